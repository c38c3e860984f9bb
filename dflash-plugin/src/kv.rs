//! Keys and values of one sequence's context, for all draft layers.

use candle_core::{DType, Device, Tensor};

use crate::config::DraftConfig;
use crate::error::{DFlashError, Result};

/// Capacity is a multiple of this many positions.
const CAPACITY_STEP: usize = 256;

/// Draft K/V of one sequence: for each layer a K and a V buffer of shape
/// `[kv_heads, capacity, head_dim]` with positions [`SequenceKv::start`] to [`SequenceKv::len`].
///
/// New rows are written in place; buffers grow by at least a quarter, so that appending costs
/// amortised constant time a row. When no layer looks further back than a window
/// ([`SequenceKv::bounded`]), the oldest rows are dropped, many at once, and the buffers stop growing;
/// positions stay what they are. Not `Clone`: a clone would share its buffers with the original, and
/// a write to one would show in the other. Copy with [`SequenceKv::deep_clone_prefix`].
#[derive(Debug)]
pub struct SequenceKv {
    layers: Vec<LayerKv>,
    /// Position of the first row of the buffers.
    start: usize,
    /// Rows up to the last written one that are never dropped; `None` keeps all.
    keep: Option<usize>,
    len: usize,
    /// Rows that were written and not overwritten or truncated since; see [`SequenceKv::set_len`].
    written: usize,
    capacity: usize,
    kv_heads: usize,
    head_dim: usize,
    dtype: DType,
    device: Device,
}

#[derive(Debug)]
struct LayerKv {
    k: Tensor,
    v: Tensor,
}

impl SequenceKv {
    /// An empty context. Nothing is allocated before the first [`SequenceKv::append`].
    ///
    /// # Errors
    /// Only those of candle.
    pub fn new(cfg: &DraftConfig, dtype: DType, device: &Device) -> Result<Self> {
        let kv = Self::with_shape(
            cfg.num_hidden_layers,
            cfg.num_key_value_heads,
            cfg.head_dim,
            dtype,
            device,
        )?;
        Ok(match cfg.context_rows() {
            Some(window) => kv.bounded(window, cfg.verify_rows()),
            None => kv,
        })
    }

    /// Lets rows go that are older than the last `window` positions, even after the length has been
    /// set back by `rollback` rows (of a verify pass; 256 at least).
    ///
    /// At most `window + max(rollback, 256) + 256` rows, rounded up to 256, are allocated then.
    pub fn bounded(mut self, window: usize, rollback: usize) -> Self {
        self.keep = Some(window.saturating_add(rollback.max(CAPACITY_STEP)));
        self
    }

    /// As [`SequenceKv::new`], from the numbers alone.
    ///
    /// # Errors
    /// Only those of candle.
    pub fn with_shape(
        num_layers: usize,
        kv_heads: usize,
        head_dim: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let mut kv = Self {
            layers: Vec::with_capacity(num_layers),
            start: 0,
            keep: None,
            len: 0,
            written: 0,
            capacity: 0,
            kv_heads,
            head_dim,
            dtype,
            device: device.clone(),
        };
        for _ in 0..num_layers {
            let layer = kv.empty_layer(0)?;
            kv.layers.push(layer);
        }
        Ok(kv)
    }

    /// Number of positions, those included whose rows were dropped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The oldest position whose row is there, or [`SequenceKv::len`] if there is none.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Whether no position is valid.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Number of layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Bytes allocated, unused capacity included.
    pub fn bytes(&self) -> usize {
        2 * self.layers.len()
            * self.kv_heads
            * self.capacity
            * self.head_dim
            * self.dtype.size_in_bytes()
    }

    /// Appends rows after position `len - 1`: for each layer a pair of K and V, each
    /// `[kv_heads, rows, head_dim]` (as [`crate::draft::DraftModel::context_kv`] returns them).
    ///
    /// # Errors
    /// [`DFlashError::Input`] when the number of layers or a shape is wrong. The length then is what
    /// it was.
    pub fn append(&mut self, kv: Vec<(Tensor, Tensor)>) -> Result<()> {
        if kv.len() != self.layers.len() {
            return Err(DFlashError::input(
                "layers of the appended K/V",
                self.layers.len().to_string(),
                kv.len().to_string(),
            ));
        }
        let Some((first, _)) = kv.first() else {
            return Ok(());
        };
        let rows = first.dims().get(1).copied().unwrap_or(0);
        for (i, (k, v)) in kv.iter().enumerate() {
            self.check_rows(i, "K", k, rows)?;
            self.check_rows(i, "V", v, rows)?;
        }
        if rows == 0 {
            return Ok(());
        }
        self.reserve(self.len + rows)?;
        if let Err(error) = self.write(&kv, rows) {
            self.start = self.start.min(self.len);
            return Err(error);
        }
        self.len += rows;
        self.written = self.len;
        Ok(())
    }

    /// Writes `rows` rows from position `len` on. Of a long prompt all but the last may be too old
    /// already.
    fn write(&self, kv: &[(Tensor, Tensor)], rows: usize) -> Result<()> {
        let skipped = self.start.saturating_sub(self.len);
        let at = self.len + skipped - self.start;
        let new = |t: &Tensor| t.narrow(1, skipped, rows - skipped)?.contiguous();
        for (layer, (k, v)) in self.layers.iter().zip(kv) {
            layer.k.slice_set(&new(k)?, 1, at)?;
            layer.v.slice_set(&new(v)?, 1, at)?;
        }
        Ok(())
    }

    /// Keeps the first `len` positions. Longer than the context means: keep all.
    ///
    /// The buffers stay; views handed out by [`SequenceKv::layer`] before are overwritten by the next
    /// append.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.written = self.len;
        self.start = self.start.min(self.len);
    }

    /// Makes exactly the first `len` written positions valid, without forgetting those behind.
    ///
    /// While a verified block is walked, the context grows row by row over rows that were all
    /// written before; the rejected ones are overwritten by the next [`SequenceKv::append`].
    ///
    /// # Errors
    /// [`DFlashError::Input`] when fewer positions have been written, or all rows before `len` were
    /// dropped.
    pub fn set_len(&mut self, len: usize) -> Result<()> {
        if len < self.start {
            return Err(DFlashError::input(
                "draft KV length",
                format!("at least the oldest kept position {}", self.start),
                len.to_string(),
            ));
        }
        if len > self.written {
            return Err(DFlashError::input(
                "draft KV length",
                format!("at most the {} written positions", self.written),
                len.to_string(),
            ));
        }
        self.len = len;
        Ok(())
    }

    /// K and V of layer `i`, each a view `[kv_heads, len - start, head_dim]` without a copy (not
    /// contiguous).
    ///
    /// # Errors
    /// [`DFlashError::Input`] when there is no such layer.
    pub fn layer(&self, i: usize) -> Result<(Tensor, Tensor)> {
        self.layer_range(i, self.start, self.len - self.start)
    }

    /// K and V of layer `i` at positions `start..start + rows`, as views.
    ///
    /// # Errors
    /// [`DFlashError::Input`] when there is no such layer or position, or its row was dropped.
    pub fn layer_range(&self, i: usize, start: usize, rows: usize) -> Result<(Tensor, Tensor)> {
        let Some(layer) = self.layers.get(i) else {
            return Err(DFlashError::input(
                "draft layer",
                format!("below {}", self.layers.len()),
                i.to_string(),
            ));
        };
        if start < self.start {
            return Err(DFlashError::input(
                "start of the context rows",
                format!("at least {}", self.start),
                start.to_string(),
            ));
        }
        let end = start.saturating_add(rows);
        if end > self.len {
            return Err(DFlashError::input(
                "end of the context rows",
                format!("at most {}", self.len),
                end.to_string(),
            ));
        }
        let at = start - self.start;
        Ok((layer.k.narrow(1, at, rows)?, layer.v.narrow(1, at, rows)?))
    }

    /// An independent copy of the first `len` positions, in buffers of its own. Rows that were dropped
    /// are missing in it, too: of a copy much shorter than a bounded context, it may be all.
    ///
    /// # Errors
    /// [`DFlashError::Input`] when `len` exceeds the context.
    pub fn deep_clone_prefix(&self, len: usize) -> Result<SequenceKv> {
        if len > self.len {
            return Err(DFlashError::input(
                "length of the copied prefix",
                format!("at most {}", self.len),
                len.to_string(),
            ));
        }
        let mut copy = Self::with_shape(
            self.layers.len(),
            self.kv_heads,
            self.head_dim,
            self.dtype,
            &self.device,
        )?;
        copy.keep = self.keep;
        let oldest = self.keep.map_or(0, |keep| len.saturating_sub(keep));
        (copy.start, copy.len, copy.written) = (self.start.max(oldest).min(len), len, len);
        let rows = len - copy.start;
        if rows == 0 {
            return Ok(copy);
        }
        copy.reserve(len)?;
        for (i, to) in copy.layers.iter().enumerate() {
            let (k, v) = self.layer_range(i, copy.start, rows)?;
            to.k.slice_set(&k.contiguous()?, 1, 0)?;
            to.v.slice_set(&v.contiguous()?, 1, 0)?;
        }
        Ok(copy)
    }

    /// Makes room for rows up to position `end`, and drops old ones if that would take more rows than
    /// a bounded context may have. All new buffers exist before the first old one is dropped, so a
    /// failed allocation leaves the context as it was.
    fn reserve(&mut self, end: usize) -> Result<()> {
        let wanted = end - self.start;
        if wanted <= self.capacity {
            return Ok(());
        }
        let most = self.keep.map(|keep| {
            let most = keep.saturating_add(CAPACITY_STEP);
            most.checked_next_multiple_of(CAPACITY_STEP).unwrap_or(most)
        });
        let start = match (most, self.keep) {
            (Some(most), Some(keep)) if wanted > most => end - keep,
            _ => self.start,
        };
        let grown = self.capacity + self.capacity / 4;
        let capacity = (end - start).max(grown).next_multiple_of(CAPACITY_STEP);
        let capacity = most.map_or(capacity, |most| capacity.min(most));
        let kept = self.len.saturating_sub(start);
        let mut layers = Vec::with_capacity(self.layers.len());
        for old in &self.layers {
            let new = self.empty_layer(capacity)?;
            if kept > 0 && self.capacity > 0 {
                let rows = |t: &Tensor| t.narrow(1, start - self.start, kept)?.contiguous();
                new.k.slice_set(&rows(&old.k)?, 1, 0)?;
                new.v.slice_set(&rows(&old.v)?, 1, 0)?;
            }
            layers.push(new);
        }
        self.layers = layers;
        self.capacity = capacity;
        self.start = start;
        Ok(())
    }

    fn empty_layer(&self, capacity: usize) -> Result<LayerKv> {
        let shape = (self.kv_heads, capacity, self.head_dim);
        Ok(LayerKv {
            k: Tensor::zeros(shape, self.dtype, &self.device)?,
            v: Tensor::zeros(shape, self.dtype, &self.device)?,
        })
    }

    fn check_rows(&self, layer: usize, name: &str, tensor: &Tensor, rows: usize) -> Result<()> {
        let expected = [self.kv_heads, rows, self.head_dim];
        if tensor.dims() == expected && tensor.dtype() == self.dtype {
            return Ok(());
        }
        Err(DFlashError::input(
            format!("{name} appended to draft layer {layer}, [kv_heads, rows, head_dim]"),
            format!("{expected:?} {:?}", self.dtype),
            format!("{:?} {:?}", tensor.dims(), tensor.dtype()),
        ))
    }
}

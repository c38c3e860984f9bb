//! Keys and values of one sequence's context, for all draft layers.

use candle_core::{DType, Device, Tensor};

use crate::config::DraftConfig;
use crate::error::{DFlashError, Result};

/// Capacity is a multiple of this many positions.
const CAPACITY_STEP: usize = 256;

/// Draft K/V of one sequence: for each layer a K and a V buffer of shape
/// `[kv_heads, capacity, head_dim]`, of which the first [`SequenceKv::len`] positions are valid.
///
/// New rows are written in place; buffers grow by at least a quarter, so that appending costs
/// amortised constant time a row. Not `Clone`: a clone would share its buffers with the original, and
/// a write to one would show in the other. Copy with [`SequenceKv::deep_clone_prefix`].
#[derive(Debug)]
pub struct SequenceKv {
    layers: Vec<LayerKv>,
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
        Self::with_shape(
            cfg.num_hidden_layers,
            cfg.num_key_value_heads,
            cfg.head_dim,
            dtype,
            device,
        )
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

    /// Number of valid positions.
    pub fn len(&self) -> usize {
        self.len
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
        for (layer, (k, v)) in self.layers.iter().zip(&kv) {
            layer.k.slice_set(&k.contiguous()?, 1, self.len)?;
            layer.v.slice_set(&v.contiguous()?, 1, self.len)?;
        }
        self.len += rows;
        self.written = self.len;
        Ok(())
    }

    /// Keeps the first `len` positions. Longer than the context means: keep all.
    ///
    /// The buffers stay; views handed out by [`SequenceKv::layer`] before are overwritten by the next
    /// append.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        self.written = self.len;
    }

    /// Makes exactly the first `len` written positions valid, without forgetting those behind.
    ///
    /// While a verified block is walked, the context grows row by row over rows that were all
    /// written before; the rejected ones are overwritten by the next [`SequenceKv::append`].
    ///
    /// # Errors
    /// [`DFlashError::Input`] when fewer positions have been written.
    pub fn set_len(&mut self, len: usize) -> Result<()> {
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

    /// K and V of layer `i`, each a view `[kv_heads, len, head_dim]` without a copy (not contiguous).
    ///
    /// # Errors
    /// [`DFlashError::Input`] when there is no such layer.
    pub fn layer(&self, i: usize) -> Result<(Tensor, Tensor)> {
        self.layer_range(i, 0, self.len)
    }

    /// K and V of layer `i` at positions `start..start + rows`, as views.
    ///
    /// # Errors
    /// [`DFlashError::Input`] when there is no such layer or position.
    pub fn layer_range(&self, i: usize, start: usize, rows: usize) -> Result<(Tensor, Tensor)> {
        let Some(layer) = self.layers.get(i) else {
            return Err(DFlashError::input(
                "draft layer",
                format!("below {}", self.layers.len()),
                i.to_string(),
            ));
        };
        let end = start.saturating_add(rows);
        if end > self.len {
            return Err(DFlashError::input(
                "end of the context rows",
                format!("at most {}", self.len),
                end.to_string(),
            ));
        }
        Ok((
            layer.k.narrow(1, start, rows)?,
            layer.v.narrow(1, start, rows)?,
        ))
    }

    /// An independent copy of the first `len` positions, in buffers of its own.
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
        if len == 0 {
            return Ok(copy);
        }
        copy.reserve(len)?;
        for (to, from) in copy.layers.iter().zip(&self.layers) {
            to.k.slice_set(&from.k.narrow(1, 0, len)?.contiguous()?, 1, 0)?;
            to.v.slice_set(&from.v.narrow(1, 0, len)?.contiguous()?, 1, 0)?;
        }
        copy.len = len;
        copy.written = len;
        Ok(copy)
    }

    /// Makes room for `wanted` positions. All new buffers exist before the first old one is dropped,
    /// so a failed allocation leaves the context as it was.
    fn reserve(&mut self, wanted: usize) -> Result<()> {
        if wanted <= self.capacity {
            return Ok(());
        }
        let grown = self.capacity + self.capacity / 4;
        let capacity = wanted.max(grown).next_multiple_of(CAPACITY_STEP);
        let mut layers = Vec::with_capacity(self.layers.len());
        for old in &self.layers {
            let new = self.empty_layer(capacity)?;
            if self.capacity > 0 {
                new.k.slice_set(&old.k, 1, 0)?;
                new.v.slice_set(&old.v, 1, 0)?;
            }
            layers.push(new);
        }
        self.layers = layers;
        self.capacity = capacity;
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

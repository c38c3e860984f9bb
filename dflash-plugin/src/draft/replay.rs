//! Work that is done at every step on inputs of the same shapes.

use candle_core::{Result, Tensor, TensorId};

/// Does such work, and may record it to do it faster the next time.
pub trait Replay: Send {
    /// Whether it may record. If not, inputs need not be laid out for it.
    fn is_on(&self) -> bool;

    /// What `work` makes of `inputs`. It may be given other tensors of the same content, or not be run at
    /// all if the same was recorded. `on` is what it reads and writes besides; other work on inputs of
    /// the same shapes needs another [`Replay`]. The result is valid until the next call.
    ///
    /// # Errors
    /// Those of `work`.
    fn run(
        &mut self,
        on: TensorId,
        inputs: &[Tensor],
        work: &mut dyn FnMut(&[Tensor]) -> Result<Tensor>,
    ) -> Result<Tensor>;
}

//! Checks of tensors that callers pass in.

use candle_core::{DType, Error, Result, Tensor};

/// An error that says what was expected and what was found.
pub(crate) fn mismatch(what: &str, expected: impl AsRef<str>, found: impl AsRef<str>) -> Error {
    Error::Msg(format!(
        "{what}: expected {}, found {}",
        expected.as_ref(),
        found.as_ref()
    ))
    .bt()
}

/// That `tensor` has this shape and dtype and lies where `like` does.
pub(crate) fn expect(
    what: &str,
    tensor: &Tensor,
    dims: &[usize],
    dtype: DType,
    like: &Tensor,
) -> Result<()> {
    if tensor.dims() != dims || tensor.dtype() != dtype {
        return Err(mismatch(
            what,
            format!("{dtype:?} {dims:?}"),
            format!("{:?} {:?}", tensor.dtype(), tensor.dims()),
        ));
    }
    expect_device(what, tensor, like)
}

/// That `tensor` lies where `like` does.
pub(crate) fn expect_device(what: &str, tensor: &Tensor, like: &Tensor) -> Result<()> {
    if tensor.device().same_device(like.device()) {
        return Ok(());
    }
    Err(mismatch(
        what,
        format!("a tensor on {:?}", like.device().location()),
        format!("one on {:?}", tensor.device().location()),
    ))
}

/// That the dtype is one of f32, f16 and bf16.
pub(crate) fn expect_float(what: &str, tensor: &Tensor) -> Result<()> {
    match tensor.dtype() {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        other => Err(mismatch(what, "f32, f16 or bf16", format!("{other:?}"))),
    }
}

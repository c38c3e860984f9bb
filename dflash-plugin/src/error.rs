//! The crate's error type.
//!
//! Every message says which key, tensor or number is wrong, what was expected, what was found, and
//! what to change: a draft model that loads with a wrong setting still gives the right text and only
//! drafts badly, so nothing may be guessed.

use std::path::{Path, PathBuf};

/// Shorthand for results with a [`DFlashError`].
pub type Result<T, E = DFlashError> = std::result::Result<T, E>;

/// What can go wrong while a draft model is loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum DFlashError {
    /// A key of the draft model's `config.json` is missing, contradictory or out of range.
    #[error("draft model config: `{key}`: {message}")]
    Config {
        /// The key, as a path (`dflash_config.block_size`).
        key: String,
        /// What was expected and found, and what to change.
        message: String,
    },
    /// A file of the checkpoint is damaged, or its tensors are not those that the config announces.
    #[error("draft model checkpoint {}: {}{message}", file.display(), tensor_prefix(tensor))]
    Checkpoint {
        /// The file (or the folder, when a file is missing).
        file: PathBuf,
        /// The tensor, when the error is about one.
        tensor: Option<String>,
        /// What was expected and found, and what to change.
        message: String,
    },
    /// Draft model and target are each valid, but not made for each other.
    #[error(
        "draft model and target do not fit: {what}: {draft} in the draft model, {target} in the target; {fix}"
    )]
    Pair {
        /// The quantity that differs.
        what: String,
        /// The draft model's number.
        draft: usize,
        /// The target's number.
        target: usize,
        /// What to change.
        fix: String,
    },
    /// The checkpoint uses a variant of DFlash, or a feature, that is not implemented.
    #[error("draft model not supported: `{key}`: {message}")]
    Unsupported {
        /// The config key, tensor or setting that asks for it.
        key: String,
        /// What was found, and what is supported.
        message: String,
    },
    /// A tensor or number passed at run time does not have the documented shape or range.
    #[error("{what}: expected {expected}, found {found}")]
    Input {
        /// The argument.
        what: String,
        /// The documented shape or range.
        expected: String,
        /// What was passed.
        found: String,
    },
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// An error of candle (out of memory, device errors).
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
}

fn tensor_prefix(tensor: &Option<String>) -> String {
    tensor
        .as_ref()
        .map(|name| format!("tensor `{name}`: "))
        .unwrap_or_default()
}

impl From<DFlashError> for candle_core::Error {
    fn from(error: DFlashError) -> Self {
        match error {
            DFlashError::Candle(error) => error,
            other => Self::msg(other),
        }
    }
}

impl DFlashError {
    pub(crate) fn config(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Config {
            key: key.into(),
            message: message.into(),
        }
    }

    pub(crate) fn unsupported(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Unsupported {
            key: key.into(),
            message: message.into(),
        }
    }

    pub(crate) fn file(file: &Path, message: impl Into<String>) -> Self {
        Self::Checkpoint {
            file: file.to_path_buf(),
            tensor: None,
            message: message.into(),
        }
    }

    pub(crate) fn tensor(file: &Path, tensor: &str, message: impl Into<String>) -> Self {
        Self::Checkpoint {
            file: file.to_path_buf(),
            tensor: Some(tensor.to_string()),
            message: message.into(),
        }
    }

    pub(crate) fn input(
        what: impl Into<String>,
        expected: impl Into<String>,
        found: impl Into<String>,
    ) -> Self {
        Self::Input {
            what: what.into(),
            expected: expected.into(),
            found: found.into(),
        }
    }
}

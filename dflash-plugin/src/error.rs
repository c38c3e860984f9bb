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

/// Longest message and longest name in one, in characters: both quote what files contain, and files
/// are strangers'.
const LONGEST_MESSAGE: usize = 400;
const LONGEST_NAME: usize = 120;

/// `text` on one line of at most about `longest` characters, without those that would change how a
/// terminal shows it.
fn readable(text: impl Into<String>, longest: usize) -> String {
    let text = shorten(text.into(), longest);
    // Control characters, and those that reverse the direction of the text.
    let is_bad =
        |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if !text.contains(is_bad) {
        return text;
    }
    let escaped = |c: char| match is_bad(c) {
        true => c.escape_default().to_string(),
        false => c.to_string(),
    };
    shorten(text.chars().map(escaped).collect(), longest)
}

/// Leaves out the middle: the beginning says what was found, the end what to change.
fn shorten(text: String, longest: usize) -> String {
    let count = text.chars().count();
    if count <= longest {
        return text;
    }
    let tail = longest / 3;
    let end: String = text.chars().skip(count - tail).collect();
    let start: String = text.chars().take(longest - tail).collect();
    format!("{start} … {end}")
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
            key: readable(key, LONGEST_NAME),
            message: readable(message, LONGEST_MESSAGE),
        }
    }

    pub(crate) fn unsupported(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self::Unsupported {
            key: readable(key, LONGEST_NAME),
            message: readable(message, LONGEST_MESSAGE),
        }
    }

    pub(crate) fn file(file: &Path, message: impl Into<String>) -> Self {
        Self::Checkpoint {
            file: file.to_path_buf(),
            tensor: None,
            message: readable(message, LONGEST_MESSAGE),
        }
    }

    pub(crate) fn tensor(file: &Path, tensor: &str, message: impl Into<String>) -> Self {
        Self::Checkpoint {
            file: file.to_path_buf(),
            tensor: Some(readable(tensor, LONGEST_NAME)),
            message: readable(message, LONGEST_MESSAGE),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_file_contains_is_quoted_on_one_line_of_bearable_length() {
        let error = DFlashError::config("a\nb", "found \u{1b}[31mred\u{202e}").to_string();
        assert!(
            error.contains(r"`a\nb`: found \u{1b}[31mred\u{202e}"),
            "{error}"
        );
        let long = format!("found {}; remove it", "x".repeat(1 << 20));
        let error = DFlashError::tensor(Path::new("f"), &"t".repeat(9_999), long).to_string();
        assert!(error.chars().count() < 600, "{}", error.len());
        assert!(
            error.contains("found xx") && error.ends_with("xx; remove it"),
            "{error}"
        );
        let escapes = DFlashError::file(Path::new("f"), "\u{1b}".repeat(9_999)).to_string();
        assert!(escapes.chars().count() < 600, "{}", escapes.len());
    }

    #[test]
    fn ordinary_text_stays_as_it_is() {
        let text = "expected \"full_attention\", found \"größer\" …";
        assert_eq!(readable(text, 400), text);
    }
}

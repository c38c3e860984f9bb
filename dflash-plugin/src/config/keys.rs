//! Typed look-ups in a `config.json`, with errors that name the key by its path.

use serde_json::{Map, Value};

use crate::error::{DFlashError, Result};

/// The table inside `config.json` that holds the method's own keys.
const NESTED: &str = "dflash_config";

/// The two tables of a draft model's config. A key set to `null` counts as absent.
pub(super) struct Keys<'a> {
    top: &'a Map<String, Value>,
    nested: Option<&'a Map<String, Value>>,
}

/// A value that is present, with its path for messages.
pub(super) struct Entry<'a> {
    pub path: String,
    pub value: &'a Value,
}

impl<'a> Keys<'a> {
    pub fn new(root: &'a Value) -> Result<Self> {
        let Value::Object(top) = root else {
            return Err(DFlashError::config(
                "config.json",
                format!("expected an object, found {}", describe(root)),
            ));
        };
        let nested = match top.get(NESTED) {
            None | Some(Value::Null) => None,
            Some(Value::Object(nested)) => Some(nested),
            Some(other) => {
                return Err(DFlashError::config(
                    NESTED,
                    format!("expected an object, found {}", describe(other)),
                ))
            }
        };
        Ok(Self { top, nested })
    }

    /// The key at the top level.
    pub fn top(&self, key: &str) -> Option<Entry<'a>> {
        present(self.top.get(key)).map(|value| Entry {
            path: key.to_string(),
            value,
        })
    }

    /// The key inside `dflash_config`.
    pub fn nested(&self, key: &str) -> Option<Entry<'a>> {
        present(self.nested?.get(key)).map(|value| Entry {
            path: format!("{NESTED}.{key}"),
            value,
        })
    }

    /// The key inside `dflash_config`, else at the top level (as SGLang resolves it).
    pub fn either(&self, key: &str) -> Option<Entry<'a>> {
        let (nested, top) = (self.nested(key), self.top(key));
        if let (Some(nested), Some(top)) = (&nested, &top) {
            if nested.value != top.value {
                tracing::warn!(
                    "draft model config: `{}` = {} overrides the top-level `{key}` = {}",
                    nested.path,
                    nested.value,
                    top.value
                );
            }
        }
        nested.or(top)
    }

    /// Names of all keys inside `dflash_config` that are not `null`.
    pub fn nested_names(&self) -> impl Iterator<Item = &'a str> {
        self.nested
            .into_iter()
            .flatten()
            .filter(|(_, value)| !value.is_null())
            .map(|(name, _)| name.as_str())
    }

    pub fn require(&self, key: &str) -> Result<Entry<'a>> {
        self.top(key)
            .ok_or_else(|| DFlashError::config(key, "missing; add it to config.json"))
    }

    pub fn require_size(&self, key: &str, max: usize) -> Result<usize> {
        self.require(key)?.size(max)
    }

    pub fn optional_size(&self, key: &str, max: usize) -> Result<Option<usize>> {
        self.either(key).map(|entry| entry.size(max)).transpose()
    }

    pub fn optional_bool(&self, key: &str) -> Result<Option<bool>> {
        self.top(key).map(|entry| entry.boolean()).transpose()
    }

    pub fn optional_string(&self, key: &str) -> Result<Option<String>> {
        self.either(key)
            .map(|entry| entry.string().map(str::to_string))
            .transpose()
    }

    pub fn optional_positive(&self, key: &str) -> Result<Option<f64>> {
        self.either(key).map(|entry| entry.positive()).transpose()
    }
}

impl<'a> Entry<'a> {
    pub fn error(&self, message: impl Into<String>) -> DFlashError {
        DFlashError::config(&self.path, message)
    }

    fn mismatch(&self, expected: &str) -> DFlashError {
        self.error(format!(
            "expected {expected}, found {}",
            describe(self.value)
        ))
    }

    /// A non-negative integer. Booleans and fractions are refused.
    pub fn integer(&self) -> Result<usize> {
        self.value
            .as_u64()
            .and_then(|n| usize::try_from(n).ok())
            .ok_or_else(|| self.mismatch("a non-negative integer"))
    }

    /// An integer from 1 to `max`.
    pub fn size(&self, max: usize) -> Result<usize> {
        match self.integer()? {
            n if (1..=max).contains(&n) => Ok(n),
            n => Err(self.error(format!("expected an integer from 1 to {max}, found {n}"))),
        }
    }

    /// A number that stays finite as f32, which the model computes in.
    pub fn number(&self) -> Result<f64> {
        let number = self
            .value
            .as_f64()
            .ok_or_else(|| self.mismatch("a number"))?;
        match is_finite_f32(number) {
            true => Ok(number),
            false => Err(self.mismatch("a number in the range of f32")),
        }
    }

    /// As [`Entry::number`], and more than 0 as f32.
    pub fn positive(&self) -> Result<f64> {
        match self.number()? {
            x if x as f32 > 0.0 => Ok(x),
            x => Err(self.error(format!("expected a positive number, found {x}"))),
        }
    }

    pub fn boolean(&self) -> Result<bool> {
        self.value
            .as_bool()
            .ok_or_else(|| self.mismatch("true or false"))
    }

    pub fn string(&self) -> Result<&'a str> {
        self.value.as_str().ok_or_else(|| self.mismatch("a string"))
    }

    pub fn strings(&self) -> Result<Vec<&'a str>> {
        self.value
            .as_array()
            .and_then(|items| items.iter().map(Value::as_str).collect())
            .ok_or_else(|| self.mismatch("a list of strings"))
    }

    pub fn integers(&self) -> Result<Vec<usize>> {
        let items = self
            .value
            .as_array()
            .ok_or_else(|| self.mismatch("a list of integers"))?;
        items
            .iter()
            .enumerate()
            .map(|(i, value)| {
                let path = format!("{}[{i}]", self.path);
                Entry { path, value }.integer()
            })
            .collect()
    }

    /// Whether the value switches something on, by Python's rules: not false, 0 or empty.
    pub fn is_truthy(&self) -> bool {
        match self.value {
            Value::Null => false,
            Value::Bool(on) => *on,
            Value::Number(n) => n.as_f64() != Some(0.0),
            Value::String(s) => !s.is_empty(),
            Value::Array(items) => !items.is_empty(),
            Value::Object(map) => !map.is_empty(),
        }
    }
}

/// Whether a number does not overflow as f32.
pub(super) fn is_finite_f32(number: f64) -> bool {
    (number as f32).is_finite()
}

fn present(value: Option<&Value>) -> Option<&Value> {
    value.filter(|v| !v.is_null())
}

/// The value for a message, cut short.
pub(super) fn describe(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

//! Mutations of JSON: first of the value, then of its text.

use proptest::prelude::*;
use serde_json::{json, Map, Value};

/// Where an edit happens: a child (modulo their number) at each level, or here.
type Place = Vec<u8>;

#[derive(Debug, Clone)]
pub enum Edit {
    Delete(Place),
    Replace(Place, Value),
    Insert(Place, String, Value),
    Rename(Place, String),
    /// Put inside so many arrays.
    Nest(Place, usize),
    /// Repeat inside an array.
    Repeat(Place, usize),
    /// Copy one place over another.
    Copy(Place, Place),
}

#[derive(Debug, Clone)]
pub enum TextEdit {
    Flip(usize, u8),
    Insert(usize, Vec<u8>),
    Remove(usize, usize),
    Truncate(usize),
    /// Copy a part of the text to another place: repeated keys, misplaced brackets.
    Copy(usize, usize, usize),
}

/// `edits` of `value`. `keys` are names that the reader of the JSON looks for.
pub fn edits(keys: &'static [&'static str]) -> impl Strategy<Value = Vec<Edit>> {
    prop::collection::vec(edit(keys), 0..5)
}

fn edit(keys: &'static [&'static str]) -> impl Strategy<Value = Edit> {
    let place = || prop::collection::vec(any::<u8>(), 1..4);
    let key = || prop_oneof![8 => prop::sample::select(keys).prop_map(str::to_string), 1 => name()];
    prop_oneof![
        3 => place().prop_map(Edit::Delete),
        8 => (place(), value()).prop_map(|(at, value)| Edit::Replace(at, value)),
        8 => (place(), key(), value()).prop_map(|(at, key, value)| Edit::Insert(at, key, value)),
        1 => (place(), key()).prop_map(|(at, key)| Edit::Rename(at, key)),
        1 => (place(), prop_oneof![1usize..4, 100usize..200]).prop_map(|(at, n)| Edit::Nest(at, n)),
        1 => (place(), prop_oneof![0usize..4, 500usize..3000]).prop_map(|(at, n)| Edit::Repeat(at, n)),
        1 => (place(), place()).prop_map(|(from, to)| Edit::Copy(from, to)),
    ]
}

/// Names that no reader expects.
pub fn name() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(String::new()),
        Just("a\nb\u{1b}[31mred\u{0}".to_string()),
        Just("ключ\u{202e}\u{1f980}`\"".to_string()),
        Just("x".repeat(20_000)),
        prop::collection::vec(any::<char>(), 1..8).prop_map(|chars| chars.into_iter().collect()),
    ]
}

/// A leaf, or a small tree of them.
pub fn value() -> impl Strategy<Value = Value> {
    prop_oneof![
        12 => leaf(),
        1 => prop::collection::vec(leaf(), 0..4).prop_map(Value::Array),
        1 => prop::collection::vec((name(), leaf()), 0..3)
            .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
    ]
}

fn leaf() -> impl Strategy<Value = Value> {
    let small = || (0u64..20).prop_map(Value::from);
    let number = prop::sample::select(vec![
        json!(-1),
        json!(32),
        json!(64),
        json!(513),
        json!(2048),
        json!(1u64 << 24),
        json!(1u64 << 31),
        json!(u32::MAX),
        json!(1u64 << 32),
        json!((1u64 << 53) + 1),
        json!(1u64 << 60),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(0.5),
        json!(1.0),
        json!(1.5),
        json!(-0.0),
        json!(1.000_000_000_000_000_2),
        json!(f64::MIN_POSITIVE),
        json!(5e-324),
        json!(f64::MAX),
        json!(f64::MIN),
    ]);
    let word = prop::sample::select(vec![
        "8",
        "silu",
        "gelu",
        "yarn",
        "linear",
        "llama3",
        "default",
        "dynamic",
        "full_attention",
        "sliding_attention",
        "DFlashDraftModel",
        "DFlash2DraftModel",
        "Qwen3DSparkModel",
        "gqa",
        "F32",
        "F16",
        "BF16",
        "F64",
        "I8",
        "f32",
        "<|MASK|>",
        "dflash",
        "domino",
    ]);
    prop_oneof![
        4 => small(),
        6 => number,
        1 => any::<u64>().prop_map(Value::from),
        1 => any::<f64>().prop_map(Value::from),
        2 => Just(Value::Null),
        2 => any::<bool>().prop_map(Value::from),
        3 => word.prop_map(Value::from),
        1 => name().prop_map(Value::from),
        1 => Just(json!([])),
        1 => Just(json!({})),
    ]
}

pub fn apply(root: &mut Value, edits: &[Edit]) {
    for edit in edits {
        match edit {
            Edit::Delete(place) => with_parent(root, place, |parent, key| match parent {
                Value::Object(map) => drop(map.remove(&key)),
                Value::Array(items) => drop(key.parse().map(|i: usize| items.remove(i))),
                _ => (),
            }),
            Edit::Replace(place, value) => *at(root, place) = value.clone(),
            Edit::Insert(place, key, value) => {
                // Into the nearest table: a key has no meaning elsewhere.
                let mut place = place.clone();
                place.pop();
                match at(root, &place) {
                    Value::Object(map) => drop(map.insert(key.clone(), value.clone())),
                    Value::Array(items) => items.push(value.clone()),
                    other => *other = Value::Object(Map::from_iter([(key.clone(), value.clone())])),
                }
            }
            Edit::Rename(place, name) => with_parent(root, place, |parent, key| {
                if let Value::Object(map) = parent {
                    if let Some(value) = map.remove(&key) {
                        map.insert(name.clone(), value);
                    }
                }
            }),
            Edit::Nest(place, depth) => {
                let slot = at(root, place);
                *slot = (0..*depth).fold(slot.take(), |inner, _| Value::Array(vec![inner]));
            }
            Edit::Repeat(place, count) => {
                let slot = at(root, place);
                // Not a large part, or the text gets too large to try many.
                if slot.to_string().len() < 200 {
                    *slot = Value::Array(vec![slot.take(); *count]);
                }
            }
            Edit::Copy(from, to) => {
                let value = at(root, from).clone();
                if value.to_string().len() < 4_000 {
                    *at(root, to) = value;
                }
            }
        }
    }
}

/// The value that a place leads to.
fn at<'a>(root: &'a mut Value, place: &[u8]) -> &'a mut Value {
    let Some((first, rest)) = place.split_first() else {
        return root;
    };
    if children(root) == 0 {
        return root;
    }
    let index = usize::from(*first) % children(root);
    let child = match root {
        Value::Object(map) => map.values_mut().nth(index),
        Value::Array(items) => items.get_mut(index),
        _ => None,
    };
    at(child.expect("below the number of children"), rest)
}

fn children(value: &Value) -> usize {
    match value {
        Value::Object(map) => map.len(),
        Value::Array(items) => items.len(),
        _ => 0,
    }
}

/// Calls `edit` with the last table or list on the way and the name of the child in it.
fn with_parent(root: &mut Value, place: &[u8], edit: impl FnOnce(&mut Value, String)) {
    let (last, way) = place.split_last().expect("places are not empty");
    let parent = at(root, way);
    let pick = usize::from(*last);
    let key = match parent {
        Value::Object(map) if !map.is_empty() => map.keys().nth(pick % map.len()).cloned(),
        Value::Array(items) if !items.is_empty() => Some((pick % items.len()).to_string()),
        _ => None,
    };
    if let Some(key) = key {
        edit(parent, key);
    }
}

pub fn text_edits() -> impl Strategy<Value = Vec<TextEdit>> {
    let at = || 0usize..4_096;
    let snippet = prop::sample::select(vec![
        &b"\xef\xbb\xbf"[..],
        b"1e999",
        b"-",
        b"NaN",
        b"\"",
        b"{",
        b"}",
        b"[",
        b"]",
        b",",
        b"\\u",
        b"\xff",
        b"\0",
        b"//",
        b"0x10",
        b"9".repeat(400).leak(),
        b"[".repeat(5_000).leak(),
    ]);
    let edit = prop_oneof![
        (at(), any::<u8>()).prop_map(|(at, byte)| TextEdit::Flip(at, byte)),
        (at(), snippet).prop_map(|(at, snippet)| TextEdit::Insert(at, snippet.to_vec())),
        (at(), prop::collection::vec(any::<u8>(), 1..9))
            .prop_map(|(at, new)| TextEdit::Insert(at, new)),
        (at(), 1usize..40).prop_map(|(at, count)| TextEdit::Remove(at, count)),
        at().prop_map(TextEdit::Truncate),
        (at(), 1usize..200, at()).prop_map(|(from, count, to)| TextEdit::Copy(from, count, to)),
    ];
    // Mostly none: text that is no JSON ends early.
    prop_oneof![4 => Just(Vec::new()), 1 => prop::collection::vec(edit, 1..3)]
}

pub fn apply_to_text(text: &mut Vec<u8>, edits: &[TextEdit]) {
    for edit in edits {
        if text.is_empty() {
            return;
        }
        let len = text.len();
        match edit {
            TextEdit::Flip(at, byte) => text[at % len] ^= byte,
            TextEdit::Insert(at, new) => {
                let at = at % (len + 1);
                drop(text.splice(at..at, new.iter().copied()));
            }
            TextEdit::Remove(at, count) => {
                let at = at % len;
                text.drain(at..len.min(at + count));
            }
            TextEdit::Truncate(at) => text.truncate(at % len),
            TextEdit::Copy(from, count, to) => {
                let from = from % len;
                let part = text[from..len.min(from + count)].to_vec();
                let to = to % (len + 1);
                drop(text.splice(to..to, part));
            }
        }
    }
}

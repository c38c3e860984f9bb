//! Weight files that lie.

use proptest::prelude::*;
use proptest::sample::select;
use serde_json::Value;

/// What becomes of a header besides edits of its JSON.
#[derive(Debug, Clone)]
pub enum Lie {
    None,
    /// Added to the announced length of the header.
    Length(i64),
    /// Bytes of data that are missing, or too many.
    Data(isize),
    /// A tensor's place is moved by so many bytes at both ends.
    Move(usize, i64),
    /// A tensor's place begins where that of another one does.
    Overlap(usize, usize),
    /// Another type, with the right size or not.
    Type(usize, &'static str),
    Shape(usize, Vec<u64>),
    /// A byte of data; exponents of all ones are NaN or infinite.
    Value(usize, u8),
}

pub fn lie() -> impl Strategy<Value = Lie> {
    let index = || 0usize..16;
    let length = prop_oneof![-40i64..40, Just(i64::MAX), Just(1 << 40), Just(99_000_000)];
    let moved = prop_oneof![-40i64..40, Just(i64::MAX), Just(i64::MIN), Just(1 << 60)];
    let types = select(vec![
        "F32", "F16", "BF16", "F64", "I8", "F8_E4M3", "", "f32",
    ]);
    let dim = prop_oneof![
        0u64..9,
        Just(1 << 31),
        Just(1 << 60),
        Just(1 << 63),
        Just(u64::MAX)
    ];
    prop_oneof![
        3 => Just(Lie::None),
        2 => length.prop_map(Lie::Length),
        1 => (-40isize..40).prop_map(Lie::Data),
        1 => (index(), moved).prop_map(|(i, by)| Lie::Move(i, by)),
        1 => (index(), index()).prop_map(|(i, j)| Lie::Overlap(i, j)),
        1 => (index(), types).prop_map(|(i, dtype)| Lie::Type(i, dtype)),
        2 => (index(), prop::collection::vec(dim, 0..5)).prop_map(|(i, shape)| Lie::Shape(i, shape)),
        1 => (0usize..2_000, select(vec![0x7fu8, 0xff, 0x7c, 0xfc])).prop_map(|(at, byte)| Lie::Value(at, byte)),
    ]
}

impl Lie {
    pub fn tell(&self, header: &mut Value, data: &mut Vec<u8>) {
        let names: Vec<String> = header
            .as_object()
            .into_iter()
            .flat_map(|map| map.keys().cloned())
            .collect();
        if names.is_empty() {
            return;
        }
        let name = |i: &usize| names[i % names.len()].as_str();
        match self {
            Lie::None | Lie::Length(_) => (),
            Lie::Data(more) => {
                let len = data.len().saturating_add_signed(*more);
                data.resize(len, 0);
            }
            Lie::Move(i, by) => {
                let moved = |offset: u64| offset.wrapping_add_signed(*by);
                if let Some((begin, end)) = offsets(header, name(i)) {
                    set(
                        header,
                        name(i),
                        "data_offsets",
                        vec![moved(begin), moved(end)].into(),
                    );
                }
            }
            Lie::Overlap(i, j) => {
                let places = (offsets(header, name(i)), offsets(header, name(j)));
                if let (Some((begin, end)), Some((other, _))) = places {
                    let end = other.wrapping_add(end.wrapping_sub(begin));
                    set(header, name(i), "data_offsets", vec![other, end].into());
                }
            }
            Lie::Type(i, dtype) => set(header, name(i), "dtype", (*dtype).into()),
            Lie::Shape(i, shape) => set(header, name(i), "shape", shape.clone().into()),
            Lie::Value(at, byte) => {
                let len = data.len();
                if len > 0 {
                    data[at % len] = *byte;
                }
            }
        }
    }

    /// What is added to the announced length of the header.
    pub fn length(&self) -> i64 {
        match self {
            Lie::Length(more) => *more,
            _ => 0,
        }
    }
}

fn offsets(header: &Value, tensor: &str) -> Option<(u64, u64)> {
    let offsets = header.get(tensor)?.get("data_offsets")?;
    Some((offsets.get(0)?.as_u64()?, offsets.get(1)?.as_u64()?))
}

fn set(header: &mut Value, tensor: &str, key: &str, value: Value) {
    if let Some(Value::Object(entry)) = header.get_mut(tensor) {
        entry.insert(key.into(), value);
    }
}

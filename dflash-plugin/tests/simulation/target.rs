//! A toy target: deterministic, and cheap enough for plain decoding as the reference.

/// What a position leaves in a KV cache. `context` depends on every token up to the position, as
/// the keys and values of a real model do, so a row can only be right in the right place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    pub token: u32,
    pub position: u32,
    pub context: u32,
}

impl Row {
    fn behind(previous: Option<&Row>, token: u32, position: usize) -> Self {
        let previous = previous.map_or(0x5eed, |row| row.context);
        Self {
            token,
            position: position as u32,
            context: hash(&[previous, token, position as u32]),
        }
    }
}

/// The rows that `tokens` leave, from the tokens alone.
pub fn rows_of(tokens: &[u32]) -> Vec<Row> {
    let mut rows = Vec::with_capacity(tokens.len());
    for (position, &token) in tokens.iter().enumerate() {
        rows.push(Row::behind(rows.last(), token, position));
    }
    rows
}

/// The target's KV cache: rows behind the length are garbage that the next write replaces.
#[derive(Debug, Clone, Default)]
pub struct TargetKv {
    rows: Vec<Row>,
    len: usize,
}

impl TargetKv {
    pub fn from_rows(rows: &[Row]) -> Self {
        Self {
            rows: rows.to_vec(),
            len: rows.len(),
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn rows(&self) -> &[Row] {
        &self.rows[..self.len]
    }

    pub fn set_len(&mut self, len: usize) -> Result<(), String> {
        if len > self.rows.len() {
            let written = self.rows.len();
            return Err(format!(
                "target KV of {written} written rows set to {len} rows"
            ));
        }
        self.len = len;
        Ok(())
    }

    /// One forward pass over `tokens` behind the valid rows; reads the cache, not the tokens
    /// before. Returns the rows, of which each is its own "logits".
    pub fn forward(&mut self, tokens: &[u32]) -> Vec<Row> {
        let start = self.len;
        for &token in tokens {
            let row = Row::behind(self.rows().last(), token, self.len);
            if self.len < self.rows.len() {
                self.rows[self.len] = row;
            } else {
                self.rows.push(row);
            }
            self.len += 1;
        }
        self.rows()[start..].to_vec()
    }
}

/// A request's sampler. With a seed every choice takes a fresh number from its own random stream,
/// so that a choice too many or too few shows in all later ones.
#[derive(Debug, Clone)]
pub struct Sampler {
    pub seed: Option<u32>,
    pub vocab: u32,
    pub draws: u32,
}

impl Sampler {
    pub fn choose(&mut self, logits: &Row) -> u32 {
        self.draws += 1;
        let noise = self.seed.map_or(0, |seed| hash(&[seed, self.draws]));
        hash(&[logits.context, noise]) % self.vocab
    }
}

pub fn hash(words: &[u32]) -> u32 {
    let mut state = 0xcbf2_9ce4_8422_2325u64;
    for &word in words {
        state = (state ^ u64::from(word)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        state ^= state >> 29;
    }
    (state.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32
}

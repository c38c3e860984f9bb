//! Requests, and what plain decoding makes of them: the reference.

use super::target::{hash, rows_of, Sampler};

/// The limits that all requests of a scenario share.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Tokens are `0..vocab`; those below `stops` end a sequence.
    pub vocab: u32,
    pub stops: u32,
    /// Tokens that a sequence may have, prompt included.
    pub max_len: usize,
    /// Rows that the target's KV cache can hold.
    pub capacity: usize,
    /// Positions that the draft model knows.
    pub draft_positions: usize,
    /// Anchor and drafts.
    pub block: usize,
    /// Entries of the prefix cache; 0 switches it off.
    pub cache_entries: usize,
}

#[derive(Debug, Clone)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub seed: Option<u32>,
    pub max_tokens: usize,
    /// The choice at which the sampler fails, or finds that the client has gone.
    pub abort_at: Option<usize>,
}

/// Why a sequence is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Stop,
    Length,
    /// The sampler made no choice.
    Aborted,
    /// The client went between two steps.
    Left,
}

impl Limits {
    pub fn sampler(&self, request: &Request) -> Sampler {
        Sampler {
            seed: request.seed,
            vocab: self.vocab,
            draws: 0,
        }
    }

    /// Whether the last of `emitted` ends a sequence that now has `tokens` tokens.
    pub fn end(&self, request: &Request, emitted: &[u32], tokens: usize) -> Option<End> {
        if emitted.last().is_some_and(|token| *token < self.stops) {
            Some(End::Stop)
        } else if emitted.len() >= request.max_tokens || tokens >= self.max_len {
            Some(End::Length)
        } else {
            None
        }
    }

    /// A token that the target never chooses.
    pub fn mask(&self) -> u32 {
        self.vocab + 7
    }

    /// A token of a text that prompts share.
    pub fn shared_token(&self, text: u32, position: usize) -> u32 {
        hash(&[0x7e47, text, position as u32]) % self.vocab
    }
}

/// Decode one token after another, from the tokens alone.
pub fn plain(limits: &Limits, request: &Request) -> (Vec<u32>, End) {
    let mut tokens = request.prompt.clone();
    let mut emitted = Vec::new();
    let mut sampler = limits.sampler(request);
    loop {
        if request.abort_at == Some(emitted.len()) {
            return (emitted, End::Aborted);
        }
        let logits = rows_of(&tokens).pop().expect("prompts are not empty");
        let token = sampler.choose(&logits);
        tokens.push(token);
        emitted.push(token);
        if let Some(end) = limits.end(request, &emitted, tokens.len()) {
            return (emitted, end);
        }
    }
}

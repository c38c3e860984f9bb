//! A running sequence, and the prefix cache that takes it when it ends.

use dflash_plugin::commit::{Choice, VerifiedSequence};
use dflash_plugin::kv::SequenceKv;

use super::draft;
use super::request::{plain, End, Limits, Request};
use super::target::{rows_of, Row, Sampler, TargetKv};

pub struct Sequence {
    pub request: Request,
    pub tokens: Vec<u32>,
    /// What the client has got.
    pub emitted: Vec<u32>,
    pub sampler: Sampler,
    pub target: TargetKv,
    pub draft: Option<SequenceKv>,
    /// Whether its next step is a prompt step.
    pub needs_prompt: bool,
    pub ended: Option<End>,
    /// What plain decoding gives.
    pub expected: (Vec<u32>, End),
}

impl Sequence {
    pub fn new(limits: &Limits, request: Request) -> Self {
        Self {
            tokens: request.prompt.clone(),
            emitted: Vec::new(),
            sampler: limits.sampler(&request),
            target: TargetKv::default(),
            draft: None,
            needs_prompt: true,
            ended: None,
            expected: plain(limits, &request),
            request,
        }
    }

    /// Positions whose KV is written between two steps: all but that of the last token.
    pub fn committed(&self) -> usize {
        self.tokens.len() - 1
    }

    /// Sample, emit, and go into the prefix cache when that was the last token.
    pub fn sample(
        &mut self,
        limits: &Limits,
        cache: &mut PrefixCache,
        logits: &Row,
    ) -> Result<Choice, String> {
        if self.ended.is_some() {
            return Err("I3: sampled after its end".into());
        }
        if self.request.abort_at == Some(self.emitted.len()) {
            self.ended = Some(End::Aborted);
            return Ok(Choice::None);
        }
        let token = self.sampler.choose(logits);
        self.tokens.push(token);
        self.emitted.push(token);
        self.ended = limits.end(&self.request, &self.emitted, self.tokens.len());
        if self.ended.is_none() {
            return Ok(Choice::Token(token));
        }
        self.check()?;
        cache.store(self, limits.cache_entries);
        Ok(Choice::Last(token))
    }

    /// What has been emitted so far against plain decoding (I1).
    pub fn check_output(&self) -> Result<(), String> {
        let (emitted, expected) = (&self.emitted, &self.expected.0);
        match expected.starts_with(emitted) {
            true => Ok(()),
            false => Err(format!(
                "I1: emitted {emitted:?}, plain decoding gives {expected:?}"
            )),
        }
    }

    /// Lengths (I2) and contents (I4) of both caches against the tokens.
    pub fn check(&self) -> Result<(), String> {
        if self.needs_prompt {
            return Ok(());
        }
        let expected = rows_of(&self.tokens[..self.committed()]);
        check_rows(&self.target, self.draft.as_ref(), &expected)
    }
}

pub fn check_rows(
    target: &TargetKv,
    draft: Option<&SequenceKv>,
    expected: &[Row],
) -> Result<(), String> {
    if target.len() != expected.len() {
        let (found, expected) = (target.len(), expected.len());
        return Err(format!(
            "I2: target KV has {found} rows, expected {expected}"
        ));
    }
    if target.rows() != expected {
        return Err("I4: the target KV has a row of another text".into());
    }
    draft.map_or(Ok(()), |kv| draft::check(kv, expected))
}

/// A sequence during the walk over its verified rows.
pub struct Verified<'a> {
    pub sequence: &'a mut Sequence,
    pub limits: &'a Limits,
    pub cache: &'a mut PrefixCache,
    /// The target's logits of each row.
    pub logits: Vec<Row>,
    pub base: usize,
    pub next_row: usize,
}

impl VerifiedSequence for Verified<'_> {
    type Error = String;

    fn set_len(&mut self, len: usize) -> Result<(), String> {
        self.sequence.target.set_len(len)?;
        match &mut self.sequence.draft {
            Some(kv) => kv.set_len(len).map_err(|error| error.to_string()),
            None => Ok(()),
        }
    }

    async fn choose(&mut self, row: usize) -> Result<Choice, String> {
        wait_once().await;
        if row != self.next_row {
            let expected = self.next_row;
            return Err(format!("row {row} sampled, expected row {expected}"));
        }
        self.next_row += 1;
        let logits = *self.logits.get(row).ok_or("a row that was not verified")?;
        // What the sampler finds in the caches is what plain decoding would have left there.
        let seen = self.base + row + 1;
        let draft = self.sequence.draft.as_ref().map(SequenceKv::len);
        if self.sequence.target.len() != seen || draft.is_some_and(|len| len != seen) {
            return Err(format!("I2: row {row} does not see exactly {seen} rows"));
        }
        self.sequence.sample(self.limits, self.cache, &logits)
    }
}

/// A point at which an engine's sampler may wait, for a client that reads slowly.
async fn wait_once() {
    let mut waited = false;
    std::future::poll_fn(|_| match std::mem::replace(&mut waited, true) {
        true => std::task::Poll::Ready(()),
        false => std::task::Poll::Pending,
    })
    .await;
}

struct Entry {
    tokens: Vec<u32>,
    target: TargetKv,
    draft: Option<SequenceKv>,
}

/// Ended sequences' KV, found by the tokens that it covers.
#[derive(Default)]
pub struct PrefixCache {
    entries: Vec<Entry>,
}

/// What a hit brings back.
pub struct Hit {
    pub entry: usize,
    pub rows: usize,
}

impl PrefixCache {
    fn store(&mut self, sequence: &mut Sequence, most: usize) {
        if most == 0 {
            return;
        }
        let target = sequence.target.clone();
        self.entries.push(Entry {
            tokens: sequence.tokens[..target.len()].to_vec(),
            target,
            draft: sequence.draft.take(),
        });
        if self.entries.len() > most {
            self.entries.remove(0);
        }
    }

    pub fn evict(&mut self, pick: usize) {
        if !self.entries.is_empty() {
            self.entries.remove(pick % self.entries.len());
        }
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// The entry that shares most of `tokens`, of which at least the last is never covered.
    pub fn find(&self, tokens: &[u32]) -> Option<Hit> {
        let shared = |entry: &Entry| {
            let pairs = entry.tokens.iter().zip(&tokens[..tokens.len() - 1]);
            pairs.take_while(|(a, b)| a == b).count()
        };
        let entries = self.entries.iter().enumerate();
        entries
            .map(|(entry, found)| Hit {
                entry,
                rows: shared(found),
            })
            .max_by_key(|hit| hit.rows)
            .filter(|hit| hit.rows > 0)
    }

    pub fn target(&self, entry: usize, rows: usize) -> TargetKv {
        TargetKv::from_rows(&self.entries[entry].target.rows()[..rows])
    }

    /// A copy of the entry's draft KV, if it has that many rows.
    pub fn fork(&self, entry: usize, rows: usize) -> Option<SequenceKv> {
        let draft = self.entries[entry].draft.as_ref()?;
        draft.deep_clone_prefix(rows).ok()
    }

    /// No entry has changed since it was stored.
    pub fn check(&self) -> Result<(), String> {
        for entry in &self.entries {
            let expected = rows_of(&entry.tokens);
            check_rows(&entry.target, entry.draft.as_ref(), &expected)
                .map_err(|error| format!("prefix cache: {error}"))?;
        }
        Ok(())
    }
}

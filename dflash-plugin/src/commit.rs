//! Walk the verified rows of one sequence: accept, emit, commit, one row at a time.
//!
//! Before a row is sampled, both KV caches hold exactly the rows that it has seen. So whatever the
//! sampler does with the sequence (emit a token, end it, store it in a prefix cache), its caches
//! are right at that moment, and nothing has to be undone when the walk ends: what is left is the
//! commit length (design invariants I1 to I3).

use std::future::Future;

use crate::accept::{AcceptWalk, Verdict};

/// What the target's sampler made of one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// Emitted; the sequence goes on.
    Token(u32),
    /// Emitted, and the sequence ended with it.
    Last(u32),
    /// The sampler failed or the client has gone; nothing was emitted, the sequence is over.
    None,
}

/// One sequence whose block has been verified: the KV of all its rows is written, in target and
/// draft.
pub trait VerifiedSequence {
    /// The engine's error.
    type Error;

    /// Make exactly the first `len` positions of target and draft KV valid (all verified rows are
    /// already written).
    ///
    /// # Errors
    /// If fewer positions have been written.
    fn set_len(&mut self, len: usize) -> Result<(), Self::Error>;

    /// Let the target's own sampler choose at verified row `row` (0 = the anchor's) and emit it.
    ///
    /// An `async fn` implements it; its future must be `Send`, because an engine's step is.
    ///
    /// # Errors
    /// Those of the engine. A failure that the client has been told about is [`Choice::None`].
    fn choose(&mut self, row: usize) -> impl Future<Output = Result<Choice, Self::Error>> + Send;
}

/// What a walk came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Walked {
    /// Accept length: drafts that the target chose itself, `0..=drafts`.
    pub accepted: usize,
    /// Tokens emitted, in order: the accepted drafts and the bonus token, or fewer when the
    /// sequence ended before.
    pub emitted: Vec<u32>,
    /// Whether the sequence is over.
    pub ended: bool,
}

/// Let `sequence` choose row by row until its choice is no draft (the bonus token), the row behind
/// the last draft has been chosen, or it ends.
///
/// `base` is the number of committed positions before the step, `drafts` the block behind the
/// anchor; rows `0..=drafts.len()` are verified. After it, the caches of a sequence that goes on
/// hold `base + emitted` positions: every token but the last one.
///
/// # Errors
/// The first error of `sequence`. Its caches then have the length of the row that failed.
pub async fn walk<S: VerifiedSequence>(
    sequence: &mut S,
    base: usize,
    drafts: &[u32],
) -> Result<Walked, S::Error> {
    let mut walk = AcceptWalk::new(drafts);
    let mut emitted = Vec::with_capacity(drafts.len() + 1);
    let mut ended = false;
    for row in 0..=drafts.len() {
        sequence.set_len(base + row + 1)?;
        let token = match sequence.choose(row).await? {
            Choice::Token(token) => token,
            Choice::Last(token) => {
                ended = true;
                token
            }
            Choice::None => {
                ended = true;
                break;
            }
        };
        emitted.push(token);
        if walk.take(token) == Verdict::Bonus || ended {
            break;
        }
    }
    Ok(Walked {
        accepted: walk.accepted(),
        emitted,
        ended,
    })
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    /// Chooses from a list and remembers the lengths that were set.
    struct Scripted {
        choices: Vec<Result<Choice, &'static str>>,
        lengths: Vec<usize>,
        written: usize,
    }

    impl VerifiedSequence for Scripted {
        type Error = &'static str;

        fn set_len(&mut self, len: usize) -> Result<(), Self::Error> {
            self.lengths.push(len);
            if len > self.written {
                return Err("not written");
            }
            Ok(())
        }

        async fn choose(&mut self, row: usize) -> Result<Choice, Self::Error> {
            self.choices[row]
        }
    }

    fn is_send<T: Send>(value: T) -> T {
        value
    }

    fn walked(
        drafts: &[u32],
        choices: Vec<Result<Choice, &'static str>>,
        written: usize,
    ) -> (Result<Walked, &'static str>, Vec<usize>) {
        let mut sequence = Scripted {
            choices,
            lengths: Vec::new(),
            written,
        };
        let result = {
            let mut future = pin!(is_send(walk(&mut sequence, 10, drafts)));
            let mut context = Context::from_waker(Waker::noop());
            match future.as_mut().poll(&mut context) {
                Poll::Ready(result) => result,
                Poll::Pending => panic!("the script never waits"),
            }
        };
        (result, sequence.lengths)
    }

    fn end(accepted: usize, emitted: &[u32], ended: bool) -> Result<Walked, &'static str> {
        Ok(Walked {
            accepted,
            emitted: emitted.to_vec(),
            ended,
        })
    }

    #[test]
    fn accepted_drafts_and_the_bonus_are_emitted_and_each_row_sees_its_own_length() {
        use Choice::Token;
        let all = vec![Ok(Token(5)), Ok(Token(6)), Ok(Token(7))];
        assert_eq!(
            walked(&[5, 6], all.clone(), 13),
            (end(2, &[5, 6, 7], false), vec![11, 12, 13])
        );
        assert_eq!(
            walked(&[5, 9], all.clone(), 13),
            (end(1, &[5, 6], false), vec![11, 12])
        );
        assert_eq!(
            walked(&[9, 6], all.clone(), 13),
            (end(0, &[5], false), vec![11])
        );
        assert_eq!(walked(&[], all, 11), (end(0, &[5], false), vec![11]));
    }

    #[test]
    fn a_last_token_ends_the_walk_and_counts_as_accepted_when_it_was_drafted() {
        let last = |token| vec![Ok(Choice::Token(5)), Ok(Choice::Last(token))];
        let (result, lengths) = walked(&[5, 6, 7], last(6), 14);
        assert_eq!((result, lengths), (end(2, &[5, 6], true), vec![11, 12]));
        let (result, _) = walked(&[5, 6, 7], last(8), 14);
        assert_eq!(result, end(1, &[5, 8], true));
    }

    #[test]
    fn a_sequence_without_a_choice_is_over_with_what_it_had() {
        let choices = vec![Ok(Choice::Token(5)), Ok(Choice::None)];
        let (result, lengths) = walked(&[5, 6, 7], choices, 14);
        assert_eq!((result, lengths), (end(1, &[5], true), vec![11, 12]));
    }

    #[test]
    fn errors_end_the_walk() {
        let choices = vec![Ok(Choice::Token(5)), Err("engine")];
        let (result, lengths) = walked(&[5, 6], choices, 13);
        assert_eq!((result, lengths), (Err("engine"), vec![11, 12]));
        let (result, lengths) = walked(&[5, 6], vec![Ok(Choice::Token(5))], 11);
        assert_eq!((result, lengths), (Err("not written"), vec![11, 12]));
    }
}

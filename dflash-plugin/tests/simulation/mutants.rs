//! Broken versions of the logic. A test that lets one of them pass tests nothing.

use dflash_plugin::accept::{AcceptWalk, Verdict};
use dflash_plugin::commit::{walk, Choice, VerifiedSequence, Walked};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {
    /// The walk goes on for one row after the first draft that the target did not choose.
    AcceptOneTooMany,
    /// The row behind the last draft is not asked for its token.
    NoBonusAfterTheLastDraft,
    /// A draft that the target did choose ends the walk.
    AcceptNothing,
    ForgetSetLen,
    SetLenAfterChoosing,
    EmitPastTheStop,
    GoOnAfterAnAbort,
    /// A sequence is given the logits of another one in its batch.
    AnotherSequencesLogits,
    /// `undo` leaves the rows of a failed verify pass in the draft KV.
    KeepDraftRowsAfterFailure,
    /// `undo` leaves the rows of a failed verify pass in the target KV.
    KeepTargetRowsAfterFailure,
    ForkOneRowTooLong,
    /// A prefix-cache hit brings back another entry's draft KV.
    ForkAnotherEntry,
    /// A preempted sequence keeps its draft KV and gets its prompt's rows behind it.
    KeepDraftOnPreemption,
}

/// The walk, or a broken one.
pub async fn walk_as<S: VerifiedSequence>(
    mutant: Option<Mutant>,
    sequence: &mut S,
    base: usize,
    drafts: &[u32],
) -> Result<Walked, S::Error> {
    match mutant {
        Some(
            mutant @ (Mutant::AcceptOneTooMany
            | Mutant::NoBonusAfterTheLastDraft
            | Mutant::AcceptNothing
            | Mutant::ForgetSetLen
            | Mutant::SetLenAfterChoosing
            | Mutant::EmitPastTheStop
            | Mutant::GoOnAfterAnAbort),
        ) => broken(mutant, sequence, base, drafts).await,
        _ => walk(sequence, base, drafts).await,
    }
}

async fn broken<S: VerifiedSequence>(
    mutant: Mutant,
    sequence: &mut S,
    base: usize,
    drafts: &[u32],
) -> Result<Walked, S::Error> {
    let mut walk = AcceptWalk::new(drafts);
    let (mut emitted, mut ended, mut mismatches) = (Vec::new(), false, 0);
    let rows = match mutant {
        Mutant::NoBonusAfterTheLastDraft => drafts.len().max(1),
        _ => drafts.len() + 1,
    };
    for row in 0..rows {
        let late = mutant == Mutant::SetLenAfterChoosing;
        if mutant != Mutant::ForgetSetLen && !late {
            sequence.set_len(base + row + 1)?;
        }
        let choice = sequence.choose(row).await?;
        if late {
            sequence.set_len(base + row + 1)?;
        }
        let token = match choice {
            Choice::Token(token) => token,
            Choice::Last(token) => {
                ended = mutant != Mutant::EmitPastTheStop;
                token
            }
            Choice::None if mutant == Mutant::GoOnAfterAnAbort => continue,
            Choice::None => {
                ended = true;
                break;
            }
        };
        emitted.push(token);
        if walk.take(token) == Verdict::Bonus {
            mismatches += 1;
        }
        let allowed = usize::from(mutant == Mutant::AcceptOneTooMany);
        if mismatches > allowed || ended || mutant == Mutant::AcceptNothing {
            break;
        }
    }
    Ok(Walked {
        accepted: walk.accepted(),
        emitted,
        ended,
    })
}

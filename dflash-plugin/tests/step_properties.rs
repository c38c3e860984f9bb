//! Whole lives of many sequences, speculative step by speculative step, against plain decoding.
//!
//! The accept walk and the draft KV are the real ones; target, drafter, scheduler and prefix cache
//! are toys (`simulation/`). After every step all caches are compared row by row with the tokens,
//! and every sequence that ends with what plain decoding gives:
//!
//! - I1: the tokens emitted are those of plain decoding, whatever is drafted;
//! - I2: both KV caches have a row for every token but the last, also at the moment at which a
//!   sequence that ends goes into the prefix cache;
//! - I3: nothing past a stop token, `max_tokens` or the longest text is emitted or kept;
//! - I4: no row of another text is in a cache.

#[path = "common/property.rs"]
#[allow(dead_code)] // each test binary uses a part
mod property;
mod simulation;

use std::cell::RefCell;

use proptest::test_runner::{TestCaseError, TestError};
use simulation::coverage::Coverage;
use simulation::engine::run;
use simulation::mutants::Mutant;
use simulation::scenario::{scenarios, Profile, Scenario};

/// Cases in a default run, over all tests of this file but the mutants'.
const CASES: u32 = 100_000;
/// In so many cases a mutant must be found.
const MUTANT_CASES: u32 = 4_000;

const ALONE: Profile = Profile {
    requests: 1,
    faults: false,
    head: 0,
};
const MANY: Profile = Profile {
    requests: 6,
    ..ALONE
};
const FAULTS: Profile = Profile {
    requests: 5,
    faults: true,
    head: 0,
};
/// Prompts just below the first growth step of the draft KV (256 positions).
const GROWING: Profile = Profile {
    requests: 3,
    faults: true,
    head: 245,
};

fn simulate(
    profile: Profile,
    cases: u32,
    mutant: Option<Mutant>,
) -> (Coverage, Result<(), TestError<Scenario>>) {
    let coverage = RefCell::new(Coverage::default());
    let mut runner = property::runner(cases);
    let result = runner.run(&scenarios(profile), |scenario| {
        run(&scenario, mutant, &mut coverage.borrow_mut()).map_err(TestCaseError::fail)
    });
    (coverage.into_inner(), result)
}

#[track_caller]
fn holds(profile: Profile, cases: u32) -> Coverage {
    let (coverage, result) = simulate(profile, cases, None);
    if let Err(error) = result {
        panic!("{error}");
    }
    println!("{coverage:#?}");
    assert_eq!(coverage.cases as u32, cases);
    coverage
}

#[test]
fn a_sequence_gives_what_plain_decoding_gives_whatever_is_drafted() {
    let seen = holds(ALONE, CASES / 4);
    assert!(seen.accepted.iter().all(|count| *count > 0));
    assert!(seen.ended_inside_a_block > 0 && seen.stops > 0 && seen.lengths > 0);
    assert!(seen.shrunk > 0 && seen.no_room > 0);
}

#[test]
fn sequences_that_share_batches_and_prefixes_do_not_disturb_each_other() {
    let seen = holds(MANY, CASES / 4);
    assert!(seen.accepted.iter().all(|count| *count > 0));
    assert!(seen.hits > 0 && seen.hits_without_draft > 0);
}

#[test]
fn failures_preemptions_and_lost_clients_leave_nothing_behind() {
    let seen = holds(FAULTS, CASES * 3 / 8);
    assert!(seen.failures > 0 && seen.preemptions > 0 && seen.without_draft > 0);
    assert!(seen.aborts > 0 && seen.left > 0 && seen.hits > 0);
}

#[test]
fn draft_kv_that_grows_in_the_middle_of_a_step_keeps_its_rows() {
    let seen = holds(GROWING, CASES / 8);
    assert!(seen.hits > 0 && seen.failures > 0);
}

/// Runs the broken version, which must be found.
#[track_caller]
fn is_found(mutant: Mutant, because: &[&str]) {
    let (_, result) = simulate(FAULTS, MUTANT_CASES, Some(mutant));
    let Err(TestError::Fail(reason, scenario)) = result else {
        panic!("{mutant:?} passed as correct");
    };
    let reason = reason.to_string();
    println!("{mutant:?}: {reason}\n{scenario:#?}");
    assert!(
        because.iter().any(|part| reason.contains(part)),
        "{mutant:?} was found by: {reason}"
    );
}

macro_rules! mutants {
    ($($name:ident: $mutant:ident, $because:expr;)*) => {
        $(#[test] fn $name() { is_found(Mutant::$mutant, $because); })*
    };
}

mutants! {
    accepting_one_too_many_is_found: AcceptOneTooMany, &["I1", "I4"];
    leaving_out_the_bonus_after_the_last_draft_is_found: NoBonusAfterTheLastDraft, &["bonus"];
    accepting_nothing_is_found: AcceptNothing, &["bonus"];
    forgetting_to_set_the_length_is_found: ForgetSetLen, &["I2"];
    setting_the_length_too_late_is_found: SetLenAfterChoosing, &["I2"];
    emitting_past_a_stop_is_found: EmitPastTheStop, &["I3"];
    going_on_after_an_abort_is_found: GoOnAfterAnAbort, &["I3"];
    logits_of_another_sequence_are_found: AnotherSequencesLogits, &["I1"];
    draft_rows_that_outlive_a_failed_verify_pass_are_found: KeepDraftRowsAfterFailure, &["I2"];
    target_rows_that_outlive_a_failed_verify_pass_are_found: KeepTargetRowsAfterFailure, &["I2"];
    a_prefix_forked_one_row_too_long_is_found: ForkOneRowTooLong, &["I2"];
    a_prefix_of_another_text_is_found: ForkAnotherEntry, &["I4"];
    draft_kv_that_outlives_a_preemption_is_found: KeepDraftOnPreemption, &["I2"];
}

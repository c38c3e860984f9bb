//! Seeds of the property tests: another one every run, printed, and settable to repeat a run.

use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Set to the number that a failed run has printed to repeat it.
const SEED_VARIABLE: &str = "DFLASH_PROPERTY_SEED";

/// A runner of `cases` cases. Says its seed; the line is shown when the test fails.
pub fn runner(cases: u32) -> TestRunner {
    let seed = match std::env::var(SEED_VARIABLE) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{SEED_VARIABLE}: expected a number, found `{text}`")),
        Err(_) => fresh_seed(),
    };
    println!("{SEED_VARIABLE}={seed}");
    let config = Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    };
    TestRunner::new_with_rng(config, rng(seed))
}

pub fn rng(seed: u64) -> TestRng {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    TestRng::from_seed(RngAlgorithm::ChaCha, &bytes)
}

pub fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish() >> 32
}

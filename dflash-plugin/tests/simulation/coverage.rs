//! Counters over all cases of a test.

/// What has happened, over all cases: a test must not pass because nothing did.
#[derive(Debug, Default, Clone)]
pub struct Coverage {
    pub cases: usize,
    pub sequences: usize,
    pub tokens: usize,
    pub verified: usize,
    pub plain: usize,
    pub prompts: usize,
    pub hits: usize,
    pub hits_without_draft: usize,
    pub failures: usize,
    pub preemptions: usize,
    pub without_draft: usize,
    pub shrunk: usize,
    pub no_room: usize,
    pub ended_inside_a_block: usize,
    pub stops: usize,
    pub lengths: usize,
    pub aborts: usize,
    pub left: usize,
    /// How often each accept length was planted and came out.
    pub accepted: [usize; 16],
}

//! The accept rule (design invariant I1).
//!
//! The target's own choice at each row of the verified block decides: a draft is accepted while
//! it equals that choice; the choice at the first mismatch, or after the last draft, is the bonus
//! token. Because every emitted token is the target's own choice for its own context, the rule is
//! exact for any sampler, penalty or grammar (DFlash, arXiv 2602.06036, section 3; z-lab's
//! reference loop).

/// What the walk over one verified block says after a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The target chose the draft: its row is valid, look at the next one.
    Accepted,
    /// The target chose another token, or there is no draft left: that token is the bonus.
    Bonus,
}

/// A walk over the rows of one verified block, row by row, as the target chooses its tokens.
#[derive(Debug, Clone)]
pub struct AcceptWalk<'a> {
    drafts: &'a [u32],
    accepted: usize,
    ended: bool,
}

impl<'a> AcceptWalk<'a> {
    /// `drafts`: the block without its anchor, `block - 1` tokens.
    pub fn new(drafts: &'a [u32]) -> Self {
        Self {
            drafts,
            accepted: 0,
            ended: false,
        }
    }

    /// Take the target's choice at the next row. After [`Verdict::Bonus`] the walk has ended and
    /// every further call says so again without counting anything.
    pub fn take(&mut self, choice: u32) -> Verdict {
        if self.ended || self.drafts.get(self.accepted) != Some(&choice) {
            self.ended = true;
            return Verdict::Bonus;
        }
        self.accepted += 1;
        Verdict::Accepted
    }

    /// Accept length: drafts accepted so far, `0..=block - 1`.
    pub fn accepted(&self) -> usize {
        self.accepted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(drafts: &[u32], choices: &[u32]) -> (usize, usize) {
        let mut walk = AcceptWalk::new(drafts);
        let mut emitted = 0;
        for &choice in choices {
            emitted += 1;
            if walk.take(choice) == Verdict::Bonus {
                break;
            }
        }
        (walk.accepted(), emitted)
    }

    #[test]
    fn the_longest_matching_prefix_is_accepted_and_one_token_more_is_emitted() {
        for accepted in 0..=3 {
            let drafts = [5, 6, 7];
            let mut choices = vec![5, 6, 7, 8];
            if accepted < 3 {
                choices[accepted] = 99;
            }
            assert_eq!(walk(&drafts, &choices), (accepted, accepted + 1));
        }
    }

    #[test]
    fn a_match_after_a_mismatch_does_not_count() {
        assert_eq!(walk(&[5, 6, 7], &[9, 6, 7, 8]), (0, 1));
        let mut walk = AcceptWalk::new(&[5, 6]);
        assert_eq!(walk.take(9), Verdict::Bonus);
        assert_eq!(walk.take(5), Verdict::Bonus);
        assert_eq!(walk.accepted(), 0);
    }

    #[test]
    fn a_block_without_drafts_emits_the_bonus_alone() {
        assert_eq!(walk(&[], &[4]), (0, 1));
    }
}

//! The table of cases. Those that let the two engines' random streams part come last.

mod api;
mod bad_requests;
mod grammars;
mod limits;
mod load;
mod sampling;

use anyhow::Result;
use futures_util::future::BoxFuture;

use crate::pair::Pair;

/// When a case runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    Always,
    /// In the full version; in the short one only on rows that are not slow.
    Fast,
    /// In the full version only.
    Full,
}

pub struct Case {
    pub name: &'static str,
    pub when: When,
    pub run: fn(&Pair) -> BoxFuture<'_, Result<()>>,
}

impl Case {
    pub fn runs_in_the_short_version(&self, slow: bool) -> bool {
        match self.when {
            When::Always => true,
            When::Fast => !slow,
            When::Full => false,
        }
    }
}

/// A case named as its function.
macro_rules! case {
    ($when:ident, $name:ident) => {
        $crate::cases::Case {
            name: stringify!($name),
            when: $crate::cases::When::$when,
            run: |pair| Box::pin($name(pair)),
        }
    };
}
pub(crate) use case;

/// All cases, in their order.
pub fn all() -> impl Iterator<Item = &'static Case> {
    [
        sampling::CASES,
        limits::CASES,
        grammars::CASES,
        api::CASES,
        bad_requests::CASES,
        load::CASES,
    ]
    .into_iter()
    .flatten()
}

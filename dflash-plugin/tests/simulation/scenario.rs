//! Random scenarios: limits, requests, and what happens in which order.

use proptest::prelude::*;

use super::request::Limits;

#[derive(Debug, Clone)]
pub struct Scenario {
    pub limits: Limits,
    pub requests: Vec<RequestPlan>,
    pub events: Vec<Event>,
}

/// A request whose prompt may depend on what came before.
#[derive(Debug, Clone)]
pub struct RequestPlan {
    /// Continue the text of this (modulo their number) ended sequence, if there is one.
    pub follow: Option<usize>,
    /// Otherwise start with so many tokens of this shared text.
    pub text: u32,
    pub shared: usize,
    pub suffix: Vec<u32>,
    pub seed: Option<u32>,
    pub max_tokens: usize,
    pub abort_at: Option<usize>,
}

/// `pick` chooses a running sequence, modulo their number.
#[derive(Debug, Clone)]
pub enum Event {
    /// The next request arrives.
    Admit,
    /// A speculative step of `batch` sequences; drafts are right up to `accept` (modulo the
    /// rows), then wrong.
    Speculate {
        pick: usize,
        batch: usize,
        accept: [usize; 3],
    },
    Plain {
        pick: usize,
    },
    /// The verify pass fails after the draft KV of `written` sequences has been written; plain
    /// steps follow.
    FailVerify {
        pick: usize,
        batch: usize,
        written: usize,
    },
    /// Both KV caches are taken away, and the text is a prompt again.
    Preempt {
        pick: usize,
    },
    /// The draft KV is taken away.
    LoseDraft {
        pick: usize,
    },
    /// The client goes.
    Leave {
        pick: usize,
    },
    Evict {
        pick: usize,
    },
}

/// What a test is about.
#[derive(Debug, Clone, Copy)]
pub struct Profile {
    /// Most requests.
    pub requests: usize,
    pub faults: bool,
    /// Tokens that every prompt starts with, to get near a growth step of the draft KV.
    pub head: usize,
}

pub fn scenarios(profile: Profile) -> impl Strategy<Value = Scenario> {
    let requests = prop::collection::vec(request(profile), 1..=profile.requests);
    let events = prop::collection::vec(event(profile), 0..40);
    (limits(profile), requests, events).prop_map(|(limits, requests, events)| Scenario {
        limits,
        requests,
        events,
    })
}

fn limits(profile: Profile) -> impl Strategy<Value = Limits> {
    let block = prop_oneof![4 => 2usize..=6, 1 => 7usize..=16];
    // Room behind the prompts; often so little that the length limit is met.
    let room = prop_oneof![2 => 12usize..=40, 1 => 60usize..=100];
    let stops = prop_oneof![1 => Just(0u32), 2 => 1u32..=2];
    let spare = 0usize..=3;
    let draft_missing = prop_oneof![3 => Just(0usize), 1 => 0usize..=20];
    (
        3u32..=40,
        stops,
        block,
        room,
        spare,
        draft_missing,
        0usize..=3,
    )
        .prop_map(
            move |(vocab, stops, block, room, spare, draft_missing, cache_entries)| {
                let max_len = profile.head + room;
                Limits {
                    vocab,
                    stops,
                    max_len,
                    // The last token of a text of full length needs no row.
                    capacity: max_len - 1 + spare,
                    draft_positions: (max_len + block).saturating_sub(draft_missing),
                    block,
                    cache_entries,
                }
            },
        )
}

fn request(profile: Profile) -> impl Strategy<Value = RequestPlan> {
    let follow = prop_oneof![2 => Just(None), 1 => (0usize..8).prop_map(Some)];
    let suffix = prop::collection::vec(0u32..40, 0..4);
    let seed = prop_oneof![Just(None), any::<u32>().prop_map(Some)];
    let max_tokens = prop_oneof![1 => 1usize..=4, 3 => 5usize..=40];
    let abort_at = match profile.faults {
        true => prop_oneof![3 => Just(None), 1 => (0usize..20).prop_map(Some)].boxed(),
        false => Just(None).boxed(),
    };
    (
        follow,
        0u32..2,
        0usize..=8,
        suffix,
        seed,
        max_tokens,
        abort_at,
    )
        .prop_map(
            move |(follow, text, shared, suffix, seed, max_tokens, abort_at)| RequestPlan {
                follow,
                text,
                shared: profile.head + shared,
                suffix,
                seed,
                max_tokens,
                abort_at,
            },
        )
}

fn event(profile: Profile) -> impl Strategy<Value = Event> {
    let pick = 0usize..8;
    let batch = 1usize..=3;
    let accept = prop::array::uniform3(0usize..16);
    let speculate =
        (pick.clone(), batch.clone(), accept).prop_map(|(pick, batch, accept)| Event::Speculate {
            pick,
            batch,
            accept,
        });
    let plain = pick.clone().prop_map(|pick| Event::Plain { pick });
    let evict = pick.clone().prop_map(|pick| Event::Evict { pick });
    let usual = prop_oneof![
        10 => speculate,
        2 => Just(Event::Admit),
        2 => plain,
        1 => evict,
    ];
    if !profile.faults {
        return usual.boxed();
    }
    let failed =
        (pick.clone(), batch, 0usize..=3).prop_map(|(pick, batch, written)| Event::FailVerify {
            pick,
            batch,
            written,
        });
    prop_oneof![
        8 => usual,
        2 => failed,
        1 => pick.clone().prop_map(|pick| Event::Preempt { pick }),
        1 => pick.clone().prop_map(|pick| Event::LoseDraft { pick }),
        1 => pick.prop_map(|pick| Event::Leave { pick }),
    ]
    .boxed()
}

//! Everything that changes which token is chosen.

use anyhow::{ensure, Result};
use serde_json::{json, Value};

use super::{case, Case};
use crate::answer::token_texts;
use crate::pair::{chat, completion, Endpoint, Pair};

pub const CASES: &[Case] = &[
    case!(Always, temperatures),
    case!(Always, top_k_top_p_and_min_p),
    case!(Fast, repetition_frequency_and_presence_penalties),
    case!(Fast, dry),
    case!(Full, logit_bias),
    case!(Always, logprobs_and_top_logprobs),
];

const RIVERS: &str = "Tell me about rivers.";

/// The same chat with each of some sets of fields.
async fn each(pair: &Pair, prompt: &str, sets: &[Value]) -> Result<()> {
    for set in sets {
        let mut fields = set.clone();
        if fields["max_tokens"].is_null() {
            fields["max_tokens"] = json!(pair.tokens());
        }
        pair.agree_chat(prompt, fields).await?;
    }
    Ok(())
}

async fn temperatures(pair: &Pair) -> Result<()> {
    let sets = [0.0, 0.7, 1.5, 1.0].map(|t| json!({"temperature": t}));
    each(pair, RIVERS, &sets[..pair.amount(4, 4, 2)]).await?;
    if pair.amount(2, 1, 0) == 0 {
        return Ok(());
    }
    // Without one the host samples at 1.
    each(pair, RIVERS, &[json!({"temperature": null})]).await
}

async fn top_k_top_p_and_min_p(pair: &Pair) -> Result<()> {
    let sets = [
        json!({"temperature": 1.0, "top_k": 5}),
        json!({"temperature": 1.0, "top_p": 0.8}),
        json!({"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.1}),
        json!({"temperature": 1.0, "top_k": 1}),
        json!({"temperature": 1.0, "min_p": 0.2}),
        json!({"temperature": 0.8, "top_p": 0.5, "min_p": 0.05}),
        json!({"temperature": 0.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0}),
    ];
    let count = pair.amount(sets.len(), 3, 2);
    each(pair, RIVERS, &sets[..count]).await
}

async fn repetition_frequency_and_presence_penalties(pair: &Pair) -> Result<()> {
    let all = json!({"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.3, "temperature": 0.8});
    let sets = [
        json!({"repetition_penalty": 1.3}),
        json!({"frequency_penalty": 0.8}),
        all,
        json!({"presence_penalty": 0.9}),
        json!({"presence_penalty": -0.5, "temperature": 1.0}),
        json!({"repetition_penalty": 0.9, "frequency_penalty": -0.2}),
    ];
    let count = pair.amount(sets.len(), 3, 1);
    each(pair, "Say the word river many times.", &sets[..count]).await
}

async fn dry(pair: &Pair) -> Result<()> {
    let sets = [
        json!({"dry_multiplier": 0.8}),
        json!({"dry_multiplier": 2.0, "dry_base": 1.5, "dry_allowed_length": 1, "dry_sequence_breakers": [","], "temperature": 0.7}),
        json!({"dry_multiplier": 0.0}),
        json!({"dry_multiplier": 5.0, "dry_allowed_length": 3, "dry_sequence_breakers": []}),
    ];
    let count = pair.amount(sets.len(), 2, 1);
    each(
        pair,
        "Repeat this line again and again: one two three, one two three, one two three",
        &sets[..count],
    )
    .await
}

/// The host takes the field and ignores it.
async fn logit_bias(pair: &Pair) -> Result<()> {
    let bias = json!({"504": 50.0, "28": -100.0});
    each(
        pair,
        RIVERS,
        &[
            json!({"logit_bias": bias}),
            json!({"logit_bias": bias, "temperature": 0.8}),
        ],
    )
    .await
}

async fn logprobs_and_top_logprobs(pair: &Pair) -> Result<()> {
    let tokens = pair.tokens();
    let sets = [
        json!({"logprobs": true, "top_logprobs": 5}),
        json!({"logprobs": true, "top_logprobs": 3, "temperature": 0.9, "top_k": 20}),
        json!({"logprobs": true}),
        json!({"logprobs": true, "top_logprobs": 0}),
        json!({"logprobs": false, "top_logprobs": 5}),
    ];
    let count = pair.amount(sets.len(), 2, 1);
    each(pair, RIVERS, &sets[..count]).await?;
    if pair.amount(2, 1, 0) == 0 {
        return Ok(());
    }
    let request = completion("Rivers are", json!({"logprobs": 4, "max_tokens": tokens}));
    let answer = pair.agree(Endpoint::Completions, request).await?;
    ensure!(token_texts(&answer).len() == tokens, "{answer}");
    let request = chat(
        RIVERS,
        json!({"logprobs": true, "top_logprobs": 2, "max_tokens": tokens}),
    );
    pair.agree_streamed(Endpoint::Chat, request).await?;
    Ok(())
}

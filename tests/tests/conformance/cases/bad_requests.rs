//! Requests that the host refuses, or takes although they look wrong: status and text are those of
//! a server without DFlash, and both go on.

use anyhow::{ensure, Context, Result};
use serde_json::{json, Value};

use super::{case, Case};
use crate::pair::{chat, is_healthy, Endpoint, Pair};

pub const CASES: &[Case] = &[
    case!(Always, refused_requests),
    case!(Fast, strange_requests_that_are_answered),
];

async fn refused_requests(pair: &Pair) -> Result<()> {
    let with = |fields: Value| chat("Hello", fields).to_string();
    let regex = |value: &str| json!({"type": "regex", "value": value});
    let too_long = "word ".repeat(9000);
    let bodies = [
        (422, with(json!({"max_tokens": "ten"}))),
        (422, with(json!({"max_tokens": -1}))),
        (422, with(json!({"max_tokens": 1e30}))),
        (422, with(json!({"temperature": "hot"}))),
        (422, with(json!({"top_k": -5}))),
        (422, with(json!({"n": 0}))),
        (422, with(json!({"stop": 7}))),
        (422, with(json!({"messages": 3}))),
        (422, with(json!({"logit_bias": [1, 2]}))),
        (422, with(json!({"tool_choice": "required"}))),
        (
            422,
            with(json!({"grammar": {"type": "sql", "value": "select"}})),
        ),
        (422, with(json!({"grammar": regex("((("), "max_tokens": 3}))),
        (
            422,
            with(json!({"grammar": {"type": "lark", "value": "start: nowhere"}})),
        ),
        (
            422,
            with(json!({"grammar": {"type": "lark", "value": "("}})),
        ),
        (
            422,
            with(json!({"grammar": {"type": "json_schema", "value": {"type": "no type"}}})),
        ),
        (422, with(json!({"response_format": {"type": "yaml"}}))),
        (
            500,
            with(json!({"grammar": regex("a"), "response_format": {"type": "text"}})),
        ),
        (500, with(json!({"model": "no-such-model"}))),
        (500, with(json!({"messages": [{"role": "user"}]}))),
        (422, chat(&too_long, json!({"max_tokens": 3})).to_string()),
        (400, "{ not JSON".to_string()),
        (422, "{}".to_string()),
    ];
    for (want, body) in &bodies {
        let shown = &body[..body.len().min(200)];
        let (status, text) = pair.agree_raw(Endpoint::Chat.path(), body).await?;
        ensure!(
            status == *want,
            "{status} instead of {want} to {shown}: {text}"
        );
    }
    for (path, body) in [
        ("v1/completions", json!({"prompt": ""})),
        ("v1/completions", json!({"prompt": ["a", "b"]})),
        (
            "v1/responses",
            json!({"input": "Hello", "max_tool_calls": 3}),
        ),
        (
            "v1/responses",
            json!({"input": "Hello", "parallel_tool_calls": false}),
        ),
        ("v1/embeddings", json!({"input": "Hello"})),
        ("v1/images/generations", json!({"prompt": "Hello"})),
    ] {
        let (status, text) = pair.agree_raw(path, &body.to_string()).await?;
        ensure!(status >= 400, "{status} to {path} {body}: {text}");
    }
    // A streamed request is refused inside the stream.
    let streamed = with(json!({"grammar": regex("((("), "stream": true}));
    pair.agree_raw(Endpoint::Chat.path(), &streamed).await?;
    is_healthy(pair).await
}

async fn strange_requests_that_are_answered(pair: &Pair) -> Result<()> {
    for fields in [
        json!({"temperature": -1.0, "max_tokens": 6}),
        json!({"temperature": 1e9, "max_tokens": 6}),
        json!({"temperature": 1.0, "top_k": 0, "max_tokens": 6}),
        json!({"temperature": 1.0, "top_k": 1_000_000, "max_tokens": 6}),
        json!({"temperature": 1.0, "top_p": -1.0, "max_tokens": 6}),
        json!({"temperature": 1.0, "top_p": 7.0, "min_p": 3.0, "max_tokens": 6}),
        json!({"repetition_penalty": 0.0, "max_tokens": 6}),
        json!({"frequency_penalty": 1e6, "max_tokens": 6}),
        // Ends by itself.
        json!({"max_tokens": u64::MAX, "stop": ["Paris"]}),
    ] {
        let request = chat("What is the capital of France?", fields).to_string();
        let (status, body) = pair.agree_raw(Endpoint::Chat.path(), &request).await?;
        let answer: Value = serde_json::from_str(&body).with_context(|| body.clone())?;
        ensure!(
            status == 200 || !answer["message"].is_null(),
            "{status}: {body}"
        );
    }
    is_healthy(pair).await
}

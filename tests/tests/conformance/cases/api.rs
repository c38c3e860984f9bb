//! Endpoints, streaming, several choices, and fields that only some models use.

use anyhow::{ensure, Context, Result};
use serde_json::{json, Value};

use super::{case, Case};
use crate::answer::{finish_reason, text};
use crate::pair::{chat, completion, post, response, streamed_text, Endpoint, Pair};

pub const CASES: &[Case] = &[
    case!(Always, chat_streamed_and_whole),
    case!(Fast, completions_streamed_and_whole),
    case!(Fast, completions_with_echo_suffix_and_best_of),
    case!(Fast, responses_streamed_and_whole),
    case!(Full, responses_that_continue_and_are_kept),
    case!(Fast, two_choices),
    case!(Fast, two_choices_streamed),
    case!(Full, thinking_and_effort),
    case!(Full, other_message_forms),
    case!(Full, a_model_that_was_unloaded_and_reloaded),
];

const SEA: &str = "Write a sentence about the sea.";

async fn chat_streamed_and_whole(pair: &Pair) -> Result<()> {
    for temperature in &[0.0, 0.8][..pair.amount(2, 2, 1)] {
        let request = chat(
            SEA,
            json!({"max_tokens": pair.tokens(), "temperature": temperature}),
        );
        let chunks = pair.agree_streamed(Endpoint::Chat, request.clone()).await?;
        let reasons = chunks
            .iter()
            .filter(|c| !c["choices"][0]["finish_reason"].is_null())
            .count();
        ensure!(reasons == 1, "{reasons} finish reasons: {chunks:?}");
        let whole = pair.agree(Endpoint::Chat, request).await?;
        if *temperature == 0.0 {
            // The host trims the start of a whole answer, but not of a streamed one.
            ensure!(
                streamed_text(&chunks).trim_start() == text(&whole),
                "{whole}\n{chunks:?}"
            );
            let usage = &chunks.last().context("no chunk")?["usage"];
            ensure!(
                usage["completion_tokens"] == whole["usage"]["completion_tokens"],
                "{usage}"
            );
        }
    }
    Ok(())
}

async fn completions_streamed_and_whole(pair: &Pair) -> Result<()> {
    let request = completion(
        "The history of computers began",
        json!({"max_tokens": pair.tokens()}),
    );
    let whole = pair.agree(Endpoint::Completions, request.clone()).await?;
    let chunks = pair.agree_streamed(Endpoint::Completions, request).await?;
    ensure!(
        streamed_text(&chunks).trim_start() == text(&whole),
        "{whole}\n{chunks:?}"
    );
    let sampled = json!({"max_tokens": pair.tokens(), "temperature": 0.9, "stop": ".", "presence_penalty": 0.2});
    pair.agree(
        Endpoint::Completions,
        completion("Once upon a time", sampled),
    )
    .await?;
    Ok(())
}

async fn completions_with_echo_suffix_and_best_of(pair: &Pair) -> Result<()> {
    let tokens = pair.tokens();
    for fields in [
        json!({"max_tokens": tokens, "echo": true}),
        json!({"max_tokens": 5, "echo": true, "suffix": " END", "logprobs": 1}),
        json!({"max_tokens": tokens, "n": 2, "best_of": 1}),
        json!({"max_tokens": 5, "echo": true, "stream": false, "user": "somebody"}),
    ] {
        pair.agree(Endpoint::Completions, completion("The sea is", fields))
            .await?;
    }
    let request = completion("The sea is", json!({"max_tokens": 6, "echo": true}));
    pair.agree_streamed(Endpoint::Completions, request).await?;
    Ok(())
}

async fn responses_streamed_and_whole(pair: &Pair) -> Result<()> {
    let fields = json!({"max_output_tokens": pair.tokens(), "instructions": "You are a sailor."});
    let whole = pair
        .agree(Endpoint::Responses, response(SEA, fields.clone()))
        .await?;
    let chunks = pair
        .agree_streamed(Endpoint::Responses, response(SEA, fields))
        .await?;
    let last = &chunks.last().context("no event")?["response"];
    ensure!(
        last["output_text"] == whole["output_text"],
        "{whole}\n{last}"
    );
    ensure!(last["usage"] == whole["usage"], "{whole}\n{last}");
    let sampled = json!({"max_output_tokens": pair.tokens(), "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1});
    pair.agree(Endpoint::Responses, response(SEA, sampled))
        .await?;
    Ok(())
}

/// Ids differ between the servers, so these requests are built for each.
async fn responses_that_continue_and_are_kept(pair: &Pair) -> Result<()> {
    let mut outputs = Vec::new();
    for server in [&pair.plain, &pair.dflash] {
        let path = Endpoint::Responses.path();
        let send = |request: Value| async move {
            let (status, body) = post(server, path, &request.to_string()).await?;
            ensure!(status == 200, "{status}: {body}");
            Ok(serde_json::from_str::<Value>(&body)?)
        };
        let first = send(response(
            "Name three fruits.",
            json!({"max_output_tokens": 24, "store": true}),
        ))
        .await?;
        let id = first["id"].as_str().context("no id")?;
        let kept = reqwest::get(server.url(&format!("{path}/{id}")))
            .await?
            .text()
            .await?;
        let kept: Value = serde_json::from_str(&kept)?;
        ensure!(
            kept["output_text"] == first["output_text"],
            "{kept}\n{first}"
        );
        let more = json!({"max_output_tokens": 24, "previous_response_id": id});
        let second = send(response("Which is the sweetest?", more)).await?;
        outputs.push([
            first["output_text"].clone(),
            second["output_text"].clone(),
            second["usage"].clone(),
        ]);
    }
    ensure!(outputs[0] == outputs[1], "{outputs:?}");
    Ok(())
}

/// Greedy: two choices draw in an order that depends on threads, with and without DFlash.
async fn two_choices(pair: &Pair) -> Result<()> {
    let answer = pair
        .agree_chat(SEA, json!({"max_tokens": pair.tokens(), "n": 2}))
        .await?;
    let choices = answer["choices"].as_array().context("no choices")?;
    ensure!(choices.len() == 2, "{answer}");
    ensure!(choices[0]["message"] == choices[1]["message"], "{answer}");
    let alone = pair
        .agree_chat(SEA, json!({"max_tokens": pair.tokens()}))
        .await?;
    ensure!(text(&alone) == text(&answer), "{alone}\n{answer}");
    let stopped = json!({"max_tokens": 30, "n": 3, "stop": ["the"]});
    let answer = pair.agree_chat(SEA, stopped).await?;
    ensure!(finish_reason(&answer) == "stop", "{answer}");
    Ok(())
}

/// The text of each choice, its finish reason, the usage, and that the stream is ended by `[DONE]`.
async fn two_choices_streamed(pair: &Pair) -> Result<()> {
    for limit in [5, 6, 7, 8, 9] {
        let request = chat(SEA, json!({"max_tokens": limit, "n": 2, "stream": true})).to_string();
        let mut seen = Vec::new();
        for server in [&pair.plain, &pair.dflash] {
            let (_, body) = post(server, Endpoint::Chat.path(), &request).await?;
            let mut texts = [String::new(), String::new()];
            let mut reasons = [Vec::new(), Vec::new()];
            let mut tokens = Vec::new();
            for line in body.lines().filter_map(|l| l.strip_prefix("data: ")) {
                let Ok(chunk) = serde_json::from_str::<Value>(line) else {
                    continue;
                };
                for choice in chunk["choices"].as_array().context("no choices")? {
                    let index = usize::from(choice["index"] == json!(1));
                    texts[index] += choice["delta"]["content"].as_str().unwrap_or_default();
                    reasons[index].extend(choice["finish_reason"].as_str().map(String::from));
                }
                tokens.extend(chunk["usage"]["completion_tokens"].as_u64());
            }
            let done = body.contains("data: [DONE]");
            seen.push((texts, reasons, tokens.pop(), done));
        }
        ensure!(
            seen[0] == seen[1],
            "limit {limit}:\nplain  {:?}\nDFlash {:?}",
            seen[0],
            seen[1]
        );
    }
    Ok(())
}

/// SmolLM2 does not think; the fields must change nothing.
async fn thinking_and_effort(pair: &Pair) -> Result<()> {
    let plain = pair.agree_chat(SEA, json!({"max_tokens": 12})).await?;
    for fields in [
        json!({"enable_thinking": true}),
        json!({"enable_thinking": false, "reasoning_effort": "high"}),
        json!({"reasoning_effort": "nonsense"}),
        json!({"truncate_sequence": true}),
        json!({"a_field_that_does_not_exist": 1}),
    ] {
        let mut fields = fields;
        fields["max_tokens"] = json!(12);
        let answer = pair.agree_chat(SEA, fields).await?;
        ensure!(text(&answer) == text(&plain), "{answer}");
    }
    Ok(())
}

/// A bare string for the messages, content in parts, a name, no messages at all.
async fn other_message_forms(pair: &Pair) -> Result<()> {
    for messages in [
        json!(SEA),
        json!([{"role": "user", "content": [{"type": "text", "text": SEA}]}]),
        json!([{"role": "user", "content": SEA, "name": "sailor"}]),
        json!([{"role": "system", "content": ""}, {"role": "user", "content": SEA}]),
        json!([]),
    ] {
        let mut request = chat("", json!({"max_tokens": 10}));
        request["messages"] = messages;
        pair.agree(Endpoint::Chat, request).await?;
    }
    Ok(())
}

/// The draft model comes back with its target, and both engines start from their seed again. (The
/// host forgets which model is the default when that one is unloaded, so it is named.)
async fn a_model_that_was_unloaded_and_reloaded(pair: &Pair) -> Result<()> {
    pair.use_up();
    let models = reqwest::get(pair.plain.url("v1/models"))
        .await?
        .text()
        .await?;
    let models: Value = serde_json::from_str(&models)?;
    let id = models["data"][1]["id"].as_str().context("no model")?;
    let body = json!({"model_id": id}).to_string();
    for (path, status) in [
        ("v1/models/unload", "unloaded"),
        ("v1/models/reload", "loaded"),
    ] {
        let (_, answer) = pair.agree_raw(path, &body).await?;
        ensure!(answer.contains(status), "{path}: {answer}");
    }
    let joined = pair.dflash.log().matches("DFlash: target").count();
    ensure!(joined == 2, "the draft model was joined {joined} times");
    for temperature in [0.0, 0.9] {
        let fields = json!({"model": id, "max_tokens": pair.tokens(), "temperature": temperature});
        pair.agree_chat(SEA, fields).await?;
    }
    Ok(())
}

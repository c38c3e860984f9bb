//! Where an answer begins and ends: token limits, stops, prompts of all lengths, cached prefixes.

use anyhow::{ensure, Result};
use serde_json::json;

use super::{case, Case};
use crate::answer::{finish_reason, text, token_texts};
use crate::pair::{chat, completion, Endpoint, Pair};

pub const CASES: &[Case] = &[
    case!(Always, max_tokens_from_0_to_17),
    case!(Always, stop_strings_at_every_token),
    case!(Fast, stop_lists_and_streamed_stops),
    case!(Fast, the_model_ends_its_answer_itself),
    case!(Always, prompts_of_one_token_and_shorter_than_a_block),
    case!(Fast, a_prompt_that_ends_just_before_the_cache_grows),
    case!(Full, a_prompt_of_1500_tokens),
    case!(Always, the_same_prompt_twice_and_further_turns),
];

const MONTHS: &str = "List the months of the year.";

async fn max_tokens_from_0_to_17(pair: &Pair) -> Result<()> {
    let step = pair.amount(1, 3, 17);
    for limit in (0..=17).step_by(step) {
        let answer = pair
            .agree_chat(MONTHS, json!({"max_tokens": limit}))
            .await?;
        // The host's first token is out before it looks at the limit.
        ensure!(
            answer["usage"]["completion_tokens"] == json!(limit.max(1)),
            "limit {limit}: {answer}"
        );
        ensure!(
            finish_reason(&answer) == "length",
            "limit {limit}: {answer}"
        );
    }
    let request = chat(
        MONTHS,
        json!({"max_completion_tokens": 5, "temperature": 0.9}),
    );
    pair.agree(Endpoint::Chat, request).await?;
    Ok(())
}

/// Stops that first occur at each of the first tokens of a greedy answer: the whole token, the
/// token without its first character, and from its last character into the next token. (A stop
/// that is one token the host looks for as this token, so "January" does not stop " January".)
async fn stop_strings_at_every_token(pair: &Pair) -> Result<()> {
    let fields = json!({"max_tokens": 24, "logprobs": true});
    let answer = pair.agree_chat(MONTHS, fields).await?;
    let tokens = token_texts(&answer);
    let whole = tokens.concat();
    let step = pair.amount(1, 3, 10);
    let (mut tried, mut stopped) = (0, 0);
    let mut start = 0;
    for (i, token) in tokens.iter().enumerate().take(20) {
        let end = start + token.len();
        let next = tokens
            .get(i + 1)
            .map_or(0, |t| t.chars().next().map_or(0, char::len_utf8));
        let second = token.chars().next().map_or(0, char::len_utf8);
        let last = token.chars().next_back().map_or(0, char::len_utf8);
        for (offset, (from, to)) in [
            (start, end),
            (start + second, end),
            (end - last, end + next),
        ]
        .into_iter()
        .enumerate()
        {
            let stop = &whole[from..to];
            // In the short version each token gets one of the three.
            let chosen = i % step == 0 && (step == 1 || i / step % 3 == offset);
            if !chosen || stop.is_empty() || whole.find(stop) != Some(from) {
                continue;
            }
            tried += 1;
            let answer = pair
                .agree_chat(MONTHS, json!({"max_tokens": 24, "stop": stop}))
                .await?;
            if finish_reason(&answer) == "stop" {
                stopped += 1;
                ensure!(!text(&answer).contains(stop), "stop {stop:?}: {answer}");
            }
        }
        start = end;
    }
    ensure!(
        tried >= pair.amount(30, 4, 1) && stopped * 2 >= tried,
        "{stopped} of {tried} stops that were tried did stop"
    );
    Ok(())
}

async fn stop_lists_and_streamed_stops(pair: &Pair) -> Result<()> {
    for stop in [
        json!(["zebra", "March"]),
        json!("February"),
        json!(["<|im_end|>", "May"]),
        json!([]),
    ] {
        let request = chat(MONTHS, json!({"max_tokens": 24, "stop": stop}));
        pair.agree_streamed(Endpoint::Chat, request).await?;
    }
    let request = chat(
        MONTHS,
        json!({"max_tokens": 24, "stop": ["a", "e"], "temperature": 0.9}),
    );
    pair.agree(Endpoint::Chat, request).await?;
    Ok(())
}

async fn the_model_ends_its_answer_itself(pair: &Pair) -> Result<()> {
    let mut ended = 0;
    for prompt in [
        "What is the capital of France?",
        "What is 2 + 2?",
        "Say hello.",
    ] {
        let answer = pair.agree_chat(prompt, json!({"max_tokens": 40})).await?;
        ended += usize::from(finish_reason(&answer) == "stop");
    }
    ensure!(ended > 0, "every answer was cut off");
    Ok(())
}

async fn prompts_of_one_token_and_shorter_than_a_block(pair: &Pair) -> Result<()> {
    let prompts = ["The", "The sea", "The sea is"];
    for prompt in &prompts[..pair.amount(3, 3, 1)] {
        let request = completion(prompt, json!({"max_tokens": pair.tokens()}));
        pair.agree(Endpoint::Completions, request).await?;
    }
    Ok(())
}

/// A text of at most this many tokens.
fn long_text(tokens: usize) -> String {
    // Each sentence has 10 or 11.
    (0..tokens / 12)
        .map(|i| {
            format!(
                "Item {} is a {} thing to find. ",
                i % 10,
                ["red", "blue", "green"][i % 3]
            )
        })
        .collect()
}

/// KV buffers grow by 512 rows.
async fn a_prompt_that_ends_just_before_the_cache_grows(pair: &Pair) -> Result<()> {
    let request = completion(&long_text(504), json!({"max_tokens": 1}));
    let used = pair.agree(Endpoint::Completions, request).await?["usage"]["prompt_tokens"]
        .as_u64()
        .unwrap_or_default() as usize;
    ensure!((400..512).contains(&used), "{used} tokens");
    let padding = " a".repeat(508 - used);
    let request = completion(&(long_text(504) + &padding), json!({"max_tokens": 24}));
    pair.agree(Endpoint::Completions, request).await?;
    Ok(())
}

async fn a_prompt_of_1500_tokens(pair: &Pair) -> Result<()> {
    let prompt = long_text(1750) + "Which colours were there?";
    for temperature in [0.0, 0.8] {
        let fields = json!({"max_tokens": pair.tokens(), "temperature": temperature});
        let answer = pair.agree_chat(&prompt, fields).await?;
        let used = answer["usage"]["prompt_tokens"]
            .as_u64()
            .unwrap_or_default();
        ensure!((1400..1600).contains(&used), "{used} tokens");
    }
    Ok(())
}

async fn the_same_prompt_twice_and_further_turns(pair: &Pair) -> Result<()> {
    let fields = json!({"max_tokens": pair.tokens()});
    let cold = pair
        .agree_chat("Name three fruits.", fields.clone())
        .await?;
    let hit = pair
        .agree_chat("Name three fruits.", fields.clone())
        .await?;
    ensure!(text(&cold) == text(&hit), "cold {cold}\nhit {hit}");
    let mut messages = vec![
        json!({"role": "system", "content": "You are brief."}),
        json!({"role": "user", "content": "Name three fruits."}),
    ];
    let questions = ["Now name three vegetables.", "Which of them are red?"];
    for question in &questions[..pair.amount(2, 1, 1)] {
        let mut request = chat("", fields.clone());
        request["messages"] = json!(messages);
        let answer = pair.agree(Endpoint::Chat, request).await?;
        messages.push(json!({"role": "assistant", "content": text(&answer)}));
        messages.push(json!({"role": "user", "content": question}));
    }
    if pair.amount(2, 1, 0) == 0 {
        return Ok(());
    }
    let mut request = chat("", json!({"max_tokens": pair.tokens(), "temperature": 0.8}));
    request["messages"] = json!(messages);
    pair.agree(Endpoint::Chat, request).await?;
    Ok(())
}

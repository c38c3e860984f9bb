//! Clients that go away, and many at once. After these the engines have drawn different random
//! numbers, so only greedy answers are compared.

use std::time::{Duration, Instant};

use anyhow::{ensure, Context, Result};
use dflash_tests::server::Server;
use futures_util::future::join_all;
use serde_json::{json, Value};

use super::{case, Case};
use crate::answer::text;
use crate::pair::{ask, chat, completion, is_healthy, stream, streamed_text, Endpoint, Pair};

pub const CASES: &[Case] = &[
    case!(Always, clients_that_disconnect),
    case!(Always, clients_together),
];

async fn clients_that_disconnect(pair: &Pair) -> Result<()> {
    pair.use_up();
    let points = [3, 0, 1, 8, 2, 5, 13];
    for &chunks in &points[..pair.amount(7, 4, 1)] {
        for server in [&pair.plain, &pair.dflash] {
            let request = chat(
                "Tell me a long story about a sailor.",
                json!({"max_tokens": 400, "stream": true}),
            );
            leave_after(server, &request, chunks).await?;
        }
        is_healthy(pair)
            .await
            .with_context(|| format!("after a client left at chunk {chunks}"))?;
    }
    // A client that does not wait for a whole answer.
    for server in [&pair.plain, &pair.dflash] {
        let request = chat("Name three colours.", json!({"max_tokens": 12}));
        tokio::time::timeout(
            Duration::from_millis(200),
            ask(server, Endpoint::Chat, &request),
        )
        .await
        .ok();
    }
    is_healthy(pair).await
}

/// Read so many chunks of a streamed answer, then close the connection.
async fn leave_after(server: &Server, request: &Value, chunks: usize) -> Result<()> {
    // A client of its own: a shared one may keep the connection.
    let http = reqwest::Client::new();
    let request = server.post(&http, Endpoint::Chat.path(), request);
    let mut answer = request.send().await?;
    for _ in 0..chunks {
        answer.chunk().await?.context("the stream ended early")?;
    }
    Ok(())
}

/// What a client of the crowd does.
enum Work {
    /// Its answer is the one that it gets alone.
    Greedy(Endpoint, Value, String),
    /// The same, streamed.
    Streamed(Value, String),
    /// Its answer matches the grammar, or is at least not empty.
    Sampled(Value),
    Leaves(Value, usize),
}

async fn clients_together(pair: &Pair) -> Result<()> {
    pair.use_up();
    let alone = alone(pair).await?;
    for &clients in &[4, 10, 1, 16, 32][..pair.amount(5, 2, 1)] {
        crowd(pair, clients, &alone)
            .await
            .with_context(|| format!("{clients} clients"))?;
        is_healthy(pair)
            .await
            .with_context(|| format!("after {clients} clients"))?;
    }
    Ok(())
}

/// Greedy requests of several lengths, and the answers that they get one at a time.
async fn alone(pair: &Pair) -> Result<Vec<(Endpoint, Value, String)>> {
    let longest = pair.amount(40, 16, 10);
    let date = json!({"type": "regex", "value": "[0-9]{4}-[0-9]{2}-[0-9]{2}"});
    let requests = [
        (
            Endpoint::Chat,
            chat("Name three colours.", json!({"max_tokens": longest})),
        ),
        (
            Endpoint::Chat,
            chat("What is 12 times 15?", json!({"max_tokens": longest / 2})),
        ),
        (
            Endpoint::Completions,
            completion("The sea is", json!({"max_tokens": longest})),
        ),
        (
            Endpoint::Chat,
            chat(
                "When did the French Revolution start?",
                json!({"max_tokens": 12, "grammar": date}),
            ),
        ),
        (
            Endpoint::Chat,
            chat(
                "List the months of the year.",
                json!({"max_tokens": longest, "repetition_penalty": 1.2}),
            ),
        ),
        (
            Endpoint::Chat,
            chat(
                "Tell me a story about a fox.",
                json!({"max_tokens": longest, "stop": ["fox"]}),
            ),
        ),
    ];
    let mut out = Vec::new();
    let count = pair.amount(requests.len(), requests.len(), 3);
    for (endpoint, request) in requests.into_iter().take(count) {
        let answer = pair.agree(endpoint, request.clone()).await?;
        out.push((endpoint, request, text(&answer).to_string()));
    }
    Ok(out)
}

/// Two thirds are greedy; every tenth, and one of every crowd but the smallest, leaves.
fn work(i: usize, clients: usize, alone: &[(Endpoint, Value, String)], tokens: usize) -> Work {
    let (endpoint, request, want) = &alone[i * 7 / 3 % alone.len()];
    if clients > 1 && i % 10 == 2 {
        let story = chat(
            "Tell me a long story about a sailor.",
            json!({"max_tokens": 200, "stream": true}),
        );
        return Work::Leaves(story, 1 + i % 5);
    }
    match i % 3 {
        1 => Work::Sampled(chat(
            "Tell me about rivers.",
            json!({"max_tokens": tokens, "temperature": 0.9}),
        )),
        2 if *endpoint == Endpoint::Chat => {
            let mut request = request.clone();
            request["stream"] = json!(true);
            // A streamed answer has the start of the stop string's text too.
            match request.get("stop") {
                None => Work::Streamed(request, want.clone()),
                Some(_) => Work::Greedy(*endpoint, request_without_stream(request), want.clone()),
            }
        }
        _ => Work::Greedy(*endpoint, request.clone(), want.clone()),
    }
}

fn request_without_stream(mut request: Value) -> Value {
    request["stream"] = json!(false);
    request
}

/// All clients at once on the server with DFlash, joining a few at a time. Nobody may wait much
/// longer than all of them would take one after the other.
async fn crowd(pair: &Pair, clients: usize, alone: &[(Endpoint, Value, String)]) -> Result<()> {
    let tokens = pair.amount(24, 10, 8);
    let start = Instant::now();
    for (endpoint, request, _) in alone {
        ask(&pair.dflash, *endpoint, request).await?;
    }
    let one_by_one = start.elapsed() / alone.len() as u32 * clients as u32;
    let results = join_all((0..clients).map(|i| async move {
        tokio::time::sleep(Duration::from_millis(60) * (i / 4) as u32).await;
        let start = Instant::now();
        do_work(pair, work(i, clients, alone, tokens))
            .await
            .with_context(|| format!("client {i}"))?;
        anyhow::Ok(start.elapsed())
    }))
    .await;
    let mut times = results.into_iter().collect::<Result<Vec<Duration>>>()?;
    times.sort();
    let seconds: Vec<String> = times
        .iter()
        .map(|t| format!("{:.1}", t.as_secs_f64()))
        .collect();
    println!(
        "{}: {clients} clients finished after {} s; one by one about {:.1} s",
        pair.row.name,
        seconds.join(" "),
        one_by_one.as_secs_f64()
    );
    let bound = one_by_one * 3 + Duration::from_secs(20);
    let last = times.last().copied().unwrap_or_default();
    ensure!(
        last < bound,
        "a client waited {last:?}, all one by one take {one_by_one:?}"
    );
    Ok(())
}

async fn do_work(pair: &Pair, work: Work) -> Result<()> {
    let server = &pair.dflash;
    let (endpoint, request, want, got) = match work {
        Work::Greedy(endpoint, request, want) => {
            let answer = ask(server, endpoint, &request).await?;
            let got = text(&answer).to_string();
            (endpoint, request, want, got)
        }
        Work::Streamed(request, want) => {
            let chunks = stream(server, Endpoint::Chat, &request).await?;
            let got = streamed_text(&chunks).trim_start().to_string();
            (Endpoint::Chat, request, want, got)
        }
        Work::Sampled(request) => {
            let answer = ask(server, Endpoint::Chat, &request).await?;
            ensure!(!text(&answer).is_empty(), "{answer}");
            return Ok(());
        }
        Work::Leaves(request, chunks) => return leave_after(server, &request, chunks).await,
    };
    if got != want && !pair.is_near_tie(endpoint, &request, &want, &got).await? {
        anyhow::bail!("{request}\nalone    {want:?}\ntogether {got:?}");
    }
    Ok(())
}

//! Soak: many mixed requests from many clients, some of which hang up or send nonsense. Nothing may
//! fail that was not provoked, memory stays flat, and all draft KV is freed.
//!
//! `DFLASH_TEST_FULL=1`: 2,000 requests; otherwise as many as take one to three minutes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dflash_tests::server::{Metrics, Server};
use dflash_tests::{drafter, full, prompts, target};
use futures_util::StreamExt;
use serde_json::{json, Value};

const CLIENTS: usize = 16;
/// Of 20 looks at the memory, so many are made before caches have filled.
const WARM_UP: usize = 5;
/// Looks at the memory that are put against each other, after warm-up and at the end: their medians,
/// since requests in flight make single ones differ.
const LOOKS: usize = 5;

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Answered,
    /// The client hangs up after this many pieces of the stream.
    HangsUp(usize),
    /// The request is wrong, and the server must say so.
    Refused,
}

struct Request {
    path: &'static str,
    body: Value,
    fate: Fate,
}

/// Request number `i` of the run: every kind comes again and again.
fn request(i: usize, texts: &[String]) -> Request {
    let text = &texts[i * 7 % texts.len()];
    let max_tokens = 8 + i * 5 % 25;
    let mut body = json!({
        "model": "default",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
    });
    let mut set = |key: &str, value: Value| {
        body[key] = value;
    };
    let mut path = "v1/chat/completions";
    let mut fate = Fate::Answered;
    match i % 12 {
        0 => set("temperature", json!(0.8)),
        1 => {
            set("temperature", json!(1.0));
            set("top_p", json!(0.9));
            set("top_k", json!(40));
        }
        2 => set("stream", json!(true)),
        3 => set(
            "grammar",
            json!({"type": "regex", "value": "(yes|no|maybe), because [a-z ]{5,40}"}),
        ),
        4 => set("stop", json!(["the", "\n"])),
        5 => {
            set("logprobs", json!(true));
            set("top_logprobs", json!(3));
        }
        6 => set("frequency_penalty", json!(0.7)),
        7 => set("speculative", json!(false)),
        8 => {
            path = "v1/completions";
            body = json!({
                "model": "default", "prompt": text, "max_tokens": max_tokens, "temperature": 0.0,
            });
        }
        9 => {
            let earlier = &texts[i % 5];
            set(
                "messages",
                json!([
                    {"role": "user", "content": earlier},
                    {"role": "assistant", "content": "That is a good question."},
                    {"role": "user", "content": text},
                ]),
            );
        }
        10 => set("n", json!(2)),
        _ => (),
    }
    if i % 50 == 17 {
        body["stream"] = json!(true);
        body["max_tokens"] = json!(200);
        fate = Fate::HangsUp(1 + i % 9);
    }
    if i % 100 == 63 {
        path = "v1/chat/completions";
        body = json!({
            "model": "default",
            "messages": [{"role": "user", "content": text}],
            "temperature": "warm",
        });
        fate = Fate::Refused;
    }
    Request { path, body, fate }
}

/// Send one request and see it through to its fate.
async fn send(http: &reqwest::Client, server: &Server, request: &Request) -> Result<(), String> {
    let failed = |what: &str, detail: String| Err(format!("{what}: {detail}: {}", request.body));
    let response = http
        .post(server.url(request.path))
        .json(&request.body)
        .send()
        .await;
    let response = match response {
        Ok(response) => response,
        Err(error) => return failed("no response", error.to_string()),
    };
    let status = response.status();
    if request.fate == Fate::Refused {
        return match status.is_client_error() {
            true => Ok(()),
            false => failed("not refused", status.to_string()),
        };
    }
    if !status.is_success() {
        let text = response.text().await.unwrap_or_default();
        return failed("refused", format!("{status} {text}"));
    }
    let mut pieces = 0;
    let mut text = String::new();
    let mut stream = response.bytes_stream();
    while let Some(piece) = stream.next().await {
        match piece {
            Ok(piece) => text.push_str(&String::from_utf8_lossy(&piece)),
            Err(error) => return failed("broken answer", error.to_string()),
        }
        pieces += 1;
        if request.fate == Fate::HangsUp(pieces) {
            return Ok(());
        }
    }
    match text.contains("finish_reason") && !text.contains("\"error\"") {
        true => Ok(()),
        false => failed("no end", text),
    }
}

async fn metric(server: &Server, name: &str) -> Option<f64> {
    Metrics::of(server).await.find(name, &[])
}

/// Resident memory of the server in MiB.
fn resident(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|l| l.starts_with("VmRSS:")).unwrap();
    let kib: f64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib / 1024.0
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[tokio::test(flavor = "multi_thread")]
async fn mixed_requests_from_16_clients_leave_no_error_and_no_memory_behind() {
    let count = if full() { 2000 } else { 160 };
    let texts: Vec<String> = dflash_bench::prompts::load(&[prompts()], None)
        .unwrap()
        .into_iter()
        .map(|line| line.prompt)
        .collect();
    let drafter = drafter();
    let server = Server::serve_without_pools(
        &target(),
        &[
            "--speculative",
            "dflash",
            "--speculative-draft-model",
            drafter.to_str().unwrap(),
        ],
    )
    .await;
    let http = reqwest::Client::new();
    let next = AtomicUsize::new(0);
    let done = AtomicUsize::new(0);
    let memory = std::sync::Mutex::new(Vec::new());
    let start = Instant::now();
    let clients = (0..CLIENTS).map(|_| async {
        let mut errors = Vec::new();
        loop {
            let i = next.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                return errors;
            }
            let request = request(i, &texts);
            errors.extend(send(&http, &server, &request).await.err());
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            if done.is_multiple_of(count / 20) {
                memory.lock().unwrap().push(resident(server.pid()));
            }
        }
    });
    let errors: Vec<String> = futures_util::future::join_all(clients)
        .await
        .into_iter()
        .flatten()
        .collect();
    let elapsed = start.elapsed();
    assert!(
        errors.is_empty(),
        "{} errors, the first: {}",
        errors.len(),
        errors[0]
    );

    // Those that hung up end with the next step.
    let deadline = Instant::now() + Duration::from_secs(60);
    while metric(&server, "mistralrs_sequences_running").await != Some(0.0) {
        assert!(
            Instant::now() < deadline,
            "sequences still run: {}",
            Metrics::of(&server).await.0
        );
        // The gauge is set by a step; a small request makes one.
        send(&http, &server, &request(11, &texts)).await.unwrap();
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    let states = metric(&server, "mistralrs_speculative_draft_states").await;
    // The host keeps 16 prefix-cache entries.
    assert!(
        states.is_some_and(|n| n <= 16.0),
        "draft KV of {states:?} sequences is left"
    );

    let memory = Arc::new(memory.into_inner().unwrap());
    let growth =
        median(&memory[memory.len() - LOOKS..]) / median(&memory[WARM_UP..WARM_UP + LOOKS]) - 1.0;
    println!(
        "{count} requests, {CLIENTS} clients, {:.0} s, draft states left {states:?}; resident MiB \
         {memory:.0?}; growth after warm-up {:.1}%",
        elapsed.as_secs_f64(),
        100.0 * growth
    );
    for name in [
        "mistralrs_speculative_drafts_total",
        "mistralrs_speculative_draft_tokens_proposed_total",
        "mistralrs_speculative_draft_tokens_accepted_total",
    ] {
        println!("{name} {:?}", metric(&server, name).await);
    }
    // In the short run requests in flight weigh more.
    let most = if full() { 0.05 } else { 0.15 };
    assert!(
        growth < most,
        "memory grew by {:.1}%: {memory:.0?}",
        100.0 * growth
    );
}

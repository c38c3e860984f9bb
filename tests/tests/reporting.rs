//! What the server tells about speculation: in the usage of a request, in the log, at `/metrics`,
//! and in the table of `mistralrs bench`.

use std::io::Write;
use std::process::{Command, Output};
use std::time::Duration;

use dflash_tests::server::{binary, Metrics, Server};
use dflash_tests::{drafter, target};
use serde_json::{json, Value};

const CHAT: &str = "v1/chat/completions";
const COMPLETIONS: &str = "v1/completions";
const RESPONSES: &str = "v1/responses";
const PROMPT: &str = "The history of computers began";

/// POST `body`; the status and the text of the answer.
async fn post(server: &Server, path: &str, body: &Value) -> (u16, String) {
    let request = server.post(&reqwest::Client::new(), path, body);
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.text().await.unwrap())
}

async fn answer(server: &Server, path: &str, body: &Value) -> Value {
    let (status, text) = post(server, path, body).await;
    assert_eq!(status, 200, "{path}: {text}");
    serde_json::from_str(&text).unwrap()
}

/// The JSON events of a streamed answer.
async fn events(server: &Server, path: &str, body: &Value) -> Vec<Value> {
    let (status, text) = post(server, path, body).await;
    assert_eq!(status, 200, "{path}: {text}");
    text.lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .filter(|data| *data != "[DONE]")
        .map(|data| serde_json::from_str(data).unwrap())
        .collect()
}

fn chat(more: Value) -> Value {
    let mut body = json!({
        "model": "default",
        "messages": [{"role": "user", "content": "List the months of the year."}],
        "temperature": 0.0,
        "max_tokens": 24,
    });
    let more = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    body
}

fn completion(more: Value) -> Value {
    let mut body = chat(more);
    let body_map = body.as_object_mut().unwrap();
    body_map.remove("messages");
    body_map.insert("prompt".into(), PROMPT.into());
    body
}

fn response(more: Value) -> Value {
    let mut body = chat(more);
    let body_map = body.as_object_mut().unwrap();
    body_map.remove("messages");
    body_map.insert("input".into(), "List the months of the year.".into());
    body
}

/// Accepted and rejected draft tokens in a usage.
fn predictions(usage: &Value) -> (f64, f64) {
    let details = usage
        .get("completion_tokens_details")
        .or_else(|| usage.get("output_tokens_details"))
        .unwrap_or_else(|| panic!("no details in {usage}"));
    let count = |name: &str| {
        details[name]
            .as_u64()
            .unwrap_or_else(|| panic!("no {name} in {usage}")) as f64
    };
    (
        count("accepted_prediction_tokens"),
        count("rejected_prediction_tokens"),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_plain_server_reports_as_before_and_has_metrics() {
    let server = Server::plain(&target()).await;
    let before = Metrics::of(&server).await;
    assert_eq!(before.get("mistralrs_generation_tokens_total", &[]), 0.0);

    let whole = answer(&server, CHAT, &chat(json!({}))).await;
    let off = answer(&server, CHAT, &chat(json!({"speculative": false}))).await;
    assert_eq!(
        off["choices"][0]["message"]["content"],
        whole["choices"][0]["message"]["content"]
    );
    let streamed = events(&server, CHAT, &chat(json!({"stream": true}))).await;
    let text = answer(
        &server,
        COMPLETIONS,
        &completion(json!({"speculative": true})),
    )
    .await;
    let pieces = events(&server, COMPLETIONS, &completion(json!({"stream": true}))).await;
    let resource = answer(&server, RESPONSES, &response(json!({"speculative": false}))).await;
    for usage in [
        &whole["usage"],
        &off["usage"],
        &streamed.last().unwrap()["usage"],
        &text["usage"],
        &resource["usage"],
    ] {
        assert!(usage.is_object());
        assert!(!usage.to_string().contains("prediction"), "{usage}");
        assert!(usage.get("completion_tokens_details").is_none(), "{usage}");
    }
    for (path, body) in [
        (CHAT, chat(json!({"speculative": "no"}))),
        (COMPLETIONS, completion(json!({"speculative": 0}))),
        (RESPONSES, response(json!({"speculative": "no"}))),
    ] {
        let (status, text) = post(&server, path, &body).await;
        assert_eq!(status, 422, "{path}: {text}");
        assert!(text.contains("speculative"), "{path}: {text}");
    }

    let tokens = |usage: &Value, name: &str| usage[name].as_u64().unwrap() as f64;
    let chat_usage = &whole["usage"];
    let generated = 3.0 * tokens(chat_usage, "completion_tokens")
        + 2.0 * tokens(&text["usage"], "completion_tokens")
        + tokens(&resource["usage"], "output_tokens");
    let prompts = 3.0 * tokens(chat_usage, "prompt_tokens")
        + 2.0 * tokens(&text["usage"], "prompt_tokens")
        + tokens(&resource["usage"], "input_tokens");
    let after = Metrics::once(&server, |metrics| {
        metrics.get("mistralrs_generation_tokens_total", &[]) >= generated
            && metrics.get("mistralrs_sequences_running", &[]) == 0.0
    })
    .await;
    let is = |name: &str, labels: &[(&str, &str)], value: f64| {
        assert_eq!(
            after.get(name, labels),
            value,
            "{name} {labels:?} in\n{}",
            after.0
        );
    };
    is("mistralrs_generation_tokens_total", &[], generated);
    is("mistralrs_prompt_tokens_total", &[], prompts);
    is("mistralrs_prefix_cache_lookups_total", &[], 6.0);
    is("mistralrs_sequences_waiting", &[], 0.0);
    is(
        "mistralrs_sequences_completed_total",
        &[("reason", "length")],
        6.0,
    );
    assert!(after.get("mistralrs_tokens_processed_total", &[]) >= generated);
    is("mistralrs_prefix_cache_hits_total", &[], 0.0);
    assert!(!after.0.contains("mistralrs_speculative_"), "{}", after.0);

    for (path, whole, pieces) in [
        ("/v1/chat/completions", 2.0, streamed.len()),
        ("/v1/completions", 1.0, pieces.len()),
        ("/v1/responses", 1.0, 0),
    ] {
        let streams = f64::from(pieces > 0);
        let path = ("path", path);
        let requests = |status| [path, ("method", "POST"), ("status", status)];
        is("http_requests_total", &requests("200"), whole + streams);
        is("http_requests_total", &requests("422"), 1.0);
        is("http_requests_in_flight", &[path], 0.0);
        let first = "mistralrs_time_to_first_token_seconds_count";
        is(first, &[path], whole + streams);
        let between = "mistralrs_inter_token_latency_seconds_count";
        is(between, &[path], pieces.saturating_sub(1) as f64);
    }
    let buckets = "mistralrs_inter_token_latency_seconds_bucket";
    assert!(after
        .0
        .lines()
        .any(|line| line.starts_with(buckets) && line.contains("le=\"0.0001\"")));
    is("http_requests_total", &[("path", "/metrics")], 0.0);

    // A prompt that goes on where an answer ended continues from the prefix cache.
    let said = text["choices"][0]["text"].as_str().unwrap();
    let mut body = completion(json!({}));
    body["prompt"] = format!("{PROMPT} {said}, and then").into();
    answer(&server, COMPLETIONS, &body).await;
    let hits = Metrics::of(&server).await;
    assert_eq!(hits.get("mistralrs_prefix_cache_hits_total", &[]), 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_speculating_server_counts_the_same_in_usage_metrics_and_log() {
    let server = Server::dflash(&target(), &drafter(), 16).await;
    let plain = answer(&server, CHAT, &chat(json!({"speculative": false}))).await;
    assert!(
        plain["usage"].get("completion_tokens_details").is_none(),
        "{plain}"
    );
    let opted_out = [("reason", "disabled_by_request")];
    let fallbacks = "mistralrs_speculative_fallback_steps_total";
    let before = Metrics::once(&server, |metrics| metrics.get(fallbacks, &opted_out) > 0.0).await;
    assert_eq!(before.get("mistralrs_speculative_drafts_total", &[]), 0.0);

    let whole = answer(&server, CHAT, &chat(json!({}))).await;
    assert_eq!(
        plain["choices"][0]["message"]["content"],
        whole["choices"][0]["message"]["content"]
    );
    let streamed = events(&server, CHAT, &chat(json!({"stream": true}))).await;
    let (last, rest) = streamed.split_last().unwrap();
    assert!(rest.iter().all(|chunk| chunk["usage"].is_null()));
    let resource = answer(&server, RESPONSES, &response(json!({}))).await;
    let resource_events = events(&server, RESPONSES, &response(json!({"stream": true}))).await;
    let completed = resource_events
        .iter()
        .find(|event| event["type"] == "response.completed")
        .unwrap();
    let text = answer(&server, COMPLETIONS, &completion(json!({}))).await;
    // The counts of a request are those of all its choices.
    let choices = answer(&server, CHAT, &chat(json!({"n": 2}))).await;

    let tokens = whole["usage"]["completion_tokens"].as_u64().unwrap() as f64;
    let (accepted, rejected) = predictions(&whole["usage"]);
    assert!(accepted > 0.0 && rejected > 0.0, "{whole}");
    // Every other token is the target's own: the prompt's and one of each block.
    let own = tokens - accepted;
    assert!(own >= 1.0 && accepted + rejected <= 15.0 * own, "{whole}");

    let usages = [
        &whole["usage"],
        &last["usage"],
        &resource["usage"],
        &completed["response"]["usage"],
        &text["usage"],
        &choices["usage"],
    ];
    let all_accepted: f64 = usages.iter().map(|usage| predictions(usage).0).sum();
    let all_rejected: f64 = usages.iter().map(|usage| predictions(usage).1).sum();
    let proposed = all_accepted + all_rejected;
    let accepted_total = "mistralrs_speculative_draft_tokens_accepted_total";
    let after = Metrics::once(&server, |metrics| {
        metrics.get(accepted_total, &[]) >= all_accepted
            && metrics.get("mistralrs_speculative_draft_tokens_proposed_total", &[]) >= proposed
    })
    .await;
    assert_eq!(after.get(accepted_total, &[]), all_accepted);
    assert_eq!(
        after.get("mistralrs_speculative_draft_tokens_proposed_total", &[]),
        proposed
    );
    let drafts = after.get("mistralrs_speculative_drafts_total", &[]);
    let at = |position: usize| {
        let label = ("position", position.to_string());
        after.get(
            "mistralrs_speculative_draft_tokens_accepted_per_pos_total",
            &[(label.0, &label.1)],
        )
    };
    assert_eq!((0..15).map(at).sum::<f64>(), all_accepted);
    assert!(at(0) >= at(1) && drafts >= at(0));

    let mut waited = 0;
    while !server.log().contains("Speculative: drafted ") {
        assert!(waited < 100, "{}", server.log());
        waited += 1;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let log = server.log();
    let line = log
        .lines()
        .find(|line| line.contains("Speculative: drafted "))
        .unwrap();
    for part in ["Throughput", ", accepted ", "%), tau ", " running"] {
        assert!(line.contains(part), "{line}");
    }
}

fn bench(arguments: &[&str]) -> Output {
    Command::new(binary())
        .args(["bench", "--cpu", "--dtype", "f32", "--iterations", "1"])
        .arg("-m")
        .arg(target())
        .args(arguments)
        .output()
        .unwrap()
}

#[test]
fn bench_takes_prompts_and_shows_tau() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    writeln!(file, r#"{{"prompt": "Name three colours."}}"#).unwrap();
    writeln!(file, r#"{{"prompt": "What is 12 times 15?"}}"#).unwrap();
    let drafter = drafter();
    let output = bench(&[
        "--prompt-file",
        file.path().to_str().unwrap(),
        "--gen-len",
        "24",
        "--speculative",
        "dflash",
        "--speculative-draft-model",
        drafter.to_str().unwrap(),
    ]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    for part in [
        "Prefill (2 prompts)",
        "Decode (up to 24 tokens)",
        "Tau",
        "Accepted",
        "%",
    ] {
        assert!(text.contains(part), "`{part}` is not in\n{text}");
    }

    let output = bench(&["--prompt-len", "8", "--gen-len", "4", "--temperature", "0"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("Prefill (8 tokens)") && text.contains("Decode (4 tokens)"));
    assert!(!text.contains("Tau"), "{text}");
}

#[test]
fn bench_refuses_a_prompt_file_without_prompts() {
    let empty = tempfile::NamedTempFile::new().unwrap();
    let mut wrong = tempfile::NamedTempFile::new().unwrap();
    writeln!(wrong, "{{\"prompt\": \"a\"}}\n{{\"text\": \"b\"}}").unwrap();
    for (file, part) in [
        ("/does/not/exist", "Cannot read the prompt file"),
        (empty.path().to_str().unwrap(), "There is no prompt in it"),
        (wrong.path().to_str().unwrap(), "Line 2"),
    ] {
        let output = bench(&["--prompt-file", file]);
        assert!(!output.status.success());
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(
            message.contains(part) && message.contains(file),
            "{message}"
        );
    }
    for arguments in [
        ["--temperature", "-1"],
        ["--temperature", "warm"],
        ["--temperature", "NaN"],
    ] {
        let output = bench(&arguments);
        assert!(!output.status.success(), "{arguments:?}");
    }
}

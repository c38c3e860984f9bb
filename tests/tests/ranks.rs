//! Tensor parallelism: two processes with a half of the target each, on a CPU by the host's ring. Both
//! must run the same steps, whatever comes, hangs up or is measured; or they wait for each other for
//! ever.

use std::path::Path;
use std::time::Duration;

use dflash_tests::server::{Metrics, Server};
use dflash_tests::tiny::{self, TinyPair};
use futures_util::{future::join_all, StreamExt};
use serde_json::{json, Value};

const PATIENCE: Duration = Duration::from_secs(120);
const TOKENS: usize = 48;
const PROMPTS: [&str; 6] = [
    "abcab",
    "h",
    "fedcbagfedcb",
    "bbbbbbb",
    "acegbdfh",
    "gfgfgfgfgfgfgfg",
];

fn pair(folder: &Path) -> (std::path::PathBuf, std::path::PathBuf) {
    let pair = TinyPair {
        letters: Some(8),
        ..TinyPair::default()
    };
    tiny::write(&pair, folder)
}

fn request(prompt: &str, temperature: f64, stream: bool) -> Value {
    json!({
        "model": "default", "prompt": prompt, "max_tokens": TOKENS, "temperature": temperature,
        "stream": stream,
    })
}

async fn text(http: &reqwest::Client, server: &Server, body: Value) -> String {
    let answer = http
        .post(server.url("v1/completions"))
        .timeout(PATIENCE)
        .body(body.to_string())
        .header("content-type", "application/json")
        .send()
        .await
        .unwrap();
    let answer: Value = serde_json::from_str(&answer.text().await.unwrap()).unwrap();
    assert_eq!(
        answer["usage"]["completion_tokens"].as_u64(),
        Some(TOKENS as u64),
        "{answer}"
    );
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// Greedy texts of all prompts, which come together with sampled ones and with clients that hang up.
async fn texts(server: &Server) -> Vec<String> {
    let http = &reqwest::Client::new();
    let greedy = PROMPTS.map(|prompt| text(http, server, request(prompt, 0.0, false)));
    let sampled = PROMPTS.map(|prompt| text(http, server, request(prompt, 0.9, false)));
    let gone = PROMPTS[..3].iter().map(|prompt| async {
        let body = request(prompt, 0.9, true).to_string();
        let answer = http
            .post(server.url("v1/completions"))
            .timeout(PATIENCE)
            .body(body)
            .header("content-type", "application/json");
        let mut pieces = answer.send().await.unwrap().bytes_stream();
        pieces.next().await.unwrap().unwrap();
    });
    let (greedy, ..) = tokio::join!(join_all(greedy), join_all(sampled), join_all(gone));
    greedy
}

/// `more`: arguments of every server; `drafts`: of that with the draft model.
async fn check(more: &[&str], drafts: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let (target, drafter) = pair(folder.path());
    let alone = Server::serve(&target, more).await;
    let want = texts(&alone).await;
    drop(alone);

    let plain = Server::serve_on_two_ranks(&target, more).await;
    assert_eq!(texts(&plain).await, want, "without a draft model");
    drop(plain);

    let drafter = drafter.to_str().unwrap();
    let speculative = [
        "--speculative",
        "dflash",
        "--speculative-draft-model",
        drafter,
    ];
    let more = [&speculative[..], drafts, more].concat();
    let mut server = Server::serve_on_two_ranks(&target, &more).await;
    for round in 0..3 {
        assert_eq!(texts(&server).await, want, "round {round}");
    }
    let metrics = Metrics::of(&server).await;
    let drafted = metrics.get("mistralrs_speculative_draft_tokens_proposed_total", &[]);
    let accepted = metrics.get("mistralrs_speculative_draft_tokens_accepted_total", &[]);
    assert!(drafted > 0.0, "{}", metrics.0);
    let is_adaptive = drafts.is_empty();
    assert!(is_adaptive || accepted > 0.0, "{}", metrics.0);
    server.end_first_rank(Duration::from_secs(20));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_ranks_give_the_text_of_one_and_end_together() {
    check(&[], &["--speculative-adaptive", "false"]).await;
}

/// Each rank measures other times, but the first one's decide.
#[tokio::test(flavor = "multi_thread")]
async fn two_ranks_verify_as_many_rows_while_they_adapt() {
    check(&[], &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_ranks_share_paged_sequences() {
    let paged = ["--paged-attn", "on", "--pa-context-len", "4096"];
    check(&paged, &["--speculative-adaptive", "false"]).await;
}

//! Tensor parallelism: two processes with a half of the target each, on a CPU by the host's ring. Both
//! must run the same steps, whatever comes, hangs up or is measured; or they wait for each other for
//! ever.

use std::path::{Path, PathBuf};
use std::time::Duration;

use dflash_tests::server::{Metrics, Server};
use dflash_tests::tiny::{self, TinyPair};
use futures_util::{future::join_all, StreamExt};
use serde_json::{json, Value};

const COMPLETIONS: &str = "v1/completions";
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

fn pair(folder: &Path, seed: u64) -> (PathBuf, PathBuf) {
    std::fs::create_dir_all(folder).unwrap();
    let pair = TinyPair {
        letters: Some(8),
        seed,
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
    let request = server.post(http, COMPLETIONS, body).timeout(PATIENCE);
    let answer = request.send().await.unwrap();
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
        let request = server.post(http, COMPLETIONS, request(prompt, 0.9, true));
        let answer = request.timeout(PATIENCE).send().await.unwrap();
        let mut pieces = answer.bytes_stream();
        pieces.next().await.unwrap().unwrap();
    });
    let (greedy, ..) = tokio::join!(join_all(greedy), join_all(sampled), join_all(gone));
    greedy
}

/// `more`: arguments of every server; `adaptive`: whether each rank chooses the rows to verify.
async fn check(more: &[&str], adaptive: [bool; 2]) {
    let folder = tempfile::tempdir().unwrap();
    let (target, drafter) = pair(&folder.path().join("first"), 1);
    let (_, other) = pair(&folder.path().join("second"), 2);
    let alone = Server::serve(&target, more).await;
    let want = texts(&alone).await;
    drop(alone);

    let plain = Server::serve_on_two_ranks(&target, more, more).await;
    assert_eq!(texts(&plain).await, want, "without a draft model");
    drop(plain);

    // What the second rank would draft, and how much, is not what the first one does.
    let [first, second] = [(&drafter, adaptive[0]), (&other, adaptive[1])].map(|(drafter, is)| {
        let adaptive = if is { "true" } else { "false" };
        let method = [
            "--speculative",
            "dflash",
            "--speculative-adaptive",
            adaptive,
        ];
        let draft_model = ["--speculative-draft-model", drafter.to_str().unwrap()];
        [&method[..], &draft_model, more].concat()
    });
    let mut server = Server::serve_on_two_ranks(&target, &first, &second).await;
    for round in 0..3 {
        assert_eq!(texts(&server).await, want, "round {round}");
    }
    let metrics = Metrics::of(&server).await;
    let drafted = metrics.get("mistralrs_speculative_draft_tokens_proposed_total", &[]);
    let accepted = metrics.get("mistralrs_speculative_draft_tokens_accepted_total", &[]);
    assert!(drafted > 0.0, "{}", metrics.0);
    assert!(adaptive[0] || accepted > 0.0, "{}", metrics.0);
    server.end_first_rank(Duration::from_secs(20));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_ranks_give_the_text_of_one_and_end_together() {
    check(&[], [false, false]).await;
}

/// Each rank measures other times, and the first one's decide. Here the second one would verify whole
/// blocks always.
#[tokio::test(flavor = "multi_thread")]
async fn two_ranks_verify_as_many_rows_as_the_first_one_finds_best() {
    check(&[], [true, false]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_ranks_share_paged_sequences() {
    let paged = ["--paged-attn", "on", "--pa-context-len", "4096"];
    check(&paged, [false, false]).await;
}

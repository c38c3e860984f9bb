//! `--speculative-draft-quant`: the text is that of the target alone, whatever the draft model is
//! quantized to, and it drafts nearly as well.

use dflash_bench::engine::{Drafting, Engine, Job, Prompt, Setup};
use dflash_bench::prompts;
use dflash_tests::server::{refusal_of_pair, Server};
use dflash_tests::{compare_greedy, drafter, prompts, target};

const TOKENS: usize = 64;

fn quantized(quant: &str) -> Setup {
    Setup {
        drafting: Drafting {
            draft_quant: Some(quant.into()),
            ..Drafting::default()
        },
        ..Setup::dflash(&target(), &drafter(), Some(8))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quantized_draft_model_gives_the_same_tokens() {
    let lines = prompts::load(&[prompts()], Some(1)).unwrap();
    let jobs: Vec<Job> = lines
        .iter()
        .map(|line| Job::greedy(Prompt::Chat(line.prompt.clone()), TOKENS).recorded())
        .collect();
    let plain = Engine::load(&Setup::plain(&target())).await.unwrap();
    let mut references = Vec::new();
    for job in &jobs {
        references.push(plain.generate(job, |_| ()).await.unwrap());
    }
    let mut taus = Vec::new();
    for quant in ["none", "q8_0", "q4k"] {
        let engine = Engine::load(&quantized(quant)).await.unwrap();
        for ((job, line), want) in jobs.iter().zip(&lines).zip(&references) {
            let got = engine.generate(job, |_| ()).await.unwrap();
            let what = format!("{quant}, {}", line.id);
            compare_greedy(&what, &want.tokens, &want.gaps, &got.tokens).unwrap();
        }
        let stats = engine.stats();
        assert!(stats.fallbacks.is_empty(), "{quant}: {stats:?}");
        taus.push(stats.tau().unwrap());
    }
    println!("tau with none, q8_0, q4k: {taus:.3?}");
    // 4 prompts say little about a few percent; over many prompts see docs/perf.md.
    assert!(taus.iter().all(|tau| *tau > 0.85 * taus[0]), "{taus:?}");
}

fn config(quant: &str) -> String {
    let (target, drafter) = (target(), drafter());
    format!(
        r#"command = "serve"

[server]
host = "127.0.0.1"
port = {{port}}

[[models]]
kind = "text"
model_id = "{}"
dtype = "f32"
device = {{ cpu = true }}

[models.speculative]
method = "dflash"
draft_model = "{}"
draft_quant = {quant}
"#,
        target.display(),
        drafter.display()
    )
}

/// 5 layers of 576 to 1536 columns: 81.9 MB in f32, of which 70.8 MB become 10.8.
#[tokio::test(flavor = "multi_thread")]
async fn the_start_up_line_has_the_type_and_the_memory_of_the_quantized_weights() {
    let server = Server::from_config(&config("\"q4k\"")).await;
    let log = server.log();
    for part in [
        " MB as F32 and q4k, draft KV",
        "width 576 is no multiple of q4k's blocks",
        "quantized as q4_1",
    ] {
        assert!(log.contains(part), "`{part}` is not in:\n{log}");
    }
    let megabytes = log.split(" MB as F32 and q4k").next().unwrap();
    let megabytes: f64 = megabytes.rsplit(' ').next().unwrap().parse().unwrap();
    assert!((21.8..22.0).contains(&megabytes), "{megabytes} MB");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_used_is_refused_at_load_with_the_types_that_can() {
    for (quant, found) in [("q9", "found q9"), ("afq4", "found afq4")] {
        let error = match Engine::load(&quantized(quant)).await {
            Ok(_) => panic!("{quant} was loaded"),
            Err(error) => format!("{error:#}"),
        };
        for part in ["--speculative-draft-quant", "one of q8_0,", "q4k", found] {
            assert!(error.contains(part), "`{part}` is not in: {error}");
        }
    }
}

#[test]
fn the_flag_of_the_program_is_the_same_option() {
    let (target, drafter) = (target(), drafter());
    let target = ["-m", target.to_str().unwrap()];
    let message = refusal_of_pair(&target, &drafter, &["--speculative-draft-quant", "Q7"]);
    for part in ["--speculative-draft-quant", "found q7", "q8_0"] {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

//! Two models in one server, of which one has a draft model: each answers as it does alone.

use std::path::Path;

use dflash_tests::server::Server;
use dflash_tests::tiny::{self, TinyPair};
use dflash_tests::{drafter, target};
use futures_util::future::join_all;
use serde_json::{json, Value};

const PROMPTS: [&str; 3] = [
    "Name three colours.",
    "What is 12 times 15?",
    "Tell me a story about a fox.",
];

fn model_table(model: &Path, drafter: Option<&Path>) -> String {
    let speculative = drafter.map_or_else(String::new, |drafter| {
        format!(
            "[models.speculative]\nmethod = \"dflash\"\ndraft_model = {:?}\nblock_size = 8\n",
            drafter.display().to_string()
        )
    });
    format!(
        "[[models]]\nkind = \"text\"\nmodel_id = {:?}\ndtype = \"f32\"\n\
         device = {{ cpu = true }}\n\n{speculative}\n",
        model.display().to_string()
    )
}

fn config(models: &[(&Path, Option<&Path>)]) -> String {
    let head = "command = \"serve\"\n\n[server]\nhost = \"127.0.0.1\"\nport = {port}\n\n";
    let tables = models.iter().map(|(m, d)| model_table(m, *d));
    head.to_string() + &tables.collect::<String>()
}

/// A greedy answer's text, finish reason and count of tokens.
type Answer = (String, String, u64);

async fn answer(server: &Server, model: &str, prompt: &str) -> Answer {
    let request = json!({
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 24
    });
    let answer: Value = server
        .client()
        .chat()
        .create_byot(request)
        .await
        .unwrap_or_else(|error| panic!("{model}: {error}"));
    let choice = &answer["choices"][0];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    (
        text(&choice["message"]["content"]),
        text(&choice["finish_reason"]),
        answer["usage"]["completion_tokens"]
            .as_u64()
            .unwrap_or_default(),
    )
}

/// Every prompt to every model, all at once.
async fn all_together(server: &Server, models: &[&Path]) -> Vec<Vec<Answer>> {
    join_all(models.iter().map(|model| {
        let name = model.display().to_string();
        async move { join_all(PROMPTS.iter().map(|prompt| answer(server, &name, prompt))).await }
    }))
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn two_models_in_one_server_of_which_some_draft_each_answer_as_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (small, small_drafter) = tiny::write(&TinyPair::default(), folder.path());
    let (big, big_drafter) = (target(), drafter());
    let models = [big.as_path(), small.as_path()];
    let mut want = Vec::new();
    for model in models {
        let alone = Server::plain(model).await;
        let mut answers = Vec::new();
        for prompt in PROMPTS {
            answers.push(answer(&alone, "default", prompt).await);
        }
        want.push(answers);
    }
    for (of_big, of_small) in [
        (Some(big_drafter.as_path()), None),
        (None, Some(small_drafter.as_path())),
        (Some(big_drafter.as_path()), Some(small_drafter.as_path())),
    ] {
        let toml = config(&[(&big, of_big), (&small, of_small)]);
        let server = Server::from_config(&toml).await;
        let expected = usize::from(of_big.is_some()) + usize::from(of_small.is_some());
        let joined = server.log().matches("DFlash: target").count();
        assert_eq!(joined, expected, "{}", server.log());
        let got = all_together(&server, &models).await;
        assert_eq!(got, want, "{toml}");
    }
}

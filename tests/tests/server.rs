//! The real binary over real HTTP with a real client.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use async_openai::config::OpenAIConfig;
use async_openai::types::chat::{
    ChatCompletionRequestUserMessageArgs, CompletionFinishReason, CreateChatCompletionRequest,
    CreateChatCompletionRequestArgs, FinishReason,
};
use async_openai::types::completions::CreateCompletionRequestArgs;
use async_openai::Client;
use dflash_tests::{drafter, root, target};
use futures_util::StreamExt;

/// A running `mistralrs serve`, ended with the test.
struct Server {
    child: Child,
    port: u16,
    log: tempfile::NamedTempFile,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

fn binary() -> std::path::PathBuf {
    let path = std::env::var_os("DFLASH_TEST_BIN")
        .map_or_else(|| root().join("target/debug/mistralrs"), Into::into);
    assert!(
        path.exists(),
        "{} does not exist: run `cargo build -p mistralrs-dflash`",
        path.display()
    );
    path
}

impl Server {
    async fn start(speculative: &[&str]) -> Self {
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let log = tempfile::NamedTempFile::new().unwrap();
        let child = Command::new(binary())
            .args([
                "serve",
                "--host",
                "127.0.0.1",
                "-p",
                &port.to_string(),
                "--cpu",
                "--dtype",
                "f32",
            ])
            .arg("-m")
            .arg(target())
            .args(speculative)
            .stdout(log.reopen().unwrap())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut server = Self { child, port, log };
        let start = Instant::now();
        while reqwest::get(server.url("health")).await.is_err() {
            assert!(
                server.child.try_wait().unwrap().is_none(),
                "the server ended at start-up"
            );
            assert!(
                start.elapsed() < Duration::from_secs(120),
                "the server does not answer"
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        server
    }

    async fn with_dflash() -> Self {
        let drafter = drafter();
        let drafter = drafter.to_str().unwrap();
        Self::start(&[
            "--speculative",
            "dflash",
            "--speculative-draft-model",
            drafter,
            "--speculative-block-size",
            "16",
        ])
        .await
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.log.path()).unwrap()
    }

    fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}/{path}", self.port)
    }

    fn client(&self) -> Client<OpenAIConfig> {
        let config = OpenAIConfig::new()
            .with_api_base(self.url("v1"))
            .with_api_key("none");
        Client::with_config(config)
    }
}

fn question(text: &str, max_tokens: u32) -> CreateChatCompletionRequest {
    let message = ChatCompletionRequestUserMessageArgs::default()
        .content(text)
        .build()
        .unwrap();
    CreateChatCompletionRequestArgs::default()
        .model("default")
        .messages([message.into()])
        .temperature(0.0)
        .max_completion_tokens(max_tokens)
        .build()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn chat_and_completions_streamed_and_not_are_those_of_a_server_without_dflash() {
    let plain = Server::start(&[]).await;
    let dflash = Server::with_dflash().await;
    assert!(!plain.log().contains("DFlash"), "{}", plain.log());
    for part in [
        "DFlash: target",
        "30 layers",
        "block size 16",
        "19.4 M parameters",
    ] {
        assert!(
            dflash.log().contains(part),
            "`{part}` is not in the log:\n{}",
            dflash.log()
        );
    }
    for text in ["Name three colours of the rainbow.", "What is 12 times 15?"] {
        let want = plain
            .client()
            .chat()
            .create(question(text, 48))
            .await
            .unwrap();
        let got = dflash
            .client()
            .chat()
            .create(question(text, 48))
            .await
            .unwrap();
        assert_eq!(
            got.choices[0].message.content,
            want.choices[0].message.content
        );
        assert_eq!(got.choices[0].finish_reason, want.choices[0].finish_reason);
        let (got_usage, want_usage) = (got.usage.unwrap(), want.usage.unwrap());
        assert_eq!(got_usage.completion_tokens, want_usage.completion_tokens);
        assert_eq!(got_usage.prompt_tokens, want_usage.prompt_tokens);

        let mut request = question(text, 48);
        request.stream = Some(true);
        let mut stream = dflash.client().chat().create_stream(request).await.unwrap();
        let (mut streamed, mut finish) = (String::new(), None);
        while let Some(chunk) = stream.next().await {
            for choice in chunk.unwrap().choices {
                streamed.push_str(&choice.delta.content.unwrap_or_default());
                finish = finish.or(choice.finish_reason);
            }
        }
        // The host trims the start of a whole answer, but not of a streamed one.
        assert_eq!(
            Some(streamed.trim_start()),
            got.choices[0].message.content.as_deref()
        );
        assert_eq!(finish, got.choices[0].finish_reason);
    }
    let request = || {
        CreateCompletionRequestArgs::default()
            .model("default")
            .prompt("The history of computers began")
            .temperature(0.0)
            .max_tokens(40u32)
            .build()
            .unwrap()
    };
    let completion = |client: Client<OpenAIConfig>| async move {
        client.completions().create(request()).await.unwrap()
    };
    let want = completion(plain.client()).await;
    let got = completion(dflash.client()).await;
    assert_eq!(got.choices[0].text, want.choices[0].text);
    assert_eq!(
        got.choices[0].finish_reason,
        Some(CompletionFinishReason::Length)
    );
    assert_eq!(got.usage.unwrap().completion_tokens, 40);
    let client = dflash.client();
    let mut stream = client.completions().create_stream(request()).await.unwrap();
    let mut streamed = String::new();
    while let Some(chunk) = stream.next().await {
        streamed.extend(chunk.unwrap().choices.into_iter().map(|choice| choice.text));
    }
    assert_eq!(streamed.trim_start(), got.choices[0].text);
}

#[tokio::test(flavor = "multi_thread")]
async fn max_tokens_1_to_17_are_met_exactly_and_counted_in_usage() {
    let server = Server::with_dflash().await;
    let client = server.client();
    for limit in 1..=17 {
        let request = question("List the months of the year.", limit);
        let answer = client.chat().create(request).await.unwrap();
        assert_eq!(
            answer.choices[0].finish_reason,
            Some(FinishReason::Length),
            "limit {limit}"
        );
        assert_eq!(
            answer.usage.unwrap().completion_tokens,
            limit,
            "limit {limit}"
        );
    }
}

#[test]
fn help_explains_the_flags_and_a_wrong_method_is_named() {
    for command in ["serve", "run", "from-config"] {
        let help = Command::new(binary())
            .args([command, "--help"])
            .output()
            .unwrap();
        let help = String::from_utf8(help.stdout).unwrap();
        for flag in [
            "--speculative <METHOD>",
            "--speculative-draft-model",
            "--speculative-block-size",
        ] {
            assert!(help.contains(flag), "{command} --help lacks {flag}");
        }
    }
    let wrong = Command::new(binary())
        .args(["serve", "--cpu", "--speculative", "eagle", "-m"])
        .arg(target())
        .output()
        .unwrap();
    assert!(!wrong.status.success());
    let message = String::from_utf8_lossy(&wrong.stderr).into_owned();
    assert!(
        message.contains("eagle") && message.contains("off, dflash"),
        "{message}"
    );
}

//! The real binary over real HTTP with a real client.

use std::process::Command;

use async_openai::config::OpenAIConfig;
use async_openai::types::chat::{
    ChatCompletionRequestUserMessageArgs, CompletionFinishReason, CreateChatCompletionRequest,
    CreateChatCompletionRequestArgs, FinishReason,
};
use async_openai::types::completions::CreateCompletionRequestArgs;
use async_openai::Client;
use dflash_tests::server::{binary, Server};
use dflash_tests::{drafter, target};
use futures_util::StreamExt;

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
    let plain = Server::plain(&target()).await;
    let dflash = Server::dflash(&target(), &drafter(), 16).await;
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
    let mut streamed_request = request();
    streamed_request.stream = Some(true);
    let mut stream = client
        .completions()
        .create_stream(streamed_request)
        .await
        .unwrap();
    let mut streamed = String::new();
    while let Some(chunk) = stream.next().await {
        streamed.extend(chunk.unwrap().choices.into_iter().map(|choice| choice.text));
    }
    assert_eq!(streamed.trim_start(), got.choices[0].text);
}

#[tokio::test(flavor = "multi_thread")]
async fn max_tokens_1_to_17_are_met_exactly_and_counted_in_usage() {
    let server = Server::dflash(&target(), &drafter(), 16).await;
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
    for command in ["serve", "run", "from-config", "bench"] {
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

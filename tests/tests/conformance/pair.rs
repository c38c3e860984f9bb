//! The two servers of a row, and requests to both.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{ensure, Context, Result};
use dflash_tests::server::Server;
use dflash_tests::{full, NEAR_TIE};
use futures_util::StreamExt;
use serde_json::{json, Value};

use crate::answer::{margins, same, strip, text, token_texts};
use crate::Row;

/// An endpoint that generates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Completions,
    Responses,
}

impl Endpoint {
    pub fn path(self) -> &'static str {
        match self {
            Self::Chat => "v1/chat/completions",
            Self::Completions => "v1/completions",
            Self::Responses => "v1/responses",
        }
    }
}

pub struct Pair {
    pub row: &'static Row,
    pub plain: Server,
    pub dflash: Server,
    used_up: AtomicBool,
    near_ties: AtomicUsize,
}

/// Longer than any answer takes on a slow machine.
const PATIENCE: Duration = Duration::from_secs(300);

impl Pair {
    pub async fn start(row: &'static Row) -> Self {
        let target = (row.target)();
        let drafter = (row.drafter)();
        let block_size = row.block_size.to_string();
        let speculative = [
            "--speculative",
            "dflash",
            "--speculative-draft-model",
            drafter.to_str().expect("the repository's path is UTF-8"),
            "--speculative-block-size",
            &block_size,
            // Drafting is what is to be tested, also where it does not pay.
            "--speculative-adaptive",
            "false",
        ];
        let with_dflash = [row.arguments, &speculative].concat();
        let (plain, dflash) = tokio::join!(
            Server::serve(&target, row.arguments),
            Server::serve(&target, &with_dflash),
        );
        assert!(!plain.log().contains("DFlash"), "{}", plain.log());
        assert!(dflash.log().contains("DFlash: target"), "{}", dflash.log());
        Self {
            row,
            plain,
            dflash,
            used_up: AtomicBool::new(false),
            near_ties: AtomicUsize::new(0),
        }
    }

    /// Length of an ordinary answer.
    pub fn tokens(&self) -> usize {
        self.amount(40, 16, 8)
    }

    /// One of three amounts: in the full version, in the short one, and there on a slow row.
    pub fn amount(&self, in_full: usize, in_short: usize, on_slow: usize) -> usize {
        match (full(), self.row.slow) {
            (true, _) => in_full,
            (false, false) => in_short,
            (false, true) => on_slow,
        }
    }

    /// The next case needs new servers: these have not drawn the same random numbers, or are no longer
    /// what they were at the start.
    pub fn use_up(&self) {
        self.used_up.store(true, Ordering::Relaxed);
    }

    pub fn is_used_up(&self) -> bool {
        self.used_up.load(Ordering::Relaxed)
    }

    /// Greedy answers that differed, at a near tie of the target's own logits.
    pub fn near_ties(&self) -> usize {
        self.near_ties.load(Ordering::Relaxed)
    }

    /// Send the request to both servers, compare the whole answers, and return the plain one.
    pub async fn agree(&self, endpoint: Endpoint, request: Value) -> Result<Value> {
        let (want, got) = tokio::join!(
            ask(&self.plain, endpoint, &request),
            ask(&self.dflash, endpoint, &request)
        );
        let (want, got) = (want.context("plain")?, got.context("DFlash")?);
        let result = same("answer", &want, &got, self.row.tolerance);
        if result.is_err()
            && self
                .is_near_tie(endpoint, &request, text(&want), text(&got))
                .await?
        {
            return Ok(want);
        }
        result.with_context(|| format!("{request}"))?;
        Ok(want)
    }

    pub async fn agree_chat(&self, prompt: &str, fields: Value) -> Result<Value> {
        self.agree(Endpoint::Chat, chat(prompt, fields)).await
    }

    /// The same, streamed: all chunks, in order.
    pub async fn agree_streamed(
        &self,
        endpoint: Endpoint,
        mut request: Value,
    ) -> Result<Vec<Value>> {
        request["stream"] = json!(true);
        let (want, got) = tokio::join!(
            stream(&self.plain, endpoint, &request),
            stream(&self.dflash, endpoint, &request)
        );
        let (want, got) = (want.context("plain")?, got.context("DFlash")?);
        let result = same("chunks", &json!(want), &json!(got), self.row.tolerance);
        if result.is_err() {
            let (want, got) = (streamed_text(&want), streamed_text(&got));
            if self.is_near_tie(endpoint, &request, &want, &got).await? {
                return Ok(Vec::new());
            }
        }
        result.with_context(|| format!("{request}"))?;
        Ok(want)
    }

    /// Send anything; statuses and bodies must be equal. Returns them.
    pub async fn agree_raw(&self, path: &str, body: &str) -> Result<(u16, String)> {
        let (want, got) = tokio::join!(
            post(&self.plain, path, body),
            post(&self.dflash, path, body)
        );
        let (want, got) = (want.context("plain")?, got.context("DFlash")?);
        ensure!(
            want.0 == got.0,
            "{path} {body}: plain {want:?}, DFlash {got:?}"
        );
        match (serde_json::from_str(&want.1), serde_json::from_str(&got.1)) {
            (Ok(mut a), Ok(mut b)) => {
                strip(&mut a);
                strip(&mut b);
                same("answer", &a, &b, self.row.tolerance)
                    .with_context(|| format!("{path} {body}"))?;
            }
            _ => ensure!(
                want.1 == got.1,
                "{path} {body}:\nplain  {}\nDFlash {}",
                want.1,
                got.1
            ),
        }
        Ok(want)
    }

    /// Whether two greedy answers part where the two best logits nearly tie. Looks at the plain
    /// server's logits for the same request.
    pub async fn is_near_tie(
        &self,
        endpoint: Endpoint,
        request: &Value,
        want: &str,
        got: &str,
    ) -> Result<bool> {
        if !self.row.near_ties
            || request["temperature"] != json!(0)
            || endpoint == Endpoint::Responses
        {
            return Ok(false);
        }
        let mut request = request.clone();
        request["stream"] = json!(false);
        match endpoint {
            Endpoint::Chat => {
                request["logprobs"] = json!(true);
                request["top_logprobs"] = json!(2);
            }
            _ => request["logprobs"] = json!(2),
        }
        let answer = ask(&self.plain, endpoint, &request).await?;
        let texts = token_texts(&answer);
        // The host trims the start of an answer.
        let trimmed = texts.first().map_or(0, |t| t.len() - t.trim_start().len());
        let common = want
            .bytes()
            .zip(got.bytes())
            .take_while(|(a, b)| a == b)
            .count()
            + trimmed;
        let mut end = 0;
        for (text, margin) in texts.iter().zip(margins(&answer)) {
            end += text.len();
            if end > common {
                let near = margin < f64::from(NEAR_TIE);
                if near {
                    self.near_ties.fetch_add(1, Ordering::Relaxed);
                    println!("{}: near tie at {text:?}, margin {margin:e}", self.row.name);
                }
                return Ok(near);
            }
        }
        Ok(false)
    }
}

/// A chat request of one user turn with further fields; greedy unless they say otherwise.
pub fn chat(prompt: &str, fields: Value) -> Value {
    with(
        json!({"messages": [{"role": "user", "content": prompt}]}),
        fields,
    )
}

/// A completion request.
pub fn completion(prompt: &str, fields: Value) -> Value {
    with(json!({"prompt": prompt}), fields)
}

/// A request of the responses endpoint.
pub fn response(prompt: &str, fields: Value) -> Value {
    with(json!({"input": prompt}), fields)
}

fn with(mut request: Value, fields: Value) -> Value {
    request["model"] = json!("default");
    request["temperature"] = json!(0);
    if let (Value::Object(request), Value::Object(fields)) = (&mut request, fields) {
        request.extend(fields);
    }
    request
}

/// One answer through the client library, stripped of volatile fields.
pub async fn ask(server: &Server, endpoint: Endpoint, request: &Value) -> Result<Value> {
    let client = server.client();
    let answer = async {
        match endpoint {
            Endpoint::Chat => client.chat().create_byot::<_, Value>(request).await,
            Endpoint::Completions => client.completions().create_byot::<_, Value>(request).await,
            Endpoint::Responses => client.responses().create_byot::<_, Value>(request).await,
        }
    };
    let mut answer = tokio::time::timeout(PATIENCE, answer)
        .await
        .with_context(|| format!("no answer to {request}"))?
        .with_context(|| format!("{request}"))?;
    strip(&mut answer);
    Ok(answer)
}

/// All chunks of a streamed answer.
pub async fn stream(server: &Server, endpoint: Endpoint, request: &Value) -> Result<Vec<Value>> {
    let client = server.client();
    let chunks = async {
        let mut stream = match endpoint {
            Endpoint::Chat => {
                client
                    .chat()
                    .create_stream_byot::<_, Value>(request)
                    .await?
            }
            Endpoint::Completions => client.completions().create_stream_byot(request).await?,
            Endpoint::Responses => client.responses().create_stream_byot(request).await?,
        };
        let mut chunks = Vec::new();
        while let Some(chunk) = stream.next().await {
            let mut chunk = chunk?;
            strip(&mut chunk);
            chunks.push(chunk);
        }
        anyhow::Ok(chunks)
    };
    tokio::time::timeout(PATIENCE, chunks)
        .await
        .with_context(|| format!("no end of the answer to {request}"))?
        .with_context(|| format!("{request}"))
}

/// Status and body, whatever they are.
pub async fn post(server: &Server, path: &str, body: &str) -> Result<(u16, String)> {
    let request = server.post(&reqwest::Client::new(), path, body);
    let answer = request.timeout(PATIENCE).send().await?;
    Ok((answer.status().as_u16(), answer.text().await?))
}

/// The concatenated text of streamed chat or completion chunks.
pub fn streamed_text(chunks: &[Value]) -> String {
    chunks
        .iter()
        .flat_map(|chunk| chunk["choices"].as_array().into_iter().flatten())
        .filter_map(|choice| {
            choice["delta"]["content"]
                .as_str()
                .or(choice["text"].as_str())
        })
        .collect()
}

/// Both servers answer, and the one with DFlash answers right.
pub async fn is_healthy(pair: &Pair) -> Result<()> {
    for server in [&pair.plain, &pair.dflash] {
        let status = reqwest::get(server.url("health")).await?.status();
        ensure!(status.is_success(), "health: {status}");
    }
    let fields = json!({"max_tokens": 8});
    let answer = pair
        .agree_chat("What is the capital of France?", fields)
        .await?;
    ensure!(!text(&answer).is_empty(), "{answer}");
    Ok(())
}

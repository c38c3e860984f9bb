//! The real binary as a server, for tests over real HTTP.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use async_openai::config::OpenAIConfig;
use async_openai::Client;

use crate::{drafter, root, target};

/// A running `mistralrs serve`, ended with the test.
pub struct Server {
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

/// The `mistralrs` program.
pub fn binary() -> std::path::PathBuf {
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
    /// Serve the target on the CPU in f32 with these further arguments.
    pub async fn start(arguments: &[&str]) -> Self {
        Self::start_with(&target(), arguments).await
    }

    /// Serve this target on the CPU in f32 with these further arguments.
    pub async fn start_with(target: &Path, arguments: &[&str]) -> Self {
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
            .arg(target)
            .args(arguments)
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

    /// Serve it with the draft model at block size 16.
    pub async fn with_dflash() -> Self {
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

    /// What it has logged so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log.path()).unwrap()
    }

    /// The server's process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// `GET /metrics`.
    pub async fn metrics(&self) -> String {
        let response = reqwest::get(self.url("metrics")).await.unwrap();
        response.text().await.unwrap()
    }

    /// The value of a metric without labels; `None` before it was set.
    pub async fn metric(&self, name: &str) -> Option<f64> {
        let metrics = self.metrics().await;
        let mut lines = metrics.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}/{path}", self.port)
    }

    pub fn client(&self) -> Client<OpenAIConfig> {
        let config = OpenAIConfig::new()
            .with_api_base(self.url("v1"))
            .with_api_key("none");
        Client::with_config(config)
    }
}

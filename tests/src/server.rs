//! The real binary as a server of its own process, ended with the test.

use std::ffi::OsStr;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use async_openai::config::OpenAIConfig;
use async_openai::Client;

use crate::root;

/// The `mistralrs` program with DFlash.
pub fn binary() -> PathBuf {
    let path = std::env::var_os("DFLASH_TEST_BIN")
        .map_or_else(|| root().join("target/debug/mistralrs"), PathBuf::from);
    assert!(
        path.exists(),
        "{} does not exist: run `cargo build --workspace`",
        path.display()
    );
    path
}

/// A running `mistralrs serve` or `mistralrs from-config`.
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

impl Server {
    /// Serve a Hugging Face folder or a GGUF file in f32 on the CPU, with further arguments.
    pub async fn serve(target: &Path, more: &[&str]) -> Self {
        let port = free_port();
        let port_text = port.to_string();
        let mut args: Vec<&OsStr> = ["serve", "--host", "127.0.0.1", "-p", &port_text]
            .map(OsStr::new)
            .into();
        args.extend(["--cpu", "--dtype", "f32", "-m"].map(OsStr::new));
        if target.extension().is_some_and(|e| e == "gguf") {
            args.push(target.parent().expect("a file is in a folder").as_ref());
            args.extend(["--format", "gguf", "-f"].map(OsStr::new));
            args.push(target.file_name().expect("a file has a name"));
        } else {
            args.push(target.as_ref());
        }
        args.extend(more.iter().map(OsStr::new));
        Self::spawn(&args, port).await
    }

    /// Without a draft model.
    pub async fn plain(target: &Path) -> Self {
        Self::serve(target, &[]).await
    }

    /// With a draft model, whole blocks in every step: drafting is what is to be tested, also where
    /// it does not pay.
    pub async fn dflash(target: &Path, drafter: &Path, block_size: usize) -> Self {
        let drafter = drafter.to_str().expect("the repository's path is UTF-8");
        let block_size = block_size.to_string();
        let more = [
            "--speculative",
            "dflash",
            "--speculative-draft-model",
            drafter,
            "--speculative-block-size",
            &block_size,
            "--speculative-adaptive",
            "false",
        ];
        Self::serve(target, &more).await
    }

    /// Serve what a TOML file says; `{port}` in it stands for the port.
    pub async fn from_config(toml: &str) -> Self {
        let port = free_port();
        let file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
        std::fs::write(file.path(), toml.replace("{port}", &port.to_string())).unwrap();
        Self::spawn(
            &[
                OsStr::new("from-config"),
                "--file".as_ref(),
                file.path().as_ref(),
            ],
            port,
        )
        .await
    }

    async fn spawn(args: &[&OsStr], port: u16) -> Self {
        let log = tempfile::NamedTempFile::new().unwrap();
        let child = Command::new(binary())
            .args(args)
            // The host puts backtraces into error messages.
            .envs([("RUST_BACKTRACE", "0"), ("RUST_LIB_BACKTRACE", "0")])
            .stdout(log.reopen().unwrap())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut server = Self { child, port, log };
        let start = Instant::now();
        while reqwest::get(server.url("health")).await.is_err() {
            assert!(
                server.child.try_wait().unwrap().is_none(),
                "the server ended at start-up:\n{}",
                server.log()
            );
            assert!(
                start.elapsed() < Duration::from_secs(300),
                "the server does not answer:\n{}",
                server.log()
            );
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        server
    }

    /// What it wrote to its standard output.
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

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

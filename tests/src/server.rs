//! The real binary as a server of its own process, ended with the test.

use std::ffi::{OsStr, OsString};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use async_openai::config::OpenAIConfig;
use async_openai::Client;

use dflash_bench::engine::Place;

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

/// What the program writes when it ends at start-up, as it does where a pair is refused.
pub fn refusal(args: &[&str]) -> String {
    let output = Command::new(binary())
        .args(args)
        .envs([("RUST_BACKTRACE", "0"), ("RUST_LIB_BACKTRACE", "0")])
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    assert!(!output.status.success(), "it did not fail:\n{text}");
    text
}

/// As [`refusal`], for `serve` on the CPU in f32 with a target's arguments, a draft model and further
/// ones.
pub fn refusal_of_pair(target: &[&str], drafter: &Path, more: &[&str]) -> String {
    let mut args = vec!["serve", "--host", "127.0.0.1", "-p", "0"];
    args.extend(["--cpu", "--dtype", "f32"]);
    args.extend(target);
    args.extend(["--speculative", "dflash", "--speculative-draft-model"]);
    args.push(drafter.to_str().expect("a path in UTF-8"));
    args.extend(more);
    refusal(&args)
}

/// A running `mistralrs serve` or `mistralrs from-config`.
pub struct Server {
    child: Child,
    /// The other ranks of a tensor-parallel target.
    others: Others,
    port: u16,
    log: tempfile::NamedTempFile,
}

#[derive(Default)]
struct Others {
    children: Vec<Child>,
    /// What tells all ranks of each other.
    _rings: Vec<tempfile::NamedTempFile>,
}

impl Drop for Server {
    fn drop(&mut self) {
        for child in std::iter::once(&mut self.child).chain(&mut self.others.children) {
            child.kill().ok();
            child.wait().ok();
        }
    }
}

impl Server {
    /// Serve a Hugging Face folder or a GGUF file with further arguments: in f32 on the CPU with
    /// the normal KV cache, unless the environment says something else ([`Place::from_env`]).
    pub async fn serve(target: &Path, more: &[&str]) -> Self {
        Self::serve_in(target, more, &[]).await
    }

    /// As [`Server::serve`], with an allocator (glibc's) that hands freed memory back at once, so that
    /// the process's resident memory is what it holds and not what it once held.
    pub async fn serve_without_pools(target: &Path, more: &[&str]) -> Self {
        let envs = [
            ("MALLOC_ARENA_MAX", "1"),
            ("MALLOC_MMAP_THRESHOLD_", "131072"),
            ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ];
        Self::serve_in(target, more, &envs).await
    }

    /// As [`Server::serve`], on two ranks that split the target's layers between them, each with further
    /// arguments of its own.
    pub async fn serve_on_two_ranks(target: &Path, first: &[&str], second: &[&str]) -> Self {
        let ports = [free_port(), free_port(), free_port()];
        let ring = |rank: usize, port: u16, right_port: u16| {
            let file = tempfile::NamedTempFile::new().unwrap();
            let config = serde_json::json!({
                "master_ip": "127.0.0.1", "master_port": ports[2], "rank": rank, "world_size": 2,
                "port": port, "right_port": right_port, "right_ip": "127.0.0.1",
            });
            serde_json::to_writer(&file, &config).unwrap();
            file
        };
        let rings = [ring(0, ports[0], ports[1]), ring(1, ports[1], ports[0])];
        let paths = [&rings[0], &rings[1]].map(|ring| ring.path().to_owned());
        let envs = [&paths[0], &paths[1]].map(|ring| [("RING_CONFIG", ring.to_str().unwrap())]);
        let port = free_port();
        let [first, second] = [first, second].map(|more| serve_args(target, more, port));
        let others = Others {
            children: vec![start(&second, &envs[1], Stdio::null())],
            _rings: rings.into(),
        };
        Self::spawn(&first, port, &envs[0], others).await
    }

    /// End the first rank, and wait for the others.
    pub fn end_first_rank(&mut self, patience: Duration) {
        self.child.kill().unwrap();
        let start = Instant::now();
        for other in &mut self.others.children {
            while other.try_wait().unwrap().is_none() {
                assert!(
                    start.elapsed() < patience,
                    "a rank goes on without the first"
                );
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }

    async fn serve_in(target: &Path, more: &[&str], envs: &[(&str, &str)]) -> Self {
        let port = free_port();
        let args = serve_args(target, more, port);
        Self::spawn(&args, port, envs, Others::default()).await
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
            &[],
            Others::default(),
        )
        .await
    }

    async fn spawn(
        args: &[impl AsRef<OsStr>],
        port: u16,
        envs: &[(&str, &str)],
        others: Others,
    ) -> Self {
        let log = tempfile::NamedTempFile::new().unwrap();
        let child = start(args, envs, log.reopen().unwrap().into());
        let mut server = Self {
            child,
            others,
            port,
            log,
        };
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

    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}/{path}", self.port)
    }

    /// A request with this JSON, or what is to be taken for it.
    pub fn post(
        &self,
        http: &reqwest::Client,
        path: &str,
        body: impl ToString,
    ) -> reqwest::RequestBuilder {
        http.post(self.url(path))
            .header("content-type", "application/json")
            .body(body.to_string())
    }

    pub fn client(&self) -> Client<OpenAIConfig> {
        let config = OpenAIConfig::new()
            .with_api_base(self.url("v1"))
            .with_api_key("none");
        Client::with_config(config)
    }
}

/// Arguments of `mistralrs serve`; see [`Server::serve`].
fn serve_args(target: &Path, more: &[&str], port: u16) -> Vec<OsString> {
    let mut args: Vec<OsString> = ["serve", "--host", "127.0.0.1", "-p"]
        .map(OsString::from)
        .into();
    args.push(port.to_string().into());
    let place = Place::from_env();
    if !place.gpu {
        args.push("--cpu".into());
    }
    args.extend(["--dtype", if place.bf16 { "bf16" } else { "f32" }].map(OsString::from));
    let paged = place.paged.map(|tokens| tokens.to_string());
    match &paged {
        _ if more.contains(&"--paged-attn") => (),
        Some(tokens) => {
            args.extend(["--paged-attn", "on", "--pa-context-len", tokens].map(OsString::from))
        }
        None => args.extend(["--paged-attn", "off"].map(OsString::from)),
    }
    args.push("-m".into());
    if target.extension().is_some_and(|e| e == "gguf") {
        args.push(target.parent().expect("a file is in a folder").into());
        args.extend(["--format", "gguf", "-f"].map(OsString::from));
        args.push(target.file_name().expect("a file has a name").into());
    } else {
        args.push(target.into());
    }
    args.extend(more.iter().map(OsString::from));
    args
}

fn start(args: &[impl AsRef<OsStr>], envs: &[(&str, &str)], stdout: Stdio) -> Child {
    Command::new(binary())
        .args(args)
        // The host puts backtraces into error messages.
        .envs([("RUST_BACKTRACE", "0"), ("RUST_LIB_BACKTRACE", "0")])
        .envs(envs.iter().copied())
        .stdout(stdout)
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// The text of `/metrics`.
pub struct Metrics(pub String);

impl Metrics {
    /// Ask the server.
    pub async fn of(server: &Server) -> Self {
        let answer = reqwest::get(server.url("metrics")).await.unwrap();
        assert_eq!(answer.status().as_u16(), 200);
        let kind = answer.headers()["content-type"].to_str().unwrap();
        assert!(kind.starts_with("text/plain"), "{kind}");
        Self(answer.text().await.unwrap())
    }

    /// The value of the series with this name and all these labels, if there is one.
    pub fn find(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let mut series = self.0.lines().filter(|line| {
            line.strip_prefix(name)
                .is_some_and(|rest| rest.starts_with([' ', '{']))
        });
        let line = series.find(|line| {
            labels
                .iter()
                .all(|(key, value)| line.contains(&format!("{key}=\"{value}\"")))
        })?;
        Some(line.rsplit(' ').next().unwrap().parse().unwrap())
    }

    /// The same; 0 if there is none.
    pub fn get(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.find(name, labels).unwrap_or(0.0)
    }

    /// Ask until `holds`: the engine counts a step after it has sent that step's answers.
    pub async fn once(server: &Server, holds: impl Fn(&Self) -> bool) -> Self {
        for _ in 0..50 {
            let metrics = Self::of(server).await;
            if holds(&metrics) {
                return metrics;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("the metrics stay\n{}", Self::of(server).await.0);
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

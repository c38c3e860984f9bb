//! `cargo xtask test`: everything that CI runs, in order, until the first failure.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};

use crate::{bench, cuda, host, model, process, prompts};

struct Context {
    root: PathBuf,
    target_dir: PathBuf,
    full: bool,
}

struct Step {
    name: &'static str,
    run: fn(&Context) -> Result<()>,
}

/// The cheap ones first. clippy and doc come last: both need a second, check-only pass over the whole host, which is
/// worth its minutes only for code whose tests pass.
const STEPS: [Step; 14] = [
    Step {
        name: "xtask fmt",
        run: |c| cargo(c, &["fmt", XTASK, "--check"]),
    },
    Step {
        name: "xtask clippy",
        run: |c| xtask(c, &["clippy", "--all-targets"], &["--", "-D", "warnings"]),
    },
    Step {
        name: "xtask test",
        run: |c| xtask(c, &["test"], &[]),
    },
    Step {
        name: "fmt",
        run: |c| cargo(c, &["fmt", "--check"]),
    },
    Step {
        name: "CUDA kernels",
        run: |c| cuda::check_kernels(&c.root),
    },
    Step {
        name: "host",
        run: |c| host::set_up(&c.root, false),
    },
    Step {
        name: "host --check",
        run: |c| host::check(&c.root),
    },
    Step {
        name: "model",
        run: |c| model::set_up(&c.root, None, false).map(drop),
    },
    Step {
        name: "prompts",
        run: |c| prompts::set_up(&c.root, false).map(drop),
    },
    Step {
        name: "build",
        run: |c| cargo(c, &["build", "--locked", "--workspace", "--all-targets"]),
    },
    Step {
        name: "test",
        run: test,
    },
    Step {
        name: "clippy",
        run: |c| {
            cargo(
                c,
                &[
                    "clippy",
                    "--locked",
                    "--workspace",
                    "--all-targets",
                    "--no-deps",
                    "--",
                    "-D",
                    "warnings",
                ],
            )
        },
    },
    Step {
        name: "core alone",
        run: |c| {
            let core = [
                "check",
                "--locked",
                "-p",
                "dflash-plugin",
                "--no-default-features",
            ];
            cargo(c, &core)
        },
    },
    Step {
        name: "doc",
        run: doc,
    },
];

const XTASK: &str = "--manifest-path=xtask/Cargo.toml";

pub fn run(root: &Path, full: bool) -> Result<()> {
    let context = Context {
        root: root.to_owned(),
        target_dir: process::target_dir(root)?,
        full,
    };
    let mut times = Vec::new();
    for (index, step) in STEPS.iter().enumerate() {
        println!("\n==> [{}/{}] {}", index + 1, STEPS.len(), step.name);
        let start = Instant::now();
        let result = (step.run)(&context);
        let time = start.elapsed();
        println!(
            "<== {}: {} in {}",
            step.name,
            if result.is_ok() { "ok" } else { "FAILED" },
            seconds(time)
        );
        times.push((step.name, time, result.is_ok()));
        if let Err(error) = result {
            println!("{}", table(&times, STEPS.len()));
            return Err(error.context(format!("step `{}`", step.name)));
        }
    }
    println!("{}", table(&times, STEPS.len()));
    Ok(())
}

fn table(times: &[(&str, Duration, bool)], steps: usize) -> String {
    let mut text = String::from("\nstep             time  result\n");
    for (name, time, ok) in times {
        text += &format!(
            "{name:<14} {:>6}  {}\n",
            seconds(*time),
            if *ok { "ok" } else { "FAILED" }
        );
    }
    let total = times.iter().map(|(_, time, _)| *time).sum();
    text += &format!(
        "{:<14} {:>6}  {} of {steps} steps run",
        "total",
        seconds(total),
        times.len()
    );
    text
}

fn seconds(time: Duration) -> String {
    format!("{} s", time.as_secs_f64().round())
}

fn cargo(context: &Context, args: &[&str]) -> Result<()> {
    process::run(process::cargo().args(args).current_dir(&context.root))
}

/// xtask's own checks, where `cargo xtask` itself is built.
fn xtask(context: &Context, args: &[&str], last: &[&str]) -> Result<()> {
    let mut cargo = process::cargo();
    cargo
        .args(args)
        .args([XTASK, "--locked", "--target-dir"])
        .arg(context.target_dir.join("xtask"));
    process::run(cargo.args(last).current_dir(&context.root))
}

fn test(context: &Context) -> Result<()> {
    let mut cargo = process::cargo();
    cargo
        .args(["test", "--locked", "--workspace"])
        .current_dir(&context.root);
    let target = model::set_up(&context.root, None, false)?;
    cargo
        .env("DFLASH_TEST_TARGET", target.hf)
        .env("DFLASH_TEST_GGUF", target.gguf)
        .env("DFLASH_TEST_PROMPTS", prompts::dir(&context.root))
        .env(
            "DFLASH_TEST_BIN",
            bench::program(&context.target_dir, "mistralrs"),
        );
    if context.full {
        cargo.env("DFLASH_TEST_FULL", "1");
    }
    // Counts that a test prints (near ties) are part of its result.
    process::run(cargo.args(["--", "--show-output"]))
}

fn doc(context: &Context) -> Result<()> {
    let flags = std::env::var("RUSTDOCFLAGS").unwrap_or_default();
    let mut cargo = process::cargo();
    cargo
        .args(["doc", "--locked", "--workspace", "--no-deps"])
        .env("RUSTDOCFLAGS", format!("{flags} -D warnings").trim())
        .current_dir(&context.root);
    process::run(&mut cargo).context("rustdoc warnings are errors here")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_ends_with_the_failed_step_and_counts_those_that_ran() {
        let times = [
            ("fmt", Duration::from_secs(2), true),
            ("host", Duration::from_millis(3400), false),
        ];
        let text = table(&times, 12);
        let lines: Vec<_> = text.trim().lines().collect();
        assert_eq!(lines[1], "fmt               2 s  ok");
        assert_eq!(lines[2], "host              3 s  FAILED");
        assert_eq!(lines[3], "total             5 s  2 of 12 steps run");
    }

    #[test]
    fn step_names_are_unique_and_fit_the_table() {
        let mut names: Vec<_> = STEPS.iter().map(|s| s.name).collect();
        assert!(names.iter().all(|n| n.len() <= 14));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), STEPS.len());
    }
}

//! `cargo xtask demo`, `bench` and `load`: set everything up, then become `dflash-bench`.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::{args, host, model, process, prompts};

pub const DRAFT: &str = "models/smollm2-135m-dflash";

/// Host, target and binaries for `demo` and `demo --serve`.
pub fn demo(root: &Path, mut rest: Vec<String>) -> Result<()> {
    set_up_pair(root, &mut rest)?;
    become_bench(root, "demo", &rest)
}

/// Host, target, prompts and binaries for `bench` and `load`.
pub fn measure(root: &Path, command: &str, mut rest: Vec<String>) -> Result<()> {
    set_up_pair(root, &mut rest)?;
    if !args::has(&rest, "--prompts") {
        args::default(&mut rest, "--prompts", &prompts::set_up(root, false)?);
    }
    become_bench(root, command, &rest)
}

/// Fills in target and draft model where none is given; the target is downloaded only then.
fn set_up_pair(root: &Path, rest: &mut Vec<String>) -> Result<()> {
    host::set_up(root, false)?;
    if !args::has(rest, "--target") {
        args::default(rest, "--target", &model::set_up(root, None, false)?.hf);
    }
    args::default(rest, "--draft", &root.join(DRAFT));
    Ok(())
}

fn become_bench(root: &Path, command: &str, rest: &[String]) -> Result<()> {
    let program = build(root, "dflash-bench")?;
    process::exec(process::command(program).arg(command).args(rest))
}

/// Builds the whole workspace, so that dependencies have the same features for every command, and returns one program's path.
pub fn build(root: &Path, program: &str) -> Result<PathBuf> {
    println!("building (the first time: the whole host, some minutes)");
    let mut cargo = process::cargo();
    cargo
        .args(["build", "--locked", "--workspace"])
        .current_dir(root);
    process::run(&mut cargo)?;
    Ok(self::program(&process::target_dir(root)?, program))
}

/// Where a build puts a program.
pub fn program(target_dir: &Path, name: &str) -> PathBuf {
    let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    target_dir.join("debug").join(file)
}

//! `cargo xtask install`: the patched `mistralrs` on the PATH.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::{bench, host};

/// Copies the program of the workspace's own build, so that nothing is built twice, to `TO/bin`; without `to`, to
/// where `cargo install` would put it.
pub fn install(root: &Path, to: Option<&Path>) -> Result<()> {
    host::set_up(root, false)?;
    let program = bench::build(root, "mistralrs")?;
    let bin = match to {
        Some(to) => to.to_path_buf(),
        None => cargo_root()?,
    }
    .join("bin");
    std::fs::create_dir_all(&bin).with_context(|| format!("cannot create {}", bin.display()))?;
    let name = program.file_name().context("the build gave no program")?;
    let installed = bin.join(name);
    // A running program cannot be overwritten, but its name can be given to another file.
    let fresh = bin.join(format!(".mistralrs-{}", std::process::id()));
    std::fs::copy(&program, &fresh)
        .and_then(|_| std::fs::rename(&fresh, &installed))
        .with_context(|| format!("cannot write {}", installed.display()))?;
    println!("installed {}", installed.display());
    let on_path = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|folder| folder == bin));
    if !on_path {
        println!("{} is not on the PATH: add it", bin.display());
    }
    Ok(())
}

/// `CARGO_INSTALL_ROOT`, `CARGO_HOME` or `~/.cargo`.
fn cargo_root() -> Result<PathBuf> {
    for variable in ["CARGO_INSTALL_ROOT", "CARGO_HOME"] {
        if let Some(folder) = std::env::var_os(variable).filter(|value| !value.is_empty()) {
            return Ok(folder.into());
        }
    }
    let home = std::env::home_dir().context("no home folder: give --root DIR")?;
    Ok(home.join(".cargo"))
}

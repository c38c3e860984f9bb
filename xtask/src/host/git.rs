//! git in a host folder, cut off from the user's configuration and from the repository around it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process;

/// The commit that holds the crate as published.
pub const BASE: &str = "refs/tags/published";
/// A fixed committer and date make the same patches give the same commit ids on every machine.
const NAME: &str = "dflash xtask";
const EMAIL: &str = "xtask@localhost";
const DATE: &str = "2026-01-01T00:00:00+00:00";

pub struct Repo {
    dir: PathBuf,
}

impl Repo {
    pub fn at(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
        }
    }

    /// A new repository whose only commit holds all files of the folder.
    pub fn create(dir: &Path, message: &str) -> Result<Self> {
        let repo = Self::at(dir);
        // `--template=` keeps hooks of the machine out.
        repo.run(["init", "--quiet", "--initial-branch=main", "--template="])?;
        repo.run(["add", "--all", "--force", "."])?;
        repo.run(["commit", "--quiet", "--allow-empty", "-m", message])?;
        repo.run(["update-ref", BASE, "HEAD"])?;
        Ok(repo)
    }

    pub fn run<'a>(&self, args: impl IntoIterator<Item = &'a str>) -> Result<String> {
        process::output(self.command().args(args))
    }

    /// Applies one mail-format patch as one commit. On failure the error holds git's own words (file and line).
    pub fn apply(&self, patch: &Path) -> Result<()> {
        let mut am = self.command();
        am.args([
            "am",
            "--quiet",
            "--no-3way",
            "--keep-cr",
            "--keep-non-patch",
        ])
        .args(["--no-scissors", "--committer-date-is-author-date"])
        .arg(patch);
        process::output(&mut am).map(drop)
    }

    /// Commit id of `HEAD`, and one line for each file that differs from it.
    pub fn status(&self) -> Result<(String, Vec<String>)> {
        let text = self.run(["status", "--porcelain=v2", "--branch"])?;
        let head = text
            .lines()
            .find_map(|l| l.strip_prefix("# branch.oid "))
            .with_context(|| format!("git status names no commit in {}", self.dir.display()))?
            .to_owned();
        let changed = text.lines().filter(|l| !l.starts_with('#'));
        Ok((head, changed.map(changed_path).collect()))
    }

    /// Id of the files that a commit holds: equal ids, equal contents.
    pub fn tree(&self, commit: &str) -> Result<String> {
        let id = self.run(["rev-parse", "--verify", &format!("{commit}^{{tree}}")])?;
        Ok(id.trim().to_owned())
    }

    pub fn exists(dir: &Path) -> bool {
        dir.join(".git").is_dir()
    }

    fn command(&self) -> Command {
        let mut git = process::command("git");
        for (name, _) in std::env::vars_os() {
            // A hook of the outer repository would hand down GIT_DIR and GIT_INDEX_FILE.
            if name.to_str().is_some_and(|n| n.starts_with("GIT_")) {
                git.env_remove(name);
            }
        }
        git.env("GIT_CONFIG_NOSYSTEM", "1")
            .env(
                "GIT_CONFIG_GLOBAL",
                if cfg!(windows) { "NUL" } else { "/dev/null" },
            )
            .env("GIT_AUTHOR_NAME", NAME)
            .env("GIT_AUTHOR_EMAIL", EMAIL)
            .env("GIT_AUTHOR_DATE", DATE)
            .env("GIT_COMMITTER_NAME", NAME)
            .env("GIT_COMMITTER_EMAIL", EMAIL)
            .env("GIT_COMMITTER_DATE", DATE)
            .env("LC_ALL", "C")
            .env("TZ", "UTC")
            .current_dir(&self.dir);
        for setting in [
            "commit.gpgsign=false",
            "core.autocrlf=false",
            "core.abbrev=10",
            "core.quotePath=false",
            "gc.auto=0",
            "maintenance.auto=false",
            "apply.whitespace=nowarn",
            "safe.directory=*",
        ] {
            git.args(["-c", setting]);
        }
        // Named outright: a folder without .git must be an error, never the repository around it.
        git.arg("--git-dir").arg(self.dir.join(".git"));
        git.arg("--work-tree").arg(&self.dir);
        git
    }
}

/// Fails with what to install when there is no git.
pub fn require() -> Result<()> {
    process::output(process::command("git").arg("--version"))
        .map(drop)
        .context("the host's patches are applied with git")
}

/// The path in a line of `git status --porcelain=v2`.
fn changed_path(line: &str) -> String {
    let fields_before_path = match line.as_bytes().first() {
        Some(b'1') => 8,
        Some(b'2') => 9,
        Some(b'u') => 10,
        _ => 1,
    };
    line.splitn(fields_before_path + 1, ' ')
        .last()
        .unwrap_or(line)
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use std::fs;

    #[test]
    fn the_same_files_give_the_same_commit_and_changes_are_listed() {
        let scratch = Scratch::system("git").unwrap();
        let mut heads = Vec::new();
        for name in ["one", "two"] {
            let dir = scratch.path().join(name);
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("a b.txt"), "text\r\n").unwrap();
            let repo = Repo::create(&dir, "as published").unwrap();
            let (head, changed) = repo.status().unwrap();
            assert!(changed.is_empty(), "{changed:?}");
            fs::write(dir.join("a b.txt"), "other").unwrap();
            fs::write(dir.join("new.txt"), "new").unwrap();
            assert_eq!(repo.status().unwrap().1, ["a b.txt", "new.txt"]);
            heads.push(head);
        }
        assert_eq!(heads[0], heads[1]);
    }

    #[test]
    fn a_folder_without_its_own_repository_is_an_error() {
        let scratch = Scratch::system("git-none").unwrap();
        assert!(Repo::at(scratch.path()).status().is_err());
        assert!(!Repo::exists(scratch.path()));
    }
}

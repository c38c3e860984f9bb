//! `patches/<crate>/NNNN-*.patch`: which there are, and how they are applied.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};

use super::fetch;
use super::git::Repo;
use super::pins::Pin;
use crate::{hash, process};

/// Part of every hash: raise it when this tool lays out a host folder differently.
const LAYOUT: &str = "host-folder-1";

pub struct Series {
    /// In the order of application.
    pub patches: Vec<PathBuf>,
    /// Hash of the pin and of all patches (names and contents).
    pub inputs: String,
}

/// The folder with one crate's patches.
pub fn dir(root: &Path, pin: &Pin) -> PathBuf {
    root.join("patches").join(&pin.name)
}

pub fn read(dir: &Path, pin: &Pin) -> Result<Series> {
    let patches = list(dir)?;
    let mut all = format!("{LAYOUT}\n{} {} {}\n", pin.name, pin.version, pin.sha256);
    for patch in &patches {
        all += &format!("{} {}\n", file_name(patch), hash::file(patch)?);
    }
    Ok(Series {
        patches,
        inputs: hash::bytes(all.as_bytes()),
    })
}

fn list(dir: &Path) -> Result<Vec<PathBuf>> {
    if !dir.exists() {
        return Ok(Vec::new());
    }
    let failed = || format!("cannot list {}", dir.display());
    let mut patches = Vec::new();
    for entry in fs::read_dir(dir).with_context(failed)? {
        let path = entry.with_context(failed)?.path();
        if path.extension().is_some_and(|e| e == "patch") {
            patches.push(path);
        }
    }
    patches.sort();
    let mut last = "";
    for patch in &patches {
        let name = patch.file_name().and_then(|n| n.to_str()).unwrap_or("");
        let number = name
            .get(..4)
            .filter(|n| n.bytes().all(|b| b.is_ascii_digit()));
        let Some(number) = number.filter(|_| name.get(4..5) == Some("-")) else {
            bail!(
                "{}: expected a name such as 0001-what-it-does.patch",
                patch.display()
            );
        };
        if number == last {
            bail!("{}: number {number} is used twice", patch.display());
        }
        last = number;
    }
    Ok(patches)
}

/// Fails when a folder in `patches/` belongs to no pinned crate: its patches would silently do nothing.
pub fn reject_unpinned(root: &Path, pins: &[Pin]) -> Result<()> {
    let patches = root.join("patches");
    let failed = || format!("cannot list {}", patches.display());
    for entry in fs::read_dir(&patches).with_context(failed)? {
        let path = entry.with_context(failed)?.path();
        let name = file_name(&path);
        if path.is_dir() && !pins.iter().any(|p| p.name == name) {
            bail!(
                "patches/{name}/ has no [[crate]] in {}: add one, or remove the folder",
                super::pins::FILE
            );
        }
    }
    Ok(())
}

/// Makes the patched crate in the empty folder `into`: one base commit, then one commit a patch.
pub fn build(pin: &Pin, series: &Series, into: &Path) -> Result<Repo> {
    fetch::unpack(pin, into)?;
    apply(pin, series, into)
}

/// Turns the unpacked crate in `into` into a repository and applies the series.
fn apply(pin: &Pin, series: &Series, into: &Path) -> Result<Repo> {
    let repo = Repo::create(into, &format!("{} as published", pin.title()))
        .with_context(|| format!("cannot make a git repository of {}", pin.title()))?;
    for (done, patch) in series.patches.iter().enumerate() {
        if let Err(error) = repo.apply(patch) {
            bail!(
                "patches/{}/{} does not apply to {} with {}\n{}\n\
                 host/{} was left as it was. To repair the series: move this patch and those after it out of\n\
                 patches/{}/, run `cargo xtask host`, make the change again in host/{} and commit it there,\n\
                 then run `cargo xtask host --export` (docs/development.md says more).",
                pin.name,
                file_name(patch),
                pin.title(),
                match done {
                    0 => "no patch before it".to_owned(),
                    1 => "the patch before it".to_owned(),
                    n => format!("the {n} patches before it"),
                },
                process::indent(&gits_words(&error.to_string())),
                pin.name,
                pin.name,
                pin.name,
            );
        }
    }
    Ok(repo)
}

/// git's message without the command line before it, the position in a series of one patch, and the advice for people
/// who ran `git am` by hand.
fn gits_words(message: &str) -> String {
    const NOISE: [&str; 5] = [
        "hint:",
        "Patch failed at",
        "When you have resolved",
        "If you prefer to skip",
        "To restore the original",
    ];
    message
        .lines()
        .skip(1)
        .map(str::trim)
        .filter(|line| !NOISE.iter().any(|noise| line.starts_with(noise)))
        .map(|line| match line {
            "Patch format detection failed." => "not a mail-format patch (From, Date and Subject lines, as `git format-patch` writes)",
            line => line,
        })
        .collect::<Vec<_>>()
        .join("\n")
}

/// "1 patch", "2 patches".
pub fn count(patches: &[PathBuf]) -> String {
    match patches.len() {
        1 => "1 patch".to_owned(),
        n => format!("{n} patches"),
    }
}

pub fn file_name(path: &Path) -> String {
    path.file_name()
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn pin() -> Pin {
        Pin {
            name: "a".into(),
            version: "1.0.0".into(),
            sha256: "0".repeat(64),
        }
    }

    #[test]
    fn patches_are_sorted_and_other_files_are_left_alone() {
        let scratch = Scratch::system("series").unwrap();
        for name in ["0002-b.patch", "0001-a.patch", "README.md"] {
            fs::write(scratch.path().join(name), name).unwrap();
        }
        let series = read(scratch.path(), &pin()).unwrap();
        let names: Vec<_> = series.patches.iter().map(|p| file_name(p)).collect();
        assert_eq!(names, ["0001-a.patch", "0002-b.patch"]);
    }

    #[test]
    fn a_name_without_number_and_a_number_used_twice_are_refused() {
        let scratch = Scratch::system("series-names").unwrap();
        let file = scratch.path().join("fix.patch");
        fs::write(&file, "").unwrap();
        assert!(list(scratch.path())
            .unwrap_err()
            .to_string()
            .contains("0001-"));
        fs::remove_file(file).unwrap();
        for name in ["0001-a.patch", "0001-b.patch"] {
            fs::write(scratch.path().join(name), "").unwrap();
        }
        assert!(list(scratch.path())
            .unwrap_err()
            .to_string()
            .contains("twice"));
    }

    #[test]
    fn the_hash_follows_pin_names_and_contents() {
        let scratch = Scratch::system("series-hash").unwrap();
        let hash = |pin: &Pin| read(scratch.path(), pin).unwrap().inputs;
        let empty = hash(&pin());
        fs::write(scratch.path().join("0001-a.patch"), "one").unwrap();
        let one = hash(&pin());
        fs::write(scratch.path().join("0001-a.patch"), "two").unwrap();
        let two = hash(&pin());
        let mut other = pin();
        other.version = "1.0.1".into();
        let hashes = [&empty, &one, &two, &hash(&other)];
        for (i, a) in hashes.iter().enumerate() {
            assert!(hashes[..i].iter().all(|b| b != a));
        }
    }

    const PATCH: &str = "From: A <a@example.org>\nDate: Thu, 1 Jan 2026 00:00:00 +0000\n\
        Subject: [PATCH] say two\n\n---\n\
        diff --git a/lib.rs b/lib.rs\n--- a/lib.rs\n+++ b/lib.rs\n@@ -1 +1 @@\n-one\n+two\n";

    #[test]
    fn each_patch_is_one_commit_and_a_second_run_gives_the_same_one() {
        let scratch = Scratch::system("series-apply").unwrap();
        let patches = scratch.path().join("patches");
        fs::create_dir(&patches).unwrap();
        fs::write(patches.join("0001-say-two.patch"), PATCH).unwrap();
        let series = read(&patches, &pin()).unwrap();
        let mut heads = Vec::new();
        for name in ["first", "second"] {
            let dir = scratch.path().join(name);
            fs::create_dir(&dir).unwrap();
            fs::write(dir.join("lib.rs"), "one\n").unwrap();
            let repo = apply(&pin(), &series, &dir).unwrap();
            assert_eq!(fs::read_to_string(dir.join("lib.rs")).unwrap(), "two\n");
            assert_eq!(
                repo.run(["log", "--format=%s"]).unwrap(),
                "say two\na 1.0.0 as published\n"
            );
            heads.push(repo.status().unwrap());
        }
        assert_eq!(heads[0], heads[1]);
    }

    #[test]
    fn a_patch_that_does_not_apply_is_named_with_file_and_line() {
        let scratch = Scratch::system("series-fail").unwrap();
        let (patches, dir) = (scratch.path().join("patches"), scratch.path().join("a"));
        fs::create_dir(&patches).unwrap();
        fs::create_dir(&dir).unwrap();
        fs::write(patches.join("0001-say-two.patch"), PATCH).unwrap();
        fs::write(dir.join("lib.rs"), "three\n").unwrap();
        let series = read(&patches, &pin()).unwrap();
        let error = apply(&pin(), &series, &dir).err().unwrap().to_string();
        for part in [
            "0001-say-two.patch",
            "a 1.0.0",
            "patch failed: lib.rs:1",
            "--export",
        ] {
            assert!(error.contains(part), "{error}");
        }
        assert!(!error.contains("git am"), "{error}");
    }
}

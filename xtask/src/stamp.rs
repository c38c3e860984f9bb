//! A folder of made files knows what it was made from, and whether anyone has touched it since.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::UNIX_EPOCH;

use anyhow::{bail, Context, Result};
use serde::{Deserialize, Serialize};

use crate::hash;

/// The stamp's name inside the folder. No extension: nothing that lists model files will pick it up.
const NAME: &str = ".xtask-stamp";

#[derive(Serialize, Deserialize)]
struct Stamp {
    /// Hash of everything that the files depend on.
    inputs: String,
    files: BTreeMap<String, FileState>,
}

#[derive(Serialize, Deserialize, PartialEq)]
struct FileState {
    size: u64,
    modified_ns: u64,
    sha256: String,
}

/// Writes the stamp for `files` of `dir`, which must already be there.
pub fn write(dir: &Path, inputs: &str, files: &[&str]) -> Result<()> {
    let mut states = BTreeMap::new();
    for name in files {
        let path = dir.join(name);
        let (size, modified_ns) = size_and_time(&path)?;
        let sha256 = hash::file(&path)?;
        states.insert(
            (*name).to_owned(),
            FileState {
                size,
                modified_ns,
                sha256,
            },
        );
    }
    let stamp = Stamp {
        inputs: inputs.to_owned(),
        files: states,
    };
    fs::write(dir.join(NAME), serde_json::to_string_pretty(&stamp)?)
        .with_context(|| format!("cannot write {}", dir.join(NAME).display()))
}

/// True if `dir` was made from `inputs` and its files have their size and time; `full` compares hashes as well.
pub fn is_current(dir: &Path, inputs: &str, full: bool) -> bool {
    let Ok(text) = fs::read_to_string(dir.join(NAME)) else {
        return false;
    };
    let Ok(stamp) = serde_json::from_str::<Stamp>(&text) else {
        return false;
    };
    stamp.inputs == inputs
        && stamp.files.iter().all(|(name, state)| {
            let path = dir.join(name);
            size_and_time(&path).is_ok_and(|found| found == (state.size, state.modified_ns))
                && (!full || hash::file(&path).is_ok_and(|found| found == state.sha256))
        })
}

/// Puts the finished folder `new` in the place of `dir`. A `dir` that xtask did not make is never replaced.
pub fn replace(dir: &Path, new: &Path) -> Result<()> {
    let failed = || format!("cannot put the new files at {}", dir.display());
    let old = new.with_extension("old");
    if dir.exists() {
        if !dir.join(NAME).is_file() && fs::read_dir(dir).with_context(failed)?.next().is_some() {
            bail!(
                "{} exists, and was not made by xtask: remove it, or choose another folder",
                dir.display()
            );
        }
        fs::rename(dir, &old).with_context(failed)?;
    } else if let Some(parent) = dir.parent() {
        fs::create_dir_all(parent).with_context(failed)?;
    }
    fs::rename(new, dir).with_context(failed)?;
    if old.exists() {
        fs::remove_dir_all(&old).with_context(|| format!("cannot remove {}", old.display()))?;
    }
    Ok(())
}

fn size_and_time(path: &Path) -> Result<(u64, u64)> {
    let failed = || format!("cannot read {}", path.display());
    let meta = fs::metadata(path).with_context(failed)?;
    let modified = meta.modified().with_context(failed)?;
    let ns = modified
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| d.as_nanos());
    Ok((meta.len(), u64::try_from(ns).unwrap_or(u64::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;

    fn made(root: &Path, text: &str) -> std::path::PathBuf {
        let dir = root.join("new");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("a"), text).unwrap();
        write(&dir, "inputs", &["a"]).unwrap();
        dir
    }

    #[test]
    fn a_stamped_folder_is_current_until_inputs_or_files_change() {
        let scratch = Scratch::system("stamp").unwrap();
        let dir = made(scratch.path(), "one");
        assert!(is_current(&dir, "inputs", true));
        assert!(!is_current(&dir, "other inputs", false));
        fs::write(dir.join("a"), "two!").unwrap();
        assert!(!is_current(&dir, "inputs", false));
        fs::remove_file(dir.join("a")).unwrap();
        assert!(!is_current(&dir, "inputs", false));
    }

    #[test]
    fn a_change_that_keeps_size_and_time_is_found_by_the_full_check() {
        let scratch = Scratch::system("stamp-full").unwrap();
        let dir = made(scratch.path(), "one");
        let time = fs::metadata(dir.join("a")).unwrap().modified().unwrap();
        fs::write(dir.join("a"), "two").unwrap();
        let file = fs::File::options().write(true).open(dir.join("a")).unwrap();
        file.set_modified(time).unwrap();
        assert!(is_current(&dir, "inputs", false));
        assert!(!is_current(&dir, "inputs", true));
    }

    #[test]
    fn only_a_stamped_or_empty_folder_is_replaced() {
        let scratch = Scratch::system("stamp-replace").unwrap();
        let place = scratch.path().join("place");
        replace(&place, &made(scratch.path(), "one")).unwrap();
        replace(&place, &made(scratch.path(), "two")).unwrap();
        assert_eq!(fs::read_to_string(place.join("a")).unwrap(), "two");
        fs::remove_file(place.join(NAME)).unwrap();
        let error = replace(&place, &made(scratch.path(), "three")).unwrap_err();
        assert!(error.to_string().contains("not made by xtask"), "{error}");
        assert_eq!(fs::read_to_string(place.join("a")).unwrap(), "two");
    }
}

//! `host/<crate>/`: what state it is in, and how a new one takes its place.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::git::Repo;

/// Lies in the crate's own `.git`, so it comes and goes with the folder that it describes.
const STAMP: &str = ".git/dflash-stamp.json";

#[derive(Serialize, Deserialize)]
pub struct Stamp {
    /// `Series::inputs` of the pin and patches that the folder was made from.
    pub inputs: String,
    /// The commit after the last patch.
    pub head: String,
}

pub enum State {
    Missing,
    /// Something is there that xtask did not make.
    Foreign,
    /// `local`: work that is in the folder and in no patch, in words.
    Made {
        stamp: Stamp,
        local: Option<String>,
    },
}

pub fn state(dir: &Path) -> Result<State> {
    if !dir.exists() {
        return Ok(State::Missing);
    }
    let stamp = fs::read_to_string(dir.join(STAMP))
        .ok()
        .and_then(|t| serde_json::from_str::<Stamp>(&t).ok());
    let Some(stamp) = stamp.filter(|_| Repo::exists(dir)) else {
        return Ok(State::Foreign);
    };
    let local = local_work(dir, &stamp)?;
    Ok(State::Made { stamp, local })
}

fn local_work(dir: &Path, stamp: &Stamp) -> Result<Option<String>> {
    let (head, changed) = Repo::at(dir).status()?;
    let mut parts = Vec::new();
    if head != stamp.head {
        parts.push("other commits than the patches'".to_owned());
    }
    if let Some(first) = changed.first() {
        let more = changed.len() - 1;
        let and = if more > 0 {
            format!(" and {more} more")
        } else {
            String::new()
        };
        parts.push(format!("uncommitted changes ({first}{and})"));
    }
    if ["rebase-apply", "rebase-merge"]
        .iter()
        .any(|d| dir.join(".git").join(d).exists())
    {
        parts.push("an unfinished rebase or am".to_owned());
    }
    Ok((!parts.is_empty()).then(|| parts.join(", ")))
}

pub fn write_stamp(dir: &Path, stamp: &Stamp) -> Result<()> {
    let path = dir.join(STAMP);
    fs::write(&path, serde_json::to_string_pretty(stamp)?)
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Puts `new` in the place of `dir`. Files with the same contents keep their old time, so that cargo rebuilds nothing
/// for them; all others get the present time *after* the move, so that no build that is running now, or ran before,
/// passes for newer than they are.
pub fn replace(dir: &Path, new: &Path) -> Result<()> {
    let mut changed = Vec::new();
    for file in files_cargo_watches(new)? {
        if !keep_time(&dir.join(&file), &new.join(&file))? {
            changed.push(file);
        }
    }
    let failed = || format!("cannot put the new files at {}", dir.display());
    let old = new.with_extension("old");
    if dir.exists() {
        fs::rename(dir, &old).with_context(failed)?;
    }
    fs::rename(new, dir).with_context(failed)?;
    let now = SystemTime::now();
    for file in changed {
        set_time(&dir.join(file), now)?;
    }
    if old.exists() {
        fs::remove_dir_all(&old).with_context(|| format!("cannot remove {}", old.display()))?;
    }
    // The index remembers the times from before: without this the next status reads every file.
    Repo::at(dir).status().map(drop)
}

/// True if `old` and `new` hold the same; `new` then has `old`'s time.
fn keep_time(old: &Path, new: &Path) -> Result<bool> {
    let (Ok(before), Ok(meta)) = (fs::read(old), fs::metadata(old)) else {
        return Ok(false);
    };
    if before != fs::read(new).with_context(|| format!("cannot read {}", new.display()))? {
        return Ok(false);
    }
    set_time(new, meta.modified()?)?;
    Ok(true)
}

fn set_time(path: &Path, time: SystemTime) -> Result<()> {
    let failed = || format!("cannot set the time of {}", path.display());
    let file = fs::File::options()
        .write(true)
        .open(path)
        .with_context(failed)?;
    file.set_modified(time).with_context(failed)
}

/// Paths relative to `dir`: all files outside `.git`, and the two in it that mistralrs-core's build script watches
/// for its "git revision" (with a new time they would rebuild the whole crate).
fn files_cargo_watches(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = [".git/HEAD", ".git/refs/heads/main"]
        .map(PathBuf::from)
        .into();
    files.retain(|f| dir.join(f).is_file());
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let failed = || format!("cannot list {}", dir.join(&folder).display());
        for entry in fs::read_dir(dir.join(&folder)).with_context(failed)? {
            let entry = entry.with_context(failed)?;
            let path = folder.join(entry.file_name());
            if entry.file_type().with_context(failed)?.is_dir() {
                if path != Path::new(".git") {
                    folders.push(path);
                }
            } else {
                files.push(path);
            }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scratch::Scratch;
    use std::time::Duration;

    fn repo(dir: &Path, a: &str, b: &str) -> Repo {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join("a"), a).unwrap();
        fs::write(dir.join("b"), b).unwrap();
        Repo::create(dir, "base").unwrap()
    }

    fn time(path: &Path) -> SystemTime {
        fs::metadata(path).unwrap().modified().unwrap()
    }

    #[test]
    fn unchanged_files_keep_their_time_and_changed_ones_get_a_new_one() {
        let scratch = Scratch::system("folder").unwrap();
        let (place, new) = (scratch.path().join("place"), scratch.path().join("new"));
        repo(&place, "same", "old");
        let past = SystemTime::now() - Duration::from_secs(1000);
        for file in ["a", "b", ".git/HEAD"] {
            set_time(&place.join(file), past).unwrap();
        }
        repo(&new, "same", "new");
        replace(&place, &new).unwrap();
        assert_eq!(time(&place.join("a")), past);
        assert_eq!(time(&place.join(".git/HEAD")), past);
        assert!(time(&place.join("b")) > past + Duration::from_secs(900));
        assert_eq!(fs::read_to_string(place.join("b")).unwrap(), "new");
        assert!(!new.exists() && !scratch.path().join("new.old").exists());
    }

    #[test]
    fn edits_and_commits_count_as_local_work() {
        let scratch = Scratch::system("folder-local").unwrap();
        let dir = scratch.path().join("crate");
        assert!(matches!(state(&dir).unwrap(), State::Missing));
        let repo = repo(&dir, "a", "b");
        assert!(matches!(state(&dir).unwrap(), State::Foreign));

        let (head, _) = repo.status().unwrap();
        write_stamp(
            &dir,
            &Stamp {
                inputs: "i".into(),
                head,
            },
        )
        .unwrap();
        let local = |dir: &Path| match state(dir).unwrap() {
            State::Made { local, .. } => local,
            _ => panic!("expected a made folder"),
        };
        assert_eq!(local(&dir), None);
        fs::write(dir.join("a"), "edited").unwrap();
        assert!(local(&dir).unwrap().contains("uncommitted changes (a)"));
        repo.run(["commit", "--quiet", "-am", "edit"]).unwrap();
        assert!(local(&dir).unwrap().contains("other commits"));
    }
}

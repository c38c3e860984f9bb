//! Temporary folders that go away whatever happens.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Starts the name of every temporary folder inside the repository.
const PREFIX: &str = ".tmp-";

pub struct Scratch(PathBuf);

impl Scratch {
    /// `parent/.tmp-NAME-PID`, on the same file system as `parent`, so that results can be renamed into place.
    pub fn inside(parent: &Path, name: &str) -> Result<Self> {
        Self::at(parent.join(format!("{PREFIX}{name}-{}", std::process::id())))
    }

    /// A folder under the system's temporary folder, for tests.
    #[cfg(test)]
    pub fn system(name: &str) -> Result<Self> {
        Self::at(std::env::temp_dir().join(format!("xtask-{name}-{}", std::process::id())))
    }

    fn at(path: PathBuf) -> Result<Self> {
        if path.exists() {
            fs::remove_dir_all(&path)
                .with_context(|| format!("cannot remove {}", path.display()))?;
        }
        fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Removes what an interrupted run left in `parent`. Only for a caller that holds `parent`'s lock.
pub fn remove_leftovers(parent: &Path) -> Result<()> {
    let Ok(entries) = fs::read_dir(parent) else {
        return Ok(());
    };
    for entry in entries {
        let path = entry
            .with_context(|| format!("cannot list {}", parent.display()))?
            .path();
        let name = path
            .file_name()
            .map(|n| n.to_string_lossy().into_owned())
            .unwrap_or_default();
        if name.starts_with(PREFIX) {
            fs::remove_dir_all(&path)
                .with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

/// Held while a command changes `dir`; a second xtask waits.
pub struct Lock(#[allow(dead_code)] fs::File);

impl Lock {
    pub fn take(dir: &Path) -> Result<Self> {
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let path = dir.join(".lock");
        let failed = || format!("cannot lock {}", path.display());
        let file = fs::File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .with_context(failed)?;
        if file.try_lock().is_err() {
            eprintln!("waiting for another xtask to finish ({})", path.display());
            file.lock().with_context(failed)?;
        }
        Ok(Self(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scratch_folder_is_gone_after_use_and_leftovers_are_removed() {
        let outer = Scratch::system("scratch").unwrap();
        let inner = Scratch::inside(outer.path(), "x").unwrap();
        let path = inner.path().to_owned();
        assert!(path.is_dir());
        drop(inner);
        assert!(!path.exists());

        fs::create_dir(outer.path().join(".tmp-dead-1")).unwrap();
        fs::create_dir(outer.path().join("kept")).unwrap();
        remove_leftovers(outer.path()).unwrap();
        assert!(!outer.path().join(".tmp-dead-1").exists());
        assert!(outer.path().join("kept").exists());
    }
}

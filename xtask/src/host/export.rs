//! `cargo xtask host --export`: commits in `host/<crate>` become `patches/<crate>/`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};

use super::folder::{self, Stamp, State};
use super::git::{Repo, BASE};
use super::pins::Pin;
use super::series;
use crate::scratch::Scratch;

/// Returns a line that says what was done.
pub fn export(root: &Path, pin: &Pin, force: bool) -> Result<String> {
    let dir = super::dir(root, pin);
    let stamp = match folder::state(&dir)? {
        State::Made { stamp, .. } => stamp,
        _ => bail!(
            "host/{} was not made by xtask: run `cargo xtask host` first",
            pin.name
        ),
    };
    let patches = series::dir(root, pin);
    if stamp.inputs != series::read(&patches, pin)?.inputs && !force {
        bail!(
            "patches/{0}/ has changed since host/{0} was made from it; exporting would overwrite that change.\n\
             `cargo xtask host --export --force` does so; `cargo xtask host` takes the new patches instead.",
            pin.name
        );
    }
    let repo = Repo::at(&dir);
    let (head, changed) = repo.status()?;
    if !changed.is_empty() {
        bail!(
            "host/{} has uncommitted changes ({}): commit them there (one concern a commit), then export",
            pin.name,
            changed.join(", ")
        );
    }

    let scratch = Scratch::inside(&root.join("host"), &format!("export-{}", pin.name))?;
    let new = scratch.path().join("patches");
    format_patches(&repo, &new).with_context(|| format!("cannot export host/{}", pin.name))?;
    let exported = series::read(&new, pin)?;
    let again = scratch.path().join("crate");
    fs::create_dir(&again)?;
    let rebuilt =
        series::build(pin, &exported, &again).context("the exported patches do not apply again")?;
    if rebuilt.tree("HEAD")? != repo.tree("HEAD")? {
        bail!(
            "the commits in host/{} are not a plain series (a merge?): the patches made from them give other files.\n\
             Rebase them onto `published`, then export.",
            pin.name
        );
    }
    let written = sync(&new, &patches)?;
    folder::write_stamp(
        &dir,
        &Stamp {
            inputs: exported.inputs,
            head,
        },
    )?;
    Ok(format!(
        "patches/{}: {}, {written}",
        pin.name,
        series::count(&exported.patches)
    ))
}

fn format_patches(repo: &Repo, into: &Path) -> Result<()> {
    fs::create_dir(into).with_context(|| format!("cannot create {}", into.display()))?;
    let into = into.to_string_lossy();
    repo.run([
        "format-patch",
        "--quiet",
        "--zero-commit",
        "--no-signature",
        "--no-numbered",
        "--no-thread",
        "--no-ext-diff",
        "--diff-algorithm=histogram",
        // Without diffstat.
        "-p",
        "-U3",
        "--output-directory",
        into.as_ref(),
        &format!("{BASE}..HEAD"),
    ])
    .map(drop)
}

/// Makes the `.patch` files of `to` equal those of `from`; writes only what differs.
fn sync(from: &Path, to: &Path) -> Result<String> {
    let new = patch_files(from)?;
    let (mut written, mut removed) = (0, 0);
    for old in patch_files(to)? {
        if !from.join(series::file_name(&old)).exists() {
            fs::remove_file(&old).with_context(|| format!("cannot remove {}", old.display()))?;
            removed += 1;
        }
    }
    if !new.is_empty() {
        fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
    }
    for file in new {
        let place = to.join(series::file_name(&file));
        let text = fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        if fs::read(&place).ok().as_ref() != Some(&text) {
            fs::write(&place, text).with_context(|| format!("cannot write {}", place.display()))?;
            written += 1;
        }
    }
    // Only succeeds on an empty folder, which is what should go.
    let _ = fs::remove_dir(to);
    Ok(format!("{written} written, {removed} removed"))
}

fn patch_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let Ok(entries) = fs::read_dir(dir) else {
        return Ok(Vec::new());
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry
            .with_context(|| format!("cannot list {}", dir.display()))?
            .path();
        if path.extension().is_some_and(|e| e == "patch") {
            files.push(path);
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exporting_writes_what_differs_and_removes_what_is_gone() {
        let scratch = Scratch::system("export").unwrap();
        let (from, to) = (scratch.path().join("from"), scratch.path().join("to"));
        fs::create_dir(&from).unwrap();
        for (name, text) in [("0001-a.patch", "a"), ("0002-b.patch", "b")] {
            fs::write(from.join(name), text).unwrap();
        }
        assert_eq!(sync(&from, &to).unwrap(), "2 written, 0 removed");
        assert_eq!(sync(&from, &to).unwrap(), "0 written, 0 removed");
        fs::rename(from.join("0002-b.patch"), from.join("0002-c.patch")).unwrap();
        assert_eq!(sync(&from, &to).unwrap(), "1 written, 1 removed");
        fs::remove_dir_all(&from).unwrap();
        fs::create_dir(&from).unwrap();
        assert_eq!(sync(&from, &to).unwrap(), "0 written, 2 removed");
        assert!(!to.exists());
    }
}

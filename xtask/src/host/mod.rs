//! `cargo xtask host`: the published host crates, checked, patched and laid out in the git-ignored `host/`.
//!
//! `pins` says which crates, `fetch` gets one, `series` applies its patches in a temporary folder, and `folder` puts
//! the result in place. `export` is the way back, from commits in `host/<crate>` to `patches/<crate>/`.

mod export;
mod fetch;
mod folder;
mod git;
mod pins;
mod series;

pub use pins::FILE as PINS;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};

use crate::scratch::{self, Lock, Scratch};
use folder::{Stamp, State};
use pins::Pin;

fn dir(root: &Path, pin: &Pin) -> PathBuf {
    root.join("host").join(&pin.name)
}

/// What every host command needs before it starts.
fn prepare(root: &Path) -> Result<(Lock, Vec<Pin>)> {
    git::require()?;
    let pins = pins::read(root)?;
    series::reject_unpinned(root, &pins)?;
    let host = root.join("host");
    let lock = Lock::take(&host)?;
    scratch::remove_leftovers(&host)?;
    Ok((lock, pins))
}

/// Makes every host folder that is missing or older than its patches.
pub fn set_up(root: &Path, force: bool) -> Result<()> {
    let (_lock, pins) = prepare(root)?;
    let mut made = 0;
    for pin in &pins {
        made += usize::from(set_up_one(root, pin, force)?);
    }
    if made == 0 {
        println!("host: up to date");
    }
    Ok(())
}

fn set_up_one(root: &Path, pin: &Pin, force: bool) -> Result<bool> {
    let dir = dir(root, pin);
    let series = series::read(&series::dir(root, pin), pin)?;
    let state = folder::state(&dir)?;
    if let State::Made { stamp, local } = &state {
        if !force && stamp.inputs == series.inputs {
            if let Some(local) = local {
                println!("host: host/{} has {local}, not in patches/", pin.name);
            }
            return Ok(false);
        }
    }
    let scratch = Scratch::inside(&root.join("host"), &pin.name)?;
    let new = scratch.path().join("crate");
    fs::create_dir(&new).with_context(|| format!("cannot create {}", new.display()))?;
    let repo = series::build(pin, &series, &new)?;
    if !force {
        refuse_to_lose_work(&dir, pin, &state, &repo)?;
    }
    let (head, _) = repo.status()?;
    folder::write_stamp(
        &new,
        &Stamp {
            inputs: series.inputs,
            head,
        },
    )?;
    folder::replace(&dir, &new)?;
    println!(
        "host: {} with {}",
        pin.title(),
        series::count(&series.patches)
    );
    Ok(true)
}

/// Local work may be replaced only if the new folder holds the same files.
fn refuse_to_lose_work(dir: &Path, pin: &Pin, state: &State, new: &git::Repo) -> Result<()> {
    let name = &pin.name;
    match state {
        State::Missing | State::Made { local: None, .. } => Ok(()),
        State::Foreign => bail!(
            "host/{name} exists, and was not made by xtask: move it away, or replace it with `cargo xtask host --force`"
        ),
        State::Made { local: Some(local), .. } => {
            let old = git::Repo::at(dir);
            if old.status()?.1.is_empty() && old.tree("HEAD")? == new.tree("HEAD")? {
                return Ok(());
            }
            bail!(
                "patches/{name}/ has changed, but host/{name} has {local}, which would be lost.\n\
                 To keep that work: commit it there, run `cargo xtask host --export --force`, and merge patches/ with \
                 your version control.\nTo discard it: `cargo xtask host --force`."
            )
        }
    }
}

pub fn export(root: &Path, force: bool) -> Result<()> {
    let (_lock, pins) = prepare(root)?;
    for pin in &pins {
        println!("{}", export::export(root, pin, force)?);
    }
    Ok(())
}

/// Applies every series from scratch, and compares the result with what lies in `host/`.
pub fn check(root: &Path) -> Result<()> {
    let (_lock, pins) = prepare(root)?;
    for pin in &pins {
        let series = series::read(&series::dir(root, pin), pin)?;
        let scratch = Scratch::inside(&root.join("host"), &format!("check-{}", pin.name))?;
        let fresh = series::build(pin, &series, scratch.path())?;
        compare(root, pin, &fresh)?;
        for patch in &series.patches {
            println!("  {} applies", series::file_name(patch));
        }
        println!("check: {}: {}", pin.title(), series::count(&series.patches));
    }
    Ok(())
}

/// A build uses `host/`: what it proves must hold for the patches.
fn compare(root: &Path, pin: &Pin, fresh: &git::Repo) -> Result<()> {
    let dir = dir(root, pin);
    let same = match folder::state(&dir)? {
        State::Missing => true,
        State::Foreign => false,
        State::Made { .. } => {
            let repo = git::Repo::at(&dir);
            repo.status()?.1.is_empty() && repo.tree("HEAD")? == fresh.tree("HEAD")?
        }
    };
    if !same {
        bail!(
            "the patches apply, but host/{0} is not what they give: run `cargo xtask host`, or `--export` to make \
             patches of what is committed there",
            pin.name
        );
    }
    Ok(())
}

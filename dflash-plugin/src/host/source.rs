//! Where a draft model comes from: a local folder or the Hugging Face hub.

use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};
use hf_hub::{api::sync::ApiBuilder, Repo, RepoType};
use mistralrs_core::{hf_hub_cache_dir, plugin::get_token, TokenSource, GLOBAL_HF_CACHE};

use crate::checkpoint::{CONFIG_FILE, INDEX_FILE, MASK_EMBEDDING_FILE, WEIGHTS_FILE};

/// The local folder of the draft model `name`, downloaded first if it is a hub id.
///
/// # Errors
/// If `name` looks like a path but is no folder, or the hub does not have its files.
pub fn resolve(name: &str, token_source: &TokenSource, silent: bool) -> Result<PathBuf> {
    let path = Path::new(name);
    if path.is_dir() {
        return Ok(path.to_path_buf());
    }
    let is_hub_id = name.split('/').count() == 2 && !name.starts_with(['.', '/', '~']);
    if path.exists() || !is_hub_id {
        bail!(
            "draft model `{name}`: not a folder. Give a folder with {CONFIG_FILE} and \
             {WEIGHTS_FILE}, or a hub id such as `z-lab/Qwen3-8B-DFlash-b16`"
        );
    }
    download(name, token_source, silent).with_context(|| {
        format!("draft model `{name}`: no such folder here, and the hub download failed")
    })
}

fn download(id: &str, token_source: &TokenSource, silent: bool) -> Result<PathBuf> {
    let cache = GLOBAL_HF_CACHE.get().cloned().unwrap_or_default();
    let mut api = ApiBuilder::from_cache(cache)
        .with_progress(!silent)
        .with_token(get_token(token_source)?);
    if let Some(dir) = hf_hub_cache_dir() {
        api = api.with_cache_dir(dir);
    }
    let repo = api.build()?.repo(Repo::with_revision(
        id.into(),
        RepoType::Model,
        "main".into(),
    ));
    let config = repo.get(CONFIG_FILE)?;
    let files: Vec<String> = repo
        .info()?
        .siblings
        .into_iter()
        .map(|f| f.rfilename)
        .collect();
    if files.iter().any(|f| f == MASK_EMBEDDING_FILE) {
        repo.get(MASK_EMBEDDING_FILE)?; // The checkpoint check refuses it with a reason.
    }
    if files.iter().any(|f| f == INDEX_FILE) {
        repo.get(INDEX_FILE)?;
        for shard in files.iter().filter(|f| f.ends_with(".safetensors")) {
            repo.get(shard)?;
        }
    } else {
        repo.get(WEIGHTS_FILE)?;
    }
    match config.parent() {
        Some(folder) => Ok(folder.to_path_buf()),
        None => bail!("the hub cache gave {} without a folder", config.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_is_no_folder_is_named_and_not_looked_up_on_the_hub() {
        for name in ["./missing", "/missing/drafter", "missing", "a/b/c"] {
            let error = resolve(name, &TokenSource::None, true)
                .unwrap_err()
                .to_string();
            assert!(
                error.contains(name) && error.contains("not a folder"),
                "{error}"
            );
        }
    }
}

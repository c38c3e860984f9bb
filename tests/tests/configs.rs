//! Every file in `configs/` is a valid configuration that turns DFlash on.

use dflash_tests::root;
use mistralrs_cli::config::{load_cli_config, CliConfig};

fn toml_files() -> Vec<std::path::PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(root().join("configs"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "toml"))
        .collect();
    files.sort();
    files
}

#[test]
fn every_ready_configuration_parses_and_names_a_draft_model() {
    let files = toml_files();
    assert!(files.len() >= 5, "{files:?}");
    for file in files {
        let CliConfig::Serve(config) = load_cli_config(&file).unwrap() else {
            panic!("{} does not serve", file.display());
        };
        for model in config.models {
            let speculative = model.speculative.unwrap();
            assert_eq!(speculative.method, "dflash", "{}", file.display());
            assert!(speculative.draft_model.is_some(), "{}", file.display());
        }
    }
}

#[test]
fn an_unknown_key_in_the_speculative_table_is_an_error_that_names_it() {
    let file = root().join("configs/smollm2-135m.toml");
    let text = std::fs::read_to_string(file).unwrap();
    let wrong = text.replace("block_size", "blok_size");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("wrong.toml");
    std::fs::write(&path, wrong).unwrap();
    let Err(error) = load_cli_config(&path) else {
        panic!("a wrong key was accepted");
    };
    assert!(format!("{error:#}").contains("blok_size"), "{error:#}");
}

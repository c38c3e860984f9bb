//! The tables in `docs/models.md` are those that the loader goes by.

use dflash_plugin::host::targets;
use dflash_tests::root;

#[test]
fn the_support_tables_are_up_to_date() {
    let path = root().join("docs/models.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once("<!-- targets -->\n").unwrap();
    let (found, after) = rest.split_once("<!-- /targets -->").unwrap();
    let wanted = format!("\n{}\n", targets::markdown());
    if std::env::var_os("DFLASH_UPDATE_DOCS").is_some_and(|value| value == "1") {
        let text = format!("{before}<!-- targets -->\n{wanted}<!-- /targets -->{after}");
        std::fs::write(&path, text).unwrap();
        return;
    }
    assert!(
        found == wanted,
        "docs/models.md is not what the loader goes by; \
         DFLASH_UPDATE_DOCS=1 cargo test --workspace --test models_doc writes it anew"
    );
}

//! The table `[models.speculative]` of a TOML configuration: whatever it contains, it is read or
//! refused with an error that says where, and never with a panic (docs/reliability.md).

#[allow(dead_code)] // a part is used here, the rest by the fuzz targets of the plugin
#[path = "../../dflash-plugin/tests/common/allocation.rs"]
mod allocation;
#[allow(dead_code)]
#[path = "../../dflash-plugin/tests/common/fuzz.rs"]
mod fuzz;
#[allow(dead_code)]
#[path = "../../dflash-plugin/tests/fuzzing/json.rs"]
mod json;
#[allow(dead_code)]
#[path = "../../dflash-plugin/tests/common/property.rs"]
mod property;

use dflash_tests::root;
use fuzz::{fuzz, scratch, Corpus, Outcome};
use mistralrs_cli::config::{load_cli_config, CliConfig};
use proptest::prelude::*;
use proptest::sample::select;

/// Everything before the table.
const HEAD: &str = r#"command = "serve"

[[models]]
kind = "text"
model_id = "TARGET"
device = { cpu = true }
"#;

/// How the table, or what stands in its place, can begin.
const OPENINGS: &[&str] = &[
    "[models.speculative]\n",
    "[[models.speculative]]\n",
    "[models.speculative.speculative]\n",
    "[models.speculativ]\n",
    "[speculative]\n",
    "[\"models\".'speculative']\n",
    "[models.speculative]\n[models.speculative]\n",
    "speculative = 1\n[models.speculative]\n",
    "speculative = \"dflash\"\n",
    "speculative = []\n",
    "speculative = { method = \"dflash\" }\n",
    "speculative.method = \"dflash\"\n",
    "[models.speculative\n",
    "",
];

const KEYS: &[&str] = &[
    "method",
    "draft_model",
    "block_size",
    "draft_quant",
    "draft_window",
    "blok_size",
    "draft-model",
    "\"method\"",
    "'block_size'",
    "method.name",
    "\"\"",
    "\"a\\nb\\u001b[31m\"",
    "ключ",
];

const VALUES: &[&str] = &[
    "\"dflash\"",
    "\"off\"",
    "\"q8_0\"",
    "\"\"",
    "'models/smollm2-135m-dflash'",
    "\"\"\"two\nlines\"\"\"",
    "\"\\u0000\\u001b[31m\"",
    "\"\u{202e}\u{1f980}\"",
    "8",
    "0",
    "1",
    "-1",
    "1_0",
    "0x10",
    "1e3",
    "8.0",
    "nan",
    "-inf",
    "9223372036854775807",
    "9223372036854775808",
    "99999999999999999999999999",
    "true",
    "[]",
    "[8]",
    "{}",
    "{ a = 1 }",
    "1979-05-27T07:32:00Z",
    "",
];

fn table() -> impl Strategy<Value = Vec<u8>> {
    let nested = (1usize..400).prop_map(|depth| "[".repeat(depth) + &"]".repeat(depth));
    let long = (1usize..5_000).prop_map(|len| format!("\"{}\"", "x".repeat(len)));
    let value = prop_oneof![
        20 => select(VALUES).prop_map(str::to_string),
        1 => any::<i64>().prop_map(|number| number.to_string()),
        1 => nested,
        1 => long,
    ];
    let line = (select(KEYS), value).prop_map(|(key, value)| format!("{key} = {value}\n"));
    let opening = prop_oneof![3 => Just(OPENINGS[0]), 1 => select(OPENINGS)];
    let lines = prop::collection::vec(line, 0..5);
    (opening, lines, json::text_edits()).prop_map(|(opening, lines, edits)| {
        let mut text = format!("{opening}{}", lines.concat()).into_bytes();
        json::apply_to_text(&mut text, &edits);
        text
    })
}

#[test]
fn any_speculative_table_is_read_or_refused_with_its_place() {
    let folder = scratch();
    let file = folder.path().join("config.toml");
    let corpus = Corpus {
        folder: root().join("dflash-plugin/tests/fuzz-corpus/toml"),
        extension: "toml",
    };
    // An input is the table; what stands before it is always right.
    fuzz("toml", &corpus, table(), |input| {
        std::fs::write(&file, [HEAD.as_bytes(), input].concat()).unwrap();
        match load_cli_config(&file) {
            Ok(config) => read(config),
            Err(error) => refused(&format!("{error:#}")),
        }
    });
}

fn read(config: CliConfig) -> Result<Outcome, String> {
    let CliConfig::Serve(config) = config else {
        return Ok("another command".into());
    };
    let Some(model) = config.models.first() else {
        return Err("accepted without a model".into());
    };
    Ok(match &model.speculative {
        None => "read, no table".into(),
        Some(table) => format!(
            "read, draft model {}, block size {}",
            table.draft_model.is_some(),
            table.block_size.is_some()
        ),
    })
}

/// The host reads its files with `toml`, whose errors show the line or quote the key; but its
/// outermost type is a tagged enum, behind which the place of a value of the wrong type is lost, so
/// the table's type names the key itself.
fn refused(message: &str) -> Result<Outcome, String> {
    if message.contains("config.toml") || message.contains("[[models]]") {
        return Ok("file or models".into());
    }
    if !message.contains("TOML") {
        return Err(format!("an error that does not say where: {message:?}"));
    }
    let is_of_wrong_type = ["type", "value", "length"]
        .iter()
        .any(|what| message.contains(&format!("invalid {what}")));
    let names_key = ["speculative `", "SpeculativeOptions", "|"]
        .iter()
        .any(|place| message.contains(place));
    if is_of_wrong_type && !names_key {
        return Err(format!("an error that names no key: {message:?}"));
    }
    if !is_of_wrong_type && !message.contains(['`', '|']) {
        return Err(format!("an error that quotes nothing: {message:?}"));
    }
    // The last line is the reason; above it is the quoted text.
    let reason = message.lines().last().unwrap_or_default();
    let letters = reason
        .chars()
        .filter(|c| c.is_ascii_alphabetic() || *c == ' ');
    Ok(letters.take(60).collect())
}

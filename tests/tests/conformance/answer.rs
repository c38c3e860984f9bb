//! Answers as JSON, without what differs from run to run.

use anyhow::{bail, ensure, Result};
use serde_json::Value;

/// Ids, times and speeds.
const VOLATILE: [&str; 13] = [
    "id",
    "call_id",
    "item_id",
    "created",
    "created_at",
    "completed_at",
    "avg_tok_per_sec",
    "avg_prompt_tok_per_sec",
    "avg_compl_tok_per_sec",
    "total_time_sec",
    "total_prompt_time_sec",
    "total_completion_time_sec",
    "previous_response_id",
];

/// What only a request that drafted reports; `reporting.rs` tests the numbers.
const DRAFTED: [&str; 2] = ["accepted_prediction_tokens", "rejected_prediction_tokens"];

/// Take out everything volatile, and the counts of drafted tokens.
pub fn strip(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|key, value| {
                let is_count = DRAFTED.contains(&key.as_str()) && value.is_u64();
                !VOLATILE.contains(&key.as_str()) && !is_count
            });
            fields.values_mut().for_each(strip);
            fields.retain(|key, value| {
                let is_empty = value.as_object().is_some_and(serde_json::Map::is_empty);
                !(is_empty && key.ends_with("_tokens_details"))
            });
        }
        Value::Array(items) => items.iter_mut().for_each(strip),
        _ => (),
    }
}

/// Compare, with a tolerance for numbers that are no integers (logprobs).
///
/// # Errors
/// The first difference and where it is.
pub fn same(at: &str, plain: &Value, dflash: &Value, tolerance: f64) -> Result<()> {
    match (plain, dflash) {
        (Value::Object(a), Value::Object(b)) => {
            let keys = |map: &serde_json::Map<String, Value>| {
                map.keys()
                    .cloned()
                    .collect::<std::collections::BTreeSet<_>>()
            };
            ensure!(
                keys(a) == keys(b),
                "{at}: keys\nplain  {plain}\nDFlash {dflash}"
            );
            for (key, value) in a {
                same(&format!("{at}.{key}"), value, &b[key], tolerance)?;
            }
        }
        (Value::Array(a), Value::Array(b)) => {
            ensure!(
                a.len() == b.len(),
                "{at}: {} items plain, {} with DFlash\nplain  {plain}\nDFlash {dflash}",
                a.len(),
                b.len()
            );
            for (i, (a, b)) in a.iter().zip(b).enumerate() {
                same(&format!("{at}[{i}]"), a, b, tolerance)?;
            }
        }
        (Value::Number(a), Value::Number(b)) if a.is_f64() && b.is_f64() => {
            let (a, b) = (
                a.as_f64().unwrap_or(f64::NAN),
                b.as_f64().unwrap_or(f64::NAN),
            );
            ensure!((a - b).abs() <= tolerance, "{at}: plain {a}, DFlash {b}");
        }
        _ if plain == dflash => (),
        _ => bail!("{at}:\nplain  {plain}\nDFlash {dflash}"),
    }
    Ok(())
}

/// The text of a chat answer or a completion.
pub fn text(answer: &Value) -> &str {
    let choice = &answer["choices"][0];
    choice["message"]["content"]
        .as_str()
        .or(choice["text"].as_str())
        .unwrap_or_default()
}

pub fn finish_reason(answer: &Value) -> &str {
    answer["choices"][0]["finish_reason"]
        .as_str()
        .unwrap_or_default()
}

/// The texts of the generated tokens; the request asked for logprobs.
pub fn token_texts(answer: &Value) -> Vec<String> {
    logprobs(answer)
        .map(|entry| entry["token"].as_str().unwrap_or_default().to_string())
        .collect()
}

/// Margin between the two best logits at each token of a greedy answer; the request asked for two
/// logprobs. (The host reports log10 of the logit itself for greedy sampling.)
pub fn margins(answer: &Value) -> Vec<f64> {
    logprobs(answer)
        .map(|entry| {
            let logit = |i: usize| {
                let log = entry["top_logprobs"][i]["logprob"].as_f64();
                10f64.powf(log.unwrap_or(f64::NAN))
            };
            logit(0) - logit(1)
        })
        .collect()
}

fn logprobs(answer: &Value) -> impl Iterator<Item = &Value> {
    answer["choices"][0]["logprobs"]["content"]
        .as_array()
        .into_iter()
        .flatten()
}

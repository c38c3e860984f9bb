//! Constrained answers and tool calls. SmolLM2's chat template does not know tools, so the tool
//! calls are forced by grammars; the host parses them from the text either way.

use anyhow::{ensure, Result};
use serde_json::{json, Value};

use super::{case, Case};
use crate::answer::{finish_reason, text};
use crate::pair::{chat, completion, Endpoint, Pair};

pub const CASES: &[Case] = &[
    case!(Always, regex),
    case!(Fast, json_schema_as_grammar_and_as_response_format),
    case!(Fast, lark),
    case!(Full, llguidance),
    case!(Fast, a_grammar_with_penalties_stops_and_limits),
    case!(Fast, a_forced_tool_call),
    case!(Full, tools_without_a_call),
    case!(Full, a_tool_result_in_the_conversation),
];

const DATE: &str = "On which date did the French Revolution start?";

fn grammar(kind: &str, value: Value) -> Value {
    json!({"type": kind, "value": value})
}

/// The grammar at temperatures 0 and 0.8, and streamed.
async fn constrained(pair: &Pair, prompt: &str, grammar: Value) -> Result<Value> {
    let tokens = pair.amount(40, 24, 16);
    let request = chat(prompt, json!({"grammar": grammar, "max_tokens": tokens}));
    let answer = pair.agree(Endpoint::Chat, request.clone()).await?;
    let sampled = json!({"grammar": grammar, "max_tokens": tokens, "temperature": 0.8});
    pair.agree_chat(prompt, sampled).await?;
    if pair.amount(1, 0, 0) == 1 {
        pair.agree_streamed(Endpoint::Chat, request).await?;
    }
    Ok(answer)
}

async fn regex(pair: &Pair) -> Result<()> {
    let date = grammar("regex", json!("[0-9]{4}-[0-9]{2}-[0-9]{2}"));
    let answer = constrained(pair, DATE, date.clone()).await?;
    ensure!(text(&answer).len() == 10, "{answer}");
    if pair.amount(2, 1, 0) == 0 {
        return Ok(());
    }
    // The model's own words are allowed for a while, so drafts are accepted inside the grammar.
    let sentence = grammar("regex", json!("The [A-Za-z ,]{10,30}\\."));
    constrained(pair, "What is a river?", sentence).await?;
    let request = completion(
        "The revolution began on ",
        json!({"grammar": date, "max_tokens": 20}),
    );
    pair.agree(Endpoint::Completions, request).await?;
    Ok(())
}

fn city_schema() -> Value {
    json!({
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": false
    })
}

async fn json_schema_as_grammar_and_as_response_format(pair: &Pair) -> Result<()> {
    let prompt = "Give me the largest city of France as JSON.";
    let answer = constrained(pair, prompt, grammar("json_schema", city_schema())).await?;
    if finish_reason(&answer) == "stop" {
        ensure!(
            serde_json::from_str::<Value>(text(&answer)).is_ok(),
            "{answer}"
        );
    }
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "city", "schema": city_schema()}});
    let fields = json!({"response_format": format, "max_tokens": pair.amount(40, 24, 16)});
    let formatted = pair.agree_chat(prompt, fields).await?;
    ensure!(text(&formatted) == text(&answer), "{formatted}");
    pair.agree_chat(
        prompt,
        json!({"response_format": {"type": "text"}, "max_tokens": 8}),
    )
    .await?;
    Ok(())
}

async fn lark(pair: &Pair) -> Result<()> {
    let sum = "start: NUMBER (OP NUMBER)+ \" =\"\nNUMBER: /[0-9]{1,3}/\nOP: \" + \" | \" - \"\n";
    constrained(
        pair,
        "Write a sum of three numbers.",
        grammar("lark", json!(sum)),
    )
    .await?;
    Ok(())
}

async fn llguidance(pair: &Pair) -> Result<()> {
    let by_lark = json!({"grammars": [{"lark_grammar": "start: \"yes\" | \"no\" | \"maybe so\""}]});
    constrained(pair, "Is the sea blue?", grammar("llguidance", by_lark)).await?;
    let by_schema = json!({"grammars": [{"json_schema": city_schema()}], "max_tokens": 30});
    constrained(
        pair,
        "The largest city of France as JSON.",
        grammar("llguidance", by_schema),
    )
    .await?;
    Ok(())
}

async fn a_grammar_with_penalties_stops_and_limits(pair: &Pair) -> Result<()> {
    let words = grammar("regex", json!("([a-z]+ ){3,30}end"));
    for fields in [
        json!({"max_tokens": 7}),
        json!({"max_tokens": 30, "repetition_penalty": 1.3, "temperature": 0.9, "top_k": 30}),
        json!({"max_tokens": 30, "stop": ["the"]}),
    ] {
        let mut fields = fields;
        fields["grammar"] = words.clone();
        pair.agree_chat("Write a list of words.", fields).await?;
    }
    Ok(())
}

fn weather_tool() -> Value {
    json!([{"type": "function", "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    }}])
}

const WEATHER: &str = "What is the weather in Paris?";

fn call_grammar() -> Value {
    grammar(
        "regex",
        json!(r#"\{"name": "get_weather", "arguments": \{"city": "[A-Z][a-z]{2,8}"\}\}"#),
    )
}

async fn a_forced_tool_call(pair: &Pair) -> Result<()> {
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    for choice in [Value::Null, json!("auto"), named] {
        let fields = json!({"tools": weather_tool(), "tool_choice": choice, "grammar": call_grammar(), "max_tokens": 40});
        let answer = pair.agree_chat(WEATHER, fields).await?;
        ensure!(finish_reason(&answer) == "tool_calls", "{answer}");
        let function = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        ensure!(function["name"] == json!("get_weather"), "{answer}");
        if pair.amount(1, 0, 0) == 0 {
            break;
        }
    }
    let fields = json!({"tools": weather_tool(), "grammar": call_grammar(), "max_tokens": 40});
    let chunks = pair
        .agree_streamed(Endpoint::Chat, chat(WEATHER, fields))
        .await?;
    let calls = chunks
        .iter()
        .filter(|c| !c["choices"][0]["delta"]["tool_calls"].is_null());
    ensure!(calls.count() == 1, "{chunks:?}");
    Ok(())
}

/// Without a call: `auto` and `none` answer in words, a named tool is an error of the host.
async fn tools_without_a_call(pair: &Pair) -> Result<()> {
    for choice in [json!("auto"), json!("none")] {
        let fields = json!({"tools": weather_tool(), "tool_choice": choice, "max_tokens": 12});
        pair.agree_chat(WEATHER, fields.clone()).await?;
        pair.agree_streamed(Endpoint::Chat, chat(WEATHER, fields))
            .await?;
    }
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    let request = chat(
        WEATHER,
        json!({"tools": weather_tool(), "tool_choice": named, "max_tokens": 6}),
    );
    let (status, _) = pair
        .agree_raw(Endpoint::Chat.path(), &request.to_string())
        .await?;
    ensure!(status == 500, "{status}");
    pair.agree_chat(WEATHER, json!({"max_tokens": 6})).await?;
    Ok(())
}

async fn a_tool_result_in_the_conversation(pair: &Pair) -> Result<()> {
    let call = json!({"id": "call-1", "type": "function", "function": {"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"}});
    let mut request = chat(
        "",
        json!({"tools": weather_tool(), "max_tokens": pair.tokens()}),
    );
    request["messages"] = json!([
        {"role": "user", "content": WEATHER},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "18 degrees and sunny", "tool_call_id": "call-1"}
    ]);
    pair.agree(Endpoint::Chat, request).await?;
    Ok(())
}

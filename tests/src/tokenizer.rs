//! A tokenizer for tiny models.

use std::path::Path;

use serde_json::json;

/// The end of text, which comes after the model's last token: it cannot be generated.
pub const END: &str = "<|im_end|>";

/// `count` tokens: `a` to `z`, then `aa`, `ab` and so on.
pub fn tokens(count: usize) -> Vec<String> {
    let letters = || ('a'..='z').map(String::from);
    let pairs = letters().flat_map(|first| letters().map(move |second| first.clone() + &second));
    let tokens: Vec<String> = letters().chain(pairs).take(count).collect();
    assert_eq!(tokens.len(), count, "too many tokens");
    tokens
}

/// Write `tokenizer.json` and `tokenizer_config.json` of these tokens and an end of text.
pub fn write(count: usize, folder: &Path) {
    write_with(count, &[], folder);
}

/// The same with special tokens in place of some; if there are any, a chat is the text of its messages.
pub fn write_with(count: usize, special: &[(&str, usize)], folder: &Path) {
    let mut tokens = tokens(count);
    for (token, id) in special {
        tokens[*id] = token.to_string();
    }
    tokens.push(END.into());
    let added: Vec<_> = special.iter().copied().chain([(END, count)]).collect();
    let added: Vec<_> = added
        .into_iter()
        .map(|(token, id)| {
            json!({
                "id": id, "content": token, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true
            })
        })
        .collect();
    let vocab: serde_json::Map<String, serde_json::Value> = tokens
        .into_iter()
        .enumerate()
        .map(|(id, token)| (token, json!(id)))
        .collect();
    let byte_level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true
    });
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": added,
        "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocab, "merges": []
        }
    });
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let template = "{% for message in messages %}{{ message['content'] }}{% endfor %}";
    let config = match special {
        [] => json!({ "eos_token": END }),
        _ => json!({ "eos_token": END, "chat_template": template }),
    };
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
}

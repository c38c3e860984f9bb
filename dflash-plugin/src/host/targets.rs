//! Which targets can be used with DFlash: the one table that the loader goes by, and that
//! `docs/models.md` is made from.

use std::fmt::Write;

/// What a family's layers keep when there is no paged attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cache {
    /// Every row.
    Whole,
    /// The rows of a sliding window, in all layers or in some, if the model's config has one.
    Window,
    /// Every row in some layers, one state for the whole text in the others.
    Recurrent,
}

/// The file format of a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Safetensors,
    Gguf,
}

/// A family of targets that drafts.
#[derive(Debug)]
pub struct TargetFamily {
    /// As the host names it, without the format.
    pub name: &'static str,
    pub format: Format,
    /// `architectures` in `config.json`, or `general.architecture` in a GGUF file.
    pub architecture: &'static str,
    pub cache: Cache,
    /// Whether the host can keep its KV in the paged cache; if not, it is in the normal one always.
    pub is_pageable: bool,
    /// What is special about it.
    pub note: &'static str,
    /// Why it is not tested, if it is not.
    pub untested: Option<&'static str>,
}

impl TargetFamily {
    /// As the host names it.
    pub fn host_name(&self) -> String {
        match self.format {
            Format::Safetensors => self.name.into(),
            Format::Gguf => format!("{} (GGUF)", self.name),
        }
    }
}

const fn family(
    name: &'static str,
    format: Format,
    architecture: &'static str,
    cache: Cache,
    note: &'static str,
) -> TargetFamily {
    TargetFamily {
        name,
        format,
        architecture,
        cache,
        is_pageable: true,
        note,
        untested: None,
    }
}

const fn on_normal_cache(family: TargetFamily) -> TargetFamily {
    TargetFamily {
        is_pageable: false,
        ..family
    }
}

use Cache::{Recurrent, Whole, Window};
use Format::{Gguf, Safetensors};

const IMAGES: &str = "requests with images draft as others do";
const M_ROPE: &str = "requests with images are decoded plainly, each in a pass of its own";
const QWEN3_5: &str =
    "Qwen3.6 too; requests with images are decoded plainly, each in a pass of its own";
const LONG_ROPE: &str = "with LongRoPE: plain steps past `original_max_position_embeddings`, and \
                         batches of sequences of equal length only";
/// Every family that can be used.
pub const TARGETS: &[TargetFamily] = &[
    family("llama", Safetensors, "LlamaForCausalLM", Whole, ""),
    family("mistral", Safetensors, "MistralForCausalLM", Window, ""),
    family("mixtral", Safetensors, "MixtralForCausalLM", Window, ""),
    family("qwen2", Safetensors, "Qwen2ForCausalLM", Window, ""),
    family("qwen3", Safetensors, "Qwen3ForCausalLM", Window, ""),
    family("qwen3_moe", Safetensors, "Qwen3MoeForCausalLM", Window, ""),
    family(
        "gemma",
        Safetensors,
        "GemmaForCausalLM",
        Whole,
        "the draft model gets the embedding without the factor sqrt(hidden)",
    ),
    family(
        "gemma2",
        Safetensors,
        "Gemma2ForCausalLM",
        Window,
        "as gemma; drafts are chosen without the cap of the logits, which does not change the best",
    ),
    family("phi2", Safetensors, "PhiForCausalLM", Whole, ""),
    family("phi3", Safetensors, "Phi3ForCausalLM", Window, LONG_ROPE),
    family(
        "phi3.5moe",
        Safetensors,
        "PhiMoEForCausalLM",
        Window,
        LONG_ROPE,
    ),
    family("glm4", Safetensors, "Glm4ForCausalLM", Whole, ""),
    family("glm4_moe", Safetensors, "Glm4MoeForCausalLM", Whole, ""),
    family("smollm3", Safetensors, "SmolLM3ForCausalLM", Whole, ""),
    family(
        "starcoder2",
        Safetensors,
        "Starcoder2ForCausalLM",
        Window,
        "",
    ),
    family("gpt_oss", Safetensors, "GptOssForCausalLM", Window, ""),
    family("deepseek2", Safetensors, "DeepseekV2ForCausalLM", Whole, ""),
    family("deepseek3", Safetensors, "DeepseekV3ForCausalLM", Whole, ""),
    family(
        "qwen3_next",
        Safetensors,
        "Qwen3NextForCausalLM",
        Recurrent,
        "",
    ),
    family(
        "granitemoehybrid",
        Safetensors,
        "GraniteMoeHybridForCausalLM",
        Recurrent,
        "the draft model gets the embedding without `embedding_multiplier`",
    ),
    family(
        "gemma3",
        Safetensors,
        "Gemma3ForConditionalGeneration",
        Window,
        "`Gemma3ForCausalLM` too; embedding as gemma; requests with images draft as others do",
    ),
    family(
        "mistral3",
        Safetensors,
        "Mistral3ForConditionalGeneration",
        Window,
        IMAGES,
    ),
    on_normal_cache(family(
        "qwen2vl",
        Safetensors,
        "Qwen2VLForConditionalGeneration",
        Whole,
        M_ROPE,
    )),
    on_normal_cache(family(
        "qwen2_5vl",
        Safetensors,
        "Qwen2_5_VLForConditionalGeneration",
        Whole,
        M_ROPE,
    )),
    family(
        "qwen3vl",
        Safetensors,
        "Qwen3VLForConditionalGeneration",
        Whole,
        M_ROPE,
    ),
    family(
        "qwen3vlmoe",
        Safetensors,
        "Qwen3VLMoeForConditionalGeneration",
        Whole,
        M_ROPE,
    ),
    family(
        "qwen3_5",
        Safetensors,
        "Qwen3_5ForConditionalGeneration",
        Recurrent,
        QWEN3_5,
    ),
    family(
        "qwen3_5moe",
        Safetensors,
        "Qwen3_5MoeForConditionalGeneration",
        Recurrent,
        QWEN3_5,
    ),
    family("llama", Gguf, "llama", Whole, "`mistral3` too"),
    family("qwen2", Gguf, "qwen2", Whole, ""),
    family("qwen3", Gguf, "qwen3", Whole, ""),
    family("qwen3_moe", Gguf, "qwen3moe", Whole, ""),
    family("phi2", Gguf, "phi2", Whole, ""),
    family("phi3", Gguf, "phi3", Window, ""),
    family("starcoder2", Gguf, "starcoder2", Whole, ""),
];

/// Why a target cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    NotText,
    XLora,
    GgufAdapter,
    NoKvCache,
    Family,
}

impl Refusal {
    pub const ALL: [Self; 5] = [
        Self::NotText,
        Self::XLora,
        Self::GgufAdapter,
        Self::NoKvCache,
        Self::Family,
    ];

    /// Which targets these are.
    pub fn targets(self) -> &'static str {
        match self {
            Self::NotText => "models that make images, speech or embeddings",
            Self::XLora => "X-LoRA adapters",
            Self::GgufAdapter => "LoRA adapters on a GGUF file",
            Self::NoKvCache => "any target with `--no-kv-cache`",
            Self::Family => "all others, with and without images or sound",
        }
    }

    /// What is in the way, and what to change where that is possible.
    pub fn reason(self) -> &'static str {
        match self {
            Self::NotText => "it does not write text",
            Self::XLora => "X-LoRA runs the model twice a step, with a KV cache of another kind",
            Self::GgufAdapter => {
                "the host runs an adapter on a GGUF file with a KV cache of another kind; use it on the \
                 safetensors model, `-m MODEL --lora ADAPTER`, with `--isq` for fewer bits"
            }
            Self::NoKvCache => "its KV cache is off; leave --no-kv-cache out",
            Self::Family => "its family is not among those that are known to work",
        }
    }
}

/// The entry of what the host calls `name`.
pub fn find(name: &str) -> Option<&'static TargetFamily> {
    TARGETS.iter().find(|target| target.host_name() == name)
}

/// The families on one line, for messages.
pub fn list() -> String {
    let of = |format| {
        let targets = TARGETS.iter().filter(|target| target.format == format);
        targets.map(|target| target.name).collect::<Vec<_>>()
    };
    format!(
        "safetensors: {}; GGUF: {}",
        of(Safetensors).join(", "),
        of(Gguf).join(", ")
    )
}

/// The tables of `docs/models.md`.
pub fn markdown() -> String {
    let mut text = String::from(
        "| family | format | architecture | KV cache | tested | paged | notes |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for target in TARGETS {
        let TargetFamily {
            name,
            architecture,
            note,
            ..
        } = target;
        let format = match target.format {
            Safetensors => "safetensors",
            Gguf => "GGUF",
        };
        let cache = match target.cache {
            Whole => "whole",
            Window => "window",
            Recurrent => "state",
        };
        let tested = match target.untested {
            None => "yes".into(),
            Some(why) => format!("no: {why}"),
        };
        let paged = match (target.is_pageable, target.untested) {
            (true, None) => "yes",
            (true, Some(_)) => "no",
            (false, _) => "the host cannot",
        };
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "| {name} | {format} | `{architecture}` | {cache} | {tested} | {paged} | {note} |"
        );
    }
    text.push_str("\nRefused at load:\n\n| targets | reason |\n| --- | --- |\n");
    for refusal in Refusal::ALL {
        let _ = writeln!(text, "| {} | {} |", refusal.targets(), refusal.reason());
    }
    text
}

//! Tiny models with random weights and the real architecture of every family of the host's, each with
//! a matching random draft model.
//!
//! Values come from one stream in a fixed order with the layers last, so a model with fewer layers
//! has the same weights in those that it has.

mod drafter;
mod gguf;
mod safetensors;

use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor, D};
pub use drafter::{write_drafter, write_export, Export};

use crate::weights::Weights;

pub const VOCAB: usize = 256;
pub const HIDDEN: usize = 64;
pub const LAYERS: usize = 4;
/// Layers that the draft model taps.
pub const TAPS: [usize; 2] = [0, 2];
/// The window of those that have one: shorter than most prompts with their answers.
pub const WINDOW: usize = 24;
pub const POSITIONS: usize = 4096;
const INTER: usize = 96;

/// How a model normalises before its head.
#[derive(Debug, Clone, Copy)]
enum Norm {
    Rms,
    /// The weight is added to 1.
    RmsPlusOne,
    Layer,
}

/// A family, or a variant of one.
pub struct Family {
    /// As the host names it.
    pub host_name: &'static str,
    /// What is special about this model of the family.
    pub variant: &'static str,
    format: Format,
    /// Names of final norm and head among the tensors.
    norm: (&'static str, Norm),
    head: &'static str,
    /// Cap of the logits.
    cap: Option<f64>,
    /// Whether the target of this variant has positions at which it is decoded plainly.
    pub has_plain_steps: bool,
    /// What a model that sees images has besides.
    pub images: Option<Images>,
}

/// How a model takes images.
pub struct Images {
    /// Tokens that stand for images or parts of them, with their ids.
    tokens: &'static [(&'static str, usize)],
    /// The text of one image in a prompt.
    pub prompt: &'static str,
    /// `preprocessor_config.json`
    preprocessor: serde_json::Value,
    /// `processor_config.json`
    processor: Option<serde_json::Value>,
}

impl Images {
    fn write(&self, folder: &Path) {
        crate::tokenizer::write_with(VOCAB, self.tokens, folder);
        let preprocessor = Some(&self.preprocessor);
        for (name, config) in [
            ("preprocessor_config.json", preprocessor),
            ("processor_config.json", self.processor.as_ref()),
        ] {
            if let Some(config) = config {
                std::fs::write(folder.join(name), config.to_string()).unwrap();
            }
        }
    }
}

enum Format {
    Safetensors {
        config: fn(usize) -> serde_json::Value,
        weights: fn(&mut Weights, usize),
    },
    Gguf {
        architecture: &'static str,
        weights: fn(&mut Weights, usize),
    },
}

/// A target on disk, with what a test needs to compute its last layers itself.
pub struct Target {
    pub path: PathBuf,
    norm: Norm,
    norm_weight: Tensor,
    norm_bias: Option<Tensor>,
    head: Tensor,
    head_bias: Option<Tensor>,
    cap: Option<f64>,
}

impl Target {
    /// Final norm and head of the output of the last layer: `[hidden]` to `[vocab]`.
    pub fn logits(&self, hidden: &Tensor) -> candle_core::Result<Vec<f32>> {
        const EPS: f64 = 1e-6;
        let mut x = hidden.to_dtype(DType::F32)?;
        if let Norm::Layer = self.norm {
            x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
        }
        let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + EPS)?.sqrt()?;
        let weight = match self.norm {
            Norm::RmsPlusOne => (&self.norm_weight + 1.0)?,
            Norm::Rms | Norm::Layer => self.norm_weight.clone(),
        };
        x = x.broadcast_div(&scale)?.mul(&weight)?;
        if let Some(bias) = &self.norm_bias {
            x = (x + bias)?;
        }
        let mut logits = self.head.matmul(&x.unsqueeze(1)?)?.squeeze(1)?;
        if let Some(bias) = &self.head_bias {
            logits = (logits + bias)?;
        }
        if let Some(cap) = self.cap {
            logits = ((logits / cap)?.tanh()? * cap)?;
        }
        logits.to_vec1()
    }
}

impl Family {
    /// Family and variant.
    pub fn title(&self) -> String {
        match self.variant {
            "" => self.host_name.into(),
            variant => format!("{}, {variant}", self.host_name),
        }
    }

    /// Write a target of so many layers below `folder`.
    pub fn write_target(&self, layers: usize, folder: &Path) -> Target {
        std::fs::create_dir_all(folder).unwrap();
        let mut weights = Weights::new(7);
        let path = match self.format {
            Format::Safetensors {
                config,
                weights: fill,
            } => {
                fill(&mut weights, layers);
                weights.save(folder, &config(layers));
                match &self.images {
                    Some(images) => images.write(folder),
                    None => crate::tokenizer::write(VOCAB, folder),
                }
                folder.into()
            }
            Format::Gguf {
                architecture,
                weights: fill,
            } => {
                fill(&mut weights, layers);
                gguf::save(&weights, architecture, layers, folder)
            }
        };
        let find = |name: &str, kind: &str| weights.tensors.get(&format!("{name}.{kind}")).cloned();
        let (norm_name, norm) = self.norm;
        Target {
            path,
            norm,
            norm_weight: find(norm_name, "weight").expect("a final norm"),
            norm_bias: find(norm_name, "bias"),
            head: find(self.head, "weight").expect("a head"),
            head_bias: find(self.head, "bias"),
            cap: self.cap,
        }
    }
}

/// Every family.
pub fn all() -> Vec<Family> {
    let mut families = safetensors::families();
    families.extend(gguf::families());
    families
}

/// The model of this family and variant.
pub fn find(title: &str) -> Family {
    let mut families = all().into_iter();
    let family = families.find(|family| family.title() == title);
    family.unwrap_or_else(|| panic!("no model of {title}"))
}

/// A model of a family that the plugin refuses.
pub fn refused(name: &str) -> Family {
    let mut families = safetensors::refused().into_iter();
    let family = families.find(|family| family.host_name == name);
    family.unwrap_or_else(|| panic!("no model of {name}"))
}

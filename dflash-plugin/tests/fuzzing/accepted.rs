//! What a config that has been accepted must be good for.

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use dflash_plugin::config::{DraftConfig, RopeScaling};
use dflash_plugin::draft::DraftModel;
use dflash_plugin::error::DFlashError;
use dflash_plugin::mask_token::resolve_mask_token;

use super::named;
use crate::common::fuzz::Outcome;

/// Models with more elements are not built: that a large model is large is no fault.
const MOST_ELEMENTS: usize = 1 << 19;

/// All that is done with a config that has been accepted.
pub fn check_config(config: &DraftConfig) -> Result<Outcome, String> {
    let rope = &config.rope;
    let numbers = match rope.scaling {
        RopeScaling::Default => vec![],
        RopeScaling::Linear { factor } => vec![factor],
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_positions,
        } => {
            vec![
                factor,
                low_freq_factor,
                high_freq_factor,
                original_positions,
            ]
        }
        RopeScaling::Yarn {
            factor,
            original_positions,
            beta_fast,
            beta_slow,
            attention_factor,
            ..
        } => {
            vec![
                factor,
                original_positions,
                beta_fast,
                beta_slow,
                attention_factor,
            ]
        }
    };
    let all = numbers.iter().chain([&rope.theta, &config.rms_norm_eps]);
    if !all.clone().all(|x| x.is_finite() && *x > 0.0) {
        return Err(format!(
            "accepted with a number that is not positive and finite: {config:?}"
        ));
    }
    if config.layers.len() != config.num_hidden_layers || config.group_size() == 0 {
        return Err(format!("accepted with contradicting sizes: {config:?}"));
    }
    if !(2..=config.head_dim).contains(&rope.rotary_dim) || !rope.rotary_dim.is_multiple_of(2) {
        return Err(format!("accepted with RoPE on no whole pairs: {config:?}"));
    }
    for layers in [0, 1, 2, 3, 4, 6, 12, 30, 512, 100_000] {
        match config.target_layer_ids(layers) {
            Ok(ids) if ids.len() == config.num_taps() && ids.iter().all(|id| *id < layers) => (),
            Ok(ids) => return Err(format!("taps {ids:?} of {layers} layers")),
            Err(error) => drop(named(&error)?),
        }
    }
    for (known, vocab) in [(None, 0), (Some(3), 160), (Some(u32::MAX), usize::MAX)] {
        match resolve_mask_token(config, &|_| known, vocab) {
            Ok(id) if (id as usize) < vocab => (),
            Ok(id) => return Err(format!("mask token {id} of {vocab}")),
            Err(error) => drop(named(&error)?),
        }
    }
    let per_layer = config.hidden_size
        * (2 * config.num_attention_heads * config.head_dim
            + 4 * config.num_key_value_heads * config.head_dim
            + 3 * config.intermediate_size);
    let elements = config.hidden_size * config.taps_width() + config.num_hidden_layers * per_layer;
    if elements > MOST_ELEMENTS {
        return Ok("accepted, large".into());
    }
    run_model(config)
}

/// Builds the model with weights of zero and drafts a block.
fn run_model(config: &DraftConfig) -> Result<Outcome, String> {
    let builder = VarBuilder::zeros(DType::F32, &Device::Cpu);
    let model = DraftModel::new(config, config.num_taps(), builder)
        .map_err(|e| format!("not built: {e}"))?;
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap();
    let draft = || -> Result<bool, DFlashError> {
        let mut kv = model.new_kv()?;
        let fused = model.fuse(&zeros(&[2, model.taps_width()]))?;
        kv.append(model.context_kv(&fused, &[0, 1])?)?;
        let block = config.block_size.min(64);
        let embeds = zeros(&[1, block, config.hidden_size]);
        let hidden = model.forward_block(&embeds, &[&kv])?;
        Ok(is_finite(&hidden) && is_finite(&kv.layer(0)?.0))
    };
    match draft() {
        Ok(true) => Ok("accepted, drafts".into()),
        Ok(false) => Err(format!("accepted, but computes NaN: {config:?}")),
        // The context of two and the block behind it may not fit.
        Err(DFlashError::Input { what, .. }) if what.starts_with("position") => {
            Ok("accepted, no room".into())
        }
        Err(error) => Err(format!("does not draft: {error}")),
    }
}

fn is_finite(tensor: &Tensor) -> bool {
    let sum = tensor.abs().and_then(|x| x.sum_all()).unwrap();
    sum.to_scalar::<f32>().unwrap().is_finite()
}

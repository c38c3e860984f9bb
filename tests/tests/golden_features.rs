//! Invariant I6 through the host: what the patched target gives the draft model (taps, embedding,
//! head) and what the draft model makes of it, against a PyTorch reference.

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor, D};
use dflash_bench::engine::Target;
use dflash_plugin::checkpoint::Checkpoint;
use dflash_tests::{drafter, golden_dir, target};
use mistralrs_core::plugin::{FlashParams, ForwardInputsResult, ModelInputs};
use mistralrs_core::{
    DeviceMapMetadata, DeviceMapSetting, LoaderBuilder, ModelDType, Pipeline, TokenSource,
};

/// Norm-wise relative error of features and K/V.
const FEATURES: f32 = 1e-4;
/// Absolute error of a logit.
const LOGITS: f32 = 2e-3;

type Golden = HashMap<String, Tensor>;

/// Largest relative error of a row.
fn error(got: &Tensor, want: &Tensor) -> f32 {
    let norm = |t: Tensor| t.sqr().unwrap().sum(D::Minus1).unwrap().sqrt().unwrap();
    let relative = (norm((got - want).unwrap()) / norm(want.clone())).unwrap();
    relative
        .flatten_all()
        .unwrap()
        .max(0)
        .unwrap()
        .to_scalar()
        .unwrap()
}

fn rows(golden: &Golden, key: &str) -> Tensor {
    golden[key].to_dtype(DType::U32).unwrap()
}

fn top20_match(what: &str, logits: &Tensor, golden: &Golden, key: &str) {
    let ids = rows(golden, &format!("{key}top20_ids"));
    let got = logits.gather(&ids, D::Minus1).unwrap();
    let want = &golden[&format!("{key}top20_logits")];
    let error = (got - want)
        .unwrap()
        .abs()
        .unwrap()
        .flatten_all()
        .unwrap()
        .max(0)
        .unwrap();
    let error: f32 = error.to_scalar().unwrap();
    println!("{what}: logits within {error:.1e}");
    assert!(error < LOGITS, "{what}: logit error {error}");
}

fn load_target() -> std::sync::Arc<tokio::sync::Mutex<dyn Pipeline + Send + Sync>> {
    LoaderBuilder::new(Target::at(&target()).select(ModelDType::F32).unwrap())
        .build()
        .unwrap()
        .load_model_from_hf(
            None,
            TokenSource::None,
            &ModelDType::F32,
            &Device::Cpu,
            true,
            DeviceMapSetting::Map(DeviceMapMetadata::dummy()),
            None,
            None,
        )
        .unwrap()
}

/// Prefill `ids`: the logits of the last position, `[vocab]`.
fn prefill(pipeline: &mut (dyn Pipeline + Send + Sync), ids: &Tensor) -> Tensor {
    let n = ids.dim(0).unwrap();
    pipeline.set_none_cache(&mut [], false, false, false);
    let inputs = ModelInputs {
        input_ids: ids.unsqueeze(0).unwrap(),
        input_ids_full: None,
        seqlen_offsets: vec![0],
        seqlen_offsets_full: None,
        context_lens: vec![(n - 1, 1)],
        position_ids: vec![n],
        paged_attn_meta: None,
        flash_meta: FlashParams::empty(true),
        flash_meta_full: None,
    };
    match pipeline.forward_inputs(Box::new(inputs), false).unwrap() {
        ForwardInputsResult::CausalGeneration { logits } => logits.flatten_all().unwrap(),
        _ => panic!("no logits"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn taps_features_block_states_and_logits_equal_the_reference() {
    let file = golden_dir().join("golden.safetensors");
    let golden: Golden = candle_core::safetensors::load(file, &Device::Cpu).unwrap();
    let pipeline = load_target();
    let mut pipeline = pipeline.lock().await;
    let checkpoint = Checkpoint::open(&drafter()).unwrap();
    let draft = checkpoint.load(DType::F32, &Device::Cpu).unwrap();
    let layers = pipeline.get_metadata().num_hidden_layers;
    let taps = checkpoint.config().target_layer_ids(layers).unwrap();
    pipeline
        .hidden_taps()
        .unwrap()
        .set_layers(&taps, layers)
        .unwrap();
    for prompt in ["short", "medium", "long"] {
        let key = |name: &str| format!("{prompt}.{name}");
        let ids = rows(&golden, &key("input_ids"));
        let logits = prefill(&mut *pipeline, &ids);
        top20_match(
            prompt,
            &logits.unsqueeze(0).unwrap(),
            &unsqueezed(&golden, prompt),
            "t.",
        );

        let taps = pipeline.hidden_taps().unwrap().take().unwrap();
        let taps = Tensor::cat(&taps, D::Minus1).unwrap().squeeze(0).unwrap();
        let held = rows(&golden, &key("rows"));
        let tap_error = error(
            &taps.index_select(&held, 0).unwrap(),
            &golden[&key("target_hidden")],
        );
        let fused = draft.fuse(&taps).unwrap();
        let fused_error = error(
            &fused.index_select(&held, 0).unwrap(),
            &golden[&key("context")],
        );
        let positions: Vec<usize> = (0..ids.dim(0).unwrap()).collect();
        let mut kv = draft.new_kv().unwrap();
        kv.append(draft.context_kv(&fused, &positions).unwrap())
            .unwrap();
        let mut kv_error = 0f32;
        let held = rows(&golden, &key("kv_rows"));
        for layer in [0, 4] {
            let (k, v) = kv.layer(layer).unwrap();
            for (name, got) in [("context_k", k), ("context_v", v)] {
                // Ours is [heads, rows, width], the reference's [rows, heads, width].
                let got = got.transpose(0, 1).unwrap().contiguous().unwrap();
                let got = got.index_select(&held, 0).unwrap();
                kv_error =
                    kv_error.max(error(&got, &golden[&key(&format!("layer{layer}.{name}"))]));
            }
        }
        println!("{prompt}: taps {tap_error:.1e}, features {fused_error:.1e}, K/V {kv_error:.1e}");
        assert!(tap_error < FEATURES && fused_error < FEATURES && kv_error < FEATURES);

        let lent = pipeline.speculative_target().unwrap();
        for block in [16, 8] {
            let key = |name: &str| format!("{prompt}.block{block}.{name}");
            let embeds = lent.embed_tokens(&rows(&golden, &key("ids"))).unwrap();
            let hidden = draft
                .forward_block(&embeds.unsqueeze(0).unwrap(), &[&kv])
                .unwrap();
            let hidden = hidden.squeeze(0).unwrap();
            let hidden_error = error(&hidden, &golden[&key("hidden")]);
            println!("{prompt} block {block}: states {hidden_error:.1e}");
            assert!(
                hidden_error < FEATURES,
                "{prompt} block {block}: {hidden_error}"
            );
            let drafted = hidden.narrow(0, 1, block - 1).unwrap();
            let logits = lent.project_logits(&drafted).unwrap();
            top20_match(
                &format!("{prompt} block {block}"),
                &logits,
                &golden,
                &key(""),
            );
        }
    }
}

/// The target's own top 20 with a row dimension, under the keys that `top20_match` reads.
fn unsqueezed(golden: &Golden, prompt: &str) -> Golden {
    ["top20_ids", "top20_logits"]
        .into_iter()
        .map(|name| {
            let tensor = golden[&format!("{prompt}.target_{name}")]
                .unsqueeze(0)
                .unwrap();
            (format!("t.{name}"), tensor)
        })
        .collect()
}

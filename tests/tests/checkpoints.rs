//! Targets in other kinds of checkpoints: with a LoRA adapter, as a UQFF file, and in FP8 by blocks or
//! with one scale a tensor.
//! GPTQ and AWQ are what the host runs on CUDA only.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use candle_core::{DType, Device, Tensor};
use dflash_bench::engine::{Engine, Setup, Target};
use dflash_plugin::DFlashMethod;
use dflash_tests::oracle::{
    check_text, difference, jobs_of, one_by_one, oracle, prompt, run, texts_of,
};
use dflash_tests::server::binary;
use dflash_tests::weights::Weights;
use dflash_tests::zoo::{self, HIDDEN, LAYERS};
use serde_json::{json, Value};

/// The last part of a tensor's name, and the tensor.
type Part = (&'static str, Tensor);

/// A target of the zoo and a draft model for it.
struct Models {
    folder: tempfile::TempDir,
    target: PathBuf,
    drafter: PathBuf,
}

impl Models {
    fn write(title: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("target");
        zoo::find(title).write_target(LAYERS, &target);
        let drafter = zoo::write_drafter(&folder.path().join("drafter"));
        Self {
            folder,
            target,
            drafter,
        }
    }

    fn plain(&self, target: &Target) -> Setup {
        Setup {
            target: target.clone(),
            ..Setup::plain(&self.target)
        }
    }

    fn dflash(&self, target: &Target) -> Setup {
        Setup {
            target: target.clone(),
            ..Setup::dflash(&self.target, &self.drafter, Some(8))
        }
    }

    /// All logits behind one prompt.
    async fn logits(&self, target: &Target) -> Vec<f32> {
        let engine = Engine::load(&self.plain(target)).await.unwrap();
        run(&engine, prompt(0), 1).await.first_logits
    }

    /// This checkpoint is another one than the zoo's, and its texts stay what they are.
    async fn keeps_text(&self, what: &str, target: &Target) {
        let base = self.logits(&Target::Folder(self.target.clone())).await;
        self.keeps_text_unlike(what, target, &base).await;
    }

    async fn keeps_text_unlike(&self, what: &str, target: &Target, base: &[f32]) {
        let plain = Engine::load(&self.plain(target)).await.unwrap();
        let cases = texts_of(&plain).await;
        let differ = difference(base, &cases[0].want.first_logits);
        assert!(differ > 1e-4, "{what}: nothing was changed: {differ}");
        let drafts = [None, Some(oracle(cases.clone()))];
        for drafts in drafts {
            let is_oracle = drafts.is_some();
            let method = match drafts {
                Some(drafts) => DFlashMethod::new().with_drafts(drafts),
                None => DFlashMethod::new(),
            };
            let engine = Engine::load_with(&self.dflash(target), method)
                .await
                .unwrap();
            let got = one_by_one(&engine, &jobs_of(&cases)).await;
            check_text(what, &cases, &got);
            let stats = engine.stats();
            assert!(stats.fallbacks.is_empty(), "{what}: {stats:?}");
            let occurs = stats.accepts.iter().filter(|n| **n > 0).count();
            assert!(!is_oracle || occurs == 8, "{what}: {stats:?}");
        }
    }

    /// Why these models cannot be loaded, with and without a draft model.
    async fn errors(&self) -> Vec<String> {
        let target = Target::Folder(self.target.clone());
        let mut errors = Vec::new();
        for setup in [self.plain(&target), self.dflash(&target)] {
            match Engine::load(&setup).await {
                Ok(_) => panic!("loaded: {setup:?}"),
                Err(error) => errors.push(format!("{error:#}")),
            }
        }
        errors
    }

    /// Replace the weights of all layers' projections by what `convert` makes of each, and name the
    /// method, if there is one, in the config.
    fn quantize(&self, config: Option<Value>, convert: impl Fn(&Tensor) -> Vec<Part>) {
        let file = self.target.join("model.safetensors");
        let tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
        let mut quantized = HashMap::new();
        // The last three are those of a gated delta net.
        let projections = ["_proj", ".in_proj_qkvz", ".in_proj_qkv", ".in_proj_z"];
        for (name, tensor) in tensors {
            match name.strip_suffix(".weight") {
                Some(layer) if projections.iter().any(|end| layer.ends_with(end)) => {
                    let parts = convert(&tensor).into_iter();
                    quantized.extend(parts.map(|(part, t)| (format!("{layer}.{part}"), t)));
                }
                _ => {
                    quantized.insert(name, tensor);
                }
            }
        }
        candle_core::safetensors::save(&quantized, file).unwrap();
        let Some(config) = config else {
            return;
        };
        let file = self.target.join("config.json");
        let mut whole: Value =
            serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
        whole["quantization_config"] = config;
        std::fs::write(file, whole.to_string()).unwrap();
    }
}

/// A random adapter of rank 4 for some of the projections.
fn write_adapter(folder: &Path) -> PathBuf {
    const RANK: usize = 4;
    std::fs::create_dir_all(folder).unwrap();
    let mut weights = Weights::new(11);
    for i in 0..LAYERS {
        for (name, rows, columns) in [
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.v_proj", 32, HIDDEN),
            ("mlp.down_proj", HIDDEN, 96),
        ] {
            let layer = format!("base_model.model.model.layers.{i}.{name}");
            weights.matrix(&format!("{layer}.lora_A"), RANK, columns);
            weights.matrix(&format!("{layer}.lora_B"), rows, RANK);
        }
    }
    let tensors = folder.join("adapter_model.safetensors");
    candle_core::safetensors::save(&weights.tensors, tensors).unwrap();
    let config = json!({
        "peft_type": "LORA", "r": RANK, "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "down_proj"]
    });
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
    folder.into()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_with_a_lora_adapter_keeps_its_text() {
    for title in ["llama", "qwen3, sliding window"] {
        let models = Models::write(title);
        let adapter = write_adapter(&models.folder.path().join("adapter"));
        let target = Target::Lora(models.target.clone(), adapter);
        models.keeps_text(&format!("{title}, LoRA"), &target).await;
    }
}

/// In one thread, as a server loads its models.
#[tokio::test(flavor = "current_thread")]
async fn an_adapter_changes_its_own_target_only() {
    let models = Models::write("llama");
    let adapter = write_adapter(&models.folder.path().join("adapter"));
    let base = Target::Folder(models.target.clone());
    let adapted = Target::Lora(models.target.clone(), adapter);
    let before = models.logits(&base).await;
    let with_adapter = models.logits(&adapted).await;
    assert!(difference(&before, &with_adapter) > 1e-2);
    assert_eq!(models.logits(&adapted).await, with_adapter);
    assert_eq!(models.logits(&base).await, before);
}

impl Models {
    /// What `mistralrs quantize` makes of the target.
    fn write_uqff(&self, isq: &str) -> Target {
        let folder = self.folder.path().join("uqff");
        let output = Command::new(binary())
            .args(["quantize", "--cpu", "--dtype", "f32", "--no-readme"])
            .args(["--isq", isq, "-m"])
            .arg(&self.target)
            .arg("-o")
            .arg(&folder)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let mut files = std::fs::read_dir(&folder).unwrap().map(Result::unwrap);
        let shard = files.find(|file| file.path().extension().is_some_and(|e| e == "uqff"));
        let name = shard.expect("a UQFF file").file_name();
        Target::Uqff(folder, name.into_string().unwrap())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_in_a_uqff_file_keeps_its_text() {
    for (title, isq) in [("llama", "q8_0"), ("qwen3, sliding window", "hqq8")] {
        let models = Models::write(title);
        let target = models.write_uqff(isq);
        let what = format!("{title}, UQFF in {isq}");
        models.keeps_text(&what, &target).await;
    }
}

/// FP8's largest value.
const LARGEST: f32 = 448.0;
/// Rows and columns of an FP8 block.
const BLOCK: usize = 32;

/// A scale for every 32 x 32 values, the largest of which becomes FP8's largest.
fn fp8_blocks(weight: &Tensor) -> Vec<Part> {
    let (rows, columns) = weight.dims2().unwrap();
    let mut values = weight.to_vec2::<f32>().unwrap();
    let (down, across) = (rows.div_ceil(BLOCK), columns.div_ceil(BLOCK));
    let mut scales = vec![0f32; down * across];
    for (y, row) in values.iter().enumerate() {
        for (x, value) in row.iter().enumerate() {
            let scale = &mut scales[y / BLOCK * across + x / BLOCK];
            *scale = scale.max(value.abs() / LARGEST);
        }
    }
    for (y, row) in values.iter_mut().enumerate() {
        for (x, value) in row.iter_mut().enumerate() {
            *value /= scales[y / BLOCK * across + x / BLOCK];
        }
    }
    let weight = Tensor::new(values, &Device::Cpu).unwrap();
    let scales = Tensor::from_vec(scales, (down, across), &Device::Cpu).unwrap();
    vec![
        ("weight", weight.to_dtype(DType::F8E4M3).unwrap()),
        ("weight_scale_inv", scales),
    ]
}

/// One scale for the whole tensor, by this name and in this shape.
fn fp8_tensor(weight: &Tensor, name: &'static str, shape: &[usize]) -> Vec<Part> {
    let largest = weight.abs().unwrap().max_all().unwrap();
    let scale = (largest / f64::from(LARGEST)).unwrap();
    let values = weight.broadcast_div(&scale).unwrap();
    vec![
        ("weight", values.to_dtype(DType::F8E4M3).unwrap()),
        (name, scale.reshape(shape).unwrap()),
    ]
}

/// What FP8 leaves of a weight: values and their scales put together.
fn fp8_rounded(parts: &[Part]) -> Vec<Part> {
    let [values, scales] = [0, 1].map(|i| parts[i].1.to_dtype(DType::F32).unwrap());
    let mut values = values.to_vec2::<f32>().unwrap();
    let across = values[0].len().div_ceil(BLOCK);
    let scales = scales.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    for (y, row) in values.iter_mut().enumerate() {
        for (x, value) in row.iter_mut().enumerate() {
            *value *= match scales.as_slice() {
                [scale] => scale,
                scales => &scales[y / BLOCK * across + x / BLOCK],
            };
        }
    }
    vec![("weight", Tensor::new(values, &Device::Cpu).unwrap())]
}

/// The same numbers, and the same text, as in a checkpoint that has what FP8 leaves in f32.
async fn keeps_text_in_fp8(
    what: &str,
    title: &str,
    config: Value,
    pack: impl Fn(&Tensor) -> Vec<Part>,
) {
    let models = Models::write(title);
    let target = Target::Folder(models.target.clone());
    let base = models.logits(&target).await;
    models.quantize(None, |weight| fp8_rounded(&pack(weight)));
    let rounded = models.logits(&target).await;
    models.quantize(Some(config), pack);
    let what = format!("{title}, {what}");
    let differ = difference(&rounded, &models.logits(&target).await);
    println!("{what}: logits differ by {differ}");
    assert!(differ < 1e-4, "{what}: {differ}");
    models.keeps_text_unlike(&what, &target, &base).await;
}

async fn keeps_text_in_fp8_by_blocks(titles: &[&str]) {
    for title in titles {
        let config = json!({ "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK] });
        keeps_text_in_fp8("FP8 by blocks", title, config, fp8_blocks).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_in_fp8_by_blocks_keeps_its_text() {
    keeps_text_in_fp8_by_blocks(&["llama", "qwen3, sliding window", "qwen2"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn recurrent_layers_in_fp8_by_blocks_keep_their_text() {
    keeps_text_in_fp8_by_blocks(&["qwen3_5"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mixtures_of_experts_in_fp8_by_blocks_keep_their_text() {
    keeps_text_in_fp8_by_blocks(&["qwen3_moe", "qwen3_next", "deepseek3"]).await;
}

/// As the exporters name and shape the scale.
#[tokio::test(flavor = "multi_thread")]
async fn a_target_in_fp8_with_one_scale_a_tensor_keeps_its_text() {
    for (title, name, shape) in [
        ("llama", "weight_scale_inv", &[][..]),
        ("qwen2", "weight_scale", &[1]),
    ] {
        let config = json!({ "quant_method": "fp8", "activation_scheme": "static" });
        let pack = |weight: &Tensor| fp8_tensor(weight, name, shape);
        keeps_text_in_fp8(&format!("FP8, {name}"), title, config, pack).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn experts_in_fp8_with_one_scale_a_tensor_are_refused_by_the_host() {
    let models = Models::write("qwen3_moe");
    let config = json!({ "quant_method": "fp8", "activation_scheme": "static" });
    models.quantize(Some(config), |weight| {
        fp8_tensor(weight, "weight_scale_inv", &[])
    });
    for error in models.errors().await {
        assert!(error.contains("weight_block_size"), "{error}");
    }
}

/// Tensors of the right sizes; their values do not matter.
fn four_bits(weight: &Tensor, is_awq: bool) -> Vec<Part> {
    const GROUP: usize = 32;
    const PACKED: usize = 8;
    let (rows, columns) = weight.dims2().unwrap();
    let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu).unwrap();
    let packed = match is_awq {
        true => [columns, rows / PACKED],
        false => [columns / PACKED, rows],
    };
    let mut parts = vec![
        ("qweight", zeros(&packed, DType::I32)),
        (
            "qzeros",
            zeros(&[columns / GROUP, rows / PACKED], DType::I32),
        ),
        ("scales", zeros(&[columns / GROUP, rows], DType::F16)),
    ];
    if !is_awq {
        parts.push(("g_idx", zeros(&[columns], DType::I32)));
    }
    parts
}

#[tokio::test(flavor = "multi_thread")]
async fn gptq_and_awq_are_refused_by_the_host_on_a_cpu() {
    for method in ["gptq", "awq"] {
        let models = Models::write("qwen3");
        let config = json!({ "quant_method": method, "bits": 4, "group_size": 32 });
        models.quantize(Some(config), |weight| four_bits(weight, method == "awq"));
        for error in models.errors().await {
            assert!(
                error.contains("only supported on CUDA"),
                "{method}: {error}"
            );
        }
    }
}

/// A mixture's experts one by one, or all in two tensors whose matrices map from the second axis to the
/// third, or from the third to the second.
#[tokio::test(flavor = "multi_thread")]
async fn experts_are_the_same_in_every_layout() {
    let models = Models::write("qwen3_5moe");
    let target = Target::Folder(models.target.clone());
    let want = models.logits(&target).await;
    let file = models.target.join("model.safetensors");
    let tensors = candle_core::safetensors::load(&file, &Device::Cpu).unwrap();
    type Layout = fn(&str, &Tensor) -> Vec<(String, Tensor)>;
    let layouts: [Layout; 2] = [
        |name, stacked| vec![(name.into(), stacked.t().unwrap())],
        |name, stacked| {
            let (experts, name) = name.rsplit_once('.').unwrap();
            let names = name.split("_proj").next().unwrap().split('_');
            let mut all = Vec::new();
            for i in 0..stacked.dim(0).unwrap() {
                let expert = stacked.get(i).unwrap();
                let parts = expert.chunk(names.clone().count(), 0).unwrap();
                for (name, part) in names.clone().zip(parts) {
                    all.push((format!("{experts}.{i}.{name}_proj.weight"), part));
                }
            }
            all
        },
    ];
    for layout in layouts {
        let mut other = HashMap::new();
        for (name, tensor) in &tensors {
            match name.contains(".experts.") {
                true => {
                    let parts = layout(name, tensor).into_iter();
                    other.extend(parts.map(|(name, part)| (name, part.contiguous().unwrap())));
                }
                false => {
                    other.insert(name.clone(), tensor.clone());
                }
            }
        }
        assert!(other.len() >= tensors.len());
        candle_core::safetensors::save(&other, &file).unwrap();
        let differ = difference(&want, &models.logits(&target).await);
        assert!(differ < 1e-5, "{differ}");
    }
}

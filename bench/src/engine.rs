//! The host's engine in this process: load a target with or without a draft model, send requests
//! through the host's own queue, scheduler and sampler, and time what comes back.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail, Context, Result};
use candle_core::Tensor;
use dflash_plugin::stats::StatsSnapshot;
use dflash_plugin::{use_decode_kernels, DFlashMethod};
use either::Either;
use image::DynamicImage;
use indexmap::IndexMap;
use mistralrs_core::{
    CustomLogitsProcessor, MistralRs, ModelDType, ModelSelected, NormalRequest, Request,
    RequestMessage, Response, SamplingParams, Speculation, SpeculativeOptions, StopTokens,
    TokenSource,
};
use mistralrs_server_core::mistralrs_for_server_builder::MistralRsForServerBuilder;
use tokio::sync::mpsc::channel;
use tracing_subscriber::EnvFilter;

/// A target model on disk.
#[derive(Debug, Clone)]
pub enum Target {
    /// Folder in Hugging Face format.
    Folder(PathBuf),
    /// GGUF file.
    Gguf(PathBuf),
    /// Folder in Hugging Face format, and the folder of a LoRA adapter for it.
    Lora(PathBuf, PathBuf),
    /// Folder that a UQFF file was written to, with the name of its first shard.
    Uqff(PathBuf, String),
}

impl Target {
    /// A `.gguf` file or a folder.
    pub fn at(path: &Path) -> Self {
        match path.extension() {
            Some(extension) if extension == "gguf" => Self::Gguf(path.into()),
            _ => Self::Folder(path.into()),
        }
    }

    /// As the host's loaders take it.
    pub fn select(&self, dtype: ModelDType) -> Result<ModelSelected> {
        match self {
            Self::Folder(folder) => auto(folder, None, dtype),
            Self::Uqff(folder, file) => auto(folder, Some(file.clone()), dtype),
            Self::Lora(folder, adapter) => Ok(ModelSelected::Lora {
                model_id: Some(utf8(folder)?),
                tokenizer_json: None,
                adapter_model_id: utf8(adapter)?,
                arch: None,
                dtype,
                topology: None,
                write_uqff: None,
                from_uqff: None,
                max_seq_len: MAX_SEQ_LEN,
                max_batch_size: 1,
                hf_cache_path: None,
            }),
            Self::Gguf(file) => Ok(ModelSelected::GGUF {
                tok_model_id: None,
                quantized_model_id: utf8(file.parent().unwrap_or(Path::new(".")))?,
                quantized_filename: utf8(Path::new(
                    file.file_name().context("the GGUF path names no file")?,
                ))?,
                dtype,
                topology: None,
                max_seq_len: MAX_SEQ_LEN,
                max_batch_size: 1,
            }),
        }
    }
}

const MAX_SEQ_LEN: usize = 4096;

/// A folder whose kind the host finds out, as its command line has it.
fn auto(folder: &Path, from_uqff: Option<String>, dtype: ModelDType) -> Result<ModelSelected> {
    Ok(ModelSelected::Run {
        model_id: utf8(folder)?,
        tokenizer_json: None,
        dtype,
        topology: None,
        organization: None,
        write_uqff: None,
        from_uqff,
        imatrix: None,
        calibration_file: None,
        max_edge: None,
        max_seq_len: MAX_SEQ_LEN,
        max_batch_size: 1,
        max_num_images: None,
        max_image_length: None,
        hf_cache_path: None,
        matformer_config_path: None,
        matformer_slice_name: None,
    })
}

fn utf8(path: &Path) -> Result<String> {
    path.to_str()
        .map(str::to_string)
        .with_context(|| format!("{} is not valid UTF-8", path.display()))
}

/// The pair of models that a command runs.
#[derive(Debug, clap::Args)]
pub struct PairArgs {
    /// Target model: a folder in Hugging Face format, or a .gguf file
    #[arg(long)]
    pub target: PathBuf,
    /// Draft model folder
    #[arg(long)]
    pub draft: PathBuf,
    #[command(flatten)]
    pub place: Place,
    #[command(flatten)]
    pub drafting: Drafting,
}

/// What a user can set of the draft model.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Drafting {
    /// In-situ quantization of the draft model: none, auto, or a type such as q8_0
    #[arg(long, value_name = "TYPE")]
    pub draft_quant: Option<String>,
    /// Most recent context tokens that the draft model attends to; 0 for all
    #[arg(long, value_name = "TOKENS")]
    pub draft_window: Option<usize>,
}

/// Where the models run, and where their KV is.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Place {
    /// Run on the first GPU instead of the CPU
    #[arg(long)]
    pub gpu: bool,
    /// Compute in bf16 instead of f32
    #[arg(long)]
    pub bf16: bool,
    /// Use the host's paged KV cache, with room for this many tokens
    #[arg(long, value_name = "TOKENS")]
    pub paged: Option<usize>,
}

impl Place {
    /// What the environment asks for: `DFLASH_GPU=1`, `DFLASH_BF16=1`, `DFLASH_PAGED=<tokens>`. So
    /// every test can be run in every place.
    pub fn from_env() -> Self {
        let is_set = |name| std::env::var_os(name).is_some_and(|value| value == "1");
        Self {
            gpu: is_set("DFLASH_GPU"),
            bf16: is_set("DFLASH_BF16"),
            paged: std::env::var("DFLASH_PAGED")
                .ok()
                .and_then(|tokens| tokens.parse().ok()),
        }
    }

    fn dtype(&self) -> ModelDType {
        match self.bf16 {
            true => ModelDType::BF16,
            false => ModelDType::F32,
        }
    }
}

impl PairArgs {
    /// The target alone.
    pub fn plain(&self) -> Setup {
        Setup {
            place: self.place.clone(),
            ..Setup::plain(&self.target)
        }
    }

    /// Both.
    pub fn dflash(&self, block_size: Option<usize>, adaptive: bool) -> Setup {
        Setup {
            adaptive,
            place: self.place.clone(),
            drafting: self.drafting.clone(),
            ..Setup::dflash(&self.target, &self.draft, block_size)
        }
    }
}

/// What to load.
#[derive(Debug, Clone)]
pub struct Setup {
    pub target: Target,
    /// Draft model folder; `None` decodes plainly.
    pub draft: Option<PathBuf>,
    /// Anchor and drafts; `None` for the checkpoint's own.
    pub block_size: Option<usize>,
    /// Let the plugin verify fewer tokens than a block where that is faster; off, every step
    /// verifies a whole block, as the reference does.
    pub adaptive: bool,
    /// Entries of the host's prefix cache; 0 turns it off, so that a repeated prompt is prefilled.
    pub prefix_cache_n: usize,
    pub max_seqs: usize,
    pub place: Place,
    /// In-situ quantization of the target, such as `Q8_0`.
    pub isq: Option<String>,
    pub drafting: Drafting,
}

impl Setup {
    pub fn plain(target: &Path) -> Self {
        Self {
            target: Target::at(target),
            draft: None,
            block_size: None,
            adaptive: false,
            prefix_cache_n: 0,
            max_seqs: 32,
            place: Place::from_env(),
            isq: None,
            drafting: Drafting::default(),
        }
    }

    pub fn dflash(target: &Path, draft: &Path, block_size: Option<usize>) -> Self {
        Self {
            draft: Some(draft.into()),
            block_size,
            ..Self::plain(target)
        }
    }

    /// On a paged KV cache of so many tokens; with `None` on the cache that it has anyway.
    pub fn on_paged(mut self, tokens: Option<usize>) -> Self {
        self.place.paged = tokens.or(self.place.paged);
        self
    }
}

/// A loaded model behind the host's engine.
pub struct Engine {
    host: Arc<MistralRs>,
    method: Arc<DFlashMethod>,
}

/// What to generate from.
#[derive(Debug, Clone)]
pub enum Prompt {
    /// One user turn, through the model's chat template.
    Chat(String),
    /// Several turns, `(role, content)`.
    Turns(Vec<(String, String)>),
    /// Raw text.
    Text(String),
    /// Token ids as they are.
    Tokens(Vec<u32>),
    /// One user turn with an image, whose place the text says in the model's own way.
    Image(String, DynamicImage),
}

/// One request.
#[derive(Debug, Clone)]
pub struct Job {
    pub prompt: Prompt,
    pub max_tokens: usize,
    /// 0 is greedy. (The host takes a missing temperature for 1.)
    pub temperature: f64,
    pub repetition_penalty: Option<f32>,
    pub stop: Vec<String>,
    /// The request's own switch.
    pub speculative: bool,
    /// Record token ids and the gap between the two best logits of each (greedy only).
    pub record: bool,
}

impl Job {
    pub fn greedy(prompt: Prompt, max_tokens: usize) -> Self {
        Self {
            prompt,
            max_tokens,
            temperature: 0.0,
            repetition_penalty: None,
            stop: Vec::new(),
            speculative: true,
            record: false,
        }
    }

    pub fn recorded(mut self) -> Self {
        self.record = true;
        self
    }
}

/// What came back.
#[derive(Debug, Clone, Default)]
pub struct Generation {
    pub text: String,
    pub finish_reason: String,
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    /// From sending the request to the first token.
    pub first_token: Duration,
    /// From the first token to the end.
    pub decode: Duration,
    /// When each piece of text came.
    pub arrivals: Vec<Instant>,
    /// Token ids, if recorded.
    pub tokens: Vec<u32>,
    /// Best minus second-best logit of each token, if recorded.
    pub gaps: Vec<f32>,
    /// All logits of the first token, if recorded.
    pub first_logits: Vec<f32>,
}

impl Generation {
    /// Decoding speed without the prefill, in tokens a second: the first token comes from it.
    pub fn tokens_per_second(&self) -> f64 {
        self.completion_tokens.saturating_sub(1) as f64 / self.decode.as_secs_f64().max(1e-9)
    }
}

impl Engine {
    pub async fn load(setup: &Setup) -> Result<Self> {
        Self::load_with(setup, DFlashMethod::new()).await
    }

    /// Load with a method of the caller's, such as one with an observer.
    pub async fn load_with(setup: &Setup, method: DFlashMethod) -> Result<Self> {
        use_decode_kernels();
        if std::env::var_os("RUST_LOG").is_some() {
            // For tests; a binary has set up its own.
            let log = tracing_subscriber::fmt().with_env_filter(EnvFilter::from_default_env());
            log.with_writer(std::io::stderr).try_init().ok();
        }
        // Tests and benchmarks must not go on over a broken invariant.
        let method = Arc::new(method.strict());
        let speculation = match &setup.draft {
            Some(draft) => Some(Speculation::new(
                method.clone(),
                SpeculativeOptions {
                    method: DFlashMethod::NAME.into(),
                    draft_model: Some(utf8(draft)?),
                    block_size: setup.block_size,
                    adaptive: Some(setup.adaptive),
                    draft_quant: setup.drafting.draft_quant.clone(),
                    draft_window: setup.drafting.draft_window,
                },
            )),
            None => None,
        };
        let host = MistralRsForServerBuilder::new()
            .with_model(setup.target.select(setup.place.dtype())?)
            .with_cpu(!setup.place.gpu)
            .set_paged_attn(Some(setup.place.paged.is_some()))
            .with_paged_ctxt_len_optional(setup.place.paged)
            .with_max_seqs(setup.max_seqs)
            .with_token_source(TokenSource::None)
            .with_interactive_mode(true)
            .with_prefix_cache_n(setup.prefix_cache_n)
            .with_in_situ_quant_optional(setup.isq.clone())
            .with_speculation(speculation)
            .build()
            .await?;
        Ok(Self { host, method })
    }

    /// What speculation did so far.
    pub fn stats(&self) -> StatsSnapshot {
        self.method.stats().snapshot()
    }

    pub fn host(&self) -> &Arc<MistralRs> {
        &self.host
    }

    /// Run one request to its end; `on_text` gets each piece of text as it comes.
    pub async fn generate(&self, job: &Job, mut on_text: impl FnMut(&str)) -> Result<Generation> {
        let (sender, mut receiver) = channel(4096);
        let recorder = Recorder::default();
        let mut request = NormalRequest::new_simple(
            messages(&job.prompt),
            SamplingParams {
                temperature: Some(job.temperature),
                repetition_penalty: job.repetition_penalty,
                max_len: Some(job.max_tokens),
                stop_toks: (!job.stop.is_empty()).then(|| StopTokens::Seqs(job.stop.clone())),
                ..SamplingParams::neutral()
            },
            sender,
            self.host.next_request_id(),
            None,
            None,
        );
        request.is_streaming = true;
        request.speculative = (!job.speculative).then_some(false);
        if job.record {
            request.logits_processors = Some(vec![Arc::new(recorder.clone())]);
        }
        let start = Instant::now();
        self.host
            .get_sender(None)
            .map_err(|error| anyhow!("the engine is gone: {error:?}"))?
            .send(Request::Normal(Box::new(request)))
            .await
            .map_err(|_| anyhow!("the engine has stopped"))?;
        let mut out = Generation::default();
        let mut first = None;
        let mut pieces = 0;
        while let Some(response) = receiver.recv().await {
            let (text, finish, usage) = match response {
                Response::Chunk(chunk) => {
                    let choice = chunk
                        .choices
                        .into_iter()
                        .next()
                        .context("a chunk without choice")?;
                    (choice.delta.content, choice.finish_reason, chunk.usage)
                }
                Response::CompletionChunk(chunk) => {
                    let choice = chunk
                        .choices
                        .into_iter()
                        .next()
                        .context("a chunk without choice")?;
                    (Some(choice.text), choice.finish_reason, None)
                }
                Response::InternalError(error) | Response::ValidationError(error) => {
                    bail!("request failed: {error}")
                }
                Response::ModelError(message, _) | Response::CompletionModelError(message, _) => {
                    bail!("request failed: {message}")
                }
                _ => bail!("unexpected kind of response"),
            };
            pieces += 1;
            out.arrivals.push(Instant::now());
            first.get_or_insert_with(|| start.elapsed());
            if let Some(text) = text {
                on_text(&text);
                out.text.push_str(&text);
            }
            if let Some(usage) = usage {
                out.prompt_tokens = usage.prompt_tokens;
                out.completion_tokens = usage.completion_tokens;
            }
            if let Some(reason) = finish {
                out.finish_reason = reason;
                break;
            }
        }
        out.decode = start.elapsed().saturating_sub(first.unwrap_or_default());
        if out.finish_reason.is_empty() {
            bail!("the engine ended the stream without a finish reason");
        }
        // The last chunk is sent from inside a step; the sequence, and with it the sender, goes
        // when the step is over and its counters are final.
        while receiver.recv().await.is_some() {}
        // The host sends one chunk a token, and no usage with completion chunks.
        if out.completion_tokens == 0 {
            out.completion_tokens = pieces;
        }
        out.first_token = first.unwrap_or_default();
        let recorded = recorder.take();
        (out.tokens, out.gaps) = (recorded.tokens, recorded.gaps);
        out.first_logits = recorded.first_logits;
        Ok(out)
    }
}

fn messages(prompt: &Prompt) -> RequestMessage {
    let message = |(role, content): (String, String)| {
        IndexMap::from([
            ("role".to_string(), Either::Left(role)),
            ("content".to_string(), Either::Left(content)),
        ])
    };
    let turns = |turns: Vec<(String, String)>| RequestMessage::Chat {
        messages: turns.into_iter().map(message).collect(),
        enable_thinking: None,
        reasoning_effort: None,
    };
    match prompt {
        Prompt::Image(text, image) => RequestMessage::MultimodalChat {
            images: vec![image.clone()],
            audios: Vec::new(),
            videos: Vec::new(),
            messages: vec![message(("user".into(), text.clone()))],
            enable_thinking: None,
            reasoning_effort: None,
        },
        Prompt::Chat(text) => turns(vec![("user".into(), text.clone())]),
        Prompt::Turns(list) => turns(list.clone()),
        Prompt::Text(text) => RequestMessage::Completion {
            text: text.clone(),
            echo_prompt: false,
            best_of: None,
        },
        Prompt::Tokens(ids) => RequestMessage::CompletionTokens(ids.clone()),
    }
}

/// A logits processor that changes nothing and notes the greedy choice and its margin, so that a
/// test sees token ids, which the host's responses do not carry.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Recorded>>);

#[derive(Default)]
struct Recorded {
    tokens: Vec<u32>,
    gaps: Vec<f32>,
    first_logits: Vec<f32>,
}

impl Recorder {
    fn take(&self) -> Recorded {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl CustomLogitsProcessor for Recorder {
    fn apply(&self, logits: &Tensor, _context: &[u32]) -> candle_core::Result<Tensor> {
        let values = logits.to_vec1::<f32>()?;
        let (mut best, mut second) = ((0, f32::NEG_INFINITY), f32::NEG_INFINITY);
        for (id, &value) in values.iter().enumerate() {
            // The host's argmax takes the last of equal maxima.
            if value >= best.1 {
                second = best.1;
                best = (id as u32, value);
            } else if value > second {
                second = value;
            }
        }
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        seen.tokens.push(best.0);
        seen.gaps.push(best.1 - second);
        if seen.first_logits.is_empty() {
            seen.first_logits = values;
        }
        Ok(logits.clone())
    }
}

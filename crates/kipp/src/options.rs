//! Flags that several verbs share.

use std::sync::Arc;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use engine::philox::random_seed;
use engine::{Backend, BackendError, KvConfig, KvKind, SamplingParams};
use model::{Model, Origin, Scheme, Spec};
use text::Tokenizer;

use crate::backends::{BackendName, MetalClass, Prepared, Settings};
use crate::output::{complain, origin, wrong_usage};
use crate::store::{Reference, parse_id, parse_scheme};

/// Which model, on what.
#[derive(Args)]
pub struct ModelOptions {
    /// Registry id with an optional :scheme, or a GGUF file; kipp-tiny, which is built in, if left out
    pub model: Option<String>,
    /// What computes
    #[arg(long, env = "KIPP_BACKEND", value_enum, default_value_t = BackendName::Cpu)]
    pub backend: BackendName,
    #[command(flatten)]
    pub threads: Threads,
    /// Number of the GPU, counted from 0
    #[arg(long, env = "KIPP_DEVICE", default_value_t = 0)]
    pub device: usize,
    /// On a GPU, use one class of kernels whatever the size of a batch: the same bits for a request in any
    /// company, and slower. The processor's answers are the same bits anyway
    #[arg(long, env = "KIPP_DETERMINISTIC")]
    pub deterministic: bool,
    /// On an Apple GPU, what multiplies many tokens; the best that computes a probe exactly if left out
    #[arg(long, env = "KIPP_METAL_CLASS", value_enum)]
    pub metal_class: Option<MetalClass>,
    /// Positions, prompt and answer together, e.g. 32k; what the checkpoint was made for if left out
    #[arg(long, env = "KIPP_CTX", value_parser = parse_size)]
    pub ctx: Option<usize>,
    /// How keys and values are stored
    #[arg(long, env = "KIPP_KV", value_enum, default_value_t = KvName::Bf16)]
    pub kv: KvName,
}

/// How many threads compute.
#[derive(Clone, Copy, Args)]
pub struct Threads {
    /// Threads; the physical cores that this process may use if left out
    #[arg(long, env = "KIPP_THREADS", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

impl Threads {
    /// Their number.
    pub fn count(self) -> usize {
        self.threads.map_or_else(cpu::default_threads, usize::from)
    }
}

/// KV storage types.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KvName {
    /// bfloat16
    Bf16,
    /// 8 bits with a scale a head
    #[value(name = "q8_0")]
    Q8_0,
}

impl ModelOptions {
    /// Opens the model.
    pub fn open(&self) -> Result<Arc<Model>> {
        open(self.model.as_deref())
    }

    /// Positions a sequence may have.
    pub fn context(&self, model: &Model) -> Result<usize> {
        let most = model.spec().context;
        match self.ctx {
            None => Ok(most),
            Some(ctx) if (1..=most).contains(&ctx) => Ok(ctx),
            Some(ctx) => Err(wrong_usage(format!(
                "--ctx: expected 1 to {most}, the checkpoint's own, found {ctx}"
            ))),
        }
    }

    /// Threads to compute with.
    pub fn threads(&self) -> usize {
        self.threads.count()
    }

    /// A KV cache for one sequence of `positions`.
    pub fn kv_config(&self, positions: usize) -> KvConfig {
        KvConfig::for_positions(positions, self.kv.kind())
    }

    /// A backend that holds `positions` in its KV cache.
    pub fn backend(&self, model: &Arc<Model>, positions: usize) -> Result<Box<dyn Backend>> {
        Ok((self.prepare(model)?.make)(self.kv_config(positions))?)
    }

    /// The model, ready for backends of the chosen kind.
    pub fn prepare(&self, model: &Arc<Model>) -> Result<Prepared, BackendError> {
        let Self { device, deterministic, metal_class, .. } = *self;
        let threads = self.threads();
        self.backend.prepare(model, Settings { threads, device, deterministic, metal_class })
    }
}

/// Opens the model of this name, and says so if its weights are not those of the pinned revision.
pub fn open(name: Option<&str>) -> Result<Arc<Model>> {
    let model = Reference::parse(name)?.open()?;
    if !matches!(model.origin, Origin::Pinned { .. }) {
        complain(&format!("weights: {}", origin(&model)));
    }
    Ok(model)
}

/// The tokenizer of a model.
pub fn tokenizer_of(spec: &Spec) -> Result<&'static Tokenizer> {
    Tokenizer::of(spec).context("the model has no tokenizer")
}

impl KvName {
    /// The engine's word for it.
    pub fn kind(self) -> KvKind {
        match self {
            KvName::Bf16 => KvKind::Bf16,
            KvName::Q8_0 => KvKind::Q8_0,
        }
    }

    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            KvName::Bf16 => "bf16",
            KvName::Q8_0 => "q8_0",
        }
    }
}

/// Made-up weights, for measuring and verifying on machines that hold no checkpoint.
#[derive(Clone, Args)]
pub struct SyntheticOptions {
    /// Use made-up weights with the dimensions of this registry entry
    #[arg(long, value_name = "ID", conflicts_with = "model")]
    pub synthetic: Option<String>,
    /// How the made-up weights are stored; f16, q6_k, q5_k and q4_k too
    #[arg(long, default_value = "bf16", requires = "synthetic")]
    pub scheme: String,
    /// Use only the first layers of the made-up weights
    #[arg(long, requires = "synthetic")]
    pub layers: Option<usize>,
}

impl SyntheticOptions {
    /// The made-up model, if one was asked for, or the model that was named.
    pub fn open_or(&self, named: &ModelOptions) -> Result<Arc<Model>> {
        let Some(id) = &self.synthetic else { return named.open() };
        let checkpoint = parse_id("--synthetic", id)?;
        // Made-up weights come in the types of other programs' files too.
        let scheme = match Scheme::from_name(&self.scheme) {
            Some(scheme) => scheme,
            None => parse_scheme("--scheme", &self.scheme)?,
        };
        let schemes = (scheme, scheme.default_head());
        let model = match self.layers {
            None => Model::synthetic(checkpoint, schemes, 0)?,
            Some(layers) if !(1..=checkpoint.spec.layers).contains(&layers) => {
                return Err(wrong_usage(format!(
                    "--layers: expected 1 to {}, found {layers}",
                    checkpoint.spec.layers
                )));
            }
            Some(layers) => Model::synthetic(Spec { layers, ..checkpoint.spec }, schemes, 0)?,
        };
        Ok(Arc::new(model))
    }
}

/// How tokens are drawn.
#[derive(Args)]
pub struct SamplingOptions {
    /// 0 always takes the most probable token
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub temperature: f32,
    /// Draw from the smallest set of tokens with this much probability
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub top_p: f32,
    /// Draw from this many of the most probable tokens; 0 is off
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    pub top_k: u32,
    /// Draw only tokens at least this probable, relative to the best
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub min_p: f32,
    /// Makes a run repeatable; random if left out
    #[arg(long, allow_negative_numbers = true)]
    pub seed: Option<u64>,
    /// Makes tokens that occurred less likely; 1 is off
    #[arg(long, default_value_t = 1.0, allow_negative_numbers = true)]
    pub repetition_penalty: f32,
    /// Subtracted from a token's logit for each time it was generated
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Subtracted from a token's logit if it was generated
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub presence_penalty: f32,
}

impl SamplingOptions {
    /// The engine's form of these flags.
    pub fn params(&self) -> Result<SamplingParams> {
        let params = SamplingParams {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            seed: self.seed.unwrap_or_else(random_seed),
        };
        params.check().map_err(|why| wrong_usage(format!("--{}", why.replacen('_', "-", 2))))?;
        Ok(params)
    }
}

/// A count with an optional k, M or G, binary, e.g. `32k`.
pub fn parse_size(text: &str) -> Result<usize> {
    let lower = text.to_ascii_lowercase();
    let (digits, unit) = match lower.as_bytes().last() {
        Some(b'k') => (&lower[..lower.len() - 1], 1 << 10),
        Some(b'm') => (&lower[..lower.len() - 1], 1 << 20),
        Some(b'g') => (&lower[..lower.len() - 1], 1 << 30),
        _ => (&*lower, 1),
    };
    let count: usize = digits.parse().context("expected a number such as 4096 or 32k")?;
    // Far more than any machine has, and small enough that sums of sizes cannot overflow.
    const MOST: usize = 1 << 44;
    count.checked_mul(unit).filter(|&size| size <= MOST).context("too large")
}

//! Flags that several verbs share.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use cpu::{Cpu, Options};
use engine::conformance::Reproducibility;
use engine::{Backend, KvConfig, KvKind, Oracle, SamplingParams};
use model::Model;

use crate::store::Reference;

/// Which model, on what.
#[derive(Args)]
pub struct ModelOptions {
    /// Registry id with an optional :scheme, or a GGUF file; kipp-tiny, which is built in, if left out
    pub model: Option<String>,
    /// What computes
    #[arg(long, value_enum, default_value_t = BackendName::Cpu)]
    pub backend: BackendName,
    /// Threads; the physical cores that this process may use if left out
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Positions, prompt and answer together, e.g. 32k; what the checkpoint was made for if left out
    #[arg(long, value_parser = parse_size)]
    pub ctx: Option<usize>,
    /// How keys and values are stored
    #[arg(long, value_enum, default_value_t = KvName::Bf16)]
    pub kv: KvName,
}

/// The backends of this binary.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// This machine's processor, with the best instructions that it has
    Cpu,
    /// The scalar definition of the model: slow, for reference
    Oracle,
}

impl BackendName {
    /// Its name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            BackendName::Cpu => "cpu",
            BackendName::Oracle => "oracle",
        }
    }

    /// What it promises about its own sums.
    pub fn reproducibility(self) -> Reproducibility {
        match self {
            BackendName::Cpu | BackendName::Oracle => Reproducibility::Bitwise,
        }
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
        Reference::parse(self.model.as_deref())?.open()
    }

    /// Positions a sequence may have.
    pub fn context(&self, model: &Model) -> Result<usize> {
        let most = model.spec().context;
        match self.ctx {
            None => Ok(most),
            Some(ctx) if (1..=most).contains(&ctx) => Ok(ctx),
            Some(ctx) => bail!("--ctx: expected 1 to {most}, the checkpoint's own, found {ctx}"),
        }
    }

    /// Threads to compute with.
    pub fn threads(&self) -> usize {
        self.threads.map_or_else(cpu::default_threads, usize::from)
    }

    /// A backend that holds `positions` in its KV cache.
    pub fn backend(&self, model: &Arc<Model>, positions: usize) -> Result<Box<dyn Backend>> {
        let kind = match self.kv {
            KvName::Bf16 => KvKind::Bf16,
            KvName::Q8_0 => KvKind::Q8_0,
        };
        self.backend_with(model, KvConfig::for_positions(positions, kind))
    }

    /// A backend with this KV cache.
    pub fn backend_with(&self, model: &Arc<Model>, kv: KvConfig) -> Result<Box<dyn Backend>> {
        match self.backend {
            BackendName::Cpu => {
                let options = Options { threads: self.threads(), ..Options::default() };
                Ok(Box::new(Cpu::new(Arc::clone(model), kv, options, &mut |_, _| {})?))
            }
            BackendName::Oracle => Ok(Box::new(Oracle::new(Arc::clone(model), kv, self.threads()))),
        }
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
    #[arg(long, default_value_t = 0)]
    pub top_k: u32,
    /// Draw only tokens at least this probable, relative to the best
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub min_p: f32,
    /// Makes a run repeatable; random if left out
    #[arg(long)]
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
        params.check().map_err(|why| anyhow::anyhow!("--{}", why.replacen('_', "-", 2)))?;
        Ok(params)
    }
}

/// A seed that differs from run to run: the standard library's hash keys are drawn from the system.
pub fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}

/// A count with an optional k or M, binary, e.g. `32k`.
pub fn parse_size(text: &str) -> Result<usize> {
    let lower = text.to_ascii_lowercase();
    let (digits, unit) = match lower.as_bytes().last() {
        Some(b'k') => (&lower[..lower.len() - 1], 1 << 10),
        Some(b'm') => (&lower[..lower.len() - 1], 1 << 20),
        _ => (&*lower, 1),
    };
    let count: usize = digits.parse().context("expected a number such as 4096 or 32k")?;
    count.checked_mul(unit).context("too large")
}

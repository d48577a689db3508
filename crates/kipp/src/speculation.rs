//! `--spec`: who guesses ahead of the model.

use std::sync::Arc;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use engine::speculation::{DraftModel, Drafter, Ngram, Speculation};
use model::Model;

use crate::options::ModelOptions;
use crate::output::wrong_usage;
use crate::store::Reference;

/// Guessing ahead.
#[derive(Args)]
pub struct SpeculationOptions {
    /// Guess ahead and check several tokens a forward pass; the answer is the same, and comes sooner where
    /// guesses are good
    #[arg(long, value_enum, value_name = "HOW", env = "KIPP_SPEC")]
    spec: Option<SpecName>,
    /// The smaller model that guesses; with it, --spec draft goes without saying
    #[arg(long, value_name = "MODEL", env = "KIPP_DRAFT_MODEL", required_if_eq("spec", "draft"))]
    draft_model: Option<String>,
}

/// Ways to guess.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SpecName {
    /// What followed in the text where its last tokens occurred before
    Ngram,
    /// A smaller model of the family
    Draft,
}

impl SpeculationOptions {
    /// Speculation for `model`, if it was asked for; a draft model runs on the same kind of backend, with
    /// `positions` in its KV cache.
    pub fn speculation(
        &self,
        options: &ModelOptions,
        model: &Model,
        positions: usize,
    ) -> Result<Option<Speculation>> {
        let Some(spec) = self.spec.or(self.draft_model.as_ref().map(|_| SpecName::Draft)) else {
            return Ok(None);
        };
        let drafter: Box<dyn Drafter> = match spec {
            SpecName::Ngram if self.draft_model.is_some() => {
                return Err(wrong_usage("--spec ngram: expected no --draft-model, found one"));
            }
            SpecName::Ngram => Box::<Ngram>::default(),
            SpecName::Draft => {
                let name = self.draft_model.as_deref().context("--draft-model")?;
                let small = Reference::parse(Some(name)).and_then(|small| small.open());
                let small: Arc<Model> = small.context("--draft-model")?;
                let (expected, found) = (model.spec().vocab, small.spec().vocab);
                if expected != found {
                    return Err(wrong_usage(format!(
                        "--draft-model: expected a vocabulary of {expected}, found {found}"
                    )));
                }
                Box::new(DraftModel::new(options.backend(&small, positions)?))
            }
        };
        Ok(Some(Speculation::new(drafter)))
    }
}

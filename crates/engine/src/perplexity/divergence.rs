//! How far a model's predictions are from a reference's, token by token.

use super::log_sum_exp;

/// What the comparison of two models over a text comes to.
#[derive(Debug, Clone, Default)]
pub struct Divergence {
    /// Kullback-Leibler divergence of the model from the reference, in nats, a scored token each.
    divergences: Vec<f64>,
    /// How often both have the same most probable token.
    agreed: usize,
    /// Negative log-likelihood of the text under the model and under the reference.
    nll: (f64, f64),
    /// Change of the text's own tokens' probability: sum and sum of squares.
    change: (f64, f64),
}

/// Figures over all tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// Tokens compared.
    pub tokens: usize,
    /// Perplexity of the text under the model.
    pub perplexity: f64,
    /// Perplexity of the text under the reference.
    pub reference: f64,
    /// Mean divergence in nats.
    pub mean: f64,
    /// Standard error of that mean, tokens taken as independent.
    pub error: f64,
    /// Half of the tokens diverge less.
    pub median: f64,
    /// 99 of 100 tokens diverge less.
    pub percentile_99: f64,
    /// The largest divergence.
    pub largest: f64,
    /// Share of tokens where both have the same most probable token.
    pub same_top: f64,
    /// Mean change of the probability of the text's tokens.
    pub mean_change: f64,
    /// Root of its mean square.
    pub rms_change: f64,
}

impl Divergence {
    /// Adds a token of the text: the reference's log-probabilities and the model's logits, both `[vocab]`.
    pub fn add(&mut self, target: u32, reference: &[f64], logits: &[f32]) {
        let norm = log_sum_exp(logits);
        let mut divergence = 0.0;
        let (mut best, mut best_of_reference) = (0, 0);
        for (token, (&p, &logit)) in reference.iter().zip(logits).enumerate() {
            divergence += p.exp() * (p - (f64::from(logit) - norm));
            // The first of equals, in both.
            if logit > logits[best] {
                best = token;
            }
            if p > reference[best_of_reference] {
                best_of_reference = token;
            }
        }
        // Rounding may leave a hair less than nothing.
        self.divergences.push(divergence.max(0.0));
        // Codes may make a tie of the reference's best tokens: any of them agrees.
        self.agreed += usize::from(reference[best] >= reference[best_of_reference]);
        let (q, p) = (f64::from(logits[target as usize]) - norm, reference[target as usize]);
        self.nll.0 -= q;
        self.nll.1 -= p;
        let change = q.exp() - p.exp();
        self.change.0 += change;
        self.change.1 += change * change;
    }

    /// The figures; `None` if nothing was added.
    pub fn summary(&self) -> Option<Summary> {
        let mut sorted = self.divergences.clone();
        sorted.sort_by(f64::total_cmp);
        let (&largest, tokens) = (sorted.last()?, sorted.len());
        let count = tokens as f64;
        let mean = sorted.iter().sum::<f64>() / count;
        let variance = sorted.iter().map(|d| (d - mean) * (d - mean)).sum::<f64>() / count;
        let percentile = |percent: usize| sorted[(tokens - 1) * percent / 100];
        Some(Summary {
            tokens,
            perplexity: (self.nll.0 / count).exp(),
            reference: (self.nll.1 / count).exp(),
            mean,
            error: (variance / count).sqrt(),
            median: percentile(50),
            percentile_99: percentile(99),
            largest,
            same_top: self.agreed as f64 / count,
            mean_change: self.change.0 / count,
            rms_change: (self.change.1 / count).sqrt(),
        })
    }
}

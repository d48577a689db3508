//! What the gates stand on: random inputs, a backend with a pool, and comparisons.

use std::sync::Arc;

use model::Model;

use super::{Finding, Reproducibility, Subject, Unit};
use crate::backend::{Backend, BackendError, KvConfig, KvKind};
use crate::batch::{Answer, Batch, Output, Row, Want};
use crate::kv::KvPool;
use crate::oracle::Oracle;
use crate::philox::philox;
use crate::sampling::argmax;
use crate::sequence::Sequence;

/// A logits row for each position asked for.
pub type Logits = Vec<Vec<f32>>;

/// Positions that gates go to unless more are asked for.
const LONGEST: usize = 1100;

/// The subject, and random numbers.
pub struct Rig<'a> {
    subject: Subject<'a>,
    drawn: u32,
    kv: KvKind,
    longest: usize,
    counterpart: Option<Arc<Model>>,
    /// What 8 bits a key and value cost, once it was asked for.
    cost: Option<f64>,
}

/// A backend and the pool that its sequences draw from.
pub struct Bench {
    backend: Box<dyn Backend>,
    /// The pool.
    pub pool: KvPool,
}

impl<'a> Rig<'a> {
    /// Gates draw their inputs one after the other from the subject's seed.
    pub fn new(subject: Subject<'a>) -> Self {
        let longest = LONGEST.min(subject.model.spec().context);
        Rig { subject, drawn: 0, kv: KvKind::Bf16, longest, counterpart: None, cost: None }
    }

    /// Gates that are not about a storage of keys and values use this one.
    pub fn with_kv(self, kv: KvKind) -> Self {
        Rig { kv, ..self }
    }

    /// The longest sequence, the checkpoint's limit at most.
    pub fn with_longest(self, longest: usize) -> Self {
        Rig { longest: longest.min(self.subject.model.spec().context), ..self }
    }

    /// The same checkpoint with exact weights.
    pub fn with_counterpart(self, exact: Arc<Model>) -> Self {
        Rig { counterpart: Some(exact), ..self }
    }

    /// Positions of the longest sequence.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// The checkpoint with exact weights, where there is one.
    pub fn counterpart(&self) -> Option<&Arc<Model>> {
        self.counterpart.as_ref()
    }

    /// Whether the subject promises the same bits however a value is computed.
    pub fn is_bitwise(&self) -> bool {
        self.subject.reproducibility == Reproducibility::Bitwise
    }

    /// The model under test.
    pub fn model(&self) -> &Arc<Model> {
        &self.subject.model
    }

    /// A random number below `sides`.
    pub fn roll(&mut self, sides: usize) -> usize {
        self.drawn += 1;
        philox(self.subject.seed, [self.drawn, 0, 0, 0])[0] as usize % sides
    }

    /// Random tokens of the whole vocabulary.
    pub fn tokens(&mut self, count: usize) -> Vec<u32> {
        let vocab = self.subject.model.spec().vocab;
        (0..count).map(|_| self.roll(vocab) as u32).collect()
    }

    /// The backend under test with room for `positions`.
    pub fn subject(&mut self, positions: usize) -> Result<Bench, BackendError> {
        self.subject_with(positions, self.kv)
    }

    /// The same with this storage of keys and values.
    pub fn subject_with(&mut self, positions: usize, kind: KvKind) -> Result<Bench, BackendError> {
        let kv = KvConfig::for_positions(positions, kind);
        Ok(Bench { backend: (self.subject.make)(kv)?, pool: KvPool::new(kv.blocks) })
    }

    /// The oracle with room for `positions`.
    pub fn oracle(&self, positions: usize) -> Bench {
        self.oracle_with(&self.subject.model, positions, self.kv)
    }

    /// The oracle on any model, with this storage of keys and values.
    pub fn oracle_with(&self, model: &Arc<Model>, positions: usize, kind: KvKind) -> Bench {
        let kv = KvConfig::for_positions(positions, kind);
        let oracle = Oracle::new(Arc::clone(model), kv, self.subject.threads);
        Bench { backend: Box::new(oracle), pool: KvPool::new(kv.blocks) }
    }

    /// What may differ from the oracle. A value that all but ties between two steps of 1/127 may be
    /// stored one step apart, and every layer amplifies that: with 8-bit keys and values the bound is
    /// what 8 bits cost at all, twice, since two that round independently differ by both their errors.
    fn bound(&mut self) -> Result<f64, BackendError> {
        if self.kv == KvKind::Bf16 {
            return Ok(self.subject.bound);
        }
        if self.cost.is_none() {
            // The worst row of one prompt is luck: of as many as gates compare.
            let model = Arc::clone(&self.subject.model);
            let mut cost = 0.0;
            for len in [31, 32, 33, 90] {
                let tokens = self.tokens(len);
                let read = |kind| {
                    let mut sequence = Sequence::new(tokens.clone());
                    self.oracle_with(&model, len, kind).read(&mut sequence)
                };
                let (rounded, exact) = (read(KvKind::Q8_0)?, read(KvKind::Bf16)?);
                cost = rounded.iter().zip(&exact).map(|(a, b)| nmse(a, b)).fold(cost, f64::max);
            }
            self.cost = Some(cost);
        }
        Ok(self.cost.map_or(self.subject.bound, |cost| self.subject.bound.max(2.0 * cost)))
    }

    /// Compares with the oracle: NMSE over the whole vocabulary, and the same arg max wherever the
    /// oracle tells the two candidates apart.
    pub fn against_oracle(
        &mut self,
        name: &str,
        found: &Logits,
        expected: &Logits,
    ) -> Result<Finding, BackendError> {
        let bound = self.bound()?;
        Ok(self.within(bound, name, found, expected))
    }

    /// The bound where nothing is stored in 8 bits.
    pub fn least_bound(&self) -> f64 {
        self.subject.bound
    }

    /// The same with a bound of at least `bound`.
    pub fn within(&self, bound: f64, name: &str, found: &Logits, expected: &Logits) -> Finding {
        let bound = bound.max(self.subject.bound);
        let mut worst = Finding { figure: 0.0, bound, unit: Unit::Nmse, detail: String::new() };
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            let nmse = nmse(found, expected);
            if nmse.is_nan() || nmse >= worst.figure {
                worst.figure = nmse;
                worst.detail = format!("{name}, row {i}");
            }
            if let Some(detail) = argmax_differs(found, expected, bound) {
                worst.figure = f64::INFINITY;
                worst.detail = format!("{name}, row {i}: {detail}");
            }
            if worst.figure.is_nan() || worst.figure.is_infinite() {
                break;
            }
        }
        worst
    }

    /// Compares two ways of computing the same rows that may use different kernel classes.
    pub fn same_across_classes(
        &mut self,
        name: &str,
        found: &Logits,
        expected: &Logits,
    ) -> Result<Finding, BackendError> {
        match self.subject.reproducibility {
            Reproducibility::Bitwise => Ok(same_bits(name, found, expected)),
            Reproducibility::WithinClass => self.against_oracle(name, found, expected),
        }
    }

    /// How far apart two logits of a row must be for all computations to agree on which is larger: at an
    /// NMSE of the bound their difference has a deviation of sqrt(2 bound) times the size of a logit, and
    /// the worst of many rows may be three of those off.
    pub fn blur(&mut self, row: &[f32]) -> Result<f64, BackendError> {
        Ok(blur(row, self.bound()?))
    }
}

impl Bench {
    /// Tokens that the backend takes in one call.
    pub fn most_tokens(&self) -> usize {
        self.backend.limits().tokens
    }

    /// Evaluates up to `count` pending tokens of each sequence in one call; returns the logits of the
    /// last `rows` tokens of each.
    pub fn evaluate(
        &mut self,
        sequences: &mut [&mut Sequence],
        count: usize,
        rows: usize,
    ) -> Result<Logits, BackendError> {
        let mut batch = Batch::default();
        for sequence in sequences {
            let count = count.min(sequence.pending());
            let first = sequence
                .schedule(&mut self.pool, &mut batch, count)
                .map_err(|_| BackendError::Batch("the gate's pool is too small".into()))?;
            let wanted = first + count - rows.min(count)..first + count;
            batch.rows.extend(wanted.map(|token| Row { token, want: Want::Logits }));
        }
        self.run(&batch)
    }

    /// Evaluates all pending tokens of one sequence, `chunk()` at a time; returns all their logits.
    pub fn evaluate_in_chunks(
        &mut self,
        sequence: &mut Sequence,
        mut chunk: impl FnMut() -> usize,
    ) -> Result<Logits, BackendError> {
        let mut logits = Logits::new();
        while sequence.pending() > 0 {
            let count = chunk().min(self.backend.limits().tokens);
            logits.extend(self.evaluate(&mut [&mut *sequence], count, count)?);
        }
        Ok(logits)
    }

    /// Evaluates all pending tokens of one sequence in as few calls as it takes; returns all their logits.
    pub fn read(&mut self, sequence: &mut Sequence) -> Result<Logits, BackendError> {
        self.evaluate_in_chunks(sequence, || usize::MAX)
    }

    /// Evaluates `count` pending tokens of one sequence in as few calls as it takes; returns the logits of
    /// the last.
    pub fn skip(&mut self, sequence: &mut Sequence, count: usize) -> Result<Logits, BackendError> {
        let end = sequence.evaluated() + count;
        let mut last = Logits::new();
        while sequence.evaluated() < end {
            let most = self.backend.limits().tokens;
            let chunk = most.min(end - sequence.evaluated());
            last = self.evaluate(&mut [&mut *sequence], chunk, 1)?;
        }
        Ok(last)
    }

    /// The backend alone.
    pub fn into_backend(self) -> Box<dyn Backend> {
        self.backend
    }

    /// Runs a batch whose rows all want logits.
    pub fn run(&mut self, batch: &Batch) -> Result<Logits, BackendError> {
        let logits = |answer| match answer {
            Answer::Logits(logits) => Ok(logits),
            other => Err(BackendError::Device(format!("expected logits, found {other:?}"))),
        };
        self.answers(batch)?.into_iter().map(logits).collect()
    }

    /// Runs a batch.
    pub fn answers(&mut self, batch: &Batch) -> Result<Vec<Answer>, BackendError> {
        let mut output = Output::default();
        self.backend.forward(batch, &mut output)?;
        let (found, expected) = (output.answers.len(), batch.rows.len());
        if found != expected {
            return Err(BackendError::Device(format!(
                "expected {expected} answers, found {found}"
            )));
        }
        Ok(output.answers)
    }
}

/// Bit for bit.
pub fn same_bits(name: &str, found: &Logits, expected: &Logits) -> Finding {
    let mut differing = 0;
    let mut detail = name.to_string();
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let pairs = found.iter().zip(expected);
        let here = pairs.filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        if here > 0 && differing == 0 {
            detail = format!("{name}, row {i}");
        }
        differing += here + found.len().abs_diff(expected.len());
    }
    differing += found.len().abs_diff(expected.len());
    Finding { figure: differing as f64, bound: 0.0, unit: Unit::DifferingBits, detail }
}

/// The worse of two findings of one gate.
pub fn worse(a: Finding, b: Finding) -> Finding {
    // Written so that a NaN counts as worse than anything.
    if b.figure <= a.figure { a } else { b }
}

/// Sum of squared differences over sum of squares; infinite if the lengths differ.
pub fn nmse(found: &[f32], expected: &[f32]) -> f64 {
    if found.len() != expected.len() {
        return f64::INFINITY;
    }
    let square = |x: f64| x * x;
    let difference = found.iter().zip(expected).map(|(&a, &b)| square(f64::from(a) - f64::from(b)));
    let size = expected.iter().map(|&b| square(f64::from(b)));
    difference.sum::<f64>() / size.sum::<f64>()
}

/// See [`Rig::blur`].
fn blur(row: &[f32], bound: f64) -> f64 {
    let squares: f64 = row.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    3.0 * (2.0 * bound * squares / row.len() as f64).sqrt()
}

/// Says which candidates the two rows prefer, unless they prefer the same or cannot tell.
fn argmax_differs(found: &[f32], expected: &[f32], bound: f64) -> Option<String> {
    let ((found, _), (best, largest)) = (argmax(found)?, argmax(expected)?);
    let gap = f64::from(largest - expected.get(found as usize)?);
    (gap > blur(expected, bound)).then(|| format!("arg max {found}, expected {best} by {gap}"))
}

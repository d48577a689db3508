//! The measuring: sequences with blocks of their own, driven as the engine drives a backend.

use std::time::Instant;

use anyhow::Result;
use engine::batch::BLOCK;
use engine::{Backend, Batch, Input, Output, Row, Sample, SamplingParams, Want};
use model::Spec;

use super::Args;

/// One thing to measure.
pub struct Case {
    pub name: String,
    pub sequences: usize,
    /// Tokens a sequence that are read in one go, or generated one after the other.
    pub work: Work,
    pub depth: usize,
}

pub enum Work {
    Read(usize),
    Generate(usize),
}

/// All combinations that were asked for.
pub fn cases(args: &Args) -> Vec<Case> {
    let mut cases = Vec::new();
    for &depth in &args.depth {
        let at = if depth > 0 { format!(" @ d{depth}") } else { String::new() };
        for &tokens in args.pp.iter().filter(|&&tokens| tokens > 0) {
            let name = format!("pp{tokens}{at}");
            cases.push(Case { name, sequences: 1, work: Work::Read(tokens), depth });
        }
        for &tokens in args.tg.iter().filter(|&&tokens| tokens > 0) {
            for &sequences in args.batch.iter().filter(|&&sequences| sequences > 0) {
                let times = if sequences > 1 { format!(" x{sequences}") } else { String::new() };
                let name = format!("tg{tokens}{times}{at}");
                cases.push(Case { name, sequences, work: Work::Generate(tokens), depth });
            }
        }
    }
    cases
}

impl Case {
    /// Positions that each sequence needs.
    pub fn reach(&self) -> usize {
        self.depth + self.work.tokens()
    }
}

impl Work {
    /// Tokens a sequence.
    pub fn tokens(&self) -> usize {
        match *self {
            Work::Read(tokens) | Work::Generate(tokens) => tokens,
        }
    }
}

/// Seconds of each counted repetition.
pub fn measure(backend: &mut dyn Backend, spec: &Spec, case: &Case, reps: u32) -> Result<Vec<f64>> {
    let mut bench = Bench::new(backend, spec, case);
    bench.fill(case.depth)?;
    let mut seconds = Vec::new();
    for rep in 0..=reps {
        let started = Instant::now();
        match case.work {
            Work::Read(tokens) => bench.read(case.depth, tokens)?,
            Work::Generate(tokens) => bench.generate(case.depth, tokens)?,
        }
        if rep > 0 {
            seconds.push(started.elapsed().as_secs_f64());
        }
    }
    Ok(seconds)
}

/// Sequences with blocks of their own, evaluated on pseudo-random tokens.
struct Bench<'a> {
    backend: &'a mut dyn Backend,
    vocab: usize,
    tables: Vec<Vec<u32>>,
    batch: Batch,
    output: Output,
}

impl<'a> Bench<'a> {
    fn new(backend: &'a mut dyn Backend, spec: &Spec, case: &Case) -> Self {
        let blocks = case.reach().div_ceil(BLOCK) as u32;
        let table = |s| (s * blocks..(s + 1) * blocks).collect();
        Bench {
            backend,
            vocab: spec.vocab,
            tables: (0..case.sequences as u32).map(table).collect(),
            batch: Batch::default(),
            output: Output::default(),
        }
    }

    /// Puts `depth` positions into every sequence's cache.
    fn fill(&mut self, depth: usize) -> Result<()> {
        for sequence in 0..self.tables.len() {
            self.read_into(sequence, 0, depth)?;
        }
        Ok(())
    }

    /// Reads a prompt into the first sequence.
    fn read(&mut self, depth: usize, tokens: usize) -> Result<()> {
        self.read_into(0, depth, tokens)
    }

    fn read_into(&mut self, sequence: usize, start: usize, tokens: usize) -> Result<()> {
        let most = self.backend.limits().tokens;
        let end = start + tokens;
        for position in (start..end).step_by(most) {
            let count = most.min(end - position);
            self.batch.clear();
            let inputs = (position..position + count).map(|p| Input::Token(self.token(p)));
            let inputs: Vec<Input> = inputs.collect();
            let first = self.batch.push(inputs, position, &self.tables[sequence]);
            if position + count == end {
                self.batch.rows.push(draw(first + count - 1, end));
            }
            self.backend.forward(&self.batch, &mut self.output)?;
        }
        Ok(())
    }

    /// Generates in all sequences, each step from the draws of the one before, as the engine does.
    fn generate(&mut self, depth: usize, tokens: usize) -> Result<()> {
        let queue = self.backend.limits().queue;
        let mut behind = 0;
        for step in 0..tokens {
            self.batch.clear();
            for (row, table) in self.tables.iter().enumerate() {
                let first = Input::Token(self.token(depth + row));
                let input = if step == 0 { first } else { Input::Sampled(row) };
                let token = self.batch.push([input], depth + step, table);
                self.batch.rows.push(draw(token, depth + step + 1));
            }
            self.backend.submit(&self.batch)?;
            behind += 1;
            if behind == queue {
                self.backend.collect(&mut self.output)?;
                behind -= 1;
            }
        }
        for _ in 0..behind {
            self.backend.collect(&mut self.output)?;
        }
        Ok(())
    }

    fn token(&self, position: usize) -> u32 {
        (position.wrapping_mul(7919) % self.vocab) as u32
    }
}

/// A greedy draw after a token.
fn draw(token: usize, position: usize) -> Row {
    let sample = Sample::new(SamplingParams::default(), position as u32);
    Row { token, want: Want::Sample(Box::new(sample)) }
}

//! The gates themselves.

use std::sync::Arc;

use model::Scheme;

use super::rig::{Bench, Logits, Rig, nmse, same_bits, worse};
use super::speculation::speculation;
use super::{Finding, Gate, Unit};
use crate::backend::{BackendError, KvKind};
use crate::batch::{Answer, BLOCK, Batch, Input, Row, Want};
use crate::kv::KvPool;
use crate::sampling::{Sample, Sampler, SamplingParams, argmax};
use crate::sequence::Sequence;

/// All gates, in the order in which they are run: a fault should show first where it is easiest to see.
pub static GATES: &[Gate] = &[
    Gate { name: "logits", shows: "logits agree with the oracle's", run: logits },
    Gate { name: "incremental", shows: "token by token = all at once", run: incremental },
    Gate { name: "chunking", shows: "any cut of a prompt = all at once", run: chunking },
    Gate { name: "block-table", shows: "a scrambled block table = the identity", run: block_table },
    Gate { name: "shared-prefix", shows: "an adopted prefix = a private one", run: shared_prefix },
    Gate {
        name: "copy-on-write",
        shows: "a fork that diverges = a private one",
        run: copy_on_write,
    },
    Gate { name: "batched", shows: "17 sequences at once = each alone", run: batched },
    Gate { name: "mixed", shows: "prompts beside decoding = each alone", run: mixed },
    Gate { name: "prefill", shows: "prompts read together agree with the oracle", run: prefill },
    Gate { name: "rows", shows: "every row of a call = that row alone", run: rows },
    Gate { name: "sampling", shows: "the backend's draws = the host sampler's", run: sampling },
    Gate { name: "speculation", shows: "drafts change no token", run: speculation },
    Gate { name: "kv-q8_0", shows: "8-bit KV agrees with the oracle's 8-bit KV", run: kv_q8_0 },
    Gate { name: "long-context", shows: "long contexts agree, at every split", run: long_context },
    Gate { name: "far-context", shows: "contexts up to 32,768 agree", run: far_context },
    Gate { name: "far-kv-q8_0", shows: "so do those of 8-bit KV", run: far_kv_q8_0 },
];

/// One more, where the same checkpoint is at hand with exact weights.
pub static AGAINST_BF16: Gate =
    Gate { name: "quantised", shows: "weights cost what their scheme may cost", run: quantised };

/// Evaluates `tokens` in one call and returns all logits.
fn at_once(bench: &mut Bench, tokens: &[u32]) -> Result<Logits, BackendError> {
    let mut sequence = Sequence::new(tokens.to_vec());
    let logits = bench.read(&mut sequence)?;
    sequence.release(&mut bench.pool);
    Ok(logits)
}

/// Folds the findings of several cases into the worst.
fn worst(
    cases: impl IntoIterator<Item = Result<Finding, BackendError>>,
) -> Result<Finding, BackendError> {
    let mut cases = cases.into_iter();
    let none = || Err(BackendError::Batch("the gate has no case".into()));
    let first = cases.next().unwrap_or_else(none)?;
    cases.try_fold(first, |a, b| Ok(worse(a, b?)))
}

fn logits(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    worst([1, 2, 5, 16, 31, 33, 70].map(|len| {
        let tokens = rig.tokens(len);
        let found = at_once(&mut rig.subject(len)?, &tokens)?;
        let expected = at_once(&mut rig.oracle(len), &tokens)?;
        rig.against_oracle(&format!("{len} tokens"), &found, &expected)
    }))
}

fn incremental(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let tokens = rig.tokens(40);
    let mut bench = rig.subject(128)?;
    let expected = at_once(&mut bench, &tokens)?;
    let found = bench.evaluate_in_chunks(&mut Sequence::new(tokens), || 1)?;
    rig.same_across_classes("40 tokens", &found, &expected)
}

fn chunking(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let tokens = rig.tokens(150);
    let mut bench = rig.subject(1024)?;
    let expected = at_once(&mut bench, &tokens)?;
    worst([3, 9, 40, 100].map(|largest| {
        let mut sequence = Sequence::new(tokens.clone());
        let found = bench.evaluate_in_chunks(&mut sequence, || 1 + rig.roll(largest))?;
        sequence.release(&mut bench.pool);
        rig.same_across_classes(&format!("chunks up to {largest}"), &found, &expected)
    }))
}

fn block_table(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let blocks = 8;
    let tokens = rig.tokens(blocks * BLOCK / 2 - 5);
    let mut bench = rig.subject(blocks * BLOCK)?;
    let expected = at_once(&mut bench, &tokens)?;
    // Take all blocks and give them back in random order: the next sequence gets them in that order.
    worst((0..4).map(|round| {
        let mut taken = Vec::new();
        while let Ok(block) = bench.pool.allocate() {
            taken.push(block);
        }
        while !taken.is_empty() {
            bench.pool.release(taken.swap_remove(rig.roll(taken.len())));
        }
        let found = at_once(&mut bench, &tokens)?;
        Ok(same_bits(&format!("order {round}"), &found, &expected))
    }))
}

fn shared_prefix(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let mut bench = rig.subject(1024)?;
    worst([BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 7].map(|len| {
        let mut tokens = rig.tokens(len);
        let mut first = Sequence::new(tokens.clone());
        bench.evaluate(&mut [&mut first], len, 1)?;
        first.publish(&mut bench.pool);
        tokens.extend(rig.tokens(9));

        let mut adopting = Sequence::new(tokens.clone());
        let gained = adopting.adopt(&mut bench.pool);
        let found = bench.read(&mut adopting)?;
        let mut private = Sequence::new(tokens);
        bench.evaluate(&mut [&mut private], gained, 1)?;
        let expected = bench.read(&mut private)?;
        for mut sequence in [first, adopting, private] {
            sequence.release(&mut bench.pool);
        }
        let mut finding = same_bits(&format!("prefix of {len}"), &found, &expected);
        if gained < len / BLOCK * BLOCK {
            finding.figure = f64::INFINITY;
            finding.detail = format!("prefix of {len}: only {gained} tokens were adopted");
        }
        Ok(finding)
    }))
}

fn copy_on_write(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let mut bench = rig.subject(1024)?;
    worst([5, BLOCK - 1, BLOCK, BLOCK + 3].map(|len| {
        let prompt = rig.tokens(len);
        let mut trunk = Sequence::new(prompt.clone());
        bench.evaluate(&mut [&mut trunk], len, 1)?;
        let mut forks = Vec::new();
        for _ in 0..3 {
            let mut fork = trunk.fork(&mut bench.pool);
            fork.append(&rig.tokens(6));
            forks.push(fork);
        }
        // Fork by fork and token by token, so that they write in turns into what was one block.
        let mut found = vec![Logits::new(); forks.len()];
        for _ in 0..6 {
            for (fork, found) in forks.iter_mut().zip(&mut found) {
                found.extend(bench.evaluate(&mut [fork], 1, 1)?);
            }
        }
        let mut finding = same_bits("", &Logits::new(), &Logits::new());
        for (mut fork, found) in forks.into_iter().zip(&found) {
            let mut private = Sequence::new(fork.tokens().to_vec());
            bench.evaluate(&mut [&mut private], len, 1)?;
            let expected = bench.evaluate_in_chunks(&mut private, || 1)?;
            finding = worse(finding, same_bits(&format!("fork at {len}"), found, &expected));
            private.release(&mut bench.pool);
            fork.release(&mut bench.pool);
        }
        trunk.release(&mut bench.pool);
        Ok(finding)
    }))
}

fn batched(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let steps = 4;
    let mut bench = rig.subject(4096)?;
    let mut sequences = Vec::new();
    for i in 0..17 {
        let len = 1 + i * 5 + steps;
        sequences.push(Sequence::new(rig.tokens(len)));
    }
    for sequence in &mut sequences {
        let prompt = sequence.tokens().len() - steps;
        bench.evaluate(&mut [sequence], prompt, 1)?;
    }
    let mut found = Logits::new();
    for _ in 0..steps {
        let mut together: Vec<&mut Sequence> = sequences.iter_mut().collect();
        found.extend(bench.evaluate(&mut together, 1, 1)?);
    }
    let mut alone = Vec::new();
    for sequence in &mut sequences {
        sequence.release(&mut bench.pool);
        let prompt = sequence.pending() - steps;
        bench.evaluate(&mut [sequence], prompt, 1)?;
        alone.push(bench.evaluate_in_chunks(sequence, || 1)?);
    }
    let expected: Logits =
        (0..steps).flat_map(|step| alone.iter().map(move |rows| rows[step].clone())).collect();
    rig.same_across_classes("17 sequences", &found, &expected)
}

fn mixed(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let mut bench = rig.subject(1024)?;
    let mut decoding = Sequence::new(rig.tokens(50));
    let mut reading = Sequence::new(rig.tokens(90));
    bench.evaluate(&mut [&mut decoding], 49, 1)?;
    bench.evaluate(&mut [&mut reading], 13, 1)?;
    let found = bench.evaluate(&mut [&mut decoding, &mut reading], 77, 77)?;
    let mut expected = Logits::new();
    for (sequence, first) in [(&mut decoding, 49), (&mut reading, 13)] {
        sequence.release(&mut bench.pool);
        bench.evaluate(&mut [sequence], first, 1)?;
        expected.extend(bench.evaluate(&mut [sequence], 77, 77)?);
    }
    rig.same_across_classes("1 token beside 77", &found, &expected)
}

/// Prompts of several lengths and beginnings in one call of hundreds of tokens, or as many as the backend takes, twice.
fn prefill(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let prompts = [(0, 290), (45, 140), (31, 33), (64, 17)]
        .map(|(first, len)| (first, rig.tokens(first + len)));
    let mut bench = rig.subject(1024)?;
    let each = bench.most_tokens() / prompts.len();
    let read = |bench: &mut Bench| {
        let mut sequences: Vec<_> =
            prompts.iter().map(|(_, tokens)| Sequence::new(tokens.clone())).collect();
        for (sequence, (first, _)) in sequences.iter_mut().zip(&prompts) {
            if *first > 0 {
                bench.evaluate(&mut [sequence], *first, 1)?;
            }
        }
        let mut together: Vec<&mut Sequence> = sequences.iter_mut().collect();
        let logits = bench.evaluate(&mut together, each, 17)?;
        sequences.iter_mut().for_each(|sequence| sequence.release(&mut bench.pool));
        Ok(logits)
    };
    let found = read(&mut bench)?;
    let again = same_bits("again", &read(&mut bench)?, &found);
    let expected = read(&mut rig.oracle(1024))?;
    Ok(worse(rig.against_oracle("4 prompts", &found, &expected)?, again))
}

fn rows(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let tokens = rig.tokens(37);
    let mut bench = rig.subject(128)?;
    let expected = at_once(&mut bench, &tokens)?;
    worst((0..tokens.len()).step_by(3).map(|token| {
        let mut sequence = Sequence::new(tokens.clone());
        let mut batch = Batch::default();
        schedule(&mut sequence, &mut bench.pool, &mut batch)?;
        batch.rows.push(Row { token, want: Want::Logits });
        let found = bench.run(&batch)?;
        sequence.release(&mut bench.pool);
        rig.same_across_classes(&format!("row {token}"), &found, &expected[token..=token].to_vec())
    }))
}

/// Puts all of a sequence into a batch.
fn schedule(
    sequence: &mut Sequence,
    pool: &mut KvPool,
    batch: &mut Batch,
) -> Result<(), BackendError> {
    let count = sequence.pending();
    match sequence.schedule(pool, batch, count) {
        Ok(_) => Ok(()),
        Err(_) => Err(BackendError::Batch("the gate's pool is too small".into())),
    }
}

/// Sampling settings that between them use every field.
fn settings(rig: &mut Rig<'_>) -> Vec<SamplingParams> {
    let warm =
        SamplingParams { temperature: 0.8, seed: rig.roll(1 << 30) as u64, ..Default::default() };
    vec![
        SamplingParams::default(),
        warm.clone(),
        SamplingParams { top_k: 20, ..warm.clone() },
        SamplingParams { top_p: 0.9, ..warm.clone() },
        SamplingParams { min_p: 0.05, ..warm.clone() },
        SamplingParams { top_k: 40, top_p: 0.8, min_p: 0.01, temperature: 1.3, ..warm.clone() },
        SamplingParams { repetition_penalty: 1.3, ..Default::default() },
        SamplingParams { frequency_penalty: 0.7, presence_penalty: 0.4, ..warm },
    ]
}

fn sampling(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let vocab = rig.model().spec().vocab;
    let mut bench = rig.subject(256)?;
    let tokens = rig.tokens(24);
    let logits = at_once(&mut bench, &tokens)?;
    let mut host = Sampler::default();
    let (mut differing, mut detail) = (0, "24 rows under 8 settings".to_string());
    for params in settings(rig) {
        let mut sequence = Sequence::new(tokens.clone());
        let mut batch = Batch::default();
        schedule(&mut sequence, &mut bench.pool, &mut batch)?;
        for token in 0..tokens.len() {
            let mut sample = Sample::new(params.clone(), token as u32 + 1);
            // The token that would win is in the history, and nowhere but at its end.
            sample.history = tokens[..=token].to_vec();
            sample.history.extend(argmax(&logits[token]).map(|(best, _)| best));
            sample.prompt = token / 2;
            sample.top = token % 4;
            if token % 3 == 1 {
                sample.bias = [(rig.roll(vocab) as u32, 3.0)].into();
            }
            if token % 5 == 2 {
                sample.mask =
                    Some((0..vocab.div_ceil(32)).map(|_| rig.roll(1 << 32) as u32).collect());
            }
            batch.rows.push(Row { token, want: Want::Sample(Box::new(sample)) });
        }
        let answers = bench.answers(&batch)?;
        sequence.release(&mut bench.pool);
        for (row, found) in batch.rows.iter().zip(&answers) {
            let expected = host.answer(&row.want, &logits[row.token]);
            if !same_choice(found, &expected) {
                differing += 1;
                detail = format!("{params:?}, row {}: {found:?}, not {expected:?}", row.token);
            }
        }
    }
    // A device's own exp and log may order two draws differently that all but tie.
    let bound = if rig.is_bitwise() { 0.0 } else { 1.0 };
    Ok(Finding { figure: f64::from(differing), bound, unit: Unit::DifferingAnswers, detail })
}

/// The same token, and log-probabilities within rounding.
fn same_choice(found: &Answer, expected: &Answer) -> bool {
    let (Answer::Choice(a), Answer::Choice(b)) = (found, expected) else { return false };
    let close = |a: f32, b: f32| (a - b).abs() < 1e-3;
    a.token == b.token
        && close(a.logprob, b.logprob)
        && a.top.len() == b.top.len()
        && a.top.iter().zip(&b.top).all(|(a, b)| close(a.1, b.1))
}

/// 8-bit keys and values. The subject and the oracle store a value that all but ties between two steps of 1/127 one step
/// apart, and every layer amplifies that, so a row may be as far off as two roundings that know nothing of each other.
/// Most values do not tie: over many rows the two must agree better than 8 bits agree with 16.
fn kv_q8_0(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let model = Arc::clone(rig.model());
    let (mut found, mut expected, mut exact) = (Logits::new(), Logits::new(), Logits::new());
    for len in [1, 31, 32, 33, 90] {
        let tokens = rig.tokens(len);
        found.extend(at_once(&mut rig.subject_with(len, KvKind::Q8_0)?, &tokens)?);
        expected.extend(at_once(&mut rig.oracle_with(&model, len, KvKind::Q8_0), &tokens)?);
        exact.extend(at_once(&mut rig.oracle_with(&model, len, KvKind::Bf16), &tokens)?);
    }
    let worst = rig.within(2.0 * eight_bits(&expected, &exact), "5 prompts", &found, &expected);
    let mean = |a: &Logits, b: &Logits| {
        a.iter().zip(b).map(|(a, b)| nmse(a, b)).sum::<f64>() / a.len() as f64
    };
    let mean = Finding {
        figure: mean(&found, &expected),
        bound: rig.least_bound().max(mean(&expected, &exact)),
        unit: Unit::Nmse,
        detail: format!("mean of {} rows", found.len()),
    };
    // Of the two the one that is nearer its bound; written so that a NaN is.
    let share = |f: &Finding| f.figure / f.bound;
    Ok(if share(&mean) <= share(&worst) { worst } else { mean })
}

/// What 8 bits a key and value cost at all: the worst row of the oracle's.
fn eight_bits(rounded: &Logits, exact: &Logits) -> f64 {
    rounded.iter().zip(exact).map(|(a, b)| nmse(a, b)).fold(5e-5, f64::max)
}

/// What quantised weights may cost, NMSE of logits on random tokens against the same checkpoint in bf16: about ten
/// times what kipp-tiny's do (q8_0 1e-4, q4_1 6e-3, q4_0 1.2e-2), since errors add up over layers.
fn scheme_bound(scheme: Scheme) -> f64 {
    match scheme {
        Scheme::Bf16 => 0.0,
        Scheme::F16 => 1e-4,
        Scheme::Q8_0 => 1e-3,
        Scheme::Q6K => 5e-3,
        Scheme::Q5K => 2e-2,
        Scheme::Q4K | Scheme::Q4_1 => 6e-2,
        Scheme::Q4_0 => 0.12,
    }
}

fn quantised(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let none = || BackendError::Batch("the gate has no bf16 counterpart to compare with".into());
    let exact = Arc::clone(rig.counterpart().ok_or_else(none)?);
    let bound = scheme_bound(rig.model().scheme);
    let (mut sum, mut rows) = (0.0, 0);
    for len in [1, 33, 70] {
        let tokens = rig.tokens(len);
        let found = at_once(&mut rig.subject(len)?, &tokens)?;
        let expected = at_once(&mut rig.oracle_with(&exact, len, KvKind::Bf16), &tokens)?;
        sum += found.iter().zip(&expected).map(|(a, b)| nmse(a, b)).sum::<f64>();
        rows += found.len();
    }
    let detail = format!("mean of {rows} rows");
    Ok(Finding { figure: sum / rows as f64, bound, unit: Unit::Nmse, detail })
}

fn long_context(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let longest = rig.longest();
    let tokens = rig.tokens(longest);
    let mut oracle = rig.oracle(longest);
    let mut bench = rig.subject(longest)?;
    let mut reference = Sequence::new(tokens.clone());
    let mut sequence = Sequence::new(tokens);
    // Splits of a context are powers of two: one less and one more, as far as it goes.
    let around = (7..).flat_map(|power| [(1 << power) - 1, (1 << power) + 1]);
    let lengths = around.take_while(|&len| len < longest).chain([longest]);
    worst(lengths.map(|len| {
        // Read up to the length, then decode one token there: both paths over the whole context.
        let step = len - sequence.evaluated();
        let (mut found, mut expected) = (Logits::new(), Logits::new());
        for count in [step - 1, 1] {
            found.extend(bench.skip(&mut sequence, count)?);
            expected.extend(oracle.skip(&mut reference, count)?);
        }
        rig.against_oracle(&format!("{len} tokens"), &found, &expected)
    }))
}

fn far_context(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let far = Far::new(rig);
    let expected = far.run(rig.oracle(far.room()))?;
    let found = far.run(rig.subject(far.room())?)?;
    rig.against_oracle(&far.name(), &found, &expected)
}

fn far_kv_q8_0(rig: &mut Rig<'_>) -> Result<Finding, BackendError> {
    let (far, model) = (Far::new(rig), Arc::clone(rig.model()));
    let expected = far.run(rig.oracle_with(&model, far.room(), KvKind::Q8_0))?;
    let found = far.run(rig.subject_with(far.room(), KvKind::Q8_0)?)?;
    let exact = far.run(rig.oracle_with(&model, far.room(), KvKind::Bf16))?;
    Ok(rig.within(2.0 * eight_bits(&expected, &exact), &far.name(), &found, &expected))
}

/// Long contexts of few tokens: a table that names the same blocks again and again means nothing, but both sides must
/// agree on it, and only the rows at its end cost the oracle time.
struct Far {
    prompt: Vec<u32>,
    /// Where a few tokens begin, and they.
    cases: Vec<(usize, Vec<u32>)>,
}

impl Far {
    fn new(rig: &mut Rig<'_>) -> Self {
        let longest = rig.model().spec().context.min(32_768);
        let prompt = rig.tokens(longest.min(128));
        let cases = [(2048, 1), (8192, 3), (16_384, 17), (longest, 32), (longest, 1)]
            .map(|(start, count)| (start.min(longest - BLOCK), rig.tokens(count)));
        Far { prompt, cases: cases.into() }
    }

    /// Positions that its blocks hold.
    fn room(&self) -> usize {
        self.prompt.len() + BLOCK
    }

    fn name(&self) -> String {
        let starts: Vec<usize> = self.cases.iter().map(|(start, _)| *start).collect();
        format!("contexts of {starts:?}")
    }

    /// The logits of each case's last token.
    fn run(&self, mut bench: Bench) -> Result<Logits, BackendError> {
        let own = (self.prompt.len() / BLOCK) as u32; // a block for the new tokens, so that none is in two places
        let mut evaluate = |tokens: &[u32], start: usize, new: std::ops::Range<u32>| {
            let table: Vec<u32> = (0..own).cycle().take(start / BLOCK).chain(new).collect();
            let mut batch = Batch::default();
            batch.push(tokens.iter().map(|&token| Input::Token(token)), start, &table);
            batch.rows.push(Row { token: tokens.len() - 1, want: Want::Logits });
            bench.run(&batch)
        };
        evaluate(&self.prompt, 0, 0..own)?;
        let rows = self.cases.iter().map(|(start, tokens)| evaluate(tokens, *start, own..own + 1));
        Ok(rows.collect::<Result<Vec<Logits>, _>>()?.concat())
    }
}

//! Answer rows on their way to the device and back (`kernels/sample.cuh`: `Draw`, `Edit`, `Answer`).

pub use engine::device::Asked;
use engine::device::{choice, edits};
use engine::sampling::COLD;
use engine::{Answer, BackendError, Sample, Want};

/// Alternatives that an answer can list.
pub const MOST_TOP: usize = 64;
/// Bytes of an answer.
pub const ANSWER_BYTES: usize = 16;
/// Bytes of an answer's alternatives.
pub const TOP_BYTES: usize = MOST_TOP * 8;

const NONE: u32 = u32::MAX;

/// Appends what the device needs to answer a row; returns where that begins.
pub fn pack_row(want: &Want, vocab: usize, words: &mut Vec<u32>) -> Result<usize, BackendError> {
    let top = match want {
        Want::Logits => 0,
        Want::Score { top, .. } => *top,
        Want::Sample(sample) => sample.top,
    };
    if top > MOST_TOP {
        return Err(BackendError::Batch(format!(
            "{top} alternatives, at most {MOST_TOP} an answer"
        )));
    }
    let at = words.len();
    match want {
        Want::Logits => words.extend([0; 16]),
        Want::Score { target, top } => {
            words.extend([1, *target, 0, *top as u32]);
            words.extend([0; 12]);
        }
        Want::Sample(sample) => pack_sample(sample, vocab, words),
    }
    Ok(at)
}

fn pack_sample(sample: &Sample, vocab: usize, words: &mut Vec<u32>) {
    let p = &sample.params;
    let edits = edits(sample, vocab);
    let edits_at = words.len() + 16;
    let mask_at = edits_at + edits.len() * 4;
    let scale = if p.temperature < COLD { 0.0 } else { 1.0 / p.temperature };
    let floor = if p.min_p > 0.0 { p.min_p.ln() } else { f32::NEG_INFINITY };
    words.extend([2, 0, sample.position, sample.top as u32]);
    words.extend([
        scale.to_bits(),
        p.top_k.min(i32::MAX as u32),
        p.top_p.to_bits(),
        floor.to_bits(),
    ]);
    words.extend([p.seed as u32, (p.seed >> 32) as u32, edits.len() as u32, edits_at as u32]);
    words.push(if sample.mask.is_some() { mask_at as u32 } else { NONE });
    words.extend([p.repetition_penalty, p.frequency_penalty, p.presence_penalty].map(f32::to_bits));
    for (token, edit) in edits {
        words.extend([token, edit.seen as u32, edit.bias.to_bits(), 0]);
    }
    if let Some(mask) = &sample.mask {
        // Tokens past the end of the mask are not allowed.
        let whole = vocab.div_ceil(32);
        words.extend(mask.iter().copied().chain(std::iter::repeat(0)).take(whole));
    }
}

/// Reads row `index` from the device's answers; `logits` are the row's, if it wanted them.
pub fn unpack_answer(
    want: &Asked,
    index: usize,
    answers: &[u8],
    tops: &[u8],
    logits: &[u8],
) -> Answer {
    match *want {
        Asked::Logits => {
            let logit = |bytes: &[u8; 4]| f32::from_le_bytes(*bytes);
            Answer::Logits(logits.as_chunks().0.iter().map(logit).collect())
        }
        Asked::Choice { top } => {
            let tops = if top > 0 { &tops[index * TOP_BYTES..] } else { &[] };
            choice(&answers[index * ANSWER_BYTES..], tops, top)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::SamplingParams;

    #[test]
    fn edits_count_the_output_and_add_biases() {
        let params = SamplingParams { presence_penalty: 1.0, ..Default::default() };
        let mut sample = Sample::new(params, 4);
        sample.history = vec![3, 5, 3, 7, 7];
        sample.prompt = 2;
        sample.bias = [(5, 1.0), (9, 0.5), (9, 0.25), (99, 1.0)].into();
        let found: Vec<_> = edits(&sample, 50).iter().map(|(t, e)| (*t, e.seen, e.bias)).collect();
        assert_eq!(found, [(3, 1, 0.0), (5, 0, 1.0), (7, 2, 0.0), (9, -1, 0.75)]);
    }

    #[test]
    fn too_many_alternatives_are_refused() {
        let want = Want::Score { target: 1, top: MOST_TOP + 1 };
        assert!(pack_row(&want, 100, &mut Vec::new()).is_err());
    }
}

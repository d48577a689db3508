//! Answer rows on their way to the device (`kernels/sample.h`: `Draw`, `Edit`, `Answer`).

use engine::device::edits;
use engine::sampling::COLD;
use engine::{BackendError, Sample, Want};

/// Alternatives that an answer can list.
pub const MOST_TOP: usize = 64;
/// Bytes of an answer.
pub const ANSWER_BYTES: usize = 16;
/// Bytes of an answer's alternatives.
pub const TOP_BYTES: usize = MOST_TOP * 8;
/// Words of a `Draw`.
const DRAW: usize = 16;
/// No mask.
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
        Want::Logits => {}
        Want::Score { target, top } => {
            if *target as usize >= vocab {
                return Err(BackendError::Batch(format!("score of token {target} of {vocab}")));
            }
            words.extend([1, *target, 0, *top as u32]);
        }
        Want::Sample(sample) => pack_sample(sample, vocab, words),
    }
    words.resize(words.len().max(at + DRAW), 0);
    Ok(at)
}

fn pack_sample(sample: &Sample, vocab: usize, words: &mut Vec<u32>) {
    let p = &sample.params;
    let edits = edits(sample, vocab);
    let edits_at = words.len() + DRAW;
    let mask_at = edits_at + edits.len() * 4;
    let scale = if p.temperature < COLD { 0.0 } else { 1.0 / p.temperature };
    let floor = if p.min_p > 0.0 { p.min_p.ln() } else { f32::NEG_INFINITY };
    words.extend([2, 0, sample.position, sample.top as u32]);
    words.extend([scale.to_bits(), p.top_k.min(vocab as u32), fraction(p.top_p), floor.to_bits()]);
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

/// A probability in units of 2^-32, at least one of them; 0 says that all is kept.
fn fraction(p: f32) -> u32 {
    if p < 1.0 { ((f64::from(p) * 4_294_967_296.0) as u32).max(1) } else { 0 }
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
    fn what_a_device_cannot_answer_is_refused() {
        let too_many = Want::Score { target: 1, top: MOST_TOP + 1 };
        assert!(pack_row(&too_many, 100, &mut Vec::new()).is_err());
        assert!(pack_row(&Want::Score { target: 100, top: 1 }, 100, &mut Vec::new()).is_err());
    }

    #[test]
    fn fractions_are_never_taken_for_all() {
        assert_eq!([fraction(1.0), fraction(0.5), fraction(1e-30)], [0, 1 << 31, 1]);
    }
}

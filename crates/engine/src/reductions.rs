//! Reductions over a row of logits, in lanes that the compiler turns into vectors: one thread does this after
//! every token, over a vocabulary of 150,000, while the others wait.

/// Numbers that are reduced side by side.
const LANES: usize = 16;

/// Whether all logits are numbers.
pub fn all_finite(logits: &[f32]) -> bool {
    // Without a way out in between, which would be looked for at every number.
    logits.iter().fold(true, |so_far, l| so_far & l.is_finite())
}

/// The largest logit; negative infinity if there is none. NaN counts as nothing.
pub fn largest(logits: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, x);
        }
    }
    lanes.iter().chain(rest).copied().fold(f32::NEG_INFINITY, larger)
}

/// ln(sum(exp(logits))), summed in f64.
pub fn log_sum_exp(logits: &[f32]) -> f32 {
    let max = largest(logits);
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut lanes = [0.0f64; LANES];
    for chunk in chunks {
        let mut e = [0.0; LANES];
        for (e, &x) in e.iter_mut().zip(chunk) {
            *e = exp(x - max);
        }
        for (lane, e) in lanes.iter_mut().zip(e) {
            *lane += f64::from(e);
        }
    }
    let rest = rest.iter().map(|&x| f64::from(exp(x - max)));
    let sum: f64 = lanes.iter().sum::<f64>() + rest.sum::<f64>();
    max + sum.ln() as f32
}

/// e^x for x <= 0, to about 1e-7 of itself; below -87, where it is next to nothing, e^-87.
#[inline(always)]
fn exp(x: f32) -> f32 {
    /// 1.5 * 2^23: what is added to it is rounded to an integer, which its last bits then hold.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 as a number with few bits and the rest.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    /// Coefficients of e^x around 0, highest first.
    const TAYLOR: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let x = if x > -87.0 { x } else { -87.0 };
    let rounded = x * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = x - n * LN_2[0] - n * LN_2[1];
    let power = f32::from_bits(rounded.to_bits().wrapping_add(127) << 23);
    TAYLOR.iter().fold(0.0, |sum, c| sum * r + c) * power
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::philox::philox;

    #[test]
    fn exponentials_are_those_of_the_library() {
        for i in 0..870_000 {
            let x = -0.0001 * i as f32;
            let expected = f64::from(x).exp();
            let error = (f64::from(exp(x)) / expected - 1.0).abs();
            assert!(error < 4e-7, "exp({x}): {} for {expected}", exp(x));
        }
        assert!(exp(f32::NEG_INFINITY) < 1e-37 && exp(f32::MIN) < 1e-37);
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn reductions_agree_with_plain_ones_at_every_length() {
        for len in (1..70).chain([331, 151_936]) {
            let number =
                |i: usize| (philox(5, [i as u32, len as u32, 0, 0])[0] >> 8) as f32 / 1e6 - 9.0;
            let logits: Vec<f32> = (0..len).map(number).collect();
            let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            assert_eq!(largest(&logits), max, "{len}");
            let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
            let expected = f64::from(max) + sum.ln();
            let error = (f64::from(log_sum_exp(&logits)) - expected).abs();
            assert!(error < 2e-6, "{len}: off by {error}");
            assert!(all_finite(&logits));
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut logits = logits.clone();
                logits[len / 2] = bad;
                assert!(!all_finite(&logits), "{len}");
            }
        }
        assert_eq!(largest(&[f32::NAN, -3.0]), -3.0);
        assert_eq!(largest(&[]), f32::NEG_INFINITY);
    }
}

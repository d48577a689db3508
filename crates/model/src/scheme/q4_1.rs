//! Q4_1: f16 scale, f16 minimum, 32 nibbles; value = scale x nibble + minimum.

use super::affine::{Affine, dot};
use super::{BLOCK, Block, pack_nibbles};
use crate::float::{f16_to_f32, f32_to_f16};

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let scale = f16_to_f32(u16::from_le_bytes([block[0], block[1]]));
    let minimum = f16_to_f32(u16::from_le_bytes([block[2], block[3]]));
    let (low, high) = out.split_at_mut(BLOCK / 2);
    for ((low, high), &q) in low.iter_mut().zip(high).zip(&block[4..]) {
        *low = scale * (q & 15) as f32 + minimum;
        *high = scale * (q >> 4) as f32 + minimum;
    }
}

/// How far the search moves each end of the range inwards, in units of the plain scale.
const MOVES: [f32; 6] = [-0.8, -0.3, 0.1, 0.5, 0.9, 1.4];

/// Searches the scale and minimum of least squared error.
pub(super) fn encode(x: &Block, weights: &Block, out: &mut [u8]) {
    let low = x.iter().fold(f32::INFINITY, |m, &x| m.min(x));
    let high = x.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
    let plain = (high - low) / 15.0;
    // Offsets from the lowest value, so that a block far from zero loses no digits in the sums.
    let y = x.map(|x| x - low);
    let (w, wy) = (dot(weights, &[1.0; BLOCK]), dot(weights, &y));

    // For given q scale and minimum solve a 2 x 2 system; they lower the error of all zeros by the
    // gain, scale x sum(w y q) + minimum x sum(w y).
    let fit = |scale: f32, minimum: f32| {
        let sums = affine(scale, minimum).moments(&y, weights);
        let determinant = w * sums.qq - sums.q * sums.q;
        if determinant > 0.0 {
            let scale = (w * sums.xq - sums.q * wy) / determinant;
            let minimum = (sums.qq * wy - sums.q * sums.xq) / determinant;
            (scale, minimum, scale * sums.xq + minimum * wy)
        } else {
            (0.0, 0.0, 0.0)
        }
    };
    let mut best = (plain, 0.0, 0.0);
    for lower in MOVES {
        for upper in MOVES {
            let fitted = fit(plain * (15.0 - lower - upper) / 15.0, plain * lower);
            if fitted.2 > best.2 {
                best = fitted;
            }
        }
    }
    // Under the fitted values some q move, so they are fitted once more. What will be stored then
    // decides.
    let stored = [(plain, 0.0, 0.0), best, fit(best.0, best.1)]
        .map(|(scale, minimum, _)| (f32_to_f16(scale), f32_to_f16(low + minimum)));
    let seen = stored.map(|(scale, minimum)| affine(f16_to_f32(scale), f16_to_f32(minimum)));
    let errors = seen.map(|affine| affine.error(x, weights));
    let best = (1..stored.len()).fold(0, |best, i| if errors[i] < errors[best] { i } else { best });
    let quants = seen[best].quants(x).map(|q| q as u8);
    out[..2].copy_from_slice(&stored[best].0.to_le_bytes());
    out[2..4].copy_from_slice(&stored[best].1.to_le_bytes());
    pack_nibbles(&quants, &mut out[4..]);
}

fn affine(scale: f32, minimum: f32) -> Affine {
    Affine { scale, minimum, range: (0.0, 15.0) }
}

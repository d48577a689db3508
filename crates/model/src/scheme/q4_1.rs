//! Q4_1: f16 scale, f16 minimum, 32 nibbles; value = scale x nibble + minimum.

use super::{BLOCK, Block, dot, inverse, pack_nibbles, round};
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

/// How far the search moves each end of the range inwards, in steps of the plain scale.
const MOVES: [f32; 6] = [0.0, 0.3, 0.6, 0.9, 1.3, 1.8];

/// Searches the scale and minimum of least weighted squared error.
pub(super) fn encode(x: &Block, weights: &Block, out: &mut [u8]) {
    let low = x.iter().fold(f32::INFINITY, |m, &x| m.min(x));
    let high = x.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
    let plain = (high - low) / 15.0;
    // Offsets from the lowest value, so that a block far from zero loses no digits in the sums.
    let y = x.map(|x| x - low);
    let mut wy = y;
    wy.iter_mut().zip(weights).for_each(|(y, w)| *y *= w);
    let ones = [1.0; BLOCK];
    let (w, wy_sum) = (dot(weights, &ones), dot(&wy, &ones));

    // For given quants scale and minimum solve a 2 x 2 system; the error falls from that of all zeros
    // by scale x sum(w y q) + minimum x sum(w y).
    let fit = |scale: f32, minimum: f32| {
        let q = quants(scale, minimum, &y);
        let mut wq = q;
        wq.iter_mut().zip(weights).for_each(|(q, w)| *q *= w);
        let (q_sum, qq, yq) = (dot(&wq, &ones), dot(&wq, &q), dot(&wy, &q));
        let determinant = w * qq - q_sum * q_sum;
        if determinant > 0.0 {
            let scale = (w * yq - q_sum * wy_sum) / determinant;
            let minimum = (qq * wy_sum - q_sum * yq) / determinant;
            (scale, minimum, scale * yq + minimum * wy_sum)
        } else {
            (0.0, 0.0, 0.0)
        }
    };
    let mut best = (plain, 0.0, 0.0);
    for lower in MOVES {
        for upper in MOVES {
            let scale = plain * (15.0 - lower - upper) / 15.0;
            let fitted = fit(scale, plain * lower);
            if fitted.2 > best.2 {
                best = fitted;
            }
        }
    }
    let refined = fit(best.0, best.1);
    let stored = [(plain, 0.0, 0.0), best, refined]
        .map(|(scale, minimum, _)| (f32_to_f16(scale), f32_to_f16(low + minimum)));
    let errors = stored.map(|stored| error(stored, x, weights));
    let best = (1..stored.len()).fold(0, |best, i| if errors[i] < errors[best] { i } else { best });
    store(stored[best], x, out);
}

/// Quants as floats, 0 to 15.
#[inline(always)]
fn quants(scale: f32, minimum: f32, x: &Block) -> Block {
    let inverse = inverse(scale);
    x.map(|x| round(((x - minimum) * inverse).clamp(0.0, 15.0)))
}

fn error((scale, minimum): (u16, u16), x: &Block, weights: &Block) -> f32 {
    let (scale, minimum) = (f16_to_f32(scale), f16_to_f32(minimum));
    let mut difference = quants(scale, minimum, x);
    difference.iter_mut().zip(x).for_each(|(q, x)| *q = x - (scale * *q + minimum));
    let mut weighted = difference;
    weighted.iter_mut().zip(weights).for_each(|(d, w)| *d *= w);
    dot(&weighted, &difference)
}

fn store((scale, minimum): (u16, u16), x: &Block, out: &mut [u8]) {
    out[..2].copy_from_slice(&scale.to_le_bytes());
    out[2..4].copy_from_slice(&minimum.to_le_bytes());
    let quants = quants(f16_to_f32(scale), f16_to_f32(minimum), x).map(|q| q as u8);
    pack_nibbles(&quants, &mut out[4..]);
}

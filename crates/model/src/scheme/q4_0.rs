//! Q4_0: f16 scale, 32 nibbles; value = scale x (nibble - 8). The scale may be negative, which decides whether the
//! longer side, -8, serves the negative values or the positive ones.

use super::{BLOCK, Block, dot, inverse, pack_nibbles, round};
use crate::float::{f16_to_f32, f32_to_f16};

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let scale = f16_to_f32(u16::from_le_bytes([block[0], block[1]]));
    let (low, high) = out.split_at_mut(BLOCK / 2);
    for ((low, high), &q) in low.iter_mut().zip(high).zip(&block[2..]) {
        *low = scale * ((q & 15) as f32 - 8.0);
        *high = scale * ((q >> 4) as f32 - 8.0);
    }
}

/// Quants of the value of largest magnitude that the search tries; the best scale of nearly every block is
/// close to one of them. The first is the plain choice.
const EXTREMES: [f32; 24] = [
    -8.0, -7.75, -7.5, -7.25, -7.0, -6.75, -6.5, -6.25, -6.0, -8.25, -8.5, -9.0, //
    7.0, 7.25, 7.5, 7.75, 8.0, 8.5, 6.75, 6.5, 6.25, 6.0, 5.5, 5.0,
];

/// Searches the scale of least weighted squared error.
pub(super) fn encode(x: &Block, weights: &Block, out: &mut [u8]) {
    let extreme = x.iter().fold(0.0, |m: f32, &x| if x.abs() > m.abs() { x } else { m });
    if extreme == 0.0 {
        return store(0, x, out);
    }
    // For given quants the best scale is sum(w x q) / sum(w q q), and it lowers the error from that of
    // all zeros by sum(w x q)^2 / sum(w q q).
    let mut weighted = *x;
    weighted.iter_mut().zip(weights).for_each(|(x, w)| *x *= w);
    let fit = |scale: f32| {
        let q = quants(scale, x);
        let mut wq = q;
        wq.iter_mut().zip(weights).for_each(|(q, w)| *q *= w);
        let (xq, qq) = (dot(&weighted, &q), dot(&wq, &q));
        if qq > 0.0 { (xq / qq, xq * xq / qq) } else { (0.0, 0.0) }
    };
    let plain = extreme / EXTREMES[0];
    let (mut scale, mut gain) = (plain, 0.0);
    for candidate in EXTREMES {
        let (fitted, fitted_gain) = fit(extreme / candidate);
        if fitted_gain > gain {
            (scale, gain) = (fitted, fitted_gain);
        }
    }
    // The quants move a little under the fitted scale; once more, then what is really stored decides.
    let refined = fit(scale).0;
    let stored = [plain, scale, refined].map(f32_to_f16);
    let errors = stored.map(|scale| error(f16_to_f32(scale), x, weights));
    let best = (1..stored.len()).fold(0, |best, i| if errors[i] < errors[best] { i } else { best });
    store(stored[best], x, out);
}

/// Quants as floats, -8 to 7.
#[inline(always)]
fn quants(scale: f32, x: &Block) -> Block {
    let inverse = inverse(scale);
    x.map(|x| round((x * inverse).clamp(-8.0, 7.0)))
}

fn error(scale: f32, x: &Block, weights: &Block) -> f32 {
    let mut difference = quants(scale, x);
    difference.iter_mut().zip(x).for_each(|(q, x)| *q = x - scale * *q);
    let mut weighted = difference;
    weighted.iter_mut().zip(weights).for_each(|(d, w)| *d *= w);
    dot(&weighted, &difference)
}

fn store(scale: u16, x: &Block, out: &mut [u8]) {
    out[..2].copy_from_slice(&scale.to_le_bytes());
    let quants = quants(f16_to_f32(scale), x).map(|q| (q + 8.0) as u8);
    pack_nibbles(&quants, &mut out[2..]);
}

//! Q4_0: f16 scale, 32 nibbles; value = scale x (nibble - 8). The scale may be negative, which
//! decides whether the longer side, -8, serves the negative values or the positive ones.

use super::affine::Affine;
use super::{BLOCK, Block, pack_nibbles};
use crate::float::{f16_to_f32, f32_to_f16};

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let scale = f16_to_f32(u16::from_le_bytes([block[0], block[1]]));
    let (low, high) = out.split_at_mut(BLOCK / 2);
    for ((low, high), &q) in low.iter_mut().zip(high).zip(&block[2..]) {
        *low = scale * ((q & 15) as f32 - 8.0);
        *high = scale * ((q >> 4) as f32 - 8.0);
    }
}

/// What the search lets the value of largest magnitude become; beyond -8 and 7 it is clipped. The
/// first is the plain choice. The best scale of nearly every block is close to one of these.
const EXTREMES: [f32; 24] = [
    -8.0, -7.75, -7.5, -7.25, -7.0, -6.75, -6.5, -6.25, -6.0, -8.25, -8.5, -9.0, //
    7.0, 7.25, 7.5, 7.75, 8.0, 8.5, 6.75, 6.5, 6.25, 6.0, 5.5, 5.0,
];

/// Searches the scale of least squared error.
pub(super) fn encode(x: &Block, weights: &Block, out: &mut [u8]) {
    let extreme = x.iter().fold(0.0, |m: f32, &x| if x.abs() > m.abs() { x } else { m });
    // For given q the best scale is sum(w x q) / sum(w q q); it lowers the error of all zeros by
    // the gain, sum(w x q)^2 / sum(w q q).
    let fit = |scale: f32| {
        let sums = affine(scale).moments(x, weights);
        if sums.qq > 0.0 { (sums.xq / sums.qq, sums.xq * sums.xq / sums.qq) } else { (0.0, 0.0) }
    };
    let plain = if extreme == 0.0 { 0.0 } else { extreme / EXTREMES[0] };
    let (mut scale, mut gain) = (plain, 0.0);
    for candidate in EXTREMES {
        let fitted = fit(extreme / candidate);
        if fitted.1 > gain {
            (scale, gain) = fitted;
        }
    }
    // Under the fitted scale some q move, so it is fitted once more. What will be stored then
    // decides.
    let stored = [plain, scale, fit(scale).0].map(f32_to_f16);
    let errors = stored.map(|scale| affine(f16_to_f32(scale)).error(x, weights));
    let best = (1..stored.len()).fold(0, |best, i| if errors[i] < errors[best] { i } else { best });
    let quants = affine(f16_to_f32(stored[best])).quants(x).map(|q| (q + 8.0) as u8);
    out[..2].copy_from_slice(&stored[best].to_le_bytes());
    pack_nibbles(&quants, &mut out[2..]);
}

fn affine(scale: f32) -> Affine {
    Affine { scale, minimum: 0.0, range: (-8.0, 7.0) }
}

//! Q8_0: f16 scale, 32 signed bytes; value = scale x byte.

use super::{BLOCK, inverse, round};
use crate::float::{f16_to_f32, f32_to_f16};

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let scale = f16_to_f32(u16::from_le_bytes([block[0], block[1]]));
    for (x, &q) in out.iter_mut().zip(&block[2..]) {
        *x = scale * q as i8 as f32;
    }
}

/// The largest magnitude becomes +-127.
pub(super) fn encode(values: &[f32], out: &mut [u8]) {
    let largest = values.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
    let mut scale = f32_to_f16(largest / 127.0);
    // Among the subnormal halves rounding down can be so coarse that the largest value would be
    // clipped.
    if f16_to_f32(scale) * 127.5 < largest {
        scale += 1;
    }
    out[..2].copy_from_slice(&scale.to_le_bytes());
    let inverse = inverse(f16_to_f32(scale));
    debug_assert_eq!(values.len(), BLOCK);
    for (q, x) in out[2..].iter_mut().zip(values) {
        *q = round(x * inverse) as i8 as u8;
    }
}

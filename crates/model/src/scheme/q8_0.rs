//! Q8_0: f16 scale, 32 signed bytes; value = scale x byte.

use super::{BLOCK, inverse};
use crate::float::{f16_to_f32, f32_to_f16};

pub(super) fn decode(block: &[u8], out: &mut [f32]) {
    let scale = f16_to_f32(u16::from_le_bytes([block[0], block[1]]));
    for (x, &q) in out.iter_mut().zip(&block[2..]) {
        *x = scale * q as i8 as f32;
    }
}

/// The largest magnitude becomes +-127. Bit for bit what ggml's reference does: the integers are rounded, halves away
/// from zero, under the scale as it is before it is stored.
pub(super) fn encode(values: &[f32], out: &mut [u8]) {
    debug_assert_eq!(values.len(), BLOCK);
    let largest = values.iter().fold(0.0, |m: f32, x| m.max(x.abs()));
    let scale = largest / 127.0;
    let inverse = inverse(scale);
    out[..2].copy_from_slice(&f32_to_f16(scale).to_le_bytes());
    for (q, x) in out[2..].iter_mut().zip(values) {
        *q = (x * inverse).round() as i8 as u8;
    }
}

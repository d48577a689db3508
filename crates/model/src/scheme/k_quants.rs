//! The K-quants, which kipp reads and writes for made-up models only: blocks of 256 weights with an f16 scale (and, but for Q6_K, an f16
//! minimum) for all of them and small integers that multiply these for every 32 (Q6_K: every 16).

use super::{inverse, round};
use crate::float::{f16_to_f32, f32_to_f16};
use crate::tensor::TensorType;

/// Weights of a block.
pub const BLOCK: usize = 256;

/// A block, unpacked: weight i is `scales[i / 16] x codes[i] + minima[i / 32]`.
pub struct Block {
    /// Whole numbers: 0 to 15 (Q4_K), 0 to 31 (Q5_K), -32 to 31 (Q6_K).
    pub codes: [i8; BLOCK],
    /// Of every 16.
    pub scales: [f32; 16],
    /// Of every 32.
    pub minima: [f32; 8],
}

impl Block {
    /// Unpacks the bytes of a block of this type.
    pub fn unpack(ty: TensorType, bytes: &[u8]) -> Self {
        match ty {
            TensorType::Q4K => affine(bytes, &[], &bytes[16..144]),
            TensorType::Q5K => affine(bytes, &bytes[16..48], &bytes[48..176]),
            TensorType::Q6K => scaled(bytes),
            other => unreachable!("{other} is no K-quant"),
        }
    }

    /// The weights.
    pub fn decode(&self, out: &mut [f32]) {
        for (i, (out, &code)) in out.iter_mut().zip(&self.codes).enumerate() {
            *out = self.scales[i / 16] * f32::from(code) + self.minima[i / 32];
        }
    }
}

fn half(bytes: &[u8]) -> f32 {
    f16_to_f32(u16::from_le_bytes([bytes[0], bytes[1]]))
}

/// Q4_K and Q5_K: scale, minimum, 12 bytes of 6-bit factors of both, a fifth bit of the codes or none, nibbles.
fn affine(bytes: &[u8], fifth: &[u8], nibbles: &[u8]) -> Block {
    let (scale, minimum, factors) = (half(bytes), half(&bytes[2..]), &bytes[4..16]);
    let mut block = Block { codes: [0; BLOCK], scales: [0.0; 16], minima: [0.0; 8] };
    for part in 0..8 {
        // The last four factors' upper two bits are those that the first four leave free.
        let (of_scale, of_minimum) = if part < 4 {
            (factors[part] & 63, factors[part + 4] & 63)
        } else {
            let low = factors[part + 4];
            (low & 15 | factors[part - 4] >> 6 << 4, low >> 4 | factors[part] >> 6 << 4)
        };
        block.scales[2 * part] = scale * f32::from(of_scale);
        block.scales[2 * part + 1] = block.scales[2 * part];
        block.minima[part] = -(minimum * f32::from(of_minimum));
        // Two parts share 32 bytes, one in the lower nibbles.
        let shift = part % 2 * 4;
        for i in 0..32 {
            let low = nibbles[part / 2 * 32 + i] >> shift & 15;
            let high = fifth.get(i).map_or(0, |bits| bits >> part & 1);
            block.codes[part * 32 + i] = (low | high << 4) as i8;
        }
    }
    block
}

/// Q6_K: the codes' lower four bits, their upper two, 16 signed factors, scale.
fn scaled(bytes: &[u8]) -> Block {
    let (low, high, factors) = (&bytes[..128], &bytes[128..192], &bytes[192..208]);
    let scale = half(&bytes[208..]);
    let mut block = Block { codes: [0; BLOCK], scales: [0.0; 16], minima: [0.0; 8] };
    for (out, &factor) in block.scales.iter_mut().zip(factors) {
        *out = scale * f32::from(factor as i8);
    }
    for (i, code) in block.codes.iter_mut().enumerate() {
        // Halves of 128: four runs of 32, of which two share the bytes of the lower bits and all four those of the
        // upper.
        let (half, run, at) = (i / 128, i / 32 % 4, i % 32);
        let low = low[half * 64 + run % 2 * 32 + at] >> (run / 2 * 4) & 15;
        let high = high[half * 32 + at] >> (run * 2) & 3;
        *code = (low | high << 4) as i8 - 32;
    }
    block
}

/// Encodes 256 weights by rounding to the nearest, without any search: for made-up models, on which backends are
/// checked. Files come from programs that search.
pub(super) fn encode(ty: TensorType, values: &[f32], out: &mut [u8]) {
    match ty {
        TensorType::Q4K => encode_affine(values, 15.0, out),
        TensorType::Q5K => encode_affine(values, 31.0, out),
        TensorType::Q6K => encode_scaled(values, out),
        other => unreachable!("{other} is no K-quant"),
    }
}

/// The whole numbers of 0 to `levels` that are nearest to factors, and the f16 that they multiply.
fn factors<const N: usize>(wanted: [f32; N], levels: f32) -> (u16, [u8; N]) {
    let unit = f32_to_f16(wanted.iter().fold(0.0, |m: f32, &x| m.max(x)) / levels);
    let inverse = inverse(f16_to_f32(unit));
    (unit, wanted.map(|x| round((x * inverse).min(levels)) as u8))
}

fn encode_affine(values: &[f32], levels: f32, out: &mut [u8]) {
    let parts = || values.chunks_exact(32);
    let (mut scales, mut minima) = ([0.0; 8], [0.0; 8]);
    for (i, part) in parts().enumerate() {
        let low = part.iter().fold(0.0, |m: f32, &x| m.min(x));
        let high = part.iter().fold(0.0, |m: f32, &x| m.max(x));
        (scales[i], minima[i]) = ((high - low) / levels, -low);
    }
    let ((scale, scales), (minimum, minima)) = (factors(scales, 63.0), factors(minima, 63.0));
    out.fill(0);
    out[..2].copy_from_slice(&scale.to_le_bytes());
    out[2..4].copy_from_slice(&minimum.to_le_bytes());
    for part in 0..4 {
        out[4 + part] = scales[part] | scales[part + 4] >> 4 << 6;
        out[8 + part] = minima[part] | minima[part + 4] >> 4 << 6;
        out[12 + part] = scales[part + 4] & 15 | minima[part + 4] << 4;
    }
    let (fifth, nibbles) = out[16..].split_at_mut(if levels > 15.0 { 32 } else { 0 });
    for (part, values) in parts().enumerate() {
        let inverse = inverse(f16_to_f32(scale) * f32::from(scales[part]));
        let minimum = f16_to_f32(minimum) * f32::from(minima[part]);
        for (i, x) in values.iter().enumerate() {
            let code = round(((x + minimum) * inverse).clamp(0.0, levels)) as u8;
            nibbles[part / 2 * 32 + i] |= (code & 15) << (part % 2 * 4);
            if let Some(bits) = fifth.get_mut(i) {
                *bits |= code >> 4 << part;
            }
        }
    }
}

fn encode_scaled(values: &[f32], out: &mut [u8]) {
    let mut scales = [0.0; 16];
    for (scale, part) in scales.iter_mut().zip(values.chunks_exact(16)) {
        *scale = part.iter().fold(0.0, |m: f32, x| m.max(x.abs())) / 31.0;
    }
    let (scale, scales) = factors(scales, 127.0);
    out.fill(0);
    out[192..208].copy_from_slice(&scales);
    out[208..].copy_from_slice(&scale.to_le_bytes());
    for (i, x) in values.iter().enumerate() {
        let inverse = inverse(f16_to_f32(scale) * f32::from(scales[i / 16]));
        let code = (round((x * inverse).clamp(-32.0, 31.0)) + 32.0) as u8;
        let (half, run, at) = (i / 128, i / 32 % 4, i % 32);
        out[half * 64 + run % 2 * 32 + at] |= (code & 15) << (run / 2 * 4);
        out[128 + half * 32 + at] |= code >> 4 << (run * 2);
    }
}

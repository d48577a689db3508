//! How weights are stored, and the scalar codecs of every storage type in GGUF's block layouts.
//!
//! The 4-bit encoders choose scales on the values that a reader will see: they round them to the f16 that
//! is stored and only then pick the integers, and search for the scale that minimises the squared error,
//! weighted by the importance of each input where it is known. Q8_0 is defined by ggml's reference encoder,
//! bit for bit.

mod affine;
pub mod k_quants;
mod q4_0;
mod q4_1;
mod q8_0;

use crate::float::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::tensor::TensorType;

/// Elements that share a scale.
pub const BLOCK: usize = 32;
/// Largest finite half.
const F16_MAX: f32 = 65504.0;

/// How the seven projections of every layer are stored, or the embedding and the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// bfloat16, as published.
    Bf16,
    /// 8 bits, a scale a block of 32.
    Q8_0,
    /// 4 bits, a scale and a minimum a block of 32.
    Q4_1,
    /// 4 bits, a scale a block of 32.
    Q4_0,
    /// IEEE halves; only in foreign files, like those below.
    F16,
    /// 4 bits, scales and minima of 6 bits.
    Q4K,
    /// 5 bits, scales and minima of 6 bits.
    Q5K,
    /// 6 bits, scales of 8 bits.
    Q6K,
}

impl Scheme {
    /// Those that kipp writes, from the most bits to the fewest.
    pub const ALL: [Scheme; 4] = [Scheme::Bf16, Scheme::Q8_0, Scheme::Q4_1, Scheme::Q4_0];

    /// Those of foreign files, which it writes for made-up models only.
    pub const FOREIGN: [Scheme; 4] = [Scheme::F16, Scheme::Q6K, Scheme::Q5K, Scheme::Q4K];

    /// The type of the tensors.
    pub const fn tensor_type(self) -> TensorType {
        match self {
            Scheme::Bf16 => TensorType::Bf16,
            Scheme::Q8_0 => TensorType::Q8_0,
            Scheme::Q4_1 => TensorType::Q4_1,
            Scheme::Q4_0 => TensorType::Q4_0,
            Scheme::F16 => TensorType::F16,
            Scheme::Q4K => TensorType::Q4K,
            Scheme::Q5K => TensorType::Q5K,
            Scheme::Q6K => TensorType::Q6K,
        }
    }

    /// Name on the command line and in files.
    pub const fn name(self) -> &'static str {
        match self {
            Scheme::Bf16 => "bf16",
            Scheme::Q8_0 => "q8_0",
            Scheme::Q4_1 => "q4_1",
            Scheme::Q4_0 => "q4_0",
            Scheme::F16 => "f16",
            Scheme::Q4K => "q4_k",
            Scheme::Q5K => "q5_k",
            Scheme::Q6K => "q6_k",
        }
    }

    /// The scheme with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().chain(Self::FOREIGN).find(|scheme| scheme.name() == name)
    }

    /// How embedding and head are stored unless asked otherwise: every token looks at the whole
    /// head, so it keeps 8 bits where the projections have 4.
    pub const fn default_head(self) -> Self {
        match self {
            Scheme::Bf16 => Scheme::Bf16,
            _ => Scheme::Q8_0,
        }
    }
}

/// A value that cannot be stored: NaN, infinite or beyond the type's range.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Unstorable {
    /// Where among the values.
    pub index: usize,
    /// The value.
    pub value: f32,
}

/// Largest magnitude that a type stores.
const fn limit(ty: TensorType) -> f32 {
    match ty {
        TensorType::F32 => f32::MAX,
        // The last value that does not round up to infinity.
        TensorType::Bf16 => f32::from_bits(0x7f7f_7fff),
        TensorType::Q8_0 => 127.0 * F16_MAX,
        TensorType::Q4_1 => F16_MAX,
        TensorType::Q4_0 => 8.0 * F16_MAX,
        TensorType::F16 | TensorType::Q4K | TensorType::Q5K | TensorType::Q6K => F16_MAX,
    }
}

/// Decodes whole blocks into `out`.
pub fn decode(ty: TensorType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), ty.row_bytes(out.len()));
    let blocks = bytes.chunks_exact(ty.block_bytes()).zip(out.chunks_exact_mut(ty.block()));
    match ty {
        TensorType::F32 => {
            blocks.for_each(|(b, x)| x[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        }
        TensorType::Bf16 => {
            blocks.for_each(|(b, x)| x[0] = bf16_to_f32(u16::from_le_bytes([b[0], b[1]])))
        }
        TensorType::Q8_0 => blocks.for_each(|(b, x)| q8_0::decode(b, x)),
        TensorType::Q4_1 => blocks.for_each(|(b, x)| q4_1::decode(b, x)),
        TensorType::Q4_0 => blocks.for_each(|(b, x)| q4_0::decode(b, x)),
        TensorType::F16 => {
            blocks.for_each(|(b, x)| x[0] = f16_to_f32(u16::from_le_bytes([b[0], b[1]])))
        }
        TensorType::Q4K | TensorType::Q5K | TensorType::Q6K => {
            blocks.for_each(|(b, x)| k_quants::Block::unpack(ty, b).decode(x))
        }
    }
}

/// Encodes whole blocks into `out`. `importance`, as long as `values`, weighs the squared errors
/// that the 4-bit types minimise; it is finite and not negative.
pub fn encode(
    ty: TensorType,
    values: &[f32],
    importance: Option<&[f32]>,
    out: &mut [u8],
) -> Result<(), Unstorable> {
    assert_eq!(out.len(), ty.row_bytes(values.len()));
    // Written so that a NaN, for which no comparison holds, is found as well.
    let storable = |value: &f32| value.abs() <= limit(ty);
    if let Some(index) = values.iter().position(|value| !storable(value)) {
        return Err(Unstorable { index, value: values[index] });
    }
    let blocks = values.chunks_exact(ty.block()).zip(out.chunks_exact_mut(ty.block_bytes()));
    match ty {
        TensorType::F32 => blocks.for_each(|(x, b)| b.copy_from_slice(&x[0].to_le_bytes())),
        TensorType::Bf16 => {
            blocks.for_each(|(x, b)| b.copy_from_slice(&f32_to_bf16(x[0]).to_le_bytes()))
        }
        TensorType::F16 => {
            blocks.for_each(|(x, b)| b.copy_from_slice(&f32_to_f16(x[0]).to_le_bytes()))
        }
        TensorType::Q8_0 => blocks.for_each(|(x, b)| q8_0::encode(x, b)),
        TensorType::Q4_1 | TensorType::Q4_0 => {
            let encode = if ty == TensorType::Q4_1 { q4_1::encode } else { q4_0::encode };
            for (i, (x, b)) in blocks.enumerate() {
                let weights = match importance {
                    Some(importance) => block(&importance[i * BLOCK..][..BLOCK]),
                    None => [1.0; BLOCK],
                };
                encode(&block(x), &weights, b);
            }
        }
        TensorType::Q4K | TensorType::Q5K | TensorType::Q6K => {
            blocks.for_each(|(x, b)| k_quants::encode(ty, x, b))
        }
    }
    Ok(())
}

/// A block's values with their length in the type, so that loops over them unroll.
type Block = [f32; BLOCK];

fn block(values: &[f32]) -> Block {
    let mut block = [0.0; BLOCK];
    block.copy_from_slice(values);
    block
}

/// Rounds to the nearest integer, ties to even, for magnitudes below 2^22. Adding 1.5 x 2^23 leaves
/// no bits for a fraction; unlike `f32::round` this vectorises on every machine.
#[inline(always)]
fn round(value: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    value + MAGIC - MAGIC
}

/// 1 / scale, and 0 for a scale of 0, under which every value is 0.
#[inline(always)]
fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// Two nibbles a byte: element j in the lower half of byte j, element j + 16 in the upper.
fn pack_nibbles(quants: &[u8; BLOCK], out: &mut [u8]) {
    let (low, high) = quants.split_at(BLOCK / 2);
    for ((out, low), high) in out.iter_mut().zip(low).zip(high) {
        *out = low | high << 4;
    }
}

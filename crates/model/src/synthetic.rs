//! Synthetic checkpoints: every weight is a function of (seed, tensor name, element index), so that
//! checkpoints of the real dimensions need no download, and any program can rebuild them bit for
//! bit.
//!
//! The values are about normal: the sum of four uniform 16-bit numbers, centred and scaled, then
//! rounded to bfloat16. Matrices have a deviation of 0.02; norms lie around 1 with a deviation of
//! 0.1.

use std::path::Path;

use crate::error::Result;
use crate::float::{bf16_to_f32, f32_to_bf16};
use crate::layout::{Role, Tensor};
use crate::metadata::Origin;
use crate::registry::Checkpoint;
use crate::scheme::Scheme;
use crate::source::{self, Source};

/// The rows of a synthetic checkpoint.
pub struct Synthetic {
    /// Different seeds give different weights.
    pub seed: u64,
}

/// Writes a synthetic checkpoint with a registered one's dimensions.
pub fn write(
    path: &Path,
    checkpoint: &Checkpoint,
    schemes: (Scheme, Scheme),
    seed: u64,
    progress: impl FnMut(u64, u64),
) -> Result<()> {
    let origin = Origin::Synthetic { seed };
    source::write(path, checkpoint, schemes, &origin, &Synthetic { seed }, progress)
}

/// Odd number close to 2^64 / golden ratio; the step of SplitMix64.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
/// Mean of the sum of four 16-bit numbers.
const MEAN: f32 = 131_070.0;
/// One over its standard deviation.
const SCALE: f32 = (1.0 / 37_837.227_f64) as f32;

impl Source for Synthetic {
    fn row(&self, tensor: &Tensor, row: usize, out: &mut [f32]) {
        let first = (row * tensor.cols) as u64;
        let base =
            self.seed.wrapping_mul(STEP).wrapping_add(fnv1a(&tensor.upstream)).wrapping_add(first);
        for (i, out) in out.iter_mut().enumerate() {
            let z = splitmix(base.wrapping_add(i as u64));
            let sum = (z & 0xffff) + (z >> 16 & 0xffff) + (z >> 32 & 0xffff) + (z >> 48);
            let normal = (sum as u32 as f32 - MEAN) * SCALE;
            let weight = match tensor.role {
                Role::Norm => 1.0 + normal * 0.1,
                Role::Head | Role::Projection => normal * 0.02,
            };
            *out = bf16_to_f32(f32_to_bf16(weight));
        }
    }
}

/// FNV-1a, 64 bits.
fn fnv1a(name: &str) -> u64 {
    name.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// The output function of SplitMix64 for the state after `x`.
fn splitmix(x: u64) -> u64 {
    let x = x.wrapping_add(STEP);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::tensors;
    use crate::spec::Spec;

    fn bits(spec: &Spec, upstream: &str, seed: u64, row: usize) -> Vec<u16> {
        let tensors = tensors(spec, Scheme::Bf16, Scheme::Bf16);
        let tensor = tensors.iter().find(|tensor| tensor.upstream == upstream).unwrap();
        let mut values = vec![0.0; tensor.cols];
        Synthetic { seed }.row(tensor, row, &mut values);
        values.into_iter().map(f32_to_bf16).collect()
    }

    const SPEC: Spec = Spec {
        layers: 28,
        hidden: 1024,
        ffn: 3072,
        heads: 16,
        vocab: 32,
        context: 64,
        theta: 1e6,
        tied: true,
    };

    /// The expected values here and below were computed by the Python definition of synthetic
    /// checkpoints.
    #[test]
    fn weights_equal_the_definition() {
        let first = |upstream, seed| bits(&SPEC, upstream, seed, 0)[..4].to_vec();
        assert_eq!(first("model.embed_tokens.weight", 7), [0x3c4d, 0x3b63, 0x3bea, 0x3c8c]);
        assert_eq!(first("model.layers.0.mlp.up_proj.weight", 7), [0xbb9e, 0x3c52, 0xbd01, 0xbd07]);
        assert_eq!(first("model.norm.weight", 7), [0x3f79, 0x3f5e, 0x3f6f, 0x3f61]);
        let q_norm = first("model.layers.5.self_attn.q_norm.weight", 0);
        assert_eq!(q_norm, [0x3f78, 0x3f80, 0x3f7c, 0x3f7a]);
        let last = bits(&SPEC, "model.layers.27.mlp.down_proj.weight", 123_456_789_012_345, 1023);
        assert_eq!(last[3068..], [0x3c88, 0x3cbd, 0x3d2d, 0xbc1a]);
    }

    /// A digest over every element of every tensor, in order.
    #[test]
    fn a_whole_checkpoint_equals_the_definition() {
        let spec = Spec { layers: 2, hidden: 640, ffn: 1760, heads: 40, vocab: 2048, ..SPEC };
        let mut digest = 0u64;
        for tensor in tensors(&Spec { tied: false, ..spec }, Scheme::Bf16, Scheme::Bf16) {
            let (mut sum, mut index, mut values) = (0u64, 0u64, vec![0.0; tensor.cols]);
            for row in 0..tensor.rows {
                Synthetic { seed: 3 }.row(&tensor, row, &mut values);
                for &value in &values {
                    index += 1;
                    sum = sum.wrapping_add(index.wrapping_mul(f32_to_bf16(value).into()));
                }
            }
            digest = digest.wrapping_mul(1_000_003).wrapping_add(sum);
        }
        assert_eq!(digest, 0xaa83_7285_ff54_b612);
    }
}

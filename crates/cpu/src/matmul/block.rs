//! Products over one block of inputs, whose weights share a scale a row: plain, or with fewer multiplications.

use crate::simd::{LANES, Simd};

/// A block of `P` panels' weights and of a tile's activations, in groups of four inputs.
#[derive(Clone, Copy)]
pub struct Block<const P: usize> {
    /// Codes, two vectors a group: the pairs (k, k + 2), then the pairs (k + 1, k + 3).
    pub weights: [*const i32; P],
    /// Scales; beside Winograd's products also sums of w0 w1 + w2 w3 + ..., as i32.
    pub factors: [*const f32; P],
    /// Codes, `[groups][2][T]`.
    pub inputs: *const i32,
    /// Bytes from here to what is multiplied after this tile's part of the inputs.
    pub ahead: usize,
    /// Scale of each token.
    pub scales: *const f32,
    /// -(x0 x1 + x2 x3 + ...) of each token.
    pub crosses: *const i32,
    /// Groups of four.
    pub groups: usize,
}

impl<const P: usize> Block<P> {
    /// The first and the last panel.
    pub fn two(&self) -> Block<2> {
        Block {
            weights: [self.weights[0], self.weights[P - 1]],
            factors: [self.factors[0], self.factors[P - 1]],
            inputs: self.inputs,
            ahead: self.ahead,
            scales: self.scales,
            crosses: self.crosses,
            groups: self.groups,
        }
    }
}

/// Whether a token of a tile takes Winograd's way, where its class has it: two of three, which balances the
/// units that add with those that multiply.
pub const fn takes_winograd(token: usize) -> bool {
    !token.is_multiple_of(3)
}

/// total\[p\]\[t\] += w\[p\] . x\[t\].
///
/// # Safety
/// The block is as it says and the machine has the class's features.
#[inline(always)]
pub unsafe fn products<S: Simd, const P: usize, const T: usize>(
    total: &mut [[S::F; T]; P],
    block: &Block<P>,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut acc = [[S::splat_i(0); T]; P];
        let (mut weights, mut inputs) = (block.weights, block.inputs);
        for _ in 0..2 * block.groups {
            let w = weights.map(|w| S::load(w));
            weights = weights.map(|w| w.add(LANES));
            for t in 0..T {
                let x = S::splat_i(*inputs.add(t));
                for p in 0..P {
                    acc[p][t] = S::dot(acc[p][t], w[p], x);
                }
            }
            inputs = inputs.add(T);
        }
        let own = block.factors.map(|f| S::load_f32(f));
        add_scaled::<S, P, T>(total, acc, own, block.scales);
    }
}

/// The same, where tokens that take Winograd's way begin at what makes up for it.
///
/// # Safety
/// As [`products`].
#[inline(always)]
pub unsafe fn fewer_products<S: Simd, const P: usize, const T: usize>(
    total: &mut [[S::F; T]; P],
    block: &Block<P>,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut acc = [[S::splat_i(0); T]; P];
        for p in 0..P {
            let own = S::load(block.factors[p].add(LANES).cast());
            for t in (0..T).filter(|&t| takes_winograd(t)) {
                acc[p][t] = S::sub_i(S::splat_i(*block.crosses.add(t)), own);
            }
        }
        for group in 0..block.groups {
            for p in 0..P {
                let w = block.weights[p].add(2 * group * LANES);
                let w = [S::load(w), S::load(w.add(LANES))];
                for t in 0..T {
                    let x = block.inputs.add(2 * group * T + t);
                    let x = [S::splat_i(*x), S::splat_i(*x.add(T))];
                    acc[p][t] = if takes_winograd(t) {
                        let b = S::add_pairs(x[1], w[0]);
                        S::dot(acc[p][t], S::add_pairs(x[0], w[1]), b)
                    } else {
                        S::dot(S::dot(acc[p][t], w[0], x[0]), w[1], x[1])
                    };
                }
            }
        }
        let own = block.factors.map(|f| S::load_f32(f));
        add_scaled::<S, P, T>(total, acc, own, block.scales);
    }
}

/// Adds a block's integer sums, times the scale of the token, times those of the rows.
///
/// # Safety
/// There are `T` scales and the machine has the class's features.
#[inline(always)]
pub unsafe fn add_scaled<S: Simd, const P: usize, const T: usize>(
    total: &mut [[S::F; T]; P],
    acc: [[S::I; T]; P],
    own: [S::F; P],
    scales: *const f32,
) {
    for t in 0..T {
        // SAFETY: the caller's.
        unsafe {
            let scale = S::splat(*scales.add(t));
            for p in 0..P {
                let sum = S::mul(S::to_f32(acc[p][t]), scale);
                total[p][t] = S::fma(sum, own[p], total[p][t]);
            }
        }
    }
}

//! What the 4-bit encoders share: a block laid on whole numbers as scale x q + minimum, and the
//! sums from which the best scale and minimum for given q follow.

use super::{BLOCK, Block, inverse, round};

/// How a block's values are laid on whole numbers.
#[derive(Clone, Copy)]
pub(super) struct Affine {
    pub scale: f32,
    pub minimum: f32,
    /// Least and largest q.
    pub range: (f32, f32),
}

/// Weighted sums over a block, for the q of one [`Affine`].
pub(super) struct Moments {
    /// Of w q.
    pub q: f32,
    /// Of w q q.
    pub qq: f32,
    /// Of w x q.
    pub xq: f32,
}

impl Affine {
    /// The q of each value, as floats.
    #[inline]
    pub fn quants(&self, x: &Block) -> Block {
        let (inverse, (least, largest)) = (inverse(self.scale), self.range);
        x.map(|x| round(((x - self.minimum) * inverse).clamp(least, largest)))
    }

    /// The sums for the q that this gives to the values `x` of weights `w`.
    #[inline]
    pub fn moments(&self, x: &Block, w: &Block) -> Moments {
        let q = self.quants(x);
        let wq = product(w, &q);
        Moments { q: dot(w, &q), qq: dot(&wq, &q), xq: dot(&wq, x) }
    }

    /// The weighted squared error that a reader will see.
    pub fn error(&self, x: &Block, w: &Block) -> f32 {
        let mut difference = self.quants(x);
        for (q, x) in difference.iter_mut().zip(x) {
            *q = x - (self.scale * *q + self.minimum);
        }
        dot(&product(w, &difference), &difference)
    }
}

#[inline(always)]
fn product(a: &Block, b: &Block) -> Block {
    std::array::from_fn(|i| a[i] * b[i])
}

/// The sum of products, halves added to halves so that it vectorises.
pub(super) fn dot(a: &Block, b: &Block) -> f32 {
    let mut sums = product(a, b);
    let mut width = BLOCK / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    sums[0]
}

//! Rotary position embedding: element i of a head turns with element i + 64 (NEOX style).

use model::HEAD_DIM;

/// Pairs that turn together in one head.
pub const PAIRS: usize = HEAD_DIM / 2;

/// Cosine and sine of every pair's angle at one position. Angles are formed in f64: at position
/// 40,000 an f32 product is already off by 0.002 radians.
#[derive(Debug, Clone, Copy)]
pub struct Rotation {
    /// `[64]`
    pub cos: [f32; PAIRS],
    /// `[64]`
    pub sin: [f32; PAIRS],
}

/// The angular frequencies of one checkpoint.
#[derive(Debug, Clone)]
pub struct Rope {
    frequencies: [f64; PAIRS],
}

impl Rope {
    /// theta^(-2i/128) for each pair i.
    pub fn new(theta: f32) -> Self {
        let exponent = |i: usize| -2.0 * i as f64 / HEAD_DIM as f64;
        Rope { frequencies: std::array::from_fn(|i| f64::from(theta).powf(exponent(i))) }
    }

    /// theta^(-2i/128) for each pair i, for a device that forms the angles itself.
    pub fn frequencies(&self) -> &[f64; PAIRS] {
        &self.frequencies
    }

    /// The rotation at `position`.
    pub fn at(&self, position: u32) -> Rotation {
        let turns = self.frequencies.map(|f| (f64::from(position) * f).sin_cos());
        Rotation { cos: turns.map(|t| t.1 as f32), sin: turns.map(|t| t.0 as f32) }
    }
}

impl Rotation {
    /// Turns one head, `[128]`, in place.
    pub fn apply(&self, head: &mut [f32]) {
        let (low, high) = head.split_at_mut(PAIRS);
        for i in 0..PAIRS {
            let (a, b) = (low[i], high[i]);
            low[i] = a * self.cos[i] - b * self.sin[i];
            high[i] = b * self.cos[i] + a * self.sin[i];
        }
    }
}

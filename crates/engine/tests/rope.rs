//! Rotary positions far out, where angles formed in 16 or 32 bits have lost their way.

use engine::rope::{PAIRS, Rope};

/// Case NU-01: position, pair, and the exact cosine and sine for theta 1e6.
const EXACT: &[(u32, usize, f32, f32)] = &[
    (4095, 0, -0.065976, -0.997821),
    (4095, 1, 0.313925, 0.949448),
    (4095, 32, -0.578908, -0.815393),
    (4095, 63, 0.999987, 0.005082),
    (15963, 0, -0.843125, -0.537717),
    (15963, 1, -0.39652, 0.918026),
    (15963, 32, -0.967654, -0.252281),
    (15963, 63, 0.999804, 0.019808),
    (32767, 0, 0.982263, 0.187507),
    (32767, 1, -0.998472, 0.055259),
    (32767, 32, 0.217959, 0.975958),
    (32767, 63, 0.999173, 0.040651),
    (40959, 0, 0.466897, -0.884312),
    (40959, 1, 0.607609, 0.794236),
    (40959, 32, -0.993011, -0.11802),
    (40959, 63, 0.998709, 0.050806),
];

#[test]
fn angles_are_exact_at_long_positions() {
    let rope = Rope::new(1e6);
    for &(position, pair, cos, sin) in EXACT {
        let rotation = rope.at(position);
        let (found_cos, found_sin) = (rotation.cos[pair], rotation.sin[pair]);
        assert!(
            (found_cos - cos).abs() < 2e-6,
            "position {position}, pair {pair}: cos {found_cos}"
        );
        assert!(
            (found_sin - sin).abs() < 2e-6,
            "position {position}, pair {pair}: sin {found_sin}"
        );
    }
}

/// Queries and keys depend on the distance alone: q(m) . k(n) = q(m + s) . k(n + s).
#[test]
fn products_depend_on_the_distance_alone() {
    let rope = Rope::new(1e6);
    let dot = |m: u32, n: u32| -> f32 {
        let mut q: Vec<f32> = (0..2 * PAIRS).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut k: Vec<f32> = (0..2 * PAIRS).map(|i| (i as f32 * 0.73).cos()).collect();
        rope.at(m).apply(&mut q);
        rope.at(n).apply(&mut k);
        q.iter().zip(&k).map(|(q, k)| q * k).sum()
    };
    for (m, n) in [(5, 0), (40, 7), (1000, 999)] {
        for shift in [1, 31, 4096, 39_000] {
            let (near, far) = (dot(m, n), dot(m + shift, n + shift));
            assert!((near - far).abs() < 1e-4, "{m}, {n} by {shift}: {near} and {far}");
        }
    }
}

//! Philox4x32-10, a counter-based random generator (Salmon et al., "Parallel random numbers: as easy
//! as 1, 2, 3", SC 2011). A draw is a pure function of key and counter, so it does not depend on what
//! else a batch holds or on the order in which anything is computed.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Four random words for a 64-bit key and a 128-bit counter.
pub fn philox(key: u64, counter: [u32; 4]) -> [u32; 4] {
    let mut k = [key as u32, (key >> 32) as u32];
    let mut c = counter;
    for _ in 0..10 {
        let a = u64::from(MULTIPLIERS[0]) * u64::from(c[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(c[2]);
        c = [(b >> 32) as u32 ^ c[1] ^ k[0], b as u32, (a >> 32) as u32 ^ c[3] ^ k[1], a as u32];
        k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
    }
    c
}

/// A random word as a number strictly between 0 and 1: 23 bits, centred, so that f32 holds it exactly.
pub fn unit(word: u32) -> f32 {
    ((word >> 9) as f32 + 0.5) * (1.0 / 8_388_608.0)
}

/// A key that differs from call to call: the standard library draws the keys of its hashes from the system.
pub fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the Random123 distribution (kat_vectors, philox4x32 10).
    #[test]
    fn known_answers() {
        assert_eq!(philox(0, [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox(u64::MAX, [u32::MAX; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox(0x299f_31d0_a409_3822, [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn unit_stays_inside() {
        assert!(unit(0) > 0.0);
        assert!(unit(u32::MAX) < 1.0);
    }
}

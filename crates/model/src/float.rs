//! The two 16-bit float formats that checkpoints use, converted by integer arithmetic: exact one
//! way, rounded to nearest even the other way.

/// bfloat16 to f32: the upper half of the bits, exactly.
#[inline]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

/// f32 to bfloat16, rounded to nearest even. A NaN stays one.
#[inline]
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    let odd = (bits >> 16) & 1;
    ((bits + 0x7fff + odd) >> 16) as u16
}

/// IEEE half to f32, exactly.
#[inline]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = (bits as u32 & 0x8000) << 16;
    let magnitude = bits as u32 & 0x7fff;
    let exponent = magnitude >> 10;
    if exponent == 0x1f {
        return f32::from_bits(sign | 0x7f80_0000 | (magnitude & 0x3ff) << 13);
    }
    if exponent == 0 {
        // Subnormal: the fraction counts steps of 2^-24.
        let value = magnitude as f32 * f32::from_bits(0x3380_0000);
        return f32::from_bits(sign | value.to_bits());
    }
    f32::from_bits(sign | ((magnitude << 13) + (112 << 23)))
}

/// f32 to IEEE half, rounded to nearest even; beyond 65,519 infinite. A NaN stays one.
#[inline]
pub fn f32_to_f16(value: f32) -> u16 {
    let bits = value.to_bits();
    let sign = (bits >> 16) as u16 & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    if magnitude > 0x7f80_0000 {
        return sign | 0x7e00;
    }
    if magnitude >= 0x477f_f000 {
        return sign | 0x7c00;
    }
    if magnitude < 0x3880_0000 {
        // Below 2^-14 the result counts steps of 2^-24. Adding 0.5, whose last bit weighs 2^-24,
        // makes the addition itself round.
        let steps = (f32::from_bits(magnitude) + 0.5).to_bits() - 0.5f32.to_bits();
        return sign | steps as u16;
    }
    let odd = (magnitude >> 13) & 1;
    sign | ((magnitude + 0xfff + odd - (112 << 23)) >> 13) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The exact value of a half, from the definition of the format.
    fn half(bits: u16) -> f64 {
        let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
        let (exponent, fraction) = ((bits >> 10 & 0x1f) as i32, (bits & 0x3ff) as f64);
        sign * match exponent {
            0 => fraction * 2f64.powi(-24),
            0x1f if fraction == 0.0 => f64::INFINITY,
            0x1f => f64::NAN,
            _ => (1024.0 + fraction) * 2f64.powi(exponent - 25),
        }
    }

    #[test]
    fn every_half_converts_exactly_and_back() {
        for bits in 0..=u16::MAX {
            let (value, exact) = (f16_to_f32(bits), half(bits));
            if exact.is_nan() {
                assert!(value.is_nan() && f16_to_f32(f32_to_f16(value)).is_nan());
                continue;
            }
            assert_eq!((value as f64).to_bits(), exact.to_bits(), "{bits:#06x}");
            assert_eq!(f32_to_f16(value), bits);
        }
    }

    #[test]
    fn every_bfloat_converts_exactly_and_back() {
        for bits in 0..=u16::MAX {
            let value = bf16_to_f32(bits);
            assert_eq!(value.to_bits() >> 16, bits as u32);
            let back = f32_to_bf16(value);
            assert!(back == bits || value.is_nan() && bf16_to_f32(back).is_nan());
        }
    }

    /// Between two neighbours the rounding can change only at their midpoint, which f32 holds
    /// exactly.
    fn rounds_to_nearest_even(decode: fn(u16) -> f32, encode: fn(f32) -> u16, largest: u16) {
        for low in 0..largest {
            let high = low + 1;
            let middle = ((decode(low) as f64 + decode(high) as f64) / 2.0) as f32;
            let even = if low % 2 == 0 { low } else { high };
            for sign in [0, 0x8000] {
                let signed = |value: f32| if sign == 0 { value } else { -value };
                assert_eq!(encode(signed(middle)), even | sign);
                assert_eq!(encode(signed(middle.next_down())), low | sign);
                assert_eq!(encode(signed(middle.next_up())), high | sign);
            }
        }
    }

    #[test]
    fn halves_round_to_nearest_even() {
        rounds_to_nearest_even(f16_to_f32, f32_to_f16, 0x7bff);
        assert_eq!(f32_to_f16(65519.996), 0x7bff);
        assert_eq!(f32_to_f16(65520.0), 0x7c00);
        assert_eq!(f32_to_f16(f32::MAX), 0x7c00);
        assert_eq!(f32_to_f16(f32::NEG_INFINITY), 0xfc00);
    }

    #[test]
    fn bfloats_round_to_nearest_even() {
        rounds_to_nearest_even(bf16_to_f32, f32_to_bf16, 0x7f7f);
        assert_eq!(f32_to_bf16(f32::MAX), 0x7f80);
        assert_eq!(f32_to_bf16(f32::NEG_INFINITY), 0xff80);
    }

    #[test]
    fn bfloats_of_published_files_read_as_they_should() {
        let cases: [([u8; 2], f32); 6] = [
            ([0x80, 0x3f], 1.0),
            ([0x20, 0xbe], -0.15625),
            ([0xc3, 0x47], 99840.0),
            ([0x62, 0x7f], 3.004_055_3e38),
            ([0x01, 0x00], 9.183_55e-41),
            ([0x81, 0x33], 6.007_030_6e-8),
        ];
        for (bytes, value) in cases {
            assert_eq!(bf16_to_f32(u16::from_le_bytes(bytes)), value);
        }
    }
}

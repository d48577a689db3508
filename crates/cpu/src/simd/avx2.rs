//! AVX2 with FMA and F16C: two registers hold the sixteen lanes. With AVX-VNNI the pair product
//! accumulates in one instruction instead of two.

use std::arch::asm;
use std::arch::x86_64::*;

use super::Simd;

#[derive(Clone, Copy)]
pub struct Avx2<const VNNI: bool>;

/// One operation on both halves.
macro_rules! both {
    ($f:expr; $($x:expr),+) => {
        unsafe { [$f($($x[0]),+), $f($($x[1]),+)] }
    };
}

// SAFETY (all blocks): the trait's contract: the features are there and pointers hold 16 lanes.
#[allow(clippy::undocumented_unsafe_blocks, reason = "said once above")]
impl<const VNNI: bool> Simd for Avx2<VNNI> {
    type I = [__m256i; 2];
    type F = [__m256; 2];
    const TILE: (usize, usize) = (1, 4);

    #[inline(always)]
    unsafe fn prefetch(at: *const i32) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn load(from: *const i32) -> [__m256i; 2] {
        unsafe { [_mm256_loadu_si256(from.cast()), _mm256_loadu_si256(from.add(8).cast())] }
    }
    #[inline(always)]
    unsafe fn splat_i(x: i32) -> [__m256i; 2] {
        unsafe { [_mm256_set1_epi32(x); 2] }
    }
    #[inline(always)]
    unsafe fn dot(acc: [__m256i; 2], a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        if VNNI {
            both!(accumulate; acc, a, b)
        } else {
            let products = both!(_mm256_madd_epi16; a, b);
            both!(_mm256_add_epi32; acc, products)
        }
    }
    #[inline(always)]
    unsafe fn add_pairs(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_add_epi16; a, b)
    }
    #[inline(always)]
    unsafe fn sub_i(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_sub_epi32; a, b)
    }
    #[inline(always)]
    unsafe fn even_bytes(x: [__m256i; 2]) -> [__m256i; 2] {
        let left = both!(_mm256_slli_epi16::<8>; x);
        both!(_mm256_srai_epi16::<8>; left)
    }
    #[inline(always)]
    unsafe fn odd_bytes(x: [__m256i; 2]) -> [__m256i; 2] {
        both!(_mm256_srai_epi16::<8>; x)
    }
    #[inline(always)]
    unsafe fn pairs(x: [__m256i; 2]) -> [__m256i; 2] {
        let behind = both!(_mm256_shuffle_epi32::<0b11_10_11_10>; x);
        let behind = both!(_mm256_slli_epi32::<16>; behind);
        both!(_mm256_blend_epi16::<0b1010_1010>; x, behind)
    }
    #[inline(always)]
    unsafe fn nibbles<const N: u32>(x: [__m256i; 2]) -> [__m256i; 2] {
        let shifted = match N {
            0 => x,
            1 => both!(_mm256_srli_epi16::<4>; x),
            2 => both!(_mm256_srli_epi16::<8>; x),
            _ => return both!(_mm256_srli_epi16::<12>; x),
        };
        let mask = unsafe { [_mm256_set1_epi16(15); 2] };
        both!(_mm256_and_si256; shifted, mask)
    }
    #[inline(always)]
    unsafe fn to_f32(x: [__m256i; 2]) -> [__m256; 2] {
        both!(_mm256_cvtepi32_ps; x)
    }
    #[inline(always)]
    unsafe fn to_i32(x: [__m256; 2]) -> [__m256i; 2] {
        both!(_mm256_cvtps_epi32; x)
    }
    #[inline(always)]
    unsafe fn store_i(x: [__m256i; 2], to: *mut i32) {
        unsafe {
            _mm256_storeu_si256(to.cast(), x[0]);
            _mm256_storeu_si256(to.add(8).cast(), x[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> [__m256; 2] {
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> [__m256; 2] {
        let halves = unsafe { [_mm_loadu_si128(from.cast()), _mm_loadu_si128(from.add(8).cast())] };
        both!(_mm256_cvtph_ps; halves)
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> [__m256; 2] {
        let halves = unsafe { [_mm_loadu_si128(from.cast()), _mm_loadu_si128(from.add(8).cast())] };
        let wide = both!(_mm256_cvtepu16_epi32; halves);
        let wide = both!(_mm256_slli_epi32::<16>; wide);
        both!(_mm256_castsi256_ps; wide)
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> [__m256; 2] {
        let halves = unsafe { [_mm_loadl_epi64(from.cast()), _mm_loadl_epi64(from.add(8).cast())] };
        let wide = both!(_mm256_cvtepi8_epi32; halves);
        both!(_mm256_cvtepi32_ps; wide)
    }
    #[inline(always)]
    unsafe fn store(x: [__m256; 2], to: *mut f32) {
        unsafe {
            _mm256_storeu_ps(to, x[0]);
            _mm256_storeu_ps(to.add(8), x[1]);
        }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> [__m256; 2] {
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    unsafe fn add(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_add_ps; a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_sub_ps; a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_mul_ps; a, b)
    }
    #[inline(always)]
    unsafe fn div(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_div_ps; a, b)
    }
    #[inline(always)]
    unsafe fn max(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_max_ps; a, b)
    }
    #[inline(always)]
    unsafe fn min(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_min_ps; a, b)
    }
    #[inline(always)]
    unsafe fn fma(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        both!(_mm256_fmadd_ps; a, b, c)
    }
    #[inline(always)]
    unsafe fn abs(x: [__m256; 2]) -> [__m256; 2] {
        let sign = unsafe { [_mm256_set1_ps(-0.0); 2] };
        both!(_mm256_andnot_ps; sign, x)
    }
    #[inline(always)]
    unsafe fn pow2(n: [__m256i; 2]) -> [__m256; 2] {
        let bias = unsafe { [_mm256_set1_epi32(127); 2] };
        let biased = both!(_mm256_add_epi32; n, bias);
        let bits = both!(_mm256_slli_epi32::<23>; biased);
        both!(_mm256_castsi256_ps; bits)
    }
    #[inline(always)]
    unsafe fn above(x: [__m256; 2], bound: [__m256; 2]) -> [__m256; 2] {
        let mask = both!(_mm256_cmp_ps::<_CMP_GT_OQ>; x, bound);
        let one = unsafe { [_mm256_set1_ps(1.0); 2] };
        both!(_mm256_and_ps; mask, one)
    }
}

/// acc + the pair products of w and a. In assembly because the compiler rewrites the intrinsic as a
/// multiplication and an addition, which shortens a chain of them and halves the throughput of many.
#[inline]
#[target_feature(enable = "avx2,avxvnni")]
fn accumulate(mut acc: __m256i, w: __m256i, a: __m256i) -> __m256i {
    // SAFETY: the function's features; registers only.
    unsafe {
        asm!(
            "{{vex}} vpdpwssd {acc}, {w}, {a}",
            acc = inout(ymm_reg) acc,
            w = in(ymm_reg) w,
            a = in(ymm_reg) a,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    acc
}

/// Without AVX-VNNI.
pub mod plain {
    type Class = super::Avx2<false>;
    crate::kernels::kernels!(Class, "avx2,fma,f16c");
}

/// With AVX-VNNI.
pub mod vnni {
    type Class = super::Avx2<true>;
    crate::kernels::kernels!(Class, "avx2,fma,f16c,avxvnni");
}

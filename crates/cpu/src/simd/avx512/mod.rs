//! AVX-512: one register holds the sixteen lanes.
//!
//! AMD's processors have four vector units that add, of which two multiply; Intel's have two that do both.

use std::arch::asm;
use std::arch::x86_64::*;

use super::Simd;
use crate::matmul::block::{Block, fewer_products, products};

mod block;

#[derive(Clone, Copy)]
pub struct Avx512<const WINOGRAD: bool>;

// SAFETY (all blocks): the trait's contract: the features are there and pointers hold 16 lanes.
#[allow(clippy::undocumented_unsafe_blocks, reason = "said once above")]
impl<const WINOGRAD: bool> Simd for Avx512<WINOGRAD> {
    type I = __m512i;
    type F = __m512;
    const TILE: (usize, usize) = (2, 12);
    const WINOGRAD: bool = WINOGRAD;

    #[inline(always)]
    unsafe fn prefetch(at: *const i32) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }
    #[inline(always)]
    unsafe fn load(from: *const i32) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn splat_i(x: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(x) }
    }
    /// In assembly because the compiler rewrites the intrinsic as a multiplication and an addition,
    /// which shortens a chain of them and halves the throughput of many.
    #[inline]
    #[target_feature(enable = "avx512f,avx512vnni")]
    unsafe fn dot(mut acc: __m512i, a: __m512i, b: __m512i) -> __m512i {
        unsafe {
            asm!(
                "vpdpwssd {acc}, {a}, {b}",
                acc = inout(zmm_reg) acc,
                a = in(zmm_reg) a,
                b = in(zmm_reg) b,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        acc
    }
    #[inline(always)]
    unsafe fn add_pairs(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi16(a, b) }
    }
    #[inline(always)]
    unsafe fn sub_i(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_sub_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn products<const P: usize, const T: usize>(
        total: &mut [[__m512; T]; P],
        block: &Block<P>,
    ) {
        let at = std::ptr::from_mut(total);
        unsafe {
            match (P, T) {
                (2, 12) => block::plain_by_twelve(&mut *at.cast(), &block.two()),
                (2, 8) => block::plain_by_eight(&mut *at.cast(), &block.two()),
                _ => products::<Self, P, T>(total, block),
            }
        }
    }
    #[inline(always)]
    unsafe fn fewer_products<const P: usize, const T: usize>(
        total: &mut [[__m512; T]; P],
        block: &Block<P>,
    ) {
        let at = std::ptr::from_mut(total);
        unsafe {
            match (P, T) {
                (2, 12) => block::winograd_by_twelve(&mut *at.cast(), &block.two()),
                (2, 8) => block::winograd_by_eight(&mut *at.cast(), &block.two()),
                _ => fewer_products::<Self, P, T>(total, block),
            }
        }
    }
    #[inline(always)]
    unsafe fn even_bytes(x: __m512i) -> __m512i {
        unsafe { _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(x)) }
    }
    #[inline(always)]
    unsafe fn odd_bytes(x: __m512i) -> __m512i {
        unsafe { _mm512_srai_epi16::<8>(x) }
    }
    #[inline(always)]
    unsafe fn pairs(x: __m512i) -> __m512i {
        unsafe {
            let behind = _mm512_shuffle_epi32::<0b11_10_11_10>(x);
            _mm512_mask_blend_epi16(0xaaaa_aaaa, x, _mm512_slli_epi32::<16>(behind))
        }
    }
    #[inline(always)]
    unsafe fn nibbles<const N: u32>(x: __m512i) -> __m512i {
        unsafe {
            match N {
                0 => _mm512_and_si512(x, _mm512_set1_epi16(15)),
                1 => _mm512_and_si512(_mm512_srli_epi16::<4>(x), _mm512_set1_epi16(15)),
                2 => _mm512_and_si512(_mm512_srli_epi16::<8>(x), _mm512_set1_epi16(15)),
                _ => _mm512_srli_epi16::<12>(x),
            }
        }
    }
    #[inline(always)]
    unsafe fn to_f32(x: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(x) }
    }
    #[inline(always)]
    unsafe fn to_i32(x: __m512) -> __m512i {
        unsafe { _mm512_cvtps_epi32(x) }
    }
    #[inline(always)]
    unsafe fn store_i(x: __m512i, to: *mut i32) {
        unsafe { _mm512_storeu_si512(to.cast(), x) }
    }
    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    unsafe fn store(x: __m512, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, x) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn abs(x: __m512) -> __m512 {
        unsafe { _mm512_abs_ps(x) }
    }
    #[inline(always)]
    unsafe fn sum(x: __m512) -> f32 {
        unsafe { _mm512_reduce_add_ps(x) }
    }
    #[inline(always)]
    unsafe fn largest(x: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(x) }
    }
    #[inline(always)]
    unsafe fn pow2(n: __m512i) -> __m512 {
        unsafe {
            let biased = _mm512_add_epi32(n, _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }
    #[inline(always)]
    unsafe fn above(x: __m512, bound: __m512) -> __m512 {
        unsafe {
            let mask = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, bound);
            _mm512_maskz_mov_ps(mask, _mm512_set1_ps(1.0))
        }
    }
}

/// Plain products.
pub mod plain {
    type Class = super::Avx512<false>;
    crate::kernels::kernels!(Class, "avx512f,avx512bw,avx512vnni,avx512vl,avx512dq,avx2,fma,f16c");
}

/// Products with fewer multiplications.
pub mod winograd {
    type Class = super::Avx512<true>;
    crate::kernels::kernels!(Class, "avx512f,avx512bw,avx512vnni,avx512vl,avx512dq,avx2,fma,f16c");
}

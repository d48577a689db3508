//! Advanced SIMD of AArch64: four registers hold the sixteen lanes. Every processor of the architecture
//! has what this class uses; the dot-product extensions work on bytes and bf16, which the kernels do not.

use std::arch::aarch64::*;
use std::arch::asm;

use super::Simd;

#[derive(Clone, Copy)]
pub struct Neon;

/// One operation on all four registers.
macro_rules! each {
    ($f:expr; $($x:expr),+) => {
        unsafe { [$f($($x[0]),+), $f($($x[1]),+), $f($($x[2]),+), $f($($x[3]),+)] }
    };
}

// SAFETY (all blocks): the trait's contract: pointers hold 16 lanes.
#[allow(clippy::undocumented_unsafe_blocks, reason = "said once above")]
#[allow(unused_unsafe, reason = "the macro serves safe operations too")]
impl Simd for Neon {
    type I = [int32x4_t; 4];
    type F = [float32x4_t; 4];
    const TILE: (usize, usize) = (1, 4);

    #[inline(always)]
    unsafe fn prefetch(at: *const i32) {
        unsafe {
            asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, readonly, preserves_flags))
        }
    }
    #[inline(always)]
    unsafe fn load(from: *const i32) -> [int32x4_t; 4] {
        unsafe {
            [
                vld1q_s32(from),
                vld1q_s32(from.add(4)),
                vld1q_s32(from.add(8)),
                vld1q_s32(from.add(12)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn splat_i(x: i32) -> [int32x4_t; 4] {
        unsafe { [vdupq_n_s32(x); 4] }
    }
    #[inline(always)]
    unsafe fn dot(acc: [int32x4_t; 4], a: [int32x4_t; 4], b: [int32x4_t; 4]) -> [int32x4_t; 4] {
        let products = |a, b| unsafe {
            let (a, b) = (vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b));
            let low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
            vpaddq_s32(low, vmull_high_s16(a, b))
        };
        let products = each!(products; a, b);
        each!(vaddq_s32; acc, products)
    }
    #[inline(always)]
    unsafe fn add_pairs(a: [int32x4_t; 4], b: [int32x4_t; 4]) -> [int32x4_t; 4] {
        let add = |a, b| unsafe {
            vreinterpretq_s32_s16(vaddq_s16(vreinterpretq_s16_s32(a), vreinterpretq_s16_s32(b)))
        };
        each!(add; a, b)
    }
    #[inline(always)]
    unsafe fn sub_i(a: [int32x4_t; 4], b: [int32x4_t; 4]) -> [int32x4_t; 4] {
        each!(vsubq_s32; a, b)
    }
    #[inline(always)]
    unsafe fn even_bytes(x: [int32x4_t; 4]) -> [int32x4_t; 4] {
        let even = |x| unsafe {
            vreinterpretq_s32_s16(vshrq_n_s16::<8>(vshlq_n_s16::<8>(vreinterpretq_s16_s32(x))))
        };
        each!(even; x)
    }
    #[inline(always)]
    unsafe fn odd_bytes(x: [int32x4_t; 4]) -> [int32x4_t; 4] {
        let odd = |x| unsafe { vreinterpretq_s32_s16(vshrq_n_s16::<8>(vreinterpretq_s16_s32(x))) };
        each!(odd; x)
    }
    #[inline(always)]
    unsafe fn pairs(x: [int32x4_t; 4]) -> [int32x4_t; 4] {
        let pairs = |x| unsafe { vsliq_n_s32::<16>(x, vextq_s32::<2>(x, x)) };
        each!(pairs; x)
    }
    #[inline(always)]
    unsafe fn nibbles<const N: u32>(x: [int32x4_t; 4]) -> [int32x4_t; 4] {
        let shifted = |x| unsafe {
            let x = vreinterpretq_u16_s32(x);
            let x = match N {
                0 => x,
                1 => vshrq_n_u16::<4>(x),
                2 => vshrq_n_u16::<8>(x),
                _ => vshrq_n_u16::<12>(x),
            };
            vreinterpretq_s32_u16(vandq_u16(x, vdupq_n_u16(15)))
        };
        each!(shifted; x)
    }
    #[inline(always)]
    unsafe fn to_f32(x: [int32x4_t; 4]) -> [float32x4_t; 4] {
        each!(vcvtq_f32_s32; x)
    }
    #[inline(always)]
    unsafe fn to_i32(x: [float32x4_t; 4]) -> [int32x4_t; 4] {
        each!(vcvtnq_s32_f32; x)
    }
    #[inline(always)]
    unsafe fn store_i(x: [int32x4_t; 4], to: *mut i32) {
        for (i, x) in x.into_iter().enumerate() {
            unsafe { vst1q_s32(to.add(4 * i), x) };
        }
    }
    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> [float32x4_t; 4] {
        unsafe {
            [
                vld1q_f32(from),
                vld1q_f32(from.add(4)),
                vld1q_f32(from.add(8)),
                vld1q_f32(from.add(12)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> [float32x4_t; 4] {
        // The conversion is part of the base architecture; the type of its operand is not yet stable.
        let wide = |x: uint16x4_t| {
            let out: float32x4_t;
            unsafe {
                asm!(
                    "fcvtl {0:v}.4s, {1:v}.4h",
                    out(vreg) out,
                    in(vreg) x,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            out
        };
        let halves = unsafe {
            [vld1_u16(from), vld1_u16(from.add(4)), vld1_u16(from.add(8)), vld1_u16(from.add(12))]
        };
        each!(wide; halves)
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> [float32x4_t; 4] {
        let wide = |x| unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(x)) };
        let halves = unsafe {
            [vld1_u16(from), vld1_u16(from.add(4)), vld1_u16(from.add(8)), vld1_u16(from.add(12))]
        };
        each!(wide; halves)
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> [float32x4_t; 4] {
        unsafe {
            let bytes = vld1q_s8(from);
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
            let words = [
                vmovl_s16(vget_low_s16(low)),
                vmovl_high_s16(low),
                vmovl_s16(vget_low_s16(high)),
                vmovl_high_s16(high),
            ];
            each!(vcvtq_f32_s32; words)
        }
    }
    #[inline(always)]
    unsafe fn store(x: [float32x4_t; 4], to: *mut f32) {
        for (i, x) in x.into_iter().enumerate() {
            unsafe { vst1q_f32(to.add(4 * i), x) };
        }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> [float32x4_t; 4] {
        unsafe { [vdupq_n_f32(x); 4] }
    }
    #[inline(always)]
    unsafe fn add(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        each!(vaddq_f32; a, b)
    }
    #[inline(always)]
    unsafe fn sub(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        each!(vsubq_f32; a, b)
    }
    #[inline(always)]
    unsafe fn mul(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        each!(vmulq_f32; a, b)
    }
    #[inline(always)]
    unsafe fn div(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        each!(vdivq_f32; a, b)
    }
    #[inline(always)]
    unsafe fn max(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        each!(vmaxnmq_f32; a, b)
    }
    #[inline(always)]
    unsafe fn min(a: [float32x4_t; 4], b: [float32x4_t; 4]) -> [float32x4_t; 4] {
        each!(vminnmq_f32; a, b)
    }
    #[inline(always)]
    unsafe fn fma(
        a: [float32x4_t; 4],
        b: [float32x4_t; 4],
        c: [float32x4_t; 4],
    ) -> [float32x4_t; 4] {
        each!(vfmaq_f32; c, a, b)
    }
    #[inline(always)]
    unsafe fn abs(x: [float32x4_t; 4]) -> [float32x4_t; 4] {
        each!(vabsq_f32; x)
    }
    #[inline(always)]
    unsafe fn pow2(n: [int32x4_t; 4]) -> [float32x4_t; 4] {
        let power =
            |n| unsafe { vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(n, vdupq_n_s32(127)))) };
        each!(power; n)
    }
    #[inline(always)]
    unsafe fn above(x: [float32x4_t; 4], bound: [float32x4_t; 4]) -> [float32x4_t; 4] {
        let above = |x, bound| unsafe {
            let one = vreinterpretq_u32_f32(vdupq_n_f32(1.0));
            vreinterpretq_f32_u32(vandq_u32(vcgtq_f32(x, bound), one))
        };
        each!(above; x, bound)
    }
}

crate::kernels::kernels!(Neon, "neon");

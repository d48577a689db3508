//! Plain Rust over arrays, for the compiler to vectorise. Multiplies and adds are rounded one by one:
//! without the instruction, a fused one is a library call.

use model::float::{bf16_to_f32, f16_to_f32};

use super::{LANES, Simd};

#[derive(Clone, Copy)]
pub struct Portable;

#[inline(always)]
fn map<A: Copy, B>(x: [A; LANES], f: impl Fn(A) -> B) -> [B; LANES] {
    std::array::from_fn(|i| f(x[i]))
}

#[inline(always)]
fn zip<A: Copy, B>(x: [A; LANES], y: [A; LANES], f: impl Fn(A, A) -> B) -> [B; LANES] {
    std::array::from_fn(|i| f(x[i], y[i]))
}

/// Two i16 as one lane.
#[inline(always)]
fn pair(low: i32, high: i32) -> i32 {
    (low & 0xffff) | (high << 16)
}

// SAFETY (all blocks): pointers hold 16 lanes, as the trait demands.
#[allow(clippy::undocumented_unsafe_blocks, reason = "said once above")]
impl Simd for Portable {
    type I = [i32; LANES];
    type F = [f32; LANES];
    const TILE: (usize, usize) = (1, 2);

    #[inline(always)]
    unsafe fn prefetch(_: *const i32) {}
    #[inline(always)]
    unsafe fn load(from: *const i32) -> [i32; LANES] {
        unsafe { from.cast::<[i32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn splat_i(x: i32) -> [i32; LANES] {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn dot(acc: [i32; LANES], a: [i32; LANES], b: [i32; LANES]) -> [i32; LANES] {
        let low = zip(a, b, |a, b| i32::from(a as i16) * i32::from(b as i16));
        let high = zip(a, b, |a, b| (a >> 16) * (b >> 16));
        zip(acc, zip(low, high, i32::wrapping_add), i32::wrapping_add)
    }
    #[inline(always)]
    unsafe fn add_pairs(a: [i32; LANES], b: [i32; LANES]) -> [i32; LANES] {
        zip(a, b, |a, b| pair(a.wrapping_add(b), (a >> 16).wrapping_add(b >> 16)))
    }
    #[inline(always)]
    unsafe fn sub_i(a: [i32; LANES], b: [i32; LANES]) -> [i32; LANES] {
        zip(a, b, i32::wrapping_sub)
    }
    #[inline(always)]
    unsafe fn even_bytes(x: [i32; LANES]) -> [i32; LANES] {
        map(x, |x| pair(i32::from(x as i8), i32::from((x >> 16) as i8)))
    }
    #[inline(always)]
    unsafe fn odd_bytes(x: [i32; LANES]) -> [i32; LANES] {
        map(x, |x| pair(i32::from((x >> 8) as i8), i32::from((x >> 24) as i8)))
    }
    #[inline(always)]
    unsafe fn pairs(x: [i32; LANES]) -> [i32; LANES] {
        std::array::from_fn(|i| pair(x[i], x[(i + 2) % LANES]))
    }
    #[inline(always)]
    unsafe fn nibbles<const N: u32>(x: [i32; LANES]) -> [i32; LANES] {
        map(x, |x| (x >> (4 * N)) & 0x000f_000f)
    }
    #[inline(always)]
    unsafe fn to_f32(x: [i32; LANES]) -> [f32; LANES] {
        map(x, |x| x as f32)
    }
    #[inline(always)]
    unsafe fn to_i32(x: [f32; LANES]) -> [i32; LANES] {
        map(x, |x| x.round_ties_even() as i32)
    }
    #[inline(always)]
    unsafe fn store_i(x: [i32; LANES], to: *mut i32) {
        unsafe { to.cast::<[i32; LANES]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn load_f32(from: *const f32) -> [f32; LANES] {
        unsafe { from.cast::<[f32; LANES]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> [f32; LANES] {
        map(unsafe { from.cast::<[u16; LANES]>().read_unaligned() }, f16_to_f32)
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> [f32; LANES] {
        map(unsafe { from.cast::<[u16; LANES]>().read_unaligned() }, bf16_to_f32)
    }
    #[inline(always)]
    unsafe fn load_i8(from: *const i8) -> [f32; LANES] {
        map(unsafe { from.cast::<[i8; LANES]>().read_unaligned() }, f32::from)
    }
    #[inline(always)]
    unsafe fn store(x: [f32; LANES], to: *mut f32) {
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; LANES] {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn add(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn fma(a: [f32; LANES], b: [f32; LANES], c: [f32; LANES]) -> [f32; LANES] {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn max(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn min(a: [f32; LANES], b: [f32; LANES]) -> [f32; LANES] {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    unsafe fn abs(x: [f32; LANES]) -> [f32; LANES] {
        map(x, f32::abs)
    }
    #[inline(always)]
    unsafe fn pow2(n: [i32; LANES]) -> [f32; LANES] {
        map(n, |n| f32::from_bits(((n + 127) << 23) as u32))
    }
    #[inline(always)]
    unsafe fn above(x: [f32; LANES], bound: [f32; LANES]) -> [f32; LANES] {
        zip(x, bound, |x, bound| if x > bound { 1.0 } else { 0.0 })
    }
}

crate::kernels::kernels!(Portable);

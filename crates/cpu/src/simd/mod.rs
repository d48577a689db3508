//! The vector operations that the kernels are written in, and the instruction classes that provide them.
//!
//! Every kernel is written once, over [`Simd`]: 16 lanes, whatever the registers' width. A class
//! implements the operations and compiles all kernels under its target features (`kernels!`); the
//! backend picks one class's table of function pointers when it is built.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use engine::BackendError;

use crate::kernels::Kernels;
use crate::matmul::block::{Block, fewer_products, products};

/// Lanes of every vector, and so rows of a panel.
pub const LANES: usize = 16;

/// Sixteen lanes of a class.
///
/// # Safety
/// Every operation requires that the processor has the class's features; those that take a pointer
/// read or write 16 lanes there, unaligned.
pub trait Simd: Copy {
    /// 16 x i32, which are also 16 pairs of i16.
    type I: Copy;
    /// 16 x f32.
    type F: Copy;
    /// How many panels and tokens one tile of the matrix product holds in registers, at most.
    const TILE: (usize, usize);
    /// Whether vectors are added beside being multiplied, and not instead.
    const WINOGRAD: bool = false;

    /// Asks for a cache line that will be needed; any address will do.
    unsafe fn prefetch(at: *const i32);
    unsafe fn load(from: *const i32) -> Self::I;
    unsafe fn splat_i(x: i32) -> Self::I;
    /// acc + a.0 * b.0 + a.1 * b.1 for the i16 pairs of each lane; what overflows wraps around.
    unsafe fn dot(acc: Self::I, a: Self::I, b: Self::I) -> Self::I;
    /// a + b of i16; what overflows wraps around.
    unsafe fn add_pairs(a: Self::I, b: Self::I) -> Self::I;
    /// a - b of i32; what overflows wraps around.
    unsafe fn sub_i(a: Self::I, b: Self::I) -> Self::I;
    /// Bytes 0 and 2 of each lane as a pair of i16.
    unsafe fn even_bytes(x: Self::I) -> Self::I;
    /// Bytes 1 and 3 of each lane as a pair of i16.
    unsafe fn odd_bytes(x: Self::I) -> Self::I;
    /// Of every four lanes, whose numbers fit in an i16: the pairs (0, 2) and (1, 3) in lanes 0 and 1, and anything behind.
    unsafe fn pairs(x: Self::I) -> Self::I;
    /// Nibble `N` (0 to 3) of both 16-bit halves of each lane, as a pair of i16.
    unsafe fn nibbles<const N: u32>(x: Self::I) -> Self::I;
    /// [`products`] of a block; a class may know a faster way.
    #[inline(always)]
    unsafe fn products<const P: usize, const T: usize>(
        total: &mut [[Self::F; T]; P],
        block: &Block<P>,
    ) {
        // SAFETY: the caller's.
        unsafe { products::<Self, P, T>(total, block) }
    }
    /// [`fewer_products`] of a block; a class may know a faster way.
    #[inline(always)]
    unsafe fn fewer_products<const P: usize, const T: usize>(
        total: &mut [[Self::F; T]; P],
        block: &Block<P>,
    ) {
        // SAFETY: the caller's.
        unsafe { fewer_products::<Self, P, T>(total, block) }
    }
    unsafe fn to_f32(x: Self::I) -> Self::F;
    /// Rounds to the nearest integer, ties to even.
    unsafe fn to_i32(x: Self::F) -> Self::I;
    unsafe fn store_i(x: Self::I, to: *mut i32);

    unsafe fn load_f32(from: *const f32) -> Self::F;
    unsafe fn load_f16(from: *const u16) -> Self::F;
    unsafe fn load_bf16(from: *const u16) -> Self::F;
    unsafe fn load_i8(from: *const i8) -> Self::F;
    unsafe fn store(x: Self::F, to: *mut f32);
    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn div(a: Self::F, b: Self::F) -> Self::F;
    /// a * b + c.
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn min(a: Self::F, b: Self::F) -> Self::F;
    /// 1 where x > bound, else 0.
    unsafe fn above(x: Self::F, bound: Self::F) -> Self::F;
    unsafe fn abs(x: Self::F) -> Self::F;
    /// Sum of the lanes, halving: the same order in every class.
    #[inline(always)]
    unsafe fn sum(x: Self::F) -> f32 {
        // SAFETY: the caller's.
        fold(unsafe { lanes::<Self>(x) }, |a, b| a + b)
    }
    /// Largest lane.
    #[inline(always)]
    unsafe fn largest(x: Self::F) -> f32 {
        // SAFETY: the caller's.
        fold(unsafe { lanes::<Self>(x) }, |a, b| if a > b { a } else { b })
    }
    /// 2^n for integers -126 <= n <= 127.
    unsafe fn pow2(n: Self::I) -> Self::F;
}

/// The lanes' values.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
unsafe fn lanes<S: Simd>(x: S::F) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    // SAFETY: the caller's, and `out` holds 16 lanes.
    unsafe { S::store(x, out.as_mut_ptr()) };
    out
}

#[inline(always)]
fn fold(mut x: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            x[i] = f(x[i], x[i + half]);
        }
        half /= 2;
    }
    x[0]
}

/// e^x to about one unit in the last place; below -87 the result is 0, above 88 it is e^88.
///
/// # Safety
/// As [`Simd`].
#[inline(always)]
pub unsafe fn exp<S: Simd>(x: S::F) -> S::F {
    // e^x = 2^n e^r with n = round(x / ln 2) and |r| <= ln 2 / 2; ln 2 in two parts, so that r is
    // exact. The coefficients are those of the Taylor series, whose remainder is below 2^-25.
    const TAYLOR: [f32; 7] =
        [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0];
    // SAFETY: the caller's.
    unsafe {
        let low = S::splat(-87.0);
        let clamped = S::min(S::max(x, low), S::splat(88.0));
        let n = S::to_i32(S::mul(clamped, S::splat(std::f32::consts::LOG2_E)));
        let whole = S::to_f32(n);
        let r = S::fma(whole, S::splat(-0.693_359_4), clamped);
        let r = S::fma(whole, S::splat(2.121_944_4e-4), r);
        let mut p = S::splat(TAYLOR[0]);
        for c in &TAYLOR[1..] {
            p = S::fma(p, r, S::splat(*c));
        }
        let p = S::fma(p, r, S::splat(1.0));
        // Everything at or below the clamp is nothing: masked scores must weigh exactly 0.
        S::mul(S::mul(p, S::pow2(n)), S::above(x, low))
    }
}

/// An instruction class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// AVX-512 with VNNI, for processors that add vectors beside multiplying them: AMD's.
    Avx512Winograd,
    /// AVX-512 with VNNI.
    Avx512,
    /// AVX2 with FMA, F16C and AVX-VNNI.
    Avx2Vnni,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// Advanced SIMD of AArch64.
    Neon,
    /// What the compiler makes of plain Rust.
    Portable,
}

impl Class {
    /// The classes that this machine can run, best first.
    pub fn available() -> Vec<Class> {
        let mut all = [
            Class::Avx512Winograd,
            Class::Avx512,
            Class::Avx2Vnni,
            Class::Avx2,
            Class::Neon,
            Class::Portable,
        ];
        if !adds_beside_multiplying() {
            all.swap(0, 1);
        }
        all.into_iter().filter(|class| class.kernels().is_some()).collect()
    }

    /// The best class of this machine.
    pub fn best() -> Class {
        Class::available()[0]
    }

    /// The class's kernels, or that this machine cannot run them.
    pub(crate) fn required(self) -> Result<&'static Kernels, BackendError> {
        let missing = || BackendError::Unavailable(format!("no {self:?} on this machine"));
        self.kernels().ok_or_else(missing)
    }

    /// The class's kernels, if this machine can run them.
    pub(crate) fn kernels(self) -> Option<&'static Kernels> {
        match self {
            #[cfg(target_arch = "x86_64")]
            Class::Avx512Winograd => avx512_detected().then_some(&avx512::winograd::KERNELS),
            #[cfg(target_arch = "x86_64")]
            Class::Avx512 => avx512_detected().then_some(&avx512::plain::KERNELS),
            #[cfg(target_arch = "x86_64")]
            Class::Avx2Vnni => (avx2_detected() && is_x86_feature_detected!("avxvnni"))
                .then_some(&avx2::vnni::KERNELS),
            #[cfg(target_arch = "x86_64")]
            Class::Avx2 => avx2_detected().then_some(&avx2::plain::KERNELS),
            #[cfg(target_arch = "aarch64")]
            Class::Neon => Some(&neon::KERNELS),
            Class::Portable => Some(&portable::KERNELS),
            #[allow(unreachable_patterns, reason = "the classes of other architectures")]
            _ => None,
        }
    }
}

/// Whether the processor's vector units that add outnumber those that multiply.
fn adds_beside_multiplying() -> bool {
    #[cfg(target_arch = "x86_64")]
    {
        let vendor = std::arch::x86_64::__cpuid(0);
        [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == *b"AuthenticAMD"
    }
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[cfg(target_arch = "x86_64")]
fn avx512_detected() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vnni")
}

#[cfg(target_arch = "x86_64")]
fn avx2_detected() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

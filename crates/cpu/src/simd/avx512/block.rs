//! [`products`](crate::matmul::block::products) and [`fewer_products`](crate::matmul::block::fewer_products) of two
//! panels by 12 or by 8 tokens.
//!
//! In assembly because it takes all 32 registers, and the two kinds of tokens in turn: the compiler keeps part of
//! the sums in memory and is half as fast.

use std::arch::asm;
use std::arch::x86_64::__m512;

use crate::matmul::block::Block;

/// The instructions of one token: how its sums begin, what a group adds, and what becomes of them.
macro_rules! token {
    (begin plain $tokens:literal $t:literal $a:literal $b:literal) => {
        concat!("vpxord zmm", $a, ", zmm", $a, ", zmm", $a, "\n", "vpxord zmm", $b, ", zmm", $b, ", zmm", $b, "\n")
    };
    (begin winograd $tokens:literal $t:literal $a:literal $b:literal) => {
        concat!(
            "vpbroadcastd zmm", $a, ", dword ptr [{crosses} + 4*", $t, "]\n",
            "vpsubd zmm", $b, ", zmm", $a, ", zmm26\n",
            "vpsubd zmm", $a, ", zmm", $a, ", zmm24\n",
        )
    };
    (inputs $tokens:literal $t:literal) => {
        concat!(
            "vpbroadcastd zmm28, dword ptr [{x} + 4*", $t, "]\n",
            "vpbroadcastd zmm29, dword ptr [{x} + 4*(", $t, " + ", $tokens, ")]\n",
        )
    };
    (group plain $tokens:literal $t:literal $a:literal $b:literal) => {
        concat!(
            token!(inputs $tokens $t),
            "vpdpwssd zmm", $a, ", zmm28, zmm24\n",
            "vpdpwssd zmm", $b, ", zmm28, zmm26\n",
            "vpdpwssd zmm", $a, ", zmm29, zmm25\n",
            "vpdpwssd zmm", $b, ", zmm29, zmm27\n",
        )
    };
    (group winograd $tokens:literal $t:literal $a:literal $b:literal) => {
        concat!(
            token!(inputs $tokens $t),
            "vpaddw zmm30, zmm28, zmm25\n",
            "vpaddw zmm31, zmm29, zmm24\n",
            "vpdpwssd zmm", $a, ", zmm30, zmm31\n",
            "vpaddw zmm30, zmm28, zmm27\n",
            "vpaddw zmm31, zmm29, zmm26\n",
            "vpdpwssd zmm", $b, ", zmm30, zmm31\n",
        )
    };
    (end $way:ident $tokens:literal $t:literal $a:literal $b:literal) => {
        concat!(
            "vcvtdq2ps zmm", $a, ", zmm", $a, "\n",
            "vcvtdq2ps zmm", $b, ", zmm", $b, "\n",
            "vmulps zmm", $a, ", zmm", $a, ", dword ptr [{scales} + 4*", $t, "]{{1to16}}\n",
            "vmulps zmm", $b, ", zmm", $b, ", dword ptr [{scales} + 4*", $t, "]{{1to16}}\n",
            "vfmadd213ps zmm", $a, ", zmm24, zmmword ptr [{total} + 64*", $t, "]\n",
            "vfmadd213ps zmm", $b, ", zmm26, zmmword ptr [{total} + 64*(", $t, " + ", $tokens, ")]\n",
            "vmovups zmmword ptr [{total} + 64*", $t, "], zmm", $a, "\n",
            "vmovups zmmword ptr [{total} + 64*(", $t, " + ", $tokens, ")], zmm", $b, "\n",
        )
    };
}

macro_rules! two_panels {
    ($name:ident, $tokens:literal, [$($t:literal $way:ident $a:literal $b:literal),*]) => {
        /// See above.
        ///
        /// # Safety
        /// As [`crate::matmul::block::products`].
        #[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
        pub unsafe fn $name(total: &mut [[__m512; $tokens]; 2], block: &Block<2>) {
            // SAFETY: the caller's.
            unsafe {
                asm!(
                    "/* Not all kinds of tokens look at {crosses}. */",
                    "vmovdqu64 zmm24, zmmword ptr [{e} + 64]",
                    "vmovdqu64 zmm26, zmmword ptr [{f} + 64]",
                    $(token!(begin $way $tokens $t $a $b),)*
                    "2:",
                    "vmovdqu64 zmm24, zmmword ptr [{v}]",
                    "vmovdqu64 zmm25, zmmword ptr [{v} + 64]",
                    "vmovdqu64 zmm26, zmmword ptr [{w}]",
                    "vmovdqu64 zmm27, zmmword ptr [{w} + 64]",
                    $(token!(group $way $tokens $t $a $b),)*
                    "add {v}, 128",
                    "add {w}, 128",
                    "prefetcht0 [{x} + {ahead}]",
                    "prefetcht0 [{x} + {ahead} + 64]",
                    concat!("add {x}, 8*", $tokens),
                    "dec {groups}",
                    "jnz 2b",
                    "vmovups zmm24, zmmword ptr [{e}]",
                    "vmovups zmm26, zmmword ptr [{f}]",
                    $(token!(end $way $tokens $t $a $b),)*
                    v = inout(reg) block.weights[0] => _,
                    w = inout(reg) block.weights[1] => _,
                    e = in(reg) block.factors[0],
                    f = in(reg) block.factors[1],
                    x = inout(reg) block.inputs => _,
                    ahead = in(reg) block.ahead,
                    crosses = in(reg) block.crosses,
                    groups = inout(reg) block.groups => _,
                    scales = in(reg) block.scales,
                    total = in(reg) total,
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _,
                    out("zmm4") _, out("zmm5") _, out("zmm6") _, out("zmm7") _,
                    out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
                    out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _,
                    out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _,
                    out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
                    out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _,
                    out("zmm28") _, out("zmm29") _, out("zmm30") _, out("zmm31") _,
                    options(nostack)
                );
            }
        }
    };
}

two_panels!(plain_by_twelve, 12, [
    0 plain 0 12,
    1 plain 1 13,
    2 plain 2 14,
    3 plain 3 15,
    4 plain 4 16,
    5 plain 5 17,
    6 plain 6 18,
    7 plain 7 19,
    8 plain 8 20,
    9 plain 9 21,
    10 plain 10 22,
    11 plain 11 23
]);
two_panels!(plain_by_eight, 8, [
    0 plain 0 8,
    1 plain 1 9,
    2 plain 2 10,
    3 plain 3 11,
    4 plain 4 12,
    5 plain 5 13,
    6 plain 6 14,
    7 plain 7 15
]);
two_panels!(winograd_by_twelve, 12, [
    0 plain 0 12,
    1 winograd 1 13,
    2 winograd 2 14,
    3 plain 3 15,
    4 winograd 4 16,
    5 winograd 5 17,
    6 plain 6 18,
    7 winograd 7 19,
    8 winograd 8 20,
    9 plain 9 21,
    10 winograd 10 22,
    11 winograd 11 23
]);
two_panels!(winograd_by_eight, 8, [
    0 plain 0 8,
    1 winograd 1 9,
    2 winograd 2 10,
    3 plain 3 11,
    4 winograd 4 12,
    5 winograd 5 13,
    6 plain 6 14,
    7 winograd 7 15
]);

//! Loops of nothing but one instruction, for measuring what a processor can multiply. Only x86 has several to
//! choose from.

/// Independent accumulators of a loop: enough to hide the latency of two units.
pub const CHAINS: usize = 12;

/// A loop.
pub struct Chain {
    /// The instruction and the bits of its registers.
    pub name: &'static str,
    /// Multiplications and additions of one instruction.
    pub operations: usize,
    /// Runs so many rounds of [`CHAINS`] instructions.
    ///
    /// # Safety
    /// The processor has the instruction.
    pub run: unsafe fn(rounds: usize),
}

/// The loops that this processor can run.
#[cfg(target_arch = "x86_64")]
pub fn available() -> Vec<Chain> {
    let mut found = Vec::new();
    let mut add = |there: bool, name, operations, run| {
        if there {
            found.push(Chain { name, operations, run });
        }
    };
    let wide = is_x86_feature_detected!("avx512f");
    let bytes = is_x86_feature_detected!("avx512vnni");
    add(wide && is_x86_feature_detected!("avx512bf16"), "vdpbf16ps zmm", 64, x86::vdpbf16ps_zmm);
    add(wide && bytes, "vpdpwssd zmm", 64, x86::vpdpwssd_zmm);
    add(wide && bytes, "vpdpbusd zmm", 128, x86::vpdpbusd_zmm);
    add(wide, "vfmadd231ps zmm", 32, x86::vfmadd231ps_zmm);
    let narrow = is_x86_feature_detected!("avxvnni");
    add(narrow, "vpdpwssd ymm", 32, x86::vpdpwssd_ymm);
    add(narrow, "vpdpbusd ymm", 64, x86::vpdpbusd_ymm);
    add(is_x86_feature_detected!("fma"), "vfmadd231ps ymm", 16, x86::vfmadd231ps_ymm);
    found
}

/// The loops that this processor can run.
#[cfg(not(target_arch = "x86_64"))]
pub fn available() -> Vec<Chain> {
    Vec::new()
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::asm;

    /// A function that runs `CHAINS` of an instruction a round, on registers of one width.
    macro_rules! chain {
        ($name:ident, $features:literal, $instruction:literal, $width:literal) => {
            #[target_feature(enable = $features)]
            pub fn $name(rounds: usize) {
                // SAFETY: the function's features; registers only.
                unsafe {
                    asm!(
                        // Two ones in bf16, and something harmless as integers or as a float.
                        "mov {one:e}, 0x3f803f80",
                        "vmovd xmm12, {one:e}",
                        concat!("vpbroadcastd ", $width, "12, xmm12"),
                        "2:",
                        concat!($instruction, " ", $width, "0, ", $width, "12, ", $width, "12"),
                        concat!($instruction, " ", $width, "1, ", $width, "12, ", $width, "12"),
                        concat!($instruction, " ", $width, "2, ", $width, "12, ", $width, "12"),
                        concat!($instruction, " ", $width, "3, ", $width, "12, ", $width, "12"),
                        concat!($instruction, " ", $width, "4, ", $width, "12, ", $width, "12"),
                        concat!($instruction, " ", $width, "5, ", $width, "12, ", $width, "12"),
                        concat!($instruction, " ", $width, "6, ", $width, "12, ", $width, "12"),
                        concat!($instruction, " ", $width, "7, ", $width, "12, ", $width, "12"),
                        concat!($instruction, " ", $width, "8, ", $width, "12, ", $width, "12"),
                        concat!($instruction, " ", $width, "9, ", $width, "12, ", $width, "12"),
                        concat!($instruction, " ", $width, "10, ", $width, "12, ", $width, "12"),
                        concat!($instruction, " ", $width, "11, ", $width, "12, ", $width, "12"),
                        "dec {rounds}",
                        "jnz 2b",
                        one = out(reg) _,
                        rounds = inout(reg) rounds => _,
                        out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                        out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                        out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                        out("xmm12") _,
                        options(nomem, nostack)
                    );
                }
            }
        };
    }

    chain!(vdpbf16ps_zmm, "avx512f,avx512bf16", "vdpbf16ps", "zmm");
    chain!(vpdpwssd_zmm, "avx512f,avx512vnni", "vpdpwssd", "zmm");
    chain!(vpdpbusd_zmm, "avx512f,avx512vnni", "vpdpbusd", "zmm");
    chain!(vfmadd231ps_zmm, "avx512f", "vfmadd231ps", "zmm");
    chain!(vpdpwssd_ymm, "avx2,avxvnni", "{{vex}} vpdpwssd", "ymm");
    chain!(vpdpbusd_ymm, "avx2,avxvnni", "{{vex}} vpdpbusd", "ymm");
    chain!(vfmadd231ps_ymm, "avx2,fma", "vfmadd231ps", "ymm");
}

#[cfg(test)]
mod tests {
    /// That they run at all, and end.
    #[test]
    fn every_chain_of_this_processor_runs() {
        for chain in super::available() {
            // SAFETY: the processor has the instruction.
            unsafe { (chain.run)(3) };
        }
    }
}

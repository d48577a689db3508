//! Weights as the kernels stream them: panels of 16 rows, interleaved so that one vector holds the
//! same inputs of all 16.
//!
//! A panel is its scales, then its codes. Lane r of every vector is row r of the panel. A lane of a
//! code vector is four bytes of that row as they lie in the file (quantised schemes: the kernels unpack
//! pairs (k, k + 2) from them), or one pair (k, k + 2) of i16 (bf16).

use model::float::{f16_to_f32, f32_to_f16};
use model::scheme::k_quants::Block;
use model::{Matrix, TensorType};

use crate::activations::{NARROW, WIDE};
use crate::simd::{LANES, Simd};

/// How a panel's codes are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// 16-bit weights as i16 codes with a bf16 scale a row and block of 128.
    Wide,
    /// The codes of q8_0.
    Q8,
    /// The codes of q4_1, with scales and minima; those of Q4_K too.
    Q41,
    /// The codes of q4_0.
    Q40,
    /// The codes of Q5_K and Q6_K as bytes, with a scale every 16 and a minimum every 32.
    K8,
}

/// Largest activation code beside [`Format::Wide`], and the largest sum of a weight block's codes: their
/// product bounds every partial sum of a block's dot product, which therefore fits in an i32.
const WIDE_LEVELS: f32 = 8191.0;
const WIDE_SUM: f32 = 262_000.0;
/// Largest code of such a weight: the sum of an activation's and a weight's must fit in an i16.
const WIDE_MOST: f32 = 32767.0 - WIDE_LEVELS;

impl Format {
    /// The format of a stored matrix.
    pub fn of(ty: TensorType) -> Option<Format> {
        match ty {
            TensorType::Bf16 | TensorType::F16 => Some(Format::Wide),
            TensorType::Q8_0 => Some(Format::Q8),
            TensorType::Q4_1 | TensorType::Q4K => Some(Format::Q41),
            TensorType::Q4_0 => Some(Format::Q40),
            TensorType::Q5K | TensorType::Q6K => Some(Format::K8),
            TensorType::F32 => None,
        }
    }

    /// Largest activation code with which a dot product over a block cannot overflow.
    pub fn levels(self) -> f32 {
        match self {
            Format::Wide => WIDE_LEVELS,
            // 32 products of a byte with an i16: below 2^27. The sum with a byte must fit in an i16.
            Format::Q8 | Format::Q41 | Format::Q40 | Format::K8 => 32767.0 - 128.0,
        }
    }

    /// Bytes of a panel's scales, padded to a cache line.
    fn scale_bytes(self, cols: usize) -> usize {
        let row = match self {
            Format::Wide => cols.div_ceil(WIDE) * 2,
            Format::Q8 | Format::Q40 => cols / NARROW * 2,
            Format::Q41 => cols / NARROW * 4,
            Format::K8 => cols / NARROW * 6,
        };
        (row * LANES).next_multiple_of(64)
    }

    /// Bytes of a panel's codes.
    fn code_bytes(self, cols: usize) -> usize {
        match self {
            Format::Wide => cols * 2 * LANES,
            Format::Q8 | Format::K8 => cols * LANES,
            Format::Q41 | Format::Q40 => cols / 2 * LANES,
        }
    }
}

/// A packed matrix in an arena that its owner keeps alive.
#[derive(Clone, Copy)]
pub struct Panels {
    /// How codes are stored.
    pub format: Format,
    /// Outputs.
    pub rows: usize,
    /// Inputs, a multiple of 32.
    pub cols: usize,
    start: *mut u8,
}

// SAFETY: the bytes are written once, panel by panel, before anything reads them.
unsafe impl Send for Panels {}
// SAFETY: as above.
unsafe impl Sync for Panels {}

impl Panels {
    /// Bytes that a `[rows, cols]` matrix takes.
    pub fn bytes(format: Format, rows: usize, cols: usize) -> usize {
        rows.div_ceil(LANES) * (format.scale_bytes(cols) + format.code_bytes(cols))
    }

    /// A matrix at `start`, which must hold [`Self::bytes`] zeroed bytes for as long as it is used.
    pub fn new(format: Format, rows: usize, cols: usize, start: *mut u8) -> Self {
        Panels { format, rows, cols, start }
    }

    /// Number of panels.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Bytes of a panel.
    pub fn panel_bytes(&self) -> usize {
        self.format.scale_bytes(self.cols) + self.format.code_bytes(self.cols)
    }

    /// A panel's scales and its codes.
    ///
    /// # Safety
    /// The panel exists.
    #[inline(always)]
    pub unsafe fn panel(&self, panel: usize) -> (*mut u16, *mut i32) {
        // SAFETY: inside the matrix.
        unsafe {
            let scales = self.start.add(panel * self.panel_bytes());
            (scales.cast(), scales.add(self.format.scale_bytes(self.cols)).cast())
        }
    }
}

/// Packs one panel; rows past the matrix's last stay zero.
///
/// # Safety
/// `from` has the format and shape of `to`, no other thread touches the panel, and the machine has
/// the class's features.
#[inline(always)]
pub unsafe fn pack<S: Simd>(to: &Panels, from: &Matrix, panel: usize) {
    let first = panel * LANES;
    let count = LANES.min(to.rows - first);
    // SAFETY: the caller's.
    let (scales, codes) = unsafe { to.panel(panel) };
    for lane in 0..count {
        let row = from.row_bytes(first + lane);
        // SAFETY: each writes this lane's part of the panel and reads `cols` weights.
        unsafe {
            let (scales, codes) = (scales.add(lane), codes.add(lane));
            match (to.format, from.ty) {
                (Format::Wide, TensorType::F16) => {
                    pack_wide::<S, true>(row, to.cols, scales, codes);
                }
                (Format::Wide, _) => pack_wide::<S, false>(row, to.cols, scales, codes),
                (Format::Q41, TensorType::Q4K) => pack_k::<2>(row, from.ty, scales, codes),
                (Format::K8, _) => pack_k::<3>(row, from.ty, scales, codes),
                (Format::Q8, _) => pack_blocks::<8, 1>(row, to.cols, scales, codes),
                (Format::Q41, _) => pack_blocks::<4, 2>(row, to.cols, scales, codes),
                (Format::Q40, _) => pack_blocks::<4, 1>(row, to.cols, scales, codes),
            }
        }
    }
}

/// Interleaves a row of blocks of `HALVES` f16 and `WORDS` words of codes.
///
/// # Safety
/// `scales` and `codes` are a lane of a panel of `cols` inputs.
#[inline(always)]
unsafe fn pack_blocks<const WORDS: usize, const HALVES: usize>(
    row: &[u8],
    cols: usize,
    scales: *mut u16,
    codes: *mut i32,
) {
    let blocks = row.chunks_exact(2 * HALVES + 4 * WORDS).take(cols / NARROW);
    for (block, bytes) in blocks.enumerate() {
        // SAFETY: the chunk holds the block, the lane all blocks.
        unsafe {
            let from = bytes.as_ptr();
            for i in 0..HALVES {
                let half = from.cast::<u16>().add(i).read_unaligned();
                *scales.add((block * HALVES + i) * LANES) = half;
            }
            let words = from.add(2 * HALVES).cast::<i32>();
            for i in 0..WORDS {
                *codes.add((block * WORDS + i) * LANES) = words.add(i).read_unaligned();
            }
        }
    }
}

/// Interleaves a row of K-quants: with 2 halves of scales every 32 as q4_1, with 3 as [`Format::K8`]. The scales and
/// minima of 32 or 16 weights are products in the file and are rounded to f16 here; what the scale loses at the middle
/// of the codes' range goes into the minimum, whose size is about the same and which would otherwise not cancel it.
///
/// # Safety
/// `scales` and `codes` are a lane of a panel whose inputs are those of the row.
#[inline(always)]
unsafe fn pack_k<const HALVES: usize>(
    row: &[u8],
    ty: TensorType,
    scales: *mut u16,
    codes: *mut i32,
) {
    let words = if HALVES == 2 { 4 } else { 8 };
    let middle = match ty {
        TensorType::Q4K => 7.5,
        TensorType::Q5K => 15.5,
        _ => 0.0,
    };
    for (index, bytes) in row.chunks_exact(ty.block_bytes()).enumerate() {
        let block = Block::unpack(ty, bytes);
        for (part, code) in block.codes.chunks_exact(NARROW).enumerate() {
            let at = index * block.minima.len() + part;
            let byte = |i: usize| match HALVES {
                2 => (code[i] | code[i + NARROW / 2] << 4) as u8,
                _ => code[i] as u8,
            };
            // SAFETY: the row's blocks are the lane's.
            unsafe {
                let scale = scales.add(at * HALVES * LANES);
                *scale = f32_to_f16(block.scales[2 * part]);
                let lost = block.scales[2 * part] - f16_to_f32(*scale);
                if HALVES == 3 {
                    *scale.add(LANES) = f32_to_f16(block.scales[2 * part + 1]);
                }
                *scale.add((HALVES - 1) * LANES) = f32_to_f16(block.minima[part] + lost * middle);
                for word in 0..words {
                    let four = [0, 1, 2, 3].map(|i| byte(4 * word + i));
                    *codes.add((at * words + word) * LANES) = i32::from_le_bytes(four);
                }
            }
        }
    }
}

/// Turns a row of bf16, or of f16 if `HALF`, into i16 codes with a scale a block of 128.
///
/// # Safety
/// `scales` and `codes` are a lane of a panel of `cols` inputs, `row` holds `cols` floats, and the
/// machine has the class's features.
#[inline(always)]
unsafe fn pack_wide<S: Simd, const HALF: bool>(
    row: &[u8],
    cols: usize,
    scales: *mut u16,
    codes: *mut i32,
) {
    let row = row.as_ptr().cast::<u16>();
    let mut code = [0i32; WIDE];
    for (block, first) in (0..cols).step_by(WIDE).enumerate() {
        let width = WIDE.min(cols - first);
        // SAFETY: the caller's.
        unsafe {
            let (mut total, mut most) = (S::splat(0.0), S::splat(0.0));
            for i in (0..width).step_by(LANES) {
                let x = S::abs(load::<S, HALF>(row.add(first + i)));
                total = S::add(total, x);
                most = S::max(most, x);
            }
            let needed = (S::sum(total) / WIDE_SUM).max(S::largest(most) / WIDE_MOST);
            if needed < 1e-36 {
                continue; // Nothing but zeros, as far as f32 can tell: the codes stay zero.
            }
            // Rounded up, so that the bounds hold for the scale as it is stored.
            let stored = (needed.to_bits() + 0xffff) >> 16;
            *scales.add(block * LANES) = stored as u16;
            let inverse = S::splat(1.0 / f32::from_bits(stored << 16));
            for i in (0..width).step_by(LANES) {
                let x = S::mul(load::<S, HALF>(row.add(first + i)), inverse);
                S::store_i(S::to_i32(x), code.as_mut_ptr().add(i));
            }
            for (four, code) in code[..width].chunks_exact(4).enumerate() {
                let pair = first / 2 + four * 2;
                *codes.add(pair * LANES) = (code[0] & 0xffff) | (code[2] << 16);
                *codes.add((pair + 1) * LANES) = (code[1] & 0xffff) | (code[3] << 16);
            }
        }
    }
}

/// Sixteen f16 if `HALF`, bf16 otherwise.
///
/// # Safety
/// There are sixteen, and the machine has the class's features.
#[inline(always)]
unsafe fn load<S: Simd, const HALF: bool>(from: *const u16) -> S::F {
    // SAFETY: the caller's.
    unsafe { if HALF { S::load_f16(from) } else { S::load_bf16(from) } }
}

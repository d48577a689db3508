//! Weights as the kernels stream them: panels of 16 rows, interleaved so that one vector holds the
//! same inputs of all 16.
//!
//! A panel is its scales, then its codes. Lane r of every vector is row r of the panel. A lane of a
//! code vector is four bytes of that row as they lie in the file (quantised schemes: the kernels unpack
//! pairs (k, k + 2) from them), or one pair (k, k + 2) of i16 (bf16).

use model::{Matrix, TensorType};

use crate::activations::{NARROW, WIDE};
use crate::simd::{LANES, Simd};

/// How a panel's codes are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// bf16 weights as i16 codes with a bf16 scale a row and block of 128.
    Wide,
    /// The codes of q8_0.
    Q8,
    /// The codes of q4_1, with scales and minima.
    Q41,
    /// The codes of q4_0.
    Q40,
}

/// Largest activation code beside [`Format::Wide`], and the largest sum of a weight block's codes: their
/// product bounds every partial sum of a block's dot product, which therefore fits in an i32.
const WIDE_LEVELS: f32 = 8191.0;
const WIDE_SUM: f32 = 262_000.0;

impl Format {
    /// The format of a stored matrix.
    pub fn of(ty: TensorType) -> Option<Format> {
        match ty {
            TensorType::Bf16 => Some(Format::Wide),
            TensorType::Q8_0 => Some(Format::Q8),
            TensorType::Q4_1 => Some(Format::Q41),
            TensorType::Q4_0 => Some(Format::Q40),
            TensorType::F32 => None,
        }
    }

    /// Largest activation code with which a dot product over a block cannot overflow.
    pub fn levels(self) -> f32 {
        match self {
            Format::Wide => WIDE_LEVELS,
            // 32 products of a byte with an i16: below 2^27.
            Format::Q8 | Format::Q41 | Format::Q40 => 32767.0,
        }
    }

    /// Bytes of a panel's scales, padded to a cache line.
    fn scale_bytes(self, cols: usize) -> usize {
        let row = match self {
            Format::Wide => cols.div_ceil(WIDE) * 2,
            Format::Q8 | Format::Q40 => cols / NARROW * 2,
            Format::Q41 => cols / NARROW * 4,
        };
        (row * LANES).next_multiple_of(64)
    }

    /// Bytes of a panel's codes.
    fn code_bytes(self, cols: usize) -> usize {
        match self {
            Format::Wide => cols * 2 * LANES,
            Format::Q8 => cols * LANES,
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
pub unsafe fn pack<S: Simd>(to: &Panels, format: Format, from: &Matrix, panel: usize) {
    let first = panel * LANES;
    let count = LANES.min(to.rows - first);
    // SAFETY: the caller's.
    let (scales, codes) = unsafe { to.panel(panel) };
    for lane in 0..count {
        let row = from.row_bytes(first + lane);
        // SAFETY: each writes this lane's part of the panel and reads `cols` weights.
        unsafe {
            match format {
                Format::Wide => pack_wide::<S>(row, to.cols, scales.add(lane), codes.add(lane)),
                Format::Q8 => pack_blocks::<8, 1>(row, to.cols, scales.add(lane), codes.add(lane)),
                Format::Q41 => pack_blocks::<4, 2>(row, to.cols, scales.add(lane), codes.add(lane)),
                Format::Q40 => pack_blocks::<4, 1>(row, to.cols, scales.add(lane), codes.add(lane)),
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

/// Turns a row of bf16 into i16 codes with a scale a block of 128.
///
/// # Safety
/// `scales` and `codes` are a lane of a panel of `cols` inputs, `row` holds `cols` bf16, and the
/// machine has the class's features.
#[inline(always)]
unsafe fn pack_wide<S: Simd>(row: &[u8], cols: usize, scales: *mut u16, codes: *mut i32) {
    let row = row.as_ptr().cast::<u16>();
    let mut code = [0i32; WIDE];
    for (block, first) in (0..cols).step_by(WIDE).enumerate() {
        let width = WIDE.min(cols - first);
        // SAFETY: the caller's.
        unsafe {
            let (mut total, mut most) = (S::splat(0.0), S::splat(0.0));
            for i in (0..width).step_by(LANES) {
                let x = S::abs(S::load_bf16(row.add(first + i)));
                total = S::add(total, x);
                most = S::max(most, x);
            }
            let needed = (S::sum(total) / WIDE_SUM).max(S::largest(most) / 32767.0);
            if needed < 1e-36 {
                continue; // Nothing but zeros, as far as f32 can tell: the codes stay zero.
            }
            // Rounded up, so that the bounds hold for the scale as it is stored.
            let stored = (needed.to_bits() + 0xffff) >> 16;
            *scales.add(block * LANES) = stored as u16;
            let inverse = S::splat(1.0 / f32::from_bits(stored << 16));
            for i in (0..width).step_by(LANES) {
                let x = S::mul(S::load_bf16(row.add(first + i)), inverse);
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

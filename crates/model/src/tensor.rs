//! Tensors as they lie in a file: bytes, a type and a shape. The bytes stay where they are, in a
//! mapping, in a buffer or in the program itself.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::scheme;

/// Element layout of a stored tensor, in GGUF's terms.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorType {
    /// 4-byte floats.
    F32,
    /// bfloat16.
    Bf16,
    /// Blocks of 32: f16 scale, 32 signed bytes (34 bytes).
    Q8_0,
    /// Blocks of 32: f16 scale, f16 minimum, 32 nibbles (20 bytes).
    Q4_1,
    /// Blocks of 32: f16 scale, 32 nibbles offset by 8 (18 bytes).
    Q4_0,
    /// IEEE halves.
    F16,
    /// Blocks of 256 in 8 parts of 32: 4 bits, scales and minima of 6 bits (144 bytes).
    Q4K,
    /// Blocks of 256 in 8 parts of 32: 5 bits, scales and minima of 6 bits (176 bytes).
    Q5K,
    /// Blocks of 256 in 16 parts of 16: 6 bits, scales of 8 bits (210 bytes).
    Q6K,
}

impl TensorType {
    /// Elements of a block; a row is a whole number of blocks.
    pub const fn block(self) -> usize {
        match self {
            TensorType::F32 | TensorType::Bf16 | TensorType::F16 => 1,
            TensorType::Q8_0 | TensorType::Q4_1 | TensorType::Q4_0 => scheme::BLOCK,
            TensorType::Q4K | TensorType::Q5K | TensorType::Q6K => scheme::k_quants::BLOCK,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            TensorType::F32 => 4,
            TensorType::Bf16 | TensorType::F16 => 2,
            TensorType::Q8_0 => 34,
            TensorType::Q4_1 => 20,
            TensorType::Q4_0 => 18,
            TensorType::Q4K => 144,
            TensorType::Q5K => 176,
            TensorType::Q6K => 210,
        }
    }

    /// Whether it holds values as they are published, not rounded to a few levels.
    pub const fn is_wide(self) -> bool {
        self.block() == 1
    }

    /// Bytes of a row of `cols` elements, a multiple of [`Self::block`].
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols / self.block() * self.block_bytes()
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TensorType::F32 => "F32",
            TensorType::Bf16 => "BF16",
            TensorType::Q8_0 => "Q8_0",
            TensorType::Q4_1 => "Q4_1",
            TensorType::Q4_0 => "Q4_0",
            TensorType::F16 => "F16",
            TensorType::Q4K => "Q4_K",
            TensorType::Q5K => "Q5_K",
            TensorType::Q6K => "Q6_K",
        })
    }
}

/// A byte range that keeps its owner (a mapping, a buffer or the binary itself) alive.
#[derive(Clone)]
pub struct Bytes {
    owner: Arc<dyn Owner>,
    start: usize,
    len: usize,
}

/// What holds the bytes.
pub(crate) trait Owner: Send + Sync {
    /// All of them.
    fn bytes(&self) -> &[u8];

    /// An error if what was read may not have been what was there when reading began.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Gives back the memory of a range that can be read again from elsewhere.
    fn release(&self, range: Range<usize>) {
        let _ = range;
    }
}

/// An owner with nothing to give back.
struct Kept<T>(T);

impl<T: AsRef<[u8]> + Send + Sync> Owner for Kept<T> {
    fn bytes(&self) -> &[u8] {
        self.0.as_ref()
    }
}

impl Bytes {
    /// All bytes of an owner.
    pub fn new(owner: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        Self::owned(Kept(owner))
    }

    pub(crate) fn owned(owner: impl Owner + 'static) -> Self {
        let len = owner.bytes().len();
        Self { owner: Arc::new(owner), start: 0, len }
    }

    /// Gives back the pages of a mapped file; they are read again when they are looked at. Bytes that
    /// live nowhere else stay.
    pub fn release(&self) {
        self.owner.release(self.start..self.start + self.len);
    }

    /// The same for all that the owner holds.
    fn release_owner(&self) {
        self.owner.release(0..self.owner.bytes().len());
    }

    /// An error if the bytes come from a file that was cut off since it was mapped: what was read of it may be
    /// zeros. To be asked before results are trusted; it costs a look at a number in memory.
    pub fn check(&self) -> Result<()> {
        self.owner.check()
    }

    /// A part of these bytes with the same owner; `None` if it is not inside.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        let len = range.end.checked_sub(range.start)?;
        (range.end <= self.len).then(|| Self {
            owner: self.owner.clone(),
            start: self.start + range.start,
            len,
        })
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.owner.bytes()[self.start..self.start + self.len]
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({})", self.len)
    }
}

/// A weight matrix, row-major: `rows` outputs, each a row of `cols` inputs.
#[derive(Debug, Clone)]
pub struct Matrix {
    /// Element layout.
    pub ty: TensorType,
    /// Outputs.
    pub rows: usize,
    /// Inputs; a multiple of the type's block.
    pub cols: usize,
    bytes: Bytes,
}

impl Matrix {
    /// A matrix over `bytes`, which have to be `rows` rows exactly.
    pub fn new(ty: TensorType, rows: usize, cols: usize, bytes: Bytes) -> Result<Self> {
        if !cols.is_multiple_of(ty.block()) {
            return Err(Error::mismatch(
                "columns",
                format_args!("a multiple of {} for {ty}", ty.block()),
                cols,
            ));
        }
        let expected = rows * ty.row_bytes(cols);
        if bytes.len() != expected {
            return Err(Error::mismatch(
                format_args!("bytes of a [{rows}, {cols}] {ty} matrix"),
                expected,
                bytes.len(),
            ));
        }
        Ok(Self { ty, rows, cols, bytes })
    }

    /// All rows, one behind the other.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// One row as it is stored.
    pub fn row_bytes(&self, row: usize) -> &[u8] {
        let len = self.ty.row_bytes(self.cols);
        &self.bytes[row * len..(row + 1) * len]
    }

    /// Gives back the pages of a mapped file that hold these rows, for a backend that has made its own copy.
    pub fn release(&self, rows: Range<usize>) {
        let len = self.ty.row_bytes(self.cols);
        if let Some(bytes) = self.bytes.slice(rows.start * len..rows.end * len) {
            bytes.release();
        }
    }

    /// Gives back all pages of the file that the matrix is in.
    pub(crate) fn release_file(&self) {
        self.bytes.release_owner();
    }

    /// See [`Bytes::check`].
    pub fn check(&self) -> Result<()> {
        self.bytes.check()
    }

    /// Decodes one row into `out`, `[cols]`.
    pub fn row_f32(&self, row: usize, out: &mut [f32]) {
        scheme::decode(self.ty, self.row_bytes(row), out);
    }
}

/// A norm's weights, `[len]` in f32.
#[derive(Debug, Clone)]
pub struct Vector {
    bytes: Bytes,
}

impl Vector {
    /// A vector over the bytes of `len` floats, which have to lie at a multiple of 4.
    pub fn new(len: usize, bytes: Bytes) -> Result<Self> {
        match bytemuck::try_cast_slice::<u8, f32>(&bytes) {
            Ok(floats) if floats.len() == len => Ok(Self { bytes }),
            Ok(floats) => Err(Error::mismatch("length", len, floats.len())),
            Err(error) => Err(Error::mismatch("bytes", "aligned floats", error)),
        }
    }

    /// The weights.
    pub fn as_f32(&self) -> &[f32] {
        bytemuck::cast_slice(&self.bytes)
    }
}

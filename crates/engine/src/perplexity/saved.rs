//! A file of next-token distributions, so that models can be compared without both in memory.
//!
//! Little-endian:
//!
//! ```text
//! "kipplogp"              8 bytes
//! version                 u32     1
//! vocabulary              u32
//! window, stride          u32 x 2 how the text is cut, see `Windows`
//! tokens                  u64     then that many u32 ids, each below the vocabulary
//! for each scored token, in the order of the windows:
//!   top                   f32     the largest log-probability
//!   step                  f32
//!   codes                 u16 x vocabulary; log-probability = top - code * step
//! ```
//!
//! The number of rows follows from tokens, window and stride, and the length from all of them. A step is 1 / 65,535
//! of the row's range, which is cut at [`FLOOR`] below the top: half a step is at most 2.4e-4.

use std::fmt;
use std::io::{self, Read, Write};

use super::{Windows, log_sum_exp};

const MAGIC: &[u8; 8] = b"kipplogp";
const VERSION: u32 = 1;
/// Natural logarithms below the most probable token at which rows are cut: 150,000 tokens that far down
/// have a probability of 2e-9 together.
pub const FLOOR: f64 = 32.0;
/// Windows may not be larger: more than any checkpoint's context.
const MAX_WINDOW: u32 = 1 << 20;
/// By how much the probabilities of a row may miss 1: more than rounding to steps can cause.
const SLACK: f64 = 0.01;

/// What a file is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Rows of the vocabulary.
    pub vocab: usize,
    /// How the text is cut.
    pub windows: Windows,
    /// The text.
    pub tokens: Vec<u32>,
}

impl Header {
    /// How many distributions the file holds.
    pub fn rows(&self) -> usize {
        self.windows.scored(self.tokens.len())
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        let row = 8 + 2 * self.vocab as u64;
        (32 + 4 * self.tokens.len() as u64) + self.rows() as u64 * row
    }
}

/// Writes a file, row by row.
pub struct Writer<W> {
    out: W,
    row: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// Writes the header.
    pub fn new(mut out: W, header: &Header) -> io::Result<Self> {
        let Windows { window, stride } = header.windows;
        out.write_all(MAGIC)?;
        for number in [VERSION, header.vocab as u32, window as u32, stride as u32] {
            out.write_all(&number.to_le_bytes())?;
        }
        out.write_all(&(header.tokens.len() as u64).to_le_bytes())?;
        for id in &header.tokens {
            out.write_all(&id.to_le_bytes())?;
        }
        Ok(Writer { out, row: Vec::with_capacity(8 + 2 * header.vocab) })
    }

    /// Writes the distribution that these logits, `[vocab]`, all finite, stand for.
    pub fn row(&mut self, logits: &[f32]) -> io::Result<()> {
        let norm = log_sum_exp(logits);
        let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let least = f64::from(logits.iter().copied().fold(f32::INFINITY, f32::min));
        let step = ((largest - least).min(FLOOR) / f64::from(u16::MAX)) as f32;
        self.row.clear();
        self.row.extend(((largest - norm) as f32).to_le_bytes());
        self.row.extend(step.to_le_bytes());
        let per_step = if step > 0.0 { 1.0 / f64::from(step) } else { 0.0 };
        for &logit in logits {
            // A float becomes the nearest code; the conversion itself stops at 65,535.
            let code = ((largest - f64::from(logit)) * per_step).round() as u16;
            self.row.extend(code.to_le_bytes());
        }
        self.out.write_all(&self.row)
    }

    /// Writes what is still buffered.
    pub fn finish(mut self) -> io::Result<W> {
        self.out.flush()?;
        Ok(self.out)
    }
}

/// Reads a file, row by row.
pub struct Reader<R> {
    input: R,
    /// Rows that are still to come.
    left: usize,
    /// The codes of a row, `[vocab]`, as bytes.
    codes: Vec<u8>,
}

impl<R: Read> Reader<R> {
    /// Reads the header of a file of `length` bytes, which must be what the header says.
    pub fn open(mut input: R, length: u64) -> Result<(Header, Self), Fault> {
        let mut magic = [0; 8];
        input.read_exact(&mut magic)?;
        if &magic != MAGIC {
            return Err(Fault::field("magic", "kipplogp", "something else"));
        }
        let version = read_u32(&mut input)?;
        if version != VERSION {
            return Err(Fault::field("version", VERSION, version));
        }
        let vocab = read_u32(&mut input)?;
        if vocab == 0 || vocab > 1 << 24 {
            return Err(Fault::field("vocabulary", "1 to 16777216", vocab));
        }
        let window = read_u32(&mut input)?;
        if !(2..=MAX_WINDOW).contains(&window) {
            return Err(Fault::field("window", format_args!("2 to {MAX_WINDOW}"), window));
        }
        let stride = read_u32(&mut input)?;
        if !(1..=window).contains(&stride) {
            return Err(Fault::field("stride", format_args!("1 to {window}"), stride));
        }
        let mut count = [0; 8];
        input.read_exact(&mut count)?;
        let count = u64::from_le_bytes(count);
        // Before memory is taken for them, and before anything is computed from their number.
        if count > length / 4 {
            return Err(Fault::field("tokens", format_args!("at most {}", length / 4), count));
        }
        let mut tokens = Vec::new();
        for at in 0..count {
            let id = read_u32(&mut input)?;
            if id >= vocab {
                let field = format!("token {at}");
                return Err(Fault::field(&field, format_args!("an id below {vocab}"), id));
            }
            tokens.push(id);
        }
        let windows = Windows { window: window as usize, stride: stride as usize };
        let header = Header { vocab: vocab as usize, windows, tokens };
        let (expected, left) = (header.file_bytes(), header.rows());
        if length != expected {
            return Err(Fault::field("length", format_args!("{expected} bytes"), length));
        }
        let codes = vec![0; 2 * header.vocab];
        Ok((header, Reader { input, left, codes }))
    }

    /// Reads the next log-probabilities, `[vocab]`, normalised; `None` after the last.
    pub fn row(&mut self) -> Result<Option<Vec<f64>>, Fault> {
        if self.left == 0 {
            return Ok(None);
        }
        self.left -= 1;
        let top = f32::from_bits(read_u32(&mut self.input)?);
        let step = f32::from_bits(read_u32(&mut self.input)?);
        self.input.read_exact(&mut self.codes)?;
        if !top.is_finite() {
            return Err(Fault::field("top", "a finite number", top));
        }
        if !(step.is_finite() && step >= 0.0) {
            return Err(Fault::field("step", "a number, 0 or more", step));
        }
        let value = |code: &[u8]| {
            let code = code.iter().rev().fold(0, |code, &byte| code << 8 | u32::from(byte));
            f64::from(top) - f64::from(code) * f64::from(step)
        };
        let mut row: Vec<f64> = self.codes.chunks_exact(2).map(value).collect();
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        if !(1.0 - SLACK..=1.0 + SLACK).contains(&sum) {
            return Err(Fault::field("probabilities", "a sum of 1", sum));
        }
        row.iter_mut().for_each(|x| *x -= sum.ln());
        Ok(Some(row))
    }
}

fn read_u32(input: &mut impl Read) -> io::Result<u32> {
    let mut bytes = [0; 4];
    input.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

/// Why a file is not one of ours.
#[derive(Debug)]
pub enum Fault {
    /// It could not be read, or it ends too early.
    Io(io::Error),
    /// A field is not what it has to be.
    Field {
        /// Which.
        field: String,
        /// What it has to be.
        expected: String,
        /// What it is.
        found: String,
    },
}

impl Fault {
    fn field(field: &str, expected: impl fmt::Display, found: impl fmt::Display) -> Self {
        let (expected, found) = (expected.to_string(), found.to_string());
        Fault::Field { field: field.to_owned(), expected, found }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                f.write_str("length: expected what the header says, found fewer bytes")
            }
            Fault::Io(error) => error.fmt(f),
            Fault::Field { field, expected, found } => {
                write!(f, "{field}: expected {expected}, found {found}")
            }
        }
    }
}

impl std::error::Error for Fault {}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Fault::Io(error)
    }
}

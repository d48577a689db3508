//! GGUF version 3: a header, metadata, a table of tensors and their bytes, read in place and
//! written as a stream.

mod read;
mod value;
mod write;

pub use read::{Gguf, TensorInfo};
pub use value::{Array, Value, ValueType};
pub use write::Writer;

use crate::tensor::TensorType;

const MAGIC: [u8; 4] = *b"GGUF";
const VERSION: u32 = 3;
/// Alignment of a file that does not name one.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Alignment that kipp writes: a cache line, so that a vector load of a mapped row never straddles
/// two.
pub const ALIGNMENT: u32 = 64;
const ALIGNMENT_KEY: &str = "general.alignment";
/// The key that every file has.
pub const ARCHITECTURE_KEY: &str = "general.architecture";

/// GGUF's number of a tensor type.
const fn type_number(ty: TensorType) -> u32 {
    match ty {
        TensorType::F32 => 0,
        TensorType::Q4_0 => 2,
        TensorType::Q4_1 => 3,
        TensorType::Q8_0 => 8,
        TensorType::Bf16 => 30,
    }
}

/// The tensor type with GGUF's number.
fn type_from_number(number: u32) -> Option<TensorType> {
    let types =
        [TensorType::F32, TensorType::Q4_0, TensorType::Q4_1, TensorType::Q8_0, TensorType::Bf16];
    types.into_iter().find(|&ty| type_number(ty) == number)
}

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
/// Alignment of a file that does not name one, and so of kipp's own: llama.cpp's programs that rewrite a file copy the
/// key but not the alignment, and their files could not be read.
const ALIGNMENT: usize = 32;
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
        TensorType::F16 => 1,
        TensorType::Q4K => 12,
        TensorType::Q5K => 13,
        TensorType::Q6K => 14,
    }
}

/// The tensor type with GGUF's number.
fn type_from_number(number: u32) -> Option<TensorType> {
    let types = [
        TensorType::F32,
        TensorType::F16,
        TensorType::Bf16,
        TensorType::Q8_0,
        TensorType::Q4_1,
        TensorType::Q4_0,
        TensorType::Q4K,
        TensorType::Q5K,
        TensorType::Q6K,
    ];
    types.into_iter().find(|&ty| type_number(ty) == number)
}

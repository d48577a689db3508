//! Safetensors: a length, a JSON header, and the tensors' bytes without gaps.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use model::tensor::Bytes;
use model::{Error, Result};
use serde::Deserialize;

use crate::json::{self, Object};

/// Longest header that the format allows.
const MAX_HEADER: u64 = 100_000_000;
/// The header's only key that is not a tensor.
const METADATA: &str = "__metadata__";

/// A file, or one in memory, whose header has been checked: every tensor lies inside the file, none
/// shares bytes with another, and no bytes are left over.
#[derive(Debug)]
pub struct Safetensors {
    /// Tensors in order of their bytes.
    pub tensors: Vec<TensorInfo>,
    file: Bytes,
}

/// A tensor in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Element type as the format names it, e.g. `BF16`.
    pub dtype: String,
    /// Elements along each dimension, the outermost first.
    pub shape: Vec<u64>,
    /// Where its bytes are in the file.
    pub range: Range<usize>,
}

/// A header's value: of a tensor, or of the metadata, whose values are strings.
#[derive(Deserialize)]
#[serde(untagged)]
enum Entry {
    Tensor { dtype: String, shape: Vec<u64>, data_offsets: (u64, u64) },
    Metadata(#[expect(dead_code, reason = "only its form is checked")] HashMap<String, String>),
}

impl Safetensors {
    /// Maps a file and reads its header.
    pub fn open(path: &Path) -> Result<Self> {
        Self::read(model::map(path)?).map_err(|error| error.in_file(path))
    }

    /// Reads the header of a file that is in memory.
    pub fn read(file: Bytes) -> Result<Self> {
        let Some((len, rest)) = file.split_first_chunk() else {
            return Err(Error::mismatch("header length", "8 bytes", file.len()));
        };
        let len = u64::from_le_bytes(*len);
        let limit = MAX_HEADER.min(rest.len() as u64);
        if len > limit {
            return Err(Error::mismatch("header length", format_args!("at most {limit}"), len));
        }
        let (header, data) = rest.split_at(len as usize);
        if header.first() != Some(&b'{') {
            return Err(Error::mismatch(
                "header",
                "a JSON object",
                header[..header.len().min(8)].escape_ascii(),
            ));
        }
        let Object(entries) = json::parse::<Object<Entry>>(header)?;
        let start = file.len() - data.len();
        let mut tensors = Vec::new();
        for (name, entry) in entries {
            match entry {
                Entry::Metadata(_) if name == METADATA => {}
                Entry::Tensor { dtype, shape, data_offsets } if name != METADATA => {
                    tensors.push(tensor(name, dtype, shape, data_offsets, start, file.len())?);
                }
                Entry::Metadata(_) | Entry::Tensor { .. } => {
                    return Err(Error::mismatch(
                        format_args!("header entry `{name}`"),
                        "a tensor's type, shape and offsets",
                        "something else",
                    ));
                }
            }
        }
        tensors.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));
        let mut end = start;
        for tensor in &tensors {
            if tensor.range.start != end {
                return Err(Error::mismatch(
                    format_args!("tensor `{}`: data_offsets", tensor.name),
                    format_args!("to begin at {}, where the one before ends", end - start),
                    tensor.range.start - start,
                ));
            }
            end = tensor.range.end;
        }
        if end != file.len() {
            return Err(Error::mismatch("bytes of tensors", end - start, file.len() - start));
        }
        Ok(Self { tensors, file })
    }

    /// The bytes of one of this file's tensors.
    pub fn bytes(&self, tensor: &TensorInfo) -> Bytes {
        self.file.slice(tensor.range.clone()).expect("ranges were checked when the file was read")
    }
}

/// Checks one entry of the header; `start` and `len` are where the data begins and ends in the
/// file.
fn tensor(
    name: String,
    dtype: String,
    shape: Vec<u64>,
    (begin, end): (u64, u64),
    start: usize,
    len: usize,
) -> Result<TensorInfo> {
    let field = |what| format!("tensor `{name}`: {what}");
    let element = match &*dtype {
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" => 1,
        "BF16" | "F16" | "U16" | "I16" => 2,
        "F32" | "U32" | "I32" => 4,
        "F64" | "U64" | "I64" => 8,
        _ => return Err(Error::mismatch(field("dtype"), "a type of the format", dtype)),
    };
    let data = (len - start) as u64;
    if begin > end || end > data {
        let expected = format!("a range within the {data} bytes of data");
        return Err(Error::mismatch(
            field("data_offsets"),
            expected,
            format_args!("{begin}..{end}"),
        ));
    }
    let bytes = shape.iter().try_fold(element, |product: u64, &dim| product.checked_mul(dim));
    if bytes != Some(end - begin) {
        let expected = format!("those of {shape:?} {dtype}");
        return Err(Error::mismatch(field("bytes"), expected, end - begin));
    }
    let range = start + begin as usize..start + end as usize;
    Ok(TensorInfo { name, dtype, shape, range })
}

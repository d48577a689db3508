//! The reader. It believes nothing: every length is bounded by the bytes that are left, nothing is
//! allocated by a count from the file, and the first fault is named.

use std::collections::HashSet;
use std::fmt::{Arguments, Display};
use std::ops::Range;
use std::path::Path;

use super::{
    ALIGNMENT, ALIGNMENT_KEY, ARCHITECTURE_KEY, Array, MAGIC, VERSION, Value, ValueType,
    type_from_number,
};
use crate::error::{Error, Result};
use crate::mapping;
use crate::scheme;
use crate::tensor::{Bytes, TensorType};

/// Longest tensor name that the format allows.
const MAX_NAME: usize = 64;
/// Most dimensions that the format allows.
const MAX_DIMS: u32 = 4;
/// Larger alignments are taken for damage.
const MAX_ALIGNMENT: u32 = 1 << 16;

/// Blocks that are decoded at once when values are checked.
const CHECKED_BLOCKS: usize = 1024;

/// A GGUF file, or one in memory.
#[derive(Debug)]
pub struct Gguf {
    /// Keys and values in the file's order.
    pub metadata: Vec<(String, Value)>,
    /// Tensors in the file's order.
    pub tensors: Vec<TensorInfo>,
    file: Bytes,
}

/// A tensor in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name.
    pub name: String,
    /// Element layout.
    pub ty: TensorType,
    /// Elements along each dimension, the innermost first.
    pub dims: Vec<u64>,
    /// Where its bytes are in the file.
    pub range: Range<usize>,
}

impl Gguf {
    /// Maps and reads a file; the tensors' bytes are not touched.
    pub fn open(path: &Path) -> Result<Self> {
        Self::read(mapping::map(path)?).map_err(|error| error.in_file(path))
    }

    /// Reads a file that is already in memory or mapped.
    pub fn read(file: Bytes) -> Result<Self> {
        let mut cursor = Cursor { file: &file, rest: &file };
        let (metadata_count, tensor_count) = read_header(&mut cursor)?;
        let metadata = read_metadata(&mut cursor, metadata_count)?;
        let alignment = alignment(&metadata)?;
        let mut tensors = read_tensors(&mut cursor, tensor_count)?;
        place(&mut tensors, cursor.position(), alignment, file.len())?;
        let gguf = Self { metadata, tensors, file };
        if gguf.get(ARCHITECTURE_KEY).is_some() {
            gguf.architecture()?;
        }
        Ok(gguf)
    }

    /// What kind of model the file holds. Files without one hold something else.
    pub fn architecture(&self) -> Result<&str> {
        match self.require(ARCHITECTURE_KEY)? {
            Value::String(name) => Ok(name),
            other => Err(wrong_type(ARCHITECTURE_KEY, ValueType::String, other)),
        }
    }

    /// A metadata value.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.metadata.iter().find(|(k, _)| k == key).map(|(_, value)| value)
    }

    /// A metadata value that has to be there.
    pub fn require(&self, key: &str) -> Result<&Value> {
        self.get(key)
            .ok_or_else(|| Error::mismatch(format_args!("`{key}`"), "a value", "no such key"))
    }

    /// The bytes of one of this file's tensors.
    pub fn bytes(&self, tensor: &TensorInfo) -> Bytes {
        self.file.slice(tensor.range.clone()).expect("ranges were checked when the file was read")
    }

    /// Decodes every tensor and refuses the first weight that is not finite.
    pub fn check_values(&self) -> Result<()> {
        let mut values = Vec::new();
        for tensor in &self.tensors {
            let &TensorInfo { ref name, ty, .. } = tensor;
            for (i, piece) in
                self.bytes(tensor).chunks(CHECKED_BLOCKS * ty.block_bytes()).enumerate()
            {
                values.resize(piece.len() / ty.block_bytes() * ty.block(), 0.0);
                scheme::decode(ty, piece, &mut values);
                if let Some(at) = values.iter().position(|value| !value.is_finite()) {
                    let index = i * CHECKED_BLOCKS * ty.block() + at;
                    return Err(Error::Value {
                        tensor: name.clone(),
                        index,
                        value: values[at],
                        ty,
                    });
                }
            }
        }
        Ok(())
    }
}

fn wrong_type(key: &str, expected: ValueType, found: &Value) -> Error {
    Error::mismatch(
        format_args!("`{key}`"),
        format_args!("a value of type {expected:?}"),
        format_args!("{:?}", found.value_type()),
    )
}

/// A place in the file that moves forward. `field` says what is being read, for the error.
struct Cursor<'a> {
    file: &'a Bytes,
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    fn position(&self) -> usize {
        self.file.len() - self.rest.len()
    }

    fn take(&mut self, len: u64, field: Arguments) -> Result<&'a [u8]> {
        let split = usize::try_from(len).ok().and_then(|len| self.rest.split_at_checked(len));
        let (taken, rest) = split.ok_or_else(|| self.too_short(len, field))?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, field: Arguments) -> Result<[u8; N]> {
        let split = self.rest.split_first_chunk();
        let (taken, rest) = split.ok_or_else(|| self.too_short(N as u64, field))?;
        self.rest = rest;
        Ok(*taken)
    }

    fn too_short(&self, len: u64, field: Arguments) -> Error {
        let left = format!("{} before the end of the file", self.rest.len());
        Error::mismatch(field, format_args!("{len} bytes"), left)
    }

    fn u32(&mut self, field: Arguments) -> Result<u32> {
        self.array(field).map(u32::from_le_bytes)
    }

    fn u64(&mut self, field: Arguments) -> Result<u64> {
        self.array(field).map(u64::from_le_bytes)
    }

    fn string(&mut self, field: Arguments) -> Result<&'a str> {
        let len = self.u64(field)?;
        let text = self.take(len, field)?;
        std::str::from_utf8(text).map_err(|error| Error::mismatch(field, "UTF-8", error))
    }
}

/// Magic, version and the two counts: metadata values and tensors.
fn read_header(cursor: &mut Cursor) -> Result<(u64, u64)> {
    let magic: [u8; 4] = cursor.array(format_args!("magic"))?;
    if magic != MAGIC {
        return Err(Error::mismatch("magic", "GGUF", magic.escape_ascii()));
    }
    match cursor.u32(format_args!("version"))? {
        VERSION => {}
        version if version.swap_bytes() == VERSION => {
            return Err(Error::mismatch("byte order", "little-endian", "big-endian"));
        }
        version => return Err(Error::mismatch("version", VERSION, version)),
    }
    let tensors = cursor.u64(format_args!("number of tensors"))?;
    let metadata = cursor.u64(format_args!("number of metadata values"))?;
    Ok((metadata, tensors))
}

fn read_metadata(cursor: &mut Cursor, count: u64) -> Result<Vec<(String, Value)>> {
    let mut metadata = Vec::new();
    let mut seen = HashSet::new();
    for i in 0..count {
        let key = cursor.string(format_args!("metadata key {i} of {count}"))?.to_owned();
        if key.is_empty() {
            return Err(Error::mismatch(
                format_args!("metadata key {i}"),
                "a name",
                "an empty one",
            ));
        }
        printable(format_args!("metadata key {i}"), &key)?;
        if !seen.insert(key.clone()) {
            return Err(Error::mismatch(format_args!("`{key}`"), "one value", "a second one"));
        }
        let ty = read_type(cursor, &key)?;
        let value = read_value(cursor, ty, &key)?;
        metadata.push((key, value));
    }
    Ok(metadata)
}

/// Names are shown on terminals, which control characters could take over.
fn printable(field: Arguments, name: &str) -> Result<()> {
    if name.chars().any(char::is_control) {
        return Err(Error::mismatch(field, "no control characters", format_args!("{name:?}")));
    }
    Ok(())
}

fn read_type(cursor: &mut Cursor, key: &str) -> Result<ValueType> {
    let number = cursor.u32(format_args!("type of `{key}`"))?;
    ValueType::from_number(number)
        .ok_or_else(|| Error::mismatch(format_args!("type of `{key}`"), "0 to 12", number))
}

fn read_value(cursor: &mut Cursor, ty: ValueType, key: &str) -> Result<Value> {
    let field = format_args!("`{key}`");
    Ok(match ty {
        ValueType::U8 => Value::U8(u8::from_le_bytes(cursor.array(field)?)),
        ValueType::I8 => Value::I8(i8::from_le_bytes(cursor.array(field)?)),
        ValueType::U16 => Value::U16(u16::from_le_bytes(cursor.array(field)?)),
        ValueType::I16 => Value::I16(i16::from_le_bytes(cursor.array(field)?)),
        ValueType::U32 => Value::U32(u32::from_le_bytes(cursor.array(field)?)),
        ValueType::I32 => Value::I32(i32::from_le_bytes(cursor.array(field)?)),
        ValueType::F32 => Value::F32(f32::from_le_bytes(cursor.array(field)?)),
        ValueType::U64 => Value::U64(u64::from_le_bytes(cursor.array(field)?)),
        ValueType::I64 => Value::I64(i64::from_le_bytes(cursor.array(field)?)),
        ValueType::F64 => Value::F64(f64::from_le_bytes(cursor.array(field)?)),
        ValueType::Bool => match cursor.array(field)? {
            [0] => Value::Bool(false),
            [1] => Value::Bool(true),
            [other] => return Err(Error::mismatch(field, "0 or 1 for a Bool", other)),
        },
        ValueType::String => Value::String(cursor.string(field)?.to_owned()),
        ValueType::Array => Value::Array(read_array(cursor, key)?),
    })
}

/// An array of scalars or strings. The format allows arrays of arrays; nothing that kipp reads has
/// them.
fn read_array(cursor: &mut Cursor, key: &str) -> Result<Array> {
    let field = format_args!("`{key}`");
    let element = read_type(cursor, key)?;
    let len = cursor.u64(field)?;
    let start = cursor.position();
    match element.size() {
        // A product beyond u64 is certainly beyond the end of the file.
        Some(size) => drop(cursor.take(len.saturating_mul(size as u64), field)?),
        None if element == ValueType::String => {
            for i in 0..len {
                let field = format_args!("element {i} of `{key}`");
                let len = cursor.u64(field)?;
                cursor.take(len, field)?;
            }
        }
        None => {
            return Err(Error::mismatch(field, "an array of scalars or strings", "one of arrays"));
        }
    }
    let bytes = cursor.file.slice(start..cursor.position());
    let bytes = bytes.expect("the cursor stays inside the file");
    Ok(Array { element, len: len as usize, bytes })
}

fn alignment(metadata: &[(String, Value)]) -> Result<u64> {
    match metadata.iter().find(|(key, _)| key == ALIGNMENT_KEY) {
        None => Ok(ALIGNMENT as u64),
        Some((_, Value::U32(value))) => {
            let valid = value.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(value);
            valid.then_some(u64::from(*value)).ok_or_else(|| {
                let expected = format!("a power of two from 8 to {MAX_ALIGNMENT}");
                Error::mismatch(format_args!("`{ALIGNMENT_KEY}`"), expected, value)
            })
        }
        Some((_, other)) => Err(wrong_type(ALIGNMENT_KEY, ValueType::U32, other)),
    }
}

/// The table of tensors. Ranges are still relative to the data.
fn read_tensors(cursor: &mut Cursor, count: u64) -> Result<Vec<TensorInfo>> {
    let mut tensors = Vec::new();
    let mut seen = HashSet::new();
    for i in 0..count {
        let name = cursor.string(format_args!("name of tensor {i} of {count}"))?.to_owned();
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(Error::mismatch(
                format_args!("name of tensor {i}"),
                format_args!("1 to {MAX_NAME} bytes"),
                name.len(),
            ));
        }
        printable(format_args!("name of tensor {i}"), &name)?;
        if !seen.insert(name.clone()) {
            return Err(Error::mismatch(format_args!("tensor `{name}`"), "one", "a second one"));
        }
        tensors.push(read_tensor(cursor, name)?);
    }
    Ok(tensors)
}

fn tensor_fault(name: &str, what: &str, expected: &dyn Display, found: &dyn Display) -> Error {
    Error::mismatch(format_args!("tensor `{name}`: {what}"), expected, found)
}

fn read_tensor(cursor: &mut Cursor, name: String) -> Result<TensorInfo> {
    let fault = |what: &str, expected: &dyn Display, found: &dyn Display| {
        tensor_fault(&name, what, expected, found)
    };
    let field = format_args!("tensor `{name}`");
    let count = cursor.u32(field)?;
    if !(1..=MAX_DIMS).contains(&count) {
        return Err(fault("dimensions", &format_args!("1 to {MAX_DIMS}"), &count));
    }
    let dims = (0..count).map(|_| cursor.u64(field)).collect::<Result<Vec<_>>>()?;
    let number = cursor.u32(field)?;
    let offset = cursor.u64(field)?;

    let ty = type_from_number(number).ok_or_else(|| {
        let expected = "F32, F16, BF16, Q8_0, Q4_1, Q4_0, Q4_K, Q5_K or Q6_K";
        fault("type", &expected, &format_args!("number {number}"))
    })?;
    if dims.contains(&0) {
        return Err(fault("shape", &"no dimension of 0", &format_args!("{dims:?}")));
    }
    if dims.first().is_none_or(|cols| !cols.is_multiple_of(ty.block() as u64)) {
        let expected = format!("rows of a multiple of {} elements for {ty}", ty.block());
        return Err(fault("shape", &expected, &format_args!("{dims:?}")));
    }
    // Where the bytes end, or `None` if no file can hold them.
    let bytes = dims
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim))
        .and_then(|elements| (elements / ty.block() as u64).checked_mul(ty.block_bytes() as u64));
    let range = bytes.and_then(|bytes| {
        let end = usize::try_from(offset.checked_add(bytes)?).ok()?;
        Some(offset as usize..end)
    });
    match range {
        Some(range) => Ok(TensorInfo { ty, dims, range, name }),
        None => Err(fault(
            "size",
            &"less than 2^64 bytes",
            &format_args!("{dims:?} at offset {offset}"),
        )),
    }
}

/// Makes the tensors' ranges absolute and checks that they are aligned, inside the file and apart.
fn place(tensors: &mut [TensorInfo], table_end: usize, alignment: u64, len: usize) -> Result<()> {
    let data = table_end.next_multiple_of(alignment as usize);
    for TensorInfo { name, range, .. } in tensors.iter_mut() {
        if !(range.start as u64).is_multiple_of(alignment) {
            let expected = format_args!("a multiple of {alignment}");
            return Err(tensor_fault(name, "offset", &expected, &range.start));
        }
        match range.end.checked_add(data) {
            Some(end) if end <= len => *range = range.start + data..end,
            _ => {
                let found = format!("{} of data", len.saturating_sub(data));
                let expected = format_args!("{} bytes", range.end);
                return Err(tensor_fault(name, "end", &expected, &found));
            }
        }
    }
    let mut in_order: Vec<&TensorInfo> = tensors.iter().collect();
    in_order.sort_by_key(|tensor| tensor.range.start);
    for pair in in_order.windows(2) {
        if let [left, right] = pair
            && right.range.start < left.range.end
        {
            let (field, start) = (format!("tensor `{}`: offset", right.name), right.range.start);
            let expected = format!("at least {}, the end of `{}`", left.range.end, left.name);
            return Err(Error::mismatch(field, expected, start));
        }
    }
    Ok(())
}

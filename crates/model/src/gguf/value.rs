//! Metadata values.

use std::borrow::Cow;
use std::fmt;

use crate::tensor::Bytes;

/// Type of a metadata value; the numbers are GGUF's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueType {
    /// 8 bits.
    U8 = 0,
    /// 8 bits, signed.
    I8 = 1,
    /// 16 bits.
    U16 = 2,
    /// 16 bits, signed.
    I16 = 3,
    /// 32 bits.
    U32 = 4,
    /// 32 bits, signed.
    I32 = 5,
    /// 4-byte float.
    F32 = 6,
    /// One byte, 0 or 1.
    Bool = 7,
    /// UTF-8 with a 64-bit length.
    String = 8,
    /// Values of one type.
    Array = 9,
    /// 64 bits.
    U64 = 10,
    /// 64 bits, signed.
    I64 = 11,
    /// 8-byte float.
    F64 = 12,
}

impl ValueType {
    const ALL: [ValueType; 13] = [
        ValueType::U8,
        ValueType::I8,
        ValueType::U16,
        ValueType::I16,
        ValueType::U32,
        ValueType::I32,
        ValueType::F32,
        ValueType::Bool,
        ValueType::String,
        ValueType::Array,
        ValueType::U64,
        ValueType::I64,
        ValueType::F64,
    ];

    /// The type with GGUF's number.
    pub(super) fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }

    /// Bytes of a value, for types that always take the same.
    pub(super) fn size(self) -> Option<usize> {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => Some(1),
            ValueType::U16 | ValueType::I16 => Some(2),
            ValueType::U32 | ValueType::I32 | ValueType::F32 => Some(4),
            ValueType::U64 | ValueType::I64 | ValueType::F64 => Some(8),
            ValueType::String | ValueType::Array => None,
        }
    }
}

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "the variants are the format's types")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    /// Its type.
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// A whole number that is not negative, of any width.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::U64(v) => Some(v),
            Value::I8(v) => v.try_into().ok(),
            Value::I16(v) => v.try_into().ok(),
            Value::I32(v) => v.try_into().ok(),
            Value::I64(v) => v.try_into().ok(),
            _ => None,
        }
    }

    /// A string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// An array.
    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Value::Array(array) => Some(array),
            _ => None,
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(v) => v.fmt(f),
            Value::I8(v) => v.fmt(f),
            Value::U16(v) => v.fmt(f),
            Value::I16(v) => v.fmt(f),
            Value::U32(v) => v.fmt(f),
            Value::I32(v) => v.fmt(f),
            Value::F32(v) => v.fmt(f),
            Value::Bool(v) => v.fmt(f),
            Value::String(text) => write!(f, "{text:?}"),
            Value::Array(array) => write!(f, "{} x {:?}", array.len, array.element),
            Value::U64(v) => v.fmt(f),
            Value::I64(v) => v.fmt(f),
            Value::F64(v) => v.fmt(f),
        }
    }
}

/// An array as it lies in the file: the 300,000 strings of a tokenizer stay in the mapping.
#[derive(Debug, Clone)]
pub struct Array {
    /// Type of the elements, not itself an array.
    pub element: ValueType,
    /// Number of elements.
    pub len: usize,
    /// The elements; each string behind its length.
    pub(super) bytes: Bytes,
}

impl Array {
    /// An array of `len` strings; `write` appends the i-th to an empty string.
    pub fn of_strings(len: usize, mut write: impl FnMut(usize, &mut String)) -> Self {
        let (mut bytes, mut text) = (Vec::new(), String::new());
        for i in 0..len {
            text.clear();
            write(i, &mut text);
            bytes.extend((text.len() as u64).to_le_bytes());
            bytes.extend(text.as_bytes());
        }
        Self { element: ValueType::String, len, bytes: Bytes::new(bytes) }
    }

    /// An array of signed 32-bit numbers.
    pub fn of_i32(values: impl Iterator<Item = i32>) -> Self {
        let bytes: Vec<u8> = values.flat_map(i32::to_le_bytes).collect();
        Self { element: ValueType::I32, len: bytes.len() / 4, bytes: Bytes::new(bytes) }
    }

    /// The strings; none if the elements are of another type. What is not UTF-8 becomes U+FFFD:
    /// reading a file checks only that the strings are inside it.
    pub fn strings(&self) -> impl Iterator<Item = Cow<'_, str>> {
        let mut rest: &[u8] = match self.element {
            ValueType::String => &self.bytes,
            _ => &[],
        };
        std::iter::from_fn(move || {
            let (len, behind) = rest.split_first_chunk()?;
            let (text, behind) = behind.split_at_checked(u64::from_le_bytes(*len) as usize)?;
            rest = behind;
            Some(String::from_utf8_lossy(text))
        })
    }

    /// The numbers; none if the elements are not signed 32-bit ones.
    pub fn i32s(&self) -> impl Iterator<Item = i32> {
        let bytes: &[u8] = match self.element {
            ValueType::I32 => &self.bytes,
            _ => &[],
        };
        bytes.as_chunks().0.iter().map(|&bytes| i32::from_le_bytes(bytes))
    }
}

impl PartialEq for Array {
    fn eq(&self, other: &Self) -> bool {
        self.element == other.element && self.len == other.len && *self.bytes == *other.bytes
    }
}

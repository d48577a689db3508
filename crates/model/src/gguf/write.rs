//! The writer: the header at once, then the tensors' bytes as they come, in pieces of any size.

use std::io::Write;

use super::{ALIGNMENT, MAGIC, VERSION, Value, type_number};
use crate::error::{Error, Result};
use crate::layout::Tensor;

/// Writes one file.
pub struct Writer<'a, W> {
    out: W,
    tensors: &'a [Tensor],
    /// Bytes of the first of `tensors` that are still to come.
    left: usize,
}

impl<'a, W: Write> Writer<'a, W> {
    /// Writes everything that precedes the tensors' bytes.
    pub fn new(mut out: W, metadata: &[(String, Value)], tensors: &'a [Tensor]) -> Result<Self> {
        let mut header = Vec::new();
        header.extend(MAGIC);
        header.extend(VERSION.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((metadata.len() as u64).to_le_bytes());
        for (key, value) in metadata {
            put_pair(&mut header, key, value);
        }
        let mut offset = 0;
        for tensor in tensors {
            put_string(&mut header, &tensor.name);
            let dims = tensor.dims();
            header.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|dim| header.extend(dim.to_le_bytes()));
            header.extend(type_number(tensor.ty).to_le_bytes());
            header.extend((offset as u64).to_le_bytes());
            offset += padded(tensor.bytes());
        }
        header.resize(padded(header.len()), 0);
        out.write_all(&header)?;
        Ok(Self { out, tensors, left: tensors.first().map_or(0, Tensor::bytes) })
    }

    /// Appends bytes of the current tensor; when it is full the next one begins.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let Some((tensor, rest)) = self.tensors.split_first().filter(|_| bytes.len() <= self.left)
        else {
            return Err(Error::mismatch("tensor bytes to write", self.left, bytes.len()));
        };
        self.out.write_all(bytes)?;
        self.left -= bytes.len();
        if self.left == 0 {
            let size = tensor.bytes();
            self.out.write_all(&[0; ALIGNMENT][..padded(size) - size])?;
            self.tensors = rest;
            self.left = rest.first().map_or(0, Tensor::bytes);
        }
        Ok(())
    }

    /// Ends the file, which has to be complete.
    pub fn finish(mut self) -> Result<W> {
        if let Some(tensor) = self.tensors.first() {
            let field = format!("bytes left to write from tensor `{}` on", tensor.name);
            return Err(Error::mismatch(field, 0, self.left));
        }
        self.out.flush()?;
        Ok(self.out)
    }
}

const fn padded(len: usize) -> usize {
    len.next_multiple_of(ALIGNMENT)
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_pair(out: &mut Vec<u8>, key: &str, value: &Value) {
    put_string(out, key);
    out.extend((value.value_type() as u32).to_le_bytes());
    match value {
        Value::U8(v) => out.extend(v.to_le_bytes()),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(text) => put_string(out, text),
        Value::Array(array) => {
            out.extend((array.element as u32).to_le_bytes());
            out.extend((array.len as u64).to_le_bytes());
            out.extend_from_slice(&array.bytes);
        }
    }
}

//! Brings published checkpoints into kipp's form: safetensors as their publisher lays them out, checked against the
//! registry, converted to GGUF.

#![forbid(unsafe_code)]

mod config;
mod convert;
mod folder;
mod json;
mod safetensors;
mod tokenizer;

pub use convert::convert;
pub use folder::Folder;
pub use safetensors::{Safetensors, TensorInfo};

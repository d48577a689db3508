//! Brings published checkpoints into kipp's form: fetched from a hub, or safetensors as their publisher lays them out,
//! checked against the registry, converted to GGUF.

#![forbid(unsafe_code)]

mod config;
mod convert;
mod digest;
mod error;
mod folder;
mod importance;
mod json;
pub mod pull;
mod quantize;
mod safetensors;
mod tokenizer;

pub use convert::convert;
pub use error::Error;
pub use folder::Folder;
pub use importance::{Importance, Squares};
pub use pull::{Hub, pull};
pub use quantize::quantize;
pub use safetensors::{Safetensors, TensorInfo};

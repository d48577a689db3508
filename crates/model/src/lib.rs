//! What a checkpoint *is*: the registry of pinned Qwen3 checkpoints, the files that hold them and the
//! weights that come out of those files, typed and checked. Nothing here computes with the weights.

#![deny(unsafe_code)]

mod error;
pub mod float;
pub mod gguf;
pub mod layout;
mod mapping;
mod metadata;
mod model;
mod part;
pub mod registry;
pub mod scheme;
pub mod source;
pub mod spec;
pub mod synthetic;
pub mod tensor;
pub mod vocabulary;
pub mod weights;

pub use error::{Error, Result};
pub use mapping::map;
pub use metadata::Origin;
pub use model::{Identity, Model};
pub use part::Part;
pub use registry::{Checkpoint, Variant};
pub use scheme::Scheme;
pub use spec::{HEAD_DIM, KV_HEADS, RMS_EPSILON, Spec};
pub use tensor::{Matrix, TensorType, Vector};
pub use vocabulary::{Marker, Vocabulary};
pub use weights::{Layer, Weights};

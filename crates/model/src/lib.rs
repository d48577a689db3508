//! What a checkpoint *is*: the registry of pinned Qwen3 checkpoints, the files that hold them and the
//! weights that come out of those files, typed and checked. Nothing here computes with the weights.

#![deny(unsafe_code)]

pub mod registry;
pub mod spec;
pub mod tensor;
pub mod vocabulary;
pub mod weights;

pub use registry::{Checkpoint, Variant};
pub use spec::{HEAD_DIM, KV_HEADS, RMS_EPSILON, Spec};
pub use tensor::{Matrix, TensorType, Vector};
pub use vocabulary::{Marker, Vocabulary};
pub use weights::{Layer, Scheme, Weights};

//! Runs a model: what a backend is asked (a [`Batch`]), how it may answer, and everything above it.

#![forbid(unsafe_code)]

pub mod backend;
pub mod batch;
pub mod sampling;

pub use backend::{Backend, BackendError, KvConfig, KvKind, Limits};
pub use batch::{Answer, Batch, Choice, Input, Output, Row, Want};
pub use sampling::{Sample, SamplingParams};

//! Runs a model: what a backend is asked (a [`Batch`]), how it may answer, and everything above it.

#![forbid(unsafe_code)]

pub mod backend;
pub mod batch;
pub mod conformance;
pub mod device;
pub mod engine;
mod job;
pub mod kv;
mod load;
pub mod oracle;
pub mod perplexity;
pub mod philox;
mod reductions;
pub mod request;
pub mod rope;
pub mod sampling;
pub mod scripted;
pub mod sequence;
pub mod service;
pub mod speculation;

pub use backend::{Answered, Backend, BackendError, KvConfig, KvKind, Limits};
pub use batch::{Answer, Batch, Choice, Input, Output, Row, Want};
pub use engine::{Engine, RequestId, Settings};
pub use kv::KvPool;
pub use load::Load;
pub use oracle::Oracle;
pub use request::{Bounds, Event, FinishReason, Finished, Refusal, Request};
pub use sampling::{Sample, Sampler, SamplingParams};
pub use scripted::Scripted;
pub use sequence::Sequence;
pub use service::{Service, SubmitError};
pub use speculation::Speculation;

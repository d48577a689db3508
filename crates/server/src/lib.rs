//! kipp over HTTP: OpenAI's and Anthropic's APIs, metrics and the chat page.
//!
//! A request passes through these modules in order: [`listen`] and `connections`, `guard` (key, origins, log
//! line), a protocol (`openai`, `responses`, `anthropic`: the only places that know its wire format),
//! `chat` and `params` (what the engine is asked), `answer` (the one reader of engine events), and back
//! through the protocol's writer into one body or a stream of events (`reply`).

#![forbid(unsafe_code)]

mod answer;
mod anthropic;
mod app;
mod chat;
mod connections;
mod error;
mod fields;
mod guard;
mod guide;
pub mod listen;
mod metrics;
mod openai;
mod page;
mod params;
mod record;
mod reply;
mod responses;
mod routes;
mod stall;

pub use app::{Card, Loaded};
pub use listen::{Config, Ended, Server, Tls};
pub use routes::endpoints;

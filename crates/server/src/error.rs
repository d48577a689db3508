//! What a client is told when it gets no answer.

use std::fmt;

use axum::http::StatusCode;
use engine::{Refusal, SubmitError};
use serde_json::{Value, json};

/// An error with the status that it is answered with.
#[derive(Debug, Clone)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// The field of the request that is at fault, if one is.
    pub param: Option<String>,
    /// A word for programs, e.g. `model_not_found`.
    pub code: Option<&'static str>,
    /// A sentence for people.
    pub message: String,
}

/// Bytes of a message, some of which may be the client's own: a body is not sent back.
const MAX_MESSAGE: usize = 2000;

/// Result of everything that a client can be told about.
pub type Result<T> = std::result::Result<T, ApiError>;

impl ApiError {
    /// An error that names no field.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        ApiError { status, param: None, code: None, message: cut(message.into()) }
    }

    /// A request that cannot be understood or met.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A field that holds something else than it should.
    pub fn field(field: &str, expected: &str, found: impl fmt::Display) -> Self {
        Self::about(field, format_args!("expected {expected}, found {found}"))
    }

    /// A field that cannot be met.
    pub fn about(field: &str, what: impl fmt::Display) -> Self {
        let param = Some(cut(field.to_owned()));
        ApiError { param, ..Self::invalid(format!("{field}: {what}")) }
    }

    /// A failure on this side.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// OpenAI's word for the kind of error.
    pub fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_client_error() => "invalid_request_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            _ => "server_error",
        }
    }

    /// The body in OpenAI's shape.
    pub fn openai(&self) -> Value {
        json!({"error": {
            "message": self.message, "type": self.kind(), "param": self.param, "code": self.code,
        }})
    }

    /// The body in Anthropic's shape.
    pub fn anthropic(&self) -> Value {
        let kind = match self.kind() {
            "server_error" => "api_error",
            kind => kind,
        };
        json!({"type": "error", "error": {"type": kind, "message": self.message}})
    }
}

/// The beginning of a text that is too long for an answer.
fn cut(mut text: String) -> String {
    if text.len() > MAX_MESSAGE {
        text.truncate(text.floor_char_boundary(MAX_MESSAGE));
        text.push_str("...");
    }
    text
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<text::Error> for ApiError {
    fn from(error: text::Error) -> Self {
        let param = match &error {
            text::Error::Field { field, .. } => Some(field.clone()),
            _ => None,
        };
        ApiError { param, ..Self::invalid(error.to_string()) }
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let message = error.to_string();
        match error {
            SubmitError::Refused(refusal) => {
                let code =
                    matches!(refusal, Refusal::TooLong { .. }).then_some("context_length_exceeded");
                // The messages begin with the field that they are about.
                let param = message.split_once(':').map(|(field, _)| field.to_owned());
                ApiError { param, code, ..Self::invalid(message) }
            }
            SubmitError::Busy(_) | SubmitError::Stopped | SubmitError::Dead(_) => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
            }
        }
    }
}

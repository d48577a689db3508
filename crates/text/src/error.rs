//! What can be wrong with a chat request.

use std::fmt;

/// Why a request has no prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// The checkpoint is a base model.
    NoTemplate,
    /// The text is not JSON, or holds a string that no Unicode text can be.
    Json(String),
    /// Arrays and objects are nested deeper than this.
    Depth(usize),
    /// An object names the same member twice, which readers resolve differently.
    DuplicateKey(String),
    /// A value is not what its place asks for.
    Field {
        /// Where it stands, such as `messages[2].content`.
        field: String,
        /// What belongs there.
        expected: &'static str,
        /// What stands there.
        found: String,
    },
}

impl Error {
    pub(crate) fn field(
        field: impl Into<String>,
        expected: &'static str,
        found: impl Into<String>,
    ) -> Self {
        Error::Field { field: field.into(), expected, found: found.into() }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NoTemplate => write!(f, "a base checkpoint has no chat template"),
            Error::Json(why) => write!(f, "invalid JSON: {why}"),
            Error::Depth(limit) => write!(f, "JSON nested deeper than {limit} levels"),
            Error::DuplicateKey(key) => write!(f, "duplicate key {key:?} in a JSON object"),
            Error::Field { field, expected, found } => {
                write!(f, "{field}: expected {expected}, found {found}")
            }
        }
    }
}

impl std::error::Error for Error {}

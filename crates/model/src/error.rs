//! Why a file or a value was refused.

use std::path::{Path, PathBuf};
use std::{fmt, io};

use crate::tensor::TensorType;

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong, in words that name the place.
#[derive(Debug)]
pub enum Error {
    /// The operating system refused.
    Io(io::Error),
    /// A file or a request is not what it must be.
    Mismatch {
        /// What was looked at: a metadata key, a property of a tensor, an argument.
        field: String,
        /// What it has to be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A weight that is NaN, infinite or beyond the range of its tensor's type.
    Value {
        /// Name of the tensor.
        tensor: String,
        /// Row-major index of the element.
        index: usize,
        /// The weight.
        value: f32,
        /// The tensor's type.
        ty: TensorType,
    },
    /// Any of the above, in this file.
    InFile {
        /// The file.
        path: PathBuf,
        /// What went wrong there.
        error: Box<Error>,
    },
}

impl Error {
    /// A [`Error::Mismatch`] from anything that can be displayed.
    pub fn mismatch(
        field: impl fmt::Display,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> Self {
        let (field, expected) = (field.to_string(), expected.to_string());
        Error::Mismatch { field, expected, found: found.to_string() }
    }

    /// Adds the name of the file.
    pub fn in_file(self, path: &Path) -> Self {
        Error::InFile { path: path.to_owned(), error: Box::new(self) }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Io(error) => error.fmt(f),
            Error::Mismatch { field, expected, found } => {
                write!(f, "{field}: expected {expected}, found {found}")
            }
            Error::Value { tensor, index, value, ty } => {
                let field = format!("tensor `{tensor}`: element {index}");
                write!(f, "{field}: expected a finite value in the range of {ty}, found {value:e}")
            }
            Error::InFile { path, error } => write!(f, "{}: {error}", path.display()),
        }
    }
}

impl std::error::Error for Error {}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Self {
        Error::Io(error)
    }
}

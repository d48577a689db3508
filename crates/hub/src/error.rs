//! Why a model could not be brought here.

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fmt, io};

/// Shorthand for this crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// What went wrong between a hub and the models' folder.
#[derive(Debug)]
pub enum Error {
    /// A file is not what it must be, or the operating system refused it.
    Model(model::Error),
    /// What HF_ENDPOINT or HF_TOKEN holds makes no request.
    Request {
        /// What was to be asked for.
        url: String,
        /// What is wrong with it.
        why: String,
    },
    /// The hub could not be reached, or the connection to it broke.
    Connection {
        /// What was asked for.
        url: String,
        /// What happened.
        why: String,
    },
    /// The hub refused.
    Status {
        /// What was asked for.
        url: String,
        /// HTTP's number of the refusal.
        status: u16,
        /// How long the hub asks to be left alone.
        wait: Option<Duration>,
    },
    /// The hub answered with something else than was asked for.
    Answer {
        /// What was asked for.
        url: String,
        /// What was looked at: a header, the length, the hash.
        field: &'static str,
        /// What it has to be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// The disk is too small.
    Space {
        /// Where to.
        folder: PathBuf,
        /// Bytes that are still to be written.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// Another process is at it.
    Locked {
        /// The file that it holds.
        lock: PathBuf,
    },
}

impl Error {
    /// Whether asking again may help.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Error::Connection { .. } | Error::Answer { .. } => true,
            // 416: a range of a file that is there, so the server is in between two states.
            Error::Status { status, .. } => matches!(status, 408 | 416 | 425 | 429 | 500..=599),
            Error::Model(_)
            | Error::Request { .. }
            | Error::Space { .. }
            | Error::Locked { .. } => false,
        }
    }

    /// What the operating system says about a file.
    pub(crate) fn of_file(path: &Path) -> impl Fn(io::Error) -> Self + Copy + '_ {
        move |error| Error::Model(model::Error::Io(error).in_file(path))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Model(error) => error.fmt(f),
            Error::Request { url, why } => write!(
                f,
                "{url}: {why}; HF_ENDPOINT has to be an address such as https://huggingface.co, HF_TOKEN a word"
            ),
            Error::Connection { url, why } => write!(f, "{url}: {why}"),
            Error::Status { url, status, .. } => {
                write!(f, "{url}: expected status 200 or 206, found {status}")?;
                match status {
                    401 | 403 => f.write_str("; HF_TOKEN has to hold a token that may read it"),
                    404 => f.write_str("; the hub does not have it"),
                    416 => f.write_str("; its file is shorter than the hub's listing says"),
                    429 => f.write_str("; the hub wants fewer requests, try again later"),
                    _ => Ok(()),
                }
            }
            Error::Answer { url, field, expected, found } => {
                write!(f, "{url}: {field}: expected {expected}, found {found}")
            }
            Error::Space { folder, needed, free } => {
                let folder = folder.display();
                write!(f, "disk space in {folder}: expected {needed} bytes, found {free}")
            }
            Error::Locked { lock } => write!(f, "{}: another kipp holds it", lock.display()),
        }
    }
}

impl std::error::Error for Error {}

impl From<model::Error> for Error {
    fn from(error: model::Error) -> Self {
        Error::Model(error)
    }
}

//! What Ctrl-C does while an answer is written.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;

/// The status of a program that a signal ended, as shells have it.
pub const STATUS: u8 = 130;

/// What a verb returns that was interrupted and has printed what there was.
#[derive(Debug)]
pub struct Interrupted;

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("interrupted")
    }
}

impl Error for Interrupted {}

/// A flag that Ctrl-C sets, to end an answer. Where it is still set, nobody has looked at it: the program
/// ends at once.
pub fn flag() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&flag);
    ctrlc::set_handler(move || {
        if seen.swap(true, Ordering::Relaxed) {
            std::process::exit(STATUS.into());
        }
    })?;
    Ok(flag)
}

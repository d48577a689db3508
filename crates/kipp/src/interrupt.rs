//! What Ctrl-C does while an answer is written.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;

/// A flag that Ctrl-C sets, to end an answer. Where it is still set, nobody has looked at it: the program
/// ends at once.
pub fn flag() -> Result<Arc<AtomicBool>> {
    let flag = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&flag);
    ctrlc::set_handler(move || {
        if seen.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    })?;
    Ok(flag)
}

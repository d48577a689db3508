//! What a record says about where it was made.

use std::fs;

use serde_json::{Value, json};

/// The commit that this binary was built from, or "unknown" outside a checkout.
pub const COMMIT: &str = env!("KIPP_COMMIT");

/// Processor, cores and system.
pub fn describe() -> Value {
    json!({
        "processor": processor(),
        "cores": std::thread::available_parallelism().map_or(1, |n| n.get()),
        "os": std::env::consts::OS,
        "arch": std::env::consts::ARCH,
    })
}

/// The command line, without the path of the program.
pub fn command() -> String {
    let arguments = std::env::args().skip(1);
    std::iter::once("kipp".to_string()).chain(arguments).collect::<Vec<_>>().join(" ")
}

/// The processor's name, where the system tells it.
fn processor() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    name.unwrap_or("unknown").to_string()
}

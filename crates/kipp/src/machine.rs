//! The machine: what it has, and what a record says about where it was made.

use std::fs;

use serde_json::{Value, json};

/// Machine, commit and command of a record.
pub fn provenance() -> Value {
    let arguments = std::env::args().skip(1).map(|word| without_folders(&word));
    let command: Vec<String> = std::iter::once("kipp".to_string()).chain(arguments).collect();
    json!({
        "machine": {
            "processor": processor(),
            "cores": std::thread::available_parallelism().map_or(1, |n| n.get()),
            "os": std::env::consts::OS,
            "arch": std::env::consts::ARCH,
        },
        // The commit that this binary was built from, or "unknown" outside a checkout.
        "commit": env!("KIPP_COMMIT"),
        "command": command.join(" "),
    })
}

/// A word of a command with files by their names: where this machine keeps them is nobody's business.
fn without_folders(word: &str) -> String {
    let (flag, value) = match word.split_once('=') {
        Some((flag, value)) if flag.starts_with("--") => (format!("{flag}="), value),
        _ => (String::new(), word),
    };
    flag + value.rsplit(std::path::is_separator).next().unwrap_or_default()
}

/// The processor's name, where the system tells it.
pub fn processor() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|line| line.strip_prefix("model name")?.split(": ").nth(1));
    name.unwrap_or("unknown").to_string()
}

/// Bytes that a program may still take, where the system tells it: what is available, and what its control
/// group still allows.
pub fn available_memory() -> Option<u64> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let free = line.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024;
    Some(group_memory().map_or(free, |allowed| free.min(allowed)))
}

/// What the control group leaves, if it has a limit; its share of the page cache can be had back.
fn group_memory() -> Option<u64> {
    let read = |name| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
    let number = |name| read(name)?.trim().parse::<u64>().ok();
    let used = number("memory.current")?;
    let stat = read("memory.stat")?;
    let cache = stat.lines().find_map(|line| line.strip_prefix("inactive_file ")?.parse().ok());
    Some(number("memory.max")?.saturating_sub(used.saturating_sub(cache.unwrap_or(0))))
}

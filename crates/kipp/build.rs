//! Notes the commit that the binary is built from, for records of measurements.

use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=../../.git/HEAD");
    println!("cargo::rerun-if-changed=../../.git/refs/heads");
    let output = Command::new("git").args(["rev-parse", "--short=12", "HEAD"]).output();
    let commit = output.ok().filter(|o| o.status.success()).map(|o| o.stdout).unwrap_or_default();
    let commit = String::from_utf8(commit).unwrap_or_default();
    let commit = if commit.trim().is_empty() { "unknown" } else { commit.trim() };
    println!("cargo::rustc-env=KIPP_COMMIT={commit}");
}

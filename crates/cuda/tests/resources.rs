//! What the compiler and the gates' record say about every kernel: the fast ones keep their values in registers, and
//! none is without a gate.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Kernels that may spill more: `project_many` serves cards without Hopper's instructions, and spills outside its loop;
/// quantised weights of 8B and more spill up to seven words outside the loop at 65 to 128 tokens, and the tall tiles of heads five.
const MAY_SPILL: &[&str] = &[
    "project_many_",
    "project_batch_Q8_0_128_3_RESIDUAL",
    "project_batch_Q4_0_128_3_RESIDUAL",
    "project_batch_Q4_1_128_3_RESIDUAL",
    "project_tall_tiles_F16_192_HEADS",
];
/// Bytes that any kernel may spill: four words that live across the whole of it (project_few of 64 tokens).
const SPILL_LIMIT: usize = 16;

/// A kernel, the architecture it was compiled for and the bytes it spills, from ptxas' reports.
fn kernels() -> Vec<(String, String, usize)> {
    let mut kernels = Vec::new();
    let reports = fs::read_dir(env!("OUT_DIR")).expect("made by build.rs");
    for path in reports.filter_map(|entry| Some(entry.ok()?.path())) {
        // A build folder that was used before may hold reports of sources that are gone.
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        let source = format!("{}/kernels/{name}.cu", env!("CARGO_MANIFEST_DIR"));
        if path.extension().is_none_or(|extension| extension != "txt")
            || !Path::new(&source).exists()
        {
            continue;
        }
        let report = fs::read_to_string(&path).expect("a text");
        let mut entry = None;
        for line in report.lines() {
            if let Some((_, rest)) = line.split_once("Compiling entry function '") {
                let mut parts = rest.split('\'');
                let name = parts.next().unwrap_or_default().to_owned();
                entry = Some((name, parts.nth(1).unwrap_or_default().to_owned()));
            } else if let Some((before, _)) = line.split_once(" bytes spill stores")
                && let Some((name, architecture)) = entry.take()
            {
                let bytes = before.rsplit(' ').next().and_then(|bytes| bytes.parse().ok());
                kernels.push((name, architecture, bytes.expect("a number of bytes")));
            }
        }
    }
    assert!(!kernels.is_empty(), "no report in {}", env!("OUT_DIR"));
    kernels
}

#[test]
fn hot_kernels_do_not_spill() {
    let spilling: Vec<_> = kernels()
        .into_iter()
        .filter(|(name, architecture, bytes)| {
            // The other architectures were never measured; what spills there is no more than a guess.
            *bytes > SPILL_LIMIT
                && architecture == "sm_90a"
                && !MAY_SPILL.iter().any(|prefix| name.starts_with(prefix))
        })
        .collect();
    assert!(spilling.is_empty(), "{spilling:?}");
}

/// The record of the gates on a device names every kernel, and no kernel that is gone.
#[test]
fn every_kernel_has_met_a_gate() {
    let record =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../bench/results/cuda/kernels-hit.txt");
    let record = fs::read_to_string(&record).expect("the committed record");
    let hit: BTreeSet<&str> = record.lines().filter(|line| !line.starts_with('#')).collect();
    let compiled: Vec<_> = kernels();
    let compiled: BTreeSet<&str> = compiled.iter().map(|(name, ..)| name.as_str()).collect();
    let missed: Vec<_> = compiled.difference(&hit).collect();
    assert!(missed.is_empty(), "no gate has run these: {missed:?}");
    let gone: Vec<_> = hit.difference(&compiled).collect();
    assert!(gone.is_empty(), "the record names kernels that are gone: {gone:?}");
}

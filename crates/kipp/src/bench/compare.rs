//! Records side by side, as ratios of medians.

use std::fmt::Write;

use super::record::Record;

/// The table; the first record is the base.
pub fn table(records: &[(String, Record)]) -> String {
    let Some(((base_name, base), others)) = records.split_first() else { return String::new() };
    let mut text = String::new();
    for (name, record) in records {
        let made = |field: &str| record.made[field].as_str().unwrap_or("unknown");
        // Writing to a string cannot fail, here and below.
        let _ = writeln!(text, "{name}: {}; commit {}", record.subject(), made("commit"));
    }
    if let Some((name, _)) = others.iter().find(|(_, r)| r.made["machine"] != base.made["machine"])
    {
        let _ = writeln!(text, "{name} was measured on another machine than {base_name}");
    }
    let _ = write!(
        text,
        "\nmedians in tokens/s; \"~\" where the repetitions' ranges overlap\n\n| {:<20} ",
        "test"
    );
    let _ = write!(text, "| {base_name:>18} ");
    for (name, _) in others {
        let _ = write!(text, "| {name:>18} | {:>7} ", "ratio");
    }
    let _ = write!(text, "|\n|{:-<22}|{:->19}:", "", "");
    for _ in others {
        let _ = write!(text, "|{:->19}:|{:->8}:", "", "");
    }
    text += "|\n";
    for entry in &base.results {
        let [least, median, most] = entry.rates();
        let _ = write!(text, "| {:<20} | {median:>18.2} ", entry.name);
        for (_, record) in others {
            let Some(other) = record.results.iter().find(|other| other.name == entry.name) else {
                let _ = write!(text, "| {:>18} | {:>7} ", "-", "-");
                continue;
            };
            let [low, middle, high] = other.rates();
            let overlap = low <= most && least <= high;
            let ratio = format!("{}{:.3}", if overlap { "~" } else { "" }, middle / median);
            let _ = write!(text, "| {middle:>18.2} | {ratio:>7} ");
        }
        text += "|\n";
    }
    for (name, record) in others {
        let new = |name: &str| base.results.iter().all(|entry| entry.name != name);
        let only: Vec<&str> = record.results.iter().map(|e| &*e.name).filter(|n| new(n)).collect();
        if !only.is_empty() {
            let _ = writeln!(text, "only in {name}: {}", only.join(", "));
        }
    }
    text
}

//! Records side by side, as ratios of medians.

use std::fmt::Write;

use super::record::Record;

/// The table; the first record is the base.
pub fn table(records: &[(String, Record)]) -> String {
    let Some(((base_name, base), others)) = records.split_first() else { return String::new() };
    let mut text = String::new();
    let width = records.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0).max(18);
    let dashes = width + 1;
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
    let _ = write!(text, "| {base_name:>width$} ");
    for (name, _) in others {
        let _ = write!(text, "| {name:>width$} | {:>7} ", "ratio");
    }
    let _ = write!(text, "|\n|{:-<22}|{:->dashes$}:", "", "");
    for _ in others {
        let _ = write!(text, "|{:->dashes$}:|{:->8}:", "", "");
    }
    text += "|\n";
    for entry in &base.results {
        let [least, median, most] = entry.rates();
        let _ = write!(text, "| {:<20} | {median:>width$.2} ", entry.name);
        for (_, record) in others {
            let Some(other) = record.results.iter().find(|other| other.name == entry.name) else {
                let _ = write!(text, "| {:>width$} | {:>7} ", "-", "-");
                continue;
            };
            let [low, middle, high] = other.rates();
            let overlap = low <= most && least <= high;
            let ratio = format!("{}{:.3}", if overlap { "~" } else { "" }, middle / median);
            let _ = write!(text, "| {middle:>width$.2} | {ratio:>7} ");
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

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A record with the seconds of 100 tokens' repetitions, by test.
    fn record(name: &str, machine: &str, results: &[(&str, &[f64])]) -> (String, Record) {
        let entry = |&(name, seconds): &(&str, &[f64])| {
            json!({
                "name": name, "sequences": 1, "depth": 0, "tokens": 100, "tokens_per_s": 1.0,
                "deviation": 0.0, "bytes_per_s": null, "operations_per_s": null,
                "percent_of_peak": null, "seconds": seconds,
            })
        };
        let value = json!({
            "kind": "bench", "made": {"machine": machine, "commit": "c0ffee"},
            "checkpoint": "kipp-tiny", "scheme": "bf16", "backend": "cpu", "threads": 2,
            "kv": "bf16", "peak_read_bytes_per_s": null, "peak_operations_per_s": null,
            "results": results.iter().map(entry).collect::<Vec<Value>>(),
        });
        (name.into(), serde_json::from_value(value).expect("a record"))
    }

    #[test]
    fn ratios_are_of_medians_and_noise_is_marked() {
        let base = [("tg100", &[1.0, 2.0, 4.0][..]), ("pp100", &[1.0, 1.0])];
        let other = [("tg100", &[1.0, 1.0, 1.5][..]), ("pp100", &[0.5, 0.25]), ("pp200", &[1.0])];
        let text = table(&[record("a", "one", &base), record("b", "one", &other)]);
        let row = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).expect("a row");
            line.split('|').map(|cell| cell.trim().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(row("| tg100")[2..5], ["50.00", "100.00", "~2.000"]);
        assert_eq!(row("| pp100")[2..5], ["100.00", "300.00", "3.000"]);
        assert!(text.contains("only in b: pp200"), "{text}");
        assert!(!text.contains("another machine"), "{text}");
    }

    #[test]
    fn records_of_other_machines_and_missing_tests_are_told() {
        let base = record("a", "one", &[("tg100", &[1.0])]);
        let text = table(&[base, record("b", "two", &[])]);
        assert!(text.contains("b was measured on another machine than a"), "{text}");
        let row = text.lines().find(|line| line.starts_with("| tg100")).expect("a row");
        assert!(row.ends_with("|                  - |       - |"), "{row}");
    }
}

//! Any bytes as a file of saved distributions.

use engine::perplexity::saved::Reader;

pub fn run(data: &[u8]) {
    let Ok((header, mut reader)) = Reader::open(data, data.len() as u64) else { return };
    let mut rows = 0;
    while let Ok(Some(row)) = reader.row() {
        assert_eq!(row.len(), header.vocab);
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-9, "{sum}");
        rows += 1;
    }
    assert!(rows <= header.rows());
}

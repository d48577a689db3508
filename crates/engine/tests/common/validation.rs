//! kipp-tiny's validation text.

/// All of its tokens.
pub fn text() -> Vec<u32> {
    // The same from the tests of every crate.
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/data/goldens/valid.u16");
    let bytes = std::fs::read(file).expect("valid.u16");
    bytes.as_chunks().0.iter().map(|pair| u16::from_le_bytes(*pair).into()).collect()
}

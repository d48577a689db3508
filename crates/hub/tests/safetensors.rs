//! Safetensors headers: what is sound is read, and what is not is refused with the reason and
//! without a panic.

use std::path::Path;

use hub::Safetensors;
use model::tensor::Bytes;
use proptest::prelude::*;

/// A file with this header and so many bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend((0..data).map(|i| i as u8));
    file
}

fn read(bytes: Vec<u8>) -> model::Result<Safetensors> {
    Safetensors::read(Bytes::new(bytes))
}

fn refusal(bytes: Vec<u8>) -> String {
    read(bytes).unwrap_err().to_string()
}

const SOUND: &str = r#"{"__metadata__":{"format":"pt"},
    "b":{"dtype":"F32","shape":[2],"data_offsets":[6,14]},"a":{"dtype":"BF16","shape":[1,3],"data_offsets":[0,6]}}  "#;

#[test]
fn tensors_are_found_in_the_order_of_their_bytes() {
    let read = read(file(SOUND, 14)).unwrap();
    let names: Vec<_> = read.tensors.iter().map(|tensor| &*tensor.name).collect();
    assert_eq!(names, ["a", "b"]);
    assert_eq!((&*read.tensors[0].dtype, &*read.tensors[0].shape), ("BF16", &[1, 3][..]));
    assert_eq!(*read.bytes(&read.tensors[1]), [6, 7, 8, 9, 10, 11, 12, 13]);
}

#[test]
fn header_lengths_are_bounded() {
    let with = |length: u64| {
        let mut file = file(SOUND, 14);
        file[..8].copy_from_slice(&length.to_le_bytes());
        refusal(file)
    };
    let limit = SOUND.len() + 14;
    assert_eq!(
        with(1 << 63),
        format!("header length: expected at most {limit}, found {}", 1u64 << 63)
    );
    assert!(with(limit as u64 + 1).starts_with("header length: expected at most"));
    assert!(with(0).starts_with("header: expected a JSON object"));
    assert!(with(20).starts_with("JSON: expected the published form"));
    assert_eq!(refusal(vec![1; 7]), "header length: expected 8 bytes, found 7");
}

#[test]
fn offsets_have_to_be_those_of_the_shapes_without_gap_or_overlap() {
    let cases = [
        ("[1,3]", "[0,6]", "[6,13]", 13, "tensor `b`: bytes: expected those of [2] F32, found 7"),
        (
            "[1,3]",
            "[6,0]",
            "[6,14]",
            14,
            "tensor `a`: data_offsets: expected a range within the 14 bytes of data, found 6..0",
        ),
        (
            "[1,3]",
            "[0,6]",
            "[4,12]",
            12,
            "tensor `b`: data_offsets: expected to begin at 6, where the one before ends, found 4",
        ),
        (
            "[1,3]",
            "[0,6]",
            "[8,16]",
            16,
            "tensor `b`: data_offsets: expected to begin at 6, where the one before ends, found 8",
        ),
        (
            "[1,3]",
            "[0,6]",
            "[6,14]",
            10,
            "tensor `b`: data_offsets: expected a range within the 10 bytes of data, found 6..14",
        ),
        ("[1,3]", "[0,6]", "[6,14]", 15, "bytes of tensors: expected 14, found 15"),
        (
            "[1,4]",
            "[0,6]",
            "[6,14]",
            14,
            "tensor `a`: bytes: expected those of [1, 4] BF16, found 6",
        ),
        ("[4294967296,4294967296,3]", "[0,6]", "[6,14]", 14, "found 6"),
        ("[1,3]", "[0,18446744073709551615]", "[6,14]", 14, "tensor `a`: data_offsets"),
    ];
    for (shape, a, b, data, reason) in cases {
        let header = format!(
            r#"{{"a":{{"dtype":"BF16","shape":{shape},"data_offsets":{a}}},"b":{{"dtype":"F32","shape":[2],"data_offsets":{b}}}}}"#
        );
        let error = refusal(file(&header, data));
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn malformed_headers_are_refused() {
    let tensor = r#"{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}"#;
    let cases = [
        ("[]".to_owned(), "header: expected a JSON object, found []"),
        (format!(r#"{{"a":{tensor},"a":{tensor}}}"#), "`a` occurs twice"),
        (
            r#"{"a":{"dtype":"BF17","shape":[1],"data_offsets":[0,2]}}"#.into(),
            "tensor `a`: dtype: expected a type of the format, found BF17",
        ),
        (
            r#"{"a":{"dtype":"BF16","shape":[-1],"data_offsets":[0,2]}}"#.into(),
            "JSON: expected the published form",
        ),
        (r#"{"a":{"dtype":"BF16","shape":[1]}}"#.into(), "JSON: expected the published form"),
        (
            r#"{"a":{"x":"y"}}"#.into(),
            "header entry `a`: expected a tensor's type, shape and offsets",
        ),
        (format!(r#"{{"__metadata__":{tensor}}}"#), "header entry `__metadata__`"),
        (format!(r#"{{"a":{tensor}}} x"#), "trailing characters"),
        ("{\"a\":".repeat(5000), "JSON: expected the published form"),
    ];
    for (header, reason) in cases {
        let error = refusal(file(&header, 2));
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn inputs_that_once_mattered_to_the_fuzzer_are_still_harmless() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/safetensors");
    for entry in corpus.read_dir().unwrap() {
        let _ = Safetensors::open(&entry.unwrap().path());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn no_damage_makes_the_reader_panic(at in 0usize..SOUND.len() + 22, byte: u8, cut in 0usize..SOUND.len() + 23) {
        let mut file = file(SOUND, 14);
        file[at] = byte;
        file.truncate(cut);
        if let Ok(read) = read(file) {
            read.tensors.iter().for_each(|tensor| drop(read.bytes(tensor).to_vec()));
        }
    }
}

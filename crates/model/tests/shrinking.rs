//! A file that is cut off while it is mapped.
#![cfg(unix)]

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use model::Model;

fn copy_of_kipp_tiny(name: &str) -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/kipp-tiny.gguf");
    let path = std::env::temp_dir().join(format!("kipp-{}-{name}.gguf", std::process::id()));
    fs::copy(own, &path).unwrap();
    path
}

fn read_all(model: &Model) -> f32 {
    let mut row = Vec::new();
    let mut sum = 0.0;
    for matrix in model.weights.matrices() {
        row.resize(matrix.cols, 0.0);
        for i in 0..matrix.rows {
            matrix.row_f32(i, &mut row);
            sum += row.iter().map(|x| x.abs()).sum::<f32>();
        }
    }
    sum
}

#[test]
fn what_is_gone_reads_as_zeros_and_is_told() {
    let path = copy_of_kipp_tiny("cut");
    let whole = Model::open(&path).unwrap();
    let expected = read_all(&whole);
    assert!(whole.weights.check().is_ok());

    let model = Model::open(&path).unwrap();
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    // From several threads at the same time, as backends read.
    let sums = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4).map(|_| scope.spawn(|| read_all(&model))).collect();
        readers.into_iter().map(|reader| reader.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(sums.iter().all(|&sum| 0.0 < sum && sum < expected), "{sums:?} of {expected}");
    let error = model.weights.check().unwrap_err().to_string();
    assert!(error.starts_with(&path.display().to_string()), "{error}");
    assert!(
        error.contains("size while in use: expected ") && error.ends_with("found fewer"),
        "{error}"
    );

    // A new mapping of another file is not blamed for it.
    let other = copy_of_kipp_tiny("whole");
    drop(model);
    let fresh = Model::open(&other).unwrap();
    assert_eq!(read_all(&fresh), expected);
    assert!(fresh.weights.check().is_ok());
    fs::remove_file(path).unwrap();
    fs::remove_file(other).unwrap();
}

/// A SIGBUS that is not of a watched mapping still ends the process. What is mapped when 256 mappings are watched is not.
#[test]
fn other_faults_stay_faults() {
    if std::env::var_os("KIPP_TEST_FAULT").is_none() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "other_faults_stay_faults"])
            .env("KIPP_TEST_FAULT", "1")
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .status()
            .unwrap();
        assert!(!status.success());
        return;
    }
    let path = copy_of_kipp_tiny("other");
    let _watched: Vec<_> = (0..256).map(|_| model::map(&path).unwrap()).collect();
    let unwatched = model::map(&path).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
    fs::remove_file(&path).unwrap();
    assert_eq!(unwatched[1 << 20], 0, "the process should be gone");
    std::process::exit(0);
}

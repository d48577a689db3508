//! Compiles every `kernels/*.cu` into one fat binary of machine code for all architectures, and lists them for
//! `src/kernels.rs` to embed. Resource usage as ptxas reports it lands beside each, in `NAME.txt`.
//!
//! Environment: `KIPP_NVCC` names the compiler; without it, `target/nvcc` (scripts/get-nvcc.sh), `CUDA_HOME` and
//! `PATH` are searched. `KIPP_CUDA_ARCHS` ("90a,120") compiles for fewer architectures while developing.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::{env, fs, thread};

/// sm_80 serves the 8.x parts, sm_100 and sm_120 their families; Hopper's own instructions need the 90a target.
const ARCHITECTURES: &str = "80,89,90a,100,120";

fn main() {
    let source =
        PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("set by cargo")).join("kernels");
    let out = PathBuf::from(env::var("OUT_DIR").expect("set by cargo"));
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rerun-if-env-changed=KIPP_NVCC");
    println!("cargo::rerun-if-env-changed=KIPP_CUDA_ARCHS");
    println!("cargo::rerun-if-env-changed=CUDA_HOME");

    let Some(nvcc) = find_nvcc() else {
        println!(
            "cargo::error=the cuda crate needs nvcc 13.0 or later: run scripts/get-nvcc.sh, or set KIPP_NVCC or CUDA_HOME"
        );
        return;
    };
    let mut names: Vec<String> = fs::read_dir(&source)
        .expect("kernels/ is part of the crate")
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let name = path.file_stem()?.to_str()?.to_owned();
            (path.extension()? == "cu").then_some(name)
        })
        .collect();
    names.sort();

    // The largest sources first, so that no core ends with a long one.
    let mut queue = names.clone();
    queue
        .sort_by_key(|name| fs::metadata(source.join(format!("{name}.cu"))).map_or(0, |m| m.len()));
    let queue = Mutex::new(queue);
    let failures = Mutex::new(Vec::new());
    let workers = thread::available_parallelism().map_or(1, |n| n.get());
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let Some(name) = queue.lock().expect("no worker panics").pop() else { return };
                    if let Err(message) = compile(&nvcc, &source, &out, &name) {
                        failures.lock().expect("no worker panics").push(message);
                    }
                }
            });
        }
    });
    for message in failures.into_inner().expect("no worker panics") {
        for line in message.lines() {
            println!("cargo::error={line}");
        }
    }

    let list: String = names
        .iter()
        .map(|name| {
            format!(
                "(\"{name}\", include_bytes!(concat!(env!(\"OUT_DIR\"), \"/{name}.fatbin\"))),\n"
            )
        })
        .collect();
    fs::write(out.join("images.rs"), format!("&[\n{list}]\n")).expect("OUT_DIR is writable");
}

/// The compiler, from the first place that has one.
fn find_nvcc() -> Option<PathBuf> {
    let places = env::var_os("KIPP_NVCC").map(PathBuf::from).into_iter();
    let fetched = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/nvcc/bin/nvcc");
    let home = env::var_os("CUDA_HOME").map(|home| PathBuf::from(home).join("bin/nvcc"));
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).map(|folder| folder.join("nvcc")).collect::<Vec<_>>();
    places.chain([fetched]).chain(home).chain(on_path).find(|nvcc| nvcc.is_file())
}

/// One source to one fat binary; the compiler's own words if it fails.
fn compile(nvcc: &Path, source: &Path, out: &Path, name: &str) -> Result<(), String> {
    let architectures = env::var("KIPP_CUDA_ARCHS").unwrap_or_else(|_| ARCHITECTURES.into());
    let mut command = Command::new(nvcc);
    command.args(["-O3", "-std=c++17", "-fatbin", "-Xptxas", "-v", "-o"]);
    command.arg(out.join(format!("{name}.fatbin"))).arg(source.join(format!("{name}.cu")));
    for arch in architectures.split(',') {
        command.arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"));
    }
    // A source is compiled anew if it, a header that it includes or the command is newer than what it was compiled to.
    let stamp = format!("{command:?}");
    let stamp_file = out.join(format!("{name}.command"));
    let changed = |path: &Path| fs::metadata(path).and_then(|m| m.modified()).ok();
    let mut inputs = vec![format!("{name}.cu")];
    for i in 0.. {
        let Some(input) = inputs.get(i) else { break };
        let text = fs::read_to_string(source.join(input)).map_err(|error| error.to_string())?;
        let headers =
            text.lines().filter_map(|line| line.strip_prefix("#include \"")?.strip_suffix('"'));
        let new: Vec<String> = headers
            .filter(|header| !inputs.iter().any(|i| i == header))
            .map(String::from)
            .collect();
        inputs.extend(new);
    }
    let inputs = inputs.iter().filter_map(|input| changed(&source.join(input)));
    let made = changed(&stamp_file);
    if inputs.max() < made && fs::read_to_string(&stamp_file).is_ok_and(|old| old == stamp) {
        return Ok(());
    }
    let run = command.output().map_err(|error| format!("{}: {error}", nvcc.display()))?;
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    if !run.status.success() {
        return Err(format!("nvcc failed on kernels/{name}.cu:\n{said}"));
    }
    fs::write(out.join(format!("{name}.txt")), said)
        .and_then(|()| fs::write(stamp_file, stamp))
        .map_err(|error| error.to_string())
}

//! Getting, making, listing and removing model files, as a user does.

#[path = "../../hub/tests/common/mod.rs"]
mod common;
#[path = "../../hub/tests/common/hub.rs"]
mod test_hub;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use model::gguf::{Gguf, Value as Field, Writer};
use model::layout::{self, Role, Tensor};
use model::source::Source as _;
use model::{Checkpoint, Model, Origin, Scheme, TensorType};
use serde_json::Value;
use test_hub::{Behaviour, Options, TestHub};

/// A models' folder of its own for a test.
struct Models(PathBuf);

impl Models {
    fn new(name: &str) -> Self {
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).expect("made");
        Self(dir)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kipp"));
        command.args(args).env("KIPP_MODELS", &self.0).env_remove("HF_TOKEN");
        command.env("HF_HOME", self.0.join("hf")).env_remove("HF_HUB_CACHE");
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("kipp starts")
    }

    /// What a verb that works prints.
    fn prints(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// Why a verb fails.
    fn refusal(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        stderr(&output)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

#[test]
fn schemes_of_the_built_in_model_are_made_listed_used_and_removed() {
    let models = Models::new("store");
    assert_eq!(models.prints(&["pull", "kipp-tiny"]), "kipp-tiny is built in\n");
    let path = models.file("kipp-tiny-q4_0.gguf");
    assert_eq!(models.prints(&["pull", "kipp-tiny:q4_0"]), format!("{}\n", path.display()));
    assert!(models.prints(&["pull", "kipp-tiny", "--scheme", "q4_0"]).ends_with(" is here\n"));

    let list: Value = serde_json::from_str(&models.prints(&["ls", "--json"])).expect("JSON");
    let tiny = list.as_array().expect("entries").iter().find(|e| e["id"] == "kipp-tiny");
    let file = &tiny.expect("kipp-tiny")["files"][0];
    assert_eq!((&file["scheme"], &file["fault"]), (&"q4_0".into(), &Value::Null));
    assert_eq!(file["bytes"], fs::metadata(&path).expect("there").len());
    assert!(models.prints(&["ls"]).contains("gates not run"));

    let story = ["generate", "kipp-tiny:q4_0", "--prompt", "Once upon a time", "--max-tokens", "5"];
    assert_eq!(models.prints(&story), ", there was a little\n");

    assert!(models.prints(&["rm", "kipp-tiny:q4_0"]).contains("kipp-tiny-q4_0.gguf"));
    assert!(!path.exists());
    assert!(models.refusal(&["rm", "kipp-tiny:q4_0"]).contains("is not in"));
    assert!(stderr(&models.run(&["rm", text(&path)])).contains("expected a registry id"));
    // An empty folder says how it is filled, and the file of a model may be asked for by the model's name.
    assert!(stderr(&models.run(&["ls"])).contains("holds no models; `kipp pull MODEL:SCHEME`"));
    assert!(models.prints(&["inspect", "kipp-tiny"]).starts_with("checkpoint  kipp-tiny"));
    let missing = models.refusal(&["inspect", "kipp-tiny:q4_0"]);
    assert!(missing.contains("`kipp pull kipp-tiny:q4_0` brings it"), "{missing}");
    models.prints(&["quantize", "kipp-tiny", "--scheme", "q4_0"]);
    assert!(models.prints(&["inspect", "KIPP-tiny:q4_0"]).starts_with("checkpoint  kipp-tiny"));
    assert!(stderr(&models.run(&["ls"])).is_empty());
    models.prints(&["rm", "kipp-tiny"]);
    // The repository's name is as good as the id.
    let missing = models.refusal(&["chat", "Qwen/Qwen3-4B:q8_0"]);
    assert!(missing.contains("`kipp pull qwen3-4b:q8_0` brings it"), "{missing}");
    let missing = models.refusal(&["chat", "qwen3-4b"]);
    assert!(
        missing.contains("`kipp pull qwen3-4b:q8_0` brings it with 8-bit weights"),
        "{missing}"
    );
    let unsaid =
        models.command(&["pull", "qwen3-0.6b"]).env("HF_ENDPOINT", "http://127.0.0.1:1").output();
    let unsaid = stderr(&unsaid.expect("kipp starts"));
    assert!(
        unsaid.starts_with("no scheme named: bf16 it is") && unsaid.contains("q4_0 413 MB"),
        "{unsaid}"
    );
    // A folder that cannot be made is told by name.
    let file = models.file("file");
    fs::write(&file, "").expect("written");
    for args in [&["pull", "kipp-tiny:q4_0"][..], &["quantize", "kipp-tiny", "--scheme", "q4_0"]] {
        let output = models.command(args).env("KIPP_MODELS", &file).output().expect("kipp starts");
        assert!(stderr(&output).contains(&format!("{}: File exists", file.display())));
    }
    // The built-in model's schemes need no file; those of others do.
    assert_eq!(models.prints(&story), ", there was a little\n");
    let missing = models.refusal(&["generate", "qwen3-0.6b:q4_0", "--prompt", "Once"]);
    assert!(missing.contains("`kipp pull qwen3-0.6b:q4_0` brings it"), "{missing}");
}

/// Files are copied into the folder by hand, and hands slip.
#[test]
fn a_file_under_another_name_is_refused() {
    let models = Models::new("misnamed");
    models.prints(&["pull", "kipp-tiny:q8_0"]);
    for name in ["kipp-tiny-q4_0.gguf", "qwen3-0.6b-q8_0.gguf"] {
        fs::copy(models.file("kipp-tiny-q8_0.gguf"), models.file(name)).expect("copied");
    }
    for args in [
        &["generate", "kipp-tiny:q4_0", "--prompt", "x"][..],
        &["generate", "qwen3-0.6b", "--prompt", "x"],
        &["pull", "qwen3-0.6b:q8_0"],
    ] {
        let error = models.refusal(args);
        let expected = "expected what the name says, found kipp-tiny in q8_0";
        assert!(error.contains(expected), "{args:?}: {error}");
    }
    assert_eq!(models.prints(&["ls"]).matches("unusable").count(), 2);
}

#[test]
fn gates_that_ran_are_listed_until_the_file_changes() {
    let models = Models::new("gates");
    models.prints(&["pull", "kipp-tiny:q8_0"]);
    models.prints(&["verify", "kipp-tiny:q8_0", "--gate", "logits"]);
    assert!(models.prints(&["ls"]).contains("gates not run"), "one gate is not all");
    models.prints(&["verify", "kipp-tiny:q8_0"]);
    assert!(models.prints(&["ls"]).contains("cpu gates hold"));
    let path = models.file("kipp-tiny-q8_0.gguf");
    let mut bytes = fs::read(&path).expect("read");
    bytes.extend([0; 64]);
    fs::write(&path, bytes).expect("written");
    assert!(models.prints(&["ls"]).contains("gates not run"));
}

#[test]
fn hubs_that_refuse_are_reported() {
    let models = Models::new("refused");
    let pull = |url: &str| {
        let output = models.command(&["pull", "qwen3-0.6b:q4_0"]).env("HF_ENDPOINT", url).output();
        let output = output.expect("kipp starts");
        assert_eq!(output.status.code(), Some(1));
        stderr(&output)
    };
    // A hub that knows another repository only.
    let hub = TestHub::start(HashMap::new(), Options::default(), |_| Behaviour::default());
    let error = pull(&hub.url);
    assert!(error.contains("found 404; the hub does not have it"), "{error}");
    let options = Options { token: Some("secret"), ..Options::default() };
    let hub = TestHub::start(HashMap::new(), options, |_| Behaviour::default());
    assert!(pull(&hub.url).contains("found 401; HF_TOKEN has to hold a token"));
    assert!(!models.prints(&["ls"]).contains("unfinished"));
    assert!(stderr(&models.run(&["pull", "gpt-5"])).contains("expected a GGUF file or one of"));
    let output = models.run(&["pull", "qwen3-0.6b:q4_0", "--scheme", "q8_0"]);
    let error = stderr(&output);
    assert!(error.contains("--scheme: expected q4_0, as the model says, found q8_0"), "{error}");
    assert_eq!(output.status.code(), Some(2));
}

/// Case DL-05: Ctrl-C keeps what has come, and says so.
#[test]
#[cfg(unix)]
fn an_interrupted_pull_says_that_it_can_go_on() {
    let models = Models::new("interrupted");
    let checkpoint = Checkpoint::find("qwen3-0.6b").expect("registered");
    let files = [("config.json", 10), ("tokenizer.json", 1 << 20), ("model.safetensors", 10)];
    let files =
        files.map(|(name, bytes)| (name.to_owned(), vec![b' '; bytes])).into_iter().collect();
    let entry = Some((checkpoint.repository, checkpoint.revision));
    let slow = |_: &test_hub::Request| Behaviour {
        pause: Duration::from_millis(200),
        ..Behaviour::default()
    };
    let hub = TestHub::start(files, Options { entry, ..Options::default() }, slow);
    let mut pull = models.command(&["pull", "qwen3-0.6b:q4_0"]);
    let pull =
        pull.env("HF_ENDPOINT", &hub.url).stderr(Stdio::piped()).spawn().expect("kipp starts");
    let journal = models.file("downloads/qwen3-0.6b/tokenizer.json.journal");
    while !journal.exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let kill = Command::new("kill").args(["-INT", &pull.id().to_string()]).status();
    assert!(kill.expect("kill").success());
    let output = pull.wait_with_output().expect("kipp ends");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("what has come is kept, run it again to go on"));
    assert!(models.prints(&["ls"]).contains("an unfinished pull"));
    assert!(models.prints(&["rm", "qwen3-0.6b"]).contains("an unfinished pull"));
    assert!(!models.prints(&["ls"]).contains("an unfinished pull"));
}

/// A whole checkpoint of the registry through the whole program. Its weights are zeros that the system makes up as they are
/// read, so that what it takes is 2 GB of disk for a moment.
#[test]
fn a_registered_checkpoint_is_pulled_and_found() {
    let models = Models::new("pulled");
    let checkpoint = Checkpoint::find("qwen3-0.6b").expect("registered");
    let tensors = layout::tensors(&checkpoint.spec, Scheme::Bf16, Scheme::Bf16);
    let (header, data) = common::header(&tensors.iter().collect::<Vec<_>>());
    let mut weights = vec![0; header.len() + data];
    weights[..header.len()].copy_from_slice(&header);
    let config = common::config(&checkpoint.spec).to_string().into_bytes();
    let tokenizer = common::tokenizer(checkpoint.vocabulary(), false).to_string().into_bytes();
    let files =
        [("config.json", config), ("tokenizer.json", tokenizer), ("model.safetensors", weights)];
    let files = files.map(|(name, bytes)| (name.to_owned(), bytes)).into_iter().collect();
    let entry = Some((checkpoint.repository, checkpoint.revision));
    let options = Options { entry, ..Options::default() };
    let hub = TestHub::start(files, options, |_| Behaviour::default());
    let mut pull = models.command(&["pull", "qwen3-0.6b:q4_0"]);
    let output = pull.env("HF_ENDPOINT", &hub.url).output().expect("kipp starts");
    let told = stderr(&output);
    assert!(output.status.success(), "{told}");
    // Not on a terminal: a line every tenth, of both stages, with rate and time left.
    for stage in ["fetching ", "converting "] {
        let on_the_way =
            |l: &str| l.starts_with(stage) && l.contains("/s  ") && l.ends_with(" left");
        assert!(told.lines().any(on_the_way), "{stage}: {told}");
    }
    let path = models.file("qwen3-0.6b-q4_0.gguf");
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{}\n", path.display()));
    assert!(models.prints(&["ls"]).contains("q4_0 ("));
    let generate = ["generate", "qwen3-0.6b", "--prompt", "a", "--max-tokens", "1", "--ids"];
    models.prints(&generate);
    fs::remove_dir_all(&models.0).expect("removed");
}

/// kipp-tiny as another program would write it: K-quants of several types, a head of its own, no keys of kipp's.
fn foreign(path: &Path, ty: TensorType) {
    let own = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/data/kipp-tiny.gguf");
    let mut metadata = Gguf::open(&own).expect("kipp-tiny").metadata;
    metadata.retain(|(key, _)| key != "general.alignment" && !key.starts_with("kipp."));
    let model = Model::builtin().expect("kipp-tiny");
    let mut tensors = layout::tensors(model.spec(), Scheme::Bf16, Scheme::Bf16);
    let head = Tensor { name: "output.weight".into(), ..tensors[0].clone() };
    tensors.push(head);
    for tensor in tensors.iter_mut().filter(|tensor| tensor.role != Role::Norm) {
        let finer = tensor.role == Role::Head || tensor.name.contains("attn_v");
        tensor.ty = if finer && !ty.is_wide() { TensorType::Q6K } else { ty };
    }
    let file = fs::File::create(path).expect("made");
    let mut writer =
        Writer::new(std::io::BufWriter::new(file), &metadata, &tensors).expect("header");
    for tensor in &tensors {
        let mut row = vec![0.0; tensor.cols];
        let mut bytes = vec![0; tensor.ty.row_bytes(tensor.cols)];
        for i in 0..tensor.rows {
            model.weights.row(tensor, i, &mut row);
            model::scheme::encode(tensor.ty, &row, None, &mut bytes).expect("storable");
            writer.append(&bytes).expect("written");
        }
    }
    writer.finish().expect("complete");
}

#[test]
fn files_of_other_programs_run_and_are_marked() {
    let models = Models::new("foreign");
    for (ty, name) in
        [(TensorType::Q4K, "q4_k"), (TensorType::Q5K, "q5_k"), (TensorType::F16, "f16")]
    {
        let path = models.file(&format!("{name}.gguf"));
        foreign(&path, ty);
        let report = models.prints(&["inspect", text(&path)]);
        assert!(report.contains("origin      foreign, not pinned\n"), "{report}");
        assert!(report.contains(&format!("scheme      {name}, ")), "{report}");
        let report = models.prints(&["inspect", text(&path), "--json"]);
        let report: Value = serde_json::from_str(&report).expect("JSON");
        assert_eq!((&report["checkpoint"], &report["scheme"]), (&"kipp-tiny".into(), &name.into()));
        assert_eq!(report["types"]["Q6_K"].as_u64(), (ty != TensorType::F16).then_some(8));
        let story = ["generate", text(&path), "--prompt", "Once upon a time", "--max-tokens", "5"];
        let output = models.run(&story);
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(told.contains(" there was a little"), "{told}");
        assert!(stderr(&output).contains("weights: foreign, not pinned"), "{}", stderr(&output));
    }
    // From 16 bits it can be quantised, stays foreign, and is not quantised again.
    let made = models.prints(&["quantize", text(&models.file("f16.gguf")), "--scheme", "q8_0"]);
    let made = PathBuf::from(made.trim_end());
    assert_eq!(made, models.file("f16-q8_0.gguf"));
    assert_eq!(Model::open(&made).expect("sound").origin, Origin::Foreign);
    let error = models.refusal(&["quantize", text(&made), "--scheme", "q4_0"]);
    assert!(error.contains("weights to quantise: expected 16 bits or more, found Q8_0"), "{error}");
    let error = models.refusal(&["quantize", text(&models.file("q4_k.gguf")), "--scheme", "q8_0"]);
    assert!(error.contains("found Q6_K"), "{error}");
}

#[test]
fn importance_is_measured_and_used() {
    let models = Models::new("imatrix");
    let story = models.prints(&["generate", "--prompt", "Once upon a time", "--max-tokens", "200"]);
    fs::write(models.file("text"), story).expect("written");
    let (input, matrix) = (models.file("text"), models.file("imatrix.gguf"));
    models.prints(&["imatrix", "--text", text(&input), "--chunk", "64", "--out", text(&matrix)]);
    let found = Gguf::open(&matrix).expect("a GGUF");
    assert_eq!(found.tensors.len(), 2 * 7 * 6);
    assert_eq!(found.get("general.type"), Some(&Field::String("imatrix".into())));
    let quantize = |more: &[&str], out: &Path| {
        let args = ["quantize", "kipp-tiny", "--scheme", "q4_0", "--out", text(out)];
        models.prints(&[&args, more].concat());
        fs::read(out).expect("written")
    };
    let plain = quantize(&[], &models.file("plain.gguf"));
    let weighted = quantize(&["--imatrix", text(&matrix)], &models.file("weighted.gguf"));
    assert!(plain.len() == weighted.len() && plain != weighted);
    let error = models.refusal(&[
        "quantize",
        "kipp-tiny",
        "--scheme",
        "q4_1",
        "--imatrix",
        text(&models.file("plain.gguf")),
    ]);
    assert!(
        error.contains("importance of the checkpoint's matrices: expected some, found none"),
        "{error}"
    );
}

#[test]
fn a_local_folder_shows_no_revision() {
    let models = Models::new("folder");
    let checkpoint = Checkpoint::find("kipp-tiny").expect("registered");
    let folder = models.file("published");
    fs::create_dir_all(&folder).expect("made");
    let tensors = layout::tensors(&checkpoint.spec, Scheme::Bf16, Scheme::Bf16);
    let (mut weights, data) = common::header(&tensors.iter().collect::<Vec<_>>());
    weights.resize(weights.len() + data, 0);
    fs::write(folder.join("config.json"), common::config(&checkpoint.spec).to_string())
        .expect("written");
    fs::write(folder.join("model.safetensors"), weights).expect("written");
    let out = models.file("tiny.gguf");
    let output =
        models.run(&["convert", text(&folder), "--checkpoint", "kipp-tiny", "--out", text(&out)]);
    assert!(output.status.success(), "{}", stderr(&output));
    let told = stderr(&output);
    assert!(told.contains("nothing shows whether the weights are those of its revision"), "{told}");
    let report = models.prints(&["inspect", text(&out)]);
    assert!(report.contains("kipp-tiny at a revision that nothing shows"), "{report}");
}

#[test]
fn doctor_says_what_fits() {
    let models = Models::new("doctor");
    let report: Value =
        serde_json::from_str(&models.prints(&["doctor", "--ctx", "32k", "--json"])).expect("JSON");
    assert_eq!(report["context"], 32_768);
    let tiny = report["models"].as_array().expect("models").iter().find(|m| m["id"] == "kipp-tiny");
    let fits = &tiny.expect("kipp-tiny")["fits"][0];
    assert_eq!((&fits["on"], &fits["largest_scheme"]), (&"processor".into(), &"bf16".into()));
    let told = models.prints(&["doctor"]);
    assert!(told.contains("largest scheme that fits with 4096 positions"), "{told}");
    for backend in ["cuda", "metal"] {
        let line = told.lines().find(|line| line.starts_with(backend)).expect("a line");
        let found = &report[backend];
        let known = found["unavailable"].as_str().or(found["devices"][0].as_str());
        assert!(line.ends_with(known.expect("devices or why there are none")), "{told}");
    }
}

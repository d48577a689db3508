//! Published folders, as they are met in practice and as they must not be, converted to GGUF.

mod common;

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use model::layout::{self, Tensor};
use model::{Checkpoint, Model, Origin, Scheme};
use serde_json::{Value, json};

const BF16: (Scheme, Scheme) = (Scheme::Bf16, Scheme::Bf16);

fn tiny() -> &'static Checkpoint {
    Checkpoint::find("kipp-tiny").unwrap()
}

/// Tensors with the file that each is in.
type Tensors = Vec<(Tensor, &'static str)>;

/// A published folder of kipp-tiny's dimensions that can be damaged before it is written.
struct Folder {
    dir: PathBuf,
    config: Value,
    tokenizer: Option<Value>,
    tensors: Tensors,
    /// What the index says, where there is one.
    index: Vec<(String, String)>,
    /// Elements set to a value of their own: tensor, index, bits.
    patches: Vec<(&'static str, usize, u16)>,
}

impl Folder {
    fn new(name: &str) -> Self {
        let spec = &tiny().spec;
        let tensors = layout::tensors(spec, Scheme::Bf16, Scheme::Bf16);
        Self {
            dir: std::env::temp_dir().join(format!("kipp-{}-{name}", std::process::id())),
            config: common::config(spec),
            tokenizer: None,
            tensors: tensors.into_iter().map(|tensor| (tensor, "model.safetensors")).collect(),
            index: Vec::new(),
            patches: Vec::new(),
        }
    }

    /// Spreads the tensors over three files with an index.
    fn sharded(name: &str) -> Self {
        let files = ["model-1.safetensors", "model-2.safetensors", "model-3.safetensors"];
        let mut folder = Self::new(name);
        for (i, (tensor, file)) in folder.tensors.iter_mut().enumerate() {
            *file = files[i * 7 % 3];
            folder.index.push((tensor.upstream.clone(), (*file).to_owned()));
        }
        folder
    }

    /// Writes the folder; without values the tensors are a hole in the file.
    fn write(&self, values: bool) -> &Self {
        fs::create_dir_all(&self.dir).unwrap();
        fs::write(self.dir.join("config.json"), self.config.to_string()).unwrap();
        if let Some(tokenizer) = &self.tokenizer {
            fs::write(self.dir.join("tokenizer.json"), tokenizer.to_string()).unwrap();
        }
        let mut files: Vec<_> = self.tensors.iter().map(|(_, file)| *file).collect();
        files.sort_unstable();
        files.dedup();
        for file in files {
            let tensors = self.tensors.iter().filter(|(_, f)| *f == file).map(|(tensor, _)| tensor);
            self.write_file(file, &tensors.collect::<Vec<_>>(), values);
        }
        if !self.index.is_empty() {
            let map: serde_json::Map<_, _> =
                self.index.iter().map(|(tensor, file)| (tensor.clone(), json!(file))).collect();
            let index = json!({"metadata": {"total_size": 1}, "weight_map": map});
            fs::write(self.dir.join("model.safetensors.index.json"), index.to_string()).unwrap();
        }
        self
    }

    fn write_file(&self, name: &str, tensors: &[&Tensor], values: bool) {
        let (header, data) = common::header(tensors);
        let mut file = File::create(self.dir.join(name)).unwrap();
        file.write_all(&header).unwrap();
        if values {
            tensors.iter().for_each(|tensor| file.write_all(&self.bytes(tensor)).unwrap());
        } else {
            file.set_len((header.len() + data) as u64).unwrap();
        }
    }

    /// The published bytes of a tensor.
    fn bytes(&self, tensor: &Tensor) -> Vec<u8> {
        let mut bytes = common::values(tensor);
        for (_, index, bits) in self.patches.iter().filter(|(name, ..)| *name == tensor.upstream) {
            bytes[2 * index..2 * index + 2].copy_from_slice(&bits.to_le_bytes());
        }
        bytes
    }

    fn open(&self) -> model::Result<hub::Folder> {
        hub::Folder::open(&self.dir, tiny())
    }

    /// Why the folder is refused.
    fn refusal(&self) -> String {
        self.write(false).open().unwrap_err().to_string()
    }

    fn convert(&self, schemes: (Scheme, Scheme)) -> model::Result<PathBuf> {
        let out = self.dir.join("out.gguf");
        hub::convert(&self.dir, tiny(), schemes, &out, |_, _| {}).map(|_| out)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

/// The bytes of a GGUF's matrices and norms under their upstream names, in bfloat16.
fn published_bytes(path: &Path) -> Vec<(String, Vec<u8>)> {
    let gguf = model::gguf::Gguf::open(path).unwrap();
    let tensors = layout::tensors(&tiny().spec, Scheme::Bf16, Scheme::Bf16);
    let bytes = |tensor: &Tensor| {
        let found = gguf.tensors.iter().find(|found| found.name == tensor.name).unwrap();
        let bytes = gguf.bytes(found);
        match found.ty {
            model::TensorType::Bf16 => bytes.to_vec(),
            // A norm is the published value with 16 zero bits below it.
            _ => bytes
                .as_chunks()
                .0
                .iter()
                .flat_map(|&[zero, nought, low, high]| {
                    assert_eq!([zero, nought], [0, 0]);
                    [low, high]
                })
                .collect(),
        }
    };
    tensors.iter().map(|tensor| (tensor.upstream.clone(), bytes(tensor))).collect()
}

#[test]
fn a_converted_file_holds_the_published_bits_from_one_file_or_several() {
    let single = Folder::new("single");
    let sharded = Folder::sharded("sharded");
    for (folder, files) in [(&single, 1), (&sharded, 3)] {
        let out = folder.write(true).convert(BF16).unwrap();
        let model = Model::open(&out).unwrap();
        assert_eq!(model.checkpoint(), Some(tiny()));
        let Origin::Unproven { sha256 } = &model.origin else { panic!("{:?}", model.origin) };
        assert_eq!(sha256.len(), files);
        assert!(sha256.iter().all(|line| line.len() > 66 && line.ends_with(".safetensors")));
        for ((name, found), (tensor, _)) in published_bytes(&out).into_iter().zip(&folder.tensors) {
            assert_eq!(name, tensor.upstream);
            assert!(found == folder.bytes(tensor), "{name}");
        }
    }
}

#[test]
fn quantised_conversion_equals_the_encoding_in_memory() {
    let folder = Folder::new("quantised");
    folder.write(true);
    let schemes = (Scheme::Q4_0, Scheme::Q8_0);
    let converted = Model::open(&folder.convert(schemes).unwrap()).unwrap();
    let memory = Model::synthetic(tiny(), schemes, 5).unwrap();
    assert_eq!((converted.scheme, converted.head), schemes);
    assert!(converted.weights.embedding.bytes() == memory.weights.embedding.bytes());
    assert!(converted.weights.layers[5].down.bytes() == memory.weights.layers[5].down.bytes());
    assert_eq!(converted.weights.output_norm.as_f32(), memory.weights.output_norm.as_f32());
}

#[test]
fn a_weight_that_is_not_finite_stops_the_conversion_and_leaves_no_file() {
    let mut folder = Folder::new("nan");
    folder.patches.push(("model.layers.2.mlp.up_proj.weight", 70_001, 0x7fc0));
    folder.write(true);
    for scheme in Scheme::ALL {
        let error = folder.convert((scheme, scheme.default_head())).unwrap_err().to_string();
        let reason = format!(
            "tensor `model.layers.2.mlp.up_proj.weight`: element 70001: expected a finite value in the range of {}, found NaN",
            scheme.tensor_type()
        );
        assert!(error.contains(&reason), "{error}");
    }
    folder.patches[0].2 = 0x7f80;
    let error = folder.write(true).convert(BF16).unwrap_err().to_string();
    assert!(error.ends_with("found inf"), "{error}");
    let left = fs::read_dir(&folder.dir).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(left.into_iter().all(|name| name == "config.json" || name == "model.safetensors"));
}

#[test]
fn a_tied_head_is_dropped_if_it_is_the_embedding_and_refused_otherwise() {
    let mut folder = Folder::new("tied");
    let mut head = folder.tensors[0].0.clone();
    head.upstream = "lm_head.weight".into();
    folder.tensors.push((head, "model.safetensors"));
    // All zeros, both of them.
    assert!(folder.write(false).open().is_ok());
    // The values depend on the name.
    let error = folder.write(true).open().unwrap_err().to_string();
    assert!(error.contains("tensor `lm_head.weight` of a tied checkpoint: expected the bytes of `model.embed_tokens.weight`"), "{error}");
    folder.tensors.last_mut().unwrap().0.rows -= 1;
    assert!(folder.refusal().contains("tensor `lm_head.weight` of a tied checkpoint"));
}

#[test]
fn tensors_have_to_be_those_of_the_checkpoint() {
    let refusal = |change: &dyn Fn(&mut Tensors)| {
        let mut folder = Folder::new("tensors");
        change(&mut folder.tensors);
        folder.refusal()
    };
    let name = folder_tensor(3);
    assert!(
        refusal(&|tensors| drop(tensors.remove(3)))
            .ends_with(&format!("tensor `{name}`: presence: expected one, found none"))
    );
    assert!(
        refusal(&|tensors| tensors[3].0.rows = 512)
            .ends_with(&format!("tensor `{name}`: shape: expected [1024, 256], found [512, 256]"))
    );
    assert!(refusal(&|tensors| tensors[3].0.upstream = "model.extra".into()).contains("presence"));
    let extra = refusal(&|tensors| {
        let mut extra = tensors[3].clone();
        extra.0.upstream = "model.extra".into();
        tensors.push(extra);
    });
    assert!(
        extra.ends_with("tensor `model.extra`: expected no such tensor in kipp-tiny, found one"),
        "{extra}"
    );
}

fn folder_tensor(i: usize) -> String {
    layout::tensors(&tiny().spec, Scheme::Bf16, Scheme::Bf16)[i].upstream.clone()
}

#[test]
fn an_index_has_to_agree_with_its_files() {
    let name = folder_tensor(3);
    let refusal = |change: &dyn Fn(&mut Folder)| {
        let mut folder = Folder::sharded("index");
        change(&mut folder);
        folder.refusal()
    };
    let absent = refusal(&|folder| folder.index[3].1 = "model-4.safetensors".into());
    let field = format!("model.safetensors.index.json: weight_map: file of tensor `{name}`");
    assert!(
        absent.ends_with(&format!(
            "{field}: expected model-4.safetensors to be there, found no such file"
        )),
        "{absent}"
    );

    let field = format!("weight_map: tensor `{name}`");
    let elsewhere = refusal(&|folder| folder.index[3].1 = "model-2.safetensors".into());
    assert!(
        elsewhere.contains(&format!("{field}: expected it in model-2.safetensors, found it in")),
        "{elsewhere}"
    );

    let nowhere = refusal(&|folder| drop(folder.tensors.remove(3)));
    assert!(
        nowhere.ends_with(&format!("{field}: expected it in model-1.safetensors, found none")),
        "{nowhere}"
    );

    let unlisted = refusal(&|folder| drop(folder.index.remove(3)));
    assert!(
        unlisted.contains(&format!("{field}: expected an entry for it, found it in")),
        "{unlisted}"
    );

    let twice = refusal(&|folder| {
        let mut copy = folder.tensors[3].clone();
        copy.1 = if copy.1 == "model-1.safetensors" {
            "model-2.safetensors"
        } else {
            "model-1.safetensors"
        };
        folder.tensors.push(copy);
    });
    assert!(twice.contains(&format!("tensor `{name}`: expected only in")), "{twice}");

    for path in
        ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", "a\\b", "C:x"]
    {
        let error = refusal(&|folder| folder.index[3].1 = path.into());
        let reason = format!(
            "weight_map: file of tensor `{name}`: expected the name of a file beside it, found {path:?}"
        );
        assert!(error.contains(&reason), "{error}");
    }
}

#[test]
fn a_file_that_was_cut_off_is_refused() {
    let folder = Folder::new("cut");
    let path = folder.write(false).dir.join("model.safetensors");
    let file = File::options().write(true).open(&path).unwrap();
    file.set_len(file.metadata().unwrap().len() - 4).unwrap();
    let error = folder.open().unwrap_err().to_string();
    assert!(error.starts_with(&path.display().to_string()), "{error}");
    assert!(
        error.contains("tensor `model.norm.weight`: data_offsets: expected a range within"),
        "{error}"
    );
}

/// Seconds that all threads of this process have computed, of which the system's calls are none.
#[cfg(target_os = "linux")]
fn computed() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    let ticks: f64 = fields.split(' ').nth(11).unwrap().parse().unwrap();
    ticks / 100.0
}

/// How long a checkpoint takes, the 4B unless KIPP_CHECKPOINT names another, and how much memory beside the mapped file.
#[test]
#[ignore = "prints times; needs 16 GB of disk"]
#[cfg(target_os = "linux")]
fn speed_of_converting() {
    let id = std::env::var("KIPP_CHECKPOINT").unwrap_or_else(|_| "qwen3-4b".into());
    let checkpoint = Checkpoint::find(&id).unwrap();
    let dir = std::env::temp_dir().join(format!("kipp-{}-speed", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("config.json"), common::config(&checkpoint.spec).to_string()).unwrap();
    let tensors = layout::tensors(&checkpoint.spec, Scheme::Bf16, Scheme::Bf16);
    let (header, data) = common::header(&tensors.iter().collect::<Vec<_>>());
    // The same million of weights again and again; no codec notices.
    let pattern = common::values(&Tensor { rows: 1024, cols: 1024, ..tensors[0].clone() });
    let mut file = std::io::BufWriter::new(File::create(dir.join("model.safetensors")).unwrap());
    file.write_all(&header).unwrap();
    for at in (0..data).step_by(pattern.len()) {
        file.write_all(&pattern[..pattern.len().min(data - at)]).unwrap();
    }
    file.into_inner().unwrap().sync_all().unwrap();
    for scheme in [Scheme::Q4_0, Scheme::Bf16, Scheme::Q8_0, Scheme::Q4_1] {
        let (out, start, mut most) = (dir.join("out.gguf"), std::time::Instant::now(), 0);
        let before = computed();
        let progress = |_, _| {
            let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
            let own = status.lines().find_map(|line| line.strip_prefix("RssAnon:"));
            let own = own.and_then(|own| own.trim().trim_end_matches(" kB").parse::<u64>().ok());
            most = most.max(own.unwrap_or(0));
        };
        let schemes = (scheme, scheme.default_head());
        hub::convert(&dir, checkpoint, schemes, &out, progress).unwrap();
        let (seconds, kib) = (start.elapsed().as_secs_f64(), most);
        let (name, computed) = (scheme.name(), computed() - before);
        println!(
            "{name}: {seconds:.1} s with hashing, {computed:.1} s of all threads, {kib} KiB of its own"
        );
    }
    fs::remove_dir_all(&dir).unwrap();
}

/// The file is cut off while it is converted.
#[test]
#[cfg(unix)]
fn a_file_that_shrinks_under_the_conversion_is_an_error_and_leaves_no_file() {
    let folder = Folder::new("shrinks");
    let path = folder.write(true).dir.join("model.safetensors");
    let out = folder.dir.join("out.gguf");
    let cut = |done, total| {
        if done < total {
            let file = File::options().write(true).open(&path).unwrap();
            file.set_len(file.metadata().unwrap().len().min(5_000_000)).unwrap();
        }
    };
    let error = hub::convert(&folder.dir, tiny(), BF16, &out, cut).unwrap_err().to_string();
    assert!(error.contains("size while in use: expected "), "{error}");
    assert!(!out.exists());
}

#[test]
fn configurations_are_compared_with_the_registry() {
    let with = |change: &dyn Fn(&mut Value)| {
        let mut folder = Folder::new("config");
        change(&mut folder.config);
        folder.write(false).open().err().map(|error| error.to_string())
    };
    // Both published forms.
    assert_eq!(with(&|_| ()), None);
    let newer = |config: &mut Value| {
        for key in ["rope_theta", "rope_scaling", "torch_dtype"] {
            config.as_object_mut().unwrap().remove(key);
        }
        config["dtype"] = json!("bfloat16");
        config["rope_parameters"] = json!({"rope_theta": 1000000.0, "rope_type": "default"});
    };
    assert_eq!(with(&newer), None);

    type Case<'a> = (&'a dyn Fn(&mut Value), &'a str);
    let cases: [Case; 10] = [
        (
            &|c| c["layer_types"] = json!(["full_attention", "sliding_attention"]),
            r#"`layer_types`: expected "full_attention", found "sliding_attention""#,
        ),
        (&|c| c["hidden_size"] = json!(512), "`hidden_size`: expected 256, found 512"),
        (&|c| c["model_type"] = json!("qwen2"), r#"`model_type`: expected "qwen3", found "qwen2""#),
        (&|c| c["rope_theta"] = json!(10000), "`rope_theta`: expected 1000000.0, found 10000"),
        (
            &|c| drop(c.as_object_mut().unwrap().remove("rope_theta")),
            "`rope_theta`: expected 1000000.0, found null",
        ),
        (
            &|c| c["rope_parameters"] = json!({"rope_theta": 5e6}),
            "`rope_theta`: expected 1000000.0, found 5000000.0",
        ),
        (&|c| c["rope_scaling"] = json!({"type": "yarn"}), "`rope_scaling`: expected null"),
        (
            &|c| c["torch_dtype"] = json!("float16"),
            r#"`dtype`: expected "bfloat16", found "float16""#,
        ),
        (
            &|c| c["tie_word_embeddings"] = json!(false),
            "`tie_word_embeddings`: expected true, found false",
        ),
        (&|c| c["attention_bias"] = json!(true), "`attention_bias`: expected false, found true"),
    ];
    for (change, reason) in cases {
        let error = with(change).unwrap();
        assert!(error.contains("config.json: ") && error.contains(reason), "{error}");
    }
}

#[test]
fn a_key_that_occurs_twice_is_refused() {
    let folder = Folder::new("twice");
    let path = folder.write(false).dir.join("config.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replacen('{', r#"{"hidden_size":512,"#, 1)).unwrap();
    let error = folder.open().unwrap_err().to_string();
    assert!(
        error.contains("config.json: ") && error.contains("`hidden_size` occurs twice"),
        "{error}"
    );
}

#[test]
fn a_published_tokenizer_has_to_be_the_compiled_in_one() {
    let with = |joined: bool, change: &dyn Fn(&mut Value)| {
        let mut folder = Folder::new("tokenizer");
        let mut tokenizer = common::tokenizer(tiny().vocabulary(), joined);
        change(&mut tokenizer);
        folder.tokenizer = Some(tokenizer);
        folder.write(false).open().err().map(|error| error.to_string())
    };
    assert_eq!(with(true, &|_| ()), None);
    assert_eq!(with(false, &|_| ()), None);

    type Case<'a> = (&'a dyn Fn(&mut Value), &'a str);
    let cases: [Case; 5] = [
        (
            &|t| t["model"]["vocab"]["Ġthe"] = json!(5),
            r#"id of token "Ġthe": expected 279, found 5"#,
        ),
        (
            &|t| drop(t["model"]["vocab"].as_object_mut().unwrap().remove("Ġthe")),
            "number of tokens: expected 8166, found 8165",
        ),
        (
            &|t| t["model"]["merges"][2] = json!(["n", "i"]),
            r#"merge 2: expected "i n", found "n i""#,
        ),
        (
            &|t| t["added_tokens"][2]["content"] = json!("<|end|>"),
            "added token 8168: expected <|im_end|>, found <|end|>",
        ),
        (
            &|t| t["added_tokens"][2]["special"] = json!(false),
            "added token 8168: expected <|im_end|>",
        ),
    ];
    for (change, reason) in cases {
        let error = with(false, change).unwrap();
        assert!(error.contains("tokenizer.json: ") && error.contains(reason), "{error}");
    }
}

//! Pulls from a hub that behaves, and from hubs that do not: the file is the same in the end, or there is a clear
//! error, nothing that looks complete, and a next pull that recovers.

mod answers;
#[path = "../common/mod.rs"]
mod common;
mod disk;
#[path = "../common/hub.rs"]
mod test_hub;

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hub::pull::{Pulled, Stage};
use hub::{Error, Hub};
use model::layout::{self, Tensor};
use model::{Checkpoint, Scheme, Spec, Variant};
use serde_json::{Value, json};
use test_hub::{Behaviour, Options, REVISION, Request, TestHub, listing};

static TINY: Checkpoint = Checkpoint {
    id: "test-tiny",
    repository: "test/tiny",
    revision: REVISION,
    spec: Spec {
        layers: 2,
        hidden: 64,
        ffn: 96,
        heads: 8,
        vocab: 8_192,
        context: 2_048,
        theta: 1e6,
        tied: true,
    },
    variant: Variant::Base,
};
const SCHEMES: (Scheme, Scheme) = (Scheme::Q4_0, Scheme::Q8_0);
const SHARDS: [&str; 3] = ["model-1.safetensors", "model-2.safetensors", "model-3.safetensors"];
const INDEX: &str = "model.safetensors.index.json";

type Files = HashMap<String, Vec<u8>>;

/// The published checkpoint, in three shards.
fn files() -> Files {
    let tensors = layout::tensors(&TINY.spec, Scheme::Bf16, Scheme::Bf16);
    let mut files = Files::new();
    let mut map = serde_json::Map::new();
    for (i, shard) in SHARDS.iter().enumerate() {
        let part: Vec<&Tensor> = tensors.iter().skip(i).step_by(3).collect();
        let (mut bytes, _) = common::header(&part);
        for tensor in part {
            map.insert(tensor.upstream.clone(), json!(shard));
            bytes.extend(common::values(tensor));
        }
        files.insert((*shard).to_owned(), bytes);
    }
    files.insert(INDEX.to_owned(), json!({ "weight_map": map }).to_string().into_bytes());
    files.insert("config.json".to_owned(), common::config(&TINY.spec).to_string().into_bytes());
    files.insert(
        "tokenizer.json".to_owned(),
        common::tokenizer(TINY.vocabulary(), true).to_string().into_bytes(),
    );
    files
}

/// A models' folder for one test.
struct Models(PathBuf);

impl Models {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("kipp-pull-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn out(&self) -> PathBuf {
        self.0.join("test-tiny-q4_0.gguf")
    }

    fn pull(&self, from: &TestHub) -> Result<Pulled, Error> {
        self.pull_with(&client(&from.url))
    }

    fn pull_with(&self, hub: &Hub) -> Result<Pulled, Error> {
        hub::pull(hub, &TINY, SCHEMES, &self.out(), &mut |_, _, _| {})
    }

    /// Why a pull fails, and that it left nothing which looks complete.
    fn refusal(&self, from: &TestHub) -> String {
        let error = self.pull(from).unwrap_err().to_string();
        assert!(!self.out().exists());
        error
    }

    /// Pulls from a hub that behaves, and compares.
    fn recovers(&self) {
        self.pull(&TestHub::start(files(), Options::default(), |_| Behaviour::default())).unwrap();
        self.is_right();
    }

    fn is_right(&self) {
        assert!(fs::read(self.out()).unwrap() == *reference(), "another file");
        let left: Vec<_> = fs::read_dir(self.0.join("downloads"))
            .unwrap()
            .map(|e| e.unwrap().file_name())
            .collect();
        assert_eq!(left, ["test-tiny.lock"]);
    }
}

impl Drop for Models {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A client for small files and short tempers.
fn client(url: &str) -> Hub {
    let mut hub = Hub::new(url, None);
    hub.piece = 64 << 10;
    hub.first_wait = Duration::from_millis(1);
    hub
}

/// The GGUF as it has to be, from the files themselves.
fn reference() -> &'static Vec<u8> {
    static REFERENCE: OnceLock<Vec<u8>> = OnceLock::new();
    REFERENCE.get_or_init(|| {
        let models = Models::new("reference");
        let dir = models.0.join(format!("models--test--tiny/snapshots/{REVISION}"));
        let blobs = models.0.join("models--test--tiny/blobs");
        snapshot(&dir, &blobs);
        let origin = hub::convert(&dir, &TINY, SCHEMES, &models.out(), |_, _| {}).unwrap();
        assert!(matches!(origin, model::Origin::Pinned { .. }), "{origin:?}");
        fs::read(models.out()).unwrap()
    })
}

/// The checkpoint as Hugging Face's programs keep it.
fn snapshot(dir: &Path, blobs: &Path) {
    let files = files();
    fs::create_dir_all(dir).unwrap();
    fs::create_dir_all(blobs).unwrap();
    for entry in listing(&files).as_array().unwrap() {
        let name = entry["path"].as_str().unwrap();
        let blob = blobs.join(entry["lfs"]["oid"].as_str().unwrap_or(name));
        fs::write(&blob, &files[name]).unwrap();
        std::os::unix::fs::symlink(&blob, dir.join(name)).unwrap();
    }
}

fn hub(script: impl Fn(&Request) -> Behaviour + Send + Sync + 'static) -> TestHub {
    TestHub::start(files(), Options::default(), script)
}

/// A hub that misbehaves whenever it is asked for bytes of a shard.
fn shards_with(behaviour: Behaviour) -> TestHub {
    hub(move |request| {
        let is_shard = request.file.ends_with(".safetensors");
        if is_shard { behaviour.clone() } else { Behaviour::default() }
    })
}

#[test]
fn shards_come_in_parallel_ranges_and_become_one_file() {
    let (models, hub) = (Models::new("plain"), hub(|_| Behaviour::default()));
    let mut stages = Vec::new();
    let client = client(&hub.url);
    hub::pull(&client, &TINY, SCHEMES, &models.out(), &mut |stage, done, total| {
        assert!(done <= total);
        stages.push((stage, done == total));
    })
    .unwrap();
    models.is_right();
    assert!(stages.contains(&(Stage::Fetching, true)));
    assert_eq!(stages.last(), Some(&(Stage::Converting, true)));
    let requests = hub.requests();
    let ranges = requests.iter().filter(|r| r.starts_with("/store/model-1.") && r.contains(".."));
    assert!(ranges.count() > 5, "{requests:#?}");
}

#[test]
fn a_broken_pull_goes_on_where_it_ended() {
    let models = Models::new("resume");
    let broken = hub(|request| {
        let cut = request.file.ends_with(".safetensors").then_some(0);
        let cut = if request.before < 20 { None } else { cut };
        Behaviour { cut, ..Behaviour::default() }
    });
    models.refusal(&broken);
    let kept: u64 = SHARDS
        .map(|shard| models.0.join("downloads/test-tiny").join(shard))
        .iter()
        .map(|path| fs::read_to_string(path.with_added_extension("journal")).unwrap_or_default())
        .flat_map(|text| text.lines().skip(1).map(str::to_owned).collect::<Vec<_>>())
        .filter_map(|line| {
            let (start, end) = line.split_once(' ')?;
            Some(end.parse::<u64>().ok()? - start.parse::<u64>().ok()?)
        })
        .sum();
    assert!(kept > 500_000, "{kept}");
    let hub = hub(|_| Behaviour::default());
    models.pull(&hub).unwrap();
    models.is_right();
    let again = hub.requests().iter().filter(|line| line.starts_with("/store/model-")).count();
    assert!(again < 25, "{again} requests, though most was here");
}

#[test]
fn one_pull_at_a_time() {
    let models = Models::new("lock");
    fs::create_dir_all(models.0.join("downloads")).unwrap();
    let lock = fs::File::create(models.0.join("downloads/test-tiny.lock")).unwrap();
    lock.lock().unwrap();
    let error = models.refusal(&hub(|_| Behaviour::default()));
    assert!(error.ends_with("test-tiny.lock: another kipp holds it"), "{error}");
    drop(lock);
    models.recovers();
}

/// What the test below starts and kills: a pull in a process of its own.
#[test]
#[ignore = "started by the test of killed pulls"]
fn a_pull_to_be_killed() {
    let Ok(url) = std::env::var("KIPP_TEST_HUB") else { return };
    let out = PathBuf::from(std::env::var("KIPP_TEST_OUT").unwrap());
    hub::pull(&client(&url), &TINY, SCHEMES, &out, &mut |_, _, _| {}).unwrap();
}

#[test]
fn a_pull_that_is_killed_at_any_moment_loses_nothing() {
    let slow = hub(|_| Behaviour { pause: Duration::from_millis(3), ..Behaviour::default() });
    let finished = AtomicUsize::new(0);
    let mut moment = u64::from(std::process::id());
    for round in 0..20 {
        let models = Models::new(&format!("killed-{round}"));
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_pull_to_be_killed", "--ignored"])
            .env("KIPP_TEST_HUB", &slow.url)
            .env("KIPP_TEST_OUT", models.out())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        moment = moment.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_millis((moment >> 33) % 600));
        child.kill().unwrap();
        child.wait().unwrap();
        if models.out().exists() {
            finished.fetch_add(1, Ordering::Relaxed);
            assert!(fs::read(models.out()).unwrap() == *reference(), "round {round}");
        }
        models.recovers();
    }
    println!("{} of 20 pulls ended before they were killed", finished.into_inner());
}

//! Pulls from a hub that behaves, and from hubs that do not: the file is the same in the end, or there is a clear
//! error, nothing that looks complete, and a next pull that recovers.

mod common;
#[path = "common/hub.rs"]
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

/// A name, and what the hub does to a request.
type Misbehaviour = (&'static str, fn(&Request) -> Behaviour);

/// Case DL-01.
#[test]
fn answers_to_ranges_that_are_not_what_was_asked_for() {
    let cases: [Misbehaviour; 10] = [
        ("whole files", |_| Behaviour { whole: true, ..Behaviour::default() }),
        ("whole files now and then", |r| Behaviour {
            whole: r.before % 3 == 0,
            ..Behaviour::default()
        }),
        ("whole files that break off", |r| {
            let cut = (r.before % 4 > 0).then_some(100_000);
            Behaviour { whole: true, cut, ..Behaviour::default() }
        }),
        ("ranges that begin early", |r| {
            let early = if r.range.is_some() { 144 } else { 0 };
            Behaviour { early, ..Behaviour::default() }
        }),
        ("ranges that begin late", |r| {
            let late = if r.range.is_some() && r.before % 3 == 0 { 40 } else { 0 };
            Behaviour { late, ..Behaviour::default() }
        }),
        ("connections that end", |_| Behaviour { cut: Some(30_000), ..Behaviour::default() }),
        ("another total", |r| {
            let total = (r.before % 5 == 0).then_some(7);
            Behaviour { total, ..Behaviour::default() }
        }),
        ("another entity", |r| {
            let etag = (r.before > 12).then_some("\"second\"");
            Behaviour { etag, ..Behaviour::default() }
        }),
        ("one entity whose tag is weak now and then", |r| {
            let etag = (r.before % 2 == 0).then_some("W/\"first\"");
            Behaviour { etag, ..Behaviour::default() }
        }),
        ("ranges of files whose size the server does not know", |r| {
            let unsized_range = r.range.is_some();
            Behaviour { unsized_range, ..Behaviour::default() }
        }),
    ];
    for (name, script) in cases {
        let models = Models::new("dl01");
        models.pull(&hub(script)).unwrap_or_else(|error| panic!("{name}: {error}"));
        models.is_right();
    }
}

/// Case DL-03 and what else a hub may say.
#[test]
fn refusals_are_told_and_a_next_pull_recovers() {
    let told = |status, wait| Behaviour { status: Some((status, wait)), ..Behaviour::default() };
    let cases = [
        (told(416, None), "found 416; its file is shorter than the hub's listing says"),
        (told(429, None), "found 429; the hub wants fewer requests, try again later"),
        (told(500, None), "expected status 200 or 206, found 500"),
        (told(503, Some(0)), "expected status 200 or 206, found 503"),
        (told(403, None), "found 403; HF_TOKEN has to hold a token that may read it"),
        (Behaviour { cut: Some(0), ..Behaviour::default() }, "/model-1.safetensors: "),
        (Behaviour { instead: Some(""), ..Behaviour::default() }, "Content-Length: expected "),
        (Behaviour { instead: Some("<html>log in</html>"), ..Behaviour::default() }, ", found 19"),
        (
            Behaviour { coding: Some("gzip"), ..Behaviour::default() },
            "/model-1.safetensors: Content-Encoding: expected identity, as asked for, found gzip",
        ),
        (
            Behaviour { corrupt: true, ..Behaviour::default() },
            "/model-1.safetensors: SHA-256: expected ",
        ),
    ];
    for (behaviour, reason) in cases {
        let models = Models::new("refusals");
        let error = models.refusal(&shards_with(behaviour));
        assert!(error.contains(reason), "{error}");
        models.recovers();
    }
}

#[test]
fn passing_refusals_are_waited_out() {
    let hub = hub(|request| {
        let status = match request.before % 3 {
            1 => Some((503, None)),
            2 => Some((429, Some(0))),
            _ => None,
        };
        Behaviour { status, ..Behaviour::default() }
    });
    let models = Models::new("passing");
    // One connection, so that no piece meets six refusals in a row.
    let mut client = client(&hub.url);
    client.connections = 1;
    models.pull_with(&client).unwrap();
    models.is_right();
}

#[test]
fn a_hub_that_asks_for_a_pause_gets_it() {
    let hub = hub(|request| {
        let status = (request.before == 0).then_some((429, Some(1)));
        Behaviour { status, ..Behaviour::default() }
    });
    let (models, started) = (Models::new("pause"), Instant::now());
    models.pull(&hub).unwrap();
    assert!(started.elapsed() >= Duration::from_secs(1));
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
fn hashes_may_be_unknown_and_then_it_is_said() {
    let mut entries = listing(&files());
    for entry in entries.as_array_mut().unwrap() {
        entry.as_object_mut().unwrap().remove("lfs");
    }
    let options = Options { listing: Some(entries), ..Options::default() };
    let hub = TestHub::start(files(), options, |_| Behaviour::default());
    let models = Models::new("unhashed");
    assert_eq!(models.pull(&hub).unwrap().unhashed, SHARDS);
    models.is_right();
}

#[test]
fn listings_that_are_none_are_refused() {
    let refusal = |listing: Value| {
        let options = Options { listing: Some(listing), ..Options::default() };
        Models::new("listing").refusal(&TestHub::start(files(), options, |_| Behaviour::default()))
    };
    assert!(refusal(json!("<html>")).contains("listing: expected the files of the repository"));
    assert!(refusal(json!({})).contains("listing: "));
    assert!(
        refusal(json!([]))
            .contains("file `config.json` of the repository: expected one, found none")
    );
    let with = |change: &dyn Fn(&mut Value)| {
        let mut entries = listing(&files());
        entries.as_array_mut().unwrap().iter_mut().for_each(change);
        refusal(entries)
    };
    let error = with(&|entry| {
        if entry["path"] == SHARDS[0] {
            entry["lfs"]["oid"] = json!("e3b0c442");
        }
    });
    assert!(
        error.contains("hash of `model-1.safetensors`: expected 64 hexadecimal digits"),
        "{error}"
    );
    // Names that lead elsewhere are no files of the repository.
    let error = with(&|entry| {
        if entry["path"] == "config.json" {
            entry["path"] = json!("../config.json");
        }
    });
    assert!(error.contains("file `config.json` of the repository"), "{error}");
}

#[test]
fn names_in_an_index_cannot_lead_elsewhere() {
    for name in ["../x.safetensors", "/etc/passwd", "a/b", "..", "", "a\\b", "C:x"] {
        let mut files = files();
        let index = json!({ "weight_map": { "model.norm.weight": name } }).to_string();
        files.insert(INDEX.to_owned(), index.into_bytes());
        files.insert(name.to_owned(), b"bytes".to_vec());
        let hub = TestHub::start(files, Options::default(), |_| Behaviour::default());
        let error = Models::new("tricks").refusal(&hub);
        let reason = format!("weight_map: expected names of files beside it, found {name:?}");
        assert!(error.contains(&reason), "{error}");
    }
}

#[test]
fn the_token_is_shown_and_asked_for() {
    let start = || {
        let options = Options { token: Some("secret"), ..Options::default() };
        TestHub::start(files(), options, |_| Behaviour::default())
    };
    let models = Models::new("token");
    let error = models.refusal(&start());
    assert!(error.contains("found 401; HF_TOKEN") && !error.contains("secret"), "{error}");
    let hub = start();
    let mut client = Hub::new(&hub.url, Some("secret".into()));
    client.piece = 64 << 10;
    models.pull_with(&client).unwrap();
    models.is_right();
}

/// A name and not a number, so that it is another host than the hub.
#[test]
fn the_token_is_shown_to_no_other_host() {
    let store = hub(|_| Behaviour::default());
    let elsewhere = store.url.replace("127.0.0.1", "localhost");
    let options = Options { token: Some("secret"), store: Some(elsewhere), ..Options::default() };
    let hub = TestHub::start(files(), options, |_| Behaviour::default());
    let models = Models::new("elsewhere");
    let mut client = Hub::new(&hub.url, Some("secret".into()));
    client.piece = 64 << 10;
    models.pull_with(&client).unwrap();
    models.is_right();
    assert!(hub.requests().iter().all(|line| line.ends_with(" token")));
    let (seen, files) = (store.requests(), files().len());
    assert!(seen.len() >= files && seen.iter().all(|line| !line.ends_with(" token")), "{seen:#?}");
}

/// What the environment says wrongly is wrong each time: nothing is waited for.
#[test]
fn addresses_and_tokens_that_make_no_request_are_told_at_once() {
    let models = Models::new("request");
    for (url, token) in [
        ("huggingface.co", None),
        ("/models", None),
        ("", None),
        ("http://127.0.0.1:1", Some("two\nlines".to_owned())),
    ] {
        let mut client = Hub::new(url, token);
        client.first_wait = Duration::from_secs(3600);
        let error = models.pull_with(&client).unwrap_err().to_string();
        assert!(error.contains("; HF_ENDPOINT has to be an address such as"), "{url}: {error}");
        assert!(!error.contains("two"), "{error}");
    }
}

/// Nothing but its size speaks for a file without a hash, so the size has to be right.
#[test]
fn an_answer_without_a_length_may_not_go_on() {
    let mut entries = listing(&files());
    for entry in entries.as_array_mut().unwrap() {
        entry.as_object_mut().unwrap().remove("lfs");
    }
    let hub = |surplus| {
        let options = Options { listing: Some(entries.clone()), ..Options::default() };
        TestHub::start(files(), options, move |request| Behaviour {
            whole: true,
            surplus: request.file.ends_with(".safetensors").then_some(surplus),
            ..Behaviour::default()
        })
    };
    let models = Models::new("surplus");
    let error = models.refusal(&hub(b"more"));
    assert!(
        error.contains("model-1.safetensors: bytes: expected ") && error.ends_with("found more"),
        "{error}"
    );
    models.pull(&hub(b"")).unwrap();
    models.is_right();
}

/// What an earlier pull left is believed only as far as something speaks for it.
#[test]
fn remains_that_are_wrong_are_fetched_again() {
    let plain = || hub(|_| Behaviour::default());
    let mut entries = listing(&files());
    for entry in entries.as_array_mut().unwrap() {
        entry.as_object_mut().unwrap().remove("lfs");
    }
    let unhashed = || {
        let options = Options { listing: Some(entries.clone()), ..Options::default() };
        TestHub::start(files(), options, |_| Behaviour::default())
    };
    let models = Models::new("remains");
    let work = models.0.join("downloads/test-tiny");
    let leave = |name: &str, bytes: &[u8]| {
        fs::create_dir_all(&work).unwrap();
        fs::write(work.join(name), bytes).unwrap();
    };
    // Small files of the right size and of others; a whole shard that is damaged.
    for name in ["config.json", "tokenizer.json", INDEX] {
        leave(name, &vec![b' '; files()[name].len()]);
    }
    leave(SHARDS[0], &vec![0; files()[SHARDS[0]].len()]);
    let error = models.refusal(&plain());
    assert!(error.contains("model-1.safetensors: SHA-256: expected "), "{error}");
    models.recovers();
    // A part that lost its end, whose journal says that all has come.
    let size = files()[SHARDS[1]].len();
    leave("model-2.safetensors.part", &[0; 100]);
    leave("model-2.safetensors.journal", format!("kipp 1 {size} -\n0 {size}\n").as_bytes());
    leave(SHARDS[2], b"");
    models.pull(&unhashed()).unwrap();
    models.is_right();
}

/// A file of no bytes has a hash too, and is no checkpoint for that.
#[test]
fn files_of_no_bytes_are_told_by_name() {
    for name in ["config.json", "tokenizer.json", INDEX, SHARDS[1]] {
        let mut files = files();
        files.insert(name.to_owned(), Vec::new());
        let hub = TestHub::start(files, Options::default(), |_| Behaviour::default());
        let error = Models::new("nothing").refusal(&hub);
        assert!(error.contains(&format!("downloads/test-tiny/{name}: ")), "{error}");
    }
}

#[test]
#[cfg(unix)]
fn a_models_folder_that_is_none_is_told_by_name() {
    let models = Models::new("none");
    fs::write(models.0.join("downloads"), "a file").unwrap();
    let error = models.refusal(&hub(|_| Behaviour::default()));
    assert!(error.starts_with(&models.0.join("downloads").display().to_string()), "{error}");
    fs::remove_file(models.0.join("downloads")).unwrap();
    fs::create_dir_all(models.0.join("downloads/test-tiny.lock")).unwrap();
    let error = models.refusal(&hub(|_| Behaviour::default()));
    assert!(error.contains("downloads/test-tiny.lock: Is a directory"), "{error}");
}

/// Where the cache of other programs is not right, it is as if it were not there.
#[test]
#[cfg(unix)]
fn a_cache_that_is_damaged_is_left_alone() {
    type Damage = (&'static str, fn(&Path));
    let damages: [Damage; 6] = [
        ("a link that leads nowhere", |dir| {
            fs::remove_file(fs::canonicalize(dir.join(SHARDS[0])).unwrap()).unwrap();
        }),
        ("a folder for a file", |dir| {
            fs::remove_file(dir.join(SHARDS[2])).unwrap();
            fs::create_dir(dir.join(SHARDS[2])).unwrap();
        }),
        ("a configuration of the right size", |dir| {
            let path = dir.join("config.json");
            fs::write(&path, vec![b' '; fs::read(&path).unwrap().len()]).unwrap();
        }),
        ("an index of the right size", |dir| {
            let path = dir.join(INDEX);
            fs::write(&path, vec![b'['; fs::read(&path).unwrap().len()]).unwrap();
        }),
        ("no tokenizer", |dir| fs::remove_file(dir.join("tokenizer.json")).unwrap()),
        ("a file for the folder", |dir| {
            fs::remove_dir_all(dir).unwrap();
            fs::write(dir, "nothing").unwrap();
        }),
    ];
    for (name, damage) in damages {
        let models = Models::new("damaged");
        let cache = models.0.join("hf");
        let dir = cache.join(format!("models--test--tiny/snapshots/{REVISION}"));
        snapshot(&dir, &cache.join("blobs"));
        damage(&dir);
        let hub = hub(|_| Behaviour::default());
        let mut client = client(&hub.url);
        client.cache = Some(cache);
        let pulled = models.pull_with(&client).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(pulled.cache, None, "{name}");
        models.is_right();
    }
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

#[test]
fn what_other_programs_fetched_is_used_if_its_hashes_are_right() {
    let models = Models::new("cache");
    let cache = models.0.join("hf");
    let (dir, blobs) =
        (cache.join(format!("models--test--tiny/snapshots/{REVISION}")), cache.join("blobs"));
    snapshot(&dir, &blobs);
    let pull = |hub: &TestHub| {
        let mut client = client(&hub.url);
        client.cache = Some(cache.clone());
        models.pull_with(&client).unwrap().cache
    };
    let from = hub(|_| Behaviour::default());
    assert_eq!(pull(&from), Some(dir.clone()));
    assert_eq!(from.requests().len(), 1);
    models.is_right();

    let mut damaged = fs::read(dir.join(SHARDS[1])).unwrap();
    *damaged.last_mut().unwrap() ^= 1;
    fs::write(dir.join(SHARDS[1]), damaged).unwrap();
    assert_eq!(pull(&from), None);
    models.is_right();
}

/// Case DL-05 without a small disk: a hub that lists more than any disk holds.
#[test]
fn what_cannot_fit_is_refused_at_once() {
    let mut entries = listing(&files());
    for entry in entries.as_array_mut().unwrap() {
        if entry["path"] == SHARDS[2] {
            entry["lfs"]["size"] = json!(1u64 << 60);
        }
    }
    let options = Options { listing: Some(entries), ..Options::default() };
    let hub = TestHub::start(files(), options, |_| Behaviour::default());
    let error = Models::new("space").refusal(&hub);
    assert!(error.starts_with("disk space in ") && error.contains("bytes, found "), "{error}");
    assert!(
        !hub.requests().iter().any(|line| line.starts_with("/store/model-")),
        "it began anyway"
    );
}

/// What is not weights is read whole, so a hub may not make it as large as it likes.
#[test]
fn small_files_are_small() {
    for name in ["config.json", "tokenizer.json", INDEX] {
        let mut entries = listing(&files());
        for entry in entries.as_array_mut().unwrap() {
            if entry["path"] == name {
                entry["size"] = json!(1u64 << 40);
            }
        }
        let options = Options { listing: Some(entries), ..Options::default() };
        let hub = TestHub::start(files(), options, |_| Behaviour::default());
        let error = Models::new("small").refusal(&hub);
        let reason = format!("bytes of `{name}`: expected at most 67108864, found {}", 1u64 << 40);
        assert_eq!(error, reason);
    }
}

/// Case DL-05 on a small file system, where the test may mount one.
#[test]
fn a_disk_that_is_or_becomes_full() {
    let models = Models::new("full");
    let mount = |size: &str| {
        let options = format!("size={size}");
        let tmpfs = ["-t", "tmpfs", "-o", &options, "tmpfs"];
        Command::new("mount")
            .args(tmpfs)
            .arg(&models.0)
            .output()
            .is_ok_and(|out| out.status.success())
    };
    let unmount = || {
        Command::new("umount").arg(&models.0).status().expect("umount");
    };
    if !mount("1m") {
        println!("not run: this user may not mount a file system");
        return;
    }
    let plain = hub(|_| Behaviour::default());
    let refusal = models.refusal(&plain);
    unmount();

    assert!(mount("5m"));
    let filler = models.0.join("filler");
    let filling = hub(move |request| {
        if request.file == SHARDS[0] && !filler.exists() {
            let _ = fs::write(&filler, vec![1; 8 << 20]);
        }
        Behaviour::default()
    });
    let late = models.refusal(&filling);
    let left = fs::read_dir(models.0.join("downloads/test-tiny")).unwrap();
    let left: Vec<_> = left.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    fs::remove_file(models.0.join("filler")).unwrap();
    let again = models.pull(&plain);
    let right = fs::read(models.out()).ok();
    unmount();

    assert!(refusal.starts_with("disk space in "), "{refusal}");
    assert!(late.contains("disk space in ") || late.contains("No space left"), "{late}");
    assert!(!left.iter().any(|name| name == SHARDS[0]), "{left:?}");
    again.unwrap();
    assert!(right.as_ref() == Some(reference()));
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

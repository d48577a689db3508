//! What lies on the disk: remains of earlier pulls, the cache of other programs, folders that are none, space that is none.

use super::*;

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

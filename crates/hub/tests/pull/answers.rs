//! What a hub may answer: ranges, refusals, listings, names, redirects.

use super::*;

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
        let reason = format!(
            "weight_map: file of tensor `model.norm.weight`: expected the name of a file beside it, found {name:?}"
        );
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

//! The program as a user meets it: arguments, streams and exit status.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn kipp(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kipp"));
    command.args(args).env("KIPP_MODELS", empty_folder());
    command
}

/// A models' folder with nothing in it.
fn empty_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("no-models")
}

fn run(args: &[&str], input: &[u8]) -> Output {
    let mut child = kipp(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("kipp starts");
    // A program that needs no input may be gone before it is written.
    let _ = child.stdin.take().expect("piped").write_all(input);
    child.wait_with_output().expect("kipp ends")
}

/// Where a test may write a file: no earlier run of it has left one.
fn free(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_file(&path);
    path.to_str().expect("UTF-8").to_owned()
}

fn stdout(output: &Output) -> &str {
    std::str::from_utf8(&output.stdout).expect("UTF-8")
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).expect("UTF-8")
}

#[test]
fn tells_the_reference_story() {
    let args = ["generate", "--prompt", "Once upon a time", "--max-tokens", "32", "--ids"];
    let output = run(&args, b"");
    assert!(output.status.success(), "{}", stderr(&output));
    // The greedy continuation of the float64 reference.
    assert_eq!(
        stdout(&output),
        "11 1052 572 264 2632 3743 6941 444 1541 13 2932 1030 264 2409 11 293 4830 6414 323 775 2066 311 \
         1486 448 1059 311 1047 13 3776 1899 11 444\n"
    );
}

#[test]
fn prompts_come_from_a_flag_a_file_or_stdin() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("prompt.txt");
    std::fs::write(&path, "Once upon a time").expect("written");
    let file = path.to_str().expect("UTF-8");
    let flag = run(&["generate", "--prompt", "Once upon a time", "--max-tokens", "7"], b"");
    let from_file = run(&["generate", "--prompt-file", file, "--max-tokens", "7"], b"");
    let from_stdin = run(&["generate", "--max-tokens", "7"], b"Once upon a time");
    assert_eq!(stdout(&flag), ", there was a little girl named\n");
    assert_eq!(stdout(&flag), stdout(&from_file));
    assert_eq!(stdout(&flag), stdout(&from_stdin));
}

#[test]
fn json_holds_text_ids_counts_and_times() {
    let args = ["generate", "--prompt", "Once upon a time", "--max-tokens", "7", "--json"];
    let value: Value = serde_json::from_str(stdout(&run(&args, b""))).expect("JSON");
    assert_eq!(value["text"], ", there was a little girl named");
    assert_eq!(value["ids"].as_array().expect("ids").len(), 7);
    assert_eq!(value["finish_reason"], "length");
    assert_eq!(value["prompt_tokens"], 5);
    assert_eq!(value["generated_tokens"], 7);
    assert!(value["timings"]["total_s"].as_f64().expect("seconds") > 0.0);
}

#[test]
fn stop_texts_and_stop_tokens_end_an_answer() {
    let base = ["generate", "--json", "--prompt"];
    let with = |rest: &[&str]| {
        let args: Vec<&str> = base.iter().chain(rest).copied().collect();
        serde_json::from_str::<Value>(stdout(&run(&args, b""))).expect("JSON")
    };
    let story = with(&["Once upon a time", "--stop", "le girl"]);
    assert_eq!(
        (&story["text"], &story["finish_reason"]),
        (&", there was a litt".into(), &"stop".into())
    );
    let chat = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n\
                <think>\n\n</think>\n\n";
    let answer = with(&[chat]);
    assert_eq!(answer["finish_reason"], "stop");
    assert_eq!(answer["text"], "The capital of France is Paris.");
}

#[test]
fn seeds_make_draws_repeatable() {
    let draw = |seed: &str| {
        let args = [
            "generate",
            "--prompt",
            "One day",
            "--max-tokens",
            "24",
            "--temperature",
            "1",
            "--seed",
            seed,
        ];
        stdout(&run(&args, b"")).to_string()
    };
    assert_eq!(draw("1"), draw("1"));
    assert_ne!(draw("1"), draw("2"));
}

/// Case CL-01: whoever read our output has seen enough.
#[test]
fn a_closed_pipe_ends_quietly() {
    let mut child =
        kipp(&["generate", "--prompt", "Once upon a time", "--max-tokens", "2000", "--ignore-eos"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("kipp starts");
    let mut first = [0; 1];
    child.stdout.take().expect("piped").read_exact(&mut first).expect("a byte");
    let output = child.wait_with_output().expect("kipp ends");
    assert!(output.status.success());
    assert_eq!(stderr(&output), "");
}

/// What cannot be written is named, too.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_behind_stdout_is_told() {
    let full = std::fs::File::options().write(true).open("/dev/full").expect("a device");
    let output = kipp(&["ls"]).stdout(full).stderr(Stdio::piped()).output().expect("kipp ends");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("kipp: stdout: No space left"), "{}", stderr(&output));
}

/// Case CL-02: at the end of the input the conversation ends, the last line answered with or without its end.
#[test]
fn a_conversation_ends_with_its_input() {
    let args = ["chat", "--max-tokens", "5", "--temperature", "0", "--no-think"];
    let none = run(&args, b"");
    assert!(none.status.success(), "{}", stderr(&none));
    assert_eq!(stdout(&none).trim(), "");
    let whole = run(&args, b"hi\n");
    let cut = run(&args, b"hi");
    assert!(whole.status.success() && cut.status.success());
    assert_eq!(stdout(&whole), stdout(&cut));
    assert!(!stdout(&cut).trim().is_empty());
    assert!(!stdout(&cut).contains(['\x1b', '>']), "prompts and colours are for terminals");
    // So does a message that was to have more lines.
    for cut in [&b"hi\\"[..], b"\"\"\"hi"] {
        assert_eq!(stdout(&run(&args, cut)), stdout(&whole));
    }
}

#[test]
fn a_conversation_is_saved_as_it_was_loaded() {
    let folder = std::env::temp_dir();
    let [from, to] = ["from", "to"]
        .map(|name| folder.join(format!("kipp-{}-chat-{name}.json", std::process::id())));
    let call = r#"{"type": "function", "function": {"name": "f", "arguments": "{\"n\": 1}"}}"#;
    let messages = format!(
        r#"{{"messages": [{{"role": "system", "content": "s"}}, {{"role": "user", "content": "q"}},
        {{"role": "assistant", "content": "", "reasoning_content": "t", "tool_calls": [{call}]}},
        {{"role": "tool", "content": "r"}}]}}"#
    );
    std::fs::write(&from, &messages).expect("written");
    let talk = format!("/load {}\n/set think maybe\n/save {}\n", from.display(), to.display());
    let output = run(&["chat"], talk.as_bytes());
    assert_eq!(stderr(&output).trim(), "think: expected on or off, found maybe");
    let read = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("JSON");
    assert_eq!(read(&std::fs::read_to_string(&to).expect("saved")), read(&messages));
    std::fs::remove_file(from).and(std::fs::remove_file(to)).expect("removed");
}

/// What a command lacks is said, and the conversation goes on.
#[test]
fn commands_of_a_conversation_say_what_they_lack() {
    let output = run(&["chat"], b"/save\n/load\n/set\n/set top_k many\n/show\n");
    assert!(output.status.success());
    let told: Vec<&str> = stderr(&output).lines().collect();
    assert_eq!(told[0], "/save: expected the name of a file, found none");
    assert_eq!(told[1], "/load: expected the name of a file, found none");
    assert_eq!(told[2], "/set: expected NAME VALUE, found less; /help lists them");
    assert!(told[3].starts_with("top_k: expected a whole number"), "{told:?}");
    assert!(stdout(&output).contains("messages 0, 0 of 2048 tokens"));
}

/// Case CU-01: what cannot run is refused with the reason, and nothing else runs in its place.
#[test]
fn a_backend_that_is_not_there_is_refused() {
    let output = kipp(&["generate", "--backend", "cuda", "--prompt", "x"])
        .env("CUDA_VISIBLE_DEVICES", "")
        .output()
        .expect("kipp runs");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(stdout(&output), "");
    assert!(stderr(&output).contains("backend unavailable"), "{}", stderr(&output));
}

/// What a long run would end with is refused before it begins.
#[test]
fn where_nothing_can_be_written_nothing_is_begun() {
    let refused = |args: &[&str]| {
        let output = run(args, b"");
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert_eq!(stdout(&output), "", "{args:?}");
        stderr(&output).trim().to_owned()
    };
    let there = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("there");
    let there = there.to_str().expect("UTF-8");
    std::fs::write(there, "mine").expect("written");
    let targets: [(&str, &str, &[&str]); 6] = [
        ("verify", "--json", &[]),
        ("bench", "--plot", &[]),
        ("imatrix", "--out", &["--text", "x"]),
        ("ppl", "--save-logits", &["--text", "x"]),
        ("quantize", "--out", &["kipp-tiny", "--scheme", "q4_0"]),
        ("convert", "--out", &["--synthetic", "--checkpoint", "kipp-tiny"]),
    ];
    for (verb, flag, rest) in targets {
        let message = refused(&[&[verb, flag, "no/such/folder/x"][..], rest].concat());
        let expected = "expected a file in a folder that is there, found no/such/folder/x";
        assert_eq!(message, format!("kipp: {flag}: {expected}"));
        // No file that is there is replaced.
        let message = refused(&[&[verb, flag, there][..], rest].concat());
        assert_eq!(message, format!("kipp: {flag}: expected a name that is free, found {there}"));
        assert_eq!(std::fs::read(there).expect("a file"), b"mine");
    }
    let message = refused(&["bench", "--plot", "x.svg"]);
    assert!(message.starts_with("kipp: --plot: expected figures at two depths"), "{message}");
}

/// The oracle computes it, and bf16 holds its keys and values: nothing else can be asked for.
#[test]
fn imatrix_takes_no_option_that_it_would_not_heed() {
    for option in [["--backend", "cpu"], ["--kv", "q8_0"], ["--device", "1"]] {
        let output = run(&[&["imatrix", "--text", "x", "--out", "x"], &option[..]].concat(), b"");
        assert_eq!(output.status.code(), Some(2), "{option:?}");
        assert!(stderr(&output).contains("unexpected argument"), "{option:?}: {}", stderr(&output));
    }
}

#[test]
fn wrong_usage_exits_with_2_and_failure_with_1() {
    let status = |args: &[&str]| run(args, b"").status.code();
    assert_eq!(status(&["generate", "--no-such-flag"]), Some(2));
    assert_eq!(status(&["generate", "--ctx", "many"]), Some(2));
    for flags in [
        ["--ctx", "4k"],
        ["--ctx", "0"],
        ["--top-p", "2"],
        ["--min-p", "-1"],
        ["--temperature", "nan"],
        ["--repetition-penalty", "0"],
        ["--stop", ""],
    ] {
        let output = run(&[&["generate", "--prompt", "x"], &flags[..]].concat(), b"");
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        assert!(stderr(&output).contains(flags[0]), "{}", stderr(&output));
    }
    assert_eq!(status(&["bench", "--synthetic", "gpt-5"]), Some(2));
    assert_eq!(status(&["bench", "--synthetic", "kipp-tiny", "--scheme", "q2"]), Some(2));
    assert_eq!(status(&["bench", "--synthetic", "kipp-tiny", "--layers", "7"]), Some(2));
    assert_eq!(status(&["bench", "--pp", "4k"]), Some(2));
    assert_eq!(status(&["serve", "--port", "0", "--ctx", "4k"]), Some(2));
    assert_eq!(status(&["serve", "--port", "0", "--host", "0.0.0.0"]), Some(2));
    assert_eq!(status(&["imatrix", "--chunks", "0", "--text", "x", "--out", "x"]), Some(2));
    assert_eq!(status(&["chat", "--temperature", "-1"]), Some(2));
    assert_eq!(status(&["verify", "--gate", "none-of-this-name"]), Some(2));
    // A name that no model has, unlike a model or a file that is not here.
    assert_eq!(status(&["generate", "gpt-5", "--prompt", "x"]), Some(2));
    assert_eq!(status(&["serve", "gpt-5", "--port", "0"]), Some(2));
    assert_eq!(status(&["chat", "--draft-model", "gpt-5"]), Some(2));
    assert_eq!(status(&["pull", "gpt-5"]), Some(2));
    assert_eq!(status(&["pull", "a.gguf"]), Some(2));
    assert_eq!(status(&["rm", "a.gguf"]), Some(2));
    assert_eq!(status(&["rm", "qwen3-4b"]), Some(1));
    assert_eq!(status(&["generate", "qwen3-4b", "--prompt", "x"]), Some(1));
    assert_eq!(status(&["inspect", "no/such/file.gguf"]), Some(1));
    assert_eq!(status(&["--version"]), Some(0));
}

#[test]
fn errors_name_the_field_what_was_expected_and_what_was_found() {
    let message = |args: &[&str], input: &[u8]| {
        let output = run(args, input);
        assert!(!output.status.success());
        stderr(&output).trim_end().to_string()
    };
    assert!(
        message(&["generate", "gpt-5", "--prompt", "x"], b"")
            .starts_with("kipp: model: expected a GGUF file or one of qwen3-0.6b-base, ")
    );
    assert_eq!(
        message(&["generate", "--top-p", "2", "--prompt", "x"], b""),
        "kipp: --top-p: expected more than 0, at most 1, found 2"
    );
    assert_eq!(
        message(&["generate", "--ctx", "4k", "--prompt", "x"], b""),
        "kipp: --ctx: expected 1 to 2048, the checkpoint's own, found 4096"
    );
    assert_eq!(
        message(&["generate", "--ctx", "4", "--prompt", "Once upon a time"], b""),
        "kipp: prompt: expected fewer tokens than the context of 4, found 5"
    );
    assert_eq!(
        message(&["serve", "--port", "0", "--ctx", "2k", "--kv-memory", "1M"], b""),
        "kipp: --ctx 2048: expected 50.3 MB for keys and values, found 1.0 MB, which hold 32"
    );
    assert!(
        message(&["serve", "--port", "0", "--kv-memory", "9"], b"")
            .starts_with("kipp: --kv-memory: expected at least 786 kB for 32 positions, found 9 B")
    );
    assert_eq!(
        message(&["generate"], b"abc\xff"),
        "kipp: stdin: expected UTF-8, found an invalid byte at offset 3"
    );
    assert_eq!(
        message(&["generate", "--prompt", ""], b""),
        "kipp: prompt: expected at least one token, found none"
    );
    assert_eq!(
        message(&["generate", "qwen3-0.6b:q4", "--prompt", "x"], b""),
        "kipp: scheme behind `qwen3-0.6b:`: expected one of bf16, q8_0, q4_1, q4_0, found `q4`"
    );
    assert!(
        message(&["render"], b"{").starts_with("kipp: stdin: invalid JSON: "),
        "what was read is named"
    );
    assert_eq!(
        message(&["tokenize"], b"ab\xff"),
        "kipp: stdin: expected UTF-8, found an invalid byte at offset 2"
    );
    assert_eq!(
        message(&["serve", "--port", "0", "--cors-origin", "example.org"], b""),
        "kipp: --cors-origin: expected * or an origin such as https://example.org, found `example.org`"
    );
    assert_eq!(
        message(&["bench", "--batch", "0"], b""),
        "kipp: --batch: expected 1 sequence or more, found 0"
    );
    let negative = message(&["generate", "--max-tokens", "-1", "--prompt", "x"], b"");
    assert!(negative.contains("invalid value '-1' for '--max-tokens"), "{negative}");
}

#[test]
fn errors_name_the_file() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("named");
    std::fs::create_dir_all(&folder).expect("made");
    let path = |name: &str, bytes: &[u8]| {
        let path = folder.join(name);
        std::fs::write(&path, bytes).expect("written");
        path.to_str().expect("UTF-8").to_owned()
    };
    let (empty, latin) = (path("empty", b""), path("latin", b"caf\xe9"));
    let (ids, record) = (path("ids.u32", b"\0\0\0\0\xff\xff\xff\xff"), path("record", b"{}"));
    let told = |args: &[&str], expected: &str| {
        let output = run(args, b"");
        assert!(!output.status.success());
        assert!(stderr(&output).starts_with(&format!("kipp: {expected}")), "{}", stderr(&output));
    };
    let name = folder.to_str().expect("UTF-8");
    told(
        &["inspect", name],
        &format!("model: expected a GGUF file or a registry id, found the folder `{name}`"),
    );
    told(&["ppl", "--text", &empty], &format!("{empty}: expected at least two tokens, found 0"));
    told(
        &["ppl", "--text", &latin],
        &format!("{latin}: expected UTF-8, found an invalid byte at offset 3"),
    );
    told(
        &["ppl", "--tokens", &ids],
        &format!("{ids}: token 1: expected an id below 8192, found 4294967295"),
    );
    told(
        &["bench", "--compare", &record],
        &format!("{record}: expected a record of `kipp bench --json`: "),
    );
    told(
        &["serve", "--port", "0", "--api-key-file", &empty],
        &format!("--api-key-file: expected a key, found none in {empty}"),
    );
}

#[test]
fn tokenize_and_render_speak_json_lines() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let texts = folder.join("texts.jsonl");
    std::fs::write(&texts, "{\"text\": \"Hello, world!\"}\n{\"text\": \"<|im_end|>\"}\n")
        .expect("written");
    let output = run(&["tokenize", "qwen3-4b", "--jsonl", texts.to_str().expect("UTF-8")], b"");
    assert_eq!(stdout(&output), "[9707,11,1879,0]\n[151645]\n");
    assert_eq!(stdout(&run(&["tokenize", "qwen3-4b"], b"Hello, world!")), "9707 11 1879 0\n");

    let requests = folder.join("requests.jsonl");
    std::fs::write(&requests, "{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n")
        .expect("written");
    let output = run(&["render", "--jsonl", requests.to_str().expect("UTF-8")], b"");
    let prompt = "\"<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n\"\n";
    assert_eq!(stdout(&output), prompt);

    std::fs::write(&texts, "{\"text\": \"a\"}\n{\"txet\": 1}\n").expect("written");
    let output = run(&["tokenize", "--jsonl", texts.to_str().expect("UTF-8")], b"");
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("line 2: text: expected a string, found none"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn ls_lists_the_registry() {
    let output = run(&["ls", "--json"], b"");
    let value: Value = serde_json::from_str(stdout(&output)).expect("JSON");
    let entries = value.as_array().expect("an array");
    assert_eq!(entries.len(), 14);
    let tiny = entries.iter().find(|e| e["id"] == "kipp-tiny").expect("kipp-tiny");
    assert_eq!(tiny["built_in"], true);
}

#[test]
fn perplexity_of_a_text_is_printed() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("ppl.txt");
    std::fs::write(&path, "Once upon a time, there was a little girl named Lily.")
        .expect("written");
    let output = run(&["ppl", "--text", path.to_str().expect("UTF-8"), "--json"], b"");
    let value: Value = serde_json::from_str(stdout(&output)).expect("JSON");
    let perplexity = value["perplexity"].as_f64().expect("a number");
    assert!((1.0..10.0).contains(&perplexity), "{perplexity}");
}

/// All 32 windows of the golden validation tokens, against transformers in float64.
#[test]
fn perplexity_agrees_with_the_reference() {
    let tokens = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/data/goldens/valid.u16");
    let output = run(&["ppl", "--tokens", tokens, "--json"], b"");
    let value: Value = serde_json::from_str(stdout(&output)).expect("JSON");
    assert_eq!(value["tokens"], 32_736);
    let perplexity = value["perplexity"].as_f64().expect("a number");
    let reference = 22.442_847_508_344_42;
    assert!((perplexity / reference - 1.0).abs() < 1e-4, "{perplexity}");
}

/// A model against its own saved distributions, and against those of itself with a coarser cache.
#[test]
fn divergence_from_saved_distributions_is_printed() {
    let saved = &*free("tiny.logits");
    let tokens = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/data/goldens/valid.u16");
    let base = ["ppl", "--tokens", tokens, "--window", "96", "--stride", "64", "--limit", "3"];
    let output = run(&[&base[..], &["--save-logits", saved, "--json"]].concat(), b"");
    let alone: Value = serde_json::from_str(stdout(&output)).expect("JSON");
    assert_eq!(alone["tokens"], 223);
    let compare = |more: &[&str]| -> Value {
        let output = run(&[&["ppl", "--kl", saved, "--json"], more].concat(), b"");
        serde_json::from_str(stdout(&output)).unwrap_or_else(|_| panic!("{}", stderr(&output)))
    };
    let itself = compare(&[]);
    assert_eq!(itself["tokens"], 223);
    assert!(itself["kl_largest"].as_f64().expect("a number") < 1e-6, "{itself}");
    assert_eq!(itself["same_top_token"], 1.0);
    let number = |value: &Value, field: &str| value[field].as_f64().expect("a number");
    let ratio = number(&itself, "perplexity") / number(&alone, "perplexity");
    assert!((ratio - 1.0).abs() < 1e-6, "{ratio}");
    let coarse = compare(&["--kv", "q8_0"]);
    assert!(number(&coarse, "kl_mean") > 10.0 * number(&itself, "kl_mean"), "{coarse}");

    let output = run(&["ppl", "--kl", tokens], b"");
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("magic: expected kipplogp"), "{}", stderr(&output));
    for flags in [["--window", "4k"], ["--window", "1"], ["--window", "9999"], ["--stride", "9999"]]
    {
        let output = run(&[&["ppl", "--tokens", tokens], &flags[..]].concat(), b"");
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains(flags[0]), "{}", stderr(&output));
    }
}

/// Two runs on cut-down kipp-tiny, put side by side and drawn.
#[test]
fn bench_records_compare_and_draw() {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let measure = |scheme: &str| {
        let args = [
            "bench",
            "--synthetic",
            "kipp-tiny",
            "--scheme",
            scheme,
            "--layers",
            "1",
            "--pp",
            "64",
            "--tg",
            "8",
            "--depth",
            "0,64,128",
            "--batch",
            "1,2",
            "--reps",
            "2",
            "--json",
        ];
        let output = run(&args, b"");
        let path = folder.join(format!("bench-{scheme}.json"));
        std::fs::write(&path, &output.stdout).expect("written");
        let record: Value = serde_json::from_str(stdout(&output)).expect("JSON");
        assert_eq!(record["results"].as_array().expect("results").len(), 9);
        for entry in record["results"].as_array().expect("results") {
            let number = |field: &str| entry[field].as_f64().expect("a number");
            assert!(number("floor_tokens_per_s") > 0.0, "{entry}");
            let percent = 100.0 * number("tokens_per_s") / number("floor_tokens_per_s");
            assert!((percent / number("percent_of_peak") - 1.0).abs() < 1e-9, "{entry}");
        }
        path.to_str().expect("UTF-8").to_owned()
    };
    let (a, b) = (measure("bf16"), measure("q4_0"));
    let picture = &*free("bench.svg");
    let output = run(&["bench", "--compare", &a, &b, "--plot", picture], b"");
    assert!(output.status.success(), "{}", stderr(&output));
    let table = stdout(&output);
    assert!(table.contains("| bench-bf16 ") || table.contains(" bench-bf16 |"), "{table}");
    assert!(table.contains("| tg8 x2 @ d128 "), "{table}");
    let svg = std::fs::read_to_string(picture).expect("a picture");
    for text in ["positions in the cache", ">sequences<", "tokens/s", "bench-q4_0 tg8"] {
        assert!(svg.contains(text), "{text}");
    }
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");

    std::fs::write(folder.join("other.json"), "{\"kind\": \"verify\"}").expect("written");
    let other = folder.join("other.json");
    let output = run(&["bench", "--compare", &a, other.to_str().expect("UTF-8")], b"");
    assert_eq!(output.status.code(), Some(1));
}

/// What a script must not take for a whole answer.
#[cfg(unix)]
#[test]
fn an_interrupted_answer_is_told_by_the_status() {
    let args = ["generate", "--prompt", "Once", "--max-tokens", "1900", "--ignore-eos"];
    let mut child = kipp(&args).stdout(Stdio::piped()).spawn().expect("kipp starts");
    let mut first = [0];
    child.stdout.as_mut().expect("piped").read_exact(&mut first).expect("a byte of the answer");
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(kill.expect("kill").success());
    let output = child.wait_with_output().expect("kipp ends");
    assert_eq!(output.status.code(), Some(130));
}

#[test]
fn contradictions_are_wrong_usage() {
    let args = ["generate", "--prompt", "x", "--spec", "ngram", "--draft-model", "kipp-tiny"];
    let output = run(&args, b"");
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("expected no --draft-model"));
    for bound in ["nan", "0", "-1"] {
        let output = run(&["verify", &format!("--bound={bound}")], b"");
        assert_eq!(output.status.code(), Some(2), "{bound}");
        assert!(stderr(&output).contains("--bound: expected a number above 0"));
    }
}

/// A conversation that was kept is not lost to a slip of the pen.
#[test]
fn a_saved_conversation_is_not_overwritten() {
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("kept-conversation.json");
    std::fs::write(&file, "kept").expect("written");
    let output = run(&["chat"], format!("/save {}\n", file.display()).as_bytes());
    assert!(stderr(&output).contains("/save: expected a name that is free"));
    assert_eq!(std::fs::read_to_string(&file).expect("there"), "kept");
}

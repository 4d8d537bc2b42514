//! Where models come from: the one in the program, the cache, and a server that imitates the hub.

#[allow(dead_code)] // The hub's own tests use all of it.
#[path = "../../../hub/tests/all/common/mod.rs"]
mod imitation;

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use crate::common::{delft, delft_at, fixture, status};
use imitation::{Reply, Server, repository};
use serde_json::Value;

fn stdout(output: &Output) -> String {
    assert_eq!(status(output), 0, "{}", stderr(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(output: &Output) -> Value {
    serde_json::from_str(&stdout(output)).unwrap()
}

/// The program alone in a folder, beside a file that has no business there.
#[test]
fn the_bundled_model_is_in_the_program_and_no_file_takes_its_place() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("delft");
    fs::copy(env!("CARGO_BIN_EXE_delft"), &program).unwrap();
    fs::create_dir(folder.path().join("models")).unwrap();
    for decoy in ["a.gguf", "models/a.gguf"] {
        fs::write(folder.path().join(decoy), "no model").unwrap();
    }
    let delft = |args: &[&str]| {
        let mut command = delft_at(&program);
        command.args(args).current_dir(folder.path()).env("DELFT_HOME", folder.path());
        command.stdin(Stdio::null()).output().unwrap()
    };
    let story = stdout(&delft(&["run", "-q", "-n", "12", "--seed", "1"]));
    assert!(story.split_whitespace().count() > 6, "{story}");
    let inspected = json(&delft(&["inspect", "--json"]));
    assert_eq!((&inspected["path"], &inspected["format"]), (&Value::Null, &Value::from("gguf")));
    assert!(inspected["problem"].is_null(), "{inspected}");
    assert!(stdout(&delft(&["inspect"])).starts_with("(bundled)\n"));
    let listed = json(&delft(&["list", "--json"]));
    assert_eq!((&listed[0]["id"], &listed[0]["path"]), (&Value::from("(bundled)"), &Value::Null));
    let left = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(left, 3, "no file was unpacked");
}

/// A hub that has one repository, `org/name`.
fn hub_with(files: Vec<(&'static str, Vec<u8>)>) -> Server {
    Server::start(move |request| match request.path.contains("org/name") {
        true => repository(request, &files),
        false => Reply::status(404).header("x-error-code", "RepoNotFound"),
    })
}

fn model() -> Vec<u8> {
    fs::read(fixture("qwen3/model.q8_0.gguf")).unwrap()
}

/// The program, a hub and a cache; standard input is a pipe.
fn at_hub(server: &Server, cache: &Path, args: &[&str]) -> Output {
    let mut command = delft();
    command.env("HF_ENDPOINT", &server.url).env("HF_HUB_CACHE", cache);
    command.args(args).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn a_pipe_fetches_a_model_only_when_told_to() {
    let cache = tempfile::tempdir().unwrap();
    let server = hub_with(vec![("m-Q8_0.gguf", model()), ("m-Q4_0.gguf", b"none".to_vec())]);
    let delft = |args: &[&str]| at_hub(&server, cache.path(), args);
    for args in [
        &["logits", "org/name:Q8_0", "--tokens", "1"][..],
        &["show", "org/name:Q8_0"],
        &["inspect", "-m", "org/name:Q8_0"],
        &["bench", "org/name:Q8_0"],
        &["chat", "org/name:Q8_0"],
        &["run", "org/name:Q8_0", "hello"],
        &["tokenize", "org/name:Q8_0", "hello"],
        &["why-slow", "org/name:Q8_0"],
        &["perplexity", "org/name:Q8_0", "Cargo.toml"],
    ] {
        let output = delft(args);
        let told = stderr(&output);
        assert_eq!(status(&output), 1, "{args:?}: {told}");
        let hint = "(hint: delft pull org/name:Q8_0, or --yes)";
        assert!(told.contains("expected a model in the cache") && told.contains(hint), "{told}");
    }
    assert!(server.log.lock().unwrap().is_empty(), "nothing is asked of the network");
    let args = ["logits", "org/name:Q8_0", "--tokens", "1,2", "--json", "--yes"];
    let fetched = json(&delft(&args));
    let requests = server.log.lock().unwrap().len();
    assert_eq!(json(&delft(&args[..5])), fetched, "it is here now");
    assert_eq!(server.log.lock().unwrap().len(), requests);
    let shown = json(&delft(&["show", "org/name", "--json"]));
    assert_eq!((&shown["id"], &shown["architecture"]), (&"org/name".into(), &"qwen3".into()));
    assert_eq!((&shown["quantisation"], &shown["template"]), (&"q8_0".into(), &false.into()));
    let text = stdout(&delft(&["show", "org/name"]));
    assert!(text.contains("architecture  qwen3\n") && text.contains("where"), "{text}");
}

#[test]
fn offline_nothing_is_fetched() {
    let cache = tempfile::tempdir().unwrap();
    let server = hub_with(vec![("m.gguf", model())]);
    let mut command = delft();
    command.env("HF_ENDPOINT", &server.url).env("HF_HUB_CACHE", cache.path());
    command.env("HF_HUB_OFFLINE", "1").args(["show", "org/name", "--yes"]);
    let output = command.output().unwrap();
    assert_eq!(status(&output), 1);
    assert!(stderr(&output).contains("HF_HUB_OFFLINE is set"), "{}", stderr(&output));
    assert!(server.log.lock().unwrap().is_empty());
}

/// A GGUF file that says its architecture and no more.
fn gguf_of(architecture: &str) -> Vec<u8> {
    let key = "general.architecture";
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend([0u64, 1, key.len() as u64].map(u64::to_le_bytes).concat());
    bytes.extend(key.as_bytes());
    bytes.extend(8u32.to_le_bytes());
    bytes.extend((architecture.len() as u64).to_le_bytes());
    bytes.extend(architecture.as_bytes());
    bytes.resize(700_000, 0);
    bytes
}

#[test]
fn a_model_that_cannot_run_says_so_before_its_weights_come() {
    let config = b"{\"model_type\":\"rwkv7\"}".to_vec();
    let cases = [
        (vec![("m.gguf", gguf_of("rwkv7"))], "m.gguf", "org/name: m.gguf: general.architecture"),
        (
            vec![("config.json", config), ("model.safetensors", vec![0; 700_000])],
            "model.safetensors",
            "org/name: config.json: ",
        ),
    ];
    for (files, weights, place) in cases {
        let cache = tempfile::tempdir().unwrap();
        let server = hub_with(files);
        for args in [&["pull", "org/name"][..], &["run", "--yes", "org/name", "hi"]] {
            let output = at_hub(&server, cache.path(), args);
            let told = stderr(&output);
            assert_eq!(status(&output), 1, "{told}");
            assert!(told.contains(place) && told.contains("found rwkv7"), "{told}");
            assert!(told.contains("--force fetches it all the same"), "{told}");
        }
        assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 0);
        let whole = |request: &imitation::Request| !request.headers.contains_key("range");
        assert!(!server.asked(weights).iter().any(whole), "weights were asked for");
        let path = stdout(&at_hub(&server, cache.path(), &["pull", "org/name", "--force"]));
        assert!(Path::new(path.trim()).exists());
    }
}

#[test]
fn models_are_removed_only_when_told_to() {
    let cache = tempfile::tempdir().unwrap();
    let server = hub_with(vec![("m-Q8_0.gguf", model()), ("m-Q4_K_M.gguf", model())]);
    let delft = |args: &[&str]| at_hub(&server, cache.path(), args);
    for name in ["org/name:Q8_0", "org/name:Q4_K_M"] {
        stdout(&delft(&["pull", "-q", name]));
    }
    let asked = delft(&["rm", "org/name"]);
    assert_eq!(status(&asked), 1);
    assert!(
        stderr(&asked).contains("expected --yes, or a terminal to ask at"),
        "{}",
        stderr(&asked)
    );
    let wrong = delft(&["rm", "-y", "org/name", "org/other"]);
    assert_eq!(status(&wrong), 1);
    let listed = json(&delft(&["list", "--json"]));
    let entry = listed.as_array().unwrap().iter().find(|m| m["id"] == "org/name").unwrap();
    assert_eq!(entry["files"].as_array().unwrap().len(), 2, "one wrong name leaves all as it is");
    let date = entry["fetched"].as_str().unwrap();
    assert!(date.len() == 20 && date.ends_with('Z'), "{date}");
    let removed = delft(&["rm", "-y", "org/name:Q8_0"]);
    assert!(
        stderr(&removed).starts_with("removed org/name (m-Q8_0.gguf, 0 B)"),
        "one blob, two names"
    );
    let partial = cache.path().join("models--org--name/blobs/x.incomplete");
    fs::write(partial, vec![0; 2048]).unwrap();
    let list = delft(&["list"]);
    assert!(stdout(&list).contains("(2.0 KiB more unfinished)"), "{}", stdout(&list));
    assert!(stderr(&list).contains("in the cache (2.0 KiB of it unfinished)"), "{}", stderr(&list));
    let removed = delft(&["rm", "-y", "org/name"]);
    assert!(stderr(&removed).contains("2.0 KiB of it unfinished"), "{}", stderr(&removed));
    assert!(!stdout(&delft(&["list"])).contains("org/name"));
    assert_eq!(status(&delft(&["rm", "-y", "org/name"])), 1);
}

/// At a terminal one question names the size and the place. `script` gives the program one.
#[test]
fn a_terminal_is_asked() {
    if !Command::new("script").arg("--version").output().is_ok_and(|found| found.status.success()) {
        testing::skipped("there is no script(1) of util-linux to make a terminal");
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let server = hub_with(vec![("m-Q8_0.gguf", model())]);
    let answer = |answer: &str, line: &str| {
        let mut command = delft();
        let program = command.get_program().to_str().unwrap().to_string();
        let environment: Vec<_> =
            command.get_envs().map(|(k, v)| (k.to_owned(), v.map(|v| v.to_owned()))).collect();
        command = Command::new("script");
        for (name, value) in environment {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.env("HF_ENDPOINT", &server.url).env("HF_HUB_CACHE", cache.path());
        command.args(["-qec", &format!("{program} {line}"), "/dev/null"]);
        let output = crate::common::fed(&mut command, answer);
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (code, text) = answer("n\n", "show org/name");
    assert!(text.contains("org/name is not on this machine (m-Q8_0.gguf, "), "{text}");
    let place = format!("Fetch it into {}? [Y/n]", cache.path().display());
    assert!(text.replace("\r\n", "").contains(&place), "{text}");
    assert_eq!(code, Some(1), "{text}");
    let (code, text) = answer("\n", "show org/name");
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("architecture  qwen3"), "{text}");
    let (code, text) = answer("no\n", "rm org/name");
    assert!(code == Some(0) && text.contains("org/name: kept"), "{text}");
    let (code, text) = answer("y\n", "rm org/name");
    assert!(code == Some(0) && text.contains("removed org/name"), "{text}");
}

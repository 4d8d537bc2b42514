//! The binary from outside: exit statuses, error lines, closed pipes, and commands that need no
//! model.

use crate::common::{delft, status};
use std::io::Write;
use std::process::Stdio;

#[test]
fn a_command_line_that_makes_no_sense_exits_with_2() {
    let cases: &[&[&str]] = &[
        &[],
        &["nonsense"],
        &["run", "--nonsense"],
        &["run", "--temp", "hot", "x"],
        &["run", "--temp", "-1", "x"],
        &["run", "--top-p", "1.5", "x"],
        &["run", "--threads", "0", "x"],
        &["run", "--ctx", "0", "x"],
        &["run", "-n", "-5", "x"],
        &["run", "--raw", "--chat", "x"],
        &["run", "--device", "abacus", "x"],
        &["run", "--gpu-layers", "some", "x"],
        &["run", "--cache-type", "q9", "x"],
        &["logits", "--tokens", "1,x"],
        &["logits"],
        &["pull"],
        &["bench", "--repeat", "0"],
        &["why-slow", "-p", "0"],
        &["why-slow", "-n", "0"],
        &["completions", "cmd"],
    ];
    for args in cases {
        let output = delft().args(*args).stdin(Stdio::null()).output().unwrap();
        assert_eq!(status(&output), 2, "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{args:?}");
    }
}

#[test]
fn whoever_names_no_command_is_told_of_run() {
    let cases: &[(&[&str], Option<&str>)] = &[
        (&["Once upon a time"], Some("delft run \"Once upon a time\"")),
        (&["org/name", "hello"], Some("delft run org/name")),
        (&["-m", "model.gguf", "-p", "hello"], Some("delft run -m")),
        (&["nonsense"], None),
        (&["run", "--nonsense"], None),
        (&[], None),
    ];
    for (args, hint) in cases {
        let output = delft().args(*args).stdin(Stdio::null()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(status(&output), 2, "{args:?}");
        let told = stderr.contains("name the command");
        assert_eq!(told, hint.is_some(), "{args:?}: {stderr}");
        assert!(hint.is_none_or(|hint| stderr.contains(hint)), "{args:?}: {stderr}");
    }
}

/// Flags and commands of other programs are answered with their names here, and no advice would
/// make a flag a prompt.
#[test]
fn flags_and_commands_of_other_programs_are_answered() {
    let cases: &[(&[&str], &str)] = &[
        (&["run", "-i", "hi"], "delft chat talks with a model"),
        (&["run", "--color", "hi"], "NO_COLOR"),
        (&["run", "--chat-template", "chatml", "hi"], "--template takes a file"),
        (&["run", "-fa", "hi"], "leave it out"),
        (&["run", "-fa", "on", "hi"], "leave it out"),
        (&["run", "-ctk", "q8_0", "hi"], "--cache-type is for both"),
        (&["chat", "-r", "User:"], "--stop ends before a text"),
        (&["run", "--no-mmap=1", "hi"], "leave it out"),
        (&["run", "--nonsense", "hi"], "unexpected argument"),
        (&["run", "--format", "json", "hi"], "--json prints an object"),
        (&["run", "--hidethinking", "hi"], "--think hide"),
        (&["run", "--json-schema", "{}", "hi"], "--schema takes a file"),
        (&["run", "--mmproj", "a.gguf", "hi"], "no pictures"),
        (&["version"], "delft --version"),
        (&["create", "mine", "-f", "Modelfile"], "delft quantize"),
        (&["cp", "a", "b"], "DELFT_MODELS"),
        (&["push", "a"], "sends nothing"),
        (&["login"], "HF_TOKEN"),
    ];
    for (args, expected) in cases {
        let output = delft().args(*args).stdin(Stdio::null()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(status(&output), 2, "{args:?}: {stderr}");
        assert!(stderr.contains(expected) && !stderr.contains("tip:"), "{args:?}: {stderr}");
    }
    for (alias, name) in
        [("models", "list"), ("download", "pull"), ("remove", "rm"), ("delete", "rm")]
    {
        let output = delft().args([alias, "--help"]).output().unwrap();
        let help = String::from_utf8(output.stdout).unwrap();
        assert!(help.contains(&format!("Usage: delft {name}")), "{alias}: {help}");
    }
}

/// A file's name need not be UTF-8, which arguments are; the name is told, and a way around it.
#[cfg(unix)]
#[test]
fn an_argument_that_is_no_text_is_named() {
    use std::os::unix::ffi::OsStrExt;
    let odd = std::ffi::OsStr::from_bytes(b"caf\xe9.gguf");
    let output = delft().args(["run", "-m"]).arg(odd).stdin(Stdio::null()).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(status(&output), 2, "{stderr}");
    assert!(stderr.contains("caf\u{fffd}.gguf: expected UTF-8 (hint: name a link"), "{stderr}");
}

#[test]
fn errors_are_one_line_that_tells_where_to_look() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    std::fs::write(at("empty.gguf"), "").unwrap();
    std::fs::write(at("text.gguf"), "this is not a model\n").unwrap();
    std::fs::write(at("cut.gguf"), b"GGUF\x03\0\0\0\xff\xff\xff\xff\xff\xff\xff\x7f").unwrap();
    std::fs::create_dir(at("folder")).unwrap();
    std::fs::write(at("latin1.txt"), b"caf\xe9").unwrap();
    std::fs::write(at("table.jsonl"), b"PAR1").unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["run", "-m", "MISSING.gguf", "x"], "nothing there"),
        (&["run", "-m", "org/name", "x"], "(hint: delft pull org/name, or --yes)"),
        (
            &["run", "-m", "org/name:Q4_K_M@v1", "x"],
            "(hint: delft pull org/name:Q4_K_M@v1, or --yes)",
        ),
        (&["run", "-m", &at("empty.gguf"), "x"], "empty.gguf"),
        (&["run", "-m", &at("text.gguf"), "x"], "text.gguf"),
        (&["inspect", &at("cut.gguf")], "cut.gguf"),
        (&["bench", "-m", &at("folder")], "expected safetensors or GGUF weights"),
        (&["bench", "-p", "0", "-n", "0"], "at least one of them above 0"),
        (&["perplexity", &at("none.txt")], "none.txt"),
        (&["tokenize", "--file", &at("latin1.txt")], "line 1: expected UTF-8, found other bytes"),
        (&["eval", "--data", &at("table.jsonl")], "found a Parquet file (hint: save it as JSON"),
        (&["replay", &at("latin1.txt")], "latin1.txt:1: expected a JSON object"),
        (&["pull", "../evil"], "org/name"),
        (&["pull", "org/name"], "connection refused (hint: is the network up?)"),
    ];
    for (args, expected) in cases {
        let output = delft().args(*args).stdin(Stdio::null()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(status(&output), 1, "{args:?}: {stderr}");
        assert!(stderr.starts_with("delft: ") && stderr.contains(expected), "{args:?}: {stderr}");
        assert_eq!(stderr.matches('\n').count(), 1, "{args:?}: {stderr}");
        assert!(
            output.stdout.is_empty() && !stderr.contains("panic") && !stderr.contains('\u{1b}'),
            "{args:?}: {stderr}"
        );
    }
}

#[test]
fn no_prompt_is_a_usage_error() {
    let output = delft().args(["run", "-m", "org/name"]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(status(&output), 2);
    assert!(String::from_utf8_lossy(&output.stderr).contains("expected PROMPT"));
}

#[test]
fn help_and_version_need_no_model() {
    for args in [
        vec!["--help"],
        vec!["--version"],
        vec!["help", "run"],
        vec!["run", "--help"],
        vec!["chat", "-h"],
    ] {
        let output = delft().args(&args).output().unwrap();
        assert_eq!(status(&output), 0, "{args:?}");
        assert!(!output.stdout.is_empty() && output.stderr.is_empty(), "{args:?}");
    }
    let version = delft().arg("--version").output().unwrap().stdout;
    assert_eq!(
        String::from_utf8(version).unwrap().trim(),
        concat!("delft ", env!("CARGO_PKG_VERSION"))
    );
}

#[test]
fn completions_name_every_command() {
    for shell in ["bash", "zsh", "fish"] {
        let output = delft().args(["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        let known =
            ["run", "chat", "pull", "list", "inspect", "tokenize", "logits", "bench", "perplexity"];
        for command in known.into_iter().chain(["convert", "quantize", "compare", "verify"]) {
            assert!(script.contains(command), "{shell}: {command}");
        }
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    for args in [&["completions", "bash"][..], &["--help"], &["list", "--json"]] {
        let mut child =
            delft().args(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // The pipe's only reader is gone before the first byte is written, or soon after.
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!(status(&output), 0, "{args:?}");
        assert!(output.stderr.is_empty(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// A device that is always full, where the system has one.
#[test]
fn a_full_disk_is_an_error() {
    let Ok(full) = std::fs::OpenOptions::new().write(true).open("/dev/full") else { return };
    let output = delft().args(["completions", "fish"]).stdout(full).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(status(&output), 1);
    assert!(
        stderr.starts_with("delft: standard output: ") && stderr.lines().count() == 1,
        "{stderr}"
    );
}

#[test]
fn an_empty_cache_lists_as_an_empty_array() {
    let output = delft().args(["list", "--json"]).output().unwrap();
    let list: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let ids: Vec<_> = list.as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert!(ids.iter().all(|id| *id == "(bundled)"), "{ids:?}");
}

#[test]
fn a_cached_model_is_listed_by_name() {
    let cache = tempfile::tempdir().unwrap();
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let root = cache.path().join("models--org--name");
    std::fs::create_dir_all(root.join("snapshots").join(commit)).unwrap();
    std::fs::create_dir_all(root.join("refs")).unwrap();
    std::fs::write(root.join("refs/main"), commit).unwrap();
    let mut file =
        std::fs::File::create(root.join("snapshots").join(commit).join("m-Q8_0.gguf")).unwrap();
    file.write_all(&[0; 2048]).unwrap();
    let output = delft().arg("list").env("HF_HUB_CACHE", cache.path()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find(|line| line.starts_with("org/name")).unwrap();
    let cells: Vec<_> = line.split_whitespace().collect();
    // The day on which it was fetched comes last.
    assert_eq!(cells[..7], ["org/name", "01234567", "main", "gguf", "1", "2.0", "KiB"]);
    assert_eq!(cells.len(), 8);
}

#[test]
fn the_doctor_tells_what_is_used_and_keeps_tokens_to_itself() {
    let output = delft()
        .args(["doctor", "--json"])
        .env("HF_TOKEN", "hf_secret")
        .env("DELFT_ISA", "scalar")
        .output()
        .unwrap();
    assert_eq!(status(&output), 0);
    let found: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(found["processor"]["used"], "scalar");
    assert_eq!(found["settings"]["DELFT_ISA"], "scalar");
    assert_eq!(found["settings"]["HF_TOKEN"], "(set)");
    assert!(found["gpus"].as_array().is_some_and(|kinds| !kinds.is_empty()));

    let output = delft().args(["doctor"]).env("DELFT_ISA", "none").output().unwrap();
    assert_eq!(status(&output), 0, "what cannot be used is told, not an error");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("cannot be used") && text.contains("DELFT_ISA=none"), "{text}");
    // Hints name flags, as everywhere.
    assert!(!text.contains("hint: device"), "{text}");
}

#[test]
fn manual_pages_are_written_for_every_command() {
    let folder = tempfile::tempdir().unwrap();
    let output = delft().arg("man").arg(folder.path()).output().unwrap();
    assert_eq!(status(&output), 0);
    let page = std::fs::read_to_string(folder.path().join("delft-run.1")).unwrap();
    assert!(page.contains(".TH delft-run 1"), "{page}");
}

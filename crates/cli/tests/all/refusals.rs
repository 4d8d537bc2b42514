//! What the binary says of numbers that are none and of memory that is not there.

use crate::common::{delft, fixture, status};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Output, Stdio};

/// A copy of a model with NaN in the first element of a tensor.
fn with_nan(model: &str, tensor: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("model.gguf");
    let file = formats::Gguf::open(model.as_ref()).unwrap();
    let start = file.header().tensors.iter().find(|t| t.name == tensor).unwrap().start as usize;
    let mut bytes = std::fs::read(model).unwrap();
    bytes[start..start + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&copy, bytes).unwrap();
    let path = copy.to_str().unwrap().to_owned();
    (folder, path)
}

/// The model that comes with the program.
fn bundled() -> String {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut models = files.filter(|path| path.extension().is_some_and(|e| e == "gguf"));
    models.next().unwrap().to_str().unwrap().to_owned()
}

fn run(args: &[&str]) -> Output {
    delft().args(args).args(["--device", "cpu"]).stdin(Stdio::null()).output().unwrap()
}

/// The one line of standard error.
fn refusal(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(status(output), 1, "{text}");
    assert_eq!(text.matches('\n').count(), 1, "{text}");
    text
}

#[test]
fn weights_that_are_not_finite_are_refused_unless_allowed() {
    let (_folder, model) = with_nan(&bundled(), "output_norm.weight");
    let text = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(text.path(), "Once upon a time there was a fox. ".repeat(40)).unwrap();
    let text = text.path().to_str().unwrap();
    let commands: [&[&str]; 3] = [
        &["run", "-m", &model, "Once upon a time", "-n", "4"],
        &["perplexity", "-m", &model, text, "--ctx", "64"],
        &["logits", "-m", &model, "--tokens", "5,6"],
    ];
    for args in commands {
        let line = refusal(&run(args));
        let named = line.contains(&model) && line.contains("output_norm.weight");
        assert!(
            named && line.contains("NaN in element 0") && line.contains("--allow-nan"),
            "{line}"
        );
        let output = run(&[args, &["--allow-nan"]].concat());
        let line = refusal(&output);
        assert!(line.contains("logits at position") && line.contains("NaN"), "{line}");
        assert_eq!(output.stdout.is_empty(), args[0] != "logits", "{args:?}");
    }
    let out = tempfile::tempdir().unwrap();
    let out = out.path().join("out.gguf");
    let line = refusal(
        &delft().args(["quantize", &model, "q4_0", "-o", out.to_str().unwrap()]).output().unwrap(),
    );
    assert!(line.contains(&format!("{model}: output_norm.weight: element 0")), "{line}");
    let json =
        ["logits", "-m", &model, "--tokens", "5,6", "--json", "--generate", "3", "--allow-nan"];
    let output = run(&json);
    assert!(refusal(&output).contains("logits at position 1"));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(found["logits"][0].as_array().unwrap().iter().all(Value::is_null));
}

#[test]
fn a_context_that_does_not_fit_is_refused_at_once_with_one_that_would() {
    let model = bundled();
    let args = ["--ctx", "16777216", "--cache-type", "f32"];
    let inspect: Vec<&str> = [&["inspect", "-m", &model, "--json"][..], &args].concat();
    let found = run(&inspect);
    let found: Value = serde_json::from_slice(&found.stdout).unwrap();
    let memory = &found["memory"];
    assert_eq!(memory["ctx"], 16_777_216);
    assert_eq!(found["device_memory"]["device"], "cpu");
    let part = |name: &str| memory[name].as_u64().unwrap();
    let parts = ["weights_bytes", "cache_bytes", "activation_bytes", "working_bytes"];
    assert_eq!(part("total_bytes"), parts.map(part).iter().sum::<u64>());
    if memory["fits"] == true {
        return testing::skipped("this machine has memory for it, or does not tell");
    }
    let output = run(&[&["run", "-m", &model, "Once", "-n", "1"][..], &args].concat());
    let line = refusal(&output);
    assert!(line.contains("cpu: expected ") && line.contains("(hint: --ctx "), "{line}");
    assert!(line.contains("GiB of its memory (weights "), "{line}");
}

#[test]
fn the_device_is_named_or_chosen() {
    let model = fixture("llama3");
    let logits = |device: &[&str], variable: Option<&str>| {
        let mut command = delft();
        command.args(["logits", "-m", &model, "--tokens", "1,2", "--json"]).args(device);
        match variable {
            Some(value) => command.env("DELFT_DEVICE", value),
            None => command.env_remove("DELFT_DEVICE"),
        };
        command.stdin(Stdio::null()).output().unwrap()
    };
    let cpu = logits(&["--device", "cpu"], None);
    assert_eq!(status(&cpu), 0);
    // Chosen by the variable, and by no other.
    assert_eq!(logits(&[], Some("cpu")).stdout, cpu.stdout);
    assert_eq!(logits(&["--device", "cpu"], Some("abacus")).stdout, cpu.stdout);
    for device in [&[][..], &["--device", "auto"]] {
        let line = refusal(&logits(device, Some("abacus")));
        assert!(line.contains("DELFT_DEVICE: expected auto, cpu"), "{line}");
    }
    let simulated = logits(&[], Some("sim"));
    assert_eq!(status(&simulated), 0);
    assert_ne!(simulated.stdout, cpu.stdout, "a GPU rounds otherwise");
    // Nobody watches, so nothing is said.
    assert!(simulated.stderr.is_empty() && logits(&["--device", "auto"], None).stderr.is_empty());
}

//! The architecture's invariants, read off `cargo metadata` and the sources.

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every crate and the workspace crates it may import: always layers below its own.
const LAYERS: &[(&str, &[&str])] = &[
    ("delft-formats", &[]),
    ("delft-testing", &[]),
    ("delft-tile-macros", &[]),
    ("delft-tile", &["delft-tile-macros"]),
    ("delft-ops", &["delft-formats", "delft-tile"]),
    ("delft-program", &["delft-formats", "delft-ops"]),
    ("delft-nn", &["delft-formats", "delft-ops", "delft-program"]),
    ("delft-cpu-kernels", &["delft-formats"]),
    (
        "delft-device",
        &["delft-cpu-kernels", "delft-formats", "delft-ops", "delft-program", "delft-tile"],
    ),
    ("delft-models", &["delft-formats", "delft-ops", "delft-program", "delft-nn"]),
    ("delft-adapters", &["delft-formats", "delft-ops", "delft-program", "delft-models"]),
    ("delft-tokens", &["delft-formats"]),
    ("delft-hub", &["delft-formats"]),
    (
        "delft-engine",
        &[
            "delft-formats",
            "delft-ops",
            "delft-program",
            "delft-nn",
            "delft-device",
            "delft-models",
            "delft-adapters",
            "delft-tokens",
        ],
    ),
    ("delft-structured", &["delft-formats", "delft-engine", "delft-tokens"]),
    (
        "delft-train",
        &[
            "delft-formats",
            "delft-ops",
            "delft-program",
            "delft-nn",
            "delft-cpu-kernels",
            "delft-device",
            "delft-models",
            "delft-adapters",
            "delft-tokens",
            "delft-engine",
        ],
    ),
    (
        "delft",
        &[
            "delft-formats",
            "delft-engine",
            "delft-hub",
            "delft-structured",
            "delft-tokens",
            "delft-train",
        ],
    ),
    ("delft-serve", &["delft"]),
    ("delft-cli", &["delft", "delft-serve"]),
    ("delft-tile-cli", &["delft-device", "delft-formats", "delft-ops", "delft-tile"]),
];

#[test]
fn imports_point_down_only() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success());
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in metadata["packages"].as_array().unwrap() {
        // Tests may look further down than the code they test.
        let normal =
            package["dependencies"].as_array().unwrap().iter().filter(|d| d["kind"] != "dev");
        let inner = normal
            .filter_map(|d| d["name"].as_str())
            .filter(|n| n.starts_with("delft"))
            .map(str::to_owned);
        found.insert(package["name"].as_str().unwrap().to_owned(), inner.collect());
        let features = package["features"].as_object().unwrap();
        let device_only = features.keys().any(|f| f == "cuda" || f == "metal");
        assert!(
            !device_only || package["name"] == "delft-device",
            "{}: a device's feature",
            package["name"]
        );
    }
    let known: Vec<&str> = LAYERS.iter().map(|l| l.0).collect();
    for (name, dependencies) in &found {
        let Some((_, allowed)) = LAYERS.iter().find(|l| l.0 == name) else {
            panic!("{name}: not in the table of layers {known:?}");
        };
        for dependency in dependencies {
            assert!(allowed.contains(&dependency.as_str()), "{name} imports {dependency}");
        }
    }
    assert_eq!(found.len(), LAYERS.len());
}

fn sources(folder: &str) -> Vec<(PathBuf, String)> {
    let mut todo = vec![root().join(folder)];
    let mut files = Vec::new();
    while let Some(path) = todo.pop() {
        if path.is_dir() {
            todo.extend(std::fs::read_dir(&path).unwrap().map(|e| e.unwrap().path()));
        } else if path.extension().is_some_and(|e| e == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            files.push((path, text));
        }
    }
    assert!(!files.is_empty(), "{folder}");
    files
}

/// Code without comments, up to the file's tests.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]").next().unwrap_or_default();
    text.lines()
        .map(|line| line.split("//").next().unwrap_or_default())
        .collect::<Vec<_>>()
        .join("\n")
}

/// A text whose string literals are empty.
fn without_strings(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('"') {
        let (before, after) = (&rest[..at], &rest[at + 1..]);
        kept.push_str(before);
        if before.ends_with('\'') {
            // A character: '"'.
            rest = after;
            continue;
        }
        let hashes = before.len() - before.trim_end_matches('#').len();
        let raw = before[..before.len() - hashes].ends_with('r');
        let end = if raw {
            let close = format!("\"{}", "#".repeat(hashes));
            after.find(&close).map(|i| i + close.len())
        } else {
            let mut escaped = false;
            let close = after.find(|c| {
                let closes = c == '"' && !escaped;
                escaped = c == '\\' && !escaped;
                closes
            });
            close.map(|i| i + 1)
        };
        kept.push_str("\"\"");
        rest = &after[end.unwrap_or(after.len())..];
    }
    kept + rest
}

#[test]
fn strings_are_emptied() {
    let text = "f(\"a \\\" b\", '\"', r#\"c \" d\"#); extern \"C\" fn g()";
    assert_eq!(without_strings(text), "f(\"\", '', r#\"\"); extern \"\" fn g()");
}

/// Whole identifiers of a text.
fn words(code: &str) -> impl Iterator<Item = &str> {
    code.split(|c: char| !c.is_alphanumeric() && c != '_')
}

#[test]
fn architectures_name_no_device_type_or_adapter() {
    let banned = [
        "DType", "dtype", "f16", "bf16", "q4_0", "q8_0", "Q8_0", "cpu", "cuda", "metal", "device",
        "cfg", "lora", "adapter",
    ];
    for (path, text) in sources("crates/models/src") {
        // What architectures share may be longer than one of them.
        let lines = if text.contains(" ARCHITECTURE: ") { text.lines().count() } else { 0 };
        assert!(lines < 250, "{}: {lines} lines", path.display());
        let tests = path.file_name().is_some_and(|name| name == "tests.rs");
        let found = words(&code(&text)).find(|w| banned.contains(w)).map(str::to_owned);
        if let Some(word) = found.filter(|_| !tests) {
            panic!("{} names `{word}`", path.display());
        }
    }
}

/// Crates that know architectures only by what `models` says of them.
const SHARED: &[&str] = &[
    "formats",
    "tile",
    "tile-cli",
    "ops",
    "program",
    "nn",
    "cpu-kernels",
    "device",
    "adapters",
    "engine",
    "structured",
    "train",
];

/// An architecture's properties are its own file's: no code elsewhere asks for its name.
#[test]
fn shared_code_names_no_architecture() {
    let field = |text: &str, name: &str| {
        let rest = text.split_once(" ARCHITECTURE: ")?.1.split_once(&format!("{name}: \""))?.1;
        Some(rest.split_once('"')?.0.to_owned())
    };
    let mut names: Vec<String> = Vec::new();
    for (_, text) in sources("crates/models/src") {
        names.extend(["name", "gguf"].iter().filter_map(|name| field(&text, name)));
    }
    assert!(names.len() > 20 && names.iter().any(|name| name == "llama"), "{names:?}");
    for folder in SHARED {
        for (path, text) in sources(&format!("crates/{folder}/src")) {
            // Cases of tests are of models' sizes; Mistral's own configuration is said in the terms
            // of config.json, which names an architecture.
            let of_tests = path.iter().any(|part| part == "tests" || part == "tests.rs");
            if of_tests || path.ends_with("formats/src/mistral.rs") {
                continue;
            }
            let code = code(&text);
            let quoted = |name: &&String| code.contains(&format!("\"{name}\""));
            if let Some(name) = names.iter().filter(|name| !name.is_empty()).find(quoted) {
                panic!("{} names the architecture {name}", path.display());
            }
        }
    }
}

#[test]
fn formats_and_operations_know_no_device() {
    for folder in ["crates/formats/src", "crates/ops/src", "crates/program/src"] {
        for (path, text) in sources(folder) {
            if let Some(word) =
                words(&code(&text)).find(|w| ["cuda", "metal", "Device", "Executor"].contains(w))
            {
                panic!("{} names `{word}`", path.display());
            }
        }
    }
}

/// The one file elsewhere that has some: it keeps a process alive whose mapped file shrinks.
const FAULTS: &str = "crates/formats/src/fault.rs";

#[test]
fn foreign_functions_stay_in_the_device_layer() {
    let device = ["delft-device", "delft-cpu-kernels"];
    for (name, _) in LAYERS.iter().filter(|l| !device.contains(&l.0)) {
        let folder = format!("crates/{}/src", name.strip_prefix("delft-").unwrap_or(name));
        for (path, text) in sources(&folder).into_iter().filter(|(path, _)| !path.ends_with(FAULTS))
        {
            let code = code(&without_strings(&text));
            let foreign =
                code.contains("extern \"\"") || words(&code).any(|w| w == "libc" || w == "asm");
            assert!(!foreign, "{}: foreign functions", path.display());
        }
    }
}

#[test]
fn every_block_is_one_file() {
    let files: Vec<String> = sources("crates/formats/src/quant")
        .into_iter()
        .filter(|(_, text)| text.contains("impl BlockFormat for"))
        .map(|(path, text)| {
            assert_eq!(text.matches("impl BlockFormat for").count(), 1, "{}", path.display());
            path.file_stem().unwrap().to_string_lossy().into_owned()
        })
        .collect();
    let blocks = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"];
    for block in blocks.into_iter().chain(["iq4_nl", "iq4_xs", "mxfp4", "tq1_0", "tq2_0"]) {
        assert!(files.iter().any(|f| f == block), "{block}");
    }
}

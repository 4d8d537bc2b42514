//! What a model computed at its last good load, and what it computes now.

use std::fs;

use crate::common::{load, root};
use delft_engine::LoadOptions;

#[test]
fn a_load_that_computes_something_else_is_told_of() {
    let folder = tempfile::tempdir().unwrap();
    let engine = load(&root().join("llama3"), &LoadOptions::default());
    let canary = |build: &str| engine.canary(folder.path(), build).unwrap();
    assert_eq!(canary("1"), None);
    assert_eq!(canary("1"), None);
    // Another build with the same numbers is a good one.
    assert_eq!(canary("2"), None);

    let file = fs::read_dir(folder.path().join("loads")).unwrap().next().unwrap().unwrap().path();
    let kept: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    assert_eq!(kept["build"], "2");
    let mut other = kept.clone();
    let logit = other["logits"][3].as_f64().unwrap();
    other["logits"][3] = (logit + 1.0).into();
    fs::write(&file, other.to_string()).unwrap();
    for (build, told) in [("2", "neither its file nor the driver nor"), ("3", "(2, now 3)")] {
        let line = canary(build).unwrap();
        assert!(line.contains(told) && line.contains(&file.display().to_string()), "{line}");
    }
    // Another file is another model: it is told of once.
    other["fingerprint"] = "another".into();
    fs::write(&file, other.to_string()).unwrap();
    assert!(canary("2").unwrap().ends_with("the model's file has changed"));
    assert_eq!(canary("2"), None);
    // What is no such file is none, and a place that cannot be written to keeps nothing.
    fs::write(&file, "{").unwrap();
    assert_eq!(canary("2"), None);
    let nowhere = file.join("below a file");
    assert_eq!(engine.canary(&nowhere, "2").unwrap(), None);
}

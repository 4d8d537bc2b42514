//! Model files with one thing wrong each: refused in the file's own words, or run with a warning
//! that says what was assumed.
//!
//! The rule: what would give another model than its makers', or one that never stops, is refused;
//! what others run and does no harm is warned of. `tests/reference/damaged.py` writes the same
//! kinds of files for programs other than this one.

pub(crate) mod folder;
pub(crate) mod gguf;

use delft::{Engine, LoadOptions, LogitRows};
use std::path::Path;
use std::process::Stdio;

/// What must become of a file.
#[derive(Clone, Copy)]
pub(crate) enum Fate {
    /// One line, with all of these words beside the file's name.
    Refused(&'static [&'static str]),
    /// It runs, and one of its warnings has these words.
    Warned(&'static str),
    /// It runs without a word.
    Runs,
}

/// A model with one thing wrong.
pub(crate) struct Case<M> {
    pub(crate) name: &'static str,
    pub(crate) damage: fn(&mut M),
    pub(crate) fate: Fate,
}

/// Loads and uses the model at `path`; its warnings, or the error.
fn attempt(path: &Path) -> Result<Vec<String>, String> {
    let options = LoadOptions {
        threads: Some(1),
        context: Some(16),
        chunk: Some(16),
        sessions: 1,
        ..LoadOptions::default()
    };
    let run = || {
        let engine = Engine::load(path, &options)?;
        if let Some(tokenizer) = engine.tokenizer() {
            let special = delft::tokens::Special { add: true, parse: true };
            tokenizer.encode("abc <s> \u{e9}", special)?;
        }
        engine.session().logits(&[3, 4, 5], LogitRows::Last(1))?;
        Ok::<_, delft::Error>(engine.warnings().to_vec())
    };
    run().map_err(|error| error.to_string())
}

/// Whether what became of a file is what should: the complaint, if not.
pub(crate) fn judge(path: &Path, fate: Fate) -> Option<String> {
    let file = path.file_name().unwrap().to_string_lossy();
    match (fate, attempt(path)) {
        (Fate::Refused(words), Err(error)) => {
            let lacking: Vec<&str> = words
                .iter()
                .copied()
                .chain([&*file])
                .filter(|word| !error.contains(word))
                .collect();
            // Neither what Rust prints for programmers, nor where this program was built.
            let debug = ["Some(", "None", " { ", "/registry/", "/rustc/", "panicked", "internal"];
            let debug = debug.iter().find(|part| error.contains(**part));
            match (lacking.is_empty(), debug) {
                (true, None) if error.len() < 500 && !error.contains('\n') => None,
                (false, _) => Some(format!("{lacking:?} not in: {error}")),
                _ => Some(format!("not fit for people: {error}")),
            }
        }
        (Fate::Warned(words), Ok(warnings)) => {
            let long = warnings.iter().find(|warning| warning.chars().count() > 160);
            let said = warnings.iter().any(|warning| warning.contains(words));
            (!said || long.is_some()).then(|| format!("warnings {warnings:?} instead of {words:?}"))
        }
        (Fate::Runs, Ok(warnings)) if warnings.is_empty() => None,
        (Fate::Runs, found) => Some(format!("expected to run, but: {found:?}")),
        (_, found) => Some(format!("{found:?}")),
    }
}

#[test]
fn damaged_gguf_files_are_refused_or_warned_of_in_their_own_words() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut wrong = Vec::new();
    for case in gguf::CASES {
        let mut model = gguf::Model::tiny();
        (case.damage)(&mut model);
        std::fs::write(&path, model.bytes()).unwrap();
        wrong.extend(judge(&path, case.fate).map(|why| format!("{}: {why}", case.name)));
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), gguf::CASES.len(), wrong.join("\n"));
    assert!(gguf::CASES.len() > 70);
}

#[test]
fn damaged_folders_are_refused_or_warned_of_in_their_own_words() {
    let mut wrong = Vec::new();
    for case in folder::CASES {
        let aside = tempfile::tempdir().unwrap();
        let path = aside.path().join("model");
        let mut model = folder::Model::tiny();
        (case.damage)(&mut model);
        model.write(&path);
        wrong.extend(judge(&path, case.fate).map(|why| format!("{}: {why}", case.name)));
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), folder::CASES.len(), wrong.join("\n"));
    assert!(folder::CASES.len() > 40);
}

/// What the user of the program sees: one line on standard error in both cases, without `-v`.
#[test]
fn the_command_refuses_with_one_line_and_warns_without_being_asked() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let run = |model: &gguf::Model| {
        std::fs::write(&path, model.bytes()).unwrap();
        let output = crate::common::delft()
            .args(["run", "--raw", "-n", "1", "--threads", "1", "abc", "-m"])
            .arg(&path)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        (crate::common::status(&output), String::from_utf8(output.stderr).unwrap())
    };
    let mut model = gguf::Model::tiny();
    let (status, stderr) = run(&model);
    assert!(status == 0 && !stderr.contains("warning"), "{stderr}");
    model.set("tokenizer.ggml.pre", "nobody");
    let (status, stderr) = run(&model);
    let warnings: Vec<&str> = stderr.lines().filter(|line| line.contains("warning: ")).collect();
    assert!(status == 0 && warnings.len() == 1 && warnings[0].contains("nobody"), "{stderr}");
    assert!(warnings[0].chars().count() <= 160, "{stderr}");
    model.set("tokenizer.ggml.eos_token_id", 1_000_u32);
    let (status, stderr) = run(&model);
    assert!(status == 1 && stderr.lines().count() == 1, "{stderr}");
    assert!(
        stderr.contains("model.gguf: tokenizer.ggml.eos_token_id: expected an id below"),
        "{stderr}"
    );
}

/// A recipe that does not fit its tensor is told with the file, as a missing tensor is.
#[test]
fn a_tensor_of_another_shape_is_told_with_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut bytes = std::fs::read(crate::common::fixture("qwen3-next/model.f32.gguf")).unwrap();
    let key = b"qwen3next.ssm.conv_kernel";
    let at = bytes.windows(key.len()).position(|part| part == key).unwrap() + key.len() + 4;
    assert_eq!(bytes[at..at + 4], [4, 0, 0, 0]);
    bytes[at] = 3;
    std::fs::write(&path, bytes).unwrap();
    let wrong = judge(&path, Fate::Refused(&["blk.0.ssm_conv1d.weight", "[208, 4]"]));
    assert_eq!(wrong, None);
}

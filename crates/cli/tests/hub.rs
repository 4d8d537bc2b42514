//! Where models come from: the one in the program, the cache, and a server that imitates the hub.

mod common;

use std::fs;
use std::process::{Output, Stdio};

use common::{delft_at, status};
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

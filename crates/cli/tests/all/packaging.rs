//! The command lines of the service and the container serve.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use crate::common::delft;

fn read(name: &str) -> String {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/");
    std::fs::read_to_string(format!("{path}{name}")).unwrap()
}

/// The words behind `delft`, as systemd, a container and compose give them.
fn commands() -> Vec<Vec<String>> {
    let (unit, container, compose) =
        (read("delft.service"), read("Containerfile"), read("compose.yaml"));
    let after = |text: &str, front: &str| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(front).map(String::from));
        line.unwrap_or_else(|| panic!("{front}"))
    };
    let start = after(&unit, "ExecStart=/usr/local/bin/delft ");
    // Unset, it is no word at all.
    let start = start.split(' ').filter(|word| *word != "$MODELS").map(String::from).collect();
    let list: Vec<String> = serde_json::from_str(&after(&container, "CMD ")).unwrap();
    let words = after(&compose, "command: [");
    let words = words.trim_end_matches(']').split(", ").map(String::from).collect();
    vec![start, list, words]
}

#[test]
fn what_is_started_serves_until_it_is_told_to_stop() {
    for words in commands() {
        let mut command = delft();
        command.args(&words).args(["--port", "0"]).stderr(Stdio::piped());
        let mut child = command.env("DELFT_API_KEY", "k-2718281828").spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let told: Vec<String> = lines.take(1).collect();
        assert!(told[0].starts_with("serving delft-stories at http://"), "{words:?}: {told:?}");
        let kill = Command::new("kill").args(["-TERM", &child.id().to_string()]).status();
        assert!(kill.unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(0), "{words:?}");
    }
}

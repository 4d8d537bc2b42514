//! Ctrl-C: what a command has so far is told, marked as such, and the program ends with 130.

use crate::common::{delft, fixture, status};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Starts a command, waits until it handles SIGINT, and sends that.
fn interrupted(args: &[&str]) -> Output {
    let mut command = delft();
    command.args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = command.spawn().unwrap();
    let start = Instant::now();
    while !catches(&child) {
        assert!(start.elapsed().as_secs() < 60, "{args:?}: no handler after a minute");
        std::thread::sleep(Duration::from_millis(20));
    }
    // Into what it does then; it would go on for hours.
    std::thread::sleep(Duration::from_millis(300));
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    child.wait_with_output().unwrap()
}

/// The kernel tells when the handler is in place: SIGINT is the second bit of the caught signals
/// (proc(5)).
fn catches(child: &Child) -> bool {
    let text = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let mask = text.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap().trim();
    u64::from_str_radix(mask, 16).unwrap() & 2 != 0
}

#[test]
fn what_there_is_so_far_is_told_and_marked() {
    let model = &fixture("llama3");
    let text = std::env::temp_dir().join(format!("delft-interrupt-{}.txt", std::process::id()));
    std::fs::write(&text, "The fox and the crow met in the wood. ".repeat(20_000)).unwrap();
    let text = text.to_str().unwrap();
    // The command, and a key that its object has besides the mark.
    let cases: &[(&[&str], &str)] = &[
        (
            &["logits", "-m", model, "--tokens", "5,6,7", "--generate", "999999999", "--rotate"],
            "generated",
        ),
        (&["bench", "-m", model, "-p", "4", "-n", "200000", "-r", "1000"], "tg_runs_tok_s"),
        (&["why-slow", "-m", model, "-p", "4", "-n", "200000"], "parameters"),
        (&["perplexity", "--stride", "1", text], "chunks"),
    ];
    for (args, key) in cases {
        let output = interrupted(&[args, &["--json"][..]].concat());
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert_eq!(status(&output), 130, "{args:?}: {stdout}");
        let found: serde_json::Value = serde_json::from_str(&stdout).unwrap();
        assert_eq!(found["interrupted"], true, "{args:?}: {stdout}");
        assert!(!found[key].is_null(), "{args:?}: {stdout}");
        // The same for people.
        let output = interrupted(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(status(&output), 130, "{args:?}: {stderr}");
        assert!(!stderr.contains("delft:"), "{args:?}: {stderr}");
    }
    std::fs::remove_file(text).unwrap();
}

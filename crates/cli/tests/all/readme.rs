//! README, followed by someone who has only the program: every command that it tells of is there,
//! its examples make sense, and the first of them works in an empty folder of an empty home.

use crate::common::{delft, status};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};

fn readme() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    std::fs::read_to_string(path).unwrap()
}

/// The lines of README's blocks of shell commands.
fn shell_lines(readme: &str) -> Vec<String> {
    let blocks = readme.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
    blocks.flat_map(str::lines).map(str::to_string).collect()
}

/// The words of a command as a shell splits them: blanks, double quotes, comments; up to a pipe or
/// redirection.
fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quoted) = (Vec::new(), None::<String>, false);
    for c in line.chars() {
        match c {
            '"' => {
                quoted = !quoted;
                word.get_or_insert_default();
            }
            '#' | '|' | '<' | '>' if !quoted => break,
            ' ' if !quoted => words.extend(word.take()),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// What follows `delft` in README's examples.
fn examples() -> Vec<Vec<String>> {
    let lines = shell_lines(&readme());
    let commands = lines.iter().filter_map(|line| match line.split_once("delft ") {
        Some(("", rest)) => Some(rest),
        Some((before, rest)) if before.ends_with("| ") => Some(rest),
        _ => None,
    });
    commands.map(words).collect()
}

/// The names in the first column of README's table of commands.
fn told() -> BTreeSet<String> {
    let readme = readme();
    let rows = readme.lines().filter_map(|line| line.strip_prefix("| `delft "));
    rows.flat_map(|row| row.split(" | ").next().unwrap().split("`delft "))
        .map(|cell| cell.split([' ', '`']).next().unwrap().to_string())
        .collect()
}

/// The commands that the program itself lists.
fn there() -> BTreeSet<String> {
    let help = String::from_utf8(delft().arg("--help").output().unwrap().stdout).unwrap();
    let list = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let names = list.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    names.filter(|name| !["", "help"].contains(name)).map(str::to_string).collect()
}

#[test]
fn the_table_of_commands_is_complete() {
    assert_eq!(told(), there());
}

#[test]
fn every_command_has_help_that_needs_nothing() {
    for name in there() {
        for flag in ["-h", "--help"] {
            let output = delft().args([&name, flag]).stdin(Stdio::null()).output().unwrap();
            assert_eq!(status(&output), 0, "{name} {flag}");
            let help = String::from_utf8(output.stdout).unwrap();
            assert!(help.contains(&format!("Usage: delft {name}")), "{name} {flag}: {help}");
        }
    }
}

#[test]
fn every_example_is_understood() {
    let examples = examples();
    assert!(examples.len() >= 4, "{examples:?}");
    for example in examples {
        // With --help at its end a command line is read and nothing is run; a flag that is not
        // there is refused.
        let output = delft().args(&example).arg("--help").stdin(Stdio::null()).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(status(&output), 0, "{example:?}: {stderr}");
    }
}

/// Copies the program. Where programs are forked, another test's would keep a copy open for writing
/// that this process made, and a file in that state cannot be run; `cp` makes it alone.
fn copy(from: &str, to: &Path) {
    if cfg!(unix) {
        assert!(Command::new("cp").arg(from).arg(to).status().unwrap().success());
    } else {
        std::fs::copy(from, to).unwrap();
    }
}

/// The program alone, copied to an empty folder, with an empty home: README's first command tells a
/// story, and leaves nothing behind.
#[test]
fn a_newcomer_gets_a_story_from_the_program_alone() {
    let (folder, home) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let program = folder.path().join("delft");
    copy(env!("CARGO_BIN_EXE_delft"), &program);
    let first =
        shell_lines(&readme()).into_iter().find(|line| line.starts_with("cargo run")).unwrap();
    let first = words(first.split_once(" -- ").unwrap().1);
    let newcomer = |args: &[&str]| {
        let mut command = Command::new(&program);
        command.env_clear().env("HOME", home.path()).current_dir(folder.path());
        // No proxy and no hub: nothing but the program itself may be needed.
        command.env("HF_ENDPOINT", "http://127.0.0.1:9").stdin(Stdio::null());
        command.args(args).output().unwrap()
    };
    let mut args: Vec<&str> = first.iter().map(String::as_str).collect();
    args.extend(["-n", "40"]);
    for args in [&args[..], &["run", "-n", "40"]] {
        let output = newcomer(args);
        let (story, stderr) = (output.stdout.clone(), String::from_utf8_lossy(&output.stderr));
        assert_eq!(status(&output), 0, "{args:?}: {stderr}");
        let story = String::from_utf8(story).unwrap();
        assert!(story.split_whitespace().count() > 10, "{args:?}: {story}");
        assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
    }
    assert_eq!(status(&newcomer(&["inspect"])), 0);
    for name in there() {
        assert_eq!(status(&newcomer(&[&name, "--help"])), 0, "{name}");
    }
    assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0, "something is left at home");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "something is left beside it");
}

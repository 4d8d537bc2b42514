//! The command lines of `tile` that README, the page for a Mac, workflows and scripts tell are
//! understood.

use std::path::Path;
use std::process::Command;

#[test]
fn every_command_that_is_told_is_understood() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut seen = 0;
    for page in
        ["docs/first-hour-on-a-mac.md", ".github/workflows/ci.yml", ".github/workflows/release.yml"]
    {
        let text = std::fs::read_to_string(root.join(page)).unwrap().replace("\\\n", " ");
        for line in text.lines().filter(|line| line.contains("cargo run ")) {
            let Some((_, rest)) = line.split_once("-p delft-tile-cli -- ") else { continue };
            let ends = ["2>&1", "|", "&&", ">"];
            let words = rest.split_whitespace().take_while(|word| !ends.contains(word));
            // With --help at its end a command line is read and nothing is run.
            let mut tile = Command::new(env!("CARGO_BIN_EXE_tile"));
            let read = tile.args(words).arg("--help").output().unwrap();
            let said = String::from_utf8_lossy(&read.stderr).into_owned();
            assert!(read.status.success(), "{page}: {line}: {said}");
            seen += 1;
        }
    }
    assert!(seen >= 3, "only {seen} commands were found");
}

//! What pages, workflows and scripts tell people and machines to run is there: packages, test
//! programs and tests that `cargo` is given, files, names of items and variables. The command lines
//! of Delft's own programs are those programs' tests.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// The files below a folder of the repository, without what is built.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let name = entry.file_name().into_string().unwrap_or_default();
        match entry.file_type().unwrap() {
            kind if kind.is_dir() && !["target", ".git"].contains(&&*name) => {
                found.extend(files(&entry.path()));
            }
            kind if kind.is_file() => found.push(entry.path()),
            _ => {}
        }
    }
    found
}

/// What is read: a page by its name, and its text with continued lines joined.
fn texts() -> Vec<(String, String)> {
    let root = root();
    let mut paths = vec![root.join("README.md"), root.join("docs/first-hour-on-a-mac.md")];
    paths.extend(files(&root.join(".github/workflows")));
    paths.extend(
        [".ci/run", "xtask/proof", "xtask/neon.sh", "xtask/systems.sh"].map(|p| root.join(p)),
    );
    let text = |path: &PathBuf| std::fs::read_to_string(path).unwrap().replace("\\\n", " ");
    let name = |path: &PathBuf| path.strip_prefix(&root).unwrap().display().to_string();
    paths.iter().map(|path| (name(path), text(path))).collect()
}

/// The words of each `cargo` command of a text, up to what a shell does with it.
fn cargo_commands(text: &str) -> Vec<Vec<String>> {
    let mut commands = Vec::new();
    for line in text.lines().filter(|line| !line.trim_start().starts_with('#')) {
        for part in line.split("cargo ").skip(1) {
            let words = part.split_whitespace();
            let ends = ["&&", "||", "|", ">", "2>&1", "#", ";", "beside", "in"];
            let words = words.take_while(|word| !ends.contains(word) && !word.starts_with('>'));
            let plain = |word: &str| word.trim_matches(['`', '"', '\'', ';', ')', ',']).to_owned();
            commands.push(words.map(plain).collect());
        }
    }
    commands
}

/// A package of the workspace: its folder, and its sources.
struct Package {
    folder: PathBuf,
    sources: String,
}

fn packages() -> BTreeMap<String, Package> {
    let folders =
        std::fs::read_dir(root().join("crates")).unwrap().map(|entry| entry.unwrap().path());
    let package = |folder: PathBuf| {
        let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
        let name = manifest.lines().find_map(|line| line.strip_prefix("name = \"")).unwrap();
        let sources =
            files(&folder).into_iter().filter(|path| path.extension().is_some_and(|e| e == "rs"));
        let read = |path: PathBuf| {
            let module = path.file_stem().unwrap().to_string_lossy().into_owned();
            format!("mod {module}\n{}", std::fs::read_to_string(path).unwrap())
        };
        (
            name.trim_end_matches('"').to_owned(),
            Package { folder, sources: sources.map(read).collect() },
        )
    };
    folders.map(package).collect()
}

#[test]
fn cargo_is_given_packages_programs_and_tests_that_are_there() {
    let packages = packages();
    let (mut filters, mut wrong) = (0, Vec::new());
    for (name, text) in texts() {
        for words in cargo_commands(&text) {
            let line = words.join(" ");
            // What follows `--` is another program's.
            let end = words.iter().position(|word| word == "--");
            let own = &words[..end.unwrap_or(words.len())];
            let after = |flag: &str| {
                let at = own.iter().position(|word| word == flag);
                at.and_then(|at| words.get(at + 1)).filter(|word| !word.contains('$'))
            };
            let package = after("-p").or(after("--package"));
            let Some(package) = package else { continue };
            let Some(package) = packages.get(package) else {
                wrong.push(format!("{name}: no package {package}: {line}"));
                continue;
            };
            if let Some(test) = after("--test") {
                let at = package.folder.join("tests");
                if !at.join(format!("{test}.rs")).exists()
                    && !at.join(test).join("main.rs").exists()
                {
                    wrong.push(format!("{name}: no test program {test}: {line}"));
                }
            }
            let tests = own.contains(&"test".to_owned());
            let Some(end) = end.filter(|_| tests) else { continue };
            let given = words[end + 1..].iter().zip(&words[end..]);
            let given = given.filter(|(word, before)| {
                !word.starts_with('-') && *before != "--test-threads" && !word.contains('$')
            });
            for (filter, _) in given {
                filters += 1;
                let there = |part: &str| {
                    part.is_empty()
                        || ["fn ", "mod "].iter().any(|item| {
                            let mut items = package.sources.split(item).skip(1);
                            let end = |c: char| !(c.is_alphanumeric() || c == '_');
                            items.any(|rest| rest.split(end).next().unwrap_or("").contains(part))
                        })
                };
                if !filter.split("::").all(there) {
                    wrong.push(format!("{name}: no test {filter}: {line}"));
                }
            }
        }
    }
    assert!(filters > 4, "only {filters} filters were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Scripts that are run, with their parts.
#[test]
fn scripts_that_are_run_are_there_and_have_the_parts_that_they_are_given() {
    let root = root();
    let proof = std::fs::read_to_string(root.join("xtask/proof")).unwrap();
    let mut wrong = Vec::new();
    for (name, text) in texts() {
        let words = text.split(|c: char| c.is_whitespace() || "`\"'();".contains(c));
        for word in words.filter(|word| word.starts_with("xtask/") || word.starts_with(".ci/")) {
            let word = word.trim_end_matches(['.', ',', ':']);
            if !root.join(word).exists() {
                wrong.push(format!("{name}: no {word}"));
            }
        }
    }
    let workflow = std::fs::read_to_string(root.join(".github/workflows/proof.yml")).unwrap();
    let parts = workflow.split("part: [").nth(1).unwrap().split(']').next().unwrap();
    let all = proof.split("|| set -- ").nth(1).unwrap().lines().next().unwrap();
    let parts: Vec<&str> = parts.split(", ").collect();
    assert_eq!(
        parts,
        all.split(' ').collect::<Vec<_>>(),
        "proof.yml runs every part of xtask/proof"
    );
    for part in parts {
        if !proof.contains(&format!("\n{part}() {{")) {
            wrong.push(format!("xtask/proof has no part {part}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Files, items and variables that the page for a Mac names between backticks.
#[test]
fn the_page_for_a_mac_names_what_is_there() {
    let root = root();
    let page = std::fs::read_to_string(root.join("docs/first-hour-on-a-mac.md")).unwrap();
    let all = files(&root.join("crates"));
    let paths: Vec<String> = all.iter().map(|path| format!("{}", path.display())).collect();
    let rust =
        all.iter().filter(|path| path.extension().is_some_and(|e| e == "rs" || e == "metal"));
    let sources: String = rust.map(|path| std::fs::read_to_string(path).unwrap()).collect();
    // Alternating: outside of backticks and between them; blocks of commands are not looked at.
    let prose: String = page.split("```").step_by(2).collect();
    let (mut seen, mut wrong) = (0, Vec::new());
    for name in
        prose.split('`').skip(1).step_by(2).filter(|name| !name.contains(char::is_whitespace))
    {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-./:".contains(c);
        if !name.chars().all(plain) || name.starts_with("target/") || name.starts_with('-') {
            continue;
        }
        let file = [".rs", ".md", ".metal"].iter().any(|ending| name.ends_with(ending));
        let there = if file || name.contains('/') {
            let below = format!("/{name}");
            root.join(name).exists()
                || paths
                    .iter()
                    .any(|path| path.ends_with(&below) || path.contains(&format!("{below}/")))
        } else if name.contains("::") || name.chars().all(|c| c.is_ascii_uppercase() || c == '_') {
            sources.contains(name.rsplit("::").next().unwrap())
        } else {
            continue;
        };
        seen += 1;
        if !there {
            wrong.push(name);
        }
    }
    assert!(seen > 10, "only {seen} names were found");
    assert!(wrong.is_empty(), "not there: {wrong:?}");
    for line in page.lines() {
        let variables = line.split(|c: char| !(c.is_ascii_uppercase() || c == '_'));
        for variable in variables.filter(|word| word.starts_with("DELFT_")) {
            assert!(sources.contains(&format!("\"{variable}\"")), "no variable {variable}");
        }
    }
}

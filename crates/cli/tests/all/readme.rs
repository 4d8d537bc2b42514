//! README, followed by someone who has only the program: every command that it tells of is there,
//! its examples work as they are typed, the first of them in an empty folder of an empty home.

#[cfg(unix)]
use crate::common::lettered;
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

/// What follows the program in the page for a Mac and in workflows: behind `cargo run .. --`, or
/// behind a variable that holds the program. A loop's variable stands for its first word.
fn examples_elsewhere() -> Vec<Vec<String>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut examples = Vec::new();
    for page in
        ["docs/first-hour-on-a-mac.md", ".github/workflows/ci.yml", ".github/workflows/release.yml"]
    {
        let text = std::fs::read_to_string(root.join(page)).unwrap().replace("\\\n", " ");
        let mut set = Vec::new();
        for line in text.lines() {
            let mut line = line.to_owned();
            if let Some((name, list)) = line.split_once("for ").and_then(|l| l.1.split_once(" in "))
            {
                set.push((format!("${name}"), list.split([' ', ';']).next().unwrap().to_owned()));
            }
            set.iter().for_each(|(name, word)| line = line.replace(name, word));
            let own = line.split("cargo run ").nth(1).and_then(|rest| rest.split_once("-- "));
            let own = own.filter(|(before, _)| !before.contains("-p "));
            let held = ["\"$delft\" ", "\"$program\" "].into_iter().find_map(|program| {
                line.split_once(program).filter(|(before, _)| !before.trim_end().ends_with("cp"))
            });
            let rest = own.or(held).map(|(_, rest)| rest.split([';', '&']).next().unwrap());
            examples.extend(rest.map(|rest| words(rest.trim_end_matches("2>"))));
        }
    }
    examples
}

#[test]
fn every_example_is_understood() {
    let mut examples = examples();
    assert!(examples.len() >= 4, "{examples:?}");
    let elsewhere = examples_elsewhere();
    assert!(elsewhere.len() >= 10, "{elsewhere:?}");
    examples.extend(elsewhere);
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

/// A home whose store and table of names have a tiny model under every name that the examples use,
/// and a folder with the files that they read.
#[cfg(unix)]
struct Newcomer {
    home: tempfile::TempDir,
    folder: tempfile::TempDir,
}

#[cfg(unix)]
impl Newcomer {
    fn new() -> Newcomer {
        let newcomer =
            Newcomer { home: tempfile::tempdir().unwrap(), folder: tempfile::tempdir().unwrap() };
        let (home, at) = (newcomer.home.path(), |name: &str| newcomer.folder.path().join(name));
        let bin = home.join("bin");
        std::fs::create_dir(&bin).unwrap();
        copy(env!("CARGO_BIN_EXE_delft"), &bin.join("delft"));
        // The program at the beginning of a pipe, which may write any text.
        let git = bin.join("git");
        std::fs::write(&git, "#!/bin/sh\necho 'a line, and another'\n").unwrap();
        assert!(Command::new("chmod").arg("+x").arg(&git).status().unwrap().success());
        // Models of the hub as pull leaves them, and a short name of the user's own.
        for (id, file) in [("Qwen/Qwen3-0.6B", None), ("org/name-GGUF", Some("name-Q4_K_M.gguf"))] {
            let id = id.replace('/', "--");
            let cached = home.join(format!(".cache/huggingface/hub/models--{id}"));
            let snapshot = cached.join("snapshots").join("0".repeat(40));
            std::fs::create_dir_all(&snapshot).unwrap();
            std::fs::create_dir_all(cached.join("refs")).unwrap();
            std::fs::write(cached.join("refs/main"), "0".repeat(40)).unwrap();
            match file {
                None => lettered(&snapshot),
                Some(file) => {
                    let tiny = crate::damaged::gguf::Model::tiny().bytes();
                    std::fs::write(snapshot.join(file), tiny).unwrap();
                }
            }
        }
        let tiny = at("tiny");
        std::fs::create_dir(&tiny).unwrap();
        lettered(&tiny);
        std::fs::create_dir_all(home.join(".config/delft")).unwrap();
        let table = format!("[qwen3]\n\"0.6b\" = {:?}\n", tiny.display().to_string());
        std::fs::write(home.join(".config/delft/models.toml"), table).unwrap();
        let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/delft-stories.gguf");
        std::os::unix::fs::symlink(bundled.canonicalize().unwrap(), at("model.gguf")).unwrap();
        let talk = "{\"messages\": [{\"role\": \"user\", \"content\": \"Who are you?\"}, \
                    {\"role\": \"assistant\", \"content\": \"A lamp.\"}]}\n";
        std::fs::write(at("talks.jsonl"), talk.repeat(3)).unwrap();
        // A folder that other types are made of, with a tokenizer that GGUF can say.
        for folder in ["Qwen3-0.6B", "gpt-like"] {
            crate::damaged::folder::Model::tiny().write(&at(folder));
            for name in ["config.json", "model.safetensors"] {
                let from = crate::common::fixture(&format!("llama-256/{name}"));
                std::fs::copy(from, at(folder).join(name)).unwrap();
            }
        }
        for text in ["wiki.test.raw", "calibration.txt"] {
            std::fs::write(at(text), "abc a b c d e f g ".repeat(20)).unwrap();
        }
        newcomer
    }

    /// A command line as a shell takes it, in that folder and with that home.
    fn shell(&self, line: &str) -> Command {
        let mut command = Command::new("sh");
        command.arg("-c").arg(line).env_clear().current_dir(self.folder.path());
        let path = format!("{}:/usr/bin:/bin", self.home.path().join("bin").display());
        command.env("PATH", path).env("HOME", self.home.path());
        command.env("HF_ENDPOINT", "http://127.0.0.1:9");
        command
    }
}

/// A line of an example without its comment, with what keeps it short behind it.
#[cfg(unix)]
fn shortened(line: &str) -> String {
    let mut quoted = false;
    let end = line.find(|c| {
        quoted ^= c == '"';
        c == '#' && !quoted
    });
    let line = line[..end.unwrap_or(line.len())].trim();
    let command = line.rsplit("delft ").next().unwrap().split(' ').next().unwrap();
    let more = match command {
        "run" | "chat" => " -n 8",
        "tune" => " --steps 2 --held-out none",
        "perplexity" | "compare" | "imatrix" => " --ctx 16",
        _ => "",
    };
    format!("{line}{more}")
}

/// Every command of README and of the chapters beside it, one after the other as they stand there.
#[cfg(unix)]
#[test]
fn every_example_works_as_it_is_typed() {
    let newcomer = Newcomer::new();
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let chapter = std::fs::read_to_string(docs.join("quantising.md")).unwrap();
    let lines = shell_lines(&(readme() + &chapter));
    let typed = lines.iter().filter(|line| line.starts_with("delft ") || line.contains("| delft "));
    // A server goes on until it is stopped.
    let typed: Vec<&String> = typed.filter(|line| !line.starts_with("delft serve")).collect();
    assert!(typed.len() > 14, "{typed:?}");
    for line in typed {
        let line = shortened(line);
        let output = crate::common::fed(&mut newcomer.shell(&line), "Hello\n");
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(status(&output), 0, "{line}: {stderr}");
        assert!(!output.stdout.is_empty() || !stderr.is_empty(), "{line} says nothing");
    }
}

/// README's first server, asked as README asks it.
#[cfg(target_os = "linux")]
#[test]
fn the_server_answers_what_readme_asks() {
    use std::io::{BufRead, BufReader, Read, Write};
    let newcomer = Newcomer::new();
    // A command may go on in the next line.
    let text = readme().replace("\\\n", " ");
    let lines = shell_lines(&text);
    let begin = lines.iter().find(|line| line.starts_with("delft serve")).unwrap();
    let mut child = newcomer
        .shell(&format!("exec {} --port 0", shortened(begin)))
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let line = said.find(|line| line.starts_with("serving ")).unwrap();
    let address = line.split_once(" at http://").unwrap().1.to_owned();
    std::thread::spawn(move || said.for_each(drop));
    let asked: Vec<&String> = lines.iter().filter(|line| line.starts_with("curl ")).collect();
    assert!(!asked.is_empty());
    let mut wrong = Vec::new();
    for line in asked {
        let url = line.split(' ').find(|word| word.contains("11435")).unwrap();
        let path = url.trim_matches(['"', '\'']).split_once("11435").unwrap().1;
        let body = line.split_once("-d '").map(|(_, rest)| rest.split('\'').next().unwrap());
        let (method, body) = body.map_or(("GET", String::new()), |body| {
            // Tiny models have little to say, and short contexts.
            let mut body: serde_json::Value = serde_json::from_str(body).unwrap();
            let most = if path.starts_with("/api/") { "options" } else { "max_tokens" };
            body[most] =
                if most == "options" { serde_json::json!({ "num_predict": 8 }) } else { 8.into() };
            ("POST", body.to_string())
        });
        let mut stream = std::net::TcpStream::connect(&address).unwrap();
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        if !answer.starts_with("HTTP/1.1 200") {
            wrong.push(format!("{line}: {answer}"));
        }
    }
    let sent = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Flags that README and the chapters name are flags of some command, or of another program's.
#[test]
fn flags_that_are_told_of_are_there() {
    // Flags of cargo, of the tile command, and of builds of Delft.
    const OTHERS: &[&str] = &["--arch", "--no-default-features", "--on", "--platform", "--test"];
    let mut known: BTreeSet<String> = OTHERS.iter().map(|flag| flag.to_string()).collect();
    let flag = |c: char| !(c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    for name in there() {
        let help = delft().args([&name, "--help"]).output().unwrap();
        let help = String::from_utf8(help.stdout).unwrap();
        known.extend(help.split(flag).filter(|word| word.starts_with("--")).map(str::to_string));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut pages = vec![root.join("README.md")];
    for folder in ["docs", "docs/inside"] {
        let files = std::fs::read_dir(root.join(folder)).unwrap().map(|file| file.unwrap().path());
        // The log tells of what was.
        let told = |path: &std::path::PathBuf| path.extension().is_some_and(|e| e == "md");
        pages.extend(files.filter(|path| told(path) && !path.ends_with("log.md")));
    }
    assert!(pages.len() > 10);
    for page in pages {
        let text = std::fs::read_to_string(&page).unwrap();
        for part in text.split("`--").skip(1) {
            let name = format!("--{}", part.split(flag).next().unwrap());
            assert!(known.contains(&name), "{}: {name}", page.display());
        }
    }
}

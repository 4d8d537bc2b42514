//! Which words are the model and which the prompt, where a prompt comes from, and what is written
//! around the text.

use crate::common::{delft, fed, lettered, status};
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Output, Stdio};
#[cfg(unix)]
use std::{io::Read, process::Command};

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn json(output: &Output) -> Value {
    assert_eq!(status(output), 0, "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The model of single characters, in a folder that lives as long as the test.
fn model() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    lettered(folder.path());
    let name = folder.path().to_str().unwrap().to_string();
    (folder, name)
}

/// Output without what is free at the moment.
fn steady(output: &[u8]) -> String {
    let output = text(output);
    let Some((before, rest)) = output.split_once("\"free_bytes\":") else { return output };
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    format!("{before}{}", &rest[end..])
}

#[test]
fn the_model_is_the_first_word_of_every_command_or_behind_m() {
    let (folder, model) = model();
    let words = folder.path().join("words.txt");
    std::fs::write(&words, "the quick brown fox jumps over the lazy dog").unwrap();
    let words = words.to_str().unwrap();
    let cases: &[(&str, &[&str])] = &[
        ("run", &["hello", "-n", "4", "--temp", "0", "-q"]),
        ("chat", &["-n", "4", "--temp", "0"]),
        ("tokenize", &["hello"]),
        ("perplexity", &[words, "--ctx", "8", "--threads", "1"]),
        ("inspect", &["--json"]),
        ("logits", &["--tokens", "5,6", "--json"]),
    ];
    for (command, rest) in cases {
        let first = fed(delft().args([command, model.as_str()]).args(*rest), "hello\n");
        let behind = fed(delft().arg(command).args(*rest).args(["-m", &model]), "hello\n");
        assert_eq!(status(&first), 0, "{command}: {}", text(&first.stderr));
        assert!(!first.stdout.is_empty(), "{command}");
        assert_eq!(steady(&first.stdout), steady(&behind.stdout), "{command}");
    }
    let timed: &[(&str, &[&str])] =
        &[("bench", &["-p", "4", "-n", "2", "-r", "1"]), ("why-slow", &["-p", "4", "-n", "2"])];
    for (command, rest) in timed {
        let output =
            delft().args([command, model.as_str(), "--json"]).args(*rest).output().unwrap();
        assert_eq!(json(&output)["architecture"], "llama", "{command}");
    }
}

#[test]
fn a_word_that_is_nearly_a_model_is_refused_with_what_was_meant() {
    let (_folder, model) = model();
    let cases: &[(&[&str], &[&str])] = &[
        (&["run", "qwen3:0.7b"], &["qwen3:0.6b", "-p \"qwen3:0.7b\""]),
        (&["run", "lama3.2", "why is the sky blue"], &["llama3.2"]),
        (&["run", "nowhere.gguf"], &["nowhere.gguf", "-p"]),
        (&["tokenize", "nowhere.gguf", "hello"], &["nowhere.gguf"]),
        (&["run", "Once", "upon", "a", "time"], &["quote", "\"Once upon a time\""]),
        (&["chat", &model, "-m", &model], &["one model"]),
        (&["run", &model, "hello", "-p", "there"], &["-p"]),
    ];
    for (args, parts) in cases {
        let output = delft().args(*args).stdin(Stdio::null()).output().unwrap();
        let stderr = text(&output.stderr);
        assert_eq!(status(&output), 2, "{args:?}: {stderr}");
        assert!(output.stdout.is_empty() && stderr.lines().count() == 1, "{args:?}: {stderr}");
        for part in *parts {
            assert!(stderr.contains(part), "{args:?}: {part}: {stderr}");
        }
    }
}

/// The prompt that a command line and this input make.
fn prompt(model: &str, args: &[&str], input: &str) -> String {
    let output = fed(
        delft().args(["run", "--show-prompt", "--json", "--raw", "-m", model]).args(args),
        input,
    );
    json(&output)["prompt"].as_str().unwrap().to_string()
}

#[test]
fn prompts_from_words_files_and_pipes_are_joined() {
    let (folder, model) = model();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_string()
    };
    let (one, two) = (file("one.txt", "one\n"), file("two.txt", "two\r\n"));
    let ends = file("ends.txt", "end\n\n");
    // Arguments, standard input, prompt, why.
    let cases: [(&[&str], &str, &str, &str); 12] = [
        (&["ask"], "", "ask", "a word and nothing piped"),
        (&["why", "so?"], "", "why so?", "words that nobody quoted"),
        (&[], "piped\n", "piped", "no prompt: standard input, without its last line break"),
        (&["-"], "piped\n\n", "piped\n", "one line break, not all"),
        (&["ask"], "piped\n", "ask\n\npiped", "a prompt, and what it is about"),
        (&["-p", "-5 is cold"], "", "-5 is cold", "-p takes what begins with a dash"),
        (&["-f", &one], "", "one", "a file"),
        (&["-f", &ends], "", "end\n", "a file loses one line break too"),
        (
            &["ask", "-f", &one, "-f", &two],
            "piped",
            "ask\n\none\n\ntwo\n\npiped",
            "everything in order",
        ),
        (&["ask", "-f", "-"], "piped\n", "ask\n\npiped", "standard input by name"),
        (&["-f", "-", "-f", &one], "piped", "piped\n\none", "in the place where it is named"),
        (&[""], "piped", "piped", "an empty prompt leaves no gap"),
    ];
    for (args, input, expected, why) in cases {
        assert_eq!(prompt(&model, args, input), expected, "{why}");
    }
}

#[test]
fn an_empty_standard_input_is_no_prompt_but_no_hindrance_either() {
    let (_folder, model) = model();
    let run = |args: &[&str]| {
        delft()
            .args(["run", "-n", "2", "-m", &model])
            .args(args)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    assert_eq!(status(&run(&["hello"])), 0);
    let none = run(&[]);
    assert_eq!(status(&none), 2);
    assert!(text(&none.stderr).contains("delft chat"), "{}", text(&none.stderr));
}

/// A pipe that nobody writes to and nobody closes, as `ssh` and containers leave one.
#[test]
fn a_silent_standard_input_is_not_waited_for_beside_a_prompt() {
    let (_folder, model) = model();
    let mut child = delft()
        .args(["run", "hello", "-n", "2", "-q", "-m", &model])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let open = child.stdin.take();
    let output = child.wait_with_output().unwrap();
    drop(open);
    assert_eq!(status(&output), 0);
    let stderr = text(&output.stderr);
    assert!(stderr.contains("going on without it") && stderr.lines().count() == 1, "{stderr}");
}

/// Without a prompt, standard input is the prompt, and worth waiting for; a line says for what.
#[test]
fn a_prompt_that_takes_its_time_is_waited_for() {
    let (_folder, model) = model();
    let mut child = delft()
        .args(["run", "--json", "-n", "2", "-m", &model])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    stderr.read_line(&mut line).unwrap();
    assert!(line.contains("waiting for the prompt on standard input"), "{line}");
    child.stdin.take().unwrap().write_all(b"late\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(json(&output)["prompt"], "late");
}

#[test]
fn a_dash_is_standard_input_for_every_command_that_reads_text() {
    let (_folder, model) = model();
    let tokenize = |args: &[&str], input: &str| {
        text(&fed(delft().args(["tokenize", "-m", &model]).args(args), input).stdout)
    };
    let expected = tokenize(&["hello"], "");
    assert!(!expected.trim().is_empty());
    for args in [&[][..], &["-"], &["-f", "-"], &["--file", "-"]] {
        assert_eq!(tokenize(args, "hello\n"), expected, "{args:?}");
    }
    let text = "the quick brown fox jumps over the lazy dog\n";
    let piped = fed(delft().args(["perplexity", &model, "-", "--ctx", "8", "--json"]), text);
    assert!(json(&piped)["perplexity"].as_f64().unwrap() > 1.0);
}

#[test]
fn a_prompt_is_shown_as_the_model_gets_it() {
    let (folder, model) = model();
    let show = |args: &[&str]| {
        json(
            &delft()
                .args(["run", &model, "ab", "--show-prompt", "--json"])
                .args(args)
                .stdin(Stdio::null())
                .output()
                .unwrap(),
        )
    };
    let spelled = "<|user|>ab<|assistant|>";
    let message = show(&[]);
    assert_eq!(message["prompt"], spelled);
    let system = show(&["--system", "Be."]);
    assert_eq!(system["prompt"], format!("<|system|>Be.{spelled}"));
    assert_eq!(show(&["--raw"])["prompt"], "ab");

    // Special tokens that are spelled out in a raw prompt, and the same from a template of one's
    // own.
    let raw = |flag: &str| {
        let args = ["run", &model, "--show-prompt", "--json", flag, "-p", spelled];
        json(&delft().args(args).stdin(Stdio::null()).output().unwrap())["tokens"].clone()
    };
    assert_eq!(raw("--special"), message["tokens"]);
    assert_eq!(raw("--raw").as_array().unwrap().len(), spelled.len());
    let template = folder.path().join("own.jinja");
    std::fs::write(&template, "<|user|>{{ messages[-1].content }}!<|assistant|>\n").unwrap();
    let own = show(&["--template", template.to_str().unwrap()]);
    assert_eq!(own["prompt"], "<|user|>ab!<|assistant|>");
    std::fs::write(&template, "{% if %}").unwrap();
    let args = ["run", &model, "ab", "--template", template.to_str().unwrap()];
    let broken = delft().args(args).stdin(Stdio::null()).output().unwrap();
    assert_eq!(status(&broken), 1);
    assert!(text(&broken.stderr).contains("own.jinja"), "{}", text(&broken.stderr));

    let page =
        delft().args(["run", &model, "ab", "--show-prompt"]).stdin(Stdio::null()).output().unwrap();
    let page = text(&page.stdout);
    assert!(
        page.starts_with(spelled) && page.contains("ID  TEXT") && page.contains(" 4  <|user|>"),
        "{page}"
    );
}

#[test]
fn the_text_alone_is_written_unless_the_prompt_is_asked_for() {
    let (_folder, model) = model();
    let run = |args: &[&str]| {
        let fixed = ["run", &model, "hello", "-n", "6", "--temp", "0", "-q"];
        text(&delft().args(fixed).args(args).stdin(Stdio::null()).output().unwrap().stdout)
    };
    let plain = run(&["--raw"]);
    assert_eq!(run(&["--raw", "--echo"]), format!("hello{plain}"));
    assert_eq!(run(&["--raw", "--no-echo"]), plain);
    assert_eq!(run(&["--raw", "--no-display-prompt"]), plain);
    assert_eq!(run(&["--echo"]), format!("hello\n\n{}", run(&[])));
}

#[test]
fn json_lines_are_the_tokens_and_then_the_whole() {
    let (_folder, model) = model();
    let run = |flag: &str| {
        let fixed = ["run", &model, "hello", "-n", "6", "--temp", "0"];
        delft().args(fixed).arg(flag).stdin(Stdio::null()).output().unwrap()
    };
    let whole = json(&run("--json"));
    for flag in ["--json-lines", "--stream-json"] {
        let output = run(flag);
        assert_eq!(status(&output), 0);
        let lines: Vec<Value> =
            text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let (last, tokens) = lines.split_last().unwrap();
        let ids: Vec<Value> = tokens.iter().map(|line| line["token"].clone()).collect();
        let pieces: String = tokens.iter().map(|line| line["text"].as_str().unwrap()).collect();
        assert_eq!(Value::from(ids), whole["tokens"]);
        assert_eq!(pieces, whole["text"].as_str().unwrap());
        for key in ["text", "tokens", "finish", "prompt"] {
            assert_eq!(last[key], whole[key], "{key}");
        }
    }
}

/// Starts a text without end, and interrupts it once some of it is written.
#[cfg(unix)]
fn interrupted(args: &[&str]) -> (Output, String) {
    let (_folder, model) = model();
    let endless = ["run", &model, "hello", "-n", "-1", "--ignore-eos", "--rotate", "--temp", "0"];
    let mut child = delft()
        .args(endless)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut begin = vec![0; 100];
    out.read_exact(&mut begin).unwrap();
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    out.read_to_end(&mut begin).unwrap();
    (child.wait_with_output().unwrap(), text(&begin))
}

#[cfg(unix)]
#[test]
fn an_interrupted_text_stays_is_marked_and_ends_with_130() {
    let (output, written) = interrupted(&[]);
    assert_eq!(status(&output), 130);
    assert!(written.len() > 100 && written.ends_with('\n'), "{written}");
    assert!(text(&output.stderr).contains("interrupted"), "{}", text(&output.stderr));
    let (output, written) = interrupted(&["--json-lines"]);
    assert_eq!(status(&output), 130);
    let last: Value = serde_json::from_str(written.lines().last().unwrap()).unwrap();
    assert_eq!(last["finish"], "cancelled");
    assert_eq!(last["tokens"].as_array().unwrap().len(), written.lines().count() - 1);
}

/// What a command writes at a terminal: `script` (util-linux, BSD) lends one. `None`, and a word of
/// it, where there is none.
#[cfg(target_os = "linux")]
fn at_a_terminal(model: &str, args: &str) -> Option<String> {
    let line = format!("{} run -m {model} {args}", env!("CARGO_BIN_EXE_delft"));
    let mut command = Command::new("script");
    command
        .args(["-q", "-e", "-c", &line, "/dev/null"])
        .env_remove("NO_COLOR")
        .env("TERM", "xterm");
    match command.stdin(Stdio::null()).output() {
        Ok(output) => {
            assert_eq!(status(&output), 0, "{}", text(&output.stdout));
            Some(text(&output.stdout))
        }
        Err(_) => {
            testing::skipped("there is no `script` to make a terminal with");
            None
        }
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_terminal_shows_the_prompt_dimmed_and_nothing_that_steers_it() {
    let (folder, model) = model();
    let fixed = "-n 4 --temp 0 -q";
    let Some(shown) = at_a_terminal(&model, &format!("--raw {fixed} hello")) else { return };
    let plain = delft()
        .args(["run", "-m", &model, "--raw", "-n", "4", "--temp", "0", "-q", "hello"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let plain = text(&plain.stdout);
    assert!(shown.contains(&format!("\u{1b}[2mhello\u{1b}[0m{}", plain.trim_end())), "{shown:?}");
    let message = at_a_terminal(&model, &format!("{fixed} hello")).unwrap();
    assert!(!message.contains("hello"), "{message:?}");
    // Thoughts are dimmed too.
    let template = folder.path().join("thinks.jinja");
    std::fs::write(&template, "{{ messages[-1].content }}<think>").unwrap();
    let thinks = at_a_terminal(&model, &format!("{fixed} --template {} hello", template.display()));
    let thinks = thinks.unwrap();
    // On a busy machine a bar that is wiped comes first.
    let thinks = thinks.rsplit("\r\u{1b}[2K").next().unwrap();
    assert!(thinks.starts_with("\u{1b}[2m") && !thinks.contains("hello"), "{thinks:?}");
    let hostile =
        at_a_terminal(&model, &format!("{fixed} --show-prompt \"$(printf 'a\\033[2Jb')\""));
    let hostile = hostile.unwrap();
    assert!(hostile.contains("a\u{241b}[2Jb") && !hostile.contains("\u{1b}[2J"), "{hostile:?}");
}

#[test]
fn settings_of_other_programs_are_understood() {
    let (_folder, model) = model();
    let run = |args: &[&str]| {
        let output = delft()
            .args(["run", "--json", "-m", &model])
            .args(args)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        json(&output)
    };
    let ours = run(&[
        "hello",
        "--max-tokens",
        "5",
        "--temp",
        "0.5",
        "--seed",
        "3",
        "--ctx",
        "64",
        "--top-k",
        "0",
    ]);
    let theirs: &[&[&str]] = &[
        &["-p", "hello", "-n", "5", "--temperature", "0.5", "-s", "3", "-c", "64", "--top-k", "-1"],
        &[
            "-p",
            "hello",
            "--n-predict",
            "5",
            "--temp",
            "0.5",
            "-s",
            "3",
            "--ctx-size",
            "64",
            "--top-k",
            "0",
        ],
        &["hello", "--predict", "5", "--temp", "0.5", "--seed", "3", "-c", "64", "--top-k", "-1"],
    ];
    for args in theirs {
        let found = run(args);
        for key in ["tokens", "sampling"] {
            assert_eq!(found[key], ours[key], "{args:?}: {key}");
        }
    }
    let endless = run(&["hello", "-n", "-1", "--seed", "-1", "-c", "32"]);
    assert_eq!(endless["sampling"]["max_tokens"], Value::Null);
}

#[test]
fn a_number_out_of_range_is_told_its_range() {
    let cases: &[(&str, &str, &str)] = &[
        ("--temp", "-1", "a number of at least 0"),
        ("--top-p", "-0.5", "a number from 0 to 1"),
        ("--min-p", "2", "a number from 0 to 1"),
        ("--repeat-penalty", "-1", "a number above 0"),
        ("-n", "-5", "a whole number, or -1"),
        ("--seed", "-2", "a whole number, or -1"),
        ("--top-k", "-2", "a whole number, or -1"),
        ("--ctx", "-1", "from 1 to"),
        ("--threads", "-1", "from 1 to 1024"),
        ("--gpu-layers", "-2", "from 0 to"),
        ("--stop", "", "expected some text"),
    ];
    for (flag, value, expected) in cases {
        let output = delft().args(["run", "x", flag, value]).stdin(Stdio::null()).output().unwrap();
        let stderr = text(&output.stderr);
        assert_eq!(status(&output), 2, "{flag} {value}: {stderr}");
        assert!(stderr.contains(expected) && !stderr.contains("tip:"), "{flag} {value}: {stderr}");
    }
}

/// `ulimit -f` and its signal: the write that goes too far is an error like that of a full disk.
#[cfg(unix)]
#[test]
fn a_file_that_may_not_grow_is_an_error_line() {
    let (folder, model) = model();
    let out = folder.path().join("out.json");
    let line = format!(
        "ulimit -f 1; exec \"$0\" run -m \"$1\" x -n 200 --ignore-eos --json-lines > \"{}\"",
        out.display()
    );
    let output = Command::new("sh")
        .args(["-c", &line, env!("CARGO_BIN_EXE_delft"), &model])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let stderr = text(&output.stderr);
    assert_eq!(status(&output), 1, "{stderr}");
    assert!(
        stderr.starts_with("delft: standard output: ") && stderr.lines().count() == 1,
        "{stderr}"
    );
}

/// Lines that are read one by one can be told from each other as they come.
#[test]
fn json_lines_come_while_the_text_is_made() {
    let (_folder, model) = model();
    let mut child = delft()
        .args([
            "run",
            "-m",
            &model,
            "hello",
            "-n",
            "-1",
            "--ignore-eos",
            "--rotate",
            "--json-lines",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    for _ in 0..3 {
        let line: Value = serde_json::from_str(&lines.next().unwrap().unwrap()).unwrap();
        assert!(line["token"].is_u64(), "{line}");
    }
    // Nobody reads on, so the endless text ends.
    drop(lines);
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_template_file_that_is_missing_is_named() {
    let (_folder, model) = model();
    let missing = Path::new("nowhere.jinja");
    let output = delft()
        .args(["run", "-m", &model, "x", "--template"])
        .arg(missing)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert_eq!(status(&output), 1);
    assert!(text(&output.stderr).contains("nowhere.jinja"));
}

#[test]
fn thinking_is_switched_by_the_template_and_hidden_on_request() {
    let (folder, model) = model();
    let template = folder.path().join("thinks.jinja");
    let source = "<|user|>{{ messages[-1].content }}<|assistant|><think>\
                  {% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}";
    std::fs::write(&template, source).unwrap();
    let run = |args: &[&str]| {
        delft()
            .args(["run", &model, "hello", "-n", "6", "--temp", "0", "-q", "--ignore-eos"])
            .args(args)
            .stdin(Stdio::null())
            .output()
            .unwrap()
    };
    let own = ["--template", template.to_str().unwrap()];
    let with = |args: &[&str]| run(&[&own[..], args].concat());

    // The template opens the reasoning, and this model never closes it.
    let thinks = json(&with(&["--json"]));
    assert_eq!((&thinks["reasoning"], &thinks["answer"]), (&thinks["text"], &Value::from("")));
    let plain = with(&[]);
    assert_eq!(text(&plain.stdout).trim_end_matches('\n'), thinks["text"].as_str().unwrap());
    assert_eq!(text(&with(&["--think", "hide"]).stdout), "\n");
    assert_eq!(json(&with(&["--think", "on", "--json"]))["tokens"], thinks["tokens"]);
    let answers = json(&with(&["--think", "off", "--json"]));
    assert_eq!((&answers["reasoning"], &answers["answer"]), (&Value::Null, &answers["text"]));

    for args in [&["--think", "off"][..], &["--think", "on", "--raw"]] {
        let refused = run(args);
        let stderr = text(&refused.stderr);
        assert_eq!(status(&refused), 1, "{args:?}");
        assert!(stderr.contains("--think: expected") && stderr.lines().count() == 1, "{stderr}");
    }
}

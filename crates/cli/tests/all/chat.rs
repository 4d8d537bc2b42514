//! `delft chat` on models that say what a script has them say: through pipes, byte by byte, and at
//! a terminal, as a screen shows it.

use crate::common::{delft, fed, letters, status, tokenizer};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// `<|role|>content` for every message, then the assistant's turn; without reasoning it begins with
/// `<s>`.
const TEMPLATE: &str = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}\
                        {% if enable_thinking is defined and not enable_thinking %}<s>{% else %}<|assistant|>{% endif %}";
const END: usize = 2;
/// Ids of `<s>` and `<|assistant|>`, after which the scripts begin.
const QUIET: usize = 1;
const ASSISTANT: usize = 5;
/// Width of the model, and size of its vocabulary: each token is a direction of its own.
const WIDTH: usize = 192;

/// What a model says.
#[derive(Default)]
struct Script<'a> {
    /// Its answer, token by token.
    answer: &'a [&'a str],
    /// Its answer where reasoning is off.
    quiet: &'a [&'a str],
    /// Whether the answer begins again at its end.
    endless: bool,
    context: usize,
    plain: bool,
}

impl Script<'_> {
    /// Writes a Llama in which nothing but the last token decides on the next: embeddings are
    /// directions, the head turns each into the token that follows, and the layer between adds
    /// zeros.
    fn model(&self, folder: &Path) {
        let mut vocabulary = letters();
        let mut head = vec![0.0; WIDTH * WIDTH];
        let mut follows = |before: usize, after: usize| head[after * WIDTH + before] = 1.0;
        for (start, words) in [(ASSISTANT, self.answer), (QUIET, self.quiet)] {
            let first = vocabulary.len();
            let mut before = start;
            for word in words {
                assert!(!vocabulary.contains(&word.to_string()), "{word:?} comes twice");
                follows(before, vocabulary.len());
                before = vocabulary.len();
                vocabulary.push(word.to_string());
            }
            follows(before, if self.endless && before != start { first } else { END });
        }
        assert!(vocabulary.len() <= WIDTH);
        let spare = (vocabulary.len()..WIDTH).map(|id| format!("<unused{id}>"));
        vocabulary.extend(spare.collect::<Vec<_>>());
        let identity = (0..WIDTH * WIDTH).map(|i| f32::from(u8::from(i / WIDTH == i % WIDTH)));
        let layer = "model.layers.0";
        let mut tensors = vec![
            ("model.embed_tokens.weight".to_string(), vec![WIDTH, WIDTH], identity.collect()),
            ("lm_head.weight".to_string(), vec![WIDTH, WIDTH], head),
        ];
        for name in ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
        {
            tensors.push((
                format!("{layer}.{name}.weight"),
                vec![WIDTH, WIDTH],
                vec![0.0; WIDTH * WIDTH],
            ));
        }
        for (name, rows, columns) in
            [("gate_proj", 64, WIDTH), ("up_proj", 64, WIDTH), ("down_proj", WIDTH, 64)]
        {
            tensors.push((
                format!("{layer}.mlp.{name}.weight"),
                vec![rows, columns],
                vec![0.0; rows * columns],
            ));
        }
        for name in [
            "model.norm",
            "model.layers.0.input_layernorm",
            "model.layers.0.post_attention_layernorm",
        ] {
            tensors.push((format!("{name}.weight"), vec![WIDTH], vec![1.0; WIDTH]));
        }
        let config = json!({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH,
            "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 6,
            "vocab_size": WIDTH, "max_position_embeddings": self.context.max(256), "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": false, "hidden_act": "silu", "bos_token_id": 1,
            "eos_token_id": END,
        });
        std::fs::write(folder.join("model.safetensors"), safetensors(&tensors)).unwrap();
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        tokenizer(folder, &vocabulary, (!self.plain).then_some(TEMPLATE));
    }
}

fn safetensors(tensors: &[(String, Vec<usize>, Vec<f32>)]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape, values) in tensors {
        let start = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] });
        header.insert(name.clone(), entry);
    }
    let header = Value::from(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

fn chat(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = delft();
    command.args(["chat", "--temp", "0", "-m"]).arg(folder).args(arguments);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// What stdout and stderr had, of a chat that ends well.
fn said(folder: &Path, arguments: &[&str], input: &str) -> (String, String) {
    let output = fed(&mut chat(folder, arguments), input);
    assert_eq!(status(&output), 0, "{}", text(&output.stderr));
    (text(&output.stdout), text(&output.stderr))
}

/// The one line of a chat that ends in an error.
fn refused(folder: &Path, arguments: &[&str], input: &[u8]) -> String {
    let output = fed(&mut chat(folder, arguments), input);
    let stderr = text(&output.stderr);
    assert_eq!((status(&output), stderr.lines().count()), (1, 1), "{stderr}");
    stderr
}

/// The messages in a saved file, each as its role, content and reasoning.
fn messages(file: &Path) -> Vec<(String, String, String)> {
    let saved: Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
    let messages = saved["messages"].as_array().unwrap().iter();
    messages
        .map(|m| (text(&m["role"]), text(&m["content"]), text(&m["reasoning_content"])))
        .collect()
}

const REASONED: [&str; 8] =
    ["<think>", "\n", "First", " \u{1b}[2J", "</think>", "\n\n", "**Yes**", ", it is."];

#[test]
fn a_pipe_gets_what_the_model_wrote_and_a_file_its_parts() {
    let folder = tempfile::tempdir().unwrap();
    Script { answer: &REASONED, quiet: &["No."], ..Script::default() }.model(folder.path());
    let file = folder.path().join("talk.json");
    let (stdout, stderr) = said(
        folder.path(),
        &[],
        &format!("why\n/save {}\n/think off\nhow\n/think\n", file.display()),
    );
    assert_eq!(stdout, format!("{}\nNo.\n", REASONED.concat()));
    assert!(stderr.contains("saved 2 turns") && stderr.contains("reasoning: off"), "{stderr}");
    let [_, (role, content, reasoning)] = messages(&file).try_into().unwrap();
    assert_eq!(role, "assistant");
    assert_eq!((content.as_str(), reasoning.as_str()), ("**Yes**, it is.", "First \u{1b}[2J"));
    // Reasoning is no part of what the next question comes after.
    let (_, stderr) = said(folder.path(), &[], &format!("/load {}\n/stats\n", file.display()));
    let used = 1 + "why".len() + 1 + content.len() + 1;
    assert!(stderr.contains(&format!("context: {used} of 256 tokens in 2 turns")), "{stderr}");
}

#[test]
fn marks_that_are_special_tokens_are_marks_too() {
    let folder = tempfile::tempdir().unwrap();
    let answer = ["<|START_THINKING|>", "Hm.", "<|END_THINKING|>", "Yes."];
    Script { answer: &answer, ..Script::default() }.model(folder.path());
    let (stdout, _) = said(folder.path(), &[], "why\n");
    assert_eq!(stdout, answer.concat() + "\n");
    let (stdout, _) = said(folder.path(), &["--think", "hide"], "why\n");
    assert_eq!(stdout, "Yes.\n");
    let output = fed(chat(folder.path(), &[]).args(["--think", "off"]), "why\n");
    assert_eq!((status(&output), text(&output.stdout).as_str()), (0, "\n"));
}

#[test]
fn an_answer_that_was_cut_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    Script { answer: &REASONED, ..Script::default() }.model(folder.path());
    let file = folder.path().join("talk.json");
    let input = format!(
        "why\n/continue\n/set max-tokens none\n/continue\n/save {}\n/stats\n",
        file.display()
    );
    let (stdout, stderr) = said(folder.path(), &["-n", "2"], &input);
    assert_eq!(stdout, "<think>\nFirst \u{1b}[2J\n</think>\n\n**Yes**, it is.\n");
    assert_eq!(stderr.matches("cut after 2 tokens: /continue goes on").count(), 2, "{stderr}");
    let [_, answer] = messages(&file).try_into().unwrap();
    assert_eq!(answer.1, "**Yes**, it is.");
    assert_eq!(answer.2, "First \u{1b}[2J");
    for input in ["/continue\n", "/undo\n"] {
        refused(folder.path(), &["-n", "2"], input.as_bytes());
    }
}

#[test]
fn stats_are_true_after_commands_and_failures() {
    let folder = tempfile::tempdir().unwrap();
    Script { answer: &["one", "two"], ..Script::default() }.model(folder.path());
    let (_, stderr) =
        said(folder.path(), &["--ctx", "64"], "abc\n/stats\n/clear\n/stats\nabc\n/undo\n/stats\n");
    let lines: Vec<&str> = stderr.lines().filter(|line| line.starts_with("context: ")).collect();
    // <|user|> abc <|assistant|> onetwo <|assistant|>
    assert_eq!(
        lines,
        [
            "context: 12 of 64 tokens in 2 turns",
            "context: 0 of 64 tokens in 0 turns",
            "context: 0 of 64 tokens in 0 turns"
        ]
    );
    // What would begin the next message has no room any more.
    let (_, stderr) = said(folder.path(), &["--ctx", "6"], "abc\n/stats\n");
    assert!(stderr.contains("context: 6 of 6 tokens in 2 turns"), "{stderr}");
    let too_long = "x".repeat(70);
    let stderr = refused(folder.path(), &["--ctx", "64"], too_long.as_bytes());
    for word in ["at most 64 tokens", "found 72", "/undo", "/clear", "--ctx", "/rotate on"] {
        assert!(stderr.contains(word), "{word}: {stderr}");
    }
    let (_, stderr) = said(folder.path(), &["--ctx", "5"], "abc\n/rotate\n");
    assert!(
        stderr.contains("the context is full: /undo or /clear") && stderr.contains("/rotate on"),
        "{stderr}"
    );
}

#[test]
fn a_full_context_goes_on_once_it_forgets_the_oldest() {
    let folder = tempfile::tempdir().unwrap();
    Script { answer: &["one", "two"], ..Script::default() }.model(folder.path());
    let (stdout, stderr) =
        said(folder.path(), &["--ctx", "6"], "abc\n/rotate on\n/continue\nabc\n/rotate\n/stats\n");
    let (before, after) = stderr.split_once("then forgets the oldest").unwrap();
    assert!(before.contains("the context is full") && !after.contains("is full"), "{stderr}");
    assert!(after.contains("holds 6 tokens, then forgets the oldest"), "{stderr}");
    assert!(after.contains("context: 6 of 6 tokens in 4 turns"), "{stderr}");
    assert_eq!(stdout.replace('\n', ""), "onetwoonetwo", "{stderr}");
    let stderr = refused(folder.path(), &["--ctx", "6"], b"/rotate off\n");
    assert!(stderr.contains("/rotate: expected on, or nothing"), "{stderr}");
}

#[test]
fn settings_can_be_seen_and_unset() {
    let folder = tempfile::tempdir().unwrap();
    Script { answer: &["one", "two"], ..Script::default() }.model(folder.path());
    let (stdout, stderr) = said(
        folder.path(),
        &["-n", "9", "--stop", "two", "--top-k", "7"],
        "abc\n/set stop\n/set stop none\nabc\n/set max-tokens none\n/SET Max-Tokens\n/set top-k 3\n/set top-k default\n\
         /set top-k\n/set stop default\n/set max-tokens default\n",
    );
    assert_eq!(stdout, "one\nonetwo\n");
    let values: Vec<String> = stderr
        .lines()
        .filter(|line| !line.starts_with("sampling: "))
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    let expected = [
        "stop \"two\"",
        "stop none",
        "max-tokens until the model stops",
        "max-tokens until the model stops",
        "top-k 7",
        "stop \"two\"",
        "max-tokens 9",
    ];
    assert_eq!(values, expected);
    assert!(refused(folder.path(), &[], b"/set nothing").contains("expected one of temp"));
    assert!(refused(folder.path(), &[], b"/set nothing default").contains("expected one of temp"));
}

#[test]
fn a_file_is_not_replaced_without_being_told() {
    let folder = tempfile::tempdir().unwrap();
    Script { answer: &["one"], ..Script::default() }.model(folder.path());
    let file = folder.path().join("precious");
    std::fs::write(&file, "precious").unwrap();
    let save = |bang: &str| format!("abc\n/save{bang} {}\n", file.display());
    let output = fed(&mut chat(folder.path(), &[]), save(""));
    assert_eq!(status(&output), 1);
    assert!(text(&output.stderr).contains("/save! replaces it"), "{}", text(&output.stderr));
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "precious");
    said(folder.path(), &[], &save("!"));
    assert_eq!(messages(&file).len(), 2);
}

#[test]
fn commands_have_short_names_and_files_become_messages() {
    let folder = tempfile::tempdir().unwrap();
    Script { answer: &["one"], ..Script::default() }.model(folder.path());
    let (note, talk) = (folder.path().join("note.txt"), folder.path().join("talk.json"));
    std::fs::write(&note, "a note\n").unwrap();
    let input = format!(
        "/FILE {}\nwhat is it?\n/etc/hosts is a path\n/mod\n/sys Be.\n/sav {}\n/BYE\nnever asked\n",
        note.display(),
        talk.display()
    );
    let (stdout, stderr) = said(folder.path(), &[], &input);
    assert_eq!(stdout, "one\none\n");
    assert!(stderr.contains("has a chat template") && stderr.contains("(llama)"), "{stderr}");
    let contents: Vec<String> = messages(&talk).into_iter().map(|message| message.1).collect();
    assert_eq!(contents, ["Be.", "a note\n\n\nwhat is it?", "one", "/etc/hosts is a path", "one"]);
    assert!(refused(folder.path(), &[], b"/s").contains("/system, /set, /stats, /save"));
    refused(folder.path(), &[], b"/copy");
}

#[test]
fn input_without_an_end_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    Script { answer: &["one"], ..Script::default() }.model(folder.path());
    let stderr = refused(folder.path(), &[], &vec![b'y'; 3 << 20]);
    assert!(stderr.contains("standard input: expected lines of at most 1024 KiB"), "{stderr}");
    let lines = "\"\"\"\n".to_string() + &("y".repeat(99) + "\n").repeat(200_000);
    let stderr = refused(folder.path(), &[], lines.as_bytes());
    assert!(stderr.contains("a message of at most 16 MiB"), "{stderr}");
    let file = folder.path().join("endless");
    std::fs::write(&file, vec![b' '; (16 << 20) + 1]).unwrap();
    for command in ["/load", "/file"] {
        let stderr =
            refused(folder.path(), &[], format!("{command} {}", file.display()).as_bytes());
        assert!(stderr.contains("endless: expected at most 16 MiB"), "{stderr}");
    }
    refused(folder.path(), &[], b"\xff\n");
}

#[test]
fn a_model_without_a_template_goes_on_with_the_text() {
    let folder = tempfile::tempdir().unwrap();
    // Nothing is a mark in the text of a model that only continues.
    Script { plain: true, ..Script::default() }.model(folder.path());
    let (stdout, stderr) = said(folder.path(), &["-n", "1"], "abc\n/think show\n/model\n");
    assert_eq!(stdout.lines().count(), 1);
    assert!(stderr.contains("it continues what you type"), "{stderr}");
    assert!(refused(folder.path(), &[], b"/think on").contains("a chat template"));
}

/// At a terminal: what a screen shows of the chat while keys are pressed.
#[cfg(unix)]
mod terminal {
    use super::{REASONED, Script, chat};
    use std::io::{Read, Write};
    use std::path::Path;
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    /// Longer than anything takes, on the busiest machine.
    const PATIENCE: Duration = Duration::from_secs(120);

    /// A chat in a window.
    struct Window {
        pty: Arc<pty_process::blocking::Pty>,
        child: std::process::Child,
        screen: Arc<Mutex<vt100::Parser>>,
    }

    impl Window {
        fn open(folder: &Path, arguments: &[&str], columns: u16) -> Window {
            let (pty, pts) = pty_process::blocking::open().unwrap();
            pty.resize(pty_process::Size::new(30, columns)).unwrap();
            let mut command = chat(folder, arguments);
            command.current_dir(folder).env("HOME", folder).env("TERM", "xterm");
            command.env_remove("XDG_DATA_HOME").env_remove("NO_COLOR");
            let child = pty_process::blocking::Command::from(command).spawn(pts).unwrap();
            let (pty, screen) =
                (Arc::new(pty), Arc::new(Mutex::new(vt100::Parser::new(30, columns, 0))));
            let (output, shown) = (pty.clone(), screen.clone());
            std::thread::spawn(move || {
                let mut bytes = [0; 4096];
                while let Ok(read @ 1..) = (&*output).read(&mut bytes) {
                    shown.lock().unwrap().process(&bytes[..read]);
                }
            });
            let window = Window { pty, child, screen };
            window.wait("Ctrl-D leaves\n> ");
            window
        }

        fn press(&self, keys: &str) {
            (&*self.pty).write_all(keys.as_bytes()).unwrap();
        }

        /// What the window shows, without the blanks at the ends of lines.
        fn shown(&self) -> String {
            let screen = self.screen.lock().unwrap();
            screen.screen().contents()
        }

        /// Waits until the window shows this text, which may go on in the next line. The prompt's
        /// blank is the end of a line.
        fn wait(&self, text: &str) -> String {
            let in_a_row = |text: &str| text.replace('\n', " ");
            let wanted = in_a_row(text.trim_end());
            self.until(text, |shown| in_a_row(shown).contains(&wanted))
        }

        fn until(&self, what: &str, holds: impl Fn(&str) -> bool) -> String {
            let since = Instant::now();
            loop {
                let shown = self.shown();
                if holds(&shown) {
                    return shown;
                }
                assert!(since.elapsed() < PATIENCE, "{what:?} is not in:\n{shown}");
                std::thread::sleep(Duration::from_millis(20));
            }
        }

        /// Whether a word of the window is bold, and whether it is dimmed.
        fn style(&self, word: &str) -> (bool, bool) {
            let screen = self.screen.lock().unwrap();
            let screen = screen.screen();
            let (rows, columns) = screen.size();
            for row in 0..rows {
                let line: String = screen.rows(0, columns).nth(row.into()).unwrap();
                if let Some(at) = line.find(word) {
                    let cell = screen.cell(row, line[..at].chars().count() as u16).unwrap();
                    return (cell.bold(), cell.dim());
                }
            }
            panic!("{word:?} is not in:\n{}", screen.contents());
        }

        fn leaves(mut self, keys: &str) {
            self.press(keys);
            let since = Instant::now();
            loop {
                if let Some(status) = self.child.try_wait().unwrap() {
                    assert_eq!(status.code(), Some(0), "{}", self.shown());
                    return;
                }
                assert!(since.elapsed() < PATIENCE, "it stays:\n{}", self.shown());
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }

    impl Drop for Window {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    const PROSE: [&str; 14] = [
        "# Title",
        "\n",
        "Some **bo",
        "ld** words",
        " that go",
        " on and on",
        " until the",
        " window ends.",
        "\n- an item",
        " which is wrapp",
        "ed below its words",
        "\n```\n",
        "code that is too long for one line",
        "\n```\n\u{1b}[2J done",
    ];

    #[test]
    fn answers_are_wrapped_and_coloured() {
        let folder = tempfile::tempdir().unwrap();
        Script { answer: &PROSE, ..Script::default() }.model(folder.path());
        let window = Window::open(folder.path(), &[], 30);
        window.press("hi\r");
        let shown = window.wait("done\n> ");
        let expected = "# Title\nSome **bold** words that go on\nand on until the window ends.\n- an item which is wrapped\n  \
                        below its words\n```\ncode that is too long for one \nline\n```\n\u{241b}[2J done\n>";
        assert!(
            shown.contains(&expected.replace("one \nline", "one line")) || shown.contains(expected),
            "{shown}"
        );
        assert_eq!(window.style("Title"), (true, false), "headings are bold");
        assert_eq!(window.style("bold"), (true, false));
        assert_eq!(window.style("**"), (false, true), "marks are dimmed");
        assert_eq!(window.style("words"), (false, false));
        // What the chat itself says, too.
        window.press("/nonsense\r");
        let shown = window.wait("an unknown one");
        let expected =
            "delft: /nonsense: expected a\ncommand that /help lists,\nfound an unknown one";
        assert!(shown.contains(expected), "{shown}");
        window.leaves("/bye\r");
    }

    #[test]
    fn reasoning_is_folded_and_shown_when_asked() {
        let folder = tempfile::tempdir().unwrap();
        Script { answer: &REASONED, ..Script::default() }.model(folder.path());
        let window = Window::open(folder.path(), &[], 40);
        window.press("why\r");
        let shown = window.wait("it is.\n> ");
        assert!(!shown.contains("First") && !shown.contains("think>"), "{shown}");
        assert!(
            shown.contains("> why\nthought for ") && shown.contains(" tokens\n**Yes**, it is."),
            "{shown}"
        );
        window.press("/think show\r");
        window.wait("First \u{241b}[2J");
        assert_eq!(window.style("First"), (false, true), "reasoning is dimmed");
        window.press("/clear\r");
        window.wait("forgotten");
        window.press("why\r");
        let shown = window.wait("[2J\nthought for ");
        assert_eq!(shown.matches("First").count(), 2, "{shown}");
        window.leaves("\u{4}");
    }

    #[test]
    fn tab_completes_and_hints_help() {
        let folder = tempfile::tempdir().unwrap();
        Script { answer: &["one"], ..Script::default() }.model(folder.path());
        std::fs::write(folder.path().join("a long name.txt"), "x").unwrap();
        let window = Window::open(folder.path(), &[], 60);
        window.press("/fi");
        window.wait("> /file PATH");
        window.press("\ta l\t\r");
        window.wait("> /file a long name.txt");
        window.wait("the next message begins with a long name.txt (1 characters)");
        window.press("/set pres\t1.5\r");
        window.wait("> /set presence-penalty 1.5\n");
        window.press("/help\r");
        window.wait("reason or not;\n                    show, fold, hide");
        window.press("/save model.safetensors\r");
        window.wait("is there already. Replace it? [y/N]");
        window.press("\r");
        window.wait("not saved");
        window.leaves("\u{4}");
    }

    #[test]
    fn ctrl_c_ends_an_answer_and_then_the_chat() {
        let folder = tempfile::tempdir().unwrap();
        let answer = ["one ", "two ", "three "];
        Script { answer: &answer, endless: true, context: 1 << 22, ..Script::default() }
            .model(folder.path());
        let window = Window::open(folder.path(), &[], 40);
        window.press("go\r");
        window.wait("one two three one");
        // Typed during the answer, it is not seen in it, and begins the next line.
        window.press("dropped");
        window.press("\u{3}");
        window.wait("interrupted: /continue goes on\n> ");
        assert!(!window.shown().contains("dropped"), "{}", window.shown());
        window.press("half a line\u{3}");
        window.wait("> half a line\n> ");
        window.press("\u{3}");
        window.wait("Ctrl-C once more leaves");
        window.press("/stats\r");
        window.wait("in 2 turns");
        window.press("\u{3}");
        window.until("the advice again", |shown| shown.matches("once more leaves").count() == 2);
        window.leaves("\u{3}");
    }

    #[test]
    fn what_is_typed_during_an_answer_begins_the_next_line() {
        let folder = tempfile::tempdir().unwrap();
        Script { answer: &["one ", "two "], endless: true, context: 1024, ..Script::default() }
            .model(folder.path());
        let window = Window::open(folder.path(), &[], 40);
        window.press("go\r");
        window.wait("one two one");
        window.press("/mod");
        window.wait("the context is full: ");
        window.wait("> /model");
        window.press("\t\r");
        window.wait("has a chat template");
        assert!(!window.shown().contains("one/mod"), "{}", window.shown());
        window.leaves("/exit\r");
    }

    #[test]
    fn a_message_that_is_not_read_is_no_part_of_the_conversation() {
        let folder = tempfile::tempdir().unwrap();
        Script { answer: &["one"], context: 1 << 20, ..Script::default() }.model(folder.path());
        std::fs::write(folder.path().join("long"), "x".repeat(400_000)).unwrap();
        let window = Window::open(folder.path(), &[], 60);
        window.press("hi\r");
        window.wait("one\n> ");
        window.press("/file long\r");
        window.wait("(400000 characters)");
        window.press("what is it?\r");
        window.wait("% of");
        window.press("\u{3}");
        window.wait("the message is no part of the conversation");
        window.press("/clear\r/stats\r");
        window.wait("tokens in 0 turns");
        assert!(!window.shown().contains("% of"), "the line is wiped: {}", window.shown());
        window.leaves("/exit\r");
    }
}

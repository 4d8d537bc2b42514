//! `delft serve` from outside: it tells where it is, answers there, keeps keys to itself, and ends
//! when it is told to.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::{Value, json};

use crate::common::{delft, fed, fixture, status};

/// The response to a GET, as it comes.
fn get(address: &str, path: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    let request =
        format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    response
}

#[test]
fn it_serves_until_it_is_told_to_stop() {
    let model = format!("tiny={}", fixture("llama3"));
    let mut command = delft();
    command.args(["serve", &model, "--port", "0", "--parallel", "1"]).stderr(Stdio::piped());
    let mut child = command.env("DELFT_API_KEY", "k-3141592653").spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let line = lines.find(|line| line.starts_with("serving ")).unwrap();
    let (name, address) = line["serving ".len()..].split_once(" at http://").unwrap();
    assert_eq!(name, "tiny");
    assert!(get(address, "/", "").contains("<title>Delft</title>"));
    assert!(get(address, "/v1/models", "").starts_with("HTTP/1.1 401"));
    let models = get(address, "/v1/models", "Authorization: Bearer k-3141592653\r\n");
    assert!(models.starts_with("HTTP/1.1 200") && models.contains("\"id\":\"tiny\""), "{models}");
    let sent = Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let log: Vec<String> = lines.collect();
    assert!(
        log.iter().any(|line| line.contains(" request ") && line.contains("status=401")),
        "{log:?}"
    );
    assert!(log.iter().any(|line| line.contains(" stopping ")), "{log:?}");
    assert!(!log.iter().any(|line| line.contains("3141592653")), "{log:?}");
}

/// What a model says, and what it says with the adapter that is tuned meanwhile by these flags,
/// once that is done.
fn said_while_tuning(model: &str, more: &[&str], flags: &str) -> [String; 2] {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("texts.jsonl");
    let line = |i: usize| format!("{{\"text\": \"The zebra number {i} sings zub zub zub.\"}}\n");
    std::fs::write(&data, (0..8).map(line).collect::<String>()).unwrap();
    let (data, out) = (data.to_str().unwrap(), folder.path().join("zebras"));
    let flags = format!("--batch-tokens 48 --held-out none --steps 8 {flags}");
    let mut command = delft();
    command.args(["serve", model, "--port", "0", "--parallel", "2", "--tune", data]).args(more);
    command.args(["--tune-out", out.to_str().unwrap(), "--tune-flags", &flags]);
    let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let line = lines.find(|line| line.starts_with("serving ")).unwrap();
    let (names, url) = line["serving ".len()..].split_once(" at ").unwrap();
    let base = model.split_once('=').unwrap().0;
    assert_eq!(names, format!("{base}, zebras"));
    // From the first update on it has a name, though it has learned nothing.
    let first = lines.find(|line| line.starts_with("tuning: update")).unwrap();
    let models = get(url.trim_start_matches("http://"), "/v1/models", "");
    assert!(models.contains("\"id\":\"zebras\""), "{first}: {models}");
    let seen: Vec<String> = lines
        .by_ref()
        .take_while(|line| !line.contains("zebras is the finished adapter"))
        .collect();
    assert!(seen.iter().any(|line| line.contains("tuning: update 8 of 8")), "{seen:?}");
    std::thread::spawn(move || lines.for_each(drop));
    let serving = Serving { child, url: url.to_owned() };
    let models = get(url.trim_start_matches("http://"), "/v1/models", "");
    for name in [base, "zebras"] {
        assert!(models.contains(&format!("\"id\":\"{name}\"")), "{models}");
    }
    assert!(out.join("adapter_model.safetensors").exists());
    [base, "zebras"].map(|model| {
        let body = json!({ "model": model, "prompt": "The zebra number 3", "max_tokens": 6, "temperature": 0 });
        let answer = serving.post("/v1/completions", &body.to_string());
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let body: Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
        body["choices"][0]["text"].as_str().unwrap().to_owned()
    })
}

/// What is learned meanwhile is asked for beside the model, and served once it is done.
#[test]
fn an_adapter_is_tuned_and_served_at_once() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/delft-stories.gguf");
    let model = format!("stories={}", model.display());
    for dora in ["", "--dora"] {
        let [base, tuned] = said_while_tuning(&model, &[], &format!("--lr 5e-3 {dora}"));
        assert!(tuned.contains("sings") && !base.contains("sings"), "{dora}: {base}, {tuned}");
    }
}

/// A server that was killed while it tuned, and started again with the same words, serves what there
/// was and goes on, to the bytes that it would have had.
#[test]
fn a_server_that_is_started_again_goes_on_tuning() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("texts.jsonl");
    let line = |i: usize| format!("{{\"text\": \"The zebra number {i} sings zub zub zub.\"}}\n");
    std::fs::write(&data, (0..8).map(line).collect::<String>()).unwrap();
    let start = |out: &Path| {
        let model = testing::models().join("llama3/model.f32.gguf");
        let mut command = delft();
        command.args(["serve", "--port", "0", "--parallel", "2", "-m", model.to_str().unwrap()]);
        command.args(["--tune", data.to_str().unwrap(), "--tune-out", out.to_str().unwrap()]);
        command.args(["--tune-flags", "--batch-tokens 60 --held-out none --steps 300"]);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        (child, lines)
    };
    let [whole, parts] = ["whole", "parts"].map(|name| folder.path().join(name));
    let (mut child, mut lines) = start(&parts);
    lines.find(|line| line.contains("tuning: update 60 of 300")).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    for (out, again) in [(&parts, true), (&whole, false)] {
        let (mut child, mut lines) = start(out);
        let said: Vec<String> =
            lines.by_ref().take_while(|line| !line.contains("is the finished adapter")).collect();
        let goes_on = said.iter().any(|line| line.contains("tuning goes on behind update"));
        assert_eq!(goes_on, again, "{said:?}");
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let adapter = |out: &Path| std::fs::read(out.join("adapter_model.safetensors")).unwrap();
    assert!(adapter(&parts) == adapter(&whole));
}

/// The same on a simulated GPU, which serves and tunes.
#[test]
fn an_adapter_is_tuned_and_served_on_a_gpu() {
    let fixture = testing::models().join("llama3/model.f32.gguf");
    let model = format!("tiny={}", fixture.display());
    for dora in ["", "--dora"] {
        let flags = format!("--device sim --precision f32 --lr 3e-2 {dora}");
        let [base, tuned] = said_while_tuning(&model, &["--device", "sim"], &flags);
        assert!(tuned != base, "{dora}: {base}");
    }
}

/// A server that runs until it is dropped.
struct Serving {
    child: Child,
    url: String,
}

impl Serving {
    fn start(args: &[&str]) -> Serving {
        let mut command = delft();
        command.args(["serve", "--port", "0", "--parallel", "2"]).args(args);
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
        let line = lines.find(|line| line.starts_with("serving ")).unwrap();
        let url = format!("http://{}", line.split_once(" at http://").unwrap().1);
        // Its log goes on, and nobody reads it.
        std::thread::spawn(move || lines.for_each(drop));
        Serving { child, url }
    }

    /// Runs a command that asks the server.
    fn run(&self, args: &[&str]) -> Output {
        delft().args(args).args(["--url", &self.url]).output().unwrap()
    }

    fn post(&self, path: &str, body: &str) -> String {
        let address = self.url.strip_prefix("http://").unwrap();
        let mut stream = TcpStream::connect(address).unwrap();
        let head = format!("POST {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n");
        write!(stream, "{head}Content-Length: {}\r\n\r\n{body}", body.len()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    /// MiB that it holds now.
    #[cfg(target_os = "linux")]
    fn resident(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() / 1024.0
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn text(output: &Output) -> String {
    assert_eq!(status(output), 0, "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What a model held is the system's again when it is unloaded, however often it comes and goes.
#[cfg(target_os = "linux")]
#[test]
fn memory_returns_when_a_model_goes() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/delft-stories.gguf");
    let (small, large) = (format!("tiny={}", fixture("llama3")), model.display().to_string());
    let serving = Serving::start(&[&small, &format!("large={large}")]);
    let stop = || drop(text(&serving.run(&["stop", "large"])));
    let ask = || {
        let body = r#"{"model": "large", "prompt": "Once", "max_tokens": 40, "ignore_eos": true}"#;
        let answer = serving.post("/v1/completions", body);
        assert!(answer.contains("\"completion_tokens\":40"), "{answer}");
    };
    ask();
    stop();
    let before = serving.resident();
    for _ in 0..6 {
        ask();
        assert!(serving.resident() > before + 10.0, "{} beside {before}", serving.resident());
        stop();
    }
    let after = serving.resident();
    assert!(after < before + 4.0, "{after} MiB, before {before}");
    let listed = text(&serving.run(&["ps"]));
    assert!(listed.contains("tiny") && !listed.contains("large"), "{listed}");
}

#[test]
fn a_server_is_asked_what_it_has_loaded_and_told_to_unload_it() {
    let (one, two) = (format!("one={}", fixture("llama3")), format!("two={}", fixture("qwen3")));
    let serving = Serving::start(&[&one, &two, "--keep-alive", "1h"]);
    let told = text(&serving.run(&["ps", "--json"]));
    let told: Value = serde_json::from_str(&told).unwrap();
    assert_eq!(
        (&told["models"][0]["name"], &told["models"][1]["name"]),
        (&json!("one:latest"), &json!("two:latest"))
    );
    let listed = text(&serving.run(&["ps"]));
    assert!(listed.starts_with("MODEL") && listed.contains("one "), "{listed}");
    text(&serving.run(&["stop", "one"]));
    let listed = text(&serving.run(&["ps"]));
    assert!(!listed.contains("one ") && listed.contains("two "), "{listed}");
    let output = serving.run(&["stop", "three"]);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(status(&output) == 1 && stderr.contains("expected one or two"), "{stderr}");
    let nobody = delft().args(["ps", "--url", "http://127.0.0.1:9"]).output().unwrap();
    let stderr = String::from_utf8_lossy(&nobody.stderr).into_owned();
    assert!(status(&nobody) == 1 && stderr.contains("delft serve starts one"), "{stderr}");
}

#[test]
fn what_was_recorded_is_answered_the_same_again() {
    let folder = tempfile::tempdir().unwrap();
    let asked = folder.path().join("asked");
    let serving = Serving::start(&["--record", asked.to_str().unwrap()]);
    let chat = r#""messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 16"#;
    for (path, more) in [
        // Hot enough that another seed tells another story.
        ("/v1/chat/completions", r#", "temperature": 1.5"#),
        ("/v1/chat/completions", r#", "stream": true, "n": 2"#),
        ("/v1/messages", r#", "stream": true"#),
        ("/api/chat", r#", "options": {"num_predict": 12}"#),
        ("/v1/chat/completions", r#", "colour": 1"#),
    ] {
        let chat = if path == "/api/chat" {
            chat.replace(", \"max_tokens\": 16", "")
        } else {
            chat.into()
        };
        serving.post(path, &format!("{{{chat}{more}}}"));
    }
    let file = std::fs::read_dir(&asked).unwrap().next().unwrap().unwrap().path();
    let recorded = std::fs::read_to_string(file).unwrap();
    assert_eq!(recorded.lines().count(), 5);
    let copy = folder.path().join("copy.jsonl");
    std::fs::write(&copy, &recorded).unwrap();
    let output = serving.run(&["replay", copy.to_str().unwrap()]);
    assert_eq!(text(&output).matches(": same\n").count(), 5, "{output:?}");
    // Another seed is another answer.
    let first: Value = serde_json::from_str(recorded.lines().next().unwrap()).unwrap();
    let other = recorded.replacen(first["seed"].as_str().unwrap(), "7", 1);
    std::fs::write(&copy, other).unwrap();
    let output = serving.run(&["replay", copy.to_str().unwrap(), "--json"]);
    assert_eq!(status(&output), 1);
    let line = String::from_utf8_lossy(&output.stdout).lines().next().unwrap().to_string();
    let line: Value = serde_json::from_str(&line).unwrap();
    assert_eq!(line["same"], false);
    assert!(
        line["difference"].as_str().unwrap().starts_with("choices[0].message.content: "),
        "{line}"
    );
    assert_eq!((&line["parting"]["of"], &line["parting"]["now"]), (&json!("seed"), &json!(7)));
    assert_eq!(line["changed"], json!([]));
    // What has changed is told, and the token from which on an answer is another.
    let mut other = first;
    other["build"] = "0.0.1".into();
    other["settings"]["sampling"]["temperature"] = 0.125.into();
    other["response"]["choices"][0]["message"]["content"] = "Once".into();
    let was = other["texts"][0]["tokens"][5].take();
    other["texts"][0]["tokens"][5] = 3.into();
    std::fs::write(&copy, format!("{other}\n")).unwrap();
    let output = serving.run(&["replay", copy.to_str().unwrap()]);
    assert_eq!(status(&output), 1);
    let (told, aside) = (output.stdout, String::from_utf8(output.stderr).unwrap());
    let told = String::from_utf8(told).unwrap();
    assert!(told.contains(&format!("text 0: token 5 of its answer is 3, now {was}")), "{told}");
    for words in [": build: \"0.0.1\", now \"0.1.0", ": sampling.temperature: ", "0.125"] {
        assert!(aside.contains(words), "{words} in {aside}");
    }
    assert!(!aside.contains("fingerprint"), "{aside}");
}

/// Room for adapters is of a rank, and texts are no longer than the server allows.
#[test]
fn a_server_has_room_for_adapters_and_a_limit_of_tokens() {
    let base = format!("base={}", fixture("llama3"));
    let path = testing::models().join("../adapters/rslora");
    let asked = json!({ "name": "mine", "path": path }).to_string();
    let serving = |rank: &str| {
        let room = ["--adapter-room", "2", "--adapter-rank", rank, "--max-tokens", "5"];
        Serving::start(&[&[&base[..]], &room[..]].concat())
    };
    let refused = serving("4").post("/adapters", &asked);
    assert!(refused.starts_with("HTTP/1.1 400") && refused.contains("a rank up to 4"), "{refused}");
    // The greatest of its ranks is 5.
    let serving = serving("5");
    let added = serving.post("/adapters", &asked);
    assert!(added.starts_with("HTTP/1.1 200"), "{added}");
    let body =
        json!({ "model": "mine", "prompt": [3, 4, 5], "max_tokens": 50, "ignore_eos": true });
    let answer = serving.post("/v1/completions", &body.to_string());
    assert!(answer.contains("\"completion_tokens\":5"), "{answer}");
}

#[test]
fn what_cannot_be_served_is_told_in_one_line() {
    let model = fixture("llama3");
    let cases: [(&[&str], i32, &str); 8] = [
        (&["--cors", "*"], 2, "name each site"),
        (&["--cors", "https://example.com/"], 2, "without a path"),
        (&["--host", "0.0.0.0"], 1, "--api-key-file"),
        (&["--api-key", "two words"], 2, "--api-key"),
        (&["--api-key-file", "/nowhere/keys"], 1, "/nowhere/keys"),
        (&[model.as_str()], 1, "names that differ"),
        // Before one is loaded, which would be refused too.
        (&[model.as_str(), "--memory", "1K"], 1, "names that differ"),
        (&["--memory", "1K"], 1, "of its memory, found 0.0 MiB allowed"),
    ];
    for (flags, code, words) in cases {
        let output = fed(delft().args(["serve", "--port", "0", &model]).args(flags), "");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(status(&output), code, "{flags:?}: {told}");
        assert!(told.contains(words), "{flags:?}: {told}");
    }
    // A port that is in use is told before a model is looked for.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let output = fed(delft().args(["serve", "/nowhere/model.gguf", "--port", &port]), "");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(status(&output), 1, "{told}");
    assert!(told.contains("take another port"), "{told}");
}

//! Models that are loaded when a request names them, side by side, and unloaded when their time is
//! over or they are told to.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use delft::hub::{Container, Hub, LocalModel, ModelSource};
use delft::{AdapterFile, Engine, LoadOptions, Location};
use delft_serve::{AccessRules, GenerationLimits, Keep, Library, Named, Running, Served};
use serde_json::{Value, json};

use crate::common::{
    Response, bundled, get, limits, post, receive, send, serve_all, serve_library,
};

pub(crate) fn reference(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference").join(path)
}

pub(crate) fn named(name: &str, path: PathBuf) -> Named {
    let kind = if path.is_dir() { Container::Folder } else { Container::Gguf };
    let model = LocalModel { location: Location::Path(path), kind, source: ModelSource::Local };
    Named { name: name.to_string(), model, devices: Vec::new(), adapters: Vec::new() }
}

pub(crate) fn options() -> LoadOptions {
    LoadOptions { threads: Some(2), sessions: 4, context: Some(256), ..LoadOptions::default() }
}

fn library() -> Library {
    let tiny = named("tiny", reference("models/llama3"));
    let adapter = AdapterFile { path: reference("adapters/lora"), scale: 1.0, any_base: false };
    let tiny = Named { adapters: vec![("tuned".to_string(), adapter)], ..tiny };
    let named = vec![named("stories", bundled()), tiny, named("gone", reference("models/none"))];
    Library { named, options: options(), ..Library::default() }
}

fn serving() -> Running {
    serve_library(limits(), AccessRules::default(), library())
}

/// The names of what is loaded.
pub(crate) fn loaded(address: SocketAddr) -> Vec<String> {
    listed(address, "/api/ps")
}

/// The names in one of Ollama's lists, of which each has a tag, without the tag that says nothing.
pub(crate) fn listed(address: SocketAddr, path: &str) -> Vec<String> {
    let told = get(address, path).json();
    let name = |model: &Value| {
        let name = model["name"].as_str().unwrap();
        assert!(name.contains(':') && model["model"] == name, "{model}");
        name.strip_suffix(":latest").unwrap_or(name).to_string()
    };
    told["models"].as_array().unwrap().iter().map(name).collect()
}

fn story(model: &str, tokens: usize) -> Value {
    json!({ "model": model, "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0, "ignore_eos": true })
}

fn ids(model: &str, tokens: usize) -> Value {
    json!({ "model": model, "prompt": [3, 4, 5, 6], "max_tokens": tokens, "temperature": 0, "ignore_eos": true })
}

/// Waits until something holds.
pub(crate) fn soon(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_request_loads_the_model_that_it_names() {
    let running = serving();
    let address = running.address();
    assert_eq!(loaded(address), Vec::<String>::new());
    let list = get(address, "/v1/models").json();
    let list: Vec<&str> =
        list["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(list, ["stories", "tiny", "tuned", "gone"]);

    // A name that is not given means the first.
    let mut unnamed = story("", 4);
    unnamed.as_object_mut().unwrap().remove("model");
    let first = post(address, "/v1/completions", &unnamed).json();
    assert_eq!(first["model"], "stories", "{first}");
    assert_eq!(loaded(address), ["stories"]);

    // An adapter's name loads its model, and both are there.
    assert_eq!(post(address, "/v1/completions", &ids("tuned", 4)).json()["model"], "tuned");
    assert_eq!(loaded(address), ["stories", "tiny", "tuned"]);
    let told = get(address, "/api/ps").json();
    assert!(told["models"][0]["size"].as_u64().unwrap() > 10 << 20, "{told}");
    assert!(told["models"][0]["expires_at"].as_str().unwrap().starts_with("2318"), "{told}");

    let unknown = post(address, "/v1/completions", &story("absent", 1));
    assert_eq!(
        (unknown.status, &unknown.json()["error"]["code"]),
        (404, &json!("model_not_found"))
    );
    let message = unknown.json()["error"]["message"].as_str().unwrap().to_string();
    assert!(message.starts_with("model: expected stories or tiny or tuned or gone,"), "{message}");
    let broken = post(address, "/v1/completions", &story("gone", 1));
    assert_eq!(
        (broken.status, &broken.json()["error"]["code"]),
        (500, &json!("model_not_loadable"))
    );
    let message = broken.json()["error"]["message"].as_str().unwrap().to_string();
    assert!(message.contains("models/none"), "{message}");
    running.stop().unwrap();
}

#[test]
fn two_models_answer_at_once() {
    let running = serving();
    let address = running.address();
    let alone = post(address, "/v1/completions", &story("stories", 60)).json();
    let mut streamed = story("stories", 60);
    streamed["stream"] = true.into();
    let (mut events, mut other) = (String::new(), Vec::new());
    let mut stream = send(address, "POST", "/v1/completions", &[], &streamed.to_string());
    let mut first = [0; 1];
    stream.read_exact(&mut first).unwrap();
    for _ in 0..3 {
        other.push(post(address, "/v1/completions", &ids("tiny", 8)).json());
    }
    stream.read_to_string(&mut events).unwrap();
    assert!(other.iter().all(|answer| answer["usage"]["completion_tokens"] == 8), "{other:?}");
    let text: String = events
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok())
        .filter_map(|event| Some(event["choices"][0]["text"].as_str()?.to_string()))
        .collect();
    assert_eq!(alone["choices"][0]["text"], text.as_str());
    running.stop().unwrap();
}

/// Two models of which memory holds one: the one that is not used gives way, one in use does when
/// it has answered.
#[test]
fn models_give_way_where_memory_is_short() {
    let planned = |named: &Named| -> u64 {
        let prepared = Engine::prepare(named.model.location.clone(), &options()).unwrap();
        prepared.plan().iter().map(|plan| plan.needed() as u64).sum()
    };
    let mut library = library();
    library.named[1].adapters.clear();
    let sizes: Vec<u64> = library.named[..2].iter().map(planned).collect();
    let most = *sizes.iter().max().unwrap();
    let with = |memory: u64| Library { memory: Some(memory), ..library.clone() };
    let running = serve_library(limits(), AccessRules::default(), with(most + 1024));
    let address = running.address();
    assert_eq!(post(address, "/v1/completions", &story("stories", 2)).status, 200);
    assert_eq!(post(address, "/v1/completions", &ids("tiny", 2)).status, 200);
    assert_eq!(loaded(address), ["tiny"]);

    let mut long = story("stories", 200);
    long["stream"] = true.into();
    let mut stream = send(address, "POST", "/v1/completions", &[], &long.to_string());
    let mut first = [0; 200];
    stream.read_exact(&mut first).unwrap();
    assert_eq!(loaded(address), ["stories"]);
    assert_eq!(post(address, "/v1/completions", &ids("tiny", 2)).status, 200);
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("[DONE]") && !rest.contains("error"), "{rest}");
    assert_eq!(loaded(address), ["tiny"]);
    running.stop().unwrap();

    // Who waits for one that is in use for too long is told to come again.
    let brief = GenerationLimits { time: Duration::from_millis(1500), ..limits() };
    let running = serve_library(brief, AccessRules::default(), with(most + 1024));
    let address = running.address();
    let held = post(address, "/v1/completions", &ids("tiny", 2));
    assert_eq!(held.status, 200);
    let mut stream = send(address, "POST", "/v1/completions", &[], &long.to_string());
    stream.read_exact(&mut first).unwrap();
    let start = Instant::now();
    let late = post(address, "/v1/completions", &ids("tiny", 2));
    assert!(matches!(late.status, 200 | 503), "{late:?}");
    assert!(start.elapsed() < Duration::from_secs(5));
    drop(stream);
    running.stop().unwrap();

    // Nobody gives way for what would not fit then either.
    let running = serve_library(limits(), AccessRules::default(), with(sizes[0] - 1));
    assert_eq!(post(running.address(), "/v1/completions", &ids("tiny", 2)).status, 200);
    let refused = post(running.address(), "/v1/completions", &story("stories", 2));
    assert_eq!(
        (refused.status, &refused.json()["error"]["code"]),
        (500, &json!("model_does_not_fit"))
    );
    assert!(refused.body.contains(" MiB of its memory, found "), "{refused:?}");
    assert_eq!(loaded(running.address()), ["tiny"]);
    running.stop().unwrap();
}

/// Requests that come while their model loads, or goes, wait for it and are answered.
#[test]
fn those_who_wait_for_a_model_are_answered() {
    let running = serving();
    let address = running.address();
    let ask = move |i: usize| {
        std::thread::spawn(move || {
            let model = ["stories", "tiny", "tuned"][i % 3];
            let body = if model == "stories" { story(model, 6) } else { ids(model, 6) };
            if i.is_multiple_of(5) {
                let stop = json!({ "model": model, "keep_alive": 0 });
                assert_eq!(post(address, "/api/generate", &stop).json()["done_reason"], "unload");
            }
            post(address, "/v1/completions", &body)
        })
    };
    let asked: Vec<_> = (0..24).map(ask).collect();
    for answer in asked {
        let answer = answer.join().unwrap();
        assert_eq!(answer.status, 200, "{answer:?}");
        assert_eq!(answer.json()["usage"]["completion_tokens"], 6);
    }
    running.stop().unwrap();
}

#[test]
fn a_line_that_is_full_refuses() {
    let none = GenerationLimits { queue: 0, ..limits() };
    let running = serve_library(none, AccessRules::default(), library());
    let address = running.address();
    let asked: Vec<_> = (0..6)
        .map(|_| std::thread::spawn(move || post(address, "/v1/completions", &story("stories", 1))))
        .collect();
    let answers: Vec<_> = asked.into_iter().map(|asked| asked.join().unwrap()).collect();
    assert!(answers.iter().any(|answer| answer.status == 200));
    let refused = answers.iter().filter(|answer| answer.status != 200);
    for refused in refused {
        assert_eq!((refused.status, refused.header("retry-after")), (503, Some("5")));
    }
    running.stop().unwrap();
}

#[test]
fn a_model_is_kept_as_long_as_is_asked() {
    let running = serve_library(
        limits(),
        AccessRules::default(),
        Library { keep_named: Keep::For(Duration::from_secs(3600)), ..library() },
    );
    let address = running.address();
    let ask = |keep: Value| {
        let body = json!({ "model": "stories", "prompt": "Once", "stream": false, "keep_alive": keep,
            "options": { "num_predict": 2 } });
        post(address, "/api/generate", &body)
    };
    let expires = || get(address, "/api/ps").json()["models"][0]["expires_at"].clone();
    let first = ask(json!("10m"));
    assert_eq!(first.header("x-delft-no-effect"), None);
    assert!(first.json()["load_duration"].as_u64().unwrap() > 0);
    assert_eq!(loaded(address), ["stories"]);
    assert!(!expires().as_str().unwrap().starts_with("2318"));
    ask(json!(-1));
    assert!(expires().as_str().unwrap().starts_with("2318"));
    ask(json!(0.2));
    soon("unloaded after its time", || loaded(address).is_empty());
    // A request without a prompt loads it, and one without time unloads it.
    let empty = |keep: Value| {
        let body = json!({ "model": "stories", "messages": [], "keep_alive": keep });
        post(address, "/api/chat", &body).json()["done_reason"].clone()
    };
    assert_eq!(empty(json!("1h")), "load");
    assert_eq!(loaded(address), ["stories"]);
    assert_eq!(empty(json!(0)), "unload");
    assert_eq!(loaded(address), Vec::<String>::new());
    assert_eq!(ask(json!("soon")).status, 400);
    running.stop().unwrap();
}

/// Lines of a stream of events until one is of a type.
fn until(events: &mut BufReader<TcpStream>, last: &str) -> Vec<Value> {
    let mut all = Vec::new();
    loop {
        let mut line = String::new();
        assert!(events.read_line(&mut line).unwrap() > 0, "{all:?}");
        let Some(event) = line.strip_prefix("data: ") else { continue };
        let event: Value = serde_json::from_str(event).unwrap();
        all.push(event.clone());
        if event["type"] == last {
            return all;
        }
    }
}

#[test]
fn what_happens_is_told_to_those_who_listen() {
    let running = serving();
    let address = running.address();
    let mut events = BufReader::new(send(address, "GET", "/events", &[], ""));
    until(&mut events, "listening");
    let id = {
        let answer = post(address, "/v1/completions", &story("stories", 2));
        answer.header("x-request-id").unwrap().to_string()
    };
    let told = until(&mut events, "request.ended");
    let (stages, told): (Vec<Value>, Vec<Value>) =
        told.into_iter().partition(|event| event["type"] == "model.stage");
    let order = ["opening", "planned", "loading", "packing", "compiling", "ready"];
    assert_eq!(stages.iter().map(|event| &event["stage"]).collect::<Vec<_>>(), order);
    for event in &stages {
        assert_eq!(
            (&event["model"], &event["capability"]),
            (&json!("stories"), &json!("generate"))
        );
    }
    let types: Vec<&str> = told.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(types, ["request.begun", "model.loading", "model.loaded", "request.ended"]);
    assert_eq!(told[0]["id"], id.as_str());
    assert_eq!(told[0]["path"], "/v1/completions");
    let (planned, held) = (&told[2]["planned_bytes"], &told[2]["held_bytes"]);
    assert!(planned.as_u64().unwrap() >= held.as_u64().unwrap() && held.as_u64().unwrap() > 0);
    let ended = &told[3];
    assert_eq!((&ended["id"], &ended["status"]), (&json!(id), &json!(200)));
    assert_eq!((&ended["model"], &ended["whole"]), (&json!("stories"), &json!(true)));
    post(address, "/v1/completions", &story("gone", 1));
    assert_eq!(until(&mut events, "model.failed").last().unwrap()["model"], "gone");
    post(address, "/api/generate", &json!({ "model": "stories", "keep_alive": 0 }));
    let unloaded = until(&mut events, "model.unloaded").pop().unwrap();
    assert_eq!((&unloaded["model"], &unloaded["for"]), (&json!("stories"), &json!("stop")));
    // Listeners do not keep a server from ending.
    let start = Instant::now();
    let stopping = std::thread::spawn(move || running.stop());
    until(&mut events, "server.stopping");
    stopping.join().unwrap().unwrap();
    assert!(start.elapsed() < Duration::from_secs(10));
}

/// A device that is lost fails the requests that run, and is opened anew for those that come.
#[test]
fn a_lost_device_is_told_of_and_its_models_are_loaded_again() {
    let place = "sim".parse().unwrap();
    let load = || {
        let options = LoadOptions { device: place, batched: true, ..options() };
        Engine::load(reference("models/llama3"), &options).unwrap()
    };
    let served = |engine| {
        let name = "tiny".to_string();
        vec![Served { name, engines: vec![engine], templates: None, adapters: Vec::new() }]
    };
    let text = |answer: &Response| answer.json()["choices"][0]["text"].clone();
    let running = serve_all(limits(), AccessRules::default(), served(load()));
    let expected = text(&post(running.address(), "/v1/completions", &ids("tiny", 4)));
    running.stop().unwrap();

    device::gpu::sim::break_next(300);
    let running = serve_all(limits(), AccessRules::default(), served(load()));
    let address = running.address();
    let mut events = BufReader::new(send(address, "GET", "/events", &[], ""));
    until(&mut events, "listening");
    let failed = loop {
        let answer = post(address, "/v1/completions", &ids("tiny", 4));
        if answer.status != 200 {
            break answer;
        }
        assert_eq!(text(&answer), expected);
    };
    assert_eq!(failed.status, 500, "{failed:?}");
    assert!(failed.body.contains("expected a device that works"), "{failed:?}");
    let again = post(address, "/v1/completions", &ids("tiny", 4));
    assert_eq!((again.status, text(&again)), (200, expected), "{again:?}");
    running.stop().unwrap();
    let told = until(&mut events, "server.stopping");
    let stages = told.iter().filter(|event| event["type"] == "model.stage");
    let stages: Vec<_> = stages.map(|event| event["stage"].as_str().unwrap()).collect();
    let order = ["lost", "opening", "planned", "loading", "packing", "compiling", "ready"];
    assert!(stages.starts_with(&order), "{stages:?}");
}

#[test]
fn a_server_with_an_empty_store_says_so() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub {
        endpoint: "http://127.0.0.1:9".to_string(),
        token: None,
        cache: cache.path().join("hub"),
        offline: true,
        retry_wait: Duration::from_millis(1),
        timeout: Duration::from_secs(1),
        models: None,
        room: None,
    };
    let library = Library { hub: Some(hub), options: options(), ..Library::default() };
    let running = serve_library(limits(), AccessRules::default(), library);
    let refused = post(running.address(), "/v1/completions", &json!({ "prompt": "x" }));
    assert!(refused.body.contains("delft pull"), "{refused:?}");
    // A path is no name.
    for name in ["/etc/passwd", "../x", "./models", "~/x.gguf"] {
        let refused = post(running.address(), "/v1/completions", &story(name, 1));
        assert_eq!(refused.status, 404, "{refused:?}");
    }
    let raw = receive(send(running.address(), "GET", "/api/tags", &[], ""));
    assert_eq!(raw.json()["models"], json!([]));
    running.stop().unwrap();
}

#[test]
fn it_is_not_ready_while_a_named_model_is_loaded_or_it_stops() {
    let running = serving();
    let address = running.address();
    assert_eq!(get(address, "/ready").status, 200);
    let load = send(address, "POST", "/v1/completions", &[], &story("stories", 1).to_string());
    let unready = || Some(get(address, "/ready")).filter(|answer| answer.status == 503);
    let start = Instant::now();
    let answer = loop {
        if let Some(answer) = unready() {
            break answer;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "it was never unready");
    };
    assert_eq!(answer.json()["reason"], "stories is being loaded");
    assert_eq!(get(address, "/health").status, 200);
    assert_eq!(receive(load).status, 200);
    assert_eq!(get(address, "/ready").status, 200);

    // A request that has begun before the signal is still answered.
    let mut late = TcpStream::connect(address).unwrap();
    write!(late, "GET /ready HTTP/1.1\r\nHost: {address}\r\n").unwrap();
    for _ in 0..10 {
        assert_eq!(get(address, "/ready").status, 200);
    }
    let stopping = std::thread::spawn(move || running.stop());
    soon("the port is closed", || TcpStream::connect(address).is_err());
    write!(late, "Connection: close\r\n\r\n").unwrap();
    let answer = receive(late);
    assert_eq!(answer.status, 503);
    assert!(answer.json()["reason"].as_str().unwrap().starts_with("the server is stopping"));
    stopping.join().unwrap().unwrap();
}

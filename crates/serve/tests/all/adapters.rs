//! Adapters of one engine, each a model of its own name.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;

use delft::{AdapterFile, Adapters, Engine, GenerateOptions, LoadOptions};
use delft_serve::{AccessRules, Library, Served};
use serde_json::{Value, json};

use crate::common::{get, limits, post, receive, send, serve_all, serve_library};
use crate::library::{loaded, named, options, reference};

#[test]
fn each_adapter_is_a_model_of_its_name() {
    let files = ["adapters/lora", "adapters/rslora"];
    let file = |path: &str| AdapterFile { path: reference(path), scale: 1.0, any_base: false };
    let adapters = Adapters { files: files.map(file).to_vec(), ..Adapters::default() };
    let options = LoadOptions { threads: Some(2), adapters, ..LoadOptions::default() };
    let engine = Engine::load(reference("models/llama3"), &options).unwrap();
    let names = ["first", "second"].map(String::from);
    let handles = engine.adapters().iter().map(|adapter| vec![adapter.clone()]);
    let adapters = names.into_iter().zip(handles).collect();
    let (name, engines) = ("base".to_string(), vec![engine.clone()]);
    let served = Served { name, engines, templates: None, adapters };
    let running = serve_all(limits(), AccessRules::default(), vec![served]);
    let address = running.address();

    let list = get(address, "/v1/models").json();
    let listed = list["data"].as_array().unwrap().iter();
    let listed: Vec<(&Value, &Value)> = listed.map(|m| (&m["id"], &m["parent"])).collect();
    let (base, first, second) = (json!("base"), json!("first"), json!("second"));
    assert_eq!(listed, [(&base, &Value::Null), (&first, &base), (&second, &base)]);

    let prompt: Vec<u32> = (3..20).collect();
    let mut texts = Vec::new();
    let all =
        [None, Some(0), Some(1)].map(|i: Option<usize>| i.map(|i| engine.adapters()[i].clone()));
    for (name, adapter) in ["base", "first", "second"].into_iter().zip(all) {
        let mut session = engine.session();
        session.set_adapter(adapter).unwrap();
        let sampling = delft::SamplingOptions::greedy();
        let options = GenerateOptions {
            sampling,
            max_tokens: Some(12),
            ignore_end: true,
            logprobs: true,
            ..GenerateOptions::default()
        };
        let written = session.generate(prompt.clone(), &options).unwrap();
        let expected: Vec<f32> = written.map(|token| token.unwrap().logprob.unwrap()).collect();
        let body = json!({ "model": name, "prompt": prompt, "max_tokens": 12, "temperature": 0,
            "ignore_eos": true, "logprobs": 0 });
        let response = post(address, "/v1/completions", &body);
        assert_eq!(response.status, 200, "{response:?}");
        let object = response.json();
        assert_eq!(object["model"], name);
        // The fixtures have no tokenizer: what was computed is told by its log-probabilities.
        let told = object["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
        assert_eq!(told.len(), expected.len());
        for (told, expected) in told.iter().zip(&expected) {
            assert!((told.as_f64().unwrap() - f64::from(*expected)).abs() < 1e-5, "{name}");
        }
        texts.push(expected);
    }
    assert!(texts[0] != texts[1] && texts[1] != texts[2] && texts[0] != texts[2]);
}

/// The log-probabilities of what a model writes, which has no tokenizer.
fn told(address: SocketAddr, model: &str) -> Vec<Value> {
    let prompt: Vec<u32> = (3..20).collect();
    let body = json!({ "model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0,
        "ignore_eos": true, "logprobs": 0 });
    let response = post(address, "/v1/completions", &body);
    assert_eq!(response.status, 200, "{response:?}");
    response.json()["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().clone()
}

/// A server of a model with room for so many adapters.
fn roomy(more: usize) -> delft_serve::Running {
    let adapters = Adapters { more, rank: 8, ..Adapters::default() };
    let options = LoadOptions { adapters, ..options() };
    let named =
        vec![named("base", reference("models/llama3")), named("other", reference("models/qwen3"))];
    serve_library(
        limits(),
        AccessRules::default(),
        Library { named, options, ..Library::default() },
    )
}

#[test]
fn adapters_come_and_go_while_others_generate() {
    let running = roomy(1);
    let address = running.address();
    let add = |name: &str, path: &str| {
        let path = reference(path);
        post(address, "/adapters", &json!({ "name": name, "model": "base", "path": path }))
    };
    let remove =
        |name: &str| receive(send(address, "DELETE", &format!("/adapters/{name}"), &[], ""));
    // One that writes meanwhile, and what it writes alone.
    let long = json!({ "model": "base", "prompt": [3, 4, 5], "max_tokens": 200, "temperature": 0,
        "ignore_eos": true, "logprobs": 0, "stream": true });
    let texts = |text: &str| -> Vec<Value> {
        let data = text.lines().filter_map(|line| line.strip_prefix("data: {"));
        let events = data.map(|rest| serde_json::from_str::<Value>(&format!("{{{rest}")).unwrap());
        events.map(|event| event["choices"][0]["logprobs"].clone()).collect()
    };
    let alone = post(address, "/v1/completions", &long);
    let mut stream = send(address, "POST", "/v1/completions", &[], &long.to_string());
    let mut first = [0; 600];
    stream.read_exact(&mut first).unwrap();

    let base = told(address, "base");
    let added = add("mine", "adapters/lora");
    assert_eq!((added.status, &added.json()["model"]), (200, &json!("base")), "{added:?}");
    let mine = told(address, "mine");
    assert_ne!(mine, base);
    assert_eq!(told(address, "base"), base);
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    let (alone, beside) = (texts(&alone.body), texts(&rest));
    assert!(beside.len() > 100 && alone.ends_with(&beside), "{beside:?}");

    // As it would be had the model been loaded with it.
    let file = AdapterFile { path: reference("adapters/lora"), scale: 1.0, any_base: false };
    let adapters = Adapters { files: vec![file], ..Adapters::default() };
    let loaded_with = LoadOptions { adapters, ..options() };
    let engine = Engine::load(reference("models/llama3"), &loaded_with).unwrap();
    let handles = vec![("given".to_string(), engine.adapters().to_vec())];
    let (name, engines) = ("base".to_string(), vec![engine]);
    let served = Served { name, engines, templates: None, adapters: handles };
    let given = serve_all(limits(), AccessRules::default(), vec![served]);
    assert_eq!(told(given.address(), "given"), mine);

    // Every list has it.
    let listed = get(address, "/v1/models").json();
    let listed = listed["data"].as_array().unwrap().iter();
    let listed: Vec<(&Value, &Value)> = listed.map(|m| (&m["id"], &m["parent"])).collect();
    assert_eq!(listed[..1], [(&json!("base"), &Value::Null)]);
    assert!(listed.contains(&(&json!("mine"), &json!("base"))), "{listed:?}");
    let tags = get(address, "/api/tags").json();
    assert!(tags.to_string().contains("\"mine"), "{tags}");
    assert_eq!(loaded(address), ["base", "mine"]);
    let own = get(address, "/adapters").json();
    assert_eq!((&own["adapters"][0]["name"], &own["adapters"][1]), (&json!("mine"), &Value::Null));

    // It is read again with its model.
    let stop = json!({ "model": "base", "keep_alive": 0 });
    assert_eq!(post(address, "/api/generate", &stop).json()["done_reason"], "unload");
    assert!(loaded(address).is_empty());
    assert_eq!(told(address, "mine"), mine);

    // There is room for one, and for another once it is gone.
    let full = add("second", "adapters/rslora");
    assert_eq!((full.status, &full.json()["error"]["code"]), (409, &json!("no_room_for_adapter")));
    assert!(full.body.contains("more adapter room"), "{full:?}");
    assert_eq!(remove("mine").status, 200);
    assert_eq!(remove("mine").status, 404);
    let gone = post(address, "/v1/completions", &json!({ "model": "mine", "prompt": [3] }));
    assert_eq!(gone.status, 404, "{gone:?}");
    assert_eq!(add("second", "adapters/rslora").status, 200);
    assert_ne!(told(address, "second"), mine);
    assert_eq!(told(address, "base"), base);
    running.stop().unwrap();
}

/// Whoever has read the last line of an answer finds the room of its adapter free, if it was
/// removed meanwhile.
#[test]
fn a_removed_adapters_room_is_free_when_its_last_answer_ends() {
    let running = roomy(1);
    let address = running.address();
    let path = reference("adapters/lora");
    let add = || {
        let body = json!({ "name": "mine", "model": "base", "path": path });
        post(address, "/adapters", &body).status
    };
    let ask = json!({ "model": "mine", "prompt": [3, 4, 5], "max_tokens": 40, "temperature": 0,
        "ignore_eos": true, "stream": true });
    for turn in 0..20 {
        assert_eq!(add(), 200, "turn {turn}");
        let stream = send(address, "POST", "/v1/completions", &[], &ask.to_string());
        let mut lines = BufReader::new(stream).lines().map(Result::unwrap);
        assert!(lines.any(|line| line.starts_with("data: {")), "turn {turn}");
        assert_eq!(receive(send(address, "DELETE", "/adapters/mine", &[], "")).status, 200);
        assert!(lines.any(|line| line == "data: [DONE]"), "turn {turn}");
    }
    running.stop().unwrap();
}

#[test]
fn adapters_that_cannot_be_added_are_refused_by_what_is_wrong() {
    let running = roomy(2);
    let address = running.address();
    let path = reference("adapters/lora");
    let ask = |body: Value| post(address, "/adapters", &body);
    assert_eq!(ask(json!({ "name": "mine", "path": path })).status, 200);
    let cases = [
        (json!({ "name": "base", "path": path }), "name: expected a name that no model has"),
        (json!({ "name": "two words", "path": path }), "name: expected ASCII letters"),
        (json!({ "name": "x", "path": reference("nowhere") }), "nowhere"),
        (json!({ "name": "x", "path": path, "model": "mine" }), "an adapter of base"),
        (json!({ "name": "mine", "path": path, "model": "other" }), "that no model has"),
        (json!({ "name": "x", "path": path, "model": "other" }), "expected"),
        (json!({ "name": "x", "path": path, "rank": 3 }), "rank"),
        (json!({ "name": "x" }), "path: expected a value"),
    ];
    for (body, words) in cases {
        let answer = ask(body.clone());
        assert_eq!(answer.status, 400, "{body}: {answer:?}");
        assert!(answer.body.contains(words), "{words} in {answer:?}");
    }
    // Anew in its own place.
    assert_eq!(ask(json!({ "name": "mine", "path": path, "scale": 0.5 })).status, 200);
    let all = get(address, "/adapters").json();
    assert_eq!(all["adapters"].as_array().unwrap().len(), 1);
    assert_eq!(all["adapters"][0]["scale"], 0.5);
    // Whoever is no administrator may not.
    let access = AccessRules { admin_keys: vec!["k".to_string()], ..AccessRules::default() };
    let closed = serve_library(limits(), access, Library::default());
    let refused = post(closed.address(), "/adapters", &json!({ "name": "x", "path": path }));
    assert_eq!(refused.json()["error"]["code"], "admin_key_needed");
    assert_eq!(get(closed.address(), "/adapters").status, 403);
    running.stop().unwrap();
}

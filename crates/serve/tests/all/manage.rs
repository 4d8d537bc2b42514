//! The store of models over Ollama's interface: a model comes from an imitated hub, gets a second
//! name, answers, and goes.

#[path = "../../../hub/tests/all/common/mod.rs"]
#[expect(dead_code, reason = "shared with the hub's own tests")]
mod fake_hub;

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use delft::hub::Hub;
use delft_serve::{AccessRules, Keep, Library, Running};
use serde_json::{Value, json};

use crate::common::{Response, bundled, get, limits, post, receive, send, serve_library};
use crate::library::{listed, loaded, options};

const MODEL: &str = "org/name:Q8_0";

fn store(endpoint: &str, folder: &Path) -> Library {
    let hub = Hub {
        endpoint: endpoint.to_string(),
        token: None,
        cache: folder.join("hub"),
        offline: false,
        retry_wait: Duration::from_millis(1),
        timeout: Duration::from_secs(5),
        models: Some(folder.join("models.toml")),
        room: None,
    };
    std::fs::write(folder.join("models.toml"), "[\"mine\"]\nv1 = \"org/name:Q8_0\"\n").unwrap();
    Library { hub: Some(hub), options: options(), keep: Keep::USUAL, ..Library::default() }
}

fn serving(folder: &Path) -> (fake_hub::Server, Running) {
    let files = vec![
        ("README.md", b"# A model\n".to_vec()),
        ("m-Q8_0.gguf", std::fs::read(bundled()).unwrap()),
        ("m-Q4_0.gguf", b"GGUF, but not for long".to_vec()),
    ];
    let hub = fake_hub::Server::start(move |request| fake_hub::repository(request, &files));
    let library = store(&hub.url, folder);
    let running = serve_library(limits(), AccessRules::default(), library);
    (hub, running)
}

fn lines(response: &Response) -> Vec<Value> {
    response.body.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn delete(address: SocketAddr, name: &str) -> Response {
    let body = json!({ "model": name }).to_string();
    receive(send(address, "DELETE", "/api/delete", &[], &body))
}

fn names(address: SocketAddr) -> Vec<String> {
    listed(address, "/api/tags")
}

fn say(address: SocketAddr, name: &str) -> Response {
    let body = json!({ "model": name, "prompt": "Once upon", "raw": true, "stream": false,
        "options": { "num_predict": 4, "temperature": 0 } });
    post(address, "/api/generate", &body)
}

#[test]
fn a_model_comes_is_named_answers_and_goes() {
    let folder = tempfile::tempdir().unwrap();
    let (hub, running) = serving(folder.path());
    let address = running.address();
    assert_eq!(names(address), Vec::<String>::new());
    assert_eq!(say(address, MODEL).status, 404);

    let pulled = post(address, "/api/pull", &json!({ "model": MODEL }));
    assert_eq!(pulled.header("content-type"), Some("application/x-ndjson"));
    let told = lines(&pulled);
    assert_eq!(told.first().unwrap()["status"], "pulling manifest");
    assert_eq!(told.last().unwrap(), &json!({ "status": "success" }), "{told:?}");
    let bytes = std::fs::metadata(bundled()).unwrap().len();
    let whole = told.iter().find(|line| line["completed"] == bytes).unwrap();
    assert_eq!((&whole["total"], &whole["digest"]), (&json!(bytes), &json!("m-Q8_0.gguf")));
    let again = post(address, "/api/pull", &json!({ "name": MODEL, "stream": false }));
    assert_eq!(again.json(), json!({ "status": "success" }));

    // The user's own name for it stands beside the hub's.
    assert_eq!(names(address), ["mine:v1", MODEL]);
    let tag = get(address, "/api/tags").json()["models"][0].clone();
    assert_eq!((&tag["size"], &tag["details"]["format"]), (&json!(bytes), &json!("gguf")));
    assert_eq!(tag["digest"], fake_hub::COMMIT);
    let copy = json!({ "source": MODEL, "destination": "other:latest" });
    assert_eq!(post(address, "/api/copy", &copy).status, 200);
    assert_eq!(names(address), ["mine:v1", MODEL, "other"]);
    assert_eq!(post(address, "/api/copy", &copy).status, 400, "a name that is taken");
    let copy = json!({ "source": "absent", "destination": "third" });
    assert_eq!(post(address, "/api/copy", &copy).status, 404);

    // One model by all its names.
    let texts: Vec<Value> = [MODEL, "other", "other:latest", "mine:v1", "org/name"]
        .into_iter()
        .map(|name| {
            let said = say(address, name);
            assert_eq!(said.status, 200, "{name}: {said:?}");
            said.json()["response"].clone()
        })
        .collect();
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    assert_eq!(loaded(address).len(), 1);
    let until = get(address, "/api/ps").json()["models"][0]["expires_at"].clone();
    assert!(!until.as_str().unwrap().starts_with("2318"), "{until}");

    // A name goes alone, a model with its files, though it is loaded.
    assert_eq!(delete(address, "other").status, 200);
    assert_eq!(names(address), ["mine:v1", MODEL]);
    assert_eq!(delete(address, MODEL).status, 200);
    assert_eq!((names(address), loaded(address)), (vec![], vec![]));
    assert!(!folder.path().join("hub/models--org--name").exists());
    assert_eq!(delete(address, MODEL).status, 404);
    drop(hub);
    running.stop().unwrap();
}

#[test]
fn what_cannot_be_pulled_is_told_as_the_stream_goes() {
    let folder = tempfile::tempdir().unwrap();
    let (_hub, running) = serving(folder.path());
    let address = running.address();
    for (name, words) in [
        ("org/absent", "org/absent"),
        ("org/name:Q5_K_M", "tagged \\\"Q5_K_M\\\""),
        ("org/name:Q4_0", "m-Q4_0.gguf"),
        ("/etc/passwd", "expected a short name or a hub id"),
    ] {
        let refused = post(address, "/api/pull", &json!({ "model": name }));
        let last = lines(&refused).pop().unwrap();
        assert!(last["error"].is_string(), "{name}: {last}");
        assert!(last.to_string().contains(words), "{name}: {last}");
    }
    let whole = post(address, "/api/pull", &json!({ "model": "org/absent", "stream": false }));
    assert_eq!(whole.status, 404, "{whole:?}");
    assert_eq!(names(address), Vec::<String>::new());
    running.stop().unwrap();
}

#[test]
fn a_store_is_changed_by_administrators_alone() {
    let folder = tempfile::tempdir().unwrap();
    let access = AccessRules { admin_keys: vec!["boss".to_string()], ..AccessRules::default() };
    let guarded = serve_library(limits(), access, store("http://127.0.0.1:9", folder.path()));
    let ask = |method: &str, path: &str, key: &str| {
        let header = format!("Bearer {key}");
        let body = json!({ "model": "org/name" }).to_string();
        receive(send(guarded.address(), method, path, &[("Authorization", &header)], &body)).status
    };
    assert_eq!(ask("DELETE", "/api/delete", "other"), 403);
    assert_eq!(ask("POST", "/api/pull", ""), 403);
    assert_eq!(ask("POST", "/api/copy", "x"), 403);
    assert_eq!(ask("DELETE", "/api/delete", "boss"), 404);
    assert_eq!(get(guarded.address(), "/api/tags").status, 200);
    guarded.stop().unwrap();

    // Without a store there is nothing to change.
    let running = serve_library(limits(), AccessRules::default(), Library::default());
    let refused = post(running.address(), "/api/pull", &json!({ "model": "org/name" }));
    assert_eq!(refused.status, 403);
    running.stop().unwrap();
}

#[test]
fn what_is_not_loaded_is_shown_by_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let (_hub, running) = serving(folder.path());
    let address = running.address();
    post(address, "/api/pull", &json!({ "model": MODEL, "stream": false }));
    let shown = post(address, "/api/show", &json!({ "model": MODEL })).json();
    assert_eq!(loaded(address), Vec::<String>::new());
    assert_eq!(shown["model_info"]["general.architecture"], "llama");
    assert_eq!(shown["details"]["family"], "llama");
    assert!(shown["details"]["quantization_level"].is_string());
    assert!(shown["template"].as_str().unwrap().contains("messages"), "{shown}");
    assert_eq!(shown["model_info"]["tokenizer.ggml.tokens"], json!([]));
    assert_eq!(shown["model_info"]["tokenizer.chat_template"], Value::Null);
    let tagged = get(address, "/api/tags").json();
    assert_eq!(tagged["models"][0]["details"], shown["details"]);
    assert_eq!(shown["capabilities"][0], "completion");
    say(address, MODEL);
    let after = post(address, "/api/show", &json!({ "model": MODEL })).json();
    for key in ["template", "model_info", "capabilities", "license"] {
        assert_eq!(shown[key], after[key], "{key}");
    }
    let all = post(address, "/api/show", &json!({ "model": MODEL, "verbose": true })).json();
    assert!(all["model_info"]["tokenizer.ggml.tokens"].as_array().unwrap().len() > 1000);
    assert!(all["tensors"].as_array().unwrap().len() > 10);
    running.stop().unwrap();
}

//! Sessions over HTTP: continued, forked, saved and restored.

use std::net::SocketAddr;

use delft_serve::{AccessRules, Served, Server, ServerConfig};
use serde_json::{Value, json};

use crate::common::{Response, config, engine, get, limits, post, receive, send};

fn delete(address: SocketAddr, path: &str) -> Response {
    receive(send(address, "DELETE", path, &[], ""))
}

#[test]
fn sessions_are_continued_forked_saved_and_restored() {
    let folder = tempfile::tempdir().unwrap();
    let serving = |access: AccessRules, folder: Option<&std::path::Path>| {
        let (name, adapters) = ("stories".to_string(), Vec::new());
        let served = Served { name, engines: vec![engine()], templates: None, adapters };
        let config = ServerConfig { sessions: folder.map(Into::into), ..config(limits(), access) };
        Server::bind(config, vec![served]).unwrap().spawn().unwrap()
    };
    let own = serving(AccessRules::default(), Some(&folder.path().join("kept")));
    let address = own.address();
    let made = post(address, "/sessions", &json!({ "prompt": "Once upon a time" })).json();
    let id = made["id"].as_str().unwrap().to_string();
    let at = |id: &str, verb: &str| format!("/sessions/{id}/{verb}");
    let greedy = json!({ "max_tokens": 12, "temperature": 0, "ignore_eos": true });
    let first = post(address, &at(&id, "generate"), &greedy);
    assert_eq!(first.status, 200, "{first:?}");
    let first = first.json();
    // The same as completions write, and then again from where that ended.
    let mut asked = greedy.clone();
    asked["prompt"] = "Once upon a time".into();
    asked["max_tokens"] = 24.into();
    let expected = post(address, "/v1/completions", &asked).json();
    let expected = expected["choices"][0]["text"].as_str().unwrap().to_string();
    let start = made["length"].as_u64().unwrap();
    assert_eq!(first["length"], start + 12);
    let fork = post(address, &at(&id, "fork"), &json!({})).json();
    let forked = fork["id"].as_str().unwrap().to_string();
    assert!(forked != id && fork["length"] == first["length"]);
    let mut streamed = greedy.clone();
    streamed["stream"] = true.into();
    let events = post(address, &at(&id, "generate"), &streamed).events();
    let (last, pieces) = events.split_last().unwrap();
    let second: String = pieces.iter().map(|piece| piece["text"].as_str().unwrap()).collect();
    assert_eq!(format!("{}{second}", first["text"].as_str().unwrap()), expected);
    assert_eq!((&last["finish_reason"], &last["length"]), (&json!("length"), &json!(start + 24)));
    // All but the token that was chosen last was there.
    assert_eq!(last["delft"], json!({ "cached_tokens": start + 11, "cache": null }));
    // The fork stands where it was, and goes another way.
    let shown = |id: &str| get(address, &format!("/sessions/{id}")).json();
    assert_eq!(shown(&forked)["length"], start + 12);
    let mut other = greedy.clone();
    other["prompt"] = " But the dog".into();
    let other = post(address, &at(&forked, "generate"), &other).json();
    assert_ne!(other["text"], second.as_str());

    let saved = post(address, &at(&id, "save"), &json!({ "name": "a-story" })).json();
    assert!(saved["bytes"].as_u64().unwrap() > 1000, "{saved}");
    assert!(folder.path().join("kept/a-story.kv").is_file());
    let empty = post(address, "/sessions", &json!({})).json()["id"].as_str().unwrap().to_string();
    let restored = post(address, &at(&empty, "restore"), &json!({ "name": "a-story" })).json();
    assert_eq!(restored["length"], start + 24, "{restored}");
    assert_eq!(shown(&empty)["tokens"], shown(&id)["tokens"]);
    for (name, status) in [("../x", 400), (".x", 400), ("a/b", 400), ("none", 400)] {
        let answer = post(address, &at(&empty, "restore"), &json!({ "name": name }));
        assert_eq!(answer.status, status, "{name}: {answer:?}");
    }
    // What is refused leaves a session as it was.
    let long = json!({ "prompt": "word ".repeat(3000) });
    let refused = post(address, &at(&empty, "generate"), &long).json();
    assert_eq!(refused["error"]["code"], "context_length_exceeded");
    assert_eq!(shown(&empty)["length"], start + 24);
    assert_eq!(delete(address, &format!("/sessions/{id}")).json()["deleted"], true);
    assert_eq!(get(address, &format!("/sessions/{id}")).status, 404);
    // Their number is bounded.
    let full = (0..300).map(|_| post(address, "/sessions", &json!({})).status).find(|s| *s != 200);
    assert_eq!(full, Some(429));
    own.stop().unwrap();

    // Files are an administrator's, and there are none without a folder.
    let access = AccessRules { admin_keys: vec!["boss".to_string()], ..AccessRules::default() };
    let guarded = serving(access, None);
    let id = post(guarded.address(), "/sessions", &json!({})).json();
    let path = at(id["id"].as_str().unwrap(), "save");
    let save = |headers: &[(&str, &str)]| -> Value {
        let body = json!({ "name": "x" }).to_string();
        receive(send(guarded.address(), "POST", &path, headers, &body)).json()["error"].clone()
    };
    assert_eq!(save(&[])["code"], "admin_key_needed");
    assert_eq!(save(&[("Authorization", "Bearer boss")])["code"], "sessions_not_saved");
    guarded.stop().unwrap();
}

//! Requests and answers in a file: what is in it, what never is, and that the same is answered to
//! the same again.

use delft_serve::{AccessRules, Served, Server, ServerConfig};
use serde_json::{Value, json};

use crate::common::{config, engine, limits, receive, send};

#[test]
fn requests_are_recorded_with_what_answers_them_again() {
    let folder = tempfile::tempdir().unwrap();
    let asked = folder.path().join("asked");
    let access = AccessRules { keys: vec!["k-2718281828".to_string()], ..AccessRules::default() };
    let config = ServerConfig { record: Some(asked.clone()), ..config(limits(), access) };
    let served = Served {
        name: "stories".to_string(),
        engines: vec![engine()],
        templates: None,
        adapters: Vec::new(),
    };
    let running = Server::bind(config, vec![served]).unwrap().spawn().unwrap();
    let ask = |path: &str, body: &str, more: &[(&str, &str)]| {
        let mut headers = vec![("Authorization", "Bearer k-2718281828")];
        headers.extend(more);
        receive(send(running.address(), "POST", path, &headers, body))
    };
    let hot = json!({ "prompt": "Once", "max_tokens": 12, "temperature": 1.5 }).to_string();
    let whole = ask("/v1/completions", &hot, &[]);
    let message = json!({ "max_tokens": 12, "stream": true, "temperature": 1.5,
        "messages": [{ "role": "user", "content": "Tell me a story" }] });
    let streamed = ask("/v1/messages", &message.to_string(), &[]);
    ask("/v1/completions", "{", &[]);
    let refused = receive(send(running.address(), "POST", "/v1/completions", &[], &hot));
    assert_eq!(refused.status, 401);

    let file = std::fs::read_dir(&asked).unwrap().next().unwrap().unwrap().path();
    assert_eq!(file.extension().unwrap(), "jsonl");
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(!text.contains("2718281828"));
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 3, "{text}");
    let first = &lines[0];
    assert_eq!((&first["path"], &first["status"]), (&json!("/v1/completions"), &json!(200)));
    assert_eq!(first["request"], serde_json::from_str::<Value>(&hot).unwrap());
    assert_eq!(first["response"], whole.json());
    assert_eq!(first["fingerprint"], engine().fingerprint());
    assert_eq!(first["settings"]["context"], engine().info().context);
    assert_eq!((&first["model"], &first["whole"]), (&json!("stories"), &json!(true)));
    let text = &first["texts"][0];
    assert_eq!(text["tokens"].as_array().unwrap().len(), 12);
    assert_eq!(&text["seed"], &first["seed"]);
    let prompt = engine().encode(&"Once".into()).unwrap();
    assert_eq!(text["prompt"], json!(prompt));
    // The tokens of a stream, too; none of what was refused.
    assert_eq!(lines[1]["texts"].as_array().unwrap().len(), 1);
    assert_eq!(lines[2]["texts"], json!([]));
    assert_eq!(lines[1]["response"], streamed.body.as_str());
    assert_eq!((&lines[2]["request"], &lines[2]["status"]), (&json!("{"), &json!(400)));

    // The seed of a request that gave none answers it again, also where the interface has no field
    // for it.
    let seed = first["seed"].as_str().unwrap();
    let again = ask("/v1/completions", &hot, &[("x-delft-seed", seed)]);
    assert_eq!(again.json()["choices"], whole.json()["choices"]);
    assert!(again.json()["delft"]["text"].is_null());
    let told = [("x-delft-seed", seed), ("x-delft-tokens", "1")];
    let told = ask("/v1/completions", &hot, &told).json();
    assert_eq!(told["delft"]["text"]["tokens"], text["tokens"]);
    let other = ask("/v1/completions", &hot, &[("x-delft-seed", "12345")]);
    assert_ne!(other.json()["choices"], whole.json()["choices"]);
    let seed = lines[1]["seed"].as_str().unwrap();
    let again = ask("/v1/messages", &message.to_string(), &[("x-delft-seed", seed)]);
    let texts = |events: Vec<Value>| -> String {
        events
            .iter()
            .filter_map(|event| event["delta"]["text"].as_str().map(String::from))
            .collect()
    };
    assert_eq!(texts(again.events()), texts(streamed.events()));
    assert!(!texts(again.events()).is_empty());
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&file), mode(&asked)), (0o600, 0o700));
    }
    running.stop().unwrap();
}

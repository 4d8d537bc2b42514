//! Embeddings on the wire, of the bundled model loaded for them, beside a model that generates.

use std::net::SocketAddr;
use std::sync::OnceLock;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use delft::models::Ending;
use delft::{EmbedOptions, Engine, LoadOptions, Prompt};
use delft_serve::{AccessRules, Served};
use serde_json::{Value, json};

use crate::common::{bundled, engine, get, limits, post, serve_all};

/// The bundled model, loaded for embeddings, for so many tokens.
fn embeds() -> Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    let load = || {
        let (threads, context) = (Some(2), Some(64));
        let options =
            LoadOptions { threads, context, ending: Ending::Hidden, ..Default::default() };
        Engine::load(bundled(), &options).unwrap()
    };
    ENGINE.get_or_init(load).clone()
}

fn server() -> SocketAddr {
    static SERVER: OnceLock<SocketAddr> = OnceLock::new();
    *SERVER.get_or_init(|| {
        let served = |name: &str, engine| Served {
            name: name.to_string(),
            engines: vec![engine],
            templates: None,
            adapters: Vec::new(),
        };
        let models = vec![served("embeds", embeds()), served("stories", engine())];
        let running = serve_all(limits(), AccessRules::default(), models);
        let address = running.address();
        // It runs until the tests end.
        std::mem::forget(running);
        address
    })
}

const TEXTS: [&str; 2] = ["a lamp that cannot sleep", "an owl"];

/// What the engine itself makes of texts.
fn expected() -> (Vec<Vec<u32>>, Vec<Vec<f32>>) {
    let engine = embeds();
    let encode = |text: &str| engine.encode(&Prompt::from(text)).unwrap();
    let tokens: Vec<Vec<u32>> = TEXTS.iter().map(|text| encode(text)).collect();
    let found = engine.embed(&tokens, &EmbedOptions::default()).unwrap();
    (tokens, found)
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap() as f32).collect()
}

#[test]
fn openai_embeddings_are_what_the_engine_makes() {
    let (tokens, expected) = expected();
    let count: usize = tokens.iter().map(Vec::len).sum();
    for input in [json!(TEXTS), json!(tokens)] {
        let response =
            post(server(), "/v1/embeddings", &json!({ "model": "embeds", "input": input }));
        assert_eq!(response.status, 200, "{response:?}");
        let object = response.json();
        assert_eq!((&object["object"], &object["model"]), (&json!("list"), &json!("embeds")));
        assert_eq!(object["usage"], json!({ "prompt_tokens": count, "total_tokens": count }));
        for (i, expected) in expected.iter().enumerate() {
            let found = &object["data"][i];
            assert_eq!((&found["object"], &found["index"]), (&json!("embedding"), &json!(i)));
            assert_eq!(numbers(&found["embedding"]), *expected);
        }
    }
    for input in [json!(TEXTS[1]), json!(tokens[1])] {
        let body = json!({ "model": "embeds", "input": input, "encoding_format": "base64" });
        let object = post(server(), "/v1/embeddings", &body).json();
        let packed = STANDARD.decode(object["data"][0]["embedding"].as_str().unwrap()).unwrap();
        let floats = packed.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()));
        assert_eq!(floats.collect::<Vec<f32>>(), expected[1]);
    }
    let body = json!({ "model": "embeds", "input": TEXTS[0], "dimensions": 4 });
    let four = EmbedOptions { dimensions: Some(4), ..EmbedOptions::default() };
    let cut = numbers(&post(server(), "/v1/embeddings", &body).json()["data"][0]["embedding"]);
    assert_eq!(cut, embeds().embed(&tokens[..1], &four).unwrap()[0]);
}

/// A model that generates makes embeddings over the same weights, and still generates.
#[test]
fn a_model_that_generates_makes_embeddings_too() {
    let (_, expected) = expected();
    let options = LoadOptions { threads: Some(2), context: Some(64), ..Default::default() };
    let engine = Engine::load(bundled(), &options).unwrap();
    let (name, adapters) = ("both".to_string(), Vec::new());
    let served = Served { name, engines: vec![engine.clone()], templates: None, adapters };
    let running = serve_all(limits(), AccessRules::default(), vec![served]);
    let ask = |path: &str, body: Value| {
        let response = post(running.address(), path, &body);
        assert_eq!(response.status, 200, "{response:?}");
        response.json()
    };
    let story = || {
        let body =
            json!({ "model": "both", "prompt": "An owl", "max_tokens": 8, "temperature": 0 });
        ask("/v1/completions", body)["choices"][0]["text"].clone()
    };
    let (before, weights) = (story(), engine.memory().weights);
    for _ in 0..2 {
        let found = ask("/v1/embeddings", json!({ "model": "both", "input": TEXTS }));
        for (found, expected) in found["data"].as_array().unwrap().iter().zip(&expected) {
            assert_eq!(numbers(&found["embedding"]), *expected);
        }
    }
    assert_eq!(story(), before);
    let further = engine.memory().weights - weights;
    assert!(further < weights / 20, "{further} of {weights}");
    assert_eq!(ask("/api/show", json!({ "model": "both" }))["capabilities"][0], "completion");
    let told = &get(running.address(), "/props").json()["models"][0];
    assert_eq!((&told["embeds"], &told["generates"]), (&json!(true), &json!(true)));
    assert!(told["planned_bytes"].as_u64() >= told["held_bytes"].as_u64(), "{told}");
    running.stop().unwrap();
}

#[test]
fn ollamas_embeddings_are_the_same() {
    let (tokens, expected) = expected();
    let body = json!({ "model": "embeds", "input": TEXTS, "options": { "num_ctx": 4 } });
    // One that asks for none only has the model loaded.
    for none in [json!([]), json!("")] {
        let nothing = post(server(), "/api/embed", &json!({ "model": "embeds", "input": none }));
        assert_eq!(
            (nothing.status, &nothing.json()["embeddings"]),
            (200, &json!([])),
            "{nothing:?}"
        );
    }
    let response = post(server(), "/api/embed", &body);
    assert_eq!(response.header("x-delft-no-effect"), Some("options.num_ctx"));
    let object = response.json();
    let found: Vec<_> = object["embeddings"].as_array().unwrap().iter().map(numbers).collect();
    assert_eq!(found, expected);
    assert_eq!(object["prompt_eval_count"], tokens.iter().map(Vec::len).sum::<usize>());
    let body = json!({ "model": "embeds", "prompt": TEXTS[0] });
    let object = post(server(), "/api/embeddings", &body).json();
    assert_eq!(numbers(&object["embedding"]), expected[0]);
    let shown = post(server(), "/api/show", &json!({ "model": "embeds" })).json();
    assert_eq!(shown["capabilities"], json!(["embedding"]));
}

#[test]
fn a_text_that_does_not_fit_is_refused_or_cut_if_that_is_wanted() {
    let long = "a lamp ".repeat(200);
    let body = json!({ "model": "embeds", "input": ["an owl", long] });
    let response = post(server(), "/v1/embeddings", &body);
    assert_eq!(response.status, 400);
    assert_eq!(response.json()["error"]["code"], "context_length_exceeded");
    let response = post(server(), "/api/embed", &body);
    assert_eq!(response.status, 400);
    let body = json!({ "model": "embeds", "input": long, "truncate": true });
    let object = post(server(), "/api/embed", &body).json();
    assert_eq!(object["prompt_eval_count"], 64);
}

#[test]
fn what_makes_no_sense_is_refused() {
    let ask = |extra: Value| {
        let mut body = json!({ "model": "embeds", "input": "an owl" });
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let response = post(server(), "/v1/embeddings", &body);
        assert_eq!(response.status, 400, "{response:?}");
        response.json()["error"]["message"].as_str().unwrap().to_string()
    };
    let width = embeds().info().hidden;
    for (extra, message) in [
        (json!({ "input": null }), "input: expected a value, found none".to_string()),
        (json!({ "input": [] }), "the prompt: expected at least one token".to_string()),
        (json!({ "input": [3, "an owl"] }), "input: expected a string, a list of".to_string()),
        (json!({ "input": [[3], [9999999]] }), "the prompt: expected tokens below".to_string()),
        (json!({ "input": vec!["x"; 2049] }), "input: expected at most 2048 texts".to_string()),
        (json!({ "encoding_format": "int8" }), "encoding_format: expected \"float\"".to_string()),
        (
            json!({ "dimensions": 0 }),
            format!("dimensions: expected a whole number from 1 to {width}"),
        ),
        (json!({ "temperature": 0 }), "temperature: there is no such field".to_string()),
    ] {
        let found = ask(extra);
        assert!(found.starts_with(&message), "{found}");
    }
    let body = json!({ "model": "embeds", "prompt": "an owl" });
    let response = post(server(), "/v1/completions", &body);
    assert_eq!(response.status, 400, "{response:?}");
    assert!(response.body.contains("expected a model that generates"), "{response:?}");
}

/// llama-server's own forms: by `content` or `input`, each text's vector in a list of one.
#[test]
fn llama_servers_embeddings_are_what_the_engine_makes() {
    let (tokens, expected) = expected();
    for path in ["/embedding", "/embeddings"] {
        let ask = |extra: Value| {
            let mut body = json!({ "model": "embeds" });
            body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            post(server(), path, &body)
        };
        for extra in [
            json!({ "content": TEXTS }),
            json!({ "input": TEXTS, "embd_normalize": 2 }),
            json!({ "content": tokens }),
        ] {
            let response = ask(extra);
            assert_eq!(response.status, 200, "{response:?}");
            let object = response.json();
            let list = object.as_array().unwrap();
            assert_eq!(list.len(), expected.len());
            for (i, (found, expected)) in list.iter().zip(&expected).enumerate() {
                assert_eq!(found["index"], i);
                let vectors = found["embedding"].as_array().unwrap();
                assert_eq!(vectors.len(), 1);
                assert_eq!(numbers(&vectors[0]), *expected);
            }
        }
        let one = ask(json!({ "content": TEXTS[1] })).json();
        assert_eq!(numbers(&one[0]["embedding"][0]), expected[1]);
        for (extra, message) in [
            (json!({ "content": TEXTS[0], "embd_normalize": 0 }), "embd_normalize: expected 2"),
            (json!({}), "input: "),
            (json!({ "content": 5 }), "content: "),
        ] {
            let response = ask(extra);
            let object = response.json();
            let error = object["error"]["message"].as_str().unwrap_or_default();
            assert!(response.status == 400 && error.starts_with(message), "{message}: {object}");
        }
        let noted = ask(json!({ "content": TEXTS[1], "colour": 1 }));
        assert_eq!(noted.header("x-delft-no-effect"), Some("colour"));
    }
}

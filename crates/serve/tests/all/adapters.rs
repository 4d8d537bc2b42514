//! Adapters of one engine, each a model of its own name.

use std::path::{Path, PathBuf};

use delft::{AdapterFile, Adapters, Engine, GenerateOptions, LoadOptions};
use delft_serve::{Access, Served};
use serde_json::{Value, json};

use crate::common::{get, limits, post, serve_all};

fn reference(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference").join(path)
}

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
    let running = serve_all(limits(), Access::default(), vec![served]);
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

//! One model on several devices: who answers what, and that nobody can tell from the answer.

use std::io::{BufRead, BufReader};

use delft::{Engine, GenerateOptions, LoadOptions, SamplingOptions};
use delft_serve::{AccessRules, Library, Named, Served};
use serde_json::{Value, json};

use crate::common::{bundled, get, limits, post, send, serve_all, serve_library};
use crate::library::{named, options, reference, soon};

fn ask(prompt: &[u32], tokens: usize) -> Value {
    json!({ "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true })
}

#[test]
fn texts_go_where_least_is_left_to_do_for_them() {
    // Slow enough to be met while it writes.
    let load = || Engine::load(bundled(), &options()).unwrap();
    let engines = vec![load(), load()];
    let served = Served {
        name: "twins".to_string(),
        engines: engines.clone(),
        templates: None,
        adapters: Vec::new(),
    };
    let running = serve_all(limits(), AccessRules::default(), vec![served]);
    let address = running.address();
    let prompt = |first: u32| -> Vec<u32> { (0..40).map(|i| (first + i * 7) % 120).collect() };
    let cached = |prompt: &[u32]| [0, 1].map(|at: usize| engines[at].cached(prompt, None) > 30);

    // All idle: the first.
    let first = post(address, "/v1/completions", &ask(&prompt(1), 2));
    assert_eq!(first.status, 200, "{first:?}");
    assert_eq!(cached(&prompt(1)), [true, false]);
    // While that one writes, the other.
    let mut long = ask(&prompt(2), 200);
    long["stream"] = true.into();
    let stream = send(address, "POST", "/v1/completions", &[], &long.to_string());
    let mut lines = BufReader::new(stream).lines();
    assert!(lines.any(|line| line.unwrap().starts_with("data: ")));
    post(address, "/v1/completions", &ask(&prompt(3), 2));
    drop(lines);
    assert_eq!(cached(&prompt(3)), [false, true]);
    soon("what was given up is kept", || cached(&prompt(2)) == [true, false]);
    // A conversation goes on where it is, and is answered as it would be anywhere.
    let further = [prompt(3), prompt(9)].concat();
    let answer = post(address, "/v1/completions", &ask(&further, 8)).json();
    assert_eq!(cached(&further), [false, true]);
    let sampling = SamplingOptions { temperature: 0.0, ..engines[0].sampling_defaults().clone() };
    let max_tokens = Some(8);
    let own =
        GenerateOptions { sampling, ignore_end: true, max_tokens, ..GenerateOptions::default() };
    let mut session = engines[0].session();
    let alone: String =
        session.generate(further, &own).unwrap().map(|token| token.unwrap().text).collect();
    assert_eq!(answer["choices"][0]["text"], alone.as_str(), "{answer}");
}

#[test]
fn a_model_is_loaded_on_all_of_its_devices() {
    let folder = tempfile::tempdir().unwrap();
    let devices = vec!["cpu".parse().unwrap(); 2];
    let twins = Named { devices, ..named("twins", reference("models/llama3")) };
    let canary = Some(folder.path().to_path_buf());
    let options = LoadOptions { threads: Some(1), ..options() };
    let library = Library { named: vec![twins], options, canary, ..Library::default() };
    let running = serve_library(limits(), AccessRules::default(), library);
    let answer = post(running.address(), "/v1/completions", &ask(&[3, 4, 5], 2));
    assert_eq!(answer.status, 200, "{answer:?}");
    let told = get(running.address(), "/api/ps").json();
    let device = told["models"][0]["device"].as_str().unwrap();
    assert_eq!(device.matches("cpu, 1 thread").count(), 2, "{told}");
    // Both computed the same at their loading, which is kept.
    assert_eq!(folder.path().join("loads").read_dir().unwrap().count(), 1);
    let stopped =
        post(running.address(), "/api/generate", &json!({ "model": "twins", "keep_alive": 0 }));
    assert_eq!(stopped.status, 200, "{stopped:?}");
}

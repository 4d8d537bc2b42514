//! The binary on real checkpoints: the reference fixtures, whose expected values Transformers
//! computed.

use crate::common::{delft, fixture, status};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Output, Stdio};

fn json(output: &Output) -> Value {
    assert_eq!(status(output), 0, "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn ids(file: &formats::Safetensors, name: &str) -> Vec<i64> {
    let bytes = file.get(name).unwrap().bytes;
    bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
}

fn joined(ids: &[i64]) -> String {
    ids.iter().map(i64::to_string).collect::<Vec<_>>().join(",")
}

#[test]
fn logits_and_greedy_tokens_are_those_of_transformers() {
    for (case, model) in [
        ("llama3", "llama3"),
        ("llama3", "llama3/model.f32.gguf"),
        ("qwen2", "qwen2"),
        ("mistral", "mistral"),
    ] {
        let expected = formats::Safetensors::open(Path::new(&fixture(&format!(
            "{case}/expected.safetensors"
        ))))
        .unwrap();
        let (prompt, decoded) = (ids(&expected, "input_ids"), ids(&expected, "decode.tokens"));
        let logits = expected.get("logits").unwrap();
        let (values, width) = (logits.to_f32().unwrap(), logits.shape[1]);
        let output = delft()
            .args(["logits", "-m", &fixture(model), "--cache-type", "f32", "--json", "--all"])
            .args(["--generate", &decoded.len().to_string(), "--tokens", &joined(&prompt)])
            .output()
            .unwrap();
        let found = json(&output);
        assert_eq!(found["tokens"], Value::from(prompt.clone()));
        assert_eq!(found["generated"], Value::from(decoded), "{model}");
        let rows = found["logits"].as_array().unwrap();
        assert_eq!(rows.len(), prompt.len());
        // The fixture may keep only the last rows.
        for (row, expected) in
            rows[rows.len() - logits.shape[0]..].iter().zip(values.chunks_exact(width))
        {
            let row = row.as_array().unwrap();
            assert_eq!(row.len(), width);
            for (found, expected) in row.iter().zip(expected) {
                let difference = (found.as_f64().unwrap() - f64::from(*expected)).abs();
                assert!(difference < 1e-3, "{model}: {found} for {expected}");
            }
        }
    }
}

#[test]
fn the_last_rows_are_the_default() {
    let rows = |extra: &[&str]| {
        let output = delft()
            .args(["logits", "-m", &fixture("llama3"), "--tokens", "5,6,7,8", "--json"])
            .args(extra)
            .output();
        json(&output.unwrap())["logits"].clone()
    };
    // A matrix of another height may be multiplied in another order.
    let near = |a: &Value, b: &Value| {
        let (a, b) = (a.as_array().unwrap(), b.as_array().unwrap());
        a.len() == b.len()
            && a.iter()
                .zip(b)
                .all(|(a, b)| (a.as_f64().unwrap() - b.as_f64().unwrap()).abs() < 1e-4)
    };
    let all = rows(&["--all"]);
    let (one, two) = (rows(&[]), rows(&["--last", "2"]));
    assert_eq!((one.as_array().unwrap().len(), two.as_array().unwrap().len()), (1, 2));
    assert!(near(&one[0], &all[3]) && near(&two[0], &all[2]) && near(&two[1], &all[3]));
    assert!(!near(&all[2], &all[3]));
    let output =
        delft().args(["logits", "-m", &fixture("llama3"), "--tokens", "5,128"]).output().unwrap();
    assert_eq!(status(&output), 1);
    assert!(String::from_utf8_lossy(&output.stderr).contains("expected ids below 128, found 128"));
}

#[test]
fn commands_that_need_a_tokenizer_say_so() {
    for args in [&["run", "x"][..], &["tokenize", "x"], &["perplexity", file!()]] {
        let output = delft()
            .args(args)
            .args(["-m", &fixture("llama3")])
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        // Cargo runs tests in the package's folder, from which the workspace's path of this file
        // leads nowhere.
        assert_eq!(status(&output), 1, "{args:?}: {stderr}");
        assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
    }
}

#[test]
fn a_load_of_requests_is_measured() {
    let model = fixture("llama3");
    let base = ["bench", "-m", &model, "--threads", "1", "-p", "12", "-n", "3"];
    let load = ["--load", "200", "--requests", "7", "--shared", "8", "--batch", "3", "--json"];
    let output = delft().args(base).args(load).output().unwrap();
    assert_eq!(status(&output), 0, "{}", String::from_utf8_lossy(&output.stderr));
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&found["requests"], &found["at_a_time"]), (&json!(7), &json!(3)));
    // Whoever comes while nothing of the common beginning is cached computes it.
    let reused = found["reused_tokens"].as_u64().unwrap();
    assert!((8..=6 * 11).contains(&reused), "{found}");
    for spread in ["first_token_s", "gap_s"] {
        let of = |name: &str| found[spread][name].as_f64().unwrap();
        assert!(0.0 < of("median") && of("median") <= of("p99") && of("p99") <= of("max"));
    }
    assert!(found["tok_s"].as_f64().unwrap() > 0.0);
    for (wrong, why) in [
        (&["--load", "0"][..], "above 0"),
        (&["--load", "1", "--shared", "13"], "no more shared"),
        (&["--requests", "3"], "--load"),
    ] {
        let output = delft().args(base).args(wrong).output().unwrap();
        assert_ne!(status(&output), 0, "{wrong:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(why), "{wrong:?}");
    }
}

#[test]
fn a_bench_is_one_object_with_the_figures() {
    let output = delft()
        .args([
            "bench",
            "-m",
            &fixture("qwen3/model.q8_0.gguf"),
            "-p",
            "16",
            "-n",
            "4",
            "-d",
            "8",
            "-r",
            "2",
            "--threads",
            "1",
            "--json",
        ])
        .output()
        .unwrap();
    let found = json(&output);
    for key in
        ["pp_tok_s", "tg_tok_s", "peak_rss_bytes", "parameters", "weights_bytes", "cache_bytes"]
    {
        assert!(found[key].as_f64().unwrap() > 0.0, "{key}: {found}");
    }
    for (key, value) in [("p", 16), ("n", 4), ("depth", 8), ("repeat", 2), ("threads", 1)] {
        assert_eq!(found[key], value, "{key}");
    }
    assert_eq!(found["pp_runs_tok_s"].as_array().unwrap().len(), 2);
    assert!(
        found["isa"].is_string()
            && found["load_s"].is_number()
            && found["device"].as_str().unwrap().contains("cpu")
    );
    let text = delft()
        .args(["bench", "-m", &fixture("llama3"), "-p", "0", "-n", "2", "-r", "1"])
        .output()
        .unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("tg2") && !text.contains("pp"), "{text}");
}

#[test]
fn a_model_on_two_devices_gives_the_tokens_of_one() {
    let of = |extra: &[&str]| {
        let output = delft()
            .args(["logits", "-m", &fixture("llama3"), "--cache-type", "f32", "--json"])
            .args(["--tokens", "5,6,7,8", "--generate", "6"])
            .args(extra)
            .output();
        json(&output.unwrap())
    };
    let (wanted, found) = (of(&[]), of(&["--device", "sim", "--gpu-layers", "1"]));
    assert_eq!(wanted["generated"], found["generated"]);
    let numbers = |found: &Value| -> Vec<f64> {
        found["logits"][0].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
    };
    for (a, b) in numbers(&wanted).into_iter().zip(numbers(&found)) {
        assert!((a - b).abs() < 1e-3, "{a} {b}");
    }
    let output = delft()
        .args(["bench", "-m", &fixture("llama3"), "--device", "sim", "--gpu-layers", "1"])
        .args(["-p", "12", "-n", "3", "-r", "1", "--json"])
        .output();
    let found = json(&output.unwrap());
    assert!(found["device"].as_str().unwrap().contains("the last 1 layers on sim"), "{found}");
    assert!(found["tg_tok_s"].as_f64().unwrap() > 0.0);
    let output =
        delft().args(["bench", "-m", &fixture("llama3"), "--gpu-layers", "1"]).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(status(&output) == 1 && stderr.contains("a GPU to put layers on"), "{stderr}");
}

#[test]
fn experts_on_the_cpu_give_the_tokens_of_one_device() {
    let model = &fixture("qwen3-moe");
    let of = |extra: &[&str]| {
        let output = delft()
            .args(["logits", "-m", model, "--cache-type", "f32", "--json"])
            .args(["--tokens", "5,6,7,8", "--generate", "6"])
            .args(extra)
            .output();
        json(&output.unwrap())
    };
    let wanted = of(&[]);
    for extra in [&["--cpu-moe"][..], &["-cmoe"], &["--n-cpu-moe", "2"], &["-ncmoe", "2"]] {
        let found = of(&[&["--device", "sim"], extra].concat());
        assert_eq!(wanted["generated"], found["generated"], "{extra:?}");
    }
    let plan = |extra: &[&str]| {
        let output =
            delft().args(["inspect", model, "--device", "sim", "--json"]).args(extra).output();
        json(&output.unwrap())["device_memory"].clone()
    };
    let weights = |plan: &Value| -> Vec<u64> {
        let one = std::slice::from_ref(plan);
        let devices = plan.as_array().map_or(one, Vec::as_slice).iter();
        devices.map(|device| device["weights_bytes"].as_u64().unwrap()).collect()
    };
    let (all, none, some) = (plan(&["--cpu-moe"]), plan(&[]), plan(&["--n-cpu-moe", "2"]));
    let ([gpu, cpu], [whole], [more, less]) =
        (&weights(&all)[..], &weights(&none)[..], &weights(&some)[..])
    else {
        panic!("{all} {none} {some}");
    };
    // Two of three layers have experts.
    assert!(gpu < more && more < whole && *cpu == 2 * less, "{all} {none} {some}");
    let text = delft().args(["inspect", model, "--device", "sim", "--cpu-moe"]).output().unwrap();
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("sim weights") && text.contains("cpu weights"), "{text}");
    let refused = |args: &[&str]| {
        let output = delft().args(["logits", "--tokens", "1"]).args(args).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(status(&output) == 1 && stderr.lines().count() == 1, "{stderr}");
        stderr
    };
    let stderr = refused(&["-m", model, "--device", "cpu", "--cpu-moe"]);
    assert!(stderr.contains("found the CPU alone (hint: leave out --cpu-moe"), "{stderr}");
    let stderr = refused(&["-m", &fixture("llama3"), "--device", "sim", "--n-cpu-moe", "1"]);
    assert!(stderr.contains("found a model without experts"), "{stderr}");
    let stderr = refused(&["-m", model, "--device", "sim", "--n-cpu-moe", "1"]);
    assert!(stderr.contains("experts in the first 1 layers"), "{stderr}");
}

#[test]
fn a_setting_without_effect_is_refused() {
    let model = &fixture("llama3");
    let logits = ["logits", "-m", model, "--tokens", "1", "--dispatch", "eager"];
    let cases: &[(&[&str], &str)] = &[
        (&logits, "--dispatch: expected a GPU"),
        (&["bench", "-m", model, "--dispatch", "graph"], "--dispatch: expected a GPU"),
        (&["perplexity", "-m", model, "--rotate", file!()], "--rotate: expected a command"),
    ];
    for (args, expected) in cases {
        let output = delft().args(*args).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(status(&output), 1, "{args:?}: {stderr}");
        assert!(stderr.contains(expected) && stderr.lines().count() == 1, "{args:?}: {stderr}");
    }
}

#[test]
fn measuring_beyond_the_trained_context_says_so() {
    let model = &fixture("llama3");
    for (args, told) in [
        (["bench", "-p", "700"], true),
        (["why-slow", "-p", "700"], true),
        (["bench", "-p", "16"], false),
    ] {
        let output = delft().args(args).args(["-m", model, "-n", "2"]).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(status(&output), 0, "{args:?}: {stderr}");
        assert_eq!(stderr.contains("was trained for"), told, "{args:?}: {stderr}");
    }
}

#[test]
fn a_dispatch_is_chosen_by_name() {
    let of = |dispatch: &str| {
        delft()
            .args(["logits", "-m", &fixture("llama3"), "--device", "sim", "--json"])
            .args(["--tokens", "5,6,7,8", "--generate", "6", "--dispatch", dispatch])
            .output()
    };
    let [eager, arguments, graph] =
        ["eager", "arguments", "graph"].map(|dispatch| json(&of(dispatch).unwrap()));
    assert_eq!(graph["generated"].as_array().map(Vec::len), Some(6));
    assert!(eager == graph && arguments == graph, "{eager}\n{arguments}\n{graph}");
    let output = of("later").unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(status(&output) == 2 && stderr.contains("arguments"), "{stderr}");
}

#[test]
fn the_memory_of_a_gpu_is_told_and_measured() {
    let bench = |memory: &str, ctx: &str| {
        let mut command = delft();
        command.args(["bench", "-m", &fixture("llama-long"), "--device", "sim", "--json"]);
        command.args(["-p", "500", "-n", "8", "-r", "1", "--sampled", "--ctx", ctx]);
        command.env("DELFT_SIM_MEMORY", memory).output().unwrap()
    };
    let found = json(&bench("100000000", "512"));
    let number = |key: &str| found[key].as_f64().unwrap_or_else(|| panic!("{key}: {found}"));
    let (planned, peak) = (number("device_planned_bytes"), number("device_peak_bytes"));
    assert!((planned / peak - 1.0).abs() <= 0.05, "planned {planned}, peak {peak}");
    assert_eq!(number("device_limit_bytes"), 1e8);
    let needed = format!("{}", planned as u64 + 1_000_000);
    assert_eq!(status(&bench(&needed, "512")), 0);
    // What does not fit is refused, and what is proposed instead does.
    let output = bench(&needed, "65536");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(status(&output) == 1 && stderr.lines().count() == 1, "{stderr}");
    assert!(stderr.contains("sim: expected") && stderr.contains("MiB free"), "{stderr}");
    let proposed = stderr.split("--ctx ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    assert_eq!(status(&bench(&needed, proposed)), 0, "--ctx {proposed}");
    let output = delft()
        .args(["inspect", &fixture("llama3"), "--device", "sim", "--json"])
        .env("DELFT_SIM_MEMORY", "5000000")
        .output();
    let found = json(&output.unwrap());
    assert_eq!(found["device_memory"]["free_bytes"], 5_000_000);
    assert!(found["device_memory"]["total_bytes"].as_u64().unwrap() > 100_000, "{found}");
    let output = delft()
        .args(["run", "--device", "sim", "--ctx", "64", "-v", "-n", "1", "Once"])
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(status(&output) == 0 && stderr.contains("memory of sim: "), "{stderr}");
}

#[test]
fn inspect_tells_sizes_and_memory_without_loading() {
    let output = delft()
        .args(["inspect", &fixture("llama3/model.f32.gguf"), "--ctx", "100", "--tensors", "--json"])
        .args(["--device", "cpu"])
        .output();
    let found = json(&output.unwrap());
    assert_eq!(
        (found["architecture"].as_str(), found["layers"].as_u64()),
        (Some("llama"), Some(2))
    );
    let tensors = found["tensors"].as_array().unwrap();
    let bytes: u64 = tensors.iter().map(|t| t["bytes"].as_u64().unwrap()).sum();
    assert_eq!(found["bytes"], bytes);
    let memory = &found["memory"];
    // 2 layers, a block of 256 positions, 2 heads: keys of 8 and values of 16, a whole vector, of
    // two bytes each.
    assert_eq!(memory["cache_bytes"], 2 * 256 * 2 * (8 + 16) * 2);
    let parts = ["weights_bytes", "cache_bytes", "activation_bytes", "working_bytes"];
    let total: u64 = parts.iter().map(|p| memory[p].as_u64().unwrap()).sum();
    assert_eq!(memory["total_bytes"], total);
    assert_eq!(found["metadata"]["general.architecture"], "llama");
    let folder = json(&delft().args(["inspect", &fixture("llama3"), "--json"]).output().unwrap());
    assert_eq!(folder["metadata"]["model_type"], "llama");
    assert!(folder["parameters"].as_u64().unwrap() > 0 && folder.get("tensors").is_none());
    let text = delft().args(["inspect", &fixture("llama3")]).output().unwrap();
    assert!(String::from_utf8(text.stdout).unwrap().contains("memory at 256 tokens"));
}

#[test]
fn a_model_s_name_cannot_write_lines_of_its_own() {
    let source = formats::Gguf::open(Path::new(&fixture("llama3/model.f32.gguf"))).unwrap();
    let mut metadata: Vec<_> =
        source.metadata().iter().map(|(key, value)| (key.to_string(), value.clone())).collect();
    metadata.retain(|(key, _)| key != "general.name");
    let name = "a\nb\u{202e}\u{1b}[2J".to_string();
    metadata.push(("general.name".to_string(), formats::gguf::MetadataValue::String(name)));
    let spec = |tensor: formats::TensorView| formats::gguf::TensorSpec {
        name: tensor.name.to_string(),
        dtype: tensor.dtype,
        shape: tensor.shape.to_vec(),
    };
    let specs: Vec<_> = source.iter().map(spec).collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("named.gguf");
    let mut file = formats::gguf::Writer::create(&path, &metadata, &specs).unwrap();
    source.iter().for_each(|tensor| file.write(tensor.bytes).unwrap());
    file.finish().unwrap();
    // It has no tokenizer, so nothing is generated; its name is told before that shows.
    let output =
        delft().args(["run", "-v", "hello", "-m"]).arg(&path).stdin(Stdio::null()).output();
    let stderr = String::from_utf8(output.unwrap().stderr).unwrap();
    assert!(stderr.contains("model: a\\nb\\u{202e}\\u{1b}[2J (llama)"), "{stderr}");
}

#[test]
fn a_truncated_model_is_one_error_line() {
    let folder = tempfile::tempdir().unwrap();
    let whole = std::fs::read(fixture("llama3/model.f32.gguf")).unwrap();
    let path = folder.path().join("cut.gguf");
    for length in [0, 3, 20, 200, 1000, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        for command in ["inspect", "logits", "bench"] {
            let mut run = delft();
            run.args([command, "-m"]).arg(&path);
            if command == "logits" {
                run.args(["--tokens", "1"]);
            }
            let output = run.output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(status(&output), 1, "{command} of {length} bytes");
            assert!(
                stderr.contains("cut.gguf") && stderr.lines().count() == 1,
                "{command} of {length} bytes: {stderr}"
            );
        }
    }
}

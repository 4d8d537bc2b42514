//! Every architecture against Hugging Face Transformers: tiny checkpoints, their activations and
//! logits, through the reference interpreter. Recorded and fused Programs, folders and their GGUF
//! twins.

use formats::safetensors::Safetensors;
use formats::{Result, Tensors};
use program::{Program, Sequence, Step, StepKind, Table, WeightId, fuse, reference};
use std::path::{Path, PathBuf};

fn options() -> delft_models::ReadOptions {
    delft_models::ReadOptions::default()
}

/// With the context for which a fixture's rotation is the one that it expects, where that follows
/// the context.
fn options_of(path: &Path) -> delft_models::ReadOptions {
    delft_models::ReadOptions { context: testing::context(path), ..options() }
}

fn cases() -> Vec<PathBuf> {
    let mut cases: Vec<PathBuf> =
        std::fs::read_dir(testing::models()).unwrap().map(|e| e.unwrap().path()).collect();
    cases.retain(|p| p.join("config.json").exists());
    cases.sort();
    assert!(cases.len() >= 12, "{cases:?}");
    cases
}

struct Expected(Safetensors);

impl Expected {
    fn floats(&self, name: &str) -> Option<Vec<f32>> {
        self.0.get(name).map(|t| t.to_f32().unwrap())
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        let bytes = self.0.get(name).unwrap().bytes;
        bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect()
    }
}

/// Largest difference, relative to the range of `want`.
fn error(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    let (low, high) = want.iter().fold((f32::MAX, f32::MIN), |(l, h), &x| (l.min(x), h.max(x)));
    let worst = got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max);
    assert!(worst.is_finite());
    worst / (high - low)
}

fn check(path: &Path, expected: &Expected, fused: bool, bound: f32) -> Result<()> {
    let tensors = Tensors::open(path)?;
    let model = delft_models::load(&tensors, &options_of(path))?;
    let recorded = model.record(!fused)?;
    let program = if fused { fuse(&recorded) } else { recorded };
    program.verify()?;
    let weight = |id: WeightId| program.weights[id.0].read(&tensors)?.to_f32();
    let mut cache = reference::ReferenceCache::default();
    let mut step = |tokens: &[u32], start: usize, outputs: &[u32]| -> Result<Vec<Vec<f32>>> {
        // Layers that see everything, layers within a window, and states.
        let tables = [Table::default(); 3];
        let tables = &tables[..program.groups().len()];
        let sequences = [Sequence::new(tokens.len(), start, tables)];
        let kind = StepKind::Prompt;
        let step = Step { kind, tokens, sequences: &sequences, outputs, input: &[] };
        let values = reference::run(&program, &weight, &mut cache, &step)?;
        Ok(program.results.iter().map(|v| values[v.0].clone()).collect())
    };
    let prompt = expected.ids("input_ids");
    let first = expected.ids("first_row")[0];
    let rows: Vec<u32> = (first..prompt.len() as u32).collect();
    let results = step(&prompt, 0, &rows)?;
    compare(&program, &results, expected, bound, path);
    let all = expected.floats("decode.logits").unwrap();
    let vocab = model.config().vocab;
    for (i, token) in expected.ids("decode.tokens").into_iter().enumerate() {
        let logits = step(&[token], prompt.len() + i, &[0])?;
        let worst = error(&logits[0], &all[i * vocab..][..vocab]);
        assert!(worst <= bound, "{}: step {i}: {worst:e}", path.display());
    }
    Ok(())
}

fn compare(program: &Program, results: &[Vec<f32>], expected: &Expected, bound: f32, path: &Path) {
    let worst = error(&results[0], &expected.floats("logits").unwrap());
    assert!(worst <= bound, "{}: logits: {worst:e}", path.display());
    for ((name, _), value) in program.traces.iter().zip(&results[1..]) {
        let stored = match name.as_str() {
            "embed" => "embeddings".to_owned(),
            name => name.replace("blocks.", "hidden."),
        };
        let Some(want) = expected.floats(&stored) else { continue };
        // Long cases keep only the last rows.
        let worst = error(&value[value.len() - want.len()..], &want);
        assert!(worst <= bound, "{}: {name}: {worst:e}", path.display());
    }
}

fn folder_agrees(case: &Path) {
    let expected = Expected(Safetensors::open(&case.join("expected.safetensors")).unwrap());
    for fused in [false, true] {
        check(case, &expected, fused, 1e-4).unwrap_or_else(|e| panic!("{e}"));
    }
}
testing::fixtures!(folders_agree_layer_by_layer: folder_agrees);

fn twin_agrees(path: &Path) {
    let name = path.file_name().unwrap().to_str().unwrap();
    let of_folder = path.with_file_name("expected.safetensors");
    if path.is_dir() {
        let expected = Expected(Safetensors::open(&of_folder).unwrap());
        for fused in [false, true] {
            check(path, &expected, fused, 1e-4).unwrap_or_else(|e| panic!("{e}"));
        }
        return;
    }
    let stored = name.strip_prefix("model.").unwrap().strip_suffix(".gguf").unwrap();
    // Quantised files have a truth of their own: the same arithmetic over the weights that they
    // decode to.
    let own = path.with_file_name(format!("expected.{stored}.safetensors"));
    let bound = if own.exists() || stored == "f32" { 1e-4 } else { 2e-2 };
    let expected =
        Expected(Safetensors::open(if own.exists() { &own } else { &of_folder }).unwrap());
    check(path, &expected, true, bound).unwrap_or_else(|e| panic!("{e}"));
}
testing::fixtures!(twins_agree: twin_agrees, twins);

#[test]
fn both_dialects_of_config_agree() {
    let mut seen = 0;
    for case in cases() {
        let old = case.join("config.v4.json");
        if !old.exists() {
            continue;
        }
        let aside = tempfile::tempdir().unwrap();
        for entry in std::fs::read_dir(&case).unwrap() {
            let from = entry.unwrap().path();
            std::fs::copy(&from, aside.path().join(from.file_name().unwrap())).unwrap();
        }
        std::fs::copy(&old, aside.path().join("config.json")).unwrap();
        let [a, b] = [case.as_path(), aside.path()].map(|p| {
            delft_models::config(&Tensors::open(p).unwrap(), &options())
                .unwrap_or_else(|e| panic!("{e}"))
        });
        assert_eq!(format!("{a:?}"), format!("{b:?}"), "{}", case.display());
        seen += 1;
    }
    assert!(seen >= 1);
}

#[test]
fn what_stands_around_states_is_fused() {
    for (case, block) in [
        ("qwen3.5", ["project", "short_conv", "delta_net", "gated_norm", "linear_add"]),
        ("mamba2", ["project", "short_conv", "selective_scan", "gated_norm", "linear_add"]),
    ] {
        let path = testing::models().join(case);
        let model = delft_models::load(&Tensors::open(&path).unwrap(), &options()).unwrap();
        let fused = fuse(&model.record(false).unwrap());
        let names: Vec<&str> = fused.nodes.iter().map(|node| node.op.name()).collect();
        assert!(names.windows(block.len()).any(|names| names == block), "{case}: {fused}");
    }
}

/// GPUs round what attention takes, and with it all results of its product.
#[test]
fn scores_of_experts_are_no_part_of_attentions_product() {
    let path = testing::models().join("cohere2_moe");
    let model = delft_models::load(&Tensors::open(&path).unwrap(), &options()).unwrap();
    let fused = fuse(&model.record(false).unwrap());
    let experts = fused.nodes.iter().filter(|node| node.op.name() == "experts");
    let scores: Vec<_> = experts.map(|node| node.inputs[1]).collect();
    assert!(!scores.is_empty(), "{fused}");
    for scores in scores {
        let product = fused.nodes.iter().find(|node| node.outputs.contains(&scores)).unwrap();
        assert_eq!(product.outputs, [scores], "{fused}");
    }
}

/// A model that runs must not be refused before its weights are there.
#[test]
fn a_configuration_is_judged_without_weights_as_with_them() {
    let mut seen = 0;
    for case in cases() {
        let Ok(text) = std::fs::read(case.join("config.json")) else { continue };
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        if delft_models::config(&Tensors::open(&case).unwrap(), &options()).is_ok() {
            delft_models::check_json(&json, "config.json", &options())
                .unwrap_or_else(|e| panic!("{e}"));
            seen += 1;
        }
    }
    assert!(seen >= 10, "{seen}");
    let other = serde_json::json!({ "model_type": "rwkv7", "architectures": ["RWKV7ForCausalLM"] });
    let error =
        delft_models::check_json(&other, "config.json", &options()).unwrap_err().to_string();
    assert!(error.contains("found rwkv7 (hint: "), "{error}");
}

#[test]
fn a_key_that_nothing_reads_is_refused_unless_it_is_ignored() {
    let mut seen = 0;
    for case in cases() {
        let text = std::fs::read(case.join("config.json")).unwrap();
        let mut json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        // Where images are read too, what the decoder reads is in an object of its own, and in one of
        // another where the model speaks, too.
        let path: &[&str] = match json.get("thinker_config") {
            Some(_) => &["thinker_config", "text_config"],
            None if json.get("text_config").is_some() => &["text_config"],
            None => &[],
        };
        let keys = path.iter().fold(&mut json, |json, key| &mut json[*key]);
        keys["attention_temperature"] = 50.0.into();
        let judge = |options: &delft_models::ReadOptions| {
            delft_models::check_json(&json, "config.json", options)
        };
        let ignore_keys = vec!["attention_temperature".to_owned()];
        let ignoring = delft_models::ReadOptions { ignore_keys, ..options() };
        judge(&ignoring).unwrap_or_else(|e| panic!("{}: {e}", case.display()));
        // One that names no architecture is judged when its weights are there.
        if json.get("model_type").is_some() {
            let why = judge(&options()).unwrap_err().to_string();
            let prefix: String = path.iter().map(|key| format!("{key}.")).collect();
            let place = format!("config.json: {prefix}attention_temperature: ");
            assert!(why.starts_with(&place), "{why}");
            seen += 1;
        }
    }
    assert!(seen >= 12, "{seen}");
}

#[test]
fn the_first_keys_tell_the_architecture() {
    let cases = [(Some("qwen3"), None), (Some("rwkv7"), Some("found rwkv7")), (None, None)];
    for (architecture, expected) in cases {
        let entry = |name: &str| ("general.architecture".to_string(), name.into());
        let keys = architecture.map(entry).into_iter().collect();
        let metadata = formats::gguf::Metadata::new("m.gguf", keys).unwrap();
        match (delft_models::check_gguf(&metadata, "m.gguf"), expected) {
            (Ok(()), None) => {}
            (Err(error), Some(part)) => assert!(error.to_string().contains(part), "{error}"),
            (found, _) => panic!("{architecture:?}: {found:?}"),
        }
    }
}

/// Where two settings meet, what Transformers takes is taken.
#[test]
fn settings_that_disagree_are_weighed_as_in_transformers() {
    let plain = || serde_json::json!({ "rope_type": "default", "rope_theta": 5.0 });
    type Change = fn(&mut serde_json::Value, serde_json::Value);
    let cases: &[(&str, Change)] = &[
        // A head that is stored is used, whatever is said of one.
        ("qwen3-untied", |config, _| config["tie_word_embeddings"] = true.into()),
        // The older object takes the place of the newer one, base and all.
        ("llama3", |config, plain| {
            config["rope_scaling"] = std::mem::replace(&mut config["rope_parameters"], plain);
        }),
        // Layers without a window where none is stated.
        ("mistral-full", |config, _| {
            config["layer_types"] = serde_json::json!(["full_attention", "full_attention"]);
        }),
        // Layers that the list does not name have heads as all others have.
        ("gemma4", |config, _| {
            let global = config["global_head_dim"].take();
            let kv_heads = config["num_global_key_value_heads"].take();
            config["per_layer_config"] = serde_json::json!({ "2": { "head_dim": global,
                "num_key_value_heads": kv_heads } });
        }),
    ];
    for (name, change) in cases {
        let (case, aside) = (testing::models().join(name), tempfile::tempdir().unwrap());
        for file in ["model.safetensors", "expected.safetensors"] {
            std::fs::copy(case.join(file), aside.path().join(file)).unwrap();
        }
        let text = std::fs::read(case.join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_slice(&text).unwrap();
        change(&mut config, plain());
        std::fs::write(aside.path().join("config.json"), config.to_string()).unwrap();
        folder_agrees(aside.path());
    }
}

/// What `config.json` does not mention is what Transformers' class of the architecture has (5.24).
#[test]
fn what_is_left_out_is_as_the_class_has_it() {
    let read_whole = |json: serde_json::Value| {
        let aside = tempfile::tempdir().unwrap();
        std::fs::write(aside.path().join("config.json"), json.to_string()).unwrap();
        let weights = testing::models().join("qwen3-untied/model.safetensors");
        std::fs::copy(weights, aside.path().join("model.safetensors")).unwrap();
        delft_models::config(&Tensors::open(aside.path()).unwrap(), &options())
    };
    let read = |inner: serde_json::Value| {
        read_whole(serde_json::json!({ "model_type": "pixtral", "text_config": inner }))
    };
    let inner = serde_json::json!({ "model_type": "mistral", "head_dim": 128,
        "rope_theta": 1e9, "rms_norm_eps": 1e-5 });
    let found = read(inner).unwrap();
    let sizes = [found.hidden, found.layers, found.heads, found.kv_heads, found.feed_forward];
    assert_eq!(sizes, [4096, 32, 32, 8, 14_336]);
    assert_eq!((found.vocab, found.context), (32_000, 131_072));
    assert_eq!(found.windows, vec![Some(4096); 32]);
    // Null is said: no window.
    let said = serde_json::json!({ "model_type": "mistral", "head_dim": 128, "sliding_window": null,
        "num_key_value_heads": null });
    let found = read(said).unwrap();
    assert_eq!((found.windows.len(), found.kv_heads), (0, 32));
    for (name, base) in [("mixtral", 1e6f32), ("cohere", 5e5), ("llama", 1e4), ("smollm3", 2e6)] {
        let found = read(serde_json::json!({ "model_type": name, "head_dim": 64 }))
            .unwrap_or_else(|e| panic!("{e}"));
        let eps = if ["mixtral", "cohere"].contains(&name) { 1e-5 } else { 1e-6 };
        assert_eq!(found.norm_eps, eps, "{name}");
        let second = found.rope.unwrap().frequencies[1];
        assert!((second * base.powf(1.0 / 32.0) - 1.0).abs() < 1e-5, "{name}: {second}");
    }
    // The rotation of a class that stretches it, said or not; null and an older object that is empty
    // say nothing of it, a null in place of that object does.
    for name in ["apertus", "cwm", "gpt_oss", "ministral3", "mistral4"] {
        let whole = |rope: &str| {
            let mut said = serde_json::json!({ "model_type": name, "rope_scaling": {} });
            said["rope_parameters"] = serde_json::from_str(rope).unwrap();
            if name != "mistral4" {
                said["head_dim"] = 128.into();
            }
            read(said).unwrap_or_else(|e| panic!("{name}: {e}")).rope.unwrap()
        };
        let (silent, plain) = (whole("null"), whole("{}"));
        assert_ne!(silent.frequencies, plain.frequencies, "{name}");
        let class = testing::models().with_file_name("classes.json");
        let class = std::fs::read_to_string(class).unwrap();
        let class: serde_json::Value = serde_json::from_str(&class).unwrap();
        let said = whole(&class[name]["rope_parameters"].to_string());
        assert_eq!(silent.frequencies, said.frequencies, "{name}");
        assert_eq!(silent.magnitude, said.magnitude, "{name}");
    }
    // A kind of layers without a base, and a part that the plain rotation of the class does not read.
    let kinds = serde_json::json!({ "full_attention": { "partial_rotary_factor": 0.5 },
        "sliding_attention": { "rope_type": "default" } });
    let lfm3 = read(serde_json::json!({ "model_type": "lfm3", "rope_parameters": kinds })).unwrap();
    let turns = lfm3.rope.unwrap().frequencies;
    assert_eq!(turns.len(), 64);
    assert!((turns[1] * 1e6f32.powf(1.0 / 64.0) - 1.0).abs() < 1e-5, "{}", turns[1]);
    let whole = read_whole(serde_json::json!({ "model_type": "mistral" }));
    let error = whole.unwrap_err().to_string();
    assert!(error.contains("num_hidden_layers: expected a whole number, found nothing"), "{error}");
    let both = serde_json::json!({ "model_type": "llama", "rope_parameters": { "rope_theta": 5e5 },
        "rope_scaling": { "rope_type": "linear", "factor": 2.0 } });
    let error = read(both).unwrap_err().to_string();
    assert!(error.contains("rope_scaling: expected nothing, or the base too"), "{error}");
}

/// Null is no, where Transformers' class says yes of what is left out.
#[test]
fn odds_are_not_made_to_sum_to_one_where_null_says_so() {
    let (case, aside) = (testing::models().join("kimi_linear"), tempfile::tempdir().unwrap());
    std::fs::copy(case.join("model.safetensors"), aside.path().join("model.safetensors")).unwrap();
    let text = std::fs::read(case.join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let experts = |config: &serde_json::Value| {
        std::fs::write(aside.path().join("config.json"), config.to_string()).unwrap();
        let tensors = Tensors::open(aside.path()).unwrap();
        let program = delft_models::load(&tensors, &options()).unwrap().record(false).unwrap();
        let node = program.nodes.iter().find(|node| node.op.name() == "experts").unwrap();
        format!("{:?}", node.op)
    };
    for (said, normalised) in [(true.into(), true), (serde_json::Value::Null, false)] {
        config["moe_renormalize"] = said;
        let found = experts(&config);
        assert!(found.contains(&format!("normalised: {normalised}")), "{found}");
    }
    config.as_object_mut().unwrap().remove("moe_renormalize");
    assert!(experts(&config).contains("normalised: true"));
}

/// A bias that nothing adds would leave another model, unless it is zero.
#[test]
fn a_bias_that_nothing_reads_is_refused() {
    let (case, aside) = (testing::models().join("qwen2"), tempfile::tempdir().unwrap());
    std::fs::copy(case.join("config.json"), aside.path().join("config.json")).unwrap();
    let stored = Safetensors::open(&case.join("model.safetensors")).unwrap();
    let bias = "model.layers.1.self_attn.o_proj.bias";
    let q = stored.get("model.layers.1.self_attn.q_proj.bias").unwrap();
    let path = aside.path().join("model.safetensors");
    let refused = |bytes: &[u8]| {
        let more = formats::TensorView { name: bias, bytes, ..q };
        formats::safetensors::write(&path, &[], stored.iter().chain([more])).unwrap();
        let tensors = Tensors::open(aside.path()).unwrap();
        delft_models::load(&tensors, &options()).err().map(|error| error.to_string())
    };
    let error = refused(q.bytes).unwrap_or_default();
    assert!(error.contains(&format!("{bias}: expected a matrix without a bias")), "{error}");
    assert_eq!(refused(&vec![0; q.bytes.len()]), None);
}

/// Codes whose bits and groups nothing states are told as such, not as a weight that is missing.
#[test]
fn codes_that_no_settings_explain_are_refused() {
    let (case, aside) = (testing::models().join("qwen2"), tempfile::tempdir().unwrap());
    std::fs::copy(case.join("config.json"), aside.path().join("config.json")).unwrap();
    let stored = Safetensors::open(&case.join("model.safetensors")).unwrap();
    let q = "model.layers.0.self_attn.q_proj";
    let codes = format!("{q}.qweight");
    let codes = formats::TensorView {
        name: &codes,
        dtype: formats::DType::I32,
        shape: &[4, 8],
        bytes: &[0; 128],
    };
    let rest = stored.iter().filter(|tensor| !tensor.name.starts_with(q)).chain([codes]);
    formats::safetensors::write(&aside.path().join("model.safetensors"), &[], rest).unwrap();
    let tensors = Tensors::open(aside.path()).unwrap();
    let error = delft_models::load(&tensors, &options()).err().map(|error| error.to_string());
    let error = error.unwrap_or_default();
    let expected = "config.json: quantization_config: expected how weights are quantised, found \
        nothing, beside model.layers.0.self_attn.q_proj.qweight of i32";
    assert!(error.contains(expected), "{error}");
}

/// README's table of models is the registry.
#[test]
fn readme_lists_every_architecture() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let readme = std::fs::read_to_string(path).unwrap();
    let rows: Vec<String> = delft_models::ARCHITECTURES
        .iter()
        .map(|a| {
            let gguf = if a.gguf.is_empty() { "-" } else { &format!("`{}`", a.gguf) };
            format!("| {} | `{}` | {gguf} |", a.title, a.name)
        })
        .collect();
    let table =
        readme.lines().skip_while(|line| *line != "| models | `model_type` | in GGUF |").skip(2);
    let told: Vec<&str> = table.take_while(|line| line.starts_with('|')).collect();
    assert_eq!(told, rows, "README's table of models should be\n{}", rows.join("\n"));
}

/// Configurations with the keys that published ones have, one a line: Llama's relatives, and all
/// families whose first files state more than Transformers reads.
#[test]
fn keys_of_published_configurations_are_known() {
    for line in include_str!("published.jsonl").lines() {
        let json: serde_json::Value = serde_json::from_str(line).unwrap();
        delft_models::check_json(&json, "config.json", &options())
            .unwrap_or_else(|e| panic!("{}: {e}", json["model_type"]));
    }
}

/// Configurations as they were published, less what generation and training read: nothing in them
/// is unknown, and what the architecture takes for granted may be left out.
#[test]
fn published_configurations_are_understood() {
    let gemma3 = serde_json::json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255_999,
        "eoi_token_index": 256_000, "image_token_index": 262_144, "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10_240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": { "factor": 8.0, "rope_type": "linear" },
            "sliding_window": 1024
        },
        "vision_config": { "hidden_size": 1152, "model_type": "siglip_vision_model" }
    });
    let qwen3_moe = serde_json::json!({
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40_960, "max_window_layers": 48,
        "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "output_router_logits": false, "rms_norm_eps": 1e-6, "rope_scaling": null,
        "rope_theta": 1e6, "router_aux_loss_coef": 0.001, "sliding_window": null,
        "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151_936
    });
    let types: Vec<&str> =
        (0..24).map(|i| ["sliding_attention", "full_attention"][i % 2]).collect();
    let gpt_oss = serde_json::json!({
        "architectures": ["GptOssForCausalLM"], "attention_bias": true, "experts_per_token": 4,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "intermediate_size": 2880, "layer_types": types, "max_position_embeddings": 131_072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": false, "rms_norm_eps": 1e-5,
        "rope_scaling": { "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false },
        "rope_theta": 150_000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
        "swiglu_limit": 7.0, "tie_word_embeddings": false, "vocab_size": 201_088
    });
    let qwen3_next = serde_json::json!({
        "architectures": ["Qwen3NextForCausalLM"], "attention_bias": false,
        "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262_144, "mlp_only_layers": [], "model_type": "qwen3_next",
        "moe_intermediate_size": 512, "norm_topk_prob": true, "num_attention_heads": 16,
        "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
        "num_key_value_heads": 2, "output_router_logits": false, "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 1e7,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151_936
    });
    let types = |layers: usize| -> Vec<&str> {
        let one = |i: usize| if i % 4 == 3 { "full_attention" } else { "linear_attention" };
        (0..layers).map(one).collect()
    };
    let qwen3_5 = |model: &str, own: serde_json::Value| {
        let mut text = serde_json::json!({
            "attention_bias": false, "attn_output_gate": true, "full_attention_interval": 4,
            "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "layer_types": types(40),
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32", "max_position_embeddings": 262_144,
            "mlp_only_layers": [], "model_type": format!("{model}_text"),
            "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false,
            "num_attention_heads": 16, "num_hidden_layers": 40, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "vocab_size": 248_320,
            "rope_parameters": { "mrope_interleaved": true, "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_type": "default" }
        });
        own.as_object().unwrap().iter().for_each(|(key, value)| text[key] = value.clone());
        serde_json::json!({ "model_type": model, "image_token_id": 248_056, "text_config": text,
            "vision_config": { "depth": 27 }, "vision_start_token_id": 248_053 })
    };
    let dense = qwen3_5("qwen3_5", serde_json::json!({ "intermediate_size": 12_288 }));
    let sparse = qwen3_5(
        "qwen3_5_moe",
        serde_json::json!({ "moe_intermediate_size": 512, "num_experts": 256,
            "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": 512 }),
    );
    let mut qwen3_coder = qwen3_moe.clone();
    let own = [("use_qk_norm", true.into()), ("shared_expert_intermediate_size", 0.into())];
    own.into_iter().for_each(|(key, value): (_, serde_json::Value)| qwen3_coder[key] = value);
    // A configuration that states all that Transformers 4 has for every model.
    let mut dumped = qwen3_moe.clone();
    dumped["pruned_heads"] = serde_json::json!({});
    dumped["encoder_no_repeat_ngram_size"] = 0.into();
    let scout = serde_json::json!({
        "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200_080,
        "eoi_token_index": 200_081, "image_token_index": 200_092, "model_type": "llama4",
        "text_config": {
            "attention_bias": false, "attention_chunk_size": 8192, "attention_dropout": 0.0,
            "attn_scale": 0.1, "attn_temperature_tuning": 4, "floor_scale": 8192,
            "for_llm_compressor": false, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
            "intermediate_size_mlp": 16_384, "max_position_embeddings": 10_485_760,
            "model_type": "llama4_text", "no_rope_layers": [], "num_attention_heads": 40,
            "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
            "num_local_experts": 16, "output_router_logits": false, "rms_norm_eps": 1e-5,
            "rope_scaling": { "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3" },
            "rope_theta": 5e5, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
            "tie_word_embeddings": false, "use_qk_norm": true, "vocab_size": 202_048
        },
        "vision_config": { "hidden_size": 1408, "model_type": "llama4_vision_model" }
    });
    // The first context is stated though nothing is stretched.
    let phi3_mini = serde_json::json!({
        "architectures": ["Phi3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "embd_pdrop": 0.0, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 8192,
        "max_position_embeddings": 4096, "model_type": "phi3", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5,
        "rope_scaling": null, "rope_theta": 10_000.0, "sliding_window": 2047,
        "tie_word_embeddings": false, "vocab_size": 32_064
    });
    let all = [
        gemma3,
        qwen3_moe,
        gpt_oss,
        qwen3_next,
        dense,
        sparse,
        qwen3_coder,
        dumped,
        scout,
        phi3_mini,
    ];
    for json in all {
        delft_models::check_json(&json, "config.json", &options())
            .unwrap_or_else(|e| panic!("{e}"));
    }
}

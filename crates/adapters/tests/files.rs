//! Adapters' files: what is read from PEFT's, mlx-lm's and llama.cpp's, and what is refused.

use delft_adapters::{AdapterFormat, Base, File};
use formats::safetensors::{self, Safetensors};
use formats::{DType, Result, TensorView, Tensors};
use program::AdapterFactors;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    testing::models().join("../adapters")
}

/// The adapter behind a path, for a model.
fn read(base: &str, path: &Path, strength: f64) -> Result<AdapterFactors> {
    let tensors = Tensors::open(testing::models().join(base))?;
    let model = models::load(&tensors, &models::ReadOptions::default())?;
    let program = program::fuse(&model.record(false)?);
    let base = Base { config: model.config(), program: &program, tensors: &tensors };
    let adapter = File::open(path)?.resolve(&base, strength)?;
    adapter.check(&program.adaptable())?;
    Ok(adapter)
}

#[test]
fn one_adapter_in_three_forms_is_the_same() {
    let lora = fixtures().join("lora");
    let kinds = [
        ("", AdapterFormat::Peft),
        ("mlx", AdapterFormat::Mlx),
        ("adapter.gguf", AdapterFormat::Gguf),
    ];
    for base in ["llama3", "llama3/model.f32.gguf"] {
        let first = read(base, &lora, 1.0).unwrap();
        assert_eq!(first.deltas.len(), 14);
        assert_eq!(first.rank(), 4);
        for (form, kind) in kinds {
            let path = lora.join(form);
            assert_eq!(File::open(&path).unwrap().kind(), kind);
            assert!(read(base, &path, 1.0).unwrap() == first, "{base}: {form}");
        }
    }
    let twice = read("llama3", &lora, 2.0).unwrap();
    let first = read("llama3", &lora, 1.0).unwrap();
    for (name, delta) in &first.deltas {
        assert_eq!(twice.deltas[name].scale, 2.0 * delta.scale, "{name}");
    }
}

/// Factors of experts: of parameters with three axes, of modules, of mlx-lm's and of GGUF's stacks.
#[test]
fn factors_of_experts_are_the_same_in_four_forms() {
    for base in ["mixtral", "mixtral/model.f32.gguf"] {
        let first = read(base, &fixtures().join("experts"), 1.0).unwrap();
        assert_eq!(first.deltas.len(), 8);
        let gate = &first.deltas["blocks.1.mlp.experts.gate"];
        assert_eq!((gate.rank, gate.down.len(), gate.up.len()), (3, 4 * 3 * 64, 4 * 3 * 96));
        for form in ["apart", "mlx", "adapter.gguf"] {
            let found = read(base, &fixtures().join("experts").join(form), 1.0).unwrap();
            assert!(found == first, "{base}: {form}");
        }
    }
}

/// GGUF calls several architectures `llama`, and has their rows of q and k in another order than
/// their folders: an adapter of llama.cpp's fits the folder of each.
#[test]
fn an_adapter_of_llama_cpp_fits_every_architecture_of_its_name() {
    let (llama, lora) = (testing::models().join("llama3"), fixtures().join("lora"));
    let first = read("llama3", &lora, 1.0).unwrap();
    for (name, class) in [("mistral", "MistralForCausalLM"), ("ministral", "MinistralForCausalLM")]
    {
        let folder = tempfile::tempdir().unwrap();
        let text = std::fs::read_to_string(llama.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_str(&text).unwrap();
        config["model_type"] = json!(name);
        config["architectures"] = json!([class]);
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let weights = "model.safetensors";
        std::fs::copy(llama.join(weights), folder.path().join(weights)).unwrap();
        // An absolute path stands for itself.
        let base = folder.path().to_str().unwrap();
        for form in ["", "adapter.gguf"] {
            assert!(read(base, &lora.join(form), 1.0).unwrap() == first, "{name}: {form}");
        }
    }
}

/// The fixtures of mlx-lm's form have PEFT's numbers, and real mlx-lm loads what is written as it
/// loads those (`tests/reference/mlx_adapters.py`).
#[test]
fn an_adapter_of_peft_becomes_one_of_mlx_lm() {
    let folder = tempfile::tempdir().unwrap();
    let write = |case: &str, base: &str| {
        let tensors = Tensors::open(testing::models().join(base))?;
        let model = models::load(&tensors, &models::ReadOptions::default())?;
        let program = program::fuse(&model.record(false)?);
        let base = Base { config: model.config(), program: &program, tensors: &tensors };
        File::open(&fixtures().join(case))?.write_mlx(&base, 1.0, &folder.path().join(case))
    };
    for (case, base) in [("lora", "llama3"), ("dora", "llama-bias"), ("fused", "phi3")] {
        let (from, to) = (fixtures().join(case), folder.path().join(case));
        write(case, base).unwrap();
        assert_eq!(File::open(&to).unwrap().kind(), AdapterFormat::Mlx);
        assert!(read(base, &to, 1.0).unwrap() == read(base, &from, 1.0).unwrap(), "{case}");
        let again = write(case, base).unwrap_err().to_string();
        assert!(again.contains("is not there yet"), "{again}");
    }
    for (case, base, said) in [
        ("rslora", "llama3", "mlx-lm has one of each"),
        ("tables", "llama3", "mlx-lm would change both"),
        ("lora/mlx", "llama3", "an adapter of PEFT"),
    ] {
        let error = write(case, base).unwrap_err().to_string();
        assert!(error.contains(said), "{error}");
        assert!(!folder.path().join(case).exists());
    }
}

/// mlx-lm has the model of texts whole within one with towers.
#[test]
fn modules_beside_towers_have_the_names_of_mlx_lm() {
    for (base, module, named) in [
        ("qwen3-vl", "model.language_model.layers.0", "language_model.model.layers.0"),
        ("qwen3.5", "model.layers.1", "language_model.model.layers.1"),
        ("qwen3", "model.layers.0", "model.layers.0"),
    ] {
        let tensors = Tensors::open(testing::models().join(base)).unwrap();
        let model = models::load(&tensors, &models::ReadOptions::default()).unwrap();
        let program = program::fuse(&model.record(false).unwrap());
        let of = Base { config: model.config(), program: &program, tensors: &tensors };
        let sites = program.adaptable();
        let block = module.rsplit_once('.').unwrap().1;
        let site = sites.iter().find(|s| s.name == format!("blocks.{block}.attention.k")).unwrap();
        let folder = changed("lora", PEFT, |_, tensors| {
            tensors.clear();
            for (half, shape) in [("A", [4, site.input]), ("B", [site.output, 4])] {
                let name = format!("base_model.model.{module}.self_attn.k_proj.lora_{half}.weight");
                let values = vec![0.5; shape[0] * shape[1]];
                tensors.push(Stored { name, shape: shape.to_vec(), values });
            }
        });
        let to = folder.path().join("mlx");
        File::open(folder.path()).unwrap().write_mlx(&of, 1.0, &to).unwrap();
        let stored = Safetensors::open(&to.join("adapters.safetensors")).unwrap();
        assert!(stored.get(&format!("{named}.self_attn.k_proj.lora_a")).is_some(), "{base}");
        assert!(read(base, &to, 1.0).unwrap() == read(base, folder.path(), 1.0).unwrap());
    }
}

/// What is stored of a tensor.
struct Stored {
    name: String,
    shape: Vec<usize>,
    values: Vec<f32>,
}

/// A copy of a fixture, changed.
fn changed(
    case: &str,
    weights: &str,
    change: impl Fn(&mut Value, &mut Vec<Stored>),
) -> tempfile::TempDir {
    let (from, to) = (fixtures().join(case), tempfile::tempdir().unwrap());
    let text = std::fs::read_to_string(from.join("adapter_config.json")).unwrap();
    let mut settings: Value = serde_json::from_str(&text).unwrap();
    let file = Safetensors::open(&from.join(weights)).unwrap();
    let mut tensors: Vec<Stored> = file
        .iter()
        .map(|tensor| Stored {
            name: tensor.name.to_owned(),
            shape: tensor.shape.to_vec(),
            values: tensor.to_f32().unwrap(),
        })
        .collect();
    change(&mut settings, &mut tensors);
    std::fs::write(to.path().join("adapter_config.json"), settings.to_string()).unwrap();
    let bytes: Vec<Vec<u8>> = tensors
        .iter()
        .map(|tensor| tensor.values.iter().flat_map(|v| v.to_le_bytes()).collect())
        .collect();
    let all = tensors.iter().zip(&bytes).map(|(tensor, bytes)| TensorView {
        name: &tensor.name,
        dtype: DType::F32,
        shape: &tensor.shape,
        bytes,
    });
    safetensors::write(&to.path().join(weights), &[], all).unwrap();
    to
}

fn rename(tensors: &mut [Stored], from: &str, to: &str) {
    tensors.iter_mut().for_each(|tensor| tensor.name = tensor.name.replace(from, to));
}

const PEFT: &str = "adapter_model.safetensors";

type Change = fn(&mut Value, &mut Vec<Stored>);

/// What is changed of the adapter `lora`, and what the refusal says.
const REFUSED: &[(&str, Change, &[&str])] = &[
    (
        "a rank that the factors do not have",
        |s, _| s["r"] = json!(8),
        &["lora_A", "rank 8", "rank 4"],
    ),
    ("no rank", |s, _| s["r"] = json!(null), &["adapter_config.json: r", "a number"]),
    ("no alpha", |s, _| s["lora_alpha"] = json!(null), &["lora_alpha", "a number"]),
    ("an alpha of zero", |s, _| s["lora_alpha"] = json!(0), &["lora_alpha", "above 0"]),
    ("another kind", |s, _| s["peft_type"] = json!("VERA"), &["peft_type", "LORA", "VERA"]),
    (
        "biases of another kind",
        |s, _| s["bias"] = json!("some"),
        &["bias", "none, all or lora_only"],
    ),
    (
        "names that are none",
        |s, _| s["modules_to_save"] = json!([7]),
        &["modules_to_save", "names"],
    ),
    (
        "tokens that are none",
        |s, _| s["trainable_token_indices"] = json!({"embed_tokens": [3, -1]}),
        &["trainable_token_indices", "a list of tokens"],
    ),
    (
        "a table of more tokens",
        |s, t| {
            s["modules_to_save"] = json!(["embed_tokens"]);
            let name = "base_model.model.model.embed_tokens.weight".to_owned();
            t.push(Stored { name, shape: vec![130, 48], values: vec![0.5; 130 * 48] });
        },
        &["embed_tokens", "128 tokens", "130", "hint"],
    ),
    (
        "a norm that was trained",
        |s, t| {
            s["modules_to_save"] = json!(["norm"]);
            let name = "base_model.model.model.norm.weight".to_owned();
            t.push(Stored { name, shape: vec![48], values: vec![0.5; 48] });
        },
        &["model.norm.weight", "the model's own weights", "hint"],
    ),
    ("a base that was changed", |s, _| s["init_lora_weights"] = json!("pissa"), &["pissa", "hint"]),
    (
        "a module that was not saved",
        |s, _| s["modules_to_save"] = json!(["lm_head"]),
        &["modules_to_save", "lm_head", "none"],
    ),
    ("an unknown setting", |s, _| s["use_more"] = json!(true), &["use_more", "not supported"]),
    (
        "an expression that looks around itself",
        |s, _| s["alpha_pattern"] = json!({"layers.(?=0).q_proj": 2}),
        &["alpha_pattern", "without looking around", "(?=0)"],
    ),
    ("magnitudes that are missing", |s, _| s["use_dora"] = json!(true), &["use_dora", "none"]),
    (
        "a missing half",
        |_, t| t.retain(|t| !t.name.ends_with("layers.0.mlp.up_proj.lora_B.weight")),
        &["layers.0.mlp.up_proj", "both factors"],
    ),
    (
        "an unknown matrix",
        |_, t| rename(t, "up_proj", "side_proj"),
        &["side_proj", "hint", "mlp.up_proj"],
    ),
    (
        "an unknown layer",
        |_, t| rename(t, "layers.1", "layers.9"),
        &["layers.9", "none that it has"],
    ),
    (
        "another tensor",
        |_, t| rename(t, "layers.1.mlp.up_proj.lora_A.weight", "x"),
        &["both factors"],
    ),
    (
        "a stranger",
        |_, t| t.push(Stored { name: "x".to_owned(), shape: vec![1], values: vec![0.0] }),
        &["x", "another tensor"],
    ),
    ("NaN", |_, t| t[3].values[5] = f32::NAN, &["finite", "NaN at element 5"]),
    ("infinity", |_, t| t[2].values[0] = f32::INFINITY, &["finite", "inf at element 0"]),
    (
        "a wider matrix",
        |_, t| {
            for tensor in t.iter_mut().filter(|t| t.name.contains("v_proj.lora_A")) {
                tensor.values.extend(vec![0.0; 4]);
                tensor.shape[1] += 1;
            }
        },
        &["v_proj.lora_A", "[rank, 48]", "[4, 49]"],
    ),
    (
        "a vector",
        |_, t| {
            for tensor in t.iter_mut().filter(|t| t.name.contains("v_proj.lora_B")) {
                tensor.shape = vec![tensor.values.len()];
            }
        },
        &["v_proj.lora_B", "[16, 4]", "[64]"],
    ),
    ("nothing", |_, t| t.clear(), &["factors of LoRA"]),
    (
        "copies of other weights",
        |_, t| {
            let name = "base_model.model.model.embed_tokens.weight".to_owned();
            t.push(Stored { name, shape: vec![128, 48], values: vec![0.5; 128 * 48] });
        },
        &["embed_tokens", "the model's own weights", "hint"],
    ),
];

/// Texts do not go through a tower, whose factors `all-linear` adds; a merged model has one.
#[test]
fn factors_of_towers_are_passed_over_for_texts_alone() {
    let of_tower = |tensors: &mut Vec<Stored>| {
        for (half, shape) in [("A", vec![4, 16]), ("B", vec![24, 4])] {
            let name =
                format!("base_model.model.model.visual.blocks.0.attn.qkv.lora_{half}.weight");
            tensors.push(Stored { name, values: vec![0.5; shape.iter().product()], shape });
        }
    };
    let folder = changed("lora", PEFT, |_, tensors| of_tower(tensors));
    let why = read("llama3", folder.path(), 1.0).unwrap_err().to_string();
    assert!(why.contains("visual.blocks.0.attn.qkv: expected a matrix of the model"), "{why}");
    let tensors = Tensors::open(testing::models().join("llama3")).unwrap();
    let model = models::load(&tensors, &models::ReadOptions::default()).unwrap();
    let program = program::fuse(&model.record(false).unwrap());
    let base = Base { config: model.config(), program: &program, tensors: &tensors };
    let (text, passed) = File::open(folder.path()).unwrap().of_text().unwrap();
    assert_eq!(passed, 1);
    assert_eq!(
        text.resolve(&base, 1.0).unwrap(),
        read("llama3", &fixtures().join("lora"), 1.0).unwrap()
    );
    let alone = changed("lora", PEFT, |_, tensors| {
        tensors.clear();
        of_tower(tensors);
    });
    let why = File::open(alone.path()).unwrap().of_text().unwrap_err().to_string();
    assert!(why.contains("expected factors of what texts go through"), "{why}");
}

/// A gate of each head is one row in the file, and one for each of the head's elements in the
/// Program: so are its factors, and a merged model has them in that one row.
#[test]
fn factors_of_a_gate_of_each_head_are_those_of_its_elements() {
    let numbers = |count: usize| (0..count).map(|i| (i % 13) as f32 * 0.125 - 0.5).collect();
    let folder = changed("lora", PEFT, |_, tensors| {
        tensors.clear();
        for (half, shape) in [("A", vec![4, 48]), ("B", vec![4, 4])] {
            let name = format!("base_model.model.model.layers.0.self_attn.g_proj.lora_{half}");
            let values: Vec<f32> = numbers(shape.iter().product());
            tensors.push(Stored { name: format!("{name}.weight"), shape, values });
        }
    });
    let adapter = read("laguna", folder.path(), 1.0).unwrap();
    let delta = &adapter.deltas["blocks.0.attention.gate"];
    let heads: Vec<f32> = numbers(16);
    for (row, up) in delta.up.chunks_exact(4).enumerate() {
        assert_eq!(up, &heads[row / 16 * 4..][..4], "row {row}");
    }
    assert_eq!(delta.up.len(), 64 * 4);

    let tensors = Tensors::open(testing::models().join("laguna")).unwrap();
    let model = models::load(&tensors, &models::ReadOptions::default()).unwrap();
    let program = program::fuse(&model.record(false).unwrap());
    let base = Base { config: model.config(), program: &program, tensors: &tensors };
    let to = folder.path().join("merged");
    delft_adapters::fuse(&base, &adapter, &to).unwrap();
    let (name, down) = ("model.layers.0.self_attn.g_proj.weight", numbers(4 * 48));
    let values = |tensors: &Tensors| tensors.get(name).unwrap().to_f32().unwrap();
    let (before, after) = (values(&tensors), values(&Tensors::open(&to).unwrap()));
    for (i, (before, after)) in before.iter().zip(&after).enumerate() {
        let change = |r: usize| heads[i / 48 * 4 + r] * down[r * 48 + i % 48];
        let expected = before + delta.scale * (0..4).map(change).sum::<f32>();
        let off = (after - expected).abs();
        assert!(off <= expected.abs() / 128.0, "element {i}: {after}, expected {expected}");
    }
}

#[test]
fn what_is_odd_is_refused_by_file_and_key() {
    let unchanged = changed("lora", PEFT, |_, _| ());
    read("llama3", unchanged.path(), 1.0).unwrap();
    for (why, change, parts) in REFUSED {
        let folder = changed("lora", PEFT, change);
        let refused = match read("llama3", folder.path(), 1.0) {
            Ok(_) => panic!("{why}: it was read"),
            Err(error) => format!("{error} {}", if error.hint.is_some() { "hint" } else { "" }),
        };
        assert!(refused.contains(folder.path().to_str().unwrap()), "{why}: {refused}");
        for part in *parts {
            assert!(refused.contains(part), "{why}: {part}: {refused}");
        }
    }
}

#[test]
fn other_models_scales_and_files_are_refused() {
    let refused =
        |base: &str, path: &Path, strength| read(base, path, strength).unwrap_err().to_string();
    let other = refused("qwen3", &fixtures().join("lora"), 1.0);
    assert!(other.contains("lora_B") && other.contains("[64, 4], found [48, 4]"), "{other}");
    let gguf = refused("qwen3", &fixtures().join("lora/adapter.gguf"), 1.0);
    assert!(gguf.contains("general.architecture") && gguf.contains("qwen3"), "{gguf}");
    let dora = refused("llama-bias", &fixtures().join("dora"), 0.5);
    assert!(dora.contains("a scale of 1"), "{dora}");
    let scale = refused("llama3", &fixtures().join("lora"), f64::NAN);
    assert!(scale.contains("finite"), "{scale}");
    let model = refused("llama3", &testing::models().join("llama3/model.f32.gguf"), 1.0);
    assert!(model.contains("general.type") && model.contains("adapter"), "{model}");
    let none = refused("llama3", Path::new("/nowhere/at/all"), 1.0);
    assert!(none.contains("no such file"), "{none}");
    let folder = refused("llama3", &testing::models().join("llama3"), 1.0);
    assert!(folder.contains("adapter_config.json"), "{folder}");
    let mlx = changed("lora/mlx", "adapters.safetensors", |settings, _| {
        settings["fine_tune_type"] = json!("full");
    });
    let mlx = refused("llama3", mlx.path(), 1.0);
    assert!(mlx.contains("fine_tune_type") && mlx.contains("lora or dora"), "{mlx}");
}

#[test]
fn damaged_files_are_refused_and_never_panic() {
    let bytes = std::fs::read(fixtures().join("lora").join(PEFT)).unwrap();
    let gguf = std::fs::read(fixtures().join("lora/adapter.gguf")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let settings = fixtures().join("lora/adapter_config.json");
    std::fs::copy(settings, folder.path().join("adapter_config.json")).unwrap();
    let mut state = 7u64;
    let mut next = |n: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    for _ in 0..60 {
        for (whole, name) in [(&bytes, PEFT), (&gguf, "adapter.gguf")] {
            // Headers are where damage matters: they are at the front.
            let mut damaged = whole.clone();
            for _ in 0..1 + next(4) {
                let at = next(damaged.len().min(3000));
                damaged[at] = next(256) as u8;
            }
            damaged.truncate(whole.len() - next(3) * next(whole.len()) / 3);
            let path = folder.path().join(name);
            std::fs::write(&path, &damaged).unwrap();
            let path = if name == PEFT { folder.path() } else { &path };
            // Damage of numbers is none that anybody could see.
            let _ = read("llama3", path, 1.0);
        }
    }
}

#[test]
fn the_reference_interpreter_agrees_with_peft() {
    use program::{Sequence, Step, StepKind, Table, WeightId, reference};
    for (case, base) in [
        ("lora", "llama3"),
        ("dora", "llama-bias"),
        ("tables", "llama3"),
        ("fused", "phi3"),
        ("transposed", "gpt2"),
    ] {
        let tensors = Tensors::open(testing::models().join(base)).unwrap();
        // Phi-3's rotation follows the context, and the prompts fill the shorter one.
        let options = models::ReadOptions { context: Some(16), ..models::ReadOptions::default() };
        let model = models::load(&tensors, &options).unwrap();
        let fused = program::fuse(&model.record(false).unwrap());
        let read = Base { config: model.config(), program: &fused, tensors: &tensors };
        let adapter = File::open(&fixtures().join(case)).unwrap().resolve(&read, 1.0).unwrap();
        let program = fused.with_sites(&|site| adapter.deltas.contains_key(site)).adapted();
        program.verify().unwrap();
        assert_eq!(program.sites.len(), adapter.deltas.len());
        let truth = Safetensors::open(&fixtures().join(case).join("expected.safetensors")).unwrap();
        let ids = truth.get("input_ids").unwrap();
        let tokens: Vec<u32> = ids
            .bytes
            .chunks_exact(8)
            .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
            .collect();
        let outputs: Vec<u32> = (0..tokens.len() as u32).collect();
        let tables = [Table::default(); 2];
        let sequences = [Sequence::new(tokens.len(), 0, &tables[..program.groups().len()])];
        let kind = StepKind::Prompt;
        let step =
            Step { kind, tokens: &tokens, sequences: &sequences, outputs: &outputs, input: &[] };
        let weight = |id: WeightId| program.weights[id.0].read(&tensors)?.to_f32();
        for (adapter, name) in [(Some(&adapter), "logits"), (None, "plain")] {
            let mut cache = reference::ReferenceCache::default();
            let values = reference::adapted(&program, &weight, adapter, &mut cache, &step).unwrap();
            let want = truth.get(name).unwrap().to_f32().unwrap();
            let worst = values[program.results[0].0]
                .iter()
                .zip(&want)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            assert!(worst <= 1e-3, "{case}: {name}: {worst:e}");
        }
    }
}

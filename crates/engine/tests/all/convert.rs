//! GGUF files that Delft writes, read again: the truth that Transformers computed for the folder
//! holds for them.

use crate::common::{Expected, cases, error, load};
use delft_engine::convert::{QuantMix, Types, convert};
use delft_engine::{CacheType, CancelToken, LoadOptions, LogitRows};
use formats::gguf::{MetadataArray, MetadataValue};
use formats::{DType, Gguf, Tensors};
use std::path::Path;

fn write(from: &Path, to: &Path, types: &Types) -> formats::Result<()> {
    let tensors = Tensors::open(from).unwrap();
    convert(&tensors, to, types, &CancelToken::default(), &mut |_| {}).map(|_| ())
}

fn mixed(name: &str) -> Types {
    Types { whole: QuantMix::named(name), ..Types::default() }
}

/// Every checkpoint has a form in GGUF but those whose settings it cannot say.
#[test]
fn folders_compute_the_same_as_files() {
    let scratch = tempfile::tempdir().unwrap();
    let options = LoadOptions { cache_type: CacheType::F32, ..LoadOptions::default() };
    let (mut converted, mut refused) = (0, Vec::new());
    for case in cases() {
        let name = case.file_name().unwrap().to_str().unwrap().to_owned();
        let file = scratch.path().join(format!("{name}.gguf"));
        if let Err(why) = write(&case, &file, &mixed("f32")) {
            refused.push(format!("{name}: {why}"));
            continue;
        }
        let expected = Expected::open(&case.join("expected.safetensors"));
        let (tokens, want) = (expected.ids("input_ids"), expected.floats("logits").unwrap());
        let context = testing::context(&case);
        let engine = load(&file, &LoadOptions { context, ..options.clone() });
        let rows = want.len() / engine.info().vocab;
        let got = engine.session().logits(&tokens, LogitRows::Last(rows)).unwrap();
        let apart = error(&got.data, &want);
        assert!(apart < 1e-4, "{name}: {apart}");
        converted += 1;
    }
    assert!(converted >= 20, "{refused:?}");
    // Settings that GGUF cannot say.
    let unsaid = [
        "aria",
        "axk1",
        "bailing_hybrid",
        "bamba",
        "biogpt",
        "bitnet",
        "bitnet-online",
        "bitnet-plain",
        "chatglm",
        "codegen",
        "cohere2_moe-rms",
        "cwm",
        "emu3",
        "ernie4_5_vl_moe",
        "ettin",
        "falcon-h1-normed",
        "falcon-rw",
        "flex_olmo",
        "flint",
        "gemma2-scalar",
        "gemma3-vision",
        "glm4v",
        "glm4v_moe",
        "glm_ocr",
        "gpt-neo",
        "gpt-neox-in-turn",
        "gpt-neox-japanese",
        "gpt2-scaled",
        "gptj",
        "granite4-moe",
        "granite_swa",
        "helium",
        "hunyuan_vl",
        "hyperclovax",
        "internlm3",
        "kimi_linear",
        "lara-mini",
        "lfm3",
        "llama-dynamic-beyond",
        "llama-proportional",
        "llama4-chunks",
        "llama4-yarn",
        "mellum",
        "minicpm3",
        "minimax",
        "ministral",
        "mllama",
        "mpt-scaled",
        "nanochat",
        "olmo_hybrid",
        "openai-gpt",
        "opt",
        "opt-sums",
        "ouro",
        "paddleocr_vl",
        "persimmon",
        "phi-normed",
        "phimoe",
        "qwen2-moe-gelu",
        "qwen2-window",
        "qwen3-moe",
        "qwen3-moe-all",
        "refact",
        "sarvam_moe",
        "starcoder2-window",
        "vaultgemma",
        "xglm",
        "zamba2",
        "zamba2-plain",
    ];
    let why: Vec<&str> = refused.iter().map(|why| why.split(':').next().unwrap()).collect();
    assert_eq!(why, unsaid, "{refused:#?}");
    let said = |why: &String| {
        why.contains("that GGUF can say")
            && !["{", "}", "Some("].iter().any(|part| why.contains(part))
            || why.contains("an architecture whose GGUF files are read")
    };
    assert!(refused.iter().all(said), "{refused:#?}");
}

/// Readers want a head of some architectures, be it the embedding; of others they do not.
#[test]
fn a_head_that_is_the_embedding_is_written_where_readers_want_one() {
    for (name, wanted) in [("olmo2", true), ("internlm2", true), ("ling2", true), ("llama2", false)]
    {
        let (case, scratch) = (testing::models().join(name), tempfile::tempdir().unwrap());
        let stored = formats::Safetensors::open(&case.join("model.safetensors")).unwrap();
        let (path, file) =
            (scratch.path().join("model.safetensors"), scratch.path().join("m.gguf"));
        let heads = ["lm_head.weight", "output.weight"];
        let kept = stored.iter().filter(|tensor| !heads.contains(&tensor.name));
        formats::safetensors::write(&path, &[], kept).unwrap();
        let text = std::fs::read(case.join("config.json")).unwrap();
        let mut config: serde_json::Value = serde_json::from_slice(&text).unwrap();
        config["tie_word_embeddings"] = true.into();
        std::fs::write(scratch.path().join("config.json"), config.to_string()).unwrap();
        write(scratch.path(), &file, &mixed("f32")).unwrap_or_else(|why| panic!("{name}: {why}"));
        let names = Gguf::open(&file).unwrap();
        assert_eq!(names.get("output.weight").is_some(), wanted, "{name}");
        let logits = |path: &Path| {
            let options = LoadOptions { cache_type: CacheType::F32, ..LoadOptions::default() };
            load(path, &options).session().logits(&[3, 5, 7, 9], LogitRows::All).unwrap().data
        };
        assert!(error(&logits(&file), &logits(scratch.path())) < 1e-4, "{name}");
    }
}

/// Whether these are the same numbers but for their last bits.
fn near(one: &[u8], other: &[u8]) -> bool {
    let numbers = |bytes: &[u8]| -> Vec<f32> {
        bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    };
    let (one, other) = (numbers(one), numbers(other));
    one.len() == other.len()
        && one.iter().zip(&other).all(|(a, b)| (a - b).abs() <= 4.0 * f32::EPSILON * b.abs())
}

/// What llama.cpp's own converter writes of the same folders: every tensor bit for bit, and every
/// number of the architecture.
#[test]
fn files_are_those_of_the_converter_of_llama_cpp() {
    let scratch = tempfile::tempdir().unwrap();
    let mut compared = 0;
    for case in cases() {
        let name = case.file_name().unwrap().to_str().unwrap();
        let file = scratch.path().join(format!("{name}.gguf"));
        let twin = case.join("model.f32.gguf");
        if !twin.exists() || write(&case, &file, &mixed("f32")).is_err() {
            continue;
        }
        let (ours, twin) = (Gguf::open(&file).unwrap(), Gguf::open(&twin).unwrap());
        for tensor in twin.iter() {
            let own = ours.get(tensor.name).unwrap_or_else(|| panic!("{name}: {}", tensor.name));
            assert_eq!(own.shape, tensor.shape, "{name}: {}", tensor.name);
            // The converter computes a rotation's factors and exponentials in f32.
            let computed = tensor.name == "rope_freqs.weight" || tensor.name.ends_with(".ssm_a");
            let near = computed && near(own.bytes, tensor.bytes);
            assert!(own.bytes == tensor.bytes || near, "{name}: {}", tensor.name);
        }
        assert_eq!(ours.iter().count(), twin.iter().count(), "{name}");
        let architecture = twin.metadata().str("general.architecture").unwrap().unwrap();
        for (key, value) in twin.metadata().iter().filter(|(key, _)| key.starts_with(architecture))
        {
            // The converter takes some contexts for granted.
            if ["falcon", "granitehybrid", "nemotron_h"]
                .iter()
                .any(|name| *key == format!("{name}.context_length"))
            {
                continue;
            }
            // Nothing turns.
            if key == "granitehybrid.rope.freq_base" {
                continue;
            }
            // No window, by a number.
            let none = *value == MetadataValue::U32(0);
            let own = ours.metadata().iter().find(|(own, _)| *own == key).map(|(_, value)| value);
            // The converter computes quantiles in f32.
            let floats = |value: &MetadataValue| match value {
                MetadataValue::Array(MetadataArray::F32(all)) => Some(all.clone()),
                _ => None,
            };
            if let (Some(own), Some(twin)) = (own.and_then(floats), floats(value)) {
                let alike = |(a, b): (&f32, &f32)| a == b || (a - b).abs() <= 1e-6 * b.abs();
                let same = own.len() == twin.len() && own.iter().zip(&twin).all(alike);
                assert!(same, "{name}: {key}: {own:?} {twin:?}");
                continue;
            }
            assert!(
                own == Some(value) || own.is_none() && none,
                "{name}: {key}: {own:?} {value:?}"
            );
        }
        compared += 1;
    }
    assert!(compared >= 12, "{compared}");
}

#[test]
fn the_same_input_gives_the_same_bytes_on_any_number_of_threads() {
    let scratch = tempfile::tempdir().unwrap();
    let from = testing::models().join("llama-k-quants/model.q4_k_m.gguf");
    let bytes = |threads| {
        let to = scratch.path().join(format!("{threads}.gguf"));
        write(&from, &to, &Types { threads, ..mixed("q5_k_m") }).unwrap();
        std::fs::read(to).unwrap()
    };
    assert!(bytes(1) == bytes(3));
}

#[test]
fn types_follow_mixes_and_roles() {
    let scratch = tempfile::tempdir().unwrap();
    let from = testing::models().join("llama-k-quants/model.q4_k_m.gguf");
    let to = scratch.path().join("out.gguf");
    let roles = vec![("ffn_".to_owned(), DType::Q8_0), ("ffn_down".to_owned(), DType::Iq4Xs)];
    write(&from, &to, &Types { roles, ..mixed("q4_k_m") }).unwrap();
    let file = Gguf::open(&to).unwrap();
    let dtype = |name: &str| file.get(name).unwrap().dtype;
    assert_eq!(dtype("blk.0.ffn_down.weight"), DType::Iq4Xs);
    assert_eq!(dtype("blk.0.ffn_up.weight"), DType::Q8_0);
    assert_eq!(dtype("blk.0.attn_q.weight"), DType::Q4K);
    assert_eq!(dtype("blk.0.attn_norm.weight"), DType::F32);
    assert_eq!(dtype("token_embd.weight"), DType::Q6K);
    assert_eq!(file.metadata().u32("general.file_type"), Ok(Some(15)));
    // llama.cpp takes taps of F32 alone.
    for (case, taps) in [("lfm2", "shortconv.conv.weight"), ("mamba2", "ssm_conv1d.weight")] {
        write(&testing::models().join(case), &to, &mixed("bf16")).unwrap();
        let file = Gguf::open(&to).unwrap();
        let found: Vec<_> = file.iter().filter(|t| t.name.ends_with(taps)).collect();
        assert!(!found.is_empty() && found.iter().all(|t| t.dtype == DType::F32), "{case}");
    }
    // Rows that are no whole blocks get what fits.
    let narrow = testing::models().join("llama2");
    write(&narrow, &to, &mixed("q4_k_m")).unwrap();
    let file = Gguf::open(&to).unwrap();
    assert!(file.iter().all(|t| t.shape.len() < 2 || t.dtype != DType::Q4K));
}

#[test]
fn a_failed_conversion_leaves_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    let from = testing::models().join("llama-k-quants/model.q4_k_m.gguf");
    let to = scratch.path().join("out.gguf");
    let cancel = CancelToken::default();
    cancel.cancel();
    let tensors = Tensors::open(from.as_path()).unwrap();
    let why = convert(&tensors, &to, &mixed("q8_0"), &cancel, &mut |_| {}).unwrap_err();
    assert!(why.to_string().contains("an interruption"), "{why}");
    assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0);
    // A file is not written over itself while it is read.
    let own = scratch.path().join("own.gguf");
    std::fs::copy(&from, &own).unwrap();
    let why = write(&own, &own, &mixed("q8_0")).unwrap_err();
    assert!(why.to_string().contains("another file than the model's own"), "{why}");
    assert!(std::fs::read(&own).unwrap() == std::fs::read(&from).unwrap());
}

//! NaN and infinity: in weights, which are refused by name, and in logits, which end a generation.

use crate::common::{root, simulates};
use delft_engine::{
    DeviceSpec, Engine, GenerateOptions, LoadOptions, LogitRows, SamplingOptions, Session,
    SplitMode,
};
use std::path::{Path, PathBuf};

const NAN: [u8; 4] = f32::NAN.to_le_bytes();
const INFINITY: [u8; 4] = f32::INFINITY.to_le_bytes();
/// f16.
const HALF_NAN: [u8; 2] = [0x01, 0x7e];
const HALF_INFINITY: [u8; 2] = [0x00, 0xfc];

/// A weight of a fixture that is overwritten, and what the refusal says.
struct Case {
    file: &'static str,
    tensor: &'static str,
    /// The byte of the tensor from which on it is overwritten.
    at: usize,
    with: &'static [u8],
    found: &'static str,
    why: &'static str,
}

const CASES: [Case; 12] = [
    Case {
        file: "qwen3/model.q8_0.gguf",
        tensor: "blk.0.ffn_gate.weight",
        at: 34 * (2 * 5 + 1),
        with: &HALF_NAN,
        found: "a scale of NaN in row 5, columns 32 to 63",
        why: "a scale of a matrix",
    },
    Case {
        file: "qwen3/model.q8_0.gguf",
        tensor: "token_embd.weight",
        at: 34 * 2 * 127,
        with: &HALF_INFINITY,
        found: "a scale of -infinity in row 127, columns 0 to 31",
        why: "a scale of an embedding, and of the head that shares it",
    },
    Case {
        file: "qwen3/model.q8_0.gguf",
        tensor: "blk.1.attn_q_norm.weight",
        at: 0,
        with: &NAN,
        found: "NaN in element 0",
        why: "a norm beside quantised matrices",
    },
    Case {
        file: "llama-k-quants/model.q4_k_m.gguf",
        tensor: "blk.0.attn_k.weight",
        at: 144 * 3 + 2,
        with: &HALF_NAN,
        found: "a scale of NaN in row 3, columns 0 to 255",
        why: "a super-block's min",
    },
    Case {
        file: "llama-k-quants/model.q4_k_m.gguf",
        tensor: "output.weight",
        at: 210 * 64 - 2,
        with: &HALF_NAN,
        found: "a scale of NaN in row 63, columns 0 to 255",
        why: "the last two bytes of a matrix of q6_k",
    },
    Case {
        file: "llama3/model.f32.gguf",
        tensor: "output_norm.weight",
        at: 4 * 47,
        with: &INFINITY,
        found: "infinity in element 47",
        why: "the last element of a norm",
    },
    Case {
        file: "llama3/model.f32.gguf",
        tensor: "blk.1.ffn_down.weight",
        at: 4 * (64 * 17 + 9),
        with: &NAN,
        found: "NaN in row 17, column 9",
        why: "one element of a matrix, in its second panel",
    },
    Case {
        file: "mistral-full/model.f16.gguf",
        tensor: "output.weight",
        at: 2 * (40 * 100 + 39),
        with: &HALF_INFINITY,
        found: "-infinity in row 100, column 39",
        why: "f16",
    },
    Case {
        file: "mistral-full/model.f16.gguf",
        tensor: "token_embd.weight",
        at: 2 * 40,
        with: &HALF_NAN,
        found: "NaN in row 1, column 0",
        why: "an embedding that is not the head's",
    },
    Case {
        file: "qwen3/model.bf16.gguf",
        tensor: "blk.0.ffn_up.weight",
        at: 2 * 64 * 63,
        with: &[0x80, 0x7f],
        found: "infinity in row 63, column 0",
        why: "bf16",
    },
    Case {
        file: "qwen2-yarn/model.f16.gguf",
        tensor: "blk.0.attn_k.bias",
        at: 4,
        with: &NAN,
        found: "NaN in element 1",
        why: "a bias",
    },
    Case {
        file: "llama3/model.safetensors",
        tensor: "model.layers.0.self_attn.q_proj.weight",
        at: 0,
        with: &NAN,
        found: "in row 0, column 0",
        why: "a folder of safetensors",
    },
];

/// A copy of a fixture's folder with some bytes overwritten; the model's path in it.
fn damaged(file: &str, tensor: &str, at: usize, with: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let aside = tempfile::tempdir().unwrap();
    let (case, file) = file.split_once('/').unwrap();
    for entry in std::fs::read_dir(root().join(case)).unwrap().map(|e| e.unwrap().path()) {
        std::fs::copy(&entry, aside.path().join(entry.file_name().unwrap())).unwrap();
    }
    let path = aside.path().join(file);
    let start = match file.ends_with(".gguf") {
        true => {
            let gguf = formats::Gguf::open(&path).unwrap();
            gguf.header().tensors.iter().find(|t| t.name == tensor).unwrap().start
        }
        false => {
            let file = formats::Safetensors::open(&path).unwrap();
            file.header().tensors.iter().find(|t| t.name == tensor).unwrap().start
        }
    };
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[start as usize + at..][..with.len()].copy_from_slice(with);
    std::fs::write(&path, bytes).unwrap();
    let model = if file.ends_with(".gguf") { path } else { aside.path().to_path_buf() };
    (aside, model)
}

fn options(device: &str) -> LoadOptions {
    let device: DeviceSpec = device.parse().unwrap();
    let (threads, context) = (Some(2), Some(64));
    LoadOptions { threads, context, ..LoadOptions::on(device) }
}

#[test]
fn weights_that_are_not_finite_are_refused_by_name_on_every_device() {
    for Case { file, tensor, at, with, found, why } in CASES {
        let (folder, model) = damaged(file, tensor, at, with);
        for device in ["cpu", "sim"] {
            let refused = Engine::load(&model, &options(device)).err();
            let error = refused.unwrap_or_else(|| panic!("{why}, on {device}: loaded")).to_string();
            let named = error.starts_with(folder.path().to_str().unwrap());
            assert!(named && error.contains(tensor) && error.contains(found), "{why}: {error}");
            assert!(
                error.contains("permission for NaN") && !error.contains('\n'),
                "{why}: {error}"
            );
            let allowed = LoadOptions { allow_nan: true, ..options(device) };
            assert!(Engine::load(&model, &allowed).is_ok(), "{why}, allowed on {device}");
        }
    }
}

/// A rank reads a part of each matrix, and tells the position in the whole.
#[test]
fn a_rank_tells_the_position_in_the_whole_tensor() {
    for (tensor, at, found) in [
        ("blk.1.ffn_gate.weight", 4 * (48 * 60 + 7), "NaN in row 60, column 7"),
        ("blk.1.ffn_down.weight", 4 * (64 * 17 + 50), "NaN in row 17, column 50"),
    ] {
        let (_folder, model) = damaged("llama3/model.f32.gguf", tensor, at, &NAN);
        let ranks = LoadOptions { split_mode: SplitMode::Tensor, ..options("sim,sim") };
        let error = Engine::load(&model, &ranks).err().unwrap().to_string();
        assert!(error.contains(found), "{error}");
    }
}

/// The generated tokens, the error if there was one, and how it ended.
fn generate(session: &mut Session, prompt: &[u32]) -> (Vec<u32>, Option<String>, &'static str) {
    let options = GenerateOptions {
        sampling: SamplingOptions::greedy(),
        max_tokens: Some(6),
        ignore_end: true,
        ..GenerateOptions::default()
    };
    let mut generation = session.generate(prompt.to_vec(), &options).unwrap();
    let (mut tokens, mut error) = (Vec::new(), None);
    for token in generation.by_ref() {
        match token {
            Ok(token) => tokens.push(token.id),
            Err(found) => error = Some(found.to_string()),
        }
    }
    (tokens, error, generation.finish().unwrap().name())
}

const UNTIED: &str = "mistral-full/model.f16.gguf";

fn on(path: &Path, device: &str) -> Engine {
    Engine::load(path, &LoadOptions { allow_nan: true, ..options(device) }).unwrap()
}

#[test]
fn logits_that_are_not_finite_end_a_generation_with_an_error() {
    let prompt = [5, 9, 14];
    for device in ["cpu", "sim", "sim-metal"].into_iter().filter(|device| simulates(device)) {
        // A norm that no token gets past: the first logits there are.
        let (_folder, all) = damaged(UNTIED, "output_norm.weight", 0, &NAN);
        let mut session = on(&all, device).session();
        for _ in 0..2 {
            let (tokens, error, finish) = generate(&mut session, &prompt);
            let error = error.unwrap_or_default();
            assert!(error.contains("logits at position 2: expected finite numbers"), "{error}");
            assert!(tokens.is_empty() && finish == "error", "{device}: {tokens:?}, {finish}");
        }

        // One word that only the model writes: the second step, whose token the device chooses
        // itself.
        let sound = on(&root().join(UNTIED), device);
        let (expected, error, finish) = generate(&mut sound.session(), &prompt);
        assert_eq!((expected.len(), error, finish), (6, None, "length"));
        let written = expected.iter().position(|token| !prompt.contains(token)).unwrap();
        let row = 2 * 40 * expected[written] as usize;
        let (_folder, one) = damaged(UNTIED, "token_embd.weight", row, &HALF_NAN);
        let engine = on(&one, device);
        let mut session = engine.session();
        let (tokens, error, finish) = generate(&mut session, &prompt);
        assert_eq!(tokens, expected[..=written], "{device}: what came before it is right");
        let place = format!("logits at position {}", prompt.len() + written);
        assert!(error.unwrap_or_default().contains(&place) && finish == "error", "{device}");
        // What it left in the cache is nobody's.
        let clean = session.logits(&prompt, LogitRows::Last(1)).unwrap();
        assert!(clean.data.iter().all(|x| x.is_finite()), "{device}");
    }
}

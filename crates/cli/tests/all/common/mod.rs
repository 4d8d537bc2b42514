//! The binary under test, cut off from the user's own cache, settings and network.

use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

/// The `delft` binary with an environment of its own.
#[allow(dead_code)] // Some test files start copies of it only.
pub(crate) fn delft() -> Command {
    delft_at(env!("CARGO_BIN_EXE_delft"))
}

/// A copy of it somewhere else.
pub(crate) fn delft_at(path: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(path);
    let nowhere = std::env::temp_dir().join("delft-tests-without-a-cache");
    for name in [
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_TOKEN",
        "XDG_CACHE_HOME",
        "HF_HUB_OFFLINE",
        "DELFT_MODELS",
        "XDG_CONFIG_HOME",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
        "all_proxy",
    ] {
        command.env_remove(name);
    }
    command
        .env("HOME", &nowhere)
        // Nothing is kept from one run to the next.
        .env("DELFT_CACHE", "/dev/null/nowhere")
        .env("HF_HOME", nowhere)
        .env("HF_ENDPOINT", "http://127.0.0.1:9")
        .env("NO_COLOR", "1");
    command
}

/// The exit status; a signal fails the test.
pub(crate) fn status(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("ended by a signal: {output:?}"))
}

/// A checkpoint of the reference fixtures.
#[allow(dead_code)] // Not every test file needs a model.
pub(crate) fn fixture(name: &str) -> String {
    let models = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/models");
    let path = models.join(name);
    assert!(path.exists(), "{} is missing", path.display());
    path.to_str().expect("a path in UTF-8").to_string()
}

/// Runs with `input` on standard input.
#[allow(dead_code)] // Not every test file feeds one.
pub(crate) fn fed(command: &mut Command, input: impl AsRef<[u8]>) -> Output {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    // A program that ends without reading all is no fault of the test's.
    let _ = stdin.write_all(input.as_ref());
    drop(stdin);
    child.wait_with_output().expect("the binary ends")
}

/// `<|role|>content` for every message, then the assistant's turn.
#[allow(dead_code)]
const TEMPLATE: &str = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}\
                        {% if add_generation_prompt %}<|assistant|>{% endif %}";

/// Tokens that are no text, from id 0 on.
#[allow(dead_code)]
pub(crate) const SPECIALS: [&str; 6] =
    ["<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"];

/// Every special token, then every character of ASCII that is seen.
#[allow(dead_code)]
pub(crate) fn letters() -> Vec<String> {
    let characters = (b' '..=b'~').map(|byte| (byte as char).to_string());
    SPECIALS.map(String::from).into_iter().chain(characters).collect()
}

/// Writes a model with a chat template: a reference checkpoint of 128 tokens given a vocabulary of
/// single characters, so that its (meaningless) answers can be followed token by token.
#[allow(dead_code)] // Not every test file needs one.
pub(crate) fn lettered(folder: &Path) {
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture(&format!("llama3/{name}")), folder.join(name)).unwrap();
    }
    tokenizer(folder, &letters(), Some(TEMPLATE));
}

/// Writes a tokenizer with these tokens, none of which is merged from others, and a chat template.
/// Those between `<|` and `|>` are special.
#[allow(dead_code)]
pub(crate) fn tokenizer(folder: &Path, vocabulary: &[String], template: Option<&str>) {
    let ids: serde_json::Map<String, Value> =
        vocabulary.iter().enumerate().map(|(id, text)| (text.clone(), id.into())).collect();
    let special =
        |text: &str| SPECIALS.contains(&text) || (text.starts_with("<|") && text.ends_with("|>"));
    let added: Vec<Value> = vocabulary
        .iter()
        .enumerate()
        .filter(|(_, text)| special(text))
        .map(|(id, text)| {
            json!({ "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true })
        })
        .collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": null, "post_processor": null, "decoder": { "type": "Fuse" },
        "model": { "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
                   "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": ids, "merges": [] },
    });
    let mut config = json!({ "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<s>",
                             "eos_token": "</s>" });
    if let Some(template) = template {
        config["chat_template"] = template.into();
    }
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
}

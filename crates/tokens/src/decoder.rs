//! The `decoder` of a tokenizer.json as a function from one token's text to its bytes.
//!
//! A decoder there works on the whole list of tokens; each kind that is known here works on one
//! token at a time but for spaces at the start of a text ([`Leading`]), which is what makes
//! decoding linear.

use formats::{Error, Result};
use serde_json::Value;

use crate::pieces::{Leading, byte_level, byte_token};

/// Steps from a token's text to its bytes, and the rule for leading spaces.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    steps: Vec<Step>,
    pub(crate) leading: Leading,
}

#[derive(Debug)]
enum Step {
    ByteLevel,
    ByteFallback,
    Replace { from: String, to: String },
    WordPiece { prefix: String, cleanup: bool },
}

impl Decoder {
    /// Reads the member `decoder`; `null` means that tokens are plain text.
    pub(crate) fn parse(place: &str, value: &Value) -> Result<Self> {
        let mut decoder = Decoder::default();
        decoder.add(&format!("{place}: decoder"), value, 0)?;
        Ok(decoder)
    }

    fn add(&mut self, place: &str, value: &Value, depth: usize) -> Result<()> {
        if value.is_null() {
            return Ok(());
        }
        let text = |value: &Value, name: &str| value[name].as_str().unwrap_or_default().to_string();
        let count =
            |name: &str| value[name].as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
        let kind = text(value, "type");
        match kind.as_str() {
            "Sequence" if depth < 8 => {
                for step in value["decoders"].as_array().into_iter().flatten() {
                    self.add(place, step, depth + 1)?;
                }
            }
            "ByteLevel" => self.steps.push(Step::ByteLevel),
            "ByteFallback" => self.steps.push(Step::ByteFallback),
            "Fuse" => {}
            "Replace" if value["pattern"]["String"].is_string() => {
                let from = text(&value["pattern"], "String");
                self.steps.push(Step::Replace { from, to: text(value, "content") });
            }
            "Strip" if value["content"] == " " && count("stop") == 0 => {
                self.leading = Leading::Drop(count("start"))
            }
            "Metaspace" => {
                let replacement = value["replacement"].as_str().unwrap_or("\u{2581}").to_string();
                self.steps.push(Step::Replace { from: replacement, to: " ".to_string() });
                let prepends = match value["prepend_scheme"].as_str() {
                    Some(scheme) => scheme != "never",
                    None => value["add_prefix_space"].as_bool().unwrap_or(true),
                };
                self.leading = if prepends { Leading::DropOfFirstToken } else { Leading::Keep };
            }
            "WordPiece" => {
                let cleanup = value["cleanup"].as_bool().unwrap_or(true);
                self.steps.push(Step::WordPiece { prefix: text(value, "prefix"), cleanup });
                self.leading = Leading::Drop(1);
            }
            _ => {
                let known = "ByteLevel, ByteFallback, Fuse, Metaspace, Replace of a string, Strip of leading spaces, WordPiece or a Sequence of them";
                return Err(Error::new(place, known, value));
            }
        }
        Ok(())
    }

    /// The bytes of a token of the model.
    pub(crate) fn bytes(&self, token: &str) -> Vec<u8> {
        let mut text = token.to_string();
        for step in &self.steps {
            match step {
                Step::ByteLevel => return byte_level(&text),
                Step::ByteFallback => {
                    if let Some(byte) = byte_token(&text) {
                        return vec![byte];
                    }
                }
                Step::Replace { from, to } if !from.is_empty() => text = text.replace(from, to),
                Step::Replace { .. } => {}
                Step::WordPiece { prefix, cleanup } => {
                    text = match text.strip_prefix(prefix.as_str()) {
                        Some(rest) => rest.to_string(),
                        None => format!(" {text}"),
                    };
                    if *cleanup {
                        for (from, to) in CLEANUP {
                            text = text.replace(from, to);
                        }
                    }
                }
            }
        }
        text.into_bytes()
    }
}

/// English punctuation closes up to the word before it.
const CLEANUP: &[(&str, &str)] = &[
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
];

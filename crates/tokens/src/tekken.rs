//! Mistral's own tokenizer file, `tekken.json`, as the GGUF vocabulary that says the same.
//!
//! ```text
//! { "config": { "pattern": "..", "default_vocab_size": 131072, "default_num_special_tokens": 1000, "version": "v7" },
//!   "vocab": [ { "rank": 0, "token_bytes": "AA==" }, .. ], "special_tokens": [ { "rank": 0, "token_str": "<unk>" }, .. ] }
//! ```
//! Special tokens have the first ids, ordinary ones follow by rank. Two neighbours in a word are
//! merged if their bytes together are a token, the one of the lowest rank first; so every way of
//! cutting a token in two is a merge, in the order of the tokens.

use std::collections::HashMap;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use formats::{Error, Result};
use serde::Deserialize;

use crate::folder::read_text;
use crate::gguf::{GgufVocabulary, VocabularyOrigin, kind};
use crate::{char_of, pre};

/// The file's name.
pub(crate) const NAME: &str = "tekken.json";

/// The file's contents.
#[derive(Deserialize)]
struct File {
    config: Config,
    vocab: Vec<Token>,
    special_tokens: Option<Vec<SpecialToken>>,
}

#[derive(Deserialize)]
struct Config {
    pattern: String,
    default_vocab_size: usize,
    default_num_special_tokens: usize,
}

#[derive(Deserialize)]
struct Token {
    rank: usize,
    token_bytes: String,
}

#[derive(Deserialize)]
struct SpecialToken {
    rank: usize,
    token_str: String,
}

/// The special tokens of files that list none, by id.
const UNLISTED: [&str; 20] = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
];

/// More tokens than any vocabulary has.
const MOST: usize = 1 << 24;

/// The vocabulary of a folder's `tekken.json`; `None` where there is none.
///
/// # Errors
/// A file that is no such JSON; numbers of tokens that do not fit each other; another pattern, by
/// key.
pub(crate) fn read(folder: &Path) -> Result<Option<GgufVocabulary>> {
    let path = folder.join(NAME);
    let place = path.display().to_string();
    let Some(text) = read_text(&path)? else { return Ok(None) };
    let file: File = serde_json::from_str(&text)
        .map_err(|e| Error::new(&place, "a vocabulary in Tekken's form", e))?;
    vocabulary(place, file).map(Some)
}

fn vocabulary(place: String, file: File) -> Result<GgufVocabulary> {
    const PRE: &str = "tekken";
    let File { config, vocab, special_tokens } = file;
    let at = |part: &str| format!("{place}: {part}");
    let known = pre::find(PRE).is_some_and(|row| row.splits == [config.pattern.as_str()]);
    if !known {
        let expected = "the pattern that Tekken cuts texts into words by";
        return Err(Error::new(at("config.pattern"), expected, format!("{:?}", config.pattern)));
    }
    let (all, special) = (config.default_vocab_size, config.default_num_special_tokens);
    let ordinary = all.checked_sub(special).filter(|n| *n <= vocab.len() && all <= MOST);
    let Some(ordinary) = ordinary else {
        let expected = format!("at most {special} special tokens and the {} of vocab", vocab.len());
        return Err(Error::new(at("config.default_vocab_size"), expected, all));
    };
    let mut tokens: Vec<String> = (0..special).map(|id| format!("<SPECIAL_{id}>")).collect();
    let listed = special_tokens.map_or_else(
        || UNLISTED.iter().map(|text| (*text).to_owned()).enumerate().collect(),
        |list| list.into_iter().map(|token| (token.rank, token.token_str)).collect::<Vec<_>>(),
    );
    for (id, text) in listed {
        match tokens.get_mut(id) {
            Some(token) => *token = text,
            None => {
                let expected = format!("ranks below {special}, the number of special tokens");
                return Err(Error::new(at("special_tokens"), expected, id));
            }
        }
    }
    let mut ranks: HashMap<Vec<u8>, usize> = HashMap::with_capacity(ordinary);
    let mut spelled: Vec<Vec<u8>> = Vec::with_capacity(ordinary);
    for (rank, token) in vocab.into_iter().take(ordinary).enumerate() {
        let wrong = |expected: &str, found: String| {
            Error::new(at(&format!("vocab[{rank}]")), expected, found)
        };
        if token.rank != rank {
            return Err(wrong("ranks in order", token.rank.to_string()));
        }
        let bytes = STANDARD.decode(&token.token_bytes);
        let bytes = bytes.map_err(|e| wrong("bytes in base64", e.to_string()))?;
        if bytes.is_empty() || ranks.insert(bytes.clone(), rank).is_some() {
            return Err(wrong("bytes that no other token has", token.token_bytes));
        }
        spelled.push(bytes);
    }
    let text = |bytes: &[u8]| bytes.iter().map(|byte| char_of(*byte)).collect::<String>();
    let mut merges = Vec::new();
    for bytes in &spelled {
        let halves = (1..bytes.len()).filter_map(|at| {
            let (left, right) = bytes.split_at(at);
            Some((ranks.get(left)?, ranks.get(right)?, left, right))
        });
        let mut halves: Vec<_> = halves.collect();
        halves.sort_unstable();
        merges.extend(
            halves.into_iter().map(|(.., left, right)| format!("{} {}", text(left), text(right))),
        );
    }
    let id = |wanted: &str| tokens.iter().position(|token| token == wanted).map(|id| id as u32);
    let (bos, eos, unk, pad) = (id("<s>"), id("</s>"), id("<unk>"), id("<pad>"));
    let mut token_types = vec![kind::CONTROL; special];
    token_types.resize(all, kind::NORMAL);
    tokens.extend(spelled.iter().map(|bytes| text(bytes)));
    Ok(GgufVocabulary {
        model: "gpt2".to_owned(),
        pre: Some(PRE.to_owned()),
        tokens,
        token_types,
        merges,
        bos,
        eos,
        unk,
        pad,
        add_bos: Some(bos.is_some()),
        origin: VocabularyOrigin::File(place),
        ..GgufVocabulary::default()
    })
}

//! The tokenizer of a model folder as the metadata of a GGUF file.
//!
//! Byte-level BPE becomes `gpt2`, with the name that GGUF has for its way of cutting text into
//! words; BPE over text with single bytes as a last resort becomes `llama`, whose scores put pieces
//! in the order of their merges. Other kinds are refused by name.

use std::collections::HashMap;
use std::path::Path;

use formats::gguf::{MetadataArray, MetadataValue};
use formats::{Error, ErrorKind, Result};
use serde_json::Value as Json;

use crate::folder::read_json;
use crate::gguf::{GgufVocabulary, kind};
use crate::pieces::byte_token;
use crate::pre::{Alphabet, PreTokenizer, TABLE};
use crate::tekken;
use crate::template;
use crate::tokenizer::Tokenizer;

/// The metadata `tokenizer.*` of a folder's tokenizer for a model whose embedding has `rows` rows;
/// nothing where the folder has none.
///
/// # Errors
/// A tokenizer that does not load, or that GGUF has no name for; more tokens than rows.
pub fn export(folder: &Path, rows: usize) -> Result<Vec<(String, MetadataValue)>> {
    let path = folder.join("tokenizer.json");
    let place = path.display().to_string();
    let Some(json) = read_json(&path)? else {
        if let Some(vocabulary) = tekken::read(folder)? {
            return of_vocabulary(folder, vocabulary, rows);
        }
        if let Some(vocabulary) = crate::folder::pieces(folder)? {
            return of_vocabulary(folder, vocabulary, rows);
        }
        if folder.join("vocab.json").is_file() {
            return Err(Error::new(folder.display(), "a tokenizer.json", "another tokenizer")
                .hint("Transformers' AutoTokenizer writes one: load and save it there"));
        }
        return Ok(Vec::new());
    };
    let tokenizer = Tokenizer::from_folder(folder)?;
    if tokenizer.vocab_size() > rows {
        let expected = format!("at most {rows} tokens, the rows of the embedding");
        return Err(Error::new(&place, expected, tokenizer.vocab_size()));
    }
    let model = &json["model"];
    let kind = model["type"].as_str().unwrap_or("BPE");
    if kind != "BPE" {
        let error = Error::new(format!("{place}: model: type"), "BPE", kind);
        return Err(error.of(ErrorKind::Unsupported));
    }
    let by_text = model["byte_fallback"].as_bool() == Some(true);
    let (texts, types) = tokens(&json, rows, by_text);
    let merges = merges(model);
    let mut all = Vec::new();
    let mut add =
        |name: &str, value: MetadataValue| all.push((format!("tokenizer.ggml.{name}"), value));
    let text = |text: &str| MetadataValue::String(text.to_owned());
    if by_text {
        add("model", text("llama"));
        add("pre", text("default"));
        add("scores", MetadataValue::Array(MetadataArray::F32(scores(&texts, &types, &merges))));
        add("add_space_prefix", MetadataValue::Bool(adds_space(&json)));
    } else {
        add("model", text("gpt2"));
        add("pre", text(pre_tokenizer(&place, &json)?));
        add("merges", MetadataValue::Array(MetadataArray::String(merges)));
    }
    add("tokens", MetadataValue::Array(MetadataArray::String(texts)));
    add("token_type", MetadataValue::Array(MetadataArray::I32(types)));
    let ids = [
        ("bos_token_id", tokenizer.bos()),
        ("eos_token_id", tokenizer.eos_token()),
        ("unknown_token_id", tokenizer.unk()),
        ("padding_token_id", tokenizer.pad()),
    ];
    for (name, id) in ids {
        id.into_iter().for_each(|id| add(name, MetadataValue::U32(id)));
    }
    add("add_bos_token", MetadataValue::Bool(tokenizer.adds_bos()));
    add("add_eos_token", MetadataValue::Bool(!tokenizer.after.is_empty()));
    all.extend(template::metadata_of(folder)?);
    Ok(all)
}

/// The metadata of a vocabulary that is in GGUF's terms.
///
/// # Errors
/// More tokens than rows.
fn of_vocabulary(
    folder: &Path,
    mut vocabulary: GgufVocabulary,
    rows: usize,
) -> Result<Vec<(String, MetadataValue)>> {
    let count = vocabulary.tokens.len();
    if count > rows {
        let expected = format!("at most {rows} tokens, the rows of the embedding");
        return Err(Error::new(vocabulary.origin.file(), expected, count));
    }
    if !vocabulary.scores.is_empty() {
        vocabulary.scores.resize(rows, -1000.0);
    }
    vocabulary.tokens.extend((count..rows).map(|id| format!("[PAD{id}]")));
    vocabulary.token_types.resize(rows, kind::UNUSED);
    fn list<T>(list: Vec<T>) -> Option<Vec<T>> {
        (!list.is_empty()).then_some(list)
    }
    let text = |text: Option<String>| text.map(MetadataValue::String);
    let all = [
        ("model", Some(MetadataValue::String(vocabulary.model))),
        ("pre", text(vocabulary.pre)),
        ("merges", list(vocabulary.merges).map(MetadataArray::String).map(MetadataValue::Array)),
        ("scores", list(vocabulary.scores).map(MetadataArray::F32).map(MetadataValue::Array)),
        ("add_space_prefix", vocabulary.add_space_prefix.map(MetadataValue::Bool)),
        ("remove_extra_whitespaces", vocabulary.remove_extra_whitespaces.map(MetadataValue::Bool)),
        ("tokens", Some(MetadataValue::Array(MetadataArray::String(vocabulary.tokens)))),
        ("token_type", Some(MetadataValue::Array(MetadataArray::I32(vocabulary.token_types)))),
        ("bos_token_id", vocabulary.bos.map(MetadataValue::U32)),
        ("eos_token_id", vocabulary.eos.map(MetadataValue::U32)),
        ("unknown_token_id", vocabulary.unk.map(MetadataValue::U32)),
        ("padding_token_id", vocabulary.pad.map(MetadataValue::U32)),
        ("add_bos_token", vocabulary.add_bos.map(MetadataValue::Bool)),
        ("add_eos_token", Some(MetadataValue::Bool(vocabulary.add_eos.unwrap_or(false)))),
    ];
    let named = |(name, value): (&str, Option<MetadataValue>)| {
        Some((format!("tokenizer.ggml.{name}"), value?))
    };
    let mut all: Vec<(String, MetadataValue)> = all.into_iter().filter_map(named).collect();
    all.extend(template::metadata_of(folder)?);
    Ok(all)
}

/// The texts and kinds of all ids; rows of the embedding that no token has are named as padding.
fn tokens(json: &Json, rows: usize, by_text: bool) -> (Vec<String>, Vec<i32>) {
    let mut texts: Vec<String> = (0..rows).map(|id| format!("[PAD{id}]")).collect();
    let mut types = vec![kind::UNUSED; rows];
    let vocab = json["model"]["vocab"].as_object().into_iter().flatten();
    for (text, id) in vocab {
        let Some(id) = id.as_u64().map(|id| id as usize).filter(|id| *id < rows) else { continue };
        let is_byte = by_text && byte_token(text).is_some();
        types[id] = if is_byte { kind::BYTE } else { kind::NORMAL };
        texts[id].clone_from(text);
    }
    let unknown = json["model"]["unk_token"].as_str();
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let id = token["id"].as_u64().map(|id| id as usize).filter(|id| *id < rows);
        let (Some(id), Some(text)) = (id, token["content"].as_str()) else { continue };
        types[id] = match token["special"].as_bool() {
            _ if unknown == Some(text) => kind::UNKNOWN,
            Some(true) => kind::CONTROL,
            _ => kind::USER_DEFINED,
        };
        text.clone_into(&mut texts[id]);
    }
    (texts, types)
}

/// "left right", best first.
fn merges(model: &Json) -> Vec<String> {
    let one = |merge: &Json| match merge {
        Json::String(line) => Some(line.clone()),
        pair => Some(format!("{} {}", pair[0].as_str()?, pair[1].as_str()?)),
    };
    model["merges"].as_array().into_iter().flatten().filter_map(one).collect()
}

/// A score for every token by which merging the best pair first is merging in the order of merges;
/// tokens that no merge makes come first, as single letters must.
fn scores(texts: &[String], types: &[i32], merges: &[String]) -> Vec<f32> {
    let mut first: HashMap<String, usize> = HashMap::new();
    for (i, merge) in merges.iter().enumerate() {
        if let Some((left, right)) = merge.split_once(' ') {
            first.entry(format!("{left}{right}")).or_insert(i);
        }
    }
    let score = |(text, kind): (&String, &i32)| match first.get(text) {
        Some(i) if *kind == kind::NORMAL => -1.0 - *i as f32,
        _ => 0.0,
    };
    texts.iter().zip(types).map(score).collect()
}

/// Whether a space is put in front of texts.
fn adds_space(json: &Json) -> bool {
    let prepends = |step: &Json| step["type"] == "Prepend";
    let normalizer = &json["normalizer"];
    let steps = normalizer["normalizers"].as_array();
    let by_normalizer =
        prepends(normalizer) || steps.is_some_and(|steps| steps.iter().any(prepends));
    let scheme = json["pre_tokenizer"]["prepend_scheme"].as_str();
    by_normalizer || matches!(scheme, Some("first" | "always"))
}

/// The name that GGUF has for a byte-level tokenizer's way of cutting text into words.
fn pre_tokenizer(place: &str, json: &Json) -> Result<&'static str> {
    let top = &json["pre_tokenizer"];
    let steps = top["pretokenizers"].as_array().cloned().unwrap_or_else(|| vec![top.clone()]);
    let mut splits = Vec::new();
    for step in &steps {
        match step["type"].as_str() {
            Some("Split") => splits.extend(step["pattern"]["Regex"].as_str()),
            Some("Digits") if step["individual_digits"] == true => splits.push(r"\p{N}"),
            Some("ByteLevel") if step["use_regex"] != false => splits.push(crate::pre::GPT2),
            Some("ByteLevel") => {}
            other => {
                let found = other.unwrap_or("nothing").to_owned();
                let expected = "Split, Digits and ByteLevel";
                return Err(Error::new(format!("{place}: pre_tokenizer"), expected, found)
                    .of(ErrorKind::Unsupported));
            }
        }
    }
    let ignores = json["model"]["ignore_merges"] == true;
    let normalises = json["normalizer"]["type"] == "NFC";
    let fits = |row: &&PreTokenizer| row.alphabet == Alphabet::Bytes && row.splits == splits;
    let best = TABLE.iter().filter(fits).max_by_key(|row| {
        2 * usize::from(row.ignore_merges == ignores) + usize::from(row.nfc == normalises)
    });
    let Some(row) = best else {
        let shown: String = splits.join(" then ").chars().take(120).collect();
        let expected = "a way of cutting words that GGUF has a name for";
        return Err(Error::new(format!("{place}: pre_tokenizer"), expected, shown)
            .of(ErrorKind::Unsupported));
    };
    Ok(row.names[0])
}

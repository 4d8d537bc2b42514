//! Tokenizers out of Hugging Face folders.
//!
//! `tokenizer.json` states the pipeline and, by its post-processor alone, what is put around a
//! text, as in current Transformers; `tokenizer_config.json` and `special_tokens_map.json` name the
//! special tokens. Folders of the GPT-2 and Qwen2 classes that hold only `vocab.json` and
//! `merges.txt`, and folders with Mistral's `tekken.json` or SentencePiece's `tokenizer.model`, are
//! read as the GGUF vocabulary that says the same.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Display;
use std::path::Path;
use std::str::FromStr as _;

use formats::{Error, Result};
use serde_json::{Map, Value, json};
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::models::unigram::Unigram;
use tokenizers::{AddedToken, Encoding, PostProcessor, PostProcessorWrapper, Token};

use crate::decoder::Decoder;
use crate::faults::{self, caught};
use crate::gguf::{GgufVocabulary, VocabularyOrigin, kind};
use crate::pieces::Pieces;
use crate::tokenizer::{Added, Model, Parts, Tokenizer};
use crate::{sentencepiece, tekken};

/// Larger JSON files than this are no tokenizers.
const LARGEST_FILE: u64 = 512 << 20;

pub(crate) fn load(folder: &Path) -> Result<Tokenizer> {
    let config = Config::read(folder).map_err(shortened)?;
    let made = caught(&folder.display().to_string(), || read(folder, &config));
    made.map_err(shortened)
}

/// An error that shows no more of a file than fits a line: the part that is wrong may be all of it.
pub(crate) fn shortened(mut error: Error) -> Error {
    for text in [&mut error.place, &mut error.expected, &mut error.found] {
        if let Some((end, _)) = text.char_indices().nth(300) {
            text.truncate(end);
            text.push_str("...");
        }
    }
    error
}

fn read(folder: &Path, config: &Config) -> Result<Tokenizer> {
    if let Some(json) = read_json(&folder.join("tokenizer.json"))? {
        return from_json(&folder.join("tokenizer.json").display().to_string(), json, config);
    }
    if let Some(vocabulary) = tekken::read(folder)? {
        return Tokenizer::from_vocabulary(vocabulary);
    }
    if let Some(vocabulary) = sentencepiece::read(folder)? {
        return Tokenizer::from_vocabulary(with_added(folder, vocabulary, config)?);
    }
    legacy(folder, config)
}

/// A JSON file; `None` where there is none.
pub(crate) fn read_json(path: &Path) -> Result<Option<Value>> {
    formats::json::find(path, LARGEST_FILE)
}

/// The error for a text that is no JSON.
pub(crate) fn no_json(place: impl Display, error: &serde_json::Error) -> Error {
    Error::new(place, "", format!("no valid JSON: {error}"))
}

/// Whether there is a file.
///
/// # Errors
/// One of more than `most` bytes.
pub(crate) fn is_there(path: &Path, most: u64) -> Result<bool> {
    match std::fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(Error::io(path.display(), e)),
        Ok(metadata) if metadata.len() > most => {
            Err(Error::new(path.display(), format!("at most {most} bytes"), metadata.len()))
        }
        Ok(_) => Ok(true),
    }
}

/// A text file; `None` where there is none.
pub(crate) fn read_text(path: &Path) -> Result<Option<String>> {
    if !is_there(path, LARGEST_FILE)? {
        return Ok(None);
    }
    let mut text = formats::text::read(path, LARGEST_FILE)?;
    if text.starts_with('\u{feff}') {
        // The byte order mark that some editors put in front.
        text.remove(0);
    }
    Ok(Some(text))
}

/// The additions of `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json`.
#[derive(Debug, Default)]
pub(crate) struct Config {
    class: Option<String>,
    /// `bos_token` and the like, by name.
    named: HashMap<&'static str, String>,
    additional: Vec<String>,
    add_bos: Option<bool>,
    add_eos: Option<bool>,
    added: BTreeMap<u32, AddedToken>,
}

impl Config {
    fn read(folder: &Path) -> Result<Self> {
        let object = |name: &str| -> Result<Map<String, Value>> {
            let path = folder.join(name);
            match read_json(&path)? {
                None => Ok(Map::new()),
                Some(Value::Object(object)) => Ok(object),
                Some(_) => Err(Error::new(path.display(), "a JSON object", "another value")),
            }
        };
        let config = object("tokenizer_config.json")?;
        let map = object("special_tokens_map.json")?;
        let ids = object("added_tokens.json")?;
        let both = |name: &str| config.get(name).or_else(|| map.get(name)).and_then(text_of);
        let mut this = Config {
            class: config.get("tokenizer_class").and_then(Value::as_str).map(str::to_string),
            add_bos: config.get("add_bos_token").and_then(Value::as_bool),
            add_eos: config.get("add_eos_token").and_then(Value::as_bool),
            ..Config::default()
        };
        for name in ["bos_token", "eos_token", "unk_token", "pad_token"] {
            this.named.extend(both(name).map(|text| (name, text)));
        }
        for source in [&config, &map] {
            let list = source.get("additional_special_tokens").and_then(Value::as_array);
            this.additional.extend(list.into_iter().flatten().filter_map(text_of));
        }
        for (text, id) in &ids {
            if let Some(id) = id.as_u64().and_then(|id| u32::try_from(id).ok()) {
                this.added.insert(id, AddedToken::from(text.clone(), false).normalized(false));
            }
        }
        let decoder = config.get("added_tokens_decoder").and_then(Value::as_object);
        for (id, token) in decoder.into_iter().flatten() {
            if let (Ok(id), Some(token)) = (id.parse::<u32>(), added_token(token)) {
                this.added.insert(id, token);
            }
        }
        Ok(this)
    }

    fn is_named(&self, text: &str) -> bool {
        self.named.values().chain(&self.additional).any(|named| named == text)
    }

    fn finish(&self, tokenizer: &mut Tokenizer, find: impl Fn(&str) -> Option<u32>) {
        let named = |name: &str| self.named.get(name).and_then(|text| find(text));
        tokenizer.bos = named("bos_token");
        tokenizer.eos = named("eos_token");
        tokenizer.unk = named("unk_token");
        tokenizer.pad = named("pad_token");
        tokenizer.end.extend(tokenizer.eos);
        for (name, id) in [("bos_token", tokenizer.bos), ("eos_token", tokenizer.eos)] {
            if let (Some(text), None) = (self.named.get(name), id) {
                let text: String = text.chars().take(40).collect();
                tokenizer.warnings.push(format!(
                    "tokenizer_config.json: {name} {text:?} is no token of the vocabulary: there is none"
                ));
            }
        }
        if tokenizer.bos.is_none() {
            tokenizer.bos =
                tokenizer.before.first().copied().filter(|_| tokenizer.before.len() == 1);
        }
    }
}

/// A token given as its text or as an object with `content`.
fn text_of(value: &Value) -> Option<String> {
    let text = value.as_str().or_else(|| value.get("content")?.as_str())?;
    (!text.is_empty()).then(|| text.to_string())
}

fn added_token(value: &Value) -> Option<AddedToken> {
    let flag =
        |name: &str, default: bool| value.get(name).and_then(Value::as_bool).unwrap_or(default);
    let special = flag("special", false);
    let mut token = AddedToken::from(text_of(value)?, special);
    token = token.single_word(flag("single_word", false)).lstrip(flag("lstrip", false));
    Some(token.rstrip(flag("rstrip", false)).normalized(flag("normalized", !special)))
}

/// The library's tokenizer with one part of a tokenizer.json, and nothing else. The library's reader
/// of whole tokenizers is compiled there, once; readers of each part's type would be compiled here
/// as well.
fn with_part(place: &str, name: &str, part: Value) -> Result<tokenizers::Tokenizer> {
    let kind = part["type"].as_str().unwrap_or("unnamed").to_string();
    let mut whole = json!({"model": {
        "type": "WordPiece", "vocab": {}, "unk_token": "", "continuing_subword_prefix": "",
        "max_input_chars_per_word": 0,
    }});
    whole[name] = part;
    let read = tokenizers::Tokenizer::from_str(&whole.to_string());
    read.map_err(|e| Error::new(format!("{place}: {name}"), format!("a valid {kind}"), e))
}

pub(crate) fn from_json(place: &str, mut json: Value, config: &Config) -> Result<Tokenizer> {
    if !json.is_object() {
        return Err(Error::new(place, "a JSON object", "another value"));
    }
    let decoder = Decoder::parse(place, &json["decoder"])?;
    faults::check(place, &json)?;
    let mut part = |name: &str| with_part(place, name, json[name].take());
    let normalizer = part("normalizer")?.get_normalizer().cloned();
    let pre_tokenizer = part("pre_tokenizer")?.get_pre_tokenizer().cloned();
    let post = part("post_processor")?.get_post_processor().cloned();

    let mut added: BTreeMap<u32, AddedToken> = BTreeMap::new();
    for token in json["added_tokens"].as_array().into_iter().flatten() {
        let id = token["id"].as_u64().and_then(|id| u32::try_from(id).ok());
        let (Some(id), Some(content)) = (id, added_token(token)) else {
            return Err(Error::new(format!("{place}: added_tokens"), "an id and a content", token));
        };
        added.insert(id, content);
    }
    for (id, token) in &config.added {
        added.entry(*id).or_insert_with(|| token.clone());
    }
    let vocabulary = vocabulary(place, &json["model"])?;
    for token in added.values_mut() {
        token.special |= config.is_named(&token.content);
    }
    for text in config.named.values().chain(&config.additional) {
        // A special token that is only part of the vocabulary is found in text all the same.
        if let Some(&id) = vocabulary.get(text) {
            added
                .entry(id)
                .or_insert_with(|| AddedToken::from(text.clone(), true).normalized(false));
        }
    }

    let count = vocabulary.len() + added.len();
    let place_of_ids = format!("{place}: model: vocab");
    let Some(last) = vocabulary.values().chain(added.keys()).max().copied() else {
        return Err(Error::new(place_of_ids, "tokens", "none"));
    };
    if last as usize > 2 * count + 65536 {
        let found = format!("{count} tokens with ids up to {last}");
        return Err(Error::new(place_of_ids, "ids without large gaps", found));
    }
    let mut texts: Vec<Option<&str>> = vec![None; last as usize + 1];
    for (text, id) in &vocabulary {
        texts[*id as usize] = Some(text);
    }
    let mut pieces = Pieces::new(decoder.leading);
    for (id, text) in (0u32..).zip(&texts) {
        let fits = match (added.get(&id), text) {
            (Some(token), _) => pieces.push(token.content.as_bytes(), token.special),
            (None, Some(text)) => pieces.push(&decoder.bytes(text), false),
            (None, None) => pieces.push(&[], false),
        };
        if !fits {
            return Err(Error::new(place, "less than 4 GiB of text", "more"));
        }
    }
    let unknown = json["model"]["unk_id"].as_u64().and_then(|id| u32::try_from(id).ok());
    let model = model(place, json["model"].take(), &added)?;
    let added = added.into_iter().map(|(id, token)| Added { id, token }).collect();
    let parts = Parts {
        model: Model::Hf(Box::new(model)),
        normalizer,
        pre_tokenizer,
        added,
        pieces,
        warnings: Vec::new(),
    };
    let mut tokenizer = Tokenizer::new(place, parts)?;
    if let Some(post) = post {
        (tokenizer.before, tokenizer.after) = around(place, &post)?;
        let size = tokenizer.vocab_size();
        let strange = tokenizer.before.iter().chain(&tokenizer.after);
        if let Some(id) = strange.copied().find(|id| *id as usize >= size) {
            let place = format!("{place}: post_processor");
            return Err(Error::new(place, format!("token ids below {size}"), id));
        }
    }
    let find = |text: &str| vocabulary.get(text).copied();
    let ids = std::mem::take(&mut tokenizer.ids);
    config.finish(&mut tokenizer, |text| ids.get(text).copied().or_else(|| find(text)));
    // A unigram knows its own, also where no setting names it.
    tokenizer.unk = tokenizer.unk.or(unknown);
    tokenizer.ids = ids;
    Ok(tokenizer)
}

/// Texts and ids of the member `model`.
fn vocabulary(place: &str, model: &Value) -> Result<HashMap<String, u32>> {
    let wrong =
        |found: String| Error::new(format!("{place}: model: vocab"), "tokens and their ids", found);
    match &model["vocab"] {
        Value::Object(vocab) => vocab
            .iter()
            .map(|(text, id)| match id.as_u64().and_then(|id| u32::try_from(id).ok()) {
                Some(id) => Ok((text.clone(), id)),
                None => Err(wrong(format!("{text:?}: {id}"))),
            })
            .collect(),
        // Unigram: a list of [text, score], whose places are the ids.
        Value::Array(list) => (0u32..)
            .zip(list)
            .map(|(id, entry)| match (entry[0].as_str(), entry[1].as_f64()) {
                (Some(text), Some(_)) => Ok((text.to_string(), id)),
                _ => Err(wrong(entry.to_string())),
            })
            .collect(),
        _ => Err(wrong("neither an object nor a list".to_string())),
    }
}

fn model(place: &str, value: Value, added: &BTreeMap<u32, AddedToken>) -> Result<ModelWrapper> {
    let (whole, place) = (place, format!("{place}: model"));
    let kind = value["type"].as_str().unwrap_or("").to_string();
    match kind.as_str() {
        "BPE" | "" if value["merges"].is_array() => bpe(&place, value).map(Into::into),
        "BPE" => {
            let found = if value["merges"].is_null() { "none" } else { "something else" };
            Err(Error::new(format!("{place}: merges"), "a list of pairs of tokens", found))
        }
        "Unigram" => unigram(&place, &value, added).map(Into::into),
        "WordPiece" | "WordLevel" => {
            with_part(whole, "model", value).map(|whole| whole.get_model().clone())
        }
        other => {
            Err(Error::new(place, "BPE, Unigram, WordPiece or WordLevel", format!("{other:?}")))
        }
    }
}

fn unigram(place: &str, value: &Value, added: &BTreeMap<u32, AddedToken>) -> Result<Unigram> {
    let Some(list) = value["vocab"].as_array() else {
        return Err(Error::new(format!("{place}: vocab"), "a list of texts and scores", "a map"));
    };
    let unknown = match &value["unk_id"] {
        Value::Null => None,
        id => match id.as_u64().filter(|id| *id < list.len() as u64) {
            Some(id) => Some(id as usize),
            None => return Err(Error::new(place, format!("unk_id below {}", list.len()), id)),
        },
    };
    let fallback = match &value["byte_fallback"] {
        Value::Null => false,
        Value::Bool(fallback) => *fallback,
        other => return Err(Error::new(place, "byte_fallback: true or false", other)),
    };
    let piece = |(id, entry): (usize, &Value)| {
        let pair = match entry.as_array().map(Vec::as_slice) {
            Some([Value::String(text), score]) => score.as_f64().map(|score| (text, score)),
            _ => None,
        };
        let (text, score) =
            pair.ok_or_else(|| Error::new(format!("{place}: vocab"), "texts and scores", entry))?;
        // The model finds any text of its list, so special tokens must not be there by their text.
        let special = added.get(&(id as u32)).is_some_and(|token| token.special);
        let hidden = special && unknown != Some(id);
        Ok((if hidden { format!("\u{fdd0}{id}\u{2581}") } else { text.clone() }, score))
    };
    let pieces: Vec<(String, f64)> = list.iter().enumerate().map(piece).collect::<Result<_>>()?;
    Unigram::from(pieces, unknown, fallback).map_err(|e| Error::new(place, "a valid Unigram", e))
}

/// BPE, with every merge checked: the builder takes for granted that parts and union are tokens.
fn bpe(place: &str, mut value: Value) -> Result<BPE> {
    let (vocab, merges) = (value["vocab"].take(), value["merges"].take());
    let (Value::Object(vocab), Value::Array(merges)) = (vocab, merges) else {
        return Err(Error::new(place, "vocab and merges", "something else"));
    };
    let vocabulary: Vocab = vocab
        .into_iter()
        .filter_map(|(text, id)| Some((text, u32::try_from(id.as_u64()?).ok()?)))
        .collect();
    let text =
        |name: &str| value[name].as_str().filter(|text| !text.is_empty()).map(str::to_string);
    let flag = |name: &str| value[name].as_bool().unwrap_or(false);
    let (prefix, suffix) = (text("continuing_subword_prefix"), text("end_of_word_suffix"));
    let mut pairs = Vec::with_capacity(merges.len());
    for merge in merges {
        let pair = match merge {
            Value::String(line) => {
                line.split_once(' ').map(|(a, b)| (a.to_string(), b.to_string()))
            }
            Value::Array(parts) => match <[Value; 2]>::try_from(parts) {
                Ok([Value::String(a), Value::String(b)]) => Some((a, b)),
                _ => None,
            },
            _ => None,
        };
        let Some((left, right)) = pair else {
            return Err(Error::new(
                format!("{place}: merges"),
                "pairs of tokens",
                "something else",
            ));
        };
        let inner = match &prefix {
            Some(prefix) => right.strip_prefix(prefix.as_str()),
            None => Some(right.as_str()),
        };
        let union = inner.map(|inner| format!("{left}{inner}"));
        let known = |token: &str| vocabulary.contains_key(token);
        if !known(&left) || !known(&right) || !union.as_deref().is_some_and(known) {
            let found = format!("{left:?} and {right:?}");
            return Err(Error::new(
                format!("{place}: merges"),
                "tokens whose union is a token too",
                found,
            ));
        }
        pairs.push((left, right));
    }
    let unknown = text("unk_token");
    if let Some(unknown) = unknown.as_ref().filter(|unknown| !vocabulary.contains_key(*unknown)) {
        return Err(Error::new(
            format!("{place}: unk_token"),
            "a token of the vocabulary",
            format!("{unknown:?}"),
        ));
    }
    let mut builder = BPE::builder()
        .vocab_and_merges(vocabulary, pairs)
        .fuse_unk(flag("fuse_unk"))
        .byte_fallback(flag("byte_fallback"))
        .ignore_merges(flag("ignore_merges"));
    if let Some(unknown) = unknown {
        builder = builder.unk_token(unknown);
    }
    if let Some(prefix) = prefix {
        builder = builder.continuing_subword_prefix(prefix);
    }
    if let Some(suffix) = suffix {
        builder = builder.end_of_word_suffix(suffix);
    }
    builder.build().map_err(|e| Error::new(place, "a vocabulary with merges", e))
}

/// The ids that a post-processor puts before and after a text.
fn around(place: &str, post: &PostProcessorWrapper) -> Result<(Vec<u32>, Vec<u32>)> {
    let wrong = |found: String| {
        Error::new(format!("{place}: post_processor"), "one place for the text", found)
    };
    let text = Encoding::from_tokens(vec![Token::new(u32::MAX, "x".to_string(), (0, 1))], 0);
    let whole = post.process(text, None, true).map_err(|e| wrong(e.to_string()))?;
    let ids = whole.get_ids();
    let at = ids.iter().position(|id| *id == u32::MAX).ok_or_else(|| wrong("none".to_string()))?;
    Ok((ids[..at].to_vec(), ids[at + 1..].to_vec()))
}

/// The vocabulary of SentencePiece's own file, with the tokens that the files beside it add; `None`
/// where there is none.
pub(crate) fn pieces(folder: &Path) -> Result<Option<GgufVocabulary>> {
    let Some(vocabulary) = sentencepiece::read(folder)? else { return Ok(None) };
    with_added(folder, vocabulary, &Config::read(folder)?).map(Some)
}

/// A vocabulary with the tokens that the files beside it add.
fn with_added(folder: &Path, mut v: GgufVocabulary, config: &Config) -> Result<GgufVocabulary> {
    for (id, token) in &config.added {
        let id = *id as usize;
        if id > v.tokens.len() + 65536 {
            let found = format!("{} tokens with ids up to {id}", v.tokens.len());
            return Err(Error::new(folder.display(), "ids without large gaps", found));
        }
        while v.tokens.len() <= id {
            v.tokens.push(format!("[PAD{}]", v.tokens.len()));
            v.scores.push(-1000.0);
            v.token_types.push(kind::UNUSED);
        }
        let special = token.special || config.is_named(&token.content);
        v.tokens[id].clone_from(&token.content);
        v.token_types[id] = if special { kind::CONTROL } else { kind::USER_DEFINED };
    }
    for (text, own) in v.tokens.iter().zip(&mut v.token_types) {
        if config.is_named(text) && !matches!(*own, kind::UNKNOWN | kind::BYTE) {
            *own = kind::CONTROL;
        }
    }
    let find = |name: &str| {
        let text = config.named.get(name)?;
        v.tokens.iter().position(|token| token == text).map(|id| id as u32)
    };
    (v.bos, v.eos) = (find("bos_token").or(v.bos), find("eos_token").or(v.eos));
    (v.unk, v.pad) = (find("unk_token").or(v.unk), find("pad_token").or(v.pad));
    (v.add_bos, v.add_eos) = (config.add_bos.or(v.add_bos), config.add_eos.or(v.add_eos));
    Ok(v)
}

/// `vocab.json` and `merges.txt`.
fn legacy(folder: &Path, config: &Config) -> Result<Tokenizer> {
    let path = folder.join("vocab.json");
    let merges = read_text(&folder.join("merges.txt"))?;
    let (Some(Value::Object(vocab)), Some(merges)) = (read_json(&path)?, merges) else {
        let expected =
            "tokenizer.json, tokenizer.model, tekken.json, or vocab.json with merges.txt";
        return Err(Error::new(folder.display(), expected, "none of them"));
    };
    let pre = match config.class.as_deref().map(|class| class.trim_end_matches("Fast")) {
        Some("GPT2Tokenizer") | None => "gpt-2",
        Some("Qwen2Tokenizer") => "qwen2",
        Some(class) => {
            return Err(Error::new(
                folder.join("tokenizer_config.json").display(),
                "GPT2Tokenizer or Qwen2Tokenizer where there is no tokenizer.json",
                format!("{class:?}"),
            ));
        }
    };
    let mut texts: HashMap<u32, (String, i32)> = HashMap::new();
    for (text, id) in vocab {
        match id.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) => texts.insert(id, (text, kind::NORMAL)),
            None => {
                return Err(Error::new(
                    path.display(),
                    "tokens and their ids",
                    format!("{text:?}: {id}"),
                ));
            }
        };
    }
    for (id, token) in &config.added {
        let special = token.special || config.is_named(&token.content);
        let kind = if special { kind::CONTROL } else { kind::USER_DEFINED };
        texts.insert(*id, (token.content.clone(), kind));
    }
    for (text, kind) in texts.values_mut() {
        if config.is_named(text) {
            *kind = kind::CONTROL;
        }
    }
    let last = texts.keys().max().copied().filter(|last| *last as usize <= 2 * texts.len() + 65536);
    let Some(last) = last else {
        return Err(Error::new(
            path.display(),
            "ids without large gaps",
            format!("{} tokens", texts.len()),
        ));
    };
    let (mut tokens, mut token_types) = (Vec::new(), Vec::new());
    for id in 0..=last {
        let (text, kind) = texts.remove(&id).unwrap_or((String::new(), kind::UNUSED));
        tokens.push(text);
        token_types.push(kind);
    }
    let lines = merges.lines().filter(|line| !line.starts_with("#version") && !line.is_empty());
    let vocabulary = GgufVocabulary {
        model: "gpt2".to_string(),
        pre: Some(pre.to_string()),
        tokens,
        token_types,
        merges: lines.map(str::to_string).collect(),
        origin: VocabularyOrigin::Folder(folder.display().to_string()),
        ..GgufVocabulary::default()
    };
    let mut tokenizer = Tokenizer::from_vocabulary(vocabulary)?;
    let ids = std::mem::take(&mut tokenizer.ids);
    config.finish(&mut tokenizer, |text| ids.get(text).copied());
    tokenizer.ids = ids;
    tokenizer.before = tokenizer.bos.filter(|_| config.add_bos == Some(true)).into_iter().collect();
    tokenizer.after = tokenizer.eos.filter(|_| config.add_eos == Some(true)).into_iter().collect();
    Ok(tokenizer)
}

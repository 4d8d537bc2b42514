//! [`Tokenizer`]: text to ids and back, whatever the model was shipped as.
//!
//! Encoding is the Hugging Face pipeline (added tokens, normaliser, pre-tokeniser, model) with
//! SentencePiece's merging by score as one more model. Decoding is a table of bytes per id, so it
//! is linear and can stream.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use formats::{Error, Result};
use tokenizers::models::ModelWrapper;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::{
    AddedToken, AddedVocabulary, Model as _, OffsetReferential, OffsetType, PreTokenizer as _,
};

use crate::faults::caught;
use crate::pieces::Pieces;
use crate::spm::Spm;
use crate::stream::Stream;

/// How special tokens take part in encoding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Special {
    /// BOS and EOS are added where the model's own configuration says so.
    pub add: bool,
    /// The text of a special token in the input becomes its id. Leave it off for text from users.
    pub parse: bool,
}

/// A model's vocabulary and how text becomes it. Made by [`Tokenizer::from_folder`] or
/// [`Tokenizer::from_gguf`].
pub struct Tokenizer {
    /// The file, as errors name it.
    place: String,
    pub(crate) model: Model,
    pub(crate) normalizer: Option<NormalizerWrapper>,
    pub(crate) pre_tokenizer: Option<PreTokenizerWrapper>,
    /// Tokens that are found in text before anything else.
    pub(crate) added: AddedVocabulary,
    /// The same without the special ones.
    pub(crate) plain: AddedVocabulary,
    pub(crate) pieces: Arc<Pieces>,
    /// Texts of added tokens to ids.
    pub(crate) ids: HashMap<String, u32>,
    pub(crate) before: Vec<u32>,
    pub(crate) after: Vec<u32>,
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Option<u32>,
    pub(crate) unk: Option<u32>,
    pub(crate) pad: Option<u32>,
    pub(crate) end: BTreeSet<u32>,
    pub(crate) warnings: Vec<String>,
}

/// The algorithm that turns a word into ids.
pub(crate) enum Model {
    Hf(Box<ModelWrapper>),
    Spm(Spm),
}

/// A token that is found in text before anything else.
pub(crate) struct Added {
    pub(crate) id: u32,
    pub(crate) token: AddedToken,
}

/// The parts a tokenizer is made from; what each kind of file must supply.
pub(crate) struct Parts {
    pub(crate) model: Model,
    pub(crate) normalizer: Option<NormalizerWrapper>,
    pub(crate) pre_tokenizer: Option<PreTokenizerWrapper>,
    pub(crate) added: Vec<Added>,
    pub(crate) pieces: Pieces,
    pub(crate) warnings: Vec<String>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Tokenizer {{ vocabulary: {}, bos: {:?}, eos: {:?} }}",
            self.vocab_size(),
            self.bos,
            self.eos
        )
    }
}

impl Tokenizer {
    /// The tokenizer of a Hugging Face folder: `tokenizer.json`, or `vocab.json` with `merges.txt`
    /// for the GPT-2 and Qwen2 classes; `tokenizer_config.json` and `special_tokens_map.json` are
    /// read where present.
    ///
    /// # Errors
    /// A missing or malformed file, or a kind of tokenizer that is not known, by name.
    pub fn from_folder(folder: &Path) -> Result<Self> {
        crate::folder::load(folder)
    }

    /// The tokenizer of a `tokenizer.json` alone; which token is BOS or EOS is not stated there.
    ///
    /// # Errors
    /// As [`Tokenizer::from_folder`].
    pub fn from_json(json: &[u8]) -> Result<Self> {
        let place = "tokenizer.json";
        let value = serde_json::from_slice(json).map_err(|e| crate::folder::no_json(place, &e))?;
        let config = crate::folder::Config::default();
        caught(place, || crate::folder::from_json(place, value, &config))
            .map_err(crate::folder::shortened)
    }

    /// Ids of `text`.
    ///
    /// # Errors
    /// A model that has neither a token nor an unknown token for some of the text.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        if special.add {
            ids.extend(&self.before);
        }
        self.encode_to(text, special.parse, &mut ids)?;
        if special.add {
            ids.extend(&self.after);
        }
        Ok(ids)
    }

    /// Ids of a prompt that a chat template rendered. Special tokens are parsed; BOS is added where
    /// the model asks for it and the template did not write it, and EOS never is.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_chat(&self, prompt: &str) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        self.encode_to(prompt, true, &mut ids)?;
        if !self.before.is_empty() && !ids.starts_with(&self.before) {
            ids.splice(0..0, self.before.iter().copied());
        }
        Ok(ids)
    }

    /// Ids of `text` behind the text `before`, without the blank that some tokenizers put in front
    /// of a text; `None` where no token begins between the two, or the ids do not say exactly the
    /// text. Special tokens in both are plain text.
    pub fn encode_behind(&self, before: &str, text: &str) -> Option<Vec<u32>> {
        let mut ids = self.encode(&format!("{before}{text}"), Special::default()).ok()?;
        let (mut at, mut left) = (ids.len(), text.len());
        while left > 0 {
            at = at.checked_sub(1)?;
            left = left.checked_sub(self.token_bytes(ids[at]).len())?;
        }
        let own = ids.split_off(at);
        let said = own.iter().flat_map(|id| self.token_bytes(*id));
        said.eq(text.as_bytes()).then_some(own)
    }

    fn encode_to(&self, text: &str, parse: bool, ids: &mut Vec<u32>) -> Result<()> {
        caught(&self.place, || self.append(text, parse, ids))
    }

    fn append(&self, text: &str, parse: bool, ids: &mut Vec<u32>) -> Result<()> {
        let failed =
            |e: tokenizers::Error| Error::new(&self.place, "text this vocabulary can write", e);
        let added = if parse { &self.added } else { &self.plain };
        let mut words = added.extract_and_normalize(self.normalizer.as_ref(), text);
        if let Some(pre_tokenizer) = &self.pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut words).map_err(failed)?;
        }
        for (word, _, tokens) in words.get_splits(OffsetReferential::Normalized, OffsetType::Byte) {
            match (tokens, &self.model) {
                (Some(tokens), _) => ids.extend(tokens.iter().map(|t| t.id)),
                (None, Model::Spm(spm)) => spm.encode(word, ids),
                (None, Model::Hf(model)) => {
                    let tokens = model.tokenize(word).map_err(failed)?;
                    // What stands in a unigram's list for special tokens must not be found either.
                    let unigram = matches!(**model, ModelWrapper::Unigram(_));
                    let plain = |id: &u32| !unigram || !self.is_special(*id);
                    ids.extend(tokens.iter().filter_map(|t| Some(t.id).filter(plain).or(self.unk)));
                }
            }
        }
        Ok(())
    }

    /// Text of `ids`. What is no UTF-8 becomes U+FFFD; ids outside the vocabulary say nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut stream = self.stream_with(skip_special);
        let mut text = String::new();
        for &id in ids {
            stream.push_to(id, &mut text);
        }
        text.extend(stream.flush());
        text
    }

    /// A detokeniser for one text; special tokens say nothing.
    pub fn stream(&self) -> Stream {
        self.stream_with(true)
    }

    /// A detokeniser for one text; special tokens say nothing but for those with these texts.
    pub fn stream_showing(&self, texts: &[&str]) -> Stream {
        self.stream().showing(texts.iter().filter_map(|text| self.special_id(text)).collect())
    }

    /// A detokeniser for one text that shows special tokens or skips them.
    pub fn stream_with(&self, skip_special: bool) -> Stream {
        Stream::new(self.pieces.clone(), skip_special)
    }

    /// The bytes of a token, perhaps a part of a character. Empty for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.pieces.get(id)
    }

    /// The text of a token, with U+FFFD for what is no UTF-8.
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.token_bytes(id)).into_owned()
    }

    /// The id of an added token (special or user-defined) by its exact text.
    pub fn special_id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    /// One more than the largest id.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The token a text begins with.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The tokens that end a generation: EOS and those that end a turn or a message.
    pub fn eos(&self) -> &BTreeSet<u32> {
        &self.end
    }

    /// The one token that the model's configuration names EOS.
    pub fn eos_token(&self) -> Option<u32> {
        self.eos
    }

    /// The token for what cannot be written otherwise.
    pub fn unk(&self) -> Option<u32> {
        self.unk
    }

    /// The token that fills short rows of a batch.
    pub fn pad(&self) -> Option<u32> {
        self.pad
    }

    /// Adds ids that end a generation, such as the ids in `generation_config.json`. Ids outside the
    /// vocabulary are ignored.
    pub fn add_eos(&mut self, ids: impl IntoIterator<Item = u32>) {
        let size = self.vocab_size();
        self.end.extend(ids.into_iter().filter(|id| (*id as usize) < size));
    }

    /// Whether `skip_special` leaves this token out.
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }

    /// Whether BOS or anything else is put before a text encoded with [`Special::add`].
    pub fn adds_bos(&self) -> bool {
        self.bos.is_some_and(|bos| self.before.contains(&bos))
    }

    /// Oddities of the vocabulary that did not prevent reading it, one sentence each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    pub(crate) fn new(place: &str, parts: Parts) -> Result<Self> {
        let Parts { model, normalizer, pre_tokenizer, added: tokens, pieces, warnings } = parts;
        let added = tokens.iter().map(|added| &added.token);
        crate::faults::check_added(place, added, normalizer.as_ref())?;
        let added = added_vocabulary(place, &tokens, normalizer.as_ref())?;
        let mut plain = added.clone();
        plain.set_encode_special_tokens(true);
        let mut ids = HashMap::new();
        for Added { id, token } in tokens {
            ids.entry(token.content).or_insert(id);
        }
        let mut tokenizer = Tokenizer {
            place: place.to_string(),
            model,
            normalizer,
            pre_tokenizer,
            added,
            plain,
            pieces: Arc::new(pieces),
            ids,
            before: Vec::new(),
            after: Vec::new(),
            bos: None,
            eos: None,
            unk: None,
            pad: None,
            end: BTreeSet::new(),
            warnings,
        };
        tokenizer.end = tokenizer.known_ends();
        Ok(tokenizer)
    }

    /// Special tokens that by their text end a turn, a message or a text.
    fn known_ends(&self) -> BTreeSet<u32> {
        let find = |text: &str| self.special_id(text).filter(|id| self.is_special(*id));
        let mut end: BTreeSet<u32> = ENDS.iter().filter_map(|text| find(text)).collect();
        // In these vocabularies <|end|> closes a message while the turn goes on.
        let harmony = find("<|return|>").is_some() && find("<|call|>").is_some();
        let solar = find("<|flush|>").is_some() && find("<|calls|>").is_some();
        if let Some(id) = find("<|end|>").filter(|_| harmony || solar) {
            end.remove(&id);
        }
        end
    }
}

/// Texts that mean "generation ends here" wherever they are special tokens.
const ENDS: &[&str] = &[
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<turn|>",
    "<end_of_utterance>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<eos>",
    "</s>",
    "<\u{ff5c}end\u{2581}of\u{2581}sentence\u{ff5c}>",
];

/// Added tokens under exactly the ids that they declare.
fn added_vocabulary(
    place: &str,
    tokens: &[Added],
    normalizer: Option<&NormalizerWrapper>,
) -> Result<AddedVocabulary> {
    // The crate takes ids from a model by text; this one holds just these tokens.
    let vocabulary =
        tokens.iter().rev().map(|added| (added.token.content.clone(), added.id)).collect();
    let bad = |e: tokenizers::Error| Error::new(place, "added tokens that can be matched", e);
    let model = WordLevel::builder().vocab(vocabulary).build().map_err(bad)?;
    let mut added = AddedVocabulary::new();
    added
        .add_tokens(tokens.iter().map(|added| added.token.clone()), &model, normalizer)
        .map_err(bad)?;
    Ok(added)
}

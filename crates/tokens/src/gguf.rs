//! Tokenizers out of GGUF metadata: the keys `tokenizer.ggml.*` as [`GgufVocabulary`], and its
//! three kinds.
//!
//! `gpt2` is byte-level BPE with merges and a named pre-tokeniser, `llama` SentencePiece BPE with
//! scores, `t5` SentencePiece unigram. Kinds that no decoder-only model uses (`bert`, `rwkv`,
//! `plamo2`) are refused by name.

use std::collections::{BTreeSet, HashSet};
use std::fmt::Display;

use formats::gguf::Metadata;
use formats::{Error, Result};
use tokenizers::models::bpe::BPE;
use tokenizers::models::unigram::Unigram;
use tokenizers::normalizers::replace::ReplacePattern;
use tokenizers::normalizers::{NFC, NormalizerWrapper, Prepend, Replace, Sequence, Strip};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, SplitDelimiterBehavior};

use crate::faults::caught;
use crate::pieces::{Leading, Pieces, byte_level, byte_token};
use crate::pre::{self, Alphabet, PreTokenizer};
use crate::spm::Spm;
use crate::tokenizer::{Added, Model, Parts, Tokenizer};

/// Values of `tokenizer.ggml.token_type`.
pub mod kind {
    /// Ordinary.
    pub const NORMAL: i32 = 1;
    /// The unknown token.
    pub const UNKNOWN: i32 = 2;
    /// Special: never part of text.
    pub const CONTROL: i32 = 3;
    /// Found in text before anything else, and part of it.
    pub const USER_DEFINED: i32 = 4;
    /// Never output.
    pub const UNUSED: i32 = 5;
    /// `<0xXX>`: one byte.
    pub const BYTE: i32 = 6;
}

/// Where a vocabulary is from, which is how errors name its parts.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum VocabularyOrigin {
    /// No file: the keys of GGUF alone.
    #[default]
    Memory,
    /// A GGUF file.
    Gguf(String),
    /// A folder with `vocab.json` and `merges.txt`.
    Folder(String),
    /// A file with keys of its own for these: `tekken.json`, `tokenizer.model`.
    File(String),
}

impl VocabularyOrigin {
    /// The file and its part that says what the key `tokenizer.ggml.NAME` says.
    fn at(&self, name: &str) -> String {
        match self {
            VocabularyOrigin::Memory => format!("{PLACE}.{name}"),
            VocabularyOrigin::Gguf(file) => format!("{file}: {PLACE}.{name}"),
            VocabularyOrigin::Folder(folder) if name == "merges" => format!("{folder}/merges.txt"),
            VocabularyOrigin::Folder(folder) => format!("{folder}/vocab.json"),
            VocabularyOrigin::File(file) => format!("{file}: {name}"),
        }
    }

    /// The file.
    pub(crate) fn file(&self) -> &str {
        match self {
            VocabularyOrigin::Memory => PLACE,
            VocabularyOrigin::Gguf(file)
            | VocabularyOrigin::Folder(file)
            | VocabularyOrigin::File(file) => file,
        }
    }
}

/// The vocabulary of a GGUF file; each field is the key `tokenizer.ggml.` of the same name unless
/// said otherwise.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GgufVocabulary {
    /// `model`: `gpt2`, `llama`, `t5`, `gemma4`.
    pub model: String,
    /// `pre`: the pre-tokeniser's name.
    pub pre: Option<String>,
    /// Texts of all ids.
    pub tokens: Vec<String>,
    /// Empty or one per token.
    pub scores: Vec<f32>,
    /// `token_type`, see [`kind`]; empty or one per token.
    pub token_types: Vec<i32>,
    /// "left right", best first.
    pub merges: Vec<String>,
    /// `bos_token_id`.
    pub bos: Option<u32>,
    /// `eos_token_id`.
    pub eos: Option<u32>,
    /// `eot_token_id`: ends a turn.
    pub eot: Option<u32>,
    /// `eom_token_id`: ends a message.
    pub eom: Option<u32>,
    /// `unknown_token_id`.
    pub unk: Option<u32>,
    /// `padding_token_id`.
    pub pad: Option<u32>,
    /// `add_bos_token`.
    pub add_bos: Option<bool>,
    /// `add_eos_token`.
    pub add_eos: Option<bool>,
    /// `add_space_prefix`.
    pub add_space_prefix: Option<bool>,
    /// `remove_extra_whitespaces`.
    pub remove_extra_whitespaces: Option<bool>,
    /// Whether `precompiled_charsmap` is present and not empty.
    pub charsmap: bool,
    /// `general.name`, by which a few models' special tokens are known to swallow spaces.
    pub name: Option<String>,
    /// Where it is from.
    pub origin: VocabularyOrigin,
    /// Oddities and assumptions, one line each.
    pub warnings: Vec<String>,
}

const PLACE: &str = "tokenizer.ggml";

impl Tokenizer {
    /// The tokenizer of a GGUF file.
    ///
    /// # Errors
    /// Keys that are absent or of another type, and the errors of [`Tokenizer::from_vocabulary`].
    pub fn from_gguf(metadata: &Metadata) -> Result<Self> {
        Self::from_vocabulary(GgufVocabulary::from_metadata(metadata)?)
    }

    /// The tokenizer of a vocabulary.
    ///
    /// # Errors
    /// A kind that is not known, by name, or arrays that do not fit together.
    pub fn from_vocabulary(vocabulary: GgufVocabulary) -> Result<Self> {
        let file = vocabulary.origin.file().to_string();
        let make = || {
            let vocabulary = vocabulary.checked()?;
            match vocabulary.model.as_str() {
                "llama" => spm(vocabulary),
                "gpt2" | "gemma4" => bpe(vocabulary),
                "t5" => unigram(vocabulary),
                other => {
                    let found: String = other.chars().take(60).collect();
                    Err(vocabulary.wrong("model", "gpt2, llama, gemma4 or t5", found))
                }
            }
        };
        caught(&file, make)
    }
}

impl GgufVocabulary {
    /// The vocabulary in a GGUF file's metadata.
    ///
    /// # Errors
    /// No model or tokens, or a key of another type, by name.
    pub fn from_metadata(metadata: &Metadata) -> Result<Self> {
        let key = |name: &str| format!("{PLACE}.{name}");
        let text = |name: &str| Ok::<_, Error>(metadata.str(&key(name))?.map(str::to_string));
        let id = |name: &str| metadata.u32(&key(name));
        let flag = |name: &str| metadata.bool(&key(name));
        let texts =
            |name: &str| Ok::<_, Error>(metadata.strings(&key(name))?.map(<[String]>::to_vec));
        // Converters have written "none" as -1 too.
        let none = |name: &str| metadata.i32(&key(name)) == Ok(Some(-1));
        let lenient = |name: &str| Ok::<_, Error>(if none(name) { None } else { id(name)? });
        let mut warnings = Vec::new();
        let mut add_bos = flag("add_bos_token")?;
        if none("bos_token_id") {
            add_bos = Some(false);
            warnings.push(format!("{} is -1: no BOS is put before texts", key("bos_token_id")));
        }
        Ok(GgufVocabulary {
            model: text("model")?.ok_or_else(|| metadata.missing(&key("model")))?,
            pre: text("pre")?,
            tokens: texts("tokens")?.ok_or_else(|| metadata.missing(&key("tokens")))?,
            scores: metadata.f32s(&key("scores"))?.unwrap_or_default(),
            token_types: metadata.i32s(&key("token_type"))?.unwrap_or_default(),
            merges: texts("merges")?.unwrap_or_default(),
            bos: lenient("bos_token_id")?,
            eos: lenient("eos_token_id")?,
            eot: lenient("eot_token_id")?,
            eom: lenient("eom_token_id")?,
            unk: lenient("unknown_token_id")?,
            pad: lenient("padding_token_id")?,
            add_bos,
            add_eos: flag("add_eos_token")?,
            add_space_prefix: flag("add_space_prefix")?,
            remove_extra_whitespaces: flag("remove_extra_whitespaces")?,
            charsmap: match metadata.get(&key("precompiled_charsmap")) {
                Some(formats::gguf::MetadataValue::Array(bytes)) => !bytes.is_empty(),
                _ => false,
            },
            name: metadata.str("general.name")?.map(str::to_string),
            origin: VocabularyOrigin::Gguf(metadata.place().to_string()),
            warnings,
        })
    }

    /// An error about what the key `tokenizer.ggml.NAME` says.
    fn wrong(&self, name: &str, expected: impl Display, found: impl Display) -> Error {
        Error::new(self.origin.at(name), expected, found)
    }

    /// The same with lengths and ids checked, empty texts named, ids that are not needed and lie
    /// outside the vocabulary gone.
    fn checked(self) -> Result<GgufVocabulary> {
        let mut v = self;
        let count = v.tokens.len();
        if count == 0 || u32::try_from(count).is_err() {
            return Err(v.wrong("tokens", "at least one token", count));
        }
        for (name, length) in [("scores", v.scores.len()), ("token_type", v.token_types.len())] {
            if length != 0 && length != count {
                return Err(v.wrong(name, format!("{count} values, one per token"), length));
            }
        }
        // A model whose end is no token can never say that it is done.
        for (name, id) in [("eos", v.eos), ("eot", v.eot), ("eom", v.eom)] {
            if let Some(id) = id.filter(|id| *id as usize >= count) {
                return Err(v.wrong(
                    &format!("{name}_token_id"),
                    format!("an id below {count}"),
                    id,
                ));
            }
        }
        if let Some(id) = v.bos.filter(|id| *id as usize >= count) {
            let then = if v.model == "llama" { "1 is taken" } else { "no BOS is put before texts" };
            v.warnings
                .push(format!("{PLACE}.bos_token_id = {id} is outside the {count} tokens: {then}"));
            v.add_bos = if v.model == "llama" { v.add_bos } else { Some(false) };
        }
        v.token_types.resize(count, kind::NORMAL);
        for (id, token) in v.tokens.iter_mut().enumerate() {
            if token.is_empty() {
                *token = format!("[EMPTY_{id}]");
            }
        }
        for id in [&mut v.bos, &mut v.unk, &mut v.pad] {
            *id = id.filter(|id| (*id as usize) < count);
        }
        Ok(v)
    }

    fn of_kind(&self, wanted: i32) -> impl Iterator<Item = (u32, &str)> {
        let kinds = self.token_types.iter().copied();
        (0u32..)
            .zip(&self.tokens)
            .zip(kinds)
            .filter(move |(_, k)| *k == wanted)
            .map(|((id, t), _)| (id, t.as_str()))
    }

    fn is_control(&self, id: u32) -> bool {
        matches!(self.token_types.get(id as usize), Some(&(kind::CONTROL | kind::UNKNOWN)))
    }

    /// Control, unknown and user-defined tokens, which are found in text before anything else.
    fn added(&self) -> Vec<Added> {
        // Phi-3 states this in its tokenizer.json; the metadata has no place for it.
        let phi3 = self.name.as_deref().is_some_and(|name| {
            let name = name.to_lowercase();
            name.contains("phi-3") || name.contains("phi3")
        });
        let strips = |text: &str| phi3 && !matches!(text, "<unk>" | "<s>" | "<|endoftext|>");
        let mut seen = HashSet::new();
        let mut added = Vec::new();
        for (id, text) in (0u32..).zip(&self.tokens) {
            let special = self.is_control(id);
            let user_defined = self.token_types.get(id as usize) == Some(&kind::USER_DEFINED);
            if (special || user_defined) && seen.insert(text) {
                let token = AddedToken::from(text.clone(), special)
                    .normalized(false)
                    .rstrip(special && strips(text));
                added.push(Added { id, token });
            }
        }
        added
    }

    fn pieces(&self, leading: Leading, piece: impl Fn(&str) -> Vec<u8>) -> Result<Pieces> {
        let mut pieces = Pieces::new(leading);
        for ((id, token), kind) in (0u32..).zip(&self.tokens).zip(&self.token_types) {
            let bytes = match *kind {
                kind::CONTROL | kind::UNKNOWN | kind::USER_DEFINED => token.clone().into_bytes(),
                kind::BYTE => byte_token(token).map_or_else(|| piece(token), |byte| vec![byte]),
                _ => piece(token),
            };
            if !pieces.push(&bytes, self.is_control(id)) {
                return Err(self.wrong("tokens", "less than 4 GiB of text", "more"));
            }
        }
        Ok(pieces)
    }

    /// The finished tokenizer: special ids and what is put around a text.
    fn finish(&self, parts: Parts, add_bos: bool, add_eos: bool) -> Result<Tokenizer> {
        let mut tokenizer = Tokenizer::new(self.origin.file(), parts)?;
        tokenizer.warnings.splice(0..0, self.warnings.iter().cloned());
        (tokenizer.bos, tokenizer.eos, tokenizer.unk, tokenizer.pad) =
            (self.bos, self.eos, self.unk, self.pad);
        tokenizer.end.extend([self.eos, self.eot, self.eom].into_iter().flatten());
        for (wanted, id, place, name, side) in [
            (self.add_bos.unwrap_or(add_bos), self.bos, &mut tokenizer.before, "bos", "before"),
            (self.add_eos.unwrap_or(add_eos), self.eos, &mut tokenizer.after, "eos", "behind"),
        ] {
            match id {
                Some(id) if wanted => place.push(id),
                None if wanted => tokenizer.warnings.push(format!(
                    "{PLACE}.{name}_token_id is missing: nothing is put {side} texts"
                )),
                _ => {}
            }
        }
        Ok(tokenizer)
    }
}

/// U+2581 stands for a space in SentencePiece's vocabularies.
const SPACE: &str = "\u{2581}";

fn unescape(token: &str) -> Vec<u8> {
    token.replace(SPACE, " ").into_bytes()
}

fn escape(add_space_prefix: bool) -> Result<NormalizerWrapper> {
    let spaces =
        Replace::new(" ", SPACE).map_err(|e| Error::new(PLACE, "a normaliser for spaces", e))?;
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if add_space_prefix {
        steps.push(Prepend::new(SPACE.to_string()).into());
    }
    steps.push(spaces.into());
    Ok(Sequence::new(steps).into())
}

/// SentencePiece BPE with scores.
fn spm(mut v: GgufVocabulary) -> Result<Tokenizer> {
    if v.scores.is_empty() {
        return Err(v.wrong("scores", "one score per token of a llama vocabulary", "none"));
    }
    // These ids are the convention of the format where the keys are absent.
    let token = |id: u32| ((id as usize) < v.tokens.len()).then_some(id);
    (v.unk, v.bos, v.eos) = (v.unk.or(token(0)), v.bos.or(token(1)), v.eos.or(token(2)));
    let mut model = Spm::new(v.unk);
    let mut bytes = 0;
    for ((id, text), (score, kind)) in
        (0u32..).zip(&v.tokens).zip(v.scores.iter().zip(&v.token_types))
    {
        match *kind {
            // Control and user-defined texts are found beforehand or not at all: merging never
            // forms them.
            kind::CONTROL | kind::UNKNOWN | kind::USER_DEFINED => {}
            kind::BYTE => {
                if let Some(byte) = byte_token(text) {
                    bytes += 1;
                    model.add_byte(byte, id);
                }
            }
            kind => model.add_piece(text, id, *score, kind == kind::UNUSED),
        }
    }
    let mut warnings = Vec::new();
    if bytes != 256 {
        warnings.push(format!(
            "{PLACE}.tokens has {bytes} of 256 byte tokens: unknown characters become the unknown token"
        ));
    }
    let prefix = v.add_space_prefix.unwrap_or(true);
    let leading = if prefix { Leading::Drop(1) } else { Leading::Keep };
    let parts = Parts {
        model: Model::Spm(model),
        normalizer: Some(escape(prefix)?),
        pre_tokenizer: None,
        added: v.added(),
        pieces: v.pieces(leading, unescape)?,
        warnings,
    };
    v.finish(parts, true, false)
}

/// BPE with ranked merges.
fn bpe(v: GgufVocabulary) -> Result<Tokenizer> {
    let mut warnings = Vec::new();
    let name = if v.model == "gemma4" { Some("gemma4") } else { v.pre.as_deref() };
    let row = pre_tokenizer(name, &mut warnings);
    let text_alphabet = row.alphabet == Alphabet::Text;
    let mut vocabulary = tokenizers::models::bpe::Vocab::new();
    for (id, token) in (0u32..).zip(&v.tokens) {
        vocabulary.entry(token.clone()).or_insert(id);
    }
    if vocabulary.len() != v.tokens.len() {
        let count = v.tokens.len() - vocabulary.len();
        warnings
            .push(format!("{PLACE}.tokens has {count} texts twice: the first id of each is used"));
    }
    if v.merges.is_empty() {
        let expected = format!("the merges of a {} vocabulary, which make its tokens", v.model);
        return Err(v.wrong("merges", expected, "none"));
    }
    let mut merges = Vec::with_capacity(v.merges.len());
    let mut union = String::new();
    let mut odd = 0usize;
    for (number, merge) in v.merges.iter().enumerate() {
        // A space that begins the line belongs to the left token.
        let split = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(at, _)| at);
        let Some((left, right)) =
            split.and_then(|at| Some((merge.get(..at)?, merge.get(at + 1..)?)))
        else {
            let shown: String = merge.chars().take(40).collect();
            let expected = "two tokens with a blank between them";
            return Err(v.wrong("merges", expected, format!("{shown:?} as number {number}")));
        };
        union.clear();
        union.push_str(left);
        union.push_str(right);
        // The model's builder takes for granted that all three are tokens.
        if vocabulary.contains_key(left)
            && vocabulary.contains_key(right)
            && vocabulary.contains_key(&union)
        {
            merges.push((left.to_string(), right.to_string()));
        } else {
            odd += 1;
        }
    }
    if odd > merges.len() {
        let found = format!("{odd} of {} that name others", v.merges.len());
        return Err(v.wrong("merges", "merges between tokens of this vocabulary", found));
    }
    if odd > 0 {
        warnings.push(format!(
            "{PLACE}.merges: {odd} of {} name tokens that do not exist: they are passed over",
            v.merges.len()
        ));
    }
    let mut builder = BPE::builder()
        .vocab_and_merges(vocabulary, merges)
        .ignore_merges(row.ignore_merges)
        .byte_fallback(text_alphabet);
    if let Some(unk) = v.unk.filter(|_| text_alphabet).and_then(|id| v.tokens.get(id as usize)) {
        builder = builder.unk_token(unk.clone()).fuse_unk(true);
    }
    let model = builder.build().map_err(|e| v.wrong("merges", "merges of this vocabulary", e))?;

    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for regex in row.splits {
        let split = Split::new(
            SplitPattern::Regex(regex.to_string()),
            SplitDelimiterBehavior::Isolated,
            false,
        );
        steps.push(split.map_err(|e| v.wrong("pre", "a valid regex", e))?.into());
    }
    let prefix = v.add_space_prefix.unwrap_or(false);
    let (normalizer, piece): (_, fn(&str) -> Vec<u8>) = if text_alphabet {
        (Some(escape(prefix)?), unescape)
    } else {
        steps.push(ByteLevel::new(false, true, false).into());
        let mut normalizers: Vec<NormalizerWrapper> = Vec::new();
        if row.nfc {
            normalizers.push(NFC.into());
        }
        if prefix {
            normalizers.push(Prepend::new(" ".to_string()).into());
        }
        ((!normalizers.is_empty()).then(|| Sequence::new(normalizers).into()), byte_level)
    };
    let parts = Parts {
        model: Model::Hf(Box::new(model.into())),
        normalizer,
        pre_tokenizer: Some(PreTokenizers::new(steps).into()),
        added: v.added(),
        pieces: v.pieces(if prefix { Leading::Drop(1) } else { Leading::Keep }, piece)?,
        warnings,
    };
    v.finish(parts, row.add_bos, false)
}

fn pre_tokenizer(name: Option<&str>, warnings: &mut Vec<String>) -> &'static PreTokenizer {
    let known = name.and_then(pre::find);
    if known.is_none() {
        let found = match name {
            None => "is missing".to_string(),
            Some(name) => format!("{:?} is not known", name.chars().take(40).collect::<String>()),
        };
        warnings.push(format!(
            "{PLACE}.pre {found}: text is cut by \"default\", perhaps not as in training"
        ));
    }
    known.unwrap_or(&pre::TABLE[0])
}

/// SentencePiece unigram.
fn unigram(mut v: GgufVocabulary) -> Result<Tokenizer> {
    if v.charsmap {
        let expected = "a unigram vocabulary without a normalisation table";
        return Err(v
            .wrong("precompiled_charsmap", expected, "one")
            .hint("load the model's Hugging Face folder, whose tokenizer.json states the same"));
    }
    if v.scores.is_empty() {
        return Err(v.wrong("scores", "one score per token of a t5 vocabulary", "none"));
    }
    v.eos = v.eos.or_else(|| (v.tokens.len() > 1).then_some(1));
    v.unk = v.unk.or_else(|| v.of_kind(kind::UNKNOWN).next().map(|(id, _)| id));
    let bytes: BTreeSet<u8> =
        v.of_kind(kind::BYTE).filter_map(|(_, text)| byte_token(text)).collect();
    let vocabulary = (0u32..)
        .zip(&v.tokens)
        .zip(v.scores.iter().zip(&v.token_types))
        .map(|((id, text), (score, kind))| match *kind {
            kind::NORMAL | kind::BYTE if score.is_finite() => (text.clone(), f64::from(*score)),
            _ if Some(id) == v.unk => (text.clone(), 0.0),
            // The model finds any text of its list, so special tokens must not be there by their
            // text.
            _ => (format!("\u{fdd0}{id}\u{2581}"), 0.0),
        })
        .collect();
    let model = Unigram::from(vocabulary, v.unk.map(|id| id as usize), bytes.len() == 256)
        .map_err(|e| v.wrong("tokens", "a unigram vocabulary", e))?;
    let prefix = v.add_space_prefix.unwrap_or(true);
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if v.remove_extra_whitespaces.unwrap_or(false) {
        let runs = Replace::new(ReplacePattern::Regex(" {2,}".to_string()), " ");
        let runs = runs.map_err(|e| Error::new(PLACE, "a normaliser for spaces", e))?;
        steps.extend([Strip::new(true, true).into(), runs.into()]);
    }
    steps.push(escape(prefix)?);
    let parts = Parts {
        model: Model::Hf(Box::new(model.into())),
        normalizer: Some(Sequence::new(steps).into()),
        pre_tokenizer: None,
        added: v.added(),
        pieces: v.pieces(if prefix { Leading::Drop(1) } else { Leading::Keep }, unescape)?,
        warnings: Vec::new(),
    };
    v.finish(parts, false, true)
}

//! Filling a gap in a text: the tokens by which a model was taught to, prompts made of them, and
//! llama-server's `/infill`, which editors ask. OpenAI's and Ollama's `suffix` are the same.
//!
//! A prompt is `PREFIX before SUFFIX after MIDDLE`, and the model writes what stands between; the
//! other order is `SUFFIX after PREFIX before MIDDLE`. Other files stand in front, as
//! `REPOSITORY name FILE name text` where the vocabulary has such tokens.

use delft::GenerateOptions;
use delft::formats::gguf::Metadata;
use delft::tokens::{Special, Tokenizer};

use crate::catalogue::Held;
use crate::demand::{Asked, GRAMMARS};
use crate::fields::{Field, Fields, Unknown, no_effect, refused, used};
use crate::generation::Work;
use crate::llama::{self, SETTINGS, Told};
use crate::models::Model;
use crate::problem::{Api, Problem};
use crate::reply::{Answer, Reply};
use crate::router::{Answered, Call, noting, telling};
use crate::settings;
use crate::stream::{Framing, response};

/// The tokens by which a model fills a gap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Infill {
    before: u32,
    after: u32,
    /// None where the model writes on behind what stands before the gap.
    middle: Option<u32>,
    /// Whether what stands behind the gap comes first.
    after_first: bool,
    repository: Option<u32>,
    file: Option<u32>,
    /// The texts of all of these, and of the token that fills short rows: a model that writes one
    /// has filled the gap.
    ends: Vec<String>,
}

/// How the tokens are called in a family of models.
struct Names {
    before: &'static str,
    after: &'static str,
    middle: Option<&'static str>,
    after_first: bool,
}

const fn names(before: &'static str, after: &'static str, middle: &'static str) -> Names {
    Names { before, after, middle: Some(middle), after_first: false }
}

const NAMES: &[Names] = &[
    // Qwen2.5-Coder, CodeGemma.
    names("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    // StarCoder, Granite.
    names("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    names("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    // DeepSeek-Coder.
    names("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    // CodeLlama.
    names("▁<PRE>", "▁<SUF>", "▁<MID>"),
    names("<PRE>", "<SUF>", "<MID>"),
    // GLM-4.5.
    names("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    // Codestral.
    Names { before: "[PREFIX]", after: "[SUFFIX]", middle: None, after_first: true },
    // Seed-Coder.
    Names {
        before: "<[fim-prefix]>",
        after: "<[fim-suffix]>",
        middle: Some("<[fim-middle]>"),
        after_first: true,
    },
];

const REPOSITORIES: &[&str] = &["<|fim_repo|>", "<|repo_name|>", "<repo_name>", "<reponame>"];
const FILES: &[&str] = &["<|file_sep|>", "<file_sep>"];
const PADS: &[&str] = &["<|fim_pad|>", "<fim_pad>", "<fim-pad>"];

impl Infill {
    /// Those of a vocabulary: as the file names them, or else by their texts; none where it has
    /// none.
    pub(crate) fn of(tokenizer: &Tokenizer, metadata: Option<&Metadata>) -> Option<Infill> {
        let key = |name: &str| {
            let value = metadata?.get(&format!("tokenizer.ggml.{name}_token_id"))?;
            let id = u32::try_from(value.integer()?).ok()?;
            ((id as usize) < tokenizer.vocab_size()).then_some(id)
        };
        let either = |new: &str, old: &str| key(new).or_else(|| key(old));
        let named = |names: &[&str]| names.iter().find_map(|name| tokenizer.special_id(name));
        let of_file =
            (either("fim_pre", "prefix"), either("fim_suf", "suffix"), either("fim_mid", "middle"));
        let (before, after, middle, after_first) = match of_file {
            (Some(before), Some(after), Some(middle)) => (before, after, Some(middle), false),
            _ => NAMES.iter().find_map(|names| {
                let middle = names.middle.map(|name| tokenizer.special_id(name));
                let middle = middle.map_or(Some(None), |found| found.map(Some))?;
                let before = tokenizer.special_id(names.before)?;
                Some((before, tokenizer.special_id(names.after)?, middle, names.after_first))
            })?,
        };
        let repository = key("fim_rep").or_else(|| named(REPOSITORIES));
        let file = key("fim_sep").or_else(|| named(FILES));
        let pad = key("fim_pad").or_else(|| named(PADS));
        let ends = [Some(before), Some(after), middle, repository, file, pad];
        let ends = ends.into_iter().flatten().map(|id| tokenizer.token_text(id)).collect();
        Some(Infill { before, after, middle, after_first, repository, file, ends })
    }

    /// How a prompt is laid out, in the words of Ollama's templates: by `.Suffix` in a template its
    /// clients see that a model fills gaps.
    pub(crate) fn layout(&self, tokenizer: &Tokenizer) -> String {
        let text = |id| tokenizer.token_text(id);
        let before = format!("{}{{{{ .Prompt }}}}", text(self.before));
        let after = format!("{}{{{{ .Suffix }}}}", text(self.after));
        let middle = self.middle.map(text).unwrap_or_default();
        let (first, second) = if self.after_first { (after, before) } else { (before, after) };
        format!("{first}{second}{middle}")
    }

    /// A prompt for the text between two others.
    pub(crate) fn prompt(
        &self,
        tokenizer: &Tokenizer,
        extra: &[u32],
        before: &[u32],
        after: &[u32],
    ) -> Vec<u32> {
        let mut prompt: Vec<u32> =
            tokenizer.bos().filter(|_| tokenizer.adds_bos()).into_iter().collect();
        prompt.extend_from_slice(extra);
        let mut parts = [(self.before, before), (self.after, after)];
        if self.after_first {
            parts.reverse();
        }
        for (mark, text) in parts {
            prompt.push(mark);
            prompt.extend_from_slice(text);
        }
        prompt.extend(self.middle);
        prompt
    }

    /// Has a text end where the model writes one of these tokens.
    pub(crate) fn bound(&self, options: &mut GenerateOptions) {
        options.show_special.extend_from_slice(&self.ends);
        options.stop.extend_from_slice(&self.ends);
    }
}

/// The tokens of a text around a gap; special tokens in it are plain text. Where a tokenizer puts a
/// blank in front of a text, one that does not begin it gets none.
pub(crate) fn encode(model: &Model, text: &str, begins: bool) -> Result<Vec<u32>, Problem> {
    model.check_length(text)?;
    let tokenizer = model.tokenizer()?;
    if !begins && let Some(tokens) = tokenizer.encode_behind("\n", text) {
        return Ok(tokens);
    }
    Ok(tokenizer.encode(text, Special::default())?)
}

/// llama-server's fields besides.
pub(crate) const FIELDS: &[Field] = &[
    used("input_prefix"),
    used("input_suffix"),
    used("input_extra"),
    refused("n_probs", "log-probabilities are told by /completion", &["0"]),
];

/// A file beside the text.
pub(crate) const EXTRA: &[Field] = &[used("text"), used("filename"), no_effect("time")];

/// A request that is understood.
struct Ask {
    model: Held,
    fields: Fields,
    work: Work,
    /// The contents of an answer.
    told: Told,
    streams: bool,
}

/// `/infill`.
pub(crate) async fn answer(call: Call) -> Answered {
    let fields = call.fields(&[SETTINGS, FIELDS, GRAMMARS], Unknown::Noted).await?;
    let model = call.model(&fields).await?;
    let Ask { model, fields, work, mut told, streams } =
        call.reading(|| read(&call, fields, model)).await?;
    let generating = model.generator.start(vec![work], &call.trail).await?;
    if streams {
        let streamed = response(Framing::Events, |sender| async move {
            sender.relay(generating, &mut told, Api::OpenAi).await.map(drop)
        });
        return Ok(noting(&fields, streamed));
    }
    let answer = Answer::of(generating, &mut Reply::plain()).await?;
    let Answer { tokens, end, .. } = answer;
    tokens.into_iter().for_each(|token| told.add(token));
    let object = told.whole(end.as_ref());
    Ok(telling(end.as_ref(), noting(&fields, axum::Json(object))))
}

fn read(call: &Call, fields: Fields, model: Held) -> Result<Ask, Problem> {
    let infill = model.infill("input_suffix")?;
    let tokenizer = model.tokenizer()?;
    let mut options = settings::options(&model, &fields, call.seed())?;
    let most = fields.whole("n_predict", -1..=i64::MAX)?.unwrap_or(-1);
    let silent = llama::set_length(&mut options, most);
    Asked::completions(&fields)?.constrain(&model, &[], false, &mut options)?;
    infill.bound(&mut options);
    let text = |name: &str| Ok::<_, Problem>(fields.text(name)?.unwrap_or_default());
    let (prefix, suffix) = (text("input_prefix")?, text("input_suffix")?);
    let mut before = encode(&model, prefix, true)?;
    before.extend(encode(&model, text("prompt")?, prefix.is_empty())?);
    let after = encode(&model, suffix, false)?;
    let bare = infill.prompt(tokenizer, &[], &before, &after);
    let room = model.room_beside(bare.len(), options.max_tokens);
    let mut files = Vec::new();
    for (i, file) in fields.list("input_extra")?.into_iter().flatten().enumerate() {
        let place = format!("input_extra[{i}]");
        fields.allow(&place, file, &[EXTRA])?;
        let own = fields.inner(file);
        let within = |e: Problem| e.within(&place);
        let text = |name: &str| own.text(name).map_err(within).map(|text| text.map(str::to_string));
        files.push((text("filename")?, text("text")?.unwrap_or_default()));
    }
    let (extra, left_out) = infill.files(&model, &files, room)?;
    fields.note_cut(left_out, "files");
    let prompt = infill.prompt(tokenizer, &extra, &before, &after);
    model.check(&prompt)?;
    let streams = fields.flag("stream")?.unwrap_or(false);
    let told = Told::new(model.clone(), llama::wanted(&fields)?, infill.ends.clone(), silent);
    Ok(Ask { model, fields, work: Work { prompt, options }, told, streams })
}

impl Infill {
    /// Other files in front of a prompt, as llama-server lays them out, in `room` tokens: the first
    /// are left out until the rest fit. Returns how many.
    fn files(
        &self,
        model: &Model,
        files: &[(Option<String>, String)],
        room: usize,
    ) -> Result<(Vec<u32>, usize), Problem> {
        let line = |text: &str| encode(model, text, false);
        let mut head = Vec::new();
        if let Some(repository) = self.repository {
            head.push(repository);
            head.extend(line("myproject\n")?);
        }
        let mut last = Vec::new();
        if let Some(file) = self.file {
            last.push(file);
            last.extend(line("filename\n")?);
        }
        let mut left = room.saturating_sub(head.len() + last.len());
        let mut kept = Vec::new();
        for (name, text) in files.iter().rev() {
            let mut own = Vec::new();
            match self.file {
                Some(file) => {
                    own.push(file);
                    let name = name.as_deref().unwrap_or("tmp");
                    own.extend(line(&format!("{name}\n"))?);
                }
                None => own.extend(line("\n\n--- snippet ---\n\n")?),
            }
            own.extend(encode(model, text, false)?);
            if own.len() > left {
                break;
            }
            left -= own.len();
            kept.push(own);
        }
        let left_out = files.len() - kept.len();
        if kept.is_empty() {
            return Ok((Vec::new(), left_out));
        }
        kept.reverse();
        Ok(([head, kept.concat(), last].concat(), left_out))
    }
}

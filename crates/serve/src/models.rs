//! A model that is loaded, as requests use it: its template, its tokens, its bounds.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, OnceLock};

use delft::structured::Grammars;
use delft::tokens::tools::{CallFormat, ToolNotice, describe};
use delft::tokens::{ChatTemplate, Tokenizer};
use delft::{Adapter, Capability, Engine, Error, Prompt, Tensors};
use serde_json::{Map, Value};

use crate::generation::{GenerationLimits, Generator};
use crate::infill::Infill;
use crate::metrics::Texts;
use crate::problem::Problem;
use crate::reply::call_id;

/// A model to serve.
pub struct Served {
    /// The name that requests give.
    pub name: String,
    /// The model on each of the devices that share its requests, at least one.
    pub engines: Vec<Engine>,
    /// Sources of chat templates to use instead of the model's own, by name; see
    /// [`ChatTemplate::new`].
    pub templates: Option<BTreeMap<String, String>>,
    /// Adapters, each a model of its own name, with a handle on each engine.
    pub adapters: Vec<(String, Vec<Adapter>)>,
}

/// A model that is served.
pub(crate) struct Model {
    pub(crate) name: String,
    /// The name of the model that it is an adapter of.
    pub(crate) parent: Option<String>,
    /// The first of its engines, by which it is described.
    pub(crate) engine: Engine,
    /// All of them.
    pub(crate) engines: Vec<Engine>,
    pub(crate) generator: Arc<Generator>,
    template: Option<Arc<ChatTemplate>>,
    /// How it writes calls of tools, and who tells it of them.
    calls: (&'static CallFormat, ToolNotice),
    /// Its vocabulary for grammars, once one was asked for.
    grammars: OnceLock<delft::Result<Grammars>>,
    /// The tokens by which it fills a gap, once that was asked for.
    infill: OnceLock<Option<Infill>>,
}

/// The code of a prompt that does not fit.
const TOO_LONG: &str = "context_length_exceeded";

/// A conversation for a model's chat template.
#[derive(Debug, Clone, Default)]
pub(crate) struct Conversation {
    /// As chat templates read them.
    pub(crate) messages: Vec<Value>,
    /// Further variables of the template.
    pub(crate) extra: Map<String, Value>,
    /// Tools that may be called, as chat templates read them.
    pub(crate) tools: Vec<Value>,
    /// How the answer begins.
    pub(crate) prefill: String,
}

impl Model {
    /// A model, and those that its adapters make of it; `counts` has what was counted of each.
    pub(crate) fn all(
        served: Served,
        limits: GenerationLimits,
        mut counts: impl FnMut(&str) -> Arc<Texts>,
    ) -> delft::Result<Vec<Model>> {
        let Served { name, engines, templates, adapters } = served;
        let none = || Error::new(&name, "an engine", "none");
        let engine = engines.first().cloned().ok_or_else(none)?;
        let template = templates.map(|sources| ChatTemplate::new("chat template", sources));
        let template = template.transpose()?.map(Arc::new);
        let plain = Model {
            generator: Arc::new(Generator::new(engines.clone(), limits, counts(&name))),
            parent: None,
            calls: CallFormat::or_described(template.as_deref().or(engine.chat_template())),
            name,
            template,
            grammars: OnceLock::new(),
            infill: OnceLock::new(),
            engine,
            engines,
        };
        let adapted = |(name, handles): (String, Vec<Adapter>)| {
            let counts = counts(&name);
            plain.adapted(&name, handles, counts)
        };
        let adapted: Vec<Model> = adapters.into_iter().map(adapted).collect();
        Ok(std::iter::once(plain).chain(adapted).collect())
    }

    /// Whether it has a capability now.
    pub(crate) fn has(&self, capability: Capability) -> bool {
        self.engines.iter().all(|engine| engine.capabilities().contains(&capability))
    }

    /// Texts that it may write at a time.
    pub(crate) fn places(&self) -> usize {
        self.engines.iter().map(|engine| engine.options().sessions).sum()
    }

    /// The devices that it is on.
    pub(crate) fn devices(&self) -> String {
        let names = self.engines.iter().map(|engine| engine.info().device.to_string());
        names.collect::<Vec<_>>().join(" + ")
    }

    /// The same with an adapter, under a name of its own.
    pub(crate) fn adapted(&self, name: &str, adapters: Vec<Adapter>, counts: Arc<Texts>) -> Model {
        Model {
            name: name.to_owned(),
            parent: Some(self.name.clone()),
            engine: self.engine.clone(),
            engines: self.engines.clone(),
            generator: Arc::new(self.generator.with(adapters, counts)),
            template: self.template.clone(),
            calls: self.calls,
            grammars: OnceLock::new(),
            infill: OnceLock::new(),
        }
    }

    /// Its chat template, if it has one.
    pub(crate) fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_deref().or(self.engine.chat_template())
    }

    /// How it writes calls of tools, and who tells it of them.
    pub(crate) fn calls(&self) -> (&'static CallFormat, ToolNotice) {
        self.calls
    }

    /// Its vocabulary for grammars.
    ///
    /// # Errors
    /// A model without a tokenizer, or without an end token.
    pub(crate) fn grammars(&self) -> Result<&Grammars, Problem> {
        self.tokenizer()?;
        let tokenizer = self.engine.shared_tokenizer();
        let (vocabulary, ends) = (self.engine.info().vocab, self.engine.end_tokens());
        let none = || Error::new(&self.name, "a tokenizer", "none");
        let make = || Grammars::new(tokenizer.ok_or_else(none)?, vocabulary, ends);
        let made = self.grammars.get_or_init(make);
        made.as_ref().map_err(|error| Problem::from(error.clone()))
    }

    /// The tokens by which it fills a gap in a text, if its vocabulary has any.
    pub(crate) fn infill_tokens(&self) -> Option<&Infill> {
        let read = || {
            // A loaded engine has dropped its file's metadata.
            let tensors = Tensors::open(self.engine.location().clone()).ok();
            let file = tensors.as_ref().and_then(Tensors::gguf);
            Infill::of(self.engine.tokenizer()?, file.map(|file| file.metadata()))
        };
        self.infill.get_or_init(read).as_ref()
    }

    /// The same for a request that asks for it by the field `name`.
    ///
    /// # Errors
    /// A model without such tokens.
    pub(crate) fn infill(&self, name: &str) -> Result<&Infill, Problem> {
        self.infill_tokens().ok_or_else(|| {
            let message = format!(
                "not supported: {} has no tokens that mark a gap, and continues texts only",
                self.name
            );
            Problem::field(name, message)
        })
    }

    /// Tokens for which there is room beside a prompt of that length, and its answer.
    pub(crate) fn room_beside(&self, prompt: usize, answer: Option<usize>) -> usize {
        self.context().saturating_sub(self.answer_room(answer) + prompt)
    }

    /// Its tokenizer.
    ///
    /// # Errors
    /// A model without one, which takes token ids only.
    pub(crate) fn tokenizer(&self) -> Result<&Tokenizer, Problem> {
        self.engine.tokenizer().ok_or_else(|| {
            Problem::bad(format!("{}: the model has no tokenizer: give token ids", self.name))
        })
    }

    /// Positions that a session holds.
    pub(crate) fn context(&self) -> usize {
        self.engine.info().context
    }

    /// The text that the model reads for a conversation.
    pub(crate) fn render(&self, conversation: &Conversation) -> Result<String, Problem> {
        let Conversation { messages, extra, tools, .. } = conversation;
        let (mut messages, mut extra) = (messages.clone(), extra.clone());
        let (format, described) = self.calls;
        let of_tools =
            |message: &Value| message["role"] == "tool" || !message["tool_calls"].is_null();
        if described == ToolNotice::InWords && (!tools.is_empty() || messages.iter().any(of_tools))
        {
            messages = describe(&messages, tools);
        } else if !tools.is_empty() {
            extra.insert("tools".to_string(), tools.as_slice().into());
        }
        if format.name.starts_with("mistral") {
            messages.iter_mut().for_each(short_ids);
        }
        let prompt = Prompt::Chat { messages, extra };
        let text = prompt.render(self.engine.tokenizer(), self.template())?;
        Ok(text + &conversation.prefill)
    }

    /// The tokens of a conversation.
    pub(crate) fn encode_chat(&self, conversation: &Conversation) -> Result<Vec<u32>, Problem> {
        self.encode_special(&self.render(conversation)?)
    }

    /// The tokens of a conversation without its oldest messages where it does not fit, and how many
    /// are left out. System messages stay; the rest begins with a user's, as templates want it.
    pub(crate) fn encode_cut(
        &self,
        conversation: &Conversation,
        answer: Option<usize>,
    ) -> Result<(Vec<u32>, usize), Problem> {
        let messages = &conversation.messages;
        let is = |role: &str, i: usize| messages[i]["role"] == role;
        let from = |start: usize| {
            let kept = (0..messages.len()).filter(|&i| i >= start || is("system", i));
            let messages = kept.map(|i| messages[i].clone()).collect();
            self.encode_chat(&Conversation { messages, ..conversation.clone() })
        };
        let most = self.context() - self.answer_room(answer);
        let fits = |start: usize| match from(start) {
            Ok(tokens) => Ok((tokens.len() <= most).then_some(tokens)),
            Err(problem) if problem.code == TOO_LONG => Ok(None),
            Err(problem) => Err(problem),
        };
        if let Some(tokens) = fits(0)? {
            return Ok((tokens, 0));
        }
        let mut starts: Vec<usize> = (1..messages.len()).filter(|&i| is("user", i)).collect();
        // The first of them that fits; the longer ones before it do not.
        let mut found = None;
        while let Some(&start) = starts.get(starts.len() / 2) {
            match fits(start)? {
                Some(tokens) => {
                    found = Some((start, tokens));
                    starts.truncate(starts.len() / 2);
                }
                None => drop(starts.drain(..=starts.len() / 2)),
            }
        }
        let (start, tokens) = match found {
            Some(found) => found,
            // The last one alone: whether it fits with a shorter answer is checked as ever.
            None => {
                let last = (1..messages.len()).rfind(|&i| is("user", i)).unwrap_or(0);
                (last, from(last)?)
            }
        };
        Ok((tokens, (0..start).filter(|&i| !is("system", i)).count()))
    }

    /// A prompt without what stands behind its first `keep` tokens, as much as does not fit; and
    /// how many tokens are left out.
    pub(crate) fn cut(
        &self,
        mut prompt: Vec<u32>,
        keep: usize,
        answer: Option<usize>,
    ) -> (Vec<u32>, usize) {
        let most = self.context() - self.answer_room(answer);
        let excess = prompt.len().saturating_sub(most);
        let keep = keep.min(most / 2);
        if excess > 0 {
            prompt.drain(keep..keep + excess);
        }
        (prompt, excess)
    }

    /// Positions that a prompt that is cut leaves to its answer: as many as it may take, or else a
    /// quarter of the context.
    fn answer_room(&self, answer: Option<usize>) -> usize {
        let context = self.context();
        answer.unwrap_or(context / 4).clamp(1, (context / 2).max(1))
    }

    /// The tokens of a whole prompt, whose special tokens are read as such.
    pub(crate) fn encode_special(&self, text: &str) -> Result<Vec<u32>, Problem> {
        self.check_length(text)?;
        Ok(self.tokenizer()?.encode_chat(text)?)
    }

    /// Refuses a text that is far too long before it is made into tokens, which takes many times
    /// its memory.
    pub(crate) fn check_length(&self, text: &str) -> Result<(), Problem> {
        if text.len() <= self.engine.longest_text() {
            return Ok(());
        }
        let message = format!(
            "prompt is too long: {} bytes; this model's maximum context length is {} tokens, the \
             answer included",
            text.len(),
            self.context()
        );
        Err(Problem { code: TOO_LONG, ..Problem::bad(message) })
    }

    /// The tokens of a text to continue; special tokens in it are plain text.
    pub(crate) fn encode_text(&self, text: &str) -> Result<Vec<u32>, Problem> {
        self.check_length(text)?;
        Ok(Prompt::from(text).encode(self.engine.tokenizer(), None)?)
    }

    /// Checks that a prompt leaves room for a token.
    ///
    /// # Errors
    /// A prompt that does not fit, or is empty, or has tokens that the model does not.
    pub(crate) fn check(&self, prompt: &[u32]) -> Result<(), Problem> {
        if !self.has(Capability::Generate) {
            let message = "expected a model that generates, found one that makes embeddings";
            return Err(Problem::field("model", message));
        }
        self.check_fits(prompt, 1)
    }

    /// Checks that a text that is embedded fits the context.
    ///
    /// # Errors
    /// As [`Model::check`].
    pub(crate) fn check_text(&self, text: &[u32]) -> Result<(), Problem> {
        self.check_fits(text, 0)
    }

    fn check_fits(&self, prompt: &[u32], answer: usize) -> Result<(), Problem> {
        let (context, vocabulary) = (self.context(), self.engine.info().vocab);
        if prompt.is_empty() {
            return Err(Problem::bad("the prompt: expected at least one token, found none"));
        }
        if let Some(token) = prompt.iter().find(|token| **token as usize >= vocabulary) {
            let message = format!("the prompt: expected tokens below {vocabulary}, found {token}");
            return Err(Problem::bad(message));
        }
        if prompt.len() + answer > context {
            let included = if answer > 0 { ", the answer included" } else { "" };
            // In the words of Anthropic and OpenAI, by which programs know that they must shorten.
            let message = format!(
                "prompt is too long: {} tokens > {} maximum; this model's maximum context length is \
                 {context} tokens{included}",
                prompt.len(),
                context - answer.min(context)
            );
            return Err(Problem { code: TOO_LONG, ..Problem::bad(message) });
        }
        Ok(())
    }
}

/// Ids of calls as Mistral's templates want them: nine letters and digits. Others become such, the
/// same the same.
fn short_ids(message: &mut Value) {
    let fit = |id: &str| id.len() == 9 && id.bytes().all(|c| c.is_ascii_alphanumeric());
    let short = |value: &mut Value| {
        if let Some(id) = value.as_str().filter(|id| !fit(id)) {
            let mut hasher = std::hash::DefaultHasher::new();
            id.hash(&mut hasher);
            *value = call_id(hasher.finish()).into();
        }
    };
    if let Some(id) = message.get_mut("tool_call_id") {
        short(id);
    }
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        match call.get_mut("id") {
            Some(id) => short(id),
            None => call["id"] = call_id(0).into(),
        }
    }
}

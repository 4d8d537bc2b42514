//! Chat templates: a conversation as the prompt text a model was trained on.
//!
//! Templates are Jinja as Hugging Face Transformers renders it (blocks trimmed, loop controls,
//! Python's string methods and printing; `raise_exception`, `strftime_now`, `tojson`). They come
//! with models, so they are untrusted: they touch nothing outside their own values; steps,
//! recursion, what their values take and what they write are limited.
//!
//! MiniJinja parses, compiles and runs them. In between the parsed template is rewritten
//! (`instrument.rs`), so that everything that makes a value is ours and knows how much may be made.
//! That takes MiniJinja's unstable interface, which is why its version is fixed.

mod budget;
mod clock;
mod filters;
mod fold;
mod instrument;
mod json;
mod methods;
mod python;
mod rewrite;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use formats::gguf::Metadata;
use formats::{Error, Result};
use minijinja::machinery::{
    CodeGenerator, Instruction, Instructions, eval, make_string_output, parse,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment};
use serde_json::{Map, Value};

use budget::{Budget, LONGEST};

pub use clock::Now;
pub use fold::fold_system;

/// Instructions a template may execute: far more than a thousand long messages need, about a
/// second's worth.
const FUEL: u64 = 20_000_000;
/// Characters shown of a reason that a template gives.
const LONGEST_REASON: usize = 1000;
/// Longest source, in bytes.
const LONGEST_SOURCE: usize = 4 << 20;
/// Deepest nesting of macros and blocks.
const DEEPEST: usize = 200;

/// The chat templates of one model: one without a name and any number by name.
#[derive(Debug)]
pub struct ChatTemplate {
    sources: BTreeMap<String, Source>,
    syntax: SyntaxConfig,
    /// Where templates are looked for, for errors about one that is not there.
    place: String,
}

/// A template as its file has it and as MiniJinja reads it.
#[derive(Debug)]
struct Source {
    /// The file, and the key in it.
    place: String,
    text: String,
    rewritten: String,
}

/// Templates as they are found: by name, the place and the text.
type Found = BTreeMap<String, (String, String)>;

/// The input of a rendering.
#[derive(Debug, Clone, Default)]
pub struct TemplateInput<'a> {
    /// Messages as in the OpenAI API: objects with `role`, `content` (a string or a list of parts),
    /// `tool_calls`, ...
    pub messages: &'a [Value],
    /// A list of JSON schemas of functions, each in `{"type": "function", "function": {...}}`.
    pub tools: Option<&'a Value>,
    /// A list of objects with `title` and `text`.
    pub documents: Option<&'a Value>,
    /// Whether the prompt ends with the beginning of an answer.
    pub add_generation_prompt: bool,
    /// Further variables, such as `enable_thinking`; they overrule all others.
    pub extra: Map<String, Value>,
    /// The text of the BOS token; undefined in the template where `None`.
    pub bos_token: Option<&'a str>,
    /// The text of the EOS token.
    pub eos_token: Option<&'a str>,
    /// The time that `strftime_now` formats; `None` means the system's clock, in UTC.
    pub now: Option<Now>,
    /// Which template, where a model has several by name. Unset, it is `tool_use` when there are
    /// tools and such a template, else the default one.
    pub name: Option<&'a str>,
}

/// The name of a template that has none.
const DEFAULT: &str = "default";

/// The templates of a folder by name, each with its place.
fn of_folder(folder: &Path) -> Result<Found> {
    let mut sources = Found::new();
    for name in ["chat_template.json", "tokenizer_config.json"] {
        let path = folder.join(name);
        if let Some(value) = crate::folder::read_json(&path)? {
            let place = format!("{}: chat_template", path.display());
            add_config(&mut sources, &place, &value["chat_template"]);
        }
    }
    let path = folder.join("chat_template.jinja");
    if let Some(source) = crate::folder::read_text(&path)? {
        sources.insert(DEFAULT.to_string(), (path.display().to_string(), source));
    }
    for inner in ["additional_chat_templates", "chat_templates"] {
        let Ok(entries) = std::fs::read_dir(folder.join(inner)) else { continue };
        for entry in entries {
            let path = entry.map_err(|e| Error::io(folder.join(inner).display(), e))?.path();
            let name = path.file_stem().map(|name| name.to_string_lossy().into_owned());
            let jinja = path.extension().is_some_and(|end| end == "jinja");
            if let (true, Some(name), Some(source)) =
                (jinja, name, crate::folder::read_text(&path)?)
            {
                sources.insert(name, (path.display().to_string(), source));
            }
        }
    }
    Ok(sources)
}

/// The templates of a folder as the metadata of a GGUF file.
pub(crate) fn metadata_of(folder: &Path) -> Result<Vec<(String, formats::gguf::MetadataValue)>> {
    let named = |(name, (_, source)): (String, (String, String))| {
        let key = match name.as_str() {
            DEFAULT => "tokenizer.chat_template".to_owned(),
            name => format!("tokenizer.chat_template.{name}"),
        };
        (key, formats::gguf::MetadataValue::String(source))
    };
    Ok(of_folder(folder)?.into_iter().map(named).collect())
}

impl ChatTemplate {
    /// The template of this source.
    ///
    /// # Errors
    /// A syntax error, with its line.
    pub fn from_source(source: &str) -> Result<Self> {
        let found = ("chat template".to_string(), source.to_string());
        Self::read("chat template", BTreeMap::from([(DEFAULT.to_string(), found)]))
    }

    /// The templates of a Hugging Face folder: `chat_template.jinja` and
    /// `additional_chat_templates/*.jinja` (or `chat_templates/*.jinja`), else `chat_template` of
    /// `tokenizer_config.json`, a string or a list of objects with `name` and `template`. `None`
    /// where there is none.
    ///
    /// # Errors
    /// Files that cannot be read, or a syntax error.
    pub fn from_folder(folder: &Path) -> Result<Option<Self>> {
        let sources = of_folder(folder)?;
        if sources.is_empty() {
            return Ok(None);
        }
        Self::read(&folder.display().to_string(), sources).map(Some)
    }

    /// The templates of a GGUF file: `tokenizer.chat_template` and, by name,
    /// `tokenizer.chat_template.NAME`. `None` where there is none.
    ///
    /// # Errors
    /// A key of another type than text, or a syntax error.
    pub fn from_gguf(metadata: &Metadata) -> Result<Option<Self>> {
        let mut sources = Found::new();
        for (key, _) in metadata.iter() {
            let Some(rest) = key.strip_prefix("tokenizer.chat_template") else { continue };
            // Their list, `tokenizer.chat_templates`, says no more than their keys.
            let name = if rest.is_empty() { Some(DEFAULT) } else { rest.strip_prefix('.') };
            let Some(name) = name else { continue };
            if let Some(source) = metadata.str(key)? {
                sources.insert(name.to_string(), (metadata.at(key), source.to_string()));
            }
        }
        if sources.is_empty() {
            return Ok(None);
        }
        Self::read(&metadata.at("tokenizer.chat_template"), sources).map(Some)
    }

    /// The templates of these names and sources, found at `place`; the default one is named
    /// `default`.
    ///
    /// # Errors
    /// None at all, or a syntax error.
    pub fn new(place: &str, sources: BTreeMap<String, String>) -> Result<Self> {
        let found = |(name, text)| {
            let place = format!("{place}: {name}");
            (name, (place, text))
        };
        Self::read(place, sources.into_iter().map(found).collect())
    }

    fn read(place: &str, sources: Found) -> Result<Self> {
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        let syntax = syntax.map_err(|e| Error::new(place, "a Jinja syntax", e))?;
        if sources.is_empty() {
            return Err(Error::new(place, "a chat template", "none"));
        }
        let mut read = BTreeMap::new();
        for (name, (place, text)) in sources {
            if text.len() > LONGEST_SOURCE {
                let expected = format!("a chat template of at most {LONGEST_SOURCE} bytes");
                return Err(Error::new(place, expected, text.len()));
            }
            let invalid = |found: String| Error::new(&place, "a valid chat template", found);
            let rewritten = rewrite::rewrite(&text, &syntax).map_err(invalid)?;
            compile(&name, &rewritten, &syntax).map_err(|e| invalid(describe(&e)))?;
            read.insert(name, Source { place, text, rewritten });
        }
        Ok(ChatTemplate { sources: read, syntax, place: place.to_string() })
    }

    /// Names of all templates.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.sources.keys().map(String::as_str)
    }

    /// The source of a template, or of the one that is rendered without tools.
    pub fn source(&self, name: Option<&str>) -> Option<&str> {
        self.sources.get(self.choose(name, false)).map(|source| source.text.as_str())
    }

    /// Names that the templates read before they set them, if they do; `enable_thinking` perhaps
    /// among them.
    pub fn variables(&self) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for (name, source) in &self.sources {
            // It has been compiled before, so it can be again.
            let Ok(code) = compile(name, &source.rewritten, &self.syntax) else { continue };
            let mut set = BTreeSet::from(["loop", "caller", "self"]);
            for part in std::iter::once(&code.main).chain(code.blocks.values()) {
                for instruction in (0..).map_while(|at| part.get(at)) {
                    match instruction {
                        Instruction::Lookup(name) if !set.contains(name) => {
                            names.insert(name.to_string());
                        }
                        Instruction::StoreLocal(name) => {
                            set.insert(name);
                        }
                        _ => {}
                    }
                }
            }
        }
        names
    }

    /// The prompt.
    ///
    /// Transformers gives a template none for tools and documents that it does not have. Some
    /// templates were written only to be used with them, and fail at that: they are given another
    /// try with these undefined, and one with empty lists, both with the variables that their own
    /// models' programs set.
    ///
    /// # Errors
    /// The error that the template raised, or why it could not be executed, with the line; a limit
    /// that was passed.
    pub fn render(&self, request: &TemplateInput<'_>) -> Result<String> {
        let strict = self.render_with(request, Absent::None);
        let absent = request.tools.is_none() || request.documents.is_none();
        let source = || self.source(request.name).unwrap_or_default();
        if strict.is_err() && absent && NEEDED.iter().any(|name| source().contains(name)) {
            return self
                .render_with(request, Absent::Undefined)
                .or_else(|_| self.render_with(request, Absent::Empty))
                .or(strict);
        }
        strict
    }

    /// Whether a system message of a conversation reaches the model: some templates refuse it, and
    /// others leave it out.
    pub fn takes_system(&self, request: &TemplateInput<'_>) -> bool {
        const PROBE: &str = "systemprobe";
        let messages = [
            serde_json::json!({ "role": "system", "content": PROBE }),
            serde_json::json!({ "role": "user", "content": "userprobe" }),
        ];
        let prompt = self.render(&TemplateInput { messages: &messages, ..request.clone() });
        prompt.is_ok_and(|prompt| prompt.contains(PROBE))
    }

    fn render_with(&self, request: &TemplateInput<'_>, absent: Absent) -> Result<String> {
        let name = self.choose(request.name, request.tools.is_some_and(|tools| !is_empty(tools)));
        let source = self.sources.get(name).ok_or_else(|| {
            let names = self.names().collect::<Vec<_>>().join(" or ");
            Error::new(&self.place, names, format!("{name:?}"))
        })?;
        let place = &source.place;
        let mut context = Map::new();
        for (name, text) in [("bos_token", request.bos_token), ("eos_token", request.eos_token)] {
            context.extend(text.map(|text| (name.to_string(), Value::from(text))));
        }
        context
            .insert("messages".to_string(), request.messages.iter().map(alias_reasoning).collect());
        let now = request.now.unwrap_or_else(Now::of_system);
        for (name, value) in [("tools", request.tools), ("documents", request.documents)] {
            match (value, absent) {
                (Some(value), _) => drop(context.insert(name.to_string(), value.clone())),
                (None, Absent::None) => drop(context.insert(name.to_string(), Value::Null)),
                (None, Absent::Undefined) => {}
                (None, Absent::Empty) => {
                    drop(context.insert(name.to_string(), Value::Array(vec![])))
                }
            }
        }
        if absent != Absent::None {
            let tools = request.tools.map_or(String::new(), Value::to_string);
            context.insert("functions".to_string(), Value::from(tools));
            let date = now.format("%b %d %Y %H:%M:%S GMT");
            context.insert("datetime".to_string(), Value::from(date));
        }
        context.insert(
            "add_generation_prompt".to_string(),
            Value::from(request.add_generation_prompt),
        );
        context.extend(request.extra.clone());
        let mut context: BTreeMap<String, minijinja::Value> =
            context.into_iter().map(|(name, value)| (name, python::value(&value))).collect();
        let budget = Budget::new();
        let own = Arc::clone(&budget);
        let clock = move |format: &str| own.text(now.format(format));
        context
            .entry("strftime_now".to_string())
            .or_insert_with(|| minijinja::Value::from_function(clock));

        let failed = |e: &minijinja::Error| Error::new(place, "", describe(e));
        let environment = environment(&budget);
        let code = compile(name, &source.rewritten, &self.syntax).map_err(|e| failed(&e))?;
        let mut prompt = String::new();
        let mut out = make_string_output(&mut prompt);
        let root = minijinja::Value::from(context);
        eval(&environment, &code.main, root, &code.blocks, &mut out, AutoEscape::None)
            .map_err(|e| failed(&e))?;
        drop(out);
        if prompt.len() > LONGEST {
            let expected = format!("a prompt of at most {LONGEST} bytes");
            return Err(Error::new(place, expected, prompt.len()));
        }
        Ok(prompt)
    }

    fn choose<'a>(&'a self, name: Option<&'a str>, tools: bool) -> &'a str {
        match name {
            Some(name) => name,
            None if tools && self.sources.contains_key("tool_use") => "tool_use",
            // A model with one template by some other name means that one.
            None if !self.sources.contains_key(DEFAULT) => {
                self.sources.keys().next().map_or(DEFAULT, String::as_str)
            }
            None => DEFAULT,
        }
    }
}

/// How a template sees tools and documents that a request does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Absent {
    /// Python's None, as with Transformers.
    None,
    /// Nothing.
    Undefined,
    /// An empty list.
    Empty,
}

/// Variables without which some templates fail though they could do without.
const NEEDED: [&str; 4] = ["tools", "documents", "functions", "datetime"];

fn is_empty(value: &Value) -> bool {
    value.is_null() || value.as_array().is_some_and(Vec::is_empty)
}

/// `chat_template` of a configuration at `place`: a string, or a list of named ones.
fn add_config(sources: &mut Found, place: &str, value: &Value) {
    if let Some(source) = value.as_str() {
        sources.insert(DEFAULT.to_string(), (place.to_string(), source.to_string()));
    }
    for entry in value.as_array().into_iter().flatten() {
        if let (Some(name), Some(source)) = (entry["name"].as_str(), entry["template"].as_str()) {
            let shown: String = name.chars().take(60).collect();
            sources.insert(name.to_string(), (format!("{place}: {shown}"), source.to_string()));
        }
    }
}

/// A message whose reasoning is found under each of the names that templates read.
fn alias_reasoning(message: &Value) -> Value {
    let Some(fields) = message.as_object() else { return message.clone() };
    let reasoning = ["reasoning_content", "thinking", "reasoning"]
        .iter()
        .find_map(|name| fields.get(*name).filter(|value| !value.is_null()));
    let Some(reasoning) = reasoning else { return message.clone() };
    let mut fields = fields.clone();
    fields.entry("thinking").or_insert(reasoning.clone());
    fields.insert("reasoning_content".to_string(), reasoning.clone());
    Value::Object(fields)
}

/// Describes a template's error and its place: the innermost one, since the outer ones only name
/// the block it was in.
fn describe(error: &minijinja::Error) -> String {
    let mut error = error;
    while let Some(inner) = std::error::Error::source(error).and_then(|inner| inner.downcast_ref())
    {
        error = inner;
    }
    let what = match error.detail() {
        Some(detail) if error.kind() == minijinja::ErrorKind::InvalidOperation => {
            detail.to_string()
        }
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    // What a template raises may be as long as a value.
    let what: String = what.chars().take(LONGEST_REASON).collect();
    match error.line() {
        Some(line) => format!("{what}, in line {line}"),
        None => what,
    }
}

/// The instructions of a template and of its named blocks.
struct Code<'a> {
    main: Instructions<'a>,
    blocks: BTreeMap<&'a str, Instructions<'a>>,
}

/// Parses a template, rewrites what it makes values with, and compiles that.
fn compile<'a>(
    name: &'a str,
    source: &'a str,
    syntax: &SyntaxConfig,
) -> std::result::Result<Code<'a>, minijinja::Error> {
    let parsed = parse(source, name, syntax.clone())?;
    let mut generator = CodeGenerator::new(name, source);
    generator.compile_stmt(&instrument::statement(&parsed));
    let (main, blocks) = generator.finish();
    Ok(Code { main, blocks })
}

/// Jinja as Transformers configures it, for one rendering. It has no templates: none can include
/// another.
fn environment(budget: &Arc<Budget>) -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(DEEPEST);
    python::install(&mut environment, budget);
    filters::install(&mut environment, budget);
    environment
}

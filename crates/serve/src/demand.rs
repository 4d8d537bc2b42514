//! The form that a request asks of its answer: tools that may or must be called, or a text of a
//! schema or grammar.

use delft::GenerateOptions;
use delft::reasoning::Opening;
use delft::structured::{Demand, Given, Grammar};
use delft::tokens::tools::{Body, Tool};
use serde_json::{Map, Value, json};

use crate::custom;
use crate::fields::{
    Field, Fields, Variant, no_effect, refused, refused_variant, shown, used, variant, wrong,
};
use crate::models::Model;
use crate::problem::Problem;
use crate::reply::Reply;

/// Most tools of a request.
const MOST_TOOLS: usize = 512;

/// Fields by which vLLM, in both its forms, and llama.cpp take grammars.
pub(crate) const GRAMMARS: &[Field] = &[
    used("grammar"),
    used("structured_outputs"),
    used("guided_json"),
    used("guided_json_object"),
    used("guided_regex"),
    used("guided_grammar"),
    used("guided_choice"),
    no_effect("guided_decoding_backend"),
    no_effect("guided_whitespace_pattern"),
];

/// Why tools are refused that others run.
const ELSEWHERE: &str = "not supported: tools run where their client runs, and are functions";

/// Tools of OpenAI's chats and of Ollama's.
pub(crate) const FUNCTIONS: &[Variant] =
    &[variant("function", &[used("type"), used("function"), no_effect("cache_control")])];

/// Tools of OpenAI's chats besides.
pub(crate) const CUSTOM_TOOLS: &[Variant] =
    &[variant("custom", &[used("type"), used("custom"), no_effect("cache_control")])];

/// The function of such a tool.
pub(crate) const FUNCTION: &[Field] =
    &[used("name"), used("description"), used("parameters"), used("strict")];

/// Choices among them.
pub(crate) const CHAT_CHOICES: &[Variant] = &[
    variant("function", &[used("type"), used("function")]),
    variant("allowed_tools", &[used("type"), used("allowed_tools")]),
    variant("custom", &[used("type"), used("custom")]),
];

/// Some of the tools, and whether one must be called.
pub(crate) const ALLOWED: &[Field] = &[used("mode"), used("tools")];

/// Tools by their names.
pub(crate) const NAMED_TOOLS: &[Variant] = &[
    variant("function", &[used("type"), used("function"), used("name")]),
    variant("custom", &[used("type"), used("custom"), used("name")]),
];

/// Tools of OpenAI's responses.
pub(crate) const RESPONSES_TOOLS: &[Variant] = &[
    variant(
        "function",
        &[
            used("type"),
            used("name"),
            used("description"),
            used("parameters"),
            used("strict"),
            no_effect("defer_loading"),
            no_effect("output_schema"),
            refused("allowed_callers", "tools are called directly", &[r#"["direct"]"#]),
            refused("async", "calls are answered in the next request", &["false"]),
        ],
    ),
    variant("namespace", &[used("type"), used("name"), used("tools"), no_effect("description")]),
    variant(
        "custom",
        &[
            used("type"),
            used("name"),
            used("description"),
            used("format"),
            no_effect("defer_loading"),
            refused("allowed_callers", "tools are called directly", &[r#"["direct"]"#]),
            refused("async", "calls are answered in the next request", &["false"]),
        ],
    ),
];

/// Tools that a server runs itself. Agents name them in every request: beside functions they are
/// passed over, since a model that does not hear of them calls none.
const HOSTED: &[&str] = &[
    "image_generation",
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
];

/// Choices among them.
pub(crate) const RESPONSES_CHOICES: &[Variant] = &[
    variant("function", &[used("type"), used("name")]),
    variant("allowed_tools", &[used("type"), used("mode"), used("tools")]),
    variant("custom", &[used("type"), used("name")]),
    refused_variant("mcp", ELSEWHERE),
];

/// Anthropic's tools.
pub(crate) const ANTHROPIC_TOOLS: &[Variant] = &[variant(
    "custom",
    &[
        used("name"),
        used("description"),
        used("input_schema"),
        used("strict"),
        used("type"),
        no_effect("allowed_callers"),
        no_effect("cache_control"),
        no_effect("defer_loading"),
        no_effect("eager_input_streaming"),
        no_effect("input_examples"),
    ],
)];

/// Anthropic's choice among them.
pub(crate) const ANTHROPIC_CHOICE: &[Field] =
    &[used("type"), used("name"), used("disable_parallel_tool_use")];

/// The form of a chat's text. Its own schema is llama-server's.
pub(crate) const RESPONSE_FORMAT: &[Field] = &[used("type"), used("json_schema"), used("schema")];

/// The schema of it. Answers follow it in any case, strict or not.
pub(crate) const JSON_SCHEMA: &[Field] =
    &[used("schema"), used("strict"), no_effect("name"), no_effect("description")];

/// The text of responses.
pub(crate) const TEXT: &[Field] = &[used("format"), no_effect("verbosity")];

/// The form of it.
pub(crate) const TEXT_FORMAT: &[Field] =
    &[used("type"), used("schema"), used("strict"), no_effect("name"), no_effect("description")];

/// Which tools are called.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
enum Choice {
    /// Those that the model wants to call, if any.
    #[default]
    Auto,
    /// None: the model does not hear of them.
    None,
    /// One at least.
    Required,
    /// This one.
    Named(String),
    /// As the model wants or one at least, but of these alone.
    Allowed { names: Vec<String>, required: bool },
}

impl Choice {
    /// By OpenAI's words, and Mistral's for a call that is required.
    fn of_word(word: &str) -> Result<Choice, Problem> {
        match word {
            "auto" => Ok(Choice::Auto),
            "none" => Ok(Choice::None),
            "required" | "any" => Ok(Choice::Required),
            other => Err(choice_problem(&other.into())),
        }
    }
}

/// The type of a tool that a server runs itself.
fn hosted(tool: &Value) -> Option<&str> {
    tool["type"].as_str().filter(|kind| HOSTED.contains(kind))
}

/// A function of a namespace.
#[derive(Debug, Clone)]
struct Spaced {
    /// The name by which the model knows it.
    joined: String,
    namespace: String,
    name: String,
}

/// The name by which a model knows a function of a namespace.
pub(crate) fn joined(namespace: &str, name: &str) -> String {
    let between = if namespace.ends_with('_') { "" } else { "__" };
    format!("{namespace}{between}{name}")
}

/// The demands on an answer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Asked {
    /// The tools as chat templates read them.
    listed: Vec<Value>,
    tools: Vec<Tool>,
    /// Where each of them stands in the request.
    places: Vec<String>,
    /// Those of the tools that a namespace holds.
    spaced: Vec<Spaced>,
    /// The names of those that take a text.
    custom: Vec<String>,
    /// The grammars of such texts, with their places.
    given: Vec<(String, Given)>,
    choice: Choice,
    /// Whether several calls may come in one answer.
    several: bool,
    /// The grammar of a text, with its place.
    grammar: Option<(&'static str, Grammar)>,
}

impl Asked {
    /// By OpenAI's fields.
    pub(crate) fn openai(fields: &Fields) -> Result<Asked, Problem> {
        let mut asked = Asked { several: true, ..Asked::default() };
        asked.functions(fields, &[FUNCTIONS, CUSTOM_TOOLS])?;
        if let Some(several) = fields.flag("parallel_tool_calls")? {
            asked.several = several;
        }
        asked.choice = match fields.value("tool_choice") {
            None => Choice::Auto,
            Some(Value::String(word)) => Choice::of_word(word)?,
            Some(choice) => {
                let kinds = &[CHAT_CHOICES];
                match fields.variant("tool_choice", choice, "a choice", kinds, None)? {
                    "allowed_tools" => {
                        let (place, list) = ("tool_choice.allowed_tools", &choice["allowed_tools"]);
                        fields.allow(place, list, &[ALLOWED])?;
                        allowed(fields, place, list, |tool| match tool.get("custom") {
                            Some(custom) => custom,
                            None => &tool["function"],
                        })?
                    }
                    kind => {
                        let function = &choice[kind];
                        fields.allow(
                            &format!("tool_choice.{kind}"),
                            function,
                            &[&[used("name")]],
                        )?;
                        Choice::Named(named(choice, function)?)
                    }
                }
            }
        };
        asked.grammar = response_format(fields)?;
        if let Some(grammar) = grammar_fields(fields)?
            && asked.grammar.replace(grammar).is_some()
        {
            let message = "not supported beside a grammar";
            return Err(Problem::field("response_format", message));
        }
        asked.check()
    }

    /// By the fields of OpenAI's responses, where tools and formats stand one level higher.
    pub(crate) fn responses(fields: &Fields) -> Result<Asked, Problem> {
        let mut asked = Asked { several: true, ..Asked::default() };
        let tools = list(fields)?;
        let beside = tools.iter().any(|tool| hosted(tool).is_none());
        for (i, value) in tools.iter().enumerate() {
            match hosted(value).filter(|_| beside) {
                Some(kind) => fields.note(&format!("tools[].{kind}")),
                None => asked.response_tool(fields, &format!("tools[{i}]"), value, None)?,
            }
        }
        if let Some(several) = fields.flag("parallel_tool_calls")? {
            asked.several = several;
        }
        asked.choice = match fields.value("tool_choice") {
            None => Choice::Auto,
            Some(Value::String(word)) => Choice::of_word(word)?,
            Some(choice) => {
                let kinds = &[RESPONSES_CHOICES];
                match fields.variant("tool_choice", choice, "a choice", kinds, None)? {
                    "allowed_tools" => allowed(fields, "tool_choice", choice, |tool| tool)?,
                    _ => Choice::Named(named(choice, choice)?),
                }
            }
        };
        let text = fields.within("text", &[TEXT])?;
        let within = |e: Problem| e.within("text");
        let format = text.map(|text| text.within("format", &[TEXT_FORMAT]));
        if let Some(format) = format.transpose().map_err(within)?.flatten() {
            let within = |e: Problem| e.within("text.format");
            asked.grammar = match (format.text("type").map_err(within)?, format.value("schema")) {
                (Some("text"), _) => None,
                (Some("json_object"), _) => Some(("text.format", Grammar::Json)),
                (Some("json_schema"), Some(schema)) => {
                    Some(("text.format.schema", Grammar::Schema(schema.clone())))
                }
                _ => {
                    let message = "expected text, json_object, or json_schema with its schema";
                    return Err(within(Problem::field("type", message)));
                }
            };
        }
        if let Some(grammar) = grammar_fields(fields)?
            && asked.grammar.replace(grammar).is_some()
        {
            return Err(Problem::field("text.format", "not supported beside a grammar"));
        }
        asked.check()
    }

    /// By the fields of texts that are continued.
    pub(crate) fn completions(fields: &Fields) -> Result<Asked, Problem> {
        Ok(Asked { grammar: grammar_fields(fields)?, ..Asked::default() })
    }

    /// By Anthropic's fields; the format is a field of the output's configuration.
    pub(crate) fn anthropic(fields: &Fields, output: Option<&Fields>) -> Result<Asked, Problem> {
        let mut asked = Asked { several: true, ..Asked::default() };
        for (i, value) in list(fields)?.iter().enumerate() {
            let place = format!("tools[{i}]");
            fields.variant(&place, value, "a tool", &[ANTHROPIC_TOOLS], Some("custom"))?;
            let tool = fields.inner(value);
            let name = tool.needed("name", tool.text("name")?).map_err(|e| e.within(&place))?;
            let schema = tool
                .object("input_schema")
                .and_then(|schema| tool.needed("input_schema", schema))
                .map_err(|e| e.within(&place))?;
            let strict = tool.flag("strict").map_err(|e| e.within(&place))?;
            let description = tool.value("description").cloned();
            asked.add(&place, name, description, schema.clone(), strict.unwrap_or(false))?;
        }
        if let Some(choice) = fields.within("tool_choice", &[ANTHROPIC_CHOICE])? {
            let name = choice.text("name").map_err(|e| e.within("tool_choice"))?;
            asked.choice = match (choice.text("type").map_err(|e| e.within("tool_choice"))?, name) {
                (Some("auto"), _) => Choice::Auto,
                (Some("none"), _) => Choice::None,
                (Some("any"), _) => Choice::Required,
                (Some("tool"), Some(name)) => Choice::Named(name.to_string()),
                _ => {
                    let message = "expected a type of auto, any, none, or tool with its name";
                    return Err(Problem::field("tool_choice", message));
                }
            };
            let single = choice.flag("disable_parallel_tool_use");
            asked.several = !single.map_err(|e| e.within("tool_choice"))?.unwrap_or(false);
        }
        const FORMAT: &[Field] = &[used("type"), used("schema")];
        let within = |e: Problem| e.within("output_config");
        let format = output.map(|output| output.within("format", &[FORMAT]).map_err(within));
        let formats = [
            ("output_config.format", format.transpose()?.flatten()),
            // Its name in beta versions.
            ("output_format", fields.within("output_format", &[FORMAT])?),
        ];
        for (place, format) in formats {
            let Some(format) = format else { continue };
            let grammar = match (format.value("type"), format.value("schema")) {
                (Some(Value::String(kind)), Some(schema)) if kind == "json_schema" => {
                    Grammar::Schema(schema.clone())
                }
                _ => {
                    let message = "expected the type json_schema and a schema";
                    return Err(Problem::field(place, message));
                }
            };
            if asked.grammar.replace((place, grammar)).is_some() {
                return Err(Problem::field(place, "not supported beside output_config.format"));
            }
        }
        asked.check()
    }

    /// By Ollama's fields.
    pub(crate) fn ollama(fields: &Fields, tools: bool) -> Result<Asked, Problem> {
        let mut asked = Asked { several: true, ..Asked::default() };
        if tools {
            asked.functions(fields, &[FUNCTIONS])?;
        }
        asked.grammar = match fields.value("format") {
            None => None,
            Some(Value::String(word)) if word.is_empty() => None,
            Some(Value::String(word)) if word == "json" => Some(("format", Grammar::Json)),
            Some(schema @ Value::Object(_)) => Some(("format", Grammar::Schema(schema.clone()))),
            Some(other) => return Err(wrong("format", "\"json\" or a JSON schema", other)),
        };
        asked.check()
    }

    /// Reads a tool of OpenAI's responses: a function, or a namespace of functions.
    fn response_tool(
        &mut self,
        fields: &Fields,
        place: &str,
        value: &Value,
        namespace: Option<&str>,
    ) -> Result<(), Problem> {
        let kind = fields.variant(place, value, "a tool", &[RESPONSES_TOOLS], None)?;
        let within = |e: Problem| e.within(place);
        let tool = fields.inner(value);
        let name = tool.text("name").and_then(|name| tool.needed("name", name)).map_err(within)?;
        if kind == "namespace" {
            if namespace.is_some() {
                return Err(Problem::field(place, "expected a function, found a namespace"));
            }
            let inner = tool.list("tools").map_err(within)?.map(Vec::as_slice).unwrap_or_default();
            if self.tools.len() + inner.len() > MOST_TOOLS {
                let message = format!("expected at most {MOST_TOOLS} tools, found more");
                return Err(Problem::field("tools", message));
            }
            for (i, value) in inner.iter().enumerate() {
                self.response_tool(fields, &format!("{place}.tools[{i}]"), value, Some(name))?;
            }
            return Ok(());
        }
        let description = tool.value("description").cloned();
        let joined = namespace.map_or_else(|| name.to_string(), |space| joined(space, name));
        if kind == "custom" {
            let inner = format!("{place}.format");
            let format = (inner.as_str(), &value["format"], custom::FORMATS);
            self.add_custom(fields, place, &joined, description, format)?;
        } else {
            let parameters = tool.object("parameters").map_err(within)?;
            let strict = tool.flag("strict").map_err(within)?.unwrap_or(false);
            self.add(place, &joined, description, parameters.cloned().unwrap_or_default(), strict)?;
        }
        let Some(namespace) = namespace else { return Ok(()) };
        let (namespace, name) = (namespace.to_string(), name.to_string());
        self.spaced.push(Spaced { joined, namespace, name });
        Ok(())
    }

    /// The namespace and the name of a function that a model called, if it is of a namespace.
    pub(crate) fn spaced(&self, called: &str) -> Option<(&str, &str)> {
        let spaced = self.spaced.iter().find(|spaced| spaced.joined == called)?;
        Some((&spaced.namespace, &spaced.name))
    }

    /// Reads tools of OpenAI's kind.
    fn functions(&mut self, fields: &Fields, kinds: &[&[Variant]]) -> Result<(), Problem> {
        for (i, value) in list(fields)?.iter().enumerate() {
            let place = format!("tools[{i}]");
            let kind = fields.variant(&place, value, "a tool", kinds, Some("function"))?;
            let table = if kind == "custom" { custom::TOOL } else { FUNCTION };
            fields.allow(&format!("{place}.{kind}"), &value[kind], &[table])?;
            let function = fields.inner(&value[kind]);
            let within = |e: Problem| e.within(kind).within(&place);
            let name = function.needed("name", function.text("name").map_err(within)?);
            let name = name.map_err(within)?;
            let description = function.value("description").cloned();
            if kind == "custom" {
                let (inner, format) = (format!("{place}.custom.format"), &value[kind]["format"]);
                let format = (inner.as_str(), format, custom::CHAT_FORMATS);
                self.add_custom(fields, &place, name, description, format)?;
                continue;
            }
            let parameters = function.object("parameters").map_err(within)?;
            let strict = function.flag("strict").map_err(within)?.unwrap_or(false);
            self.add(&place, name, description, parameters.cloned().unwrap_or_default(), strict)?;
        }
        Ok(())
    }

    /// Adds a custom tool, whose text has a format: its place, itself, and what it may be.
    fn add_custom(
        &mut self,
        fields: &Fields,
        place: &str,
        name: &str,
        description: Option<Value>,
        (inner, format, formats): (&str, &Value, &[Variant]),
    ) -> Result<(), Problem> {
        let (schema, grammar) = custom::parameters(fields, inner, format, formats)?;
        self.add(place, name, description, schema, grammar.is_some())?;
        self.custom.push(name.to_string());
        if let Some(grammar) = grammar {
            let (tool, argument) = (name.to_string(), custom::INPUT.to_string());
            self.given.push((inner.to_string(), Given { tool, argument, grammar }));
        }
        Ok(())
    }

    fn add(
        &mut self,
        place: &str,
        name: &str,
        description: Option<Value>,
        mut schema: Map<String, Value>,
        strict: bool,
    ) -> Result<(), Problem> {
        // A function without parameters is one of an object without properties.
        schema.entry("type").or_insert_with(|| "object".into());
        schema.entry("properties").or_insert_with(|| json!({}));
        let parameters = Value::Object(schema);
        let tool = Tool::new(name, parameters.clone(), strict)
            .map_err(|error| Problem::field(place, error))?;
        if self.tools.iter().any(|other| other.name == tool.name) {
            return Err(Problem::field(place, format_args!("a second tool named {name}")));
        }
        let description = description.unwrap_or_else(|| "".into());
        self.listed.push(json!({
            "type": "function",
            "function": { "name": name, "description": description, "parameters": parameters },
        }));
        self.tools.push(tool);
        self.places.push(place.to_string());
        Ok(())
    }

    fn check(self) -> Result<Asked, Problem> {
        match &self.choice {
            Choice::Required if self.tools.is_empty() => {
                return Err(Problem::field("tool_choice", "expected beside tools"));
            }
            _ => {}
        }
        let named: &[String] = match &self.choice {
            Choice::Named(name) => std::slice::from_ref(name),
            Choice::Allowed { names, .. } => names,
            _ => &[],
        };
        let unknown = named.iter().find(|name| !self.tools.iter().any(|own| own.name == **name));
        if let Some(name) = unknown {
            let message = format!("expected a tool of this request, found {}", shown(name));
            return Err(Problem::field("tool_choice", message));
        }
        Ok(self)
    }

    /// The tools that may be called.
    fn active(&self) -> &[Tool] {
        if self.choice == Choice::None { &[] } else { &self.tools }
    }

    /// The tools that the model hears of, as chat templates read them.
    pub(crate) fn listed(&self) -> &[Value] {
        if self.choice == Choice::None { &[] } else { &self.listed }
    }

    /// Adds to a generation's options what the form takes: a constraint, and special tokens that
    /// are shown.
    ///
    /// # Errors
    /// A schema or grammar that cannot be followed, or a model that has no tokenizer.
    pub(crate) fn constrain(
        &self,
        model: &Model,
        prompt: &[u32],
        splits: bool,
        options: &mut GenerateOptions,
    ) -> Result<(), Problem> {
        let opening = || -> Result<Opening, Problem> {
            let (tokenizer, template) = (model.tokenizer()?, model.template());
            let after = || Opening::after_tokens(tokenizer, template, prompt);
            Ok(if splits { after() } else { Opening::Answer })
        };
        let compiled = |place: &str, grammar: &Grammar, opening| {
            let told = |error| Problem::from(error).at(place);
            model.grammars()?.compile(grammar, opening).map_err(told)
        };
        if self.active().is_empty() {
            if let Some((place, grammar)) = &self.grammar {
                options.constraint = Some(compiled(place, grammar, opening()?)?);
            }
            return Ok(());
        }
        let (format, _) = model.calls();
        options.show_special = format.marks();
        let mut given = Vec::new();
        for (place, text) in &self.given {
            let told = |error: delft::Error| Problem::field(place, error);
            // What is wrong with a grammar is told in its own words, before it is part of another.
            compiled(place, &text.grammar, Opening::Answer)?;
            given.push(match format.body {
                // Such values stand between marks as they are.
                Body::Tagged { .. } => text.clone(),
                _ => Given { grammar: text.grammar.in_json().map_err(told)?, ..text.clone() },
            });
        }
        let strict = self.tools.iter().any(|tool| tool.strict);
        let required = matches!(
            self.choice,
            Choice::Required | Choice::Named(_) | Choice::Allowed { required: true, .. }
        );
        let restricted = matches!(self.choice, Choice::Allowed { .. });
        let named = |tool: &&Tool| match &self.choice {
            Choice::Named(name) => tool.name == *name,
            Choice::Allowed { names, .. } => names.contains(&tool.name),
            _ => true,
        };
        let tools: Vec<Tool> = self.tools.iter().filter(named).cloned().collect();
        let parallel = self.several && !matches!(self.choice, Choice::Named(_));
        let text = self.grammar.as_ref().map(|(_, grammar)| grammar);
        let lazy = !required && !strict && !restricted && self.several && text.is_none();
        if lazy && options.ignore_end {
            // Where the end is ignored there is none for a grammar either.
            return Ok(());
        }
        let demand = Demand { required, parallel, lazy };
        let source = model.grammars()?.tools(format, &tools, &given, demand, opening()?, text);
        match source {
            Ok(source) => options.constraint = Some(source),
            // Calls that nobody insists on are read as they come.
            Err(_) if lazy => {}
            Err(error) => {
                // The text or the tool that is wrong by itself is named.
                if let Some((place, grammar)) = &self.grammar {
                    compiled(place, grammar, Opening::Answer)?;
                }
                for (tool, place) in self.tools.iter().zip(&self.places).filter(|(t, _)| named(t)) {
                    compiled(place, &Grammar::Schema(tool.parameters.clone()), Opening::Answer)?;
                }
                return Err(Problem::from(error).at("tools"));
            }
        }
        Ok(())
    }

    /// The parser of the answer to a rendered conversation.
    pub(crate) fn reply(&self, model: &Model, prompt: &[u32]) -> Reply {
        let reply = Reply::chat(model.engine.tokenizer(), prompt);
        match self.active() {
            [] => reply,
            tools => {
                let reply = reply.calling(model.calls().0, tools.to_vec());
                reply.with_custom(self.custom.clone())
            }
        }
    }
}

/// The list of tools.
fn list(fields: &Fields) -> Result<&[Value], Problem> {
    let tools = fields.list("tools")?.map(Vec::as_slice).unwrap_or_default();
    if tools.len() > MOST_TOOLS {
        let message = format!("expected at most {MOST_TOOLS} tools, found {}", tools.len());
        return Err(Problem::field("tools", message));
    }
    Ok(tools)
}

/// The name of the function that is to be called.
fn named(choice: &Value, function: &Value) -> Result<String, Problem> {
    function["name"].as_str().map(str::to_string).ok_or_else(|| choice_problem(choice))
}

/// The tools among which a call must be; `function` has a tool's name.
fn allowed(
    fields: &Fields,
    place: &str,
    list: &Value,
    function: impl Fn(&Value) -> &Value,
) -> Result<Choice, Problem> {
    let required = match list["mode"].as_str() {
        Some("auto") => false,
        Some("required") => true,
        _ => return Err(wrong(&format!("{place}.mode"), "auto or required", &list["mode"])),
    };
    let tools = list["tools"].as_array().filter(|tools| !tools.is_empty());
    let tools = tools.ok_or_else(|| {
        Problem::field(&format!("{place}.tools"), "expected a list of tools by their names")
    })?;
    let name = |(i, tool): (usize, &Value)| {
        let place = format!("{place}.tools[{i}]");
        fields.variant(&place, tool, "a tool", &[NAMED_TOOLS], None)?;
        let name = function(tool)["name"].as_str();
        let missing = || Problem::field(&format!("{place}.name"), "expected a string, found none");
        name.map(str::to_string).ok_or_else(missing)
    };
    let names = tools.iter().enumerate().map(name).collect::<Result<_, _>>()?;
    Ok(Choice::Allowed { names, required })
}

fn choice_problem(found: &Value) -> Problem {
    wrong("tool_choice", "auto, none, required or a tool by its name", found)
}

/// `response_format`: text, a JSON object, or JSON of a schema.
fn response_format(fields: &Fields) -> Result<Option<(&'static str, Grammar)>, Problem> {
    let Some(format) = fields.within("response_format", &[RESPONSE_FORMAT])? else {
        return Ok(None);
    };
    let within = |e: Problem| e.within("response_format");
    let own = || {
        let schema = format.value("schema")?;
        Some(("response_format.schema", Grammar::Schema(schema.clone())))
    };
    match format.text("type").map_err(within)? {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(own().unwrap_or(("response_format", Grammar::Json)))),
        Some("json_schema") if format.value("json_schema").is_none() && own().is_some() => {
            Ok(own())
        }
        Some("json_schema") => {
            let schema = format.within("json_schema", &[JSON_SCHEMA]).map_err(within)?;
            let schema = schema.and_then(|schema| schema.value("schema").cloned());
            let place = "response_format.json_schema.schema";
            let none = || Problem::field(place, "expected a schema");
            Ok(Some((place, Grammar::Schema(schema.ok_or_else(none)?))))
        }
        found => {
            let found = Value::from(found.unwrap_or_default());
            Err(within(wrong("type", "text, json_object or json_schema", &found)))
        }
    }
}

/// The grammar of vLLM's or llama.cpp's fields.
fn grammar_fields(fields: &Fields) -> Result<Option<(&'static str, Grammar)>, Problem> {
    const KINDS: &[Field] = &[
        used("json"),
        used("json_object"),
        used("regex"),
        used("choice"),
        used("grammar"),
        no_effect("disable_fallback"),
        refused("structural_tag", "tools are the way to that", &[]),
    ];
    let mut found = Vec::new();
    if let Some(text) = fields.text("grammar")?.filter(|text| !text.is_empty()) {
        found.push(("grammar", Grammar::of_text(text)));
    }
    // llama-server's, beside an empty one that asks for nothing.
    if let Some(schema) = fields.object("json_schema")?.filter(|schema| !schema.is_empty()) {
        found.push(("json_schema", Grammar::Schema(schema.clone().into())));
    }
    if let Some(kinds) = fields.within("structured_outputs", &[KINDS])? {
        let names = ["json", "json_object", "regex", "grammar", "choice"];
        let kinds = kinds_of(&kinds, names).map_err(|e| e.within("structured_outputs"));
        found.extend(kinds?.into_iter().map(|(_, grammar)| ("structured_outputs", grammar)));
    }
    // The older form of the same.
    let names =
        ["guided_json", "guided_json_object", "guided_regex", "guided_grammar", "guided_choice"];
    found.extend(kinds_of(fields, names)?);
    if found.len() > 1 {
        return Err(Problem::field("structured_outputs", "expected one kind, found several"));
    }
    Ok(found.pop())
}

/// Grammars of vLLM's kinds, by the names of their fields.
fn kinds_of(
    fields: &Fields,
    [json, json_object, regex, grammar, choice]: [&'static str; 5],
) -> Result<Vec<(&'static str, Grammar)>, Problem> {
    let mut found = Vec::new();
    if let Some(schema) = fields.value(json) {
        // It may be written as JSON in a string.
        let read = schema.as_str().map(serde_json::from_str);
        let schema = read.unwrap_or_else(|| Ok(schema.clone()));
        let schema = schema.map_err(|e| Problem::field(json, format_args!("{e}")));
        found.push((json, Grammar::Schema(schema?)));
    }
    if fields.flag(json_object)? == Some(true) {
        found.push((json_object, Grammar::Json));
    }
    if let Some(text) = fields.text(regex)? {
        found.push((regex, Grammar::Regex(text.to_string())));
    }
    if let Some(text) = fields.text(grammar)? {
        found.push((grammar, Grammar::of_text(text)));
    }
    if let Some(choices) = fields.list(choice)? {
        let texts = choices.iter().map(|choice| choice.as_str().map(|text| json!(text)));
        let texts: Option<Vec<String>> =
            texts.map(|text| text.map(|text| text.to_string())).collect();
        let texts = texts
            .filter(|texts| !texts.is_empty())
            .ok_or_else(|| Problem::field(choice, "expected a list of strings"))?;
        found.push((choice, Grammar::Lark(format!("start: {}", texts.join(" | ")))));
    }
    Ok(found)
}

//! Grammars of tool calls, from the same rows that they are read by.

use super::{End, Grammar, Grammars, laid_out, named, quoted, short, written};
use engine::ConstraintSource;
use engine::reasoning::Opening;
use formats::{Error, Result};
use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};
use std::fmt::Write;
use tokens::tools::{Body, CallFormat, Tool};

/// The form that an answer must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demand {
    /// It must be a call; else it may be text, and calls behind it.
    pub required: bool,
    /// It may be several calls, where the form has that.
    pub parallel: bool,
    /// Text is left as the model writes it: the schemas count from where a call begins. A schema
    /// that cannot be followed is no hindrance; any object is taken then.
    pub lazy: bool,
}

/// An argument whose text is one of a grammar. Its tool has no other, and its schema says that it
/// is a string.
#[derive(Debug, Clone, PartialEq)]
pub struct Given {
    /// The tool's name.
    pub tool: String,
    /// The argument's.
    pub argument: String,
    /// The grammar of the text as a call has it: within quotes ([`Grammar::in_json`]), but in forms
    /// in which texts stand between marks as they are ([`Body::Tagged`]).
    pub grammar: Grammar,
}

/// Most calls of one answer: a model that repeats itself comes to an end.
const MOST_CALLS: usize = 16;

/// Text that no special token belongs to.
const TEXT: &str = "TEXT: /(?s:.*)/\n";

impl Grammars {
    /// Constraints that let a model call tools in its form, with arguments that their schemas
    /// allow, or the grammars `given` of the only ones. An answer that calls none is a text of the
    /// grammar `text`, where there is one, and nothing stands beside calls then.
    ///
    /// # Errors
    /// No tools, or a schema that is wrong, too large or asks for what is not supported.
    pub fn tools(
        &self,
        format: &CallFormat,
        tools: &[Tool],
        given: &[Given],
        demand: Demand,
        opening: Opening,
        text: Option<&Grammar>,
    ) -> Result<ConstraintSource> {
        let asked = format!("{format:?} {tools:?} {given:?} {demand:?} {opening:?} {text:?}");
        self.kept(asked, || {
            let demand = Demand { lazy: demand.lazy && text.is_none(), ..demand };
            let found = self.schemas(format, tools, given, demand, opening, text);
            if !demand.lazy || found.is_ok() {
                return found;
            }
            let loose = |tool: &Tool| {
                let parameters = match tool.strict {
                    true => tool.parameters.clone(),
                    false => json!({ "type": "object", "additionalProperties": true }),
                };
                Tool { parameters, ..tool.clone() }
            };
            let loose: Vec<Tool> = tools.iter().map(loose).collect();
            self.schemas(format, &loose, given, demand, opening, text)
        })
    }

    fn schemas(
        &self,
        format: &CallFormat,
        tools: &[Tool],
        given: &[Given],
        demand: Demand,
        opening: Opening,
        text: Option<&Grammar>,
    ) -> Result<ConstraintSource> {
        if tools.is_empty() {
            return Err(Error::new("tools", "at least one tool", "none"));
        }
        let text = text.filter(|_| !demand.required);
        // A schema stands among the rules: of calls without marks it is told apart there alone.
        let (body, apart) = match text {
            None => (None, None),
            Some(Grammar::Json) => (Some(json!({ "type": "object" })), None),
            Some(Grammar::Schema(schema)) => (Some(schema.clone()), None),
            Some(other) => (None, Some(other)),
        };
        let mut lark = match format.body {
            Body::Harmony => self.harmony(tools, demand, text.is_some())?,
            _ => {
                let before = self.before(opening, "final");
                let start = if before.is_some() { "before answer" } else { "answer" };
                let answer = self.answer(format, tools, given, demand, text.is_some())?;
                format!("start: {start}\n{answer}{}", before.unwrap_or_default())
            }
        };
        // Writing to a string cannot fail.
        if let Body::Tagged { argument: (_, _, close), .. } = format.body {
            let _ = writeln!(lark, "value[suffix={}]: /(?s:.*)/", quoted(close.trim_end()));
        } else {
            for (i, tool) in tools.iter().enumerate() {
                let _ = match of(given, tool) {
                    Some((at, Given { argument, .. })) => {
                        let begin = quoted(&format!("{{{}: \"", quoted(argument)));
                        writeln!(lark, "arguments_{i}: {begin} @given_{at} {}", quoted("\"}"))
                    }
                    None => writeln!(lark, "arguments_{i}: %json {}", arguments(tool)?),
                };
            }
        }
        if text.is_some() {
            let _ = match body {
                Some(schema) => writeln!(lark, "text: %json {}", laid_out(&schema, None)?),
                None => writeln!(lark, "text: @body"),
            };
        }
        short("tools", lark.len())?;
        // Arguments that were made up to come to an end must not be acted on: a call that is cut
        // says so.
        let end = if demand.lazy { End::Lazy } else { End::Cut };
        let mut all = TopLevelGrammar::from_lark(lark);
        if let Some(text) = apart {
            all.grammars.push(super::body(text)?);
        }
        for (at, Given { grammar, .. }) in tools.iter().filter_map(|tool| of(given, tool)) {
            all.grammars.push(named(written(grammar, None)?.1, &format!("given_{at}")));
        }
        self.constraint("tools", all, None, end)
    }

    /// The rules of an answer with calls that stand between marks, or of the rule `text` if there
    /// is one.
    fn answer(
        &self,
        format: &CallFormat,
        tools: &[Tool],
        given: &[Given],
        demand: Demand,
        text: bool,
    ) -> Result<String> {
        let opening = format.opening();
        let between = format.between.filter(|_| demand.parallel);
        let more = between.map_or(String::new(), |between| {
            format!("({} call){{0,{}}}", self.text(between), MOST_CALLS - 1)
        });
        let (section, end) = (format.section.0, self.text(format.section.1));
        let mut lark = format!("calls: {} call {more} {end}\n", self.text(section));
        for (rule, without) in [("call", ""), ("first", opening)] {
            let names: Vec<String> = (0..tools.len()).map(|i| format!("{rule}_{i}")).collect();
            let _ = writeln!(lark, "{rule}: {}", names.join(" | "));
            for (i, tool) in tools.iter().enumerate() {
                let one = match format.body {
                    Body::Object { name, arguments } if text && opening.is_empty() => {
                        bare(i, tool, name, arguments)
                    }
                    _ => self.one(format, i, (tool, given), without)?,
                };
                let _ = writeln!(lark, "{rule}_{i}: {one}");
            }
        }
        if demand.required {
            lark += "answer: calls\n";
        } else if text {
            lark += "answer: calls | text\n";
        } else if opening.is_empty() {
            // Text, unless it begins as a call does.
            let Body::Object { name, .. } = format.body else {
                return Err(Error::new("tools", "a form with marks", format.name));
            };
            let names: Vec<String> = tools.iter().map(|tool| in_regex(&tool.name)).collect();
            let call = format!("\\{{\"{name}\": \"({})\"(?s:.*)", names.join("|"));
            let free = format!("/(?s:.*)/ & ~/{call}/");
            let free = if demand.lazy { &free } else { "/([^{](?s:.*))?/" };
            let _ = write!(lark, "answer: calls | FREE\nFREE: {free}\n");
        } else if self.text(opening).starts_with("<[") {
            let _ = write!(lark, "answer: TEXT calls?\n{TEXT}");
        } else {
            // The first mark ends the text, however it came to be written.
            let rest = match section.strip_prefix(opening) {
                Some(rest) => format!("{} call {more} {end}", self.text(rest)),
                None => format!("first {more}"),
            };
            let _ = write!(
                lark,
                "answer: TEXT | head {rest}\nhead[suffix={}]: /(?s:.*)/\n{TEXT}",
                quoted(opening)
            );
        }
        Ok(lark)
    }

    /// A call of one tool, without what stands at its beginning already.
    fn one(
        &self,
        format: &CallFormat,
        i: usize,
        (tool, given): (&Tool, &[Given]),
        without: &str,
    ) -> Result<String> {
        let name = tool.name.as_str();
        let (before, arguments, after) = match format.body {
            Body::Object { name: key, arguments } => (
                format!("{{\"{key}\": \"{name}\", \"{arguments}\": "),
                format!("arguments_{i}"),
                "}".to_string(),
            ),
            Body::Keyed => (format!("{{\"{name}\": "), format!("arguments_{i}"), "}".to_string()),
            Body::Named { before, after, end } => {
                let [first, rest @ ..] = after else {
                    return Err(Error::new("tools", "a form with marks", format.name));
                };
                // Between two marks is the call's own id, nine letters and digits, or a number.
                let id = if *first == ":" { "/[0-9]{1,2}/" } else { "/[a-zA-Z0-9]{9}/" };
                let marks: String =
                    rest.iter().map(|mark| format!("{id} {} ", self.text(mark))).collect();
                (format!("{before}{name}{first}"), format!("{marks}arguments_{i}"), end.to_string())
            }
            Body::Tagged { name: around, argument, end } => (
                format!("{}{name}{}", around.0, around.1),
                self.tagged(tool, given, argument)?,
                end.to_string(),
            ),
            Body::Harmony => (String::new(), format!("arguments_{i}"), String::new()),
        };
        let before = format!("{}{before}", format.call.0);
        let begin = self.text(before.strip_prefix(without).unwrap_or(&before));
        Ok(format!("{begin} {arguments} {}", self.text(&(after + format.call.1))))
    }

    /// Arguments that each stand between marks, in the schema's order.
    fn tagged(
        &self,
        tool: &Tool,
        given: &[Given],
        (open, middle, close): (&str, &str, &str),
    ) -> Result<String> {
        let none = serde_json::Map::new();
        let properties = tool.parameters["properties"].as_object().unwrap_or(&none);
        let required = tool.parameters["required"].as_array();
        let mut parts = Vec::new();
        for (key, schema) in properties {
            let begin = self.text(&format!("{open}{key}{middle}"));
            if let Some((at, _)) = of(given, tool).filter(|(_, given)| given.argument == *key) {
                parts.push(format!("{begin} @given_{at} {}", self.text(close)));
                continue;
            }
            let strings = |values: &Vec<Value>| values.iter().all(Value::is_string);
            let value = match schema["enum"].as_array().filter(|values| strings(values)) {
                Some(values) => {
                    let values: Vec<String> =
                        values.iter().filter_map(Value::as_str).map(quoted).collect();
                    format!("({}) {}", values.join(" | "), self.text(close))
                }
                // A text ends where the mark behind it begins.
                None if schema["type"] == "string" => {
                    format!("value {}", self.text(&close[close.trim_end().len()..]))
                }
                None => format!("{} {}", json(schema, &tool.parameters)?, self.text(close)),
            };
            let is_required = required.is_some_and(|names| names.iter().any(|name| name == key));
            let part = format!("{begin} {value}");
            parts.push(if is_required { part } else { format!("({part})?") });
        }
        Ok(parts.join(" "))
    }

    /// The rules of an answer in the harmony form: each message has a header, and a call's names
    /// the tool.
    fn harmony(&self, tools: &[Tool], demand: Demand, text: bool) -> Result<String> {
        let before = self.before(Opening::Harmony, "final").unwrap_or_default();
        let [channel, message, constrain] =
            ["<|channel|>", "<|message|>", "<|constrain|>"].map(|mark| self.text(mark));
        let mut lark = if demand.required {
            "start: analysis* call\n".to_string()
        } else if text {
            "start: analysis* call | before text\n".to_string()
        } else {
            "start: analysis* call | before REASONING\n".to_string()
        };
        let names: Vec<String> = (0..tools.len()).map(|i| format!("call_{i}")).collect();
        let _ = writeln!(lark, "call: {}", names.join(" | "));
        for (i, tool) in tools.iter().enumerate() {
            let header = quoted(&format!("commentary to=functions.{} ", tool.name));
            let _ = writeln!(
                lark,
                "call_{i}: {channel} {header} {constrain} \"json\" {message} arguments_{i}"
            );
        }
        Ok(lark + &before)
    }
}

/// The grammar of a tool's one argument, and its number; none where its schema says all.
fn of<'a>(given: &'a [Given], tool: &Tool) -> Option<(usize, &'a Given)> {
    given.iter().enumerate().find(|(_, given)| given.tool == tool.name)
}

/// A call of one tool as an object without marks, in the pieces of JSON: what begins alike is told
/// apart from another object piece by piece.
fn bare(i: usize, tool: &Tool, name: &str, arguments: &str) -> String {
    let [name, own, arguments] = [name, &tool.name, arguments].map(|text| quoted(&quoted(text)));
    format!("\"{{\" {name} \": \" {own} \", \" {arguments} \": \" arguments_{i} \"}}\"")
}

/// A tool's name in a regular expression.
fn in_regex(name: &str) -> String {
    name.replace('.', "\\.").replace('-', "\\-")
}

/// A part of a schema as a rule's body, with what the whole defines for its parts.
fn json(schema: &Value, whole: &Value) -> Result<String> {
    let mut schema = schema.clone();
    for name in ["$defs", "definitions"] {
        if let (Some(fields), Some(shared)) = (schema.as_object_mut(), whole.get(name)) {
            fields.entry(name).or_insert_with(|| shared.clone());
        }
    }
    Ok(format!("%json {}", laid_out(&schema, None)?))
}

/// The schema of a tool's arguments: an object that has the properties it names and no others,
/// unless the schema speaks of others.
fn arguments(tool: &Tool) -> Result<Value> {
    let mut schema = tool.parameters.clone();
    if let Some(fields) = schema.as_object_mut() {
        fields.insert("type".to_string(), "object".into());
        const OTHERS: [&str; 8] = [
            "additionalProperties",
            "unevaluatedProperties",
            "patternProperties",
            "allOf",
            "anyOf",
            "oneOf",
            "if",
            "$ref",
        ];
        if OTHERS.iter().all(|name| !fields.contains_key(*name)) {
            fields.entry("properties").or_insert_with(|| json!({}));
            fields.insert("additionalProperties".to_string(), false.into());
        }
    }
    laid_out(&schema, None)
}

//! Calls of tools: how families of models write them, one table from chat templates to parsers.
//!
//! A chat template shows the model its tools in the form that it was trained on, and the model
//! answers in that form. A [`CallFormat`] is what there is to know about one form;
//! [`CallFormat::of`] finds a template's by texts that stand in it, and [`Calls`] takes the calls
//! out of an answer while it streams. Grammars are made of the same rows, so that what is enforced
//! is what is read. Templates that know no tools get them by [`describe`] in words, in the form of
//! Hermes.

mod pieces;
mod plain;
mod read;

use formats::{Error, Result};
use serde_json::Value;

use crate::template::ChatTemplate;

pub use plain::describe;
pub use read::{Calls, Part};

/// A function that a model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name: letters, digits, `_`, `-` and `.`.
    pub name: String,
    /// The JSON schema of its arguments, an object.
    pub parameters: Value,
    /// Whether calls must follow the schema whatever the model would rather write.
    pub strict: bool,
}

impl Tool {
    /// Longest name, in bytes.
    const LONGEST_NAME: usize = 128;

    /// A tool, if its name and schema are fit for one.
    ///
    /// # Errors
    /// A name that is empty, too long or has other characters, and parameters that are no schema of
    /// objects.
    pub fn new(name: &str, parameters: Value, strict: bool) -> Result<Tool> {
        let fit = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if name.is_empty() || name.len() > Self::LONGEST_NAME || !name.chars().all(fit) {
            let expected = "1 to 128 letters, digits, _, - or .";
            let found: String = name.chars().take(60).collect();
            return Err(Error::new("tool name", expected, format!("{found:?}")));
        }
        if !parameters.is_object() {
            return Err(Error::new("tool parameters", "a JSON schema, an object", "another value"));
        }
        let kinds = parameters.get("type");
        let is_object = |kind: &Value| kind == "object";
        let is_any = kinds.and_then(Value::as_array).is_some_and(|all| all.iter().any(is_object));
        if !is_any && !kinds.is_none_or(is_object) {
            let found = format!("type {}", kinds.unwrap_or(&Value::Null));
            return Err(Error::new("tool parameters", "a JSON schema of type \"object\"", found));
        }
        Ok(Tool { name: name.to_string(), parameters, strict })
    }

    /// The schema of one argument; none where the schema does not name it.
    pub fn argument(&self, name: &str) -> Option<&Value> {
        self.parameters.get("properties")?.get(name)
    }
}

/// A call that a model made.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// The tool's name.
    pub name: String,
    /// Its arguments: an object, unless the model wrote something else.
    pub arguments: Value,
}

/// How one call is written between its marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body {
    /// A JSON object with the name and the arguments under these keys.
    Object {
        /// The key of the name.
        name: &'static str,
        /// The key of the arguments.
        arguments: &'static str,
    },
    /// A JSON object whose one key is the name and whose value is the arguments.
    Keyed,
    /// The name and then the arguments as JSON.
    Named {
        /// Stands before the name.
        before: &'static str,
        /// Stands between the name and the arguments; of several, what is between these is the
        /// call's own id.
        after: &'static [&'static str],
        /// Stands behind the arguments.
        end: &'static str,
    },
    /// Each argument between marks of its own: texts as they are, other values as JSON.
    Tagged {
        /// Stands before and behind the name.
        name: (&'static str, &'static str),
        /// Stand before an argument's name, between it and its value, and behind the value.
        argument: (&'static str, &'static str, &'static str),
        /// Stands behind the last argument.
        end: &'static str,
    },
    /// A message of the harmony form, whose header names the tool: `to=functions.NAME`.
    Harmony,
}

/// A form of calls.
#[derive(Debug, PartialEq, Eq)]
pub struct CallFormat {
    /// The family that it is known by.
    pub name: &'static str,
    /// Texts that all stand in the family's templates.
    signs: &'static [&'static str],
    /// Stand around all calls of an answer; empty where each stands alone.
    pub section: (&'static str, &'static str),
    /// Stand around each call.
    pub call: (&'static str, &'static str),
    /// Stands between two calls; none where the form has one call only.
    pub between: Option<&'static str>,
    /// The content between the marks.
    pub body: Body,
}

const OBJECT: Body = Body::Object { name: "name", arguments: "arguments" };

/// All forms. The first whose signs stand in a template is the template's: those with more to tell
/// come first.
pub static FORMATS: [CallFormat; 21] = [
    CallFormat {
        name: "harmony",
        signs: &["<|channel|>commentary", "functions."],
        section: ("", ""),
        call: ("", ""),
        between: None,
        body: Body::Harmony,
    },
    CallFormat {
        name: "glm",
        signs: &["<arg_key>", "<arg_value>"],
        section: ("", ""),
        call: ("<tool_call>", "</tool_call>"),
        between: Some("\n"),
        body: Body::Tagged {
            name: ("", "\n"),
            argument: ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
            end: "",
        },
    },
    CallFormat {
        name: "minimax",
        signs: &["minimax:tool_call", "<invoke name="],
        section: ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
        call: ("", ""),
        between: Some("\n"),
        body: Body::Tagged {
            name: ("<invoke name=\"", "\">\n"),
            argument: ("<parameter name=\"", "\">", "</parameter>\n"),
            end: "</invoke>",
        },
    },
    CallFormat {
        name: "seed",
        signs: &["<seed:tool_call>"],
        section: ("", ""),
        call: ("<seed:tool_call>\n", "\n</seed:tool_call>"),
        between: Some("\n"),
        body: Body::Tagged {
            name: ("<function=", ">\n"),
            argument: ("<parameter=", ">", "</parameter>\n"),
            end: "</function>",
        },
    },
    CallFormat {
        name: "qwen3-coder",
        signs: &["<function=", "<parameter="],
        section: ("", ""),
        call: ("<tool_call>\n", "\n</tool_call>"),
        between: Some("\n"),
        body: Body::Tagged {
            name: ("<function=", ">\n"),
            argument: ("<parameter=", ">\n", "\n</parameter>\n"),
            end: "</function>",
        },
    },
    CallFormat {
        name: "functionary",
        signs: &["<function=", "</function>"],
        section: ("", ""),
        call: ("", ""),
        between: Some(""),
        body: Body::Named { before: "<function=", after: &[">"], end: "</function>" },
    },
    CallFormat {
        name: "kimi",
        signs: &["<|tool_calls_section_begin|>"],
        section: ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call: ("<|tool_call_begin|>", "<|tool_call_end|>"),
        between: Some(""),
        body: Body::Named {
            before: "functions.",
            after: &[":", "<|tool_call_argument_begin|>"],
            end: "",
        },
    },
    CallFormat {
        name: "deepseek-r1",
        signs: &["<\u{ff5c}tool\u{2581}sep\u{ff5c}>", "```json"],
        section: (
            "<\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}>",
            "<\u{ff5c}tool\u{2581}calls\u{2581}end\u{ff5c}>",
        ),
        call: (
            "<\u{ff5c}tool\u{2581}call\u{2581}begin\u{ff5c}>",
            "<\u{ff5c}tool\u{2581}call\u{2581}end\u{ff5c}>",
        ),
        between: Some("\n"),
        body: Body::Named {
            before: "function<\u{ff5c}tool\u{2581}sep\u{ff5c}>",
            after: &["\n```json\n"],
            end: "\n```",
        },
    },
    CallFormat {
        name: "deepseek",
        signs: &["<\u{ff5c}tool\u{2581}sep\u{ff5c}>"],
        section: (
            "<\u{ff5c}tool\u{2581}calls\u{2581}begin\u{ff5c}>",
            "<\u{ff5c}tool\u{2581}calls\u{2581}end\u{ff5c}>",
        ),
        call: (
            "<\u{ff5c}tool\u{2581}call\u{2581}begin\u{ff5c}>",
            "<\u{ff5c}tool\u{2581}call\u{2581}end\u{ff5c}>",
        ),
        between: Some(""),
        body: Body::Named { before: "", after: &["<\u{ff5c}tool\u{2581}sep\u{ff5c}>"], end: "" },
    },
    CallFormat {
        name: "mistral-v11",
        signs: &["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"],
        section: ("", ""),
        call: ("[TOOL_CALLS]", ""),
        between: Some(""),
        body: Body::Named { before: "", after: &["[CALL_ID]", "[ARGS]"], end: "" },
    },
    CallFormat {
        name: "mistral-v13",
        signs: &["[TOOL_CALLS]", "[ARGS]"],
        section: ("", ""),
        call: ("[TOOL_CALLS]", ""),
        between: Some(""),
        body: Body::Named { before: "", after: &["[ARGS]"], end: "" },
    },
    CallFormat {
        name: "mistral",
        signs: &["[TOOL_CALLS]"],
        section: ("[TOOL_CALLS][", "]"),
        call: ("", ""),
        between: Some(", "),
        body: OBJECT,
    },
    CallFormat {
        name: "command-r",
        signs: &["<|START_ACTION|>"],
        section: ("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
        call: ("", ""),
        between: Some(",\n    "),
        body: Body::Object { name: "tool_name", arguments: "parameters" },
    },
    CallFormat {
        name: "nemotron",
        signs: &["<TOOLCALL>"],
        section: ("<TOOLCALL>[", "]</TOOLCALL>"),
        call: ("", ""),
        between: Some(", "),
        body: OBJECT,
    },
    CallFormat {
        name: "apriel",
        signs: &["<tool_calls>["],
        section: ("<tool_calls>[", "]</tool_calls>"),
        call: ("", ""),
        between: Some(", "),
        body: OBJECT,
    },
    CallFormat {
        name: "apertus",
        signs: &["<|tools_prefix|>"],
        section: ("<|tools_prefix|>[", "]<|tools_suffix|>"),
        call: ("", ""),
        between: Some(", "),
        body: Body::Keyed,
    },
    CallFormat {
        name: "phi",
        signs: &["<|/tool|>"],
        section: ("<|tool_call|>[", "]<|/tool_call|>"),
        call: ("", ""),
        between: Some(", "),
        body: OBJECT,
    },
    CallFormat {
        name: "granite",
        signs: &["<|tool_call|>"],
        section: ("<|tool_call|>[", "]"),
        call: ("", ""),
        between: Some(", "),
        body: OBJECT,
    },
    CallFormat {
        name: "firefunction",
        signs: &[" functools["],
        section: ("functools[", "]"),
        call: ("", ""),
        between: Some(", "),
        body: OBJECT,
    },
    CallFormat {
        name: "hermes",
        signs: &["<tool_call>"],
        section: ("", ""),
        call: ("<tool_call>\n", "\n</tool_call>"),
        between: Some("\n"),
        body: OBJECT,
    },
    CallFormat {
        name: "llama",
        signs: &["\"parameters\"", "ipython"],
        section: ("", ""),
        call: ("", ""),
        between: None,
        body: Body::Object { name: "name", arguments: "parameters" },
    },
];

/// The variables from which templates take tools: some set the first from another, where that is
/// given.
const TOOLS: [&str; 3] = ["tools", "available_tools", "custom_tools"];

/// Whether a template's statements or expressions name one of the variables that hold tools.
///
/// Its own list of variables leaves out names that are also the parameters of macros.
fn reads_tools(source: &str) -> bool {
    let first = |text: &str, marks: [&str; 2]| marks.iter().filter_map(|m| text.find(m)).min();
    let mut rest = source;
    while let Some(start) = first(rest, ["{%", "{{"]) {
        let inner = &rest[start + 2..];
        let end = first(inner, ["%}", "}}"]).unwrap_or(inner.len());
        // What is in quotes is text; a name behind a dot is a field.
        let code = inner[..end].split(['"', '\'']).step_by(2);
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '.';
        let mut words = code.flat_map(|code| code.split(|c: char| !is_name(c)));
        if words.any(|word| TOOLS.contains(&word)) {
            return true;
        }
        rest = &inner[end..];
    }
    false
}

/// The form of templates that know no tools: they are told of it in words.
fn hermes() -> &'static CallFormat {
    FORMATS.iter().find(|format| format.name == "hermes").unwrap_or(&FORMATS[0])
}

impl CallFormat {
    /// The form in which a template's model writes calls; none for a template that knows no tools.
    pub fn of(template: &ChatTemplate) -> Option<&'static CallFormat> {
        let sources = || template.names().filter_map(|name| template.source(Some(name)));
        let reads = sources().any(reads_tools);
        let has = |sign: &&str| sources().any(|source| source.contains(*sign));
        reads.then(|| FORMATS.iter().find(|format| format.signs.iter().all(has))).flatten()
    }

    /// The form of a model with this template; the form of [`describe`] where the template knows no
    /// tools, or none of the table's.
    pub fn or_described(template: Option<&ChatTemplate>) -> (&'static CallFormat, ToolNotice) {
        match template.and_then(CallFormat::of) {
            Some(format) => (format, ToolNotice::ByTemplate),
            None => (hermes(), ToolNotice::InWords),
        }
    }

    /// The text that begins the calls of an answer; empty where an answer that is a call begins
    /// with the call itself.
    pub fn opening(&self) -> &'static str {
        let begin = match self.body {
            Body::Named { before, .. } => before,
            Body::Tagged { name, .. } => name.0,
            _ => "",
        };
        let all = [self.section.0, self.call.0, begin];
        all.into_iter().map(str::trim).find(|text| !text.is_empty()).unwrap_or_default()
    }

    /// Marks that a vocabulary may have as special tokens, which a text must show for its calls to
    /// be read.
    pub fn marks(&self) -> Vec<String> {
        let mut texts = vec![self.section.0, self.section.1, self.call.0, self.call.1];
        match self.body {
            Body::Named { before, after, end } => {
                texts.extend([before, end].iter().chain(after).copied());
            }
            Body::Tagged { name, argument, end } => {
                texts.extend([name.0, name.1, argument.0, argument.1, argument.2, end]);
            }
            Body::Harmony => texts.extend(["<|constrain|>"]),
            Body::Object { .. } | Body::Keyed => texts.extend(["<|python_tag|>"]),
        }
        let mut marks: Vec<String> = texts.into_iter().flat_map(bracketed).collect();
        marks.sort();
        marks.dedup();
        marks
    }
}

/// Who tells a model of its tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolNotice {
    /// Its chat template, which is given them.
    ByTemplate,
    /// [`describe`].
    InWords,
}

/// The parts of a text in angle or square brackets: what may be special tokens.
pub fn bracketed(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (open, close) in [('<', '>'), ('[', ']')] {
        let mut rest = text;
        while let Some(start) = rest.find(open)
            && let Some(end) = rest[start..].find(close)
        {
            found.push(rest[start..=start + end].to_string());
            rest = &rest[start + end + 1..];
        }
    }
    found
}

//! A model's text as an answer: what is reasoning, what is content, and what is the call of a tool.

use std::time::Instant;

use delft::reasoning::{Span, Splitter, TextKind};
use delft::tokens::Tokenizer;
use delft::tokens::tools::{self, Body, CallFormat, Calls, Tool, ToolCall};
use delft::{Finish, Metrics, Token};
use serde_json::{Value, json};

use crate::custom::Inputs;
use crate::generation::{Done, Event, Generating};
use crate::logprobs;
use crate::models::Model;
use crate::problem::Problem;
use crate::settings::random;

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Piece {
    Reasoning(String),
    Content(String),
    /// A call, whole.
    Call(Called),
    /// The beginning of a call that comes piece by piece, without its arguments.
    Begin(Called),
    /// More of the JSON text of its arguments.
    Arguments(String),
    /// It has ended.
    End,
}

/// The call of a tool, by an id of its own.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Called {
    pub(crate) id: String,
    pub(crate) name: String,
    /// For a custom tool, a text: its input.
    pub(crate) arguments: Value,
    /// Whether the tool is a custom one.
    pub(crate) custom: bool,
    /// Whether the call came to its end; only told of custom tools.
    pub(crate) ended: bool,
}

impl Called {
    /// A call; ids are nine letters and digits, as Mistral's templates want them.
    fn new(call: ToolCall) -> Called {
        let ToolCall { name, mut arguments } = call;
        plain_zeros(&mut arguments);
        Called { id: call_id(random()), name, arguments, custom: false, ended: false }
    }

    /// A call whose arguments are still to come.
    fn begun(name: String) -> Called {
        Called::new(ToolCall { name, arguments: "".into() })
    }

    /// Adds to the text of arguments that come piece by piece.
    pub(crate) fn add(&mut self, more: &str) {
        if let Value::String(text) = &mut self.arguments {
            *text += more;
        }
    }

    /// The arguments as JSON in a string.
    pub(crate) fn arguments_text(&self) -> String {
        match &self.arguments {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        }
    }
}

/// Writes zeros as integers: `-0`, which a schema of integers allows, is read as a float, and would
/// be told as `-0.0`, which clients with types take for no integer.
fn plain_zeros(value: &mut Value) {
    match value {
        Value::Number(number) if number.as_f64() == Some(0.0) => *value = 0.into(),
        Value::Array(items) => items.iter_mut().for_each(plain_zeros),
        Value::Object(fields) => fields.values_mut().for_each(plain_zeros),
        _ => {}
    }
}

/// Nine letters and digits.
pub(crate) fn call_id(number: u64) -> String {
    const DIGITS: &[u8; 62] = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    let digit = |i: u32| DIGITS[(number / 62u64.pow(i) % 62) as usize] as char;
    (0..9).map(digit).collect()
}

/// Takes one text apart as it comes.
pub(crate) struct Reply {
    /// Unset where the text is taken as it is.
    splitter: Option<Splitter>,
    /// Unset where no tools may be called.
    calls: Option<Reader>,
    /// Tokens before or behind which the text was within reasoning.
    reasoning: usize,
    /// Calls of custom tools.
    inputs: Inputs,
}

/// The parser of calls in an answer.
enum Reader {
    /// By marks in the text.
    Marks(Calls),
    /// By the headers of harmony messages.
    Headers {
        /// The header so far.
        header: String,
        /// The tool that the message calls, and the arguments so far.
        open: Option<(String, String)>,
        /// Whether arguments are given as they come.
        piecewise: bool,
    },
}

impl Reader {
    fn take(&mut self, span: Span) -> Vec<Piece> {
        match (self, span.part) {
            (Reader::Marks(calls), TextKind::Answer) => parts(calls.push(&span.text)),
            (Reader::Headers { open: Some((_, arguments)), piecewise, .. }, TextKind::Answer) => {
                *arguments += &span.text;
                if *piecewise { vec![Piece::Arguments(span.text)] } else { Vec::new() }
            }
            (Reader::Headers { header, open, piecewise }, TextKind::Answer) => {
                match CallFormat::recipient(header) {
                    Some(name) => {
                        let begin = || Called::begun(name.to_string());
                        let pieces = if *piecewise {
                            vec![Piece::Begin(begin()), Piece::Arguments(span.text.clone())]
                        } else {
                            Vec::new()
                        };
                        *open = Some((name.to_string(), span.text));
                        header.clear();
                        pieces
                    }
                    None => vec![Piece::Content(span.text)],
                }
            }
            (reader @ Reader::Headers { .. }, TextKind::Mark) => {
                let ended = reader.finish(false);
                if let Reader::Headers { header, .. } = reader {
                    *header += &span.text;
                }
                ended
            }
            (reader, TextKind::Reasoning) => {
                if let Reader::Headers { header, .. } = reader {
                    header.clear();
                }
                vec![Piece::Reasoning(span.text)]
            }
            (_, TextKind::Mark) => Vec::new(),
        }
    }

    /// Ends the text, which may have been cut.
    fn finish(&mut self, cut: bool) -> Vec<Piece> {
        match self {
            Reader::Marks(calls) => parts(calls.finish(cut)),
            Reader::Headers { open, piecewise: true, .. } => match open.take() {
                None => Vec::new(),
                // Who puts the pieces together must find an object.
                Some((_, arguments)) if arguments.trim().is_empty() && !cut => {
                    vec![Piece::Arguments("{}".to_string()), Piece::End]
                }
                Some(_) => vec![Piece::End],
            },
            Reader::Headers { open, .. } => {
                let call = open.take().and_then(|(name, arguments)| {
                    let arguments = match arguments.trim() {
                        "" if !cut => json!({}),
                        text => match serde_json::from_str(text) {
                            Ok(arguments) => arguments,
                            Err(_) if cut => return None,
                            Err(_) => text.into(),
                        },
                    };
                    Some(Piece::Call(Called::new(ToolCall { name, arguments })))
                });
                call.into_iter().collect()
            }
        }
    }
}

fn parts(parts: Vec<tools::Part>) -> Vec<Piece> {
    let piece = |part| match part {
        tools::Part::Text(text) => Piece::Content(text),
        tools::Part::Call(call) => Piece::Call(Called::new(call)),
        tools::Part::Begin(name) => Piece::Begin(Called::begun(name)),
        tools::Part::Arguments(more) => Piece::Arguments(more),
        tools::Part::End => Piece::End,
    };
    parts.into_iter().map(piece).collect()
}

impl Reply {
    /// The answer to a rendered conversation, whose template may have opened the reasoning.
    pub(crate) fn chat(tokenizer: Option<&Tokenizer>, prompt: &[u32]) -> Self {
        let splitter = Some(Splitter::after_tokens(tokenizer, prompt));
        Reply { splitter, calls: None, reasoning: 0, inputs: Inputs::default() }
    }

    /// The continuation of a text.
    pub(crate) fn plain() -> Self {
        Reply { splitter: None, calls: None, reasoning: 0, inputs: Inputs::default() }
    }

    /// The same, in which these tools may be called.
    pub(crate) fn calling(self, format: &'static CallFormat, tools: Vec<Tool>) -> Self {
        let reader = match format.body {
            Body::Harmony => {
                Reader::Headers { header: String::new(), open: None, piecewise: false }
            }
            _ => Reader::Marks(Calls::new(format, tools)),
        };
        Reply { calls: Some(reader), ..self }
    }

    /// The same, in which calls of these tools have a text for their input.
    pub(crate) fn with_custom(self, names: Vec<String>) -> Self {
        Reply { inputs: Inputs::of(names), ..self }
    }

    /// The same, which gives the arguments of calls as they come, where the form of the calls
    /// allows it.
    pub(crate) fn piecewise(self) -> Self {
        let calls = self.calls.map(|reader| match reader {
            Reader::Marks(calls) => Reader::Marks(calls.piecewise()),
            Reader::Headers { header, open, .. } => {
                Reader::Headers { header, open, piecewise: true }
            }
        });
        Reply { calls, ..self }
    }

    /// Takes the text of the next token.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Piece> {
        let spans = match &mut self.splitter {
            Some(splitter) => {
                let before = splitter.is_reasoning();
                let spans = splitter.push(text);
                self.reasoning += usize::from(before || splitter.is_reasoning());
                spans
            }
            None => vec![Span { part: TextKind::Answer, text: text.to_string() }],
        };
        let pieces = self.pieces(spans);
        self.inputs.take(pieces)
    }

    /// Tokens of reasoning so far, its marks among them.
    pub(crate) fn reasoning_tokens(&self) -> usize {
        self.reasoning
    }

    /// Gives the text that was held back, at its end, for which this is the reason.
    pub(crate) fn finish(&mut self, finish: &Finish) -> Vec<Piece> {
        let cut = matches!(finish, Finish::Length | Finish::ContextFull);
        let spans = self.splitter.as_mut().map_or_else(Vec::new, Splitter::finish);
        let mut pieces = self.pieces(spans);
        pieces.extend(self.calls.as_mut().map_or_else(Vec::new, |calls| calls.finish(cut)));
        self.inputs.take(pieces)
    }

    fn pieces(&mut self, spans: Vec<Span>) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for span in spans.into_iter().filter(|span| !span.text.is_empty()) {
            match (&mut self.calls, span.part) {
                (Some(reader), _) => pieces.extend(reader.take(span)),
                (None, TextKind::Answer) => pieces.push(Piece::Content(span.text)),
                (None, TextKind::Reasoning) => pieces.push(Piece::Reasoning(span.text)),
                (None, TextKind::Mark) => {}
            }
        }
        pieces
    }
}

/// A whole answer.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    pub(crate) calls: Vec<Called>,
    /// All tokens, the model's end token included.
    pub(crate) tokens: Vec<Token>,
    /// Which of them made the content.
    pub(crate) said: Vec<usize>,
    pending: Pending<usize>,
    pub(crate) end: Option<Done>,
    /// Tokens of reasoning, its marks among them.
    pub(crate) reasoning_tokens: usize,
}

/// Tokens whose text is still held back: it is not known yet whether they are of the content.
#[derive(Debug, Default)]
pub(crate) struct Pending<T>(Vec<T>);

impl<T> Pending<T> {
    /// Takes a token, if there is one, and the pieces that came with it; gives the tokens that
    /// turned out to be of the content.
    pub(crate) fn take(&mut self, token: Option<T>, pieces: &[Piece]) -> Vec<T> {
        self.0.extend(token);
        if pieces.iter().any(|piece| matches!(piece, Piece::Content(_))) {
            return std::mem::take(&mut self.0);
        }
        if !pieces.is_empty() {
            self.0.clear();
        }
        Vec::new()
    }
}

impl Answer {
    /// Waits for the whole of one text.
    ///
    /// # Errors
    /// A generation that failed, or took too long.
    pub(crate) async fn of(
        mut generating: Generating,
        reply: &mut Reply,
    ) -> Result<Answer, Problem> {
        let mut answer = Answer::default();
        while let Some((_, event)) = generating.next().await? {
            answer.take(reply, event);
        }
        Ok(answer)
    }

    pub(crate) fn add(&mut self, piece: Piece) {
        match piece {
            Piece::Reasoning(text) => self.reasoning += &text,
            Piece::Content(text) => self.content += &text,
            Piece::Call(call) | Piece::Begin(call) => self.calls.push(call),
            Piece::Arguments(more) => {
                if let Some(call) = self.calls.last_mut() {
                    call.add(&more);
                }
            }
            Piece::End => {
                if let Some(call) = self.calls.last_mut() {
                    call.ended = true;
                }
                if let Some(call) = self.calls.last_mut().filter(|call| !call.custom)
                    && let Some(arguments) = call.arguments.as_str()
                {
                    let read = serde_json::from_str(arguments);
                    call.arguments = read.unwrap_or_else(|_| arguments.into());
                    plain_zeros(&mut call.arguments);
                }
            }
        }
    }

    /// Adds what happened.
    pub(crate) fn take(&mut self, reply: &mut Reply, event: Event) {
        match event {
            Event::Token(token) => {
                let pieces = reply.push(&token.text);
                self.said.extend(self.pending.take(Some(self.tokens.len()), &pieces));
                pieces.into_iter().for_each(|piece| self.add(piece));
                self.tokens.push(token);
            }
            Event::Done(done) => {
                let pieces = reply.finish(&done.finish);
                self.said.extend(self.pending.take(None, &pieces));
                pieces.into_iter().for_each(|piece| self.add(piece));
                self.reasoning_tokens = reply.reasoning_tokens();
                self.end = Some(done);
            }
        }
    }

    /// Why it ended.
    pub(crate) fn finish(&self) -> Option<&Finish> {
        self.end.as_ref().map(|done| &done.finish)
    }

    pub(crate) fn metrics(&self) -> Metrics {
        self.end.as_ref().map(|done| done.metrics).unwrap_or_default()
    }
}

/// A token with its log-probability, and the likeliest ones in its place.
pub(crate) fn token_json(model: &Model, token: &Token) -> Value {
    logprobs::of_chat(model.engine.tokenizer(), token)
}

/// Tokens of prompts and answers together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt: usize,
    /// Those of them that were found computed.
    pub(crate) cached: usize,
    pub(crate) generated: usize,
    /// Those of them that are reasoning.
    pub(crate) reasoning: usize,
}

impl Usage {
    /// Adds a text's tokens. Texts that continue the same prompt count it once.
    pub(crate) fn add(&mut self, metrics: &Metrics, reasoning: usize, new_prompt: bool) {
        if new_prompt {
            self.prompt += metrics.prompt_tokens;
            self.cached += metrics.reused_tokens;
        }
        self.generated += metrics.generated_tokens;
        // A stop string that is met takes tokens back.
        self.reasoning += reasoning.min(metrics.generated_tokens);
    }
}

/// When a request began, for what it took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Began(pub(crate) Instant);

impl Began {
    pub(crate) fn now() -> Self {
        Began(Instant::now())
    }

    /// Nanoseconds since then.
    pub(crate) fn nanoseconds(self) -> u64 {
        nanoseconds(self.0.elapsed())
    }
}

/// A time in nanoseconds.
pub(crate) fn nanoseconds(time: std::time::Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use delft::tokens::tools::FORMATS;

    /// Reasoning, content, and calls with their arguments.
    type Taken = (String, String, Vec<(String, Value)>);

    /// A text through a reply, whole and letter by letter.
    fn taken(format: &str, text: &str) -> Taken {
        let taken = ended(format, text, &Finish::End(0));
        assert_eq!(taken[0], taken[1], "{text}");
        taken[0].clone()
    }

    /// A text that ended for a reason, first with calls whole, then piece by piece.
    fn ended(format: &str, text: &str, finish: &Finish) -> [Taken; 2] {
        let format = FORMATS.iter().find(|row| row.name == format).unwrap();
        let tools = vec![Tool::new("paint", json!({}), false).unwrap()];
        let take = |pieces: Vec<String>, piecewise: bool| {
            let reply = Reply::chat(None, &[]).calling(format, tools.clone());
            let mut reply = if piecewise { reply.piecewise() } else { reply };
            let mut answer = Answer::default();
            for piece in pieces {
                reply.push(&piece).into_iter().for_each(|piece| answer.add(piece));
            }
            reply.finish(finish).into_iter().for_each(|piece| answer.add(piece));
            let calls = answer.calls.into_iter().map(|call| (call.name, call.arguments));
            (answer.reasoning, answer.content, calls.collect::<Vec<_>>())
        };
        [false, true].map(|piecewise| {
            let whole = take(vec![text.to_string()], piecewise);
            let letters = text.chars().map(String::from).collect();
            assert_eq!(take(letters, piecewise), whole, "{text}");
            whole
        })
    }

    /// A call that is cut is told as far as it came where its arguments come as text, and left out
    /// where they are an object; it is never text.
    #[test]
    fn calls_that_are_cut_are_no_text() {
        let rows = [
            (
                "hermes",
                "Sure.\n<tool_call>\n{\"name\": \"paint\", \"arguments\": {\"a\": 1}}\n",
                "Sure.",
            ),
            ("mistral-v13", "Sure. [TOOL_CALLS]paint[ARGS]{\"a\": 1}", "Sure."),
            ("mistral", "[TOOL_CALLS][{\"name\": \"paint\", \"arguments\": {\"a\": 1}}]", ""),
            ("llama", "{\"name\": \"paint\", \"parameters\": {\"a\": 1}}", ""),
            ("qwen3-coder", "<tool_call>\n<function=paint>\n<parameter=a>\n1\n</parameter>\n", ""),
            (
                "harmony",
                "<|channel|>commentary to=functions.paint <|constrain|>json<|message|>{\"a\": 1}",
                "",
            ),
        ];
        for (format, text, said) in rows {
            let arguments = text.find(": {").or(text.find("{\"a")).unwrap_or(text.len());
            for (end, _) in text.char_indices().filter(|(at, _)| *at > 2) {
                let [whole, pieces] = ended(format, &text[..end], &Finish::Length);
                for (_, content, calls) in [&whole, &pieces] {
                    // Where no mark is begun, or half of one, nothing tells that it was to be one.
                    let marked = match format {
                        "harmony" => text[..end].contains("<|message|>"),
                        _ => text[..end].find(['<', '[', '{']).is_some_and(|at| end - at > 9),
                    };
                    if marked {
                        assert_eq!(content, said, "{format}: {}", &text[..end]);
                    }
                    assert!(calls.iter().all(|call| call.0 == "paint"), "{format}");
                }
                assert!(whole.2.iter().all(|(_, arguments)| arguments.is_object()), "{format}");
                if end > arguments + 3 && format != "qwen3-coder" {
                    assert_eq!(pieces.2.len(), 1, "{format}: {}", &text[..end]);
                }
            }
        }
        // An answer that has come to its end is what the model wrote.
        let ends = taken("hermes", "Calls begin with <tool_call>");
        assert_eq!(ends, (String::new(), "Calls begin with <tool_call>".into(), vec![]));
    }

    #[test]
    fn reasoning_content_and_calls_are_told_apart() {
        let call = vec![("paint".to_string(), json!({ "a": 1 }))];
        let header = "<|start|>assistant<|channel|>commentary to=functions.paint <|constrain|>json";
        let harmony =
            format!("<|channel|>analysis<|message|>Hm.<|end|>{header}<|message|>{{\"a\": 1}}");
        assert_eq!(taken("harmony", &harmony), ("Hm.".into(), String::new(), call.clone()));
        let older =
            "<|start|>assistant to=functions.paint<|channel|>commentary json<|message|>{\"a\": 1}";
        assert_eq!(taken("harmony", older).2, call);
        let plain = "<|channel|>final<|message|>to=functions.paint is a header.";
        let told = "to=functions.paint is a header.".to_string();
        assert_eq!(taken("harmony", plain), (String::new(), told, vec![]));

        let hermes = "<think>Hm. <tool_call></think>\n\nSure.\n<tool_call>\n{\"name\": \"paint\", \"arguments\": {\"a\": 1}}\n</tool_call>";
        assert_eq!(taken("hermes", hermes), ("Hm. <tool_call>".into(), "Sure.".into(), call));

        let zero =
            "<tool_call>\n{\"name\": \"paint\", \"arguments\": {\"a\": [-0, 0.5]}}\n</tool_call>";
        let arguments = &taken("hermes", zero).2[0].1;
        assert_eq!(arguments.to_string(), r#"{"a":[0,0.5]}"#);
    }

    #[test]
    fn tokens_of_reasoning_are_counted_and_those_of_content_told() {
        let mut reply = Reply::chat(None, &[]);
        let (mut pending, mut said) = (Pending::default(), Vec::new());
        for (i, text) in ["<think>", "Hm", ".", "</think>", "\n\n", "Hi", "!"].iter().enumerate() {
            let pieces = reply.push(text);
            said.extend(pending.take(Some(i), &pieces));
        }
        said.extend(pending.take(None, &reply.finish(&Finish::End(0))));
        // White space behind the mark belongs to it, but is known to only with the next token.
        assert_eq!((reply.reasoning_tokens(), said), (4, vec![3, 4, 5, 6]));
    }

    #[test]
    fn ids_are_nine_letters_and_digits() {
        for number in [0, 1, u64::MAX, 12345] {
            let id = call_id(number);
            assert!(id.len() == 9 && id.bytes().all(|c| c.is_ascii_alphanumeric()), "{id}");
        }
        assert_ne!(call_id(1), call_id(2));
    }
}

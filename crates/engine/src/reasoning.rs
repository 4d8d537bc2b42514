//! A model's reasoning apart from its answer, while the text streams.
//!
//! Models put marks around what they think: `<think>` and `</think>`, or channels with names. A
//! [`Splitter`] is fed the text piece by piece, with marks cut anywhere, and says of each part
//! whether it is answer, reasoning or mark. The parts joined are the text as it came. Marks open
//! reasoning only where an answer begins: later in the text they are what the model talks about.

use crate::stop::overlap;
use serde_json::Value;
use tokens::{ChatTemplate, Stream, Tokenizer};

/// Kinds of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextKind {
    /// Meant for the reader.
    Answer,
    /// The way to the answer.
    Reasoning,
    /// A mark between the two, with the white space that lays it out.
    Mark,
}

/// A stretch of text of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Its kind.
    pub part: TextKind,
    /// The text itself, as the model wrote it.
    pub text: String,
}

/// Marks that open reasoning, each with the one that closes it. No opening mark is a prefix of
/// another.
const PAIRS: [(&str, &str); 8] = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|channel>thought", "<channel|>"),
];

/// In the harmony form every message has a header:
/// `<|start|>assistant<|channel|>analysis<|message|>` and its text.
const CHANNEL: &str = "<|channel|>";
const START: &str = "<|start|>";
const MESSAGE: &str = "<|message|>";
/// Marks that end a message of the harmony form.
const ENDS: [&str; 5] = ["<|end|>", "<|return|>", "<|call|>", START, CHANNEL];
/// The harmony channel that holds reasoning.
const ANALYSIS: &str = "analysis";

/// Bytes that are held back at most while they might be the white space around a mark, or a header:
/// far more than any model writes there, and few enough to be looked at again with each piece.
const LONGEST_DOUBT: usize = 256;

/// Tokens that hold the longest mark and header however they are cut.
const TAIL: usize = 64;

/// The part of the text that the splitter is in.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// An answer begins here, unless a mark does. After a mark, white space belongs to it.
    Start { after_mark: bool },
    /// Behind an opening mark and before the first word of the reasoning, which the named mark will
    /// close.
    Opened(&'static str),
    /// In reasoning that the named mark closes.
    Inside(&'static str),
    /// In an answer that lasts to the end.
    Answer,
    /// In the name of a harmony channel, which has begun with this.
    Channel(String),
    /// In the text of a harmony message.
    Message(TextKind),
    /// Between the text of a harmony message and the next channel or message.
    Between,
}

/// Names that templates give their switch for reasoning.
const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];

/// The variables that turn reasoning on or off: the usual names, as far as the template reads them.
pub fn switches(on: bool, template: Option<&ChatTemplate>) -> serde_json::Map<String, Value> {
    let read = template.map(ChatTemplate::variables).unwrap_or_default();
    let switches = SWITCHES.iter().filter(|name| read.contains(**name));
    switches.map(|name| (name.to_string(), on.into())).collect()
}

/// The reasoning that may precede the answer to a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// Nothing: the answer begins at once.
    Answer,
    /// Reasoning between these marks, or the answer at once.
    Offered {
        /// Opens it.
        open: &'static str,
        /// Closes it.
        close: &'static str,
    },
    /// Reasoning, which the prompt has opened, up to this mark.
    Opened {
        /// Closes it.
        close: &'static str,
    },
    /// Messages of the harmony form, each with a channel.
    Harmony,
}

impl Opening {
    /// Finds out what may precede the answer to a prompt's tokens, with the model's template.
    pub fn after_tokens(
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        prompt: &[u32],
    ) -> Opening {
        let is_special = |text| tokenizer.special_id(text).is_some();
        if is_special(CHANNEL) && is_special(MESSAGE) && is_special(START) {
            return Opening::Harmony;
        }
        let tail = &prompt[prompt.len().saturating_sub(TAIL)..];
        let names = template.into_iter().flat_map(ChatTemplate::names);
        let sources: Vec<&str> =
            names.filter_map(|name| template.and_then(|t| t.source(Some(name)))).collect();
        Opening::after(&tokenizer.decode(tail, false), &sources)
    }

    /// Finds out what may precede the answer to a prompt, from the sources of the template.
    fn after(prompt: &str, sources: &[&str]) -> Opening {
        match state_after(prompt.trim_end()) {
            State::Opened(close) | State::Inside(close) => return Opening::Opened { close },
            State::Start { after_mark: false } => {}
            _ => return Opening::Answer,
        }
        let offered = PAIRS.iter().find(|(open, close)| {
            sources.iter().any(|source| source.contains(open) && source.contains(close))
        });
        offered.map_or(Opening::Answer, |(open, close)| Opening::Offered { open, close })
    }
}

/// A detokeniser that shows the marks of reasoning, which many vocabularies have as special tokens,
/// and these special tokens.
pub(crate) fn stream(tokenizer: &Tokenizer, shown: &[String]) -> Stream {
    let mut marks: Vec<&str> = PAIRS.iter().flat_map(|(open, close)| [*open, *close]).collect();
    marks.extend(shown.iter().map(String::as_str));
    marks.push("<|channel>");
    if tokenizer.special_id(CHANNEL).is_some() {
        // Elsewhere these have other meanings.
        marks.extend(ENDS.iter().chain(&[MESSAGE]));
    }
    tokenizer.stream_showing(&marks)
}

/// Tells reasoning from answer in one text that comes in pieces.
#[derive(Debug, Clone)]
pub struct Splitter {
    state: State,
    /// Text that may still turn out to be the beginning of a mark.
    held: String,
}

impl Default for Splitter {
    fn default() -> Self {
        Splitter { state: State::Start { after_mark: false }, held: String::new() }
    }
}

impl Splitter {
    /// For text that continues `prompt`: templates may open the reasoning themselves.
    pub fn after(prompt: &str) -> Self {
        Splitter { state: state_after(prompt.trim_end()), held: String::new() }
    }

    /// [`Splitter::after`] the tokens of a prompt.
    pub fn after_tokens(tokenizer: Option<&Tokenizer>, prompt: &[u32]) -> Self {
        let tail = &prompt[prompt.len().saturating_sub(TAIL)..];
        tokenizer.map_or_else(Splitter::default, |t| Splitter::after(&t.decode(tail, false)))
    }

    /// Whether the text so far ends within reasoning.
    pub fn is_reasoning(&self) -> bool {
        matches!(
            self.state,
            State::Opened(_) | State::Inside(_) | State::Message(TextKind::Reasoning)
        )
    }

    /// Takes the next piece of text; gives the parts that are now certain.
    pub fn push(&mut self, text: &str) -> Vec<Span> {
        self.held += text;
        let mut spans = Spans::default();
        while self.step(&mut spans) {}
        spans.0
    }

    /// Ends the text; gives what was held back. A text that goes on after all may be pushed as
    /// before.
    pub fn finish(&mut self) -> Vec<Span> {
        let mut spans = Spans::default();
        if let State::Channel(name) = &mut self.state {
            *name += &self.held;
        }
        let part = match &self.state {
            State::Start { after_mark } if self.held.trim_start().is_empty() && *after_mark => {
                TextKind::Mark
            }
            State::Start { .. } | State::Answer => TextKind::Answer,
            State::Inside(_) => TextKind::Reasoning,
            State::Message(part) => *part,
            State::Opened(_) | State::Channel(_) | State::Between => TextKind::Mark,
        };
        if part == TextKind::Answer
            && !self.held.is_empty()
            && matches!(self.state, State::Start { .. })
        {
            self.state = State::Answer;
        }
        self.take(self.held.len(), part, &mut spans);
        spans.0
    }

    /// Gives the first `len` bytes held back as one part.
    fn take(&mut self, len: usize, part: TextKind, spans: &mut Spans) {
        let rest = self.held.split_off(len);
        spans.add(part, std::mem::replace(&mut self.held, rest));
    }

    /// Goes on by one part or state; false when more text is needed.
    fn step(&mut self, spans: &mut Spans) -> bool {
        match self.state.clone() {
            State::Start { after_mark } => self.start(after_mark, spans),
            State::Opened(close) => {
                let space = self.leading_space();
                self.take(space, TextKind::Mark, spans);
                let begun = !self.held.is_empty();
                if begun {
                    self.state = State::Inside(close);
                }
                begun
            }
            State::Inside(close) => self.inside(close, spans),
            State::Answer => {
                self.take(self.held.len(), TextKind::Answer, spans);
                false
            }
            State::Channel(name) => self.channel(name, spans),
            State::Message(part) => match self.until(&ENDS, part, spans) {
                Some(CHANNEL) => self.become_and(CHANNEL, State::Channel(String::new()), spans),
                Some(end) => self.become_and(end, State::Between, spans),
                None => false,
            },
            State::Between => match self.until(&[CHANNEL, MESSAGE], TextKind::Mark, spans) {
                Some(CHANNEL) => self.become_and(CHANNEL, State::Channel(String::new()), spans),
                Some(mark) => self.become_and(mark, State::Message(TextKind::Answer), spans),
                None => false,
            },
        }
    }

    fn leading_space(&self) -> usize {
        self.held.len() - self.held.trim_start().len()
    }

    /// Handles held text at the beginning of an answer, where a mark may stand.
    fn start(&mut self, after_mark: bool, spans: &mut Spans) -> bool {
        let space = self.leading_space();
        let rest = &self.held[space..];
        let harmony = [(CHANNEL, State::Channel(String::new())), (START, State::Between)];
        let openings = PAIRS.map(|(open, close)| (open, State::Opened(close)));
        for (mark, next) in openings.into_iter().chain(harmony) {
            if rest.starts_with(mark) {
                self.take(space + mark.len(), TextKind::Mark, spans);
                self.state = next;
                return true;
            }
            if mark.starts_with(rest) && space <= LONGEST_DOUBT {
                return false;
            }
        }
        self.take(space, if after_mark { TextKind::Mark } else { TextKind::Answer }, spans);
        self.state = State::Answer;
        true
    }

    /// In reasoning: white space before the closing mark belongs to the mark.
    fn inside(&mut self, close: &'static str, spans: &mut Spans) -> bool {
        let found = self.held.find(close);
        let end = found.unwrap_or(self.held.len() - overlap(&self.held, close));
        let words = self.held[..end].trim_end().len();
        match found {
            Some(at) => {
                self.take(words, TextKind::Reasoning, spans);
                self.take(at + close.len() - words, TextKind::Mark, spans);
                self.state = State::Start { after_mark: true };
                true
            }
            None => {
                let words = if end - words > LONGEST_DOUBT { end } else { words };
                self.take(words, TextKind::Reasoning, spans);
                false
            }
        }
    }

    /// In a channel's name, up to the mark before the message.
    fn channel(&mut self, name: String, spans: &mut Spans) -> bool {
        let Some(at) = self.held.find(MESSAGE) else {
            if self.held.len() > LONGEST_DOUBT {
                self.state = State::Answer;
                return true;
            }
            return false;
        };
        let part = part_of(&(name + &self.held[..at]));
        self.take(at + MESSAGE.len(), TextKind::Mark, spans);
        self.state = State::Message(part);
        true
    }

    /// Gives text as `part` up to the first of `marks`, which is returned and stays held, or up to
    /// what may become one.
    fn until(
        &mut self,
        marks: &[&'static str],
        part: TextKind,
        spans: &mut Spans,
    ) -> Option<&'static str> {
        let first = marks.iter().filter_map(|mark| Some((self.held.find(mark)?, *mark))).min();
        let doubt = || marks.iter().map(|mark| overlap(&self.held, mark)).max().unwrap_or(0);
        let end = first.map_or_else(|| self.held.len() - doubt(), |(at, _)| at);
        self.take(end, part, spans);
        first.map(|(_, mark)| mark)
    }

    fn become_and(&mut self, mark: &str, next: State, spans: &mut Spans) -> bool {
        self.take(mark.len(), TextKind::Mark, spans);
        self.state = next;
        true
    }
}

/// The kind of text that a harmony channel holds, by its header.
fn part_of(header: &str) -> TextKind {
    let name = header.split_whitespace().next();
    if name == Some(ANALYSIS) { TextKind::Reasoning } else { TextKind::Answer }
}

/// The state behind a prompt, given without the white space at its end.
fn state_after(prompt: &str) -> State {
    for (open, close) in PAIRS {
        if prompt.ends_with(open) {
            return State::Opened(close);
        }
        if prompt.ends_with(close) {
            return State::Start { after_mark: true };
        }
    }
    let header = prompt.rfind(CHANNEL).map(|at| &prompt[at + CHANNEL.len()..]);
    let one_line = |text: &str| text.len() <= LONGEST_DOUBT && !text.contains(['\n', '<', '>']);
    match header {
        Some(name) if one_line(name) => State::Channel(name.to_string()),
        Some(header) => match header.strip_suffix(MESSAGE) {
            Some(name) if one_line(name) => State::Message(part_of(name)),
            _ => State::Start { after_mark: false },
        },
        None => State::Start { after_mark: false },
    }
}

/// Spans under construction: neighbours of one kind are one span.
#[derive(Default)]
struct Spans(Vec<Span>);

impl Spans {
    fn add(&mut self, part: TextKind, text: String) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(last) if last.part == part => last.text += &text,
            _ => self.0.push(Span { part, text }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::TextKind::{Answer, Mark, Reasoning};
    use super::*;

    #[test]
    fn what_may_open_an_answer_follows_from_prompt_and_template() {
        let (open, close) = ("<think>", "</think>");
        let template: &[&str] = &["{{ '<think>' + message.reasoning + '</think>' }}"];
        let cases = [
            ("<|assistant|>\n", template, Opening::Offered { open, close }),
            ("<|assistant|>\n<think>\n", template, Opening::Opened { close }),
            ("<|assistant|>\n<think>\n\n</think>\n\n", template, Opening::Answer),
            ("<|assistant|>\n", &["{{ message }}"], Opening::Answer),
            ("<|assistant|>[THINK]", &[], Opening::Opened { close: "[/THINK]" }),
        ];
        for (prompt, sources, expected) in cases {
            assert_eq!(Opening::after(prompt, sources), expected, "{prompt:?}");
        }
    }

    struct Case {
        prompt: &'static str,
        parts: &'static [(TextKind, &'static str)],
        why: &'static str,
    }

    const CASES: [Case; 23] = [
        Case { prompt: "", parts: &[(Answer, " Hello,\n world ")], why: "no marks" },
        Case { prompt: "", parts: &[(Answer, "  \n")], why: "white space alone" },
        Case {
            prompt: "",
            parts: &[
                (Mark, "<think>\n"),
                (Reasoning, "So.\n\nYes < no."),
                (Mark, "\n</think>\n\n"),
                (Answer, "42 \n"),
            ],
            why: "the usual form",
        },
        Case {
            prompt: "<|im_start|>assistant\n<think>\n",
            parts: &[(Reasoning, "So."), (Mark, "</think>"), (Answer, "42")],
            why: "the template opens the reasoning",
        },
        Case {
            prompt: "assistant\n<think>\n\n</think>\n\n",
            parts: &[(Answer, "42 </think>")],
            why: "the template closes it too",
        },
        Case {
            prompt: "Say <think>\nassistant\n",
            parts: &[(Answer, "42")],
            why: "a mark earlier in the prompt is the user's",
        },
        Case {
            prompt: "",
            parts: &[(Mark, "\n <think>\n\n</think>\n\n"), (Answer, "Hi")],
            why: "nothing was thought",
        },
        Case {
            prompt: "",
            parts: &[(Answer, "Write <think>x</think>.")],
            why: "a mark inside an answer is text",
        },
        Case { prompt: "", parts: &[(Answer, "<thinker>x")], why: "a mark's beginning alone" },
        Case { prompt: "", parts: &[(Answer, "<thi")], why: "the text ends in doubt" },
        Case {
            prompt: "",
            parts: &[(Mark, "<think>"), (Reasoning, "a </thi")],
            why: "the text ends before the mark does",
        },
        Case {
            prompt: "",
            parts: &[
                (Mark, "<thinking>"),
                (Reasoning, "a</think>b"),
                (Mark, "</thinking> "),
                (Answer, "c"),
            ],
            why: "another pair's mark closes nothing",
        },
        Case {
            prompt: "",
            parts: &[
                (Mark, "<think>"),
                (Reasoning, "a"),
                (Mark, "</think>\n<think>"),
                (Reasoning, "b"),
                (Mark, "</think>"),
                (Answer, "c"),
            ],
            why: "reasoning goes on in a second block",
        },
        Case {
            prompt: "",
            parts: &[
                (Mark, "[THINK]"),
                (Reasoning, "é—ü"),
                (Mark, "[/THINK]"),
                (Answer, "ß[THINK]"),
            ],
            why: "letters of several bytes",
        },
        Case {
            prompt: "",
            parts: &[(Mark, "<seed:think>"), (Reasoning, "a"), (Mark, "</seed:think>")],
            why: "no answer",
        },
        Case {
            prompt: "",
            parts: &[
                (Mark, "<|channel>thought\n"),
                (Reasoning, "a"),
                (Mark, "\n<channel|>"),
                (Answer, "b"),
            ],
            why: "a channel with an end",
        },
        Case {
            prompt: "<|start|>assistant",
            parts: &[
                (Mark, "<|channel|>analysis<|message|>"),
                (Reasoning, "User greets.\n"),
                (Mark, "<|end|><|start|>assistant<|channel|>final<|message|>"),
                (Answer, "Hello <b>!"),
                (Mark, "<|return|>"),
            ],
            why: "harmony",
        },
        Case {
            prompt: "",
            parts: &[
                (Mark, "<|start|>assistant<|message|>"),
                (Answer, "Hi"),
                (Mark, "<|channel|>analysis code<|message|>"),
                (Reasoning, "x"),
            ],
            why: "harmony without a channel, then with no end",
        },
        Case {
            prompt: "<|start|>assistant<|channel|>analysis<|message|>",
            parts: &[(Reasoning, "Hm"), (Mark, "<|end|>assistant")],
            why: "the prompt opens a harmony channel",
        },
        Case {
            prompt: "<|start|>assistant<|channel|>anal",
            parts: &[(Mark, "ysis<|message|>"), (Reasoning, "Hm")],
            why: "the prompt ends in a channel's name",
        },
        Case {
            prompt: "",
            parts: &[(Mark, "<|channel|>final")],
            why: "harmony that ends in a name",
        },
        Case {
            prompt: "",
            parts: &[
                (Mark, "<|START_THINKING|>"),
                (Reasoning, "a\n \nb"),
                (Mark, "<|END_THINKING|>"),
                (Answer, "c"),
            ],
            why: "blank lines inside reasoning",
        },
        Case {
            prompt: "",
            parts: &[(Mark, "<think>"), (Reasoning, "a\n\n")],
            why: "cut in white space",
        },
    ];

    /// The parts of a text that is cut into these pieces.
    fn split<'a>(prompt: &str, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Span> {
        let mut splitter = Splitter::after(prompt);
        let mut spans = Spans::default();
        let mut given: Vec<Span> = pieces.into_iter().flat_map(|p| splitter.push(p)).collect();
        given.extend(splitter.finish());
        given.into_iter().for_each(|span| spans.add(span.part, span.text));
        spans.0
    }

    #[test]
    fn parts_do_not_depend_on_where_the_text_is_cut() {
        for Case { prompt, parts, why } in CASES {
            let text: String = parts.iter().map(|(_, text)| *text).collect();
            let expected: Vec<Span> =
                parts.iter().map(|&(part, text)| Span { part, text: text.to_string() }).collect();
            assert_eq!(split(prompt, [text.as_str()]), expected, "{why}");
            let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
            for &cut in &cuts {
                let (a, b) = text.split_at(cut);
                assert_eq!(split(prompt, [a, b]), expected, "{why}, cut at {cut}");
            }
            let letters = cuts.iter().map(|&at| {
                let end = at + text[at..].chars().next().map_or(0, char::len_utf8);
                &text[at..end]
            });
            assert_eq!(split(prompt, letters), expected, "{why}, letter by letter");
        }
    }

    #[test]
    fn a_text_that_was_ended_may_go_on() {
        let cases = [
            ("<think>a ", "b</think>c", "a b", "c"),
            ("<|channel|>ana", "lysis<|message|>a<|end|>", "a", ""),
            ("one <", "two", "", "one <two"),
            ("<th", "ink>", "", "<think>"),
        ];
        for (first, rest, reasoning, answer) in cases {
            let mut splitter = Splitter::default();
            let mut spans = splitter.push(first);
            spans.extend(splitter.finish());
            spans.extend(splitter.push(rest));
            spans.extend(splitter.finish());
            let of = |part| -> String {
                spans.iter().filter(|s| s.part == part).map(|s| s.text.as_str()).collect()
            };
            assert_eq!(
                (of(Reasoning).as_str(), of(Answer).as_str()),
                (reasoning, answer),
                "{first}"
            );
        }
    }

    #[test]
    fn what_is_held_back_is_bounded() {
        let endless = [
            ("", " "),
            ("<think>", "\n"),
            ("<think>a", " "),
            ("<|channel|>", "x"),
            ("<think></think>", "\n"),
        ];
        for (begin, piece) in endless {
            let mut splitter = Splitter::default();
            splitter.push(begin);
            for _ in 0..2000 {
                splitter.push(piece);
                assert!(splitter.held.len() <= LONGEST_DOUBT + MESSAGE.len(), "{begin}");
            }
        }
    }

    #[test]
    fn text_of_any_kind_comes_back_whole() {
        // All short words over pieces of marks: wrong nesting, ends without beginnings, headers
        // without channels.
        let pieces =
            ["<think>", "</think>", "<|channel|>", "<|message|>", "<|end|>", "analysis", " ", "a<"];
        for n in 0..pieces.len().pow(4) {
            let word = |place: u32| pieces[n / pieces.len().pow(place) % pieces.len()];
            let text: Vec<&str> = (0..4).map(word).collect();
            let joined: String = split("", text.clone()).into_iter().map(|s| s.text).collect();
            assert_eq!(joined, text.concat());
        }
    }

    #[test]
    fn no_opening_mark_begins_another() {
        let marks: Vec<&str> =
            PAIRS.iter().map(|(open, _)| *open).chain([CHANNEL, START]).collect();
        for (i, a) in marks.iter().enumerate() {
            assert!(marks.iter().enumerate().all(|(j, b)| i == j || !b.starts_with(a)), "{a}");
        }
    }
}

//! `delft run`: one prompt, one text.

use std::collections::BTreeMap;

use delft::reasoning::{self, Splitter, TextKind};
use delft::tokens::{ChatTemplate, Special, Tokenizer};
use delft::{Engine, Error, Finish, GenerateOptions, Prompt, Token};
use serde_json::{Value, json};

use super::tokenize;
use crate::args::{Run, ThinkArg};
use crate::generate::{Answer, generate_tokens};
use crate::grammar::Maker;
use crate::prompt::{self, Gathering};
use crate::terminal::{
    Outcome, Page, Stop, aside, print, print_json, print_json_line, printable, stdout_is_terminal,
};
use crate::waiting::Waiting;
use crate::{load, logprobs, sampling};

/// How the bundled model's stories begin by default.
const OPENING: &str = "Once upon a time";

/// A prompt as text, and in the form that the model is given.
struct Opening {
    text: String,
    /// The program chose it, so it belongs to the text shown.
    own: bool,
    form: Form,
}

/// How a prompt's text becomes tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// As it stands.
    Plain,
    /// As it stands, with spellings of special tokens read as these tokens.
    Special,
    /// As a user's message in the chat template.
    Message,
}

pub(crate) fn run(args: &Run) -> Outcome {
    // What must be read is read before the model is loaded: a prompt that is missing shall not cost
    // that time.
    let gathering = prompt::gather(args.prompt.as_deref(), &args.file)?;
    check(args, &gathering)?;
    let grammar = args.grammar.read()?;
    let template = args.template.as_deref().map(template).transpose()?;
    if args.show_prompt {
        return show(args, gathering, template);
    }
    let (engine, _) = load::engine(&args.load, args.verbose)?;
    let template = template.as_ref().or(engine.chat_template());
    let opening = opening(args, gathering, template)?;
    let tokenizer = load::need_tokenizer(&engine)?;
    let fits = |text: &str| engine.check_length(text);
    let (_, tokens) = encode(args, &opening, tokenizer, template, &fits)?;
    let mut options = sampling::options(&engine, &args.sampling)?;
    options.logprobs = args.top_logprobs.is_some();
    options.top_logprobs = args.top_logprobs.map_or(0, usize::from);
    if let Some(grammar) = &grammar {
        let rendered = opening.form == Form::Message;
        options.constraint = Some(Maker::new(&engine, template).make(grammar, &tokens, rendered)?);
    }
    if args.verbose {
        describe(&opening, &tokens, &options);
    }
    let mut session = load::session(&engine)?;
    let splitter = Splitter::after_tokens(Some(tokenizer), &tokens);
    let given = Prompt::Tokens(tokens);
    let object = |answer: &Answer| object(&engine, &opening, &options, answer, splitter.clone());
    let answer = if args.json {
        let mut told = Vec::new();
        let mut note = |token: &Token| {
            told.extend(options.logprobs.then(|| logprobs::by_id(Some(tokenizer), token)));
            Ok(())
        };
        let answer = generate_tokens(&mut session, given, &options, &mut note)?;
        let mut object = object(&answer);
        if options.logprobs {
            object["logprobs"] = told.into();
        }
        print_json(&object)?;
        answer
    } else if args.json_lines {
        let mut line = |token: &Token| {
            let mut object = match options.logprobs {
                true => logprobs::by_id(Some(tokenizer), token),
                false => json!({ "token": token.id }),
            };
            object["text"] = json!(token.text);
            print_json_line(&object)
        };
        let answer = generate_tokens(&mut session, given, &options, &mut line)?;
        print_json_line(&object(&answer))?;
        answer
    } else {
        let mut writer = Writer::new(args, &opening, splitter.clone());
        let mut told = Vec::new();
        let mut push = |token: &Token| {
            told.extend(options.logprobs.then(|| logprobs::line(Some(tokenizer), token)));
            writer.push(&token.text)
        };
        let answer = generate_tokens(&mut session, given, &options, &mut push)?;
        writer.finish()?;
        told.iter().for_each(aside);
        if !args.quiet {
            aside(answer.summary(&engine));
        }
        answer
    };
    if answer.finish == Finish::Cancelled { Err(Stop::Interrupted) } else { Ok(()) }
}

/// Refuses a missing prompt, unless it is the bundled model's to begin.
fn check(args: &Run, gathering: &Gathering) -> Outcome {
    let asked = args.chat || args.special || args.system.is_some() || args.template.is_some();
    if !gathering.is_nothing() || (args.load.model.model.is_none() && !asked) {
        return Ok(());
    }
    let error = Error::new("prompt", "PROMPT or text on standard input", "none");
    let hint = match &args.load.model.model {
        Some(model) => format!("to talk with the model: delft chat {model}"),
        None => "delft run --help shows openings to try".to_string(),
    };
    Err(Stop::Usage(crate::terminal::line(&error.hint(hint))))
}

/// A chat template from a file.
fn template(path: &std::path::Path) -> Outcome<ChatTemplate> {
    let sources = BTreeMap::from([("template".to_string(), crate::terminal::read_file(path)?)]);
    Ok(ChatTemplate::new(&path.display().to_string(), sources)?)
}

/// The prompt, or the bundled model's own opening where there is none, and its form for a model
/// with this template.
fn opening(args: &Run, gathering: Gathering, template: Option<&ChatTemplate>) -> Outcome<Opening> {
    // A bundled model that has a template continues plain text all the same, and nobody asked it
    // anything.
    if gathering.is_nothing() {
        return Ok(Opening { text: OPENING.to_string(), own: true, form: Form::Plain });
    }
    let form = if args.special {
        Form::Special
    } else if args.chat || (template.is_some() && !args.raw) {
        Form::Message
    } else if args.system.is_some() {
        let error = Error::new("--system", "a model with a chat template", "none");
        return Err(error.hint("write what you want to say into the prompt").into());
    } else if matches!(args.think, Some(ThinkArg::On | ThinkArg::Off)) {
        return Err(Error::new("--think", "a model with a chat template", "none").into());
    } else {
        Form::Plain
    };
    Ok(Opening { text: gathering.finish()?, own: false, form })
}

/// The text that the model reads, and its tokens; `check` is asked before they are made.
fn encode(
    args: &Run,
    opening: &Opening,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    check: &dyn Fn(&str) -> delft::Result<()>,
) -> Outcome<(String, Vec<u32>)> {
    let text = opening.text.clone();
    check(&text)?;
    match opening.form {
        Form::Plain => {
            let tokens = tokenizer.encode(&text, Special { add: true, parse: false })?;
            Ok((text, tokens))
        }
        // The spelling of the token that begins a text may be among them, and is not doubled.
        Form::Special => {
            Ok((tokenizer.encode_chat(&text)?, text)).map(|(tokens, text)| (text, tokens))
        }
        Form::Message => {
            let system = args.system.iter().map(|content| message("system", content));
            let messages = system.chain([message("user", &text)]).collect();
            let prompt = Prompt::Chat { messages, extra: switches(args.think, template)? };
            if let Some(remark) = prompt.remark(template) {
                aside(format_args!("warning: {remark}"));
            }
            let rendered = prompt.render(Some(tokenizer), template)?;
            check(&rendered)?;
            let tokens = tokenizer.encode_chat(&rendered)?;
            Ok((rendered, tokens))
        }
    }
}

/// The template's variables as `--think` has them.
fn switches(
    think: Option<ThinkArg>,
    template: Option<&ChatTemplate>,
) -> Outcome<serde_json::Map<String, Value>> {
    let on = match think {
        Some(ThinkArg::On) => true,
        Some(ThinkArg::Off) => false,
        Some(ThinkArg::Hide) | None => return Ok(serde_json::Map::new()),
    };
    let switches = reasoning::switches(on, template);
    if switches.is_empty() {
        let error = Error::new("--think", "a chat template with a switch for thinking", "none");
        return Err(error.hint("--think hide leaves out what the model thinks").into());
    }
    Ok(switches)
}

/// A message as chat templates read it.
pub(crate) fn message(role: &str, content: &str) -> Value {
    json!({ "role": role, "content": content })
}

/// `--show-prompt`: what the model would get, from the model's headers alone.
fn show(args: &Run, gathering: Gathering, template: Option<ChatTemplate>) -> Outcome {
    let model = load::find(&args.load.model)?;
    let template = match template {
        Some(template) => Some(template),
        None => delft::read_template(&load::open(&model)?)?,
    };
    let opening = opening(args, gathering, template.as_ref())?;
    let tokenizer = load::tokenizer(&model)?;
    let all = |_: &str| Ok(());
    let (text, tokens) = encode(args, &opening, &tokenizer, template.as_ref(), &all)?;
    if args.json || args.json_lines {
        return print_json(&json!({ "prompt": text, "tokens": tokens }));
    }
    let text = if stdout_is_terminal() { printable(&text) } else { text.as_str().into() };
    print(&format!("{text}\n\n{}", tokenize::shown(&tokenizer, &tokens)))
}

/// `--verbose`: what is in effect.
fn describe(opening: &Opening, tokens: &[u32], options: &GenerateOptions) {
    /// Tokens that are shown of a long prompt; --show-prompt shows all.
    const SHOWN: usize = 100;
    let form = match opening.form {
        Form::Plain => "as it stands",
        Form::Special => "as it stands, special tokens read",
        Form::Message => "chat template applied",
    };
    aside(format_args!("prompt: {form}"));
    let first = &tokens[..tokens.len().min(SHOWN)];
    let more = if tokens.len() > SHOWN { " and more" } else { "" };
    aside(format_args!("prompt tokens: {first:?}{more} ({})", tokens.len()));
    let settings: Vec<String> =
        sampling::settings(options).iter().map(|(name, value)| format!("{name} {value}")).collect();
    aside(format_args!("settings: {}", settings.join(", ")));
    aside(format_args!("sampling: {}", options.sampling.describe()));
}

/// Writes the text as it comes, behind its prompt where that is shown.
struct Writer<'a> {
    args: &'a Run,
    opening: &'a Opening,
    page: Page,
    begun: bool,
    /// Tells reasoning from answer, where they are not written alike.
    splitter: Option<Splitter>,
    /// Tokens of a reasoning that is not shown, and the line that tells of them.
    hidden: Option<(usize, Waiting)>,
    /// Whether what was written last ended its line.
    ended: bool,
}

impl<'a> Writer<'a> {
    fn new(args: &'a Run, opening: &'a Opening, splitter: Splitter) -> Writer<'a> {
        let page = Page::new();
        let hides = args.think == Some(ThinkArg::Hide);
        let hidden = hides.then(|| (0, Waiting::begin("thinking")));
        let splitter = (hides || page.is_terminal()).then_some(splitter);
        Writer { args, opening, page, begun: false, splitter, hidden, ended: false }
    }

    /// While a prompt is read a bar may stand where the text will begin, so the prompt comes with
    /// the first token.
    fn begin(&mut self) -> Outcome {
        if std::mem::replace(&mut self.begun, true) {
            return Ok(());
        }
        echo(self.args, self.opening, &mut self.page)
    }

    /// Writes a token's text.
    fn push(&mut self, text: &str) -> Outcome {
        self.begin()?;
        let Some(splitter) = &mut self.splitter else { return self.write(TextKind::Answer, text) };
        for span in splitter.push(text) {
            self.write(span.part, &span.text)?;
        }
        let thinks = self.splitter.as_ref().is_some_and(Splitter::is_reasoning);
        if let Some((tokens, waiting)) = self.hidden.as_mut().filter(|_| thinks) {
            *tokens += 1;
            waiting.at(*tokens, None);
        }
        Ok(())
    }

    /// Writes what was held back, and ends the line.
    fn finish(mut self) -> Outcome {
        // A text that was interrupted before it began has no line to end.
        if !self.begun {
            return Ok(());
        }
        for span in self.splitter.as_mut().map(Splitter::finish).unwrap_or_default() {
            self.write(span.part, &span.text)?;
        }
        if self.ended { Ok(()) } else { self.page.write("\n") }
    }

    fn write(&mut self, part: TextKind, text: &str) -> Outcome {
        if text.is_empty() {
            return Ok(());
        }
        match (part, &mut self.hidden) {
            (TextKind::Answer, hidden) => {
                if let Some((_, waiting)) = hidden {
                    waiting.end();
                }
                self.page.write(text)?
            }
            (_, Some(_)) => return Ok(()),
            (_, None) => self.page.write_dimmed(text)?,
        }
        self.ended = text.ends_with('\n');
        Ok(())
    }
}

/// Writes the prompt where it is asked for, or helps a reader to follow: at a terminal, in front of
/// its continuation.
fn echo(args: &Run, opening: &Opening, page: &mut Page) -> Outcome {
    if args.no_echo {
        return Ok(());
    }
    if opening.own {
        return page.write(&opening.text);
    }
    let continued = opening.form != Form::Message;
    if args.echo {
        page.write_dimmed(&opening.text)?;
        return page.write(if continued { "" } else { "\n\n" });
    }
    if !(continued && page.is_terminal()) {
        return Ok(());
    }
    // A long prompt has been read elsewhere; its end is what the text continues.
    const SHOWN: usize = 600;
    match opening.text.char_indices().nth_back(SHOWN) {
        Some((at, _)) => {
            let end = &opening.text[at..];
            let whole = end.split_once(char::is_whitespace).map_or(end, |(_, words)| words);
            page.write_dimmed(&format!("[..] {whole}"))
        }
        None => page.write_dimmed(&opening.text),
    }
}

/// All about a text, for machines: as the model wrote it, and its answer apart from its reasoning.
fn object(
    engine: &Engine,
    opening: &Opening,
    options: &GenerateOptions,
    answer: &Answer,
    mut splitter: Splitter,
) -> Value {
    let mut spans = splitter.push(&answer.text);
    spans.extend(splitter.finish());
    let of = |part: TextKind| -> String {
        spans.iter().filter(|span| span.part == part).map(|span| span.text.as_str()).collect()
    };
    let thinks = spans.iter().any(|span| span.part == TextKind::Reasoning);
    json!({
        "model": engine.info().name,
        "prompt": opening.text,
        "text": answer.text,
        "reasoning": thinks.then(|| of(TextKind::Reasoning)),
        "answer": of(TextKind::Answer),
        "tokens": answer.tokens,
        "finish": answer.finish.name(),
        "sampling": sampling::to_json(options),
        "metrics": answer.metrics_json(),
    })
}

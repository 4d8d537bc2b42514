//! `delft chat`: a conversation in the terminal, or line by line through a pipe.
//!
//! The whole conversation is the prompt of every turn; the session computes only what it does not
//! hold yet. A model without a chat template is given the plain text so far, so that a base model
//! goes on with what was typed.

mod actions;
mod commands;
mod complete;
mod conversation;
mod lines;
mod render;

use delft::hub::{LocalModel, ModelSource};
use delft::reasoning::{self, Splitter};
use delft::{Engine, Error, Finish, GenerateOptions, Prompt, Session};
use serde_json::Value;

use self::conversation::{Conversation, LARGEST, Role, Turn};
use self::lines::Lines;
use self::render::Screen;
use crate::args::{Chat, ThinkArg};
use crate::generate::{Answer, generate_tokens};
use crate::quiet::Quiet;
use crate::terminal::{
    BOLD, Outcome, Stop, aside, harmless, line, note, report, stdin_is_terminal,
};
use crate::{load, sampling};

/// Where a conversation with the bundled model may begin.
const OPENINGS: [&str; 3] = [
    "Tell me a story about a lighthouse that is afraid of the dark.",
    "Write a short tale of two friends who build a boat.",
    "I would like a bedtime story with a happy ending.",
];

/// A running chat.
struct Talk<'a> {
    args: &'a Chat,
    engine: Engine,
    model: LocalModel,
    session: Session,
    options: GenerateOptions,
    conversation: Conversation,
    /// Texts of files that the next message begins with.
    files: Vec<String>,
    /// Whether the template is told to have the model reason; as it likes unless said.
    thinking: Option<bool>,
    last: Option<Answer>,
    cut: Option<Cut>,
    screen: Screen,
    lines: Lines,
    interactive: bool,
    /// Whether a full context forgets the oldest tokens.
    rotates: bool,
}

/// Where the last answer was cut: what was computed, and in which part of it the text was.
struct Cut {
    tokens: Vec<u32>,
    splitter: Option<Splitter>,
}

/// How the chat goes on.
enum Next {
    Go,
    Leave,
}

pub(crate) fn run(args: &Chat) -> Outcome {
    let (engine, model) = load::engine(&args.load, args.verbose)?;
    let interactive = stdin_is_terminal();
    let (screen, thinking) = (Screen::new(args.plain, args.think), first_switch(args));
    if let Some(on) = thinking
        && reasoning::switches(on, engine.chat_template()).is_empty()
    {
        return Err(
            Error::new("--think", "a chat template with a switch for thinking", "none").into()
        );
    }
    let mut talk = Talk {
        args,
        session: load::session(&engine)?,
        options: sampling::options(&engine, &args.sampling)?,
        conversation: Conversation { system: args.system.clone(), turns: Vec::new() },
        files: Vec::new(),
        thinking,
        last: None,
        cut: None,
        lines: Lines::new(interactive, screen.has_colours())?,
        screen,
        interactive,
        rotates: args.load.rotate,
        engine,
        model,
    };
    if args.verbose {
        aside(format_args!("sampling: {}", talk.options.sampling.describe()));
    }
    if interactive {
        talk.greet();
    }
    while let Some(input) = talk.lines.input()? {
        match talk.turn(&input) {
            Ok(Next::Go) => {}
            Ok(Next::Leave) => break,
            // At a terminal a mistake costs a line, not the conversation.
            Err(Stop::Error(error)) if interactive => report(&line(&error)),
            Err(stop) => return Err(stop),
        }
    }
    talk.lines.save();
    Ok(())
}

/// The command line's settings of reasoning for the template.
fn first_switch(args: &Chat) -> Option<bool> {
    match args.think? {
        ThinkArg::On => Some(true),
        ThinkArg::Off => Some(false),
        ThinkArg::Hide => None,
    }
}

impl Talk<'_> {
    fn greet(&self) {
        let name = harmless(&self.engine.info().name);
        note(format_args!("{BOLD}{name}{BOLD:#}: /help lists the commands, Ctrl-D leaves"));
        if self.engine.chat_template().is_none() {
            aside("this model has no chat template: it continues what you type");
        } else if self.model.source == ModelSource::Bundled {
            aside("it tells stories. You might begin with:");
            OPENINGS.iter().for_each(|opening| aside(format_args!("  {opening}")));
        }
    }

    /// One input: a command or something to answer.
    fn turn(&mut self, input: &str) -> Outcome<Next> {
        if let Some((name, rest)) = commands::parse(input) {
            return commands::run(self, name, rest);
        }
        if input.trim().is_empty() && self.files.is_empty() {
            return Ok(Next::Go);
        }
        let parts = self.files.iter().map(String::as_str).chain([input]);
        let question =
            parts.filter(|part| !part.trim().is_empty()).collect::<Vec<_>>().join("\n\n");
        if question.len() > LARGEST {
            let expected = format!("a message of at most {} MiB", LARGEST >> 20);
            self.files.clear();
            return Err(Error::new("the message", expected, "a longer one").into());
        }
        if self.ask(question)? {
            self.files.clear();
        }
        Ok(Next::Go)
    }

    /// Asks a question. False if it was not answered: then it is no part of the conversation.
    fn ask(&mut self, question: String) -> Outcome<bool> {
        self.cut = None;
        self.conversation.turns.push(Turn::new(Role::User, question));
        let answered = self.answer();
        if !matches!(answered, Ok(true)) {
            self.conversation.turns.pop();
        }
        answered
    }

    /// Answers the last question.
    fn answer(&mut self) -> Outcome<bool> {
        let prompt = self.prompt();
        // Once for a conversation, with its first question.
        if let Some(remark) = prompt.remark(self.engine.chat_template())
            && self.conversation.turns.len() == 1
        {
            aside(format_args!("warning: {remark}"));
        }
        let prompt = self.engine.encode(&prompt)?;
        self.check_room(prompt.len())?;
        let tokenizer = self.engine.tokenizer();
        let splitter = (self.engine.chat_template().is_some())
            .then(|| Splitter::after_tokens(tokenizer, &prompt));
        let Some(said) = self.say(prompt, splitter)? else {
            aside("interrupted before it was read: the message is no part of the conversation");
            return Ok(false);
        };
        self.conversation.turns.push(said);
        Ok(true)
    }

    /// Goes on with an answer that was cut.
    fn go_on(&mut self) -> Outcome {
        let Some(cut) = self.cut.take() else { return Ok(()) };
        self.check_room(cut.tokens.len()).inspect_err(|_| {
            self.cut = Some(Cut { tokens: cut.tokens.clone(), splitter: cut.splitter.clone() })
        })?;
        if let (Some(more), Some(turn)) =
            (self.say(cut.tokens, cut.splitter)?, self.conversation.answer())
        {
            turn.text += &more.text;
            turn.reasoning += &more.reasoning;
        }
        Ok(())
    }

    /// The model's input: the conversation as its template has it, or as text.
    fn prompt(&self) -> Prompt {
        if self.engine.chat_template().is_none() {
            return Prompt::Text(self.conversation.text());
        }
        Prompt::Chat { messages: self.conversation.messages(), extra: self.switches() }
    }

    /// The variables by which the template is told to have the model reason or not.
    fn switches(&self) -> serde_json::Map<String, Value> {
        let on = self.thinking;
        on.map(|on| reasoning::switches(on, self.engine.chat_template())).unwrap_or_default()
    }

    /// Tokens of the context that the conversation takes.
    fn used(&self) -> Outcome<usize> {
        // Templates may refuse a conversation without a question.
        if self.conversation.turns.is_empty() {
            return Ok(0);
        }
        Ok(self.engine.encode(&self.prompt())?.len())
    }

    fn check_room(&self, tokens: usize) -> Outcome {
        let context = self.engine.info().context;
        if self.rotates || tokens <= context {
            return Ok(());
        }
        let expected = format!("a conversation of at most {context} tokens");
        let found = format!("{tokens} with this message");
        Err(Error::new("context", expected, found).hint(ROOM).into())
    }

    /// Generates after these tokens and shows what is said; None if nothing was, since the user
    /// interrupted.
    fn say(&mut self, prompt: Vec<u32>, splitter: Option<Splitter>) -> Outcome<Option<Turn>> {
        let mut sequence = prompt.clone();
        let mut showing = self.screen.begin(splitter);
        let quiet = self.interactive.then(Quiet::begin);
        let answer = generate_tokens(
            &mut self.session,
            Prompt::Tokens(prompt),
            &self.options,
            &mut |token| showing.token(&token.text),
        );
        let unread =
            answer.as_ref().is_ok_and(|a| a.finish == Finish::Cancelled && a.tokens.is_empty());
        let shown = if unread { None } else { Some(showing.end()) };
        drop(quiet);
        let answer = answer?;
        if answer.finish == Finish::Cancelled && !self.interactive {
            return Err(Stop::Interrupted);
        }
        let Some(shown) = shown else { return Ok(None) };
        let (said, splitter) = shown?;
        if self.args.verbose {
            aside(answer.summary(&self.engine));
        }
        let limit = answer.tokens.len();
        match answer.finish {
            Finish::Length => aside(format_args!(
                "cut after {limit} tokens: /continue goes on, /set max-tokens none lifts the limit"
            )),
            Finish::ContextFull => aside(format_args!("the context is full: {ROOM}")),
            Finish::Cancelled => aside("interrupted: /continue goes on"),
            _ => {}
        }
        sequence.extend(&answer.tokens);
        self.cut =
            matches!(answer.finish, Finish::Length | Finish::Cancelled | Finish::ContextFull)
                .then_some(Cut { tokens: sequence, splitter });
        self.last = Some(answer);
        Ok(Some(said))
    }

    /// Forgets what belongs to a conversation besides its turns.
    fn forget(&mut self) {
        self.session.clear();
        self.files.clear();
        self.last = None;
        self.cut = None;
    }
}

/// Advice for when the context is full.
const ROOM: &str =
    "/undo or /clear makes room, /rotate on forgets the oldest; delft chat --ctx N holds more";

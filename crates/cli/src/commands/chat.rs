//! `delft chat`: a conversation in the terminal, or line by line through a pipe.
//!
//! The whole conversation is the prompt of every turn; the session computes only what it does not hold yet. A model
//! without a chat template is given the plain text so far, so that a base model goes on with what was typed.

use std::io::{BufRead, Write};
use std::path::Path;

use delft::{Engine, Error, GenerateOptions, Prompt, Session};
use rustyline::error::ReadlineError;
use rustyline::{DefaultEditor, history::History};
use serde_json::{Value, json};

use super::run::message;
use crate::args::Chat;
use crate::generate::{Answer, generate};
use crate::terminal::{BOLD, Outcome, Stop, aside, note, report, stdin_is_terminal};
use crate::{load, sampling};

const HELP: &str = "\
/help               this list
/system [TEXT]      show or set the system message (none removes it)
/clear              forget the conversation
/reset              forget it, and return to the first system message and settings
/undo               take back the last question and its answer
/regen              answer the last question anew
/set [KEY VALUE]    show or change a setting, e.g. /set temp 0.7
/stats              speed, memory and context use
/save FILE          write the conversation to a file
/load FILE          go on with a saved one
/exit               leave (also Ctrl-D)
A line that ends with \\ goes on in the next one; \"\"\" begins and ends a block of lines.";

/// What the user and the model said. `turns` alternates between user and assistant, from a user on.
#[derive(Debug, Clone, Default, PartialEq)]
struct Conversation {
    system: Option<String>,
    turns: Vec<(Role, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    User,
    Assistant,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

impl Conversation {
    /// The conversation as chat templates read it; also what is saved.
    fn messages(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| message("system", text));
        system.chain(self.turns.iter().map(|(role, text)| message(role.name(), text))).collect()
    }

    /// The conversation as text to continue: its parts with a space between them where they bring none.
    fn text(&self) -> String {
        let mut text = self.system.clone().unwrap_or_default();
        for (_, part) in &self.turns {
            let apart = text.is_empty()
                || text.ends_with(char::is_whitespace)
                || part.starts_with(char::is_whitespace);
            text += if apart { "" } else { " " };
            text += part;
        }
        text
    }

    fn from_messages(place: &str, json: &Value) -> Result<Conversation, Error> {
        let wrong = |expected: &str, found: String| Error::new(place, expected, found);
        let messages = json["messages"].as_array();
        let messages = messages
            .ok_or_else(|| wrong("an object with a list \"messages\"", "none".to_string()))?;
        let mut conversation = Conversation::default();
        for entry in messages {
            let content = entry["content"].as_str();
            let content = content
                .ok_or_else(|| wrong("text in \"content\"", entry["content"].to_string()))?
                .to_string();
            let turns = conversation.turns.len();
            match entry["role"].as_str() {
                Some("system") if turns == 0 && conversation.system.is_none() => {
                    conversation.system = Some(content)
                }
                Some("user") if turns % 2 == 0 => conversation.turns.push((Role::User, content)),
                Some("assistant") if turns % 2 == 1 => {
                    conversation.turns.push((Role::Assistant, content))
                }
                _ => {
                    return Err(wrong(
                        "user and assistant in turn after at most one system message",
                        entry["role"].to_string(),
                    ));
                }
            }
        }
        // A question without its answer was interrupted; it can be asked again.
        conversation.turns.truncate(conversation.turns.len() / 2 * 2);
        Ok(conversation)
    }
}

/// A running chat.
struct Talk<'a> {
    args: &'a Chat,
    engine: &'a Engine,
    session: Session,
    options: GenerateOptions,
    conversation: Conversation,
    last: Option<Answer>,
}

pub(crate) fn run(args: &Chat) -> Outcome {
    let (engine, _) = load::engine(&args.load, args.verbose)?;
    let interactive = stdin_is_terminal();
    let mut talk = Talk {
        args,
        engine: &engine,
        session: engine.session(),
        options: sampling::options(&engine, &args.sampling),
        conversation: Conversation { system: args.system.clone(), turns: Vec::new() },
        last: None,
    };
    if args.verbose {
        aside(format_args!("sampling: {}", talk.options.sampling.describe()));
    }
    if interactive {
        note(format_args!(
            "{BOLD}{}{BOLD:#}: /help lists the commands, Ctrl-D leaves",
            engine.info().name
        ));
        if engine.chat_template().is_none() {
            aside("this model has no chat template: it continues what you type");
        }
    }
    let mut lines = Lines::new(interactive)?;
    while let Some(input) = lines.input()? {
        match talk.turn(&input) {
            Ok(true) => {}
            Ok(false) => break,
            // At a terminal a mistake costs a line, not the conversation.
            Err(Stop::Error(error)) if interactive => report(&error),
            Err(stop) => return Err(stop),
        }
    }
    lines.save();
    Ok(())
}

impl Talk<'_> {
    /// One input: a command or something to answer. False ends the chat.
    fn turn(&mut self, input: &str) -> Outcome<bool> {
        if let Some(command) = input.strip_prefix('/') {
            let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
            return self.command(name, rest.trim());
        }
        if !input.trim().is_empty() {
            self.answer(input.to_string())?;
        }
        Ok(true)
    }

    fn answer(&mut self, question: String) -> Outcome {
        self.conversation.turns.push((Role::User, question));
        let prompt = if self.engine.chat_template().is_some() {
            Prompt::Chat { messages: self.conversation.messages(), extra: serde_json::Map::new() }
        } else {
            Prompt::Text(self.conversation.text())
        };
        let mut out = std::io::stdout().lock();
        let answer = generate(&mut self.session, prompt, &self.options, &mut |piece| {
            out.write_all(piece.as_bytes())?;
            Ok(out.flush()?)
        });
        let answer = match answer {
            Ok(answer) => answer,
            Err(stop) => {
                // The question cannot be answered as things are; the conversation before it can go on.
                self.conversation.turns.pop();
                return Err(stop);
            }
        };
        if !answer.text.ends_with('\n') {
            writeln!(out)?;
            out.flush()?;
        }
        drop(out);
        if self.args.verbose {
            aside(answer.summary(self.engine));
        } else if matches!(answer.finish, delft::Finish::ContextFull) {
            aside("the context is full: /clear or /undo makes room, --ctx makes more");
        }
        self.conversation.turns.push((Role::Assistant, answer.text.clone()));
        self.last = Some(answer);
        Ok(())
    }

    fn command(&mut self, name: &str, rest: &str) -> Outcome<bool> {
        match name {
            "help" | "?" => say(HELP),
            "exit" | "quit" | "q" => return Ok(false),
            "system" if rest.is_empty() => {
                say(self.conversation.system.as_deref().unwrap_or("no system message"))
            }
            "system" => {
                self.conversation.system = Some(rest.to_string()).filter(|text| text != "none");
                say("the system message holds from the next answer on");
            }
            "clear" => {
                self.conversation.turns.clear();
                say("the conversation is forgotten");
            }
            "reset" => {
                self.conversation =
                    Conversation { system: self.args.system.clone(), turns: Vec::new() };
                self.options = sampling::options(self.engine, &self.args.sampling);
                self.session.clear();
                self.last = None;
                say("everything is as it was at the start");
            }
            "undo" => match self.take_back() {
                Some(question) => {
                    say(&format!("taken back: {}", question.lines().next().unwrap_or_default()))
                }
                None => return wrong("/undo", "a question to take back", "none"),
            },
            "regen" => match self.take_back() {
                Some(question) => {
                    // The same seed at the same place would give the same answer.
                    self.options.sampling.seed = self.options.sampling.seed.wrapping_add(1);
                    self.answer(question)?;
                }
                None => return wrong("/regen", "a question to answer", "none"),
            },
            "set" if rest.is_empty() => {
                for (name, value) in sampling::settings(&self.options) {
                    say(&format!("{name:<20}{value}"));
                }
            }
            "set" => {
                let (key, value) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
                match sampling::set(&mut self.options, key, value.trim()) {
                    Ok(()) => say(&format!("sampling: {}", self.options.sampling.describe())),
                    Err(problem) => {
                        return wrong(
                            &format!("/set {key}"),
                            problem.trim_start_matches("expected "),
                            value,
                        );
                    }
                }
            }
            "stats" => {
                let used = self.session.tokens().len();
                say(&format!("context: {used} of {} tokens", self.engine.info().context));
                if let Some(answer) = &self.last {
                    say(&answer.summary(self.engine));
                }
            }
            "save" | "load" if rest.is_empty() => {
                return wrong(&format!("/{name}"), "a file name", "none");
            }
            "save" => {
                let text = format!("{:#}\n", json!({ "messages": self.conversation.messages() }));
                std::fs::write(rest, text).map_err(|error| Error::io(rest, error))?;
                say(&format!("saved {} turns to {rest}", self.conversation.turns.len()));
            }
            "load" => {
                let text = crate::terminal::read_file(Path::new(rest))?;
                let json = serde_json::from_str(&text)
                    .map_err(|error| Error::new(rest, "a saved conversation", error))?;
                self.conversation = Conversation::from_messages(rest, &json)?;
                say(&format!("{} turns loaded", self.conversation.turns.len()));
            }
            _ => return wrong(&format!("/{name}"), "a command that /help lists", "an unknown one"),
        }
        Ok(true)
    }

    /// Removes the last question and its answer; gives the question.
    fn take_back(&mut self) -> Option<String> {
        let turns = &mut self.conversation.turns;
        let at = turns.iter().rposition(|(role, _)| *role == Role::User)?;
        let question = turns.get(at).map(|(_, text)| text.clone());
        turns.truncate(at);
        question
    }
}

/// What commands answer goes to stderr: stdout is the model's.
fn say(text: &str) {
    note(text);
}

/// A command that makes no sense: told at a terminal, an error in a pipe.
fn wrong(place: &str, expected: &str, found: &str) -> Outcome<bool> {
    let found = if found.is_empty() { "nothing" } else { found };
    Err(Error::new(place, expected, found).into())
}

/// Where input comes from: an edited line at a terminal, a plain one elsewhere.
enum Lines {
    Edited { editor: Box<DefaultEditor>, history: Option<std::path::PathBuf> },
    Plain,
}

impl Lines {
    fn new(interactive: bool) -> Outcome<Lines> {
        if !interactive {
            return Ok(Lines::Plain);
        }
        let config = rustyline::Config::builder().auto_add_history(false).max_history_size(1000);
        let editor = config.and_then(|config| DefaultEditor::with_config(config.build()));
        let mut editor =
            editor.map_err(|error| Error::new("the terminal", "line editing", error))?;
        let history = data_folder().map(|folder| folder.join("history"));
        if let Some(path) = &history {
            // There is none the first time.
            let _ = editor.load_history(path);
        }
        Ok(Lines::Edited { editor: Box::new(editor), history })
    }

    /// The next input, its lines joined; None at the end.
    fn input(&mut self) -> Outcome<Option<String>> {
        let Some(first) = self.line("> ")? else { return Ok(None) };
        let mut text = String::new();
        if let Some(rest) = first.trim_start().strip_prefix("\"\"\"") {
            let mut line = rest.to_string();
            loop {
                if let Some(end) = line.trim_end().strip_suffix("\"\"\"") {
                    text += end;
                    break;
                }
                text += &line;
                text.push('\n');
                match self.line(". ")? {
                    Some(next) => line = next,
                    None => break,
                }
            }
        } else {
            let mut line = first;
            while let Some(start) = line.strip_suffix('\\') {
                text += start;
                text.push('\n');
                match self.line(". ")? {
                    Some(next) => line = next,
                    None => line = String::new(),
                }
            }
            text += &line;
        }
        if let Lines::Edited { editor, .. } = self {
            let _ = editor.add_history_entry(text.trim_end());
        }
        Ok(Some(text))
    }

    fn line(&mut self, prompt: &str) -> Outcome<Option<String>> {
        match self {
            Lines::Edited { editor, .. } => match editor.readline(prompt) {
                Ok(line) => Ok(Some(line)),
                // Ctrl-C at the prompt drops what was typed, as shells do.
                Err(ReadlineError::Interrupted) => Ok(Some(String::new())),
                Err(ReadlineError::Eof) => Ok(None),
                Err(error) => Err(Error::new("the terminal", "a line", error).into()),
            },
            Lines::Plain => {
                let mut line = String::new();
                let read = std::io::stdin().lock().read_line(&mut line);
                if read.map_err(|error| Error::io("standard input", error))? == 0 {
                    return Ok(None);
                }
                let end = line.trim_end_matches(['\n', '\r']).len();
                line.truncate(end);
                Ok(Some(line))
            }
        }
    }

    /// Keeps the history for the next time. Whoever has no data folder has no history.
    fn save(&mut self) {
        if let Lines::Edited { editor, history: Some(path) } = self
            && !editor.history().is_empty()
            && path.parent().is_some_and(|folder| std::fs::create_dir_all(folder).is_ok())
            && let Err(error) = editor.save_history(path)
        {
            aside(format_args!("{}: the history was not saved: {error}", path.display()));
        }
    }
}

/// The folder for data that belongs to the user, by each system's custom.
fn data_folder() -> Option<std::path::PathBuf> {
    let set = |name: &str| {
        std::env::var_os(name).filter(|value| !value.is_empty()).map(std::path::PathBuf::from)
    };
    let base = if cfg!(windows) {
        set("APPDATA")
    } else if cfg!(target_os = "macos") {
        set("HOME").map(|home| home.join("Library").join("Application Support"))
    } else {
        set("XDG_DATA_HOME").or_else(|| set("HOME").map(|home| home.join(".local").join("share")))
    };
    base.map(|base| base.join("delft"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversations_survive_a_file() {
        let turns = vec![(Role::User, "a\nb".to_string()), (Role::Assistant, "c".to_string())];
        let conversation = Conversation { system: Some("s".to_string()), turns };
        let json = json!({ "messages": conversation.messages() });
        assert_eq!(Conversation::from_messages("f", &json), Ok(conversation));
        for bad in [
            json!({}),
            json!({ "messages": [{ "role": "assistant", "content": "x" }] }),
            json!({ "messages": [{ "role": "user" }] }),
        ] {
            assert!(Conversation::from_messages("f", &bad).is_err());
        }
    }
}

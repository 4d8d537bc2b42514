//! The commands of a chat: one table, from which help, completion and hints are made too.

use delft::Error;

use super::{Next, Talk, actions};
use crate::terminal::Outcome;

/// A command that is typed with a slash.
pub(super) struct Command {
    pub(super) name: &'static str,
    /// Other names, which are understood but not listed.
    aliases: &'static [&'static str],
    pub(super) argument: Argument,
    pub(super) usage: &'static str,
    pub(super) help: &'static str,
    run: fn(&mut Talk, Given) -> Outcome<Next>,
}

/// The argument after a command's name.
#[derive(Debug, Clone, Copy)]
pub(super) enum Argument {
    None,
    Text,
    File,
    /// A sampling setting and its value.
    Setting,
    Words(&'static [&'static str]),
}

/// The text typed after a command's name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Given<'a> {
    pub(super) text: &'a str,
    /// The name ended in `!`: do it without asking.
    pub(super) insists: bool,
}

pub(super) const COMMANDS: &[Command] = &[
    Command {
        name: "help",
        aliases: &["?", "h"],
        argument: Argument::None,
        usage: "",
        help: "this list",
        run: actions::help,
    },
    Command {
        name: "system",
        aliases: &[],
        argument: Argument::Text,
        usage: "[TEXT]",
        help: "show or set the system message (none removes it)",
        run: actions::system,
    },
    Command {
        name: "file",
        aliases: &[],
        argument: Argument::File,
        usage: "PATH",
        help: "put a file's text before the next message",
        run: actions::file,
    },
    Command {
        name: "clear",
        aliases: &["new"],
        argument: Argument::None,
        usage: "",
        help: "forget the conversation",
        run: actions::clear,
    },
    Command {
        name: "reset",
        aliases: &[],
        argument: Argument::None,
        usage: "",
        help: "forget it, and return to the first system message and settings",
        run: actions::reset,
    },
    Command {
        name: "undo",
        aliases: &[],
        argument: Argument::None,
        usage: "",
        help: "take back the last question and its answer",
        run: actions::undo,
    },
    Command {
        name: "regen",
        aliases: &["retry"],
        argument: Argument::None,
        usage: "",
        help: "answer the last question anew",
        run: actions::regen,
    },
    Command {
        name: "continue",
        aliases: &[],
        argument: Argument::None,
        usage: "",
        help: "go on with an answer that was cut",
        run: actions::go_on,
    },
    Command {
        name: "think",
        aliases: &[],
        argument: Argument::Words(&["on", "off", "show", "fold", "hide"]),
        usage: "[HOW]",
        help: "on, off: let the model reason or not; show, fold, hide: what is seen of it",
        run: actions::think,
    },
    Command {
        name: "set",
        aliases: &[],
        argument: Argument::Setting,
        usage: "[KEY [VALUE]]",
        help: "show or change a setting, e.g. /set temp 0.7, /set stop none, /set top-p default",
        run: actions::set,
    },
    Command {
        name: "stats",
        aliases: &[],
        argument: Argument::None,
        usage: "",
        help: "speed, memory and context use",
        run: actions::stats,
    },
    Command {
        name: "model",
        aliases: &["info"],
        argument: Argument::None,
        usage: "",
        help: "what the model is",
        run: actions::model,
    },
    Command {
        name: "rotate",
        aliases: &[],
        argument: Argument::Words(&["on"]),
        usage: "[on]",
        help: "what happens when the context is full; on: it forgets the oldest tokens",
        run: actions::rotate,
    },
    Command {
        name: "save",
        aliases: &[],
        argument: Argument::File,
        usage: "FILE",
        help: "write the conversation to a file (/save! replaces one without asking)",
        run: actions::save,
    },
    Command {
        name: "load",
        aliases: &[],
        argument: Argument::File,
        usage: "FILE",
        help: "go on with a saved one",
        run: actions::load,
    },
    Command {
        name: "copy",
        aliases: &[],
        argument: Argument::None,
        usage: "",
        help: "the last answer to the clipboard, if the terminal allows it",
        run: actions::copy,
    },
    Command {
        name: "exit",
        aliases: &["quit", "q", "bye"],
        argument: Argument::None,
        usage: "",
        help: "leave (also Ctrl-D)",
        run: |_, _| Ok(Next::Leave),
    },
];

/// The text below the list of commands.
pub(super) const AFTERWORD: &str = "\
The beginning of a name will do where it is clear. A line that ends with \\ goes on in the next one; \"\"\" begins and \
ends a block of lines. Ctrl-C ends an answer, and leaves if it is pressed twice at an empty line.";

/// The command that an input is, and what follows its name; None if it is text. A first word with a
/// second slash is a path or a comment, and text.
pub(super) fn parse(input: &str) -> Option<(&str, &str)> {
    let command = input.strip_prefix('/')?;
    let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    (!name.contains('/')).then(|| (name, rest.trim()))
}

/// Runs a command by its name, or by the beginning of it.
pub(super) fn run(talk: &mut Talk, name: &str, text: &str) -> Outcome<Next> {
    let bare = name.strip_suffix('!').unwrap_or(name);
    (find(bare)?.run)(talk, Given { text, insists: name.ends_with('!') })
}

fn find(name: &str) -> Result<&'static Command, Error> {
    let typed = name.to_lowercase();
    let exact = |c: &&Command| c.name == typed || c.aliases.contains(&typed.as_str());
    if let Some(command) = COMMANDS.iter().find(exact) {
        return Ok(command);
    }
    let place = format!("/{name}");
    let begun: Vec<&Command> = COMMANDS.iter().filter(|c| c.name.starts_with(&typed)).collect();
    match begun.as_slice() {
        _ if typed.is_empty() => Err(Error::new(place, "a command that /help lists", "none")),
        [command] => Ok(command),
        [] => Err(Error::new(place, "a command that /help lists", "an unknown one")),
        _ => {
            let names: Vec<String> = begun.iter().map(|c| format!("/{}", c.name)).collect();
            Err(Error::new(place, "one command", names.join(", ")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_found_by_any_clear_beginning() {
        let cases = [
            ("help", Ok("help")),
            ("HELP", Ok("help")),
            ("h", Ok("help")),
            ("bye", Ok("exit")),
            ("q", Ok("exit")),
            ("cl", Ok("clear")),
            ("con", Ok("continue")),
            ("t", Ok("think")),
            ("s", Err("/system, /set, /stats, /save")),
            ("c", Err("/clear, /continue, /copy")),
            ("nonsense", Err("an unknown one")),
            ("helpx", Err("an unknown one")),
            ("", Err("none")),
        ];
        for (typed, expected) in cases {
            let found = find(typed).map(|command| command.name).map_err(|error| error.found);
            assert_eq!(found, expected.map_err(str::to_string), "{typed}");
        }
        let names = |c: &Command| c.aliases.iter().copied().chain([c.name]);
        let mut all: Vec<&str> = COMMANDS.iter().flat_map(names).collect();
        all.sort_unstable();
        assert!(all.windows(2).all(|two| two[0] != two[1]), "every name has one meaning");
    }

    #[test]
    fn paths_and_comments_are_text() {
        assert_eq!(parse("/set temp  0.5 "), Some(("set", "temp  0.5")));
        assert_eq!(parse("/"), Some(("", "")));
        assert_eq!(parse("/etc/passwd is what?"), None);
        assert_eq!(parse("// a comment"), None);
        assert_eq!(parse("hello /exit"), None);
    }
}

//! Tab and hints at the prompt: commands, their arguments, names of files.

use std::path::Path;

use super::actions::settings;
use super::commands::{Argument, COMMANDS, Command};
use super::conversation::path;

/// The text that is listed, and the text that replaces the word.
pub(super) type Candidate = (String, String);

/// The possible continuations of a line that ends at the cursor, and where in the line they begin.
pub(super) fn complete(line: &str) -> (usize, Vec<Candidate>) {
    let Some(command) = line.strip_prefix('/') else { return (0, Vec::new()) };
    let Some((name, rest)) = command.split_once(' ') else {
        let names = COMMANDS.iter().filter(|c| begins(c.name, command));
        return (0, names.map(completed).collect());
    };
    let typed = rest.trim_start();
    let start = line.len() - typed.len();
    let exact = |c: &&Command| c.name == name.trim_end_matches('!').to_lowercase();
    let Some(command) = COMMANDS.iter().find(exact) else { return (0, Vec::new()) };
    let words = |words: Vec<&str>, end: &str| {
        let fit = words.into_iter().filter(|word| begins(word, typed));
        fit.map(|word| (word.to_string(), format!("{word}{end}"))).collect()
    };
    match command.argument {
        Argument::None | Argument::Text => (0, Vec::new()),
        Argument::Words(list) => (start, words(list.to_vec(), "")),
        Argument::Setting => (start, words(settings(), " ")),
        Argument::File => (start, files(typed)),
    }
}

/// A command with the blank that its argument needs.
fn completed(command: &Command) -> Candidate {
    let end = if matches!(command.argument, Argument::None) { "" } else { " " };
    (format!("/{}", command.name), format!("/{}{end}", command.name))
}

fn begins(word: &str, typed: &str) -> bool {
    word.starts_with(&typed.to_lowercase())
}

/// Files that begin as typed, folders with a slash; hidden ones only if their dot is typed.
fn files(typed: &str) -> Vec<Candidate> {
    let cut = typed.rfind('/').map_or(0, |at| at + 1);
    let (folder, begun) = typed.split_at(cut);
    let place = if folder.is_empty() { Path::new(".").to_path_buf() } else { path(folder) };
    let Ok(entries) = std::fs::read_dir(place) else { return Vec::new() };
    let candidate = |entry: std::fs::DirEntry| {
        let name = entry.file_name().into_string().ok()?;
        let hidden = name.starts_with('.') && !begun.starts_with('.');
        // Names that would steer the terminal, or end the line, are not offered.
        if hidden || !name.starts_with(begun) || name.contains(char::is_control) {
            return None;
        }
        let end = if entry.path().is_dir() { "/" } else { "" };
        Some((format!("{name}{end}"), format!("{folder}{name}{end}")))
    };
    let mut found: Vec<Candidate> = entries.flatten().filter_map(candidate).collect();
    found.sort();
    found
}

/// The suggested continuation of a line, shown after the cursor.
#[derive(Debug, PartialEq)]
pub(super) struct Hint {
    text: String,
    /// So much of it is typed by the right arrow; the rest only explains.
    typed: usize,
}

impl rustyline::hint::Hint for Hint {
    fn display(&self) -> &str {
        &self.text
    }

    fn completion(&self) -> Option<&str> {
        Some(&self.text[..self.typed]).filter(|text| !text.is_empty())
    }
}

/// The rest of the only command that a line can become, and how that is used.
pub(super) fn hint(line: &str) -> Option<Hint> {
    let name = line.strip_prefix('/').filter(|name| !name.is_empty())?;
    let bare = name.trim_end();
    let mut fit =
        COMMANDS.iter().filter(|c| c.name == bare || (bare == name && begins(c.name, name)));
    let (first, more) = (fit.next()?, fit.next());
    let command =
        if first.name == bare { first } else { Some(first).filter(|_| more.is_none())? };
    let rest = &command.name[bare.len()..];
    let gap = if bare.len() < name.len() || command.usage.is_empty() { "" } else { " " };
    Some(Hint { text: format!("{rest}{gap}{}", command.usage), typed: rest.len() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(line: &str) -> Vec<String> {
        let (start, candidates) = complete(line);
        candidates.into_iter().map(|(_, text)| format!("{}{text}", &line[..start])).collect()
    }

    #[test]
    fn tab_completes_commands_and_arguments() {
        struct Case {
            line: &'static str,
            completed: &'static [&'static str],
            why: &'static str,
        }
        let cases = [
            Case { line: "/cl", completed: &["/clear"], why: "a command" },
            Case { line: "/SA", completed: &["/save "], why: "in capitals; its argument follows" },
            Case { line: "/re", completed: &["/reset", "/regen"], why: "two commands" },
            Case { line: "/set top", completed: &["/set top-k ", "/set top-p "], why: "settings" },
            Case { line: "/think s", completed: &["/think show"], why: "words" },
            Case { line: "/clear x", completed: &[], why: "no argument" },
            Case { line: "/nonsense x", completed: &[], why: "no command" },
            Case { line: "hello /cl", completed: &[], why: "text" },
            Case { line: "", completed: &[], why: "nothing" },
        ];
        for Case { line, completed, why } in cases {
            assert_eq!(listed(line), completed, "{why}");
        }
    }

    #[test]
    fn tab_completes_names_of_files() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["talk.json", "tale two.txt", ".hidden", "other"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        std::fs::create_dir(folder.path().join("tales")).unwrap();
        let at = folder.path().display();
        for (typed, found) in
            [("ta", &["tale two.txt", "tales/", "talk.json"][..]), (".", &[".hidden"]), ("x", &[])]
        {
            let expected: Vec<String> =
                found.iter().map(|name| format!("/load {at}/{name}")).collect();
            assert_eq!(listed(&format!("/load {at}/{typed}")), expected, "{typed}");
        }
        assert_eq!(listed(&format!("/save! {at}/oth")), [format!("/save! {at}/other")]);
        assert!(listed("/file /nowhere/at/all/").is_empty());
    }

    #[test]
    fn hints_show_how_a_command_is_used() {
        let hinted = |line: &str| hint(line).map(|hint| (hint.text.clone(), hint.typed));
        let some = |text: &str, typed| Some((text.to_string(), typed));
        assert_eq!(hinted("/und"), some("o", 1));
        assert_eq!(hinted("/loa"), some("d FILE", 1));
        assert_eq!(hinted("/load"), some(" FILE", 0));
        assert_eq!(hinted("/load "), some("FILE", 0));
        assert_eq!(hinted("/load x"), None);
        assert_eq!(hinted("/s"), None);
        assert_eq!(hinted("/"), None);
        assert_eq!(hinted("hello"), None);
    }
}

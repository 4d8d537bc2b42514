//! The flags that a run was begun with, so that it can be resumed without them: `arguments.json` in
//! its folder, an object of lists of values by flag.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, Parser};
use delft::Error;
use delft::formats::Aside;

use crate::args::{Cli, Command, spelled};
use crate::terminal::{Outcome, Stop, read_file};
use crate::tuning::Tune;

const FILE: &str = "arguments.json";
/// Flags that are each command's own.
const OWN: &[&str] = &["resume", "out", "json", "yes"];

/// Values by flag; a switch has none.
type Flags = BTreeMap<String, Vec<String>>;

/// The flags of a command line.
fn given(words: impl Iterator<Item = OsString>) -> Outcome<Flags> {
    let matches = Cli::command().try_get_matches_from(spelled(words));
    let matches = matches.map_err(|e| Stop::Usage(e.to_string()))?;
    matches.subcommand().map_or_else(|| Ok(Flags::new()), |(name, matches)| flags(name, matches))
}

fn flags(command: &str, matches: &ArgMatches) -> Outcome<Flags> {
    let mut flags = Flags::new();
    let cli = Cli::command();
    for argument in cli.find_subcommand(command).into_iter().flat_map(clap::Command::get_arguments)
    {
        let id = argument.get_id().as_str();
        if OWN.contains(&id) || matches.value_source(id) != Some(ValueSource::CommandLine) {
            continue;
        }
        let takes = argument.get_action().takes_values();
        let values = matches.get_raw(id).filter(|_| takes).into_iter().flatten();
        let text = |value: &OsStr| {
            let odd = || Stop::Usage(format!("{id}: expected UTF-8, found other bytes"));
            value.to_str().map(str::to_owned).ok_or_else(odd)
        };
        // The model by its place or by its option is the same.
        let name = argument.get_long().unwrap_or("model");
        flags.insert(name.to_owned(), values.map(text).collect::<Outcome<_>>()?);
    }
    Ok(flags)
}

/// The flags of a run that begins, as its folder keeps them.
pub(in crate::commands) struct Noted(String);

impl Noted {
    /// Those of a command line.
    pub(in crate::commands) fn new(words: impl Iterator<Item = OsString>) -> Outcome<Noted> {
        let flags = serde_json::to_string_pretty(&given(words)?);
        Ok(Noted(flags.map_err(|e| Error::new(FILE, "flags", e))? + "\n"))
    }

    /// Writes them to the folder of the run.
    pub(in crate::commands) fn write(&self, folder: &Path) -> Result<(), Error> {
        Aside::whole(&folder.join(FILE), self.0.as_bytes())
    }
}

/// The flags that the run in a folder was begun with, where the command line says nothing else; the
/// command line alone where the folder has no flags.
///
/// # Errors
/// A file that has no flags of this version.
pub(super) fn resumed(args: &Tune, folder: &Path) -> Outcome<Option<Tune>> {
    let path = folder.join(FILE);
    if !path.exists() {
        return Ok(None);
    }
    let wrong = |found: String| Error::new(path.display(), "the flags of delft tune", found);
    let text = read_file(&path)?;
    let mut flags: Flags = serde_json::from_str(&text).map_err(|e| wrong(e.to_string()))?;
    flags.extend(given(std::env::args_os())?);
    let mut words = vec!["delft".to_owned(), "tune".to_owned()];
    for (name, values) in flags {
        match values[..] {
            [] => words.push(format!("--{name}")),
            _ => words.extend(values.iter().map(|value| format!("--{name}={value}"))),
        }
    }
    let mut cli = Cli::try_parse_from(words).map_err(|e| wrong(first_line(&e.to_string())))?;
    cli.command.settle()?;
    let Command::Tune(mut tune) = cli.command else { return Ok(None) };
    (tune.resume, tune.out, tune.json) = (true, args.out.clone(), args.json);
    tune.model.yes = args.model.yes;
    Ok(Some(tune))
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

//! `delft man`: manual pages, made of the same words as `--help`.

use std::path::Path;

use clap::{Command, CommandFactory};
use delft::Error;

use crate::args::Cli;
use crate::terminal::{Outcome, aside};

pub(crate) fn run(folder: &Path) -> Outcome {
    std::fs::create_dir_all(folder).map_err(|error| Error::io(folder.display(), error))?;
    let pages = pages();
    for (name, page) in &pages {
        let path = folder.join(name);
        std::fs::write(&path, page).map_err(|error| Error::io(path.display(), error))?;
    }
    aside(format_args!("{} manual pages in {}", pages.len(), folder.display()));
    Ok(())
}

/// Each page by its file's name.
fn pages() -> Vec<(String, Vec<u8>)> {
    let mut delft = Cli::command();
    // Options that all commands have are spread to them only now.
    delft.build();
    let commands = delft.get_subcommands().filter(|command| command.get_name() != "help");
    std::iter::once(&delft).chain(commands).map(page).collect()
}

fn page(command: &Command) -> (String, Vec<u8>) {
    // Building gave each command the name that its page has: `delft-run`.
    let name = command.get_display_name().unwrap_or(command.get_name());
    let mut text = Vec::new();
    // Writing to memory does not fail.
    let _ = clap_mangen::Man::new(command.clone()).manual("Delft").render(&mut text);
    (format!("{name}.1"), text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_has_a_page_with_its_options() {
        let pages = pages();
        let page = |name: &str| {
            let found = pages.iter().find(|(file, _)| file == name);
            String::from_utf8(found.unwrap_or_else(|| panic!("{name}")).1.clone()).unwrap()
        };
        for command in Cli::command().get_subcommands() {
            let text = page(&format!("delft-{}.1", command.get_name()));
            assert!(text.contains(".TH"), "{}", command.get_name());
        }
        assert!(page("delft-run.1").contains("temp"));
        assert!(page("delft.1").contains("HF_HOME"));
    }
}

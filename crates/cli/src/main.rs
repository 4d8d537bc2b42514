//! The `delft` command: parses the command line, runs one command, and turns how it ended into an exit status.
//!
//! 0: done, or nobody reads the output any more. 1: an error, told in one line on stderr. 2: a command line that makes
//! no sense. 130: interrupted.

mod args;
mod commands;
mod generate;
mod interrupt;
mod load;
mod machine;
mod progress;
mod sampling;
mod terminal;

use std::io::Write;
use std::process::ExitCode;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use terminal::{Outcome, Stop, report};

fn main() -> ExitCode {
    std::panic::set_hook(Box::new(|panic| {
        // The last net: nothing is known to end here. One line, and no half-dead threads behind it.
        let at = panic
            .location()
            .map(|place| format!("{}:{}", place.file(), place.line()))
            .unwrap_or_default();
        let what = panic.payload();
        let what = what
            .downcast_ref::<&str>()
            .copied()
            .or_else(|| what.downcast_ref::<String>().map(String::as_str));
        let what = terminal::harmless(what.unwrap_or("a panic"));
        report(&format_args!("internal error at {at}: {what} (hint: please report this)"));
        std::process::exit(1);
    }));
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version come this way too; whether anybody reads them does not matter.
            let _ = error.print();
            return ExitCode::from(error.exit_code() as u8);
        }
    };
    match run(cli.command) {
        Ok(()) | Err(Stop::Closed) => ExitCode::SUCCESS,
        Err(Stop::Error(error)) => {
            report(&error);
            ExitCode::from(1)
        }
        Err(Stop::Usage(problem)) => {
            report(&problem);
            ExitCode::from(2)
        }
        Err(Stop::Interrupted) => ExitCode::from(interrupt::INTERRUPTED),
    }
}

fn run(command: Command) -> Outcome {
    match command {
        Command::Run(args) => commands::run::run(&args),
        Command::Chat(args) => commands::chat::run(&args),
        Command::Pull(args) => commands::pull::run(&args),
        Command::List(args) => commands::list::run(&args),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Tokenize(args) => commands::tokenize::run(&args),
        Command::Logits(args) => commands::logits::run(&args),
        Command::Bench(args) => commands::bench::run(&args),
        Command::WhySlow(args) => commands::why_slow::run(&args),
        Command::Perplexity(args) => commands::perplexity::run(&args),
        Command::Completions { shell } => {
            // Into memory first: the generator would panic on a closed pipe.
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "delft", &mut script);
            let mut out = std::io::stdout().lock();
            out.write_all(&script)?;
            Ok(out.flush()?)
        }
    }
}

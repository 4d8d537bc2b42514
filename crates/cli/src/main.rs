//! The `delft` command: parses the command line, runs one command, and turns how it ended into an
//! exit status.
//!
//! 0: done, or the reader of the output has gone. 1: an error, told in one line on stderr. 2: a
//! command line that makes no sense. 130: interrupted.

mod args;
mod client;
mod commands;
mod environment;
mod fetch;
mod generate;
mod grammar;
mod interrupt;
mod load;
mod logprobs;
mod machine;
mod markdown;
mod progress;
mod prompt;
mod quiet;
mod ranks;
mod sampling;
mod terminal;
mod tuning;
mod waiting;
mod words;
mod wrap;

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
            .map(|place| format!("{}:{}", short(place.file()), place.line()))
            .unwrap_or_default();
        let what = match delft::formats::words_of(panic.payload()) {
            "" => "a panic",
            words => words,
        };
        let what = terminal::harmless(what);
        report(&format_args!("internal error at {at}: {what} (hint: please report this)"));
        quiet::end();
        std::process::exit(1);
    }));
    files_may_be_limited();
    let arguments = args::spelled(std::env::args_os());
    let mut cli = match Cli::try_parse_from(&arguments) {
        Ok(cli) => cli,
        Err(mut error) => {
            let hint = words::advice(&mut error, &arguments);
            // Help and version come this way too; whether anybody reads them does not matter.
            let _ = error.print();
            if let Some(hint) = hint.filter(|_| error.use_stderr()) {
                terminal::note(hint);
            }
            return ExitCode::from(error.exit_code() as u8);
        }
    };
    match cli.command.settle().and_then(|()| ranks::run(cli.command, run)) {
        Ok(()) | Err(Stop::Closed) => ExitCode::SUCCESS,
        Err(Stop::Error(error)) => {
            report(&terminal::line(&error));
            ExitCode::from(1)
        }
        Err(Stop::Usage(problem)) => {
            report(&problem);
            ExitCode::from(2)
        }
        Err(Stop::Interrupted) => ExitCode::from(interrupt::INTERRUPTED),
    }
}

/// Where a limit on the size of files is passed (`ulimit -f`), a write fails like one to a full
/// disk, and is told so: the signal that would end the program first is only noted.
fn files_may_be_limited() {
    #[cfg(unix)]
    {
        let noted = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        // Where it cannot be registered the system's own way stays.
        let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, noted);
    }
}

/// A source file as its own package names it: where the program was built is nobody's business.
fn short(file: &str) -> &str {
    // The registry's folder has a subfolder for each registry.
    let packaged = file.split_once("/registry/src/").or(file.split_once("\\registry\\src\\"));
    match packaged.and_then(|(_, path)| path.split_once(['/', '\\'])) {
        Some((_, path)) => path,
        None => ["/crates/", "/library/"]
            .iter()
            .find_map(|part| file.rfind(part).map(|at| &file[at + 1..]))
            .unwrap_or(file),
    }
}

fn run(command: Command) -> Outcome {
    match command {
        Command::Run(args) => commands::run::run(&args),
        Command::Chat(args) => commands::chat::run(&args),
        Command::Batch(args) => commands::batch::run(&args),
        Command::Serve(args) => commands::serve::run(&args),
        Command::Pull(args) => commands::pull::run(&args),
        Command::List(args) => commands::list::run(&args),
        Command::Ps(args) => commands::ps::run(&args),
        Command::Stop(args) => commands::stop::run(&args),
        Command::Replay(args) => commands::replay::run(&args),
        Command::Show(args) => commands::show::run(&args),
        Command::Rm(args) => commands::rm::run(&args),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Tune(args) => commands::tune::run(&args),
        Command::Eval(args) => commands::eval::run(&args),
        Command::Fuse(args) => commands::fuse::run(&args),
        Command::Embed(args) => commands::embed::run(&args),
        Command::Classify(args) => commands::classify::run(&args),
        Command::Tokenize(args) => commands::tokenize::run(&args),
        Command::Logits(args) => commands::logits::run(&args),
        Command::Bench(args) => commands::bench::run(&args),
        Command::WhySlow(args) => commands::why_slow::run(&args),
        Command::Perplexity(args) => commands::perplexity::run(&args),
        Command::Compare(args) => commands::compare::run(&args),
        Command::Verify(args) => commands::verify::run(&args),
        Command::Convert(args) => commands::convert::convert_to_gguf(&args),
        Command::Quantize(args) => commands::convert::quantize(&args),
        Command::Imatrix(args) => commands::imatrix::run(&args),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Man { folder } => commands::man::run(&folder),
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

#[cfg(test)]
mod tests {
    use super::short;

    #[test]
    fn source_files_are_named_without_the_builder_s_folders() {
        let cases = [
            (
                "/home/x/.cargo/registry/src/index.crates.io-19/tokenizers-0.23.2/src/a.rs",
                "tokenizers-0.23.2/src/a.rs",
            ),
            ("C:\\Users\\x\\.cargo\\registry\\src\\y\\b-1.0\\src\\a.rs", "b-1.0\\src\\a.rs"),
            ("/home/x/delft/crates/hub/src/lib.rs", "crates/hub/src/lib.rs"),
            ("crates/hub/src/lib.rs", "crates/hub/src/lib.rs"),
            ("/rustc/0123/library/core/src/option.rs", "library/core/src/option.rs"),
            ("src/main.rs", "src/main.rs"),
        ];
        for (file, shown) in cases {
            assert_eq!(short(file), shown);
        }
    }
}

//! `tile`: builds, tests, measures and inspects the kernels that the operations list.

mod bench;
mod build;
mod diff;
mod inspect;
mod list;
mod metallib;
mod ptx;
mod select;
mod test;

use clap::{Parser, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::process::ExitCode;

/// Builds, tests, measures and inspects Delft's kernels.
#[derive(Parser)]
#[command(name = "tile", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write kernels as source text, binaries, a manifest and typed wrappers.
    Build(build::Options),
    /// Run the kernels' cases and compare with their references.
    Test {
        /// Only kernels whose name or family contains this.
        filter: Option<String>,
        /// The device that executes them.
        #[arg(long, value_enum, default_value = "interp")]
        on: Runner,
    },
    /// Time the kernels on a GPU, beside its measured roof.
    Bench {
        /// Only kernels whose name or family contains this.
        filter: Option<String>,
        /// One JSON object per line.
        #[arg(long)]
        json: bool,
    },
    /// Show a kernel after every pass, its text, and what it costs.
    Inspect {
        /// A kernel's name, or part of one.
        kernel: String,
        /// Only this target.
        #[arg(long, value_enum)]
        target: Option<TargetArg>,
        /// Only the emitted text.
        #[arg(long)]
        text: bool,
    },
    /// List every case, and every kernel with digests of its texts in which its own name does not
    /// count, and digests of what stands before all kernels.
    List {
        /// Only kernels whose name or family contains this.
        filter: Option<String>,
    },
    /// Compare two builds: kernels added, removed, with another contract or another text.
    Diff {
        /// A folder that `tile build` wrote.
        before: PathBuf,
        /// Another; left out: the kernels as they are now.
        after: Option<PathBuf>,
    },
}

/// The kinds of files that `tile build` writes.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Emit {
    /// Everything that this machine has the tools for.
    All,
    /// Metal text, one file per kernel.
    Msl,
    /// A library of Metal for each platform, where there are Apple's tools, and the list of its
    /// texts.
    Metallib,
    /// CUDA text, one file per kernel.
    Cuda,
    /// PTX, one file per kernel and architecture, where there is nvcc.
    Ptx,
    /// `manifest.json`.
    Manifest,
    /// `kernels.rs`.
    Rust,
    /// `Kernels.swift`, and the `Launch.swift` that it is written over.
    Swift,
}

/// The runner of test cases.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Runner {
    /// The interpreter: as written, and lowered for every target.
    Interp,
    /// The emitted Metal text, compiled for this CPU.
    Msl,
    /// The emitted CUDA text, compiled for this CPU.
    CudaText,
    /// An NVIDIA GPU.
    Cuda,
}

/// A target of the passes.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TargetArg {
    /// The interpreter.
    Interp,
    /// Metal.
    Metal,
    /// CUDA.
    Cuda,
}

/// The result of a command: whether all went well, or one line that names the failure.
type Outcome = Result<bool, String>;

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Build(options) => build::run(&options),
        Command::Test { filter, on } => test::run(filter.as_deref(), on),
        Command::Bench { filter, json } => bench::run(filter.as_deref(), json),
        Command::Inspect { kernel, target, text } => inspect::run(&kernel, target, text),
        Command::List { filter } => list::run(filter.as_deref()),
        Command::Diff { before, after } => diff::run(&before, after.as_deref()),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(line) => {
            eprintln!("error: {line}");
            ExitCode::FAILURE
        }
    }
}

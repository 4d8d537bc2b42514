//! The command line: every command, flag and help text. The commands and what they share are here;
//! what each has besides, in the files below.
//!
//! Flags have the names that llama.cpp's and Ollama's users know; where those have several, the
//! others are hidden aliases. Which words name a model and which a prompt: `words`.

mod familiar;
mod files;
mod generate;
mod numbers;
mod serving;
mod values;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use delft::DeviceSpec;

use crate::environment;
use crate::grammar::GrammarArgs;
use crate::tuning::{Eval, Tune};

pub(crate) use familiar::{elsewhere, spelled};
pub(crate) use files::{
    Convert, Doctor, Fuse, Imatrix, Inspect, List, Output, Pull, Quantize, Rm, Show,
};
pub(crate) use generate::{Batch, Chat, Run};
pub(crate) use numbers::{
    Bench, Classify, Compare, Embed, Logits, Perplexity, PoolingArg, Tokenize, Verify, WhySlow,
};
pub(crate) use serving::{AddressArgs, Ps, Replay, Serve, StopModels};
pub(crate) use values::*;

/// Runs language models on the machine in front of you.
#[derive(Debug, Parser)]
#[command(
    name = "delft",
    version,
    max_term_width = 100,
    after_help = format!("{EXAMPLES}\n\ndelft --help lists exit codes and environment variables too."),
    after_long_help = format!("{EXAMPLES}\n\n{EXIT_CODES}\n\n{}", environment::help())
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
A model is a .gguf file, a Hugging Face folder, a short name (qwen3:0.6b), or a hub id: org/name, org/name:file.gguf, \
org/name:Q4_K_M, each with an optional @revision. It is the first word, or behind -m; left out, it is the bundled story \
model.

Examples:
  delft run                                     a story from the bundled model
  delft run \"Once upon a time, a fox\"           continue a text
  delft run qwen3:0.6b \"Why is the sky blue?\"   ask a model of the hub
  delft chat Qwen/Qwen3-0.6B                    talk to one
  git diff | delft run model.gguf \"Explain:\"    a prompt, and what it is about
  delft inspect model.gguf --ctx 8192           what it is and the memory it needs";

const EXIT_CODES: &str = "\
Exit codes:
  0    done, or nobody reads the output any more
  1    an error, told in one line on standard error
  2    a command line that makes no sense
  130  interrupted by Ctrl-C; what was written until then stays";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Generate text from a prompt
    #[command(alias = "generate")]
    Run(Run),
    /// Talk with a model
    Chat(Chat),
    /// Answer a file of requests, one JSON object a line
    Batch(Batch),
    /// Serve models over HTTP: the OpenAI, Anthropic and Ollama interfaces
    Serve(Serve),
    /// Download a model from the Hugging Face hub into the shared cache
    #[command(alias = "download")]
    Pull(Pull),
    /// List the models on this machine
    #[command(aliases = ["ls", "models"])]
    List(List),
    /// List the models that a server has loaded
    Ps(Ps),
    /// Have a server unload models
    Stop(StopModels),
    /// Ask again what a server recorded, and tell what is answered otherwise
    Replay(Replay),
    /// Show a model in a few lines
    Show(Show),
    /// Remove models from the cache
    #[command(aliases = ["remove", "delete"])]
    Rm(Rm),
    /// Show a model's metadata, tensors and memory needs without loading it
    Inspect(Inspect),
    /// Teach a model from examples: writes an adapter
    Tune(Tune),
    /// Measure a model over examples: loss, exact answers, multiple choice
    Eval(Eval),
    /// Write a model with an adapter merged into it
    Fuse(Fuse),
    /// Turn texts into embeddings
    Embed(Embed),
    /// Tell which of some labels a model holds to follow each text
    Classify(Classify),
    /// Turn text into token ids
    Tokenize(Tokenize),
    /// Print the logits that follow given tokens
    Logits(Logits),
    /// Measure speed: prompt processing and generation, in tokens per second
    Bench(Bench),
    /// Tell where the time of prefill and decode goes, and what holds them back
    WhySlow(WhySlow),
    /// Measure the perplexity of a text
    Perplexity(Perplexity),
    /// Tell how far a model's predictions are from another's over a text
    Compare(Compare),
    /// Check a model layer by layer against the values of a reference
    Verify(Verify),
    /// Write a model folder as a GGUF file
    Convert(Convert),
    /// Write a model as a GGUF file with smaller types
    #[command(alias = "quantise")]
    Quantize(Quantize),
    /// Measure over a text how much each weight matters, for quantize --imatrix
    Imatrix(Imatrix),
    /// Tell what was found on this machine, what will be used, and why
    Doctor(Doctor),
    /// Print a completion script for a shell
    #[command(
        after_help = "Example:\n  delft completions bash > ~/.local/share/bash-completion/completions/delft"
    )]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Write the manual pages, one for each command
    #[command(after_help = "Example:\n  delft man ~/.local/share/man/man1 && man delft")]
    Man {
        /// The folder to write them to
        folder: PathBuf,
    },
}

/// Which model.
#[derive(Debug, Clone, Args)]
pub(crate) struct ModelArg {
    /// The model: a .gguf file, a folder, a short name (qwen3:0.6b) or a hub id (org/name:Q4_K_M)
    /// [default: the bundled model]
    #[arg(value_name = "MODEL", index = 1, help_heading = None::<&'static str>)]
    pub(crate) named: Option<String>,
    /// The model by option instead; then every word belongs to the prompt, where a command has one
    #[arg(short, long, value_name = "MODEL", alias = "hf-repo")]
    pub(crate) model: Option<String>,
    /// Fetch a model that is not on this machine without asking
    #[arg(short, long)]
    pub(crate) yes: bool,
}

/// How it is loaded.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Loading")]
pub(crate) struct LoadArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// Most tokens of prompt and answer together [default: what the model was trained for, or less
    /// where memory is short]
    #[arg(short, long, alias = "ctx-size", value_name = "N", value_parser = positive(), allow_negative_numbers = true)]
    pub(crate) ctx: Option<u64>,
    /// Once the context is full, forget the oldest tokens instead of stopping
    #[arg(long)]
    pub(crate) rotate: bool,
    /// Threads [default: the physical cores; fewer write text while other programs use some of
    /// them]
    #[arg(short, long, value_name = "N", value_parser = whole(1..=1024), allow_negative_numbers = true)]
    pub(crate) threads: Option<u64>,
    /// Where to compute: auto (a GPU that the model fits, else the CPU), cpu, cuda, cuda:N, metal,
    /// or several GPUs that share the model: cuda:0,1
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceSpec::Auto)]
    pub(crate) device: DeviceSpec,
    /// Layers on the GPU, or on all GPUs together: the last N with the model's head; those before
    /// them run on the CPU [default: all]
    #[arg(long, alias = "n-gpu-layers", value_name = "N", value_parser = whole(0..=MOST), allow_negative_numbers = true)]
    pub(crate) gpu_layers: Option<u64>,
    #[command(flatten)]
    pub(crate) experts: ExpertArgs,
    /// How several GPUs share the model [default: layer]. With tensor and one device, each process
    /// that a launcher (torchrun, mpirun, srun) starts drives one of them
    #[arg(long, value_enum)]
    pub(crate) split_mode: Option<SplitArg>,
    /// How a GPU is given its work [default: graph]
    #[arg(long, value_enum)]
    pub(crate) dispatch: Option<DispatchArg>,
    /// Tokens of a prompt that are computed together [default: 512, on NVIDIA GPUs 2048]
    #[arg(long, aliases = ["ubatch-size", "batch-size"], value_name = "N", value_parser = whole(1..=MOST), allow_negative_numbers = true)]
    pub(crate) chunk: Option<u64>,
    /// On a GPU, compute each token as serve and batch do, among many: an answer then has the same
    /// bits as theirs, and one alone takes longer
    #[arg(long)]
    pub(crate) as_served: bool,
    /// Element type of the key/value cache: q8_0 is about half of f16, turbo, of 4 bits, 9/32
    #[arg(long, value_enum, default_value_t = CacheArg::F16)]
    pub(crate) cache_type: CacheArg,
    /// Load weights that are NaN or infinite as they are, instead of refusing the model
    #[arg(long)]
    pub(crate) allow_nan: bool,
    /// Load a model though its configuration has this key, which Delft does not know; may be given
    /// several times
    #[arg(long, value_name = "KEY")]
    pub(crate) ignore_key: Vec<String>,
    /// An adapter on top of the model: a folder of PEFT or mlx-lm, or a GGUF file; with =SCALE to
    /// apply it more or less strongly. delft serve takes several, each a model of its NAME beside
    /// the one without
    #[arg(long, alias = "lora", value_name = "[NAME=]PATH[=SCALE]")]
    pub(crate) adapter: Vec<AdapterArg>,
    /// Load an adapter of delft tune though it was made for another model, such as the one that
    /// this was quantised from
    #[arg(long, requires = "adapter")]
    pub(crate) any_base: bool,
    /// Whether nothing is said that only people want to know: with -q and --json.
    #[arg(skip)]
    pub(crate) quiet: bool,
    /// Whether the command computes many sequences together, as serve does.
    #[arg(skip)]
    pub(crate) together: bool,
    /// Adapters that may be added while the model is loaded, and their greatest rank.
    #[arg(skip)]
    pub(crate) room: (usize, usize),
    /// The processes that share the model, if a launcher has started several.
    #[arg(skip)]
    pub(crate) processes: Option<delft::Processes>,
    /// The values that are kept, as a command and no flag has it.
    #[arg(skip)]
    pub(crate) trace: delft::Trace,
}

/// Where experts are.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct ExpertArgs {
    /// Keep all experts in the machine's memory, where the CPU computes them, and all else on the
    /// GPU: for mixtures of experts that a GPU has too little memory for
    #[arg(long, conflicts_with = "n_cpu_moe")]
    cpu_moe: bool,
    /// As --cpu-moe, the experts of the first N layers alone
    #[arg(long, value_name = "N", value_parser = whole(0..=MOST), allow_negative_numbers = true)]
    n_cpu_moe: Option<u64>,
}

impl ExpertArgs {
    /// Layers, from the first on, whose experts are on the CPU.
    pub(crate) fn layers(self) -> usize {
        if self.cpu_moe { usize::MAX } else { self.n_cpu_moe.map_or(0, |n| n as usize) }
    }
}

impl Command {
    /// How its model is loaded, if it loads one.
    pub(crate) fn loading(&mut self) -> Option<&mut LoadArgs> {
        match self {
            Command::Run(args) => Some(&mut args.load),
            Command::Chat(args) => Some(&mut args.load),
            Command::Batch(args) => Some(&mut args.load),
            Command::Serve(args) => Some(&mut args.load),
            Command::Logits(args) => Some(&mut args.load),
            Command::Bench(args) => Some(&mut args.load),
            Command::WhySlow(args) => Some(&mut args.load),
            Command::Perplexity(args) => Some(&mut args.load),
            Command::Compare(args) => Some(&mut args.load),
            Command::Imatrix(args) => Some(&mut args.load),
            Command::Verify(args) => Some(&mut args.load),
            Command::Embed(args) => Some(&mut args.load),
            Command::Classify(args) => Some(&mut args.load),
            Command::Eval(args) => Some(&mut args.load),
            _ => None,
        }
    }

    /// Tells the loading whether to be quiet.
    pub(crate) fn quieten(&mut self) {
        let quiet = match self {
            Command::Run(args) => args.quiet || args.json || args.json_lines,
            Command::Logits(args) => args.json,
            Command::Bench(args) => args.json,
            Command::WhySlow(args) => args.json,
            Command::Perplexity(args) => args.json,
            Command::Compare(args) => args.json,
            Command::Imatrix(args) => args.json,
            Command::Verify(args) => args.json,
            Command::Eval(args) => args.json,
            Command::Embed(_) | Command::Classify(_) => true,
            _ => return,
        };
        if let Some(load) = self.loading() {
            load.quiet = quiet;
        }
    }
}

/// An adapter's name and path, and what its change is multiplied with.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AdapterArg {
    pub(crate) name: Option<String>,
    pub(crate) path: PathBuf,
    pub(crate) scale: f64,
}

impl std::str::FromStr for AdapterArg {
    type Err = String;

    /// `[NAME=]PATH[=SCALE]`; a path that exists may have an equals sign itself, and a name may be
    /// that of a file.
    fn from_str(text: &str) -> Result<AdapterArg, String> {
        let there = |path: &str| std::path::Path::new(path).exists();
        let named = |text: &str| match text.split_once('=').filter(|_| !there(text)) {
            Some((name, path)) => (Some(name.to_owned()), PathBuf::from(path)),
            None => (None, PathBuf::from(text)),
        };
        let finite = |scale: &str| scale.parse().ok().filter(|scale: &f64| scale.is_finite());
        let (front, scale) = match text.rsplit_once('=').filter(|_| !there(text)) {
            Some((front, behind)) => match finite(behind) {
                Some(scale) => (front, scale),
                None if there(front) && !there(behind) => {
                    return Err(format!("a number behind {front}=, not {behind:?}"));
                }
                None => (text, 1.0),
            },
            None => (text, 1.0),
        };
        let (name, path) = named(front);
        Ok(AdapterArg { name, path, scale })
    }
}

/// A dispatch by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DispatchArg {
    /// Every kernel is bound and launched anew in each step
    Eager,
    /// Launches are kept; each step's arguments are sent while earlier steps run
    Arguments,
    /// As one recording for each kind of step
    Graph,
}

/// A way to share a model by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SplitArg {
    /// Each has some of the layers, one after the other
    Layer,
    /// Each has a share of every layer, all at the same time
    Tensor,
}

/// A cache element type by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum CacheArg {
    F16,
    Bf16,
    F32,
    #[value(name = "q8_0")]
    Q8,
    Turbo,
}

/// How tokens are chosen; what is left out comes from the model's own defaults.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Sampling (defaults come from the model)")]
pub(crate) struct SamplingArgs {
    /// Most tokens to generate; -1 is no limit [default: until the model stops or the context is
    /// full]
    #[arg(short = 'n', long, aliases = ["n-predict", "predict"], value_name = "N", value_parser = or_none, allow_negative_numbers = true)]
    pub(crate) max_tokens: Option<OrNone>,
    /// Temperature: higher is bolder; 0 always takes the likeliest token
    #[arg(long, alias = "temperature", value_name = "T", value_parser = at_least_zero, allow_negative_numbers = true)]
    pub(crate) temp: Option<f32>,
    /// Keep the K likeliest tokens; 0 or -1 keeps all
    #[arg(long, value_name = "K", value_parser = top_k, allow_negative_numbers = true)]
    pub(crate) top_k: Option<u32>,
    /// Keep the likeliest tokens that together have this probability; 1 keeps all
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Keep tokens at least this likely relative to the likeliest; 0 keeps all
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Divide the scores of recent tokens by this, so that they are repeated less; 1 is off
    #[arg(long, alias = "repetition-penalty", value_name = "X", value_parser = above_zero, allow_negative_numbers = true)]
    pub(crate) repeat_penalty: Option<f32>,
    /// How many of the latest tokens the three penalties look at; -1 is all [default: 64]
    #[arg(long, value_name = "N", value_parser = or_none, allow_negative_numbers = true)]
    pub(crate) repeat_last_n: Option<OrNone>,
    /// Subtract this from the score of every token that occurred
    #[arg(long, value_name = "X", value_parser = finite, allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Subtract this from a token's score for each time it occurred
    #[arg(long, value_name = "X", value_parser = finite, allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Add to a token's score, by its id: 15043+1, 15043-2.5, or 15043-inf to forbid it; may be
    /// given several times
    #[arg(long, value_name = "ID(+|-)BIAS", value_parser = bias)]
    pub(crate) logit_bias: Vec<(u32, f32)>,
    /// DRY: subtract this from the score of what would go on with a repetition of the allowed
    /// length; 0 is off [default: 0]
    #[arg(long, value_name = "X", value_parser = at_least_zero, allow_negative_numbers = true)]
    pub(crate) dry_multiplier: Option<f32>,
    /// DRY: what each further repeated token multiplies that with [default: 1.75]
    #[arg(long, value_name = "X", value_parser = at_least_one, allow_negative_numbers = true)]
    pub(crate) dry_base: Option<f32>,
    /// DRY: repetitions shorter than this are free [default: 2]
    #[arg(long, value_name = "N")]
    pub(crate) dry_allowed_length: Option<u32>,
    /// DRY: how many of the latest tokens are looked at; -1 is all [default: -1]
    #[arg(long, value_name = "N", value_parser = or_none, allow_negative_numbers = true)]
    pub(crate) dry_penalty_last_n: Option<OrNone>,
    /// DRY: text over which no repetition is followed; may be given several times, none for no such
    /// text [default: a new line, a colon, a double quote, an asterisk]
    #[arg(long, value_name = "TEXT", value_parser = some_text, allow_hyphen_values = true)]
    pub(crate) dry_sequence_breaker: Vec<String>,
    /// XTC: how often the likeliest tokens are taken away, all but the least likely that reaches
    /// the threshold; 0 is off [default: 0]
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub(crate) xtc_probability: Option<f32>,
    /// XTC: the probability that a token must reach to be taken away; above 0.5 is off [default:
    /// 0.1]
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub(crate) xtc_threshold: Option<f32>,
    /// Seed: on the same machine, the same seed with the same settings gives the same text; -1 is a
    /// random one [default: -1]
    #[arg(short, long, value_name = "N", value_parser = or_none, allow_negative_numbers = true)]
    pub(crate) seed: Option<OrNone>,
    /// End before this text; may be given several times
    #[arg(long, alias = "reverse-prompt", value_name = "TEXT", value_parser = some_text, allow_hyphen_values = true)]
    pub(crate) stop: Vec<String>,
    /// Go on when the model writes a token that ends its text
    #[arg(long)]
    pub(crate) ignore_eos: bool,
}

/// The treatment of a model's reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ThinkArg {
    /// The template tells the model to think; at a terminal its thoughts are dimmed
    On,
    /// The template tells it not to
    Off,
    /// It does as it is used to, and its thoughts are not written
    Hide,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_name_of_an_adapter_may_be_that_of_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let there = folder.path().to_str().unwrap();
        let read = |text: String| text.parse::<AdapterArg>();
        let named = read(format!("{there}={there}")).unwrap();
        assert_eq!((named.name.as_deref(), named.path.as_path()), (Some(there), folder.path()));
        assert_eq!(read(format!("{there}=0.5")).unwrap().scale, 0.5);
        assert!(read(format!("{there}=strong")).unwrap_err().contains("a number behind"));
    }

    #[test]
    fn settings_that_hints_name_are_flags() {
        let known = Cli::command();
        let of = |command| known.find_subcommand(command).unwrap().get_arguments();
        for setting in delft::Setting::ALL {
            let flag = crate::terminal::flag(*setting);
            let name = flag.trim_start_matches('-');
            let takes = |command| of(command).any(|arg| arg.get_long() == Some(name));
            assert!(takes("run") || takes("tune"), "{flag}");
        }
    }
}

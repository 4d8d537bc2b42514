//! The command line: every command, flag and help text.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use delft::Place;

/// Runs language models on the machine in front of you.
#[derive(Debug, Parser)]
#[command(name = "delft", version, max_term_width = 100, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
A model (-m) is a .gguf file, a Hugging Face folder, or a hub id: org/name, org/name:file.gguf, org/name:Q4_K_M, \
each with an optional @revision. Without -m the bundled story model runs.

Examples:
  delft run                                 a story from the bundled model
  delft run \"The fox and the crow\" -n 200   continue a text
  delft pull Qwen/Qwen3-0.6B                download a model
  delft chat -m Qwen/Qwen3-0.6B             talk to it
  delft run -m model.gguf < question.txt    prompt from a file
  delft inspect -m model.gguf --ctx 8192    what it is and the memory it needs";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Generate text from a prompt
    Run(Run),
    /// Talk with a model
    Chat(Chat),
    /// Download a model from the Hugging Face hub into the shared cache
    Pull(Pull),
    /// List the models on this machine
    List(List),
    /// Show a model's metadata, tensors and memory needs without loading it
    Inspect(Inspect),
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
    /// Print a completion script for a shell
    #[command(
        after_help = "Example:\n  delft completions bash > ~/.local/share/bash-completion/completions/delft"
    )]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

/// Which model.
#[derive(Debug, Args)]
pub(crate) struct ModelArg {
    /// A .gguf file, a folder, or a hub id such as org/name:Q4_K_M [default: the bundled model]
    #[arg(short, long, value_name = "MODEL")]
    pub(crate) model: Option<String>,
}

/// How it is loaded.
#[derive(Debug, Args)]
#[command(next_help_heading = "Loading")]
pub(crate) struct LoadArgs {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// Most tokens of prompt and answer together [default: what the model was trained for]
    #[arg(long, value_name = "N", value_parser = positive())]
    pub(crate) ctx: Option<u64>,
    /// Once the context is full, forget the oldest tokens instead of stopping
    #[arg(long)]
    pub(crate) rotate: bool,
    /// Threads [default: the physical cores]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1024))]
    pub(crate) threads: Option<u64>,
    /// Where to compute: cpu, cuda, cuda:N, metal, or several GPUs that share the model: cuda:0,1
    #[arg(long, value_name = "DEVICE", default_value_t = Place::Cpu)]
    pub(crate) device: Place,
    /// Layers on the GPU, or on all GPUs together: the last N with the model's head; those before them run on the CPU [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(0..=MOST))]
    pub(crate) gpu_layers: Option<u64>,
    /// How several GPUs share the model
    #[arg(long, value_enum, default_value_t = SplitArg::Layer)]
    pub(crate) split_mode: SplitArg,
    /// How a GPU is given its work
    #[arg(long, value_enum, default_value_t = DispatchArg::Graph)]
    pub(crate) dispatch: DispatchArg,
    /// Element type of the key/value cache; q8_0 on GPUs only
    #[arg(long, value_enum, default_value_t = CacheArg::F16)]
    pub(crate) cache_type: CacheArg,
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
}

/// How tokens are chosen; what is left out comes from the model's own defaults.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Sampling (defaults come from the model)")]
pub(crate) struct SamplingArgs {
    /// Most tokens to generate [default: until the model stops or the context is full]
    #[arg(short = 'n', long, value_name = "N")]
    pub(crate) max_tokens: Option<u64>,
    /// Temperature; 0 always takes the likeliest token
    #[arg(long, value_name = "T", value_parser = at_least_zero)]
    pub(crate) temp: Option<f32>,
    /// Keep the K likeliest tokens; 0 keeps all
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<u32>,
    /// Keep the likeliest tokens that together have this probability
    #[arg(long, value_name = "P", value_parser = probability)]
    pub(crate) top_p: Option<f32>,
    /// Keep tokens at least this likely relative to the likeliest
    #[arg(long, value_name = "P", value_parser = probability)]
    pub(crate) min_p: Option<f32>,
    /// Divide the scores of recent tokens by this; 1 is off
    #[arg(long, value_name = "X", value_parser = above_zero)]
    pub(crate) repeat_penalty: Option<f32>,
    /// Subtract this from the score of every token that occurred
    #[arg(long, value_name = "X", value_parser = finite, allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Subtract this from a token's score for each time it occurred
    #[arg(long, value_name = "X", value_parser = finite, allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Seed: the same seed gives the same text [default: random]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// End before this text; may be given several times
    #[arg(long, value_name = "TEXT")]
    pub(crate) stop: Vec<String>,
}

/// `delft run`.
#[derive(Debug, Args)]
#[command(after_help = "\
The text goes to standard output, speed and memory to standard error. An instruction-tuned model (one with a chat \
template) takes the prompt as a user's message; --raw continues the prompt as it stands.

Examples:
  delft run \"Once upon a time\" -n 100 --seed 7
  delft run -m org/name --system \"Answer in one word.\" \"What is the capital of France?\"
  git diff | delft run -m org/name --json")]
pub(crate) struct Run {
    /// The prompt; standard input when left out or `-`
    pub(crate) prompt: Option<String>,
    /// Continue the prompt as it stands, without the chat template
    #[arg(long, conflicts_with_all = ["chat", "system"])]
    pub(crate) raw: bool,
    /// Insist on the chat template; an error where the model has none
    #[arg(long)]
    pub(crate) chat: bool,
    /// A system message before the prompt
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Print one JSON object: text, tokens, finish, metrics
    #[arg(long)]
    pub(crate) json: bool,
    /// Say what is in effect: the model, the prompt's tokens, the sampling chain
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// No speed and memory at the end
    #[arg(short, long, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// `delft chat`.
#[derive(Debug, Args)]
#[command(after_help = "\
Type /help for the commands inside. A line that ends with \\ goes on in the next one; a line that starts with \"\"\" \
goes on until one that ends with \"\"\". Ctrl-C ends an answer, Ctrl-D the conversation.

Examples:
  delft chat -m org/name --system \"You are a pirate.\"
  printf 'Hello!\\nTell me more.\\n' | delft chat -m org/name")]
pub(crate) struct Chat {
    /// A system message before the conversation
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Say what is in effect, and speed and memory after each answer
    #[arg(short, long)]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// `delft pull`.
#[derive(Debug, Args)]
#[command(after_help = "\
Files go to the cache that Python's huggingface_hub uses (HF_HUB_CACHE, HF_HOME). A private or gated model needs \
HF_TOKEN. An interrupted download is resumed. The path of the model goes to standard output.

Examples:
  delft pull Qwen/Qwen3-0.6B
  delft pull Qwen/Qwen3-0.6B-GGUF:Q8_0
  delft pull org/name:model-Q4_K_M.gguf@main")]
pub(crate) struct Pull {
    /// org/name[:FILE or :TAG][@REVISION]
    pub(crate) model: String,
    /// No progress on standard error
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// `delft list`.
#[derive(Debug, Args)]
pub(crate) struct List {
    /// Print a JSON array with every file
    #[arg(long)]
    pub(crate) json: bool,
}

/// `delft inspect`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  delft inspect
  delft inspect -m model.gguf --ctx 32768 --device cuda
  delft inspect -m org/name --tensors --json")]
pub(crate) struct Inspect {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// The model, as with -m
    #[arg(value_name = "MODEL", conflicts_with = "model")]
    pub(crate) named: Option<String>,
    /// Tell the memory for this context length
    #[arg(long, value_name = "N", value_parser = positive())]
    pub(crate) ctx: Option<u64>,
    /// Where it would run: tells what it would take there beside what is free
    #[arg(long, value_name = "DEVICE", default_value_t = Place::Cpu)]
    pub(crate) device: Place,
    /// Element type of the key/value cache
    #[arg(long, value_enum, default_value_t = CacheArg::F16)]
    pub(crate) cache_type: CacheArg,
    /// List every tensor
    #[arg(long)]
    pub(crate) tensors: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `delft tokenize`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  delft tokenize -m org/name \"Hello, world\"
  delft tokenize -m model.gguf --file text.txt --json
  delft tokenize --show \"Once upon a time\"")]
pub(crate) struct Tokenize {
    /// The text; standard input when left out
    #[arg(conflicts_with = "file")]
    pub(crate) text: Option<String>,
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// Read the text from a file
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Add no special tokens, such as the one that begins a text
    #[arg(long)]
    pub(crate) no_special: bool,
    /// Read the spelling of special tokens in the text as these tokens
    #[arg(long)]
    pub(crate) parse_special: bool,
    /// Print each token with its text
    #[arg(long, conflicts_with = "json")]
    pub(crate) show: bool,
    /// Print {"tokens": [...]}
    #[arg(long)]
    pub(crate) json: bool,
}

/// `delft logits`.
#[derive(Debug, Args)]
#[command(after_help = "\
Works without a tokenizer. With --json: {\"tokens\": [...], \"logits\": [[...], ...], \"generated\": [...]}, one row of \
logits per position asked for; otherwise the ten likeliest tokens of each.

Examples:
  delft logits -m model.gguf --tokens 1,2,3 --json
  delft logits -m model.gguf --tokens 1,2,3 --all --generate 8 --json")]
pub(crate) struct Logits {
    /// Token ids, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', required = true)]
    pub(crate) tokens: Vec<u32>,
    /// Rows for the last N positions [default: 1]
    #[arg(long, value_name = "N", value_parser = positive(), conflicts_with = "all")]
    pub(crate) last: Option<u64>,
    /// Rows for all positions
    #[arg(long)]
    pub(crate) all: bool,
    /// Then generate N tokens, each time the likeliest
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) generate: u64,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// `delft bench`.
#[derive(Debug, Args)]
#[command(after_help = "\
pp is the processing of a prompt of P random tokens at once; tg is N single-token steps; both start from an empty \
cache, or one that holds D tokens. One unmeasured run comes first; the figure is the median of R runs.

Examples:
  delft bench -m model.gguf
  delft bench -m model.gguf -p 512 -n 128 --threads 8 --repeat 5 --json")]
pub(crate) struct Bench {
    /// Prompt tokens; 0 leaves this measurement out
    #[arg(short, long, value_name = "P", default_value_t = 512, value_parser = clap::value_parser!(u64).range(0..=MOST))]
    pub(crate) prompt: u64,
    /// Generated tokens; 0 leaves this measurement out
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u64).range(0..=MOST))]
    pub(crate) generate: u64,
    /// Tokens in the cache before the measurement begins
    #[arg(short, long, value_name = "D", default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=MOST))]
    pub(crate) depth: u64,
    /// Generate by choosing each token, greedily, instead of taking given ones: all that decoding takes
    #[arg(long)]
    pub(crate) sampled: bool,
    /// Measured runs
    #[arg(short, long, value_name = "R", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) repeat: u64,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// `delft why-slow`.
#[derive(Debug, Args)]
#[command(after_help = "\
Runs one prefill of P random tokens and N single-token steps behind it, each operation timed, beside what this machine \
reaches when it does one thing alone: reading the weights, and multiplying with each unit of the instruction set in \
use. OF ROOF is the longer of the two times that the bytes and the operations would take there, as a share of the time \
taken; BOUND BY says which of the two it is. Barriers are the time between operations. At the end it says in words what \
holds the model back, with the figure that shows it, and what mends it.

Examples:
  delft why-slow
  delft why-slow -m model.gguf -p 4096 -n 64
  delft why-slow -m model.gguf --threads 8 --json")]
pub(crate) struct WhySlow {
    /// Prompt tokens
    #[arg(short, long, value_name = "P", default_value_t = 512, value_parser = positive())]
    pub(crate) prompt: u64,
    /// Generated tokens
    #[arg(short = 'n', long, value_name = "N", default_value_t = 32, value_parser = positive())]
    pub(crate) generate: u64,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// `delft perplexity`.
#[derive(Debug, Args)]
#[command(after_help = "\
As llama.cpp defines it: the text's tokens are cut into chunks of N tokens (--ctx, here 512 unless given), each \
evaluated on its own with its first token replaced by the model's beginning-of-text token where it has one; the \
tokens of each chunk's second half are scored, and the perplexity is exp of their mean negative log-likelihood. The \
last, incomplete chunk is left out. With --stride S, windows of N tokens begin every S tokens instead, and the last \
S tokens of each are scored.

Examples:
  delft perplexity -m model.gguf wiki.test.raw
  delft perplexity -m model.gguf wiki.test.raw --ctx 1024 --chunks 20 --json")]
pub(crate) struct Perplexity {
    /// The text file
    pub(crate) file: PathBuf,
    /// Windows that begin every S tokens, of which the last S are scored
    #[arg(long, value_name = "S", value_parser = positive())]
    pub(crate) stride: Option<u64>,
    /// Stop after so many chunks
    #[arg(long, value_name = "N", value_parser = positive())]
    pub(crate) chunks: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// More positions than any model has.
const MOST: u64 = 1 << 24;

fn positive() -> clap::builder::RangedU64ValueParser<u64> {
    clap::value_parser!(u64).range(1..=MOST)
}

fn number(text: &str, holds: impl Fn(f32) -> bool, expected: &str) -> Result<f32, String> {
    text.parse()
        .ok()
        .filter(|value: &f32| value.is_finite() && holds(*value))
        .ok_or_else(|| format!("expected {expected}"))
}

pub(crate) fn finite(text: &str) -> Result<f32, String> {
    number(text, |_| true, "a number")
}

pub(crate) fn at_least_zero(text: &str) -> Result<f32, String> {
    number(text, |value| value >= 0.0, "a number of at least 0")
}

pub(crate) fn above_zero(text: &str) -> Result<f32, String> {
    number(text, |value| value > 0.0, "a number above 0")
}

pub(crate) fn probability(text: &str) -> Result<f32, String> {
    number(text, |value| (0.0..=1.0).contains(&value), "a number from 0 to 1")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}

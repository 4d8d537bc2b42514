//! The command line: every command, flag and help text.
//!
//! Flags have the names that llama.cpp's and Ollama's users know; where those have several, the
//! others are hidden aliases. Which words name a model and which a prompt: `words`.

use std::ffi::OsString;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use delft::Place;

use crate::environment;
use crate::grammar::GrammarArgs;
use crate::tuning::{Eval, Tune};

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
    #[arg(long, value_name = "DEVICE", default_value_t = Place::Auto)]
    pub(crate) device: Place,
    /// Layers on the GPU, or on all GPUs together: the last N with the model's head; those before
    /// them run on the CPU [default: all]
    #[arg(long, alias = "n-gpu-layers", value_name = "N", value_parser = whole(0..=MOST), allow_negative_numbers = true)]
    pub(crate) gpu_layers: Option<u64>,
    #[command(flatten)]
    pub(crate) experts: ExpertArgs,
    /// How several GPUs share the model [default: layer]
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

    /// `[NAME=]PATH[=SCALE]`; a path that exists may have an equals sign itself.
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
                None if there(front) => {
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
    /// XTC: the probability that a token must reach to be taken away; above 0.5 is off [default: 0.1]
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

/// What becomes of a model's reasoning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ThinkArg {
    /// The template tells the model to think; at a terminal its thoughts are dimmed
    On,
    /// The template tells it not to
    Off,
    /// It does as it is used to, and its thoughts are not written
    Hide,
}

/// `delft run`.
#[derive(Debug, Args)]
#[command(
    override_usage = "delft run [OPTIONS] [MODEL] [PROMPT]...",
    after_help = format!("{RUN_EXAMPLES}\n\ndelft run --help says where a prompt may come from."),
    after_long_help = format!("{RUN_PROMPTS}\n\n{RUN_EXAMPLES}")
)]
pub(crate) struct Run {
    /// The prompt; behind a model several words are joined with blanks. `-` is standard input
    #[arg(value_name = "PROMPT", index = 2)]
    pub(crate) words: Vec<String>,
    /// The prompt, whatever it looks like; a word beside it is the model
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: Option<String>,
    /// Take a file's text as the prompt, or add it to the prompt; `-` is standard input, for which
    /// this waits
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Vec<PathBuf>,
    /// A system message before the prompt
    #[arg(long, alias = "system-prompt", value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) system: Option<String>,
    /// Continue the prompt as it stands, without the chat template
    #[arg(long, conflicts_with_all = ["chat", "system"])]
    pub(crate) raw: bool,
    /// Insist on the chat template; an error where the model has none
    #[arg(long, alias = "conversation")]
    pub(crate) chat: bool,
    /// A file with the chat template to use instead of the model's own (Jinja)
    #[arg(long, visible_alias = "chat-template-file", value_name = "FILE", conflicts_with = "raw")]
    pub(crate) template: Option<PathBuf>,
    /// Continue the prompt as it stands (as --raw), and read the spellings of special tokens in it,
    /// such as <|im_start|>, as these tokens
    #[arg(long, conflicts_with_all = ["chat", "system", "template"])]
    pub(crate) special: bool,
    /// Whether the model thinks before it answers, by its template's switch, and whether that is
    /// shown
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) think: Option<ThinkArg>,
    /// Write the prompt in front of the text, in a pipe too [default: at a terminal, where the text
    /// continues it]
    #[arg(long, conflicts_with_all = ["json", "json_lines"])]
    pub(crate) echo: bool,
    /// Never write the prompt
    #[arg(long, alias = "no-display-prompt", conflicts_with = "echo")]
    pub(crate) no_echo: bool,
    /// Print the prompt as the model would get it, with its tokens, and stop; weights are not
    /// loaded
    #[arg(long, alias = "verbose-prompt")]
    pub(crate) show_prompt: bool,
    /// Print one JSON object at the end: text, tokens, finish, metrics
    #[arg(long)]
    pub(crate) json: bool,
    /// Print a JSON object for each token as it comes, on a line of its own, then the object of
    /// --json
    #[arg(long, alias = "stream-json", conflicts_with = "json")]
    pub(crate) json_lines: bool,
    /// Tell the N likeliest tokens of each position and their log-probabilities, before any sampling
    /// setting: in the JSON, or on standard error behind the text
    #[arg(long, aliases = ["logprobs", "n-probs"], value_name = "N", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub(crate) top_logprobs: Option<u8>,
    /// Say what is in effect: the model, the prompt's tokens, the sampling chain
    #[arg(short, long)]
    pub(crate) verbose: bool,
    /// No speed and memory at the end
    #[arg(short, long, conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    #[command(flatten)]
    pub(crate) grammar: GrammarArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

const RUN_EXAMPLES: &str = "\
Examples:
  delft run \"The old lighthouse keeper found a bottle\" --seed 7
  delft run \"In the year 2150, the first children were born on Mars.\"
  delft run \"Tell me a story about a dragon who loves cooking\" -n 200
  delft run org/name --system \"Answer in one word.\" \"What is the capital of France?\"
  delft run model.gguf -f question.txt
  git diff | delft run org/name \"Explain this change:\" --json";

const RUN_PROMPTS: &str = "\
Model and prompt:
  A lone word or quoted text is the prompt for the bundled model, unless it is a model's name: then the prompt comes \
from standard input. A word that only looks like a model's name is refused. Behind a model, unquoted words are joined \
with blanks. With -m all words are the prompt; -p is the prompt whatever it looks like.

Where the prompt comes from:
  The prompt, each file of -f, and what is piped in are joined in this order, with a blank line between them. A file \
and standard input lose one line break at their end. Beside a prompt, standard input that stays silent for three seconds is \
done without, and a line says so; -f - waits for it, < /dev/null says that there is none (as in a loop that reads lines).

Standard output is the model's text and nothing else, speed and memory go to standard error. At a terminal the prompt is \
shown, dimmed, before a text that continues it, and control characters in the text are shown as symbols; a pipe gets \
the exact text. Ctrl-C ends the text, which stays, and the exit code is 130.

An instruction-tuned model (one with a chat template) takes the prompt as a user's message; --raw continues it as it \
stands. The bundled model's own opening, when there is no prompt at all, is always continued.";

/// `delft chat`.
#[derive(Debug, Args)]
#[command(after_help = "\
Type /help for the commands inside. A line that ends with \\ goes on in the next one; a line that starts with \"\"\" \
goes on until one that ends with \"\"\". Ctrl-C ends an answer, Ctrl-D the conversation.

Examples:
  delft chat org/name --system \"You are a pirate.\"
  printf 'Hello!\\nTell me more.\\n' | delft chat org/name")]
pub(crate) struct Chat {
    /// A system message before the conversation
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    /// Answers as they come: no wrapped lines, no colours, reasoning with its marks
    #[arg(long)]
    pub(crate) plain: bool,
    /// Whether the model thinks before it answers, by its template's switch, and whether that is
    /// shown
    #[arg(long, value_enum, value_name = "HOW")]
    pub(crate) think: Option<ThinkArg>,
    /// Say what is in effect, and speed and memory after each answer
    #[arg(short, long)]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// `delft batch`.
#[derive(Debug, Args)]
#[command(
    override_usage = "delft batch [OPTIONS] [MODEL] <FILE>",
    after_help = "\
A line has a prompt (text, or token ids) or messages, and settings under OpenAI's names: max_tokens, temperature, top_p, \
seed, stop, logprobs, .. What it does not say is as the flags have it. It may be a line of OpenAI's batch files, with custom_id \
and body, and is then answered in the shape of their results. Many lines are computed at a time, answers keep their order, \
and a line that cannot be answered is answered with its error.

Examples:
  echo '{\"prompt\": \"Once upon a time\", \"max_tokens\": 40}' | delft batch -
  delft batch qwen3:0.6b requests.jsonl --output answers.jsonl"
)]
pub(crate) struct Batch {
    /// The requests, one JSON object a line; `-` is standard input
    #[arg(value_name = "FILE", index = 2)]
    pub(crate) file: Option<String>,
    /// Where answers go [default: standard output]; a file that has answers already is continued
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) grammar: GrammarArgs,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// `delft pull`.
#[derive(Debug, Args)]
#[command(after_help = "\
Files go to the cache that Python's huggingface_hub uses (HF_HUB_CACHE, HF_HOME). A private or gated model needs \
HF_TOKEN. An interrupted download is resumed. The path of the model goes to standard output. A model that Delft cannot \
run is refused before its weights come, by its configuration or its first keys.

Examples:
  delft pull qwen3:0.6b
  delft pull Qwen/Qwen3-0.6B
  delft pull Qwen/Qwen3-0.6B-GGUF:Q8_0
  delft pull org/name:model-Q4_K_M.gguf@main")]
pub(crate) struct Pull {
    /// A short name, or org/name[:FILE or :TAG][@REVISION]
    pub(crate) model: String,
    /// Fetch it even if Delft cannot run it
    #[arg(long)]
    pub(crate) force: bool,
    /// No progress on standard error
    #[arg(short, long)]
    pub(crate) quiet: bool,
}

/// `delft serve`.
#[derive(Debug, Args)]
#[command(
    override_usage = "delft serve [OPTIONS] [[NAME=]MODEL[@DEVICE]]...",
    after_help = SERVE_HELP
)]
pub(crate) struct Serve {
    /// Further models
    #[arg(value_name = "MODEL", index = 2)]
    pub(crate) models: Vec<String>,
    /// The address to listen at; one that other machines reach needs a key, or --insecure-public
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub(crate) host: IpAddr,
    /// The port to listen at; 0 is one of the system's choosing
    #[arg(long, value_name = "PORT", default_value_t = 11435)]
    pub(crate) port: u16,
    /// A key that requests must have; may be given several times. Other users of this machine can
    /// see a command line: DELFT_API_KEY and --api-key-file are kept from them
    #[arg(long, value_name = "KEY")]
    pub(crate) api_key: Vec<String>,
    /// A file with keys, one on each line
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Vec<PathBuf>,
    /// Listen at an address that other machines reach, and answer everyone
    #[arg(long)]
    pub(crate) insecure_public: bool,
    /// Serve every model for embeddings alone, also those whose files do not say that they are made
    /// for it
    #[arg(long)]
    pub(crate) embeddings: bool,
    /// An origin, such as https://example.com, whose web pages may ask from browsers
    #[arg(long, value_name = "ORIGIN")]
    pub(crate) cors: Vec<String>,
    /// A host name of this server, beside localhost and addresses, for requests without a key
    #[arg(long, value_name = "NAME")]
    pub(crate) allow_host: Vec<String>,
    /// Requests that each model answers at the same time on each of its devices
    #[arg(long, alias = "np", value_name = "N", default_value_t = 4, value_parser = whole(1..=256), allow_negative_numbers = true)]
    pub(crate) parallel: u64,
    /// Requests that may wait for their turn; those beyond are refused
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = whole(0..=100_000), allow_negative_numbers = true)]
    pub(crate) queue: u64,
    /// The longest that a request may take, in seconds, waiting included
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = whole(1..=1_000_000), allow_negative_numbers = true)]
    pub(crate) timeout: u64,
    /// Tokens that a text may have at most, whatever its request says; it then ends with length
    #[arg(long, value_name = "N", value_parser = whole(1..=1_000_000_000), allow_negative_numbers = true)]
    pub(crate) max_tokens: Option<u64>,
    /// How long requests may go on after the first signal to stop, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = whole(0..=1_000_000), allow_negative_numbers = true)]
    pub(crate) drain: u64,
    /// How long a model stays loaded after its last request, such as 5m, 1h30m, 0, or -1 for ever
    /// [default: 5m; models that the command line names stay]
    #[arg(long, value_name = "TIME", allow_negative_numbers = true)]
    pub(crate) keep_alive: Option<serve::Keep>,
    /// Most memory that loaded models may take together on a device, such as 20G or 800M [default:
    /// what is free]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) memory: Option<u64>,
    /// A file with keys of administrators, one on each line, who may change the store of models;
    /// without it, programs of this machine may
    #[arg(long, value_name = "FILE")]
    pub(crate) admin_key_file: Vec<PathBuf>,
    /// Note every request and its answer in a new file of this folder, for delft replay; keys are
    /// not in it
    #[arg(long, value_name = "DIR")]
    pub(crate) record: Option<PathBuf>,
    /// Let administrators save sessions to files of this folder, and restore them
    #[arg(long, value_name = "DIR")]
    pub(crate) sessions: Option<PathBuf>,
    /// A file with the chat template to use instead of the models' own (Jinja)
    #[arg(long, visible_alias = "chat-template-file", value_name = "FILE")]
    pub(crate) template: Option<PathBuf>,
    /// Adapters that each model has room for, to be added while it is served, by POST /adapters
    #[arg(long, value_name = "N", value_parser = whole(1..=1024), allow_negative_numbers = true)]
    pub(crate) adapter_room: Option<u64>,
    /// The greatest rank of those adapters [default: 16]
    #[arg(long, value_name = "R", value_parser = whole(1..=4096), requires = "adapter_room", allow_negative_numbers = true)]
    pub(crate) adapter_rank: Option<u64>,
    /// Tune an adapter of the model from these examples meanwhile, as delft tune does; it is served
    /// under its folder's name, as it stands
    #[arg(long, value_name = "FILE")]
    pub(crate) tune: Option<PathBuf>,
    /// That adapter's folder [default: the name of the examples with -lora behind it]
    #[arg(long, value_name = "FOLDER", requires = "tune")]
    pub(crate) tune_out: Option<PathBuf>,
    /// Flags of delft tune for it, in one word, such as "--rank 16 --steps 500"
    #[arg(long, value_name = "FLAGS", requires = "tune", allow_hyphen_values = true)]
    pub(crate) tune_flags: Option<String>,
    /// Say what is in effect: the models and their memory
    #[arg(short, long)]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// Which server a command asks.
#[derive(Debug, Args)]
pub(crate) struct AddressArgs {
    /// The server's address
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:11435")]
    pub(crate) url: String,
    /// A file whose first line is the server's key [default: DELFT_API_KEY]
    #[arg(long, value_name = "FILE")]
    pub(crate) api_key_file: Option<PathBuf>,
}

/// `delft ps`.
#[derive(Debug, Args)]
pub(crate) struct Ps {
    /// Print JSON, as the server's /api/ps has it
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) address: AddressArgs,
}

/// `delft stop`.
#[derive(Debug, Args)]
pub(crate) struct StopModels {
    /// Names that the server has for them
    #[arg(value_name = "MODEL", required = true)]
    pub(crate) models: Vec<String>,
    #[command(flatten)]
    pub(crate) address: AddressArgs,
}

/// `delft replay`.
#[derive(Debug, Args)]
#[command(after_help = "\
Asks each request of a file that delft serve --record wrote, one after the other and with its seed, and compares the answers: ids, times \
and what was found in the cache aside, they are the same where the model, the build and the device are. Exit status 1 if any differs.

Examples:
  delft serve qwen3:0.6b --record asked
  delft replay asked/2026-11-23T18-30-00.000Z.jsonl")]
pub(crate) struct Replay {
    /// The file of requests and answers
    pub(crate) file: PathBuf,
    /// Print a JSON object for each request
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) address: AddressArgs,
}

const SERVE_HELP: &str = "\
Without a model it offers the bundled one and those that delft pull fetched, and loads what a request names; with models, these alone.
Of NAME=MODEL a model has another name; MODEL@cuda:1 is loaded on that device. One name and model on several devices is one model, whose \
requests they share.
Listens at http://127.0.0.1:11435, where a web page to chat on is, with the interfaces of OpenAI (/v1/chat/completions, \
/v1/responses, /v1/completions, /v1/models), Anthropic (/v1/messages) and Ollama (/api/chat, /api/generate, /api/tags), and /tokenize, /detokenize, \
/apply-template, /props, /adapters, /health, /ready, /metrics and /events. The first Ctrl-C lets requests finish, the second ends at once.

Examples:
  delft serve
  delft serve qwen3:0.6b
  delft serve small=qwen3:0.6b large=org/name-GGUF:Q4_K_M --parallel 8
  delft serve qwen3:8b@cuda:0 qwen3:8b@cuda:1
  delft serve model.gguf --host 0.0.0.0 --api-key-file keys.txt";

/// `delft show`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  delft show
  delft show qwen3:0.6b --json")]
pub(crate) struct Show {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `delft rm`.
#[derive(Debug, Args)]
#[command(after_help = "\
org/name is all of a repository, unfinished downloads too; org/name@REVISION one revision of it; org/name:TAG, or a \
short name, one GGUF file. What another revision uses stays.

Examples:
  delft rm qwen3:0.6b
  delft rm org/name org/other --yes")]
pub(crate) struct Rm {
    /// Short names, or org/name[:FILE or :TAG][@REVISION]
    #[arg(value_name = "MODEL", required = true)]
    pub(crate) models: Vec<String>,
    /// Remove them without asking
    #[arg(short, long)]
    pub(crate) yes: bool,
}

/// `delft fuse`.
#[derive(Debug, Args)]
#[command(after_help = "\
Writes a folder like the model's own, in the types that its weights are stored in, with what the adapter changes added to \
them. The model is a folder of safetensors; a quantised one is merged from the model that it was made of.

Example:
  delft fuse path/to/model --adapter path/to/adapter --output merged")]
pub(crate) struct Fuse {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// The adapter: a folder of PEFT or mlx-lm, or a GGUF file; with =SCALE to apply it more or
    /// less strongly
    #[arg(long, alias = "lora", value_name = "PATH[=SCALE]")]
    pub(crate) adapter: AdapterArg,
    /// Merge an adapter of delft tune though it was made for another model
    #[arg(long)]
    pub(crate) any_base: bool,
    /// The folder to write, which is not there yet
    #[arg(short, long, value_name = "FOLDER")]
    pub(crate) output: PathBuf,
    /// Read a model though its configuration has this key, which Delft does not know; may be given
    /// several times
    #[arg(long, value_name = "KEY")]
    pub(crate) ignore_key: Vec<String>,
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
  delft inspect model.gguf --ctx 32768 --device cuda
  delft inspect org/name --tensors --json")]
pub(crate) struct Inspect {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// Tell the memory for this context length
    #[arg(short, long, alias = "ctx-size", value_name = "N", value_parser = positive(), allow_negative_numbers = true)]
    pub(crate) ctx: Option<u64>,
    /// Where it would run: tells what it would take there beside what is free
    #[arg(long, value_name = "DEVICE", default_value_t = Place::Auto)]
    pub(crate) device: Place,
    #[command(flatten)]
    pub(crate) experts: ExpertArgs,
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
#[command(
    override_usage = "delft tokenize [OPTIONS] [MODEL] [TEXT]...",
    after_help = "\
A lone word or quoted text is the text, in the tokens of the bundled model, unless it is a model's name: then the text \
comes from standard input. A file and standard input lose one line break at their end, as a prompt of delft run does.

Examples:
  delft tokenize org/name \"Hello, world\"
  delft tokenize model.gguf --file text.txt --json
  delft tokenize --show \"Once upon a time\""
)]
pub(crate) struct Tokenize {
    /// The text; standard input when left out or `-`
    #[arg(value_name = "TEXT", index = 2, conflicts_with = "file")]
    pub(crate) words: Vec<String>,
    /// The text, whatever it looks like; a word beside it is the model
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true, conflicts_with = "file")]
    pub(crate) prompt: Option<String>,
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// Read the text from a file; `-` is standard input
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Add no special tokens, such as the one that begins a text
    #[arg(long)]
    pub(crate) no_special: bool,
    /// Read the spelling of special tokens in the text as these tokens
    #[arg(long = "special", visible_alias = "parse-special")]
    pub(crate) parse_special: bool,
    /// Print each token with its text
    #[arg(long, conflicts_with = "json")]
    pub(crate) show: bool,
    /// Print {"tokens": [...]}
    #[arg(long)]
    pub(crate) json: bool,
}

/// `delft embed`.
#[derive(Debug, Args)]
#[command(after_help = "\
Prints a JSON object a line for each text: {\"index\": 0, \"tokens\": 5, \"embedding\": [...]}. Texts are the words behind the \
model, else the lines of a file or of standard input; lines that are empty are passed over.

Examples:
  delft embed Qwen/Qwen3-Embedding-0.6B \"What is a fox?\" \"A fox is an animal.\"
  delft embed model.gguf --file passages.txt --dimensions 256 > passages.jsonl")]
pub(crate) struct Embed {
    /// The texts
    #[arg(value_name = "TEXT", index = 2, conflicts_with = "file")]
    pub(crate) texts: Vec<String>,
    /// Read a text from each line of a file; `-` is standard input
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Keep so many of the first numbers of each, for models that were trained for it
    #[arg(long, value_name = "N", value_parser = positive(), allow_negative_numbers = true)]
    pub(crate) dimensions: Option<u64>,
    /// Make them of these hidden states instead of what the model's files say
    #[arg(long, value_enum)]
    pub(crate) pooling: Option<PoolingArg>,
    /// Do not divide them by their length
    #[arg(long, requires = "pooling")]
    pub(crate) raw: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// `delft classify`.
#[derive(Debug, Args)]
#[command(after_help = "\
Prints a JSON object a line for each text: {\"index\": 0, \"label\": \"good\", \"probabilities\": {\"good\": 0.9, \"bad\": 0.1}, \
\"logprobs\": {...}}. A label's probability is that of all its tokens behind the text, among the labels; the logarithms are those \
among everything that the model could write. Texts are the words behind the model, else the lines of a file or of standard input.

An instruction-tuned model takes each text as a user's message; --raw continues it as it stands, and labels then begin with the \
blank that they would have there.

Examples:
  delft classify qwen3:0.6b --labels good,bad --prompt \"Is this review good or bad? {}\" --file reviews.txt
  delft classify model.gguf --raw --labels \" yes, no\" \"Q: Is the sky blue? A:\"")]
pub(crate) struct Classify {
    /// The texts
    #[arg(value_name = "TEXT", index = 2, conflicts_with = "file")]
    pub(crate) texts: Vec<String>,
    /// Read a text from each line of a file; `-` is standard input
    #[arg(short, long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// The labels, as the model would write them
    #[arg(short, long, value_name = "LABEL,..", value_delimiter = ',', required = true)]
    pub(crate) labels: Vec<String>,
    /// What the model is asked, with {} in the place of the text
    #[arg(short, long, value_name = "PROMPT", default_value = "{}")]
    pub(crate) prompt: String,
    /// Continue the prompt as it stands, without the model's chat template
    #[arg(long)]
    pub(crate) raw: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// Which hidden states of a text its embedding is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PoolingArg {
    /// The first token's
    First,
    /// The mean of all
    Mean,
    /// The last token's
    Last,
}

/// `delft logits`.
#[derive(Debug, Args)]
#[command(after_help = "\
Works without a tokenizer. With --json: {\"tokens\": [...], \"logits\": [[...], ...], \"generated\": [...]}, one row of \
logits per position asked for; otherwise the ten likeliest tokens of each.

Examples:
  delft logits model.gguf --tokens 1,2,3 --json
  delft logits model.gguf --tokens 1,2,3 --all --generate 8 --json")]
pub(crate) struct Logits {
    /// Token ids, separated by commas
    #[arg(long, value_name = "IDS", value_delimiter = ',', required = true, value_parser = token)]
    pub(crate) tokens: Vec<u32>,
    /// Rows for the last N positions [default: 1]
    #[arg(long, value_name = "N", value_parser = positive(), allow_negative_numbers = true, conflicts_with = "all")]
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
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
pp is the processing of a prompt of P random tokens at once; tg is N single-token steps; both start from an empty \
cache, or one that holds D tokens. One unmeasured run comes first; the figure is the median of R runs. Ctrl-C tells \
what was measured until then.

Examples:
  delft bench model.gguf
  delft bench model.gguf -p 512 -n 128 --threads 8 --repeat 5 --json
  delft bench model.gguf -p 0 --batch 1,8,32
  delft bench model.gguf --load 2 --requests 50 --shared 256")]
pub(crate) struct Bench {
    /// Prompt tokens; 0 leaves this measurement out
    #[arg(short, long, value_name = "P", default_value_t = 512, value_parser = whole(0..=MOST), allow_negative_numbers = true)]
    pub(crate) prompt: u64,
    /// Generated tokens; 0 leaves this measurement out
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128, value_parser = whole(0..=MOST), allow_negative_numbers = true)]
    pub(crate) generate: u64,
    /// Tokens in the cache before the measurement begins
    #[arg(short, long, value_name = "D", default_value_t = 0, value_parser = whole(0..=MOST), allow_negative_numbers = true)]
    pub(crate) depth: u64,
    /// Generate by choosing each token, greedily, instead of taking given ones: all that decoding
    /// takes
    #[arg(long)]
    pub(crate) sampled: bool,
    /// Numbers of sequences to generate at the same time, a measurement for each; its speed counts
    /// the tokens of all sequences
    #[arg(long, value_name = "B,..", value_delimiter = ',', value_parser = whole(1..=256), conflicts_with = "sampled")]
    pub(crate) batch: Vec<u64>,
    /// Measure requests that arrive at random, R a second on average, as at a server: the time to
    /// the first token, that between tokens, and tokens per second. Each has a prompt of P tokens
    /// and an answer of N; --batch says how many are computed at a time [default: 16]
    #[arg(long = "load", value_name = "R", value_parser = rate, conflicts_with_all = ["sampled", "depth", "repeat"])]
    pub(crate) arrivals: Option<f64>,
    /// Requests that arrive [default: 64]
    #[arg(long, value_name = "N", value_parser = whole(1..=100_000))]
    pub(crate) requests: Option<u64>,
    /// Tokens that all their prompts begin with [default: 0]
    #[arg(long, value_name = "N", value_parser = whole(0..=MOST))]
    pub(crate) shared: Option<u64>,
    /// Measured runs
    #[arg(short, long, value_name = "R", default_value_t = 3, value_parser = whole(1..=1000), allow_negative_numbers = true)]
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
  delft why-slow model.gguf -p 4096 -n 64
  delft why-slow model.gguf --threads 8 --json")]
pub(crate) struct WhySlow {
    /// Prompt tokens
    #[arg(short, long, value_name = "P", default_value_t = 512, value_parser = positive(), allow_negative_numbers = true)]
    pub(crate) prompt: u64,
    /// Generated tokens
    #[arg(short = 'n', long, value_name = "N", default_value_t = 32, value_parser = positive(), allow_negative_numbers = true)]
    pub(crate) generate: u64,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// `delft perplexity`.
#[derive(Debug, Args)]
#[command(
    allow_missing_positional = true,
    after_help = "\
As llama.cpp defines it: the text's tokens are cut into chunks of N tokens (--ctx, here 512 unless given), each \
evaluated on its own with its first token replaced by the model's beginning-of-text token where it has one; the \
tokens of each chunk's second half are scored, and the perplexity is exp of their mean negative log-likelihood. The \
last, incomplete chunk is left out. With --stride S, windows of N tokens begin every S tokens instead, and the last \
S tokens of each are scored.

Examples:
  delft perplexity model.gguf wiki.test.raw
  delft perplexity model.gguf wiki.test.raw --ctx 1024 --chunks 20 --json"
)]
pub(crate) struct Perplexity {
    /// The text file; `-` is standard input
    #[arg(value_name = "FILE", index = 2)]
    pub(crate) file: PathBuf,
    /// Windows that begin every S tokens, of which the last S are scored
    #[arg(long, value_name = "S", value_parser = positive(), allow_negative_numbers = true)]
    pub(crate) stride: Option<u64>,
    /// Stop after so many chunks
    #[arg(long, value_name = "N", value_parser = positive(), allow_negative_numbers = true)]
    pub(crate) chunks: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// `delft compare`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Both models read the text in windows of --ctx tokens (512), of which the second half is scored, as by delft perplexity. The KL \
divergence is the reference's, in nats; both need the same tokens, and memory for both at once. An adapter is put on the model, not \
on the reference.

Examples:
  delft compare model-q4_k_m.gguf model-f16.gguf wiki.test.raw
  delft compare model-q4_k_m.gguf model-f16.gguf wiki.test.raw --chunks 10 --worst 20 --json
  delft compare model-q4_k_m.gguf model-f16.gguf wiki.test.raw --svg divergence.svg")]
pub(crate) struct Compare {
    /// The model that it is compared with, such as the same without quantisation
    #[arg(value_name = "REFERENCE", index = 2)]
    pub(crate) reference: Option<String>,
    /// The text file; `-` is standard input
    #[arg(value_name = "FILE", index = 3)]
    pub(crate) file: Option<PathBuf>,
    /// Stop after N windows
    #[arg(long, value_name = "N", value_parser = positive(), allow_negative_numbers = true)]
    pub(crate) chunks: Option<u64>,
    /// Show the N tokens that are furthest apart
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub(crate) worst: u64,
    /// Draw every scored token's divergence, as an SVG
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// `delft verify`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
A reference is a safetensors file with input_ids [T] i64 and, as f32 [rows, width] of the last rows, embeddings, hidden.N (behind \
layer N), norm and logits. The first value that is further from it than --tolerance, as root mean squares, is named, and the exit \
code is 1.

Examples:
  delft verify model.gguf --make reference.safetensors --cache-type f32
  delft verify model.gguf --against reference.safetensors --device cuda
  delft verify model-q8_0.gguf --against reference.safetensors --tolerance 0.05 --json")]
pub(crate) struct Verify {
    /// The reference to compare with
    #[arg(long, value_name = "FILE", required_unless_present = "make", conflicts_with = "make")]
    pub(crate) against: Option<PathBuf>,
    /// Write this model's values as a reference instead
    #[arg(long, value_name = "FILE")]
    pub(crate) make: Option<PathBuf>,
    /// With --make: the token ids to compute, separated by commas [default: those of a short
    /// English text]
    #[arg(long, value_name = "IDS", value_delimiter = ',', conflicts_with = "against", value_parser = token)]
    pub(crate) tokens: Vec<u32>,
    /// How far values may be from the reference, relative to them
    #[arg(long, value_name = "R", default_value_t = 0.01)]
    pub(crate) tolerance: f64,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// Where a model goes, and how.
#[derive(Debug, Clone, Args)]
pub(crate) struct Output {
    /// The file to write, or of MLX's types the folder; it takes its name when it is whole
    #[arg(short, long, value_name = "PATH")]
    pub(crate) out: PathBuf,
    /// Another type for tensors whose name contains NAME; may be given several times, the last that
    /// fits counts
    #[arg(long, value_name = "NAME=TYPE")]
    pub(crate) role: Vec<String>,
    /// Elements that share a scale in MLX's types: 32, 64 or 128 [default: 64]
    #[arg(long, value_name = "N", value_parser = whole(1..=1024), allow_negative_numbers = true)]
    pub(crate) group_size: Option<u64>,
    /// Threads [default: all]
    #[arg(short, long, value_name = "N", value_parser = whole(1..=1024), allow_negative_numbers = true)]
    pub(crate) threads: Option<u64>,
    /// Replace a file that is there
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// `delft convert`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
The model is a folder of Hugging Face or MLX; metadata, tokenizer and chat template come with it. Without --type, matrices \
stay as they are stored, but for types that GGUF does not have, which become bf16. The memory taken is that of the largest tensor.

Examples:
  delft convert ./Qwen3-0.6B -o qwen3.gguf
  delft convert org/name --type q4_k_m -o name-q4_k_m.gguf
  delft convert org/name --type q8_0 --role token_embd=bf16 -o name.gguf
  delft convert qwen3:0.6b --adapter my-style -o my-style-mlx")]
pub(crate) struct Convert {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// Convert this adapter of the model instead, of PEFT's form as delft tune writes it, to a folder
    /// of mlx-lm; with =SCALE to apply it more or less strongly
    #[arg(long, alias = "lora", value_name = "PATH[=SCALE]", conflicts_with_all = ["kind", "role", "group_size", "force"])]
    pub(crate) adapter: Option<AdapterArg>,
    /// Convert an adapter of delft tune though it was made for another model
    #[arg(long, requires = "adapter")]
    pub(crate) any_base: bool,
    /// The type of matrices: f32, f16, bf16, q8_0, q4_k_m, mxfp4 and the like, as delft quantize
    /// has them
    #[arg(long = "type", value_name = "TYPE")]
    pub(crate) kind: Option<String>,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// `delft quantize`.
#[derive(Debug, Clone, Args)]
#[command(
    allow_missing_positional = true,
    after_help = "\
Types: f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 q2_k q3_k_s q3_k_m q4_k_s q4_k_m q5_k_s q5_k_m q6_k iq4_nl iq4_xs mxfp4. \
Norms and biases stay f32, and the head gets q6_k or better. Rows that are no whole blocks of a type get the nearest that fits. \
The same input gives the same bytes. mlx2 mlx3 mlx4 mlx5 mlx6 mlx8 mlx-mxfp4 make of a Hugging Face folder a folder as MLX has it.

Examples:
  delft quantize model-bf16.gguf q4_k_m -o model-q4_k_m.gguf
  delft quantize ./Qwen3-0.6B q8_0 -o qwen3-q8_0.gguf
  delft quantize model.gguf q4_0 --role attn_v=q8_0 --role output.weight=q8_0 -o model-q4_0.gguf
  delft quantize ./Qwen3-0.6B mlx4 --group-size 32 -o ./Qwen3-0.6B-4bit
  delft quantize model.gguf q3_k_m --imatrix model.imatrix.gguf -o model-q3_k_m.gguf"
)]
pub(crate) struct Quantize {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// The type of matrices; see below
    #[arg(value_name = "TYPE", index = 2)]
    pub(crate) kind: String,
    /// How much each weight matters, as delft imatrix or llama-imatrix wrote it: errors count by
    /// that
    #[arg(long, value_name = "FILE")]
    pub(crate) imatrix: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// `delft imatrix`.
#[derive(Debug, Clone, Args)]
#[command(
    allow_missing_positional = true,
    after_help = "\
The model reads the text in windows of --ctx tokens (512), the first replaced by its beginning-of-text token where it has one. What each \
product multiplies with is squared and summed, for each expert by itself. The file is as llama.cpp's llama-imatrix writes it. Some hundred \
windows of the kind of text that the model is for are enough. Mixtures of experts run on the CPU for this.

Examples:
  delft imatrix model-bf16.gguf calibration.txt -o model.imatrix.gguf
  delft quantize model-bf16.gguf q3_k_m --imatrix model.imatrix.gguf -o model-q3_k_m.gguf"
)]
pub(crate) struct Imatrix {
    /// The text file; `-` is standard input
    #[arg(value_name = "FILE", index = 2)]
    pub(crate) file: PathBuf,
    /// The file to write; it takes its name when it is whole
    #[arg(short, long, value_name = "FILE")]
    pub(crate) out: PathBuf,
    /// Replace a file that is there
    #[arg(short, long)]
    pub(crate) force: bool,
    /// Stop after so many windows
    #[arg(long, value_name = "N", value_parser = positive(), allow_negative_numbers = true)]
    pub(crate) chunks: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// `delft doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Lists instruction sets, threads, memory, GPUs with their drivers and libraries, caches, and the environment variables \
that are set. Nothing is loaded or fetched.

Examples:
  delft doctor
  delft doctor --json")]
pub(crate) struct Doctor {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// More positions than any model has.
pub(crate) const MOST: u64 = 1 << 24;

pub(crate) fn positive() -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync {
    whole(1..=MOST)
}

/// A number of bytes: alone, or with K, M, G or T for powers of 1024.
fn size(text: &str) -> Result<u64, String> {
    let upper = text.to_ascii_uppercase();
    let (number, shift) = match upper.trim_end_matches('B').trim_end_matches('I') {
        rest if rest.ends_with('K') => (&rest[..rest.len() - 1], 10),
        rest if rest.ends_with('M') => (&rest[..rest.len() - 1], 20),
        rest if rest.ends_with('G') => (&rest[..rest.len() - 1], 30),
        rest if rest.ends_with('T') => (&rest[..rest.len() - 1], 40),
        rest => (rest, 0),
    };
    let number: Option<f64> = number.parse().ok().filter(|n: &f64| (0.0..1e15).contains(n));
    let bytes = number.map(|number| number * (1u64 << shift) as f64).filter(|n| *n < 1e18);
    bytes.map(|bytes| bytes as u64).ok_or_else(|| "expected bytes, such as 20G or 800M".to_string())
}

/// A whole number of a range.
pub(crate) fn whole(
    range: RangeInclusive<u64>,
) -> impl Fn(&str) -> Result<u64, String> + Clone + Send + Sync {
    move |text| {
        let found = text.parse().ok().filter(|value| range.contains(value));
        found.ok_or_else(|| {
            format!("expected a whole number from {} to {}", range.start(), range.end())
        })
    }
}

/// A number, or none: what -1 means to a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OrNone(pub(crate) Option<u64>);

fn or_none(text: &str) -> Result<OrNone, String> {
    if text == "-1" {
        return Ok(OrNone(None));
    }
    let found = text.parse().map(|value| OrNone(Some(value)));
    found.map_err(|_| "expected a whole number, or -1".to_string())
}

fn top_k(text: &str) -> Result<u32, String> {
    if text == "-1" {
        return Ok(0);
    }
    text.parse().map_err(|_| "expected a whole number, or -1".to_string())
}

fn token(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "expected the ids of tokens, as in 1,15043".to_string())
}

fn some_text(text: &str) -> Result<String, String> {
    let some = (!text.is_empty()).then(|| text.to_string());
    some.ok_or_else(|| "expected some text: nothing would be met at once".to_string())
}

/// How many come each second.
fn rate(text: &str) -> Result<f64, String> {
    let found = text.parse().ok().filter(|rate: &f64| *rate > 0.0 && rate.is_finite());
    found.ok_or_else(|| "expected a number above 0".to_owned())
}

fn number(text: &str, holds: impl Fn(f32) -> bool, expected: &str) -> Result<f32, String> {
    text.parse()
        .ok()
        .filter(|value: &f32| value.is_finite() && holds(*value))
        .ok_or_else(|| format!("expected {expected}"))
}

/// llama.cpp's names of several letters behind one dash, which read as a cluster of short flags
/// otherwise.
const ONE_DASH: &[(&str, &str)] = &[
    ("-ngl", "--gpu-layers"),
    ("-cmoe", "--cpu-moe"),
    ("-ncmoe", "--n-cpu-moe"),
    ("-sm", "--split-mode"),
    ("-sys", "--system"),
    ("-hf", "--model"),
    ("-cnv", "--chat"),
    ("-no-cnv", "--raw"),
    ("-ub", "--chunk"),
    ("-fa", "--flash-attn"),
    ("-co", "--color"),
    ("-ctk", "--cache-type-k"),
    ("-ctv", "--cache-type-v"),
    ("-mg", "--main-gpu"),
    ("-ts", "--tensor-split"),
];

/// Flags that llama.cpp's users know and Delft has no use for, and what to do instead.
const ELSEWHERE: &[(&[&str], &str)] = &[
    (&["-i", "--interactive", "--interactive-first"], "delft chat talks with a model"),
    (&["--color"], "a terminal has colours by itself, unless NO_COLOR is set"),
    (&["--jinja"], "a model's chat template is used by itself; --raw goes without"),
    (&["--chat-template"], "--template takes a file with a chat template"),
    (&["-e", "--escape"], "the shell reads escapes: $'a\\nb'"),
    (&["-r"], "--stop ends before a text"),
    (&["-b"], "--chunk sets how many tokens of a prompt are computed together"),
    (&["--flash-attn", "--no-warmup"], "there is nothing to choose: leave it out"),
    (&["--no-mmap", "--mlock"], "weights are read into memory in any case: leave it out"),
    (&["--cache-type-k", "--cache-type-v"], "--cache-type is for both"),
    (
        &["--rope-scaling", "--rope-scale", "--rope-freq-base", "--rope-freq-scale"],
        "the model's file says how positions are scaled",
    ),
    (&["--log-disable", "--log-verbosity", "-lv"], "-q leaves out speed and memory, -v tells more"),
    (&["--main-gpu"], "--device cuda:1 takes the second GPU"),
    (&["--tensor-split"], "GPUs that share a model have even shares of it"),
];

/// The advice for a flag of llama.cpp's that has no use here.
pub(crate) fn elsewhere(flag: &str) -> Option<&'static str> {
    let name = flag.split('=').next().unwrap_or(flag);
    ELSEWHERE.iter().find(|(flags, _)| flags.contains(&name)).map(|(_, instead)| *instead)
}

/// The command line with each of [`ONE_DASH`] as the flag that it means; what stands behind `--` is
/// left alone.
pub(crate) fn spelled(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut words = false;
    let spell = |argument: OsString| {
        words |= argument == "--";
        let meant = ONE_DASH.iter().find(|(short, _)| !words && argument == *short);
        meant.map_or(argument, |(_, long)| OsString::from(long))
    };
    arguments.map(spell).collect()
}

/// A token and what is added to its logit, with llama.cpp's spelling.
fn bias(text: &str) -> Result<(u32, f32), String> {
    let sign = text.find(['+', '-']).unwrap_or(text.len());
    let (token, bias) = text.split_at(sign);
    let bias = bias.parse().ok().filter(|bias: &f32| !bias.is_nan() && *bias < f32::INFINITY);
    let pair = token.parse().ok().zip(bias);
    pair.ok_or_else(|| {
        "expected a token's id and a number with its sign, as in 15043-1".to_string()
    })
}

pub(crate) fn at_least_one(text: &str) -> Result<f32, String> {
    number(text, |value| value >= 1.0, "a number of at least 1")
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

pub(crate) fn below_one(text: &str) -> Result<f32, String> {
    number(text, |value| (0.0..1.0).contains(&value), "a number from 0 to below 1")
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

    #[test]
    fn settings_that_hints_name_are_flags() {
        let known = Cli::command();
        let run = known.find_subcommand("run").unwrap();
        for setting in delft::Setting::ALL {
            let flag = crate::terminal::flag(*setting);
            let name = flag.trim_start_matches('-');
            assert!(run.get_arguments().any(|arg| arg.get_long() == Some(name)), "{flag}");
        }
    }

    #[test]
    fn names_of_one_dash_become_flags() {
        let spell = |line: &str| {
            let spelled = spelled(line.split(' ').map(OsString::from));
            spelled
                .into_iter()
                .map(|word| word.into_string().unwrap())
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(
            spell("delft run -ngl 99 -n 5 -- -ngl"),
            "delft run --gpu-layers 99 -n 5 -- -ngl"
        );
        assert_eq!(spell("delft run -hf org/name -p x"), "delft run --model org/name -p x");
        let known = Cli::command();
        let run = known.find_subcommand("run").unwrap();
        for (short, long) in ONE_DASH {
            let name = long.trim_start_matches('-');
            let known = run.get_arguments().any(|arg| arg.get_long() == Some(name));
            assert!(known || elsewhere(long).is_some(), "{short}: {long}");
        }
        // No flag of ours has advice, and advice names flags of ours alone.
        for (flags, instead) in ELSEWHERE {
            for flag in *flags {
                let long = run.get_arguments().any(|arg| {
                    arg.get_long().map(|long| format!("--{long}")).as_deref() == Some(flag)
                        || arg.get_short().map(|short| format!("-{short}")).as_deref() == Some(flag)
                });
                assert!(!long, "{flag}");
            }
            for word in instead.split([' ', ';', ':']).filter_map(|word| word.strip_prefix("--")) {
                assert!(run.get_arguments().any(|arg| arg.get_long() == Some(word)), "{instead}");
            }
        }
    }
}

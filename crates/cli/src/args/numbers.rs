//! Arguments of the commands that print what a model computes, and how fast.

use super::*;
use clap::Args;

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
    /// The question to the model, with {} in the place of the text
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
  delft why-slow model.gguf --batch 8
  delft why-slow model.gguf --threads 8 --json")]
pub(crate) struct WhySlow {
    /// Prompt tokens
    #[arg(short, long, value_name = "P", default_value_t = 512, value_parser = positive(), allow_negative_numbers = true)]
    pub(crate) prompt: u64,
    /// Generated tokens
    #[arg(short = 'n', long, value_name = "N", default_value_t = 32, value_parser = positive(), allow_negative_numbers = true)]
    pub(crate) generate: u64,
    /// Time steps of a token of each of B sequences, each behind a prompt of its own
    #[arg(long, value_name = "B", value_parser = whole(1..=256), allow_negative_numbers = true)]
    pub(crate) batch: Option<u64>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

/// `delft perplexity`.
#[derive(Debug, Args)]
#[command(
    override_usage = "delft perplexity [OPTIONS] [MODEL] <FILE>",
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
    pub(crate) file: Option<PathBuf>,
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
    /// With --make: the token ids to compute, separated by commas [default: a short English
    /// text]
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

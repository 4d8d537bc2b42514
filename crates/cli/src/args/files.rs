//! Arguments of the commands that fetch, list, read and write models, and of `delft doctor`.

use super::*;
use clap::Args;

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
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceSpec::Auto)]
    pub(crate) device: DeviceSpec,
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
    /// Convert this adapter of the model instead, of PEFT's form as delft tune writes it, to a
    /// folder of mlx-lm; with =SCALE to apply it more or less strongly
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
    override_usage = "delft quantize [OPTIONS] --out <PATH> [MODEL] <TYPE>",
    after_help = "\
Types: f32 f16 bf16 q8_0 q4_0 q4_1 q5_0 q5_1 q2_k q3_k_s q3_k_m q4_k_s q4_k_m q5_k_s q5_k_m q6_k iq4_nl iq4_xs mxfp4 tq1_0 tq2_0. \
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
    pub(crate) kind: Option<String>,
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
    override_usage = "delft imatrix [OPTIONS] --out <FILE> [MODEL] <FILE>",
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
    pub(crate) file: Option<PathBuf>,
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

//! Arguments of the server, and of the commands that speak with one.

use std::net::IpAddr;

use clap::Args;

use super::*;

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
    #[arg(long, value_name = "ORIGIN", value_parser = origin)]
    pub(crate) cors: Vec<String>,
    /// A host name of this server, beside localhost and addresses, for requests without a key
    #[arg(long, value_name = "NAME")]
    pub(crate) allow_host: Vec<String>,
    /// Requests that each model answers at the same time on each of its devices
    #[arg(long, alias = "np", value_name = "N", default_value_t = 4, value_parser = whole(1..=256), allow_negative_numbers = true)]
    pub(crate) parallel: u64,
    /// Requests that may wait for their turn; those beyond are refused
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = whole(0..=100_000), allow_negative_numbers = true)]
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

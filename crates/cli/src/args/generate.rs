//! Arguments of the commands that continue texts: run, chat, batch.

use super::*;
use clap::Args;

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
    /// Tell the N likeliest tokens of each position and their log-probabilities, before any
    /// sampling setting: in the JSON, or on standard error behind the text
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

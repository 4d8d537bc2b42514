//! The arguments of `delft eval`.

use std::path::PathBuf;

use clap::Args;

use crate::args::{LoadArgs, positive};

/// `delft eval`.
#[derive(Debug, Args)]
#[command(after_help = "\
A .jsonl file has an example on each line: {\"messages\": [...]} as OpenAI's interface has them, {\"prompt\": .., \"completion\": ..}, \
or {\"text\": ..}; any other file is plain text. Over answers, completions and texts it tells the loss of what would be learned, in nats per token, and the perplexity; \
how many tokens were the likeliest in their place; and how many answers are exactly what greedy decoding would write. A .jsonl file \
of {\"question\": .., \"choices\": [..], \"answer\": ..} is multiple choice instead: the answer is a text, a letter or a number from 0, \
and the choice counts that the model holds likeliest, as it is and by its length.

Examples:
  delft eval qwen3:0.6b --data talks.jsonl
  delft eval qwen3:0.6b --data talks.jsonl --adapter my-style
  delft eval model.gguf --data questions.jsonl --json")]
pub(crate) struct Eval {
    /// The examples: a .jsonl file, or plain text
    #[arg(short, long, value_name = "FILE")]
    pub(crate) data: PathBuf,
    /// Measure the first N examples alone
    #[arg(long, value_name = "N", value_parser = positive())]
    pub(crate) limit: Option<u64>,
    /// Prompts are text to continue, though the model has a chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

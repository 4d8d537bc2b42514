//! `delft tokenize`: text to token ids, without loading the weights.

use delft::tokens::{Special, Tokenizer};
use serde_json::json;

use crate::args::Tokenize;
use crate::terminal::{Outcome, harmless, print, table};
use crate::{load, prompt};

pub(crate) fn run(args: &Tokenize) -> Outcome {
    let text = prompt::one(args.prompt.as_deref(), args.file.as_deref())?;
    let tokenizer = load::tokenizer(&load::find(&args.model)?)?;
    let tokens =
        tokenizer.encode(&text, Special { add: !args.no_special, parse: args.parse_special })?;
    if args.json {
        return print(&format!("{}\n", json!({ "tokens": tokens })));
    }
    if args.show {
        return print(&shown(&tokenizer, &tokens));
    }
    let ids: Vec<String> = tokens.iter().map(u32::to_string).collect();
    print(&format!("{}\n", ids.join(" ")))
}

/// Tokens with their texts, one to a line.
pub(super) fn shown(tokenizer: &Tokenizer, tokens: &[u32]) -> String {
    let row = |id: &u32| vec![id.to_string(), harmless(&tokenizer.token_text(*id))];
    table(&["ID", "TEXT"], &[true, false], &tokens.iter().map(row).collect::<Vec<_>>())
}

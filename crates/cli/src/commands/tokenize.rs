//! `delft tokenize`: text to token ids, without loading the weights.

use delft::tokens::Special;
use serde_json::json;

use crate::args::Tokenize;
use crate::load;
use crate::terminal::{Outcome, harmless, print, read_file, read_stdin, table};

pub(crate) fn run(args: &Tokenize) -> Outcome {
    let text = match (&args.text, &args.file) {
        (Some(text), _) => text.clone(),
        (None, Some(file)) => read_file(file)?,
        (None, None) => read_stdin()?,
    };
    let tokenizer = load::tokenizer(&load::find(args.model.model.as_deref())?)?;
    let tokens =
        tokenizer.encode(&text, Special { add: !args.no_special, parse: args.parse_special })?;
    if args.json {
        return print(&format!("{}\n", json!({ "tokens": tokens })));
    }
    if args.show {
        let row = |id: &u32| vec![id.to_string(), harmless(&tokenizer.token_text(*id))];
        return print(&table(
            &["ID", "TEXT"],
            &[true, false],
            &tokens.iter().map(row).collect::<Vec<_>>(),
        ));
    }
    let ids: Vec<String> = tokens.iter().map(u32::to_string).collect();
    print(&format!("{}\n", ids.join(" ")))
}

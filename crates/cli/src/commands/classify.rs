//! `delft classify`: which of some labels a model holds to follow each text.

use delft::tokens::Special;
use delft::{Error, Prompt};
use serde_json::{Map, Value, json};

use crate::args::Classify;
use crate::load;
use crate::prompt;
use crate::terminal::{Outcome, print_json_line};

/// Texts between which results are printed.
const TOGETHER: usize = 64;

pub(crate) fn run(args: &Classify) -> Outcome {
    let labels = labels(&args.labels)?;
    if !args.prompt.contains("{}") {
        return Err(Error::new("--prompt", "{} in the place of the text", &args.prompt).into());
    }
    let texts = prompt::several(&args.texts, args.file.as_deref())?;
    let (engine, _) = load::engine(&args.load, false)?;
    let tokenizer = load::need_tokenizer(&engine)?;
    let chats = engine.chat_template().is_some() && !args.raw;
    let encode = |text: &String| {
        let text = args.prompt.replace("{}", text);
        let prompt = match chats {
            true => {
                let messages = vec![json!({ "role": "user", "content": text })];
                Prompt::Chat { messages, extra: Map::new() }
            }
            false => Prompt::Text(text),
        };
        engine.encode(&prompt)
    };
    let plain = Special { add: false, parse: false };
    let tokens = labels.iter().map(|label| tokenizer.encode(label, plain));
    let tokens = tokens.collect::<delft::Result<Vec<_>>>()?;
    for (part, texts) in texts.chunks(TOGETHER).enumerate() {
        let prompts = texts.iter().map(encode).collect::<delft::Result<Vec<_>>>()?;
        let found = engine.classify(&prompts, &tokens, engine.adapters().first())?;
        for (i, logprobs) in found.iter().enumerate() {
            let top = logprobs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = logprobs.iter().map(|x| (x - top).exp()).sum();
            let best = logprobs.iter().position(|x| *x == top).unwrap_or_default();
            let by_label = |number: &dyn Fn(f64) -> f64| -> Map<String, Value> {
                let each = labels.iter().zip(logprobs);
                each.map(|(label, x)| (label.to_string(), number(*x).into())).collect()
            };
            print_json_line(&json!({
                "index": part * TOGETHER + i,
                "label": labels[best],
                "probabilities": by_label(&|x| (x - top).exp() / sum),
                "logprobs": by_label(&|x| x),
            }))?;
        }
    }
    Ok(())
}

/// Labels that differ and say something.
fn labels(given: &[String]) -> Outcome<Vec<&str>> {
    let mut labels: Vec<&str> = Vec::new();
    for label in given {
        if label.is_empty() || labels.contains(&label.as_str()) {
            let found = format!("{label:?}");
            return Err(
                Error::new("--labels", "labels that differ and say something", found).into()
            );
        }
        labels.push(label);
    }
    Ok(labels)
}

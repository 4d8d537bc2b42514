//! `delft show`: a model in a few lines, from its headers; all there is to know is in `inspect`.

use delft::hub::{LocalModel, ModelSource};
use delft::{Tensors, models};
use serde_json::{Value, json};

use super::inspect::Sizes;
use crate::args::Show;
use crate::load;
use crate::terminal::{BOLD, Outcome, bytes, count, harmless, print, print_json};

pub(crate) fn run(args: &Show) -> Outcome {
    let model = load::find(&args.model)?;
    let tensors = load::open(&model)?;
    let facts = facts(&model, &tensors);
    if args.json { print_json(&facts) } else { print(&text(&facts)) }
}

fn facts(model: &LocalModel, tensors: &Tensors) -> Value {
    let sizes = Sizes::of(tensors);
    let stated = tensors.gguf().and_then(|file| file.metadata().str("general.name").ok().flatten());
    let mut facts = json!({
        "name": stated.map_or_else(|| model.name(), str::to_string),
        "architecture": null,
        "parameters": sizes.parameters,
        "quantisation": sizes.main_type(),
        "context": null,
        "bytes": sizes.bytes,
        "template": delft::read_template(tensors).is_ok_and(|template| template.is_some()),
        "path": model.path().map(|path| path.display().to_string()),
    });
    if let ModelSource::Hub { id, commit } = &model.source {
        facts["id"] = id.as_str().into();
        facts["revision"] = commit.as_str().into();
    }
    match models::config(tensors, &models::ReadOptions::default()) {
        Ok(config) => {
            facts["architecture"] = config.architecture.name.into();
            facts["context"] = config.context.into();
        }
        Err(error) => facts["problem"] = crate::terminal::line(&error).into(),
    }
    facts
}

fn text(facts: &Value) -> String {
    let word = |key: &str| harmless(facts[key].as_str().unwrap_or_default());
    let number = |key: &str| facts[key].as_u64().unwrap_or_default();
    let mut text = format!("{BOLD}{}{BOLD:#}\n", word("name"));
    let mut line = |name: &str, value: String| text += &format!("  {name:<14}{value}\n");
    match facts.get("problem") {
        Some(_) => line("cannot run", word("problem")),
        None => line("architecture", word("architecture")),
    }
    line("parameters", count(number("parameters")));
    line("quantisation", word("quantisation"));
    if facts["context"].is_u64() {
        line("context", format!("{} tokens", number("context")));
    }
    line("size", bytes(number("bytes")));
    line("chat template", if facts["template"] == true { "yes" } else { "no" }.to_string());
    if facts.get("id").is_some() {
        line("from", format!("{} at {}", word("id"), &word("revision")));
    }
    line(
        "where",
        if facts["path"].is_null() { "in this program".to_string() } else { word("path") },
    );
    text
}

//! `delft stop`: has a server unload models, once their requests are answered.

use serde_json::json;

use crate::args::StopModels;
use crate::client::Client;
use crate::terminal::{Outcome, aside, harmless};

pub(crate) fn run(args: &StopModels) -> Outcome {
    let client = Client::new(&args.address)?;
    for model in &args.models {
        let body = json!({ "model": model, "keep_alive": 0 }).to_string();
        client.expect(&client.post("/api/generate", &body, &[])?)?;
        aside(format_args!("stopped {}", harmless(model)));
    }
    Ok(())
}

//! `delft ps`: what a server has loaded.

use serde_json::Value;

use crate::args::Ps;
use crate::client::Client;
use crate::terminal::{Outcome, aside, bytes, harmless, print, print_json, table};

pub(crate) fn run(args: &Ps) -> Outcome {
    let client = Client::new(&args.address)?;
    let told = client.expect(&client.get("/api/ps")?)?;
    if args.json {
        return print_json(&told);
    }
    let models = told["models"].as_array().map(Vec::as_slice).unwrap_or_default();
    if models.is_empty() {
        aside("no model is loaded");
        return Ok(());
    }
    let rows: Vec<_> = models.iter().map(row).collect();
    print(&table(
        &["MODEL", "PLANNED", "HELD", "DEVICE", "CONTEXT", "RUNNING", "WAITING", "UNTIL"],
        &[false, true, true, false, true, true, true, false],
        &rows,
    ))
}

fn row(model: &Value) -> Vec<String> {
    let text = |key: &str| harmless(model[key].as_str().unwrap_or_default());
    let number = |key: &str| model[key].as_u64().unwrap_or_default();
    let until = text("expires_at");
    let name = text("name");
    vec![
        name.strip_suffix(":latest").unwrap_or(&name).to_string(),
        bytes(number("planned_bytes")),
        bytes(number("held_bytes")),
        text("device"),
        number("context_length").to_string(),
        number("running").to_string(),
        number("waiting").to_string(),
        if *until < *"2200" { until } else { "unloaded for others".to_string() },
    ]
}

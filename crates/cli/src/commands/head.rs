//! The subject of a measurement: the model and the device, for people and for machines.

use delft::Engine;
use delft::hub::LocalModel;
use serde_json::{Map, Value, json};

use crate::terminal::{bytes, count, harmless};

/// `Name (architecture, 596.0M parameters, 604.2 MiB) on cpu, 2 threads, avx512`.
pub(super) fn title(engine: &Engine) -> String {
    let info = engine.info();
    format!(
        "{} ({}, {} parameters, {}) on {}",
        harmless(&info.name),
        info.architecture,
        count(info.parameters),
        bytes(info.file_bytes),
        info.device
    )
}

/// The same as an object's first entries, with `rest` after them.
pub(super) fn object(engine: &Engine, model: &LocalModel, rest: Value) -> Value {
    let info = engine.info();
    let head = json!({
        "model": info.name,
        "path": model.path().map(|path| path.display().to_string()),
        "architecture": info.architecture,
        "parameters": info.parameters,
        "file_bytes": info.file_bytes,
        "device": info.device.to_string(),
        "threads": info.device.threads,
        "load_s": info.load_ms as f64 / 1e3,
        "peak_rss_bytes": delft::peak_rss_bytes(),
    });
    joined(head, rest)
}

/// The entries of two objects as one.
pub(super) fn joined(first: Value, rest: Value) -> Value {
    let entries = [first, rest].into_iter().filter_map(|part| match part {
        Value::Object(entries) => Some(entries),
        _ => None,
    });
    Value::Object(entries.flatten().collect::<Map<String, Value>>())
}

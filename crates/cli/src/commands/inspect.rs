//! `delft inspect`: what a model is and the memory it needs, from its headers alone.

use std::collections::BTreeMap;

use delft::formats::gguf::{MetadataArray, MetadataValue};
use delft::models::{self, Config};
use delft::{CacheType, DeviceSpec, Engine, Error, LoadOptions, Location, Plan, Tensors};
use serde_json::{Value as Json, json};

use crate::args::Inspect;
use crate::load;
use crate::terminal::{BOLD, Outcome, bytes, count, harmless, print, print_json, table};

/// The sums over a model's tensors.
#[derive(Default)]
pub(super) struct Sizes {
    pub(super) parameters: u64,
    pub(super) bytes: u64,
    /// Tensors, elements and bytes by element type.
    types: BTreeMap<&'static str, (usize, u64, u64)>,
}

impl Sizes {
    pub(super) fn of(tensors: &Tensors) -> Sizes {
        let mut sizes = Sizes::default();
        for tensor in tensors.iter() {
            let (elements, size) = (tensor.elements() as u64, tensor.bytes.len() as u64);
            let entry = sizes.types.entry(tensor.dtype.name()).or_default();
            *entry = (entry.0 + 1, entry.1 + elements, entry.2 + size);
            sizes.parameters += elements;
            sizes.bytes += size;
        }
        sizes
    }

    /// The type of most elements.
    pub(super) fn main_type(&self) -> Option<&'static str> {
        self.types.iter().max_by_key(|(_, (_, elements, _))| *elements).map(|(name, _)| *name)
    }
}

/// Everything that is shown.
struct Report {
    location: Location,
    format: &'static str,
    sizes: Sizes,
    /// The model as Delft reads it, or why it cannot run it.
    model: Result<Model, Error>,
}

/// A model that Delft can run.
struct Model {
    config: Config,
    context: usize,
    /// The planned memory of each device.
    plans: Vec<(DeviceSpec, Plan)>,
}

pub(crate) fn run(args: &Inspect) -> Outcome {
    let model = load::find(&args.model)?;
    let tensors = load::open(&model)?;
    let report = report(&tensors, args);
    if args.json {
        print_json(&to_json(&report, &tensors, args))
    } else {
        print(&to_text(&report, &tensors, args))
    }
}

fn report(tensors: &Tensors, args: &Inspect) -> Report {
    let model = models::config(tensors, &models::ReadOptions::default()).and_then(|config| {
        let context = args.ctx.map_or(config.context, |n| n as usize);
        let cache_type = CacheType::from(args.cache_type);
        let on = LoadOptions::on(args.device);
        let cpu_experts = args.experts.layers();
        let options = LoadOptions { context: Some(context), cache_type, cpu_experts, ..on };
        let prepared = Engine::prepare(tensors.location(), &options)?;
        let places = prepared.places().iter().copied();
        let plans = places.zip(prepared.plan().iter().copied()).collect();
        Ok(Model { config, context, plans })
    });
    let format = if tensors.gguf().is_some() { "gguf" } else { "safetensors" };
    Report { location: tensors.location(), format, sizes: Sizes::of(tensors), model }
}

fn to_text(report: &Report, tensors: &Tensors, args: &Inspect) -> String {
    let mut text = format!("{BOLD}{}{BOLD:#}\n", harmless(&report.location.to_string()));
    let mut line = |name: &str, value: String| text += &format!("  {name:<16}{value}\n");
    let version =
        tensors.gguf().map_or(String::new(), |file| format!(" version {}", file.header().version));
    line("format", format!("{}{version}", report.format));
    line("parameters", format!("{} in {} tensors", count(report.sizes.parameters), tensors.len()));
    line("weights", bytes(report.sizes.bytes));
    match &report.model {
        Ok(Model { config, context, plans }) => {
            line("architecture", config.architecture.name.to_string());
            line("layers", config.layers.to_string());
            line("hidden", config.hidden.to_string());
            line("feed-forward", config.feed_forward.to_string());
            line(
                "heads",
                format!(
                    "{} of {}, {} for keys and values",
                    config.heads, config.head_dim, config.kv_heads
                ),
            );
            line(
                "vocabulary",
                format!(
                    "{}{}",
                    config.vocab,
                    if config.tied { ", tied to the output" } else { "" }
                ),
            );
            line("trained context", config.context.to_string());
            text += &format!("\n{BOLD}memory at {context} tokens{BOLD:#}\n");
            let mut row =
                |name: &str, value: u64| text += &format!("  {name:<16}{:>10}\n", bytes(value));
            for (place, plan) in plans {
                let of = if plans.len() > 1 { format!("{place} ") } else { String::new() };
                for (name, value) in planned(plan) {
                    row(&format!("{of}{name}"), value);
                }
            }
            if let Some((place, _)) = plans.iter().find(|(_, plan)| !plan.fits()) {
                text += &format!("  does not fit {place}: a shorter --ctx may\n");
            }
        }
        Err(error) => line("cannot run", crate::terminal::line(error)),
    }
    let rows: Vec<Vec<String>> = report
        .sizes
        .types
        .iter()
        .map(|(name, (tensors, elements, size))| {
            vec![name.to_string(), tensors.to_string(), count(*elements), bytes(*size)]
        })
        .collect();
    text.push('\n');
    text += &table(&["TYPE", "TENSORS", "ELEMENTS", "SIZE"], &[false, true, true, true], &rows);
    let metadata: Vec<Vec<String>> = metadata(tensors)
        .into_iter()
        .map(|(key, value)| vec![harmless(&key), shown(&value)])
        .collect();
    text.push('\n');
    text += &table(&["KEY", "VALUE"], &[false, false], &metadata);
    if args.tensors {
        let rows: Vec<Vec<String>> = tensors
            .iter()
            .map(|t| {
                vec![
                    harmless(t.name),
                    t.dtype.name().to_string(),
                    format!("{:?}", t.shape),
                    bytes(t.bytes.len() as u64),
                ]
            })
            .collect();
        text.push('\n');
        text += &table(&["TENSOR", "TYPE", "SHAPE", "SIZE"], &[false, false, false, true], &rows);
    }
    text
}

fn to_json(report: &Report, tensors: &Tensors, args: &Inspect) -> Json {
    let types: serde_json::Map<String, Json> = report
        .sizes
        .types
        .iter()
        .map(|(name, (tensors, elements, size))| {
            (name.to_string(), json!({ "tensors": tensors, "elements": elements, "bytes": size }))
        })
        .collect();
    let mut out = json!({
        "path": report.location.path().map(|path| path.display().to_string()),
        "format": report.format,
        "parameters": report.sizes.parameters,
        "bytes": report.sizes.bytes,
        "types": types,
    });
    match &report.model {
        Ok(Model { config, context, plans }) => {
            out["architecture"] = config.architecture.name.into();
            out["layers"] = config.layers.into();
            out["hidden"] = config.hidden.into();
            out["feed_forward"] = config.feed_forward.into();
            out["heads"] = config.heads.into();
            out["kv_heads"] = config.kv_heads.into();
            out["head_dim"] = config.head_dim.into();
            out["vocab"] = config.vocab.into();
            out["trained_context"] = config.context.into();
            out["tied"] = config.tied.into();
            let all = |part: fn(&Plan) -> usize| -> Json {
                plans.iter().map(|(_, plan)| part(plan)).fold(0, usize::saturating_add).into()
            };
            out["memory"] = json!({
                "ctx": context,
                "weights_bytes": all(|plan| plan.weights),
                "cache_bytes": all(|plan| plan.cache),
                "activation_bytes": all(|plan| plan.arena),
                "working_bytes": all(|plan| plan.working),
                "total_bytes": all(Plan::needed),
                "fits": plans.iter().all(|(_, plan)| plan.fits()),
            });
            let part = |(name, value): (&str, u64)| (format!("{name}_bytes"), value.into());
            let share = |(place, plan): &(DeviceSpec, Plan)| -> Json {
                let name = ("device".to_owned(), place.to_string().into());
                Json::Object(
                    [name].into_iter().chain(planned(plan).into_iter().map(part)).collect(),
                )
            };
            match &plans[..] {
                [one] => out["device_memory"] = share(one),
                several => out["device_memory"] = several.iter().map(share).collect(),
            }
        }
        Err(error) => out["problem"] = crate::terminal::line(error).into(),
    }
    out["metadata"] = Json::Object(metadata(tensors).into_iter().collect());
    if args.tensors {
        let entry = |t: delft::formats::TensorView| json!({ "name": t.name, "dtype": t.dtype.name(), "shape": t.shape, "bytes": t.bytes.len() });
        out["tensors"] = tensors.iter().map(entry).collect();
    }
    out
}

/// The planned contents of a device's memory, and the bytes that are free there.
fn planned(plan: &Plan) -> Vec<(&'static str, u64)> {
    let parts = [
        ("weights", Some(plan.weights)),
        ("cache", Some(plan.cache)),
        ("activations", Some(plan.arena)),
        ("working", Some(plan.working)),
        ("total", Some(plan.needed())),
        ("free", plan.free),
    ];
    parts.into_iter().filter_map(|(name, bytes)| Some((name, bytes? as u64))).collect()
}

/// The file's own metadata: GGUF keys, or config.json.
fn metadata(tensors: &Tensors) -> Vec<(String, Json)> {
    if let Some(file) = tensors.gguf() {
        return file.metadata().iter().map(|(key, value)| (key.to_string(), gguf(value))).collect();
    }
    let config = tensors.folder().and_then(|folder| folder.config().as_object());
    config.into_iter().flatten().map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// A GGUF value; a long array is told by its type and length, such as `array of 32000 string`.
fn gguf(value: &MetadataValue) -> Json {
    const WHOLE: usize = 16;
    match value {
        MetadataValue::Bool(value) => (*value).into(),
        MetadataValue::String(text) => text.as_str().into(),
        MetadataValue::F32(value) => float(*value),
        MetadataValue::F64(value) => (*value).into(),
        MetadataValue::Array(array) if array.len() <= WHOLE => match array {
            MetadataArray::F32(values) => values.iter().copied().map(float).collect(),
            MetadataArray::F64(values) => values.iter().copied().collect(),
            MetadataArray::Bool(values) => values.iter().copied().collect(),
            MetadataArray::String(values) => values.iter().map(String::as_str).collect(),
            MetadataArray::Array(_) => value.kind().into(),
            whole => whole.integers().into_iter().flatten().map(integer).collect(),
        },
        MetadataValue::Array(_) => value.kind().into(),
        whole => whole.integer().map_or(Json::Null, integer),
    }
}

fn integer(value: i128) -> Json {
    u64::try_from(value)
        .map(Json::from)
        .or_else(|_| i64::try_from(value).map(Json::from))
        .unwrap_or(Json::Null)
}

/// Through its decimal text, so that 1e-5f32 reads 1e-5 and not 0.0000099999997.
fn float(value: f32) -> Json {
    value.to_string().parse::<f64>().map_or(Json::Null, Json::from)
}

/// A metadata value on one line of bounded length.
fn shown(value: &Json) -> String {
    const WIDTH: usize = 72;
    let text = value.as_str().map_or_else(|| value.to_string(), str::to_string);
    let line = harmless(&text.chars().take(WIDTH).collect::<String>());
    if text.chars().nth(WIDTH).is_some() { format!("{line}...") } else { line }
}

//! Ollama's interface to models: what there is, what is loaded, and changes of the store.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use delft::formats::gguf;
use delft::hub::{Hub, PullProgress};
use delft::tokens::tools::{CallFormat, ToolNotice};
use delft::tokens::{ChatTemplate, Tokenizer};
use delft::{Capability, Engine, Error, Plan, Tensors, models};
use hyper::StatusCode;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::catalogue::{Catalogue, Known};
use crate::fields::{Field, Fields, Unknown, no_effect, refused, used};
use crate::infill::Infill;
use crate::library::{held_bytes, planned_part, seconds};
use crate::log::{Line, timestamp_of};
use crate::native::short;
use crate::problem::{Api, Problem};
use crate::router::{Answered, App, Call, noting};
use crate::stream::{Framing, response};
use crate::task;

/// How often the progress of a download is told.
const OFTEN: Duration = Duration::from_millis(100);

/// A model's kind and size, as lists tell of them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Summary {
    family: &'static str,
    parameters: Option<u64>,
    level: &'static str,
}

/// Summaries by names, with when the files were changed.
pub(crate) type Summaries = Mutex<HashMap<(String, u64), Summary>>;

impl Summary {
    fn of(tensors: &Tensors) -> delft::Result<Summary> {
        let config = models::config(tensors, &models::ReadOptions::default())?;
        let parameters = tensors.iter().map(|tensor| tensor.elements() as u64).sum();
        let family = config.architecture.name;
        Ok(Summary { family, parameters: Some(parameters), level: main_type(tensors) })
    }

    /// That of a model, whose files are read once unless they change; an empty one where they
    /// cannot be read.
    fn known(app: &App, known: &Known) -> Summary {
        let summaries = || app.summaries.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (known.name.clone(), known.files.modified);
        if let Some(found) = summaries().get(&key) {
            return found.clone();
        }
        let location = app.models.look_up(&known.name).map(|(_, location)| location);
        let tensors = location.ok().and_then(|location| Tensors::open(location).ok());
        let read = tensors.and_then(|tensors| Summary::of(&tensors).ok()).unwrap_or_default();
        let mut summaries = summaries();
        summaries.retain(|(name, _), _| *name != known.name);
        summaries.insert(key, read.clone());
        read
    }

    fn details(&self, known: &Known) -> Value {
        json!({
            "parent_model": known.parent.as_deref().unwrap_or_default(),
            "format": known.files.format,
            "family": self.family,
            "families": if self.family.is_empty() { vec![] } else { vec![self.family] },
            "parameter_size": self.parameters.map_or(String::new(), size),
            "quantization_level": self.level,
        })
    }
}

/// A count of parameters as Ollama writes it.
fn size(parameters: u64) -> String {
    match parameters {
        0..1_000_000 => format!("{:.0}K", parameters as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1}M", parameters as f64 / 1e6),
        _ => format!("{:.1}B", parameters as f64 / 1e9),
    }
}

/// A name with a tag, which all have in Ollama's lists: clients look for names there that they have
/// added one to.
fn tagged(name: &str) -> String {
    let has = name.rsplit('/').next().is_some_and(|last| last.contains(':'));
    if has { name.to_string() } else { format!("{name}:latest") }
}

fn listed(app: &App, known: &Known) -> Value {
    let name = tagged(&known.name);
    json!({
        "name": name,
        "model": name,
        "modified_at": timestamp_of(known.changed(app.created)),
        "size": known.files.bytes,
        "digest": known.files.commit,
        "details": Summary::known(app, known).details(known),
    })
}

/// `/api/tags`.
pub(crate) async fn tags(State(app): State<Arc<App>>) -> Response {
    let list =
        || -> Vec<Value> { app.models.known().iter().map(|known| listed(&app, known)).collect() };
    axum::Json(json!({ "models": tokio::task::block_in_place(list) })).into_response()
}

/// `/api/ps`.
pub(crate) async fn ps(State(app): State<Arc<App>>) -> Response {
    // A model that computes tells its memory between two steps.
    let residents = || -> Vec<Value> {
        let residents = app.models.residents().into_iter();
        residents
            .map(|resident| {
                let engines = &resident.model.engines;
                let cpu = |engine: &&Engine| engine.info().device.name == "cpu";
                let (bytes, on_cpu) = (held_bytes(engines), held_bytes(engines.iter().filter(cpu)));
                let known = Known {
                    name: resident.model.name.clone(),
                    parent: resident.model.parent.clone(),
                    files: resident.files,
                    loaded: Some(resident.model.clone()),
                };
                let mut object = listed(&app, &known);
                let (running, waiting) = resident.model.generator.load();
                object["size"] = bytes.into();
                object["size_vram"] = bytes.saturating_sub(on_cpu).into();
                object["context_length"] = resident.model.context().into();
                object["device"] = resident.model.devices().into();
                object["planned_bytes"] = planned_part(engines, Plan::most).into();
                object["held_bytes"] = bytes.into();
                object["running"] = running.into();
                object["waiting"] = waiting.into();
                // One that stays for ever is told of as Ollama does: it expires in a far year.
                object["expires_at"] = match resident.expires {
                    Some(at) => timestamp_of(seconds(at)),
                    None => FAR.to_string(),
                }
                .into();
                object
            })
            .collect()
    };
    let list = tokio::task::block_in_place(residents);
    axum::Json(json!({ "models": list })).into_response()
}

/// When a model expires that is never unloaded for time.
const FAR: &str = "2318-01-01T00:00:00.000Z";

/// `/api/show`: of a model that is not loaded, by its files.
pub(crate) async fn show(call: Call) -> Answered {
    const SHOW: &[Field] =
        &[used("model"), used("name"), used("verbose"), no_effect("system"), no_effect("options")];
    let fields = call.fields(&[SHOW], Unknown::Noted).await?;
    let name = name(&fields)?;
    let verbose = fields.flag("verbose")?.unwrap_or(false);
    let show = || -> Result<Value, Problem> {
        let (known, location) = call.app.models.look_up(name)?;
        let tensors = Tensors::open(location)?;
        match &known.loaded {
            Some(model) => {
                let parts = (model.template(), model.engine.tokenizer(), model.infill_tokens());
                described(&call.app, &known, &tensors, parts, verbose)
            }
            None => {
                let template = delft::read_template(&tensors)?;
                let tokenizer = delft::read_tokenizer(&tensors)?;
                let infill = tokenizer.as_ref().and_then(|own| Infill::of(own, metadata(&tensors)));
                let parts = (template.as_ref(), tokenizer.as_ref(), infill.as_ref());
                described(&call.app, &known, &tensors, parts, verbose)
            }
        }
    };
    let shown = call.reading(show).await?;
    Ok(noting(&fields, axum::Json(shown).into_response()))
}

/// The tokenizer of a model, in Ollama's words.
type Parts<'a> = (Option<&'a ChatTemplate>, Option<&'a Tokenizer>, Option<&'a Infill>);

/// The metadata of a GGUF file.
fn metadata(tensors: &Tensors) -> Option<&gguf::Metadata> {
    tensors.gguf().map(|file| file.metadata())
}

/// All that is told of a model.
fn described(
    app: &App,
    known: &Known,
    tensors: &Tensors,
    (template, tokenizer, infill): Parts<'_>,
    verbose: bool,
) -> Result<Value, Problem> {
    let config = models::config(tensors, &models::ReadOptions::default())?;
    let summary = Summary::of(tensors)?;
    let architecture = summary.family;
    let mut info = json!({
        "general.architecture": architecture,
        "general.parameter_count": summary.parameters,
        format!("{architecture}.context_length"): config.context,
        format!("{architecture}.embedding_length"): config.hidden,
        format!("{architecture}.block_count"): config.layers,
    });
    // The template and the name are told beside them.
    let keys = metadata(tensors).into_iter().flat_map(|metadata| metadata.iter());
    let beside = ["general.name", "tokenizer.chat_template"];
    for (key, value) in keys.filter(|(key, _)| !beside.contains(key)) {
        info[key] = told(value, verbose);
    }
    let mut text = template.and_then(|template| template.source(None)).unwrap_or_default().into();
    if let (Some(infill), Some(tokenizer)) = (infill, tokenizer) {
        // To Jinja it is a comment.
        text = format!("{{#- {} -#}}{text}", infill.layout(tokenizer));
    }
    let parameters = parameters(known, tokenizer);
    let each = |tensor: delft::formats::TensorView<'_>| json!({ "name": tensor.name, "type": tensor.dtype.name(), "shape": tensor.shape });
    let listed: Vec<Value> = if verbose { tensors.iter().map(each).collect() } else { Vec::new() };
    let stated = |(name, value): &(&str, String)| format!("PARAMETER {name} {value}\n");
    let modelfile = format!(
        "# Modelfile of delft serve; the template is Jinja.\nFROM {}\nTEMPLATE \"\"\"{text}\"\"\"\n{}",
        known.name,
        parameters.iter().map(stated).collect::<String>()
    );
    // Ollama's columns.
    let aligned = |(name, value): &(&str, String)| format!("{name:<30} {value}");
    Ok(json!({
        "modelfile": modelfile,
        "parameters": parameters.iter().map(aligned).collect::<Vec<_>>().join("\n"),
        "template": text,
        "license": info["general.license"].as_str().unwrap_or_default(),
        "details": summary.details(known),
        "model_info": info,
        "tensors": listed,
        "capabilities": capabilities(known, tensors, template, infill.is_some())?,
        "modified_at": timestamp_of(known.changed(app.created)),
    }))
}

/// The settings that hold where a request says nothing, by the names that Ollama's files give them:
/// of a model that is not loaded, the tokens that end its texts.
fn parameters(known: &Known, tokenizer: Option<&Tokenizer>) -> Vec<(&'static str, String)> {
    let mut all = Vec::new();
    if let Some(model) = &known.loaded {
        let sampling = model.engine.sampling_defaults();
        all.push(("num_ctx", model.context().to_string()));
        all.push(("temperature", short(sampling.temperature).to_string()));
        all.push(("top_k", sampling.top_k.to_string()));
        all.push(("top_p", short(sampling.top_p).to_string()));
        all.push(("min_p", short(sampling.min_p).to_string()));
        all.push(("repeat_penalty", short(sampling.repetition_penalty).to_string()));
    }
    if let Some(tokenizer) = tokenizer {
        let texts = tokenizer.eos().iter().map(|id| tokenizer.token_text(*id));
        let texts = texts.filter(|text| !text.is_empty());
        all.extend(texts.map(|text| ("stop", Value::from(text).to_string())));
    }
    all
}

/// The capabilities of a model, in Ollama's words.
fn capabilities(
    known: &Known,
    tensors: &Tensors,
    template: Option<&ChatTemplate>,
    fills_gaps: bool,
) -> Result<Vec<&'static str>, Problem> {
    let embeds = match &known.loaded {
        Some(model) => !model.has(Capability::Generate),
        None => delft::read_embedding_form(tensors)?.is_some(),
    };
    if embeds {
        return Ok(vec!["embedding"]);
    }
    let mut all = vec!["completion"];
    if fills_gaps {
        all.push("insert");
    }
    if CallFormat::or_described(template).1 == ToolNotice::ByTemplate {
        all.push("tools");
    }
    if !delft::reasoning::switches(true, template).is_empty() {
        all.push("thinking");
    }
    Ok(all)
}

/// The element type of most of a model's elements.
fn main_type(tensors: &Tensors) -> &'static str {
    let mut types: BTreeMap<&'static str, usize> = BTreeMap::new();
    for tensor in tensors.iter() {
        *types.entry(tensor.dtype.name()).or_default() += tensor.elements();
    }
    types.into_iter().max_by_key(|(_, elements)| *elements).map_or("", |(name, _)| name)
}

/// A value of a GGUF file's metadata. Of a long list, which may be a whole vocabulary, nothing is
/// told unless all is asked for.
fn told(value: &gguf::MetadataValue, verbose: bool) -> Value {
    /// Longest list that Ollama tells of unasked.
    const LONGEST: usize = 5;
    match value {
        gguf::MetadataValue::Bool(value) => (*value).into(),
        gguf::MetadataValue::String(text) => text.as_str().into(),
        gguf::MetadataValue::F32(value) => short(*value).into(),
        gguf::MetadataValue::F64(value) => (*value).into(),
        gguf::MetadataValue::Array(array) if !verbose && array.len() > LONGEST => json!([]),
        gguf::MetadataValue::Array(array) => match array {
            gguf::MetadataArray::F32(values) => values.iter().copied().map(short).collect(),
            gguf::MetadataArray::F64(values) => values.iter().copied().collect(),
            gguf::MetadataArray::Bool(values) => values.iter().copied().collect(),
            gguf::MetadataArray::String(values) => values.iter().map(String::as_str).collect(),
            gguf::MetadataArray::Array(_) => Value::Null,
            whole => whole.integers().into_iter().flatten().map(integer).collect(),
        },
        whole => whole.integer().map_or(Value::Null, integer),
    }
}

fn integer(value: i128) -> Value {
    let small = || i64::try_from(value).map_or(Value::Null, Value::from);
    u64::try_from(value).map_or_else(|_| small(), Value::from)
}

/// The name of a model that must be given; older clients call it `name`.
fn name(fields: &Fields) -> Result<&str, Problem> {
    let name = fields.text("model")?.filter(|name| !name.is_empty());
    fields.needed("model", name.or(fields.text("name")?))
}

/// The store, which a request wants to change.
fn store(models: &Catalogue) -> Result<Hub, Problem> {
    models.hub().ok_or_else(|| {
        let message = "this server has no store of models: it serves those that it was given";
        Problem::new(StatusCode::FORBIDDEN, "no_store", message)
    })
}

/// `/api/pull`: fetches a model into the store, telling its progress.
pub(crate) async fn pull(call: Call) -> Answered {
    const PULL: &[Field] = &[
        used("model"),
        used("name"),
        used("stream"),
        refused("insecure", "models come over TLS", &["false"]),
        refused("username", "HF_TOKEN is how the hub is told who asks", &["\"\""]),
        refused("password", "HF_TOKEN is how the hub is told who asks", &["\"\""]),
    ];
    let fields = call.fields(&[PULL], Unknown::Noted).await?;
    let (name, hub) = (name(&fields)?.to_string(), store(&call.app.models)?);
    let streams = fields.flag("stream")?.unwrap_or(true);
    let (told, mut heard) = mpsc::unbounded_channel();
    let fetched = task::blocking(move || {
        let done = fetch(&hub, &name, &Told::new(told.clone()));
        Line::about("pull")
            .with("model", &name)
            .with(
                "outcome",
                done.as_ref().map_or_else(|problem| problem.message.as_str(), |()| "done"),
            )
            .write();
        done
    });
    if !streams {
        fetched.await.map_err(|_| Problem::failed("a panic ended the download"))??;
        let done = axum::Json(json!({ "status": "success" }));
        return Ok(noting(&fields, done.into_response()));
    }
    let streamed = response(Framing::Lines, |sender| async move {
        // A download whose client goes away comes to its end all the same.
        while let Some(line) = sender.or_gone(heard.recv()).await? {
            sender.send(&line).await?;
        }
        let last = match fetched.await {
            Ok(Ok(())) => json!({ "status": "success" }),
            Ok(Err(problem)) => problem.to_json(Api::Ollama),
            Err(_) => Problem::failed("a panic ended the download").to_json(Api::Ollama),
        };
        sender.send(&last).await
    });
    Ok(noting(&fields, streamed))
}

/// Fetches a model, unless it is one that could not be run.
fn fetch(hub: &Hub, name: &str, progress: &Told) -> Result<(), Problem> {
    progress.tell(json!({ "status": "pulling manifest" }));
    let wrong = |error: Error| {
        let status = if error.found.starts_with("404 ") {
            StatusCode::NOT_FOUND
        } else {
            StatusCode::INTERNAL_SERVER_ERROR
        };
        Problem::new(status, "not_pulled", error.to_string())
    };
    // A path is for those who may read this machine's files, and is here already.
    if delft::hub::HubName::parse(name).is_err() {
        return Err(Problem::field("model", "expected a short name or a hub id, org/name:TAG"));
    }
    let offer = hub.offer(name, progress).map_err(wrong)?;
    if let Some(error) = delft::objection(&offer, progress).map_err(wrong)? {
        return Err(wrong(error));
    }
    offer.fetch(progress).map_err(wrong)?;
    progress.tell(json!({ "status": "verifying sha256 digest" }));
    progress.tell(json!({ "status": "writing manifest" }));
    Ok(())
}

/// Tells of a download in Ollama's lines.
struct Told {
    lines: mpsc::UnboundedSender<Value>,
    /// The file that is coming: its size, and when it was last told of.
    current: Mutex<Option<(u64, Instant)>>,
}

impl Told {
    fn new(lines: mpsc::UnboundedSender<Value>) -> Told {
        Told { lines, current: Mutex::default() }
    }

    fn tell(&self, line: Value) {
        // The client may have gone away.
        let _ = self.lines.send(line);
    }

    fn current(&self) -> MutexGuard<'_, Option<(u64, Instant)>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn file(&self, file: &str, total: u64, have: u64) {
        let status = format!("pulling {file}");
        self.tell(json!({ "status": status, "digest": file, "total": total, "completed": have }));
    }
}

impl PullProgress for Told {
    fn start(&self, file: &str, size: Option<u64>, have: u64) {
        let total = size.unwrap_or(0);
        *self.current() = Some((total, Instant::now()));
        self.file(file, total, have);
    }

    fn at(&self, file: &str, have: u64) {
        let mut current = self.current();
        let Some((total, last)) = current.as_mut().filter(|(_, last)| last.elapsed() >= OFTEN)
        else {
            return;
        };
        *last = Instant::now();
        let total = (*total).max(have);
        drop(current);
        self.file(file, total, have);
    }

    fn done(&self, file: &str) {
        if let Some((total, _)) = self.current().take() {
            self.file(file, total, total);
        }
    }

    fn note(&self, text: &str) {
        self.tell(json!({ "status": text }));
    }
}

/// `/api/copy`: a further name for a model of the store; nothing is copied.
pub(crate) async fn copy(call: Call) -> Answered {
    const COPY: &[Field] = &[used("source"), used("destination")];
    let fields = call.fields(&[COPY], Unknown::Noted).await?;
    let source = fields.needed("source", fields.text("source")?)?;
    let destination = fields.needed("destination", fields.text("destination")?)?;
    let bare = |name: &str| name.strip_suffix(":latest").unwrap_or(name).to_string();
    let copy = || -> Result<(), Problem> {
        let (known, _) = call.app.models.look_up(source)?;
        store(&call.app.models)?;
        let added = call.app.models.with_hub(|hub| hub.add_name(&bare(destination), &known.name));
        added.unwrap_or(Ok(())).map_err(Problem::from)
    };
    call.reading(copy).await?;
    Ok(noting(&fields, StatusCode::OK.into_response()))
}

/// `/api/delete`: a name that a copy made, or a model of the store with its files.
pub(crate) async fn delete(call: Call) -> Answered {
    const DELETE: &[Field] = &[used("model"), used("name")];
    let fields = call.fields(&[DELETE], Unknown::Noted).await?;
    let name = name(&fields)?;
    let hub = store(&call.app.models)?;
    let bare = name.strip_suffix(":latest").unwrap_or(name);
    if call.reading(|| hub.remove_name(bare)).await? {
        return Ok(noting(&fields, StatusCode::OK.into_response()));
    }
    if call.reading(|| hub.find_stored(bare)).await?.is_none() {
        return Err(call.reading(|| call.app.models.unknown(name)).await);
    }
    call.app.models.stop(bare, "deletion").await?;
    let (hub, own) = (hub.clone(), bare.to_string());
    let removed = task::blocking(move || hub.removal(&own)?.run()).await;
    removed.map_err(|_| Problem::failed("a panic ended the removal"))??;
    call.app.models.forget_adapters(bare);
    Line::about("deleted").with("model", bare).write();
    Ok(noting(&fields, StatusCode::OK.into_response()))
}

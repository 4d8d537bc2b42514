//! The record of a request from its head to the last byte of its answer: its name and seed, events
//! of its begin and end, and the record of both for `delft replay`.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use delft::{Error, Finish, Metrics, Result};
use hyper::body::{Frame, SizeHint};
use serde_json::{Value, json};

use crate::build::build;
use crate::catalogue::Held;
use crate::log::{Line, timestamp};
use crate::native::settings;
use crate::reply::Began;
use crate::router::App;

/// Longest part of an answer that is recorded, in bytes.
const RECORDED: usize = 16 << 20;

/// The state of a request on its way.
#[derive(Debug)]
pub(crate) struct Trail {
    /// Its name in log lines, in its response and in records.
    pub(crate) id: String,
    /// The seed of its texts, unless it gives one.
    pub(crate) seed: u64,
    /// Whether its answer tells the tokens of its texts.
    tells_tokens: bool,
    /// Its body, where it is to be recorded.
    body: OnceLock<Bytes>,
    /// The model that answers it.
    model: OnceLock<Answering>,
    /// Time and tokens of its texts, as far as they have ended.
    took: Mutex<Took>,
    /// The tokens of those that have ended, where they are recorded.
    written: Mutex<Vec<Arc<Written>>>,
}

/// The tokens of a text, and the seed that they were drawn with.
#[derive(Debug)]
pub(crate) struct Written {
    /// Its place among the texts of its request.
    pub(crate) index: usize,
    pub(crate) seed: u64,
    pub(crate) prompt: Vec<u32>,
    /// Tokens of the prompt that were found computed.
    pub(crate) cached: usize,
    /// Those that were generated.
    pub(crate) tokens: Vec<u32>,
}

impl Written {
    /// The text as answers and records tell of it.
    pub(crate) fn to_json(&self) -> Value {
        let Written { index, seed, prompt, cached, tokens } = self;
        // A seed is beyond what numbers of many JSON readers hold.
        let seed = seed.to_string();
        json!({ "index": index, "seed": seed, "prompt": prompt, "cached": cached, "tokens": tokens })
    }
}

/// Time and tokens of a request's texts.
#[derive(Debug, Default)]
struct Took {
    prompt: usize,
    cached: usize,
    generated: usize,
    /// Why the last of them ended; none have.
    finish: Option<&'static str>,
    queued: Duration,
    /// From the turn of the first to its first token.
    prefill: Duration,
}

/// A model that answers, as a record tells of it.
#[derive(Debug)]
struct Answering {
    name: String,
    fingerprint: String,
    /// Defaults where a request says nothing.
    settings: Value,
}

impl Trail {
    /// Watches a request that may give its texts a seed, and ask for their tokens.
    pub(crate) fn new(number: u64, seed: Option<u64>, tells_tokens: bool) -> Trail {
        let (id, seed) = (format!("{number:016x}"), seed.unwrap_or(number));
        let (body, model, took, written) = Default::default();
        Trail { id, seed, tells_tokens, body, model, took, written }
    }

    /// Whether the tokens of its texts are recorded or told.
    pub(crate) fn keeps_tokens(&self) -> bool {
        self.tells_tokens || self.body.get().is_some()
    }

    /// Keeps the tokens of a text where they are recorded, and returns them where they are told.
    pub(crate) fn keep(&self, written: Arc<Written>) -> Option<Arc<Written>> {
        if self.body.get().is_some() {
            let mut all = self.written.lock().unwrap_or_else(PoisonError::into_inner);
            all.push(written.clone());
        }
        self.tells_tokens.then_some(written)
    }

    /// Notes the model that answers.
    pub(crate) fn answers(&self, model: &Held) {
        let answering = || Answering {
            name: model.name.clone(),
            fingerprint: model.engine.fingerprint().to_string(),
            settings: settings(model),
        };
        self.model.get_or_init(answering);
    }

    /// Notes what a text took that has ended, or was given up.
    pub(crate) fn counts(&self, metrics: &Metrics, finish: &Finish, queued: Duration) {
        let mut took = self.took.lock().unwrap_or_else(PoisonError::into_inner);
        took.prompt += metrics.prompt_tokens;
        took.cached += metrics.reused_tokens;
        took.generated += metrics.generated_tokens;
        if took.finish.is_none() {
            took.prefill = metrics.prefill;
        }
        (took.finish, took.queued) = (Some(finish.name()), queued);
    }

    /// Notes the body.
    pub(crate) fn asks(&self, body: &Bytes) {
        self.body.get_or_init(|| body.clone());
    }
}

/// A file of requests and their answers, a JSON object on each line.
pub(crate) struct Record(Mutex<File>);

impl Record {
    /// Begins a file in a folder, which is made if there is none. It is called after the time, and
    /// holds what people ask, so that only its owner may read it.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn begin(folder: &Path) -> Result<Record> {
        let mut make = std::fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut make, 0o700);
        let made = make.recursive(true).create(folder);
        made.map_err(|error| Error::io(folder.display(), error))?;
        let mut options = File::options();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        loop {
            // Not every system allows colons in names.
            let path = folder.join(format!("{}.jsonl", timestamp().replace(':', "-")));
            match options.open(&path) {
                Ok(file) => return Ok(Record(Mutex::new(file))),
                // Another server began in the same millisecond.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(Error::io(path.display(), error)),
            }
        }
    }

    fn write(&self, line: &Value) {
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // A disk that is full is no reason to stop serving.
        let _ = file.write_all(format!("{line}\n").as_bytes());
    }
}

/// A request whose answer is on its way.
pub(crate) struct Asked {
    pub(crate) app: Arc<App>,
    pub(crate) trail: Arc<Trail>,
    pub(crate) method: hyper::Method,
    pub(crate) path: String,
    pub(crate) began: Began,
}

impl Asked {
    /// Tells that it has begun.
    pub(crate) fn begin(&self) {
        let Asked { trail, method, path, .. } = self;
        let told = json!({ "id": trail.id, "method": method.as_str(), "path": path });
        self.app.models.events().tell("request.begun", told);
    }

    /// The response, watched to its end.
    pub(crate) fn watch(self, response: Response) -> Response {
        let recorded = self.app.record.is_some() && self.trail.body.get().is_some();
        let status = response.status().as_u16();
        let (head, body) = response.into_parts();
        let text = recorded.then(Vec::new);
        Response::from_parts(
            head,
            Body::new(Watched { body, asked: self, status, text, whole: false }),
        )
    }
}

/// A body on its way.
struct Watched {
    body: Body,
    asked: Asked,
    status: u16,
    /// The bytes sent so far, where they are recorded.
    text: Option<Vec<u8>>,
    /// Whether all of it was sent.
    whole: bool,
}

impl hyper::body::Body for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                if let (Some(data), Some(text)) = (frame.data_ref(), &mut self.text)
                    && text.len() + data.len() <= RECORDED
                {
                    text.extend_from_slice(data);
                }
                self.whole = self.body.is_end_stream();
            }
            Poll::Ready(None) => self.whole = true,
            _ => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let Watched { asked, status, text, whole, .. } = self;
        let Asked { app, trail, method, path, began } = asked;
        let ms = began.nanoseconds() / 1_000_000;
        let model = trail.model.get();
        let mut line = Line::about("request")
            .with("id", &trail.id)
            .with("method", &method)
            .with("path", &path)
            .with("status", *status)
            .with("ms", ms);
        if let Some(model) = model {
            line = line.with("model", &model.name);
        }
        {
            let took = trail.took.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(finish) = took.finish {
                line = line
                    .with("prompt", took.prompt)
                    .with("cached", took.cached)
                    .with("generated", took.generated)
                    .with("finish", finish)
                    .with("queue_ms", took.queued.as_millis())
                    .with("first_ms", (took.queued + took.prefill).as_millis());
            }
        }
        if !*whole {
            line = line.with("whole", false);
        }
        line.write();
        app.models.events().tell(
            "request.ended",
            json!({
                "id": trail.id,
                "path": path,
                "status": status,
                "ms": ms,
                "model": model.map(|own| &own.name),
                "whole": whole,
            }),
        );
        let (Some(record), Some(text), Some(body)) = (&app.record, text, trail.body.get()) else {
            return;
        };
        let read = |bytes: &[u8]| -> Value {
            let text = || String::from_utf8_lossy(bytes).into_owned().into();
            serde_json::from_slice(bytes).unwrap_or_else(|_| text())
        };
        let mut texts =
            std::mem::take(&mut *trail.written.lock().unwrap_or_else(PoisonError::into_inner));
        texts.sort_by_key(|text| text.index);
        let texts: Vec<Value> = texts.iter().map(|text| text.to_json()).collect();
        record.write(&json!({
            "time": timestamp(),
            "build": build(),
            "id": trail.id,
            "method": method.as_str(),
            "path": path,
            // Beyond what numbers of many JSON readers hold.
            "seed": trail.seed.to_string(),
            "model": model.map(|own| &own.name),
            "fingerprint": model.map(|own| &own.fingerprint),
            "settings": model.map(|own| &own.settings),
            "request": read(body),
            "status": status,
            "ms": ms,
            "whole": whole,
            "response": read(text),
            "texts": texts,
        }));
    }
}

//! Sessions: timelines of tokens that the server keeps between requests, to be continued, forked,
//! saved to a file and restored.
//!
//! A session is its tokens. Their keys and values lie in the engine's prefix tree, as for all
//! requests: a session is continued together with whatever else runs, a fork shares all that is
//! computed, and what was given up for others meanwhile is computed again. Their number is bounded,
//! and those that are not asked for are forgotten.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use delft::tokens::Special;
use delft::{Engine, Error};
use hyper::StatusCode;
use serde_json::{Value, json};
use tokio::sync::OwnedMutexGuard;

use crate::catalogue::Held;
use crate::demand::{Asked, GRAMMARS};
use crate::fields::{Field, Fields, Unknown, shown, used, wrong};
use crate::generation::{Done, Event, Work};
use crate::models::Model;
use crate::openai::EXTENSIONS;
use crate::problem::{Api, Problem};
use crate::router::{Answered, App, Call, noting, telling};
use crate::settings::{self, random};
use crate::stream::{Framing, Gone, Sender, Shape, response};
use crate::task;

/// Most sessions at a time.
const MOST: usize = 256;
/// How long a session is kept that is not asked for.
const KEPT: Duration = Duration::from_secs(3600);

const CREATE: &[Field] = &[used("model"), used("prompt"), used("tokens")];

const GENERATE: &[Field] = &[
    used("prompt"),
    used("tokens"),
    used("frequency_penalty"),
    used("logit_bias"),
    used("max_tokens"),
    used("presence_penalty"),
    used("seed"),
    used("stop"),
    used("stream"),
    used("temperature"),
    used("top_p"),
];

const FILE: &[Field] = &[used("name")];

/// All sessions of a server.
pub(crate) struct Sessions {
    /// Where they are saved, if they are.
    folder: Option<PathBuf>,
    all: Mutex<HashMap<String, Session>>,
}

/// A session: whoever has its timeline locked works on it.
#[derive(Clone)]
struct Session {
    model: String,
    timeline: Arc<tokio::sync::Mutex<Vec<u32>>>,
    last: Instant,
}

/// A session's timeline in the hands of a request.
struct Taken {
    id: String,
    model: String,
    tokens: OwnedMutexGuard<Vec<u32>>,
}

impl Taken {
    fn to_json(&self) -> Value {
        json!({ "id": self.id, "model": self.model, "length": self.tokens.len() })
    }
}

impl Sessions {
    /// No sessions yet; those that are saved go to a folder, which is made if there is none.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn begin(folder: Option<PathBuf>) -> delft::Result<Sessions> {
        if let Some(folder) = &folder {
            let mut make = std::fs::DirBuilder::new();
            // A cache tells what was said.
            #[cfg(unix)]
            std::os::unix::fs::DirBuilderExt::mode(&mut make, 0o700);
            let made = make.recursive(true).create(folder);
            made.map_err(|error| Error::io(folder.display(), error))?;
        }
        Ok(Sessions { folder, all: Mutex::default() })
    }

    fn all(&self) -> MutexGuard<'_, HashMap<String, Session>> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, own| own.last.elapsed() < KEPT || Arc::strong_count(&own.timeline) > 1);
        all
    }

    fn add(&self, model: String, tokens: Vec<u32>) -> Result<Value, Problem> {
        let mut all = self.all();
        if all.len() >= MOST {
            let message = format!("expected at most {MOST} sessions: delete another one");
            let status = StatusCode::TOO_MANY_REQUESTS;
            return Err(Problem::new(status, "too_many_sessions", message));
        }
        let id = format!("{:016x}{:016x}", random(), random());
        let told = json!({ "id": id, "model": model, "length": tokens.len() });
        let timeline = Arc::new(tokio::sync::Mutex::new(tokens));
        all.insert(id, Session { model, timeline, last: Instant::now() });
        Ok(told)
    }

    /// The session that a path names, for one request alone.
    fn take(&self, path: &str) -> Result<Taken, Problem> {
        let id = path.split('/').nth(2).unwrap_or_default();
        let mut all = self.all();
        let Some(own) = all.get_mut(id) else {
            let message = format!("there is no session {}", shown(id));
            return Err(Problem::new(StatusCode::NOT_FOUND, "session_not_found", message));
        };
        own.last = Instant::now();
        let busy = |_| {
            let message = "another request works on this session";
            Problem::new(StatusCode::CONFLICT, "session_in_use", message)
        };
        let tokens = own.timeline.clone().try_lock_owned().map_err(busy)?;
        Ok(Taken { id: id.to_string(), model: own.model.clone(), tokens })
    }

    /// The file of a saved session.
    fn file(&self, fields: &Fields) -> Result<PathBuf, Problem> {
        let Some(folder) = &self.folder else {
            let message = "this server was given no folder for sessions";
            return Err(Problem::new(StatusCode::FORBIDDEN, "sessions_not_saved", message));
        };
        let name = fields.needed("name", fields.text("name")?)?;
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.len() > 100 || name.starts_with('.') || !name.chars().all(plain)
        {
            let expected = "1 to 100 letters, digits, dots, dashes and underscores";
            return Err(wrong("name", expected, &name.into()));
        }
        Ok(folder.join(format!("{name}.kv")))
    }
}

/// `POST /sessions`: a new one, empty or with a beginning.
pub(crate) async fn create(call: Call) -> Answered {
    let fields = call.fields(&[CREATE], Unknown::Refused).await?;
    let model = call.model(&fields).await?;
    let tokens = call.reading(|| further(&model, &fields, true)).await?;
    if !tokens.is_empty() {
        model.check(&tokens)?;
    }
    Ok(axum::Json(call.app.sessions.add(model.name.clone(), tokens)?).into_response())
}

/// `GET /sessions/{id}`.
pub(crate) async fn show(State(app): State<Arc<App>>, request: axum::extract::Request) -> Response {
    let shown = app.sessions.take(request.uri().path()).map(|taken| {
        let mut shown = taken.to_json();
        shown["tokens"] = taken.tokens.as_slice().into();
        axum::Json(shown).into_response()
    });
    shown.unwrap_or_else(|problem| problem.response(Api::OpenAi))
}

/// `DELETE /sessions/{id}`.
pub(crate) async fn delete(call: Call) -> Answered {
    let taken = call.app.sessions.take(&call.path)?;
    call.app.sessions.all().remove(&taken.id);
    Ok(axum::Json(json!({ "id": taken.id, "deleted": true })).into_response())
}

/// `POST /sessions/{id}/fork`: another session with the same tokens.
pub(crate) async fn fork(call: Call) -> Answered {
    call.fields(&[], Unknown::Refused).await?;
    let Taken { model, tokens, .. } = call.app.sessions.take(&call.path)?;
    Ok(axum::Json(call.app.sessions.add(model, tokens.clone())?).into_response())
}

/// `POST /sessions/{id}/save`: what is computed of it, in a file.
pub(crate) async fn save(call: Call) -> Answered {
    let save = |engine: &Engine, taken: &mut Taken, path: &Path| {
        engine.save_cached(&taken.tokens, path)?;
        let bytes = std::fs::metadata(path).map_err(|e| Error::io(path.display(), e))?.len();
        let mut told = taken.to_json();
        told["bytes"] = bytes.into();
        Ok(told)
    };
    filed(call, save).await
}

/// `POST /sessions/{id}/restore`: it becomes what was saved.
pub(crate) async fn restore(call: Call) -> Answered {
    let restore = |engine: &Engine, taken: &mut Taken, path: &Path| {
        *taken.tokens = engine.restore_cached(path)?;
        Ok(taken.to_json())
    };
    filed(call, restore).await
}

/// Does something with a session and the file that a request names, on a thread that may wait; it
/// goes on if the client goes away.
async fn filed(
    call: Call,
    work: impl FnOnce(&Engine, &mut Taken, &Path) -> delft::Result<Value> + Send + 'static,
) -> Answered {
    let fields = call.fields(&[FILE], Unknown::Refused).await?;
    let path = call.app.sessions.file(&fields)?;
    let mut taken = call.app.sessions.take(&call.path)?;
    let model = call.model_named(&taken.model).await?;
    if model.parent.is_some() {
        let message = "a session of an adapter cannot be saved or restored";
        return Err(Problem::field("model", message));
    }
    let work = move || {
        let place = model.generator.place(&taken.tokens);
        work(place.engine(), &mut taken, &path)
    };
    let told = task::blocking(work).await;
    let told = told.map_err(|_| Problem::failed("a panic ended the work on a session"))?;
    Ok(axum::Json(told?).into_response())
}

/// The tokens that a request adds, as text, in which special tokens are read as such, or by ids;
/// `first` are the first of their session.
fn further(model: &Model, fields: &Fields, first: bool) -> Result<Vec<u32>, Problem> {
    let expected = format!("token ids below {}", model.engine.info().vocab);
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        let id = id.filter(|id| (*id as usize) < model.engine.info().vocab);
        id.ok_or_else(|| wrong("tokens", &expected, value))
    };
    match (fields.text("prompt")?, fields.list("tokens")?) {
        (Some(_), Some(_)) => Err(Problem::field("tokens", "not supported beside prompt")),
        (Some(text), None) => {
            model.check_length(text)?;
            Ok(model.tokenizer()?.encode(text, Special { add: first, parse: true })?)
        }
        (None, list) => list.into_iter().flatten().map(id).collect(),
    }
}

/// `POST /sessions/{id}/generate`: adds tokens to a session and continues it.
pub(crate) async fn generate(call: Call) -> Answered {
    let fields = call.fields(&[GENERATE, EXTENSIONS, GRAMMARS], Unknown::Refused).await?;
    let mut taken = call.app.sessions.take(&call.path)?;
    let model = call.model_named(&taken.model).await?;
    let read = || {
        let mut options = settings::options(&model, &fields, call.seed())?;
        let most = fields.whole("max_tokens", 1..=i64::MAX)?;
        options.max_tokens = most.and_then(|n| usize::try_from(n).ok());
        let mut prompt = taken.tokens.clone();
        prompt.extend(further(&model, &fields, prompt.is_empty())?);
        model.check(&prompt)?;
        Asked::completions(&fields)?.constrain(&model, &[], false, &mut options)?;
        let streams = fields.flag("stream")?.unwrap_or(false);
        Ok::<_, Problem>((Work { prompt, options }, streams))
    };
    let (work, streams) = call.reading(read).await?;
    let prompt = work.prompt.clone();
    let mut generating = model.generator.start(vec![work], &call.trail).await?;
    // What was asked stays, also where the answer is cut off.
    *taken.tokens = prompt;
    let mut writer = Writer { _model: model, taken, text: String::new(), tokens: Vec::new() };
    if streams {
        let streamed = response(Framing::Events, |sender| async move {
            sender.relay(generating, &mut writer, Api::OpenAi).await.map(drop)
        });
        return Ok(noting(&fields, streamed));
    }
    let mut end = None;
    while let Some((_, event)) = generating.next().await? {
        end = writer.take(event).or(end);
    }
    let mut object = writer.taken.to_json();
    object["text"] = writer.text.into();
    object["tokens"] = writer.tokens.into();
    end.iter().for_each(|done| ended(&mut object, done));
    Ok(telling(end.as_ref(), noting(&fields, axum::Json(object).into_response())))
}

/// Tells in an object how a text ended.
fn ended(object: &mut Value, done: &Done) {
    let metrics = &done.metrics;
    object["finish_reason"] = done.finish.name().into();
    object["usage"] = json!({
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": metrics.generated_tokens,
        "total_tokens": metrics.prompt_tokens + metrics.generated_tokens,
        "prompt_tokens_details": { "cached_tokens": metrics.reused_tokens },
    });
    done.note_closing(object);
    done.tell_cache(object);
}

/// Adds what is generated to a session.
struct Writer {
    _model: Held,
    taken: Taken,
    text: String,
    tokens: Vec<u32>,
}

impl Writer {
    fn take(&mut self, event: Event) -> Option<Done> {
        match event {
            Event::Token(token) => {
                self.taken.tokens.push(token.id);
                self.tokens.push(token.id);
                self.text += &token.text;
                None
            }
            Event::Done(done) => Some(done),
        }
    }
}

impl Shape for Writer {
    async fn event(&mut self, sender: &Sender, _: usize, event: Event) -> Result<(), Gone> {
        let mut piece = match &event {
            Event::Token(token) => json!({ "text": token.text, "token": token.id }),
            Event::Done(_) => self.taken.to_json(),
        };
        let Some(done) = self.take(event) else { return sender.send(&piece).await };
        ended(&mut piece, &done);
        sender.end(&piece);
        Ok(())
    }
}

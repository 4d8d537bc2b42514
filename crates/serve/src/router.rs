//! Which path is answered by what.

use std::io::Read;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use bytes::Bytes;
use flate2::read::{MultiGzDecoder, ZlibDecoder};
use http_body_util::{BodyExt, Limited};
use hyper::body::Body;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, EXPECT, HeaderName, HeaderValue};
use hyper::{HeaderMap, Method, StatusCode, Uri};
use serde_json::json;
use tokio::sync::Semaphore;
use tower::util::MapRequest;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::catalogue::{Catalogue, Held};
use crate::fields::{Field, Fields, Unknown, shown, wrong};
use crate::gate::{AccessRules, REQUEST_ID};
use crate::generation::Done;
use crate::keep::Keep;
use crate::metrics::Requests;
use crate::problem::{Api, Problem};
use crate::reply::Began;
use crate::sessions::{self, Sessions};
use crate::settings::random;
use crate::watch::{Record, Trail};
use crate::{
    adapters, anthropic, embeddings, events, gate, infill, llama, metrics, native, ollama, openai,
    page, task,
};
use ollama::manage;
use openai::stored::Stored;

/// Largest body of a request, in bytes: some millions of words.
const LARGEST_BODY: usize = 16 << 20;
/// The longest that a body may take to arrive.
const BODY_TIME: Duration = Duration::from_secs(60);

/// Bodies that are read at the same time, in parts of [`PART`] bytes: as many as the largest body
/// has.
pub(crate) const PARTS: usize = LARGEST_BODY / PART;
/// Bytes of a body that count as one.
const PART: usize = 256 << 10;
/// Parts that each body counts as at least, which bounds how many are read at the same time.
const LEAST_PARTS: usize = 8;

/// Names the fields of a request that were accepted but have no effect on the answer.
const NO_EFFECT: HeaderName = HeaderName::from_static("x-delft-no-effect");

/// Tells what was left out of a prompt that did not fit, where the request asks for that.
const CUT: HeaderName = HeaderName::from_static("x-delft-cut");

/// Tells how much of the prompt was found computed, and why no more: of whole answers, whose head
/// is sent last.
const CACHE: HeaderName = HeaderName::from_static("x-delft-cache");

/// State that all requests share.
pub(crate) struct App {
    pub(crate) models: Arc<Catalogue>,
    pub(crate) access: AccessRules,
    /// Where requests and answers are recorded, if they are.
    pub(crate) record: Option<Record>,
    pub(crate) requests: Requests,
    pub(crate) sessions: Sessions,
    pub(crate) responses: Stored,
    pub(crate) summaries: manage::Summaries,
    /// Permits to read parts of bodies: to render, to tokenise and to compile what they ask for.
    pub(crate) parts: Semaphore,
    /// Seconds since 1970 when the server began.
    pub(crate) created: u64,
}

/// A request with its body.
pub(crate) struct Call {
    pub(crate) app: Arc<App>,
    pub(crate) body: Bytes,
    pub(crate) path: String,
    pub(crate) id: String,
    pub(crate) trail: Arc<Trail>,
    pub(crate) began: Began,
}

impl Call {
    /// The body's fields, by their tables.
    ///
    /// # Errors
    /// No JSON object; a field that is refused or unknown.
    pub(crate) async fn fields(
        &self,
        table: &[&[Field]],
        unknown: Unknown,
    ) -> Result<Fields, Problem> {
        self.reading(|| Fields::read(&self.body, table, unknown)).await
    }

    /// The model that the fields name, loaded and held.
    ///
    /// # Errors
    /// As [`Catalogue::hold`].
    pub(crate) async fn model(&self, fields: &Fields) -> Result<Held, Problem> {
        self.hold(fields.text("model")?, None).await
    }

    /// The model of a name, likewise.
    ///
    /// # Errors
    /// As [`Call::model`].
    pub(crate) async fn model_named(&self, name: &str) -> Result<Held, Problem> {
        self.hold(Some(name), None).await
    }

    /// The same, with Ollama's `keep_alive`.
    ///
    /// # Errors
    /// As [`Call::model`], and a time that is none.
    pub(crate) async fn model_kept(&self, fields: &Fields) -> Result<Held, Problem> {
        self.hold(fields.text("model")?, keep_alive(fields)?).await
    }

    async fn hold(&self, name: Option<&str>, keep: Option<Keep>) -> Result<Held, Problem> {
        let held = self.app.models.hold(name, keep).await?;
        self.trail.answers(&held);
        Ok(held)
    }

    /// The seed of this request's texts, unless it gives one.
    pub(crate) fn seed(&self) -> u64 {
        self.trail.seed
    }

    /// Reads the body on this thread, as soon as few others read theirs. What reading takes is a
    /// multiple of what was sent, so that a thousand at once would take all memory.
    pub(crate) async fn reading<T>(&self, read: impl FnOnce() -> T) -> T {
        self.reading_beside(0, read).await
    }

    /// As `reading`, with `bytes` bytes beside the body.
    pub(crate) async fn reading_beside<T>(&self, bytes: usize, read: impl FnOnce() -> T) -> T {
        let parts = ((self.body.len() + bytes) / PART).clamp(LEAST_PARTS, PARTS);
        // The semaphore is never closed.
        let _permit = self.app.parts.acquire_many(parts as u32).await;
        tokio::task::block_in_place(read)
    }
}

/// The result of a request.
pub(crate) type Answered = Result<Response, Problem>;

/// All paths.
pub(crate) fn router(app: Arc<App>) -> Router {
    let paths = Router::new()
        .route("/v1/chat/completions", post(openai::chat::answer))
        .route("/v1/responses", post(openai::responses::answer))
        .route("/v1/responses/input_tokens", post(openai::responses::count))
        .route("/v1/responses/{id}", get(openai::stored::retrieve).delete(openai::stored::delete))
        .route("/v1/responses/{id}/cancel", axum::routing::post(openai::stored::cancel))
        .route("/v1/responses/{id}/input_items", get(openai::stored::input_items))
        .route("/v1/completions", post(openai::completions::answer))
        .route("/v1/fim/completions", post(openai::fim::answer))
        .route("/v1/embeddings", post(embeddings::openai))
        .route("/v1/models", get(openai::models))
        .route("/v1/models/{*name}", get(openai::model))
        .route("/v1/messages", post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/api/embed", post(embeddings::ollama))
        .route("/api/embeddings", post(embeddings::ollama_one))
        .route("/api/tags", get(manage::tags))
        .route("/api/ps", get(manage::ps))
        .route("/api/show", post(manage::show))
        .route("/api/pull", post(manage::pull))
        .route("/api/copy", post(manage::copy))
        .route("/api/delete", axum::routing::delete(taking(manage::delete)))
        .route("/api/version", get(ollama::version))
        .route("/infill", post(infill::answer))
        .route("/completion", post(llama::completion))
        .route("/completions", post(llama::completion))
        .route("/chat/completions", post(openai::chat::answer))
        .route("/responses", post(openai::responses::answer))
        .route("/models", get(openai::models))
        .route("/embedding", post(embeddings::llama))
        .route("/embeddings", post(embeddings::llama))
        .route("/slots", get(llama::slots))
        .route("/slots/{id}", axum::routing::post(llama::slot))
        .route("/rerank", axum::routing::post(llama::rerank))
        .route("/reranking", axum::routing::post(llama::rerank))
        .route("/v1/rerank", axum::routing::post(llama::rerank))
        .route("/v1/reranking", axum::routing::post(llama::rerank))
        .route("/sessions", post(sessions::create))
        .route("/sessions/{id}", get(sessions::show).delete(taking(sessions::delete)))
        .route("/sessions/{id}/fork", post(sessions::fork))
        .route("/sessions/{id}/generate", post(sessions::generate))
        .route("/sessions/{id}/save", post(sessions::save))
        .route("/sessions/{id}/restore", post(sessions::restore))
        .route("/adapters", get(adapters::list).post(taking(adapters::add)))
        .route("/adapters/{*name}", axum::routing::delete(taking(adapters::remove)))
        .route("/tokenize", post(native::tokenize))
        .route("/detokenize", post(native::detokenize))
        .route("/tokenizer_info", get(taking(native::tokenizer_info)))
        .route("/apply-template", post(native::apply_template))
        .route("/props", get(native::props))
        .route("/v1/health", get(|| async { axum::Json(json!({ "status": "ok" })) }))
        .route("/health", get(|| async { axum::Json(json!({ "status": "ok" })) }))
        .route("/ready", get(ready))
        .route("/metrics", get(metrics_text))
        .route("/events", get(events::events))
        .merge(page::router());
    let origins = app.access.origins.iter().filter_map(|origin| origin.parse().ok());
    let cors = CorsLayer::new()
        .allow_origin(AllowOrigin::list(origins))
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([REQUEST_ID, NO_EFFECT, CACHE, CUT]);
    let paths = paths
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(CatchPanicLayer::custom(gate::panicked))
        .layer(axum::middleware::from_fn_with_state(app.clone(), gate::pass))
        // Outermost, so that pages may read why they are turned away; preflights have no key and
        // end here.
        .layer(cors)
        .with_state(app);
    Router::new().fallback_service(MapRequest::new(paths, without_spare_slashes))
}

/// The same request, whose path begins with one slash and ends in none, as where a base address
/// that ends in a slash had a path put behind it.
fn without_spare_slashes(mut request: Request) -> Request {
    let path = request.uri().path();
    let plain = format!("/{}", path.trim_matches('/'));
    if plain == path {
        return request;
    }
    let plain = match request.uri().query() {
        Some(query) => format!("{plain}?{query}"),
        None => plain,
    };
    let mut parts = request.uri().clone().into_parts();
    parts.path_and_query = plain.parse().ok();
    if let Ok(uri) = Uri::from_parts(parts) {
        *request.uri_mut() = uri;
    }
    request
}

/// How long a model is to stay loaded, as Ollama's requests say it.
///
/// # Errors
/// A value that is no time.
pub(crate) fn keep_alive(fields: &Fields) -> Result<Option<Keep>, Problem> {
    const NAME: &str = "keep_alive";
    let expected = "seconds, or a duration such as \"5m\"; below zero: for ever";
    let read = |value| Keep::of_json(value).ok_or_else(|| wrong(NAME, expected, value));
    fields.value(NAME).map(read).transpose()
}

/// Answers requests that have a body.
type Handler = Arc<dyn Fn(Call) -> Pin<Box<dyn Future<Output = Answered> + Send>> + Send + Sync>;

/// A path that takes a body, and answers problems in its interface's shape.
fn post<F, A>(handler: F) -> MethodRouter<Arc<App>>
where
    F: Fn(Call) -> A + Send + Sync + 'static,
    A: Future<Output = Answered> + Send + 'static,
{
    axum::routing::post(taking(handler))
}

/// The handler of a request that has a body.
fn taking<F, A>(
    handler: F,
) -> impl Fn(State<Arc<App>>, Request) -> Pin<Box<dyn Future<Output = Response> + Send>>
+ Clone
+ Send
+ Sync
+ 'static
where
    F: Fn(Call) -> A + Send + Sync + 'static,
    A: Future<Output = Answered> + Send + 'static,
{
    // A boxed handler has one type, so that the code around it is compiled once for all.
    let handler: Handler = Arc::new(move |call| Box::pin(handler(call)));
    reading(handler)
}

fn reading(
    handler: Handler,
) -> impl Fn(State<Arc<App>>, Request) -> Pin<Box<dyn Future<Output = Response> + Send>>
+ Clone
+ Send
+ Sync
+ 'static {
    move |State(app): State<Arc<App>>, request: Request| {
        let handler = Arc::clone(&handler);
        Box::pin(async move {
            let path = request.uri().path().to_string();
            let api = Api::of(&path);
            let trail = request.extensions().get::<Arc<Trail>>().cloned();
            // The gate has named every request.
            let trail = trail.unwrap_or_else(|| Arc::new(Trail::new(random(), None, false)));
            let (id, began) = (trail.id.clone(), Began::now());
            let answer = match read(request).await {
                Ok(body) => {
                    if app.record.is_some() {
                        trail.asks(&body);
                    }
                    handler(Call { app, body, path, id, trail, began }).await
                }
                Err(problem) => Err(problem),
            };
            answer.unwrap_or_else(|problem| problem.response(api))
        })
    }
}

/// How a body is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packing {
    None,
    Gzip,
    Zlib,
}

impl Packing {
    /// As a request's head says.
    fn of(headers: &HeaderMap) -> Result<Packing, Problem> {
        let Some(value) = headers.get(CONTENT_ENCODING) else { return Ok(Packing::None) };
        let found = value.to_str().unwrap_or_default();
        match found.trim().to_ascii_lowercase().as_str() {
            "" | "identity" => Ok(Packing::None),
            "gzip" | "x-gzip" => Ok(Packing::Gzip),
            "deflate" => Ok(Packing::Zlib),
            _ => {
                let message = format!(
                    "the header Content-Encoding: expected gzip, deflate or none, found \"{}\"",
                    shown(found)
                );
                let status = StatusCode::UNSUPPORTED_MEDIA_TYPE;
                Err(Problem::new(status, "unsupported_encoding", message))
            }
        }
    }

    /// Unpacks a body, up to one byte more than the largest that is allowed.
    fn unpacked(self, body: &[u8]) -> std::io::Result<Vec<u8>> {
        let (mut whole, most) = (Vec::new(), LARGEST_BODY as u64 + 1);
        match self {
            Packing::None => body.take(most).read_to_end(&mut whole),
            Packing::Gzip => MultiGzDecoder::new(body).take(most).read_to_end(&mut whole),
            Packing::Zlib => ZlibDecoder::new(body).take(most).read_to_end(&mut whole),
        }?;
        Ok(whole)
    }
}

/// A request's body.
async fn read(request: Request) -> Result<Bytes, Problem> {
    let too_large = || {
        let message = format!("the body: expected at most {LARGEST_BODY} bytes, found more");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    };
    let packing = Packing::of(request.headers())?;
    let body = request.body();
    // Who asks whether to send it is told before it is sent.
    if request.headers().contains_key(EXPECT) && body.size_hint().lower() > LARGEST_BODY as u64 {
        return Err(too_large());
    }
    let body = Limited::new(request.into_body(), LARGEST_BODY).collect();
    match tokio::time::timeout(BODY_TIME, body).await {
        Ok(Ok(body)) if packing == Packing::None => Ok(body.to_bytes()),
        Ok(Ok(body)) => {
            let body = body.to_bytes();
            let unpacked = task::blocking(move || packing.unpacked(&body)).await;
            let unpacked = unpacked.map_err(std::io::Error::other).and_then(|whole| whole);
            let unpacked = unpacked.map_err(|e| Problem::bad(format!("the packed body: {e}")))?;
            if unpacked.len() > LARGEST_BODY { Err(too_large()) } else { Ok(unpacked.into()) }
        }
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => Err(too_large()),
        Ok(Err(error)) => Err(Problem::bad(format!("the body: {error}"))),
        Err(_) => {
            let message = format!("the body: expected within {} s", BODY_TIME.as_secs());
            Err(Problem::new(StatusCode::REQUEST_TIMEOUT, "timeout", message))
        }
    }
}

/// A response that names the fields without effect, and what was left out of the prompt.
pub(crate) fn noting(fields: &Fields, response: impl IntoResponse) -> Response {
    let mut response = response.into_response();
    let noted = fields.noted().and_then(|noted| HeaderValue::from_str(&noted).ok());
    if let Some(noted) = noted {
        response.headers_mut().insert(NO_EFFECT, noted);
    }
    if let Some(cut) = fields.cut().and_then(|cut| HeaderValue::from_str(cut).ok()) {
        response.headers_mut().insert(CUT, cut);
    }
    response
}

/// A response that tells what was reused of its prompt.
pub(crate) fn telling(done: Option<&Done>, mut response: Response) -> Response {
    let Some(Done { metrics, missed, .. }) = done else { return response };
    let why = missed.as_ref().map_or(String::new(), |missed| format!("; {missed}"));
    let told = format!("{} of {}{why}", metrics.reused_tokens, metrics.prompt_tokens);
    if let Ok(value) = HeaderValue::from_str(&told) {
        response.headers_mut().insert(CACHE, value);
    }
    response
}

/// Paths of the same interfaces for what is not done here, and why.
const NOT_DONE: &[(&str, &str)] = &[
    ("/api/blobs", "models are not made here: `delft convert` and `delft quantize` make them"),
    ("/api/create", "models are not made here: `delft convert` and `delft quantize` make them"),
    ("/api/push", "models are not given away: copy their files"),
    ("/v1/audio", "models here read and write text"),
    ("/v1/images", "models here read and write text"),
    ("/v1/videos", "models here read and write text"),
    ("/v1/realtime", "models here read and write text: stream /v1/responses"),
    ("/v1/moderations", "nothing is moderated"),
    ("/v1/assistants", "use /v1/responses"),
    ("/v1/threads", "use /v1/responses"),
    ("/v1/conversations", "go on with previous_response_id of /v1/responses"),
    ("/v1/responses/compact", "send what is to be kept, or have the oldest left out: truncation"),
    ("/v1/batches", "`delft batch` answers a file of requests"),
    ("/v1/messages/batches", "`delft batch` answers a file of requests"),
    ("/v1/files", "no files are kept"),
    ("/v1/vector_stores", "no files are kept"),
    ("/v1/containers", "no files are kept"),
    ("/v1/uploads", "no files are kept"),
    ("/v1/fine_tuning", "`delft tune` teaches models, and `delft serve --tune` while they answer"),
    ("/v1/evals", "`delft eval` measures models"),
    ("/v1/score", "models here generate text or make embeddings (/v1/embeddings)"),
    ("/score", "models here generate text or make embeddings (/v1/embeddings)"),
    ("/pooling", "models here generate text or make embeddings (/v1/embeddings)"),
    ("/classify", "models here generate text or make embeddings; `delft classify` labels texts"),
    ("/generate", "ask /v1/completions or /completion"),
    ("/v1beta", "ask /v1/chat/completions"),
    ("/openai/deployments", "ask /v1/chat/completions"),
    ("/api/v0", "ask the same paths under /v1"),
    ("/api/v1", "ask the same paths under /v1"),
];

/// What is told of a path that others have and that is not answered here.
fn not_done(path: &str) -> Option<Problem> {
    let begins = |(outer, _): &&(&str, &str)| {
        path.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    let (outer, why) = NOT_DONE.iter().rev().find(begins)?;
    let message = format!("{outer} is not supported: {why}");
    Some(Problem::new(StatusCode::NOT_IMPLEMENTED, "unsupported", message))
}

async fn no_such_path(request: Request) -> Response {
    let path = request.uri().path();
    if let Some(problem) = not_done(path) {
        return problem.response(Api::of(path));
    }
    let message = "there is no such path; the interfaces are those of OpenAI (/v1/chat/completions, \
                   /v1/responses, /v1/completions, /v1/embeddings, /v1/models), Anthropic (/v1/messages), Ollama (/api/chat, \
                   /api/generate, /api/embed) and llama-server (/completion, /embedding, /infill)";
    let problem = Problem::new(StatusCode::NOT_FOUND, "not_found", message);
    problem.response(Api::of(path))
}

async fn no_such_method(request: Request) -> Response {
    let message = format!("{} is not answered here", request.method());
    let problem = Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message);
    let path = request.uri().path();
    not_done(path).unwrap_or(problem).response(Api::of(path))
}

/// Whether requests should come here now: not while a named model is being loaded, nor while the
/// server stops. `/health` says only that the process is alive.
async fn ready(State(app): State<Arc<App>>) -> Response {
    match app.models.unready() {
        None => axum::Json(json!({ "status": "ok" })).into_response(),
        Some(why) => {
            let status = StatusCode::SERVICE_UNAVAILABLE;
            (status, axum::Json(json!({ "status": "unready", "reason": why }))).into_response()
        }
    }
}

async fn metrics_text(State(app): State<Arc<App>>) -> impl IntoResponse {
    // Models that compute tell their memory between two steps.
    let text = tokio::task::block_in_place(|| metrics::text(&app.requests, &app.models));
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text)
}

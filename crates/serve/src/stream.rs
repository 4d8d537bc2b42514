//! Bodies that come piece by piece: server-sent events, or JSON lines.
//!
//! A task writes the pieces; a client that goes away is noticed while it waits, and the task ends,
//! which cancels what it waited for. The last piece is sent once the task has given up what it
//! held, its model and the model's adapter: whoever has read it may count on that. Between pieces,
//! comments keep connections open that something in between would close.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use hyper::body::Frame;
use hyper::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use serde_json::Value;
use tokio::sync::mpsc;

use crate::generation::{Event, Generating};
use crate::problem::Api;
use crate::task;

/// Pieces that may wait for a slow client before the task that writes them waits too.
const AHEAD: usize = 64;
/// How long nothing may be sent.
const SILENCE: Duration = Duration::from_secs(15);

/// How pieces are framed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Framing {
    /// Server-sent events without names: `data: {..}`.
    Events,
    /// Server-sent events named by each object's `type`.
    NamedEvents,
    /// A JSON object on each line.
    Lines,
}

impl Framing {
    fn piece(self, value: &Value) -> String {
        match self {
            Framing::Events => format!("data: {value}\n\n"),
            Framing::NamedEvents => {
                format!("event: {}\ndata: {value}\n\n", value["type"].as_str().unwrap_or("message"))
            }
            Framing::Lines => format!("{value}\n"),
        }
    }
}

/// Where a task writes its pieces.
pub(crate) struct Sender {
    pieces: mpsc::Sender<Bytes>,
    framing: Framing,
    /// The piece that ends the stream.
    last: Arc<OnceLock<Bytes>>,
}

/// The client has gone away.
#[derive(Debug)]
pub(crate) struct Gone;

/// Gives the events of texts an interface's shape.
pub(crate) trait Shape: Send {
    /// Sends what an event of the text with this index becomes.
    fn event(
        &mut self,
        sender: &Sender,
        index: usize,
        event: Event,
    ) -> impl Future<Output = Result<(), Gone>> + Send;
}

impl Sender {
    /// Sends an object.
    pub(crate) async fn send(&self, value: &Value) -> Result<(), Gone> {
        self.raw(self.framing.piece(value)).await
    }

    /// Sends the object that ends a stream, as soon as the task has ended.
    pub(crate) fn end(&self, value: &Value) {
        self.end_with(self.framing.piece(value));
    }

    /// Sends what ends a stream of OpenAI's, as soon as the task has ended.
    pub(crate) fn done(&self) {
        self.end_with("data: [DONE]\n\n".to_string());
    }

    fn end_with(&self, piece: String) {
        // A stream ends once.
        let _ = self.last.set(piece.into());
    }

    async fn raw(&self, piece: String) -> Result<(), Gone> {
        self.pieces.send(piece.into()).await.map_err(|_| Gone)
    }

    /// Sends all events of what is being written; false if it failed, which is then told in the
    /// interface's shape.
    pub(crate) async fn relay(
        &self,
        mut generating: Generating,
        shape: &mut impl Shape,
        api: Api,
    ) -> Result<bool, Gone> {
        loop {
            match self.or_gone(generating.next()).await? {
                Ok(Some((index, event))) => shape.event(self, index, event).await?,
                Ok(None) => return Ok(true),
                Err(problem) => {
                    self.send(&problem.to_json(api)).await?;
                    return Ok(false);
                }
            }
        }
    }

    /// Waits for something, unless the client goes away first.
    pub(crate) async fn or_gone<T>(&self, wanted: impl Future<Output = T>) -> Result<T, Gone> {
        let mut wanted = std::pin::pin!(wanted);
        loop {
            tokio::select! {
                biased;
                () = self.pieces.closed() => return Err(Gone),
                found = &mut wanted => return Ok(found),
                () = tokio::time::sleep(SILENCE), if self.framing != Framing::Lines => {
                    self.raw(": waiting\n\n".to_string()).await?;
                }
            }
        }
    }
}

type Writing = Pin<Box<dyn Future<Output = Result<(), Gone>> + Send>>;

/// A response whose body `write` sends from a task of its own.
pub(crate) fn response<F>(framing: Framing, write: impl FnOnce(Sender) -> F) -> Response
where
    F: Future<Output = Result<(), Gone>> + Send + 'static,
{
    let (pieces, receiver) = mpsc::channel(AHEAD);
    let (end, last) = (pieces.clone(), Arc::<OnceLock<Bytes>>::default());
    let writing = write(Sender { pieces, framing, last: last.clone() });
    task::spawn(ended(Box::pin(writing), end, last));
    streamed(framing, receiver)
}

/// Ends the stream behind what is written, unless the client has gone away.
async fn ended(writing: Writing, end: mpsc::Sender<Bytes>, last: Arc<OnceLock<Bytes>>) {
    let written = writing.await;
    if let (Ok(()), Some(last)) = (written, last.get()) {
        let _ = end.send(last.clone()).await;
    }
}

fn streamed(framing: Framing, receiver: mpsc::Receiver<Bytes>) -> Response {
    let mut response = Response::new(Body::new(Pieces(receiver)));
    let kind = match framing {
        Framing::Events | Framing::NamedEvents => "text/event-stream; charset=utf-8",
        Framing::Lines => "application/x-ndjson",
    };
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies that collect a response before they pass it on are told not to.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// A body of pieces as they are sent.
struct Pieces(mpsc::Receiver<Bytes>);

impl hyper::body::Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|piece| piece.map(|piece| Ok(Frame::data(piece))))
    }
}

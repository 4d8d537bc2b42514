//! A server's events, as they happen: models that are loaded and unloaded, requests that
//! begin and end.
//!
//! Whoever listens at `/events` gets server-sent events from then on; one who reads too slowly
//! misses some, and is told how many.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};
use tokio::sync::broadcast::{Receiver, Sender, error::RecvError};

use crate::log::timestamp;
use crate::router::App;
use crate::stream::{Framing, response};

/// Events that are kept for a listener who reads slowly.
const KEPT: usize = 1024;

/// Where events are told.
#[derive(Debug, Clone)]
pub(crate) struct Events(Sender<Arc<Value>>);

impl Default for Events {
    fn default() -> Self {
        Events(Sender::new(KEPT))
    }
}

impl Events {
    /// The last event of all.
    pub(crate) const STOPPING: &str = "server.stopping";

    /// Tells that something happened: what, and its fields.
    pub(crate) fn tell(&self, what: &str, fields: Value) {
        if self.0.receiver_count() == 0 {
            return;
        }
        let mut event = json!({ "type": what, "time": timestamp() });
        if let (Some(event), Value::Object(fields)) = (event.as_object_mut(), fields) {
            event.extend(fields);
        }
        // The last listener may have gone away just now.
        let _ = self.0.send(Arc::new(event));
    }

    fn listen(&self) -> Receiver<Arc<Value>> {
        self.0.subscribe()
    }
}

/// `/events`.
pub(crate) async fn events(State(app): State<Arc<App>>) -> Response {
    let mut events = app.models.events().listen();
    response(Framing::NamedEvents, |sender| async move {
        // So that a listener knows that from here on it hears all.
        sender.send(&json!({ "type": "listening", "time": timestamp() })).await?;
        loop {
            let event = match sender.or_gone(events.recv()).await? {
                Ok(event) => event,
                Err(RecvError::Lagged(missed)) => {
                    Arc::new(json!({ "type": "missed", "time": timestamp(), "events": missed }))
                }
                Err(RecvError::Closed) => return Ok(()),
            };
            sender.send(&event).await?;
            if event["type"] == Events::STOPPING {
                return Ok(());
            }
        }
    })
}

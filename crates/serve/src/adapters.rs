//! `/adapters`: adapters that come and go while others generate, each a model of its own name. Only
//! administrators may ask: a path is of the server's machine.

use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use delft::AdapterFile;
use serde_json::{Value, json};

use crate::catalogue::Added;
use crate::fields::{Field, Unknown, shown, used};
use crate::problem::Problem;
use crate::router::{Answered, App, Call};

const ADD: &[Field] = &[used("name"), used("path"), used("model"), used("scale"), used("any_base")];

/// An adapter as lists tell of it.
fn told(added: &Added) -> Value {
    let Added { of, name, file } = added;
    json!({ "name": name, "model": of, "path": file.path.display().to_string(), "scale": file.scale })
}

/// `GET /adapters`: those that were added.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Response {
    let all: Vec<Value> = app.models.added().iter().map(told).collect();
    axum::Json(json!({ "adapters": all })).into_response()
}

/// `POST /adapters`: reads `path` and serves it on top of `model` under `name`, in the place of the
/// adapter that was added under it before, if one was.
pub(crate) async fn add(call: Call) -> Answered {
    let fields = call.fields(&[ADD], Unknown::Refused).await?;
    let name = fields.needed("name", fields.text("name")?)?;
    let path = fields.needed("path", fields.text("path")?)?;
    // It stands in paths as it is.
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.:/@+".contains(c);
    if name.is_empty() || !name.chars().all(plain) {
        let found = shown(name);
        let message =
            format!("expected ASCII letters, digits and any of -_.:/@+, found \"{found}\"");
        return Err(Problem::field("name", message));
    }
    let scale = f64::from(fields.number("scale", -1000.0..=1000.0)?.unwrap_or(1.0));
    let any_base = fields.flag("any_base")?.unwrap_or(false);
    let file = AdapterFile { path: PathBuf::from(path), scale, any_base };
    let model = call.model(&fields).await?;
    let added = call.app.models.add_adapter(&model, name, file).await?;
    Ok(axum::Json(told(&added)).into_response())
}

/// `DELETE /adapters/{name}`: serves it no more. Requests that have begun are answered.
pub(crate) async fn remove(call: Call) -> Answered {
    let name = call.path.strip_prefix("/adapters/").unwrap_or_default();
    let removed = call.app.models.remove_adapter(name)?;
    Ok(axum::Json(told(&removed)).into_response())
}

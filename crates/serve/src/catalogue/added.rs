//! Adapters that are added while a server runs. They stay known when their model is unloaded, and
//! are read again with it.

use std::sync::{Arc, MutexGuard, PoisonError};

use delft::{Adapter, AdapterFile, Engine, Error};
use hyper::StatusCode;
use serde_json::json;

use super::{Catalogue, Held, same};
use crate::fields::shown;
use crate::log::Line;
use crate::problem::Problem;
use crate::task;

/// An adapter that was added.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Added {
    /// The name of the model that it is on top of.
    pub(crate) of: String,
    pub(crate) name: String,
    pub(crate) file: AdapterFile,
}

/// Puts an adapter on each of a model's engines.
pub(super) fn seat(engines: &[Engine], file: &AdapterFile) -> delft::Result<Vec<Adapter>> {
    engines.iter().map(|engine| engine.adapt(file)).collect()
}

impl Catalogue {
    pub(super) fn all_added(&self) -> MutexGuard<'_, Vec<Added>> {
        self.added.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that were added, in their order.
    pub(crate) fn added(&self) -> Vec<Added> {
        self.all_added().clone()
    }

    /// The adapter that was added under a name.
    pub(super) fn added_as(&self, name: &str) -> Option<Added> {
        self.all_added().iter().find(|own| same(&own.name, name)).cloned()
    }

    /// Serves an adapter on top of a model, which is held, beside what is generated meanwhile. One
    /// that was added to it under the same name gives way; requests that have begun keep it.
    ///
    /// # Errors
    /// A name that another model has; an adapter on top of an adapter; one that does not fit the
    /// model, or for which it was not loaded.
    pub(crate) async fn add_adapter(
        self: &Arc<Self>,
        model: &Held,
        name: &str,
        file: AdapterFile,
    ) -> Result<Added, Problem> {
        if let Some(parent) = &model.parent {
            let message = format!(
                "expected a model, found \"{}\", an adapter of {parent}",
                shown(&model.name)
            );
            return Err(Problem::field("model", message));
        }
        let added = Added { of: model.name.clone(), name: name.to_string(), file };
        let taken = |own: &Added| same(&own.name, name) && own.of != added.of;
        let known = tokio::task::block_in_place(|| self.look_up(name)).is_ok();
        let own = self.added_as(name);
        if own.as_ref().map_or(known, taken) {
            let message = format!("expected a name that no model has, found \"{}\"", shown(name));
            return Err(Problem::field("name", message));
        }
        let (catalogue, own, model) = (self.clone(), added.clone(), model.clone());
        let put = move || {
            let adapters = seat(&model.engines, &own.file).map_err(|error| match error.kind {
                delft::ErrorKind::Busy => no_room(&error),
                _ => Problem { param: Some("path".to_string()), ..Problem::bad(error.to_string()) },
            })?;
            catalogue.put(&own.of, &own.name, adapters)?;
            // The model may have been unloaded and loaded meanwhile: it is held.
            let mut all = catalogue.all_added();
            all.retain(|other| !same(&other.name, &own.name));
            all.push(own);
            Ok::<_, Problem>(())
        };
        let done = task::blocking(put).await;
        done.map_err(|_| Problem::failed("a panic ended the reading of the adapter"))??;
        let Added { of, name, .. } = &added;
        Line::about("adapter added").with("model", of).with("name", name).write();
        self.events.tell("adapter.added", json!({ "model": of, "name": name }));
        Ok(added)
    }

    /// Serves an adapter no more that was added. Its room is free once the requests that have begun
    /// are answered: whoever has read the end of the last answer finds it free.
    ///
    /// # Errors
    /// A name that no added adapter has.
    pub(crate) fn remove_adapter(&self, name: &str) -> Result<Added, Problem> {
        let mut all = self.all_added();
        let Some(at) = all.iter().position(|own| same(&own.name, name)) else {
            let message = format!("there is no adapter \"{}\" that was added", shown(name));
            return Err(Problem::new(StatusCode::NOT_FOUND, "adapter_not_found", message));
        };
        let added = all.remove(at);
        drop(all);
        for own in self.loaded().iter_mut().filter(|own| same(own.name(), &added.of)) {
            own.models.retain(|model| model.parent.is_none() || !same(&model.name, &added.name));
        }
        let Added { of, name, .. } = &added;
        Line::about("adapter removed").with("model", of).with("name", name).write();
        self.events.tell("adapter.removed", json!({ "model": of, "name": name }));
        Ok(added)
    }

    /// Forgets the adapters of a model that is no more.
    pub(crate) fn forget_adapters(&self, of: &str) {
        self.all_added().retain(|own| !same(&own.of, of));
    }

    /// The adapters that were added to a model, read again for engines of it that were just loaded.
    /// One that is no longer there is told and left out.
    pub(super) fn seat_added(&self, of: &str, engines: &[Engine]) -> Vec<(String, Vec<Adapter>)> {
        let own = self.added().into_iter().filter(|own| same(&own.of, of));
        let seated = own.filter_map(|Added { name, file, .. }| match seat(engines, &file) {
            Ok(adapters) => Some((name, adapters)),
            Err(error) => {
                let text = error.to_string();
                Line::about("warning").with("model", &name).with("text", &text).write();
                None
            }
        });
        seated.collect()
    }
}

/// A model that was not loaded for another adapter.
fn no_room(error: &Error) -> Problem {
    let message = format!(
        "{} (hint: a server with more adapter room takes it; an adapter that is removed makes room)",
        Error { hint: None, ..error.clone() }
    );
    Problem::new(StatusCode::CONFLICT, "no_room_for_adapter", message)
}

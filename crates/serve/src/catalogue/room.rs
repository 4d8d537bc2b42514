//! Loading and unloading: what is planned before memory is taken, who gives way, and when it is
//! back.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use delft::{Capability, Engine, Error, Plan, Prepared};
use hyper::StatusCode;
use serde_json::json;

use super::{Catalogue, Held, Loaded, Target, follow};
use crate::keep::Keep;
use crate::library::{held_bytes, planned_part};
use crate::log::Line;
use crate::models::Model;
use crate::problem::Problem;
use crate::task;

/// How long an engine that is no longer in use may take to be gone.
const GOING: Duration = Duration::from_secs(10);
/// The result of making room.
enum Room {
    Made,
    /// Nothing is loaded that could give way.
    Nobody,
    /// Those that could were in use for too long.
    Late,
}

impl Catalogue {
    /// Loads a model; the one who loads has the line to itself.
    pub(super) fn load(
        self: &Arc<Self>,
        target: &Target,
        keep: Option<Keep>,
        begun: Instant,
        deadline: Instant,
    ) -> Result<Held, Problem> {
        let name = &target.named.name;
        self.events.tell("model.loading", json!({ "model": name }));
        let mut engines = Vec::new();
        for &device in self.library.devices_of(&target.named) {
            let options = self.library.options_of(&target.named, device);
            let options = options.map_err(|error| refused(&error))?;
            follow(&self.events, name, &options.events);
            let prepare = || Engine::prepare(target.named.location().clone(), &options);
            let fell_back = |prepared: &Prepared| self.fell_back(prepared, &options);
            let prepared = self.make_room(&prepare, &fell_back, &engines, None, deadline)?;
            engines.push(prepared.load(&mut |_, _| {}).map_err(|error| refused(&error))?);
        }
        for warning in engines.first().map_or(&[][..], Engine::warnings) {
            Line::about("warning").with("model", name).with("text", warning).write();
        }
        let mut served = self.library.served(&target.named, engines);
        served.adapters.extend(self.seat_added(&served.name, &served.engines));
        let keep = keep.unwrap_or(target.keep);
        let id = self.add(served, Some(target.named.clone()), keep)?;
        let took = begun.elapsed();
        let own = self.take(begun, None, |own| (own.id == id).then(|| own.of(target))?);
        let held = own.ok_or_else(|| self.unknown(&target.wanted))?;
        self.tell_loaded(&held, took);
        Ok(held)
    }

    /// Tells that a model has been loaded, what was planned of memory for it, and what it holds.
    pub(super) fn tell_loaded(&self, model: &Model, took: Duration) {
        let Model { name, engines, .. } = model;
        let (context, device) = (model.context(), model.devices());
        let (planned, held) = (planned_part(engines, Plan::most), held_bytes(engines));
        Line::about("loaded")
            .with("model", name)
            .with("ms", took.as_millis())
            .with("planned", planned)
            .with("held", held)
            .with("context", context)
            .with("device", &device)
            .write();
        let told = json!({ "model": name, "seconds": took.as_secs_f64(), "device": device,
            "planned_bytes": planned, "held_bytes": held });
        self.events.tell("model.loaded", told);
    }

    /// Loads a capability of a model beside what it has already.
    pub(super) fn load_beside(&self, held: &Held, capability: Capability) -> Result<(), Problem> {
        let begun = Instant::now();
        for engine in held.engines.iter().filter(|own| !own.capabilities().contains(&capability)) {
            let prepare = || engine.prepare_capability(capability);
            // A model in use is not waited for: its request may wait for its turn to load.
            let now = Instant::now();
            drop(self.make_room(&prepare, &|_| false, &[], Some(held.user.id), now)?);
            engine.enable(capability, &mut |_, _| {}).map_err(|error| refused(&error))?;
        }
        Line::about("enabled")
            .with("model", &held.name)
            .with("capability", capability.name())
            .with("ms", begun.elapsed().as_millis())
            .with("planned", planned_part(&held.engines, Plan::most))
            .with("held", held_bytes(&held.engines))
            .write();
        Ok(())
    }

    /// Plans what is to be loaded, and unloads models other than `kept` until it fits beside what
    /// is left and `own`. `fell_back` says whether a plan is for a device that is used for want of
    /// memory.
    fn make_room(
        &self,
        prepare: &dyn Fn() -> delft::Result<Prepared>,
        fell_back: &dyn Fn(&Prepared) -> bool,
        own: &[Engine],
        kept: Option<u64>,
        deadline: Instant,
    ) -> Result<Prepared, Problem> {
        loop {
            let prepared = prepare().map_err(|error| refused(&error))?;
            // Nobody gives way for what would not fit then either.
            if !fell_back(&prepared)
                && let Some(error) = self.library.beyond(&prepared, own)
            {
                return Err(refused(&error));
            }
            let mut engines = own.to_vec();
            self.loaded().iter().for_each(|other| engines.extend_from_slice(&other.engines));
            let lack = self.library.lack(&prepared, &engines);
            // They are given back before any of them is unloaded.
            drop(engines);
            // A shorter context, or another device, is for want of memory, too.
            if lack.is_none() && !prepared.shortened() && !fell_back(&prepared) {
                return Ok(prepared);
            }
            match (self.unload_one(kept, deadline), lack) {
                (Room::Made, _) => {}
                (Room::Nobody, None) => return Ok(prepared),
                (Room::Nobody, Some(error)) => return Err(refused(&error)),
                (Room::Late, _) => {
                    return Err(self.late("the models that are loaded are in use"));
                }
            }
        }
    }

    /// Whether a model that could be anywhere is on the CPU while others are on GPUs.
    fn fell_back(&self, prepared: &Prepared, options: &delft::LoadOptions) -> bool {
        let cpu = |places: &[delft::DeviceSpec]| places == [delft::DeviceSpec::Cpu];
        options.device == delft::DeviceSpec::Auto
            && cpu(prepared.places())
            && self.loaded().iter().any(|own| own.engines.iter().any(|own| !cpu(own.places())))
    }

    /// Unloads the model other than `kept` that was unused for longest, which may have to be waited
    /// for.
    fn unload_one(&self, kept: Option<u64>, deadline: Instant) -> Room {
        let victim = {
            let loaded = self.loaded();
            let could = loaded.iter().filter(|own| own.named.is_some() && Some(own.id) != kept);
            could.min_by_key(|own| (own.users > 0, own.last)).map(|own| own.id)
        };
        match victim {
            None => Room::Nobody,
            Some(id) if self.unload(id, "memory", deadline) => Room::Made,
            Some(_) => Room::Late,
        }
    }

    /// Unloads a model once it is not in use; false if it still was at the deadline.
    fn unload(&self, id: u64, why: &str, deadline: Instant) -> bool {
        let mut loaded = self.loaded();
        loop {
            let Some(at) = loaded.iter().position(|own| own.id == id) else { return true };
            loaded[at].leaving = true;
            if loaded[at].users == 0 {
                let own = loaded.remove(at);
                drop(loaded);
                self.end(own, why);
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                loaded[at].leaving = false;
                return false;
            }
            let waited = self.freed.wait_timeout(loaded, left);
            loaded = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Gives a model's memory back.
    fn end(&self, own: Loaded, why: &str) {
        let name = own.name().to_string();
        let Loaded { models, engines, .. } = own;
        drop(models);
        let gone = engines.into_iter().map(|engine| engine.unload(GOING)).fold(true, |a, b| a & b);
        Line::about("unloaded").with("model", &name).with("for", why).with("gone", gone).write();
        self.events.tell("model.unloaded", json!({ "model": name, "for": why }));
    }

    /// Unloads a model if it is loaded and can be loaded again, once its requests are answered:
    /// whether it was.
    ///
    /// # Errors
    /// Requests that took too long.
    pub(crate) async fn stop(
        self: &Arc<Self>,
        name: &str,
        why: &'static str,
    ) -> Result<bool, Problem> {
        let location = match tokio::task::block_in_place(|| self.look_up(name)) {
            Ok((_, location)) => location,
            Err(problem) => return Err(problem),
        };
        let id = {
            let loaded = self.loaded();
            let could = |own: &&Loaded| own.location == location && own.named.is_some();
            loaded.iter().find(could).map(|own| own.id)
        };
        let Some(id) = id else { return Ok(false) };
        let (own, deadline) = (self.clone(), Instant::now() + self.limits.time);
        let unloaded = task::blocking(move || own.unload(id, why, deadline)).await;
        match unloaded {
            Ok(true) => Ok(true),
            _ => Err(self.late("the model is in use")),
        }
    }

    /// Unloads what nobody has asked for in the time that it is kept, for as long as this is
    /// polled.
    pub(crate) async fn unload_idle(self: Arc<Self>) {
        loop {
            let (now, next) = (Instant::now(), self.expiring());
            match next {
                Some((at, id)) if at <= now => {
                    let own = self.clone();
                    // A request may have come meanwhile, and is not waited for.
                    let unload = move || own.unload(id, "time", Instant::now());
                    let _ = task::blocking(unload).await;
                }
                Some((at, _)) => {
                    tokio::select! {
                        () = tokio::time::sleep_until(at.into()) => {}
                        () = self.due.notified() => {}
                    }
                }
                None => self.due.notified().await,
            }
        }
    }

    /// The model that is to be unloaded next, among those that are not in use.
    fn expiring(&self) -> Option<(Instant, u64)> {
        let loaded = self.loaded();
        let idle = loaded.iter().filter(|own| own.users == 0 && !own.leaving);
        idle.filter_map(|own| Some((own.expires()?, own.id))).min()
    }
}

/// A model that cannot be loaded is no fault of the request that asked for it.
fn refused(error: &Error) -> Problem {
    let code = match error.kind {
        delft::ErrorKind::NoMemory => "model_does_not_fit",
        _ => "model_not_loadable",
    };
    Problem::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        code,
        format!("the model cannot be loaded: {error}"),
    )
}

//! The models that a server has: which are known, which are loaded, and who uses them.
//!
//! A request holds its model ([`Held`]) until it is answered. One that names a model that is not
//! loaded waits in line while it is: one model is loaded at a time, planned before any memory is
//! taken, and those unused for longest give way where memory is short. A model in use gives way
//! once its requests are answered; those that come meanwhile wait in the same line.

mod added;
mod room;

pub(crate) use added::Added;

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use delft::hub::Hub;
use delft::{Adapter, Capability, Engine, Error, Lifecycle, Location, Stage};
use hyper::StatusCode;
use serde_json::json;
use tokio::sync::Notify;

use crate::build::build;
use crate::events::Events;
use crate::fields::shown;
use crate::generation::{GenerationLimits, Waiting, busy};
use crate::keep::Keep;
use crate::library::{Files, Library, Named, seconds};
use crate::log::Line;
use crate::metrics::Texts;
use crate::models::{Model, Served};
use crate::problem::Problem;
use crate::task;

/// Names that an error tells.
const TOLD: usize = 20;

/// All models, loaded or not.
pub(crate) struct Catalogue {
    library: Library,
    hub: Option<Mutex<Hub>>,
    limits: GenerationLimits,
    loaded: Mutex<Vec<Loaded>>,
    /// A model's last request was answered.
    freed: Condvar,
    /// Whose turn it is to load.
    pub(crate) line: Arc<tokio::sync::Mutex<()>>,
    waiting: AtomicUsize,
    /// The named model that is being loaded.
    loading: Mutex<Option<String>>,
    /// Whether the server has been told to stop.
    stopping: AtomicBool,
    next: AtomicU64,
    /// Adapters that were added, of models that are loaded and of others.
    added: Mutex<Vec<Added>>,
    /// Counters of each model, loaded or not.
    texts: Mutex<BTreeMap<String, Arc<Texts>>>,
    /// When a model is to be unloaded may have changed.
    due: Notify,
    events: Events,
}

/// A model that is loaded.
struct Loaded {
    id: u64,
    named: Option<Named>,
    location: Location,
    files: Files,
    engines: Vec<Engine>,
    /// Itself, then its adapters.
    models: Vec<Arc<Model>>,
    users: usize,
    last: Instant,
    keep: Keep,
    /// Whether it is to be unloaded as soon as it is not in use.
    leaving: bool,
}

impl Loaded {
    fn name(&self) -> &str {
        self.models.first().map_or("", |model| &model.name)
    }

    fn model(&self, name: &str) -> Option<&Arc<Model>> {
        self.models.iter().find(|model| same(&model.name, name))
    }

    /// When it is to be unloaded if it is not asked for.
    fn expires(&self) -> Option<Instant> {
        match (self.keep, &self.named) {
            (Keep::For(time), Some(_)) => self.last.checked_add(time),
            _ => None,
        }
    }
}

/// Whether a name that a request gives is a model's; Ollama's tag `latest` adds nothing to it.
fn same(own: &str, name: &str) -> bool {
    let bare = name.strip_suffix(":latest").unwrap_or(name);
    [name, bare].iter().any(|name| own.eq_ignore_ascii_case(name))
}

/// Refuses names two of which a request could not tell apart.
pub(crate) fn distinct(names: &[String]) -> delft::Result<()> {
    let taken = |i: usize| names[..i].iter().any(|other| same(other, &names[i]));
    match (0..names.len()).find(|i| taken(*i)) {
        Some(i) => {
            let error = Error::new("models", "names that differ", &names[i]);
            Err(error.hint("give one of them another name"))
        }
        None => Ok(()),
    }
}

/// A model in the hands of a request: it is not unloaded meanwhile.
#[derive(Clone)]
pub(crate) struct Held {
    model: Arc<Model>,
    // Behind the model: it is given up first.
    user: Arc<User>,
}

impl Deref for Held {
    type Target = Model;

    fn deref(&self) -> &Model {
        &self.model
    }
}

struct User {
    catalogue: Arc<Catalogue>,
    id: u64,
    /// The time that loading it took for this request.
    loading: Duration,
}

impl Drop for User {
    fn drop(&mut self) {
        self.catalogue.release(self.id);
    }
}

impl Held {
    /// How long this request waited for the model to be loaded.
    pub(crate) fn loading(&self) -> Duration {
        self.user.loading
    }
}

/// A model that is known, as listings tell of it.
pub(crate) struct Known {
    pub(crate) name: String,
    /// The name of the model that it is an adapter of.
    pub(crate) parent: Option<String>,
    pub(crate) files: Files,
    /// It, if it is loaded.
    pub(crate) loaded: Option<Arc<Model>>,
}

impl Known {
    /// When its files were last changed, in seconds since 1970; where there are none, when the
    /// server `began`.
    pub(crate) fn changed(&self, began: u64) -> u64 {
        if self.files.modified > 0 { self.files.modified } else { began }
    }
}

/// A model that is loaded, as `ps` tells of it.
pub(crate) struct Resident {
    pub(crate) model: Arc<Model>,
    pub(crate) files: Files,
    /// When it is to be unloaded if it is not asked for; never, if unset.
    pub(crate) expires: Option<SystemTime>,
}

/// Loads on a thread that may wait.
async fn loading<T: Send + 'static>(
    load: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<T, Problem> {
    let loaded = task::blocking(load).await;
    loaded.unwrap_or_else(|_| Err(Problem::failed("a panic ended the loading of the model")))
}

/// Tells each stage of a model's parts at `/events`, and the loss of its device in the log.
fn follow(events: &Events, model: &str, stages: &delft::Events) {
    let (events, model) = (events.clone(), model.to_string());
    let mut lost = Vec::new();
    stages.listen(move |Lifecycle { stage, capability, why }| {
        let (capability, stage) = (*capability, *stage);
        let mut told = json!({ "model": model, "capability": capability.name() });
        told["stage"] = stage.name().into();
        if let Some(why) = why {
            told["why"] = why.as_str().into();
        }
        events.tell("model.stage", told);
        let line =
            |what| Line::about(what).with("model", &model).with("capability", capability.name());
        let was_lost = lost.contains(&capability);
        match stage {
            Stage::Lost => {
                line("device lost").with("device", why.as_deref().unwrap_or_default()).write();
                lost.push(capability);
            }
            Stage::Ready if was_lost => line("loaded again").write(),
            Stage::Failed if was_lost => {
                line("not loaded again").with("error", why.as_deref().unwrap_or_default()).write();
            }
            _ => {}
        }
        if matches!(stage, Stage::Ready | Stage::Failed) {
            lost.retain(|one| *one != capability);
        }
        true
    });
}

/// A model to load, and which of it and its adapters is meant.
struct Target {
    named: Named,
    wanted: String,
    keep: Keep,
    of_store: bool,
}

impl Catalogue {
    /// The models that are loaded already, and those that may be.
    ///
    /// # Errors
    /// Two models of one name, and a chat template that cannot be read.
    pub(crate) fn new(
        library: Library,
        served: Vec<Served>,
        limits: GenerationLimits,
    ) -> delft::Result<Catalogue> {
        let mut names: Vec<String> = library.named.iter().flat_map(Named::names).cloned().collect();
        let hub = library.hub.clone().map(Mutex::new);
        let catalogue = Catalogue {
            hub,
            limits,
            loaded: Mutex::default(),
            freed: Condvar::new(),
            line: Arc::default(),
            waiting: AtomicUsize::new(0),
            loading: Mutex::default(),
            stopping: AtomicBool::new(false),
            next: AtomicU64::new(0),
            added: Mutex::default(),
            texts: Mutex::default(),
            due: Notify::new(),
            events: Events::default(),
            library,
        };
        for served in served {
            let own = |named: &&Named| same(&named.name, &served.name);
            let named = catalogue.library.named.iter().find(own).cloned();
            if named.is_none() {
                names.push(served.name.clone());
                names.extend(served.adapters.iter().map(|(name, _)| name.clone()));
            }
            let id = catalogue.add(served, named, catalogue.library.keep_named)?;
            let own =
                catalogue.loaded().iter().find(|own| own.id == id).map(|own| own.models[0].clone());
            if let Some(model) = own {
                model
                    .engines
                    .iter()
                    .for_each(|one| follow(&catalogue.events, &model.name, one.events()));
                let ms = model.engines.iter().map(|engine| engine.info().load_ms);
                catalogue.tell_loaded(&model, Duration::from_millis(ms.sum()));
            }
        }
        distinct(&names)?;
        Ok(catalogue)
    }

    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    /// Notes that the server has been told to stop.
    pub(crate) fn stop_soon(&self) {
        self.stopping.store(true, Ordering::Relaxed);
        self.events.tell(Events::STOPPING, json!({}));
    }

    /// Why requests should go elsewhere for now, if they should.
    pub(crate) fn unready(&self) -> Option<String> {
        if self.stopping.load(Ordering::Relaxed) {
            return Some("the server is stopping: it answers what it has begun".to_string());
        }
        let loading = self.loading.lock().unwrap_or_else(PoisonError::into_inner);
        loading.as_ref().map(|name| format!("{name} is being loaded"))
    }

    /// Notes the named model that is being loaded.
    fn note_loading(&self, name: Option<String>) {
        *self.loading.lock().unwrap_or_else(PoisonError::into_inner) = name;
    }

    /// The store, if models of it are offered.
    pub(crate) fn hub(&self) -> Option<Hub> {
        self.hub.as_ref().map(|hub| hub.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Changes the store's settings.
    pub(crate) fn with_hub<T>(&self, change: impl FnOnce(&mut Hub) -> T) -> Option<T> {
        let hub = self.hub.as_ref()?;
        Some(change(&mut hub.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    fn loaded(&self) -> MutexGuard<'_, Vec<Loaded>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a model that is loaded; it has no user yet.
    fn add(&self, served: Served, named: Option<Named>, keep: Keep) -> delft::Result<u64> {
        let engines = served.engines.clone();
        engines.iter().for_each(|engine| self.compare(&served.name, engine));
        let mut texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = |name: &str| texts.entry(name.to_string()).or_default().clone();
        let models = Model::all(served, self.limits, counts)?;
        let first = &models[0].engine;
        let files = named.as_ref().map_or_else(
            || Files { bytes: first.info().file_bytes, ..Files::default() },
            |named| Files::of(&named.model),
        );
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.loaded().push(Loaded {
            id,
            location: named.as_ref().map_or(first.location(), Named::location).clone(),
            files,
            models: models.into_iter().map(Arc::new).collect(),
            users: 0,
            last: Instant::now(),
            leaving: false,
            named,
            engines,
            keep,
        });
        Ok(id)
    }

    /// Tells if a model computes something else than when it was loaded the last time.
    fn compare(&self, name: &str, engine: &Engine) {
        let Some(folder) = &self.library.canary else { return };
        let told = engine.canary(folder, build()).unwrap_or_else(|error| Some(error.to_string()));
        if let Some(told) = told {
            Line::about("warning").with("model", name).with("text", &told).write();
            self.events.tell("model.differs", json!({ "model": name, "text": told }));
        }
    }

    /// Puts an adapter, with its handle on each engine, behind a name beside the loaded model `of`,
    /// in the place of the one of that name.
    ///
    /// # Errors
    /// A model that is not loaded; a name that another model has.
    pub(crate) fn put(&self, of: &str, name: &str, adapters: Vec<Adapter>) -> delft::Result<()> {
        let counts = {
            let mut texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
            texts.entry(name.to_string()).or_default().clone()
        };
        let mut loaded = self.loaded();
        let taken = |own: &Loaded| {
            let replaced = |one: &Model| same(own.name(), of) && one.parent.is_some();
            own.models.iter().any(|one| same(&one.name, name) && !replaced(one))
        };
        if loaded.iter().any(taken) {
            return Err(Error::new("adapter", "a name that no model has", name));
        }
        let missing = || Error::new("adapter", "a model that is loaded", of);
        let own = loaded.iter_mut().find(|own| same(own.name(), of)).ok_or_else(missing)?;
        let first = own.models.first().cloned().ok_or_else(missing)?;
        let model = Arc::new(first.adapted(name, adapters, counts));
        match own.models.iter_mut().find(|one| same(&one.name, name)) {
            Some(before) => *before = model,
            None => own.models.push(model),
        }
        Ok(())
    }

    /// The model of a name, which is loaded if it is not; `keep` is how long it stays loaded from
    /// now on.
    ///
    /// # Errors
    /// 404 with the names that there are; a model that cannot be loaded; a line that is full, or in
    /// which the time ran out.
    pub(crate) async fn hold(
        self: &Arc<Self>,
        name: Option<&str>,
        keep: Option<Keep>,
    ) -> Result<Held, Problem> {
        let begun = Instant::now();
        let name = match name {
            Some(name) => name.to_string(),
            None => tokio::task::block_in_place(|| self.usual())?,
        };
        if let Some(held) = self.take(begun, keep, |own| own.model(&name)) {
            return Ok(held);
        }
        let target = tokio::task::block_in_place(|| self.find(&name))?;
        let take = |target: &Target| {
            self.take(begun, keep, |own| {
                (own.location == *target.named.location()).then(|| own.of(target))?
            })
        };
        if let Some(held) = take(&target) {
            return Ok(held);
        }
        let deadline = begun + self.limits.time;
        let before = self.waiting.fetch_add(1, Ordering::Relaxed);
        let waiting = Waiting(&self.waiting);
        if before > self.limits.queue {
            return Err(busy(format!("{before} requests wait for models to be loaded already")));
        }
        let turn = self.turn(deadline).await?;
        if let Some(held) = take(&target) {
            return Ok(held);
        }
        // It goes on if the client goes away: others may wait for the same model.
        let own = self.clone();
        let load = move || {
            let _turn = turn;
            own.note_loading((!target.of_store).then(|| target.named.name.clone()));
            let done = Defer(|| own.note_loading(None));
            let held = own.load(&target, keep, begun, deadline);
            drop(done);
            if let Err(problem) = &held {
                let (model, error) = (&target.named.name, &problem.message);
                Line::about("not loaded").with("model", model).with("error", error).write();
                own.events.tell("model.failed", json!({ "model": model, "error": error }));
            }
            held
        };
        let held = loading(load).await;
        drop(waiting);
        held
    }

    /// Waits until it is the caller's turn to load.
    async fn turn(&self, deadline: Instant) -> Result<tokio::sync::OwnedMutexGuard<()>, Problem> {
        let turn = tokio::time::timeout_at(deadline.into(), self.line.clone().lock_owned()).await;
        turn.map_err(|_| self.late("the models before it took too long to load"))
    }

    /// Loads a capability of a model that a request holds, unless it has it.
    ///
    /// # Errors
    /// A model that does not fit with it, and as [`Catalogue::hold`].
    pub(crate) async fn enable(
        self: &Arc<Self>,
        held: &Held,
        capability: Capability,
    ) -> Result<(), Problem> {
        if held.has(capability) {
            return Ok(());
        }
        let deadline = Instant::now() + self.limits.time;
        let turn = self.turn(deadline).await?;
        let (own, held) = (self.clone(), held.clone());
        // It goes on if the client goes away: others may wait for the same.
        loading(move || {
            let _turn = turn;
            own.load_beside(&held, capability)
        })
        .await
    }

    fn late(&self, why: &str) -> Problem {
        busy(format!("{why}: more than {} s", self.limits.time.as_secs()))
    }

    /// A loaded model in the hands of a further request.
    fn take(
        self: &Arc<Self>,
        begun: Instant,
        keep: Option<Keep>,
        wanted: impl Fn(&Loaded) -> Option<&Arc<Model>>,
    ) -> Option<Held> {
        let mut loaded = self.loaded();
        let own = loaded.iter_mut().find(|own| !own.leaving && wanted(own).is_some())?;
        own.users += 1;
        own.keep = keep.unwrap_or(own.keep);
        let (model, id) = (wanted(own)?.clone(), own.id);
        drop(loaded);
        let loading = begun.elapsed();
        Some(Held { model, user: Arc::new(User { catalogue: self.clone(), id, loading }) })
    }

    fn release(&self, id: u64) {
        let mut loaded = self.loaded();
        if let Some(own) = loaded.iter_mut().find(|own| own.id == id) {
            own.users -= 1;
            own.last = Instant::now();
            if own.users == 0 {
                self.freed.notify_all();
                self.due.notify_one();
            }
        }
    }

    /// The name that is meant where a request gives none: the first that was named, else the one
    /// used last, else the first of the store.
    fn usual(&self) -> Result<String, Problem> {
        if let Some(named) = self.library.named.first() {
            return Ok(named.name.clone());
        }
        if let Some(own) = self.loaded().iter().find(|own| own.named.is_none()) {
            return Ok(own.name().to_string());
        }
        if let Some(own) = self.loaded().iter().max_by_key(|own| (own.users, own.last)) {
            return Ok(own.name().to_string());
        }
        let first = self.stored()?.into_iter().next();
        let none = "no model is served: delft pull NAME fetches one";
        first.map(|stored| stored.name).ok_or_else(|| Problem::failed(none))
    }

    fn stored(&self) -> delft::Result<Vec<delft::hub::StoredModel>> {
        self.hub().map_or_else(|| Ok(Vec::new()), |hub| hub.stored())
    }

    /// The meaning of a name that is not loaded.
    fn find(&self, name: &str) -> Result<Target, Problem> {
        let own = |named: &&Named| named.names().any(|own| same(own, name));
        if let Some(named) = self.library.named.iter().find(own).cloned() {
            let (wanted, keep) = (name.to_string(), self.library.keep_named);
            return Ok(Target { named, wanted, keep, of_store: false });
        }
        if let Some(added) = self.added_as(name) {
            let base = self.find(&added.of)?;
            return Ok(Target { wanted: added.name, of_store: false, ..base });
        }
        let Some(hub) = self.hub() else { return Err(self.unknown(name)) };
        let found = match hub.find_stored(name)? {
            Some(model) => model,
            None => {
                let bare = name.strip_suffix(":latest").unwrap_or(name);
                hub.find_stored(bare)?.ok_or_else(|| self.unknown(name))?
            }
        };
        let known = self.stored()?.into_iter().find(|stored| stored.model == found);
        let name = known.map_or_else(|| name.to_string(), |stored| stored.name);
        let (devices, adapters) = (Vec::new(), Vec::new());
        let named = Named { name: name.clone(), model: found, devices, adapters };
        Ok(Target { named, wanted: name, keep: self.library.keep, of_store: true })
    }

    /// The problem of an unknown name, with the names that there are.
    pub(crate) fn unknown(&self, name: &str) -> Problem {
        let mut names: Vec<String> = self.known().into_iter().map(|known| known.name).collect();
        let more = names.len().saturating_sub(TOLD);
        names.truncate(TOLD);
        let mut expected = names.join(" or ");
        if more > 0 {
            expected += &format!(" or one of {more} others");
        }
        if expected.is_empty() {
            expected = "a model of the store, which is empty".to_string();
        }
        let pull = if self.hub.is_some() { " (hint: delft pull fetches models)" } else { "" };
        let message = format!("model: expected {expected}, found \"{}\"{pull}", shown(name));
        let problem = Problem::new(StatusCode::NOT_FOUND, "model_not_found", message);
        Problem { param: Some("model".to_string()), ..problem }
    }

    /// All models, the named ones first.
    pub(crate) fn known(&self) -> Vec<Known> {
        let mut all: Vec<Known> = Vec::new();
        for own in self.loaded().iter().filter(|own| own.named.is_none()) {
            all.extend(own.models.iter().map(|model| own.known(model)));
        }
        for named in &self.library.named {
            let loaded = self.loaded();
            let resident = loaded.iter().find(|own| own.location == *named.location());
            let files = resident.map_or_else(|| Files::of(&named.model), |own| own.files.clone());
            all.extend(named.names().map(|name| Known {
                name: name.clone(),
                parent: (*name != named.name).then(|| named.name.clone()),
                files: files.clone(),
                loaded: resident.and_then(|own| own.model(name)).cloned(),
            }));
            // Those that came while it was served.
            if let Some(resident) = resident {
                let came = |one: &&Arc<Model>| !named.names().any(|name| same(name, &one.name));
                all.extend(resident.models.iter().filter(came).map(|one| resident.known(one)));
            }
        }
        // A store that cannot be read offers nothing; a request for a model of it says why.
        for stored in self.stored().unwrap_or_default() {
            let loaded = self.loaded();
            let resident = loaded.iter().find(|own| own.location == stored.model.location);
            if all.iter().any(|known| same(&known.name, &stored.name)) {
                continue;
            }
            all.push(Known {
                files: Files::of_stored(&stored),
                loaded: resident.and_then(|own| own.models.first()).cloned(),
                name: stored.name,
                parent: None,
            });
        }
        for added in self.added() {
            if all.iter().any(|known| same(&known.name, &added.name)) {
                continue;
            }
            let files = all.iter().find(|known| same(&known.name, &added.of));
            let files = files.map(|known| known.files.clone()).unwrap_or_default();
            let loaded = self.loaded();
            let resident = loaded.iter().find(|own| same(own.name(), &added.of));
            all.push(Known {
                loaded: resident.and_then(|own| own.model(&added.name)).cloned(),
                name: added.name,
                parent: Some(added.of),
                files,
            });
        }
        all
    }

    /// Where the files of a known model lie, what is told of them, and the model by its own name.
    ///
    /// # Errors
    /// A name that is unknown.
    pub(crate) fn look_up(&self, name: &str) -> Result<(Known, Location), Problem> {
        if let Some(own) = self.loaded().iter().find(|own| own.model(name).is_some())
            && let Some(model) = own.model(name)
        {
            return Ok((own.known(model), own.location.clone()));
        }
        let target = self.find(name)?;
        let location = target.named.location().clone();
        let loaded = self.loaded();
        let resident = loaded.iter().find(|own| own.location == location);
        let known = Known {
            parent: (!same(&target.named.name, &target.wanted)).then(|| target.named.name.clone()),
            files: Files::of(&target.named.model),
            loaded: resident.and_then(|own| own.of(&target)).cloned(),
            name: target.wanted,
        };
        Ok((known, location))
    }

    /// The loaded models, in the order of loading.
    pub(crate) fn residents(&self) -> Vec<Resident> {
        let (now, clock) = (Instant::now(), SystemTime::now());
        let resident = |own: &Loaded| {
            let expires = own.expires().map(|at| clock + at.saturating_duration_since(now));
            let of = |model: &Arc<Model>| Resident {
                model: model.clone(),
                files: own.files.clone(),
                expires,
            };
            own.models.iter().map(of).collect::<Vec<_>>()
        };
        self.loaded().iter().flat_map(resident).collect()
    }

    /// Counters of each model that was ever loaded.
    pub(crate) fn texts(&self) -> Vec<(String, Arc<Texts>)> {
        let texts = self.texts.lock().unwrap_or_else(PoisonError::into_inner);
        texts.iter().map(|(name, texts)| (name.clone(), texts.clone())).collect()
    }
}

impl Loaded {
    /// The model that is meant by a target, which lies where this does.
    fn of(&self, target: &Target) -> Option<&Arc<Model>> {
        if target.of_store { self.models.first() } else { self.model(&target.wanted) }
    }

    fn known(&self, model: &Arc<Model>) -> Known {
        Known {
            name: model.name.clone(),
            parent: model.parent.clone(),
            files: self.files.clone(),
            loaded: Some(model.clone()),
        }
    }
}

/// Does something when it is dropped, after a panic too.
struct Defer<F: Fn()>(F);

impl<F: Fn()> Drop for Defer<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Seconds since 1970 of now.
pub(crate) fn now() -> u64 {
    seconds(SystemTime::now())
}

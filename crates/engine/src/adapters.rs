//! Adapters of a loaded engine: seats on the device, and handles that keep them.
//!
//! Each adapter has a number that no other ever has, by which sessions and the prefix tree tell
//! what was computed with which.

use crate::load::{Engine, Shared};
use adapters::{Base, File, MadeFor, shortened};
use formats::{Error, ErrorKind, Hint, Location, Result, Setting, Tensors, fingerprint};
use models::{Config, Ending};
use program::Program;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// An adapter and how strongly it is applied.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterFile {
    /// A folder of PEFT or mlx-lm, or a GGUF file.
    pub path: PathBuf,
    /// The factor on its change; 1 as it was trained.
    pub scale: f64,
    /// Whether it may say that it was made for another model.
    pub any_base: bool,
}

/// The adapters that an engine is loaded with, and the room for more.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Adapters {
    /// Adapters that are loaded with the model.
    pub files: Vec<AdapterFile>,
    /// How many more may be added while the engine runs. If any may, every matrix of the model can
    /// be adapted, but experts' only with `experts`; else only the matrices that `files` change.
    pub more: usize,
    /// The greatest rank of those that may be added.
    pub rank: usize,
    /// Whether those that may be added may change experts. Factors of all of them are large.
    pub experts: bool,
    /// Whether those that may be added may have the table of embeddings and the head anew, which
    /// take as much memory as these in f32.
    pub tables: bool,
}

/// An adapter of an engine. Its seat is free for another once the last clone is gone.
#[derive(Clone)]
pub struct Adapter(Arc<Seated>);

struct Seated {
    file: AdapterFile,
    seat: u32,
    number: u64,
    seats: Seats,
}

impl Drop for Seated {
    fn drop(&mut self) {
        self.seats.lock().free.push(self.seat);
    }
}

impl std::fmt::Debug for Adapter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Adapter({})", self.0.file.path.display())
    }
}

impl PartialEq for Adapter {
    fn eq(&self, other: &Adapter) -> bool {
        self.0.number == other.0.number
    }
}

impl Adapter {
    /// Its file or folder.
    pub fn path(&self) -> &std::path::Path {
        &self.0.file.path
    }

    /// The file that it was read from.
    pub(crate) fn file(&self) -> &AdapterFile {
        &self.0.file
    }

    /// Its seat on the device.
    pub(crate) fn seat(&self) -> u32 {
        self.0.seat
    }

    /// A number that no other adapter of the engine has or had.
    pub(crate) fn number(&self) -> u64 {
        self.0.number
    }
}

/// The seat of an adapter, or 0.
pub(crate) fn seat(adapter: Option<&Adapter>) -> u32 {
    adapter.map_or(0, Adapter::seat)
}

/// The number of an adapter, or 0.
pub(crate) fn number(adapter: Option<&Adapter>) -> u64 {
    adapter.map_or(0, Adapter::number)
}

#[derive(Debug, Default)]
struct Free {
    free: Vec<u32>,
    /// Adapters that there were.
    count: u64,
    seated: Vec<Weak<Seated>>,
}

/// The seats that are free.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seats(Arc<Mutex<Free>>);

impl Seats {
    pub(crate) fn new(count: usize) -> Seats {
        let free = (1..=count as u32).rev().collect();
        Seats(Arc::new(Mutex::new(Free { free, ..Free::default() })))
    }

    fn lock(&self) -> MutexGuard<'_, Free> {
        // A panic elsewhere cannot leave the list half-changed: its operations are single ones.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses an adapter that sits elsewhere.
    pub(crate) fn check(&self, adapter: Option<&Adapter>) -> Result<()> {
        match adapter.filter(|adapter| !Arc::ptr_eq(&adapter.0.seats.0, &self.0)) {
            None => Ok(()),
            Some(other) => Err(Error::new("adapter", "one of this engine", other.path().display())),
        }
    }

    /// The adapters that have a seat on the device.
    pub(crate) fn seated(&self) -> Vec<Adapter> {
        self.lock().seated.iter().filter_map(Weak::upgrade).map(Adapter).collect()
    }

    fn take(&self, file: AdapterFile) -> Result<Adapter> {
        let mut free = self.lock();
        let seat = free.free.pop().ok_or_else(|| {
            let error = Error::new(file.path.display(), "a free seat for an adapter", "none");
            error.of(ErrorKind::Busy).hint("drop another adapter, or load the engine for more")
        })?;
        free.count += 1;
        let seated = Arc::new(Seated { file, seat, number: free.count, seats: self.clone() });
        free.seated.retain(|seated| seated.strong_count() > 0);
        free.seated.push(Arc::downgrade(&seated));
        Ok(Adapter(seated))
    }
}

/// Opens an adapter, whose weights are read when it is resolved.
///
/// # Errors
/// A setting that is missing or contradicts itself; an adapter that says that it was made for
/// another model than `tensors`, unless [`AdapterFile::any_base`] allows it.
pub fn open_adapter(file: &AdapterFile, tensors: &Tensors) -> Result<File> {
    let opened = File::open(&file.path)?;
    let Some(MadeFor { name, fingerprint: made_for }) =
        opened.made_for().filter(|_| !file.any_base)
    else {
        return Ok(opened);
    };
    let own = fingerprint(tensors);
    if *made_for == own {
        return Ok(opened);
    }
    let [own, other] = [&own, made_for].map(|all| all.chars().take(12).collect::<String>());
    let name: String = name.chars().take(80).collect();
    let expected = format!("an adapter made for this model, fingerprint {own}");
    let error = Error::new(file.path.display(), expected, format!("one made for {name}, {other}"));
    Err(error.hint(Hint::setting(Setting::AnyBase).and(" loads it all the same")))
}

/// Adapters before their model is loaded.
pub(crate) struct Opened {
    /// Each with its file.
    resolved: Vec<(AdapterFile, program::AdapterFactors)>,
    /// Room on the device.
    pub(crate) seats: device::Seats,
    /// A line for each that does not say which model it was made for.
    pub(crate) warnings: Vec<String>,
}

impl Opened {
    /// Reads the adapters that `wanted` names, and gives the Program that has room for them and for
    /// more.
    pub(crate) fn open(
        wanted: &Adapters,
        config: &Config,
        program: Program,
        tensors: &Tensors,
    ) -> Result<(Opened, Program)> {
        let count = wanted.files.len() + wanted.more;
        if count == 0 {
            let (resolved, seats) = (Vec::new(), device::Seats::default());
            return Ok((Opened { resolved, seats, warnings: Vec::new() }, program));
        }
        let base = Base { config, program: &program, tensors };
        let mut warnings = Vec::new();
        let resolve = |file: &AdapterFile| {
            let (opened, towers) = open_adapter(file, tensors)?.of_text()?;
            let adapter = opened.resolve(&base, file.scale)?;
            if towers > 0 {
                warnings.push(format!(
                    "{}: {towers} matrices of towers are passed over: texts do not go through them",
                    file.path.display()
                ));
            }
            if opened.made_for().is_none() {
                let path = file.path.display();
                warnings
                    .push(format!("{path}: does not say which model it was made for, but fits"));
            }
            Ok((file.clone(), shortened(&base, adapter)?))
        };
        let resolved = wanted.files.iter().map(resolve).collect::<Result<Vec<_>>>()?;
        // Tables that an adapter has anew have far greater ranks than what lies in the blocks.
        let ranks = |wanted: &dyn Fn(&str) -> bool| {
            let deltas = resolved.iter().flat_map(|(_, adapter)| &adapter.deltas);
            deltas.filter(|(site, _)| wanted(site)).map(|(_, delta)| delta.rank).max().unwrap_or(0)
        };
        let more = if wanted.more > 0 { wanted.rank * base.most_pieces()? } else { 0 };
        let inside = ranks(&|site| site.starts_with("blocks."));
        let seats = device::Seats { count, rank: more.max(inside).max(1) };
        let stacks = program.adaptable().into_iter().filter(|site| site.experts.is_some());
        let stacks: Vec<String> = stacks.map(|site| site.name).collect();
        let changed = |site: &str| {
            let expert = stacks.iter().any(|stack| stack == site);
            let more = wanted.more > 0 && (wanted.experts || !expert);
            more || resolved.iter().any(|(_, a)| a.deltas.contains_key(site))
        };
        let mut program = program.with_sites(&changed);
        for site in program.sites.iter_mut().filter(|site| !site.name.starts_with("blocks.")) {
            // A table that changes as a whole has as many ranks as it is wide.
            let wide = if site.gathers { site.output } else { site.input };
            let more = if wanted.more > 0 && wanted.tables { wide } else { 0 };
            let own = ranks(&|name| name == site.name).max(more);
            site.rank = Some(own).filter(|own| *own > seats.rank);
        }
        Ok((Opened { resolved, seats, warnings }, program))
    }

    /// Puts them on the seats of a loaded engine.
    pub(crate) fn seat(
        self,
        seats: &Seats,
        executor: &mut dyn device::Executor,
    ) -> Result<Vec<Adapter>> {
        let mut all = Vec::new();
        for (file, adapter) in self.resolved {
            let seated = seats.take(file)?;
            executor.seat(seated.seat(), Some(&adapter))?;
            all.push(seated);
        }
        Ok(all)
    }
}

impl Engine {
    /// The adapters that it was loaded with, in the order of
    /// [`LoadOptions::adapters`](crate::LoadOptions::adapters).
    pub fn adapters(&self) -> &[Adapter] {
        &self.0.adapters
    }

    /// Adds an adapter while others generate: nothing is compiled, and steps go on between its
    /// reading and its use.
    ///
    /// # Errors
    /// An adapter that does not fit the model, by file and key; one more than the engine was loaded
    /// for, or of a greater rank.
    pub fn adapt(&self, file: &AdapterFile) -> Result<Adapter> {
        let shared: &Shared = &self.0;
        let seated = shared.seats.take(file.clone())?;
        let tensors = Tensors::open(shared.location.clone())?;
        for part in self.enabled() {
            let ending = part.options.ending;
            let adapter = with_base_of(&part, ending, &tensors, |base| resolve(base, file))?;
            tensors.whole()?;
            part.executor().seat(seated.seat(), Some(&adapter))?;
        }
        Ok(seated)
    }
}

/// Reads an adapter for a base.
pub(crate) fn resolve(base: &Base<'_>, file: &AdapterFile) -> Result<program::AdapterFactors> {
    let (opened, _) = open_adapter(file, base.tensors)?.of_text()?;
    let adapter = opened.resolve(base, file.scale)?;
    shortened(base, adapter)
}

/// Calls `f` with a part of a loaded model as adapters see it.
pub(crate) fn with_base_of<T>(
    shared: &Shared,
    ending: Ending,
    tensors: &Tensors,
    f: impl FnOnce(&Base<'_>) -> Result<T>,
) -> Result<T> {
    let ignore_keys = shared.options.ignore_keys.clone();
    let context = Some(shared.info.context);
    with_base(tensors, &models::ReadOptions { ignore_keys, context, ending, latents: None }, f)
}

/// Writes an adapter of PEFT's form, such as those that are tuned here, as a folder of mlx-lm.
///
/// # Errors
/// An adapter that does not fit the model, or has what mlx-lm has otherwise; a folder that is there
/// already.
pub fn adapter_to_mlx(
    model: impl Into<Location>,
    file: &AdapterFile,
    to: &std::path::Path,
) -> Result<()> {
    let tensors = Tensors::open(model)?;
    with_base(&tensors, &models::ReadOptions::default(), |base| {
        open_adapter(file, &tensors)?.write_mlx(base, file.scale, to)
    })
}

/// Calls `f` with a model as adapters see it.
fn with_base<T>(
    tensors: &Tensors,
    options: &models::ReadOptions,
    f: impl FnOnce(&Base<'_>) -> Result<T>,
) -> Result<T> {
    let model = models::load(tensors, options)?;
    let program = program::fuse(&model.record(false)?);
    f(&Base { config: model.config(), program: &program, tensors })
}

/// Writes a model with an adapter merged into it: a folder like the model's own, in the types that
/// it is stored in.
///
/// # Errors
/// A model that is no folder of floats, an adapter that does not fit it, a folder that is there
/// already.
pub fn fuse(
    model: impl Into<Location>,
    file: &AdapterFile,
    ignore_keys: &[String],
    to: &std::path::Path,
) -> Result<()> {
    let tensors = Tensors::open(model)?;
    let read =
        models::ReadOptions { ignore_keys: ignore_keys.to_vec(), ..models::ReadOptions::default() };
    with_base(&tensors, &read, |base| {
        let adapter = open_adapter(file, &tensors)?.resolve(base, file.scale)?;
        adapters::fuse(base, &adapter, to).map_err(|error| match error.kind {
            // The error names the site alone, but the fault is the adapter's.
            ErrorKind::Unsupported if adapter.deltas.contains_key(&error.place) => {
                Error { place: format!("{}: {}", file.path.display(), error.place), ..error }
            }
            _ => error,
        })
    })
}

//! The kernels of a device: recorded, specialised and lowered once.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};

use formats::{Error, Result};
use tile::Kernel;
use tile::dsl::Recipe;
use tile::ir::ParamKind;
use tile::launch::Numbers;
use tile::passes::{self, Target};

use super::lower::{Slot, Step};
use super::{Backend, Facts};

/// Most instructions of kernels that [`KNOWN`] keeps: some 50 MB, about what one model has. Where
/// GPUs are simulated, one process loads many.
const MOST: usize = if cfg!(feature = "sim") { 1 << 23 } else { 1 << 19 };

/// Cache of recorded and lowered kernels, for all devices of this process. Parts of an engine,
/// ranks and models that are loaded again share kernels, as do threads that prepare them; to record
/// and lower them takes longer than a step of a small model.
static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

/// A kernel once somebody has made it. Ranks ask for the same kernels at the same time: the first
/// makes each, the others wait for it.
type Made<T> = Arc<OnceLock<T>>;

/// The key of a lowered kernel: target, key of the recipe, values of the constants.
type Lowering = (Target, String, Vec<u32>);

/// See [`KNOWN`].
#[derive(Default)]
struct Known {
    /// As they were recorded, by the key of the recipe.
    recorded: HashMap<String, Made<Arc<Kernel>>>,
    /// Lowered, or why they cannot be.
    lowered: HashMap<Lowering, Made<Result<Arc<Kernel>>>>,
    /// Instructions of all of them.
    instructions: usize,
}

impl Known {
    /// Makes room for a kernel.
    fn count(&mut self, kernel: &Kernel) {
        let mut instructions = 0;
        kernel.visit(&mut |_| instructions += 1);
        if self.instructions + instructions > MOST {
            *self = Known::default();
        }
        self.instructions += instructions;
    }
}

fn known() -> MutexGuard<'static, Known> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A kernel as its recipe records it.
fn recorded(recipe: Recipe<'_>, key: &str) -> Arc<Kernel> {
    let made = Arc::clone(known().recorded.entry(key.to_owned()).or_default());
    let mut is_new = false;
    let kernel = made.get_or_init(|| {
        is_new = true;
        Arc::new(recipe.record())
    });
    if is_new {
        known().count(kernel);
    }
    Arc::clone(kernel)
}

/// A recorded kernel, specialised to the values of its constants and lowered for a target.
///
/// # Errors
/// The verifier's findings, or an instruction that the target lacks.
fn lowered(
    source: &Kernel,
    key: &str,
    (numbers, constants): (&Numbers, &[u32]),
    target: Target,
) -> Result<Arc<Kernel>> {
    let key = (target, key.to_owned(), constants.to_vec());
    let made = Arc::clone(known().lowered.entry(key).or_default());
    let mut is_new = false;
    let kernel = made.get_or_init(|| {
        is_new = true;
        let special = passes::specialise(source, numbers);
        let kernel = passes::lower(&special, target);
        kernel.map(Arc::new).map_err(|fault| Error::new(&source.name, "", fault))
    });
    if let (Ok(kernel), true) = (kernel, is_new) {
        known().count(kernel);
    }
    kernel.clone()
}

/// The distinct kernels of a device, each lowered once.
#[derive(Default)]
pub(super) struct Kernels {
    pub(super) all: Vec<Arc<Kernel>>,
    /// The recorded kernel before lowering, and the values of its constants.
    pub(super) sources: Vec<(Arc<Kernel>, Numbers)>,
    /// Recorded kernels by the key of their recipe.
    recorded: HashMap<String, Arc<Kernel>>,
    /// Number by the key of the recipe and the values of the constants.
    known: HashMap<(String, Vec<u32>), usize>,
}

impl Kernels {
    /// The number of the kernel lowered with these constants, and the kernel as it was recorded.
    pub(super) fn get(
        &mut self,
        recipe: Recipe,
        numbers: &Numbers,
        facts: Facts,
    ) -> Result<(usize, Arc<Kernel>)> {
        // Layers and classes repeat their kernels; record each once.
        let key = recipe.key();
        let own = self.recorded.entry(key.clone());
        let source = own.or_insert_with(|| recorded(recipe, &key)).clone();
        let wrong = |expected: &str, found: &str| Error::new(&source.name, expected, found);
        let constants = source.constants.iter().map(|c| numbers.get(&c.name));
        let constants: Option<Vec<u32>> = constants.collect();
        let constants = constants.ok_or_else(|| wrong("a value for each constant", "fewer"))?;
        if let Some(&known) = self.known.get(&(key.clone(), constants.clone())) {
            return Ok((known, source));
        }
        let lowered = lowered(&source, &key, (numbers, &constants), facts.target)?;
        self.all.push(lowered);
        self.sources.push((source.clone(), numbers.clone()));
        self.known.insert((key, constants), self.all.len() - 1);
        Ok((self.all.len() - 1, source))
    }

    /// A launch of a kernel with buffers bound by parameter name.
    pub(super) fn step(
        &mut self,
        recipe: Recipe,
        numbers: Numbers,
        facts: Facts,
        bound: &[(&str, Slot)],
    ) -> Result<Step> {
        let (kernel, source) = self.get(recipe, &numbers, facts)?;
        let buffers = source
            .params
            .iter()
            .filter(|p| matches!(p.kind, ParamKind::Buffer { .. }))
            .map(|p| {
                let slot = bound.iter().find(|(name, _)| *name == p.name);
                let missing = || Error::new(&source.name, format!("a buffer `{}`", p.name), "none");
                slot.map(|(_, slot)| slot.clone()).ok_or_else(missing)
            })
            .collect::<Result<_>>()?;
        Ok(Step::Kernel { kernel, numbers, buffers })
    }

    /// Compiles the kernels from the one of number `first` on that are not precompiled; returns the
    /// pipelines of those that are.
    pub(super) fn compile<B: Backend>(
        &self,
        backend: &B,
        first: usize,
    ) -> Vec<Option<B::Pipeline>> {
        let sources = self.sources[first..].iter();
        let built: Vec<_> = sources.map(|(k, numbers)| backend.built(k, numbers)).collect();
        let missing = self.all[first..].iter().zip(&built).filter(|(_, built)| built.is_none());
        backend.ahead(&missing.map(|(kernel, _)| &**kernel).collect::<Vec<_>>());
        built
    }

    /// Loads the kernels that have no pipeline yet.
    pub(super) fn load<B: Backend>(
        &self,
        backend: &B,
        pipelines: &mut Vec<B::Pipeline>,
    ) -> Result<()> {
        let first = pipelines.len();
        for (kernel, built) in self.all[first..].iter().zip(self.compile(backend, first)) {
            pipelines.push(built.map_or_else(|| backend.load(kernel), Ok)?);
        }
        Ok(())
    }
}

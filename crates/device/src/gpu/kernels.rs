//! The kernels of a device: recorded, specialised and lowered once.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use formats::{Error, Result};
use tile::Kernel;
use tile::dsl::Recipe;
use tile::ir::ParamKind;
use tile::launch::Numbers;
use tile::passes::{self, Target};

use super::lower::{Slot, Step};
use super::{Backend, Facts};

/// Most instructions of kernels that [`LOWERED`] keeps: some 25 MB, about what one model has. Where
/// GPUs are simulated, one process loads many.
const MOST: usize = if cfg!(feature = "sim") { 1 << 23 } else { 1 << 18 };

/// Cache of lowered kernels, for all devices of this process. Parts of an engine, ranks and models
/// that are loaded again share kernels, and lowering them takes longer than a step of a small
/// model.
static LOWERED: LazyLock<Mutex<Lowered>> = LazyLock::new(Mutex::default);

/// See [`LOWERED`].
#[derive(Default)]
struct Lowered {
    /// By target, key of the recipe and values of the constants.
    kernels: HashMap<(Target, String, Vec<u32>), Arc<Kernel>>,
    /// Instructions of all of them.
    instructions: usize,
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
    let all = || LOWERED.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (target, key.to_owned(), constants.to_vec());
    if let Some(known) = all().kernels.get(&key) {
        return Ok(Arc::clone(known));
    }
    let special = passes::specialise(source, numbers);
    let kernel = passes::lower(&special, target)
        .map_err(|fault| Error::new(&source.name, "", fault))
        .map(Arc::new)?;
    let mut instructions = 0;
    kernel.visit(&mut |_| instructions += 1);
    let mut all = all();
    if all.instructions + instructions > MOST {
        *all = Lowered::default();
    }
    all.instructions += instructions;
    all.kernels.insert(key, Arc::clone(&kernel));
    Ok(kernel)
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
        let recorded = self.recorded.entry(key.clone());
        let source = recorded.or_insert_with(|| Arc::new(recipe.record())).clone();
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

    /// Loads the kernels that have no pipeline yet.
    pub(super) fn load<B: Backend>(
        &self,
        backend: &B,
        pipelines: &mut Vec<B::Pipeline>,
    ) -> Result<()> {
        let first = pipelines.len();
        let sources = self.sources[first..].iter();
        let built: Vec<_> = sources.map(|(k, numbers)| backend.built(k, numbers)).collect();
        let new = || self.all[first..].iter().zip(&built);
        let missing: Vec<&Kernel> =
            new().filter(|(_, built)| built.is_none()).map(|(kernel, _)| &**kernel).collect();
        backend.ahead(&missing);
        for (kernel, built) in new() {
            pipelines.push(built.clone().map_or_else(|| backend.load(kernel), Ok)?);
        }
        Ok(())
    }
}

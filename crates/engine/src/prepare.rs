//! A model between its path and its weights: what can be told before anything large is allocated.

use crate::adapters::{Opened, Seats};
use crate::choose::{Chosen, Recorded, choose};
use crate::defaults::{self, Defaults};
use crate::embed::{EmbeddingForm, read_embedding_form};
use crate::fingerprint::fingerprint;
use crate::load::{Engine, Info, LoadOptions, Shared, Trace, read_template, read_tokenizer};
use crate::pool::Pool;
use crate::prefix::Prefixes;
use crate::slots::Slots;
use device::{Place, Plan};
use formats::{Error, Location, Result, Tensors};
use models::{Config, Ending};
use program::{Input, Program};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;
use tokens::Tokenizer;

/// A model that is open, with its Program recorded and its device found; see [`Engine::prepare`].
pub struct Prepared {
    start: Instant,
    tensors: Tensors,
    traces: Vec<String>,
    inputs: Vec<Input>,
    config: Config,
    chosen: Chosen,
    adapters: Opened,
}

impl Prepared {
    pub(crate) fn new(model: Location, options: &LoadOptions) -> Result<Prepared> {
        let start = Instant::now();
        let tensors = Tensors::open(model)?;
        let Read { mut config, traces, inputs, mut program } =
            record(&tensors, options, options.context)?;
        let opened = Opened::open(&options.adapters, &config, program, &tensors)?;
        let mut adapters = opened.0;
        program = opened.1;
        if options.context == Some(0) || options.chunk == Some(0) {
            return Err(Error::new("context", "at least one token", 0));
        }
        let positions = program.learned_positions();
        if options.context.is_some_and(|context| context > positions) {
            let expected = format!("at most {positions} tokens, whose positions the model learned");
            return Err(Error::new("context", expected, options.context.unwrap_or(positions)));
        }
        if options.rotate && positions < usize::MAX {
            let found = format!("{positions} learned positions");
            return Err(Error::new("rotation", "a model with positions without end", found));
        }
        let (trained, seats) = (config.context, adapters.seats);
        let recorded = Recorded { tensors: &tensors, program: &program, trained, seats };
        let mut chosen = choose(&recorded, options)?;
        if config.rope_by_context && chosen.context != options.context.unwrap_or(config.context) {
            // Memory is short: the rotation follows the shorter context, and nothing else does.
            let context = Some(chosen.context);
            Read { config, program, .. } = record(&tensors, options, context)?;
            (adapters, program) = Opened::open(&options.adapters, &config, program, &tensors)?;
            let (trained, seats) = (config.context, adapters.seats);
            let recorded = Recorded { tensors: &tensors, program: &program, trained, seats };
            chosen = choose(&recorded, &LoadOptions { context, ..options.clone() })?;
            chosen.options.context = options.context;
        }
        Ok(Prepared { start, tensors, traces, inputs, config, chosen, adapters })
    }

    /// What loading it, and using it with a whole context, will take of the memory of each device.
    pub fn plan(&self) -> &[Plan] {
        &self.chosen.plan
    }

    /// Each device, in the order of the plans.
    pub fn places(&self) -> &[Place] {
        &self.chosen.places
    }

    /// Why it runs where it does, if [`Place::Auto`] had something to choose between.
    pub fn why(&self) -> Option<&str> {
        self.chosen.why.as_deref()
    }

    /// Positions that a session will hold at most.
    pub fn context(&self) -> usize {
        self.chosen.context
    }

    /// Whether the context is shorter than the model's because no more fits in memory.
    pub fn shortened(&self) -> bool {
        self.chosen.options.context.is_none() && self.chosen.context < self.config.context
    }

    /// Reads the weights, telling `progress` the bytes read so far and in all.
    ///
    /// # Errors
    /// Weights that are missing, damaged, or too large for the device.
    pub fn load(self, progress: &mut dyn FnMut(u64, u64)) -> Result<Engine> {
        let Prepared { start, mut tensors, traces, inputs, config, chosen, adapters } = self;
        let Chosen { program, options, device, load, plan, places, context, .. } = chosen;
        let tokenizer = read_tokenizer(&tensors)?;
        let template = read_template(&tensors)?;
        let Defaults { sampling, ends, warnings } =
            defaults::read(&tensors, config.vocab, tokenizer.as_ref())?;
        let stated = match (options.ending, options.embeddings) {
            (Ending::Logits, _) => None,
            (Ending::Hidden, None) => read_embedding_form(&tensors)?,
            (Ending::Hidden, form) => form,
        };
        let assumed = (options.ending == Ending::Hidden && stated.is_none()).then(|| {
            "no pooling is stated: embeddings are the last token's state, normalised".to_string()
        });
        let embeds = stated.or(assumed.is_some().then_some(EmbeddingForm::ASSUMED));
        let of_tokenizer = tokenizer.as_ref().map_or(&[][..], Tokenizer::warnings);
        let warnings = config
            .warnings
            .iter()
            .chain(of_tokenizer)
            .chain(&warnings)
            .chain(&assumed)
            .chain(&adapters.warnings);
        let warnings = warnings.map(|warning| brief(warning)).collect();
        let elements = |weight: &program::Weight| weight.shape.iter().product::<usize>() as u64;
        let parameters = program.weights.iter().map(elements).sum();
        let file_bytes = program.stored_bytes(&tensors)?;
        let (pool, groups) = (Pool::new(&load.blocks), program.groups());
        let layers = program.layers.clone();
        let name = name(&tensors);
        tensors.forget_metadata();
        device::give_back();
        let executor = device.load(program, &tensors, load, progress);
        // Its pages were read just now.
        let fingerprint = fingerprint(&tensors);
        // First: of a file that became shorter, what it lost reads as weights of zero, or as
        // nonsense.
        tensors.whole()?;
        let mut executor = executor?;
        let seats = Seats::new(adapters.seats.count);
        let adapters = adapters.seat(&seats, &mut *executor)?;
        let location = tensors.location();
        let info = Info {
            name,
            architecture: config.architecture.name,
            parameters,
            file_bytes,
            trained_context: config.context,
            context,
            vocab: config.vocab,
            layers: config.layers,
            hidden: config.hidden,
            device: device.about(),
            load_ms: start.elapsed().as_millis() as u64,
        };
        drop(tensors);
        device::give_back();
        Ok(Engine(Arc::new(Shared {
            prefixes: Prefixes::new(&groups),
            pool,
            slots: Slots::default(),
            seats,
            adapters,
            location,
            executor: Mutex::new(executor),
            groups,
            layers,
            fingerprint,
            traces,
            inputs,
            config,
            options,
            info,
            tokenizer,
            ends,
            template,
            defaults: sampling,
            plan,
            warnings,
            embeds,
            together: Mutex::default(),
            worker: OnceLock::new(),
            places,
            whole: Arc::new(()),
        })))
    }
}

/// What a model's files say.
struct Read {
    config: Config,
    /// Names of traced values.
    traces: Vec<String>,
    /// What those are, where they are the inputs of products.
    inputs: Vec<Input>,
    program: Program,
}

/// Reads a model that is going to have so many positions.
fn record(tensors: &Tensors, options: &LoadOptions, context: Option<usize>) -> Result<Read> {
    let read = models::Options {
        ignore_keys: options.ignore_keys.clone(),
        context,
        ending: options.ending,
    };
    let model = models::load(tensors, &read)?;
    let recorded = model.record(options.trace == Trace::Layers)?;
    let (recorded, inputs) = match options.trace {
        Trace::Inputs => recorded.observed(),
        _ => (recorded, Vec::new()),
    };
    let traces = recorded.traces.iter().map(|(name, _)| name.clone()).collect();
    let program = program::fuse(&recorded);
    program.verify()?;
    Ok(Read { config: model.config().clone(), traces, inputs, program })
}

/// A warning as one short line, whatever names of the file are in it.
fn brief(warning: &str) -> String {
    const LONGEST: usize = 150;
    match warning.char_indices().nth(LONGEST) {
        Some((end, _)) => format!("{}...", &warning[..end]),
        None => warning.to_string(),
    }
}

fn name(tensors: &Tensors) -> String {
    let path = tensors.path();
    let stated = tensors.gguf().and_then(|f| f.metadata().str("general.name").ok().flatten());
    let stem = || path.canonicalize().ok()?.file_stem().map(|s| s.to_string_lossy().into_owned());
    stated.map(str::to_owned).or_else(stem).unwrap_or_else(|| path.display().to_string())
}

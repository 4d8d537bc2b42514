//! A model between its path and its weights: what can be told before anything large is allocated.

use crate::adapters::{Opened, Seats};
use crate::choose::{Chosen, Recorded, choose};
use crate::defaults::{self, Defaults};
use crate::embed::{EmbeddingForm, read_embedding_form};
use crate::events::{Capability, Stage};
use crate::load::{Engine, Info, LoadOptions, Shared, Trace, read_template, read_tokenizer};
use crate::parts;
use crate::pool::Pool;
use crate::prefix::Prefixes;
use crate::slots::Slots;
use device::{DeviceSpec, Plan};
use formats::{Error, Location, Result, Tensors, fingerprint};
use models::{Config, Ending};
use program::{Input, Program};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;
use tokens::{ChatTemplate, Tokenizer};

/// Words of a vocabulary that leaves enough freed memory behind, once it is read, to look for it in
/// all of the heap.
const LARGE_VOCABULARY: usize = 1024;

/// A model that is open, with its Program recorded and its device found; see [`Engine::prepare`].
pub struct Prepared {
    /// The part of an engine that it is loaded beside, or again in the place of.
    beside: Option<Arc<Shared>>,
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
        Prepared::open(model, options, None)
    }

    /// A part with a capability, on the device of another part of its model, if that is open.
    pub(crate) fn beside(part: &Arc<Shared>, capability: Capability) -> Result<Prepared> {
        let options = part.options_beside(capability);
        Prepared::open(part.location.clone(), &options, Some(part.clone()))
    }

    fn open(
        model: Location,
        options: &LoadOptions,
        beside: Option<Arc<Shared>>,
    ) -> Result<Prepared> {
        let (events, capability) = (&options.events, Capability::of(options.ending));
        events.tell(capability, Stage::Opening, None);
        let opened = Prepared::read(model, options, beside);
        match &opened {
            Ok(_) => events.tell(capability, Stage::Planned, None),
            Err(why) => events.tell(capability, Stage::Failed, Some(why.to_string())),
        }
        opened
    }

    fn read(
        model: Location,
        options: &LoadOptions,
        beside: Option<Arc<Shared>>,
    ) -> Result<Prepared> {
        let start = Instant::now();
        let tensors = Tensors::open(model)?;
        if let Some(part) = beside.as_ref().filter(|part| part.fingerprint != fingerprint(&tensors))
        {
            let expected = format!("the model that is loaded, {}", part.info.name);
            let error = Error::new(tensors.path().display(), expected, "another");
            return Err(error.hint("unload it, and load what is there now"));
        }
        let kept = beside.as_ref().and_then(|part| {
            let device = part.home.device()?;
            Some((device, part.places.clone()))
        });
        let read = |context: Option<usize>| -> Result<(Read, Opened, Option<Program>)> {
            let Read { config, traces, inputs, program } =
                record(&tensors, options, context, None)?;
            let (adapters, program) = Opened::open(&options.adapters, &config, program, &tensors)?;
            // Adapters change the matrices that make each head's keys and values, and importance
            // is of those, too.
            let traced = options.trace == Trace::Inputs;
            let suits = config.latents && adapters.seats.count == 0 && !traced;
            let latents = || record(&tensors, options, context, Some(device::LONGEST_HEAD));
            let latents = suits.then(latents).transpose()?.map(|read| read.program);
            Ok((Read { config, traces, inputs, program }, adapters, latents))
        };
        let placed = |(read, adapters, latents): &(Read, Opened, Option<Program>), options| {
            let recorded = Recorded {
                tensors: &tensors,
                program: &read.program,
                latents: latents.as_ref(),
                trained: read.config.context,
                seats: adapters.seats,
                kept: kept.clone(),
            };
            choose(&recorded, options)
        };
        let mut model = read(options.context)?;
        let program = &model.0.program;
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
        let mut chosen = placed(&model, options)?;
        let config = &model.0.config;
        if config.rope_by_context && chosen.context != options.context.unwrap_or(config.context) {
            // Memory is short: the rotation follows the shorter context, and nothing else does.
            let context = Some(chosen.context);
            model = read(context)?;
            chosen = placed(&model, &LoadOptions { context, ..options.clone() })?;
            chosen.options.context = options.context;
        }
        let (Read { config, traces, inputs, .. }, adapters, _) = model;
        Ok(Prepared { beside, start, tensors, traces, inputs, config, chosen, adapters })
    }

    /// The memory of each device that the model will take with a full context.
    pub fn plan(&self) -> &[Plan] {
        &self.chosen.plan
    }

    /// Each device, in the order of the plans.
    pub fn places(&self) -> &[DeviceSpec] {
        &self.chosen.places
    }

    /// Why it runs where it does, if [`DeviceSpec::Auto`] had something to choose between.
    pub fn why(&self) -> Option<&str> {
        self.chosen.why.as_deref()
    }

    /// Positions that a session will hold at most.
    pub fn context(&self) -> usize {
        self.chosen.context
    }

    /// Positions that the cache holds at most for all sequences together; fewer than a context for
    /// each where memory is short. Layers with a window hold fewer.
    pub fn pooled(&self) -> usize {
        let blocks = self.chosen.load.blocks.iter().max().copied().unwrap_or(0);
        blocks.saturating_mul(program::BLOCK_TOKENS)
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
        let options = &self.chosen.options;
        let (events, capability) = (options.events.clone(), Capability::of(options.ending));
        events.tell(capability, Stage::Loading, None);
        let mut before = None;
        let mut told = |done: u64, all: u64| {
            let now = if done < all { Stage::Packing } else { Stage::Compiling };
            if before.replace(now) != Some(now) {
                events.tell(capability, now, None);
            }
            progress(done, all);
        };
        let loaded = self.load_telling(&mut told);
        match &loaded {
            Ok(_) => events.tell(capability, Stage::Ready, None),
            Err(why) => events.tell(capability, Stage::Failed, Some(why.to_string())),
        }
        loaded
    }

    fn load_telling(self, progress: &mut dyn FnMut(u64, u64)) -> Result<Engine> {
        let Prepared { beside, start, mut tensors, traces, inputs, config, chosen, adapters } =
            self;
        let Chosen { program, options, device, load, plan, places, context, .. } = chosen;
        let elements = |weight: &program::Weight| weight.shape.iter().product::<usize>() as u64;
        let parameters = program.weights.iter().map(elements).sum();
        let file_bytes = program.stored_bytes(&tensors)?;
        let (pool, groups) = (Pool::new(&load.blocks), program.groups());
        let layers = program.layers.clone();
        let name = name(&tensors);
        let form = (options.ending, options.embeddings);
        let (text, executor) = together(
            || Text::read(&tensors, config.vocab, form, beside.as_deref()),
            || device.load(program, &tensors, load, progress),
        );
        tensors.forget_metadata();
        let give_back = || (config.vocab >= LARGE_VOCABULARY).then(device::give_back);
        give_back();
        // Its pages were read just now.
        let fingerprint = fingerprint(&tensors);
        // First: of a file that became shorter, what it lost reads as weights of zero, or as
        // nonsense.
        tensors.whole()?;
        let Text { tokenizer, template, defaults, embeds, assumed } = text?;
        let Defaults { sampling, ends, warnings } = defaults;
        let of_tokenizer = tokenizer.as_deref().map_or(&[][..], Tokenizer::warnings);
        let warnings = config
            .warnings
            .iter()
            .chain(of_tokenizer)
            .chain(&warnings)
            .chain(&assumed)
            .chain(&adapters.warnings);
        let warnings = warnings.map(|warning| brief(warning)).collect();
        let mut executor = executor?;
        let (seats, adapters) = match &beside {
            Some(part) => {
                parts::seat_again(part, options.ending, &tensors, &mut *executor)?;
                (part.seats.clone(), part.adapters.clone())
            }
            None => {
                let seats = Seats::new(adapters.seats.count);
                let adapters = adapters.seat(&seats, &mut *executor)?;
                (seats, adapters)
            }
        };
        let (home, whole) = match &beside {
            Some(part) => (part.home.clone(), part.whole.clone()),
            None => Default::default(),
        };
        home.settle(&device);
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
        give_back();
        let shared = Arc::new(Shared {
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
            longest_token: OnceLock::new(),
            ends,
            template,
            defaults: sampling,
            plan,
            warnings,
            embeds,
            together: Mutex::default(),
            worker: OnceLock::new(),
            places,
            others: Mutex::default(),
            gate: Arc::default(),
            epoch: AtomicU64::new(0),
            lost: AtomicBool::new(false),
            home,
            whole,
        });
        shared.home.join(&shared);
        Ok(Engine(shared))
    }
}

/// A model as read from its files.
struct Read {
    config: Config,
    /// Names of traced values.
    traces: Vec<String>,
    /// The matrices behind those traced values that are inputs of products.
    inputs: Vec<Input>,
    program: Program,
}

/// Reads a model and records its Program for a context of `context` positions; `latents`:
/// [`models::ReadOptions::latents`].
fn record(
    tensors: &Tensors,
    options: &LoadOptions,
    context: Option<usize>,
    latents: Option<usize>,
) -> Result<Read> {
    let read = models::ReadOptions {
        ignore_keys: options.ignore_keys.clone(),
        context,
        ending: options.ending,
        latents,
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

/// The tokenizer, the chat template and the defaults of generation in a model's files.
struct Text {
    tokenizer: Option<Arc<Tokenizer>>,
    template: Option<Arc<ChatTemplate>>,
    defaults: Defaults,
    /// How embeddings are made of hidden states.
    embeds: Option<EmbeddingForm>,
    /// A warning, if no file says how.
    assumed: Option<String>,
}

impl Text {
    /// Reads it, or takes what a part of the same model has read; `form` is what its Program ends
    /// with, and how embeddings are to be made, if the caller says so.
    fn read(
        tensors: &Tensors,
        vocab: usize,
        form: (Ending, Option<EmbeddingForm>),
        beside: Option<&Shared>,
    ) -> Result<Text> {
        let (tokenizer, template) = match beside {
            Some(part) => (part.tokenizer.clone(), part.template.clone()),
            None => {
                let (tokenizer, template) = (read_tokenizer(tensors)?, read_template(tensors)?);
                (tokenizer.map(Arc::new), template.map(Arc::new))
            }
        };
        let defaults = defaults::read(tensors, vocab, tokenizer.as_deref())?;
        let stated = match form {
            (Ending::Logits, _) => None,
            (Ending::Hidden, None) => read_embedding_form(tensors)?,
            (Ending::Hidden, form) => form,
        };
        let assumed = (form.0 == Ending::Hidden && stated.is_none()).then(|| {
            "no pooling is stated: embeddings are the last token's state, normalised".to_string()
        });
        let embeds = stated.or(assumed.is_some().then_some(EmbeddingForm::ASSUMED));
        Ok(Text { tokenizer, template, defaults, embeds, assumed })
    }
}

/// Runs one function on a thread of its own, if there is one to be had, beside another.
fn together<T: Send, U>(one: impl Fn() -> T + Sync, other: impl FnOnce() -> U) -> (T, U) {
    std::thread::scope(|scope| {
        // As much as a main thread has: files of tokenizers and templates are read recursively.
        let thread = std::thread::Builder::new().stack_size(8 << 20);
        let one_beside = thread.spawn_scoped(scope, &one);
        let other = other();
        let one = match one_beside {
            Ok(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            Err(_) => one(),
        };
        (one, other)
    })
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

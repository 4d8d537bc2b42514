//! A model between its path and its weights: what can be told before anything large is allocated.

use crate::defaults::{self, Defaults};
use crate::load::{Engine, Info, LoadOptions, OUTPUT_ROWS, Shared, read_template, read_tokenizer};
use crate::pool::{Pool, bound};
use crate::session::GROUPS;
use device::{Device, Place, Plan, Split, SplitMode};
use formats::{Error, Location, Result, Tensors};
use models::Config;
use program::Program;
use std::sync::{Arc, Mutex};
use std::time::Instant;
use tokens::Tokenizer;

/// A model that is open, with its Program recorded and its device found; see [`Engine::prepare`].
pub struct Prepared {
    start: Instant,
    options: LoadOptions,
    tensors: Tensors,
    program: Program,
    traces: Vec<String>,
    config: Config,
    context: usize,
    device: Box<dyn Device>,
    load: device::LoadOptions,
    plan: Vec<Plan>,
}

impl Prepared {
    pub(crate) fn new(model: Location, options: &LoadOptions) -> Result<Prepared> {
        let start = Instant::now();
        let tensors = Tensors::open(model)?;
        let model = models::load(&tensors)?;
        let recorded = model.record(options.trace)?;
        let traces = recorded.traces.iter().map(|(name, _)| name.clone()).collect();
        let mut program = program::fuse(&recorded);
        program.verify()?;
        let config = model.config().clone();
        if options.context == Some(0) || options.chunk == 0 {
            return Err(Error::new("context", "at least one token", 0));
        }
        let context = options.context.unwrap_or(config.context);
        if options.rotate {
            program.bound(context);
        }
        let groups = program.groups();
        if groups.len() > GROUPS {
            let expected = format!("layers with at most {GROUPS} different windows");
            return Err(Error::new("windows", expected, groups.len()));
        }
        let device = open(options, program.layers.len())?;
        let blocks = |&window: &Option<usize>| {
            let (window, context) = options.span(window, context);
            bound(window, context, options.chunk)
        };
        let one: Vec<usize> = groups.iter().map(blocks).collect();
        let load = device::LoadOptions {
            cache_type: options.cache_type,
            rows: (options.chunk, OUTPUT_ROWS.min(options.chunk)),
            blocks: one.iter().map(|blocks| blocks.saturating_mul(options.sessions)).collect(),
            context: one,
            dispatch: options.dispatch,
            allow_nan: options.allow_nan,
        };
        let plan = device.plan(&program, &tensors, &load)?;
        Ok(Prepared {
            start,
            options: options.clone(),
            tensors,
            program,
            traces,
            config,
            context,
            device,
            load,
            plan,
        })
    }

    /// What loading it, and using it with a whole context, will take of the memory of each device that has its own.
    pub fn plan(&self) -> &[Plan] {
        &self.plan
    }

    /// Positions that a session will hold at most.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Reads the weights, telling `progress` the bytes read so far and in all.
    ///
    /// # Errors
    /// Weights that are missing, damaged, or too large for the device.
    pub fn load(self, progress: &mut dyn FnMut(u64, u64)) -> Result<Engine> {
        let Prepared { mut tensors, program, config, device, options, .. } = self;
        let tokenizer = read_tokenizer(&tensors)?;
        let template = read_template(&tensors)?;
        let Defaults { sampling, ends, warnings } =
            defaults::read(&tensors, config.vocab, tokenizer.as_ref())?;
        let of_tokenizer = tokenizer.as_ref().map_or(&[][..], Tokenizer::warnings);
        let warnings = config.warnings.iter().chain(of_tokenizer).chain(&warnings);
        let warnings = warnings.map(|warning| brief(warning)).collect();
        let elements = |weight: &program::Weight| weight.shape.iter().product::<usize>() as u64;
        let parameters = program.weights.iter().map(elements).sum();
        let file_bytes = program.stored_bytes(&tensors)?;
        let (pool, groups) = (Pool::new(&self.load.blocks), program.groups());
        let name = name(&tensors);
        tensors.forget_metadata();
        device::give_back();
        let executor = device.load(program, &tensors, self.load, progress);
        // First: of a file that became shorter, what it lost reads as weights of zero, or as nonsense.
        tensors.whole()?;
        let executor = executor?;
        let info = Info {
            name,
            architecture: config.architecture.name,
            parameters,
            file_bytes,
            trained_context: config.context,
            context: self.context,
            vocab: config.vocab,
            layers: config.layers,
            hidden: config.hidden,
            device: device.about(),
            load_ms: self.start.elapsed().as_millis() as u64,
        };
        drop(tensors);
        device::give_back();
        Ok(Engine(Arc::new(Shared {
            pool,
            executor: Mutex::new(executor),
            groups,
            traces: self.traces,
            config,
            options,
            info,
            tokenizer,
            ends,
            template,
            defaults: sampling,
            plan: self.plan,
            warnings,
        })))
    }
}

/// The device, or the CPU and GPUs for the last of so many layers.
fn open(options: &LoadOptions, layers: usize) -> Result<Box<dyn Device>> {
    let LoadOptions { device, threads, trace, .. } = *options;
    let tensor = options.split_mode == SplitMode::Tensor;
    match options.gpu_layers {
        Some(_) if tensor => {
            let found = "some on the CPU by --gpu-layers";
            Err(Error::new("--split-mode tensor", "all layers on the GPUs", found))
        }
        Some(_) if device == Place::Cpu => {
            let error = Error::new("--gpu-layers", "a GPU to put layers on", "the CPU alone");
            Err(error.hint("--device cuda or --device metal"))
        }
        Some(0) => Place::Cpu.open(threads),
        Some(last) if last < layers => {
            if trace {
                return Err(Error::new("a trace", "a model on one device", "one on several"));
            }
            let places = [Place::Cpu].into_iter().chain(device.each());
            let devices = places.map(|place| place.open(threads)).collect::<Result<_>>()?;
            Ok(Box::new(Split::new(devices, Some(last))))
        }
        _ if trace && device.each().len() > 1 => {
            Err(Error::new("a trace", "a model on one device", device))
        }
        _ if tensor => device.open_ranks(),
        _ => device.open(threads),
    }
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

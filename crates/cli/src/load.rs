//! From the loading flags to an engine.

use delft::hub::{Found, Hub, LocalModel};
use delft::{
    AdapterFile, Adapters, CacheType, DeviceSpec, Dispatch, EmbeddingForm, Engine, Error,
    LoadOptions, Plan, Prepared, Session, SplitMode, Tensors, models::Ending,
};

use delft::tokens::Tokenizer;

use crate::args::{AdapterArg, CacheArg, DispatchArg, LoadArgs, ModelArg, SplitArg};
use crate::fetch;
use crate::terminal::{Outcome, Stop, aside, bytes, harmless, stderr_is_terminal};

impl From<CacheArg> for CacheType {
    fn from(arg: CacheArg) -> Self {
        match arg {
            CacheArg::F16 => CacheType::F16,
            CacheArg::Bf16 => CacheType::BF16,
            CacheArg::F32 => CacheType::F32,
            CacheArg::Q8 => CacheType::Q8_0,
            CacheArg::Turbo => CacheType::Turbo,
        }
    }
}

impl From<DispatchArg> for Dispatch {
    fn from(arg: DispatchArg) -> Self {
        match arg {
            DispatchArg::Eager => Dispatch::Eager,
            DispatchArg::Arguments => Dispatch::Arguments,
            DispatchArg::Graph => Dispatch::Graph,
        }
    }
}

impl From<SplitArg> for SplitMode {
    fn from(arg: SplitArg) -> Self {
        match arg {
            SplitArg::Layer => SplitMode::Layer,
            SplitArg::Tensor => SplitMode::Tensor,
        }
    }
}

/// The model that the command line names: found on this machine, or else fetched, if that is
/// wanted.
pub(crate) fn find(args: &ModelArg) -> Outcome<LocalModel> {
    let Some(name) = args.model.as_deref() else { return Ok(LocalModel::bundled()?) };
    let hub = match Hub::from_env() {
        Ok(hub) => hub,
        Err(error) => return Ok(delft::hub::without_cache(name).unwrap_or(Err(error))?),
    };
    match hub.find(name)? {
        Found::Here(model) => Ok(model),
        Found::Absent(error) => fetch::absent(&hub, name, args.yes, error),
    }
}

/// A session with the adapter that the command line names.
pub(crate) fn session(engine: &Engine) -> Outcome<Session> {
    let mut session = engine.session();
    session.set_adapter(engine.adapters().first().cloned())?;
    Ok(session)
}

/// The adapter that an argument names; with `any_base` it may have been made for another model.
pub(crate) fn adapter(arg: &AdapterArg, any_base: bool) -> AdapterFile {
    AdapterFile { path: arg.path.clone(), scale: arg.scale, any_base }
}

/// The name of an adapter as a model: the one that it was given, or its file's.
pub(crate) fn adapter_name(arg: &AdapterArg) -> String {
    let file = || arg.path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    arg.name.clone().unwrap_or_else(file)
}

/// Finds and loads the model. On a terminal a line tells how far it is, and is wiped when done.
pub(crate) fn engine(args: &LoadArgs, verbose: bool) -> Outcome<(Engine, LocalModel)> {
    let context = args.ctx.map(|n| n as usize);
    let (engine, model) = engine_with(args, context, None, Embeds::Never, verbose)?;
    let info = engine.info();
    if info.context > info.trained_context && !args.rotate {
        beyond(&engine, "it may ramble");
    }
    Ok((engine, model))
}

/// Says that the context is longer than the model was trained for, and what follows.
pub(crate) fn beyond(engine: &Engine, consequence: &str) {
    let trained = engine.info().trained_context;
    aside(format_args!("the model was trained for {trained} tokens: beyond them {consequence}"));
}

/// Refuses flags that would have no effect at these places; `together` if the command computes
/// several sequences by itself.
fn have_effect(args: &LoadArgs, places: &[DeviceSpec], together: bool) -> Outcome {
    let gpus = places.iter().filter(|place| **place != DeviceSpec::Cpu).count();
    let found = if gpus == 0 { "the CPU alone".to_owned() } else { joined(places) };
    let refused = |flag: &str, expected: &str, hint: &str| {
        Err(Error::new(flag, expected, &found).hint(hint.to_owned()).into())
    };
    let a_gpu = "--device cuda or --device metal";
    if args.dispatch.is_some() && gpus == 0 {
        return refused("--dispatch", "a GPU to give work to", a_gpu);
    }
    if args.as_served && together {
        let found = "one that computes several as served in any case";
        return Err(Error::new("--as-served", "a command of one sequence", found).into());
    }
    if args.as_served && gpus == 0 {
        return refused("--as-served", "a GPU: a CPU computes alike alone and among many", a_gpu);
    }
    if args.split_mode.is_some() && gpus < 2 {
        return refused("--split-mode", "several GPUs that share the model", "--device cuda:0,1");
    }
    Ok(())
}

/// The names of some places.
fn joined(places: &[DeviceSpec]) -> String {
    places.iter().map(DeviceSpec::to_string).collect::<Vec<_>>().join(", ")
}

/// [`have_effect`] for models that are loaded once a request names them, at the place that the
/// flags say.
pub(crate) fn have_effect_later(args: &LoadArgs) -> Outcome {
    if let Some(processes) = &args.processes {
        return have_effect(args, processes.places(), true);
    }
    // A name that is none is told where it is used.
    let named = delft::named_place().ok().flatten();
    let places = match (args.device, named) {
        (DeviceSpec::Auto, None) => delft::survey().preferred.into_iter().take(1).collect(),
        (DeviceSpec::Auto, Some(place)) | (place, _) => match place {
            DeviceSpec::Several(_) => return Ok(()),
            place => vec![place],
        },
    };
    have_effect(args, &places, true)
}

/// Refuses to forget the oldest tokens in a command whose context never fills up.
pub(crate) fn never_full(args: &LoadArgs, command: &str) -> Outcome {
    if !args.rotate {
        return Ok(());
    }
    let found = format!("{command}, where it never does");
    Err(Error::new("--rotate", "a command whose context can fill up", found).into())
}

/// Whether a model makes embeddings instead of generating.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Embeds {
    Never,
    /// If its files say that it is made for it.
    IfStated,
    /// In a form that its files state, or in this one.
    Always(Option<EmbeddingForm>),
}

/// [`engine`] with a context and a number of sessions that the caller chooses, and that are
/// computed together, to generate or for embeddings.
pub(crate) fn engine_with(
    args: &LoadArgs,
    context: Option<usize>,
    sessions: Option<usize>,
    embeds: Embeds,
    verbose: bool,
) -> Outcome<(Engine, LocalModel)> {
    let model = find(&args.model)?;
    Ok((found(args, model.clone(), context, sessions, embeds, verbose)?, model))
}

/// [`engine_with`] for a model that was found.
pub(crate) fn found(
    args: &LoadArgs,
    model: LocalModel,
    context: Option<usize>,
    sessions: Option<usize>,
    embeds: Embeds,
    verbose: bool,
) -> Outcome<Engine> {
    let (ending, embeddings) = match embeds {
        Embeds::Always(form) => (Ending::Hidden, form),
        Embeds::IfStated if delft::read_embedding_form(&open(&model)?)?.is_some() => {
            (Ending::Hidden, None)
        }
        Embeds::IfStated | Embeds::Never => (Ending::Logits, None),
    };
    let options = LoadOptions { ending, embeddings, ..options(args, context, sessions) };
    let prepared = Engine::prepare(&model.location, &options)?;
    have_effect(args, prepared.places(), args.together || sessions.is_some())?;
    if let Some(sessions) = sessions.filter(|_| ending == Ending::Logits) {
        let (pooled, context) = (prepared.pooled(), prepared.context());
        if pooled < sessions.saturating_mul(context) {
            aside(format_args!(
                "the cache has room for {pooled} tokens: for {sessions} sequences of {context} memory is short"
            ));
        }
    }
    load(args, &model, prepared, verbose)
}

/// The options of loading that the flags state: with a context and a number of sessions that the
/// caller chooses.
pub(crate) fn options(
    args: &LoadArgs,
    context: Option<usize>,
    sessions: Option<usize>,
) -> LoadOptions {
    let usual = LoadOptions::on(args.device);
    LoadOptions {
        sessions: sessions.unwrap_or(usual.sessions),
        batched: args.as_served || args.together || sessions.is_some(),
        threads: args.threads.map(|n| n as usize),
        context,
        rotate: args.rotate,
        cache_type: args.cache_type.into(),
        split_mode: args.split_mode.map_or(SplitMode::default(), SplitMode::from),
        processes: args.processes.clone(),
        dispatch: args.dispatch.map_or(Dispatch::default(), Dispatch::from),
        gpu_layers: args.gpu_layers.map(|n| n as usize),
        cpu_experts: args.experts.layers(),
        allow_nan: args.allow_nan,
        ignore_keys: args.ignore_key.clone(),
        adapters: Adapters {
            files: args.adapter.iter().map(|arg| adapter(arg, args.any_base)).collect(),
            more: args.room.0,
            rank: args.room.1,
            experts: false,
            tables: false,
        },
        chunk: args.chunk.map(|n| n as usize),
        trace: args.trace,
        ..usual
    }
}

/// Loads what was prepared. On a terminal a line tells how far it is.
fn load(args: &LoadArgs, model: &LocalModel, prepared: Prepared, verbose: bool) -> Outcome<Engine> {
    if prepared.shortened() {
        aside(format_args!(
            "context {} instead of the model's own, for which memory is short (--ctx sets it)",
            prepared.context()
        ));
    }
    if let Some(why) = prepared.why().filter(|_| stderr_is_terminal() && !args.quiet) {
        aside(format_args!("runs on {why}"));
    }
    if verbose {
        for (plan, place) in prepared.plan().iter().zip(prepared.places()) {
            aside(format_args!("memory of {place}: {}", planned(plan, prepared.context())));
        }
    }
    let bar = stderr_is_terminal().then(|| {
        let bar = indicatif::ProgressBar::new(0)
            .with_message(format!("loading {}", harmless(&model.name())));
        // Small models load before anybody could read the line.
        bar.set_style(crate::progress::style("{msg} {percent}%"));
        bar
    });
    let mut shown = std::time::Instant::now();
    let engine = prepared.load(&mut |done, all| {
        if let Some(bar) = &bar
            && shown.elapsed().as_millis() >= 200
        {
            shown = std::time::Instant::now();
            bar.set_length(all);
            bar.set_position(done);
        }
    });
    if let Some(bar) = bar {
        bar.finish_and_clear();
    }
    let engine = engine?;
    if verbose {
        let info = engine.info();
        aside(format_args!(
            "model: {} ({}) from {}",
            harmless(&info.name),
            info.architecture,
            harmless(&model.location.to_string())
        ));
        aside(format_args!(
            "loaded: {} parameters, {} on {} in {:.2} s; context {} of {} trained",
            crate::terminal::count(info.parameters),
            bytes(info.file_bytes),
            info.device,
            info.load_ms as f64 / 1000.0,
            info.context,
            info.trained_context
        ));
    }
    warn(engine.warnings());
    Ok(engine)
}

/// Says what is odd about a model's files.
fn warn(warnings: &[String]) {
    for warning in warnings {
        aside(format_args!("warning: {}", harmless(warning)));
    }
}

/// A device's parts of a plan, and what is free there.
pub(crate) fn planned(plan: &Plan, context: usize) -> String {
    let size = |n: usize| bytes(n as u64);
    let free = plan.free.map_or(String::new(), |free| format!(", {} free", size(free)));
    let full = match plan.pool {
        0 => String::new(),
        _ => format!(", {} once the cache of all sequences is full", size(plan.most())),
    };
    format!(
        "{} for weights, {} for a cache of {context} tokens, {} for activations, {} to work with: {} in all{full}{free}",
        size(plan.weights),
        size(plan.cache),
        size(plan.arena),
        size(plan.working),
        size(plan.needed())
    )
}

/// A model's files, mapped but not read.
pub(crate) fn open(model: &LocalModel) -> Outcome<Tensors> {
    Ok(Tensors::open(&model.location)?)
}

/// A model's tokenizer, without its weights.
pub(crate) fn tokenizer(model: &LocalModel) -> Outcome<Tokenizer> {
    let found = delft::read_tokenizer(&open(model)?)?;
    let found = found
        .ok_or_else(|| Error::new(&model.location, "a tokenizer beside the weights", "none"))?;
    warn(found.warnings());
    Ok(found)
}

/// The tokenizer of a loaded model, for commands that cannot do without.
pub(crate) fn need_tokenizer(engine: &Engine) -> Outcome<&Tokenizer> {
    engine.tokenizer().ok_or_else(|| {
        Stop::Error(
            Error::new(engine.location(), "a tokenizer beside the weights", "none")
                .hint("delft logits and delft bench work without one"),
        )
    })
}

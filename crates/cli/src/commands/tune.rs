//! `delft tune`: an adapter, or all weights of a model, from examples.

pub(super) mod begun;
mod show;

use std::path::{Path, PathBuf};

use delft::hub::LocalModel;
use delft::train::run::{self, Intervals, Length, RunEnd, RunSummary, Watcher};
use delft::train::{
    AdamW, Data, Example, Hardware, Language, LoraOptions, Objective, Precision, Preference,
    Reader, Run, Settings, Trainable as _, Tuned, usual_precision,
};
use delft::{AdapterFile, DeviceSpec, Error, ErrorKind, Tensors, Usage};
use serde_json::json;

use super::eval;
use crate::load;
use crate::terminal::{
    Outcome, Stop, aside, bytes, count, harmless, note, print, print_json, stderr_is_terminal,
};
use crate::tuning::{HeldOut, PairsArg, Tune, Warmup};

/// Tokens of a batch unless said otherwise, at most.
const BATCH: usize = 2048;
/// Share of the examples that is held out unless said otherwise, and from how many on.
const HELD_OUT: (f64, usize) = (0.05, 20);

pub(crate) fn run(args: &Tune) -> Outcome {
    let folder = folder(args)?;
    // Before anything that takes long.
    if run::checkpointed(&folder) != args.resume {
        return Err(misplaced(&folder, args.resume).into());
    }
    let begun = if args.resume { begun::resumed(args, &folder)? } else { None };
    let args = begun.as_ref().unwrap_or(args);
    let prepared = Prepared::new(args, &folder)?;
    let (model, language) = (&prepared.model, &prepared.language);
    let mut shown = show::Shown::new(args, model, language, prepared.lora.as_ref())?;
    let (summary, memory) = prepared.train(&folder, args.resume, &mut shown)?;
    let speed = shown.end();
    report(args, &folder, &summary, speed, memory)
}

/// What an adapter asks of an engine that it is added to.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct AdapterRoom {
    pub(super) rank: usize,
    /// Whether it changes experts.
    pub(super) experts: bool,
    /// Whether it has tables anew.
    pub(super) tables: bool,
}

/// A run that could begin.
pub(super) struct Prepared {
    model: LocalModel,
    language: Language,
    /// The adapter that is trained; none where all weights are.
    lora: Option<LoraOptions>,
    /// The loss of pairs of answers; none where single answers are learned.
    objective: Option<Objective>,
    examples: Examples,
    tuned: Tuned,
    settings: Settings,
    identity: Vec<(String, String)>,
    intervals: Intervals,
}

impl Prepared {
    /// Reads the model and the examples, and says what is going to be done.
    pub(super) fn new(args: &Tune, folder: &Path) -> Outcome<Prepared> {
        let split = split(args)?;
        let args = split.as_ref().unwrap_or(args);
        let objective = objective(args)?;
        let data = args.data.as_deref();
        let missing = || Error::new(folder.display(), "--data, the examples", "none");
        let data = data.ok_or_else(missing)?;
        if folder.exists() && !folder.is_dir() {
            let place = harmless(&folder.display().to_string());
            let error = Error::new(place, "a folder, or a name that is free", "a file");
            return Err(error.hint("--out names another folder").into());
        }
        let model = load::find(&args.model)?;
        spare(args, folder, &model)?;
        let tensors = load::open(&model)?;
        let language = Language {
            tokenizer: load::tokenizer(&model)?,
            template: delft::read_template(&tensors)?,
        };
        let context = eval::context(&model, args.context, data, &[])?;
        let examples = Examples::read(args, data, &language, context)?;
        examples.tell(data);
        let (location, hardware) = (model.location.clone(), hardware(args, &tensors));
        drop(tensors);
        let mut tuned = match (&args.lora.from, lora(args)) {
            (Some(path), _) => {
                let file = AdapterFile { path: path.clone(), scale: 1.0, any_base: false };
                let mut tuned = Tuned::adapter(location, &file, hardware)?;
                if objective.is_some_and(|objective| objective.has_base()) {
                    tuned.rebase()?;
                }
                tuned
            }
            (None, Some(lora)) => Tuned::lora(location, &lora, hardware)?,
            (None, None) => match args.lora.layers {
                Some(layers) => Tuned::last_blocks(location, layers as usize, hardware)?,
                None => Tuned::full(location, hardware)?,
            },
        };
        if let Some(alpha) = args.lora.neftune {
            tuned.add_noise(alpha, args.updates.seed)?;
        }
        let lora = tuned.lora_options().cloned();
        let settings = settings(args, &examples, tuned.config().hidden)?;
        let updates = settings.updates(&examples.training.examples)?;
        make_room(&mut tuned, &settings, examples.longest(), args.updates.recompute)?;
        let wanted = run::disk(tuned.parameters(), if lora.is_some() { 4 } else { 2 }, args.resume);
        enough_disk(folder, wanted, delft::hub::free_disk(folder))?;
        plan(&tuned, &settings, updates)?;
        let mut identity = identity(&model, &examples, context)?;
        identity.extend(match &lora {
            Some(lora) => lora.identity(),
            None => {
                let blocks =
                    args.lora.layers.map(|n| format!("all weights of the last {n} blocks"));
                let what = blocks.unwrap_or_else(|| "all weights".to_owned());
                vec![("trained".to_owned(), what)]
            }
        });
        if args.lora.from.is_some() {
            identity.push(("begun from".to_owned(), tuned.digest()));
        }
        let precision = match hardware.precision {
            Precision::F32 => "f32",
            Precision::BF16 => "bf16",
        };
        identity.push(("precision".to_owned(), precision.to_owned()));
        if hardware.place != DeviceSpec::Cpu {
            identity.push(("device".to_owned(), hardware.place.to_string()));
        }
        identity.extend(
            args.lora.neftune.map(|alpha| ("noise".to_owned(), format!("NEFTune, alpha {alpha}"))),
        );
        identity.extend(args.prompts.then(|| ("learned".to_owned(), "prompts, too".to_owned())));
        identity.extend(objective.map(|of| ("objective".to_owned(), of.identity())));
        let sample =
            if args.sample.is_some() { or_share(args.sample_every, updates, 10) } else { 0 };
        let checkpoint =
            or_share(args.checkpoint_every, updates, 20).min(args.checkpoint_every.unwrap_or(100));
        let intervals = Intervals { checkpoint, sample };
        Ok(Prepared {
            model,
            language,
            lora,
            objective,
            examples,
            tuned,
            settings,
            identity,
            intervals,
        })
    }

    /// What the adapter asks of an engine; nothing where all weights are trained.
    pub(super) fn room(&self) -> AdapterRoom {
        self.lora.as_ref().map_or(AdapterRoom::default(), |lora| AdapterRoom {
            rank: lora.rank,
            experts: lora.changes_experts(),
            tables: !lora.whole.is_empty(),
        })
    }

    /// Has the watcher given what the parameters make, twenty times in a run.
    pub(super) fn offer(&mut self) -> Outcome {
        let updates = self.settings.updates(&self.examples.training.examples)?;
        self.intervals.sample = or_share(None, updates, 20);
        Ok(())
    }

    /// The files of what the parameters make before the first update.
    pub(super) fn made(&mut self) -> Outcome<Vec<(String, Vec<u8>)>> {
        Ok(self.tuned.export()?)
    }

    /// Trains; tells what the device's own memory held, too.
    pub(super) fn train(
        self,
        folder: &Path,
        resume: bool,
        watcher: &mut dyn Watcher,
    ) -> Outcome<(RunSummary, Option<Usage>)> {
        let run = Run {
            settings: &self.settings,
            intervals: self.intervals,
            training: &self.examples.training.examples,
            held_out: &self.examples.held_out.examples,
            identity: &self.identity,
            folder,
            resume,
        };
        let mut tuned = self.tuned;
        let Some(objective) = self.objective else {
            let summary = run.train(&mut tuned, watcher)?;
            return Ok((summary, tuned.memory()));
        };
        let mut preference = Preference::new(tuned, objective)?;
        let summary = run.train(&mut preference, watcher)?;
        Ok((summary, preference.model().memory()))
    }
}

/// The flags with the files of a folder of examples, as mlx-lm has them, in the place of the
/// folder; none where the examples are a file.
fn split(args: &Tune) -> Outcome<Option<Tune>> {
    let Some(folder) = args.data.as_deref().filter(|data| data.is_dir()) else { return Ok(None) };
    let file = |name: &str| Some(folder.join(name)).filter(|file| file.is_file());
    let missing = || {
        let error = Error::new(folder.display(), "a file, or a folder with train.jsonl", "neither");
        error.hint("--data FILE")
    };
    let mut args = args.clone();
    args.data = Some(file("train.jsonl").ok_or_else(missing)?);
    // `--held-out none` says that nothing is held out.
    args.held_out = args.held_out.or_else(|| file("valid.jsonl").map(HeldOut::File));
    Ok(Some(args))
}

/// The folder of the run.
pub(super) fn folder(args: &Tune) -> Outcome<PathBuf> {
    if let Some(folder) = &args.out {
        return Ok(folder.clone());
    }
    let none = || Stop::Usage("--out or --data: expected one of them, found none".to_owned());
    let stem = args.data.as_ref().ok_or_else(none)?.file_stem().unwrap_or_default();
    let kind = if args.lora.full { "tuned" } else { "lora" };
    Ok(PathBuf::from(format!("{}-{kind}", stem.to_string_lossy())))
}

/// The error of a folder that has a run though none is resumed, or none though one is.
fn misplaced(folder: &Path, resume: bool) -> Error {
    let (expected, found, hint) = match resume {
        true => ("a run to go on with", "no checkpoint", "leave --resume out to begin one"),
        false => (
            "a folder without a run",
            "a checkpoint",
            "--resume goes on with it, --out names another folder",
        ),
    };
    Error::new(folder.display(), expected, found).hint(hint)
}

/// Refuses a folder in which a run would write over what is not its own: the model that it begins
/// with, another one, or an adapter.
fn spare(args: &Tune, folder: &Path, model: &LocalModel) -> Outcome<()> {
    let path = |path: &Path| path.canonicalize().ok();
    let same = path(folder).is_some_and(|own| model.location.path().and_then(path) == Some(own));
    // What a run leaves of its own, its log from the beginning on.
    let runs = ["delft.json", "loss.jsonl"].iter().any(|name| folder.join(name).exists());
    let kept: &[&str] = match args.lora.full {
        true => &["config.json", "model.safetensors"],
        false => &["adapter_model.safetensors"],
    };
    let kept = kept.iter().find(|name| !runs && folder.join(name).exists());
    let found = match kept {
        _ if same => "the model's",
        Some(&name) => name,
        None => return Ok(()),
    };
    let place = harmless(&folder.display().to_string());
    let error = Error::new(place, "a folder of the run's own", found);
    Err(error.hint("--out names another folder").into())
}

/// The examples: those that are learned, and those that are only measured.
struct Examples {
    training: Data,
    held_out: Data,
}

impl Examples {
    fn read(args: &Tune, file: &Path, language: &Language, context: usize) -> Outcome<Examples> {
        let reader = Reader {
            tokenizer: &language.tokenizer,
            template: language.template.as_ref(),
            raw: args.raw,
            prompts: args.prompts,
            judged: args.lora.kto,
            context,
            truncate: args.truncate,
        };
        let mut training = reader.read(file)?;
        let seed = args.updates.seed;
        let held_out = match &args.held_out {
            Some(HeldOut::File(path)) => {
                let held_out = reader.read(path)?;
                eval::tell(&held_out, path);
                held_out
            }
            Some(HeldOut::Share(share)) => training.hold_out(*share, seed)?,
            None if training.examples.last().is_some_and(|last| last.line >= HELD_OUT.1) => {
                training.hold_out(HELD_OUT.0, seed)?
            }
            Some(HeldOut::None) | None => Data::default(),
        };
        for data in [&training, &held_out] {
            paired(args.lora.pairs().is_some(), file, data)?;
        }
        let measured = [
            ("--patience", args.updates.patience),
            ("--evaluate-every", args.updates.evaluate_every),
        ];
        let asked = measured.iter().find(|(_, given)| given.is_some());
        if let Some((flag, _)) = asked.filter(|_| held_out.examples.is_empty()) {
            let error = Error::new(*flag, "held-out examples", "none");
            return Err(error.hint("--held-out 5%").into());
        }
        Ok(Examples { training, held_out })
    }

    fn longest(&self) -> usize {
        self.training.longest().max(self.held_out.longest())
    }

    fn tell(&self, file: &Path) {
        eval::tell(&self.training, file);
        let one = |data: &Data| {
            let examples = data.examples.len();
            let (all, own) = (data.tokens() as u64, data.answer_tokens() as u64);
            format!("{examples} examples, {} tokens, of which {} count", count(all), count(own))
        };
        aside(format_args!("learned: {}", one(&self.training)));
        if !self.held_out.examples.is_empty() {
            aside(format_args!("held out: {}", one(&self.held_out)));
        }
    }
}

/// The hardware that the model is trained on.
fn hardware(args: &Tune, tensors: &Tensors) -> Hardware {
    let usual = || usual_precision(tensors);
    Hardware {
        place: args.device,
        threads: args.threads.map(|n| n as usize),
        precision: args.precision.map_or_else(usual, Precision::from),
    }
}

/// Refuses pairs of answers where single ones are learned, and the other way round.
fn paired(wanted: bool, file: &Path, data: &Data) -> Outcome {
    let place = harmless(&file.display().to_string());
    let named = |e: Error| Error { place: format!("{place}: {}", e.place), ..e };
    match (data.are_pairs().map_err(named)?, wanted) {
        (Some(true), false) => {
            let error = Error::new(place, "single answers", "chosen and rejected ones");
            Err(error.hint("--dpo and --pairs learn from pairs").into())
        }
        (Some(false), true) => {
            let error = Error::new(place, "chosen and rejected answers", "single ones");
            Err(error
                .hint("{\"prompt\": .., \"chosen\": .., \"rejected\": ..} on each line")
                .into())
        }
        _ => Ok(()),
    }
}

/// The adapter that is trained; none where all weights are.
fn lora(args: &Tune) -> Option<LoraOptions> {
    let lora = &args.lora;
    (!lora.full).then(|| LoraOptions {
        rank: lora.rank as usize,
        alpha: lora.alpha.unwrap_or(2.0 * lora.rank as f32),
        stabilised: lora.rslora,
        dora: lora.dora,
        // PEFT's word for the default.
        sites: if lora.sites == ["all-linear"] { Vec::new() } else { lora.sites.clone() },
        layers: lora.layers.map(|n| n as usize),
        whole: lora.whole.clone(),
        dropout: lora.dropout,
        seed: args.updates.seed,
    })
}

/// The loss of pairs of answers; none where single answers are learned.
fn objective(args: &Tune) -> Outcome<Option<Objective>> {
    let beta = |usual: f64| args.lora.beta.map_or(usual, exact);
    if args.lora.kto {
        let weight = |given: Option<f32>| given.map_or(1.0, exact);
        let weights = [args.lora.desirable_weight, args.lora.undesirable_weight].map(weight);
        return Ok(Some(Objective::Kto { beta: beta(0.1), weights }));
    }
    let Some(pairs) = args.lora.pairs() else { return Ok(None) };
    let objective = match pairs {
        PairsArg::Dpo => Objective::Dpo { beta: beta(0.1) },
        PairsArg::Hinge => Objective::Hinge { beta: beta(0.1) },
        PairsArg::Ipo => Objective::Ipo { beta: beta(0.1) },
        PairsArg::Simpo => {
            Objective::SimPo { beta: beta(2.0), gamma: args.lora.gamma.map_or(1.0, exact) }
        }
        PairsArg::Orpo => Objective::Orpo { beta: beta(0.1) },
    };
    if args.lora.gamma.is_some() && pairs != PairsArg::Simpo {
        return Err(Stop::Usage("--gamma: expected --pairs simpo, found another".to_owned()));
    }
    if args.lora.full && objective.has_base() {
        let found = "--pairs: expected simpo or orpo, which --full has, found a loss that compares \
                     with the model as it was";
        return Err(Stop::Usage(found.to_owned()));
    }
    Ok(Some(objective))
}

/// A number that was given, or a share of a run, of one update at least.
fn or_share(given: Option<u64>, updates: u64, share: u64) -> u64 {
    given.unwrap_or((updates / share).max(1))
}

/// The settings of the run; those not given follow from the examples and from the width of the
/// model.
fn settings(args: &Tune, examples: &Examples, hidden: usize) -> Outcome<Settings> {
    let given = &args.updates;
    let (longest, all) = (examples.longest(), examples.training.tokens());
    let batch_tokens = match given.batch_tokens {
        Some(stated) if (stated as usize) < longest => {
            let expected = format!("at least {longest}, the tokens of the longest example");
            let error = Error::new("--batch-tokens", expected, stated);
            return Err(error.hint("or a smaller --context with --truncate").into());
        }
        Some(stated) => stated as usize,
        // Twenty updates or more in each pass over few examples.
        None => (all / 20).clamp(longest, BATCH.max(longest)),
    };
    let length = match (given.steps, given.epochs) {
        (Some(steps), _) => Length::Updates(steps),
        (None, epochs) => Length::Epochs(epochs.unwrap_or(3) as u32),
    };
    // Narrow models take greater steps than wide ones, factors than the weights themselves, and
    // answers than pairs of them.
    let most = if args.lora.full || args.lora.prefers() { 2e-5 } else { 2e-4 };
    let usual = most * (2048.0 / hidden.max(1) as f64).sqrt().clamp(0.5, 10.0);
    let rate = given.lr.map_or_else(|| two_digits(usual), exact);
    let least = exact(given.min_lr);
    if least > rate {
        let error = Error::new("--min-lr", format!("{rate} at most, the learning rate"), least);
        return Err(error.into());
    }
    let clip = (given.clip > 0.0).then(|| exact(given.clip));
    let mut settings = Settings {
        seed: given.seed,
        length,
        batch_tokens,
        accumulate: given.accumulate as usize,
        rate,
        schedule: given.schedule.into(),
        least,
        warmup: 0,
        optimiser: AdamW {
            betas: [given.adam_beta1, given.adam_beta2].map(exact),
            epsilon: exact(given.adam_epsilon),
            decay: exact(given.weight_decay),
            clip,
        },
        evaluate_every: 1,
        patience: given.patience,
    };
    let updates = settings.updates(&examples.training.examples)?;
    settings.warmup = match given.warmup {
        Some(Warmup::Updates(updates)) => updates,
        Some(Warmup::Share(share)) => (share * updates as f64).ceil() as u64,
        None => updates / 30,
    };
    settings.evaluate_every = or_share(given.evaluate_every, updates, 10);
    Ok(settings)
}

/// A number as its decimal digits say it, not as f32 rounds it.
fn exact(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

fn two_digits(x: f64) -> f64 {
    format!("{x:.1e}").parse().unwrap_or(x)
}

/// Bytes that a run takes beside the weights, of the memory that [`free`] tells of.
fn needed(tuned: &Tuned, batch_tokens: usize) -> Outcome<u64> {
    let batch = tuned.activation_bytes(batch_tokens, batch_tokens) as u64;
    let there = tuned.free_memory()?.is_some();
    Ok(update_bytes(tuned, there) + batch)
}

/// Bytes that updates take beside the weights: of the host's memory, or of a device's own memory if
/// it has one.
fn update_bytes(tuned: &Tuned, there: bool) -> u64 {
    if there { tuned.update_bytes() as u64 } else { run::memory(tuned.parameters()) }
}

/// Memory that is left where batches are computed; none where that cannot be told.
fn free(tuned: &Tuned) -> Outcome<Option<usize>> {
    Ok(tuned.free_memory()?.or_else(delft::free_memory))
}

/// Has activations computed again if that was asked for or memory is short. Refuses a run for which
/// memory is short even so, with the batch that would fit.
fn make_room(tuned: &mut Tuned, settings: &Settings, longest: usize, recompute: bool) -> Outcome {
    if recompute {
        tuned.recompute()?;
    }
    let Some(free) = free(tuned)? else { return Ok(()) };
    if !recompute && needed(tuned, settings.batch_tokens)? > free as u64 {
        tuned.recompute()?;
        aside(format_args!("memory is short: activations are computed again for their gradients"));
    }
    let wanted = needed(tuned, settings.batch_tokens)?;
    if wanted <= free as u64 {
        return Ok(());
    }
    let halves = std::iter::successors(Some(settings.batch_tokens / 2), |n| Some(n / 2));
    let mut fits = None;
    for tokens in halves.take_while(|tokens| *tokens >= longest) {
        if needed(tuned, tokens)? <= free as u64 {
            fits = Some(tokens);
            break;
        }
    }
    let hint = match fits {
        Some(fits) => {
            format!("--batch-tokens {fits} would fit, with --accumulate for as large updates")
        }
        None => "a smaller --context with --truncate, or an adapter of a smaller --rank".to_owned(),
    };
    let place = format!("batches of {} tokens", settings.batch_tokens);
    let error = Error::new(place, format!("{} at most", bytes(free as u64)), bytes(wanted));
    Err(error.of(ErrorKind::NoMemory).hint(hint).into())
}

/// Refuses a run whose checkpoints would not fit the disk of its folder, which has so much free
/// where the system can tell.
fn enough_disk(folder: &Path, wanted: u64, free: Option<u64>) -> Result<(), Error> {
    match free {
        Some(free) if free < wanted => {
            let place = harmless(&folder.display().to_string());
            let expected = format!("{} free on its disk, for checkpoints", bytes(wanted));
            let error = Error::new(place, expected, bytes(free));
            Err(error.hint("--out names a folder on another disk"))
        }
        _ => Ok(()),
    }
}

/// Says what is going to be done, and the memory for it.
fn plan(tuned: &Tuned, settings: &Settings, updates: u64) -> Outcome {
    let parameters: u64 = tuned.parameters().iter().map(|p| p.values.len() as u64).sum();
    aside(format_args!(
        "{updates} updates of {} tokens at most, learning rate {}, {} parameters are trained",
        settings.batch_tokens * settings.accumulate,
        settings.rate,
        count(parameters),
    ));
    let there = tuned.free_memory()?.is_some();
    let free = free(tuned)?.map_or(String::new(), |n| format!(", {} free", bytes(n as u64)));
    aside(format_args!(
        "memory: {} for {}gradients and moments, {} for a batch{free}",
        bytes(update_bytes(tuned, there)),
        if there { "" } else { "parameters, " },
        bytes(tuned.activation_bytes(settings.batch_tokens, settings.batch_tokens) as u64),
    ));
    Ok(())
}

/// The model and the data, from which the result follows beside the settings.
fn identity(
    model: &LocalModel,
    examples: &Examples,
    context: usize,
) -> Outcome<Vec<(String, String)>> {
    let tensors = load::open(model)?;
    let held_out = examples.held_out.examples.iter().map(|e: &Example| e.line.to_string());
    let held_out: Vec<String> = held_out.collect();
    let named = |name: &str, value: String| (name.to_owned(), value);
    Ok(vec![
        named("model", model.name()),
        named("model fingerprint", delft::fingerprint(&tensors)),
        named("data sha256", examples.training.sha256.clone()),
        named("held out", format!("{} lines {}", examples.held_out.sha256, held_out.join(","))),
        named("context", context.to_string()),
    ])
}

/// Tells the result of the run, and the command that uses it.
fn report(
    args: &Tune,
    folder: &Path,
    summary: &RunSummary,
    speed: show::Speed,
    device: Option<Usage>,
) -> Outcome {
    let RunSummary { end, step, tokens, best, curve } = summary;
    if *end == RunEnd::Cancelled {
        note(format_args!("stopped behind update {step}: --resume goes on from there"));
        return Err(Stop::Interrupted);
    }
    if stderr_is_terminal() {
        note(curve.plot(70, 12));
    }
    let before = curve.held_out.first().map(|first| first.1);
    let peak = delft::peak_rss_bytes();
    if args.json {
        return print_json(&json!({
            "folder": folder.display().to_string(),
            "end": if *end == RunEnd::Early { "early" } else { "done" },
            "updates": step,
            "tokens": tokens,
            "best": best.map(|(step, loss)| json!({ "step": step, "held_out": loss })),
            "held_out_before": before,
            "seconds": speed.seconds,
            "tok_s": speed.rate(),
            "peak_rss_bytes": peak,
            "device_peak_bytes": device.map(|usage| usage.peak),
        }));
    }
    if *end == RunEnd::Early {
        aside(format_args!("ended behind update {step}: the held-out loss fell no more"));
    }
    let of = match (best, before) {
        (Some((step, loss)), Some(before)) => {
            format!(
                ": the parameters of update {step}, held-out loss {loss:.4} ({before:.4} before)"
            )
        }
        _ => String::new(),
    };
    let name = harmless(&folder.display().to_string());
    aside(format_args!("wrote {name}{of}"));
    let device = device.map(|usage| format!(", the device's {}", bytes(usage.peak as u64)));
    aside(format_args!(
        "{} tokens, {:.0} a second; memory {} at its peak{}",
        count(*tokens),
        speed.rate(),
        bytes(peak),
        device.unwrap_or_default()
    ));
    let model = args.model.model.as_deref().map_or(String::new(), |model| format!("{model} "));
    match args.lora.full {
        true => aside(format_args!("try it: delft run {name}")),
        false => aside(format_args!("try it: delft run {}--adapter {name}", harmless(&model))),
    }
    print(&format!("{}\n", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::{enough_disk, exact, two_digits};
    use delft::train::Parameter;
    use delft::train::run::disk;
    use std::path::Path;

    #[test]
    fn numbers_are_as_they_were_written() {
        assert_eq!(exact(0.1), 0.1);
        assert_eq!(exact(2e-4), 2e-4);
        assert_eq!(two_digits(0.000_565_68), 5.7e-4);
    }

    #[test]
    fn a_disk_that_checkpoints_do_not_fit_is_refused() {
        let values = vec![0.0; 1 << 20];
        let parameter =
            Parameter { name: "a".to_owned(), shape: vec![1 << 20], values, decays: true };
        let parameters = std::slice::from_ref(&parameter);
        let wanted = disk(parameters, 4, false);
        // Two checkpoints of three numbers for each, and two adapters of one.
        assert_eq!(wanted, 32 << 20);
        assert_eq!(disk(parameters, 4, true), 16 << 20);
        let folder = Path::new("my-style");
        assert!(enough_disk(folder, wanted, None).is_ok());
        assert!(enough_disk(folder, wanted, Some(wanted)).is_ok());
        let error = enough_disk(folder, wanted, Some(wanted - 1)).unwrap_err().to_string();
        assert!(error.starts_with("my-style: expected 32.0 MiB free"), "{error}");
    }
}

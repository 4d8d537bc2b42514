//! Chooses the device that a model runs on and the length of its context, from memory plans, before
//! anything is loaded.
//!
//! [`DeviceSpec::Auto`] becomes the first GPU that the model fits, else the CPU. A context length
//! that the caller left open becomes shorter where memory is short; one that the caller set does
//! not.

use crate::load::{LoadOptions, OUTPUT_ROWS, Trace};
use crate::pool::most;
use crate::session::GROUPS;
use device::{CachesLatents, Device, DeviceSpec, Offload, Plan, Split, SplitMode};
use formats::{Error, Hint, Result, Setting, Tensors};
use models::Ending;
use program::{Group, Program};
use std::sync::Arc;

/// Names the place that [`DeviceSpec::Auto`] is.
const VARIABLE: &str = "DELFT_DEVICE";

/// The shortest context that is chosen for want of memory: with less, a conversation ends before it
/// has begun.
const SHORTEST: usize = 2048;

/// A model that is about to be loaded, as read from its files.
pub(crate) struct Recorded<'a> {
    pub(crate) tensors: &'a Tensors,
    /// Its cache not yet bound by a context that rotates.
    pub(crate) program: &'a Program,
    /// The same with latents in its cache, for devices that have them so.
    pub(crate) latents: Option<&'a Program>,
    /// Positions that it was trained for.
    pub(crate) trained: usize,
    /// Room for adapters on the device.
    pub(crate) seats: device::Seats,
    /// The device that it is to be on, and each of those that it consists of; else one is opened.
    pub(crate) kept: Option<(Arc<dyn Device>, Vec<DeviceSpec>)>,
}

/// A model's Program on a device that is open, and what it will take there.
pub(crate) struct Chosen {
    pub(crate) program: Program,
    /// With the place where it runs.
    pub(crate) options: LoadOptions,
    pub(crate) device: Arc<dyn Device>,
    /// Each device, in the order of the plans.
    pub(crate) places: Vec<DeviceSpec>,
    pub(crate) load: device::ExecutorOptions,
    pub(crate) plan: Vec<Plan>,
    pub(crate) context: usize,
    /// Why it runs there, if there was something to choose between.
    pub(crate) why: Option<String>,
}

impl Chosen {
    fn fits(&self) -> bool {
        self.plan.iter().all(Plan::fits)
    }
}

/// Chooses among what this machine has.
pub(crate) fn choose(model: &Recorded<'_>, options: &LoadOptions) -> Result<Chosen> {
    if let Some(own) = options.processes.as_ref().and_then(|all| all.places().first()) {
        return on(model, options, *own);
    }
    if options.device != DeviceSpec::Auto {
        return on(model, options, options.device);
    }
    match named_place()? {
        Some(place) => on(model, options, place),
        None => among(model, options, &device::gpus()),
    }
}

/// The place that the environment names for [`DeviceSpec::Auto`], if it names one.
///
/// # Errors
/// A name that is none.
pub fn named_place() -> Result<Option<DeviceSpec>> {
    let Some(name) = std::env::var(VARIABLE).ok().filter(|name| !name.is_empty()) else {
        return Ok(None);
    };
    let place = name.parse().map_err(|e: Error| Error { place: VARIABLE.to_owned(), ..e })?;
    Ok(Some(place).filter(|place| *place != DeviceSpec::Auto))
}

/// The first of these GPUs that the model fits, else the CPU.
fn among(model: &Recorded<'_>, options: &LoadOptions, gpus: &[DeviceSpec]) -> Result<Chosen> {
    let mut against = None;
    if options.gpu_layers == Some(0) {
        return on(model, &LoadOptions { gpu_layers: None, ..options.clone() }, DeviceSpec::Cpu);
    }
    let asked = options.gpu_layers.is_some() || options.cpu_experts > 0;
    for &place in gpus {
        let found = match on(model, options, place) {
            Ok(chosen) if chosen.fits() => {
                let why = format!("{place}: {}", chosen.device.about().isa);
                return Ok(Chosen { why: Some(why), ..chosen });
            }
            // Who says what goes there is told whether it fits.
            Ok(chosen) if asked => return Ok(chosen),
            Ok(chosen) => lack(&chosen.plan),
            Err(error) if asked => return Err(error),
            Err(error) => error.to_string(),
        };
        against.get_or_insert(format!("the CPU, not {place}: {found}"));
    }
    Ok(Chosen { why: against, ..on(model, options, DeviceSpec::Cpu)? })
}

/// The memory that the first plan that does not fit would take, beside what is free.
fn lack(plans: &[Plan]) -> String {
    let gib = |bytes: usize| format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30));
    let short = plans.iter().find(|plan| !plan.fits());
    short.map_or(String::new(), |plan| {
        format!("the model takes {}, {} are free", gib(plan.needed()), gib(plan.free.unwrap_or(0)))
    })
}

/// The model at one place, with the context asked for; else with the trained one, or the greatest
/// power of two below it that fits. What fits at no length is left as it is, to be refused when it
/// is loaded.
fn on(model: &Recorded<'_>, options: &LoadOptions, place: DeviceSpec) -> Result<Chosen> {
    let options = LoadOptions { device: place, ..options.clone() };
    let (device, places) = match &model.kept {
        Some(kept) => kept.clone(),
        None => {
            let (device, places) = open(&options, model.program.blocks().len())?;
            (Arc::from(device), places)
        }
    };
    let whole = options.context.unwrap_or(model.trained);
    let mut chosen = lay_out(model, options, device, places, (whole, false))?;
    let crowds = model.latents.is_some() && !chosen.options.batched;
    if crowds && !chosen.fits() && chosen.device.caches_latents() == CachesLatents::Crowded {
        chosen = chosen.with(model, whole)?;
    }
    if chosen.fits() || chosen.options.context.is_some() {
        return Ok(chosen);
    }
    let longest = whole.checked_next_power_of_two().map_or(1 << (usize::BITS - 1), |n| n / 2);
    let shorter = std::iter::successors(Some(longest), |context| Some(context / 2));
    for context in shorter.take_while(|context| *context >= SHORTEST) {
        chosen = chosen.with(model, context)?;
        if chosen.fits() {
            return Ok(chosen);
        }
    }
    chosen.with(model, whole)
}

impl Chosen {
    /// The same with another context, and the smallest cache.
    fn with(self, model: &Recorded<'_>, context: usize) -> Result<Chosen> {
        lay_out(model, self.options, self.device, self.places, (context, true))
    }
}

/// Plans the model on a device, with a context of `context` positions; `crowded`: with the smallest
/// cache that it can have.
fn lay_out(
    model: &Recorded<'_>,
    options: LoadOptions,
    device: Arc<dyn Device>,
    places: Vec<DeviceSpec>,
    (context, crowded): (usize, bool),
) -> Result<Chosen> {
    let latents = model.latents.filter(|_| match device.caches_latents() {
        CachesLatents::Always => true,
        CachesLatents::Crowded => options.batched || crowded,
        CachesLatents::Never => false,
    });
    let mut program = latents.unwrap_or(model.program).clone();
    if options.rotate {
        program.bound(context);
    }
    let groups = program.groups();
    if groups.len() > GROUPS {
        let expected = format!("layers with at most {GROUPS} different windows");
        return Err(Error::new("windows", expected, groups.len()));
    }
    let chunk = options.chunk();
    let blocks = |&kind: &Group| {
        let (kind, context) = options.span(kind, context);
        most(kind, context, chunk)
    };
    let one: Vec<usize> = groups.iter().map(blocks).collect();
    let outputs = match options.ending {
        Ending::Logits => OUTPUT_ROWS.max(options.sessions).min(chunk),
        Ending::Hidden => chunk,
    };
    let mut load = device::ExecutorOptions {
        cache_type: options.cache_type,
        rows: (chunk, outputs),
        sequences: options.sessions.min(chunk),
        blocks: one.iter().map(|blocks| blocks.saturating_mul(options.sessions)).collect(),
        context: one,
        seats: model.seats,
        dispatch: options.dispatch,
        batched: options.batched,
        copies: options.copies,
        allow_nan: options.allow_nan,
    };
    let plan = bound_pool(&mut load, &|load| device.plan(&program, model.tensors, load))?;
    Ok(Chosen { program, options, device, places, load, plan, context, why: None })
}

/// Plans a load, and bounds the blocks of its cache so that what they may grow to fits into seven
/// eighths of the memory that one full context leaves free. The long tables give way first: the
/// short ones, of layers with a window, are needed by every sequence.
fn bound_pool(
    load: &mut device::ExecutorOptions,
    plan: &dyn Fn(&device::ExecutorOptions) -> Result<Vec<Plan>>,
) -> Result<Vec<Plan>> {
    let planned = plan(load)?;
    let room = |plan: &Plan| {
        let left = plan.free.map(|free| free.saturating_sub(plan.needed()));
        left.map_or(usize::MAX, |left| left - left / 8)
    };
    let bounded = |plans: &[Plan]| plans.iter().all(|plan| plan.pool <= room(plan));
    let fit = |plans: &[Plan]| plans.iter().all(Plan::fits);
    if bounded(&planned) && fit(&planned) {
        return Ok(planned);
    }
    let (most, one) = (load.blocks.clone(), load.context.clone());
    let with = |blocks: Vec<usize>| device::ExecutorOptions { blocks, ..load.clone() };
    let alone = plan(&with(one.clone()))?;
    if !fit(&alone) {
        return Ok(planned);
    }
    let longest = one.iter().copied().max().unwrap_or(1);
    let long = |(one, most): (&usize, &usize)| if *one == longest { *one } else { *most };
    let short: Vec<usize> = one.iter().zip(&most).map(long).collect();
    let mut least = (plan(&with(short.clone()))?, short);
    if !bounded(&least.0) || !fit(&least.0) {
        least = (alone, one);
    }
    // A cache's bytes are linear in its blocks, but for what is copied as it grows.
    let shares: Vec<(u128, u128)> = planned
        .iter()
        .zip(&least.0)
        .filter(|(all, least)| all.pool > least.pool)
        .map(|(all, least)| (room(all).saturating_sub(least.pool), all.pool - least.pool))
        .map(|(room, more)| (room.min(more) as u128, more as u128))
        .collect();
    let between = |(least, most): (&usize, &usize)| {
        let more = most.saturating_sub(*least);
        let share = |(room, all): &(u128, u128)| (more as u128 * room / all) as usize;
        least + shares.iter().map(share).min().unwrap_or(more)
    };
    let blocks = least.1.iter().zip(&most).map(between).collect();
    *load = with(blocks);
    plan(load)
}

/// Opens the device, or with `gpu_layers` the CPU and GPUs together, for a model of `layers`
/// layers; and the place of each.
fn open(options: &LoadOptions, layers: usize) -> Result<(Box<dyn Device>, Vec<DeviceSpec>)> {
    let LoadOptions { device, threads, trace, .. } = *options;
    let trace = trace != Trace::Nothing;
    let tensor = options.split_mode == SplitMode::Tensor || options.processes.is_some();
    if options.cpu_experts > 0 {
        return open_for_experts(options);
    }
    match options.gpu_layers {
        Some(_) if tensor => {
            let found = "some on the CPU";
            Err(Error::new("split mode tensor", "all layers on the GPUs", found))
        }
        Some(_) if device == DeviceSpec::Cpu => {
            let error = Error::new("GPU layers", "a GPU to put layers on", "the CPU alone");
            Err(error.hint(
                Hint::set(Setting::Place, "cuda").and(" or ").with_value(Setting::Place, "metal"),
            ))
        }
        Some(0) => Ok((DeviceSpec::Cpu.open(threads)?, vec![DeviceSpec::Cpu])),
        Some(last) if last < layers => {
            if trace {
                return Err(Error::new("a trace", "a model on one device", "one on several"));
            }
            let places: Vec<DeviceSpec> =
                [DeviceSpec::Cpu].into_iter().chain(device.each()).collect();
            let devices = places.iter().map(|place| place.open(threads)).collect::<Result<_>>()?;
            Ok((Box::new(Split::new(devices, Some(last))), places))
        }
        _ if trace && (device.each().len() > 1 || options.processes.is_some()) => {
            Err(Error::new("a trace", "a model on one device", device))
        }
        _ if let Some(processes) = &options.processes => {
            Ok((processes.open()?, processes.places().to_vec()))
        }
        _ if tensor => Ok((device.open_ranks()?, device.each())),
        _ => Ok((device.open(threads)?, device.each())),
    }
}

/// A GPU, with the CPU for the experts of some layers; and both.
fn open_for_experts(options: &LoadOptions) -> Result<(Box<dyn Device>, Vec<DeviceSpec>)> {
    let LoadOptions { device, threads, trace, gpu_layers, cpu_experts, .. } = *options;
    let found = match (device, gpu_layers, trace) {
        (DeviceSpec::Cpu, ..) => Some("the CPU alone"),
        _ if options.processes.is_some() => Some("several processes"),
        (DeviceSpec::Several(_), ..) => Some("several GPUs"),
        (_, Some(_), _) => Some("layers on the CPU, too"),
        (_, None, Trace::Nothing) => None,
        (_, None, _) => Some("a trace, which is of one device"),
    };
    if let Some(found) = found {
        let error = Error::new("experts on the CPU", "all else on one GPU", found);
        return Err(error.hint(Hint::text("leave out ").with(Setting::CpuMoe)));
    }
    let offload =
        Offload::experts(device.open(threads)?, DeviceSpec::Cpu.open(threads)?, cpu_experts);
    Ok((Box::new(offload), vec![device, DeviceSpec::Cpu]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// A context that no machine has memory for, of a model that takes some hundred bytes for each
    /// position.
    const ENDLESS: usize = 1 << 42;
    /// A GPU that no machine has.
    const ABSENT: DeviceSpec = DeviceSpec::Cuda(9999);

    fn with<T>(trained: usize, test: impl FnOnce(&Recorded<'_>) -> T) -> T {
        let folder = "../../tests/reference/models/llama3";
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let tensors = Tensors::open(&folder).unwrap();
        let program = program::fuse(
            &models::load(&tensors, &models::ReadOptions::default())
                .unwrap()
                .record(false)
                .unwrap(),
        );
        let seats = device::Seats::default();
        let kept = None;
        let latents = None;
        test(&Recorded { tensors: &tensors, program: &program, latents, trained, seats, kept })
    }

    fn sim() -> DeviceSpec {
        "sim".parse().unwrap()
    }

    fn auto() -> LoadOptions {
        LoadOptions { threads: Some(1), ..LoadOptions::on(DeviceSpec::Auto) }
    }

    #[test]
    fn experts_are_beside_one_gpu_that_has_all_else() {
        let options = |device| LoadOptions { cpu_experts: 1, ..LoadOptions::on(device) };
        let said = |options: LoadOptions| {
            with(2048, |model| choose(model, &options))
                .err()
                .map_or_else(String::new, |e| e.to_string())
        };
        let several = "sim,sim".parse().unwrap();
        let layers = LoadOptions { gpu_layers: Some(1), ..options(sim()) };
        let traced = LoadOptions { trace: Trace::Layers, ..options(sim()) };
        for (options, found) in [
            (options(DeviceSpec::Cpu), "found the CPU alone (hint: leave out"),
            (options(several), "found several GPUs"),
            (
                LoadOptions { split_mode: SplitMode::Tensor, ..options(several) },
                "found several GPUs",
            ),
            (layers, "found layers on the CPU, too"),
            (traced, "found a trace"),
            (options(sim()), "expected a mixture of experts, found a model without experts"),
        ] {
            let said = said(options);
            assert!(said.starts_with("experts on the CPU: ") && said.contains(found), "{said}");
        }
        // Who asks for it is not given the CPU alone.
        let auto = LoadOptions { cpu_experts: 1, ..auto() };
        let why = with(2048, |model| among(model, &auto, &[sim()])).err().unwrap().to_string();
        assert!(why.contains("a model without experts"), "{why}");
    }

    #[test]
    fn the_cache_of_many_sequences_grows_to_what_memory_there_is() {
        const FREE: usize = 1000;
        // A long table, and a short one; blocks take 1 and 2 bytes, a full context 14.
        let plan = |free: usize| {
            move |load: &device::ExecutorOptions| {
                let bytes = |blocks: &[usize]| blocks[0] + 2 * blocks[1];
                let (cache, all) = (bytes(&load.context), bytes(&load.blocks));
                Ok(vec![Plan { cache, pool: all - cache, free: Some(free), ..Plan::default() }])
            }
        };
        for (sessions, free, blocks, why) in [
            (8, FREE, [80, 16], "all fit"),
            (100, FREE, [477, 200], "the long ones give way"),
            (1000, FREE, [626, 125], "both give way"),
            (100, 13, [1000, 200], "what does not fit at all is left to be refused"),
            (100, 15, [10, 2], "one context alone fits"),
        ] {
            let (context, blocks_of_all) = (vec![10, 2], vec![10 * sessions, 2 * sessions]);
            let usual = device::ExecutorOptions::default();
            let mut load = device::ExecutorOptions { context, blocks: blocks_of_all, ..usual };
            let planned = bound_pool(&mut load, &plan(free)).unwrap();
            assert_eq!(load.blocks, blocks, "{why}");
            assert_eq!(planned, plan(free)(&load).unwrap(), "{why}");
            assert!(!planned[0].fits() || planned[0].most() <= free, "{why}");
        }
    }

    #[test]
    fn the_first_gpu_that_the_model_fits_is_chosen_else_the_cpu() {
        let layers = |gpu_layers| LoadOptions { gpu_layers: Some(gpu_layers), ..auto() };
        let cases = [
            (vec![], auto(), vec![DeviceSpec::Cpu], None, "a machine without a GPU"),
            (vec![sim()], auto(), vec![sim()], Some("sim: "), "one that fits"),
            (vec![ABSENT, sim()], auto(), vec![sim()], Some("sim: "), "the first does not open"),
            (
                vec![ABSENT],
                auto(),
                vec![DeviceSpec::Cpu],
                Some("the CPU, not cuda:9999: "),
                "none does",
            ),
            (vec![sim()], layers(0), vec![DeviceSpec::Cpu], None, "no layers are wanted there"),
            (vec![sim()], layers(1), vec![DeviceSpec::Cpu, sim()], Some("sim: "), "some layers"),
            (vec![sim()], layers(99), vec![sim()], Some("sim: "), "all layers"),
        ];
        for (gpus, options, places, said, why) in cases {
            let chosen = with(2048, |model| among(model, &options, &gpus)).unwrap();
            assert_eq!(chosen.places, places, "{why}");
            assert_eq!(chosen.plan.len(), places.len(), "{why}");
            assert_eq!(chosen.options.device, *places.last().unwrap(), "{why}");
            let found = chosen.why.unwrap_or_default();
            assert!(found.starts_with(said.unwrap_or_default()), "{why}: {found}");
            assert_eq!(found.is_empty(), said.is_none(), "{why}: {found}");
        }
        for (gpus, why) in [(vec![], "a GPU to put layers on"), (vec![ABSENT], "cuda")] {
            let error = with(2048, |model| among(model, &layers(1), &gpus)).err().unwrap();
            assert!(error.to_string().contains(why), "{error}");
        }
    }

    /// The child of [`a_gpu_that_is_too_small_leaves_it_to_the_cpu`], whose simulated GPU
    /// has little memory.
    #[test]
    fn with_a_small_gpu_in_a_process_of_its_own() {
        if std::env::var_os("DELFT_SIM_MEMORY").is_none() {
            return;
        }
        let chosen = with(2048, |model| among(model, &auto(), &[sim()])).unwrap();
        let why = chosen.why.unwrap_or_default();
        assert_eq!(chosen.places, [DeviceSpec::Cpu], "{why}");
        assert!(why.starts_with("the CPU, not sim: the model takes 0.0 GiB, 0.0 GiB"), "{why}");
        // Who asks for layers there gets what was asked for, to be refused with figures when it is
        // loaded.
        let layers = LoadOptions { gpu_layers: Some(99), ..auto() };
        let chosen = with(2048, |model| among(model, &layers, &[sim()])).unwrap();
        assert!(chosen.places == [sim()] && !chosen.fits());
    }

    #[test]
    fn a_gpu_that_is_too_small_leaves_it_to_the_cpu() {
        let name = "choose::tests::with_a_small_gpu_in_a_process_of_its_own";
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name])
            .env("DELFT_SIM_MEMORY", "1000")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    fn what_follows_from_the_place_follows_from_the_one_chosen() {
        let chosen = |options: LoadOptions| with(2048, |model| among(model, &options, &[sim()]));
        assert_eq!(chosen(auto()).unwrap().load.rows.0, sim().chunk());
        let chunk = Some(7);
        assert_eq!(chosen(LoadOptions { chunk, ..auto() }).unwrap().load.rows.0, 7);
    }

    #[test]
    fn a_context_that_nobody_asked_for_is_as_long_as_memory_allows() {
        for rotate in [false, true] {
            let options = LoadOptions { rotate, ..LoadOptions::default() };
            let chosen = with(ENDLESS, |model| on(model, &options, DeviceSpec::Cpu)).unwrap();
            if chosen.plan[0].free.is_none() {
                return testing::skipped("this system does not tell what memory is free");
            }
            assert!(chosen.fits() && chosen.context.is_power_of_two());
            assert!((SHORTEST..ENDLESS).contains(&chosen.context), "{}", chosen.context);
            let windows = chosen.program.groups();
            assert_eq!(windows[0].window.is_some_and(|w| w <= chosen.context), rotate);
        }
        for (trained, asked, context, why) in [
            (ENDLESS, Some(ENDLESS), ENDLESS, "it was asked for"),
            (3000, None, 3000, "all of it fits"),
            (100, None, 100, "shorter than what memory would shorten to"),
        ] {
            let options = LoadOptions { context: asked, ..LoadOptions::default() };
            let chosen = with(trained, |model| on(model, &options, DeviceSpec::Cpu)).unwrap();
            assert_eq!(chosen.context, context, "{why}");
        }
    }
}

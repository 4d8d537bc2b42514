//! A GPU that fails: what it has said so far stays right, and what comes after it is right again,
//! or one clear error. One that is late, or does nothing: `dispatch`.

mod dispatch;

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use formats::{Error, Result, Tensors};
use ops::sample::{Choice, Options};
use program::{CHOSEN, Choose, Program, Sequence, Step, StepKind, Table};
use tile::Kernel;
use tile::launch::Numbers;

use super::executor::GpuExecutor;
use super::group::AllReduceGroup;
use super::sim::{KernelRunner, Sim, SimBuffer, SimLaunch, SimPipeline};
use super::weights::Store;
use super::{Backend, Dispatch, Facts, GpuDevice, ProductShape};
use crate::ranks::Ranks;
use crate::tests::recorded;
use crate::{About, CacheType, Device, Executor, ExecutorOptions, Ticket, Usage};

/// When work is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum When {
    /// At once.
    Now,
    /// When something is waited for, and no more of it than that.
    Late,
    /// As [`Late`](When::Late), but events are not waited for: wrong.
    Hasty,
    /// Not at all: every note is there, and says 0.
    Never,
}

/// Work to be done late.
enum Job {
    Launch(SimLaunch),
    Copy(SimBuffer, SimBuffer),
}

/// The simulated GPU, until a call fails that was named.
struct Faulty {
    sim: Sim,
    when: Mutex<When>,
    jobs: Mutex<VecDeque<Job>>,
    /// Jobs that there were so far, and those done.
    asked: AtomicUsize,
    done: AtomicUsize,
    /// The kind of call that fails, and how many of it are done before.
    fault: Mutex<Option<(&'static str, usize)>>,
    /// How often each kind was called.
    calls: Mutex<HashMap<&'static str, usize>>,
    /// Whether the failure breaks the device.
    breaks: AtomicBool,
    broken: AtomicBool,
    /// Whether addresses can be reserved.
    pages: AtomicBool,
}

impl Faulty {
    fn new(sim: Sim) -> Arc<Faulty> {
        let (fault, calls, breaks, broken, pages, jobs, asked, done) = Default::default();
        let when = Mutex::new(When::Now);
        Arc::new(Faulty { sim, when, jobs, asked, done, fault, calls, breaks, broken, pages })
    }

    fn when(&self) -> When {
        *self.when.lock().unwrap()
    }

    /// Does work now, later or never.
    fn job(&self, job: Job) -> Result<()> {
        match self.when() {
            When::Now => self.perform(job),
            When::Never => Ok(()),
            When::Late | When::Hasty => {
                self.jobs.lock().unwrap().push_back(job);
                self.asked.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    fn perform(&self, job: Job) -> Result<()> {
        match job {
            Job::Launch(launch) => self.sim.submit(&[launch]),
            Job::Copy(from, to) => self.sim.copy(&from, &to),
        }
    }

    /// Works until `until` jobs are done.
    fn work(&self, until: usize) -> Result<()> {
        while self.done.load(Ordering::Relaxed) < until {
            let job = self.jobs.lock().unwrap().pop_front().unwrap();
            self.done.fetch_add(1, Ordering::Relaxed);
            self.perform(job)?;
        }
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        self.work(self.asked.load(Ordering::Relaxed))
    }

    /// How often a kind was called.
    fn calls(&self, kind: &str) -> usize {
        self.calls.lock().unwrap().get(kind).copied().unwrap_or(0)
    }

    fn arm(&self, kind: &'static str, after: usize) {
        *self.fault.lock().unwrap() = Some((kind, after));
    }

    /// Whether the failure is still to come.
    fn disarm(&self) -> bool {
        self.fault.lock().unwrap().take().is_some()
    }

    fn step(&self, kind: &'static str) -> Result<()> {
        *self.calls.lock().unwrap().entry(kind).or_default() += 1;
        if self.broken.load(Ordering::Relaxed) {
            return Err(Error::new("faulty", "", "everything fails now"));
        }
        let mut fault = self.fault.lock().unwrap();
        match &mut *fault {
            Some((of, 0)) if *of == kind => {
                *fault = None;
                self.broken.store(self.breaks.load(Ordering::Relaxed), Ordering::Relaxed);
                Err(Error::new("faulty", "", format!("a failed {kind}")))
            }
            Some((of, left)) if *of == kind => {
                *left -= 1;
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl Backend for Faulty {
    type Buffer = SimBuffer;
    type Pipeline = SimPipeline;
    type Launch = SimLaunch;
    type Recording = Vec<SimLaunch>;
    /// Jobs before it.
    type Event = AtomicUsize;

    fn about(&self) -> About {
        self.sim.about()
    }

    fn facts(&self) -> Facts {
        self.sim.facts()
    }

    fn buffer(&self, bytes: usize) -> Result<SimBuffer> {
        self.step("buffer").and_then(|()| self.sim.buffer(bytes))
    }

    fn page(&self) -> Option<usize> {
        self.sim.page().filter(|_| self.pages.load(Ordering::Relaxed))
    }

    fn reserve(&self, bytes: usize) -> Result<SimBuffer> {
        self.step("reserve").and_then(|()| self.sim.reserve(bytes))
    }

    fn extend(&self, reserved: &SimBuffer, bytes: usize) -> Result<()> {
        self.step("extend").and_then(|()| self.sim.extend(reserved, bytes))
    }

    fn pinned(&self, words: usize) -> Result<SimBuffer> {
        self.step("buffer").and_then(|()| self.sim.pinned(words))
    }

    fn read_pinned(&self, pinned: &SimBuffer, word: usize) -> Result<Option<[u32; 2]>> {
        self.step("peek")?;
        if self.when() == When::Never {
            return Ok(Some([0, 0]));
        }
        loop {
            match self.sim.read_pinned(pinned, word) {
                Err(_) if !self.jobs.lock().unwrap().is_empty() => {
                    self.work(self.done.load(Ordering::Relaxed) + 1)?;
                }
                found => return found,
            }
        }
    }

    fn write_pinned(&self, pinned: &SimBuffer, word: usize, bytes: &[u8]) -> Result<()> {
        self.step("write_pinned").and_then(|()| self.sim.write_pinned(pinned, word, bytes))
    }

    fn event(&self) -> Result<AtomicUsize> {
        self.step("event").map(|()| AtomicUsize::new(0))
    }

    fn record_event(&self, event: &AtomicUsize) -> Result<()> {
        self.step("event")?;
        event.store(self.asked.load(Ordering::Relaxed), Ordering::Relaxed);
        Ok(())
    }

    fn wait_event(&self, event: &AtomicUsize) -> Result<()> {
        self.step("wait_event")?;
        match self.when() {
            When::Hasty => Ok(()),
            _ => self.work(event.load(Ordering::Relaxed)),
        }
    }

    fn part(&self, of: &SimBuffer, range: Range<usize>) -> Result<SimBuffer> {
        self.step("part").and_then(|()| self.sim.part(of, range))
    }

    fn write(&self, to: &SimBuffer, bytes: &[u8]) -> Result<()> {
        self.step("write").and_then(|()| self.finish()).and_then(|()| self.sim.write(to, bytes))
    }

    fn read(&self, from: &SimBuffer, to: &mut [u8]) -> Result<()> {
        self.step("read").and_then(|()| self.finish()).and_then(|()| self.sim.read(from, to))
    }

    fn copy(&self, from: &SimBuffer, to: &SimBuffer) -> Result<()> {
        self.step("copy").and_then(|()| self.job(Job::Copy(from.clone(), to.clone())))
    }

    fn load(&self, kernel: &Arc<Kernel>) -> Result<SimPipeline> {
        self.step("load").and_then(|()| self.sim.load(kernel))
    }

    fn bind(
        &self,
        pipeline: &SimPipeline,
        numbers: &Numbers,
        buffers: &[SimBuffer],
    ) -> Result<SimLaunch> {
        self.step("bind").and_then(|()| self.sim.bind(pipeline, numbers, buffers))
    }

    fn product(
        &self,
        shape: &ProductShape,
        x: &SimBuffer,
        w: &SimBuffer,
        add: Option<&SimBuffer>,
        y: &SimBuffer,
    ) -> Result<SimLaunch> {
        self.step("bind").and_then(|()| self.sim.product(shape, x, w, add, y))
    }

    fn all_reduce(&self, x: &SimBuffer, y: &SimBuffer, count: usize) -> Result<SimLaunch> {
        self.step("bind").and_then(|()| self.sim.all_reduce(x, y, count))
    }

    fn all_gather(&self, x: &SimBuffer, y: &SimBuffer, counts: &[usize]) -> Result<SimLaunch> {
        self.step("bind").and_then(|()| self.sim.all_gather(x, y, counts))
    }

    /// Launches one by one, so that a failure comes in the middle of a step.
    fn submit(&self, launches: &[SimLaunch]) -> Result<()> {
        launches.iter().try_for_each(|launch| {
            self.step("launch")?;
            if self.when() == When::Never { Ok(()) } else { self.job(Job::Launch(launch.clone())) }
        })
    }

    fn record(&self, launches: &[SimLaunch]) -> Result<Vec<SimLaunch>> {
        self.step("record").and_then(|()| self.sim.record(launches))
    }

    fn replay(&self, recording: &mut Vec<SimLaunch>) -> Result<()> {
        self.submit(recording)
    }

    fn lost(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    fn usage(&self) -> Option<Usage> {
        self.sim.usage()
    }

    fn free(&self) -> Result<Option<usize>> {
        self.sim.free()
    }

    fn read_rate(&self) -> f64 {
        self.sim.read_rate()
    }
}

fn model() -> (Program, Tensors) {
    recorded("llama3")
}

/// Room for sixteen contexts of one block.
fn options() -> ExecutorOptions {
    ExecutorOptions {
        cache_type: CacheType::F16,
        rows: (32, 4),
        blocks: vec![16],
        context: vec![1],
        ..ExecutorOptions::default()
    }
}

fn load(backend: &Arc<Faulty>) -> GpuExecutor<Faulty> {
    load_as(backend, Dispatch::default())
}

fn load_as(backend: &Arc<Faulty>, dispatch: Dispatch) -> GpuExecutor<Faulty> {
    let (program, tensors) = model();
    let options = ExecutorOptions { dispatch, ..options() };
    let (backend, store) = (Arc::clone(backend), Store::<Faulty>::default());
    let load = GpuExecutor::load(backend, program, &tensors, options, &store, &mut |_, _| {});
    load.unwrap()
}

/// Tokens from a position on, in one block, which is also the slot; logits of the last.
fn submit(
    executor: &mut dyn Executor,
    block: u32,
    start: u32,
    tokens: &[u32],
    choose: Option<&Choose<'_>>,
) -> Result<Ticket> {
    let tables = [Table { blocks: &[block], oldest: 0 }];
    let sequence = Sequence::new(tokens.len(), start as usize, &tables);
    executor.submit(&Step {
        kind: if tokens.len() == 1 { StepKind::Decode } else { StepKind::Prompt },
        tokens,
        sequences: &[Sequence { slot: block, choose, ..sequence }],
        outputs: &[tokens.len() as u32 - 1],
        input: &[],
    })
}

/// The logits after tokens from a position on.
fn logits(executor: &mut dyn Executor, block: u32, start: u32, tokens: &[u32]) -> Result<Vec<f32>> {
    let ticket = submit(executor, block, start, tokens, None)?;
    Ok(executor.read(ticket, 0)?.to_vec())
}

/// The token that is chosen after a token.
fn choice(
    executor: &mut dyn Executor,
    block: u32,
    start: u32,
    token: u32,
    options: &Options,
    history: &[u32],
) -> Result<Choice> {
    let choose = Choose { options, history, mask: None, logprobs: Some(0) };
    let ticket = submit(executor, block, start, &[token], Some(&choose))?;
    Ok(executor.wait(ticket)?.choice(0).expect("there is something to choose"))
}

/// The token after one, and after that, of which the host does not know it when it asks.
fn chosen(executor: &mut dyn Executor, block: u32, start: u32, token: u32) -> Result<[u32; 2]> {
    let options = Options { top_k: 5, seed: 3, repetition_penalty: 1.1, ..Options::default() };
    let history = [1, 2, token];
    let choose = Choose { options: &options, history: &history, mask: None, logprobs: None };
    let first = submit(executor, block, start, &[token], Some(&choose))?;
    let second = submit(executor, block, start + 1, &[CHOSEN], Some(&choose))?;
    let mut token = |ticket| {
        let outcome = executor.wait(ticket)?;
        Ok(outcome.choice(0).expect("there is something to choose").token)
    };
    Ok([token(first)?, token(second)?])
}

const FIRST: &[u32] = &[5, 9, 100, 3, 77, 21, 6, 8, 9, 2, 64, 13];
const SECOND: &[u32] = &[7, 7, 50];

/// Everything that is asked of an executor whose sessions hold [`FIRST`] in block 0 and [`SECOND`]
/// in block 1.
fn answers(executor: &mut dyn Executor) -> Result<(Vec<f32>, Vec<f32>, [u32; 2])> {
    let second = logits(executor, 1, 3, &[40])?;
    let first = logits(executor, 0, 12, &[4])?;
    Ok((first, second, chosen(executor, 0, 13, 30)?))
}

#[test]
fn after_any_failure_all_sessions_go_on() {
    let wanted = {
        let mut sound = load(&Faulty::new(Sim::new(KernelRunner::Interpreter)));
        logits(&mut sound, 0, 0, FIRST).unwrap();
        logits(&mut sound, 1, 0, SECOND).unwrap();
        answers(&mut sound).unwrap()
    };
    let every = [
        "buffer",
        "part",
        "write",
        "read",
        "copy",
        "load",
        "bind",
        "record",
        "launch",
        "write_pinned",
        "peek",
    ];
    let kinds = every.map(|kind| (Dispatch::Graph, kind)).into_iter();
    let kinds = kinds.chain(["bind", "launch", "write"].map(|kind| (Dispatch::Eager, kind)));
    let of_arguments = ["part", "bind", "launch", "write_pinned", "copy", "event", "wait_event"];
    let kinds: Vec<_> = kinds.chain(of_arguments.map(|kind| (Dispatch::Arguments, kind))).collect();
    let mut failures = HashMap::new();
    for &(dispatch, kind) in &kinds {
        let backend = Faulty::new(Sim::new(KernelRunner::Interpreter));
        let mut executor = load_as(&backend, dispatch);
        logits(&mut executor, 0, 0, FIRST).unwrap();
        logits(&mut executor, 1, 0, SECOND).unwrap();
        for (turn, after) in [0, 1, 2, 4, 9, 17, 30].into_iter().enumerate() {
            backend.arm(kind, after);
            // A block that there is no room for yet, rows of a prompt, a step, and steps that
            // choose.
            let block = 2 + turn as u32;
            let tried = logits(&mut executor, block, 0, &FIRST[..10])
                .and_then(|_| logits(&mut executor, 0, 12, &[4]))
                .and_then(|_| chosen(&mut executor, 0, 13, 30));
            let fired = !backend.disarm();
            assert_eq!(tried.is_err(), fired, "{dispatch:?} {kind} {after}: {tried:?}");
            if let Err(why) = tried {
                assert!(why.to_string().contains(&format!("a failed {kind}")), "{why}");
                *failures.entry((dispatch, kind)).or_insert(0) += 1;
            }
            let found = answers(&mut executor).unwrap();
            assert_eq!(found, wanted, "{dispatch:?} {kind} {after}");
        }
    }
    assert!(kinds.iter().all(|kind| failures.get(kind) >= Some(&1)), "{failures:?}");
}

/// Whichever rank fails at whatever, no other waits for it for ever, and all go on together.
#[test]
fn after_a_failure_of_one_rank_all_go_on() {
    let ranks = || {
        let group = Arc::new(AllReduceGroup::new(2));
        let sim =
            |rank| Faulty::new(Sim::new(KernelRunner::Interpreter).in_group(group.clone(), rank));
        let backends = [sim(0), sim(1)];
        let device = |backend: &Arc<Faulty>| {
            Box::new(GpuDevice { backend: Arc::clone(backend), store: Store::<Faulty>::default() })
                as Box<dyn Device>
        };
        let group = Ranks::new(backends.iter().map(device).collect(), group.clone());
        let (program, tensors) = model();
        let executor = group.load(program, &tensors, options(), &mut |_, _| {}).unwrap();
        (backends, executor)
    };
    let (_, mut sound) = ranks();
    logits(&mut *sound, 0, 0, FIRST).unwrap();
    logits(&mut *sound, 1, 0, SECOND).unwrap();
    let wanted = answers(&mut *sound).unwrap();
    let mut failures = HashMap::new();
    for kind in ["buffer", "write", "load", "bind", "record", "launch", "peek"] {
        let (backends, mut executor) = ranks();
        logits(&mut *executor, 0, 0, FIRST).unwrap();
        logits(&mut *executor, 1, 0, SECOND).unwrap();
        for (turn, after) in [0, 1, 3, 17].into_iter().enumerate() {
            backends[turn % 2].arm(kind, after);
            let tried = logits(&mut *executor, 2 + turn as u32, 0, &FIRST[..10])
                .and_then(|_| logits(&mut *executor, 0, 12, &[4]))
                .and_then(|_| chosen(&mut *executor, 0, 13, 30));
            let fired = !backends[turn % 2].disarm();
            assert_eq!(tried.is_err(), fired, "{kind} {after}: {tried:?}");
            if let Err(why) = tried {
                assert!(why.to_string().contains(&format!("a failed {kind}")), "{why}");
                *failures.entry(kind).or_insert(0) += 1;
            }
            assert_eq!(answers(&mut *executor).unwrap(), wanted, "{kind} {after}");
        }
    }
    assert!(failures.len() == 7, "{failures:?}");
}

#[test]
fn a_broken_device_says_so_from_then_on() {
    for kind in ["launch", "peek", "write", "read"] {
        let backend = Faulty::new(Sim::new(KernelRunner::Interpreter));
        backend.breaks.store(true, Ordering::Relaxed);
        let mut executor = load(&backend);
        logits(&mut executor, 0, 0, FIRST).unwrap();
        backend.arm(kind, 3);
        let first = (0..20)
            .find_map(|_| {
                chosen(&mut executor, 0, 12, 4)
                    .and_then(|_| logits(&mut executor, 0, 12, &[4]))
                    .err()
            })
            .unwrap()
            .to_string();
        assert!(first.contains(kind) && first.contains("load the model again"), "{first}");
        let calls = backend.calls.lock().unwrap().clone();
        for _ in 0..3 {
            let why = logits(&mut executor, 1, 0, SECOND).unwrap_err().to_string();
            assert_eq!(why, first);
            assert_eq!(chosen(&mut executor, 0, 12, 4).unwrap_err().to_string(), first);
        }
        assert_eq!(*backend.calls.lock().unwrap(), calls, "nothing more was asked of it");
    }
}

#[test]
fn a_cache_that_cannot_grow_says_so_and_serves_what_fits() {
    let roomy = Faulty::new(Sim::new(KernelRunner::Interpreter));
    let mut sound = load(&roomy);
    let peak = |backend: &Faulty| backend.usage().unwrap().peak;
    logits(&mut sound, 0, 0, FIRST).unwrap();
    let wanted = answers_of_first(&mut sound);
    // Room for a few blocks more than the first.
    let block = 2 * 2 * 256 * 2 * 8 * 2;
    let memory = peak(&roomy) + 3 * block;
    let backend = Faulty::new(Sim::with_memory(KernelRunner::Interpreter, memory));
    let mut executor = load(&backend);
    logits(&mut executor, 0, 0, FIRST).unwrap();
    let why = logits(&mut executor, 15, 0, SECOND).unwrap_err().to_string();
    assert!(why.contains("bytes") && why.contains("cannot grow to 4096 positions"), "{why}");
    // What is there serves on, and so does a smaller demand.
    assert_eq!(answers_of_first(&mut executor), wanted);
    assert_eq!(logits(&mut executor, 1, 0, SECOND), logits(&mut sound, 1, 0, SECOND));
    assert!(backend.usage().unwrap().peak <= memory);
}

/// A cache grows in place where addresses can be reserved: nothing is copied, nothing is bound
/// anew, and what fails leaves what there was.
#[test]
fn a_cache_of_reserved_addresses_grows_where_it_is() {
    for pages in [false, true] {
        let backend = Faulty::new(Sim::new(KernelRunner::Interpreter));
        backend.pages.store(pages, Ordering::Relaxed);
        let mut executor = load(&backend);
        // Every class that comes later is bound, once there is room for sampling.
        logits(&mut executor, 0, 0, FIRST).unwrap();
        answers_of_first(&mut executor);
        logits(&mut executor, 0, 0, SECOND).unwrap();
        logits(&mut executor, 0, 0, FIRST).unwrap();
        let wanted = answers_of_first(&mut executor);
        let before = ["bind", "copy"].map(|kind| backend.calls(kind));
        logits(&mut executor, 7, 0, SECOND).unwrap();
        assert_eq!(answers_of_first(&mut executor), wanted);
        let after = ["bind", "copy"].map(|kind| backend.calls(kind));
        assert_eq!(after == before, pages, "{before:?}, then {after:?}");
        let growth = if pages { "extend" } else { "buffer" };
        backend.arm(growth, 1);
        let why = logits(&mut executor, 15, 0, SECOND).unwrap_err().to_string();
        assert!(why.contains(&format!("a failed {growth}")), "{why}");
        assert_eq!(answers_of_first(&mut executor), wanted);
        logits(&mut executor, 15, 0, SECOND).unwrap();
        assert_eq!(answers_of_first(&mut executor), wanted);
    }
}

fn answers_of_first(executor: &mut dyn Executor) -> (Vec<f32>, [u32; 2]) {
    (logits(executor, 0, 12, &[4]).unwrap(), chosen(executor, 0, 13, 30).unwrap())
}

#[test]
fn a_model_too_large_is_refused_with_figures_before_anything_is_allocated() {
    let (program, tensors) = model();
    let backend = Faulty::new(Sim::with_memory(KernelRunner::Interpreter, 400_000));
    let options = ExecutorOptions { context: vec![16], ..options() };
    let store = Store::<Faulty>::default();
    let loaded =
        GpuExecutor::load(Arc::clone(&backend), program, &tensors, options, &store, &mut |_, _| {});
    let why = loaded.err().unwrap().to_string();
    assert!(why.contains("weights") && why.contains("MiB free") && why.contains("hint"), "{why}");
    assert_eq!(backend.usage().unwrap().peak, 0);
}

/// Prompts read copies of packed matrices where they take a small part of what is left, and their
/// bits are those of matrices that each step unpacks.
#[test]
fn unpacked_copies_change_no_bits() {
    let (program, tensors) = recorded("llama-k-quants/model.q4_k_m.gguf");
    for batched in [false, true] {
        let groups = program.groups().len();
        let blocks = vec![2; groups];
        let options = ExecutorOptions {
            rows: (16, 1),
            context: blocks.clone(),
            blocks,
            batched,
            copies: true,
            ..ExecutorOptions::default()
        };
        let load = |memory: usize| {
            let backend = Faulty::new(Sim::with_memory(KernelRunner::Interpreter, memory));
            let store = Store::<Faulty>::default();
            let device = GpuDevice { backend: Arc::clone(&backend), store };
            let plan = device.plan(&program, &tensors, &options).unwrap()[0];
            let mut executor =
                device.load(program.clone(), &tensors, options.clone(), &mut |_, _| {}).unwrap();
            let tokens: Vec<u32> = (3..15).collect();
            let before = backend.calls("launch");
            let first = logits(&mut *executor, 0, 0, &tokens).unwrap();
            let launches = backend.calls("launch") - before;
            let next = logits(&mut *executor, 0, 12, &[4]).unwrap();
            (plan, executor.memory().weights, launches, first, next)
        };
        let (plan, held, launches, first, next) = load(usize::MAX);
        assert!(plan.copies > 0 && plan.weights == held, "{plan:?}, held {held}");
        // A byte less than what the copies must be a quarter of.
        let memory = plan.most() + 3 * plan.copies - 1;
        let (without, held, more, first_without, next_without) = load(memory);
        assert_eq!((without.copies, without.weights), (0, plan.weights - plan.copies));
        assert_eq!(held, without.weights);
        assert!(more > launches, "{more} launches without copies, {launches} with them");
        assert_eq!((first, next), (first_without, next_without), "batched: {batched}");
    }
}

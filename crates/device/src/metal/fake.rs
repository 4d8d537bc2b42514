//! Metal without Apple's Metal: sources are compiled for this CPU and run, and the caller's
//! obligations are checked.
//!
//! It is stricter than a GPU. Work runs only when it is waited for, dispatches between two barriers
//! run in reverse order, and memory that a command buffer does not hold must be alive and resident
//! when it runs. A driver that forgets to wait, a barrier, a binding, or to keep something alive
//! gets wrong results or an error.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use formats::{Error, Result};
use tile::case;
use tile::emit::{self, Dialect};
use tile::ir::{Access, Block, Kernel, ParamKind};
use tile::launch::{Extent, Numbers};
use tile::proof::{self, ThreadOrder};

use super::api::{Api, BINDINGS, COMMANDS, Commands, Facts, Function};
use super::failure::{Failure, first_error};
use crate::gpu::sim;

/// A simulated GPU.
pub(crate) struct Fake {
    facts: Facts,
    state: Mutex<State>,
    /// Number of pipelines that were compiled because no archive had them.
    compiled: AtomicUsize,
}

#[derive(Default)]
struct State {
    committed: VecDeque<Vec<Command>>,
    resident: HashSet<usize>,
    allocated: usize,
    failure: Option<Failure>,
    /// Seconds of a dispatch, and most dispatches of a command buffer so far.
    #[cfg(test)]
    dispatch: f64,
    #[cfg(test)]
    longest: usize,
}

type Bytes = Mutex<Vec<u8>>;

/// A dispatch that does not keep its memory alive.
type Loose = Dispatch<Weak<Bytes>>;

/// Memory shared by GPU and CPU.
#[derive(Clone)]
pub(crate) struct Memory(Arc<Bytes>);

/// A compiled source.
pub(crate) struct Library {
    text: String,
    program: Arc<proof::CompiledText>,
}

/// A function of a source; its kernel has no body.
#[derive(Clone)]
pub(crate) struct Pipeline(Arc<(Kernel, Numbers, Arc<proof::CompiledText>)>);

/// The identities of stored pipelines.
pub(crate) struct Archive(Mutex<BTreeSet<String>>);

/// Indirect commands, as filled in so far.
#[derive(Clone)]
pub(crate) struct Indirect {
    slots: Arc<Mutex<Vec<Loose>>>,
    bindings: usize,
}

/// A dispatch. `M` is how it refers to memory.
struct Dispatch<M> {
    pipeline: Option<Pipeline>,
    bound: BTreeMap<usize, Bound<M>>,
    barrier: bool,
    /// Grid and threads.
    size: Option<([u32; 3], u32)>,
    wrong: Option<String>,
}

#[derive(Clone)]
enum Bound<M> {
    Memory(M, Range<usize>),
    Word(u32),
}

enum Command {
    Dispatch(Dispatch<Memory>),
    /// A range of indirect commands, and the pipelines that the encoder has touched before.
    Execute(Indirect, Range<usize>, HashSet<usize>),
}

impl<M> Default for Dispatch<M> {
    fn default() -> Self {
        let (pipeline, bound, barrier, size, wrong) = Default::default();
        Dispatch { pipeline, bound, barrier, size, wrong }
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn identity(bytes: &Arc<Bytes>) -> usize {
    Arc::as_ptr(bytes).addr()
}

fn wrong(why: impl std::fmt::Display) -> Error {
    Error::new("metal", "", why)
}

impl Pipeline {
    fn identity(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }
}

impl Memory {
    /// A range of its bytes, checked for bounds.
    fn inside(&self, at: usize, bytes: usize) -> Result<Range<usize>> {
        let length = lock(&self.0).len();
        let end = at.checked_add(bytes).filter(|end| *end <= length);
        end.map(|end| at..end).ok_or_else(|| wrong(format!("{bytes} bytes at {at} of {length}")))
    }
}

impl<M> Dispatch<M> {
    fn bind(&mut self, index: usize, bound: Bound<M>, most: usize) {
        if index >= most {
            self.wrong = Some(format!("binding {index} of {most}"));
        }
        self.bound.insert(index, bound);
    }
}

impl Dispatch<Memory> {
    fn run(&self) -> std::result::Result<(), String> {
        if let Some(wrong) = &self.wrong {
            return Err(wrong.clone());
        }
        let (Some(pipeline), Some((grid, threads))) = (&self.pipeline, self.size) else {
            return Err("a launch without a pipeline or a grid".to_owned());
        };
        let (shell, constants, program) = &*pipeline.0;
        if threads != shell.launch.threads {
            return Err(format!("{}: {threads} threads", shell.name));
        }
        let mut kernel = shell.clone();
        kernel.launch.grid = grid.map(Extent::Literal);
        let mut numbers = constants.clone();
        let (mut buffers, mut written) = (vec![], vec![]);
        for (i, param) in kernel.params.iter().enumerate() {
            let missing = || format!("{}: nothing fit for `{}` at {i}", kernel.name, param.name);
            let bytes = |memory: &Memory, range: &Range<usize>| {
                lock(&memory.0).get(range.clone()).map(<[u8]>::to_vec).ok_or_else(missing)
            };
            match (param.kind, self.bound.get(&i)) {
                (ParamKind::Buffer { scalar, access }, Some(Bound::Memory(memory, range))) => {
                    if access != Access::In {
                        written.push((buffers.len(), memory, range.clone()));
                    }
                    // Bytes of a partial last element are ignored.
                    let mut bytes = bytes(memory, range)?;
                    bytes.truncate(bytes.len() / scalar.bytes() * scalar.bytes());
                    buffers.push(case::Buffer::raw(scalar, bytes));
                }
                (ParamKind::Argument(_), Some(Bound::Word(word))) => {
                    numbers.set(&param.name, *word);
                }
                (ParamKind::Argument(_), Some(Bound::Memory(memory, range))) => {
                    let found = bytes(memory, range)?;
                    let word = found.first_chunk::<4>().ok_or_else(missing)?;
                    numbers.set(&param.name, u32::from_le_bytes(*word));
                }
                _ => return Err(missing()),
            }
        }
        program.run(&kernel, &numbers, &mut buffers, ThreadOrder::ALL[0])?;
        for (i, memory, range) in written {
            let bytes = &buffers[i].bytes;
            lock(&memory.0)[range.start..range.start + bytes.len()].copy_from_slice(bytes);
        }
        Ok(())
    }
}

impl Fake {
    /// With the strictest properties of any Apple GPU.
    pub(crate) fn new() -> Fake {
        let facts = Facts {
            name: "Metal text on this CPU".to_owned(),
            system: "none".to_owned(),
            longest: 1 << 33,
            memory: 16 << 20,
            shared: 32 << 10,
            touches: true,
        };
        let (state, compiled) = Default::default();
        Fake { facts, state, compiled }
    }

    /// Makes a command buffer fail.
    #[cfg(test)]
    pub(super) fn fail(&self, failure: Failure) {
        lock(&self.state).failure = Some(failure);
    }

    /// Sets the seconds of a dispatch. Returns the most dispatches that a command buffer had so
    /// far.
    #[cfg(test)]
    pub(super) fn dispatches_take(&self, seconds: f64) -> usize {
        let mut state = lock(&self.state);
        state.dispatch = seconds;
        std::mem::take(&mut state.longest)
    }

    /// Pipelines that no archive had.
    #[cfg(test)]
    pub(super) fn compiled(&self) -> usize {
        self.compiled.load(Ordering::Relaxed)
    }

    /// Command buffers that have not been waited for.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        lock(&self.state).committed.len()
    }

    /// The CPU may touch memory only when the GPU is idle.
    fn idle(&self) -> Result<()> {
        match lock(&self.state).committed.len() {
            0 => Ok(()),
            n => Err(wrong(format!("memory touched while {n} command buffers are in flight"))),
        }
    }

    /// The dispatches of a command buffer, each with its memory.
    fn dispatches(
        commands: Vec<Command>,
        resident: &HashSet<usize>,
    ) -> std::result::Result<Vec<Dispatch<Memory>>, String> {
        let mut dispatches = Vec::new();
        for command in commands {
            match command {
                Command::Dispatch(dispatch) => dispatches.push(dispatch),
                Command::Execute(indirect, commands, touched) => {
                    let slots = lock(&indirect.slots);
                    let filled = slots.get(commands).ok_or("more commands than there are")?;
                    for slot in filled {
                        let pipeline = slot.pipeline.as_ref().map(Pipeline::identity);
                        if pipeline.is_some_and(|id| !touched.contains(&id)) {
                            return Err("a pipeline of a recording is not named".to_owned());
                        }
                        dispatches.push(alive(slot, |id| resident.contains(id))?);
                    }
                }
            }
        }
        Ok(dispatches)
    }

    /// Runs dispatches in the most harmful order that the barriers allow.
    fn run(dispatches: Vec<Dispatch<Memory>>) -> std::result::Result<(), String> {
        let mut group: Vec<Dispatch<Memory>> = Vec::new();
        let flush = |group: &mut Vec<Dispatch<Memory>>| {
            std::mem::take(group).into_iter().rev().try_for_each(|dispatch| dispatch.run())
        };
        for dispatch in dispatches {
            if dispatch.barrier {
                flush(&mut group)?;
            }
            group.push(dispatch);
        }
        flush(&mut group)
    }
}

/// The name of a coherent parameter that an atomic cast strips of its qualifier, which Apple's
/// compiler may refuse.
fn dropped(text: &str) -> Option<&str> {
    text.split("TK_COHERENT device ").skip(1).find_map(|rest| {
        let name = rest.split(" [[").next()?.rsplit(['*', ' ']).next()?;
        // `(device atomic_uint*)(counters + v9)`
        let mut casts = text.split("atomic_").filter_map(|cast| cast.split_once("*)("));
        casts.any(|(ty, at)| ty.len() < 8 && at.starts_with(name)).then_some(name)
    })
}

/// An indirect command, checked to have living, resident memory.
fn alive(
    slot: &Loose,
    reachable: impl Fn(&usize) -> bool,
) -> std::result::Result<Dispatch<Memory>, String> {
    let mut bound = BTreeMap::new();
    for (index, binding) in &slot.bound {
        let binding = match binding {
            Bound::Word(_) => return Err("an indirect command cannot hold bytes".to_owned()),
            Bound::Memory(memory, range) => {
                let memory = memory.upgrade().ok_or("memory of a recording is gone")?;
                if !reachable(&identity(&memory)) {
                    return Err("memory of a recording is not resident".to_owned());
                }
                Bound::Memory(Memory(memory), range.clone())
            }
        };
        bound.insert(*index, binding);
    }
    let (pipeline, wrong) = (slot.pipeline.clone(), slot.wrong.clone());
    Ok(Dispatch { pipeline, bound, barrier: slot.barrier, size: slot.size, wrong })
}

impl Api for Fake {
    type Memory = Memory;
    type Library = Library;
    type Pipeline = Pipeline;
    type Archive = Archive;
    type Indirect = Indirect;
    type Encoder<'a> = Encoder<'a>;
    type Slot<'a> = Slot<'a>;

    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn memory(&self, bytes: usize) -> Result<Memory> {
        let mut zeros = Vec::new();
        let full = |_| Error::new("metal", "memory", format!("none for {bytes} bytes"));
        zeros.try_reserve_exact(bytes).map_err(full)?;
        zeros.resize(bytes, 0);
        lock(&self.state).allocated += bytes;
        Ok(Memory(Arc::new(Mutex::new(zeros))))
    }

    fn write(&self, to: &Memory, at: usize, bytes: &[u8]) -> Result<()> {
        self.idle()?;
        let range = to.inside(at, bytes.len())?;
        lock(&to.0)[range].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, from: &Memory, at: usize, bytes: &mut [u8]) -> Result<()> {
        self.idle()?;
        let range = from.inside(at, bytes.len())?;
        bytes.copy_from_slice(&lock(&from.0)[range]);
        Ok(())
    }

    fn look(&self, from: &Memory, at: usize) -> Result<[u32; 2]> {
        let range = from.inside(at, 8)?;
        let bytes = lock(&from.0);
        let word = |i: usize| bytes[range.start + i..].first_chunk::<4>().copied();
        let words = [word(0), word(4)].map(|w| u32::from_le_bytes(w.unwrap_or_default()));
        Ok(words)
    }

    fn put(&self, to: &Memory, at: usize, word: u32) -> Result<()> {
        let range = to.inside(at, 4)?;
        lock(&to.0)[range].copy_from_slice(&word.to_le_bytes());
        Ok(())
    }

    fn reside(&self, memory: &Memory) {
        lock(&self.state).resident.insert(identity(&memory.0));
    }

    fn depart(&self, memory: &Memory) {
        let mut state = lock(&self.state);
        state.resident.remove(&identity(&memory.0));
        state.allocated -= lock(&memory.0).len();
    }

    fn keep(&self) {}

    fn allocated(&self) -> usize {
        lock(&self.state).allocated
    }

    fn compile(&self, text: &str, version: (u32, u32)) -> Result<Library> {
        // The qualifier that was added in 3.2, the only reason to ask for that version.
        let coherent = text.contains("TK_COHERENT device ");
        if coherent != (version >= (3, 2)) {
            return Err(wrong(format!("a text compiled as {version:?}, coherent: {coherent}")));
        }
        if let Some(name) = dropped(text) {
            return Err(wrong(format!("a cast of `{name}` that drops what makes it coherent")));
        }
        let first = |e: Error| Error { found: first_error(&e.found).to_owned(), ..e };
        let program = sim::compiled(text, &[], Dialect::Metal, "metal").map_err(first)?;
        Ok(Library { text: text.to_owned(), program })
    }

    fn open(&self, path: &Path) -> Result<Library> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path.display(), e))?;
        let coherent = text.contains("TK_COHERENT device ");
        self.compile(&text, if coherent { (3, 2) } else { (3, 1) })
    }

    fn pipeline(
        &self,
        library: &Library,
        function: &Function<'_>,
        archive: Option<&Archive>,
    ) -> Result<(Pipeline, bool)> {
        let kernel = function.kernel;
        if !library.text.contains(&format!("kernel void {}(", kernel.name)) {
            return Err(wrong(format!("no function {}", kernel.name)));
        }
        let mut numbers = Numbers::new();
        for constant in &kernel.constants {
            let name = emit::metal_constant(kernel, &constant.name);
            let set = function.constants.iter().find(|(known, _, _)| *known == name);
            match set {
                Some((_, scalar, bits)) if *scalar == constant.scalar => {
                    numbers.set(&constant.name, *bits);
                }
                _ => return Err(wrong(format!("no value for {name}"))),
            }
        }
        let mut shell = Kernel { body: Block::default(), ..kernel.clone() };
        shell.launch.requirements.clear();
        let identity = format!("{} {:?}", kernel.name, function.constants);
        let new = match archive {
            Some(archive) => lock(&archive.0).insert(identity),
            None => false,
        };
        if new || archive.is_none() {
            self.compiled.fetch_add(1, Ordering::Relaxed);
        }
        Ok((Pipeline(Arc::new((shell, numbers, Arc::clone(&library.program)))), new))
    }

    fn archive(&self, file: Option<&Path>) -> Result<Archive> {
        let Some(path) = file else { return Ok(Archive(Mutex::default())) };
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path.display(), e))?;
        let lines = text.strip_prefix("pipelines\n").ok_or_else(|| wrong("not an archive"))?;
        Ok(Archive(Mutex::new(lines.lines().map(str::to_owned).collect())))
    }

    fn save(&self, archive: &Archive, to: &Path) -> Result<()> {
        let lines: Vec<String> = lock(&archive.0).iter().cloned().collect();
        let text = format!("pipelines\n{}", lines.join("\n"));
        std::fs::write(to, text).map_err(|e| Error::io(to.display(), e))
    }

    fn indirect(&self, commands: usize, bindings: usize) -> Result<Indirect> {
        if commands > COMMANDS || bindings > BINDINGS {
            return Err(wrong(format!("{commands} commands of {bindings} bindings")));
        }
        let slots = (0..commands).map(|_| Dispatch::default()).collect();
        Ok(Indirect { slots: Arc::new(Mutex::new(slots)), bindings })
    }

    fn slot<'a>(&self, indirect: &'a Indirect, index: usize) -> Slot<'a> {
        Slot { of: indirect, index }
    }

    fn encoder(&self) -> Result<Encoder<'_>> {
        let (commands, next, touched) = Default::default();
        Ok(Encoder { of: self, commands, next, touched })
    }

    fn advance(&self) -> Option<f64> {
        let mut state = lock(&self.state);
        let commands = state.committed.pop_front()?;
        let found = Fake::dispatches(commands, &state.resident);
        #[cfg(test)]
        let seconds = {
            let count = found.as_ref().map_or(0, Vec::len);
            state.longest = state.longest.max(count);
            count as f64 * state.dispatch
        };
        #[cfg(not(test))]
        let seconds = 0.0;
        if let (Err(said), None) = (found.and_then(Fake::run), &state.failure) {
            state.failure = Some(Failure { code: 3, said });
        }
        Some(seconds)
    }

    fn failure(&self) -> Option<Failure> {
        lock(&self.state).failure.take()
    }
}

/// A command buffer.
pub(crate) struct Encoder<'a> {
    of: &'a Fake,
    commands: Vec<Command>,
    next: Dispatch<Memory>,
    touched: HashSet<usize>,
}

impl Commands<Fake> for Encoder<'_> {
    fn pipeline(&mut self, pipeline: &Pipeline) {
        self.next.pipeline = Some(pipeline.clone());
    }

    fn buffer(&mut self, index: usize, memory: &Memory, range: Range<usize>) {
        self.next.bind(index, Bound::Memory(memory.clone(), range), BINDINGS);
    }

    fn barrier(&mut self) {
        self.next.barrier = true;
    }

    fn dispatch(&mut self, grid: [u32; 3], threads: u32) {
        let mut made = std::mem::take(&mut self.next);
        made.size = Some((grid, threads));
        self.commands.push(Command::Dispatch(made));
    }
}

impl super::api::Encoder<Fake> for Encoder<'_> {
    fn word(&mut self, index: usize, word: u32) {
        self.next.bind(index, Bound::Word(word), BINDINGS);
    }

    fn touch(&mut self, pipeline: &Pipeline) {
        self.touched.insert(pipeline.identity());
    }

    fn execute(&mut self, indirect: &Indirect, commands: Range<usize>) {
        self.commands.push(Command::Execute(indirect.clone(), commands, self.touched.clone()));
    }

    fn commit(self) -> Result<()> {
        lock(&self.of.state).committed.push_back(self.commands);
        Ok(())
    }
}

/// An indirect command.
pub(crate) struct Slot<'a> {
    of: &'a Indirect,
    index: usize,
}

impl Slot<'_> {
    fn change(&mut self, change: impl FnOnce(&mut Loose)) {
        if let Some(slot) = lock(&self.of.slots).get_mut(self.index) {
            change(slot);
        }
    }
}

impl Commands<Fake> for Slot<'_> {
    fn pipeline(&mut self, pipeline: &Pipeline) {
        self.change(|slot| slot.pipeline = Some(pipeline.clone()));
    }

    fn buffer(&mut self, index: usize, memory: &Memory, range: Range<usize>) {
        let (memory, most) = (Arc::downgrade(&memory.0), self.of.bindings);
        self.change(|slot| slot.bind(index, Bound::Memory(memory, range), most));
    }

    fn barrier(&mut self) {
        self.change(|slot| slot.barrier = true);
    }

    fn dispatch(&mut self, grid: [u32; 3], threads: u32) {
        self.change(|slot| slot.size = Some((grid, threads)));
    }
}

//! A simulated GPU: every kernel runs on the interpreter, which detects errors that a GPU would not
//! report, or as emitted CUDA source compiled for this CPU. Metal source has a simulated driver of
//! its own: `metal/fake.rs`.

use std::cell::Cell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use formats::{Error, Result};
use ops::tuned::{Card, CardNumbers};
use tile::case;
use tile::emit::{self, Dialect};
use tile::interp::{self, CompiledKernel};
use tile::ir::{Access, ParamKind};
use tile::launch::Numbers;
use tile::passes::Target;
use tile::proof::{self, ThreadOrder, Unproved};
use tile::{Kernel, types::Scalar};

use super::group::{Combine, HostGroup};
use super::meter::{Meter, Taken};
use super::{Backend, Facts, GpuDevice, ProductShape, launches};
use crate::ranks::{Candidate, Joined};
use crate::{About, Usage};

/// How kernels are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelRunner {
    /// The interpreter, on kernels lowered for a target.
    Interpreter,
    /// The emitted CUDA source.
    Cuda,
}

/// A simulated GPU.
pub struct Sim {
    engine: KernelRunner,
    /// Bytes of its memory.
    memory: usize,
    meter: Arc<Meter>,
    /// The group of ranks that it belongs to, and its rank.
    rank: Option<(Arc<dyn HostGroup>, usize)>,
    /// Launches left until it breaks for good, if it is to break.
    left: Mutex<Option<usize>>,
    broken: AtomicBool,
}

/// Sources compiled by this process; each takes about a second.
static COMPILED: LazyLock<Mutex<HashMap<String, Arc<proof::CompiledText>>>> =
    LazyLock::new(Mutex::default);

/// Kernels compiled for the interpreter by this process, by the address of the kernel, which stands
/// beside it so that no other gets it.
static MACHINES: LazyLock<Mutex<HashMap<usize, Interpreted>>> = LazyLock::new(Mutex::default);

/// A kernel, and what the interpreter made of it.
type Interpreted = (Arc<Kernel>, Arc<CompiledKernel>);

/// A block of new memory.
const ZEROS: &[u8] = &[0; 1 << 12];

/// Most of [`MACHINES`].
const MOST_MACHINES: usize = 1 << 14;

thread_local! {
    /// Launches of this thread until one fails.
    static LEFT: Cell<Option<usize>> = const { Cell::new(None) };
    /// Launches after which the next simulated GPU that this thread opens breaks.
    static BREAKS: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Fault injection for tests: the next simulated GPU that this thread opens breaks for good after
/// `launches` launches, as a lost device does. Devices opened after it work.
pub fn break_next(launches: usize) {
    BREAKS.set(Some(launches));
}

/// Fault injection for tests: after `launches` further launches, this thread's next launch on any
/// simulated GPU fails; `None` injects no fault. Returns the number that was left.
pub fn fail_after(launches: Option<usize>) -> Option<usize> {
    LEFT.replace(launches)
}

/// Counts a launch, and fails it if it is due.
fn counted() -> Result<()> {
    match LEFT.get() {
        None => Ok(()),
        Some(0) => {
            LEFT.set(None);
            Err(Error::new("sim", "a launch that succeeds", "one that was made to fail"))
        }
        Some(left) => {
            LEFT.set(Some(left - 1));
            Ok(())
        }
    }
}

/// Memory of a simulated device.
#[derive(Clone)]
pub struct SimBuffer {
    held: Arc<Held>,
    range: Range<usize>,
}

struct Held {
    /// Less than a buffer's range, if that is reserved.
    bytes: Mutex<Vec<u8>>,
    taken: Mutex<Vec<Taken>>,
}

impl SimBuffer {
    fn lock(&self) -> MutexGuard<'_, Vec<u8>> {
        self.held.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The bytes that it has memory for.
    fn range(&self) -> Range<usize> {
        let Range { start, end } = self.range;
        start..end.min(self.lock().len()).max(start)
    }

    fn to_vec(&self) -> Vec<u8> {
        let range = self.range();
        self.lock()[range].to_vec()
    }

    fn first(&self, bytes: usize) -> Result<Range<usize>> {
        let Range { start, end } = self.range();
        if bytes > end - start {
            let expected = format!("at most {} bytes", end - start);
            return Err(Error::new("sim buffer", expected, bytes));
        }
        Ok(start..start + bytes)
    }
}

/// A loaded kernel.
#[derive(Clone)]
pub struct SimPipeline {
    kernel: Arc<Kernel>,
    code: Code,
}

#[derive(Clone)]
enum Code {
    Machine(Arc<CompiledKernel>),
    Text(Arc<proof::CompiledText>),
}

/// A kernel with its buffers and constants.
#[derive(Clone)]
struct Bound {
    pipeline: SimPipeline,
    numbers: Numbers,
    buffers: Vec<SimBuffer>,
}

/// A product with its matrices: `x`, `w`, the summand, `y`.
#[derive(Clone)]
struct Product {
    shape: ProductShape,
    x: SimBuffer,
    w: SimBuffer,
    add: Option<SimBuffer>,
    y: SimBuffer,
}

/// Bound work that can run any number of times.
#[derive(Clone)]
pub struct SimLaunch(Work);

#[derive(Clone)]
enum Work {
    Kernel(Bound),
    Product(Product),
    Collective(Collective),
}

/// One rank's part in a collective operation.
#[derive(Clone)]
struct Collective {
    group: Arc<dyn HostGroup>,
    rank: usize,
    combine: Combine,
    x: SimBuffer,
    y: SimBuffer,
}

impl Collective {
    fn run(&self) -> Result<()> {
        let values = case::Buffer::raw(Scalar::F32, self.x.to_vec()).to_f32();
        let joined = self.group.join(self.rank, self.combine, values)?;
        if 4 * joined.len() != self.y.range.len() {
            let expected = format!("{} floats of all ranks", self.y.range.len() / 4);
            return Err(Error::new("sim", expected, joined.len()));
        }
        let bytes = case::Buffer::floats(Scalar::F32, &joined).bytes;
        self.y.lock()[self.y.range.clone()].copy_from_slice(&bytes);
        Ok(())
    }
}

impl Product {
    fn run(&self) {
        let ProductShape { rows, out, width, operand, result, .. } = self.shape;
        let [rows, out, width] = [rows, out, width].map(|n| n as usize);
        let read = |buffer: &SimBuffer, scalar, len: usize| {
            let start = buffer.range.start;
            let bytes = buffer.lock()[start..start + len * Scalar::bytes(scalar)].to_vec();
            case::Buffer::raw(scalar, bytes).to_f32()
        };
        let side = |buffer: &SimBuffer, lines: usize, turned: bool| {
            let values = read(buffer, operand, lines * width);
            if !turned {
                return values;
            }
            (0..lines * width).map(|i| values[i % width * lines + i / width]).collect()
        };
        let x = side(&self.x, rows, self.shape.x_turned);
        let w = side(&self.w, out, self.shape.w_turned);
        let add = self.add.as_ref().map(|add| read(add, result, rows * out));
        let mut y = vec![0.0; rows * out];
        match operand {
            Scalar::F32 => ops::linear::reference(&x, &w, None, width, &mut y),
            _ => interp::product(&x, &w, width, &mut y),
        }
        y.iter_mut().zip(add.iter().flatten()).for_each(|(y, add)| *y += add);
        let bytes = case::Buffer::floats(result, &y).bytes;
        let start = self.y.range.start;
        self.y.lock()[start..start + bytes.len()].copy_from_slice(&bytes);
    }
}

impl Sim {
    /// With unlimited memory.
    pub fn new(engine: KernelRunner) -> Sim {
        Sim::with_memory(engine, usize::MAX)
    }

    /// With `memory` bytes of memory.
    pub fn with_memory(engine: KernelRunner, memory: usize) -> Sim {
        let (left, broken) = (Mutex::new(BREAKS.take()), AtomicBool::new(false));
        Sim { engine, memory, meter: Arc::default(), rank: None, left, broken }
    }

    /// Makes this device one of the ranks of a group.
    pub(crate) fn in_group(self, group: Arc<dyn HostGroup>, rank: usize) -> Sim {
        Sim { rank: Some((group, rank)), ..self }
    }

    /// Counts a launch against those that a device made to break has left.
    fn lasts(&self) -> Result<()> {
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *left {
            None => return Ok(()),
            Some(0) => self.broken.store(true, Ordering::SeqCst),
            Some(left) => {
                *left -= 1;
                return Ok(());
            }
        }
        Err(Error::new("sim", "a device that works", "one that was made to break"))
    }

    /// With as many bytes of memory as `DELFT_SIM_MEMORY` says; unlimited if it is not set.
    ///
    /// # Errors
    /// A value that is not a number.
    pub fn from_env(engine: KernelRunner) -> Result<Sim> {
        let Ok(said) = std::env::var("DELFT_SIM_MEMORY") else { return Ok(Sim::new(engine)) };
        let wrong = |_| Error::new("DELFT_SIM_MEMORY", "a number of bytes", &said);
        Ok(Sim::with_memory(engine, said.parse().map_err(wrong)?))
    }
}

impl Candidate for Sim {
    fn group(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    fn join(
        self: Box<Self>,
        _: &[u8],
        rank: usize,
        _: usize,
        values: Arc<dyn HostGroup>,
    ) -> Result<Joined> {
        Ok((Box::new(GpuDevice::new(self.in_group(values, rank))), None))
    }
}

/// Compiles emitted source for this CPU, each source once per process.
///
/// # Errors
/// No C++ compiler, or an error that it reports, at `place`.
pub(crate) fn compiled(
    text: &str,
    kernels: &[Kernel],
    dialect: Dialect,
    place: &str,
) -> Result<Arc<proof::CompiledText>> {
    let known = || COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = known().get(text) {
        return Ok(Arc::clone(known));
    }
    let program =
        proof::CompiledText::compile(text, kernels, dialect).map_err(|why| match why {
            Unproved::Skip(why) => Error::new("sim", "a C++ compiler", why),
            Unproved::Wrong(why) => Error::new(place, "", why),
        })?;
    Ok(Arc::clone(known().entry(text.to_owned()).or_insert(Arc::new(program))))
}

/// A kernel compiled for the interpreter, once per process.
///
/// # Errors
/// The verifier's findings.
fn machine(kernel: &Arc<Kernel>) -> Result<Arc<CompiledKernel>> {
    let all = || MACHINES.lock().unwrap_or_else(PoisonError::into_inner);
    let address = Arc::as_ptr(kernel).addr();
    if let Some((_, known)) = all().get(&address) {
        return Ok(Arc::clone(known));
    }
    let new = CompiledKernel::new(kernel).map_err(|fault| Error::new(&kernel.name, "", fault))?;
    let (new, mut all) = (Arc::new(new), all());
    if all.len() >= MOST_MACHINES {
        all.clear();
    }
    all.insert(address, (Arc::clone(kernel), Arc::clone(&new)));
    Ok(new)
}

/// Refuses a launch whose written buffer overlaps another of its buffers: launches here work on
/// copies, which would hide the race. Exactly equal ranges of one type are allowed, since kernels
/// that may alias declare it.
fn apart(kernel: &Kernel, buffers: &[SimBuffer]) -> Result<()> {
    let params: Vec<(&str, Scalar, Access)> = kernel
        .params
        .iter()
        .filter_map(|p| match p.kind {
            ParamKind::Buffer { scalar, access } => Some((p.name.as_str(), scalar, access)),
            ParamKind::Argument(_) => None,
        })
        .collect();
    for ((name, scalar, access), a) in params.iter().zip(buffers) {
        for ((other, of, _), b) in params.iter().zip(buffers) {
            let meet = a.range.start < b.range.end && b.range.start < a.range.end;
            let same = a.range.start == b.range.start && scalar == of;
            let both = name != other && Arc::ptr_eq(&a.held, &b.held) && meet;
            if *access != Access::In && both && !same {
                let expected = format!("`{name}` apart from `{other}`");
                return Err(Error::new(&kernel.name, expected, "bytes that both have"));
            }
        }
    }
    Ok(())
}

impl Bound {
    fn run(&self) -> Result<()> {
        let SimPipeline { kernel, code } = &self.pipeline;
        let params = || {
            kernel.params.iter().filter_map(|p| match p.kind {
                ParamKind::Buffer { scalar, access } => Some((scalar, access)),
                ParamKind::Argument(_) => None,
            })
        };
        let load = |((scalar, _), buffer): ((Scalar, Access), &SimBuffer)| {
            case::Buffer::raw(scalar, buffer.to_vec())
        };
        let mut bound: Vec<case::Buffer> = params().zip(&self.buffers).map(load).collect();
        let wrong = |why: &dyn std::fmt::Display| Error::new("sim", "", why);
        match code {
            Code::Machine(machine) => {
                machine.run(&self.numbers, &mut bound).map_err(|e| wrong(&e))?;
            }
            Code::Text(program) => {
                let order = ThreadOrder::ALL[0];
                program.run(kernel, &self.numbers, &mut bound, order).map_err(|e| wrong(&e))?;
            }
        }
        for (((_, access), buffer), after) in params().zip(&self.buffers).zip(bound) {
            if access != Access::In {
                let range = buffer.range();
                buffer.lock()[range].copy_from_slice(&after.bytes);
            }
        }
        Ok(())
    }
}

impl Backend for Sim {
    type Buffer = SimBuffer;
    type Pipeline = SimPipeline;
    type Launch = SimLaunch;
    type Recording = Vec<SimLaunch>;
    /// All work is done when its call returns.
    type Event = ();

    fn about(&self) -> About {
        let isa = match self.engine {
            KernelRunner::Interpreter => "interpreter",
            KernelRunner::Cuda => "CUDA text",
        };
        About { name: "sim", threads: 1, isa: isa.to_owned(), driver: String::new() }
    }

    fn facts(&self) -> Facts {
        let (target, shared) = match self.engine {
            KernelRunner::Interpreter => (Target::Interpreter, 227 << 10),
            KernelRunner::Cuda => (Target::Cuda, 227 << 10),
        };
        // Few rows, so that small tests reach the library.
        let products = (self.engine == KernelRunner::Interpreter).then_some(9);
        let tuned = CardNumbers::of(Card::Nvidia(9, 0));
        Facts { target, processors: 4, shared, wgmma: true, products, tuned }
    }

    fn buffer(&self, bytes: usize) -> Result<SimBuffer> {
        let buffer = self.reserve(bytes)?;
        self.extend(&buffer, bytes)?;
        Ok(buffer)
    }

    fn page(&self) -> Option<usize> {
        // Small, so that caches of small models have several.
        Some(1 << 12)
    }

    fn reserve(&self, bytes: usize) -> Result<SimBuffer> {
        let held = Held { bytes: Mutex::default(), taken: Mutex::default() };
        Ok(SimBuffer { held: Arc::new(held), range: 0..bytes })
    }

    fn extend(&self, reserved: &SimBuffer, bytes: usize) -> Result<()> {
        let full = || Error::new("sim", "memory", format!("none for {bytes} bytes"));
        if bytes > reserved.range.end {
            let expected = format!("at most {} bytes", reserved.range.end);
            return Err(Error::new("sim buffer", expected, bytes));
        }
        let mut held = reserved.lock();
        let more = bytes.saturating_sub(held.len());
        let taken = self.meter.take_within(more, self.memory).ok_or_else(full)?;
        held.try_reserve_exact(more).map_err(|_| full())?;
        let all = held.len() + more;
        // Not `resize`, which is a loop over bytes at the level at which tests build this crate.
        while held.len() < all {
            let part = (all - held.len()).min(ZEROS.len());
            held.extend_from_slice(&ZEROS[..part]);
        }
        reserved.held.taken.lock().unwrap_or_else(PoisonError::into_inner).push(taken);
        Ok(())
    }

    fn pinned(&self, words: usize) -> Result<SimBuffer> {
        self.buffer(4 * words)
    }

    fn read_pinned(&self, pinned: &SimBuffer, word: usize) -> Result<Option<[u32; 2]>> {
        let mut bytes = [0; 8];
        self.read(&self.part(pinned, 4 * word..4 * word + 8)?, &mut bytes)?;
        let [a, b, c, d, e, f, g, h] = bytes;
        let found = [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h])];
        if found[0] == u32::MAX {
            return Err(Error::new("sim pinned words", "a note", "none"));
        }
        Ok(Some(found))
    }

    fn write_pinned(&self, pinned: &SimBuffer, word: usize, bytes: &[u8]) -> Result<()> {
        self.write(&self.part(pinned, 4 * word..4 * word + bytes.len())?, bytes)
    }

    fn event(&self) -> Result<()> {
        Ok(())
    }

    fn record_event(&self, (): &()) -> Result<()> {
        Ok(())
    }

    fn wait_event(&self, (): &()) -> Result<()> {
        Ok(())
    }

    fn part(&self, of: &SimBuffer, range: Range<usize>) -> Result<SimBuffer> {
        let first = of.first(range.end)?;
        let held = Arc::clone(&of.held);
        Ok(SimBuffer { held, range: first.start + range.start..first.end })
    }

    fn write(&self, to: &SimBuffer, bytes: &[u8]) -> Result<()> {
        let range = to.first(bytes.len())?;
        to.lock()[range].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, from: &SimBuffer, to: &mut [u8]) -> Result<()> {
        let range = from.first(to.len())?;
        to.copy_from_slice(&from.lock()[range]);
        Ok(())
    }

    fn copy(&self, from: &SimBuffer, to: &SimBuffer) -> Result<()> {
        self.write(to, &from.to_vec())
    }

    fn lost(&self) -> bool {
        self.broken.load(Ordering::SeqCst)
    }

    fn has_peer(&self, _: &Sim) -> bool {
        true
    }

    fn peer_copy(&self, from: &Sim, source: &SimBuffer, to: &SimBuffer) -> Result<()> {
        from.copy(source, to)
    }

    fn load(&self, kernel: &Arc<Kernel>) -> Result<SimPipeline> {
        let code = match self.engine {
            KernelRunner::Interpreter => Code::Machine(machine(kernel)?),
            KernelRunner::Cuda => {
                let all = std::slice::from_ref(&**kernel);
                let text = emit::text(all, Dialect::Cuda)
                    .map_err(|fault| Error::new(&kernel.name, "", fault))?;
                Code::Text(compiled(&text, all, Dialect::Cuda, &kernel.name)?)
            }
        };
        Ok(SimPipeline { kernel: Arc::clone(kernel), code })
    }

    fn bind(
        &self,
        pipeline: &SimPipeline,
        numbers: &Numbers,
        buffers: &[SimBuffer],
    ) -> Result<SimLaunch> {
        apart(&pipeline.kernel, buffers)?;
        launches::note(&pipeline.kernel, numbers)?;
        let (pipeline, numbers) = (pipeline.clone(), numbers.clone());
        Ok(SimLaunch(Work::Kernel(Bound { pipeline, numbers, buffers: buffers.to_vec() })))
    }

    fn product(
        &self,
        shape: &ProductShape,
        x: &SimBuffer,
        w: &SimBuffer,
        add: Option<&SimBuffer>,
        y: &SimBuffer,
    ) -> Result<SimLaunch> {
        let ProductShape { rows, out, width, operand, result, adds, .. } = *shape;
        let size = |a: u32, b: u32, scalar: Scalar| a as usize * b as usize * scalar.bytes();
        x.first(size(rows, width, operand))?;
        w.first(size(out, width, operand))?;
        y.first(size(rows, out, result))?;
        add.map(|add| add.first(size(rows, out, result))).transpose()?;
        if adds != add.is_some() {
            return Err(Error::new("sim product", "what its shape says", "others"));
        }
        launches::note_product(shape)?;
        let (x, w, add, y) = (x.clone(), w.clone(), add.cloned(), y.clone());
        Ok(SimLaunch(Work::Product(Product { shape: *shape, x, w, add, y })))
    }

    fn all_reduce(&self, x: &SimBuffer, y: &SimBuffer, count: usize) -> Result<SimLaunch> {
        let alone = || Error::new("all_reduce", "a rank of several", "a device alone");
        let (group, rank) = self.rank.clone().ok_or_else(alone)?;
        let part = |buffer| self.part(buffer, 0..4 * count);
        let (combine, x, y) = (Combine::Sum, part(x)?, part(y)?);
        Ok(SimLaunch(Work::Collective(Collective { group, rank, combine, x, y })))
    }

    fn all_gather(&self, x: &SimBuffer, y: &SimBuffer, counts: &[usize]) -> Result<SimLaunch> {
        let alone = || Error::new("all_gather", "a rank of several", "a device alone");
        let (group, rank) = self.rank.clone().ok_or_else(alone)?;
        let own = counts.get(rank).copied().ok_or_else(alone)?;
        let (x, y) =
            (self.part(x, 0..4 * own)?, self.part(y, 0..4 * counts.iter().sum::<usize>())?);
        let combine = Combine::Gather;
        Ok(SimLaunch(Work::Collective(Collective { group, rank, combine, x, y })))
    }

    fn submit(&self, launches: &[SimLaunch]) -> Result<()> {
        launches.iter().try_for_each(|launch| {
            counted()?;
            self.lasts()?;
            match &launch.0 {
                Work::Kernel(bound) => bound.run()?,
                Work::Product(product) => product.run(),
                Work::Collective(collective) => collective.run()?,
            }
            Ok(())
        })
    }

    fn time(&self, launches: &[SimLaunch]) -> Result<Option<Vec<f64>>> {
        let one = |launch| {
            let start = Instant::now();
            self.submit(std::slice::from_ref(launch))?;
            Ok(start.elapsed().as_secs_f64())
        };
        launches.iter().map(one).collect::<Result<_>>().map(Some)
    }

    fn record(&self, launches: &[SimLaunch]) -> Result<Vec<SimLaunch>> {
        Ok(launches.to_vec())
    }

    fn replay(&self, recording: &mut Vec<SimLaunch>) -> Result<()> {
        self.submit(recording)
    }

    fn usage(&self) -> Option<Usage> {
        Some(self.meter.usage(self.memory))
    }

    fn free(&self) -> Result<Option<usize>> {
        Ok(Some(self.memory.saturating_sub(self.meter.usage(self.memory).active)))
    }

    fn read_rate(&self) -> f64 {
        let bytes = vec![1_u8; 64 << 20];
        let start = Instant::now();
        let sum: u64 = bytes.chunks_exact(8).map(|b| u64::from(b[0])).sum();
        std::hint::black_box(sum);
        bytes.len() as f64 / start.elapsed().as_secs_f64()
    }
}

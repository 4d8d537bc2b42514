//! Proof on a machine without a GPU: emitted text is compiled for the CPU and executed.
//!
//! A C++ compiler turns Metal or CUDA text into a program through the headers in `tests/shim`,
//! which give each built-in function its meaning. The threads of a threadgroup run as fibres under
//! five schedules; threadgroup memory starts as NaN, buffers end at pages that cannot be touched,
//! inputs cannot be written. So the text is wrong here if it is missing a barrier, synchronises
//! threads that have gone different ways, leaves an array, or computes something else than the
//! reference. What this cannot show: what a vendor's compiler makes of the text, coherence across
//! threadgroups, speed.
//!
//! [`check_all`] is what tests call; [`CompiledText`] runs single launches; [`address_spaces`] and
//! [`strict_types`] check what the shim is generous with.

mod batch;
mod child;
mod compile;
mod nvcc;
mod source;
mod spaces;
mod strict;

use std::fmt;
use std::sync::Mutex;

use crate::case::Buffer;
use crate::emit::{self, Dialect};
use crate::ir::{Access, Kernel, ParamKind};
use crate::launch::Numbers;

pub use batch::{Counts, check, check_all};
pub use nvcc::{Nvcc, Resources};
pub use spaces::address_spaces;
pub use strict::strict_types;

/// Why something is not proved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unproved {
    /// A tool is not on this machine. No failure, but whoever sees it prints it: nothing is skipped
    /// in silence.
    Skip(String),
    /// A finding: the text does not compile, or does not do what it should.
    Wrong(String),
}

impl fmt::Display for Unproved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unproved::Skip(why) => write!(f, "skipped: {why}"),
            Unproved::Wrong(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Unproved {}

/// The order in which threads and threadgroups run. A result must not depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ThreadOrder {
    /// Threads in order, simdgroups in turn. Asynchronous copies are made at once.
    Forward,
    /// The reverse. Arrays begin, rather than end, at a guard page; copies are made when they are
    /// waited for.
    Backward,
    /// Threads, simdgroups and threadgroups in a seeded random order; late copies.
    Shuffled,
    /// The first simdgroup runs until it has to wait for the others, then the second, and so on;
    /// early copies.
    FirstAhead,
    /// The last simdgroup goes first; late copies.
    LastAhead,
}

impl ThreadOrder {
    /// All five.
    pub const ALL: [ThreadOrder; 5] = [
        ThreadOrder::Forward,
        ThreadOrder::Backward,
        ThreadOrder::Shuffled,
        ThreadOrder::FirstAhead,
        ThreadOrder::LastAhead,
    ];
}

/// Compiled kernels, and the process that runs them.
pub struct CompiledText {
    executable: compile::Executable,
    entries: Vec<source::Entry>,
    constants: Vec<String>,
    dialect: Dialect,
    worker: Mutex<Option<child::Worker>>,
}

impl CompiledText {
    /// Compiles a text that holds (at least) these kernels. CUDA kernels with constants need their
    /// instances in the text.
    ///
    /// # Errors
    /// [`Unproved::Skip`] without a C++ compiler; [`Unproved::Wrong`] if the text does not compile
    /// or lacks a kernel.
    pub fn compile(
        text: &str,
        kernels: &[Kernel],
        dialect: Dialect,
    ) -> Result<CompiledText, Unproved> {
        let source = source::prepare(text, dialect).map_err(Unproved::Wrong)?;
        for kernel in kernels {
            let template = dialect == Dialect::Cuda && !kernel.constants.is_empty();
            if !template && !source.entries.iter().any(|e| e.name == kernel.name) {
                return Err(Unproved::Wrong(format!("{}: not in the text", kernel.name)));
            }
        }
        let executable = compile::compile(&source.text)?;
        let source::Source { entries, constants, .. } = source;
        Ok(CompiledText { executable, entries, constants, dialect, worker: Mutex::new(None) })
    }

    /// Runs one launch. `buffers` are the kernel's in binding order; those it writes are replaced
    /// by what they hold then.
    ///
    /// # Errors
    /// One line: the contract that the launch breaks, or what the run found wrong.
    pub fn run(
        &self,
        kernel: &Kernel,
        numbers: &Numbers,
        buffers: &mut [Buffer],
        schedule: ThreadOrder,
    ) -> Result<(), String> {
        let fail = |what: String| format!("{}: {schedule:?}: {what}", kernel.name);
        let (request, written) = self.request(kernel, numbers, buffers, schedule)?;
        let mut worker = self.worker.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let running = match worker.take() {
            Some(running) => running,
            None => child::Worker::start(&self.executable.path).map_err(fail)?,
        };
        let running = worker.insert(running);
        let lengths: Vec<usize> = written.iter().map(|i| buffers[*i].bytes.len()).collect();
        match running.launch(&request, &lengths) {
            Ok(child::Answer::Done(found)) => {
                for (i, bytes) in written.into_iter().zip(found) {
                    buffers[i].bytes = bytes;
                }
                Ok(())
            }
            Ok(child::Answer::Wrong(what)) => Err(fail(what)),
            // The next launch starts another process.
            Ok(child::Answer::Died(what)) | Err(what) => {
                *worker = None;
                Err(fail(what))
            }
        }
    }

    /// A launch in the child's words, and which buffers come back.
    fn request(
        &self,
        kernel: &Kernel,
        numbers: &Numbers,
        buffers: &[Buffer],
        schedule: ThreadOrder,
    ) -> Result<(child::Request, Vec<usize>), String> {
        let bound: Vec<_> = buffers.iter().map(Buffer::bound).collect();
        let grid = kernel.bind(numbers, &bound)?;
        let symbol = match self.dialect {
            Dialect::Metal => kernel.name.clone(),
            Dialect::Cuda => emit::cuda_instance(kernel, numbers).map_err(|e| e.to_string())?.0,
        };
        let which = self.entries.iter().position(|e| e.name == symbol);
        let which = which.ok_or_else(|| format!("{symbol}: not in the text"))?;
        let entry = &self.entries[which];
        let mut request = child::Request::default();
        let order = ThreadOrder::ALL.iter().position(|s| *s == schedule).unwrap_or(0);
        let dynamic = match self.dialect {
            Dialect::Metal => 0,
            Dialect::Cuda => emit::cuda_dynamic_shared(kernel),
        };
        let [x, y, z] = grid;
        for word in [which as u32, order as u32, x, y, z, kernel.launch.threads, dynamic] {
            request.word(word);
        }

        let value = |name: &str| {
            let of =
                kernel.constants.iter().find(|c| emit::metal_constant(kernel, &c.name) == name);
            of.and_then(|c| numbers.get(&c.name))
        };
        request.word(entry.constants.len() as u32);
        for index in &entry.constants {
            let name = &self.constants[*index];
            let bits = value(name);
            let bits =
                bits.ok_or_else(|| format!("{symbol}: function constant `{name}` has no value"))?;
            request.word(*index as u32);
            request.word(bits);
        }

        self.check_bindings(entry, kernel)?;
        request.word(kernel.params.len() as u32);
        let (mut next, mut written) = (0, vec![]);
        for param in &kernel.params {
            match param.kind {
                ParamKind::Argument(_) => {
                    request.word(0);
                    // `bind` has found a value for every argument.
                    request.word(numbers.get(&param.name).unwrap_or(0));
                }
                ParamKind::Buffer { scalar, access } => {
                    let buffer = &buffers[next];
                    if buffer.scalar != scalar {
                        return Err(format!(
                            "{}: {}: expected {scalar}, found {}",
                            kernel.name, param.name, buffer.scalar
                        ));
                    }
                    request.word(if access == Access::In { 1 } else { 2 });
                    if access != Access::In {
                        written.push(next);
                    }
                    let Ok(length) = u32::try_from(buffer.bytes.len()) else {
                        return Err(format!("{}: {}: 4 GiB or more", kernel.name, param.name));
                    };
                    request.word(scalar.bytes() as u32);
                    request.word(length);
                    request.bytes(&buffer.bytes);
                    next += 1;
                }
            }
        }
        Ok((request, written))
    }

    /// The text's bindings must be the kernel's: a pointer where it has a buffer, in its order.
    fn check_bindings(&self, entry: &source::Entry, kernel: &Kernel) -> Result<(), String> {
        for parameter in &entry.parameters {
            let source::Parameter::Bound { name, index, pointer } = parameter else { continue };
            let kind = kernel.params.get(*index).map(|p| p.kind);
            let agrees = match kind {
                Some(ParamKind::Buffer { .. }) => *pointer,
                Some(ParamKind::Argument(_)) => !pointer,
                None => false,
            };
            if !agrees {
                return Err(format!(
                    "{}: the text binds `{name}` at {index}, where the kernel has {kind:?}",
                    entry.name
                ));
            }
        }
        Ok(())
    }
}

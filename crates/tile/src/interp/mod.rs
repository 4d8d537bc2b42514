//! The interpreter: executes a kernel over its whole grid and finds what a device would not say.
//!
//! It is the oracle for machines without a GPU. All threads of a threadgroup go through the program
//! in step, one instruction for all active lanes at a time, and threadgroups follow one another.
//! Neither may decide a result, so every access to memory is checked: bounds and alignment,
//! elements nothing has written, and accesses of several threads (or groups) that no barrier (or
//! hand-over through an atomic) orders. Barriers, simdgroup exchanges and tile operations must be
//! executed by all that they concern, arithmetic must be defined, asynchronous copies and products
//! waited for. Kernels run one after another, so `grid_wait` has nothing to do and a missing one is
//! not found.

use crate::case::{Buffer, Case};
use crate::ir::{Access, Kernel, ParamKind};
use crate::launch::Numbers;
use crate::passes::{self, Target};
use crate::types::Type;
use crate::verify::{self, Fault};

mod access;
mod allocate;
mod arith;
mod compile;
mod lanes;
mod memory;
mod ops;
mod order;
mod products;
mod registers;
mod report;
mod run;
#[cfg(test)]
mod tests;
mod tiles;

pub use products::product;

/// Lane instructions after which a launch is taken for a runaway.
const BUDGET: u64 = 1 << 36;

/// Statistics of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Threadgroups.
    pub groups: u64,
    /// Instructions, each counted once per active lane. Literals and the like cost nothing.
    pub instructions: u64,
    /// Bytes read from buffers, however often.
    pub loaded: u64,
    /// Bytes written to buffers.
    pub stored: u64,
    /// Barriers, counted once per threadgroup.
    pub barriers: u64,
}

/// A kernel compiled for the interpreter: made once, run often.
#[derive(Debug)]
pub struct CompiledKernel {
    kernel: Kernel,
    program: ops::Program,
    budget: u64,
}

impl CompiledKernel {
    /// Verifies and compiles a kernel.
    ///
    /// # Errors
    /// The verifier's findings, or that it needs more registers or shared memory than any device
    /// has.
    pub fn new(kernel: &Kernel) -> Result<Self, Fault> {
        verify::verify(kernel)?;
        CompiledKernel::compiled(kernel)
    }

    /// Compiles a kernel that may break the verifier's rules: what that leads to is found when it
    /// is run.
    fn compiled(kernel: &Kernel) -> Result<Self, Fault> {
        // The verifier bounds threads and shared memory; an array of a million registers it lets
        // pass.
        let words = kernel.registers.iter().map(|array| {
            let words = match array.ty {
                Type::Scalar(_) => 1,
                Type::Vector(_, lanes) => u64::from(lanes),
                Type::Tile(_) => 8,
            };
            words * u64::from(array.len)
        });
        let words: u64 = words.sum();
        if words > 16_384 {
            let message = format!("at most 16384 words of registers per thread, found {words}");
            return Err(report::fault(kernel, message));
        }
        let program = compile::compile(kernel)?;
        Ok(CompiledKernel { kernel: kernel.clone(), program, budget: BUDGET })
    }

    /// With another number of lane instructions after which a launch is taken for a runaway.
    pub fn budget(self, instructions: u64) -> Self {
        CompiledKernel { budget: instructions, ..self }
    }

    /// Launches it on `buffers`, the buffer parameters in binding order.
    ///
    /// # Errors
    /// A breach of the launch contract, or the first fault, with its thread and
    /// line. What was written until then stays written.
    pub fn run(&self, numbers: &Numbers, buffers: &mut [Buffer]) -> Result<Stats, Fault> {
        let kernel = &self.kernel;
        let fail = |message: String| report::fault(kernel, message);
        let bounds: Vec<_> = buffers.iter().map(Buffer::bound).collect();
        let grid = kernel.bind(numbers, &bounds).map_err(|message| {
            let own = format!("{}: ", kernel.name);
            fail(message.strip_prefix(&own).unwrap_or(&message).to_owned())
        })?;
        let mut given = buffers.iter_mut();
        let mut bound = vec![];
        for (param, atomic) in kernel.params.iter().zip(&self.program.atomic_buffers) {
            let ParamKind::Buffer { scalar, access } = param.kind else {
                bound.push(memory::Buffer::none());
                continue;
            };
            let Some(buffer) = given.next() else {
                return Err(fail(format!("no buffer for {}", param.name)));
            };
            if buffer.scalar != scalar || !buffer.bytes.len().is_multiple_of(scalar.bytes()) {
                return Err(fail(format!(
                    "{} holds {scalar}, but {} bytes of {} are bound",
                    param.name,
                    buffer.bytes.len(),
                    buffer.scalar
                )));
            }
            bound.push(memory::Buffer::new(buffer, access, *atomic));
        }
        let bits = |fixed| {
            let (name, scalar) = match fixed {
                ops::Fixed::Constant(i) => {
                    let constant = &kernel.constants[i as usize];
                    (&constant.name, constant.scalar)
                }
                ops::Fixed::Argument(i) => {
                    let param = &kernel.params[i as usize];
                    (&param.name, crate::types::Scalar::U32)
                }
                _ => return 0,
            };
            // `bind` has found them all.
            let bits = numbers.get(name).unwrap_or(0);
            if scalar == crate::types::Scalar::Bool { u32::from(bits != 0) } else { bits }
        };
        run::State::new(kernel, &self.program, grid, bound, self.budget).launch(&bits)
    }
}

/// Launches a kernel on `buffers`, its buffer parameters in binding order.
///
/// # Errors
/// See [`CompiledKernel::new`] and [`CompiledKernel::run`].
pub fn run(kernel: &Kernel, numbers: &Numbers, buffers: &mut [Buffer]) -> Result<Stats, Fault> {
    CompiledKernel::new(kernel)?.run(numbers, buffers)
}

/// Runs a case as it is written, then specialised and lowered for every target; the largest
/// relative error of all.
///
/// # Errors
/// One line: the kernel, the case, which of these runs, and the fault or the first number that is
/// wrong.
pub fn check(case: &Case) -> Result<f64, String> {
    let mut done = vec![case.kernel.clone()];
    let mut worst = launch(case, &case.kernel, "as written")?;
    let special = passes::specialise(&case.kernel, &case.numbers);
    for (target, name) in [
        (Target::Interpreter, "lowered for the interpreter"),
        (Target::Metal, "lowered for Metal"),
        (Target::Cuda, "lowered for CUDA"),
    ] {
        // What a target lacks is made for others.
        if passes::fits(&special, target).is_err() {
            continue;
        }
        let lowered = passes::lower(&special, target)
            .map_err(|fault| format!("{}, {name}: {fault}", case.label))?;
        // A kernel without tiles or copies is the same for several.
        if !done.contains(&lowered) {
            worst = worst.max(launch(case, &lowered, name)?);
            done.push(lowered);
        }
    }
    Ok(worst)
}

fn launch(case: &Case, kernel: &Kernel, what: &str) -> Result<f64, String> {
    let mut buffers = case.buffers.clone();
    run(kernel, &case.numbers, &mut buffers)
        .map_err(|fault| format!("{}, {what}: {fault}", case.label))?;
    let bound = kernel.params.iter().filter_map(|param| match param.kind {
        ParamKind::Buffer { access, .. } => Some((&param.name, access)),
        ParamKind::Argument(_) => None,
    });
    for ((name, access), (before, after)) in bound.zip(case.buffers.iter().zip(&buffers)) {
        if access == Access::In && before != after {
            return Err(format!("{} {}, {what}: input {name} changed", kernel.name, case.label));
        }
    }
    let found = case.check(&buffers);
    found.map_err(|why| format!("{} {}, {what}: {why}", kernel.name, case.label))
}

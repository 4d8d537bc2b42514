//! NVIDIA GPUs through the CUDA driver. Kernels are compiled by NVRTC at first use; large matrix
//! products go to cuBLASLt.
//!
//! [`Gpu`] is a context with one stream, on which all work runs in order. [`Gpu::load`] makes a
//! [`CudaPipeline`] from a lowered kernel. Bound to buffers and constants it is a [`CudaLaunch`], whose
//! parameters and grid are fixed: repeating it is one driver call. A [`Graph`] repeats a list of
//! launches in one submission. [`roof`] measures the GPU's peak rates.
//!
//! Each [`Dispatch`](crate::Dispatch) mode keeps more between steps: `eager` kernels and library
//! plans; `arguments` their launches, too; `graph` the graphs of steps of few rows, and launches of
//! the others. Launches overlap in all three: one that [waits by itself](CudaPipeline::waits) is
//! scheduled while the one before ends. With `arguments` a step's words are copied from pinned
//! memory on the same stream, so that they are ordered between the kernels of successive steps; an
//! [`Event`] after the copy says when the pinned bytes may change.

mod backend;
mod compile;
mod graph;
mod library;
mod matmul;
mod memory;
mod nccl;
mod peer;
mod peer_sum;
mod pipeline;
pub mod roof;
mod stage;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use formats::{Error, Result};
use ops::tuned::{Card, CardNumbers};

use crate::cache::Key;
use crate::gpu::meter::Meter;
use crate::survey::{Gpus, RuntimeLibrary};

pub use backend::Cuda;
pub use compile::Compiler;
pub use graph::{Event, Graph, GraphWork, Samples};
pub use library::present;
pub use matmul::{BoundProduct, CublasLt, Matmul};
pub use memory::CudaBuffer;
pub use nccl::{Collective, Sums};
pub use pipeline::{CudaLaunch, CudaPipeline};

/// A result of the driver.
type Outcome<T> = std::result::Result<T, DriverError>;

/// Properties of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Properties {
    /// Its name: `NVIDIA H200`.
    pub name: String,
    /// Compute capability, such as `(9, 0)`.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Device memory in bytes.
    pub memory: usize,
    /// Second-level cache in bytes.
    pub l2: usize,
    /// Most shared memory of a threadgroup, in bytes.
    pub shared: u32,
    /// The bytes in which reserved addresses get memory; `None` if none can be reserved.
    pub page: Option<usize>,
    /// The newest CUDA version that its driver supports: `13.0`.
    pub driver: String,
}

impl Properties {
    /// Whether it has warpgroup matrix products (`wgmma`), which only one generation has.
    pub fn has_wgmma(&self) -> bool {
        self.capability == (9, 0)
    }

    /// The numbers measured on such a GPU.
    pub fn tuned(&self) -> &'static CardNumbers {
        let (major, minor) = self.capability;
        CardNumbers::of(Card::Nvidia(major, minor))
    }
}

impl std::fmt::Display for Properties {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (major, minor) = self.capability;
        write!(
            f,
            "{}, compute capability {major}.{minor}, {} multiprocessors, {} GiB, {} MiB L2, CUDA {}",
            self.name,
            self.multiprocessors,
            self.memory >> 30,
            self.l2 >> 20,
            self.driver
        )
    }
}

/// A GPU: a context of this process on it. Clones refer to the same context.
#[derive(Clone)]
pub struct Gpu(Arc<Context>);

/// State shared by all objects on a GPU; lives as long as the last of them.
struct Context {
    device: sys::CUdevice,
    handle: sys::CUcontext,
    /// Whether it is the device's primary context, which other libraries share.
    primary: bool,
    stream: sys::CUstream,
    facts: Properties,
    compiler: Compiler,
    modules: Mutex<HashMap<Key, pipeline::Module>>,
    lost: AtomicBool,
    meter: Arc<Meter>,
}

// SAFETY: the driver's functions may be called from any thread on any handle; each call here first
// makes the context current on its thread (`Context::enter`). Mutable state is behind a mutex or
// atomic.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Gpu {
    /// Opens a GPU by its number, from 0.
    ///
    /// # Errors
    /// No driver, no GPU with that number, or one older than Ampere.
    pub fn open(ordinal: u32) -> Result<Gpu> {
        Gpu::open_in(ordinal, false)
    }

    /// As [`open`](Gpu::open), in the primary context, which NVIDIA's libraries share.
    ///
    /// # Errors
    /// As [`open`](Gpu::open).
    pub fn open_primary(ordinal: u32) -> Result<Gpu> {
        Gpu::open_in(ordinal, true)
    }

    fn open_in(ordinal: u32, primary: bool) -> Result<Gpu> {
        library::driver()?;
        let count = result::device::get_count().map_err(|e| fault("cuda", e))?;
        let index = i32::try_from(ordinal).ok().filter(|i| *i < count).ok_or_else(|| {
            Error::new(format!("cuda:{ordinal}"), "a GPU of that number", format!("{count} GPUs"))
        })?;
        let place = format!("cuda:{ordinal}");
        let wrong = |e| fault(&place, e);
        let device = result::device::get(index).map_err(wrong)?;
        let facts = facts(device).map_err(wrong)?;
        let compiler = Compiler::new(facts.capability)?;
        let mut handle = std::ptr::null_mut();
        if primary {
            // SAFETY: the device exists; the context is made current before anything is made in it.
            handle = unsafe { result::primary_ctx::retain(device) }.map_err(wrong)?;
            // SAFETY: as above.
            unsafe { result::ctx::set_current(handle) }.map_err(wrong)?;
        } else {
            // SAFETY: no parameters is allowed; the device exists; this makes the context current
            // too.
            unsafe { sys::cuCtxCreate_v4(&mut handle, std::ptr::null_mut(), 0, device) }
                .result()
                .map_err(wrong)?;
        }
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
        let stream = stream.map_err(|e| {
            // SAFETY: nothing is in the context yet.
            unsafe { leave(device, handle, primary) };
            fault(&place, e)
        })?;
        let (modules, lost, meter) = Default::default();
        Ok(Gpu(Arc::new(Context {
            device,
            handle,
            primary,
            stream,
            facts,
            compiler,
            modules,
            lost,
            meter,
        })))
    }

    /// Its properties.
    pub fn facts(&self) -> &Properties {
        &self.0.facts
    }

    /// Its compiler, which can compile sources ahead.
    pub fn compiler(&self) -> &Compiler {
        &self.0.compiler
    }

    /// Waits until everything enqueued is done.
    ///
    /// # Errors
    /// A failure of a kernel since the last wait; the GPU is then usually [`lost`](Gpu::lost).
    pub fn synchronize(&self) -> Result<()> {
        self.0.synchronize()
    }

    /// Whether everything enqueued is done.
    ///
    /// # Errors
    /// As [`synchronize`](Gpu::synchronize).
    pub fn idle(&self) -> Result<bool> {
        self.0.enter()?;
        // SAFETY: the stream lives as long as the context.
        match unsafe { sys::cuStreamQuery(self.0.stream) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            other => self.0.check("cuda", other.result()).map(|()| true),
        }
    }

    /// Whether a kernel has broken the context, for example by an illegal address: every later call
    /// on this `Gpu` fails. A new one can be opened once all objects of this one are dropped.
    pub fn lost(&self) -> bool {
        self.0.lost.load(Ordering::Relaxed)
    }
}

impl Context {
    /// Makes the context current on this thread.
    fn enter(&self) -> Result<()> {
        // SAFETY: the context lives as long as `self`.
        self.check("cuda", unsafe { result::ctx::set_current(self.handle) })
    }

    fn synchronize(&self) -> Result<()> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`.
        self.check("cuda", unsafe { result::stream::synchronize(self.stream) })
    }

    /// Converts a driver error, and records whether it breaks the context.
    fn check<T>(&self, place: &str, outcome: Outcome<T>) -> Result<T> {
        outcome.map_err(|e| {
            if fatal(e.0) {
                self.lost.store(true, Ordering::Relaxed);
            }
            fault(place, e)
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Errors here come from earlier work and were reported to the waiter.
        drop(self.synchronize());
        // SAFETY: buffers, pipelines and graphs each hold an `Arc` of this context, so none is
        // left; the stream has drained. Destroying the context unloads its modules.
        unsafe {
            let _ = result::stream::destroy(self.stream);
            leave(self.device, self.handle, self.primary);
        }
    }
}

/// Destroys a context, or releases the primary one.
///
/// # Safety
/// It was made by [`Gpu::open`] or [`Gpu::open_primary`], and no object of this process is left in
/// it.
unsafe fn leave(device: sys::CUdevice, handle: sys::CUcontext, primary: bool) {
    // SAFETY: the caller's promise.
    unsafe {
        let _ = match primary {
            true => result::primary_ctx::release(device),
            false => sys::cuCtxDestroy_v2(handle).result(),
        };
    }
}

/// Errors after which every call in the context fails.
fn fatal(code: sys::CUresult) -> bool {
    use sys::CUresult as Code;
    matches!(
        code,
        Code::CUDA_ERROR_ILLEGAL_ADDRESS
            | Code::CUDA_ERROR_LAUNCH_TIMEOUT
            | Code::CUDA_ERROR_ASSERT
            | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
            | Code::CUDA_ERROR_ILLEGAL_INSTRUCTION
            | Code::CUDA_ERROR_MISALIGNED_ADDRESS
            | Code::CUDA_ERROR_INVALID_ADDRESS_SPACE
            | Code::CUDA_ERROR_INVALID_PC
            | Code::CUDA_ERROR_LAUNCH_FAILED
            | Code::CUDA_ERROR_CONTEXT_IS_DESTROYED
            | Code::CUDA_ERROR_ECC_UNCORRECTABLE
    )
}

/// A driver error with the driver's message.
fn fault(place: &str, e: DriverError) -> Error {
    let said = e.error_string().map(|s| s.to_string_lossy().into_owned());
    Error::new(place, "", said.unwrap_or_else(|_| format!("error {}", e.0 as u32)))
}

fn facts(device: sys::CUdevice) -> Outcome<Properties> {
    use sys::CUdevice_attribute as Attribute;
    // SAFETY: the device exists.
    let ask = |attribute| unsafe { result::device::get_attribute(device, attribute) };
    let number = |attribute| ask(attribute).map(|n| u32::try_from(n).unwrap_or(0));
    let mut driver = 0;
    // SAFETY: writes one number.
    unsafe { sys::cuDriverGetVersion(&mut driver) }.result()?;
    Ok(Properties {
        name: result::device::get_name(device)?,
        capability: (
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        // SAFETY: the device exists.
        memory: unsafe { result::device::total_mem(device)? },
        l2: number(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
        shared: number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        page: memory::page(device),
        driver: library::shown(driver),
    })
}

/// Number of GPUs that this process may use.
///
/// # Errors
/// No driver.
pub(crate) fn count() -> Result<u32> {
    library::driver()?;
    let count = result::device::get_count().map_err(|e| fault("cuda", e))?;
    Ok(u32::try_from(count).unwrap_or(0))
}

/// Surveys NVIDIA's driver and libraries without creating a context: it costs only the driver's
/// start.
pub(crate) fn survey() -> Gpus {
    let found = library::driver().and_then(|()| {
        let count = result::device::get_count().map_err(|e| fault("cuda", e))?;
        let describe = |index| result::device::get(index).and_then(facts).map(|f| f.to_string());
        let all: Outcome<Vec<String>> = (0..count).map(describe).collect();
        match all.map_err(|e| fault("cuda", e))? {
            none if none.is_empty() => Err(Error::new("cuda", "an NVIDIA GPU", "none")),
            some => Ok(some),
        }
    });
    let library = |name, purpose, found| RuntimeLibrary { name, purpose, found };
    let libraries = match found {
        Ok(_) => vec![
            library("NVRTC", "compiles kernels", library::nvrtc()),
            library("cuBLASLt", "multiplies the matrices of prompts", library::cublaslt()),
            library("NCCL", "adds up over GPUs that share each layer", nccl::present()),
        ],
        Err(_) => Vec::new(),
    };
    Gpus { kind: "cuda", found, libraries }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_a_gpu_says_so_in_one_line() {
        match Gpu::open(1 << 20) {
            Err(why) => assert!(why.to_string().starts_with("cuda"), "{why}"),
            Ok(_) => panic!("no machine has a million GPUs"),
        }
    }
}

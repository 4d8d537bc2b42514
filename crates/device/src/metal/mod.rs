//! Apple GPUs through Metal: the driver of the shared lowering, and what it runs on.
//!
//! `driver` is all of it that decides anything: what is bound where, what waits for what, what is compiled and kept. It
//! knows Metal as a trait (`api`) with two implementations. `apple` is Metal itself, through its Objective-C interface;
//! `fake` runs the same texts on this CPU, and is how the driver is tested where there is no Metal.
//!
//! A step is one command buffer with one compute encoder whose dispatches may overlap; a barrier stands before each that touches
//! what an earlier one writes. A step that is repeated is an indirect command buffer, encoded once. Memory is shared
//! with the CPU, which waits for the GPU before it reads or writes.
//!
//! A step of many launches is several command buffers, whose length follows what launches take (`pace`), since the system ends
//! those that keep the display waiting. Between steps memory is kept where the GPU reaches it (`keep`).
//!
//! macOS 15 (iOS 18) is needed: the attention of every model hands results from one threadgroup to another within a launch, for
//! which the language has `coherent(device)` from version 3.2 on. Kernels without such a hand-over ask for 3.1.
//!
//! The order of such a hand-over is that of the language's memory model, not of what hardware is
//! seen to do: all threads write, a barrier, then one thread fences, counts its threadgroup in with
//! a relaxed atomic, and fences again, then a barrier, and the threads of the last threadgroup
//! read. What is handed over is `coherent(device)`; what only atomics touch is plain device memory,
//! since no cast may take the qualifier away (`tile`'s emitter and its strict check see to both).
//!
//! Pipelines that only indirect commands name are named by the encoder as well on GPUs before
//! family 9 (M3, A17), where they would not be reachable: `api::Facts::touches`.
//!
//! `--dispatch graph` is the indirect command buffer; `eager` and `arguments` encode a step's launches, which `eager` binds anew
//! each time. `arguments` has no overlap of a step with the host's writing here: copies into words wait for the GPU.

/// What needs Metal, or what stands for it.
macro_rules! driven {
    ($($item:item)*) => {
        $(#[cfg(any(feature = "sim", all(feature = "metal", target_vendor = "apple")))]
        $item)*
    };
}

driven! {
    mod api;
    mod archive;
    mod driver;
    mod failure;
    mod keep;
    #[cfg_attr(
        not(all(feature = "metal", target_vendor = "apple")),
        allow(dead_code, reason = "elsewhere no library is looked for")
    )]
    mod library;
    mod pace;
    mod plan;

    use crate::gpu::GpuDevice;
    use driver::{Driver, Options};
}

#[cfg(all(feature = "metal", target_vendor = "apple"))]
mod apple;
#[cfg(feature = "sim")]
mod fake;
#[cfg(all(test, feature = "sim"))]
mod tests;

use formats::Result;

use crate::Device;

/// The GPU of this machine.
///
/// # Errors
/// If it has none that Metal can use, or a library that `DELFT_METALLIB` names cannot be used.
#[cfg(all(feature = "metal", target_vendor = "apple"))]
pub(crate) fn open() -> Result<Box<dyn Device>> {
    let cache = crate::cache::Cache::of_user();
    let options = Options { cache, library: library::of_process(), keep: None };
    let driver = Driver::new(apple::Metal::open()?, options)?;
    Ok(Box::new(GpuDevice::new(driver)))
}

/// The GPU of this machine: there is none.
///
/// # Errors
/// Always.
#[cfg(not(all(feature = "metal", target_vendor = "apple")))]
pub(crate) fn open() -> Result<Box<dyn Device>> {
    let expected = "macOS or iOS, and a build with the feature `metal`";
    let error = formats::Error::new("metal", expected, std::env::consts::OS);
    let error = error.of(formats::ErrorKind::Unsupported);
    Err(error.hint(formats::Hint::set(formats::Setting::Place, "cpu")))
}

/// The driver without a GPU: Metal text on this CPU.
///
/// # Errors
/// None; texts are compiled when a program is loaded.
#[cfg(feature = "sim")]
pub(crate) fn simulated() -> Result<Box<dyn Device>> {
    let driver = Driver::new(fake::Fake::new(), Options::default())?;
    Ok(Box::new(GpuDevice::new(driver)))
}

//! Apple GPUs through Metal: the driver of the shared lowering, and what it runs on.
//!
//! `driver` is all of it that decides anything: what is bound where, what waits for what, what is
//! compiled and kept. It knows Metal as a trait (`api`) with two implementations. `apple` is Metal
//! itself, through its Objective-C interface; `fake` runs the same texts on this CPU, and is how
//! the driver is tested where there is no Metal.
//!
//! A step is a command buffer with one compute encoder whose dispatches may overlap; a barrier
//! stands before each that touches what an earlier one writes. One of many launches is several such
//! command buffers, whose length follows what launches take (`pace`), since the system ends those
//! that keep the display waiting. A step that is repeated is an indirect command buffer, encoded
//! once. Memory is shared with the CPU, which waits for the GPU before it reads or writes; between
//! steps it is kept where the GPU reaches it (`keep`).
//!
//! macOS 15 (iOS 18) is needed: the attention of every model hands results from one threadgroup to
//! another within a launch, for which the language has `coherent(device)` from version 3.2 on.
//! Kernels without such a hand-over ask for 3.1.
//!
//! Such a hand-over is ordered as the language's memory model asks for, not as hardware is seen to
//! behave: all threads write, a barrier, then one thread fences, counts its threadgroup in with
//! a relaxed atomic, and fences again, then a barrier, and the threads of the last threadgroup
//! read. What is handed over is `coherent(device)`; what only atomics touch is plain device memory,
//! since no cast may take the qualifier away (`tile`'s emitter and its strict check see to both).
//!
//! Pipelines that only indirect commands name are named by the encoder as well on GPUs before
//! family 9 (M3, A17), where they would not be reachable: `api::Facts::touches`.
//!
//! # Schedules
//!
//! Nothing here was measured: schedules follow from counts of instructions, and from what is public
//! of these GPUs. A core has 128 lanes that do one 32-bit float operation or addition of whole
//! numbers a cycle; a multiplication of whole numbers takes 2 to 2.3, with an addition 3 to 3.7,
//! and there is no instruction for four products of bytes (`philipturner/metal-benchmarks`, Apple
//! 7). Latency is hidden by other threads, 768 to 3,072 of them, as registers and 60 KiB of
//! threadgroup memory allow.
//!
//! | one row times a matrix of 4 bits in groups | for each weight |
//! |---|---|
//! | bytes (`dot4` emulated), as elsewhere | 2 sign extensions, 1 multiply-add of whole numbers, 0.5 to unpack: 5.5 to 6.2 cycles, beside rounding activations to bytes |
//! | floats (here): the code is masked into the mantissa of a power of two | AND, OR, subtract, multiply-add, 0.1 shift; 0.5 for activations and their sum, which four rows share, 0.4 for scales: 5 cycles |
//! | MLX `qmv`, llama.cpp `mul_mv_q4_K`: activations divided by 1, 16, 256, 4096 instead of codes shifted | AND, conversion to float, multiply-add, 0.4 for activations, 0.1 for scales: 3.5 instructions; no public table has the conversion's rate |
//!
//! | | rows of a matrix in a simdgroup | simdgroups | groups |
//! |---|---|---|---|
//! | elsewhere | 1 to 4 | 8 to 16 | 1 or 2 for each processor, which stay |
//! | here ([`ops::tuned::SmallGroups`]) | 4; 2 of each matrix of a pair | 2 | as many as have work |
//! | MLX | 4 | 2 | as many as have work |
//! | llama.cpp | 2 to 4 | 2 | as many as have work |
//!
//! Such a group reads activations where they lie, since four or eight rows of weights are as much
//! as they are. A norm in front would cost a tenth of such a kernel (squares of whole rows, and a
//! product with the norm's weights in each simdgroup), so it is a launch of its own. Elsewhere
//! eight to sixteen simdgroups share both.
//!
//! | product of many rows, operands of 16 bits | threadgroup memory | loads of 8 x 8 for each product of those |
//! |---|---|---|
//! | 64 x 64 x 32, two steps, as before | 25 KiB | 0.5 |
//! | 16 x 64 x 32, 32 x 64 x 32, 64 x 64 x 32, one step (here, by rows) | 11.5, 12.5, 15 KiB, 6 to 10 of them operands | 1, 0.75, 0.5 |
//! | llama.cpp `mul_mm` 64 x 32 x 32, one step | 6 to 8 KiB | 0.75 |
//! | MLX `qmm` 32 x 32 x 32, steel 64 x 64 x 16, one step | 5 to 10 KiB | 1, 0.5 |
//!
//! | attention of a prompt, heads of 64, 128 | queries in a group, in a simdgroup | threadgroup memory | loads of 8 x 8 for each product of those |
//! |---|---|---|---|
//! | here ([`ops::tuned::ForAttention::small`]): queries stay in registers | 64, 16 | 9, 17 KiB | 0.5 |
//! | MLX steel: queries are loaded again for each block of keys | 32, 8 | 9.5, 14.5 KiB | 1, and queries' |
//!
//! A token's attention has no products of matrices here, as in MLX's `sdpa_vector` and llama.cpp's
//! `flash_attn_ext_vec`: a multiply-add for each number of a key and of a value and query head, and
//! the query heads of a group share what is read.
//!
//! The matrix units of the M5 and A19 are not used: Metal 4's `matmul2d` keeps its operands and
//! sums in cooperative tensors whose layout among threads only its own functions know, so that
//! norms, scales and softmaxes around a product would be written against headers that no compiler
//! here has. Kernels that could not be compiled here would be guesses. Prompts take there what an
//! M4 takes; MLX and llama.cpp read prompts up to four times as fast with those units, and decode
//! no faster. The place for it is an instruction beside `wgmma` in `tile`, a schedule that a test
//! compile at [`open`] allows.
//!
//! The next step of a product waits in registers meanwhile. Barriers are of threadgroup memory
//! alone where no thread reads from device memory what the kernel wrote (`tile::emit`), as MLX's
//! and llama.cpp's are.
//!
//! Operands of 16 bits stay bf16 where matrices are not all f16, on GPUs before family 9, too,
//! which emulate it: that costs rounding, about five operations for each element that is put into
//! threadgroup memory and none in products, and f16 would turn activations beyond 65,504 into
//! infinities.
//!
//! # What was weighed
//!
//! - Contraction is off in all texts, and functions are precise whether a text is compiled ahead or
//!   when it is loaded, as in the interpreter. `simd_sum` adds in an order of its own, and these
//!   GPUs are said to flush subnormal numbers, so results have other bits than elsewhere.
//! - Each kernel is a library of its own, up to eight of which are compiled at once: joined ones
//!   would parse the prelude once, and be compiled again whenever one of their texts changes. An
//!   archive of pipelines, or a metallib beside the program, spares all starts but the first.
//! - Weights are copied, since kernels read them packed; the file's pages are given back meanwhile
//!   (`gpu::weights`), so that loading takes no second copy. What is free follows from the system's
//!   own count of the process's memory.
//! - Indirect commands bind parts that begin below 4 GiB, since an offset beyond is known to lose
//!   its upper bits: a recording of others is refused, and `--dispatch arguments` runs them.
//! - Work that failed may not have updated its fence, for which the next would wait for ever: it
//!   gets a new one. Failures of a layer below Metal are known by their words (`failure`).
//! - The number of cores is estimated from the chip's name. The system knows it outside of Metal
//!   alone, and only how attention's keys are split follows from it.
//! - Virtual machines have a GPU below family 7, which is refused in one line; all texts are
//!   compiled there all the same (`.github/workflows/ci.yml`).
//!
//! `--dispatch graph` is the indirect command buffer; `eager` and `arguments` encode a step's
//! launches, which `eager` binds anew each time. `arguments` has no overlap of a step with the
//! host's writing here: copies into words wait for the GPU.

/// Items that need Metal or its simulator.
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

/// Opens the GPU of this machine.
///
/// # Errors
/// No GPU that Metal can use, or a library named by `DELFT_METALLIB` that cannot be used.
#[cfg(all(feature = "metal", target_vendor = "apple"))]
pub(crate) fn open() -> Result<Box<dyn Device>> {
    let cache = crate::cache::Cache::of_user();
    let options = Options { cache, library: library::of_process(), keep: None };
    let driver = Driver::new(apple::Metal::open()?, options)?;
    Ok(Box::new(GpuDevice::new(driver)))
}

/// Opens the GPU of this machine; this build has no Metal.
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

/// Opens the simulated driver: Metal source on this CPU.
///
/// # Errors
/// None; sources are compiled when a Program is loaded.
#[cfg(feature = "sim")]
pub(crate) fn simulated() -> Result<Box<dyn Device>> {
    let driver = Driver::new(fake::Fake::new(), Options::default())?;
    Ok(Box::new(GpuDevice::new(driver)))
}

//! Programs in training on the CPU: products by packed matrices ([`cpu_kernels`]), everything else
//! by loops that a team of threads shares out. What a result's bits follow from is the batch and
//! the instruction set, never the number of threads.

mod attention;
mod elements;
mod executor;
mod experts;
mod gemm;
mod losses;
mod products;
mod scans;
mod states;
mod tiles;
pub(crate) mod vectorised;
mod weights;

pub use executor::{CpuExecutor, Results, check};
pub use weights::FloatWeights;

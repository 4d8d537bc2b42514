//! Gradients of Programs, as functions from Program to Program: [`pack`], then [`losses`], then [`differentiate`]. What runs them
//! slowly and obviously is [`mod@reference`]; on the CPU it is an [`Executor`](crate::cpu::Executor).

mod differentiate;
mod rewrite;

pub mod reference;

pub use differentiate::differentiate;
pub use rewrite::{Factors, adapt, losses, pack};

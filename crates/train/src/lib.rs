//! Training. A [`Model`] has parameters and gives the gradients of a loss on a [`Batch`]; what updates them, where the
//! data come from and what is written when, it does not know.

mod model;

pub use model::{Batch, Loss, Model, Parameter};

//! Training. A [`Model`] has parameters and gives the gradients of a loss on a [`Batch`]; what updates them, where the
//! data come from and what is written when, it does not know.
//!
//! [`data`] makes examples of files, [`pack`] batches of examples, [`AdamW`] updates of gradients, and [`run`] does all of it in
//! turn, so that it can be stopped and resumed.

mod adamw;
mod checkpoint;
mod curve;
pub mod data;
mod model;
pub mod pack;
pub mod run;

pub use adamw::{AdamW, Moments, Schedule};
pub use curve::Curve;
pub use data::{Data, Example, Language, Reader};
pub use model::{Batch, Loss, Model, Parameter};
pub use run::{Run, Settings};

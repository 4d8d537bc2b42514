//! Training. A [`Trainable`] has parameters and gives the gradients of a loss on a [`Batch`]; what
//! updates them, where the data come from and what is written when, it does not know.
//!
//! [`Tuned`] is a model's recorded Program, differentiated ([`gradients`]) and run on the CPU
//! ([`cpu`]) or a GPU; [`Preference`] trains one by pairs of answers. [`data`] makes examples of
//! files, [`pack`] batches of examples, [`AdamW`] updates of gradients, and [`run`] does all of it
//! in turn, so that it can be stopped and resumed. [`eval`] measures what came of it.

mod adamw;
mod checkpoint;
pub mod cpu;
mod curve;
pub mod data;
pub mod eval;
mod experts;
mod full;
pub mod function;
pub mod gradients;
mod model;
pub mod pack;
mod packing;
mod peft;
mod preference;
pub mod run;
mod runner;
mod tables;
mod tuned;

pub use adamw::{AdamW, Moments, RateSchedule};
pub use curve::{Curve, sparks};
pub use data::{Data, Example, Language, Reader};
pub use device::{DeviceSpec, Precision, Usage};
pub use model::{Batch, Loss, Parameter, Trainable};
pub use preference::{Objective, Preference};
pub use run::{Run, Settings};
pub use runner::{Hardware, usual_precision};
pub use tables::{EMBEDDINGS, HEAD};
pub use tuned::{LoraOptions, Tuned};

//! Gradients, data, updates and the loop of a run from outside, as one test program.

mod adamw;
mod data;
mod eval;
mod function;
mod gradients;
mod resume;
mod run;
mod toy;

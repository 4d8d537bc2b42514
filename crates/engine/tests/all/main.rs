//! Loaded models from outside, as one test program. `replay.rs` beside it counts allocations and is
//! a program of its own.

mod adapters;
mod alike;
mod cached;
mod canary;
mod classify;
#[path = "../common/mod.rs"]
mod common;
mod convert;
mod damage;
mod devices;
mod embed;
mod failures;
mod importance;
mod memory;
mod mlx;
mod not_finite;
mod parts;
mod quantised;
mod real_data;
mod requests;
mod saved;
mod score;
mod session;
mod transformers;

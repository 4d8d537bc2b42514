//! The formats from outside, as one test program. `damage.rs` beside it counts allocations and is a
//! program of its own.

#[path = "../build/mod.rs"]
mod build;
mod folder;
mod gguf;
mod quant;
mod quantised;
mod source;

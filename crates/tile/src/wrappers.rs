//! Typed wrappers for built kernels: one Rust or Swift function per kernel, so that a launch that
//! binds the wrong number or type of things does not compile.
//!
//! Both only gather a launch. In Rust it is a [`Call`], which the device binds, checks and submits;
//! in Swift a `Launch`, which `Launch.swift` ([`swift_runtime`]) does by the manifest.

mod rust;
mod swift;

pub use rust::rust;
pub use swift::{swift, swift_runtime};

use crate::launch::Numbers;

/// A launch that a generated wrapper describes: what to run, on what, with which numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Call<B> {
    /// The kernel's name, to look up in the manifest.
    pub kernel: &'static str,
    /// Buffers in binding order.
    pub buffers: Vec<B>,
    /// Constants, arguments and dimensions.
    pub numbers: Numbers,
}

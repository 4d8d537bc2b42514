//! The kernel language: functions that build IR, a verifier, an interpreter, passes, and emitters
//! for Metal and CUDA.
//!
//! [`dsl`] is what kernels are written with, [`ir`] what they become. This crate knows no device
//! and no model.

pub mod build;
pub mod case;
pub mod dsl;
pub mod emit;
pub mod instr;
#[cfg(feature = "rig")]
pub mod interp;
pub mod ir;
pub mod launch;
pub mod manifest;
pub mod passes;
#[cfg(feature = "rig")]
pub mod proof;
pub mod recipe;
mod table;
pub mod text;
pub mod types;
pub mod verify;
pub mod wrappers;

pub use ir::Kernel;

//! Model file formats: what the bytes of GGUF, safetensors and quantised blocks mean.
//!
//! This crate maps and parses; it knows no device and no model. Untrusted bytes are read in safe Rust with checked
//! arithmetic, and no allocation is proportional to a number that was not checked against the file's size.

mod error;
pub mod quant;

pub use error::{Error, Result};

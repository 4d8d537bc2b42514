//! Model file formats: what the bytes of GGUF, safetensors and quantised blocks mean.
//!
//! This crate maps and parses; it knows no device and no model. Untrusted bytes are read in safe
//! Rust with checked arithmetic, and no allocation is proportional to a number that was not checked
//! against the file's size.

mod aside;
mod cache_type;
mod caught;
mod dot;
mod dtype;
pub mod elementwise;
mod encoding;
mod error;
mod fault;
mod fingerprint;
mod finite;
mod folder;
mod front;
pub mod gguf;
mod importance;
pub mod json;
mod location;
mod map;
mod mistral;
mod pairing;
mod program_file;
pub mod quant;
mod quantised;
pub mod safetensors;
mod source;
mod tensors;
pub mod text;

pub use aside::{Aside, AsideFolder};
pub use cache_type::CacheType;
pub use caught::{caught, words_of};
pub use dot::dot;
pub use dtype::DType;
pub use encoding::{Encoding, Groups};
pub use error::{Error, ErrorKind, Hint, Result, Setting, shape};
pub use fingerprint::fingerprint;
pub use finite::NotFinite;
pub use folder::Folder;
pub use front::{pointer_hint, unmarked};
pub use gguf::Gguf;
pub use importance::{Importance, Inputs};
pub use json::json_of_python;
pub use location::Location;
pub use pairing::Pairing;
pub use program_file::program_digest;
pub use quantised::{Integers, Quantised, Scheme};
pub use safetensors::Safetensors;
pub use source::{Described, ElementRun, Encoded, Origin, Source};
pub use tensors::{Container, Identity, TensorInfo, TensorView, Tensors};

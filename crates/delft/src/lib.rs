//! Delft: run language models on the machine in front of you.
//!
//! ```no_run
//! use delft::{Engine, GenerateOptions, LoadOptions};
//!
//! # fn main() -> delft::Result<()> {
//! let engine = Engine::load("model.gguf", &LoadOptions::default())?;
//! let mut session = engine.session();
//! let options = GenerateOptions { max_tokens: Some(64), ..Default::default() };
//! for token in session.generate("Once upon a time", &options)? {
//!     print!("{}", token?.text);
//! }
//! # Ok(())
//! # }
//! ```

mod offered;

pub use engine::*;
pub use formats::{self, DType, Error, ErrorKind, Hint, Location, Result, Setting, Tensors};
pub use hub;
pub use offered::objection;
pub use structured;
pub use tokens;
pub use train;

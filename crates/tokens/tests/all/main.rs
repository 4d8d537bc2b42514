//! Tokenizers and templates from outside, as one test program. `memory.rs` beside it counts what
//! the process allocates.

mod damage;
mod folders;
mod hostile;
mod published;
mod templates;
mod tools;

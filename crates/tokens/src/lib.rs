//! Text and tokens: tokenizers, streaming detokenisation, chat templates.
//!
//! [`Tokenizer`] turns text into ids and back, from a Hugging Face folder or GGUF metadata;
//! [`Stream`] turns ids into text as they come; [`ChatTemplate`] turns a conversation into a
//! prompt. Vocabularies and templates are untrusted: what is wrong with them is an error, never a
//! panic.

mod decoder;
mod export;
mod faults;
mod folder;
pub mod gguf;
mod pieces;
pub mod pre;
mod sentencepiece;
pub mod spm;
mod stream;
mod tekken;
pub mod template;
mod tokenizer;
pub mod tools;

pub use export::export;
pub use gguf::GgufVocabulary;
pub use pieces::char_of;
pub use stream::Stream;
pub use template::{ChatTemplate, TemplateInput};
pub use tokenizer::{Special, Tokenizer};

//! Delft over HTTP: the interfaces of OpenAI, Anthropic and Ollama, and a web page to chat on.
//!
//! [`Server::bind`] takes an address, models that are loaded, and a [`Library`] of those that are
//! loaded when a request names them; [`Server::run`] answers until it is told to stop. Requests
//! pass the checks of `gate.rs`, are read by tables of documented fields (`fields.rs`), hold their
//! model (`catalogue.rs`), and become texts through the one module that knows the engine
//! (`generation.rs`). There is no state but the models and the sessions that clients open
//! (`sessions.rs`).

mod adapters;
mod anthropic;
mod build;
mod catalogue;
mod chat;
mod custom;
mod demand;
mod embeddings;
mod events;
mod fields;
mod gate;
mod generation;
mod infill;
mod keep;
mod library;
mod llama;
mod log;
pub mod logprobs;
mod metrics;
mod models;
mod native;
mod ollama;
mod openai;
mod page;
mod problem;
mod replicas;
mod reply;
mod router;
mod server;
mod sessions;
mod settings;
mod stream;
mod task;
mod watch;

pub use chat::messages_of;
pub use gate::{AccessRules, is_origin};
pub use generation::GenerationLimits;
pub use keep::Keep;
pub use library::{Library, Named};
pub use models::Served;
pub use server::{Adapted, Running, Server, ServerConfig};

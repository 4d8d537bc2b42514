//! Delft over HTTP: the interfaces of OpenAI, Anthropic and Ollama, and a web page to chat on.
//!
//! [`Server::bind`] takes models that are loaded and an address; [`Server::run`] answers until it is told to stop. Requests
//! pass the checks of `gate.rs`, are read by tables of documented fields (`fields.rs`), and become texts through the one module
//! that knows the engine (`generation.rs`). There is no state but the models and their sessions.

mod anthropic;
mod chat;
mod demand;
mod embeddings;
mod fields;
mod gate;
mod generation;
mod log;
mod metrics;
mod models;
mod native;
mod ollama;
mod openai;
mod page;
mod problem;
mod reply;
mod router;
mod server;
mod settings;
mod stream;

pub use gate::Access;
pub use generation::Limits;
pub use models::Served;
pub use server::{Config, Running, Server};

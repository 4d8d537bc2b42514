//! The server from outside, over sockets, as one test program.

mod adapters;
mod anthropic;
mod common;
mod embeddings;
mod ollama;
mod openai;
mod safety;
mod structured;

//! The server from outside, over sockets, as one test program.

mod adapters;
mod anthropic;
mod common;
mod custom;
mod embeddings;
mod infill;
mod library;
mod llama;
mod manage;
mod ollama;
mod openai;
mod others;
mod record;
mod replicas;
mod responses;
mod safety;
mod sessions;
mod structured;

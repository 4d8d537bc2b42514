//! The `delft` binary from outside, as one test program: linking one is faster than linking a
//! dozen.

mod adapters;
mod batch;
mod chat;
mod command_line;
mod common;
mod damaged;
mod embed;
mod flags;
mod formats;
mod grammar;
mod hub;
#[cfg(target_os = "linux")]
mod interrupt;
mod models;
#[cfg(unix)]
mod packaging;
mod prompts;
mod ranks;
mod readme;
mod refusals;
#[cfg(target_os = "linux")]
mod serve;
mod stories;
mod templates;
mod tuning;
mod why_slow;

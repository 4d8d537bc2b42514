//! The hub's cache and downloads from outside, as one test program.

#[cfg(unix)]
mod cache;
mod common;
mod pull;

//! The commands, one file each.

pub(crate) mod batch;
pub(crate) mod bench;
mod bench_load;
pub(crate) mod chat;
pub(crate) mod classify;
pub(crate) mod compare;
pub(crate) mod convert;
pub(crate) mod doctor;
pub(crate) mod embed;
pub(crate) mod eval;
pub(crate) mod fuse;
mod head;
pub(crate) mod inspect;
pub(crate) mod list;
pub(crate) mod logits;
pub(crate) mod man;
pub(crate) mod perplexity;
pub(crate) mod pull;
pub(crate) mod rm;
pub(crate) mod run;
pub(crate) mod serve;
pub(crate) mod show;
pub(crate) mod tokenize;
pub(crate) mod verify;
pub(crate) mod why_slow;

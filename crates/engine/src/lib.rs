//! Engine and Session: a loaded model on a device, and one mutable timeline of tokens on it.
//!
//! [`Engine::load`] maps the file, records the model's Program, fuses it and hands it to the
//! device. A [`Session`] owns tokens and the cache blocks that hold them; what must be computed for
//! a new prompt (prefill, decode, or nothing for a shared prefix) follows from the tokens alone.
//! [`Session::generate`] is an iterator of [`Token`]s.

mod adapters;
mod canary;
mod choose;
mod classify;
mod constraint;
pub mod convert;
mod defaults;
mod embed;
mod events;
mod follow;
mod generate;
pub mod importance;
mod load;
mod parts;
mod pool;
mod prefix;
mod prepare;
mod profile;
mod prompt;
pub mod reasoning;
mod request;
mod saved;
mod schedule;
mod score;
mod sequences;
mod session;
mod slots;
mod stop;
mod text;
mod together;
mod worker;

pub use crate::adapters::{Adapter, AdapterFile, Adapters, adapter_to_mlx, fuse, open_adapter};
pub use choose::named_place;
pub use constraint::{Constraint, ConstraintSource, TokenSet};
pub use device::{
    About, Absence, CacheType, ComputePeaks, DeviceSpec, Dispatch, Gpus, Memory, Peaks, Plan,
    Processes, Processor, Profile, RankLaunch, Roof, RuntimeLibrary, SplitMode, Survey, Timing,
    Usage, Work, folder_of_user, follow, free_memory, peak_rss_bytes, share_heaps, survey,
};
pub use embed::{EmbedOptions, EmbeddingForm, Pooling, read_embedding_form};
pub use events::{Capability, Events, Lifecycle, Stage};
pub use formats::{fingerprint, program_digest};
pub use generate::{
    CancelToken, Finish, GenerateOptions, Generation, Metrics, Progress, Token, check_logits,
};
pub use load::{Engine, Info, LoadOptions, Trace, read_template, read_tokenizer};
pub use models;
pub use ops::sample::Options as SamplingOptions;
pub use ops::softmax::log_sum_exp;
pub use prefix::Miss;
pub use prepare::Prepared;
pub use profile::{Profiler, TimedStep};
pub use prompt::Prompt;
pub use request::{Generated, Generating, Request};
pub use saved::SavedLayer;
pub use session::{LogitRows, Logits, Session};

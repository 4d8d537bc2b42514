//! Any bytes as a `config.json`: a checked configuration, or an error of one line.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nn::{Stored, Weights};

/// A checkpoint that holds a query projection and nothing else.
struct Few;

impl Weights for Few {
    fn find(&self, canonical: &str) -> Option<Stored> {
        (canonical == "blocks.0.attention.q").then(|| Stored { name: "q".into(), shape: vec![96, 48] })
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Ok(json) = serde_json::from_slice(bytes) else { return };
    match models::config_from_json(&json, "fuzz", &Few) {
        Ok(config) => {
            assert!(config.layers > 0 && config.heads % config.kv_heads == 0);
            assert!(config.rope.frequencies.iter().all(|f| f.is_finite()));
        }
        Err(error) => assert!(!error.to_string().contains('\n')),
    }
});

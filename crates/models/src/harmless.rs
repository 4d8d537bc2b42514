//! Keys of configurations that are passed over: they say nothing about what is computed.

/// Whether a key says nothing about what is computed for a prompt, whatever its value.
pub(crate) fn is_harmless(key: &str) -> bool {
    include_str!("harmless.txt").lines().any(|line| line == key)
}

/// Whether a key says something by being false: that tokens see those behind them, too.
pub(crate) fn is_causality(key: &str) -> bool {
    matches!(key, "is_causal" | "attention.causal")
}

/// Keys that change nothing while they have this value.
pub(crate) const HARMLESS_VALUES: &[(&str, u64)] = &[
    ("full_attn_mod", 1),
    ("interpolate_factor", 1),
    ("encoder_no_repeat_ngram_size", 0),
    ("ep_size", 1),
    ("moe_layer_freq", 1),
];

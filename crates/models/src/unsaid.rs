//! Values for keys that configurations leave out: those of the architecture's class in
//! Transformers 5. Versions before 5 wrote no size of a decoder below `text_config` that was its class's.

/// The keys of [`Unsaid::sizes`], in order.
const KEYS: [&str; 8] = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "sliding_window",
    "max_position_embeddings",
    "vocab_size",
];

/// Keys that are left out of configurations of decoders alone too; without others, such a file is
/// damaged.
const ANYWHERE: [&str; 2] = ["num_key_value_heads", "sliding_window"];

/// The values that an architecture's class has for keys that `config.json` leaves out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unsaid {
    /// Sizes under [`KEYS`]; 0: the class has none.
    sizes: [usize; KEYS.len()],
    /// The base of the rotation.
    pub(crate) theta: f64,
    /// The number that norms add to a mean square.
    pub(crate) eps: f64,
    /// Whether it stretches the rotation, by numbers that published configurations state.
    pub(crate) stretches: bool,
}

impl Unsaid {
    /// No sizes, a rotation to the base of 10,000, and norms that add 1e-6.
    pub(crate) const NOTHING: Unsaid = Unsaid::sizes([0; KEYS.len()]);

    /// These sizes, in the order of [`KEYS`], a rotation to the base of 10,000, and norms that add
    /// 1e-6.
    pub(crate) const fn sizes(sizes: [usize; KEYS.len()]) -> Unsaid {
        Unsaid { sizes, theta: 10_000.0, eps: 1e-6, stretches: false }
    }

    /// The same with another base of the rotation.
    pub(crate) const fn theta(self, theta: f64) -> Unsaid {
        Unsaid { theta, ..self }
    }

    /// The same with norms that add another number.
    pub(crate) const fn eps(self, eps: f64) -> Unsaid {
        Unsaid { eps, ..self }
    }

    /// The same with a rotation that is stretched.
    pub(crate) const fn stretched(self) -> Unsaid {
        Unsaid { stretches: true, ..self }
    }

    /// The size under `key`, if it may be left out; `below`: the keys are those below
    /// `text_config`.
    pub(crate) fn size(&self, key: &str, below: bool) -> Option<usize> {
        let column = KEYS.iter().position(|known| *known == key)?;
        let may_lack = below || ANYWHERE.contains(&key);
        Some(self.sizes[column]).filter(|size| may_lack && *size > 0)
    }
}

//! Values for keys that configurations leave out: those of the architecture's class in
//! Transformers 5. Versions before 5 wrote no size of a decoder below `text_config` that was its class's.

use serde_json::Value;

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
const ANYWHERE: [&str; 3] = ["intermediate_size", "num_key_value_heads", "sliding_window"];

/// Whole numbers by their keys.
pub(crate) type Numbers = &'static [(&'static str, usize)];

/// The function that gives a JSON object, which is made once.
macro_rules! said {
    ($object:tt) => {
        || {
            static SAID: std::sync::LazyLock<serde_json::Value> =
                std::sync::LazyLock::new(|| serde_json::json!($object));
            &SAID
        }
    };
}
pub(crate) use said;

/// The values that an architecture's class has for keys that `config.json` leaves out.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unsaid {
    /// Sizes under [`KEYS`]; 0: the class has none.
    sizes: [usize; KEYS.len()],
    /// Other whole numbers, and sizes that decoders alone leave out too, by their keys: two tables,
    /// of which families share one.
    numbers: [Numbers; 2],
    /// The base of the rotation.
    pub(crate) theta: f64,
    /// The number that norms add to a mean square.
    pub(crate) eps: f64,
    /// The `rope_parameters` of a class, where they are more than a base.
    pub(crate) rotation: Option<fn() -> &'static Value>,
}

impl Unsaid {
    /// No sizes, a rotation to the base of 10,000, and norms that add 1e-6.
    pub(crate) const NOTHING: Unsaid = Unsaid::sizes([0; KEYS.len()]);

    /// These sizes, in the order of [`KEYS`], a rotation to the base of 10,000, and norms that add
    /// 1e-6.
    pub(crate) const fn sizes(sizes: [usize; KEYS.len()]) -> Unsaid {
        Unsaid { sizes, numbers: [&[], &[]], theta: 10_000.0, eps: 1e-6, rotation: None }
    }

    /// The same with more whole numbers, by their keys: two times at most.
    pub(crate) const fn numbers(self, more: Numbers) -> Unsaid {
        let [first, second] = self.numbers;
        assert!(second.is_empty(), "there are two tables");
        let numbers = if first.is_empty() { [more, second] } else { [first, more] };
        Unsaid { numbers, ..self }
    }

    /// The same with another base of the rotation.
    pub(crate) const fn theta(self, theta: f64) -> Unsaid {
        Unsaid { theta, ..self }
    }

    /// The same with norms that add another number.
    pub(crate) const fn eps(self, eps: f64) -> Unsaid {
        Unsaid { eps, ..self }
    }

    /// The same with a rotation of which these `rope_parameters` say more than its base.
    pub(crate) const fn rotated(self, rotation: fn() -> &'static Value) -> Unsaid {
        Unsaid { rotation: Some(rotation), ..self }
    }

    /// The whole number under `key`, if it may be left out; `below`: the keys are those below
    /// `text_config`; `null`: the file says that it has none, as some do of other numbers than sizes.
    pub(crate) fn size(&self, key: &str, below: bool, null: bool) -> Option<usize> {
        if let Some((_, number)) =
            self.numbers.into_iter().flatten().find(|(known, _)| *known == key)
        {
            return Some(*number);
        }
        let column = KEYS.iter().position(|known| *known == key)?;
        let may_lack = !null && (below || ANYWHERE.contains(&key));
        Some(self.sizes[column]).filter(|size| may_lack && *size > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ARCHITECTURES;

    /// What the classes have, by `tests/reference/classes.py`.
    fn classes() -> Value {
        let path = testing::models().with_file_name("classes.json");
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    /// Whether a value is the other, or an object with all that the other has.
    fn holds(all: &Value, some: &Value) -> bool {
        match some.as_object() {
            Some(object) => object.iter().all(|(key, value)| holds(&all[key], value)),
            None => all == some,
        }
    }

    /// Numbers that classes have under another name, and per layer.
    const ELSEWHERE: &[(&str, &str)] = &[
        ("bailing_hybrid", "head_dim"),
        ("gemma4", "global_head_dim"),
        ("gemma4_unified", "global_head_dim"),
    ];

    #[test]
    fn what_is_unsaid_is_what_transformers_classes_have() {
        let classes = classes();
        let mut compared = 0;
        for architecture in ARCHITECTURES {
            let (name, unsaid) = (architecture.name, architecture.unsaid);
            let Some(class) = classes.get(name) else { continue };
            let sizes = KEYS.iter().copied().zip(unsaid.sizes).filter(|(_, size)| *size > 0);
            for (key, number) in sizes.chain(unsaid.numbers.into_iter().flatten().copied()) {
                let of_class = class.get(key).and_then(Value::as_u64);
                let elsewhere = ELSEWHERE.contains(&(name, key));
                assert!(
                    elsewhere || of_class == Some(number as u64),
                    "{name}: {key}: {of_class:?}"
                );
                compared += 1;
            }
            if let Some(eps) = class.get("eps").and_then(Value::as_f64) {
                assert_eq!(unsaid.eps, eps, "{name}: norms");
            }
            let rotation = &class["rope_parameters"];
            let base = rotation.get("rope_theta").and_then(Value::as_f64);
            let base = base.filter(|_| unsaid.rotation.is_none());
            assert!(base.is_none_or(|base| base == unsaid.theta), "{name}: {base:?}");
            let kind = rotation.get("rope_type").and_then(Value::as_str).unwrap_or("default");
            assert!(unsaid.rotation.is_some() || kind == "default", "{name}: {kind}");
            for (key, said) in unsaid.rotation.iter().flat_map(|said| said().as_object().unwrap()) {
                assert!(holds(&rotation[key], said), "{name}: {key}");
            }
        }
        assert!(compared > 700, "{compared} numbers");
    }
}

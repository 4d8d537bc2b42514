//! Mixtures of experts: their numbers as configurations state them, and their weights as files
//! store them.

use crate::config::{GATE, SILU};
use crate::files::Files;
use crate::gpt2;
use crate::keys::{Key, Keys};
use crate::names::Row;
use crate::stated::Stated;
use formats::{Error, ErrorKind, Result, Source, shape};
use nn::{Bias, ExpertsOptions, Gate, Odds, Routing, Stored, Weights};
use ops::experts::{MOST_EXPERTS, MOST_USED};

/// The names of all experts' matrices in one tensor, as GGUF and MLX have them.
pub(crate) const SWITCHED: &[Row] = &[
    (
        "blocks.{}.mlp.experts.gate",
        "model.layers.{}.mlp.switch_mlp.gate_proj",
        "blk.{}.ffn_gate_exps",
    ),
    ("blocks.{}.mlp.experts.up", "model.layers.{}.mlp.switch_mlp.up_proj", "blk.{}.ffn_up_exps"),
    (
        "blocks.{}.mlp.experts.down",
        "model.layers.{}.mlp.switch_mlp.down_proj",
        "blk.{}.ffn_down_exps",
    ),
];

/// The names that most mixtures share beside [`SWITCHED`]; experts are stored one by one.
pub(crate) const NAMES: &[Row] = &[
    ("blocks.{}.mlp.router", "model.layers.{}.mlp.gate", "blk.{}.ffn_gate_inp"),
    (
        "blocks.{}.mlp.experts.{}.gate",
        "model.layers.{}.mlp.experts.{}.gate_proj",
        "blk.{}.ffn_gate.{}",
    ),
    ("blocks.{}.mlp.experts.{}.up", "model.layers.{}.mlp.experts.{}.up_proj", "blk.{}.ffn_up.{}"),
    (
        "blocks.{}.mlp.experts.{}.down",
        "model.layers.{}.mlp.experts.{}.down_proj",
        "blk.{}.ffn_down.{}",
    ),
];

/// The names beside [`SWITCHED`], which they stand before, where all experts' gates and ups may be
/// one tensor, and all downs another; or they are stored one by one.
pub(crate) const STACKS: &[Row] = &[
    ("blocks.{}.mlp.router", "model.layers.{}.mlp.gate", "blk.{}.ffn_gate_inp"),
    (
        "blocks.{}.mlp.experts.gate_up",
        "model.layers.{}.mlp.experts.gate_up_proj!",
        "blk.{}.ffn_gate_up_exps",
    ),
    (
        "blocks.{}.mlp.experts.down",
        "model.layers.{}.mlp.experts.down_proj!",
        "blk.{}.ffn_down_exps",
    ),
    ("blocks.{}.mlp.experts.{}.gate", "model.layers.{}.mlp.experts.{}.gate_proj", ""),
    ("blocks.{}.mlp.experts.{}.up", "model.layers.{}.mlp.experts.{}.up_proj", ""),
    ("blocks.{}.mlp.experts.{}.down", "model.layers.{}.mlp.experts.{}.down_proj", ""),
];

/// The names of Mixtral and what follows it.
pub(crate) const SPARSE_BLOCK: &[Row] = &[
    ("blocks.{}.mlp.router", "model.layers.{}.block_sparse_moe.gate", "blk.{}.ffn_gate_inp"),
    // As Transformers 5 names the module, after which adapters are named.
    ("blocks.{}.mlp.router", "model.layers.{}.mlp.gate", ""),
    (
        "blocks.{}.mlp.experts.gate",
        "model.layers.{}.block_sparse_moe.switch_mlp.gate_proj",
        "blk.{}.ffn_gate_exps",
    ),
    (
        "blocks.{}.mlp.experts.up",
        "model.layers.{}.block_sparse_moe.switch_mlp.up_proj",
        "blk.{}.ffn_up_exps",
    ),
    (
        "blocks.{}.mlp.experts.down",
        "model.layers.{}.block_sparse_moe.switch_mlp.down_proj",
        "blk.{}.ffn_down_exps",
    ),
    (
        "blocks.{}.mlp.experts.{}.gate",
        "model.layers.{}.block_sparse_moe.experts.{}.w1",
        "blk.{}.ffn_gate.{}",
    ),
    (
        "blocks.{}.mlp.experts.{}.up",
        "model.layers.{}.block_sparse_moe.experts.{}.w3",
        "blk.{}.ffn_up.{}",
    ),
    (
        "blocks.{}.mlp.experts.{}.down",
        "model.layers.{}.block_sparse_moe.experts.{}.w2",
        "blk.{}.ffn_down.{}",
    ),
];

const SPELLINGS: [Key; 4] = [
    Key("num_experts", "expert_count"),
    Key("num_local_experts", "expert_count"),
    Key("n_routed_experts", "expert_count"),
    Key("moe_num_experts", "expert_count"),
];
const USED: Key = Key("num_experts_per_tok", "expert_used_count");

/// A number, where it is stated.
pub(crate) type Count = Option<Stated<usize>>;

/// How many experts a configuration states, if any, and how many a token goes through.
fn counts(keys: &Keys<'_>) -> Result<(Count, Count)> {
    let used = keys.size(USED)?;
    let mut stated = SPELLINGS[0];
    let mut count = None;
    // One that is stated is meant, whatever the class has under another.
    let said = SPELLINGS.into_iter().find(|key| keys.mentions(*key));
    for key in SPELLINGS {
        if said.is_some_and(|said| said.0 != key.0) {
            keys.get(key);
            continue;
        }
        if let Some(found) = keys.size(key)?.filter(|_| count.is_none()) {
            (stated, count) = (key, Some(found));
        }
    }
    let most = count.as_ref().map_or(0, |count| count.value);
    if let Some(used) = used.as_ref().filter(|used| used.value > most) {
        let expected = format!("at most {} = {most}", keys.stated(stated, ()).key());
        return Err(used.wrong(expected, used.value));
    }
    Ok((count, used))
}

/// Refuses a configuration of a dense model that states experts: under its name such a file would
/// lose most of its weights.
///
/// # Errors
/// Such a configuration, by key.
pub(crate) fn check(keys: &Keys<'_>) -> Result<()> {
    match counts(keys)?.0.filter(|count| count.value > 0) {
        Some(count) => Err(count.wrong("0: this architecture has no experts", count.value)),
        None => Ok(()),
    }
}

/// How many experts a configuration states; 0 if none.
///
/// # Errors
/// As [`read`].
pub(crate) fn count(keys: &Keys<'_>) -> Result<usize> {
    Ok(counts(keys)?.0.map_or(0, |count| count.value))
}

/// Whether a configuration states experts.
///
/// # Errors
/// As [`read`].
pub(crate) fn are_stated(keys: &Keys<'_>) -> Result<bool> {
    Ok(count(keys)? > 0)
}

/// Reads a mixture whose experts are chosen by the softmax of their scores, normalised as
/// `norm_topk_prob` says; `feed_forward` is an expert's width where no key of its own states it.
///
/// # Errors
/// A key that is missing or out of range.
pub(crate) fn read(
    files: &Files<'_>,
    hidden: usize,
    feed_forward: usize,
) -> Result<ExpertsOptions> {
    let keys = &files.keys;
    let own = keys.size(Key("moe_intermediate_size", "expert_feed_forward_length"))?;
    let own = own.map(|own| own.within(1..=1 << 20)).transpose()?;
    read_used(files, hidden, own.unwrap_or(feed_forward), counts(keys)?.1)
}

/// As [`read`], where experts are `feed_forward` wide and a token goes through `used` of them.
///
/// # Errors
/// As [`read`].
pub(crate) fn read_used(
    files: &Files<'_>,
    hidden: usize,
    feed_forward: usize,
    used: Count,
) -> Result<ExpertsOptions> {
    let keys = &files.keys;
    let count = counts(keys)?.0;
    let count = count.ok_or_else(|| keys.wrong(SPELLINGS[0], "a number of experts", "nothing"))?;
    let used = used.ok_or_else(|| keys.wrong(USED, "a number of experts", "nothing"))?;
    let experts = count.within(1..=MOST_EXPERTS)?;
    let used = used.within(1..=experts.min(MOST_USED))?;
    let normalised = keys.flag(Key("norm_topk_prob", "expert_weights_norm"))?.unwrap_or(false);
    Ok(ExpertsOptions {
        hidden,
        experts,
        feed_forward,
        router_bias: Bias::Never,
        biases: false,
        routing: Routing { used, odds: Odds::Softmax, normalised, scale: 1.0 },
        limit: None,
        gate: gate(files, GATE.0)?,
        weighs_inputs: false,
        factors: false,
    })
}

/// The function of experts' gates that `key` names: SiLU where nothing is said.
///
/// # Errors
/// A function that is not known, or made of several, by key.
pub(crate) fn gate(files: &Files<'_>, key: &'static str) -> Result<Gate> {
    match gpt2::activation(files, key, SILU)? {
        [function] => Ok(Gate::Plain(*function)),
        _ => {
            let found = files.keys.text(key)?.unwrap_or_default();
            let error = files.keys.wrong(key, "a function that gates of experts have", found);
            Err(error.of(ErrorKind::Unsupported))
        }
    }
}

/// All experts' matrices below each other, of files that store them one by one, or in a stack.
///
/// # Errors
/// Experts that are missing, or stacks of another rank.
pub(crate) fn joined(weights: &dyn Weights, name: &str, experts: usize) -> Result<Option<Stored>> {
    let (stem, bias) = match name.strip_suffix(".bias") {
        Some(stem) => (stem, ".bias"),
        None => (name, ""),
    };
    let Some((block, part)) = stem.split_once(".experts.").filter(|(_, p)| !p.contains('.')) else {
        return Ok(None);
    };
    if let Some(stored) = weights.find(name)? {
        return flat(weights, name, stored).map(Some);
    }
    let mut parts = Vec::with_capacity(experts);
    let mut rows = None;
    for expert in 0..experts {
        let name = format!("{block}.experts.{expert}.{part}{bias}");
        let Some(found) = weights.find(&name)? else {
            // No expert at all: what is missing is the whole.
            let none = expert == 0;
            let missing = || Error::new(weights.place(&name), "a tensor", "none in the file");
            return if none { Ok(None) } else { Err(missing()) };
        };
        let same = rows.get_or_insert_with(|| found.shape.clone());
        if *same != found.shape {
            let expected = format!("{}, as of the first expert", shape(same));
            return Err(Error::new(weights.place(&name), expected, shape(&found.shape)));
        }
        parts.push(found.source);
    }
    let Some(mut dims) = rows.filter(|dims| !dims.is_empty()) else { return Ok(None) };
    dims[0] = dims[0].saturating_mul(experts);
    Ok(Some(Stored { source: Source::Concat(parts), shape: dims }))
}

/// As [`joined`]; or gate or up, where each expert's gate lies on top of its up in one stack.
///
/// # Errors
/// As [`joined`].
pub(crate) fn stacked(weights: &dyn Weights, name: &str, experts: usize) -> Result<Option<Stored>> {
    let both = name.rsplit_once(".experts.").filter(|(_, part)| matches!(*part, "gate" | "up"));
    let both = both.map(|(block, part)| (format!("{block}.experts.gate_up"), part));
    let Some((both, part)) = both else { return joined(weights, name, experts) };
    let Some(stored) = weights.find(&both)? else { return joined(weights, name, experts) };
    let Stored { source, mut shape } = flat(weights, &both, stored)?;
    let each = shape[0] / 2 / experts.max(1);
    if shape[0] != 2 * each * experts {
        let expected = format!("the gates and ups of {experts} experts");
        return Err(Error::new(weights.place(&both), expected, formats::shape(&shape)));
    }
    shape[0] = experts * each;
    let apart = Source::Permute(Box::new(source), [1, experts, 2, each]);
    let start = if part == "gate" { 0 } else { shape[0] };
    Ok(Some(Stored { source: apart.rows(start, shape[0]), shape }))
}

/// A stack of matrices as one, or of biases.
///
/// # Errors
/// Tensors of one axis, which are no stack.
pub(crate) fn flat(weights: &dyn Weights, name: &str, stored: Stored) -> Result<Stored> {
    let dims = match *stored.shape.as_slice() {
        [experts, rows, columns] => vec![experts.saturating_mul(rows), columns],
        [experts, rows] if name.ends_with(".bias") => vec![experts.saturating_mul(rows)],
        ref other => {
            return Err(Error::new(weights.place(name), "a stack of experts", shape(other)));
        }
    };
    let source = Source::Reshape(Box::new(stored.source), dims.clone());
    Ok(Stored { source, shape: dims })
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Held(Vec<(String, Vec<usize>)>);

    impl Weights for Held {
        fn find(&self, name: &str) -> Result<Option<Stored>> {
            let found = self.0.iter().find(|(held, _)| held == name);
            let stored = |(name, shape): &(String, Vec<usize>)| Stored {
                source: Source::Tensor(name.clone()),
                shape: shape.clone(),
            };
            Ok(found.map(stored))
        }
    }

    #[test]
    fn experts_are_joined_however_they_are_stored() {
        let one = |expert: usize, rows: usize| (format!("b.experts.{expert}.up"), vec![rows, 4]);
        let of = |held: Vec<(String, Vec<usize>)>| joined(&Held(held), "b.experts.up", 2);
        let apart = of(vec![one(0, 3), one(1, 3)]).unwrap().unwrap();
        assert_eq!(apart.shape, [6, 4]);
        assert!(matches!(apart.source, Source::Concat(parts) if parts.len() == 2));
        let stack = of(vec![("b.experts.up".into(), vec![2, 3, 4])]).unwrap().unwrap();
        assert_eq!(stack.shape, [6, 4]);
        assert!(of(vec![]).unwrap().is_none());
        for (held, expected) in [
            (vec![one(0, 3)], "b.experts.1.up: expected a tensor, found none in the file"),
            (vec![one(0, 3), one(1, 2)], "b.experts.1.up: expected [3, 4], as of the first"),
            (vec![("b.experts.up".into(), vec![6, 4])], "b.experts.up: expected a stack"),
        ] {
            let error = of(held).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}

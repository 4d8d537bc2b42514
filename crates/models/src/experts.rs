//! Mixtures of experts, which no architecture here has: such a file under a dense model's name would lose most of its weights.

use crate::keys::{Key, Keys};
use formats::Result;

const SPELLINGS: [Key; 3] = [
    Key("num_experts", "expert_count"),
    Key("num_local_experts", "expert_count"),
    Key("n_routed_experts", "expert_count"),
];

/// Refuses a configuration that states experts.
///
/// # Errors
/// Such a configuration, by key.
pub(crate) fn check(keys: &Keys<'_>) -> Result<()> {
    const USED: Key = Key("num_experts_per_tok", "expert_used_count");
    let chosen = keys.size(USED)?;
    let mut stated = SPELLINGS[0];
    let mut count = None;
    for key in SPELLINGS {
        if let Some(found) = keys.size(key)?.filter(|_| count.is_none()) {
            (stated, count) = (key, Some(found));
        }
    }
    let most = count.as_ref().map_or(0, |count| count.value);
    if let Some(chosen) = chosen.filter(|chosen| chosen.value > most) {
        let expected = format!("at most {} = {most}", keys.stated(stated, ()).key());
        return Err(chosen.wrong(expected, chosen.value));
    }
    match count.filter(|count| count.value > 0) {
        Some(count) => Err(count
            .wrong("0: a model without experts", count.value)
            .hint("mixtures of experts are not supported yet")),
        None => Ok(()),
    }
}

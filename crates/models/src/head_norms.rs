//! Layer norms of heads of q and k that have a weight for each head: the norms' own weights are ones,
//! and what they give is multiplied with the heads' weights, which lie one behind the other.

use crate::config::Config;
use crate::files::Files;
use crate::keys::Key;
use crate::names::Row;
use formats::{Error, Result, Source, shape};
use nn::{Bias, QkNorm, Stored, Weights};

/// The names in GGUF.
pub(crate) const IN_GGUF: &[Row] = &[
    ("blocks.{}.attention.q_scale", "", "blk.{}.attn_q_norm"),
    ("blocks.{}.attention.k_scale", "", "blk.{}.attn_k_norm"),
];

/// Whether a model has such norms: a folder says so under `key`, a GGUF file has their weights.
///
/// # Errors
/// A key of another type.
pub(crate) fn has(files: &Files<'_>, key: &'static str) -> Result<bool> {
    let stated = files.keys.flag(Key(key, ""))?;
    match files.metadata() {
        Some(_) => Ok(files.names.find("blocks.0.attention.q_scale")?.is_some()),
        None => Ok(stated.unwrap_or(false)),
    }
}

/// Such norms, which add the number that other norms add, if there are any.
pub(crate) fn of(config: &Config, has: bool) -> QkNorm {
    let norm = QkNorm::Layer { eps: config.norm_eps, bias: Bias::Never, apart: true };
    if has { norm } else { QkNorm::None }
}

/// The weight `name`, if it is a norm's own, or the heads'.
///
/// # Errors
/// A weight that has not the heads' shape.
pub(crate) fn part(config: &Config, weights: &dyn Weights, name: &str) -> Result<Option<Stored>> {
    let Some((stem, part)) = name.rsplit_once(".attention.") else { return Ok(None) };
    let width = config.head_dim;
    let heads = match part {
        "q_norm" | "k_norm" => {
            let ones = Source::Plus(Box::new(Source::Zeros(vec![width])), 1.0);
            return Ok(Some(Stored { source: ones, shape: vec![width] }));
        }
        "q_scale" => config.heads,
        "k_scale" => config.kv_heads,
        _ => return Ok(None),
    };
    let all = vec![heads * width];
    let fits = |name: &str, found: Stored, expected: &[usize]| match found.shape == expected {
        true => Ok(found.source),
        false => Err(Error::new(weights.place(name), shape(expected), shape(&found.shape))
            .hint("the configuration does not fit these weights")),
    };
    if let Some(found) = weights.find(name)? {
        let source = fits(name, found, &[heads, width])?;
        return Ok(Some(Stored {
            source: Source::Reshape(Box::new(source), all.clone()),
            shape: all,
        }));
    }
    let one = |head: usize| -> Result<Option<Source>> {
        let name = format!("{stem}.attention.{}_norms.{head}", &part[..1]);
        weights.find(&name)?.map(|found| fits(&name, found, &[width])).transpose()
    };
    let sources = (0..heads).map(one).collect::<Result<Option<Vec<Source>>>>()?;
    Ok(sources.map(|sources| Stored { source: Source::Concat(sources), shape: all }))
}

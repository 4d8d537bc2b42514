//! Weights of delta nets that are stored part by part: the projections of queries, keys and values,
//! and the taps of their convolutions.

use crate::hybrid;
use crate::names::Recipes;
use formats::{Result, Source};
use nn::{DeltaNetOptions, Forgetting, Stored, Weights};

/// A weight of a net whose parts are stored apart; none for another name.
///
/// # Errors
/// Tensors that do not fit the name.
pub(crate) fn part(
    weights: &dyn Weights,
    name: &str,
    net: &DeltaNetOptions,
) -> Result<Option<Stored>> {
    let Some((block, part)) = name.split_once(".delta.") else { return Ok(None) };
    let whole = Recipes { weights, change: together };
    let elements = matches!(net.forgetting, Forgetting::Elements { .. });
    match part {
        "a.bias" => weights.find(&format!("{block}.delta.dt")),
        "decay" if elements => {
            let found = hybrid::delta(&whole, block, part, net)?;
            Ok(found.map(|stored| each(stored, net)))
        }
        "qkv" => whole.find(name),
        _ => hybrid::delta(&whole, block, part, net),
    }
}

/// Rows of queries, keys and values, or their taps, one below the other.
fn together(weights: &dyn Weights, name: &str) -> Result<Option<Stored>> {
    let (Some((stem, part)), None) = (name.rsplit_once('.'), weights.find(name)?) else {
        return Ok(None);
    };
    let end = match part {
        "qkv" => "",
        "conv" => "_conv",
        _ => return Ok(None),
    };
    let (mut sources, mut shape) = (Vec::new(), Vec::new());
    for one in ["q", "k", "v"] {
        let Some(stored) = weights.find(&format!("{stem}.{one}{end}"))? else { return Ok(None) };
        match shape.first_mut() {
            Some(rows) => *rows += stored.shape.first().copied().unwrap_or(0),
            None => shape = stored.shape,
        }
        sources.push(stored.source);
    }
    Ok(Some(Stored { source: Source::Concat(sources), shape }))
}

/// The rate of a head for each element of its keys; minus it where rates have a bound.
fn each(Stored { source, .. }: Stored, net: &DeltaNetOptions) -> Stored {
    let source = match net.forgetting {
        Forgetting::Elements { bound: Some(_), .. } => Source::Times(Box::new(source), -1.0),
        _ => source,
    };
    let flat = Source::Reshape(Box::new(source), vec![net.heads]);
    let turned = Source::Transpose(Box::new(Source::Stack(vec![flat; net.key_dim])));
    let shape = vec![net.heads * net.key_dim];
    Stored { source: Source::Reshape(Box::new(turned), shape.clone()), shape }
}

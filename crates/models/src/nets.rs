//! Weights of delta nets that are stored part by part: the projections of queries, keys and values,
//! and the taps of their convolutions.

use crate::hybrid;
use crate::names::Recipes;
use formats::{Result, Source};
use nn::{DeltaNetOptions, Forgetting, Stored, Weights};
use program::Weight;

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
        let stored = channels(stored);
        match shape.first_mut() {
            Some(rows) => *rows += stored.shape.first().copied().unwrap_or(0),
            None => shape = stored.shape,
        }
        sources.push(stored.source);
    }
    Ok(Some(Stored { source: Source::Concat(sources), shape }))
}

/// Taps `[channels, 1, kernel]`, of which GGUF has four axes.
fn channels(stored: Stored) -> Stored {
    let [1, channels, 1, kernel] = stored.shape[..] else { return stored };
    let shape = vec![channels, 1, kernel];
    Stored { source: Source::Reshape(Box::new(stored.source), shape.clone()), shape }
}

/// A weight of a net whose elements forget by themselves as GGUF has it, and its shape: what is
/// stored part by part; `Some(None)` is none at all, and `None` as in other models.
pub(crate) fn exported(held: &[Weight], canonical: &str) -> Option<Option<(Source, Vec<usize>)>> {
    let (block, part) = canonical.split_once(".delta.")?;
    let find = |part: &str| held.iter().find(|w| w.name == format!("{block}.delta.{part}"));
    let (decay, bias) = (find("decay")?, find("a.bias")?);
    let third = |which: &str, source: &Source, all: usize| {
        let at = ["q", "k", "v"].iter().position(|name| *name == which)?;
        Some((source.clone().rows(at * all / 3, all / 3), all / 3))
    };
    Some(match part {
        "a.bias" => None,
        "dt" => Some((bias.source.clone(), bias.shape.clone())),
        "decay" => {
            let rates = rates(&decay.source)?;
            let shape = vec![1, 1, rates.1, 1];
            Some((Source::Reshape(Box::new(rates.0.clone()), shape.clone()), shape))
        }
        "q" | "k" | "v" => {
            let all = find("qkv")?;
            let (source, rows) = third(part, &all.source, all.shape[0])?;
            Some((source, vec![rows, all.shape[1]]))
        }
        "q_conv" | "k_conv" | "v_conv" => {
            let Source::Reshape(turned, _) = &find("taps")?.source else { return None };
            let Source::Transpose(flat) = &**turned else { return None };
            let Source::Reshape(_, own) = &**flat else { return None };
            let [all, kernel] = own[..] else { return None };
            let (source, rows) = third(&part[..1], flat, all)?;
            let shape = vec![1, rows, 1, kernel];
            Some((Source::Reshape(Box::new(source), shape.clone()), shape))
        }
        _ => return None,
    })
}

/// The rate of each head, and their number, in what [`each`] makes of them.
fn rates(source: &Source) -> Option<(&Source, usize)> {
    let Source::Reshape(turned, _) = source else { return None };
    let Source::Transpose(stack) = &**turned else { return None };
    let Source::Stack(all) = &**stack else { return None };
    match all.first()? {
        flat @ Source::Reshape(_, shape) => Some((flat, shape[0])),
        _ => None,
    }
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

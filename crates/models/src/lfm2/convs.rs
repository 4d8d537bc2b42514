//! The weights of LFM2's convolutions, which files have in another form than layers read them.

use crate::phi3;
use formats::{Error, Result, Source, shape};
use nn::{Stored, Weights};
use program::Weight;

/// The parts of the matrix in front of a convolution, one below the other.
const PARTS: [&str; 3] = ["gate", "out_gate", "x"];

/// A weight of a convolution, whose matrices are stored as one and whose taps lie by channel.
///
/// # Errors
/// Weights that do not fit these sizes.
pub(crate) fn part(
    weights: &dyn Weights,
    name: &str,
    hidden: usize,
    kernel: usize,
) -> Result<Option<Stored>> {
    let Some((block, part)) = name.split_once(".conv.") else { return Ok(None) };
    if let Some(at) = PARTS.iter().position(|one| *one == part) {
        let joined = format!("{block}.conv.in");
        return phi3::rows(weights, &joined, &[3 * hidden, hidden], at * hidden, hidden);
    }
    if part != "taps" {
        return Ok(None);
    }
    let conv = format!("{block}.conv.conv");
    let Some(Stored { source, shape: dims }) = weights.find(&conv)? else { return Ok(None) };
    if dims.first() != Some(&hidden) || dims.iter().product::<usize>() != hidden * kernel {
        let expected = format!("{hidden} rows of {kernel}");
        return Err(Error::new(weights.place(&conv), expected, shape(&dims)));
    }
    let flat = Source::Reshape(Box::new(source), vec![hidden, kernel]);
    let turned = Source::Transpose(Box::new(flat));
    let shape = vec![kernel * hidden];
    Ok(Some(Stored { source: Source::Reshape(Box::new(turned), shape.clone()), shape }))
}

/// A weight of a convolution as GGUF has it, and its shape; `None` for another weight.
pub(crate) fn exported(held: &[Weight], canonical: &str) -> Option<Option<(Source, Vec<usize>)>> {
    let (block, part) = canonical.split_once(".conv.")?;
    let find =
        |part: &str| held.iter().find(|weight| weight.name == format!("{block}.conv.{part}"));
    match part {
        "in" => {
            let parts = PARTS.iter().map(|part| find(part)).collect::<Option<Vec<_>>>();
            Some(parts.map(|parts| {
                let mut shape = parts[0].shape.clone();
                shape[0] *= PARTS.len();
                (Source::Concat(parts.iter().map(|part| part.source.clone()).collect()), shape)
            }))
        }
        "conv" => Some(find("taps").and_then(|taps| match &taps.source {
            Source::Reshape(turned, _) => match &**turned {
                Source::Transpose(flat) => match &**flat {
                    Source::Reshape(_, shape) => Some(((**flat).clone(), shape.clone())),
                    _ => None,
                },
                _ => None,
            },
            _ => None,
        })),
        "o" => Some(find("o").map(|weight| (weight.source.clone(), weight.shape.clone()))),
        _ => None,
    }
}

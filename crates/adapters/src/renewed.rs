//! Numbers of the base that an adapter has anew, as PEFT saves them: whole matrices
//! (`modules_to_save`), some rows of the table of embeddings (`trainable_token_indices`), biases
//! (`bias`).
//!
//! A device takes a new matrix `W'` as factors of what changes:
//!
//! ```text
//! W' - W = up down
//! ```
//!
//! with a rank for each row that changes: `up` has a 1 where the row is, `down` what is added to
//! it. If that makes more ranks than the matrix has columns, `up` is the change of all rows and
//! `down` the identity. A new bias is an offset on what the product gives.

use crate::resolve::{reordered, turned};
use crate::{Base, File};
use formats::{DType, ErrorKind, Result, Source, shape};
use ops::low_rank::{Delta, Gain};
use program::{AdapterFactors, Site};

/// A weight of the base that an adapter has anew.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Renewed {
    /// The adapter's tensor.
    pub(crate) tensor: String,
    /// The module, as the base would name it in the adapter's dialect.
    pub(crate) module: String,
    /// Whether it is the module's bias.
    pub(crate) bias: bool,
    /// The rows that it has, in their order; none: all of them.
    pub(crate) rows: Option<Vec<usize>>,
    /// Whether it was trained. Others are copies of the base's, which they must equal.
    pub(crate) trained: bool,
    /// Whether the head is the same matrix, if the base has one for both.
    pub(crate) ties: bool,
}

impl File {
    /// Adds what renewed weights change to an adapter's factors.
    ///
    /// # Errors
    /// Weights that the base does not have, of other shapes or that are not finite; weights of
    /// norms and such that are not the base's; a matrix that has factors, too.
    pub(crate) fn renew(
        &self,
        base: &Base<'_>,
        sites: &[Site],
        strength: f64,
        adapter: &mut AdapterFactors,
    ) -> Result<()> {
        // Offsets of biases go on top of the factors that a matrix has.
        let biases = self.renewed.iter().filter(|own| own.bias);
        for own in self.renewed.iter().filter(|own| !own.bias).chain(biases) {
            let canonicals = base.config.architecture.canonicals(&own.module, false);
            let site = sites.iter().find(|s| s.experts.is_none() && canonicals.contains(&s.name));
            match site {
                Some(site) if own.trained && !own.bias => {
                    self.renew_matrix(base, site, own, strength, adapter)?;
                    let head = sites.iter().find(|s| s.weight == site.weight && !s.gathers);
                    if let Some(head) = head.filter(|_| own.ties && site.gathers) {
                        self.renew_matrix(base, head, own, strength, adapter)?;
                    }
                }
                _ if own.trained && own.bias => {
                    self.renew_bias(base, sites, own, strength, adapter)?;
                }
                _ => self.check_copy(base, site, &canonicals, own)?,
            }
        }
        Ok(())
    }

    /// A copy of the base's must be the base's: others mean that they were trained or resized.
    fn check_copy(
        &self,
        base: &Base<'_>,
        site: Option<&Site>,
        canonicals: &[String],
        own: &Renewed,
    ) -> Result<()> {
        let wrong = |found: &str| {
            self.wrong(&own.tensor, "the model's own weights", found)
                .of(ErrorKind::Unsupported)
                .hint("merge the adapter into the model with PEFT, and load that")
        };
        let weights = &base.program.weights;
        let named = |end: &str| {
            let is = |name: &String| canonicals.iter().any(|own| format!("{own}{end}") == *name);
            weights.iter().find(|weight| is(&weight.name))
        };
        let weight = match (site, own.bias) {
            (Some(site), false) => Some(&weights[site.weight.0]),
            (Some(site), true) => site.bias.map(|bias| &weights[bias.0]),
            (None, false) => named(""),
            (None, true) => named(".bias"),
        };
        let Some(weight) = weight else { return Err(wrong("weights of another matrix")) };
        let copied = self.tensor(&own.tensor)?;
        if copied.shape != weight.shape {
            return Err(wrong(&shape(copied.shape)));
        }
        let stored = weight.read(base.tensors)?;
        if stored.encoding.is_quantised() {
            return Ok(());
        }
        let (stored, copied) = (stored.to_f32()?, copied.to_f32()?);
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 0.01 * b.abs() + 1e-6;
        if stored.iter().zip(&copied).all(close) { Ok(()) } else { Err(wrong("others")) }
    }

    fn renew_matrix(
        &self,
        base: &Base<'_>,
        site: &Site,
        own: &Renewed,
        strength: f64,
        adapter: &mut AdapterFactors,
    ) -> Result<()> {
        let weight = &base.program.weights[site.weight.0];
        let unsupported = |expected: &str, found: &str| {
            let error = self.wrong(&own.tensor, expected, found).of(ErrorKind::Unsupported);
            error.hint("merge the adapter into the model with PEFT, and load that")
        };
        let (turns, source) = match &weight.source {
            Source::Transpose(of) => (true, &**of),
            source => (false, source),
        };
        let alone =
            matches!(source, Source::Tensor(_) | Source::Affine { .. } | Source::Quantised(_));
        let (&[count, width], true) =
            (&weight.shape[..], alone && base.column_order(site).is_none())
        else {
            return Err(unsupported("a matrix that the model's files have as it is", "another"));
        };
        self.check_order(base, site)?;
        let (rows, values) = match &own.rows {
            Some(rows) => {
                if let Some(odd) = rows.iter().find(|row| **row >= count) {
                    let expected = format!("tokens below {count}");
                    return Err(self.wrong(&own.tensor, expected, odd));
                }
                let values = self.numbers(&own.tensor, &[&[rows.len(), width]])?;
                (rows.clone(), values)
            }
            None => {
                let stored = if turns { [width, count] } else { [count, width] };
                let found = self.tensor(&own.tensor)?.shape;
                if site.gathers && found.len() == 2 && found[1] == width && found[0] != count {
                    let expected = format!("a table of {count} tokens, as the model has");
                    return Err(unsupported(&expected, &format!("one of {}", found[0])));
                }
                let mut values = self.numbers(&own.tensor, &[&stored])?;
                if turns {
                    values = turned(&values, count);
                }
                if let Some(order) = self.order(base, site) {
                    values = reordered(&values, width, &order);
                }
                ((0..count).collect(), values)
            }
        };
        let before = weight.read(base.tensors)?.to_f32()?;
        let mut changed: Vec<(usize, Vec<f32>)> = Vec::new();
        for (row, new) in rows.into_iter().zip(values.chunks_exact(width.max(1))) {
            let old = &before[row * width..][..width];
            if new != old {
                changed.push((row, new.iter().zip(old).map(|(new, old)| new - old).collect()));
            }
        }
        drop((before, values));
        if changed.is_empty() {
            return Ok(());
        }
        let delta = factors(site, changed, [count, width], strength as f32);
        if adapter.deltas.insert(site.name.clone(), delta).is_some() {
            return Err(self.wrong(&own.tensor, "factors of a matrix, or all of it", "both"));
        }
        Ok(())
    }

    fn renew_bias(
        &self,
        base: &Base<'_>,
        sites: &[Site],
        own: &Renewed,
        strength: f64,
        adapter: &mut AdapterFactors,
    ) -> Result<()> {
        let targets = self.biased(base, sites, &own.module)?;
        // A bias that no product has, such as a norm's, must be the base's.
        if targets.is_empty() {
            let canonicals = base.config.architecture.canonicals(&own.module, false);
            return self.check_copy(base, None, &canonicals, own);
        }
        let all = targets.iter().map(|(_, rows)| rows.len()).sum();
        let values = self.numbers(&own.tensor, &[&[all]])?;
        for (site, rows) in targets {
            let bias = site.bias.ok_or_else(|| {
                let error = self.wrong(&own.tensor, "a bias that the model has", "none");
                error.of(ErrorKind::Unsupported)
            })?;
            let mut new = reordered(&values, 1, &rows);
            if let Some(order) = self.order(base, site) {
                new = reordered(&new, 1, &order);
            }
            let old = base.program.weights[bias.0].read(base.tensors)?.to_f32()?;
            if new != old {
                let change = new.iter().zip(&old).map(|(new, old)| strength as f32 * (new - old));
                add_offset(site, change, adapter);
            }
        }
        Ok(())
    }
}

/// The factors of what changes in rows of a matrix.
fn factors(
    site: &Site,
    changed: Vec<(usize, Vec<f32>)>,
    [count, width]: [usize; 2],
    scale: f32,
) -> Delta {
    let few = changed.len() < width;
    let rank = if few { changed.len() } else { width };
    // `[count, rank]` and `[rank, width]`.
    let (mut picks, mut rows) = (vec![0.0; count * rank], vec![0.0; rank * width]);
    for (r, (row, change)) in changed.into_iter().enumerate() {
        if few {
            picks[row * rank + r] = 1.0;
            rows[r * width..][..width].copy_from_slice(&change);
        } else {
            picks[row * rank..][..width].copy_from_slice(&change);
        }
    }
    if !few {
        (0..width).for_each(|i| rows[i * width + i] = 1.0);
    }
    // A table of embeddings has tokens on the side of `down`.
    let (down, up) = if site.gathers { (picks, turned(&rows, width)) } else { (rows, picks) };
    Delta { rank, down, up, scale, gain: None, element: DType::F32 }
}

/// Adds to what a product gives.
pub(crate) fn add_offset(
    site: &Site,
    change: impl Iterator<Item = f32>,
    adapter: &mut AdapterFactors,
) {
    let delta = adapter.deltas.entry(site.name.clone()).or_insert_with(|| Delta {
        rank: 1,
        down: vec![0.0; site.input],
        up: vec![0.0; site.output],
        scale: 1.0,
        gain: None,
        element: DType::F32,
    });
    let gain = delta.gain.get_or_insert_with(|| Gain {
        gain: vec![1.0; site.output],
        offset: vec![0.0; site.output],
    });
    gain.offset.iter_mut().zip(change).for_each(|(offset, more)| *offset += more);
}

//! Matrices that files keep in pieces, one below the other in the model (the queries, keys and values
//! of a gated delta net): an adapter has factors for each piece, a device for the whole matrix.
//!
//! Side by side they are one pair of factors of all their ranks:
//!
//! ```text
//! up = | up_q           |   down = | down_q |
//!      |      up_k      |          | down_k |
//!      |           up_v |          | down_v |
//! ```

use crate::resolve::gain;
use crate::{Base, File};
use formats::{DType, Result, Source};
use ops::low_rank::Delta;
use program::{AdapterFactors, Site, WeightId};
use std::ops::Range;

/// A piece of a matrix: a whole matrix of the files.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece<'a> {
    /// Its canonical name, such as `blocks.0.delta.q`.
    pub name: String,
    /// How it is made of the files' tensors.
    pub source: &'a Source,
    /// The range of its rows in the whole matrix.
    pub rows: Range<usize>,
}

impl Base<'_> {
    /// The most pieces that a matrix of the model has, at least 1: an adapter's factors of a matrix
    /// have as many times its rank.
    ///
    /// # Errors
    /// As [`Base::pieces`].
    pub fn most_pieces(&self) -> Result<usize> {
        let sites = self.program.adaptable().into_iter();
        sites
            .map(|site| Ok(self.pieces(site.weight)?.len()))
            .try_fold(1, |most, count| count.map(|count: usize| most.max(count)))
    }

    /// The pieces of a matrix, in the order of its rows; none of one that is a matrix of the files,
    /// or some rows of one.
    ///
    /// # Errors
    /// Tensors that are not there.
    pub fn pieces(&self, weight: WeightId) -> Result<Vec<Piece<'_>>> {
        let whole = &self.program.weights[weight.0];
        let (Source::Concat(parts), [_, _]) = (&whole.source, &whole.shape[..]) else {
            return Ok(Vec::new());
        };
        let front = whole.name.rsplit_once('.').map_or("", |(front, _)| front);
        let (mut pieces, mut first) = (Vec::new(), 0);
        for source in parts {
            // A matrix of the files by itself, whatever numbers of tensors it takes.
            let partial = matches!(source, Source::Rows { .. } | Source::Permute(..));
            let stem = |tensor: &'_ str| tensor.rsplit_once('.').map(|(stem, _)| stem.to_owned());
            let mut stems: Vec<_> = source.tensors().into_iter().map(stem).collect();
            stems.dedup();
            let ([Some(stem)], false) = (&stems[..], partial) else { return Ok(Vec::new()) };
            let names = self.config.architecture.canonicals(stem, self.tensors.gguf().is_some());
            let beside = |name: &String| name.rsplit_once('.').is_some_and(|(own, _)| own == front);
            let Some(name) = names.into_iter().find(beside) else { return Ok(Vec::new()) };
            let rows = source.describe(self.tensors)?.shape[0];
            pieces.push(Piece { name, source, rows: first..first + rows });
            first += rows;
        }
        Ok(pieces)
    }
}

/// The change of some rows of a site.
struct PieceChange {
    rows: Range<usize>,
    delta: Delta,
    magnitude: Option<Vec<f32>>,
}

/// The changes of sites that files keep in pieces.
#[derive(Default)]
pub(crate) struct Pieces<'s>(Vec<(&'s Site, Vec<PieceChange>)>);

impl<'s> Pieces<'s> {
    /// Takes the change of the rows of a site from `first` on; false if it is there.
    pub(crate) fn take(
        &mut self,
        site: &'s Site,
        first: usize,
        delta: Delta,
        magnitude: Option<Vec<f32>>,
    ) -> bool {
        let at = self.0.iter().position(|(of, _)| of.name == site.name).unwrap_or_else(|| {
            self.0.push((site, Vec::new()));
            self.0.len() - 1
        });
        let rows = first..first + delta.up.len() / delta.rank;
        let changes = &mut self.0[at].1;
        let new = changes.iter().all(|change| change.rows.start != first);
        changes.push(PieceChange { rows, delta, magnitude });
        new
    }

    /// Joins the changes of each site. Rows of pieces that are not changed stay as they are.
    ///
    /// # Errors
    /// A site that the file has as a whole, too; with DoRA, matrices that cannot be read.
    pub(crate) fn join(
        self,
        file: &File,
        base: &Base<'_>,
        adapter: &mut AdapterFactors,
    ) -> Result<()> {
        for (site, changes) in self.0 {
            let rank: usize = changes.iter().map(|change| change.delta.rank).sum();
            // One scale is for all pieces, of which some may have none.
            let mut scales = changes.iter().map(|change| change.delta.scale);
            let scale = scales.find(|scale| *scale != 0.0).unwrap_or(1.0);
            let mut whole = Delta {
                rank,
                down: Vec::with_capacity(rank * site.input),
                up: vec![0.0; site.output * rank],
                scale,
                gain: None,
                element: DType::F32,
            };
            let mut magnitudes = vec![None; site.output];
            let mut before = 0;
            for PieceChange { rows, delta, magnitude } in changes {
                let by = delta.scale / scale;
                for (row, up) in rows.clone().zip(delta.up.chunks_exact(delta.rank)) {
                    let to = &mut whole.up[row * rank + before..][..delta.rank];
                    to.iter_mut().zip(up).for_each(|(to, up)| *to = by * up);
                }
                before += delta.rank;
                whole.down.extend(delta.down);
                let own = magnitude.into_iter().flatten().map(Some);
                magnitudes[rows].iter_mut().zip(own).for_each(|(to, own)| *to = own);
            }
            if magnitudes.iter().any(Option::is_some) {
                whole.gain = Some(gain(base, site, &whole, &magnitudes)?);
            }
            if adapter.deltas.insert(site.name.clone(), whole).is_some() {
                return Err(file.wrong(&site.name, "each matrix once", "twice"));
            }
        }
        Ok(())
    }
}

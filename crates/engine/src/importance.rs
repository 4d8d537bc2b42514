//! Importance matrices of a text: what it puts into each product of a model that was loaded with
//! [`Trace::Inputs`].

use std::collections::BTreeMap;

use formats::{Error, Importance, Inputs, Result};
use models::Architecture;
use ops::moe::route;
use program::{Input, Routed};

use crate::session::Session;
use crate::{Engine, Trace};

/// Tokens that are computed together: the inputs of all layers for these tokens are in memory at
/// once.
pub const CHUNK: usize = 64;

/// Sums over the windows that a session has read.
#[derive(Debug)]
pub struct Collector<'a> {
    inputs: &'a [Input],
    /// For each input, the names that its matrices have in GGUF.
    names: Vec<Vec<String>>,
    /// For each input, what its matrices share.
    sums: Vec<Inputs>,
}

impl<'a> Collector<'a> {
    /// Sums of nothing yet, for a model's products that GGUF has names for.
    ///
    /// # Errors
    /// A model that was not loaded with [`Trace::Inputs`], or of an architecture that GGUF files
    /// are not read of.
    pub fn new(engine: &'a Engine) -> Result<Collector<'a>> {
        let inputs = &engine.0.inputs[..];
        let architecture = engine.config().architecture;
        if engine.0.options.trace != Trace::Inputs {
            return Err(Error::new("importance", "a model whose inputs are kept", "another"));
        }
        if architecture.gguf.is_empty() {
            let expected = "an architecture whose GGUF files are read";
            return Err(Error::new("importance", expected, architecture.name));
        }
        let of = |input: &Input| {
            let mut names: Vec<String> =
                input.weights.iter().filter_map(|weight| in_gguf(architecture, weight)).collect();
            names.dedup();
            names
        };
        let names = inputs.iter().map(of).collect();
        Ok(Collector { inputs, names, sums: vec![Inputs::default(); inputs.len()] })
    }

    /// Adds a window of tokens, which `session` reads from the beginning.
    ///
    /// # Errors
    /// As of [`Session::evaluate`]; values that are no numbers.
    pub fn add(&mut self, session: &mut Session, window: &[u32]) -> Result<()> {
        session.clear();
        for piece in window.chunks(CHUNK) {
            session.evaluate(piece, piece.len(), &mut |_, _| {})?;
            let mut read: BTreeMap<usize, Vec<f32>> = BTreeMap::new();
            for (input, sums) in self.inputs.iter().zip(&mut self.sums) {
                let scores = input.routed.map(|routed| routed.scores);
                for trace in [Some(input.trace), scores].into_iter().flatten() {
                    if let std::collections::btree_map::Entry::Vacant(entry) = read.entry(trace) {
                        entry.insert(session.traced(trace)?);
                    }
                }
                let values = &read[&input.trace];
                if let Some(odd) = values.iter().find(|x| !x.is_finite()) {
                    let place = input.weights.join(", ");
                    return Err(Error::new(place, "numbers to multiply with", odd));
                }
                let rows = values.chunks_exact(values.len() / piece.len());
                match input.routed {
                    None => rows.for_each(|row| sums.add(0, 1, row)),
                    Some(routed) => add_routed(sums, rows, &read[&routed.scores], &routed),
                }
            }
        }
        Ok(())
    }

    /// The importance of each matrix of the blocks, by its name in GGUF.
    pub fn finish(self) -> Importance {
        let named = self.names.into_iter().zip(self.sums);
        let each =
            named.flat_map(|(names, sums)| names.into_iter().map(move |n| (n, sums.clone())));
        let tensors = each.filter(|(name, sums)| name.starts_with("blk.") && !sums.rows.is_empty());
        Importance { tensors: tensors.collect(), ..Importance::default() }
    }
}

/// Adds rows to the experts that they choose.
fn add_routed<'a>(
    sums: &mut Inputs,
    rows: impl Iterator<Item = &'a [f32]>,
    scores: &[f32],
    &Routed { experts, op, apart, .. }: &Routed,
) {
    let (routes, used) = (route(scores, experts, &op.routing), op.routing.used);
    let chosen = routes.ids.chunks_exact(used).zip(routes.weights.chunks_exact(used));
    for (row, (ids, weights)) in rows.zip(chosen) {
        let width = if apart { row.len() / used } else { row.len() };
        for (i, (expert, weight)) in ids.iter().zip(weights).enumerate() {
            let start = if apart { i * width } else { 0 };
            let read = &row[start..start + width];
            match op.weighs_inputs && !apart {
                true => {
                    let weighed: Vec<f32> = read.iter().map(|x| x * *weight as f32).collect();
                    sums.add(*expert as usize, experts, &weighed);
                }
                false => sums.add(*expert as usize, experts, read),
            }
        }
    }
}

/// The tensor that a matrix is, or is a part of, in GGUF.
fn in_gguf(architecture: &Architecture, canonical: &str) -> Option<String> {
    let named = |name: &str| architecture.stored(name, true).into_iter().next();
    named(canonical).or_else(|| {
        let (block, part) = canonical.rsplit_once('.')?;
        let whole = match part {
            "q" | "k" | "v" => "qkv",
            "gate" | "up" => "gate_up",
            _ => return None,
        };
        named(&format!("{block}.{whole}"))
    })
}

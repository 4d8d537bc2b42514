//! One model on several devices: which of its engines computes a text.
//!
//! Each engine keeps what it computed, so that a conversation does best where its earlier turns
//! are; but an engine that has much to do is worth leaving. Both are counted in tokens of prompt:
//! the part of the prompt that the engine would have to compute, and [`NEIGHBOUR`] for each text
//! that is under way there. SGLang's and vLLM's routers weigh the same two.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use delft::{Adapter, Engine};

/// The cost of a text under way for one that comes to the same engine, in tokens of prompt: its
/// steps take longer by so much.
const NEIGHBOUR: usize = 256;

/// A model's engines, and what is under way on each.
pub(crate) struct Replicas {
    engines: Vec<Engine>,
    /// Texts that each computes at a time.
    parallel: usize,
    under_way: Mutex<Vec<Vec<Text>>>,
}

/// A text under way.
struct Text {
    prompt: Arc<[u32]>,
    /// Whether with an adapter, and which.
    adapter: Option<PathBuf>,
}

/// The work of an engine for a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Offer {
    /// Tokens of its prompt that are not there yet.
    rest: usize,
    /// Other texts under way.
    others: usize,
}

impl Offer {
    /// Those with room go first, then those that cost least, then those with fewest texts.
    fn rank(self, parallel: usize) -> (bool, usize, usize) {
        let cost = self.rest.saturating_add(self.others.saturating_mul(NEIGHBOUR));
        (self.others >= parallel, cost, self.others)
    }
}

/// The place of the offer that ranks first; 0 of none.
fn least(offers: impl Iterator<Item = Offer>, parallel: usize) -> usize {
    let ranks = offers.map(|offer| offer.rank(parallel)).enumerate();
    ranks.min_by_key(|(_, rank)| *rank).map_or(0, |(at, _)| at)
}

impl Replicas {
    /// Creates the replicas; there is at least one engine.
    pub(crate) fn new(engines: Vec<Engine>, parallel: usize) -> Replicas {
        let under_way = Mutex::new(engines.iter().map(|_| Vec::new()).collect());
        Replicas { engines, parallel, under_way }
    }

    fn under_way(&self) -> MutexGuard<'_, Vec<Vec<Text>>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place on the engine that has the least to do for a text that begins so; `adapters` has a
    /// handle for each engine, or there is none.
    pub(crate) fn place(self: &Arc<Self>, prompt: &[u32], adapters: &[Adapter]) -> Place {
        let mut under_way = self.under_way();
        let adapter = adapters.first().map(Adapter::path);
        let offer = |(at, engine): (usize, &Engine)| {
            // What is being computed will be there, too.
            let alike = under_way[at].iter().filter(|text| text.adapter.as_deref() == adapter);
            let coming = alike.map(|text| common(&text.prompt, prompt)).max().unwrap_or(0);
            let there = engine.cached(prompt, adapters.get(at)).max(coming);
            Offer { rest: prompt.len().saturating_sub(there), others: under_way[at].len() }
        };
        let at = match self.engines.len() {
            1 => 0,
            _ => least(self.engines.iter().enumerate().map(offer), self.parallel),
        };
        let prompt: Arc<[u32]> = prompt.into();
        let adapter = adapter.map(Path::to_path_buf);
        under_way[at].push(Text { prompt: prompt.clone(), adapter });
        drop(under_way);
        Place { replicas: self.clone(), at, adapter: adapters.get(at).cloned(), prompt }
    }
}

/// Tokens that two sequences have in common from the first on.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// A text's place on an engine, until it is dropped.
pub(crate) struct Place {
    replicas: Arc<Replicas>,
    at: usize,
    adapter: Option<Adapter>,
    prompt: Arc<[u32]>,
}

impl Place {
    pub(crate) fn engine(&self) -> &Engine {
        &self.replicas.engines[self.at]
    }

    pub(crate) fn adapter(&self) -> Option<&Adapter> {
        self.adapter.as_ref()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut under_way = self.replicas.under_way();
        let texts = &mut under_way[self.at];
        if let Some(own) = texts.iter().position(|text| Arc::ptr_eq(&text.prompt, &self.prompt)) {
            texts.swap_remove(own);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The engine that is chosen, of some with so many tokens to compute and so many texts under
    /// way.
    fn chosen(offers: &[(usize, usize)]) -> usize {
        least(offers.iter().map(|&(rest, others)| Offer { rest, others }), 4)
    }

    #[test]
    fn what_is_cached_is_weighed_against_what_is_under_way() {
        // Idle and alike: the first.
        assert_eq!(chosen(&[(100, 0), (100, 0)]), 0);
        // A conversation goes where its earlier turns are, though others are there.
        assert_eq!(chosen(&[(2000, 0), (50, 3)]), 1);
        // A few words in common are no reason to wait for others.
        assert_eq!(chosen(&[(90, 1), (100, 0)]), 1);
        // One that is full is left alone while another has room.
        assert_eq!(chosen(&[(0, 4), (9000, 3)]), 1);
        // Where all are full the least is waited for.
        assert_eq!(chosen(&[(900, 4), (10, 4)]), 1);
        assert_eq!(chosen(&[(100, 5), (100, 4)]), 1);
    }
}

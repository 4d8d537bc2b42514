//! Parts that the attention kernels share: the form of a layer, the source of cached numbers, the
//! units of the softmax.
//!
//! The softmax is computed online (Milakov & Gimelshein 2018) in powers of two: a score's exponent
//! is `score * log2(e)`, folded into the scale. A masked score is [`MASKED`] and a maximum begins
//! at [`FLOOR`], far above it and far below any score: so a row that sees nothing has the sum 0,
//! and no infinity or NaN arises on the way.

use tile::dsl::*;
use tile::launch::Requirement;

use super::Attention;
use crate::kv_write::Cache;

/// A score that is not seen.
pub(super) const MASKED: f32 = -3.0e38;
/// The maximum over nothing.
pub(super) const FLOOR: f32 = -1.0e30;

/// The properties of an attention layer that are fixed when its kernels are built.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionForm {
    /// Elements per head, a multiple of 16 but among packed rows.
    pub head_dim: u32,
    /// Query heads per key/value head.
    pub group: u32,
    /// Whether values are the keys, and both buffers one.
    pub keys_only: bool,
    /// Whether a query sees a limited number of the latest keys: the constant `window`.
    pub window: bool,
    /// Whether those are the keys of its own chunk of `window` positions.
    pub chunked: bool,
    /// Whether scores are bounded, `cap * tanh(score / cap)`: the constant `cap`.
    pub softcap: bool,
    /// Whether each head has a sink, a logit that joins the denominator alone: the buffer `sinks`,
    /// one f32 per query head.
    pub sinks: bool,
    /// Whether each head has a slope, by which scores fall with the distance of a key: the buffer
    /// `slopes`, one f32 per query head.
    pub slopes: bool,
    /// Whether a query sees only positions that were chosen for it: the constant `count` and the
    /// buffer `chosen`, `[rows, count]` in f32, in ascending order; what is missing is in front.
    pub chosen: bool,
}

impl AttentionForm {
    /// The form of an operation whose values are its keys, or not.
    pub fn of(op: &Attention, keys_only: bool) -> AttentionForm {
        AttentionForm {
            head_dim: op.head_dim as u32,
            group: (op.heads / op.kv_heads) as u32,
            keys_only,
            window: op.window.is_some(),
            chunked: op.chunked,
            softcap: op.cap.is_some(),
            sinks: op.sinks,
            slopes: op.slopes,
            chosen: op.chosen.is_some(),
        }
    }

    /// Full causal attention without extras.
    pub fn plain(head_dim: u32, group: u32) -> AttentionForm {
        AttentionForm {
            head_dim,
            group,
            keys_only: false,
            window: false,
            chunked: false,
            softcap: false,
            sinks: false,
            slopes: false,
            chosen: false,
        }
    }

    /// Declares what only some forms bind, after all else.
    #[track_caller]
    pub(crate) fn extras(self) -> Extras {
        let vector = |name: &str| {
            let vector = <In>::declare(name);
            require(Requirement::Length(name.to_owned(), dim("kv_heads") * self.group));
            vector
        };
        let sinks = self.sinks.then(|| vector("sinks"));
        Extras {
            sinks,
            slopes: self.slopes.then(|| vector("slopes")),
            window: self.window.then(|| Const::<u32>::declare("window")),
            chunked: self.chunked,
            cap: self.softcap.then(|| Const::<f32>::declare("cap")),
            chosen: self.chosen.then(|| {
                let positions = <In>::declare("chosen");
                require(Requirement::Length("chosen".to_owned(), dim("rows") * dim("count")));
                Chosen { positions, count: Const::<u32>::declare("count") }
            }),
        }
    }
}

/// Buffers and constants that only some forms have.
#[derive(Clone, Copy)]
pub(crate) struct Extras {
    pub(crate) sinks: Option<In>,
    pub(crate) slopes: Option<In>,
    pub(crate) window: Option<Val<u32>>,
    pub(crate) chunked: bool,
    pub(crate) cap: Option<Val<f32>>,
    pub(crate) chosen: Option<Chosen>,
}

/// The positions that were chosen for each row.
#[derive(Clone, Copy)]
pub(crate) struct Chosen {
    positions: In,
    count: Val<u32>,
}

impl Chosen {
    /// Which entries of a row that sees `visible` positions are positions: from the first number up
    /// to the second, both 0 if it sees none.
    #[track_caller]
    pub(super) fn entries(&self, visible: Val<u32>) -> (Val<u32>, Val<u32>) {
        let there = visible.min(self.count);
        let end = select(Order::eq(there, 0u32), 0u32, self.count);
        (end - there, end)
    }

    /// The position of an entry of a row, which must be one.
    #[track_caller]
    pub(super) fn position(&self, row: Val<u32>, entry: Val<u32>) -> Val<u32> {
        self.positions.get(row * self.count + entry).max(0.0f32).u32()
    }
}

impl Extras {
    /// The first position that the query before `end` sees.
    #[track_caller]
    pub(crate) fn first(&self, end: Val<u32>) -> Val<u32> {
        match self.window {
            Some(chunk) if self.chunked => (end.max(1u32) - 1u32) / chunk * chunk,
            Some(window) => end - window.min(end),
            None => 0u32.val(),
        }
    }

    /// Two factors: the first on `q . k`; the second on the result (after the cap, if there is
    /// one), which makes it an exponent of two.
    #[track_caller]
    pub(crate) fn scales(&self, scale: Val<f32>) -> (Val<f32>, Val<f32>) {
        let log2e = std::f32::consts::LOG2_E;
        match self.cap {
            Some(cap) => (scale / cap, cap * log2e),
            None => (1.0f32.val(), scale * log2e),
        }
    }
}

/// The quotient of a rounded up.
#[track_caller]
pub(super) fn ceil_div(a: Val<u32>, b: impl IntoVal<u32>) -> Val<u32> {
    let b = b.val();
    (a + b - 1u32) / b
}

/// One of a layer's two caches, as a kernel reads it: numbers, or codes of i8, or eight to a u32,
/// with a factor for each block.
#[derive(Clone, Copy)]
pub(crate) struct Stored {
    /// `[slots, kv_heads, head_dim]` numbers or codes.
    pub(super) array: In,
    /// `[slots, kv_heads, head_dim / 32]`, of codes.
    pub(super) scales: Option<In>,
}

impl Stored {
    pub(crate) fn numbers(array: In) -> Stored {
        Stored { array, scales: None }
    }

    pub(crate) fn codes(array: In, scales: In) -> Stored {
        Stored { array, scales: Some(scales) }
    }

    /// The codes of elements `at` on, of which there are `count`, 1, 2, 4 or 8, in one word; none
    /// where codes have words of their own.
    #[track_caller]
    pub(super) fn nibbles(self, at: Val<u32>, count: u32) -> Option<Vec<Val<f32>>> {
        if self.array.scalar() != Scalar::U32 {
            return None;
        }
        let word = self.array.get_raw(at / 8u32).cast::<u32>();
        let word = word >> (at % 8u32 * 4u32);
        Some((0..count).map(|j| ((word >> (4 * j)) & 15u32).f32() - 8.0).collect())
    }

    /// Element `at` of a key or value of one head.
    #[track_caller]
    pub(crate) fn element(self, cache: &Cache, slot: Val<u32>, at: Val<u32>) -> Val<f32> {
        let place = cache.element(slot, 0u32) + at;
        let number = match self.nibbles(place, 1) {
            Some(one) => one[0],
            None => self.array.get_raw(place).f32(),
        };
        self.factor(cache, slot, 0u32.val(), at).map_or(number, |factor| number * factor)
    }

    /// The factor on the elements of a head from `at` on; `None` where elements are plain numbers.
    #[track_caller]
    pub(super) fn factor(
        self,
        cache: &Cache,
        slot: Val<u32>,
        head: Val<u32>,
        at: Val<u32>,
    ) -> Option<Val<f32>> {
        self.scales.map(|scales| scales.get(cache.scale(slot, head) + at / 32u32))
    }
}

/// Requires that buffers are aligned for 16-byte vectors.
pub(crate) fn require_aligned(names: &[&str]) {
    names.iter().for_each(|name| require(Requirement::Aligned((*name).to_owned(), 16)));
}

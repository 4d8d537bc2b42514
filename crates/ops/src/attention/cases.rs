//! Cases and benchmarks of the attention kernels: sequences in a scattered block pool whose unused
//! slots are NaN, so that a kernel that reads a slot it should not see is found out.

use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, noise, tolerance};
use tile::dsl::Recipe;
use tile::launch::Numbers;
use tile::types::Scalar;

use super::decode::{
    DecodeLoad, DecodeSchedule, KeyShares, attention_decode, attention_decode_codes,
};
use super::{AttentionForm, Scores, WideTiling};
use crate::kv_write::{reference_q8_0, reference_turbo, slot};
use crate::trial::{every_float, random};
use crate::tuned::{ForAttention, HOPPER};

/// A layer's form and a step: what a case is made from.
#[derive(Debug, Clone)]
pub(crate) struct Scene {
    pub(crate) why: &'static str,
    pub(crate) kv_heads: usize,
    pub(crate) group: usize,
    pub(crate) head_dim: usize,
    pub(crate) keys_only: bool,
    pub(crate) window: Option<usize>,
    pub(crate) chunked: bool,
    pub(crate) cap: Option<f32>,
    pub(crate) sinks: bool,
    pub(crate) slopes: bool,
    /// How many positions are chosen for each row, if not all.
    pub(crate) chosen: Option<usize>,
    /// Slots per block.
    pub(crate) block: usize,
    /// How decoding multiplies.
    pub(crate) schedule: DecodeSchedule,
    /// How many keys a group takes.
    pub(crate) shares: KeyShares,
    /// Per row: its sequence and its position; `u32::MAX` is an idle row.
    pub(crate) rows: Vec<(u32, u32)>,
}

impl Default for Scene {
    fn default() -> Self {
        Scene {
            why: "",
            kv_heads: 2,
            group: 2,
            head_dim: 64,
            keys_only: false,
            window: None,
            chunked: false,
            cap: None,
            sinks: false,
            slopes: false,
            chosen: None,
            block: 16,
            schedule: DecodeSchedule::Lanes { stages: 0 },
            shares: KeyShares::Launched,
            rows: vec![(0, 40)],
        }
    }
}

/// Keys and values of a cache: as buffers to bind, and as the numbers a kernel sees.
pub(crate) struct Stores {
    pub(crate) buffers: Vec<Buffer>,
    pub(crate) keys: Vec<f32>,
    pub(crate) values: Vec<f32>,
}

impl Scene {
    pub(crate) fn form(&self) -> AttentionForm {
        AttentionForm {
            head_dim: self.head_dim as u32,
            group: self.group as u32,
            keys_only: self.keys_only,
            window: self.window.is_some(),
            chunked: self.chunked,
            softcap: self.cap.is_some(),
            sinks: self.sinks,
            slopes: self.slopes,
            chosen: self.chosen.is_some(),
        }
    }

    /// The first position that a query sees in front of `end`, the one behind its own.
    pub(crate) fn first(&self, end: usize) -> usize {
        match self.window {
            Some(chunk) if self.chunked => end.saturating_sub(1) / chunk * chunk,
            Some(window) => end.saturating_sub(window),
            None => 0,
        }
    }

    pub(crate) fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    pub(crate) fn scale(&self) -> f32 {
        1.0 / (self.head_dim as f32).sqrt()
    }

    /// How many positions each sequence has.
    pub(crate) fn lengths(&self) -> Vec<usize> {
        let count = self.rows.iter().map(|r| r.0 as usize + 1).max().unwrap_or(0);
        let mut lengths = vec![0; count];
        for &(sequence, position) in self.rows.iter().filter(|r| r.1 != u32::MAX) {
            let length = &mut lengths[sequence as usize];
            *length = (*length).max(position as usize + 1);
        }
        lengths
    }

    /// Blocks per row of the table: as the longest sequence needs.
    pub(crate) fn stride(&self) -> usize {
        self.lengths().into_iter().max().unwrap_or(0).div_ceil(self.block).max(1)
    }

    fn blocks(&self) -> usize {
        self.lengths().len() * self.stride()
    }

    /// The blocks in an order that no sequence follows.
    pub(crate) fn table(&self) -> Vec<u32> {
        let blocks = self.blocks();
        let apart =
            [7, 5, 3, 2, 1].into_iter().find(|a: &usize| !blocks.is_multiple_of(*a)).unwrap_or(1);
        (0..blocks).map(|i| ((i * apart + 1) % blocks) as u32).collect()
    }

    /// The slot of each sequence and position. It keeps the table, which takes longer to make than
    /// all else that a case is made of.
    pub(crate) fn slots(&self) -> impl Fn(usize, usize) -> usize {
        let (table, stride, block) = (self.table(), self.stride(), self.block);
        move |sequence, position| slot(&table, stride, block, sequence, position)
    }

    /// Slots that hold something.
    fn used(&self) -> Vec<bool> {
        let (mut used, slot) = (vec![false; self.blocks() * self.block], self.slots());
        for (sequence, length) in self.lengths().into_iter().enumerate() {
            (0..length).for_each(|p| used[slot(sequence, p)] = true);
        }
        used
    }

    /// The seed of values, which is that of keys if values are keys.
    fn values(&self) -> u64 {
        if self.keys_only { 2 } else { 3 }
    }

    /// A cache of `C`, NaN where no position lies.
    pub(crate) fn plain(&self, stored: Scalar) -> Stores {
        let width = self.kv_heads * self.head_dim;
        let used = self.used();
        let fill = |seed| {
            let mut values = noise(seed, used.len() * width);
            for (row, _) in values.chunks_exact_mut(width).zip(&used).filter(|(_, used)| !**used) {
                row.fill(f32::NAN);
            }
            Buffer::floats(stored, &values)
        };
        let buffers = vec![fill(2), fill(self.values())];
        Stores { keys: buffers[0].to_f32(), values: buffers[1].to_f32(), buffers }
    }

    /// A cache of turbo, whose scales are NaN where no position lies; keys and values as they lie,
    /// turned.
    pub(crate) fn turbo(&self) -> Stores {
        let width = self.kv_heads * self.head_dim;
        let used = self.used();
        let fill = |seed| {
            let (words, scales) = reference_turbo(&noise(seed, used.len() * width));
            let scales: Vec<f32> = scales
                .iter()
                .enumerate()
                .map(|(i, d)| if used[i * 32 / width] { d.to_f32() } else { f32::NAN })
                .collect();
            let code = |i: usize| (words[i / 8] >> (i % 8 * 4) & 15) as f32 - 8.0;
            let seen: Vec<f32> = (0..8 * words.len()).map(|i| code(i) * scales[i / 32]).collect();
            (seen, [Buffer::words(&words), Buffer::floats(Scalar::F16, &scales)])
        };
        let [(keys, key_buffers), (values, value_buffers)] = [fill(2), fill(self.values())];
        Stores { keys, values, buffers: [key_buffers, value_buffers].concat() }
    }

    /// A cache of q8_0, whose scales are NaN where no position lies.
    pub(crate) fn q8_0(&self) -> Stores {
        let width = self.kv_heads * self.head_dim;
        let used = self.used();
        let fill = |seed| {
            let (codes, scales) = reference_q8_0(&noise(seed, used.len() * width));
            let scales: Vec<f32> = scales
                .iter()
                .enumerate()
                .map(|(i, d)| if used[i * 32 / width] { d.to_f32() } else { f32::NAN })
                .collect();
            let seen: Vec<f32> =
                codes.iter().enumerate().map(|(i, c)| f32::from(*c) * scales[i / 32]).collect();
            let codes = codes.into_iter().map(|c| c as u8).collect();
            (Buffer::raw(Scalar::I8, codes), Buffer::floats(Scalar::F16, &scales), seen)
        };
        let ((k, ks, keys), (v, vs, values)) = (fill(2), fill(self.values()));
        Stores { buffers: vec![k, ks, v, vs], keys, values }
    }

    pub(crate) fn queries(&self, query: Scalar) -> Buffer {
        // Scores of a few units, so that weights differ.
        let values: Vec<f32> = noise(1, self.rows.len() * self.heads() * self.head_dim)
            .into_iter()
            .map(|v| v * 4.0)
            .collect();
        Buffer::floats(query, &values)
    }

    pub(crate) fn sinks(&self) -> Buffer {
        let logits: Vec<f32> = noise(4, self.heads()).into_iter().map(|v| v * 3.0).collect();
        Buffer::floats(Scalar::F32, &logits)
    }

    /// Slopes from what hardly matters to what leaves a few keys.
    pub(crate) fn slopes(&self) -> Buffer {
        let slopes: Vec<f32> = (0..self.heads()).map(|h| 0.5 / (1 + 3 * h) as f32).collect();
        Buffer::floats(Scalar::F32, &slopes)
    }

    /// A head's slope, 0 where there are none.
    pub(crate) fn slope(&self, head: usize) -> f32 {
        if self.slopes { self.slopes().to_f32()[head] } else { 0.0 }
    }

    /// The buffers that only some forms bind.
    pub(crate) fn vectors(&self) -> Vec<Buffer> {
        let sinks = self.sinks.then(|| self.sinks());
        let chosen = || {
            let rows = (0..self.rows.len()).flat_map(|row| {
                let seen = self.seen(row);
                let missing = self.chosen.unwrap_or(0) - seen.len();
                let none = std::iter::repeat_n(crate::indexer::NONE, missing);
                none.chain(seen.into_iter().map(|p| p as f32))
            });
            Buffer::floats(Scalar::F32, &rows.collect::<Vec<f32>>())
        };
        let slopes = self.slopes.then(|| self.slopes());
        sinks.into_iter().chain(slopes).chain(self.chosen.map(|_| chosen())).collect()
    }

    /// The positions that a row's queries see.
    fn seen(&self, row: usize) -> Vec<usize> {
        let end = self.rows[row].1.wrapping_add(1) as usize;
        let all = self.first(end)..end;
        let Some(count) = self.chosen.filter(|count| *count < all.len()) else {
            return all.collect();
        };
        // Some of every part, and the last.
        (1..=count).map(|i| all.start + i * all.len() / count - 1).collect()
    }

    /// The expected result of each row's queries over a cache, with `keys` and `values` indexed by
    /// `(slot, head)`.
    pub(crate) fn expected(&self, q: &Buffer, stores: &Stores) -> Vec<f64> {
        let (q, sinks, d) = (q.to_f32(), self.sinks().to_f32(), self.head_dim);
        let (mut y, slot) = (Vec::new(), self.slots());
        for (row, &(sequence, _)) in self.rows.iter().enumerate() {
            let seen = self.seen(row);
            for h in 0..self.heads() {
                let at =
                    |p: &usize| (slot(sequence as usize, *p) * self.kv_heads + h / self.group) * d;
                let keys: Vec<&[f32]> = seen.iter().map(|p| &stores.keys[at(p)..][..d]).collect();
                let values: Vec<&[f32]> =
                    seen.iter().map(|p| &stores.values[at(p)..][..d]).collect();
                let sink = self.sinks.then(|| sinks[h]);
                let slope = self.slope(h);
                let scores = Scores { scale: self.scale(), cap: self.cap, sink, slope };
                let q = &q[(row * self.heads() + h) * d..][..d];
                y.extend(scores.reference(q, &keys, &values));
            }
        }
        y
    }

    /// The numbers that every kernel takes.
    pub(crate) fn numbers(&self) -> Numbers {
        let mut numbers = Numbers::new()
            .with("stride", self.stride() as u32)
            .with("block", self.block as u32)
            .with("kv_heads", self.kv_heads as u32)
            .with_f32("scale", self.scale());
        if let Some(window) = self.window {
            numbers.set("window", window as u32);
        }
        if let Some(cap) = self.cap {
            numbers.set("cap", cap.to_bits());
        }
        if let Some(count) = self.chosen {
            numbers.set("count", count as u32);
        }
        numbers
    }

    pub(crate) fn words(&self) -> [Buffer; 3] {
        let (sequences, positions): (Vec<u32>, Vec<u32>) = self.rows.iter().copied().unzip();
        [positions, sequences, self.table()].map(|words| Buffer::words(&words))
    }

    fn decode(&self, query: Scalar, kernel: Recipe, stores: Stores, splits: usize) -> Case {
        let q = self.queries(query);
        let (rows, heads) = (self.rows.len(), self.heads());
        let expected = self.expected(&q, &stores);
        let len = q.len();
        let mut buffers = vec![q];
        buffers.extend(stores.buffers);
        buffers.extend(self.words());
        let y = buffers.len();
        buffers.extend([
            Buffer::zeros(query, len),
            Buffer::zeros(Scalar::F32, rows * heads * splits * self.head_dim),
            Buffer::zeros(Scalar::F32, rows * heads * splits * 2),
            Buffer::zeros(Scalar::U32, rows * heads),
        ]);
        let counters = Expected::Exact(vec![0.0; rows * heads]);
        buffers.extend(self.vectors());
        Case {
            label: self.label(&format!("{splits} splits")),
            kernel: kernel.record(),
            numbers: self.numbers().with("rows", rows as u32).with("splits", splits as u32),
            buffers,
            expected: vec![(y, Expected::Near(expected, tolerance(query))), (y + 3, counters)],
        }
    }

    pub(crate) fn label(&self, extra: &str) -> String {
        let (rows, heads, d) = (self.rows.len(), self.heads(), self.head_dim);
        format!("{rows} x {heads} heads of {} x {d}, {extra}: {}", self.kv_heads, self.why)
    }
}

/// Decoding through shared memory, small enough for devices with 32 KiB of it.
fn staged_scenes(head_dim: usize) -> Vec<(Scene, usize)> {
    let schedule = DecodeSchedule::Lanes { stages: 2 };
    let of = || Scene { head_dim, block: 32, schedule, ..Scene::default() };
    vec![
        (Scene { why: "two stages", rows: vec![(0, 500), (1, 1), (2, 129)], ..of() }, 2),
        (Scene { why: "two stages, one for each turn", rows: vec![(0, 255)], ..of() }, 1),
        (
            Scene {
                why: "two stages, chosen positions",
                rows: vec![(0, 400), (1, 30)],
                chosen: Some(70),
                ..of()
            },
            2,
        ),
        (Scene { why: "two stages, a window", rows: vec![(0, 400)], window: Some(50), ..of() }, 1),
    ]
}

/// The scenes that decoding is tested on, with the number of splits of each.
fn decode_scenes() -> Vec<(Scene, usize)> {
    let of = Scene::default;
    let uneven = || vec![(2, 70), (0, 0), (1, 15), (3, 33), (4, u32::MAX)];
    vec![
        (Scene { why: "one query, one key", rows: vec![(0, 0)], ..of() }, 1),
        (Scene { why: "a key before a block's end", rows: vec![(0, 14)], group: 1, ..of() }, 1),
        (Scene { why: "rows of unlike lengths, one idle", rows: uneven(), ..of() }, 1),
        (Scene { why: "shared by two", rows: uneven(), group: 4, ..of() }, 2),
        (Scene { why: "shared by five", rows: vec![(0, 300), (1, 7)], group: 3, ..of() }, 5),
        (Scene { why: "seven heads", group: 7, kv_heads: 1, rows: vec![(0, 90)], ..of() }, 2),
        (Scene { why: "two packs", group: 16, kv_heads: 1, rows: vec![(0, 70)], ..of() }, 2),
        (Scene { why: "wide heads", head_dim: 128, group: 4, rows: vec![(0, 65)], ..of() }, 2),
        (Scene { why: "wider heads", head_dim: 256, kv_heads: 1, rows: vec![(0, 37)], ..of() }, 2),
        (Scene { why: "heads of 96", head_dim: 96, kv_heads: 1, rows: vec![(0, 130)], ..of() }, 2),
        (Scene { why: "chosen positions", rows: uneven(), chosen: Some(9), ..of() }, 1),
        (
            Scene {
                why: "chosen within a window, shared by two",
                window: Some(200),
                rows: vec![(0, 300), (1, 7)],
                chosen: Some(90),
                ..of()
            },
            2,
        ),
        (Scene { why: "a window of one", window: Some(1), rows: vec![(0, 50), (1, 0)], ..of() }, 2),
        (Scene { why: "a window over a block's edge", window: Some(20), ..of() }, 2),
        (Scene { why: "a window at a block's edge", window: Some(25), ..of() }, 1),
        (Scene { why: "a window of more than there is", window: Some(4096), ..of() }, 1),
        (Scene { why: "chunks", window: Some(12), chunked: true, rows: uneven(), ..of() }, 1),
        (Scene { why: "a chunk's first", window: Some(20), chunked: true, ..of() }, 1),
        (Scene { why: "bounded scores", cap: Some(2.0), ..of() }, 1),
        (Scene { why: "sinks, one row idle", sinks: true, rows: uneven(), ..of() }, 1),
        (Scene { why: "slopes, one row idle", slopes: true, rows: uneven(), ..of() }, 1),
        (Scene { why: "slopes, shared by five", slopes: true, rows: vec![(0, 300)], ..of() }, 5),
        (
            Scene {
                why: "all extras, shared by five",
                sinks: true,
                cap: Some(5.0),
                window: Some(200),
                rows: vec![(1, 350), (0, 3)],
                ..of()
            },
            5,
        ),
        (Scene { why: "blocks of 256", block: 256, rows: vec![(0, 280)], ..of() }, 2),
        (
            Scene {
                why: "shares by their own lengths",
                shares: KeyShares::Own { most: 100, parts: 3 },
                rows: vec![(0, 450), (1, 130), (2, 99), (3, u32::MAX), (4, 0)],
                ..of()
            },
            4,
        ),
    ]
}

/// Decoding by the matrix unit, in schedules small enough for 32 KiB of shared memory.
fn matrix_scenes() -> Vec<(Scene, usize)> {
    let of = |simds, keys, stages| {
        let schedule = DecodeSchedule::Matrix { simds, keys, stages };
        Scene { block: keys as usize, schedule, ..Scene::default() }
    };
    let uneven = || vec![(2, 70), (0, 0), (1, 15), (3, 33), (4, u32::MAX)];
    let wide = || Scene { head_dim: 128, group: 4, kv_heads: 1, ..of(1, 16, 2) };
    let small = |simds, keys, stages| Scene { head_dim: 16, ..of(simds, keys, stages) };
    vec![
        (Scene { why: "tiles: one query, one key", rows: vec![(0, 0)], ..of(2, 16, 2) }, 1),
        (
            Scene {
                why: "tiles: rows of unlike lengths, one idle",
                rows: uneven(),
                ..of(2, 16, 2)
            },
            1,
        ),
        (Scene { why: "tiles: shared by two", rows: uneven(), group: 4, ..of(2, 16, 2) }, 2),
        (Scene { why: "tiles: shared by five", rows: vec![(0, 300), (1, 7)], ..of(1, 32, 2) }, 5),
        (Scene { why: "tiles: shared by twenty", rows: vec![(0, 330)], ..small(1, 16, 2) }, 20),
        (Scene { why: "tiles: one stage", rows: vec![(0, 200)], ..of(2, 16, 1) }, 1),
        (Scene { why: "tiles: three stages", rows: vec![(0, 200), (1, 47)], ..small(2, 32, 3) }, 1),
        (Scene { why: "tiles: eight simdgroups", rows: vec![(0, 129)], ..small(8, 16, 2) }, 1),
        (
            Scene {
                why: "tiles: sixteen heads",
                group: 16,
                rows: vec![(0, 90)],
                ..small(2, 16, 2)
            },
            2,
        ),
        (
            Scene { why: "tiles: packs of ten", group: 20, rows: vec![(0, 40)], ..small(2, 16, 2) },
            2,
        ),
        (
            Scene {
                why: "tiles: shares by their own lengths",
                shares: KeyShares::Own { most: 40, parts: 4 },
                rows: vec![(0, 250), (1, 63), (2, 3)],
                ..of(2, 16, 2)
            },
            4,
        ),
        (Scene { why: "tiles: wide heads", rows: vec![(0, 65)], ..wide() }, 2),
        (Scene { why: "tiles: heads of 80", head_dim: 80, rows: vec![(0, 77)], ..wide() }, 1),
        (Scene { why: "tiles: heads of 96", head_dim: 96, rows: vec![(0, 33)], ..wide() }, 2),
        (Scene { why: "tiles: a window of one", window: Some(1), ..of(2, 16, 2) }, 2),
        (
            Scene {
                why: "tiles: a window",
                window: Some(45),
                rows: vec![(0, 100)],
                ..of(2, 16, 2)
            },
            2,
        ),
        (
            Scene {
                why: "tiles: all extras, shared by five",
                sinks: true,
                cap: Some(5.0),
                window: Some(200),
                rows: vec![(1, 350), (0, 3)],
                ..of(2, 16, 2)
            },
            5,
        ),
    ]
}

/// Decoding by all simdgroups of a group together, over values that are their keys.
fn together_scenes() -> Vec<(Scene, usize)> {
    let wide =
        |tiles, columns, stages| DecodeSchedule::Together(WideTiling { tiles, columns, stages });
    let of = |why, schedule, block| {
        let form = Scene { kv_heads: 1, group: 4, keys_only: true, ..Scene::default() };
        Scene { why, schedule, block, ..form }
    };
    vec![
        (Scene { rows: vec![(0, 0)], ..of("together: one query, one key", wide(1, 2, 2), 32) }, 1),
        (
            Scene {
                rows: vec![(0, 70), (1, u32::MAX), (2, 129), (1, 5)],
                ..of("together: rows of unlike lengths, one idle", wide(1, 4, 1), 64)
            },
            1,
        ),
        (Scene { rows: vec![(0, 200)], ..of("together: three stages", wide(1, 2, 3), 32) }, 2),
        (
            Scene {
                group: 20,
                rows: vec![(0, 150), (1, 40)],
                ..of("together: twenty heads, shared by three", wide(2, 2, 3), 32)
            },
            3,
        ),
        (
            Scene {
                head_dim: 144,
                group: 32,
                rows: vec![(0, 90)],
                ..of("together: packs of sixteen, heads of 144", wide(1, 2, 2), 64)
            },
            2,
        ),
        (
            Scene {
                shares: KeyShares::Own { most: 64, parts: 3 },
                rows: vec![(0, 250), (1, 63), (2, 3)],
                ..of("together: shares by their own lengths", wide(1, 2, 2), 32)
            },
            3,
        ),
        (
            Scene {
                cap: Some(5.0),
                sinks: true,
                window: Some(45),
                rows: vec![(0, 100), (1, 3)],
                ..of("together: a bound, sinks and a window", wide(1, 2, 2), 32)
            },
            2,
        ),
        (
            Scene {
                chosen: Some(37),
                rows: vec![(0, 130), (1, 20), (0, 36)],
                ..of("together: chosen positions", wide(1, 2, 2), 32)
            },
            1,
        ),
    ]
}

pub(crate) fn decode() -> Vec<Case> {
    fn of(query: Scalar, stored: Scalar, every: usize) -> Vec<Case> {
        let odd =
            Scene { why: "heads of 80", head_dim: 80, rows: vec![(0, 33)], ..Scene::default() };
        let mut scenes = decode_scenes();
        scenes.push((odd, 2));
        // A lane's share of a head ends past the head.
        for (head_dim, why) in [(10, "heads of 10"), (6, "heads of 6"), (21, "heads of 21")] {
            let rows = vec![(0, 33), (1, 200)];
            scenes
                .push((Scene { why, head_dim, group: 4, rows, block: 32, ..Scene::default() }, 2));
        }
        if stored.bytes() == 2 {
            scenes.extend(staged_scenes(16));
        }
        if stored.bytes() == 2 && query == stored {
            scenes.extend(matrix_scenes());
            scenes.extend(together_scenes());
        }
        let case = |(s, splits): (Scene, usize)| {
            s.decode(
                query,
                attention_decode(query, stored, s.form(), s.schedule, s.shares),
                s.plain(stored),
                splits,
            )
        };
        scenes.into_iter().step_by(every).map(case).collect()
    }
    let mut all = of(Scalar::F32, Scalar::F32, 1);
    all.extend(of(Scalar::F16, Scalar::F16, 1));
    all.extend(of(Scalar::BF16, Scalar::BF16, 1));
    all.extend(of(Scalar::F32, Scalar::F16, 3));
    all.extend(of(Scalar::BF16, Scalar::F16, 4));
    all
}

pub(crate) fn decode_codes() -> Vec<Case> {
    [decode_q8_0(), decode_turbo()].concat()
}

fn decode_turbo() -> Vec<Case> {
    fn of(query: Scalar) -> Vec<Case> {
        let case = |(s, splits): (Scene, usize)| {
            let kernel = attention_decode_codes(query, Scalar::U32, s.form(), s.schedule, s.shares);
            s.decode(query, kernel, s.turbo(), splits)
        };
        decode_scenes().into_iter().step_by(2).map(case).collect()
    }
    every_float(of)
}

fn decode_q8_0() -> Vec<Case> {
    fn of(query: Scalar) -> Vec<Case> {
        let case = |(s, splits): (Scene, usize)| {
            let kernel = attention_decode_codes(query, Scalar::I8, s.form(), s.schedule, s.shares);
            s.decode(query, kernel, s.q8_0(), splits)
        };
        let plain = decode_scenes().into_iter().step_by(2);
        let mut scenes: Vec<(Scene, usize)> = plain.chain(staged_scenes(64)).collect();
        if query.bytes() == 2 {
            let coded = |scene: &Scene| matches!(scene.head_dim, 64 | 128);
            scenes.extend(matrix_scenes().into_iter().filter(|(scene, _)| coded(scene)));
            let whole = |scene: &Scene| scene.head_dim.is_multiple_of(32);
            scenes.extend(together_scenes().into_iter().filter(|(scene, _)| whole(scene)));
        }
        scenes.into_iter().map(case).collect()
    }
    every_float(of)
}

/// One row of a sequence: key/value heads, query heads per key/value head, elements, keys. The
/// first is long; the others have the geometry of an 8B, a 1B and a 0.6B model.
const LONG: [(usize, usize, usize, usize); 5] =
    [(8, 4, 128, 32_768), (8, 4, 64, 8192), (8, 4, 128, 4096), (8, 4, 64, 4096), (8, 2, 128, 4096)];

/// Sequences of an 8B model that decode together, and keys of each.
const MANY: [(usize, usize); 6] = [(1, 544), (8, 544), (32, 544), (32, 640), (128, 544), (8, 4096)];

/// Multiprocessors of an H200.
const PROCESSORS: u32 = 132;
const SHARED: u32 = 227 << 10;
const FEW: DecodeLoad = DecodeLoad::Few;
/// An H200's numbers.
const TUNED: &ForAttention = &HOPPER.attention;

fn decode_bench(
    query: Scalar,
    kernel: Recipe,
    schedule: DecodeSchedule,
    shares: KeyShares,
    rows: usize,
    stores: impl Fn(usize) -> Vec<Fill>,
    bits: u64,
    (kv_heads, group, d, keys): (usize, usize, usize, usize),
) -> Bench {
    let launched = || schedule.splits(PROCESSORS, kv_heads as u32, keys as u32);
    let splits = shares.splits(keys as u32).unwrap_or_else(launched) as usize;
    let (stride, heads) = (keys.div_ceil(256), rows * kv_heads * group);
    let words = |words: Vec<u32>| Fill::These(Buffer::words(&words));
    let mut buffers = vec![Fill::These(random(query, 1, heads * d))];
    buffers.extend(stores(rows * stride * 256 * kv_heads * d));
    buffers.extend([
        words(vec![keys as u32 - 1; rows]),
        words((0..rows as u32).collect()),
        words((0..(rows * stride) as u32).rev().collect()),
        Fill::Zeros(query, heads * d),
        Fill::Zeros(Scalar::F32, heads * splits * d),
        Fill::Zeros(Scalar::F32, heads * splits * 2),
        Fill::Zeros(Scalar::U32, heads),
    ]);
    let read = rows * keys * kv_heads * d;
    Bench {
        kernel: kernel.record(),
        label: format!("{rows} x {group} heads of {kv_heads} x {d}, {keys} keys"),
        numbers: Numbers::new()
            .with("stride", stride as u32)
            .with("block", 256)
            .with("kv_heads", kv_heads as u32)
            .with_f32("scale", 1.0 / (d as f32).sqrt())
            .with("rows", rows as u32)
            .with("splits", splits as u32),
        buffers,
        bytes: 2 * read as u64 * bits / 8,
        flops: 4 * (keys * heads * d) as u64,
        roof: Bottleneck::Memory,
    }
}

pub(crate) fn decode_benches() -> Vec<Bench> {
    fn of(query: Scalar) -> Vec<Bench> {
        let bench = |shape: (usize, usize, usize, usize)| {
            let form = AttentionForm::plain(shape.2 as u32, shape.1 as u32);
            let (shares, bits) = (KeyShares::Launched, 8 * query.bytes() as u64);
            let schedule =
                DecodeSchedule::pick(form, query, query, shape.3 as u32, FEW, SHARED, TUNED);
            let stores = |n| vec![Fill::Noise(query, n), Fill::Noise(query, n)];
            let kernel = attention_decode(query, query, form, schedule, shares);
            decode_bench(query, kernel, schedule, shares, 1, stores, bits, shape)
        };
        LONG.into_iter().map(bench).collect()
    }
    let latents = LATENTS.into_iter().map(|(rows, heads, keys)| latent_bench(rows, heads, keys));
    let all = |of| [None].into_iter().chain(OTHERS.map(Some)).map(move |other| many(of, other));
    every_float(of).into_iter().chain(MANY.into_iter().flat_map(all)).chain(latents).collect()
}

/// Rows over latents that all heads share, their heads, and keys of each.
const LATENTS: [(usize, usize, usize); 5] =
    [(1, 16, 8192), (1, 20, 8192), (1, 128, 8192), (16, 20, 4096), (128, 20, 4096)];

fn latent_bench(rows: usize, heads: usize, keys: usize) -> Bench {
    let (query, shape) = (Scalar::BF16, (1, heads, 576, keys));
    let load = match rows {
        1 => FEW,
        2..64 => DecodeLoad::Several,
        _ => DecodeLoad::Many,
    };
    let form = AttentionForm { keys_only: true, ..AttentionForm::plain(576, heads as u32) };
    let schedule = DecodeSchedule::pick(form, query, query, u32::MAX, load, SHARED, TUNED);
    let shares = schedule.shares(load, TUNED);
    let kernel = attention_decode(query, query, form, schedule, shares);
    let stores = |n| vec![Fill::Noise(query, n), Fill::Noise(query, 8)];
    let bench = decode_bench(query, kernel, schedule, shares, rows, stores, 16, shape);
    Bench { bytes: bench.bytes / 2, ..bench }
}

/// Beside what is picked for [`MANY`]: simdgroups, their batches in shared memory, and keys of a
/// part.
const OTHERS: [(u32, u32, u32); 5] =
    [(4, 2, 192), (4, 2, 576), (6, 2, 576), (6, 2, 1152), (12, 2, 576)];

/// As steps of many sequences share keys.
fn many((rows, keys): (usize, usize), other: Option<(u32, u32, u32)>) -> Bench {
    let (query, shape) = (Scalar::BF16, (8, 4, 128, keys));
    let (form, load) = (AttentionForm::plain(128, 4), DecodeLoad::Many);
    let (schedule, shares) = match other {
        None => {
            let picked = DecodeSchedule::pick(form, query, query, u32::MAX, load, SHARED, TUNED);
            (picked, picked.shares(load, TUNED))
        }
        Some((simds, stages, most)) => {
            let keys = TUNED.keys[1];
            let shares = KeyShares::Own { most, parts: 16 };
            (DecodeSchedule::Matrix { simds, keys, stages }, shares)
        }
    };
    let kernel = attention_decode(query, query, form, schedule, shares);
    let stores = |n| vec![Fill::Noise(query, n), Fill::Noise(query, n)];
    let bench = decode_bench(query, kernel, schedule, shares, rows, stores, 16, shape);
    let tiling = other.map_or(String::new(), |(simds, stages, most)| {
        format!(", {simds} simds x {stages}, parts of {most}")
    });
    Bench { label: bench.label + &tiling, ..bench }
}

pub(crate) fn decode_q8_0_benches() -> Vec<Bench> {
    let bench = |shape: (usize, usize, usize, usize)| {
        let form = AttentionForm::plain(shape.2 as u32, shape.1 as u32);
        let (query, codes, shares) = (Scalar::BF16, Scalar::I8, KeyShares::Launched);
        let schedule = DecodeSchedule::pick(form, query, codes, shape.3 as u32, FEW, SHARED, TUNED);
        let kernel = attention_decode_codes(query, codes, form, schedule, shares);
        let stores = |n| {
            let (codes, scales) = (Fill::Noise(Scalar::I8, n), Fill::Noise(Scalar::F16, n / 32));
            vec![codes.clone(), scales.clone(), codes, scales]
        };
        let mut bench = decode_bench(query, kernel, schedule, shares, 1, stores, 8, shape);
        // 34 bytes hold 32 numbers.
        bench.bytes = bench.bytes / 32 * 34;
        bench
    };
    LONG.into_iter().map(bench).collect()
}

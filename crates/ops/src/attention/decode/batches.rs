//! Keys and values on their way to the matrix unit: a simdgroup's batches in shared memory, as
//! operands of 16 bits or as codes of q8_0 that the simdgroup turns into operands when their turn
//! has come.

use tile::dsl::*;
use tile::ir::{LoadHint, ROW};

use super::Plan;
use crate::attention::form::Stored;
use crate::kv_write::Cache;

/// Elements between rows in shared memory: eight rows of 16 bytes then lie in different banks.
pub(super) const PAD: u32 = 8;

/// Keys or values of a batch as operands.
#[derive(Clone, Copy)]
pub(super) struct Operands {
    pub(super) array: Shared,
    lie: Lie,
}

/// How the rows of a batch lie in shared memory.
#[derive(Clone, Copy)]
enum Lie {
    /// So many elements apart.
    Rows(u32),
    /// 64 elements of each of so many rows, then the next 64, swizzled: what is copied of a row
    /// arrives in whole lines of 128 bytes, so that memory is asked for as much at once.
    Blocks(u32),
}

impl Operands {
    /// Elements of a batch of so many keys.
    fn size(&self, plan: Plan) -> u32 {
        match self.lie {
            Lie::Rows(row) => plan.keys * row,
            Lie::Blocks(keys) => keys * plan.head_dim,
        }
    }

    /// Where eight elements of a key lie, from a multiple of eight on, in a batch that begins at
    /// `from`.
    #[track_caller]
    fn place(&self, from: Val<u32>, key: Val<u32>, element: Val<u32>) -> Val<u32> {
        match self.lie {
            Lie::Rows(row) => from + key * row + element,
            Lie::Blocks(keys) => {
                let at = from + ((element / ROW * keys + key) * ROW + element % ROW);
                // As `tile::ir::swizzle` has it.
                at ^ ((at / ROW % 8u32) * 8u32)
            }
        }
    }

    /// Sixteen elements of each of sixteen keys, from element `element` and key `key` on, as a right
    /// operand: with a column for each key, or with a row.
    #[track_caller]
    pub(super) fn right(&self, from: Val<u32>, key: u32, element: u32, columns: bool) -> Frag {
        match self.lie {
            Lie::Rows(row) => {
                let at = from + (key * row + element);
                match columns {
                    true => Frag::right_transposed(self.array, at, row),
                    false => Frag::right(self.array, at, row),
                }
            }
            Lie::Blocks(keys) => {
                let at = from + ((element / ROW * keys + key) * ROW + element % ROW);
                match columns {
                    true => Frag::right_transposed_swizzled(self.array, at),
                    false => Frag::right_swizzled(self.array, at),
                }
            }
        }
    }
}

/// A layer's keys (kind 0) and values (1), by batches.
pub(super) trait Batches: Copy {
    /// Whether a batch that is [`Batches::ready`] leaves its stage free for the next.
    const FREES: bool;

    /// Where operands lie.
    fn operands(&self) -> Operands;

    /// Begins to copy a batch, whose first key is in a slot, to a stage; zeros for keys that are
    /// not to be kept.
    fn bring(
        &self,
        stage: Val<u32>,
        kind: u32,
        cache: &Cache,
        slot: Val<u32>,
        head: Val<u32>,
        keep: impl Fn(Val<u32>) -> Val<bool>,
    );

    /// An array that nothing uses once all batches have been read.
    fn spent(&self) -> Shared;

    /// Makes operands of a batch that has arrived and that no lane reads any more the former
    /// operands of: where they begin.
    fn ready(&self, stage: Val<u32>, kind: u32) -> Val<u32>;
}

/// How the lanes of a simdgroup share a batch: chunks of 16 bytes.
#[derive(Clone, Copy)]
struct Chunks {
    /// Elements of a chunk.
    elements: u32,
    /// Chunks of a key.
    per_key: u32,
    /// Chunks of a lane.
    count: u32,
}

impl Chunks {
    fn of(plan: Plan, elements: u32) -> Chunks {
        let per_key = plan.head_dim / elements;
        Chunks { elements, per_key, count: plan.keys * per_key / 32 }
    }

    /// The key and the first element of a lane's `i`th chunk.
    #[track_caller]
    fn at(self, i: u32) -> (Val<u32>, Val<u32>) {
        let Chunks { elements, per_key, .. } = self;
        // Where the lanes share out whole keys, a lane's element is always the same.
        if 32 % per_key == 0 {
            return (lane_id() / per_key + i * (32 / per_key), lane_id() % per_key * elements);
        }
        let chunk = lane_id() + 32 * i;
        (chunk / per_key, chunk % per_key * elements)
    }
}

/// Numbers that are operands as they are.
#[derive(Clone, Copy)]
pub(super) struct Numbers {
    stored: [In; 2],
    plan: Plan,
    stages: u32,
    /// `[simds, stages, 2]` batches.
    operands: Operands,
}

impl Numbers {
    pub(super) fn new(plan: Plan, stages: u32, stored: [In; 2]) -> Self {
        let lie = match plan.head_dim.is_multiple_of(ROW) {
            true => Lie::Blocks(plan.keys),
            false => Lie::Rows(plan.head_dim + PAD),
        };
        let all = plan.simds * stages * 2 * Numbers::elements(plan.head_dim, plan.keys);
        let array = Shared::stored(stored[0].scalar(), "batches", all);
        Numbers { stored, plan, stages, operands: Operands { array, lie } }
    }

    /// Elements of a batch.
    fn elements(head_dim: u32, keys: u32) -> u32 {
        keys * if head_dim.is_multiple_of(ROW) { head_dim } else { head_dim + PAD }
    }

    /// Bytes of a simdgroup's batches, in whose place `after` bytes follow.
    pub(super) fn bytes(head_dim: u32, keys: u32, stages: u32, after: u32) -> u32 {
        (stages * 2 * 2 * Numbers::elements(head_dim, keys)).max(after)
    }
}

impl Batches for Numbers {
    const FREES: bool = false;

    fn operands(&self) -> Operands {
        self.operands
    }

    fn spent(&self) -> Shared {
        self.operands.array
    }

    #[track_caller]
    fn bring(
        &self,
        stage: Val<u32>,
        kind: u32,
        cache: &Cache,
        slot: Val<u32>,
        head: Val<u32>,
        keep: impl Fn(Val<u32>) -> Val<bool>,
    ) {
        let chunks = Chunks::of(self.plan, 8);
        let (to, from) = (self.ready(stage, kind), cache.element(slot, head));
        for i in 0..chunks.count {
            let (key, element) = chunks.at(i);
            let to = self.operands.place(to, key, element);
            let from = from + key * (cache.kv_heads * cache.head_dim) + element;
            let stored = self.stored[kind as usize];
            copy_async(self.operands.array, to, stored, from, 8, Some(keep(key)));
        }
    }

    #[track_caller]
    fn ready(&self, stage: Val<u32>, kind: u32) -> Val<u32> {
        let size = self.operands.size(self.plan);
        (simd_id() * self.stages + stage) * (2 * size) + kind * size
    }
}

/// Codes of q8_0. A lane turns those into operands that it brought itself. Scales come in pairs, 4
/// bytes: 64 must divide the elements of a head.
#[derive(Clone, Copy)]
pub(super) struct Codes {
    stored: [Stored; 2],
    plan: Plan,
    stages: u32,
    /// `[simds, stages, 2, chunks, 32, 16]`.
    codes: Shared,
    /// `[simds, stages, 2, chunks, 32, 2]`: for each chunk the pair that holds its scale.
    scales: Shared,
    /// `[simds, keys, head_dim + PAD]`: keys, then values.
    operands: Operands,
}

impl Codes {
    /// Batches of codes that are decoded into operands of a type.
    pub(super) fn new(scalar: Scalar, plan: Plan, stages: u32, stored: [Stored; 2]) -> Self {
        let (row, lots) = (plan.head_dim + PAD, plan.simds * stages * 2);
        let chunks = 32 * Chunks::of(plan, 16).count;
        let codes = Shared::stored(Scalar::I8, "codes", lots * chunks * 16);
        let scales = Shared::stored(Scalar::F16, "scales", lots * chunks * 2);
        let array = Shared::stored(scalar, "operands", plan.simds * plan.keys * row);
        let operands = Operands { array, lie: Lie::Rows(row) };
        Codes { stored, plan, stages, codes, scales, operands }
    }

    /// Bytes of a simdgroup's batches, in the place of whose codes `after` bytes follow.
    pub(super) fn bytes(head_dim: u32, keys: u32, stages: u32, after: u32) -> u32 {
        let chunks = stages * 2 * keys * head_dim / 16;
        (16 * chunks).max(after) + 4 * chunks + keys * 2 * (head_dim + PAD)
    }

    /// Which of all chunks a lane's `i`th is.
    #[track_caller]
    fn chunk(&self, stage: Val<u32>, kind: u32, i: u32) -> Val<u32> {
        let lot = (simd_id() * self.stages + stage) * 2u32 + kind;
        (lot * Chunks::of(self.plan, 16).count + i) * 32u32 + lane_id()
    }
}

impl Batches for Codes {
    const FREES: bool = true;

    fn operands(&self) -> Operands {
        self.operands
    }

    fn spent(&self) -> Shared {
        self.codes
    }

    #[track_caller]
    fn bring(
        &self,
        stage: Val<u32>,
        kind: u32,
        cache: &Cache,
        slot: Val<u32>,
        head: Val<u32>,
        keep: impl Fn(Val<u32>) -> Val<bool>,
    ) {
        let chunks = Chunks::of(self.plan, 16);
        let (codes, scales) = (cache.element(slot, head), cache.scale(slot, head));
        let apart = cache.kv_heads * cache.head_dim;
        let Stored { array: from, scales: factors } = self.stored[kind as usize];
        let factors = factors.expect("codes have scales");
        for i in 0..chunks.count {
            let ((key, element), to) = (chunks.at(i), self.chunk(stage, kind, i));
            let keep = Some(keep(key));
            copy_async(self.codes, to * 16u32, from, codes + key * apart + element, 16, keep);
            let pair = scales + key * (apart / 32u32) + element / 64u32 * 2u32;
            copy_async(self.scales, to * 2u32, factors, pair, 2, keep);
        }
    }

    #[track_caller]
    fn ready(&self, stage: Val<u32>, kind: u32) -> Val<u32> {
        let chunks = Chunks::of(self.plan, 16);
        let start = simd_id() * self.operands.size(self.plan);
        for i in 0..chunks.count {
            let ((key, element), chunk) = (chunks.at(i), self.chunk(stage, kind, i));
            let codes = self.codes.get_raw_vec(chunk * 16u32, 16, LoadHint::None);
            let pair = self.scales.get_raw_vec(chunk * 2u32, 2, LoadHint::None);
            let second = Order::ne(element & 32u32, 0u32);
            let scale = select(second, pair[1].f32(), pair[0].f32());
            let to = self.operands.array.scalar();
            let values: Vec<Val<Raw>> = codes.iter().map(|c| (c.f32() * scale).to(to)).collect();
            for (half, values) in (0..).zip(values.chunks(8)) {
                let at = self.operands.place(start, key, element + 8 * half);
                self.operands.array.set_raw_vec(at, values);
            }
        }
        simd_barrier();
        start
    }
}

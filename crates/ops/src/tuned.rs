//! [`CardNumbers`]: what was measured on a GPU, or counted for one, and decides which schedule a
//! kernel gets, and which kernel a product.
//!
//! A GPU is known by what it reports ([`Card`]); one that was not measured has the row of its kind.
//! Every number suits every GPU: of the schedules named here those are taken that fit its shared
//! memory, and all give the same results, but for the last bits. What a kernel is made of whatever
//! the GPU, such as its threads per row, is a constant beside the kernel.
//!
//! A row for another GPU: an arm in [`CardNumbers::of`], and a constant with the numbers that
//! differ, measured by `tile bench` and `delft bench`.

use std::ops::RangeInclusive;

use crate::attention::decode::KeyShares;
use crate::attention::{WideTiling, prefill};
use crate::linear::gemm::GemmSchedule;
use crate::linear::{Held, Traits};

/// The report of a GPU by which its row of numbers is chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Card {
    /// An NVIDIA GPU of a compute capability, such as `(9, 0)`.
    Nvidia(u32, u32),
    /// An Apple GPU.
    Apple,
}

/// The numbers of a kind of GPU.
#[derive(Debug)]
pub struct CardNumbers {
    /// The GPU, and how its numbers were found.
    pub found: &'static str,
    /// Products of few rows: [`crate::linear::GemvSchedule`].
    pub gemv: ForGemv,
    /// Products of many rows: [`crate::linear::gemm::GemmSchedule`].
    pub gemm: ForGemm,
    /// Products of rows that decode together: [`crate::linear::stream::StreamTiling`].
    pub stream: ForStream,
    /// Attention.
    pub attention: ForAttention,
    /// Numbers of rows and of sequences from which another kernel, or the vendor's library, is
    /// faster.
    pub thresholds: Thresholds,
    /// Schedules of many small groups, for GPUs that hide the latency of memory by groups that take
    /// turns rather than by loads that few groups have under way.
    pub small_groups: Option<SmallGroups>,
}

/// A condition on a product, and what it gets.
pub type TunedRule<T> = (fn(&Traits) -> bool, T);

/// Products of few rows.
#[derive(Debug)]
pub struct ForGemv {
    /// Loads that a simdgroup holds for one or two rows: the first rule whose condition is
    /// met.
    pub held: &'static [TunedRule<Held>],
    /// Matrix rows from which every simdgroup has several, which then share the activations.
    pub tall: u32,
    /// Rows of one matrix up to which each has a simdgroup of its own, as a router's of experts.
    pub short: u32,
    /// Columns from which on a matrix has one group on every processor, if its rows want this many
    /// simdgroups there.
    pub filled: (u32, RangeInclusive<u32>),
}

/// Candidates for up to a number of rows, the larger block first: for weights that are copied, and
/// for weights that are converted.
pub type Candidates = (u32, &'static [GemmSchedule], &'static [GemmSchedule]);

/// Products of many rows.
#[derive(Debug)]
pub struct ForGemm {
    /// Candidates by rows; the last for any number.
    pub candidates: &'static [Candidates],
    /// Candidates where four simdgroups can multiply together, *from* a number of rows on.
    pub warpgroups: Candidates,
    /// Candidates of [`GemmSchedule::alike`] by rows, the last for any number, the larger block
    /// first. All add the same terms in the same order.
    pub alike: &'static [(u32, &'static [GemmSchedule])],
}

/// Products of rows that decode together.
#[derive(Debug)]
pub struct ForStream {
    /// Steps in shared memory at most.
    pub stages: u32,
    /// Steps in shared memory of which there must be room for as many if they are long.
    pub enough: u32,
    /// Tiles of sums of a simdgroup at most: of 16 x 16, eight registers each.
    pub sums: u32,
    /// Rows up to which simdgroups share terms, without a look at the other way.
    pub few: u32,
    /// Rows of activations of a group at most, where simdgroups have sums of their own.
    pub many: u32,
    /// Rows up to which two groups share a multiprocessor where pairs of matrices are converted.
    pub two: u32,
    /// How long 16-bit weights take, which wait for memory.
    pub stored: Cost,
    /// How long weights take that are converted, in every turn anew.
    pub converted: Cost,
    /// Likewise, where simdgroups have sums of their own, each of which reads all activations.
    pub own: Cost,
}

/// About how long a block of a product takes, in hundredths of what a tile of 16 matrix rows takes
/// for few rows of activations.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// For each tile.
    pub tile: u32,
    /// For each tile and row of activations.
    pub tile_row: u32,
    /// For each row of activations.
    pub row: u32,
}

/// Attention.
#[derive(Debug)]
pub struct ForAttention {
    /// Simdgroups of a group of tokens' attention on the matrix unit, the first that fits, by
    /// [`DecodeLoad`](crate::attention::decode::DecodeLoad).
    pub simds: [[u32; 2]; 3],
    /// Their keys of a batch, for heads of up to 64 elements and for longer ones.
    pub keys: [u32; 2],
    /// Fewer keys than the first are left to lanes, if as many query elements as the second share
    /// them: they make few groups, and one that has a processor's shared memory to itself keeps the
    /// next kernels' groups from where they would balance.
    pub crowded: (u32, u32),
    /// How a row's keys are shared where its own number of keys decides: in loads for several
    /// sequences, and by the matrix unit in loads for many.
    pub own: [KeyShares; 2],
    /// Sequences of a load for many.
    pub many: usize,
    /// Groups that share the keys of a prompt's row at most, if it is attended to by itself: each
    /// has scratch.
    pub prompt_parts: u32,
    /// Blocks of prompts' attention for heads of up to 128 elements and for longer ones, with 32
    /// KiB of shared memory.
    pub small: [prefill::PrefillTiling; 2],
    /// Those with 99 KiB, and 64 Ki registers per processor.
    pub large: [prefill::PrefillTiling; 2],
    /// Blocks of prompts' attention for heads of more than 256 elements, the first that fits.
    pub wide: &'static [WideTiling],
    /// Likewise of attention of single tokens whose values are their keys, of those that have as
    /// many tiles as heads want.
    pub wide_rows: &'static [WideTiling],
    /// How their keys are shared where a row's own number of keys decides: in loads for several
    /// sequences, and for many.
    pub own_wide: [KeyShares; 2],
}

/// Numbers of rows and of sequences from which another kernel is faster.
#[derive(Debug)]
pub struct Thresholds {
    /// With up to this many sequences, rows that decode take the kernels for few rows although
    /// those may read a matrix more than once: usually fewer sequences are active. The first number
    /// is for models with unpacked matrices, the second for fully packed ones, where unpacking for
    /// tiles takes longer.
    pub few_sequences: [usize; 2],
    /// Sequences from which on rows that decode go to the vendor's library, where matrices have 16
    /// bits: it takes hardly longer for 128 rows than for 32.
    pub library_sequences: usize,
    /// Sequences from which on rows that decode go to warpgroups: with 16-bit matrices, and where
    /// matrices have too few rows for all processors, so that sums are split.
    pub warpgroup_sequences: [usize; 2],
    /// Rows from which the vendor's product, with unpacking, is faster than our kernels.
    pub unpack: usize,
    /// The same where unpacked copies of matrices are kept.
    pub copied: usize,
}

/// Schedules of many small groups.
#[derive(Debug)]
pub struct SmallGroups {
    /// Matrix rows of a simdgroup in products of few rows; half as many for more than two rows, for
    /// pairs of matrices and for formats with long runs, each.
    pub outputs: u32,
    /// Their threads.
    pub threads: u32,
    /// Blocks of products of many rows, by rows, the last for any number: 11.5, 12.5 and 15 KiB, of
    /// which results take 5. The last has the fewest reads of shared memory per product; the first
    /// computes the fewest unused rows.
    pub blocks: &'static [(u32, GemmSchedule)],
}

impl CardNumbers {
    /// The row of a GPU.
    pub fn of(card: Card) -> &'static CardNumbers {
        match card {
            Card::Nvidia(9, 0) => &HOPPER,
            Card::Nvidia(..) => &NVIDIA,
            Card::Apple => &APPLE,
        }
    }
}

/// Compute capability 9.0.
pub const HOPPER: CardNumbers = CardNumbers {
    found: "measured on an H200: 132 multiprocessors, 227 KiB of shared memory, 4.8 TB/s",
    gemv: ForGemv {
        // Two steps are under way. A thread has 128 registers when 512 threads share a
        // multiprocessor, 64 when 1024 do: of formats with many words a run, more threads with
        // smaller steps hold more. Long runs take registers for their activations, too.
        held: &[
            (|t| t.pair && (t.words > 5 || t.exact), held(2, 256, 2)),
            (|t| t.pair, held(4, 256, 2)),
            (|t| t.exact, held(2, 512, 2)),
            (|t| t.long && t.several, held(2, 256, 2)),
            (|t| t.long && t.out >= 8192 && t.words > 7, held(2, 256, 2)),
            (|t| t.long && t.out >= 8192, held(4, 256, 2)),
            (|t| t.long, held(2, 512, 1)),
            (|t| t.several && t.words > 4, held(4, 256, 2)),
            // Many columns, of four bits in particular: more threads have their activations ready
            // sooner.
            (|t| t.words > 5 && (t.cols > 4096 || t.out >= 8192), held(2, 512, 2)),
            (|t| t.words > 4 && t.run == 32 && t.cols > 8192, held(2, 512, 2)),
            // Codes that are looked up take as many instructions as their words take bytes.
            (|t| t.words > 5 || t.looked_up, held(4, 256, 2)),
            (|_| true, held(8, 256, 2)),
        ],
        tall: 8192,
        short: 512,
        filled: (8192, 20..=28),
    },
    // With matrices of 4096 x 14336 and 4096 x 4096; warpgroups with 128, 256 and 512 rows of them.
    gemm: ForGemm {
        candidates: &[
            (16, &[s(16, 128, 128, 1, 8, 3), s(16, 64, 128, 1, 4, 4)], &[s(16, 64, 128, 1, 4, 2)]),
            (32, &[s(32, 128, 64, 1, 4, 4), s(32, 64, 128, 1, 4, 4)], &[s(32, 64, 128, 1, 4, 2)]),
            (
                64,
                &[s(64, 128, 64, 2, 4, 3), s(64, 64, 64, 2, 2, 3)],
                &[s(64, 128, 128, 2, 4, 2), s(64, 32, 128, 2, 2, 3)],
            ),
            (
                u32::MAX,
                &[GemmSchedule::LARGE, GemmSchedule::MEDIUM, s(64, 64, 64, 2, 2, 3)],
                &[GemmSchedule::MEDIUM, s(64, 64, 128, 2, 2, 2)],
            ),
        ],
        warpgroups: (
            65,
            &[GemmSchedule::WIDE, GemmSchedule::SQUARE, w(64, 128, 8), w(64, 64, 8)],
            // So small that one group converts weights while another on the processor multiplies.
            &[w(128, 128, 2), w(64, 128, 3)],
        ),
        alike: &[
            (16, &[k(16, 64), k(16, 32), GemmSchedule::SHARED]),
            (32, &[k(32, 64), k(32, 32), k(32, 16), k(16, 32), GemmSchedule::SHARED]),
            (
                u32::MAX,
                &[k(64, 32), k(64, 16), k(32, 32), k(32, 16), k(16, 32), GemmSchedule::SHARED],
            ),
        ],
    },
    // On an H100, too.
    stream: ForStream {
        stages: 6,
        enough: 4,
        sums: 16,
        few: 32,
        many: 128,
        two: 8,
        stored: Cost { tile: 100, tile_row: 0, row: 1 },
        converted: Cost { tile: 100, tile_row: 2, row: 1 },
        own: Cost { tile: 20, tile_row: 4, row: 1 },
    },
    attention: ForAttention {
        // Smaller groups, of which a processor has room for three, or two, stream their keys while
        // others begin or merge; they need many rows, or many keys.
        simds: [[8, 4], [4, 2], [6, 4]],
        keys: [32, 16],
        // Whole models with such heads lost an eighth; those with smaller ones gained.
        crowded: (1024, 512),
        // Smaller parts would cost more to begin and to merge than they gain. Seven batches of six
        // simdgroups, whose groups leave the next kernels' little room while rows are few.
        own: [KeyShares::Own { most: 192, parts: 16 }, KeyShares::Own { most: 672, parts: 16 }],
        many: 64,
        prompt_parts: 4,
        small: [tiling(4, 1, 32), tiling(2, 1, 16)],
        large: [tiling(4, 2, 64), tiling(4, 1, 32)],
        wide: &[wide(4, 3, 2), wide(4, 2, 2), wide(2, 2, 1), wide(1, 2, 2)],
        wide_rows: &[wide(1, 4, 2), wide(2, 4, 2), wide(1, 2, 2)],
        // A group has a processor for itself, so that it should not begin and end often.
        own_wide: [
            KeyShares::Own { most: 256, parts: 32 },
            KeyShares::Own { most: 2048, parts: 8 },
        ],
    },
    thresholds: Thresholds {
        few_sequences: [4, 8],
        library_sequences: 96,
        warpgroup_sequences: [48, 24],
        unpack: 256,
        copied: 64,
    },
    small_groups: None,
};

/// Any other NVIDIA GPU.
pub const NVIDIA: CardNumbers = CardNumbers {
    found: "not measured: an H200's numbers, and the library where it has warpgroups",
    thresholds: Thresholds { library_sequences: 48, ..HOPPER.thresholds },
    ..HOPPER
};

/// Any Apple GPU.
pub const APPLE: CardNumbers = CardNumbers {
    found: "not measured: counts of instructions, and what is public of these GPUs",
    small_groups: Some(SmallGroups {
        outputs: 4,
        threads: 64,
        blocks: &[
            (16, s(16, 64, 32, 1, 4, 1)),
            (63, s(32, 64, 32, 2, 2, 1)),
            (u32::MAX, s(64, 64, 32, 2, 2, 1)),
        ],
    }),
    ..HOPPER
};

const fn held(words: u32, threads: u32, resident: u32) -> Held {
    Held { loads: words, threads, resident }
}

const fn wide(tiles: u32, columns: u32, stages: u32) -> WideTiling {
    WideTiling { tiles, columns, stages }
}

const fn tiling(simds: u32, tiles: u32, keys: u32) -> prefill::PrefillTiling {
    prefill::PrefillTiling { simds, tiles, keys }
}

pub(crate) const fn s(
    bm: u32,
    bn: u32,
    bk: u32,
    simds_m: u32,
    simds_n: u32,
    stages: u32,
) -> GemmSchedule {
    GemmSchedule { bm, bn, bk, simds_m, simds_n, simds_k: 1, stages, warpgroups: false }
}

/// A block of four simdgroups that multiply together.
pub(crate) const fn w(bm: u32, bn: u32, stages: u32) -> GemmSchedule {
    let (simds_m, simds_n, simds_k) = (bm / 16, 1, 1);
    GemmSchedule { bm, bn, bk: 64, simds_m, simds_n, simds_k, stages, warpgroups: true }
}

/// A block of long steps, whose sums eight simdgroups share: few groups then have many weights on
/// their way.
pub(crate) const fn k(bm: u32, bn: u32) -> GemmSchedule {
    let (simds_m, simds_n, simds_k, stages) = (1, 1, 8, 2);
    GemmSchedule { bm, bn, bk: 512, simds_m, simds_n, simds_k, stages, warpgroups: false }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_an_entry_for_any_number_of_rows() {
        fn rises(most: impl Iterator<Item = u32>) -> bool {
            let most: Vec<u32> = most.collect();
            most.is_sorted_by(|a, b| a < b) && most.last() == Some(&u32::MAX)
        }
        for tuned in
            [CardNumbers::of(Card::Nvidia(9, 0)), CardNumbers::of(Card::Nvidia(8, 9)), &APPLE]
        {
            assert!(rises(tuned.gemm.candidates.iter().map(|(most, ..)| *most)), "{tuned:?}");
            assert!(rises(tuned.gemm.alike.iter().map(|(most, _)| *most)), "{tuned:?}");
            let small = tuned.small_groups.iter().flat_map(|small| small.blocks);
            assert!(tuned.small_groups.is_none() || rises(small.map(|(most, _)| *most)));
            let traits = Traits {
                pair: false,
                several: false,
                exact: false,
                long: false,
                looked_up: false,
                words: 4,
                run: 8,
                cols: 64,
                out: 64,
            };
            assert!(tuned.gemv.held.iter().any(|(meets, _)| meets(&traits)), "{tuned:?}");
        }
    }
}

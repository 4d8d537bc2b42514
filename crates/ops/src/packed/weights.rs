//! [`PackedWeights`]: what kernels read packed and dense matrices with, whatever their format.
//!
//! A row is read in runs: what one 16-byte load of its base plane holds. Loading
//! ([`PackedWeights::load`]) gives raw words, to be kept in registers while other loads are under
//! way; [`PackedWeights::run`] then makes a [`WordRun`] of them, which yields weights as f32
//! ([`WordRun::floats`]) or bytes for `dot4` with their scales ([`WordRun::quads`],
//! [`WordRun::scaled`]).

use super::tiles::{ROWS, RUNS, Tile};
use super::{Entry, Format, Packing};
use tile::dsl::*;
use tile::ir::LoadHint;

/// A matrix that a kernel reads: one buffer of words, whatever the format.
#[derive(Debug, Clone, Copy)]
pub struct PackedWeights {
    words: In<u32>,
    format: Format,
    starts: [Val<u32>; 5],
    /// The row that counts as the first.
    first: Option<Val<u32>>,
    /// See [`PackedWeights::with_zero`].
    zero: Option<Val<u32>>,
}

/// The scale, zero and offset of neighbouring elements of a run:
/// `w = scale * (code - zero) + offset`.
#[derive(Debug, Clone, Copy)]
pub struct Scaled {
    /// Multiplies the code.
    pub scale: Val<f32>,
    /// The format's zero point.
    pub zero: f32,
    /// Is added; none is 0.
    pub offset: Option<Val<f32>>,
}

impl Scaled {
    /// The weight of a code less its zero.
    #[track_caller]
    fn weight(&self, code: Val<f32>) -> Val<f32> {
        let scaled = self.scale * code;
        self.offset.map_or(scaled, |offset| scaled + offset)
    }
}

/// The numbers from which the [`Scaled`]s of a run are computed where a block has numbers of its
/// own: `scale = d * byte`, `offset = -min * byte`.
#[derive(Debug, Clone)]
pub struct Supers {
    /// The block's factor of scales.
    pub d: Val<f32>,
    /// Its factor of offsets, less the sign.
    pub min: Option<Val<f32>>,
    /// The bytes of each part: of the scale, and of the offset.
    pub bytes: Vec<(Val<i32>, Option<Val<i32>>)>,
}

/// The words of one run, ready to be taken apart.
#[derive(Debug, Clone)]
pub struct WordRun {
    format: Format,
    base: Vec<Val<u32>>,
    high: Vec<Val<u32>>,
    /// Shifted so that the run's first entry is lowest.
    entries: Vec<Val<u32>>,
    block: Option<Val<u32>>,
    zero: Option<Val<u32>>,
}

impl PackedWeights {
    /// Declares the buffer, a parameter of the kernel under construction, of a matrix with `cols`
    /// columns.
    #[track_caller]
    pub fn declare(name: &str, format: Format, cols: Val<u32>) -> PackedWeights {
        let starts = format.starts(0u32.val(), cols);
        PackedWeights { words: In::declare(name), format, starts, first: None, zero: None }
    }

    /// Masks of codes are added to `zero`, a number that is 0 without a compiler knowing it of any
    /// bit. NVIDIA's has an instruction that takes a mask and an exponent at once, but of the two
    /// only one may be a literal: it would move the other to a register for each code that is
    /// converted.
    pub fn with_zero(self, zero: Val<u32>) -> PackedWeights {
        PackedWeights { zero: Some(zero), ..self }
    }

    /// How its elements are stored.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The word at which a row begins, or of a matrix in tiles the row's number: what
    /// [`PackedWeights::load`] is given. That of a sum of rows is the sum of theirs.
    #[track_caller]
    pub fn row(&self, row: impl IntoVal<u32>) -> Val<u32> {
        let row = row.val();
        let row = self.first.map_or(row, |first| first + row);
        if self.format.together() > 1 { row } else { row * self.starts[4] }
    }

    /// The first word of the tile in which a run of a row lies.
    #[track_caller]
    fn tile(&self, tile: &Tile, row: Val<u32>, run: Val<u32>) -> Val<u32> {
        row / ROWS * (self.starts[4] * ROWS) + run / RUNS * tile.words()
    }

    /// The rows from one on, as a matrix: one of several that lie one after another.
    pub fn starting_at(self, first: Val<u32>) -> PackedWeights {
        PackedWeights { first: Some(first), ..self }
    }

    /// Reads the [`Format::words`] words of run `run` (elements `run * format.run()` on) of the row
    /// at `row`: the base and high planes are streamed, what neighbours share is left in the cache.
    #[track_caller]
    pub fn load(&self, row: Val<u32>, run: impl IntoVal<u32>) -> Vec<Val<u32>> {
        let run = run.val();
        if let Some(tile) = Tile::of(self.format) {
            let first = self.tile(&tile, row, run);
            let (row, run) = (row % ROWS, run % RUNS);
            let get = |at: Val<u32>, count, hint| self.words.get_vec(first + at, count, hint);
            return in_tile(&tile, row, run, get);
        }
        let per = self.format.per_word();
        let mut words = Vec::new();
        for (plane, count) in self.format.counts().into_iter().enumerate().filter(|(_, n)| *n > 0) {
            let shared = per[plane] / self.format.run();
            let index = if shared > 1 { run / shared } else { run * count };
            let hint = if plane < 2 { LoadHint::Stream } else { LoadHint::None };
            words.extend(self.words.get_vec(row + self.starts[plane] + index, count as u8, hint));
        }
        words
    }

    /// Begins to copy what [`PackedWeights::load`] reads to shared memory, where a simdgroup's 32
    /// lanes have [`Format::words`] words each from `to` on: plane after plane, lane after lane. Of
    /// a matrix in tiles they have a tile there: its rows and runs in the order of lanes.
    #[track_caller]
    pub fn copy(
        &self,
        row: Val<u32>,
        run: impl IntoVal<u32>,
        (shared, to): (Shared<u32>, Val<u32>),
    ) {
        let run = run.val();
        if let Some(tile) = Tile::of(self.format) {
            let first = self.tile(&tile, row, run);
            for begin in (0..tile.words()).step_by(128) {
                let at = lane_id() * 4u32 + begin;
                let copy = || copy_async(shared, to + at, self.words, first + at, 4, None);
                match (tile.words() - begin) / 4 {
                    32.. => copy(),
                    lanes => test(lane_id().lt(lanes)).then(copy).otherwise(|| {}),
                }
            }
            return;
        }
        let per = self.format.per_word();
        let mut before = 0;
        for (plane, count) in self.format.counts().into_iter().enumerate().filter(|(_, n)| *n > 0) {
            let shared_by = per[plane] / self.format.run();
            let index = if shared_by > 1 { run / shared_by } else { run * count };
            let from = row + self.starts[plane] + index;
            copy_async(
                shared,
                to + lane_id() * count + before,
                self.words,
                from,
                count as u8,
                None,
            );
            before += 32 * count;
        }
    }

    /// Begins to copy the four words of a run of a dense 16-bit matrix to shared memory, in order.
    #[track_caller]
    pub fn copy_run(&self, row: Val<u32>, run: Val<u32>, (shared, to): (Shared<u32>, Val<u32>)) {
        copy_async(shared, to, self.words, row + run * 4u32, 4, None);
    }

    /// The words that [`PackedWeights::copy`] brought this lane, as [`PackedWeights::load`] would
    /// have returned them.
    #[track_caller]
    pub fn copied(&self, shared: Shared<u32>, from: Val<u32>) -> Vec<Val<u32>> {
        if let Some(tile) = Tile::of(self.format) {
            let get = |at: Val<u32>, count, _| shared.get_vec(from + at, count, LoadHint::None);
            return in_tile(&tile, lane_id() / RUNS, lane_id() % RUNS, get);
        }
        let mut words = Vec::new();
        let mut before = 0;
        for count in self.format.counts().into_iter().filter(|n| *n > 0) {
            let at = from + lane_id() * count + before;
            words.extend(shared.get_vec(at, count as u8, LoadHint::None));
            before += 32 * count;
        }
        words
    }

    /// Run `run` of the words that [`PackedWeights::load`] returned, ready to be decoded.
    #[track_caller]
    pub fn run(&self, words: &[Val<u32>], run: impl IntoVal<u32>) -> WordRun {
        let format = self.format;
        let [base, high, entries, block] = self.format.counts().map(|n| n as usize);
        let (base, rest) = words.split_at(base);
        let (high, rest) = rest.split_at(high);
        let (entries, rest) = rest.split_at(entries);
        let mut entries = entries.to_vec();
        if let (Some(p), [word]) = (format.packing(), &mut entries[..]) {
            // Several runs find their entries in one word.
            let span = p.sub.max(format.run());
            let spans = format.per_word()[2] / span;
            if spans > 1 {
                let at = run.val() / (span / format.run()) % spans;
                *word = *word >> (at * (32 / spans));
            }
        }
        let block = rest[..block].first().copied();
        let (base, high) = (base.to_vec(), high.to_vec());
        WordRun { format, base, high, entries, block, zero: self.zero }
    }

    /// Reads a run and prepares it.
    #[track_caller]
    pub fn read(&self, row: Val<u32>, run: impl IntoVal<u32>) -> WordRun {
        let run = run.val();
        let words = self.load(row, run);
        self.run(&words, run)
    }
}

/// The words of a run of a row of a tile, as [`PackedWeights::load`] returns them; `get` reads some
/// from one of the tile's on.
#[track_caller]
fn in_tile(
    tile: &Tile,
    row: Val<u32>,
    run: Val<u32>,
    get: impl Fn(Val<u32>, u8, LoadHint) -> Vec<Val<u32>>,
) -> Vec<Val<u32>> {
    let mut words = Vec::new();
    for (plane, count) in tile.per_run.into_iter().enumerate().filter(|(_, n)| *n > 0) {
        let of = tile.plane(plane);
        let begin = row * of.row + of.start;
        if plane < 2 {
            words.extend(get(begin + run * of.run, count as u8, LoadHint::Stream));
            continue;
        }
        let at = match of.sharing {
            1 => begin + run * of.run,
            sharing if sharing >= RUNS => begin,
            sharing => begin + run / sharing,
        };
        // Not aligned to more than a word.
        (0..count).for_each(|i| words.extend(get(at + i, 1, LoadHint::None)));
    }
    words
}

impl WordRun {
    /// Elements that share a [`Scaled`].
    pub fn part(&self) -> usize {
        self.format.packing().map_or(self.format.run(), |p| p.sub.min(self.format.run())) as usize
    }

    /// The weights, exactly as the format's decoder gives them.
    #[track_caller]
    pub fn floats(&self) -> Vec<Val<f32>> {
        let codes = self.codes();
        let scaled = self.scaled();
        let weight = |(i, code): (usize, Val<f32>)| {
            scaled.get(i / self.part()).map_or(code, |part| part.weight(code))
        };
        codes.into_iter().enumerate().map(weight).collect()
    }

    /// Eight neighbours rounded to f16 or bf16, two a word, the first in the low half: the weights
    /// from `8 * octet` on, of a run whose [`WordRun::scaled`] is `scaled`. So few at a time keep
    /// registers free for sums.
    #[track_caller]
    pub fn octet(&self, scaled: &[Scaled], octet: u32, scalar: Scalar) -> Vec<Val<u32>> {
        if self.format == Format::Dense(scalar) {
            let first = 4 * octet as usize;
            return self.base[first..first + 4].to_vec();
        }
        let fours = 2 * octet as usize..2 * octet as usize + 2;
        let weights: Vec<Val<f32>> = match (self.format.packing(), scaled) {
            (Some(p), [_, ..]) => {
                let part = &scaled[8 * octet as usize / self.part()];
                fours.flat_map(|four| self.four_weights(&p, part, four)).collect()
            }
            _ => self.dense()[4 * fours.start..4 * fours.end].to_vec(),
        };
        weights.chunks_exact(2).map(|two| two[0].pack(two[1], scalar)).collect()
    }

    /// Eight neighbours times 2^[`RAISED`] in f16, two a word: the weights from `8 * octet` on, each
    /// beside the one that is two behind it, since their codes are sixteen bits apart. For quantised
    /// formats.
    #[track_caller]
    pub fn halves(&self, scaled: &[Scaled], octet: u32) -> Vec<Val<u32>> {
        let Some(p) = self.format.packing() else { return vec![] };
        let part = &scaled[8 * octet as usize / self.part()];
        let twice = |number: Val<f32>| {
            let number = number * (1 << RAISED) as f32;
            number.pack(number, Scalar::F16)
        };
        let none = || 0f32.val();
        let (scale, offset) = (twice(part.scale), twice(part.offset.unwrap_or_else(none)));
        let one = 0x3C00_3C00u32.val();
        let mut halves = Vec::new();
        for four in 2 * octet as usize..2 * octet as usize + 2 {
            let (word, k) = self.four_codes(&p, four);
            for second in [0, 8] {
                let (shift, mask) = (second + p.bits * k, ((1u32 << p.bits) - 1) * 0x0001_0001);
                let codes = if shift > 0 { word >> shift } else { word };
                let codes = self.zero.map_or_else(|| codes & mask, |zero| codes & (zero + mask));
                // 1024 and the code: in the mantissa of 2^10 the lowest bit counts 1.
                let more = -(1024.0 + p.zero as f32);
                let code = (codes | 0x6400_6400u32)
                    .fma_halves(one, more.val().pack(more.val(), Scalar::F16));
                halves.push(code.fma_halves(scale, offset));
            }
        }
        halves
    }

    /// The codes less the format's zero, as f32; of a dense matrix, the weights.
    #[track_caller]
    pub fn codes(&self) -> Vec<Val<f32>> {
        let Some(p) = self.format.packing() else { return self.dense() };
        // One plane is read where it lies; two are first joined, which leaves a code in each byte,
        // as the look into a table does.
        let (words, fields) = match (p.table, p.bits) {
            (Some(table), _) => (self.found(table), 1),
            (None, 8) => (self.base.iter().map(|w| *w ^ 0x8080_8080).collect(), 1),
            _ if p.high() > 0 => (self.quads(), 1),
            _ => (self.base.clone(), 8 / p.bits),
        };
        let mut codes = Vec::new();
        for word in words {
            let upper = word >> 16u32;
            (0..fields).for_each(|k| codes.extend(four(&p, [word, upper], k, self.zero)));
        }
        codes
    }

    /// Four weights of a part, each by one multiplication with addition: what makes a number of a
    /// code is taken back by what is added. Codes are moved up to [`LOWEST`], so that this is off
    /// by no more than 1/512 of what a code counts.
    #[track_caller]
    fn four_weights(&self, p: &Packing, part: &Scaled, i: usize) -> [Val<f32>; 4] {
        let (word, k) = self.four_codes(p, i);
        [0, 1, 2, 3].map(|byte| {
            let (word, at) = match 8 * byte + p.bits * k {
                at if at < LOWEST => (word << LOWEST, at + LOWEST),
                at if at + p.bits <= MANTISSA => (word, at),
                at if at >= LOWEST + 12 => (word >> 12u32, at - 12),
                at => (word >> 8u32, at - 8),
            };
            let (number, more) = numbered(word, at, p.bits, self.zero);
            let less = -(more + p.zero as f32);
            let offset = match part.offset {
                Some(offset) => part.scale.fma(less, offset),
                None => part.scale * less,
            };
            part.scale.fma(number, offset)
        })
    }

    /// A word with four codes, and which of those in each of its bytes they are.
    #[track_caller]
    fn four_codes(&self, p: &Packing, i: usize) -> (Val<u32>, u32) {
        match (p.table, p.bits) {
            (Some(table), _) => (self.four_found(table, i), 0),
            (None, 8) => (self.base[i] ^ 0x8080_8080, 0),
            _ if p.high() > 0 => (self.joined(p, i), 0),
            (None, bits) => {
                let fields = 8 / bits as usize;
                (self.base[i / fields], (i % fields) as u32)
            }
        }
    }

    /// Four codes that lie in two planes, a byte each.
    #[track_caller]
    fn joined(&self, p: &Packing, i: usize) -> Val<u32> {
        field_bytes(&self.base, p.base(), i) | field_bytes(&self.high, p.high(), i) << p.base()
    }

    /// The bytes of a table that four codes name.
    #[track_caller]
    fn four_found(&self, table: [u8; 16], i: usize) -> Val<u32> {
        let word = self.base[i / 2];
        (if i.is_multiple_of(2) { word } else { word >> 16u32 }).lookup(table)
    }

    /// Those that all codes name.
    #[track_caller]
    fn found(&self, table: [u8; 16]) -> Vec<Val<u32>> {
        (0..2 * self.base.len()).map(|i| self.four_found(table, i)).collect()
    }

    /// The words of a dense matrix as numbers.
    #[track_caller]
    fn dense(&self) -> Vec<Val<f32>> {
        let Format::Dense(scalar) = self.format else { return vec![] };
        match scalar {
            Scalar::F32 => self.base.iter().map(|w| w.bits()).collect(),
            scalar => self.base.iter().flat_map(|w| halves(scalar, *w)).collect(),
        }
    }

    /// Signed bytes, four neighbours a word: codes, or what they stand for, less 128 if they have 8
    /// bits.
    #[track_caller]
    pub fn quads(&self) -> Vec<Val<u32>> {
        let Some(p) = self.format.packing() else { return vec![] };
        if let Some(table) = p.table {
            return self.found(table.map(|number| number ^ p.bias() as u8));
        }
        let base = spread(&self.base, p.base());
        if p.high() == 0 {
            return base;
        }
        let high = spread(&self.high, p.high());
        base.into_iter().zip(high).map(|(low, high)| low | high << p.base()).collect()
    }

    /// The difference between a code and its byte in [`WordRun::quads`]: 128 or 0.
    pub fn bias(&self) -> i32 {
        self.format.packing().map_or(0, |p| p.bias() as i32)
    }

    /// The code of a weight that equals the offset; 0 for dense formats.
    pub fn zero(&self) -> i32 {
        self.format.packing().map_or(0, |p| p.zero as i32)
    }

    /// The whole numbers behind [`WordRun::scaled`], of formats that have them.
    #[track_caller]
    pub fn supers(&self) -> Option<Supers> {
        let (p, block) = (self.format.packing()?, self.block?);
        let parts = 0..self.format.run() / self.part() as u32;
        let bytes = |part| {
            let (word, shift) = self.entry(&p, part);
            let min = matches!(p.entry, Entry::Bytes).then(|| signed_byte(word, shift + 8));
            (signed_byte(word, shift), min)
        };
        let bytes = parts.map(bytes).collect();
        match p.entry {
            Entry::Bytes => {
                let [d, min] = halves(Scalar::F16, block);
                Some(Supers { d, min: Some(min), bytes })
            }
            _ => Some(Supers { d: half(Scalar::F16, block), min: None, bytes }),
        }
    }

    /// The word that holds the entry of a part, and the entry's lowest bit.
    fn entry(&self, p: &Packing, part: u32) -> (Val<u32>, u32) {
        let per_word = 32 / p.entry.bits();
        (self.entries[(part / per_word) as usize], part % per_word * p.entry.bits())
    }

    /// One for each [`WordRun::part`] of the run; none for dense formats.
    #[track_caller]
    pub fn scaled(&self) -> Vec<Scaled> {
        let Some(p) = self.format.packing() else { return vec![] };
        let parts = self.format.run() as usize / self.part();
        (0..parts).map(|part| self.part_scaled(&p, part as u32)).collect()
    }

    #[track_caller]
    fn part_scaled(&self, p: &Packing, part: u32) -> Scaled {
        let (word, shift) = self.entry(p, part);
        let byte = |at: u32| signed_byte(word, at).f32();
        let half = |scalar, at: u32| half(scalar, if at > 0 { word >> at } else { word });
        let (scale, offset) = match (p.entry, self.block) {
            (Entry::Scale(scalar), _) => (half(scalar, shift), None),
            (Entry::Pair(scalar), _) => {
                let [scale, offset] = halves(scalar, word);
                (scale, Some(offset))
            }
            (Entry::Power, _) => {
                let e = word >> shift & 255u32;
                let power =
                    select(e.lt(2u32), 0x0020_0000u32.val() << (e & 1u32), (e - 1u32) << 23u32);
                (power.bits(), None)
            }
            (Entry::Byte, Some(block)) => (self::half(Scalar::F16, block) * byte(shift), None),
            (Entry::Bytes, Some(block)) => {
                let [d, min] = halves(Scalar::F16, block);
                (d * byte(shift), Some(-(min * byte(shift + 8))))
            }
            _ => unreachable!("a format with byte entries has supers"),
        };
        Scaled { scale, zero: p.zero as f32, offset }
    }
}

/// The byte of a word at a bit, its sign kept.
#[track_caller]
fn signed_byte(word: Val<u32>, at: u32) -> Val<i32> {
    (word << (24 - at)).bits::<i32>() >> 24i32
}

/// Four codes to a word, from the words of a plane.
#[track_caller]
fn spread(words: &[Val<u32>], bits: u32) -> Vec<Val<u32>> {
    (0..words.len() * (8 / bits) as usize).map(|i| field_bytes(words, bits, i)).collect()
}

/// The fields of four neighbours, as bytes: group `i` of a plane's groups.
#[track_caller]
fn field_bytes(words: &[Val<u32>], bits: u32, i: usize) -> Val<u32> {
    let fields = (8 / bits) as usize;
    let (word, k) = (words[i / fields], (i % fields) as u32);
    let mask = 0x0101_0101 * ((1u32 << bits) - 1);
    match k {
        _ if bits == 8 => word,
        0 => word & mask,
        _ => word >> (k * bits) & mask,
    }
}

/// Four codes less the format's zero: the fields `k` of the bytes of a word, which comes with its
/// upper half. Masks are added to `zero`: see [`PackedWeights::with_zero`].
#[track_caller]
fn four(
    p: &Packing,
    [word, upper]: [Val<u32>; 2],
    k: u32,
    zero: Option<Val<u32>>,
) -> [Val<f32>; 4] {
    [0, 1, 2, 3].map(|i| {
        let at = 8 * i + p.bits * k;
        let (word, at) = if at + p.bits <= MANTISSA { (word, at) } else { (upper, at - 16) };
        let (number, added) = numbered(word, at, p.bits, zero);
        number - (added + p.zero as f32)
    })
}

/// By how many powers of two [`WordRun::halves`] multiplies: f16 then holds weights of up to 4,094,
/// and to 2^-28.
pub const RAISED: u32 = 4;

/// Bits of an f32's mantissa that are stored.
const MANTISSA: u32 = 23;
/// From which bit on codes are few enough powers of two apart from what [`numbered`] adds, 2^15
/// there, for one rounding of both.
const LOWEST: u32 = 8;

/// The code at bit `at` of a word as a number, more than it is by the number that comes second. In
/// the mantissa of 2^(23 - at) the bit `at` counts 1, so that no conversion is needed.
#[track_caller]
fn numbered(word: Val<u32>, at: u32, bits: u32, zero: Option<Val<u32>>) -> (Val<f32>, f32) {
    let exponent = (127 + MANTISSA - at) << MANTISSA;
    let mask = ((1 << bits) - 1) << at;
    let code = zero.map_or_else(|| word & mask, |zero| word & (zero + mask));
    ((code | exponent).bits::<f32>(), f32::from_bits(exponent))
}

/// The lower half of a word as a number.
#[track_caller]
fn half(scalar: Scalar, word: Val<u32>) -> Val<f32> {
    match scalar {
        Scalar::BF16 => (word << 16u32).bits(),
        _ => word.cast::<u16>().bits::<half::f16>().f32(),
    }
}

/// Both halves of a word, the lower first.
#[track_caller]
pub(crate) fn halves(scalar: Scalar, word: Val<u32>) -> [Val<f32>; 2] {
    match scalar {
        Scalar::BF16 => [(word << 16u32).bits(), (word & 0xffff_0000).bits()],
        _ => [half(scalar, word), half(scalar, word >> 16u32)],
    }
}

//! Operands on their way to shared memory: a ring of [`GemmSchedule::stages`] steps.
//!
//! A [`Side`] is the block of `x` or of the weights. What memory holds as the product wants it is
//! copied asynchronously, 16 bytes at a time. What must be converted goes through registers: read a
//! step before it is stored, stored two steps before it is multiplied.

use super::GemmSchedule;
use crate::packed::{Format, PackedWeights};
use tile::dsl::*;
use tile::ir::LoadHint;

/// Which rows of a matrix a block has.
pub(crate) enum Rows {
    /// From the first on, below the second.
    Span(Val<u32>, Val<u32>),
    /// Likewise, of rows that lie several apart: row `i` is `i * apart + offset`.
    Every { begin: Val<u32>, end: Val<u32>, apart: Val<u32>, offset: Val<u32> },
    /// Entries of a table from the first on, below the second, each divided by a number.
    Table(In<u32>, Val<u32>, Val<u32>, Val<u32>),
}

/// Where a side comes from.
enum Source {
    /// Memory that holds operands.
    Copied(In),
    /// Numbers of another type, and what a thread keeps of them for a step.
    Cast(In, Regs),
    /// Packed weights, and the words that a thread keeps.
    Packed(PackedWeights, Regs<u32>),
}

/// A row's place in memory, and whether there is such a row.
#[derive(Clone, Copy)]
struct Line {
    at: Val<u32>,
    exists: Val<bool>,
}

/// Which of its matrix's rows a thread reads.
enum Lines {
    /// Some rows of the block, in every step the same.
    Fixed(Vec<Line>),
    /// A row for each term of a step, of a matrix that lies turned.
    Terms {
        /// The row of the first term, and how many terms there are.
        base: Val<u32>,
        terms: Val<u32>,
        /// The thread's unit of the matrix's rows.
        unit: Val<u32>,
    },
}

/// One operand's block in shared memory, `[stages, count, stride]`, where a row has a step's terms;
/// of a matrix that lies turned `[stages, bk, stride]`, where a row is one term of all rows of the
/// block. Every thread moves one unit of each of some rows.
pub(crate) struct Side {
    pub(crate) shared: Shared,
    schedule: GemmSchedule,
    source: Source,
    /// Rows in shared memory.
    count: u32,
    /// Elements from one to the next.
    stride: u32,
    /// Elements that a thread moves together.
    unit: u32,
    /// Rows that a thread moves, and the distance between two of them.
    passes: u32,
    apart: u32,
    /// This thread's first row.
    first: Val<u32>,
    /// Its unit in the row.
    column: Val<u32>,
    lines: Lines,
    /// Elements of the matrix's rows.
    width: Val<u32>,
}

impl Side {
    /// The left operand's block, of activations `[.., width]`.
    #[track_caller]
    pub(crate) fn activations(
        operand: Scalar,
        x: In,
        rows: Rows,
        width: Val<u32>,
        schedule: &GemmSchedule,
    ) -> Side {
        let size = schedule.stages * schedule.bm * schedule.stride(operand);
        let shared = Shared::stored(operand, "a", size);
        if x.scalar() == operand {
            let source = Source::Copied(x);
            let unit = 16 / operand.bytes() as u32;
            return Side::new(shared, source, schedule.bm, unit, rows, width, schedule);
        }
        let unit = 8;
        let kept = Regs::stored(x.scalar(), unit * passes(schedule, schedule.bm, unit));
        Side::new(shared, Source::Cast(x, kept), schedule.bm, unit, rows, width, schedule)
    }

    /// The right operand's block, of a matrix in a format.
    #[track_caller]
    pub(crate) fn weights(
        operand: Scalar,
        name: &str,
        format: Format,
        rows: Rows,
        width: Val<u32>,
        schedule: &GemmSchedule,
    ) -> Side {
        let size = schedule.stages * schedule.bn * schedule.stride(operand);
        let shared = Shared::stored(operand, "b", size);
        if format == Format::Dense(operand) {
            let source = Source::Copied(In::stored(name, operand));
            let unit = 16 / operand.bytes() as u32;
            return Side::new(shared, source, schedule.bn, unit, rows, width, schedule);
        }
        let weights = PackedWeights::declare(name, format, width);
        let unit = format.run();
        let kept = Regs::uninit(weights.format().words() * passes(schedule, schedule.bn, unit));
        let source = Source::Packed(weights, kept);
        Side::new(shared, source, schedule.bn, unit, rows, width, schedule)
    }

    /// The right operand's block of a matrix that lies turned, with a row for each term: rows
    /// `base` on of `terms`, of which the block has the columns from `first` on, a multiple of
    /// [`Format::run`] as [`GemmSchedule::bn`] is. `width` is the matrix's own.
    #[track_caller]
    pub(crate) fn turned(
        operand: Scalar,
        (name, format): (&str, Format),
        (base, terms): (Val<u32>, Val<u32>),
        (first, width): (Val<u32>, Val<u32>),
        schedule: &GemmSchedule,
    ) -> Side {
        let (unit, stride) = (format.run(), schedule.turned_stride(operand));
        let shared = Shared::stored(operand, "b", schedule.stages * schedule.bk * stride);
        let weights = PackedWeights::declare(name, format, width);
        let (per_row, passes) = (schedule.bn / unit, passes(schedule, schedule.bn, unit));
        let kept = Regs::uninit(format.words() * passes);
        let column = thread_id() % per_row;
        Side {
            shared,
            schedule: *schedule,
            source: Source::Packed(weights, kept),
            count: schedule.bk,
            stride,
            unit,
            passes,
            apart: schedule.threads() / per_row,
            first: thread_id() / per_row,
            column,
            lines: Lines::Terms { base, terms, unit: first / unit + column },
            width,
        }
    }

    #[track_caller]
    fn new(
        shared: Shared,
        source: Source,
        count: u32,
        unit: u32,
        rows: Rows,
        width: Val<u32>,
        schedule: &GemmSchedule,
    ) -> Self {
        let per_row = schedule.bk / unit;
        let apart = schedule.threads() / per_row;
        let (first, column) = (thread_id() / per_row, thread_id() % per_row);
        let words = |row: Val<u32>| match &source {
            Source::Packed(weights, _) => weights.row(row),
            _ => row * width,
        };
        let base = match rows {
            Rows::Span(begin, _) => Some(words(begin + first)),
            Rows::Every { begin, apart: step, offset, .. } => {
                Some(words((begin + first) * step + offset))
            }
            Rows::Table(..) => None,
        };
        let line = |pass: u32| {
            let row = first + pass * apart;
            match (&rows, base) {
                (Rows::Span(begin, end), Some(base)) => {
                    Line { at: base + words((pass * apart).val()), exists: (*begin + row).lt(*end) }
                }
                (Rows::Every { begin, end, apart: step, .. }, Some(base)) => {
                    let at = base + words(*step * (pass * apart));
                    Line { at, exists: (*begin + row).lt(*end) }
                }
                (Rows::Table(table, begin, end, by), _) => {
                    let exists = (*begin + row).lt(*end);
                    let at = words(table.get((*begin + row).min(*end - 1u32)) / *by);
                    Line { at, exists }
                }
                (Rows::Span(..) | Rows::Every { .. }, None) => unreachable!("they have a base"),
            }
        };
        let passes = passes(schedule, count, unit);
        let lines = Lines::Fixed((0..passes).map(line).collect());
        let (stride, schedule) = (schedule.stride(shared.scalar()), *schedule);
        Side {
            shared,
            schedule,
            source,
            count,
            stride,
            unit,
            passes,
            apart,
            first,
            column,
            lines,
            width,
        }
    }

    /// Where a column of the block lies in a stage, at a term that both matrices of a product
    /// count from the step's first.
    #[track_caller]
    pub(crate) fn at(&self, stage: Val<u32>, column: Val<u32>, term: u32) -> Val<u32> {
        let begin = stage * (self.count * self.stride);
        match self.lines {
            Lines::Fixed(_) => begin + column * self.stride + term,
            Lines::Terms { .. } => begin + column + term * self.stride,
        }
    }

    /// Elements between a number of terms of one column.
    #[track_caller]
    pub(crate) fn terms(&self, number: Val<u32>) -> Val<u32> {
        match self.lines {
            Lines::Fixed(_) => number,
            Lines::Terms { .. } => number * self.stride,
        }
    }

    /// A fragment of the right operand `columns` behind a place that [`Side::at`] gave.
    #[track_caller]
    pub(crate) fn right(&self, at: Val<u32>, columns: u32) -> Frag {
        match self.lines {
            Lines::Fixed(_) => {
                Frag::right_transposed(self.shared, at + columns * self.stride, self.stride)
            }
            Lines::Terms { .. } => Frag::right(self.shared, at + columns, self.stride),
        }
    }

    /// Four neighbouring terms of the column `columns` behind a place that [`Side::at`] gave, from
    /// term `k` on.
    #[track_caller]
    pub(crate) fn four(&self, at: Val<u32>, columns: u32, k: Val<u32>) -> Vec<Val<f32>> {
        match self.lines {
            Lines::Fixed(_) => {
                self.shared.get_vec(at + columns * self.stride + k, 4, LoadHint::None)
            }
            Lines::Terms { .. } => {
                let term = |i: u32| self.shared.get(at + columns + (k + i) * self.stride);
                (0..4).map(term).collect()
            }
        }
    }

    /// One of this thread's rows in a step.
    #[track_caller]
    fn line(&self, pass: u32, step: Val<u32>) -> Line {
        match &self.lines {
            Lines::Fixed(lines) => lines[pass as usize],
            Lines::Terms { base, terms, .. } => {
                let term = step * self.schedule.bk + self.first + pass * self.apart;
                let row = *base + term.min(*terms - 1u32);
                let at = match &self.source {
                    Source::Packed(weights, _) => weights.row(row),
                    _ => row * self.width,
                };
                Line { at, exists: term.lt(*terms) }
            }
        }
    }

    /// Whether blocks are copied: if not, they are fetched and put.
    pub(crate) fn is_copied(&self) -> bool {
        matches!(self.source, Source::Copied(_))
    }

    /// Runs `f` for each of this thread's rows, with the place in a stage that [`Side::spot`]
    /// takes.
    #[track_caller]
    fn each(&self, stage: Val<u32>, mut f: impl FnMut(u32, Val<u32>)) {
        let stride = self.stride;
        let row = stage * (self.count * stride) + self.first * stride;
        let base = if self.schedule.warpgroups { row } else { row + self.column * self.unit };
        for pass in 0..self.passes {
            let to = base + pass * self.apart * stride;
            if (pass + 1) * self.apart <= self.count {
                f(pass, to);
            } else {
                let within = (self.first + pass * self.apart).lt(self.count);
                test(within).then(|| f(pass, to)).otherwise(|| {});
            }
        }
    }

    /// Where 16 bytes of this thread's unit lie, the `i`th, in a row at a place that [`Side::each`]
    /// gives. For warpgroups they change places as [`tile::ir::swizzled`] says; a thread's rows are
    /// multiples of eight apart.
    #[track_caller]
    fn spot(&self, to: Val<u32>, i: u32) -> Val<u32> {
        let lanes = 16 / self.shared.scalar().bytes() as u32;
        if !self.schedule.warpgroups {
            return if i == 0 { to } else { to + i * lanes };
        }
        let unit = self.column * (self.unit / lanes) + i;
        to + (unit ^ (self.first % 8u32)) * lanes
    }

    /// The unit of a row that is this thread's in a step.
    #[track_caller]
    fn own(&self, step: Val<u32>) -> Val<u32> {
        match self.lines {
            Lines::Fixed(_) => step * (self.schedule.bk / self.unit) + self.column,
            Lines::Terms { unit, .. } => unit,
        }
    }

    /// Begins to copy a step to a stage; zeros past the ends.
    #[track_caller]
    pub(crate) fn copy(&self, step: Val<u32>, stage: Val<u32>) {
        let Source::Copied(from) = self.source else { return };
        let column = self.own(step) * self.unit;
        let inside = column.lt(self.width);
        self.each(stage, |pass, to| {
            let line = self.line(pass, step);
            let keep = Some(line.exists & inside);
            let to = self.spot(to, 0);
            copy_async(self.shared, to, from, line.at + column, self.unit as u8, keep);
        });
    }

    /// Reads this thread's part of a step. Past the ends it reads what is there: nothing is made of
    /// it.
    #[track_caller]
    pub(crate) fn fetch(&self, step: Val<u32>) {
        let unit = self.own(step).min(self.width / self.unit - 1u32);
        for pass in 0..self.passes {
            let line = self.line(pass, step);
            // A row that does not exist is replaced by the matrix's first.
            let at = select(line.exists, line.at, 0u32);
            match &self.source {
                Source::Copied(_) => {}
                Source::Cast(x, kept) => {
                    let lanes = (16 / x.scalar().bytes() as u32).min(self.unit);
                    for part in 0..self.unit / lanes {
                        let from = at + unit * self.unit + part * lanes;
                        let values = x.get_raw_vec(from, lanes as u8, LoadHint::Coherent);
                        for (i, value) in values.into_iter().enumerate() {
                            kept.set_raw(pass * self.unit + part * lanes + i as u32, value);
                        }
                    }
                }
                Source::Packed(weights, kept) => {
                    for (i, word) in weights.load(at, unit).into_iter().enumerate() {
                        kept.set(pass * weights.format().words() + i as u32, word);
                    }
                }
            }
        }
    }

    /// Converts what was fetched of a step and stores it in a stage; zeros past the ends.
    #[track_caller]
    pub(crate) fn put(&self, step: Val<u32>, stage: Val<u32>) {
        if self.is_copied() {
            return;
        }
        let unit = self.own(step);
        let inside = unit.lt(self.width / self.unit);
        let operand = self.shared.scalar();
        let store = |to: Val<u32>, values: &[Val<Raw>]| {
            let lanes = (16 / operand.bytes()).min(values.len());
            for (i, values) in values.chunks(lanes).enumerate() {
                self.shared.set_raw_vec(self.spot(to, i as u32), values);
            }
        };
        self.each(stage, |pass, to| {
            let line = self.line(pass, step);
            let converted = || -> Vec<Val<Raw>> {
                match &self.source {
                    Source::Copied(_) => vec![],
                    Source::Cast(_, kept) => {
                        let of = |i| kept.get(pass * self.unit + i).to(operand);
                        (0..self.unit).map(of).collect()
                    }
                    Source::Packed(weights, kept) => {
                        let count = weights.format().words();
                        let words: Vec<Val<u32>> =
                            (0..count).map(|i| kept.get(pass * count + i)).collect();
                        let floats = weights.run(&words, unit).floats();
                        floats.into_iter().map(|v| v.to(operand)).collect()
                    }
                }
            };
            let zeros = || vec![0f32.val().to(operand); self.unit as usize];
            test(line.exists & inside)
                .then(|| store(to, &converted()))
                .otherwise(|| store(to, &zeros()));
        });
    }
}

/// How many rows of a block a thread has units of.
fn passes(schedule: &GemmSchedule, count: u32, unit: u32) -> u32 {
    (count * schedule.bk / unit).div_ceil(schedule.threads())
}

/// Both operands of a threadgroup.
pub(crate) struct Ring {
    pub(crate) schedule: GemmSchedule,
    pub(crate) a: Side,
    pub(crate) b: Side,
    pub(crate) width: Val<u32>,
}

impl Ring {
    /// The type of both operands.
    pub(crate) fn operand(&self) -> Scalar {
        self.a.shared.scalar()
    }

    /// Steps of a sum.
    #[track_caller]
    pub(crate) fn steps(&self) -> Val<u32> {
        (self.width + (self.schedule.bk - 1)) / self.schedule.bk
    }

    pub(super) fn copies(&self) -> bool {
        self.a.is_copied() || self.b.is_copied()
    }

    /// Begins to copy what is copied of a step, as a batch.
    #[track_caller]
    pub(super) fn copy(&self, step: Val<u32>, stage: Val<u32>) {
        self.a.copy(step, stage);
        self.b.copy(step, stage);
        if self.copies() {
            copy_commit();
        }
    }

    /// Reads what is converted of a step.
    #[track_caller]
    pub(super) fn fetch(&self, step: Val<u32>) {
        self.a.fetch(step);
        self.b.fetch(step);
    }

    /// Stores what was read of a step.
    #[track_caller]
    pub(super) fn put(&self, step: Val<u32>) {
        let stage = step % self.schedule.stages;
        self.a.put(step, stage);
        self.b.put(step, stage);
    }

    /// Fills the stages; the first is there afterwards.
    #[track_caller]
    pub(crate) fn start(&self) {
        for step in 0..self.schedule.stages {
            self.copy(step.val(), step.val());
        }
        for step in 0..2u32 {
            self.fetch(step.val());
            self.put(step.val());
        }
        self.fetch(2u32.val());
        self.arrive(self.schedule.stages - 1);
    }

    /// As [`Ring::start`], which has not waited for the kernel in front: asks for weights before it
    /// does.
    #[track_caller]
    pub(crate) fn start_early(&self) {
        for step in 0..self.schedule.stages {
            self.b.copy(step.val(), step.val());
        }
        self.b.fetch(0u32.val());
        grid_wait();
        for step in 0..self.schedule.stages {
            self.a.copy(step.val(), step.val());
            if self.copies() {
                copy_commit();
            }
        }
        self.b.put(0u32.val(), 0u32.val());
        self.a.fetch(0u32.val());
        self.a.put(0u32.val(), 0u32.val());
        self.fetch(1u32.val());
        self.put(1u32.val());
        self.fetch(2u32.val());
        self.arrive(self.schedule.stages - 1);
    }

    /// As [`Ring::start`], of one stage.
    #[track_caller]
    pub(super) fn start_single(&self) {
        self.copy(0u32.val(), 0u32.val());
        self.fetch(0u32.val());
        self.put(0u32.val());
        self.fetch(1u32.val());
        self.arrive(0);
    }

    /// After the last read of a step of one stage: puts the next in its place, and asks for the one
    /// after.
    #[track_caller]
    pub(super) fn replace(&self, step: Val<u32>) {
        barrier();
        self.copy(step + 1u32, 0u32.val());
        self.put(step + 1u32);
        self.fetch(step + 2u32);
        self.arrive(0);
    }

    /// After the last read of a step: the next has arrived, and the step's stage is free.
    #[track_caller]
    pub(crate) fn advance(&self) {
        self.arrive(self.schedule.stages - 2);
    }

    #[track_caller]
    fn arrive(&self, pending: u32) {
        if self.copies() {
            copy_wait(pending as u8);
        }
        barrier();
    }

    /// After the last step: copies of steps that there are not are done.
    #[track_caller]
    pub(crate) fn finish(&self) {
        if self.copies() {
            copy_wait(0);
        }
    }

    /// After [`Ring::advance`] from a step: begins to fill what is free.
    #[track_caller]
    pub(crate) fn refill(&self, step: Val<u32>) {
        let stages = self.schedule.stages;
        self.copy(step + stages, step % stages);
        self.put(step + 2u32);
        self.fetch(step + 3u32);
    }
}

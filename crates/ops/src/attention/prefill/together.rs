//! Rows of one head that all simdgroups of a group share ([`Wide`]).

use tile::dsl::*;
use tile::instr::UnaryOp;
use tile::ir::LoadHint;

use super::{Flash, PAD, Rows, bring};
use crate::attention::form::Stored;
use crate::attention::wide::{self, Side, Wide, WideTiling};
use crate::sweep::when;

impl Flash<WideTiling> {
    /// As [`Flash::run`], of all simdgroups together.
    pub(super) fn share(&self, keys: Stored, values: Stored, place: impl Rows) {
        let (d, tiling) = (self.form.head_dim, self.tiling);
        let (rows, step, ld) = (tiling.rows(), tiling.keys(), d + PAD);
        let position = self.step.positions.get(self.first_row) + self.offset;
        let last = position + self.left.min(rows);
        let end = place.limit().map_or(last, |limit| last.min(limit));
        let head = group_id() / self.form.group;
        let start = self.extras.first(position + 1u32) / step * step;
        let work =
            Wide::new(tiling, self.form, self.step.q.scalar(), &self.extras, self.step.scale);
        let (query, staging, outer) = (work.query, work.staging, work.outer);
        work.ask(self.step.q, |row| self.row(row), self.left);

        let slabs = Regs::<u32>::new(step / 16, 0u32);
        let fetch = |side: Side, at: Val<u32>, key: Val<u32>| {
            let row = place.slabs(self.first_row, head, key, slabs);
            let from = |slab: u32, r: Val<u32>| slabs.get(slab) + r * row;
            let stored = if side == Side::Keys { keys } else { values };
            bring(32 * tiling.simds(), d, step, stored, (staging, at), from, end - key);
        };
        let slope = self
            .extras
            .slopes
            .map(|slopes| Frag::filled(slopes.get(group_id()) * std::f32::consts::LOG2_E / outer));
        let mask = |score: Frag, row: Val<u32>, key: Val<u32>| {
            let rows = Frag::row_numbers() + Frag::filled_u32(position + row);
            let columns = Frag::col_numbers() + Frag::filled_u32(key);
            let leaning = slope.map(|slope| {
                let distance = columns.cast(Scalar::F32) - rows.cast(Scalar::F32);
                score + distance * slope
            });
            wide::masked(self.seen(rows, columns, place.limit()), leaning.unwrap_or(score))
        };
        let mixed = work.attend((start, end), fetch, mask);
        barrier();
        let sink = self
            .extras
            .sinks
            .map(|sinks| Frag::filled(sinks.get(group_id()) * std::f32::consts::LOG2_E / outer));
        let wide = Frag::filled(outer);
        for r in 0..tiling.tiles {
            // A sink joins the denominator alone, and may be the maximum.
            let (top, total) = (mixed.top(r), mixed.total(r));
            let most = sink.map_or(top, |sink| top.max(sink));
            let decay = ((top - most) * wide).map(UnaryOp::Exp2);
            let beside = sink.map(|sink| ((sink - most) * wide).map(UnaryOp::Exp2));
            let sum = total * decay;
            let sum = beside.map_or(sum, |beside| sum + beside).max(Frag::filled(1.0e-30f32));
            let scale = decay / sum;
            mixed.each(r, |element, tile| {
                (tile * scale).store(query, element + 16 * r * ld, ld);
            });
        }
        barrier();
        let per_row = d / 8;
        strided(rows * per_row).each(|i| {
            let (row, element) = (i / per_row, i % per_row * 8u32);
            when(Order::lt(row, self.left), || {
                let values = query.get_raw_vec(row * ld + element, 8, LoadHint::None);
                self.step.y.set_raw_vec(self.row(row) + element, &values);
            });
        });
    }
}

//! Low-rank factors of adapters: `t = scale down x`, then `y += up t`.
//!
//! Rows that have the same factors go through them several at a time, so that each weight that is
//! read and decoded serves all of them. On an instruction set every sum has one order, whatever the
//! worker's share or the other rows: `down` in as many partial sums as a vector has lanes, `up`
//! from the first rank to the last.

use crate::isa::Isa;
use crate::math::lanes::{Lanes, WIDEST, dispatch};
use formats::{DType, Error, Result};
use std::ops::Range;

/// Outputs of a panel of `up`: a multiple of every vector's lanes.
const PANEL: usize = WIDEST;

/// Where rows of f32 are written: the first element, and the distance from one row to the next.
#[derive(Debug, Clone, Copy)]
pub struct OutRows {
    /// The first element.
    pub start: *mut f32,
    /// Elements from one row to the next.
    pub stride: usize,
}

/// The low-rank factors of an adapter at one site.
#[derive(Debug, Clone, PartialEq)]
pub struct Factors {
    rank: usize,
    input: usize,
    output: usize,
    scale: f32,
    down: Numbers,
    /// Panels of [`PANEL`] outputs, `[rank, PANEL]` each, so that what is read of all ranks is near
    /// one another; the last is filled up with zeros.
    up: Numbers,
    gain: Option<[Vec<f32>; 2]>,
}

#[derive(Debug, Clone, PartialEq)]
enum Numbers {
    F32(Vec<f32>),
    BF16(Vec<u16>),
}

impl Numbers {
    fn new(values: impl Iterator<Item = f32>, element: DType) -> Numbers {
        match element {
            DType::BF16 => Numbers::BF16(values.map(|v| (v.to_bits() >> 16) as u16).collect()),
            _ => Numbers::F32(values.collect()),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Numbers::F32(values) => size_of_val(values.as_slice()),
            Numbers::BF16(values) => size_of_val(values.as_slice()),
        }
    }
}

/// An element of a factor.
trait Element: Copy + Default {
    fn float(self) -> f32;

    /// Reads `L::N` elements.
    ///
    /// # Safety
    /// They are readable, and the processor has `L`.
    unsafe fn load<L: Lanes>(p: *const Self) -> L;

    /// Reads `n <= L::N` elements; the other lanes are 0.
    ///
    /// # Safety
    /// As [`Element::load`], for `n` elements.
    #[inline(always)]
    unsafe fn load_part<L: Lanes>(p: *const Self, n: usize) -> L {
        let mut whole = [Self::default(); WIDEST];
        // SAFETY: `n` elements are readable, and there is room for them.
        unsafe {
            std::ptr::copy_nonoverlapping(p, whole.as_mut_ptr(), n);
            Self::load(whole.as_ptr())
        }
    }
}

impl Element for f32 {
    #[inline(always)]
    fn float(self) -> f32 {
        self
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const f32) -> L {
        // SAFETY: passed on.
        unsafe { L::load(p) }
    }
}

impl Element for u16 {
    #[inline(always)]
    fn float(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u16) -> L {
        // SAFETY: passed on.
        unsafe { L::load_bf16(p) }
    }
}

impl Factors {
    /// Takes `down` `[rank, input]` (for an embedding table `[input, rank]`) and `up` `[output,
    /// rank]`. `element` is f32, or bf16 if that holds the values exactly. `gain` holds a factor
    /// and an offset for each output (DoRA).
    ///
    /// # Errors
    /// Factors of other sizes.
    pub fn new(
        [rank, input, output]: [usize; 3],
        down: &[f32],
        up: &[f32],
        scale: f32,
        gain: Option<[&[f32]; 2]>,
        element: DType,
    ) -> Result<Factors> {
        let gains = gain.iter().flatten().all(|values| values.len() == output);
        if rank == 0
            || Some(down.len()) != rank.checked_mul(input)
            || Some(up.len()) != rank.checked_mul(output)
            || !gains
        {
            let found = format!("{} and {} numbers", down.len(), up.len());
            let expected = format!("factors of rank {rank}, {input} to {output}");
            return Err(Error::new("adapter", expected, found));
        }
        let panels = (0..output.next_multiple_of(PANEL)).step_by(PANEL);
        let turned = panels.flat_map(|first| {
            let places = (0..rank).flat_map(move |r| (first..first + PANEL).map(move |o| (r, o)));
            places.map(|(r, o)| if o < output { up[o * rank + r] } else { 0.0 })
        });
        Ok(Factors {
            rank,
            input,
            output,
            scale,
            down: Numbers::new(down.iter().copied(), element),
            up: Numbers::new(turned, element),
            gain: gain.map(|parts| parts.map(<[f32]>::to_vec)),
        })
    }

    /// The rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Whether outputs have gains (DoRA).
    pub fn has_gain(&self) -> bool {
        self.gain.is_some()
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        let gain = self.gain.iter().flatten().map(|values| size_of_val(values.as_slice()));
        self.down.bytes() + self.up.bytes() + gain.sum::<usize>()
    }

    /// `t[r] = scale down[r] x` for the given ranks, for each row of `x` `[rows, input]`.
    ///
    /// # Safety
    /// `t` has a row for each row of `x`, with room for those ranks, and is not used elsewhere
    /// meanwhile.
    pub unsafe fn down(&self, isa: Isa, x: &[f32], ranks: Range<usize>, t: OutRows) {
        assert!(x.len().is_multiple_of(self.input) && ranks.end <= self.rank);
        let (input, scale) = (self.input, self.scale);
        let range = ranks.start * input..ranks.end * input;
        // SAFETY: the value of `isa` is the proof that the processor has these instructions; the
        // rest is the caller's promise.
        unsafe {
            match &self.down {
                Numbers::F32(rows) => {
                    let call = &Down { factor: &rows[range], x, input, scale, t };
                    dispatch!(isa, dots[f32](call: &Down<'_, f32>));
                }
                Numbers::BF16(rows) => {
                    let call = &Down { factor: &rows[range], x, input, scale, t };
                    dispatch!(isa, dots[u16](call: &Down<'_, u16>));
                }
            }
        }
    }

    /// `t = scale down[row]` for all ranks of an embedding table.
    pub fn pick(&self, row: usize, t: &mut [f32]) {
        assert!(row < self.input && t.len() == self.rank);
        let range = row * self.rank..(row + 1) * self.rank;
        match &self.down {
            Numbers::F32(rows) => t.copy_from_slice(&rows[range]),
            Numbers::BF16(rows) => {
                t.iter_mut().zip(&rows[range]).for_each(|(t, v)| *t = v.float());
            }
        }
        t.iter_mut().for_each(|t| *t *= self.scale);
    }

    /// `y += up t` for the given columns, at which rows of `y` begin, for each row of `t` `[rows,
    /// stride]`, of which the first numbers count. Columns begin at a multiple of sixteen. With a
    /// gain, `y` then becomes `residual + gain (y - residual) + offset`; `residual` is the first
    /// element of as many rows and columns, with the stride of `y`.
    ///
    /// # Safety
    /// `y` and `residual` have a row for each row of `t`, with those columns. During the call nobody
    /// else uses those of `y`, and nobody writes those of `residual`.
    pub unsafe fn up(
        &self,
        isa: Isa,
        (t, stride): (&[f32], usize),
        columns: Range<usize>,
        residual: Option<*const f32>,
        y: OutRows,
    ) {
        assert!(stride >= self.rank && t.len().is_multiple_of(stride));
        assert!(columns.start.is_multiple_of(PANEL) && columns.end <= self.output);
        let (rank, own) = (self.rank, columns.clone());
        // SAFETY: as in `down`.
        unsafe {
            match &self.up {
                Numbers::F32(factor) => {
                    let call = &Up { factor, rank, t, stride, columns: own, y };
                    dispatch!(isa, sums[f32](call: &Up<'_, f32>));
                }
                Numbers::BF16(factor) => {
                    let call = &Up { factor, rank, t, stride, columns: own, y };
                    dispatch!(isa, sums[u16](call: &Up<'_, u16>));
                }
            }
        }
        let Some(parts) = &self.gain else { return };
        let [gain, offset] = parts.each_ref().map(|part| &part[columns.clone()]);
        for row in 0..t.len() / stride {
            let first = row * y.stride;
            // SAFETY: the caller's promise.
            let (y, residual) = unsafe {
                let own =
                    |start: *const f32| std::slice::from_raw_parts(start.add(first), columns.len());
                let y = std::slice::from_raw_parts_mut(y.start.add(first), columns.len());
                (y, residual.map(own))
            };
            for (i, y) in y.iter_mut().enumerate() {
                let residual = residual.map_or(0.0, |residual| residual[i]);
                *y = residual + (gain[i] * (*y - residual) + offset[i]);
            }
        }
    }
}

/// A call of [`Factors::down`]: the ranks' rows of the factor.
struct Down<'a, E> {
    factor: &'a [E],
    x: &'a [f32],
    input: usize,
    scale: f32,
    t: OutRows,
}

/// A call of [`Factors::up`], with the factor's panels.
struct Up<'a, E> {
    factor: &'a [E],
    rank: usize,
    t: &'a [f32],
    stride: usize,
    columns: Range<usize>,
    y: OutRows,
}

/// # Safety
/// As [`Factors::down`], on a processor that has `L`.
#[inline(always)]
unsafe fn dots<L: Lanes, E: Element>(call: &Down<'_, E>) {
    // SAFETY: passed on.
    unsafe {
        // As many sums as registers hold beside what is multiplied: AVX2 has sixteen.
        match L::N {
            8 => call.tiles::<L, 4>(),
            _ => call.tiles::<L, 8>(),
        }
    }
}

impl<E: Element> Down<'_, E> {
    /// `M` rows at a time, then one.
    ///
    /// # Safety
    /// As [`dots`].
    #[inline(always)]
    unsafe fn tiles<L: Lanes, const M: usize>(&self) {
        let (rows, mut row) = (self.x.len() / self.input, 0);
        // SAFETY: passed on; rows are below `rows`.
        unsafe {
            while row + M <= rows {
                self.ranks::<L, M, 2>(row);
                row += M;
            }
            while row < rows {
                self.ranks::<L, 1, 8>(row);
                row += 1;
            }
        }
    }

    /// `M` rows, by `N` ranks at a time, whose sums are independent, then by one.
    ///
    /// # Safety
    /// As [`dots`].
    #[inline(always)]
    unsafe fn ranks<L: Lanes, const M: usize, const N: usize>(&self, row: usize) {
        let (ranks, mut rank) = (self.factor.len() / self.input, 0);
        // SAFETY: passed on; ranks are below `ranks`.
        unsafe {
            while rank + N <= ranks {
                self.tile::<L, M, N>(row, rank);
                rank += N;
            }
            while rank < ranks {
                self.tile::<L, M, 1>(row, rank);
                rank += 1;
            }
        }
    }

    /// The dot products of `M` rows with `N` ranks.
    ///
    /// # Safety
    /// As [`dots`]; there are that many of both.
    #[inline(always)]
    unsafe fn tile<L: Lanes, const M: usize, const N: usize>(&self, row: usize, rank: usize) {
        let input = self.input;
        let (x, factor) = (&self.x[row * input..][..M * input], &self.factor[rank * input..]);
        let (x, factor) = (x.as_ptr(), factor[..N * input].as_ptr());
        let mut sums = [[L::splat(0.0); M]; N];
        let whole = input / L::N * L::N;
        // SAFETY: rows of both have `input` elements; the caller promises `t`.
        unsafe {
            for at in (0..whole).step_by(L::N) {
                let mut own = [L::splat(0.0); M];
                each!(m < M, {
                    own[m] = L::load(x.add(m * input + at));
                });
                each!(n < N, {
                    let w: L = E::load(factor.add(n * input + at));
                    each!(m < M, {
                        sums[n][m] = w.fma(own[m], sums[n][m]);
                    });
                });
            }
            let rest = input - whole;
            if rest > 0 {
                each!(n < N, {
                    let w: L = E::load_part(factor.add(n * input + whole), rest);
                    each!(m < M, {
                        let own = L::load_part(x.add(m * input + whole), rest);
                        sums[n][m] = w.fma(own, sums[n][m]);
                    });
                });
            }
            each!(n < N, {
                each!(m < M, {
                    let to = self.t.start.add((row + m) * self.t.stride + rank + n);
                    *to = self.scale * sums[n][m].sum();
                });
            });
        }
    }
}

/// # Safety
/// As [`Factors::up`], on a processor that has `L`.
#[inline(always)]
unsafe fn sums<L: Lanes, E: Element>(call: &Up<'_, E>) {
    // SAFETY: passed on.
    unsafe {
        match L::N {
            8 => call.tiles::<L, 6>(),
            _ => call.tiles::<L, 8>(),
        }
    }
}

impl<E: Element> Up<'_, E> {
    /// `M` rows at a time, then one.
    ///
    /// # Safety
    /// As [`sums`].
    #[inline(always)]
    unsafe fn tiles<L: Lanes, const M: usize>(&self) {
        let (rows, mut row) = (self.t.len() / self.stride, 0);
        // SAFETY: passed on; rows are below `rows`.
        unsafe {
            while row + M <= rows {
                self.columns::<L, M, 2>(row);
                row += M;
            }
            while row < rows {
                self.columns::<L, 1, 8>(row);
                row += 1;
            }
        }
    }

    /// `M` rows, by `N` vectors of columns at a time, whose sums are independent, then by one.
    ///
    /// # Safety
    /// As [`sums`].
    #[inline(always)]
    unsafe fn columns<L: Lanes, const M: usize, const N: usize>(&self, row: usize) {
        let (columns, mut column) = (self.columns.len(), 0);
        // SAFETY: passed on; columns are below `columns`.
        unsafe {
            while column + N * L::N <= columns {
                self.tile::<L, M, N>(row, column, L::N);
                column += N * L::N;
            }
            while column < columns {
                self.tile::<L, M, 1>(row, column, L::N.min(columns - column));
                column += L::N;
            }
        }
    }

    /// `M` rows by `N` vectors of columns, of which `y` has `lanes` lanes: fewer than all only of a
    /// single one.
    ///
    /// # Safety
    /// As [`sums`]; there are that many of both.
    #[inline(always)]
    unsafe fn tile<L: Lanes, const M: usize, const N: usize>(
        &self,
        row: usize,
        column: usize,
        lanes: usize,
    ) {
        let t = self.t[row * self.stride..][..M * self.stride].as_ptr();
        let mut sums = [[L::splat(0.0); N]; M];
        let mut panels = [self.factor.as_ptr(); N];
        each!(n < N, {
            let first = self.columns.start + column + n * L::N;
            let panel = &self.factor[first / PANEL * PANEL * self.rank..][..PANEL * self.rank];
            panels[n] = panel[first % PANEL..].as_ptr();
        });
        for rank in 0..self.rank {
            // SAFETY: a panel has as many elements; `t` has `rank` numbers in each row.
            unsafe {
                let mut w = [L::splat(0.0); N];
                each!(n < N, {
                    w[n] = E::load(panels[n].add(rank * PANEL));
                });
                each!(m < M, {
                    let t = L::splat(*t.add(m * self.stride + rank));
                    each!(n < N, {
                        sums[m][n] = w[n].fma(t, sums[m][n]);
                    });
                });
            }
        }
        each!(m < M, {
            each!(n < N, {
                // SAFETY: the caller's promise.
                unsafe {
                    let to = self.y.start.add((row + m) * self.y.stride + column + n * L::N);
                    match lanes < L::N {
                        true => L::load_part(to, lanes).add(sums[m][n]).store_part(to, lanes),
                        false => L::load(to).add(sums[m][n]).store(to),
                    }
                }
            });
        });
    }
}

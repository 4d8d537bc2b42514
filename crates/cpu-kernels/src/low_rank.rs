//! Low-rank factors of adapters: `t = scale down x`, then `y += up t`, one row at a time.
//!
//! Every sum has one order, whatever the instruction set, the worker's share or the other rows:
//! `down` in 32 partial sums that are added pairwise, `up` from the first rank to the last.
//! Products and sums are rounded separately, so that all instruction sets agree to the last bit.

use crate::isa::Isa;
use formats::{DType, Error, Result};
use std::ops::Range;

/// Partial sums of a dot product, and outputs computed side by side.
const LANES: usize = 32;

/// The low-rank factors of an adapter at one site.
#[derive(Debug, Clone, PartialEq)]
pub struct Factors {
    rank: usize,
    input: usize,
    output: usize,
    scale: f32,
    down: Numbers,
    /// `[rank, output]`.
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
trait Element: Copy {
    fn float(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn float(self) -> f32 {
        self
    }
}

impl Element for u16 {
    #[inline(always)]
    fn float(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
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
        let turned = (0..rank * output).map(|i| up[i % output * rank + i / output]);
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

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        let gain = self.gain.iter().flatten().map(|values| size_of_val(values.as_slice()));
        self.down.bytes() + self.up.bytes() + gain.sum::<usize>()
    }

    /// `t[r] = scale down[r] x` for the given ranks; `t` holds exactly those.
    pub fn down(&self, isa: Isa, x: &[f32], ranks: Range<usize>, t: &mut [f32]) {
        assert!(x.len() == self.input && t.len() == ranks.len() && ranks.end <= self.rank);
        let range = ranks.start * self.input..ranks.end * self.input;
        match &self.down {
            Numbers::F32(rows) => dots(isa, &rows[range], x, t),
            Numbers::BF16(rows) => dots(isa, &rows[range], x, t),
        }
        t.iter_mut().for_each(|t| *t *= self.scale);
    }

    /// `t = scale down[row]` for the given ranks of an embedding table.
    pub fn pick(&self, row: usize, ranks: Range<usize>, t: &mut [f32]) {
        assert!(row < self.input && t.len() == ranks.len() && ranks.end <= self.rank);
        let range = row * self.rank + ranks.start..row * self.rank + ranks.end;
        match &self.down {
            Numbers::F32(rows) => t.copy_from_slice(&rows[range]),
            Numbers::BF16(rows) => {
                t.iter_mut().zip(&rows[range]).for_each(|(t, v)| *t = v.float());
            }
        }
        t.iter_mut().for_each(|t| *t *= self.scale);
    }

    /// `y += up t` for the given columns, which `y` and `residual` hold. With a gain, `y` then
    /// becomes `residual + gain (y - residual) + offset`.
    pub fn up(
        &self,
        isa: Isa,
        t: &[f32],
        columns: Range<usize>,
        residual: Option<&[f32]>,
        y: &mut [f32],
    ) {
        assert!(t.len() == self.rank && y.len() == columns.len() && columns.end <= self.output);
        match &self.up {
            Numbers::F32(rows) => add(isa, rows, self.output, columns.start, t, y),
            Numbers::BF16(rows) => add(isa, rows, self.output, columns.start, t, y),
        }
        if let Some([gain, offset]) = &self.gain {
            for (i, y) in y.iter_mut().enumerate() {
                let residual = residual.map_or(0.0, |residual| residual[i]);
                let column = columns.start + i;
                *y = residual + (gain[column] * (*y - residual) + offset[column]);
            }
        }
    }
}

/// The dot product of `x` with each row.
fn dots<E: Element>(isa: Isa, rows: &[E], x: &[f32], t: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the value of `isa` is the proof that the processor has these instructions.
        Isa::Avx512 | Isa::Amx => unsafe { dots_avx512(rows, x, t) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 | Isa::AvxVnni => unsafe { dots_avx2(rows, x, t) },
        _ => dots_here::<E, 2>(rows, x, t),
    }
}

/// `y += up t` from column `from` on; `rows` is `[rank, width]`.
fn add<E: Element>(isa: Isa, rows: &[E], width: usize, from: usize, t: &[f32], y: &mut [f32]) {
    match isa {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the value of `isa` is the proof that the processor has these instructions.
        Isa::Avx512 | Isa::Amx => unsafe { add_avx512(rows, width, from, t, y) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Isa::Avx2 | Isa::AvxVnni => unsafe { add_avx2(rows, width, from, t, y) },
        _ => add_here::<E, 2>(rows, width, from, t, y),
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn dots_avx512<E: Element>(rows: &[E], x: &[f32], t: &mut [f32]) {
    dots_here::<E, 4>(rows, x, t);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn dots_avx2<E: Element>(rows: &[E], x: &[f32], t: &mut [f32]) {
    dots_here::<E, 2>(rows, x, t);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn add_avx512<E: Element>(rows: &[E], width: usize, from: usize, t: &[f32], y: &mut [f32]) {
    add_here::<E, 4>(rows, width, from, t, y);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn add_avx2<E: Element>(rows: &[E], width: usize, from: usize, t: &[f32], y: &mut [f32]) {
    add_here::<E, 2>(rows, width, from, t, y);
}

/// `N` rows at a time, so that their sums are independent and `x` is loaded once.
#[inline(always)]
fn dots_here<E: Element, const N: usize>(rows: &[E], x: &[f32], t: &mut [f32]) {
    let (groups, rest) = t.as_chunks_mut::<N>();
    let (front, behind) = rows.split_at(groups.len() * N * x.len());
    for (rows, t) in front.chunks_exact(N * x.len()).zip(groups) {
        *t = dots_of(rows, x);
    }
    for (row, t) in behind.chunks_exact(x.len()).zip(rest) {
        [*t] = dots_of(row, x);
    }
}

/// The dot products of `x` with `N` rows.
#[inline(always)]
fn dots_of<E: Element, const N: usize>(rows: &[E], x: &[f32]) -> [f32; N] {
    let mut sums = [[0f32; LANES]; N];
    let (blocks, rest) = x.as_chunks::<LANES>();
    let rows: [&[E]; N] = std::array::from_fn(|n| &rows[n * x.len()..][..x.len()]);
    for (b, x) in blocks.iter().enumerate() {
        for n in 0..N {
            let row = &rows[n][b * LANES..][..LANES];
            for i in 0..LANES {
                sums[n][i] += row[i].float() * x[i];
            }
        }
    }
    for n in 0..N {
        for (i, (row, x)) in rows[n][blocks.len() * LANES..].iter().zip(rest).enumerate() {
            sums[n][i] += row.float() * x;
        }
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                sums[n][i] += sums[n][i + half];
            }
            half /= 2;
        }
    }
    sums.map(|sums| sums[0])
}

/// `N` blocks of columns at a time, whose sums are independent.
#[inline(always)]
fn add_here<E: Element, const N: usize>(
    rows: &[E],
    width: usize,
    from: usize,
    t: &[f32],
    y: &mut [f32],
) {
    let (blocks, rest) = y.as_chunks_mut::<LANES>();
    let (groups, blocks) = blocks.as_chunks_mut::<N>();
    let mut column = from;
    for y in groups {
        add_blocks(rows, width, column, t, y);
        column += N * LANES;
    }
    for y in blocks {
        add_blocks(rows, width, column, t, std::array::from_mut(y));
        column += LANES;
    }
    for y in rest {
        let mut sum = 0f32;
        for (r, &t) in t.iter().enumerate() {
            sum += rows[r * width + column].float() * t;
        }
        *y += sum;
        column += 1;
    }
}

#[inline(always)]
fn add_blocks<E: Element, const N: usize>(
    rows: &[E],
    width: usize,
    column: usize,
    t: &[f32],
    y: &mut [[f32; LANES]; N],
) {
    let mut sums = [[0f32; LANES]; N];
    for (r, &t) in t.iter().enumerate() {
        let row = &rows[r * width + column..][..N * LANES];
        for n in 0..N {
            for i in 0..LANES {
                sums[n][i] += row[n * LANES + i].float() * t;
            }
        }
    }
    for n in 0..N {
        for i in 0..LANES {
            y[n][i] += sums[n][i];
        }
    }
}

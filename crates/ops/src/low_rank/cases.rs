//! Cases and benchmarks of the adapters' kernels.

pub(super) mod pairs;

use super::kernels::{Low, UpEnding, low_rank_down, low_rank_pick, low_rank_up, schedule};
use crate::Unary;
use crate::gate_up::gate_up;
use crate::linear::cases::{
    Matrix, PROCESSORS, activations, matrix_bytes, norm_scales, numbers, products,
};
use crate::linear::gemm::cases::rounded;
use crate::linear::stream::{End, Share, StreamTiling, StreamTypes, stream};
use crate::linear::{GemvSchedule, Task, reference};
use crate::linear_add::linear_add;
use crate::packed::Format;
use crate::project::{ProjectedMatrix, project};
use formats::DType;
use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, noise, tolerance};
use tile::launch::Numbers;
use tile::types::Scalar;

use Scalar::{BF16, F16, F32, U32};

const EPS: f32 = 1e-6;

/// The seats of rows: none, one and another by turns.
fn seats(rows: usize, count: usize) -> Vec<u32> {
    (0..rows).map(|row| ((row * 2 + row / 3 + 1) % (count + 1)) as u32).collect()
}

/// Rows, columns, ranks of all sites, seats.
type Shape = (usize, usize, usize, usize);

fn down(
    (rows, width, ranks, count): Shape,
    types: (Scalar, Scalar),
    norm: bool,
    outer: usize,
    why: &str,
) -> Case {
    let (from, element) = types;
    let matrix = Matrix::new(Format::Dense(element), 3, count * ranks, width);
    let x = Buffer::floats(from, &noise(7, rows * width));
    let (weight, seats) = (noise(13, width), seats(rows, count));
    let scales = if norm { norm_scales(&x, width, EPS) } else { vec![1.0; rows] };
    let mut seen = x.to_f32();
    if norm {
        seen.iter_mut().zip(weight.iter().cycle()).for_each(|(x, w)| *x *= w);
        // A copy is kept in the activations' own type.
        seen = Buffer::floats(from, &seen).to_f32();
    }
    let mut want = Vec::new();
    for (row, x) in seen.chunks(width).enumerate() {
        let seat = (seats[row] as usize).max(1) - 1;
        let mut t = vec![0.0; ranks];
        reference(x, &matrix.weights[seat * ranks * width..][..ranks * width], None, width, &mut t);
        want.extend(t.iter().map(|t| f64::from(*t) * scales[row]));
    }
    let mut schedule = schedule(width as u32, ranks as u32, from, element);
    schedule.threads = 64;
    let mut buffers = vec![x, Buffer::zeros(F32, rows * ranks), Buffer::words(&seats)];
    if norm {
        buffers.push(Buffer::floats(F32, &weight));
    }
    buffers.push(matrix.buffer());
    let mut expected = vec![(1, Expected::Near(want, tolerance(F32)))];
    if outer > 0 {
        let residual = noise(17, rows * outer);
        let kept = residual.iter().map(|v| f64::from(*v)).collect();
        buffers.extend([Buffer::floats(F32, &residual), Buffer::zeros(F32, rows * outer)]);
        expected.push((buffers.len() - 1, Expected::Exact(kept)));
    }
    Case {
        kernel: low_rank_down(from, element, norm, outer > 0, schedule).record(),
        label: format!("{rows} x {width} -> {ranks}, {count} seats, {element}: {why}"),
        numbers: down_numbers((rows, width, ranks, count), 2)
            .with("outer", outer as u32)
            .with_f32("eps", EPS),
        buffers,
        expected,
    }
}

fn down_numbers((rows, width, ranks, count): Shape, groups: u32) -> Numbers {
    Numbers::new()
        .with("rows", rows as u32)
        .with("width", width as u32)
        .with("ranks", ranks as u32)
        .with("count", count as u32)
        .with("groups", groups)
}

pub(super) fn downs() -> Vec<Case> {
    vec![
        down((1, 520, 24, 1), (F32, BF16), true, 0, "one row, three sites behind a norm"),
        down((5, 288, 8, 3), (F32, F32), false, 0, "rows of three seats and of none"),
        down((3, 1024, 16, 2), (BF16, BF16), false, 40, "what a product overwrites is kept"),
        down((2, 264, 72, 2), (F16, BF16), false, 0, "more ranks"),
        down((4, 64, 8, 2), (F32, F32), true, 3, "norm and residual"),
    ]
}

pub(super) fn down_benches() -> Vec<Bench> {
    let bench = |(rows, width, ranks, count): Shape| {
        let schedule = schedule(width as u32, ranks as u32, F32, BF16);
        let groups = schedule.groups(ranks as u32, PROCESSORS);
        let matrix = matrix_bytes(Format::Dense(BF16), count * ranks, width);
        let seats: Vec<u32> = (0..rows).map(|row| 1 + (row % count) as u32).collect();
        let buffers = vec![
            Fill::Noise(F32, rows * width),
            Fill::Zeros(F32, rows * ranks),
            Fill::These(Buffer::words(&seats)),
            Fill::Noise(F32, width),
            Fill::Noise(U32, matrix / 4),
        ];
        Bench {
            kernel: low_rank_down(F32, BF16, true, false, schedule).record(),
            label: format!("{rows} x {width} -> {ranks}, {count} seats"),
            numbers: down_numbers((rows, width, ranks, count), groups).with_f32("eps", EPS),
            buffers,
            bytes: (matrix + 4 * rows * width) as u64,
            flops: 2 * (rows * width * ranks) as u64,
            roof: Bottleneck::Memory,
        }
    };
    vec![bench((1, 4096, 48, 1)), bench((8, 4096, 48, 4))]
}

pub(super) fn picks() -> Vec<Case> {
    let case = |(rows, vocab, ranks, count): Shape, element: Scalar| {
        let down = Buffer::floats(element, &noise(5, count * vocab * ranks));
        let (values, seats) = (down.to_f64(), seats(rows, count));
        let tokens: Vec<u32> = (0..rows).map(|row| (row * 7 % vocab) as u32).collect();
        let row = |(seat, token): (&u32, &u32)| {
            let from = ((seat.max(&1) - 1) as usize * vocab + *token as usize) * ranks;
            values[from..from + ranks].to_vec()
        };
        let want = seats.iter().zip(&tokens).flat_map(row).collect();
        Case {
            kernel: low_rank_pick(element).record(),
            label: format!("{rows} of {vocab}, {ranks} ranks, {count} seats, {element}"),
            numbers: pick_numbers((rows, vocab, ranks, count)),
            buffers: vec![
                Buffer::words(&tokens),
                Buffer::words(&seats),
                down,
                Buffer::zeros(F32, rows * ranks),
            ],
            expected: vec![(3, Expected::Exact(want))],
        }
    };
    vec![case((5, 11, 40, 2), BF16), case((1, 3, 8, 1), F32)]
}

fn pick_numbers((rows, vocab, ranks, count): Shape) -> Numbers {
    Numbers::new()
        .with("rows", rows as u32)
        .with("vocab", vocab as u32)
        .with("ranks", ranks as u32)
        .with("count", count as u32)
}

pub(super) fn pick_benches() -> Vec<Bench> {
    let (rows, vocab, ranks, count) = (4096, 32768, 16, 2);
    let tokens: Vec<u32> = (0..rows as u32).map(|i| i.wrapping_mul(0x9E37_79B9) >> 17).collect();
    let buffers = vec![
        Fill::These(Buffer::words(&tokens)),
        Fill::These(Buffer::words(&vec![1; rows])),
        Fill::Noise(BF16, count * vocab * ranks),
        Fill::Zeros(F32, rows * ranks),
    ];
    vec![Bench {
        kernel: low_rank_pick(BF16).record(),
        label: format!("{rows} rows of {ranks}"),
        numbers: pick_numbers((rows, vocab, ranks, count)),
        buffers,
        bytes: (6 * rows * ranks + 8 * rows) as u64,
        flops: 0,
        roof: Bottleneck::Memory,
    }]
}

/// A launch of `low_rank_up`.
struct Up<'a> {
    rows: usize,
    outs: &'a [usize],
    to: &'a [Scalar],
    element: Scalar,
    rank: usize,
    count: usize,
    block: u32,
    ending: UpEnding,
    why: &'a str,
}

impl Up<'_> {
    fn numbers(&self) -> Numbers {
        let mut numbers =
            Numbers::new().with("rows", self.rows as u32).with("count", self.count as u32);
        for (j, out) in self.outs.iter().enumerate() {
            numbers.set(&format!("out{j}"), *out as u32);
        }
        numbers
    }

    fn label(&self) -> String {
        let Up { rows, outs, element, rank, count, block, ending, why, .. } = self;
        format!(
            "{rows} x {rank} -> {outs:?}, {count} seats, {element}, blocks of {block}, {ending:?}: {why}"
        )
    }

    fn kernel(&self) -> tile::Kernel {
        low_rank_up(self.to, self.element, self.rank as u32, self.block, self.ending).record()
    }

    fn case(&self) -> Case {
        let Up { rows, outs, to, element, rank, count, ending, .. } = *self;
        let (sites, all): (usize, usize) = (outs.len(), outs.iter().sum());
        let t = Buffer::floats(F32, &noise(3, rows * sites * rank));
        let up = Buffer::floats(element, &noise(5, count * all * rank));
        // The last site of the first seat is one that its adapter does not change.
        let scale = |i: usize| if sites > 1 && i + 1 == sites { 0.0 } else { 0.5 + i as f32 };
        // Not every seat has gains.
        let gained = |i: usize| i.is_multiple_of(2);
        let about = |i: usize| [scale(i), f32::from(u8::from(gained(i)))];
        let scales: Vec<f32> = (0..count * sites).flat_map(about).collect();
        let seats = seats(rows, count);
        let ys: Vec<Buffer> = (0..sites)
            .map(|j| Buffer::floats(to[j], &noise(11 + j as u64, rows * outs[j])))
            .collect();
        let gains = matches!(ending, UpEnding::Gains { .. }).then(|| noise(23, count * 2 * all));
        let kept =
            matches!(ending, UpEnding::Gains { residual: true }).then(|| noise(29, rows * all));
        let (low, factors) = (t.to_f64(), up.to_f64());
        let mut want: Vec<Vec<f64>> = ys.iter().map(Buffer::to_f64).collect();
        for row in 0..rows {
            let Some(seat) = (seats[row] as usize).checked_sub(1) else { continue };
            let mut first = 0;
            for (j, out) in outs.iter().enumerate() {
                let scale = f64::from(scales[2 * (seat * sites + j)]);
                for o in 0..if scale == 0.0 { 0 } else { *out } {
                    let column = first + o;
                    let terms = (0..rank).map(|k| {
                        factors[(seat * all + column) * rank + k]
                            * low[(row * sites + j) * rank + k]
                    });
                    let y = &mut want[j][row * out + o];
                    *y += scale * terms.sum::<f64>();
                    if let Some(gains) = gains.as_ref().filter(|_| gained(seat * sites + j)) {
                        let [gain, offset] =
                            [0, 1].map(|i| f64::from(gains[(seat * 2 + i) * all + column]));
                        let base =
                            kept.as_ref().map_or(0.0, |kept| f64::from(kept[row * all + column]));
                        *y = base + gain * (*y - base) + offset;
                    }
                }
                first += out;
            }
        }
        let mut buffers = vec![t, up, Buffer::floats(F32, &scales), Buffer::words(&seats)];
        let first = buffers.len();
        buffers.extend(ys);
        buffers.extend(gains.map(|gains| Buffer::floats(F32, &gains)));
        buffers.extend(kept.map(|kept| Buffer::floats(F32, &kept)));
        let near =
            |(j, want): (usize, Vec<f64>)| (first + j, Expected::Near(want, tolerance(to[j])));
        let expected = want.into_iter().enumerate().map(near).collect();
        Case {
            kernel: self.kernel(),
            label: self.label(),
            numbers: self.numbers(),
            buffers,
            expected,
        }
    }

    fn bench(&self) -> Bench {
        let Up { rows, outs, to, rank, count, .. } = *self;
        let (sites, all): (usize, usize) = (outs.len(), outs.iter().sum());
        let mut buffers = vec![
            Fill::Noise(F32, rows * sites * rank),
            Fill::Noise(self.element, count * all * rank),
            Fill::Noise(F32, 2 * count * sites),
            Fill::These(Buffer::words(&vec![1; rows])),
        ];
        let ys = outs.iter().zip(to);
        buffers.extend(ys.clone().map(|(out, to)| Fill::Noise(*to, rows * out)));
        let moved: usize = ys.map(|(out, to)| 2 * rows * out * to.bytes()).sum();
        Bench {
            kernel: self.kernel(),
            label: self.label(),
            numbers: self.numbers(),
            buffers,
            bytes: (moved + all * rank * self.element.bytes()) as u64,
            flops: 2 * (rows * all * rank) as u64,
            roof: Bottleneck::Memory,
        }
    }
}

pub(super) fn ups() -> Vec<Case> {
    let up = Up {
        rows: 5,
        outs: &[130],
        to: &[F32],
        element: BF16,
        rank: 8,
        count: 2,
        block: 1,
        ending: UpEnding::Plain,
        why: "",
    };
    [
        Up {
            rows: 1,
            outs: &[96, 40, 24],
            to: &[F16; 3],
            rank: 16,
            why: "one row, three sites, one unchanged",
            ..up
        },
        Up { outs: &[64, 8], to: &[F32, BF16], element: F32, count: 3, why: "unlike types", ..up },
        Up { rows: 37, block: 16, rank: 24, why: "blocks of rows, the last ragged", ..up },
        Up { rows: 6, rank: 72, block: 4, count: 1, why: "more ranks than registers hold", ..up },
        Up { ending: UpEnding::Gains { residual: true }, why: "gains around a residual", ..up },
        Up {
            outs: &[20, 30],
            to: &[F32; 2],
            block: 2,
            ending: UpEnding::Gains { residual: false },
            why: "gains of two sites",
            ..up
        },
    ]
    .iter()
    .map(Up::case)
    .collect()
}

pub(super) fn up_benches() -> Vec<Bench> {
    let up = Up {
        rows: 1,
        outs: &[4096, 1024, 1024],
        to: &[F16; 3],
        element: BF16,
        rank: 16,
        count: 1,
        block: 1,
        ending: UpEnding::Plain,
        why: "queries, keys and values of an 8B model",
    };
    let many = Up { rows: 2048, outs: &[4096], to: &[F32], block: 16, why: "a prompt", ..up };
    [up, many].iter().map(Up::bench).collect()
}

/// Which kernel adds what adapters add to its own sums.
#[derive(Debug, Clone, Copy)]
enum Kernel {
    Project,
    LinearAdd,
    GateUp(Unary),
    Stream(End),
}

/// A launch of one.
#[derive(Clone, Copy)]
struct WithSites<'a> {
    kernel: Kernel,
    rows: usize,
    outs: &'a [usize],
    width: usize,
    format: Format,
    low: Low,
    count: usize,
    why: &'a str,
}

impl WithSites<'_> {
    /// Places of the matrices that have sites.
    fn places(&self) -> Vec<usize> {
        (0..self.outs.len()).filter(|j| self.low.sites >> j & 1 == 1).collect()
    }

    /// The gate, if the two matrices are of one.
    fn gate(&self) -> Option<Unary> {
        match self.kernel {
            Kernel::GateUp(act) | Kernel::Stream(End::Gate(act)) => Some(act),
            _ => None,
        }
    }

    fn adds(&self) -> bool {
        matches!(self.kernel, Kernel::LinearAdd | Kernel::Stream(End::Add))
    }

    /// The schedule of a kernel of few rows.
    fn schedule(&self) -> GemvSchedule {
        let formats = vec![self.format; self.outs.len()];
        let out = self.outs.iter().sum::<usize>() as u32;
        let decode = Task::decode(&formats, self.width as u32, out);
        let pair = self.gate().is_some();
        let task = Task { rows: self.rows as u32, x: BF16, pair, ..decode };
        GemvSchedule { threads: 64, ..GemvSchedule::pick(&task) }
    }

    fn recorded(&self) -> tile::Kernel {
        let (format, low, rows, schedule) =
            (self.format, Some(self.low), self.rows as u32, self.schedule());
        let parts: Vec<ProjectedMatrix> = (0..self.outs.len())
            .map(|j| ProjectedMatrix { format, bias: self.biased(j) })
            .collect();
        match self.kernel {
            Kernel::Project => project(BF16, F32, &parts, false, rows, schedule, low).record(),
            Kernel::LinearAdd => linear_add(BF16, F32, format, true, rows, schedule, low).record(),
            Kernel::GateUp(act) => {
                gate_up(BF16, F32, format, false, act, rows, schedule, low).record()
            }
            Kernel::Stream(end) => {
                let types = StreamTypes { x: BF16, operand: BF16, y: F32 };
                let tiling = StreamTiling {
                    share: Share::Terms,
                    resident: 1,
                    tiles: 1,
                    rows: 8,
                    loads: 2,
                    stages: 2,
                };
                stream(types, &parts, end, tiling, low).record()
            }
        }
    }

    /// Gates have no biases; else the first matrix has.
    fn biased(&self, j: usize) -> bool {
        j == 0 && self.gate().is_none()
    }

    /// Applies the seats of rows to the sums of each matrix; returns the buffers of the sites.
    fn changed(&self, sums: &mut [Vec<f64>]) -> Vec<Buffer> {
        let WithSites { rows, outs, low, count, .. } = *self;
        let (places, rank) = (self.places(), low.rank as usize);
        let (sites, all): (usize, usize) = (places.len(), places.iter().map(|j| outs[*j]).sum());
        let t = Buffer::floats(F32, &noise(3, rows * sites * rank));
        let up = Buffer::floats(low.element, &noise(5, count * all * rank));
        // The last site of the first seat is one that its adapter does not change; not every seat
        // has gains.
        let scale = |i: usize| if sites > 1 && i + 1 == sites { 0.0 } else { 0.5 + i as f32 };
        let gained = |i: usize| low.gains && i.is_multiple_of(2);
        let about = |i: usize| [scale(i), f32::from(u8::from(gained(i)))];
        let scales: Vec<f32> = (0..count * sites).flat_map(about).collect();
        let (gains, seats) = (noise(23, count * 2 * all), seats(rows, count));
        let (lows, factors) = (t.to_f64(), up.to_f64());
        for (row, seat) in seats.iter().enumerate().filter(|(_, seat)| **seat > 0) {
            let seat = *seat as usize - 1;
            let mut column = seat * all;
            for (site, j) in places.iter().enumerate() {
                let at = seat * sites + site;
                for o in 0..outs[*j] {
                    let low = &lows[(row * sites + site) * rank..][..rank];
                    let terms = low.iter().zip(&factors[column * rank..]).map(|(t, u)| t * u);
                    let y = &mut sums[*j][row * outs[*j] + o];
                    *y += f64::from(scale(at)) * terms.sum::<f64>();
                    if gained(at) {
                        let of = |i: usize| f64::from(gains[(seat + i) * all + column]);
                        *y = of(0) * *y + of(1);
                    }
                    column += 1;
                }
            }
        }
        let mut buffers = vec![t, up, Buffer::floats(F32, &scales), Buffer::words(&seats)];
        buffers.extend(low.gains.then(|| Buffer::floats(F32, &gains)));
        buffers
    }

    fn case(&self) -> Case {
        let WithSites { kernel, rows, outs, width, format, count, why, .. } = *self;
        let streams = matches!(kernel, Kernel::Stream(_));
        let (x, kept) = activations(BF16, rows * width, None, &self.schedule());
        let seen = if streams { x.to_f32() } else { kept };
        let matrices: Vec<Matrix> =
            (0..outs.len()).map(|j| Matrix::new(format, 5 + j as u64, outs[j], width)).collect();
        let biases = noise(11, outs[0]);
        let mut sums: Vec<Vec<f64>> = Vec::new();
        for (j, matrix) in matrices.iter().enumerate() {
            let bias = self.biased(j).then_some(&biases[..]);
            let mut read = Matrix::new(format, 5 + j as u64, outs[j], width);
            if streams {
                read.weights = rounded(&matrix.weights, BF16);
            }
            sums.push(products(&seen, &read, bias, &vec![1.0; rows], width));
        }
        let sites = self.changed(&mut sums);
        let residual = Buffer::floats(F32, &noise(21, rows * outs[0]));
        if let Some(act) = self.gate() {
            let ups = sums.pop().unwrap_or_default();
            sums[0].iter_mut().zip(ups).for_each(|(gate, up)| *gate = act.apply(*gate) * up);
        }
        let mut buffers = vec![if streams { Buffer::raw(U32, x.bytes) } else { x }];
        if self.adds() {
            let old = residual.to_f64();
            sums[0].iter_mut().zip(old).for_each(|(sum, old)| *sum += old);
            buffers.push(residual);
        }
        let mut expected = Vec::new();
        let mut numbers = numbers(2, width).with("rows", rows as u32).with("count", count as u32);
        numbers.set("out", outs[0] as u32);
        let mut wanted = sums.into_iter();
        for (j, matrix) in matrices.iter().enumerate() {
            if let Some(want) = wanted.next() {
                numbers.set(&format!("out{j}"), outs[j] as u32);
                expected.push((buffers.len(), Expected::Near(want, tolerance(F32))));
                buffers.push(Buffer::zeros(F32, rows * outs[j]));
            }
            buffers.push(matrix.buffer());
            buffers.extend(self.biased(j).then(|| Buffer::floats(F32, &biases)));
        }
        buffers.extend(sites);
        Case {
            kernel: self.recorded(),
            label: format!("{kernel:?} {rows} x {width} -> {outs:?}, {count} seats: {why}"),
            numbers,
            buffers,
            expected,
        }
    }
}

pub(super) fn sites() -> Vec<Case> {
    let [bf16, q8_0] = [Format::Dense(BF16), Format::Block(DType::Q8_0)];
    let low = Low { element: BF16, rank: 8, gains: false, sites: 1, beside: true };
    let gained = Low { gains: true, ..low };
    let one = WithSites {
        kernel: Kernel::LinearAdd,
        rows: 1,
        outs: &[37],
        width: 576,
        format: bf16,
        low,
        count: 2,
        why: "one row",
    };
    let three = WithSites {
        kernel: Kernel::Project,
        outs: &[24, 9, 13],
        low: Low { rank: 24, sites: 0b101, ..low },
        why: "the second matrix has no site",
        ..one
    };
    let gate = WithSites {
        kernel: Kernel::GateUp(Unary::Silu),
        outs: &[21, 21],
        low: Low { sites: 0b11, ..low },
        why: "a gate",
        ..one
    };
    let stream = |end| Kernel::Stream(end);
    let apart = |low: Low| Low { beside: false, ..low };
    [
        one,
        WithSites { low: apart(low), why: "`t` from any launch", ..one },
        WithSites { rows: 8, low: gained, format: q8_0, why: "gains under a residual", ..one },
        WithSites { rows: 2, low: Low { element: F32, rank: 72, ..low }, why: "many ranks", ..one },
        three,
        WithSites { rows: 4, low: Low { gains: true, ..three.low }, ..three },
        gate,
        WithSites {
            kernel: Kernel::GateUp(Unary::GeluTanh),
            rows: 3,
            low: Low { gains: true, ..gate.low },
            format: q8_0,
            ..gate
        },
        WithSites { kernel: stream(End::Store), rows: 11, low: apart(three.low), ..three },
        WithSites { kernel: stream(End::Add), rows: 9, low: apart(gained), format: q8_0, ..one },
        WithSites { kernel: stream(End::Gate(Unary::Silu)), rows: 5, low: apart(gate.low), ..gate },
        WithSites {
            kernel: stream(End::Gate(Unary::Silu)),
            rows: 5,
            low: apart(Low { gains: true, ..gate.low }),
            ..gate
        },
    ]
    .iter()
    .map(WithSites::case)
    .collect()
}

/// The feed-forward of an 8B model at one row, to be compared with `gate_up`'s.
pub(super) fn site_benches() -> Vec<Bench> {
    let (width, out, rank) = (4096, 14336, 16);
    let bench = |format: Format| {
        let formats = [format];
        let task = Task { pair: true, x: F32, ..Task::decode(&formats, width as u32, out as u32) };
        let (schedule, bytes) = (GemvSchedule::pick(&task), matrix_bytes(format, out, width));
        let low = Low { element: BF16, rank, gains: false, sites: 0b11, beside: true };
        Bench {
            kernel: gate_up(F32, BF16, format, false, Unary::Silu, 1, schedule, Some(low)).record(),
            label: format!("{} {width} -> 2 x {out}, rank {rank}", format.name()),
            numbers: numbers(schedule.groups(out as u32, PROCESSORS), width)
                .with("out", out as u32)
                .with("count", 1),
            buffers: vec![
                Fill::Noise(F32, width),
                Fill::Zeros(BF16, out),
                Fill::Noise(U32, bytes / 4),
                Fill::Noise(U32, bytes / 4),
                Fill::Noise(F32, 2 * rank as usize),
                Fill::Noise(BF16, 2 * out * rank as usize),
                Fill::Noise(F32, 4),
                Fill::These(Buffer::words(&[1])),
            ],
            bytes: (2 * bytes + 8 * width + 2 * out + 4 * out * rank as usize) as u64,
            flops: 4 * (out * width) as u64,
            roof: Bottleneck::Memory,
        }
    };
    [DType::BF16, DType::Q4K].into_iter().filter_map(Format::of).map(bench).collect()
}

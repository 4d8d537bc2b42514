//! Cases and benchmarks of the kernels of experts' adapters.

use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, noise, tolerance};
use tile::launch::Numbers;
use tile::types::Scalar;

use super::super::pairs::{low_rank_pairs_down, low_rank_pairs_up};
use super::seats;

use Scalar::{BF16, F16, F32};

/// The sizes of a launch.
#[derive(Clone, Copy)]
struct Shape {
    tokens: usize,
    used: usize,
    experts: usize,
    count: usize,
    /// Columns and rows of each expert's matrices, and how many of them have sites.
    width: usize,
    out: usize,
    sites: usize,
    rank: usize,
    why: &'static str,
}

const SHAPES: &[Shape] = &[
    Shape {
        tokens: 5,
        used: 2,
        experts: 4,
        count: 2,
        width: 70,
        out: 150,
        sites: 2,
        rank: 8,
        why: "two sites",
    },
    Shape {
        tokens: 1,
        used: 3,
        experts: 3,
        count: 1,
        width: 16,
        out: 9,
        sites: 1,
        rank: 24,
        why: "few outputs",
    },
    Shape {
        tokens: 3,
        used: 1,
        experts: 2,
        count: 3,
        width: 33,
        out: 130,
        sites: 1,
        rank: 72,
        why: "a great rank",
    },
];

impl Shape {
    fn pairs(&self) -> usize {
        self.tokens * self.used
    }

    /// The expert of each pair.
    fn ids(&self) -> Vec<u32> {
        (0..self.pairs()).map(|pair| (pair * 5 % self.experts) as u32).collect()
    }

    /// For each pair its seat's number, if it has one, and the number of its expert's factors.
    fn matrices(&self) -> Vec<Option<(usize, usize)>> {
        let (ids, seats) = (self.ids(), seats(self.tokens, self.count));
        let matrix = |pair: usize| {
            let seat = (seats[pair / self.used] as usize).checked_sub(1)?;
            Some((seat, seat * self.experts + ids[pair] as usize))
        };
        (0..self.pairs()).map(matrix).collect()
    }

    fn numbers(&self) -> Numbers {
        Numbers::new()
            .with("pairs", self.pairs() as u32)
            .with("experts", self.experts as u32)
            .with("count", self.count as u32)
    }

    fn down_numbers(&self, share: usize) -> Numbers {
        self.numbers()
            .with("width", self.width as u32)
            .with("ranks", (self.sites * self.rank) as u32)
            .with("share", share as u32)
    }
}

pub(in crate::low_rank) fn downs() -> Vec<Case> {
    let case = |shape: &Shape, from: Scalar, element: Scalar, share: usize| {
        let Shape { width, sites, rank, experts, count, .. } = *shape;
        let ranks = sites * rank;
        let x = Buffer::floats(from, &noise(7, shape.pairs().div_ceil(share) * width));
        let down = Buffer::floats(element, &noise(9, count * experts * ranks * width));
        let (seen, factors) = (x.to_f64(), down.to_f64());
        // Pairs without an adapter have the first seat's sums.
        let ids = shape.ids();
        let matrices = shape.matrices().into_iter().zip(&ids);
        let want = matrices.enumerate().flat_map(|(pair, (matrix, id))| {
            let matrix = matrix.map_or(*id as usize, |(_, matrix)| matrix);
            let x = &seen[pair / share * width..][..width];
            let row = |j: usize| {
                let row = &factors[(matrix * ranks + j) * width..][..width];
                row.iter().zip(x).map(|(a, b)| a * b).sum::<f64>()
            };
            (0..ranks).map(row).collect::<Vec<f64>>()
        });
        Case {
            kernel: low_rank_pairs_down(from, element, shape.used as u32).record(),
            label: format!("{}, {from} and {element}", shape.why),
            numbers: shape.down_numbers(share),
            expected: vec![(4, Expected::Near(want.collect(), tolerance(F32)))],
            buffers: vec![
                x,
                Buffer::words(&ids),
                Buffer::words(&seats(shape.tokens, count)),
                down,
                Buffer::zeros(F32, shape.pairs() * ranks),
            ],
        }
    };
    vec![
        case(&SHAPES[0], BF16, BF16, 2),
        case(&SHAPES[0], F32, F32, 1),
        case(&SHAPES[1], F32, BF16, 3),
        case(&SHAPES[2], F16, BF16, 1),
    ]
}

pub(in crate::low_rank) fn ups() -> Vec<Case> {
    let case = |shape: &Shape, element: Scalar, leaves: bool| {
        let Shape { out, sites, rank, experts, count, .. } = *shape;
        let pairs = shape.pairs();
        let t = Buffer::floats(F32, &noise(3, pairs * sites * rank));
        let up = Buffer::floats(element, &noise(4, count * experts * sites * out * rank));
        let mut scales: Vec<f32> = (0..2 * count * sites).map(|i| 0.5 + i as f32).collect();
        if leaves {
            scales[0] = 0.0;
        }
        let ys: Vec<Buffer> =
            (0..sites).map(|j| Buffer::floats(F32, &noise(20 + j as u64, pairs * out))).collect();
        let (low, factors) = (t.to_f64(), up.to_f64());
        let want = |j: usize| {
            let mut y = ys[j].to_f64();
            for (pair, matrix) in shape.matrices().into_iter().enumerate() {
                let Some((seat, matrix)) = matrix else { continue };
                let low = &low[(pair * sites + j) * rank..][..rank];
                let scale = f64::from(scales[(seat * sites + j) * 2]);
                for o in 0..out {
                    let row = &factors[((matrix * sites + j) * out + o) * rank..][..rank];
                    let sum = row.iter().zip(low).map(|(a, b)| a * b).sum::<f64>();
                    y[pair * out + o] += scale * sum;
                }
            }
            y
        };
        let near = |j: usize| (5 + j, Expected::Near(want(j), tolerance(F32)));
        let expected = (0..sites).map(near).collect();
        let kernel =
            low_rank_pairs_up(element, rank as u32, sites as u32, shape.used as u32).record();
        let fixed = vec![
            t,
            Buffer::words(&shape.ids()),
            Buffer::words(&seats(shape.tokens, count)),
            up,
            Buffer::floats(F32, &scales),
        ];
        Case {
            kernel,
            label: format!("{}, {element}", shape.why),
            numbers: shape.numbers().with("out", out as u32),
            buffers: fixed.into_iter().chain(ys).collect(),
            expected,
        }
    };
    vec![
        case(&SHAPES[0], BF16, false),
        case(&SHAPES[0], F32, true),
        case(&SHAPES[1], BF16, false),
        case(&SHAPES[2], BF16, false),
    ]
}

/// Gates and ups of Qwen3-30B-A3B's experts, one token, rank 16.
const BENCH: Shape = Shape {
    tokens: 1,
    used: 8,
    experts: 128,
    count: 1,
    width: 2048,
    out: 768,
    sites: 2,
    rank: 16,
    why: "one token, 8 of 128 experts, rank 16",
};

fn bench(kernel: tile::Kernel, numbers: Numbers, buffers: Vec<Fill>, bytes: usize) -> Bench {
    let (label, roof) = (BENCH.why.to_owned(), Bottleneck::Memory);
    Bench { kernel, label, numbers, buffers, bytes: bytes as u64, flops: 0, roof }
}

pub(in crate::low_rank) fn down_benches() -> Vec<Bench> {
    let Shape { width, sites, rank, experts, used, .. } = BENCH;
    let buffers = vec![
        Fill::Noise(BF16, width),
        Fill::These(Buffer::words(&BENCH.ids())),
        Fill::These(Buffer::words(&[1])),
        Fill::Noise(BF16, experts * sites * rank * width),
        Fill::Zeros(F32, used * sites * rank),
    ];
    let kernel = low_rank_pairs_down(BF16, BF16, used as u32).record();
    let bytes = 2 * used * sites * rank * width;
    vec![bench(kernel, BENCH.down_numbers(used), buffers, bytes)]
}

pub(in crate::low_rank) fn up_benches() -> Vec<Bench> {
    let Shape { out, sites, rank, experts, used, .. } = BENCH;
    let mut buffers = vec![
        Fill::Noise(F32, used * sites * rank),
        Fill::These(Buffer::words(&BENCH.ids())),
        Fill::These(Buffer::words(&[1])),
        Fill::Noise(BF16, experts * sites * out * rank),
        Fill::These(Buffer::floats(F32, &vec![1.0; 2 * sites])),
    ];
    buffers.extend((0..sites).map(|_| Fill::Noise(F32, used * out)));
    let kernel = low_rank_pairs_up(BF16, rank as u32, sites as u32, used as u32).record();
    let bytes = 2 * used * sites * out * rank + 8 * used * sites * out;
    vec![bench(kernel, BENCH.numbers().with("out", out as u32), buffers, bytes)]
}

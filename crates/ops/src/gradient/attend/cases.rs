//! Cases and benchmarks of the kernels of attention among packed rows.

use tile::case::{Bench, Bottleneck, Buffer, Case, Expected, Fill, Spec, tolerance};
use tile::dsl::Scalar;
use tile::launch::Numbers;

use super::kernels::{
    attend, attend_keys, attend_queries, attend_sinks, backward_form, form, numbers,
};
use super::tiles::{attend_along, attend_tile_keys, attend_tile_queries};
use super::{Attend, AttendBackward};
use crate::Attention;
use crate::attention::prefill::{PrefillTiling, attention_packed};
use crate::operation::Operation;
use crate::trial::{PackedRows, memory, near, scaled};
use crate::tuned::{HOPPER, NVIDIA};

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "attend", cases: || cases(0), benches: || benches(0) },
    Spec { name: "attend_queries", cases: || cases(1), benches: || benches(1) },
    Spec { name: "attend_keys", cases: || cases(2), benches: || benches(2) },
    Spec { name: "attend_sinks", cases: sink_cases, benches: sink_benches },
    Spec { name: "attend_along", cases: || tile_cases(0), benches: || tile_benches(0) },
    Spec { name: "attend_tile_queries", cases: || tile_cases(1), benches: || tile_benches(1) },
    Spec { name: "attend_tile_keys", cases: || tile_cases(2), benches: || tile_benches(2) },
    Spec { name: "attention_packed", cases: || tile_cases(3), benches: || tile_benches(3) },
];

/// Heads, key/value heads, elements of a head.
fn plain([heads, kv_heads, head_dim]: [usize; 3]) -> Attention {
    let scale = 1.0 / (head_dim as f32).sqrt();
    let (window, cap, sinks, slopes, chosen) = (None, None, false, false, None);
    let chunked = false;
    Attention {
        layer: 0,
        heads,
        kv_heads,
        head_dim,
        scale,
        window,
        chunked,
        cap,
        sinks,
        slopes,
        chosen,
    }
}

/// Lengths of sequences, the layer, and why.
fn layers() -> Vec<(&'static [usize], Attention, &'static str)> {
    vec![
        (&[1, 2], plain([1, 1, 16]), "one token, and two"),
        (&[5, 1, 9], plain([4, 2, 16]), "short sequences, heads in pairs"),
        (&[70, 3], plain([2, 1, 40]), "more keys than lanes, a head that lanes do not divide"),
        (&[40], Attention { window: Some(7), ..plain([2, 2, 64]) }, "a window"),
        (
            &[5, 40],
            Attention { window: Some(17), chunked: true, ..plain([2, 1, 16]) },
            "chunks, of which sequences have their own",
        ),
        (&[33, 2], Attention { cap: Some(5.0), ..plain([2, 1, 16]) }, "scores that are bounded"),
        (&[9, 35], Attention { sinks: true, ..plain([3, 1, 8]) }, "sinks, small heads"),
        (
            &[9, 35],
            Attention { sinks: true, slopes: true, cap: Some(5.0), ..plain([3, 1, 8]) },
            "sinks, slopes, scores that are bounded",
        ),
        (
            &[5, 40],
            Attention { window: Some(17), chunked: true, slopes: true, ..plain([2, 2, 16]) },
            "slopes in chunks",
        ),
    ]
}

/// As [`layers`], of heads that matrix units take.
fn tile_layers() -> Vec<(&'static [usize], Attention, &'static str)> {
    vec![
        (&[1, 2], plain([1, 1, 16]), "one token, and two"),
        (&[37, 70], plain([4, 2, 32]), "ragged blocks, heads in pairs"),
        (&[130], plain([1, 1, 64]), "several blocks"),
        (&[3, 90], Attention { window: Some(20), ..plain([2, 2, 16]) }, "a window"),
        (&[66], Attention { cap: Some(5.0), ..plain([2, 1, 16]) }, "scores that are bounded"),
        (&[40], plain([1, 1, 128]), "large heads"),
        (&[70], plain([2, 1, 160]), "heads in halves, two on one"),
        (
            &[3, 20],
            Attention { window: Some(9), ..plain([1, 1, 256]) },
            "the largest heads, a window",
        ),
        (&[9, 60], Attention { sinks: true, ..plain([2, 1, 16]) }, "sinks"),
        (&[90, 5], Attention { slopes: true, ..plain([3, 3, 32]) }, "slopes"),
        (
            &[9, 60],
            Attention { slopes: true, sinks: true, cap: Some(5.0), ..plain([2, 1, 16]) },
            "sinks, slopes, scores that are bounded",
        ),
    ]
}

/// A layer's operands, and what the references make of them.
struct Setting {
    attention: Attention,
    scalar: Scalar,
    rows: PackedRows,
    ends: Vec<u32>,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    dy: Buffer,
    sinks: Vec<f32>,
    slopes: Vec<f32>,
    y: Buffer,
    lse: Buffer,
}

impl Setting {
    fn new(lengths: &[usize], attention: Attention, scalar: Scalar) -> Setting {
        let rows: usize = lengths.iter().sum();
        let packed = PackedRows::new(lengths);
        let end = |(first, length): (&u32, &usize)| vec![first + *length as u32; *length];
        let ends = packed.starts().iter().zip(lengths).flat_map(end).collect();
        let Attention { heads, kv_heads, head_dim, .. } = attention;
        let (sinks, slopes) = ([0.5, -1.0, 2.0], [0.5, 0.03, 0.125]);
        let vector = |has: bool, of: &[f32]| if has { of[..heads].to_vec() } else { Vec::new() };
        let fill = |seed, heads, by| scaled(scalar, seed, rows * heads * head_dim, by);
        let [wide, narrow] = [heads, kv_heads];
        let mut setting = Setting {
            q: fill(1, wide, 4.0),
            k: fill(2, narrow, 1.0),
            v: fill(3, narrow, 1.0),
            dy: fill(4, wide, 1.0),
            y: Buffer::zeros(scalar, 0),
            lse: Buffer::zeros(Scalar::F32, 0),
            sinks: vector(attention.sinks, &sinks),
            slopes: vector(attention.slopes, &slopes),
            attention,
            scalar,
            rows: packed,
            ends,
        };
        let found = setting.call(
            &Attend(setting.attention.clone()),
            &[&setting.q, &setting.k, &setting.v],
            &[rows * heads * head_dim, rows * heads],
        );
        setting.y = Buffer::floats(scalar, &found[0]);
        setting.lse = Buffer::floats(Scalar::F32, &found[1]);
        setting
    }

    fn call(&self, op: &dyn Operation, inputs: &[&Buffer], outputs: &[usize]) -> Vec<Vec<f32>> {
        let vectors = [&self.sinks, &self.slopes].into_iter().filter(|vector| !vector.is_empty());
        let weights: Vec<Vec<f32>> = vectors.cloned().collect();
        self.rows.reference(op, inputs, &weights, outputs)
    }

    /// The buffer of slopes, if there are any, which all kernels bind.
    fn slopes(&self) -> Option<Buffer> {
        self.attention.slopes.then(|| Buffer::floats(Scalar::F32, &self.slopes))
    }

    /// `dq`, `dk`, `dv`.
    fn gradients(&self) -> Vec<Vec<f32>> {
        let (wide, narrow) = (self.q.len(), self.k.len());
        let mut outputs = vec![wide, narrow, narrow];
        outputs.extend(self.attention.sinks.then_some(self.attention.heads));
        let op = AttendBackward(self.attention.clone());
        let inputs = [&self.q, &self.k, &self.v, &self.y, &self.lse, &self.dy];
        self.call(&op, &inputs, &outputs)
    }

    /// `dy . y` of each head.
    fn along(&self) -> Vec<f32> {
        let d = self.attention.head_dim;
        let (dy, y) = (self.dy.to_f64(), self.y.to_f64());
        let dots = dy.chunks_exact(d).zip(y.chunks_exact(d));
        dots.map(|(a, b)| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>() as f32).collect()
    }

    fn zeros(&self, like: &Buffer) -> Buffer {
        Buffer::zeros(self.scalar, like.len())
    }

    /// The case of the kernel of this number.
    fn case(&self, kernel: usize, why: &str) -> Case {
        let (rows, scalar, of) = (self.rows.len(), self.scalar, &self.attention);
        let form = form(of);
        let back = backward_form(of);
        let clone = |all: &[&Buffer]| all.iter().map(|b| (*b).clone()).collect::<Vec<Buffer>>();
        let (first, ends) = (Buffer::words(&self.rows.first), Buffer::words(&self.ends));
        let along = Buffer::floats(Scalar::F32, &self.along());
        let (kernel, buffers, expected): (_, Vec<Buffer>, Vec<(usize, Expected)>) = match kernel {
            0 => {
                let mut buffers = clone(&[&self.q, &self.k, &self.v, &first]);
                let lse = Buffer::zeros(Scalar::F32, rows * of.heads);
                buffers.extend([self.zeros(&self.q), lse]);
                if of.sinks {
                    buffers.push(Buffer::floats(Scalar::F32, &self.sinks));
                }
                buffers.extend(self.slopes());
                let lse = near(Scalar::F32, &self.lse.to_f32());
                let expected = vec![(4, near(scalar, &self.y.to_f32())), (5, lse)];
                (attend(scalar, form), buffers, expected)
            }
            1 => {
                let inputs = [&self.q, &self.k, &self.v, &self.y, &self.lse, &self.dy, &first];
                let mut buffers = clone(&inputs);
                buffers.extend([self.zeros(&self.q), Buffer::zeros(Scalar::F32, along.len())]);
                buffers.extend(self.slopes());
                let dq = near(scalar, &self.gradients()[0]);
                let along = near(Scalar::F32, &self.along());
                (attend_queries(scalar, back), buffers, vec![(7, dq), (8, along)])
            }
            _ => {
                let inputs = [&self.q, &self.k, &self.v, &self.lse, &self.dy, &along, &ends];
                let mut buffers = clone(&inputs);
                buffers.extend([self.zeros(&self.k), self.zeros(&self.v)]);
                buffers.extend(self.slopes());
                buffers.extend(of.chunked.then_some(first));
                let found = self.gradients();
                let expected = vec![(7, near(scalar, &found[1])), (8, near(scalar, &found[2]))];
                (attend_keys(scalar, back), buffers, expected)
            }
        };
        let Attention { heads, kv_heads, head_dim, .. } = of;
        Case {
            kernel: kernel.record(),
            label: format!("{rows} x {heads}/{kv_heads} x {head_dim} {scalar}, {why}"),
            numbers: numbers(of, rows),
            buffers,
            expected,
        }
    }
}

impl Setting {
    /// The case of the matrix units' kernel of this number.
    fn tile_case(&self, kernel: usize, why: &str) -> Case {
        let (rows, scalar, of) = (self.rows.len(), self.scalar, &self.attention);
        let form = form(of);
        let Attention { heads, kv_heads, head_dim, .. } = *of;
        let (starts, along) = (self.rows.starts(), Buffer::floats(Scalar::F32, &self.along()));
        let longest = starts.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(1);
        let numbers = numbers(of, rows)
            .with("batch", starts.len() as u32 - 1)
            .with("longest", longest)
            .with("items", (rows * heads) as u32)
            .with("head_dim", head_dim as u32);
        let starts = Buffer::words(&starts);
        // Weights and slopes are rounded before they are added up.
        let close = |want: &[f32]| {
            let want = want.iter().map(|value| f64::from(*value)).collect();
            Expected::Near(want, 2.0 * tolerance(scalar))
        };
        let clone = |all: &[&Buffer]| all.iter().map(|b| (*b).clone()).collect::<Vec<Buffer>>();
        let shared = [&self.q, &self.k, &self.v, &self.lse, &self.dy, &along, &starts];
        let (kernel, buffers, expected) = match kernel {
            0 => {
                let mut buffers = clone(&[&self.y, &self.dy]);
                buffers.push(Buffer::zeros(Scalar::F32, along.len()));
                let expected = vec![(2, near(Scalar::F32, &self.along()))];
                (attend_along(scalar), buffers, expected)
            }
            1 => {
                let mut buffers = clone(&shared);
                buffers.push(self.zeros(&self.q));
                buffers.extend(self.slopes());
                let expected = vec![(7, close(&self.gradients()[0]))];
                (attend_tile_queries(scalar, backward_form(of)), buffers, expected)
            }
            2 => {
                let mut buffers = clone(&shared);
                buffers.extend([self.zeros(&self.k), self.zeros(&self.v)]);
                buffers.extend(self.slopes());
                let found = self.gradients();
                let expected = vec![(7, close(&found[1])), (8, close(&found[2]))];
                (attend_tile_keys(scalar, backward_form(of)), buffers, expected)
            }
            _ => {
                let mut buffers = clone(&[&self.q, &self.k, &self.v]);
                buffers.extend([Buffer::words(&self.rows.positions()), starts]);
                buffers.extend([self.zeros(&self.q), Buffer::zeros(Scalar::F32, along.len())]);
                if of.sinks {
                    buffers.push(Buffer::floats(Scalar::F32, &self.sinks));
                }
                buffers.extend(self.slopes());
                let (y, lse) = (self.y.to_f32(), self.lse.to_f32());
                let expected = vec![(5, close(&y)), (6, near(Scalar::F32, &lse))];
                let tiling = match scalar {
                    Scalar::BF16 if form.head_dim <= 128 => {
                        PrefillTiling { simds: 1, tiles: 2, keys: 32 }
                    }
                    _ => PrefillTiling::pick(form.head_dim, 32 << 10, &NVIDIA.attention),
                };
                (attention_packed(scalar, form, tiling), buffers, expected)
            }
        };
        Case {
            kernel: kernel.record(),
            label: format!("{rows} x {heads}/{kv_heads} x {head_dim} {scalar}, {why}"),
            numbers,
            buffers,
            expected,
        }
    }
}

fn tile_cases(kernel: usize) -> Vec<Case> {
    let case = |scalar: Scalar| {
        let layers = tile_layers().into_iter();
        layers.map(move |(lengths, attention, why)| {
            Setting::new(lengths, attention, scalar).tile_case(kernel, why)
        })
    };
    [Scalar::F16, Scalar::BF16].into_iter().flat_map(case).collect()
}

fn sink_numbers(rows: usize, heads: usize) -> Numbers {
    Numbers::new().with("rows", rows as u32).with("width", heads as u32)
}

fn sink_cases() -> Vec<Case> {
    let case = |(lengths, heads, why): (&[usize], usize, &str)| {
        let of = Attention { sinks: true, ..plain([heads, 1, 8]) };
        let setting = Setting::new(lengths, of, Scalar::F32);
        let along = Buffer::floats(Scalar::F32, &setting.along());
        let sinks = Buffer::floats(Scalar::F32, &setting.sinks);
        Case {
            kernel: attend_sinks().record(),
            label: format!("{} x {heads}, {why}", setting.rows.len()),
            numbers: sink_numbers(setting.rows.len(), heads),
            buffers: vec![sinks, setting.lse.clone(), along, Buffer::zeros(Scalar::F32, heads)],
            expected: vec![(3, near(Scalar::F32, &setting.gradients()[3]))],
        }
    };
    vec![case((&[1], 1, "one row")), case((&[9, 35, 1], 3, "more rows than shares"))]
}

fn sink_benches() -> Vec<Bench> {
    let (rows, heads) = (1 << 16, 64);
    let noise = || Fill::Noise(Scalar::F32, rows * heads);
    let sinks = Fill::Noise(Scalar::F32, heads);
    let buffers = vec![sinks, noise(), noise(), Fill::Zeros(Scalar::F32, heads)];
    let flops = 3 * (rows * heads) as u64;
    vec![memory(attend_sinks(), "65536 x 64", sink_numbers(rows, heads), buffers, flops)]
}

fn tile_benches(kernel: usize) -> Vec<Bench> {
    let (rows, of, scalar) = (4096, plain([32, 8, 64]), Scalar::BF16);
    let (wide, narrow) = (rows * 2048, rows * 512);
    let noise = |n| Fill::Noise(scalar, n);
    let zeros = |n| Fill::Zeros(scalar, n);
    let heads = || Fill::Zeros(Scalar::F32, rows * of.heads);
    let starts = || Fill::These(Buffer::words(&[0, 1024, 2048, 3072, 4096]));
    let shared = || {
        let (q, dy) = (noise(wide), noise(wide));
        vec![q, noise(narrow), noise(narrow), heads(), dy, heads(), starts()]
    };
    let form = form(&of);
    let (kernel, buffers, products) = match kernel {
        0 => (attend_along(scalar), vec![noise(wide), noise(wide), heads()], 0),
        1 => {
            let mut buffers = shared();
            buffers.push(zeros(wide));
            (attend_tile_queries(scalar, form), buffers, 3)
        }
        2 => {
            let mut buffers = shared();
            buffers.extend([zeros(narrow), zeros(narrow)]);
            (attend_tile_keys(scalar, form), buffers, 4)
        }
        _ => {
            let positions: Vec<u32> = (0..rows as u32).map(|row| row % 1024).collect();
            let mut buffers = vec![noise(wide), noise(narrow), noise(narrow)];
            buffers.extend([Fill::These(Buffer::words(&positions)), starts()]);
            buffers.extend([zeros(wide), heads()]);
            let tiling = PrefillTiling::pick(64, 227 << 10, &HOPPER.attention);
            (attention_packed(scalar, form, tiling), buffers, 2)
        }
    };
    let numbers = numbers(&of, rows)
        .with("batch", 4)
        .with("longest", 1024)
        .with("items", (rows * of.heads) as u32)
        .with("head_dim", 64);
    vec![Bench {
        kernel: kernel.record(),
        label: "4 x 1024 x 32/8 x 64".to_owned(),
        numbers,
        buffers,
        bytes: 2 * (2 * wide + 2 * narrow) as u64,
        flops: products * (rows * 1024 * 2048) as u64,
        roof: if products == 0 { Bottleneck::Memory } else { Bottleneck::Matrix },
    }]
}

fn cases(kernel: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for scalar in [Scalar::F32, Scalar::BF16] {
        for (lengths, attention, why) in layers() {
            cases.push(Setting::new(lengths, attention, scalar).case(kernel, why));
        }
    }
    cases
}

fn benches(kernel: usize) -> Vec<Bench> {
    let (rows, of) = (1024, plain([32, 8, 64]));
    let (wide, narrow) = (rows * 2048, rows * 512);
    let scalar = Scalar::BF16;
    let noise = |n| Fill::Noise(scalar, n);
    let zeros = |n| Fill::Zeros(scalar, n);
    let heads = || Fill::Zeros(Scalar::F32, rows * of.heads);
    let words = |value| Fill::These(Buffer::words(&vec![value; rows]));
    let form = form(&of);
    let (name, buffers, products) = match kernel {
        0 => {
            let buffers =
                vec![noise(wide), noise(narrow), noise(narrow), words(0), zeros(wide), heads()];
            (attend(scalar, form), buffers, 2)
        }
        1 => {
            let [k, v] = [noise(narrow), noise(narrow)];
            let (y, dy, first) = (noise(wide), noise(wide), words(0));
            let buffers = vec![noise(wide), k, v, y, heads(), dy, first, zeros(wide), heads()];
            (attend_queries(scalar, form), buffers, 3)
        }
        _ => {
            let [k, v] = [noise(narrow), noise(narrow)];
            let (dy, ends) = (noise(wide), words(rows as u32));
            let (dk, dv) = (zeros(narrow), zeros(narrow));
            let buffers = vec![noise(wide), k, v, heads(), dy, heads(), ends, dk, dv];
            (attend_keys(scalar, form), buffers, 4)
        }
    };
    vec![Bench {
        kernel: name.record(),
        label: "1024 x 32/8 x 64".to_owned(),
        numbers: numbers(&of, rows),
        buffers,
        bytes: 2 * (2 * wide + 2 * narrow) as u64,
        // A query sees half of the keys on average.
        flops: products * (rows * rows * 2048) as u64,
        roof: Bottleneck::Matrix,
    }]
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}

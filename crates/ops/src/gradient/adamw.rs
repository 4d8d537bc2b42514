//! An update of AdamW (Loshchilov and Hutter 2019), element by element, in f32, and the sums of
//! squares that its clipping follows from. `g` is `scale` times the gradient that was added up; the
//! rest is as [`Rule`] names it.
//!
//! ```text
//! m <- m + (1 - b1) (g - m)        v <- b2 v + (1 - b2) g^2
//! p <- keep p - step m / (sqrt(v) / root + eps)
//! ```

use crate::sweep::{begin, load, require_lengths, require_vectors, when};
use crate::trial::{memory, near, random, scaled};
use tile::case::{Bench, Buffer, Case, Fill, Spec};
use tile::dsl::*;
use tile::launch::{Mode, Numbers, Requirement};

/// An update of single numbers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rule {
    /// The factor on gradients.
    pub scale: f32,
    /// The shares of a gradient and of its square that the moments take: `1 - beta1` and `1 -
    /// beta2`.
    pub rest: [f32; 2],
    /// The share that the second moment keeps of itself: `beta2`.
    pub kept: f32,
    /// The learning rate by the first moment's correction.
    pub step: f32,
    /// The root of the second moment's correction.
    pub root: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// The share of a parameter that weight decay leaves.
    pub keep: f32,
}

impl Rule {
    /// Updates parameters and both moments by gradients, on the CPU.
    pub fn apply(
        &self,
        values: &mut [f32],
        gradient: &[f32],
        first: &mut [f32],
        second: &mut [f32],
    ) {
        for i in 0..values.len() {
            let g = gradient[i] * self.scale;
            first[i] += self.rest[0] * (g - first[i]);
            second[i] = self.kept * second[i] + self.rest[1] * (g * g);
            let root = second[i].sqrt() / self.root + self.epsilon;
            values[i] = values[i] * self.keep - self.step * (first[i] / root);
        }
    }

    /// The numbers of a launch for `n` elements.
    pub fn numbers(&self, n: u32) -> Numbers {
        let Rule { scale, rest, kept, step, root, epsilon, keep } = *self;
        let each = [
            ("scale", scale),
            ("first_rest", rest[0]),
            ("second_rest", rest[1]),
            ("kept", kept),
            ("step", step),
            ("root", root),
            ("epsilon", epsilon),
            ("keep", keep),
        ];
        let numbers = Numbers::new().with("n", n);
        each.into_iter().fold(numbers, |numbers, (name, value)| numbers.with_f32(name, value))
    }
}

/// Threads of a group.
const THREADS: u32 = 256;
/// Elements that a thread has at a time.
const LANES: u32 = 4;
/// Elements whose squares a group adds up.
pub const PART: u32 = 32 * THREADS * LANES;

/// [`Rule`] on the device, for `n` elements: a multiple of 4. Where `operand` is a type of 16 bits,
/// a last buffer `operands` has the new values rounded to it.
#[kernel]
pub fn adamw(
    values: InOut<f32>,
    gradient: In<f32>,
    first: InOut<f32>,
    second: InOut<f32>,
    n: Arg<u32>,
    scale: Arg<f32>,
    first_rest: Arg<f32>,
    second_rest: Arg<f32>,
    kept: Arg<f32>,
    step: Arg<f32>,
    root: Arg<f32>,
    epsilon: Arg<f32>,
    keep: Arg<f32>,
    operand: Scalar,
) {
    launch(Mode::Element, [dim("n").ceil_div(THREADS * LANES), fixed(1), fixed(1)], THREADS);
    require(Requirement::Divisible(dim("n"), LANES));
    let names = ["values", "gradient", "first", "second"];
    require_vectors(&names.map(|name| (name, dim("n"))));
    let operands = (operand != Scalar::F32).then(|| {
        require_vectors(&[("operands", dim("n"))]);
        <Out>::stored("operands", operand)
    });
    begin();
    let at = (group_id() * THREADS + thread_id()) * LANES;
    when(Order::lt(at, n), || {
        let [p, m, v] = [values, first, second].map(|own| load(own, at, LANES as u8));
        let g = load(gradient, at, LANES as u8);
        let mut new = [(); 3].map(|()| Vec::with_capacity(LANES as usize));
        for i in 0..LANES as usize {
            let g = g[i] * scale;
            let m = m[i] + first_rest * (g - m[i]);
            let v = kept * v[i] + second_rest * (g * g);
            let length = v.sqrt() / root + epsilon;
            let p = p[i] * keep - step * (m / length);
            new.iter_mut().zip([p, m, v]).for_each(|(new, own)| new.push(own));
        }
        for (to, new) in [values, first, second].into_iter().zip(&new) {
            to.set_vec(at, new);
        }
        if let Some(operands) = operands {
            operands.set_vec(at, &new[0]);
        }
    });
}

/// The sums of squares of every [`PART`] of `n` elements, a multiple of 4, on the device. The order
/// of additions follows from `n` alone; a sum is not finite where an element is not.
#[kernel]
pub fn squares(x: In<f32>, y: Out<f32>, n: Arg<u32>) {
    let groups = dim("n").ceil_div(PART);
    launch(Mode::Tile, [groups.clone(), fixed(1), fixed(1)], THREADS);
    require(Requirement::Divisible(dim("n"), LANES));
    require_vectors(&[("x", dim("n"))]);
    require_lengths(&[("y", groups)]);
    begin();
    let start = group_id() * PART;
    let end = start + (n - start).min(PART);
    let sum = Var::new(0.0);
    range(start + thread_id() * LANES, end).step(THREADS * LANES).each(|at| {
        for x in load(x, at, LANES as u8) {
            sum.set(x.fma(x, sum.get()));
        }
    });
    let all = group_sum(sum.get());
    when(Order::eq(thread_id(), 0u32), || y.set(group_id(), all));
}

/// The kernels, their cases and benchmarks.
pub(crate) const KERNELS: &[Spec] = &[
    Spec { name: "adamw", cases, benches },
    Spec { name: "squares", cases: square_cases, benches: square_benches },
];

/// The fifth update with usual settings, of gradients of a sum over eight tokens.
const RULE: Rule = Rule {
    scale: 0.125,
    rest: [0.1, 0.001],
    kept: 0.999,
    step: 2.4e-4,
    root: 0.07,
    epsilon: 1e-8,
    keep: 0.99,
};

const LENGTHS: [(usize, &str); 4] = [
    (4, "one vector"),
    (4 * 333, "less than two groups"),
    (PART as usize, "one part exactly"),
    (PART as usize + 260, "a part and a ragged one"),
];

fn cases() -> Vec<Case> {
    let case = |(n, why): (usize, &str), operand: Scalar| {
        let noise = |seed: u64, by: f32| scaled(Scalar::F32, seed + n as u64, n, by).to_f32();
        let (mut values, gradient, mut first) = (noise(1, 1.0), noise(2, 8.0), noise(3, 0.5));
        let mut second: Vec<f32> = noise(4, 0.5).into_iter().map(|v| v * v).collect();
        let floats = |values: &[f32]| Buffer::floats(Scalar::F32, values);
        let mut buffers: Vec<Buffer> =
            [&values, &gradient, &first, &second].map(|own| floats(own)).into();
        RULE.apply(&mut values, &gradient, &mut first, &mut second);
        let mut expected = vec![
            (0, near(Scalar::F32, &values)),
            (2, near(Scalar::F32, &first)),
            (3, near(Scalar::F32, &second)),
        ];
        if operand != Scalar::F32 {
            buffers.push(Buffer::zeros(operand, n));
            expected.push((4, near(operand, &values)));
        }
        Case {
            kernel: adamw(operand).record(),
            label: format!("{n} with operands of {operand}, {why}"),
            numbers: RULE.numbers(n as u32),
            buffers,
            expected,
        }
    };
    let each = |length| [Scalar::F32, Scalar::F16, Scalar::BF16].map(|to| case(length, to));
    LENGTHS.into_iter().flat_map(each).collect()
}

fn square_cases() -> Vec<Case> {
    let case = |(n, why): (usize, &str)| {
        let x = random(Scalar::F32, n as u64, n);
        let all = x.to_f32();
        let parts = all.chunks(PART as usize);
        let sum = |part: &[f32]| part.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>();
        let sums: Vec<f32> = parts.map(|part| sum(part) as f32).collect();
        Case {
            kernel: squares().record(),
            label: format!("{n}, {why}"),
            numbers: Numbers::new().with("n", n as u32),
            buffers: vec![x, Buffer::zeros(Scalar::F32, sums.len())],
            expected: vec![(1, near(Scalar::F32, &sums))],
        }
    };
    LENGTHS.into_iter().map(case).collect()
}

/// Elements of a benchmark: the factors of rank 16 of a model of 1B.
const FACTORS: usize = 11 << 20;

fn benches() -> Vec<Bench> {
    let bench = |operand: Scalar| {
        let (noise, zeros) = (Fill::Noise(Scalar::F32, FACTORS), Fill::Zeros(Scalar::F32, FACTORS));
        let mut buffers = vec![noise.clone(), noise, zeros.clone(), zeros];
        if operand != Scalar::F32 {
            buffers.push(Fill::Zeros(operand, FACTORS));
        }
        let label = format!("{FACTORS} with operands of {operand}");
        let numbers = RULE.numbers(FACTORS as u32);
        memory(adamw(operand), &label, numbers, buffers, 12 * FACTORS as u64)
    };
    [Scalar::F32, Scalar::BF16].map(bench).into()
}

fn square_benches() -> Vec<Bench> {
    let parts = FACTORS.div_ceil(PART as usize);
    let buffers = vec![Fill::Noise(Scalar::F32, FACTORS), Fill::Zeros(Scalar::F32, parts)];
    let numbers = Numbers::new().with("n", FACTORS as u32);
    vec![memory(squares(), &format!("{FACTORS}"), numbers, buffers, 2 * FACTORS as u64)]
}

#[cfg(test)]
mod tests {
    #[test]
    fn kernels_agree_with_the_reference() {
        crate::trial::check(super::KERNELS);
    }
}

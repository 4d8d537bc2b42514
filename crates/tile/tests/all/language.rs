//! `#[kernel]`: what a Rust function records.

use tile::dsl::*;
use tile::ir::{Inst, Kernel, Place};
use tile::launch::Mode;

/// Root-mean-square norm of a row per threadgroup: loops, a reduction over shared memory, a
/// constant of each kind.
#[kernel]
pub(crate) fn rms_norm(
    x: In<{ scalar }>,
    y: Out<{ scalar }>,
    width: Const<u32>,
    eps: Const<f32>,
    scalar: Scalar,
    group: u32,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], group);
    let row = group_id() * width;
    let mut sum = Var::new(0.0);
    for i in strided(width) {
        let v = x[row + i];
        sum += v * v;
    }
    let scale = (group_sum(sum.get()) / width.f32() + eps).rsqrt();
    for i in strided(width) {
        y[row + i] = x[row + i] * scale;
    }
}

/// Every form that the macro rewrites, on values of the device and of Rust.
#[kernel]
fn forms(x: InOut<f32>, n: Arg<u32>, twice: bool, table: &[f32]) {
    launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 32);
    let mut kept = Var::new(0.0);
    let mut count = 0;
    for c in table {
        count += 1;
        if n > count {
            kept += *c;
        } else if n == 0 {
            kept = 1.0;
        } else {
            kept -= 1.0;
        }
    }
    if twice {
        kept = kept.get() * 2.0;
    }
    let i = lane_id();
    if i < n {
        x[i] = kept.get() + table[0];
        x[i] += 1.0;
    }
}

fn count(kernel: &Kernel, wanted: impl Fn(&Inst) -> bool) -> usize {
    let mut found = 0;
    kernel.visit(&mut |node| found += usize::from(wanted(&node.inst)));
    found
}

#[test]
fn operators_record_typed_instructions_with_their_lines() {
    let kernel = rms_norm(Scalar::F16, 64).record();
    assert_eq!(kernel.name, "rms_norm_f16_group64");
    assert_eq!((kernel.params.len(), kernel.constants.len()), (2, 2));
    assert_eq!(kernel.launch.threads, 64);
    assert_eq!(kernel.dimensions(), ["rows"]);
    assert_eq!(count(&kernel, |i| matches!(i, Inst::Load { place: Place::Buffer(0), .. })), 2);
    assert_eq!(count(&kernel, |i| matches!(i, Inst::Barrier)), 2);
    assert_eq!(count(&kernel, |i| matches!(i, Inst::For { .. })), 2);
    kernel.visit(&mut |node| {
        assert!(kernel.source(node.source).contains(".rs:"), "{node:?}");
        if let Inst::Load { place: Place::Buffer(0), .. } = node.inst {
            let (_, line) = kernel.source(node.source).split_once("language.rs:").expect("a line");
            let line: usize = line.parse().expect("a number");
            let text = include_str!("language.rs").lines().nth(line - 1);
            assert!(text.is_some_and(|t| t.contains("x[row + i]")), "{node:?}: {text:?}");
        }
    });
}

#[test]
fn plain_rust_runs_while_the_kernel_is_built() {
    let ifs = |kernel: &Kernel| count(kernel, |i| matches!(i, Inst::If { .. }));
    assert_eq!(ifs(&forms(false, &[1.0, 2.0]).record()), 5);
    assert_eq!(ifs(&forms(true, &[1.0]).record()), 3);
    let stores = |twice| count(&forms(twice, &[1.0]).record(), |i| matches!(i, Inst::Store { .. }));
    assert_eq!(stores(true), stores(false) + 1);
}

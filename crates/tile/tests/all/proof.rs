//! Emitted text executed on the CPU, and the test of that test: text with one mistake in it must be
//! caught.
//!
//! Of the inventory's kernels a few of each family are run, or all if DELFT_ALL_KERNELS is set.

use crate::inventory;
use crate::language::rms_norm;
use std::collections::HashSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex};
use tile::case::{Buffer, Case, Expected, noise, tolerance};
use tile::dsl::*;
use tile::emit::{self, Dialect};
use tile::ir::{AtomicOp, Kernel, ParamKind};
use tile::launch::{Mode, Numbers};
use tile::passes::{self, Target};
use tile::proof::{self, CompiledText, ThreadOrder, Unproved};
use tile::types::Scalar;

/// `c = a b^T` in tiles of 32 x 32: a 16 x 16 tile for each of four simdgroups, operands copied
/// ahead to shared memory.
#[kernel]
fn product(a: In<{ scalar }>, b: In<{ scalar }>, c: Out<f32>, inner: Const<u32>, scalar: Scalar) {
    launch(Mode::Tile, [dim("columns").ceil_div(32), dim("rows").ceil_div(32), fixed(1)], 128);
    let width = 16u32;
    // Rows are padded to 24 elements: 48 bytes, so that every row can be copied in pieces of 16
    // bytes.
    let left = Shared::<f32>::stored(scalar, "left", 2 * 32 * 24);
    let right = Shared::<f32>::stored(scalar, "right", 2 * 32 * 24);
    let (row, column) = (group_id_of(1) * 32, group_id_of(0) * 32);
    let (r, half) = (thread_id() / 4, thread_id() % 4);
    // Threads 0 and 1 of each four copy the row of `a`, 2 and 3 that of `b`.
    let stage = |slot: Val<u32>, k: Val<u32>| {
        let to = slot * (32 * 24) + r * 24 + half % 2 * 8;
        let from = k * 16 + half % 2 * 8;
        test(half.lt(2))
            .then(|| copy_async(left, to, a, (row + r) * inner + from, 8, None))
            .otherwise(|| copy_async(right, to, b, (column + r) * inner + from, 8, None));
        copy_commit();
    };
    let sums = Frags::accumulators(1, 0.0);
    let steps = inner / width;
    stage(0u32.val(), 0u32.val());
    let (down, across) = (simd_id() / 2 * 16, simd_id() % 2 * 16);
    for k in range(0, steps) {
        let slot = k % 2;
        if k + 1 < steps {
            stage((k + 1) % 2, k + 1);
            copy_wait(1);
        } else {
            copy_wait(0);
        }
        barrier();
        let at = slot * (32 * 24);
        let x = Frag::left(left, at + down * 24, 24);
        let y = Frag::right_transposed(right, at + across * 24, 24);
        sums.set(0, sums.get(0).mma(x, y));
        barrier();
    }
    let to = (row + down) * dim_columns() + column + across;
    sums.get(0).store(c, to, dim_columns());
}

/// `c = a b^T` in blocks of 64 x 32, by a warpgroup: steps of 64 terms through three stages, a
/// product under way while the next begins.
#[kernel]
fn wide(a: In<{ scalar }>, b: In<{ scalar }>, c: Out<f32>, inner: Const<u32>, scalar: Scalar) {
    launch(Mode::Tile, [dim("columns").ceil_div(32), dim("rows").ceil_div(64), fixed(1)], 128);
    let left = Shared::<f32>::stored(scalar, "left", 3 * 64 * 64);
    let right = Shared::<f32>::stored(scalar, "right", 3 * 32 * 64);
    let (row, column) = (group_id_of(1) * 64, group_id_of(0) * 32);
    let (r, unit) = (thread_id() / 8, thread_id() % 8);
    let spot = r * 64 + (unit ^ (r % 8)) * 8;
    let stage = |k: Val<u32>| {
        let from = r * inner + k * 64 + unit * 8;
        let some = Some(k.lt(inner / 64));
        for i in 0..4u32 {
            let to = k % 3 * (64 * 64) + i * (16 * 64) + spot;
            copy_async(left, to, a, (row + i * 16) * inner + from, 8, some);
        }
        for i in 0..2u32 {
            let to = k % 3 * (32 * 64) + i * (16 * 64) + spot;
            copy_async(right, to, b, (column + i * 16) * inner + from, 8, some);
        }
        copy_commit();
    };
    let sums = Frags::accumulators(2, 0.0);
    stage(0u32.val());
    for k in range(0, inner / 64) {
        copy_wait(0);
        async_fence();
        wgmma_wait(1);
        barrier();
        wgmma_fence();
        sums.wgmma((left, k % 3 * (64 * 64)), (right, k % 3 * (32 * 64)));
        wgmma_commit();
        stage(k + 1);
    }
    wgmma_wait(0);
    copy_wait(0);
    let to = (row + simd_id() * 16) * dim_columns() + column;
    sums.get(0).store(c, to, dim_columns());
    sums.get(1).store(c, to + 16, dim_columns());
}

/// The columns of [`product`]'s result: as many as its grid covers.
fn dim_columns() -> Val<u32> {
    groups(0) * 32
}

/// Reverses each simdgroup's 32 numbers through shared memory that only the simdgroup shares.
#[kernel]
fn reverse(x: In<f32>, y: Out<f32>) {
    launch(Mode::Element, [dim("blocks"), fixed(1), fixed(1)], 64);
    let kept = Shared::<f32>::named("kept", 64);
    let at = group_id() * 64 + thread_id();
    kept[thread_id()] = x[at];
    simd_barrier();
    y[at] = kept[simd_id() * 32 + 31 - lane_id()];
}

/// A sum by exchanges, a prefix sum and a vote of each simdgroup.
#[kernel]
fn lanes(x: In<u32>, sums: Out<u32>, before: Out<u32>, odd: Out<u32>) {
    launch(Mode::Element, [dim("blocks"), fixed(1), fixed(1)], 64);
    let at = group_id() * 64 + thread_id();
    let mut sum = Var::new(x[at]);
    for mask in [16u8, 8, 4, 2, 1] {
        sum += shuffle_xor(sum.get(), mask);
    }
    sums[at] = sum.get();
    before[at] = simd_prefix_sum(x[at]);
    odd[at] = ballot((x[at] % 2).eq(1));
}

/// How often each of 16 values occurs; the last threadgroup to finish writes the total.
#[kernel]
fn histogram(x: In<u32>, counts: InOut<u32>, total: Out<u32>, n: Arg<u32>) {
    launch(Mode::Element, [dim("blocks"), fixed(1), fixed(1)], 32);
    let at = group_id() * 32 + thread_id();
    if at < n {
        counts.atomic(AtomicOp::Add, x[at] % 16, 1);
    }
    fence();
    barrier();
    if thread_id() == 0 {
        let arrived = counts.atomic(AtomicOp::Add, 16, 1);
        if arrived + 1 == groups(0) {
            let mut sum = Var::new(0u32);
            for i in range(0, 16) {
                sum += counts.atomic(AtomicOp::Add, i, 0);
            }
            total[0] = sum.get();
        }
    }
}

/// A float as every storage type and back.
#[kernel]
fn casts(x: In<f32>, y: Out<f32>) {
    launch(Mode::Element, [dim("blocks"), fixed(1), fixed(1)], 32);
    let at = group_id() * 32 + thread_id();
    let v = x[at];
    y[at * 7] = v.cast::<i8>().f32();
    y[at * 7 + 1] = v.cast::<u8>().f32();
    y[at * 7 + 2] = v.cast::<i16>().f32();
    y[at * 7 + 3] = v.cast::<u16>().f32();
    y[at * 7 + 4] = v.cast::<half::f16>().f32();
    y[at * 7 + 5] = v.cast::<half::bf16>().f32();
    y[at * 7 + 6] = v.i32().f32();
}

fn near(values: Vec<f64>, scalar: Scalar) -> Expected {
    Expected::Near(values, tolerance(scalar))
}

fn norm_case(scalar: Scalar, rows: usize, width: usize, group: u32) -> Case {
    let x = Buffer::floats(scalar, &noise(7, rows * width));
    let mut want = vec![];
    for row in x.to_f64().chunks(width) {
        let scale = 1.0 / (row.iter().map(|v| v * v).sum::<f64>() / width as f64 + 1e-5).sqrt();
        want.extend(row.iter().map(|v| v * scale));
    }
    Case {
        kernel: rms_norm(scalar, group).record(),
        label: format!("{rows} x {width}, {group} threads"),
        numbers: Numbers::new()
            .with("rows", rows as u32)
            .with("width", width as u32)
            .with_f32("eps", 1e-5),
        buffers: vec![x, Buffer::zeros(scalar, rows * width)],
        expected: vec![(1, near(want, scalar))],
    }
}

fn product_case(scalar: Scalar, rows: usize, columns: usize, inner: usize) -> Case {
    product_by(product(scalar).record(), rows, columns, inner)
}

fn wide_case(scalar: Scalar, rows: usize, columns: usize, inner: usize) -> Case {
    product_by(wide(scalar).record(), rows, columns, inner)
}

fn product_by(kernel: Kernel, rows: usize, columns: usize, inner: usize) -> Case {
    let ParamKind::Buffer { scalar, .. } = kernel.params[0].kind else {
        panic!("the first parameter is a matrix");
    };
    let a = Buffer::floats(scalar, &noise(1, rows * inner));
    let b = Buffer::floats(scalar, &noise(2, columns * inner));
    let (left, right) = (a.to_f64(), b.to_f64());
    let mut want = vec![];
    for r in 0..rows {
        for c in 0..columns {
            want.push((0..inner).map(|k| left[r * inner + k] * right[c * inner + k]).sum());
        }
    }
    Case {
        kernel,
        label: format!("{rows} x {columns} x {inner}"),
        numbers: Numbers::new()
            .with("rows", rows as u32)
            .with("columns", columns as u32)
            .with("inner", inner as u32),
        buffers: vec![a, b, Buffer::zeros(Scalar::F32, rows * columns)],
        expected: vec![(2, near(want, Scalar::F32))],
    }
}

fn reverse_case() -> Case {
    let x = noise(3, 192);
    let want = x.chunks(32).flat_map(|c| c.iter().rev().map(|v| f64::from(*v)));
    Case {
        kernel: reverse().record(),
        label: "3 blocks".to_owned(),
        numbers: Numbers::new().with("blocks", 3),
        expected: vec![(1, Expected::Exact(want.collect()))],
        buffers: vec![Buffer::floats(Scalar::F32, &x), Buffer::zeros(Scalar::F32, 192)],
    }
}

fn lanes_case() -> Case {
    let x: Vec<u32> = (0..128).map(|i| (i * 37 + 11) % 101).collect();
    let (mut sums, mut before, mut odd) = (vec![], vec![], vec![]);
    for chunk in x.chunks(32) {
        let bits: u64 = chunk.iter().enumerate().map(|(i, v)| u64::from(v % 2) << i).sum();
        for i in 0..32 {
            sums.push(f64::from(chunk.iter().sum::<u32>()));
            before.push(f64::from(chunk[..i].iter().sum::<u32>()));
            odd.push(bits as f64);
        }
    }
    let zeros = || Buffer::zeros(Scalar::U32, 128);
    Case {
        kernel: lanes().record(),
        label: "2 blocks".to_owned(),
        numbers: Numbers::new().with("blocks", 2),
        buffers: vec![Buffer::words(&x), zeros(), zeros(), zeros()],
        expected: vec![
            (1, Expected::Exact(sums)),
            (2, Expected::Exact(before)),
            (3, Expected::Exact(odd)),
        ],
    }
}

fn histogram_case() -> Case {
    let x: Vec<u32> = (0..100).map(|i| i * i).collect();
    let mut counts = vec![0.0; 17];
    x.iter().for_each(|v| counts[*v as usize % 16] += 1.0);
    counts[16] = 4.0;
    Case {
        kernel: histogram().record(),
        label: "100 numbers".to_owned(),
        numbers: Numbers::new().with("blocks", 4).with("n", 100),
        buffers: vec![
            Buffer::words(&x),
            Buffer::zeros(Scalar::U32, 17),
            Buffer::zeros(Scalar::U32, 1),
        ],
        expected: vec![(1, Expected::Exact(counts)), (2, Expected::Exact(vec![100.0]))],
    }
}

fn casts_case() -> Case {
    let mut x = vec![
        0.0,
        -0.5,
        1.5,
        2.5,
        300.0,
        -300.0,
        7e4,
        -7e4,
        1e10,
        -1e10,
        65519.0,
        65520.0,
        6e-8,
        3e-8,
        1e-7,
        6.1e-5,
        f32::MAX,
        f32::MIN_POSITIVE,
        1.003_906_3,
        1.011_718_8,
        f32::INFINITY,
    ];
    x.extend(noise(5, 64 - x.len()));
    let want = x.iter().flat_map(|v| {
        [
            f64::from(*v as i8),
            f64::from(*v as u8),
            f64::from(*v as i16),
            f64::from(*v as u16),
            half::f16::from_f32(*v).to_f64(),
            half::bf16::from_f32(*v).to_f64(),
            f64::from((*v as i32) as f32),
        ]
    });
    Case {
        kernel: casts().record(),
        label: "rounding and saturation".to_owned(),
        numbers: Numbers::new().with("blocks", 2),
        expected: vec![(1, Expected::Exact(want.collect()))],
        buffers: vec![Buffer::floats(Scalar::F32, &x), Buffer::zeros(Scalar::F32, 64 * 7)],
    }
}

fn cases() -> Vec<Case> {
    vec![
        norm_case(Scalar::F32, 3, 129, 64),
        norm_case(Scalar::F16, 2, 96, 128),
        norm_case(Scalar::BF16, 5, 1000, 256),
        product_case(Scalar::F16, 64, 32, 64),
        product_case(Scalar::BF16, 32, 96, 16),
        wide_case(Scalar::F16, 64, 64, 64),
        wide_case(Scalar::BF16, 128, 32, 320),
        reverse_case(),
        lanes_case(),
        histogram_case(),
        casts_case(),
    ]
}

fn every_case_holds(cases: &[Case], dialect: Dialect) {
    let counts = proof::check_all(cases, dialect).expect("the emitted text is right");
    match &counts.skipped {
        Some(why) => testing::skipped(why),
        None => {
            println!("{counts:?}");
            assert!(counts.left_out * 4 < cases.len(), "most cases run on every target");
            assert_eq!(counts.cases + counts.left_out, cases.len());
            assert_eq!(counts.launches, 5 * counts.cases);
        }
    }
}

#[test]
fn metal_text_computes_what_it_should() {
    every_case_holds(&cases(), Dialect::Metal);
}

#[test]
fn cuda_text_computes_what_it_should() {
    every_case_holds(&cases(), Dialect::Cuda);
}

#[test]
fn metal_text_of_the_inventory_computes_what_it_should() {
    every_case_holds(inventory::cases(), Dialect::Metal);
}

#[test]
fn cuda_text_of_the_inventory_computes_what_it_should() {
    every_case_holds(inventory::cases(), Dialect::Cuda);
}

/// Kernels that a Metal GPU can run, each once, lowered for it.
fn for_metal(cases: &[Case]) -> Vec<Kernel> {
    lowered_for_metal(cases.iter().map(|case| &case.kernel))
}

fn lowered_for_metal<'a>(kernels: impl Iterator<Item = &'a Kernel>) -> Vec<Kernel> {
    let mut names = HashSet::new();
    let taken = kernels.filter(|kernel| emit::metal_takes(kernel) && names.insert(&kernel.name));
    taken.map(|k| passes::lower(k, Target::Metal).expect("it lowers")).collect()
}

/// All kernels that a Metal GPU can run and `tile build` writes, lowered for it.
fn all_for_metal() -> &'static [Kernel] {
    static ALL: LazyLock<Vec<Kernel>> = LazyLock::new(|| lowered_for_metal(inventory::kernels()));
    &ALL
}

/// Puts kernels, some to a text, to a check of Metal text, on all cores.
fn texts_pass(kernels: &[Kernel], check: fn(&str) -> Result<(), Unproved>) {
    assert!(!kernels.is_empty());
    let texts: Vec<&[Kernel]> = kernels.chunks(32).collect();
    let (next, found) = (AtomicUsize::new(0), Mutex::new(vec![]));
    let work = || {
        while let Some(some) = texts.get(next.fetch_add(1, Ordering::Relaxed)) {
            let text = emit::text(some, Dialect::Metal).expect("it can be written");
            if let Err(why) = check(&text) {
                found.lock().expect("no thread panics with it").push((&some[0].name, why));
            }
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| (0..cores).for_each(|_| drop(scope.spawn(work))));
    let (mut wrong, mut skipped) = (String::new(), None);
    for (name, why) in found.into_inner().expect("no thread panicked") {
        match why {
            Unproved::Skip(why) => skipped = Some(why),
            Unproved::Wrong(what) => wrong += &format!("{name}..: {what}\n"),
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    match skipped {
        Some(why) => testing::skipped(why),
        None => println!("{} kernels in {} texts", kernels.len(), texts.len()),
    }
}

#[test]
fn address_spaces_of_the_inventory_are_right() {
    texts_pass(all_for_metal(), proof::address_spaces);
}

/// A few kernels of each family; all of them with DELFT_ALL_KERNELS.
#[test]
fn types_of_the_inventory_are_strictly_right() {
    match inventory::all() {
        true => texts_pass(all_for_metal(), proof::strict_types),
        false => texts_pass(&for_metal(inventory::cases()), proof::strict_types),
    }
}

/// Mistakes of kinds that compilers of C++ let pass: what is found in the text of the kernel, what
/// is put there, and part of the complaint.
const UNTYPED: &[(&str, &str, &str)] = &[
    // Memory that is handed over has no atomics, and a cast to plain memory takes its coherence
    // away.
    ("device uint* counters", "TK_COHERENT device uint* counters", "drops coherence"),
    ("(TK_COHERENT device const float4*)(", "(device const float4*)(", "drops coherence"),
    ("(threadgroup uint4*)(", "(device uint4*)(", "changes the address space"),
    ("memory_order_seq_cst, thread_scope_device", "thread_scope_device", "atomic_thread_fence"),
    ("min(tk_u32(x), 255u)", "min(tk_u32(x), 255)", "ambiguous"),
    ("= simd_sum(", "= simd_sum(0.0f < ", "simd_sum"),
    ("bfloat4(bfloat(", "bfloat4(half(", "bfloat4"),
];

/// The kernels of this file, and one that hands over vectors of 16 bits.
fn for_strict_types() -> Vec<Kernel> {
    let decode = |kernel: &&Kernel| {
        let name = &kernel.name;
        name.starts_with("attention_decode_bf16_bf16") && name.contains("lanes")
    };
    let mut kernels = for_metal(&cases());
    kernels.push(all_for_metal().iter().find(decode).expect("there is one").clone());
    kernels
}

#[test]
fn strict_types_find_what_cpp_lets_pass() {
    let kernels = for_strict_types();
    let text = emit::text(&kernels, Dialect::Metal).expect("it can be written");
    match proof::strict_types(&text) {
        Ok(()) => {}
        Err(Unproved::Skip(why)) => return testing::skipped(why),
        Err(Unproved::Wrong(what)) => panic!("{what}"),
    }
    let mut missed = String::new();
    for (find, put, why) in UNTYPED {
        assert!(text.contains(find), "`{find}` is not in\n{text}");
        match proof::strict_types(&text.replacen(find, put, 1)) {
            Err(Unproved::Wrong(what)) if what.contains(why) => {}
            other => missed += &format!("{find} -> {put}: {other:?}\n"),
        }
    }
    assert!(missed.is_empty(), "{missed}");
}

#[test]
fn address_spaces_are_right() {
    let kernels = for_metal(&cases());
    let text = emit::text(&kernels, Dialect::Metal).expect("it can be written");
    match proof::address_spaces(&text) {
        Ok(()) => {}
        Err(Unproved::Skip(why)) => return testing::skipped(why),
        Err(Unproved::Wrong(what)) => panic!("{what}"),
    }
    // A device pointer where a threadgroup's is meant.
    let wrong = text.replacen("(threadgroup uint4*)(", "(device uint4*)(", 1);
    assert_ne!(wrong, text);
    assert!(matches!(proof::address_spaces(&wrong), Err(Unproved::Wrong(_))));
}
/// One mistake in an emitted text: the `nth` occurrence of `find` after the kernel's name (or in
/// the prelude, if the mistake is made there) becomes `put`.
struct Mutant {
    why: &'static str,
    case: fn() -> Case,
    prelude: bool,
    find: &'static str,
    nth: usize,
    put: &'static str,
    /// Part of what is reported under one of the schedules; a wrong result if empty.
    says: &'static str,
}

fn norm_f32() -> Case {
    norm_case(Scalar::F32, 3, 129, 64)
}

fn product_f16() -> Case {
    product_case(Scalar::F16, 64, 32, 64)
}

fn wide_f16() -> Case {
    wide_case(Scalar::F16, 64, 32, 320)
}

const BARRIER: &str = "threadgroup_barrier(mem_flags::mem_threadgroup);";

#[rustfmt::skip]
const METAL: &[Mutant] = &[
    Mutant { why: "a barrier is missing", case: norm_f32, prelude: false, find: BARRIER, nth: 0, put: "", says: "" },
    Mutant { why: "some threads skip a barrier", case: norm_f32, prelude: false, find: BARRIER, nth: 0, put: "if (tid < 32u) threadgroup_barrier(mem_flags::mem_threadgroup);", says: "divergent barrier" },
    Mutant { why: "some lanes skip a barrier", case: norm_f32, prelude: false, find: BARRIER, nth: 0, put: "if (tid < 48u) threadgroup_barrier(mem_flags::mem_threadgroup);", says: "diverged" },
    Mutant { why: "some lanes skip a sum", case: norm_f32, prelude: false, find: "simd_sum(", nth: 0, put: "lane > 15u ? 0.0f : simd_sum(", says: "diverged" },
    Mutant { why: "a row is read past its end", case: norm_f32, prelude: false, find: "< width", nth: 0, put: "<= width", says: "" },
    Mutant { why: "a row is written past its end", case: norm_f32, prelude: false, find: "< width", nth: 1, put: "< width + 8u", says: "outside `" },
    Mutant { why: "a constant is declared under another name", case: norm_f32, prelude: false, find: "norm_f32_group64_eps", nth: 99, put: "norm_f32_group64_epsilon", says: "has no value" },
    Mutant { why: "the output is bound as the input", case: norm_f32, prelude: false, find: "y [[buffer(1)]]", nth: 0, put: "y [[buffer(0)]]", says: "write to input `" },
    Mutant { why: "shared memory is read but not written", case: reverse_case, prelude: false, find: "kept[tid] =", nth: 0, put: "if (lane < 31u) kept[tid] =", says: "" },
    Mutant { why: "shared memory is read past its end", case: reverse_case, prelude: false, find: "31u - lane", nth: 0, put: "32u + lane", says: "read outside `kept`" },
    Mutant { why: "a lane reads another's place", case: reverse_case, prelude: false, find: "31u - lane", nth: 0, put: "30u - lane", says: "" },
    Mutant { why: "a simdgroup's barrier is missing", case: reverse_case, prelude: false, find: "simdgroup_barrier(mem_flags::mem_threadgroup);", nth: 0, put: "", says: "" },
    Mutant { why: "a shuffle has the wrong mask", case: lanes_case, prelude: false, find: "ushort(8)", nth: 0, put: "ushort(4)", says: "" },
    Mutant { why: "an atomic's result is taken for the new value", case: histogram_case, prelude: false, find: "+ 1u == groups.x", nth: 0, put: "== groups.x", says: "" },
    Mutant { why: "the barrier before a product is missing", case: product_f16, prelude: false, find: BARRIER, nth: 0, put: "", says: "" },
    Mutant { why: "the barrier after a product is missing", case: product_f16, prelude: false, find: BARRIER, nth: 1, put: "", says: "" },
    Mutant { why: "tiles are stored with the wrong stride", case: product_f16, prelude: true, find: "to, stride);", nth: 0, put: "to, stride + 1u);", says: "" },
    Mutant { why: "an operand is not transposed", case: product_f16, prelude: true, find: "ulong2(0, 0), true", nth: 0, put: "ulong2(0, 0), false", says: "" },
    Mutant { why: "elements of a tile are swapped", case: product_f16, prelude: true, find: "thread_elements()[0] = v.x", nth: 0, put: "thread_elements()[0] = v.y", says: "" },
];

#[rustfmt::skip]
const CUDA: &[Mutant] = &[
    Mutant { why: "a barrier is missing", case: norm_f32, prelude: false, find: "__syncthreads();", nth: 0, put: "", says: "" },
    Mutant { why: "some lanes skip a sum", case: norm_f32, prelude: false, find: "tk_simd_sum(", nth: 0, put: "lane > 15u ? 0.0f : tk_simd_sum(", says: "diverged" },
    Mutant { why: "lanes differ in the turns of a loop", case: norm_f32, prelude: true, find: "int apart = 16; apart > 0", nth: 0, put: "int apart = 16; apart > int(threadIdx.x % 2u)", says: "diverged" },
    Mutant { why: "a shuffle leaves lanes out", case: lanes_case, prelude: false, find: "__shfl_xor_sync(~0u", nth: 0, put: "__shfl_xor_sync(0xFFFFu", says: "mask" },
    Mutant { why: "a warp's barrier is missing", case: reverse_case, prelude: false, find: "__syncwarp();", nth: 0, put: "", says: "" },
    Mutant { why: "the last wait for copies is missing", case: product_f16, prelude: false, find: "tk_copy_wait<0>();", nth: 0, put: "", says: "" },
    Mutant { why: "a wait leaves one batch too many", case: product_f16, prelude: false, find: "tk_copy_wait<1>();", nth: 0, put: "tk_copy_wait<2>();", says: "" },
    Mutant { why: "copies are not committed", case: product_f16, prelude: false, find: "tk_copy_commit();", nth: 1, put: "", says: "" },
    Mutant { why: "the barrier before a product is missing", case: product_f16, prelude: false, find: "__syncthreads();", nth: 0, put: "", says: "" },
    Mutant { why: "the barrier after a product is missing", case: product_f16, prelude: false, find: "__syncthreads();", nth: 1, put: "", says: "" },
    Mutant { why: "an operand is not transposed", case: product_f16, prelude: false, find: "tk_load_b_rows<true>", nth: 0, put: "tk_load_b_rows<false>", says: "" },
    Mutant { why: "words of an operand are swapped", case: product_f16, prelude: true, find: "{b.word[2 * half], b.word[2 * half + 1]}", nth: 0, put: "{b.word[2 * half + 1], b.word[2 * half]}", says: "" },
    Mutant { why: "rows of shared memory are misaligned", case: product_f16, prelude: false, find: ", 24u)", nth: 0, put: ", 20u)", says: "multiple of 16" },
    Mutant { why: "the output is written past its end", case: lanes_case, prelude: false, find: "sums[", nth: 0, put: "sums[64u + ", says: "write outside `sums`" },
    Mutant { why: "the last wait for products is missing", case: wide_f16, prelude: false, find: "tk_wgmma_wait<0>();", nth: 0, put: "", says: "" },
    Mutant { why: "operands are overwritten before the product is waited for", case: wide_f16, prelude: false, find: "tk_wgmma_wait<1>();", nth: 0, put: "tk_wgmma_wait<2>();", says: "" },
    Mutant { why: "a product is not committed", case: wide_f16, prelude: false, find: "tk_wgmma_commit();", nth: 0, put: "", says: "" },
    Mutant { why: "the barrier before a product is missing", case: wide_f16, prelude: false, find: "__syncthreads();", nth: 0, put: "", says: "" },
    Mutant { why: "units of a row stay in their places", case: wide_f16, prelude: false, find: " ^ ", nth: 0, put: " + 0u * ", says: "" },
    Mutant { why: "a block is misaligned", case: wide_f16, prelude: false, find: "(r0, left + ", nth: 0, put: "(r0, left + 64u + ", says: "multiple of 1024" },
];

impl Mutant {
    /// The text with the mistake.
    fn apply(&self, text: &str, kernel: &str) -> String {
        let start = match self.prelude {
            true => 0,
            false => text.find(&format!("// {kernel}: mode")).expect("the kernel has a comment"),
        };
        let (before, after) = text.split_at(start);
        if self.nth == 99 {
            return format!("{before}{}", after.replace(self.find, self.put));
        }
        let found = after.match_indices(self.find).nth(self.nth);
        let (at, _) =
            found.unwrap_or_else(|| panic!("{}: `{}` is not in\n{after}", self.why, self.find));
        format!("{before}{}{}{}", &after[..at], self.put, &after[at + self.find.len()..])
    }

    /// What the five schedules say of it; nothing if it survives.
    fn findings(&self, dialect: Dialect) -> Result<Vec<String>, Unproved> {
        let target = if dialect == Dialect::Metal { Target::Metal } else { Target::Cuda };
        let case = (self.case)();
        let kernel = passes::lower(&case.kernel, target).expect("it lowers");
        let mut text =
            emit::text(std::slice::from_ref(&kernel), dialect).expect("it can be written");
        if dialect == Dialect::Cuda {
            text.push_str(
                &emit::cuda_instance(&kernel, &case.numbers).expect("constants are given").1,
            );
        }
        let text = self.apply(&text, &kernel.name);
        let program = CompiledText::compile(&text, std::slice::from_ref(&kernel), dialect)?;
        let mut findings = vec![];
        for schedule in ThreadOrder::ALL {
            let mut buffers = case.buffers.clone();
            let ran = program.run(&kernel, &case.numbers, &mut buffers, schedule);
            if let Err(what) = ran.and_then(|()| case.check(&buffers).map(|_| ())) {
                findings.push(what);
            }
        }
        Ok(findings)
    }
}

/// Every mutant is caught, and for the reason that it should be.
fn mutants_are_caught(mutants: &[Mutant], dialect: Dialect) {
    let mut survivors = vec![];
    for mutant in mutants {
        let findings = match mutant.findings(dialect) {
            Ok(findings) => findings,
            Err(Unproved::Skip(why)) => return testing::skipped(why),
            Err(Unproved::Wrong(what)) => panic!("{}: {what}", mutant.why),
        };
        println!("{dialect:?}: {}: {} of 5: {:?}", mutant.why, findings.len(), findings.first());
        let said = |f: &String| f.contains(if mutant.says.is_empty() { "" } else { mutant.says });
        if !findings.iter().any(said) {
            survivors.push(format!("{}: {findings:?}", mutant.why));
        }
    }
    assert!(survivors.is_empty(), "not caught:\n{}", survivors.join("\n"));
}

#[test]
fn mistakes_in_metal_text_are_caught() {
    mutants_are_caught(METAL, Dialect::Metal);
}

#[test]
fn mistakes_in_cuda_text_are_caught() {
    mutants_are_caught(CUDA, Dialect::Cuda);
}

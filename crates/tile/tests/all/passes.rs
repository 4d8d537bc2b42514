//! Passes keep the meaning of kernels: each kernel here runs on the interpreter as it was written,
//! and again after every step of the pipeline for every target, with its constants specialised and
//! without.

use tile::Kernel;
use tile::case::{self, Buffer, noise};
use tile::dsl::*;
use tile::instr::{BinaryOp, UnaryOp};
use tile::interp;
use tile::ir::{AtomicOp, Inst, LoadHint, Reduce};
use tile::launch::{Mode, Numbers, Requirement};
use tile::passes::{self, Pass, Target};
use tile::text;
use tile::types::Scalar;

/// Two strided loops, a reduction between them.
#[kernel]
fn rms_norm(
    x: In<{ scalar }>,
    y: Out<{ scalar }>,
    width: Const<u32>,
    eps: Const<f32>,
    scalar: Scalar,
    group: u32,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], group);
    aligned(&["x", "y"]);
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

fn aligned(names: &[&str]) {
    for name in names {
        require(Requirement::Aligned((*name).to_owned(), 16));
    }
}

/// Loops that hand elements on through memory without a barrier, and a running maximum with its
/// sum.
#[kernel]
fn softmax(x: In<f32>, y: InOut<f32>, width: Const<u32>) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 64);
    aligned(&["x", "y"]);
    let row = group_id() * width;
    let top = Var::new(f32::NEG_INFINITY);
    for i in strided(width) {
        top.set(top.get().max(x[row + i]));
    }
    let top = group_max(top.get());
    let mut sum = Var::new(0.0);
    for i in strided(width) {
        let e = (x[row + i] - top).exp();
        y[row + i] = e;
        sum += e;
    }
    let scale = 1.0 / group_sum(sum.get());
    for i in strided(width) {
        y[row + i] = y[row + i] * scale;
    }
}

/// Neighbouring loops that merge, and one of another element that does not.
#[kernel]
fn neighbours(x: In<f32>, y: InOut<f32>, z: Out<f32>, n: Arg<u32>) {
    launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 32);
    for i in strided(n) {
        y[i] = x[i] * 2.0;
    }
    for i in strided(n) {
        y[i] = y[i] + x[i] * y[i];
    }
    for i in strided(n / 32u32 * 32u32) {
        z[i] = y[i] + x[(i + 1) % n];
    }
}

/// A loop that is widened although its number and another array's elements, one by one, take part.
#[kernel]
fn gather(x: In<f32>, table: In<f32>, y: Out<f32>, n: Const<u32>) {
    launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 32);
    aligned(&["x", "y"]);
    for i in strided(n) {
        y[i] = x[i] * table[i % 7] + i.f32();
    }
}

/// Loops that must stay as they are: what the first leaves, the same thread reads at another of its
/// elements.
#[kernel]
fn own_but_other(x: In<f32>, y: InOut<f32>, z: Out<f32>, n: Const<u32>) {
    launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 32);
    aligned(&["x", "y", "z"]);
    for i in strided(n) {
        y[i] = x[i] * 3.0;
    }
    for i in strided(n) {
        z[i] = y[(i + 32) % n] + y[thread_id()];
    }
}

/// Branches that change a register, divisions by powers of two, comparisons that the contract
/// decides.
#[kernel]
fn branches(x: InOut<u32>, n: Arg<u32>) {
    launch(Mode::Element, [fixed(2), fixed(1), fixed(1)], 64);
    let mut kept = Var::new(1u32);
    let i = group_id() * 64 + thread_id();
    if i < n {
        kept = i / 8 + i % 8 * 3;
        if i % 4 == 1u32 {
            kept.set(kept.get() * 5 + 3 + 4);
        }
    } else {
        kept = 7u32;
    }
    if thread_id() < 64 {
        x[i] = kept.get() + x[i] * 1 + 0;
    }
    if lane_id() >= 32 {
        x[i] = 0u32;
    }
}

/// Loops written out, so that register indices become numbers; one inside another.
#[kernel]
fn registers(x: In<f32>, y: Out<f32>) {
    launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 32);
    let regs = Regs::<f32>::new(8, 0.0);
    for i in range(0, 8u32).unroll() {
        regs[i] = x[thread_id() * 8 + i];
    }
    for i in range(1, 8u32).unroll() {
        for k in range(0, i).step(3u32).unroll() {
            regs[i] = regs[i] + regs[k] * 0.5;
        }
    }
    for i in range(0, 8u32).unroll() {
        y[i * 32 + thread_id()] = regs[i];
    }
}

/// A histogram: atomics on shared memory, barriers, a vote.
#[kernel]
fn histogram(x: In<u32>, counts: Out<u32>, votes: Out<u32>, n: Const<u32>) {
    launch(Mode::Row, [fixed(1), fixed(1), fixed(1)], 64);
    require(Requirement::Aligned("x".into(), 16));
    let bins = Shared::<u32>::named("bins", 64);
    bins[thread_id()] = 0u32;
    barrier();
    barrier();
    for i in strided(n) {
        bins.atomic(AtomicOp::Add, x[i] % 64, 1u32);
    }
    barrier();
    counts[thread_id()] = bins[thread_id()];
    let many = simd_sum((bins[thread_id()] > 1).u32());
    votes[thread_id()] = many + ballot(bins[thread_id()] == 0) / 65536;
    barrier();
}

/// A simdgroup for a row: loops over the lanes.
#[kernel]
fn by_lane(x: In<{ Scalar::F16 }>, y: Out<f32>, width: Arg<u32>) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], 64);
    require(Requirement::Divisible(dim("width"), 8));
    aligned(&["x", "y"]);
    let row = (group_id() * 2 + simd_id()) * width;
    let mut sum = Var::new(0.0);
    for i in range(lane_id(), width).step(32u32) {
        sum += x[row + i];
    }
    let mean = simd_sum(sum.get()) / width.f32();
    for i in range(lane_id(), width).step(32u32) {
        y[row + i] = x[row + i] - mean;
    }
}

/// Bytes, products of four, vectors, hints.
#[kernel]
fn bytes(x: In<{ Scalar::U8 }>, w: In<u32>, y: Out<i32>, n: Const<u32>) {
    launch(Mode::Vector, [fixed(1), fixed(1), fixed(1)], 32);
    aligned(&["x", "w"]);
    let sum = Var::new(0i32);
    for i in range(lane_id() * 4, n).step(128u32) {
        let words = w.get_vec(i, 4, LoadHint::Stream);
        for (k, word) in words.into_iter().enumerate() {
            let near = x.get_raw(i + k as u32).u32();
            sum.set(word.dot4(near * 0x0101_0101u32, sum.get()));
        }
    }
    y[lane_id()] = simd_sum(sum.get()) + lane_id().i32();
}

/// A product of matrices: copies to shared memory, zeros outside, tiles both ways round.
#[kernel]
fn product(
    x: In<{ scalar }>,
    w: In<{ scalar }>,
    y: Out<f32>,
    rows: Arg<u32>,
    k: Const<u32>,
    n: Const<u32>,
    scalar: Scalar,
) {
    launch(Mode::Tile, [dim("n").ceil_div(32u32), dim("tiles"), fixed(1)], 64);
    let (row, col) = (group_id_of(1) * 16, group_id() * 32 + simd_id() * 16);
    let stage = Shared::<f32>::stored(scalar, "stage", 512);
    let acc = Frags::accumulators(2, 0.0);
    for step in range(0, k).step(16u32) {
        for part in range(0, 2u32).unroll() {
            let at = part * 256 + thread_id() * 4;
            let (r, c) = (thread_id() / 4, thread_id() % 4 * 4);
            let keep = row + r < rows;
            let from = select(keep, (row + r) * k + step + c, 0u32);
            copy_async(stage, at, x, from, 4, Some(keep));
        }
        copy_commit();
        copy_wait(0);
        barrier();
        let a = Frag::left(stage, 0, 16);
        let again = Frag::left(stage, 256, 16);
        let b = Frag::right_transposed(w, col * k + step, k);
        acc.set(0, acc.get(0).mma(a, b));
        acc.set(1, acc.get(1).mma(again, b));
        barrier();
    }
    let both = (acc.get(0) + acc.get(1)) * Frag::filled(0.5);
    both.store(y, row * n + col, n);
}

/// What attention does with tiles: masked rows, their maxima and sums, a product with what comes
/// out.
#[kernel]
fn attend(q: In<{ Scalar::F16 }>, v: In<{ Scalar::F16 }>, y: Out<f32>) {
    launch(Mode::Tile, [fixed(1), fixed(1), fixed(1)], 32);
    let a = Frag::left(q, 0, 16);
    let k = Frag::right_transposed(q, 0, 16);
    let scores = Frag::filled(0.0).mma(a, k);
    let below = Frag::col_numbers().le(Frag::row_numbers());
    let scores = below.select(scores, Frag::filled(f32::NEG_INFINITY));
    let state = Frags::new(1, Frag::rows(0.0));
    let top = scores.reduce_rows(Reduce::Max);
    let p = (scores - top.across()).map(UnaryOp::Exp);
    state.set(0, p.reduce_rows(Reduce::Sum));
    let out = Frag::filled(0.0).mma(p.to_left(Scalar::F16), Frag::right(v, 0, 16));
    (out / state.get(0).across()).store(y, 0, 16);
}

/// A kernel with what it is launched with.
struct Launched {
    kernel: Kernel,
    numbers: Numbers,
    buffers: Vec<Buffer>,
}

fn floats(scalar: Scalar, seed: u64, len: usize) -> Buffer {
    Buffer::floats(scalar, &noise(seed, len))
}

fn words(seed: u64, len: usize) -> Buffer {
    let words: Vec<u32> = noise(seed, len).into_iter().map(|x| x.to_bits() >> 3).collect();
    Buffer::words(&words)
}

fn all() -> Vec<Launched> {
    let with = |kernel, numbers, buffers| Launched { kernel, numbers, buffers };
    let f32s = |seed, len| floats(Scalar::F32, seed, len);
    let f16s = |seed, len| floats(Scalar::F16, seed, len);
    let none = |scalar, len| Buffer::zeros(scalar, len);
    let row = |width| Numbers::new().with("rows", 3).with("width", width).with_f32("eps", 1e-5);
    vec![
        with(
            rms_norm(Scalar::F32, 64).record(),
            row(512),
            vec![f32s(1, 1536), none(Scalar::F32, 1536)],
        ),
        with(
            rms_norm(Scalar::F32, 64).record(),
            row(129),
            vec![f32s(1, 387), none(Scalar::F32, 387)],
        ),
        with(
            rms_norm(Scalar::BF16, 32).record(),
            row(40),
            vec![floats(Scalar::BF16, 2, 120), none(Scalar::BF16, 120)],
        ),
        with(softmax().record(), row(640), vec![f32s(3, 1920), none(Scalar::F32, 1920)]),
        with(softmax().record(), row(67), vec![f32s(4, 201), none(Scalar::F32, 201)]),
        with(
            neighbours().record(),
            Numbers::new().with("n", 100),
            vec![f32s(5, 100), f32s(6, 100), none(Scalar::F32, 100)],
        ),
        with(
            gather().record(),
            Numbers::new().with("n", 256),
            vec![f32s(16, 256), f32s(17, 7), none(Scalar::F32, 256)],
        ),
        with(
            own_but_other().record(),
            Numbers::new().with("n", 256),
            vec![f32s(18, 256), f32s(19, 256), none(Scalar::F32, 256)],
        ),
        with(branches().record(), Numbers::new().with("n", 77), vec![words(7, 128)]),
        with(registers().record(), Numbers::new(), vec![f32s(8, 256), none(Scalar::F32, 256)]),
        with(
            histogram().record(),
            Numbers::new().with("n", 256),
            vec![words(9, 256), none(Scalar::U32, 64), none(Scalar::U32, 64)],
        ),
        with(by_lane().record(), row(320), vec![f16s(10, 1920), none(Scalar::F32, 1920)]),
        with(
            bytes().record(),
            Numbers::new().with("n", 256),
            vec![
                Buffer::raw(Scalar::U8, (0..=255).collect()),
                words(11, 256),
                none(Scalar::I32, 32),
            ],
        ),
        with(
            product(Scalar::F16).record(),
            Numbers::new().with("rows", 21).with("tiles", 2).with("k", 48).with("n", 64),
            vec![f16s(12, 21 * 48), f16s(13, 64 * 48), none(Scalar::F32, 32 * 64)],
        ),
        with(
            attend().record(),
            Numbers::new(),
            vec![f16s(14, 256), f16s(15, 256), none(Scalar::F32, 256)],
        ),
    ]
}

fn run(kernel: &Kernel, launched: &Launched) -> Vec<Buffer> {
    let mut buffers = launched.buffers.clone();
    if let Err(fault) = interp::run(kernel, &launched.numbers, &mut buffers) {
        panic!("{fault}\n{kernel}");
    }
    buffers
}

fn same(found: &[Buffer], wanted: &[Buffer], kernel: &Kernel, after: &str) {
    for (found, wanted) in found.iter().zip(wanted) {
        let error = case::error(&found.to_f64(), &wanted.to_f64());
        let allowed = case::tolerance(wanted.scalar);
        assert!(error <= allowed, "{} after {after}: error {error}\n{kernel}", kernel.name);
    }
}

#[test]
fn every_step_keeps_the_meaning() {
    for launched in all() {
        let wanted = run(&launched.kernel, &launched);
        let special = passes::specialise(&launched.kernel, &launched.numbers);
        same(&run(&special, &launched), &wanted, &special, "specialise");
        for kernel in [&launched.kernel, &special] {
            for target in Target::ALL {
                let steps = passes::trace(kernel, target).unwrap_or_else(|fault| panic!("{fault}"));
                assert_eq!(steps.len(), Pass::PIPELINE.len());
                for (name, step) in &steps {
                    same(&run(step, &launched), &wanted, step, name);
                }
                let lowered = passes::lower(kernel, target).map(|k| k.to_string());
                assert_eq!(lowered.ok(), steps.last().map(|(_, k)| k.to_string()));
            }
        }
    }
}

/// The same passes alone, in a random order: each must hold by itself.
#[test]
fn passes_hold_in_any_order() {
    let mut state = 7u64;
    for launched in all() {
        let wanted = run(&launched.kernel, &launched);
        let special = passes::specialise(&launched.kernel, &launched.numbers);
        for target in Target::ALL {
            let mut kernel = special.clone();
            for _ in 0..12 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let pass = Pass::ALL[(state >> 33) as usize % Pass::ALL.len()];
                kernel = pass.apply(&kernel, target).unwrap_or_else(|fault| panic!("{fault}"));
                same(&run(&kernel, &launched), &wanted, &kernel, pass.name());
            }
        }
    }
}

/// Const-fold on every pair of operations with every pair of awkward numbers, on either side: the
/// same bits for awkward operands, and undefined where it was.
#[test]
fn folding_keeps_every_bit() {
    let numbers: [(&str, [&str; 5], Vec<u32>); 3] = [
        (
            "u32",
            ["0", "1", "8", "7", "4294967295"],
            vec![0, 1, 2, 7, 8, 31, 32, 1000, 1 << 31, u32::MAX - 1, u32::MAX],
        ),
        (
            "i32",
            ["0", "1", "8", "-1", "-2147483648"],
            vec![0, 1, 7, 8, u32::MAX, u32::MAX - 6, 1 << 31, i32::MAX as u32],
        ),
        (
            "f32",
            ["0.0", "-0.0", "1.0", "2.5", "-1.0"],
            [0.0, -0.0, 1.0, -1.5, f32::INFINITY, 1e-40, f32::MAX].map(f32::to_bits).to_vec(),
        ),
    ];
    let mut changed = 0;
    for (ty, literals, operands) in &numbers {
        let scalar = Scalar::ALL.into_iter().find(|s| s.name() == *ty).expect("a type");
        let ops: Vec<BinaryOp> = BinaryOp::ALL.into_iter().filter(|op| op.takes(scalar)).collect();
        for (first, second) in ops.iter().flat_map(|a| ops.iter().map(move |b| (a, b))) {
            for (m, n, side) in (0..50).map(|i| (literals[i % 5], literals[i / 5 % 5], i / 25 == 1))
            {
                // A result of another type, a truth value or a word of two numbers, takes no second
                // operation of these.
                let second = (first.result(scalar) == scalar).then_some(second);
                let kernel = pair(ty, *first, second.copied(), m, n, side);
                let folded = Pass::ConstFold.apply(&kernel, Target::Interpreter).expect("valid");
                changed += usize::from(folded != kernel);
                let run = |kernel: &Kernel, x: &[u32]| {
                    let bytes = x.iter().flat_map(|x| x.to_le_bytes()).collect();
                    let mut buffers =
                        [Buffer::raw(scalar, bytes), Buffer::zeros(Scalar::U32, x.len())];
                    let numbers = Numbers::new().with("n", x.len() as u32);
                    interp::run(kernel, &numbers, &mut buffers).ok()?;
                    Some(std::mem::take(&mut buffers[1].bytes))
                };
                let equal = |x: &[u32]| {
                    let (before, after) = (run(&kernel, x), run(&folded, x));
                    assert_eq!(before, after, "x = {x:x?}\n{kernel}{folded}");
                    before.is_some()
                };
                // Where some are undefined, each by itself.
                if !equal(operands) {
                    operands.iter().for_each(|x| {
                        equal(&[*x]);
                    });
                }
            }
        }
    }
    assert!(changed > 1000, "{changed} kernels folded");
}

/// `y = (x first m) second n`, or `n second (m first x)`.
fn pair(
    ty: &str,
    first: BinaryOp,
    second: Option<BinaryOp>,
    m: &str,
    n: &str,
    left: bool,
) -> Kernel {
    let order = |a: u32, b: u32| if left { format!("%{b}, %{a}") } else { format!("%{a}, %{b}") };
    let scalar = Scalar::ALL.into_iter().find(|s| s.name() == ty).expect("a type");
    let type_of = |op: BinaryOp| op.result(scalar).name();
    let last = second.unwrap_or(first);
    let second = second.map_or(String::new(), |op| {
        format!("%6: {ty} = {n}\n%7: {} = {} {}", type_of(op), op.name(), order(5, 6))
    });
    let value = if second.is_empty() { 5 } else { 7 };
    let convert = match type_of(last) {
        "u32" => format!("store y[%0] = %{value}"),
        "bool" => format!("%8: u32 = cast %{value}\nstore y[%0] = %8"),
        _ => format!("%8: u32 = bitcast %{value}\nstore y[%0] = %8"),
    };
    let text = format!(
        "kernel pair {{\nbuffer x: {ty} in\nbuffer y: u32 out\nargument n: u32\nbody {{\n%0: u32 = lane\n%1: u32 = argument n\n\
         %2: bool = lt %0, %1\nif %2 {{\n%3: {ty} = load x[%0]\n%4: {ty} = {m}\n%5: {} = {} {}\n{second}\n{convert}\n}}\n}}\n}}\n",
        type_of(first),
        first.name(),
        order(3, 4),
    );
    text::parse(&text).unwrap_or_else(|fault| panic!("{fault}\n{text}"))
}

fn count(kernel: &Kernel, wanted: impl Fn(&Inst) -> bool) -> usize {
    let mut found = 0;
    kernel.visit(&mut |node| found += usize::from(wanted(&node.inst)));
    found
}

/// That the passes do something here: what each is for is gone or there afterwards.
#[test]
fn lowering_reaches_what_it_is_for() {
    let lower = |kernel: &Kernel, numbers: &Numbers, target| {
        passes::lower(&passes::specialise(kernel, numbers), target).expect("it lowers")
    };
    let width = Numbers::new().with("width", 512).with_f32("eps", 1e-5);
    let norm = lower(&rms_norm(Scalar::F16, 64).record(), &width, Target::Cuda);
    let wide = |i: &Inst| matches!(i, Inst::Load { lanes: 8, .. });
    assert_eq!(count(&norm, wide), 2, "{norm}");
    assert_eq!(count(&norm, |i| matches!(i, Inst::For { .. })), 0, "one trip each: {norm}");
    assert_eq!(norm.registers.len(), 0, "the sum needs no register: {norm}");
    assert_eq!(count(&norm, |i| matches!(i, Inst::Barrier)), 1, "{norm}");

    let length = Numbers::new().with("n", 256);
    let quads = |i: &Inst| matches!(i, Inst::Load { lanes: 4, .. });
    assert_eq!(count(&lower(&gather().record(), &length, Target::Metal), quads), 1);
    assert_eq!(count(&lower(&own_but_other().record(), &length, Target::Metal), quads), 0);

    let sizes = Numbers::new().with("k", 48).with("n", 64);
    let metal = lower(&product(Scalar::F16).record(), &sizes, Target::Metal);
    assert_eq!(count(&metal, |i| matches!(i, Inst::Mma { .. })), 16, "{metal}");
    assert_eq!(count(&metal, |i| matches!(i, Inst::CopyAsync { .. })), 0, "{metal}");
    let tiles = |kernel: &Kernel, edge| {
        kernel.values.iter().filter_map(|ty| ty.tile()).all(|tile| tile.rows == edge)
    };
    assert!(tiles(&metal, 8), "{metal}");
    let cuda = lower(&product(Scalar::F16).record(), &sizes, Target::Cuda);
    assert_eq!(count(&cuda, |i| matches!(i, Inst::Mma { .. })), 2, "{cuda}");
    assert_eq!(count(&cuda, |i| matches!(i, Inst::CopyAsync { .. })), 2, "{cuda}");
    assert!(tiles(&cuda, 16), "{cuda}");
}

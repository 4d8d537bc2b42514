//! The interpreter runs kernels as the language says: every instruction, against numbers worked out
//! in plain Rust; and each kernel again as the passes lower it for every target.

use crate::language::rms_norm;
use half::bf16;
use tile::case::{Buffer, Case, Expected, noise};
use tile::dsl::*;
use tile::instr::UnaryOp;
use tile::interp::{self, CompiledKernel};
use tile::ir::{AtomicOp, Kernel, LoadHint, Reduce};
use tile::launch::{Mode, Numbers};
use tile::types::Scalar;

/// Runs a kernel as written and as lowered for every target; the listed buffers must hold exactly
/// these numbers.
fn exact(kernel: Kernel, numbers: Numbers, buffers: Vec<Buffer>, want: Vec<(usize, Vec<f64>)>) {
    let expected = want.into_iter().map(|(i, w)| (i, Expected::Exact(w))).collect();
    let case = Case { kernel, label: "tiny".to_owned(), numbers, buffers, expected };
    interp::check(&case).unwrap_or_else(|why| panic!("{why}\n{}", case.kernel));
}

fn one_group(threads: u32) {
    launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], threads);
}

fn numbers<T: Copy + Into<f64>>(values: &[T]) -> Vec<f64> {
    values.iter().map(|v| (*v).into()).collect()
}

#[test]
fn a_reduction_over_rows() {
    for (rows, width, group) in [(3, 129, 64), (1, 7, 32), (2, 1024, 256)] {
        let x = noise(1, rows * width);
        let mut buffers = [Buffer::floats(Scalar::F32, &x), Buffer::zeros(Scalar::F32, x.len())];
        let numbers = Numbers::new().with("width", width as u32).with("rows", rows as u32);
        let numbers = numbers.with_f32("eps", 1e-5);
        interp::run(&rms_norm(Scalar::F32, group).record(), &numbers, &mut buffers).unwrap();
        let want: Vec<f64> = x
            .chunks(width)
            .flat_map(|row| {
                let squares: f64 = row.iter().map(|v| f64::from(*v).powi(2)).sum();
                let scale = 1.0 / (squares / width as f64 + 1e-5).sqrt();
                row.iter().map(move |v| f64::from(*v) * scale)
            })
            .collect();
        assert!(tile::case::error(&buffers[1].to_f64(), &want) < 1e-6);
    }
}

#[kernel]
fn places(y: Out<u32>) {
    launch(Mode::Element, [fixed(3), fixed(2), fixed(2)], 64);
    let group = (group_id_of(2) * groups(1) + group_id_of(1)) * groups(0) + group_id();
    let at = (group * 64 + thread_id()) * 3;
    y[at] = group;
    y[at + 1] = lane_id();
    y[at + 2] = simd_id();
}

#[test]
fn every_thread_knows_its_place() {
    let want = (0..12).flat_map(|g| (0..64).flat_map(move |t| [g, t % 32, t / 32]));
    let want: Vec<u32> = want.collect();
    let y = Buffer::zeros(Scalar::U32, want.len());
    exact(places().record(), Numbers::new(), vec![y], vec![(0, numbers(&want))]);
}

#[kernel]
fn known(y: Out<f32>, a: Arg<f32>, n: Arg<u32>, c: Const<i32>, flag: Const<bool>) {
    one_group(32);
    grid_trigger();
    grid_wait();
    let sum = a + n.f32() + c.f32();
    if flag {
        y[lane_id()] = sum;
    } else {
        y[lane_id()] = -sum;
    }
}

#[test]
fn constants_and_arguments_come_from_the_launch() {
    for flag in [0, 1] {
        let given = Numbers::new().with_f32("a", 0.5).with("n", 3).with("c", -2i32 as u32);
        let want = if flag == 1 { 1.5 } else { -1.5 };
        let y = vec![Buffer::zeros(Scalar::F32, 32)];
        exact(known().record(), given.with("flag", flag), y, vec![(0, vec![want; 32])]);
    }
}

#[kernel]
fn paths(x: In<u32>, y: Out<u32>) {
    one_group(64);
    let n = x[thread_id()];
    let mut sum = Var::new(0u32);
    for i in range(thread_id() / 2, n).step(3u32) {
        if i % 2 == 0 {
            sum += i;
        } else if i > 20 {
            for j in range(0u32, i - 20) {
                sum += j * 1000;
            }
        } else {
            sum += 1u32;
        }
    }
    y[thread_id()] = sum.get();
}

#[test]
fn lanes_take_their_own_paths() {
    let x: Vec<u32> = (0..64).map(|t| t * 37 % 50).collect();
    let sum = |t: u32, n: u32| {
        let turns = (t / 2..n).step_by(3);
        turns.map(|i| match i {
            i if i % 2 == 0 => i,
            i if i > 20 => (0..i - 20).map(|j| j * 1000).sum(),
            _ => 1,
        })
    };
    let want: Vec<u32> = x.iter().zip(0..).map(|(n, t)| sum(t, *n).sum()).collect();
    let buffers = vec![Buffer::words(&x), Buffer::zeros(Scalar::U32, 64)];
    exact(paths().record(), Numbers::new(), buffers, vec![(1, numbers(&want))]);
}

#[kernel]
fn bits(x: In<u32>, ints: Out<i32>, floats: Out<f32>, words: Out<u32>, bytes: Out<{ Scalar::I8 }>) {
    one_group(32);
    let i = lane_id();
    let v = x[i];
    ints[i] = v.dot4(x[31 - i], 5);
    floats[i] = v.bits::<f32>();
    words[i] = select(v > 100u32, v.mul_hi(v), v.count_ones() + v.leading_zeros());
    bytes.set_raw(i, v.cast::<u8>().bits::<i8>().to(Scalar::I8));
}

#[test]
fn words_are_taken_apart() {
    let x: Vec<u32> = (0..32u32).map(|i| i.wrapping_mul(0x0731_2345) >> (i % 7)).collect();
    let finite = |v: u32| if f32::from_bits(v).is_finite() { v } else { 7 };
    let x: Vec<u32> = x.into_iter().map(finite).collect();
    let dot = |a: u32, b: u32| {
        let pairs = a.to_le_bytes().into_iter().zip(b.to_le_bytes());
        5 + pairs.map(|(a, b)| i32::from(a as i8) * i32::from(b as i8)).sum::<i32>()
    };
    let word = |v: u32| match v {
        v if v > 100 => ((u64::from(v) * u64::from(v)) >> 32) as u32,
        v => v.count_ones() + v.leading_zeros(),
    };
    let ints: Vec<i32> = (0..32).map(|i| dot(x[i], x[31 - i])).collect();
    let floats: Vec<f32> = x.iter().map(|v| f32::from_bits(*v)).collect();
    let words: Vec<u32> = x.iter().map(|v| word(*v)).collect();
    let bytes: Vec<i8> = x.iter().map(|v| *v as i8).collect();
    let zeros = |s| Buffer::zeros(s, 32);
    let outs = [Scalar::I32, Scalar::F32, Scalar::U32, Scalar::I8].map(zeros);
    let buffers = std::iter::once(Buffer::words(&x)).chain(outs).collect();
    let want = vec![numbers(&ints), numbers(&floats), numbers(&words), numbers(&bytes)];
    exact(bits().record(), Numbers::new(), buffers, (1..).zip(want).collect());
}

#[kernel]
fn vectors(x: In<{ scalar }>, y: Out<f32>, z: Out<{ scalar }>, scalar: Scalar, lanes: u8) {
    one_group(32);
    let at = lane_id() * u32::from(lanes);
    let v = x.get_raw_vec(at, lanes, LoadHint::Stream);
    let wide: Vec<Val<f32>> = v.iter().map(|e| e.f32() * 2.0).collect();
    for (part, values) in wide.chunks(4).enumerate() {
        y.set_vec(at + part as u32 * 4, values);
    }
    let back: Vec<Val<Raw>> = v.iter().rev().copied().collect();
    z.set_raw_vec(at, &back);
}

#[test]
fn vectors_move_their_elements_in_order() {
    let x: Vec<f32> = (0..256).map(|i| i as f32 - 100.0).collect();
    for (scalar, kernel, lanes) in [
        (Scalar::F16, vectors(Scalar::F16, 8).record(), 8),
        (Scalar::BF16, vectors(Scalar::BF16, 4).record(), 4),
        (Scalar::F32, vectors(Scalar::F32, 2).record(), 2),
    ] {
        let x = &x[..32 * lanes];
        let twice: Vec<f32> = x.iter().map(|v| v * 2.0).collect();
        let back: Vec<f32> = x.chunks(lanes).flat_map(|c| c.iter().rev().copied()).collect();
        let zeros = |scalar| Buffer::zeros(scalar, x.len());
        let buffers = vec![Buffer::floats(scalar, x), zeros(Scalar::F32), zeros(scalar)];
        let want = vec![(1, numbers(&twice)), (2, numbers(&back))];
        exact(kernel, Numbers::new(), buffers, want);
    }
}

#[kernel]
fn registers(x: In<u32>, y: Out<u32>) {
    one_group(32);
    let kept = Regs::<u32>::uninit(8);
    for i in range(0u32, 8u32) {
        kept[(i + lane_id()) % 8] = x[i] * (lane_id() + 1);
    }
    y[lane_id()] = kept[x[lane_id()]] + kept[2u32];
}

#[test]
fn registers_are_indexed_by_each_thread() {
    let x: Vec<u32> = (0..32).map(|i| (i * 5 + 1) % 8).collect();
    let kept = |lane: u32, at: u32| x[((at + 8 * 4 - lane) % 8) as usize] * (lane + 1);
    let want: Vec<u32> = (0..32).map(|l| kept(l, x[l as usize]) + kept(l, 2)).collect();
    let buffers = vec![Buffer::words(&x), Buffer::zeros(Scalar::U32, 32)];
    exact(registers().record(), Numbers::new(), buffers, vec![(1, numbers(&want))]);
}

#[kernel]
fn atomics(x: In<u32>, all: InOut<u32>, ints: InOut<i32>, sum: InOut<f32>, here: Out<u32>) {
    launch(Mode::Element, [fixed(3), fixed(1), fixed(1)], 64);
    let v = x[group_id() * 64 + thread_id()];
    all.atomic(AtomicOp::Add, 0u32, v);
    all.atomic(AtomicOp::Min, 1u32, v);
    all.atomic(AtomicOp::Max, 2u32, v);
    ints.atomic(AtomicOp::Max, 0u32, v.i32() - 500);
    ints.atomic(AtomicOp::Min, 1u32, v.i32() - 500);
    sum.atomic(AtomicOp::Add, 0u32, v.f32() * 0.5);
    let seen = Shared::<u32>::new(2);
    if thread_id() < 2 {
        seen[thread_id()] = 0;
    }
    barrier();
    let ticket = seen.atomic(AtomicOp::Add, 0u32, 1);
    seen.atomic(AtomicOp::Exchange, 1u32, 9);
    here[group_id() * 65 + 1 + ticket] = 1;
    barrier();
    if thread_id() == 5 {
        here[group_id() * 65] = seen[0u32] + seen[1u32];
    }
}

#[test]
fn atomics_lose_nothing() {
    let x: Vec<u32> = (0..192).map(|i| 3 + i * 7919 % 1000).collect();
    let sum: u32 = x.iter().sum();
    let (low, high) = (x.iter().min().unwrap(), x.iter().max().unwrap());
    let here: Vec<u32> = (0..195).map(|i| if i % 65 == 0 { 64 + 9 } else { 1 }).collect();
    let buffers = vec![
        Buffer::words(&x),
        Buffer::words(&[0, u32::MAX, 0]),
        Buffer::raw(Scalar::I32, vec![0, 0, 0, 0x80, 0, 0, 0, 0x70]),
        Buffer::zeros(Scalar::F32, 1),
        Buffer::zeros(Scalar::U32, 195),
    ];
    let want = vec![
        (1, numbers(&[sum, *low, *high])),
        (2, numbers(&[*high as i32 - 500, *low as i32 - 500])),
        (3, vec![f64::from(sum) * 0.5]),
        (4, numbers(&here)),
    ];
    exact(atomics().record(), Numbers::new(), buffers, want);
}

#[kernel]
fn exchanges(x: In<i32>, y: Out<i32>) {
    one_group(64);
    let (t, n) = (thread_id(), 64u32);
    let v = x[t];
    y[t] = simd_sum(v);
    y[t + n] = simd_max(v);
    y[t + n * 2] = simd_reduce(Reduce::Min, v);
    y[t + n * 3] = simd_prefix_sum(v);
    y[t + n * 4] = shuffle(v, (lane_id() + 5) % 32);
    y[t + n * 5] = shuffle_xor(v, 12);
    y[t + n * 6] = simd_any(v == 3).i32() + simd_all(v < 1000).i32() * 2;
    y[t + n * 7] = ballot(v > 0).i32();
    if simd_id() == 1 {
        y[t + n * 8] = simd_sum(v.f32()).i32();
    } else {
        y[t + n * 8] = group_sum_of_one(v);
    }
}

fn group_sum_of_one(v: Val<i32>) -> Val<i32> {
    simd_sum(v) * 2
}

#[test]
fn lanes_exchange_within_their_simdgroup() {
    let x: Vec<i32> = (0..64).map(|i| (i * 29 % 64) - 30).collect();
    let mut want = vec![0; 64 * 9];
    for t in 0..64 {
        let (own, lane) = (&x[t / 32 * 32..][..32], t % 32);
        let bits = own.iter().enumerate().map(|(i, v)| u32::from(*v > 0) << i).sum::<u32>();
        let sum = own.iter().sum::<i32>();
        let each = [
            sum,
            *own.iter().max().unwrap(),
            *own.iter().min().unwrap(),
            own[..lane].iter().sum(),
            own[(lane + 5) % 32],
            own[lane ^ 12],
            i32::from(own.contains(&3)) + 2,
            bits as i32,
            if t < 32 { sum * 2 } else { sum },
        ];
        each.into_iter().enumerate().for_each(|(k, v)| want[t + 64 * k] = v);
    }
    let bytes = x.iter().flat_map(|v| v.to_le_bytes()).collect();
    let buffers = vec![Buffer::raw(Scalar::I32, bytes), Buffer::zeros(Scalar::I32, 64 * 9)];
    exact(exchanges().record(), Numbers::new(), buffers, vec![(1, numbers(&want))]);
}

/// Groups add up their parts; the last one to finish adds up the groups.
#[kernel]
fn last_one(x: In<u32>, parts: InOut<u32>, count: InOut<u32>, y: Out<u32>, by_all: bool) {
    launch(Mode::Row, [fixed(4), fixed(1), fixed(1)], 64);
    let last = Shared::<u32>::new(1);
    let sum = group_sum(x[group_id() * 64 + thread_id()]);
    if thread_id() == 0 {
        parts[group_id()] = sum;
    }
    if by_all {
        fence();
        barrier();
    }
    if thread_id() == 0 {
        if !by_all {
            fence();
        }
        last[0u32] = count.atomic(AtomicOp::Add, 0u32, 1);
        fence();
    }
    barrier();
    if last[0u32] == groups(0) - 1 {
        if thread_id() < 4 {
            y[thread_id()] = parts[thread_id()];
        }
        if thread_id() == 40 {
            count[0u32] = 0;
        }
    }
}

#[test]
fn groups_hand_work_over_through_an_atomic() {
    let x: Vec<u32> = (0..256).collect();
    let want: Vec<u32> = x.chunks(64).map(|part| part.iter().sum()).collect();
    for by_all in [false, true] {
        let zeros = |len| Buffer::zeros(Scalar::U32, len);
        let buffers = vec![Buffer::words(&x), zeros(4), zeros(1), zeros(4)];
        let expected = vec![(3, numbers(&want)), (2, vec![0.0])];
        exact(last_one(by_all).record(), Numbers::new(), buffers, expected);
    }
}

/// Two batches in flight, what is beyond `n` left out.
#[kernel]
fn stream(x: In<{ Scalar::F16 }>, y: Out<f32>, n: Arg<u32>) {
    one_group(64);
    let stage = Shared::<f32>::stored(Scalar::F16, "", 2 * 512);
    let begin = |step: u32| {
        let at = thread_id() * 8 + step * 512;
        copy_async(stage, thread_id() * 8 + step % 2 * 512, x, at, 8, Some(at.lt(n)));
        copy_commit();
    };
    begin(0);
    for step in 0..4u32 {
        if step < 3 {
            begin(step + 1);
            copy_wait(1);
        } else {
            copy_wait(0);
        }
        barrier();
        for k in 0..8u32 {
            let i = 511 - (thread_id() + k * 64);
            y[step * 512 + i] = stage[step % 2 * 512 + i];
        }
        barrier();
    }
}

#[test]
fn asynchronous_copies_arrive() {
    let x = noise(5, 2048);
    let x = Buffer::floats(Scalar::F16, &x);
    let kept = x.to_f64().into_iter().enumerate();
    let want: Vec<f64> = kept.map(|(i, v)| if i < 1608 { v } else { 0.0 }).collect();
    let x = Buffer::raw(Scalar::F16, x.bytes[..1608 * 2].to_vec());
    let buffers = vec![x, Buffer::zeros(Scalar::F32, 2048)];
    exact(stream().record(), Numbers::new().with("n", 1608), buffers, vec![(1, want)]);
}

/// `[16, 32] x [32, 16]`, the right side transposed for every second simdgroup; then what a softmax
/// does to a tile.
#[kernel]
fn product(
    a: In<{ scalar }>,
    b: In<{ scalar }>,
    bt: In<{ scalar }>,
    c: Out<f32>,
    d: Out<{ scalar }>,
    e: Out<f32>,
    scalar: Scalar,
) {
    one_group(64);
    let sums = Frags::accumulators(2, 1.0);
    for k in range(0u32, 2u32) {
        let left = Frag::left(a, k * 16, 32u32);
        sums.set(0, sums.get(0).mma(left, Frag::right(b, k * 256, 16u32)));
        sums.set(1, sums.get(1).mma(left, Frag::right_transposed(bt, k * 16, 32u32)));
    }
    let stage = Shared::<f32>::new(512);
    sums.get(0).store(stage, simd_id() * 256, 16u32);
    simd_barrier();
    for i in range(lane_id(), 256u32).step(32u32) {
        c[simd_id() * 256 + i] = stage[simd_id() * 256 + i];
    }
    let low = Frag::col_numbers().le(Frag::row_numbers());
    let masked = low.select(sums.get(1), Frag::filled(-8.0));
    let most = masked.reduce_rows(Reduce::Max);
    let spread = (masked - most.across()).map(UnaryOp::Abs).max(Frag::filled(0.25));
    let again = Frag::filled(0.0).mma(spread.to_left(scalar), Frag::right(b, 0u32, 16u32));
    if simd_id() == 0 {
        spread.store(d, 0u32, 16u32);
    } else {
        again.store(e, 0u32, 16u32);
    }
}

#[test]
fn tiles_multiply_and_combine() {
    let small = |seed, len| -> Vec<f32> {
        noise(seed, len).iter().map(|v| (v * 4.0).round() / 2.0).collect()
    };
    let (a, b) = (small(1, 512), small(2, 512));
    let bt: Vec<f32> = (0..512).map(|i| b[i % 32 * 16 + i / 32]).collect();
    let c: Vec<f64> = (0..256)
        .map(|i| {
            let terms =
                (0..32).map(|k| f64::from(a[i / 16 * 32 + k]) * f64::from(b[k * 16 + i % 16]));
            1.0 + terms.sum::<f64>()
        })
        .collect();
    let masked = |r: usize, col: usize| if col <= r { c[r * 16 + col] } else { -8.0 };
    let most = |r: usize| (0..16).map(|k| masked(r, k)).fold(f64::MIN, f64::max);
    let spread = |i: usize| (masked(i / 16, i % 16) - most(i / 16)).abs().max(0.25);
    let d: Vec<f64> = (0..256).map(spread).collect();
    let again =
        |i: usize| (0..16).map(|k| d[i / 16 * 16 + k] * f64::from(b[k * 16 + i % 16])).sum::<f64>();
    let e: Vec<f64> = (0..256).map(again).collect();
    for (scalar, kernel) in [
        (Scalar::F16, product(Scalar::F16).record()),
        (Scalar::BF16, product(Scalar::BF16).record()),
    ] {
        let [a, b, bt] = [&a, &b, &bt].map(|v| Buffer::floats(scalar, v));
        let outs = [(Scalar::F32, 512), (scalar, 256), (Scalar::F32, 256)];
        let outs = outs.map(|(scalar, len)| Buffer::zeros(scalar, len));
        let buffers = [a, b, bt].into_iter().chain(outs).collect();
        let twice = [c.clone(), c.clone()].concat();
        let want = vec![(3, twice), (4, d.clone()), (5, e.clone())];
        exact(kernel, Numbers::new(), buffers, want);
    }
}

#[kernel]
fn fused(x: In<f32>, y: Out<f32>, z: Out<{ Scalar::BF16 }>) {
    one_group(32);
    let v = x[lane_id()];
    y[lane_id()] = v.fma(v, -1.0);
    z[lane_id()] = v;
}

#[test]
fn fma_rounds_once_and_stores_round_to_even() {
    let x: Vec<f32> = (0..32).map(|i| 1.0 + i as f32 * 1.1e-3).collect();
    let once: Vec<f32> = x.iter().map(|v| (f64::from(*v) * f64::from(*v) - 1.0) as f32).collect();
    let rounded: Vec<f32> = x.iter().map(|v| bf16::from_f32(*v).to_f32()).collect();
    let outs = [Scalar::F32, Scalar::BF16].map(|s| Buffer::zeros(s, 32));
    let buffers = std::iter::once(Buffer::floats(Scalar::F32, &x)).chain(outs).collect();
    exact(
        fused().record(),
        Numbers::new(),
        buffers,
        vec![(1, numbers(&once)), (2, numbers(&rounded))],
    );
}

#[test]
fn a_machine_counts_what_it_does() {
    let machine = CompiledKernel::new(&rms_norm(Scalar::F32, 64).record()).unwrap();
    let given = Numbers::new().with("width", 128).with("rows", 2).with_f32("eps", 0.0);
    for _ in 0..2 {
        let mut buffers =
            [Buffer::floats(Scalar::F32, &[1.0; 256]), Buffer::zeros(Scalar::F32, 256)];
        let stats = machine.run(&given, &mut buffers).unwrap();
        assert_eq!((stats.groups, stats.barriers), (2, 4));
        assert_eq!((stats.loaded, stats.stored), (2 * 256 * 4, 256 * 4));
        assert!(stats.instructions > 2 * 256 * 4);
    }
}

/// Not a test of correctness: prints lane instructions per second.
/// `cargo test -- --ignored --nocapture speed`.
#[test]
#[ignore = "a measurement"]
fn speed() {
    let machine = CompiledKernel::new(&rms_norm(Scalar::F32, 256).record()).unwrap();
    let (rows, width) = (64, 4096);
    let x = noise(1, rows * width);
    let mut buffers = [Buffer::floats(Scalar::F32, &x), Buffer::zeros(Scalar::F32, x.len())];
    let numbers = Numbers::new().with("width", width as u32).with("rows", rows as u32);
    let numbers = numbers.with_f32("eps", 1e-5);
    for _ in 0..3 {
        let start = std::time::Instant::now();
        let stats = machine.run(&numbers, &mut buffers).unwrap();
        let seconds = start.elapsed().as_secs_f64();
        let rate = stats.instructions as f64 / seconds / 1e6;
        println!("{stats:?} in {seconds:.4} s: {rate:.0} M lane instructions per second");
    }
}

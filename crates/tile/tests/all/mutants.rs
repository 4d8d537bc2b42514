//! Seeded mistakes, each in a kernel that is right without it: the right one runs, the wrong one is
//! refused in words that name the mistake, and at the line of this file that makes it.

use tile::case::Buffer;
use tile::dsl::*;
use tile::interp::{self, CompiledKernel};
use tile::ir::{AtomicOp, Inst, Kernel, LoadHint, Place};
use tile::launch::{Mode, Numbers, Requirement};
use tile::types::Scalar;

macro_rules! mistakes {
    ($kernel:ident: $($mistake:ident)*) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        enum $kernel {
            $($mistake,)*
        }
        impl $kernel {
            fn is(self, mistake: Self) -> bool {
                self == mistake
            }
        }
    };
}

fn groups_of(count: u32, threads: u32) {
    launch(Mode::Element, [fixed(count), fixed(1), fixed(1)], threads);
}

mistakes!(Turn: Right NoStore NoBarrier NoSecondBarrier SimdBarrier ReadPast WritePast OtherLane Divergent);

/// Turns rows of 64 around through shared memory, twice.
#[kernel]
fn turn(x: In<f32>, y: Out<f32>, how: Turn) {
    groups_of(2, 64);
    let row = Shared::<f32>::named("row", 64);
    let (t, base) = (thread_id(), group_id() * 64);
    for i in range(0u32, 2u32) {
        if how.is(Turn::OtherLane) {
            row[t / 2] = x[base + t];
        } else if how.is(Turn::ReadPast) {
            row[t] = x[base + t + 1];
        } else if !how.is(Turn::NoStore) {
            row[t] = x[base + t];
        }
        if how.is(Turn::Divergent) {
            if t < 63 {
                barrier();
            }
        } else if how.is(Turn::SimdBarrier) {
            simd_barrier();
        } else if !how.is(Turn::NoBarrier) {
            barrier();
        }
        if how.is(Turn::WritePast) {
            y[base + t + i] = row[63 - t];
        } else {
            y[base + t] = row[63 - t];
        }
        if !how.is(Turn::NoSecondBarrier) {
            barrier();
        }
    }
}

fn turned(how: Turn) -> (Kernel, Numbers, Vec<Buffer>) {
    let x: Vec<f32> = (0..128).map(|i| i as f32).collect();
    let buffers = vec![Buffer::floats(Scalar::F32, &x), Buffer::zeros(Scalar::F32, 128)];
    (turn(how).record(), Numbers::new(), buffers)
}

mistakes!(Lanes: Right NoBarrier Branch Loop FarLane);

/// Lanes of a simdgroup exchange through shared memory and by shuffles.
#[kernel]
fn exchange(x: In<u32>, y: Out<u32>, how: Lanes) {
    groups_of(1, 64);
    let own = Shared::<u32>::named("own", 64);
    let (t, v) = (thread_id(), x[thread_id()]);
    own[t] = v;
    if !how.is(Lanes::NoBarrier) {
        simd_barrier();
    }
    let near = own[simd_id() * 32 + (31 - lane_id())];
    let mut sum = Var::new(0u32);
    if how.is(Lanes::Branch) {
        if v > 3 {
            sum += shuffle_xor(v, 1);
        }
    } else if how.is(Lanes::Loop) {
        for i in range(0u32, v) {
            sum += simd_sum(i);
        }
    } else if how.is(Lanes::FarLane) {
        sum += shuffle(v, lane_id() + 1);
    } else {
        sum += shuffle(v, (lane_id() + 1) % 32);
    }
    y[t] = near + sum.get();
}

fn exchanged(how: Lanes) -> (Kernel, Numbers, Vec<Buffer>) {
    let x: Vec<u32> = (0..64).map(|i| i % 7).collect();
    (
        exchange(how).record(),
        Numbers::new(),
        vec![Buffer::words(&x), Buffer::zeros(Scalar::U32, 64)],
    )
}

mistakes!(Copies: Right NoWait NoCommit TooFew NoBarrier Overwrites Misaligned NeverRead);

/// Two batches of copies to shared memory, read by other threads.
#[kernel]
fn copies(x: In<f32>, y: Out<f32>, how: Copies) {
    groups_of(1, 32);
    let (first, second) = (Shared::<f32>::named("first", 128), Shared::<f32>::named("second", 128));
    let t = thread_id();
    if how.is(Copies::Misaligned) {
        copy_async(first, t * 4, x, t * 4 + 2, 4, None);
    } else {
        copy_async(first, t * 4, x, t * 4, 4, None);
    }
    if !how.is(Copies::NoCommit) {
        copy_commit();
    }
    copy_async(second, t * 4, x, t * 4 + 128, 4, None);
    copy_commit();
    if how.is(Copies::NeverRead) {
        copy_wait(1);
        barrier();
    } else {
        if how.is(Copies::TooFew) {
            copy_wait(1);
        } else if how.is(Copies::NoWait) {
            barrier();
        } else {
            copy_wait(0);
        }
        if !how.is(Copies::NoBarrier) {
            barrier();
        }
        y[t + 32] = second[(t + 1) % 32];
    }
    if how.is(Copies::Overwrites) {
        copy_async(first, t * 4, x, t * 4, 4, None);
        copy_commit();
        first[t * 4] = 0.0;
        copy_wait(0);
        barrier();
    }
    y[t] = first[(t + 1) % 32];
}

fn copied(how: Copies) -> (Kernel, Numbers, Vec<Buffer>) {
    let x: Vec<f32> = (0..260).map(|i| i as f32).collect();
    let buffers = vec![Buffer::floats(Scalar::F32, &x), Buffer::zeros(Scalar::F32, 64)];
    (copies(how).record(), Numbers::new(), buffers)
}

mistakes!(Hand: Right NoFence NoFenceAfter NoAtomic OwnCounters PlainCount Together WriteLate);

/// Every group writes its part; the last one reads them all.
#[kernel]
fn hand(parts: InOut<u32>, count: InOut<u32>, y: Out<u32>, how: Hand) {
    groups_of(3, 32);
    let g = group_id();
    if lane_id() == 0 {
        if how.is(Hand::Together) {
            parts[0u32] = g + 1;
        } else {
            parts[g] = g + 1;
        }
        if !how.is(Hand::NoFence) {
            fence();
        }
        if how.is(Hand::WriteLate) {
            parts[g] = g + 2;
        }
        let before = Var::new(0u32);
        if how.is(Hand::NoAtomic) {
            before.set(g);
        } else if how.is(Hand::OwnCounters) {
            before.set(count.atomic(AtomicOp::Add, g, 1) + g);
        } else if how.is(Hand::PlainCount) {
            before.set(count[0u32]);
            count[0u32] = before.get() + 1;
        } else {
            before.set(count.atomic(AtomicOp::Add, 0u32, 1));
        }
        if before.get() == 2 {
            if !how.is(Hand::NoFenceAfter) {
                fence();
            }
            y[0u32] = parts[0u32] + parts[1u32] + parts[2u32];
        }
    }
}

fn handed(how: Hand) -> (Kernel, Numbers, Vec<Buffer>) {
    let zeros = |len| Buffer::zeros(Scalar::U32, len);
    (hand(how).record(), Numbers::new(), vec![zeros(3), zeros(3), zeros(1)])
}

mistakes!(Gather: Right FencesBeforeBarrier FencesAfterBarrier NoBarrier);

/// Every thread of every group writes its part; all threads of the last group read them all.
#[kernel]
fn gather(parts: InOut<u32>, count: InOut<u32>, y: Out<u32>, how: Gather) {
    groups_of(3, 64);
    let (g, t) = (group_id(), thread_id());
    parts[g * 64 + t] = g + t;
    let last = Shared::<u32>::named("last", 1);
    if how.is(Gather::FencesBeforeBarrier) {
        fence();
    }
    if !how.is(Gather::NoBarrier) {
        barrier();
    }
    if t == 0 {
        if !how.is(Gather::FencesBeforeBarrier) {
            fence();
        }
        last[0u32] = count.atomic(AtomicOp::Add, 0u32, 1);
        if !how.is(Gather::FencesAfterBarrier) {
            fence();
        }
    }
    barrier();
    if last[0u32] == 2 {
        if how.is(Gather::FencesAfterBarrier) {
            fence();
        }
        y[t] = parts[t] + parts[64 + t] + parts[128 + t];
    }
}

fn gathered(how: Gather) -> (Kernel, Numbers, Vec<Buffer>) {
    let zeros = |len| Buffer::zeros(Scalar::U32, len);
    (gather(how).record(), Numbers::new(), vec![zeros(192), zeros(1), zeros(64)])
}

mistakes!(Plain: Right Registers SomeRegisters BeyondRegisters ReadsOutput Misaligned MisalignedStore DividesByZero Shifts StepZero Wraps AtomicPast SameElement);

/// Arithmetic, registers and vectors, one thread at a time.
#[kernel]
fn plain(x: In<u32>, y: Out<u32>, z: InOut<u32>, how: Plain) {
    groups_of(1, 32);
    let t = thread_id();
    let is = |flaw: Plain| u32::from(how.is(flaw));
    let kept = Regs::<u32>::uninit(4);
    if how.is(Plain::SomeRegisters) {
        if t != 9 {
            kept[1u32] = t;
        }
    } else if !how.is(Plain::Registers) {
        kept[1u32] = t;
    }
    let four = x.get_vec(t * 4 + is(Plain::Misaligned) * 2, 4, LoadHint::None);
    let parts = four[0] / (t + 1 - is(Plain::DividesByZero)) + (four[1] >> (t + is(Plain::Shifts)));
    let mut sum = Var::new(parts);
    for i in range(t, 40u32).step(x[1u32] - is(Plain::StepZero)) {
        sum += i;
    }
    if how.is(Plain::Wraps) {
        for i in range(4_000_000_000u32, u32::MAX).step(2_000_000_000u32) {
            sum += i;
        }
    }
    let at = t % 4 * is(Plain::BeyondRegisters) * 2;
    let at = select(at.eq(0u32), 1u32, at);
    sum += kept[at];
    z.atomic(AtomicOp::Add, t + is(Plain::AtomicPast), sum.get());
    if how.is(Plain::ReadsOutput) {
        sum += y[t];
    }
    if how.is(Plain::SameElement) {
        y[t / 2] = 1;
    } else {
        y.set_vec(t * 4 + is(Plain::MisalignedStore), &[sum.get(), four[0], four[2], four[3]]);
    }
}

fn plainly(how: Plain) -> (Kernel, Numbers, Vec<Buffer>) {
    let x: Vec<u32> = (0..132).collect();
    let zeros = |len| Buffer::zeros(Scalar::U32, len);
    (plain(how).record(), Numbers::new(), vec![Buffer::words(&x), zeros(132), zeros(32)])
}

mistakes!(Matrix: Right NoBarrier Past Unset);

/// A product through shared memory.
#[kernel]
fn matrix(x: In<{ Scalar::F16 }>, y: Out<f32>, how: Matrix) {
    groups_of(1, 32);
    let sums = Frags::accumulators(1, 0.0);
    let past = u32::from(how.is(Matrix::Past));
    let (a, b) = (Frag::left(x, 0u32, 16u32), Frag::right_transposed(x, past, 16u32));
    sums.set(0, sums.get(0).mma(a, b));
    let stage = Shared::<f32>::named("stage", 256);
    if !how.is(Matrix::Unset) {
        sums.get(0).store(stage, 0u32, 16u32);
    }
    if !how.is(Matrix::NoBarrier) {
        simd_barrier();
    }
    for i in range(0u32, 8u32) {
        y[lane_id() * 8 + i] = stage[lane_id() * 8 + i];
    }
}

fn multiplied(how: Matrix) -> (Kernel, Numbers, Vec<Buffer>) {
    let x = Buffer::floats(Scalar::F16, &[1.0; 256]);
    (matrix(how).record(), Numbers::new(), vec![x, Buffer::zeros(Scalar::F32, 256)])
}

mistakes!(Warps: Right NoAsyncFence LateAsyncFence NoBarrier NoFence NoWait NoCommit Overwrites NoBarrierAfter Unset Crooked Apart Past NeverWaited);

/// A product of a warpgroup, whose blocks are copied, and a store to one of them afterwards.
#[kernel]
fn warpgroup(x: In<{ Scalar::F16 }>, y: Out<f32>, how: Warps) {
    groups_of(1, 128);
    let (a, b) = (
        Shared::<f32>::stored(Scalar::F16, "a", 4096),
        Shared::<f32>::stored(Scalar::F16, "b", 2048),
    );
    let (row, unit) = (thread_id() / 8, thread_id() % 8);
    for i in range(0u32, 4u32) {
        let at = (i * 16 + row) * 64;
        let to = at + (unit ^ (row % 8)) * 8;
        copy_async(a, to, x, at + unit * 8, 8, None);
        if i < 2 {
            copy_async(b, to, x, at + unit * 8, 8, None);
        }
    }
    copy_commit();
    copy_wait(0);
    if !how.is(Warps::NoAsyncFence) && !how.is(Warps::LateAsyncFence) {
        async_fence();
    }
    if !how.is(Warps::NoBarrier) {
        barrier();
    }
    if how.is(Warps::LateAsyncFence) {
        async_fence();
    }
    let sums = Frags::accumulators(2, 0.0);
    let others = Frags::accumulators(2, 0.0);
    let index = Var::new(group_id());
    if how.is(Warps::Crooked) {
        index.set(group_id() + 64);
    } else if how.is(Warps::Past) {
        index.set(group_id() + 512);
    } else if how.is(Warps::Apart) {
        index.set(simd_id() / 2 * 512);
    }
    if !how.is(Warps::NoFence) {
        wgmma_fence();
    }
    sums.wgmma((a, group_id()), (b, index.get()));
    if !how.is(Warps::NoCommit) {
        wgmma_commit();
    }
    if how.is(Warps::Overwrites) {
        a[thread_id()] = x[thread_id()];
    }
    if how.is(Warps::NeverWaited) {
        others.get(0).store(y, simd_id() * 512, 32u32);
    } else {
        if !how.is(Warps::NoWait) {
            wgmma_wait(0);
        }
        sums.get(0).store(y, simd_id() * 512, 32u32);
        sums.get(1).store(y, simd_id() * 512 + 16, 32u32);
    }
    if !how.is(Warps::NoBarrierAfter) {
        barrier();
    }
    if !how.is(Warps::NeverWaited) {
        a[thread_id()] = x[thread_id()];
    }
}

fn by_warpgroup(how: Warps) -> (Kernel, Numbers, Vec<Buffer>) {
    let x = Buffer::floats(Scalar::F16, &[0.5; 4096]);
    let mut kernel = warpgroup(how).record();
    if how.is(Warps::Unset) {
        // Without the zeros of its second accumulator.
        let mut stores = 0;
        kernel.body.0.retain(|node| {
            let store = matches!(node.inst, Inst::Store { place: Place::Register(0), .. });
            stores += u32::from(store);
            !store || stores != 2
        });
    }
    (kernel, Numbers::new(), vec![x, Buffer::zeros(Scalar::F32, 2048)])
}

#[kernel]
fn contract(x: In<f32>, y: Out<f32>, n: Arg<u32>, m: Const<u32>) {
    launch(Mode::Element, [dim("n").ceil_div(32u32), fixed(1), fixed(1)], 32);
    require(Requirement::Divisible(dim("n"), 32));
    require(Requirement::AtMost(dim("m"), 4));
    require(Requirement::Length("x".to_owned(), dim("n") * dim("m")));
    require(Requirement::Aligned("x".to_owned(), 16));
    let i = group_id() * 32 + lane_id();
    if i < n {
        y[i] = x[i] * m.f32();
    }
}

fn contracted(n: u32, m: u32, len: usize, out: Scalar) -> (Kernel, Numbers, Vec<Buffer>) {
    let buffers = vec![Buffer::floats(Scalar::F32, &vec![1.0; len]), Buffer::zeros(out, 64)];
    (contract().record(), Numbers::new().with("n", n).with("m", m), buffers)
}

/// The right kernels, as written and as lowered for every target.
#[test]
fn the_right_kernels_run() {
    for (kernel, numbers, buffers) in [
        turned(Turn::Right),
        exchanged(Lanes::Right),
        copied(Copies::Right),
        handed(Hand::Right),
        gathered(Gather::Right),
        plainly(Plain::Right),
        multiplied(Matrix::Right),
        by_warpgroup(Warps::Right),
        contracted(64, 2, 128, Scalar::F32),
    ] {
        let expected = vec![];
        let case = tile::case::Case { kernel, label: "right".into(), numbers, buffers, expected };
        interp::check(&case).unwrap();
    }
}

/// What is launched, the array or operation that must be named, and the words that must be said.
#[test]
fn every_mistake_is_found_where_it_is_made() {
    let mut contracts = vec![
        (contracted(48, 2, 128, Scalar::F32), "", "n divisible by 32, found n is 48"),
        (contracted(64, 5, 320, Scalar::F32), "", "m at most 4, found m is 5"),
        (contracted(64, 3, 128, Scalar::F32), "", "x holds n * m, found 128, not 192"),
        (contracted(0, 2, 128, Scalar::F32), "", "grid axis 0 is 0"),
        (contracted(64, 2, 128, Scalar::F16), "", "y holds f32, but 128 bytes of f16 are bound"),
        (contracted(64, 2, 128, Scalar::F32), "", "no value for argument `n`"),
        (contracted(64, 2, 128, Scalar::F32), "", "2 buffers expected, 1 bound"),
        (contracted(64, 2, 128, Scalar::F32), "", "a multiple of 32 from 32 to 1024 expected"),
        (contracted(64, 2, 128, Scalar::F32), "store", "x"),
    ];
    contracts[5].0.1 = Numbers::new().with("m", 2);
    contracts[6].0.2.pop();
    contracts[7].0.0.launch.threads = 33;
    writes_its_input(&mut contracts[8].0.0);
    let others = [
        (turned(Turn::NoStore), "loads row[63]", "which nothing has written"),
        (turned(Turn::NoBarrier), "loads row[63]", "thread 63 wrote with no barrier between"),
        (turned(Turn::NoSecondBarrier), "stores row[0]", "thread 63 read with no barrier between"),
        (turned(Turn::SimdBarrier), "loads row[63]", "thread 63 wrote with no barrier between"),
        (turned(Turn::ReadPast), "loads x[128]", "out of bounds: it has 128 elements"),
        (turned(Turn::WritePast), "stores y[64]", "of group (0, 0, 0) wrote in the same launch"),
        (turned(Turn::OtherLane), "stores row[0]", "thread 0 wrote with no barrier between"),
        (turned(Turn::Divergent), "barrier", "threads"),
        (exchanged(Lanes::NoBarrier), "loads own[31]", "thread 31 wrote with no barrier between"),
        (exchanged(Lanes::Branch), "shuffle", "lanes"),
        (exchanged(Lanes::Loop), "sum", "lanes"),
        (exchanged(Lanes::FarLane), "thread 31", "a shuffle from lane 32"),
        (copied(Copies::NoWait), "loads second[1]", "copy of thread 0 is not finished"),
        (copied(Copies::TooFew), "loads second[1]", "copy of thread 0 is not finished"),
        (copied(Copies::NoBarrier), "loads second[2]", "thread 0 wrote with no barrier between"),
        (copied(Copies::Overwrites), "stores first[0]", "copy of thread 0 is not finished"),
        (copied(Copies::Misaligned), "4 lanes at x[2]", "misaligned"),
        (copied(Copies::NeverRead), "asynchronous copy", "nothing waits for"),
        (handed(Hand::NoFence), "loads parts[0]", "of group (0, 0, 0) wrote in the same launch"),
        (handed(Hand::NoFenceAfter), "loads parts[0]", "of group (0, 0, 0) wrote"),
        (handed(Hand::NoAtomic), "loads parts[0]", "of group (0, 0, 0) wrote in the same launch"),
        (handed(Hand::OwnCounters), "loads parts[0]", "of group (0, 0, 0) wrote"),
        (handed(Hand::PlainCount), "loads count[0]", "of group (0, 0, 0) wrote"),
        (handed(Hand::Together), "stores parts[0]", "of group (0, 0, 0) wrote"),
        (handed(Hand::WriteLate), "loads parts[0]", "of group (0, 0, 0) wrote"),
        (gathered(Gather::FencesBeforeBarrier), "loads parts[1]", "of group (0, 0, 0) wrote"),
        (gathered(Gather::FencesAfterBarrier), "loads parts[1]", "of group (0, 0, 0) wrote"),
        (gathered(Gather::NoBarrier), "loads parts[1]", "of group (0, 0, 0) wrote"),
        (plainly(Plain::Registers), "loads r0[1]", "which nothing has written"),
        (plainly(Plain::SomeRegisters), "thread 9 of group (0, 0, 0) loads r0[1]", "nothing has"),
        (plainly(Plain::BeyondRegisters), "thread 1 of", "loads r0[2]"),
        (plainly(Plain::ReadsOutput), "loads y[0]", "which nothing has written"),
        (plainly(Plain::Misaligned), "4 lanes at x[2]", "must be a multiple of 4"),
        (plainly(Plain::MisalignedStore), "4 lanes at y[1]", "must be a multiple of 4"),
        (plainly(Plain::DividesByZero), "thread 0", "undefined arithmetic: 0 div 0"),
        (plainly(Plain::Shifts), "thread 31", "undefined arithmetic: 125 shr 32"),
        (plainly(Plain::StepZero), "thread 0", "a loop with step 0 never ends"),
        (plainly(Plain::Wraps), "thread 0", "passes 2^32 after 4000000000"),
        (plainly(Plain::AtomicPast), "changes z[32]", "out of bounds: it has 32 elements"),
        (plainly(Plain::SameElement), "stores y[0]", "thread 0 wrote with no barrier between"),
        (multiplied(Matrix::NoBarrier), "loads stage[0]", "wrote with no barrier between"),
        (multiplied(Matrix::Past), "loads a tile at x[256]", "out of bounds"),
        (multiplied(Matrix::Unset), "loads stage[0]", "which nothing has written"),
        (by_warpgroup(Warps::NoAsyncFence), "multiplies a[0]", "thread 0 wrote and did not fence"),
        (by_warpgroup(Warps::LateAsyncFence), "multiplies a[0]", "wrote and did not fence"),
        (
            by_warpgroup(Warps::NoBarrier),
            "multiplies a[0]",
            "thread 0 wrote with no barrier between",
        ),
        (by_warpgroup(Warps::NoFence), "adds to r0[0]", "touched since the last fence"),
        (by_warpgroup(Warps::NoWait), "loads r0[0]", "to which a product still adds"),
        (by_warpgroup(Warps::NoCommit), "loads r0[0]", "to which a product still adds"),
        (by_warpgroup(Warps::Overwrites), "stores a[0]", "which a product still reads"),
        (by_warpgroup(Warps::NoBarrierAfter), "stores a[0]", "read with no barrier between"),
        (by_warpgroup(Warps::Unset), "adds to r0[1]", "which nothing has written"),
        (by_warpgroup(Warps::Crooked), "a block at index 64", "a multiple of 512 expected"),
        (
            by_warpgroup(Warps::Apart),
            "thread 64",
            "the same for the warpgroup: 0 expected, 512 found",
        ),
        (by_warpgroup(Warps::Past), "multiplies b[2559]", "out of bounds: it has 2048 elements"),
        (by_warpgroup(Warps::NeverWaited), "a product", "that nothing waits for"),
    ];
    let in_code = contracts.len() - 1;
    let mut missed = String::new();
    for (i, ((kernel, numbers, mut buffers), what, why)) in
        contracts.into_iter().chain(others).enumerate()
    {
        let fault = match interp::run(&kernel, &numbers, &mut buffers) {
            Ok(stats) => {
                missed += &format!("{what} .. {why}: not found, {stats:?}\n");
                continue;
            }
            Err(fault) => fault,
        };
        let said = fault.to_string();
        println!("{said}");
        let text = kernel.to_text(true);
        let line = text.lines().nth(fault.line.wrapping_sub(1));
        let placed = fault.source.contains("mutants.rs:")
            && line.is_some_and(|line| line.ends_with(&fault.source));
        if !said.contains(what) || !said.contains(why) || (i >= in_code && !placed) {
            missed += &format!("{what} .. {why}: but {said}\n");
        }
    }
    assert!(missed.is_empty(), "{missed}");
}

/// Makes the store go to the input.
fn writes_its_input(kernel: &mut Kernel) {
    fn walk(block: &mut tile::ir::Block) {
        for node in &mut block.0 {
            if let Inst::Store { place, .. } = &mut node.inst {
                *place = Place::Buffer(0);
            }
            node.inst.blocks_mut().into_iter().for_each(walk);
        }
    }
    walk(&mut kernel.body);
}

#[kernel]
fn endless(y: Out<u32>) {
    groups_of(1, 32);
    let mut sum = Var::new(0u32);
    for i in range(0u32, u32::MAX - 1) {
        sum += i;
    }
    y[lane_id()] = sum.get();
}

#[test]
fn runaway_loops_are_stopped() {
    let machine = CompiledKernel::new(&endless().record()).unwrap().budget(100_000);
    let mut buffers = [Buffer::zeros(Scalar::U32, 32)];
    let fault = machine.run(&Numbers::new(), &mut buffers).unwrap_err();
    assert!(fault.to_string().contains("more than 100000 instructions"), "{fault}");
    assert!(fault.source.contains("mutants.rs:"));
}

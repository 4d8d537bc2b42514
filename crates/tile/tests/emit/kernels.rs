//! Kernels that between them hold every instruction.

use tile::dsl::*;
use tile::ir::{AtomicOp, Block, Inst, Kernel, LoadHint, Reduce};
use tile::launch::{Mode, Requirement};
use tile::types::{Role, Scalar, Tile, Type};

/// All of them, with tiles as the language has them.
pub(crate) fn all() -> Vec<Kernel> {
    let mut kernels = vec![
        rms_norm(Scalar::F16, 256).record(),
        numbers().record(),
        casts().record(),
        vectors().record(),
        lanes().record(),
        control().record(),
        hand_over().record(),
        copies().record(),
        product(Scalar::BF16).record(),
        attention(Scalar::F16).record(),
        warpgroups().record(),
        words(Scalar::F16).record(),
        words(Scalar::BF16).record(),
    ];
    // The language has no way to load an accumulator yet, the representation has: f32 operands
    // become some.
    retype(&mut kernels, &|tile| match (tile.role, tile.scalar) {
        (Role::A, Scalar::F32) => Tile { role: Role::C, ..tile },
        _ => tile,
    });
    kernels
}

/// The same kernels with every tile 8 x 8 instead of 16 x 16, without products of warpgroups: what
/// Metal takes.
pub(crate) fn for_metal() -> Vec<Kernel> {
    let mut kernels = all();
    kernels.retain(|kernel| !kernel.has_wgmma());
    retype(&mut kernels, &|tile| Tile::sized(tile.scalar, tile.role, 8));
    kernels
}

/// Changes the type of every tile.
fn retype(kernels: &mut [Kernel], f: &dyn Fn(Tile) -> Tile) {
    let change = |ty: &mut Type| {
        if let Type::Tile(tile) = ty {
            *tile = f(*tile);
        }
    };
    fn walk(block: &mut Block, change: &dyn Fn(&mut Type)) {
        for node in &mut block.0 {
            match &mut node.inst {
                Inst::Splat(ty, _)
                | Inst::TileLoad { ty, .. }
                | Inst::TileRow(ty)
                | Inst::TileCol(ty)
                | Inst::ToLeft(ty, _) => change(ty),
                Inst::TileOf(ty, words) => {
                    change(ty);
                    words.truncate(ty.tile().map_or(4, |tile| tile.elements() / 64));
                }
                _ => {}
            }
            node.inst.blocks_mut().into_iter().for_each(|block| walk(block, change));
        }
    }
    for kernel in kernels {
        kernel.values.iter_mut().for_each(change);
        kernel.registers.iter_mut().for_each(|array| change(&mut array.ty));
        walk(&mut kernel.body, &change);
    }
}

/// A row reduced by a threadgroup, with constants of two types.
#[kernel]
fn rms_norm(
    x: In<{ scalar }>,
    weight: In<{ scalar }>,
    y: Out<{ scalar }>,
    width: Const<u32>,
    eps: Const<f32>,
    scalar: Scalar,
    group: u32,
) {
    launch(Mode::Row, [dim("rows"), fixed(1), fixed(1)], group);
    require(Requirement::Divisible(dim("width"), 8));
    let row = group_id() * width;
    let mut sum = Var::new(0.0);
    for i in strided(width) {
        let v = x[row + i];
        sum += v * v;
    }
    let scale = (group_sum(sum.get()) / width.f32() + eps).rsqrt();
    for i in strided(width) {
        y[row + i] = x[row + i] * scale * weight[i];
    }
}

/// Every operation on numbers: f32 to `y`, i32 to `z`, u32 to `w`, 32 results of each thread apart.
#[kernel]
fn numbers(
    a: In<f32>,
    b: In<i32>,
    c: In<u32>,
    y: Out<f32>,
    z: Out<i32>,
    w: Out<u32>,
    by: Arg<f32>,
    shift: Arg<i32>,
) {
    launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 32);
    let t = thread_id();
    let (p, q) = (a[t], a[t + 32]);
    let size = p.abs() + 0.5;
    let floats = [
        -p,
        size,
        p.exp(),
        p.exp2(),
        size.ln(),
        size.log2(),
        p.sin(),
        p.cos(),
        p.tanh(),
        size.sqrt(),
        size.rsqrt(),
        p.floor(),
        p.ceil(),
        p.round(),
        p + q,
        p - q,
        p * q,
        p / size,
        p.min(q),
        p.max(q),
        p.fma(q, by),
        p - (q - by),
        p / (size / 2.0),
        -(-p),
        (p + q) * (p - q),
        p.max(f32::NEG_INFINITY).min(f32::INFINITY),
        select(p.lt(q), p, q),
        select(p.eq(q), 1.0, -1.5e-7),
        p - -q,
    ];
    for (i, v) in floats.into_iter().enumerate() {
        y[t + 32 * i as u32] = v;
    }
    let (i, j) = (b[t], b[t + 32]);
    let odd = (j & 15) | 1;
    let signed = [
        -i,
        i ^ -1,
        i + j,
        i - j,
        i * j,
        i / odd,
        i % odd,
        i.min(j),
        i.max(j),
        i & j,
        i | j,
        i ^ j,
        i << (j & 7),
        i >> shift,
        i - (j - 3),
        (i + j) * 5,
        select(i.lt(j), i, i32::MIN),
        select(i.ge(j), j, -1),
    ];
    for (k, v) in signed.into_iter().enumerate() {
        z[t + 32 * k as u32] = v;
    }
    let (m, n) = (c[t], c[t + 32]);
    let some = (n & 15) | 1;
    let bytes: [u8; 16] = std::array::from_fn(|i| (i * 17) as u8);
    let unsigned = [
        !m,
        m.count_ones(),
        m.leading_zeros(),
        m + n,
        m - n,
        m * n,
        m / some,
        m % some,
        m.min(n),
        m.max(n),
        m & n,
        m | n,
        m ^ n,
        m << (n & 7),
        m >> (n & 7),
        m.mul_hi(n),
        select(m.gt(n), m, 7u32),
        select(m.ne(n), n, u32::MAX),
        m - (n - 3),
        m / (some % 4 + 1),
        (m & 3) << 4 | n >> 28,
        (m.count_ones() - n.count_ones()) >> 1,
        select(m.le(n) & p.lt(q) | !i.eq(j), 1u32, 0u32),
        select(m.lt(n) ^ p.gt(q), 1u32, 0u32),
        m.lookup(bytes),
        (m >> 16).lookup(bytes.map(|byte| byte / 2)),
    ];
    for (k, v) in unsigned.into_iter().enumerate() {
        w[t + 32 * k as u32] = v;
    }
    z[t + 32 * 18] = m.dot4(n, i);
}

/// Conversions between every pair of types that differs in kind.
#[kernel]
fn casts(
    x: In<f32>,
    h: Out<{ Scalar::F16 }>,
    r: Out<{ Scalar::BF16 }>,
    s: Out<{ Scalar::I8 }>,
    u: Out<{ Scalar::U8 }>,
    m: Out<{ Scalar::I16 }>,
    n: Out<{ Scalar::U16 }>,
    i: Out<i32>,
    w: Out<u32>,
    f: Out<f32>,
) {
    launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 32);
    let t = thread_id();
    let v = x[t];
    h[t] = v;
    r[t] = v;
    s[t] = v;
    u[t] = v;
    m[t] = v;
    n[t] = v;
    i[t] = v.i32();
    w[t] = v.u32();
    // What was stored, read again and converted.
    let sum = h[t] + r[t] + s[t] + u[t] + m[t] + n[t];
    f[t] = sum;
    f[t + 32] = i[t].f32() + w[t].f32();
    i[t + 32] = s.get_raw(t).i32() + m.get_raw(t).i32() + u.get_raw(t).i32() + n.get_raw(t).i32();
    w[t + 32] = s.get_raw(t).u32()
        ^ h.get_raw(t).bits::<u16>().u32()
        ^ (r.get_raw(t).bits::<u16>().u32() << 16);
    h.set_raw(t + 32, i[t].to(Scalar::F16));
    s.set_raw(t + 32, i[t].to(Scalar::I8));
    u.set_raw(t + 32, w[t].to(Scalar::U8));
    m.set_raw(t + 32, i[t].to(Scalar::I16));
    n.set_raw(t + 32, w[t].to(Scalar::U16));
    r.set_raw(t + 32, h.get_raw(t).to(Scalar::BF16));
    w[t + 64] = v.bits::<u32>() ^ i[t].bits::<u32>() ^ v.cast::<bool>().u32();
    f[t + 64] = w[t + 64].bits::<i32>().cast::<bool>().f32();
}

/// Vectors of every width, with hints.
#[kernel]
fn vectors(
    a: In<{ Scalar::F16 }>,
    b: In<{ Scalar::I8 }>,
    c: In<{ Scalar::U8 }>,
    d: In<{ Scalar::BF16 }>,
    e: In<f32>,
    y: Out<f32>,
    h: Out<{ Scalar::F16 }>,
    g: Out<{ Scalar::I8 }>,
    k: Out<{ Scalar::BF16 }>,
) {
    launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 32);
    for name in ["a", "b", "c", "d", "e", "y", "h", "g", "k"] {
        require(Requirement::Aligned(name.to_owned(), 16));
    }
    let t = thread_id();
    let mut sum = Var::new(0.0);
    for v in a.get_vec(t * 8, 8, LoadHint::Stream) {
        sum += v;
    }
    for v in b.get_vec(t * 16, 16, LoadHint::None) {
        sum += v;
    }
    for v in c.get_vec(t * 4, 4, LoadHint::Stream) {
        sum += v;
    }
    for v in d.get_vec(t * 2, 2, LoadHint::None) {
        sum += v;
    }
    let floats = e.get_vec(t * 4, 4, LoadHint::Stream);
    for v in &floats {
        sum += *v;
    }
    for v in d.get_vec(t * 4, 4, LoadHint::None) {
        sum += v;
    }
    sum += a.get_with(t, LoadHint::Stream) + b.get_vec(t * 2, 2, LoadHint::None)[1];
    y.set_vec(t * 4, &[sum.get(), floats[3], floats[2], floats[1]]);
    let halves: Vec<Val<Raw>> = a.get_raw_vec(t * 8, 8, LoadHint::None).into_iter().rev().collect();
    h.set_raw_vec(t * 8, &halves);
    let bytes: Vec<Val<Raw>> =
        b.get_raw_vec(t * 16, 16, LoadHint::None).into_iter().rev().collect();
    g.set_raw_vec(t * 16, &bytes);
    k.set_vec(t * 2, &[floats[0], floats[1]]);
}

/// Exchanges between lanes.
#[kernel]
fn lanes(x: In<f32>, n: In<u32>, y: Out<f32>, m: Out<u32>, s: Out<i32>) {
    launch(Mode::Element, [fixed(2), fixed(1), fixed(1)], 64);
    let at = group_id() * 64 + thread_id();
    let (v, c) = (x[at], n[at]);
    y[at] = simd_sum(v);
    y[at + 128] = simd_max(v);
    y[at + 256] = simd_reduce(Reduce::Min, v);
    y[at + 384] = shuffle(v, lane_id() ^ 5);
    y[at + 512] = shuffle_xor(v, 16);
    m[at] = simd_sum(c);
    m[at + 128] = simd_max(c);
    m[at + 256] = simd_prefix_sum(c);
    m[at + 384] = ballot(v.gt(0.0));
    m[at + 512] =
        select(simd_any(v.gt(0.9)), 1u32, 0u32) + select(simd_all(v.gt(-0.9)), 2u32, 0u32);
    m[at + 640] = groups(0) * simd_id();
    let i = c.bits::<i32>();
    s[at] = simd_sum(i);
    s[at + 128] = simd_reduce(Reduce::Min, i);
    s[at + 256] = simd_prefix_sum(i);
}

/// Branches, loops, registers and shared memory.
#[kernel]
fn control(x: InOut<f32>, n: Arg<u32>) {
    launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 64);
    let held = Shared::<f32>::named("held", 64);
    let t = thread_id();
    let regs = Regs::<f32>::new(4, 0.0);
    for i in range(0u32, 4u32).unroll() {
        regs[i] = x[t + i * 64] * 2.0;
    }
    held[t] = regs[3u32] + regs[0u32];
    barrier();
    let mut best = Var::new(f32::NEG_INFINITY);
    for i in range(t % 4, n).step(2u32) {
        let v = held[i];
        if v > best.get() {
            best = v;
        } else if v < -1.0 {
            best += 0.25;
        } else {
            regs[1u32] = v;
        }
    }
    simd_barrier();
    let before = best.get();
    best = 3.0;
    if before == f32::NEG_INFINITY {
        best = 0.0;
    }
    x[t] = best.get() + before.max(-100.0) + regs[1u32] + held[63u32 - t];
}

/// Twice each element, once the kernel in front is done.
#[kernel]
pub(crate) fn doubled(x: In<f32>, y: Out<f32>) {
    launch(Mode::Row, [dim("groups"), fixed(1), fixed(1)], 32);
    grid_wait();
    let at = group_id() * 32 + lane_id();
    y[at] = x.get_with(at, LoadHint::Coherent) * 2.0;
}

/// The last threadgroup to arrive adds up what all have left; atomics of every kind.
#[kernel]
pub(crate) fn hand_over(
    x: In<f32>,
    partial: InOut<f32>,
    arrived: InOut<u32>,
    extremes: InOut<i32>,
    y: InOut<f32>,
) {
    launch(Mode::Row, [dim("groups"), fixed(1), fixed(1)], 32);
    let last = Shared::<u32>::named("last", 1);
    let counts = Shared::<u32>::named("counts", 4);
    grid_trigger();
    grid_wait();
    let at = group_id() * 32 + lane_id();
    let v = x.get_with(at, LoadHint::Coherent);
    let sum = simd_sum(v);
    if lane_id() < 4 {
        counts[lane_id()] = 0;
    }
    barrier();
    counts.atomic(AtomicOp::Add, lane_id() % 4, 1u32);
    barrier();
    if lane_id() == 0 {
        partial[group_id()] = sum;
        fence();
        last[0u32] = arrived.atomic(AtomicOp::Add, 0u32, 1u32);
        extremes.atomic(AtomicOp::Max, 0u32, (sum * 100.0).i32());
        extremes.atomic(AtomicOp::Min, 1u32, (sum * 100.0).i32());
        arrived.atomic(AtomicOp::Exchange, 1u32, counts[3u32]);
        y.atomic(AtomicOp::Add, 1u32, sum);
        fence();
    }
    barrier();
    if last[0u32] == groups(0) - 1 {
        let mut total = Var::new(0.0);
        for i in range(0u32, groups(0)) {
            total += partial.get_with(i, LoadHint::Coherent);
        }
        if lane_id() == 0 {
            y[0u32] = total.get();
        }
    }
}

/// Atomics and loads of one buffer with a fence between them, for which Metal has no one type.
#[kernel]
pub(crate) fn tally(counts: InOut<u32>) {
    launch(Mode::Row, [fixed(2), fixed(1), fixed(1)], 32);
    counts.atomic(AtomicOp::Add, thread_id(), 1u32);
    fence();
    counts[thread_id() + 32] = counts.get_with(thread_id(), LoadHint::Coherent);
}

/// Asynchronous copies of every size, double-buffered.
#[kernel]
fn copies(x: In<{ Scalar::F16 }>, z: In<f32>, y: Out<f32>, n: Arg<u32>) {
    launch(Mode::Row, [dim("groups"), fixed(1), fixed(1)], 64);
    let wide = Shared::<f32>::stored(Scalar::F16, "wide", 2 * 512);
    let small = Shared::<f32>::named("small", 64 * 3);
    let t = thread_id();
    let mut sum = Var::new(0.0);
    copy_async(wide, t * 8, x, t * 8, 8, None);
    copy_async(small, t, z, t, 1, None);
    copy_async(small, t * 2 + 64, z, t * 2, 2, Some(t.lt(n)));
    copy_commit();
    for i in range(0u32, 4u32) {
        let next = i + 1;
        copy_async(wide, next % 2 * 512 + t * 8, x, next * 512 + t * 8, 8, Some(next.lt(4u32)));
        copy_commit();
        copy_wait(1);
        barrier();
        for v in wide.get_vec(i % 2 * 512 + (63u32 - t) * 8, 8, LoadHint::None) {
            sum += v;
        }
        barrier();
    }
    copy_wait(0);
    barrier();
    y[t] = sum.get() + small[63u32 - t] + small[64u32 + 127u32 - t];
}

/// Shared memory by the kilobyte, under names that are taken.
#[kernel]
pub(crate) fn hoard(half: Out<f32>, v1: Arg<u32>, len: u32) {
    launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 32);
    let held = Shared::<f32>::named("for", len);
    held[thread_id()] = 1.0;
    barrier();
    half[thread_id()] = held[v1];
}

/// Two products of two warpgroups, one under way while the next begins: the block of `a` twice, by
/// 32 and by 16 rows of `b`; and one of what lanes hold.
#[kernel]
fn warpgroups(a: In<{ Scalar::BF16 }>, b: In<{ Scalar::BF16 }>, y: Out<f32>) {
    launch(Mode::Tile, [fixed(1), fixed(1), fixed(1)], 256);
    let left = Shared::<f32>::stored(Scalar::BF16, "left", 2 * 64 * 64);
    let right = Shared::<f32>::stored(Scalar::BF16, "right", 48 * 64);
    let (row, unit) = (thread_id() / 8, thread_id() % 8);
    let spot = (unit ^ (row % 8)) * 8;
    for i in range(0u32, 4u32) {
        let at = (i * 32 + row) * 64;
        copy_async(left, at + spot, a, at + unit * 8, 8, None);
        if i * 32 + row < 48 {
            copy_async(right, at + spot, b, at + unit * 8, 8, None);
        }
    }
    copy_commit();
    copy_wait(0);
    async_fence();
    barrier();
    let (wide, narrow) = (Frags::accumulators(2, 0.0), Frags::accumulators(1, 1.0));
    wgmma_fence();
    let from = simd_id() / 4 * (64 * 64);
    wide.wgmma((left, from), (right, 0u32.val()));
    wgmma_commit();
    narrow.wgmma((left, from), (right, (32u32 * 64).val()));
    wgmma_commit();
    wgmma_wait(1);
    let to = simd_id() * 16 * 48;
    wide.get(0).store(y, to, 48u32);
    wide.get(1).store(y, to + 16, 48u32);
    let held = Frag::left_of(Scalar::BF16, [thread_id(), from, to, thread_id()]);
    wgmma_fence();
    wide.wgmma_of(&[held; 4], (right, 0u32.val()));
    wgmma_commit();
    wgmma_wait(0);
    narrow.get(0).store(y, to + 32, 48u32);
}

/// `y = a b + c`, `a` from shared memory, `b` transposed from global memory and plain from shared.
#[kernel]
pub(crate) fn product(
    a: In<{ scalar }>,
    b: In<{ scalar }>,
    c: In<f32>,
    y: Out<{ scalar }>,
    z: Out<f32>,
    depth: Const<u32>,
    scalar: Scalar,
) {
    launch(Mode::Tile, [fixed(1), fixed(1), fixed(1)], 32);
    require(Requirement::Divisible(dim("depth"), 16));
    require(Requirement::Aligned("b".to_owned(), 16));
    require(Requirement::Aligned("z".to_owned(), 16));
    let left = Shared::<f32>::stored(scalar, "left", 16 * 24);
    let right = Shared::<f32>::stored(scalar, "right", 16 * 24);
    let acc = Frags::accumulators(2, 0.0);
    acc.set(1, Frag::filled(1.0));
    let lane = lane_id();
    for k in range(0u32, depth).step(16u32) {
        for i in range(0u32, 8u32).unroll() {
            let at = i * 32 + lane;
            let (r, q) = (at / 16, at % 16);
            left.set_raw(r * 24 + q, a.get_raw(r * depth + k + q));
            right.set_raw(q * 24 + r, b.get_raw(r * depth + k + q));
        }
        barrier();
        let l = Frag::left(left, 0u32, 24u32);
        acc.set(0, acc.get(0).mma(l, Frag::right_transposed(b, k, depth)));
        acc.set(1, acc.get(1).mma(l, Frag::right(right, 0u32, 24u32)));
        // Without alignment, and the other way round, from global memory.
        let l = Frag::left(a, k, depth);
        let r = Frag::right(right, 0u32, 24u32);
        acc.set(1, acc.get(1).mma(l, r));
        barrier();
    }
    acc.get(0).store(y, 0u32, 16u32);
    (acc.get(1) + Frag::left(c, 0u32, 16u32)).store(z, 0u32, 16u32);
}

/// One step of attention on tiles: masked scores, row statistics, a second product.
#[kernel]
fn attention(
    q: In<{ scalar }>,
    k: In<{ scalar }>,
    v: In<{ scalar }>,
    y: Out<f32>,
    limit: Arg<u32>,
    scale: Arg<f32>,
    scalar: Scalar,
) {
    launch(Mode::Tile, [fixed(1), fixed(1), fixed(1)], 32);
    let values = Shared::<f32>::stored(scalar, "values", 256);
    for i in range(0u32, 8u32) {
        values.set_raw(i * 32 + lane_id(), v.get_raw(i * 32 + lane_id()));
    }
    barrier();
    let scores =
        Frag::filled(0.0).mma(Frag::left(q, 0u32, 16u32), Frag::right_transposed(k, 0u32, 16u32));
    let (rows, cols) = (Frag::row_numbers(), Frag::col_numbers());
    let seen = cols.le(rows).and(cols.lt(Frag::filled_u32(limit)));
    let scores = seen.select(scores * Frag::filled(scale), Frag::filled(f32::NEG_INFINITY));
    let most = Frags::new(1, Frag::rows(-1.0e30));
    let top = most.get(0).max(scores.reduce_rows(Reduce::Max));
    most.set(0, top);
    let weights = (scores - top.across()).map(tile::instr::UnaryOp::Exp);
    let total = weights.reduce_rows(Reduce::Sum);
    let mixed = Frag::filled(0.0).mma(weights.to_left(scalar), Frag::right(values, 0u32, 16u32));
    (mixed / total.across()).store(y, 0u32, 16u32);
}

/// A product whose operands are the lanes' own words.
#[kernel]
fn words(x: In<f32>, y: Out<f32>, scalar: Scalar) {
    launch(Mode::Tile, [fixed(1), fixed(1), fixed(1)], 32);
    let word = |i: u32| {
        let at = i * 64 + lane_id() * 2;
        x[at].pack(x[at + 1], scalar)
    };
    let left = Frag::left_of(scalar, [word(0), word(1), word(2), word(3)]);
    let right = Frag::right_of(scalar, [word(4), word(5), word(6), word(7)]);
    Frag::filled(0.0).mma(left, right).store(y, 0u32, 16u32);
}

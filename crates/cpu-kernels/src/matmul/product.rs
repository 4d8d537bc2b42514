//! The quantised product: one core for every format, processor and number of tokens.
//!
//! ```text
//! y[t][r] = sum over sub-blocks of  s_w s_x (codes_w - zero) . codes_x  +  m_w s_x sum(codes_x)
//! ```
//!
//! The dot product of a sub-block is exact in integers; the accumulator starts at
//! `-zero * sum(codes_x)`, which the activations carry. [`tile`] does it for `P` panels by `N`
//! tokens. It reads the packed weights in place ([`in_place`]), or panels that were first expanded
//! to bytes and f32 scales in cache ([`many`]), so that every format prefills alike: tiles of slabs
//! are compiled for each [`Form`], not for each format. On either path each token's sums are one
//! chain, whatever `P` and `N` are. Float weights: `float`.

use super::activations::{Line, Path, TOKENS};
use super::lanes::Lanes;
use super::layout::{GROUP, Packed};
use super::{BLOCK, Call};
use formats::quant::{BlockFormat, Offset};
use std::marker::PhantomData;
use std::ops::Range;

/// A source of weights for [`tile`]: groups of at most [`GROUP`] blocks of 32 columns by 16 rows.
///
/// # Safety
/// Callers pass a panel that holds the group, block and sub-block they name, on a processor that
/// has `L`.
pub(super) trait Source<L: Lanes> {
    /// An opened group.
    type Group: Copy;
    /// Columns per scale.
    const SUB: usize;
    /// Whether sub-blocks have offsets.
    const OFFSETS: bool;
    /// The zero point that [`Source::quad`] leaves in codes, a power of two; 0 for none.
    const ZERO: u8;
    /// Bits of a code.
    const BITS: usize;
    /// Whether [`Source::quad`] gives codes less 128, so that they are signed, though they have no
    /// zero point.
    const LOWERED: bool;

    /// The distance, in bytes and wrapping, from group `g` of a panel of `blocks` blocks to the
    /// data to prefetch, if `panels` panels are read side by side.
    fn ahead(g: usize, blocks: usize, panels: usize) -> usize;
    /// Opens group `g`, which has `blocks` blocks and prefetches at distance `ahead`.
    unsafe fn group(panel: *const u8, g: usize, blocks: usize, ahead: usize) -> Self::Group;
    /// Prefetches the cache lines ahead of block `b`.
    unsafe fn fetch(group: Self::Group, b: usize);
    /// Quad `q` (columns `4 q..4 q + 4`) of block `b`.
    unsafe fn quad(group: Self::Group, b: usize, q: usize) -> L::Bytes;
    /// Scales of sub-block `h` of block `b`.
    unsafe fn scale(group: Self::Group, b: usize, h: usize) -> L::Floats;
    /// Offsets of sub-block `h` of block `b`.
    unsafe fn offset(group: Self::Group, b: usize, h: usize) -> L::Floats;
}

/// `P` panels times `N` tokens over `blocks` blocks. Block `b` of token `t` is `x[b * step + t]`.
///
/// # Safety
/// The panels and lines are readable and the processor has `L`.
#[inline(always)]
unsafe fn tile<L: Lanes, S: Source<L>, const P: usize, const N: usize>(
    panels: [*const u8; P],
    blocks: usize,
    mut x: *const Line,
    step: usize,
) -> [[L::Floats; N]; P] {
    // SAFETY: the caller's promise covers every block below `blocks` and every lane below `N`.
    unsafe {
        let mut acc = [[L::splat(0.0); N]; P];
        let mut g = 0;
        while g * GROUP < blocks {
            let (n, ahead) = (GROUP.min(blocks - g * GROUP), S::ahead(g, blocks, P));
            let mut groups = [S::group(panels[0], g, n, ahead); P];
            each!(
                p < P,
                if p > 0 {
                    groups[p] = S::group(panels[p], g, n, ahead)
                }
            );
            let mut b = 0;
            while b < n {
                each!(p < P, S::fetch(groups[p], b));
                let (mut sums, mut runs) = ([[L::ints(0); N]; P], [[L::ints(0); N]; P]);
                // Unrolled in the source for vector units, so that the bit position of each quad is
                // a constant.
                macro_rules! quads {
                    ($($q:expr),*) => {$({
                        let (h, within, depth) = ($q * 4 / S::SUB, $q % (S::SUB / 4), L::depth(S::BITS));
                        if within == 0 {
                            start::<L, S, P, N>(x, h, &mut sums);
                        }
                        let mut codes = [S::quad(groups[0], b, $q); P];
                        each!(p < P, if p > 0 { codes[p] = S::quad(groups[p], b, $q) });
                        each!(t < N, {
                            let word = x.add(t).cast::<i32>().add($q).read();
                            each!(p < P, {
                                let (sum, mut run) = (sums[p][t], runs[p][t]);
                                if within % depth == 0 {
                                    run = L::open(S::BITS, sum);
                                }
                                run = L::dot(S::BITS, run, codes[p], word);
                                runs[p][t] = run;
                                if (within + 1) % depth.min(S::SUB / 4) == 0 {
                                    sums[p][t] = L::close(S::BITS, sum, run);
                                }
                            });
                        });
                        if within + 1 == S::SUB / 4 {
                            scale::<L, S, P, N>(&groups, b, h, x, &sums, &mut acc);
                        }
                    })*};
                }
                if L::UNROLLED {
                    quads!(0, 1, 2, 3, 4, 5, 6, 7);
                } else {
                    let mut q = 0;
                    while q < 8 {
                        quads!(q);
                        q += 1;
                    }
                }
                x = x.add(step);
                b += 1;
            }
            g += 1;
        }
        acc
    }
}

/// Writes the initial sums of sub-block `h` of the block of lines at `x`.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn start<L: Lanes, S: Source<L>, const P: usize, const N: usize>(
    x: *const Line,
    h: usize,
    sums: &mut [[L::Ints; N]; P],
) {
    // SAFETY: the caller's promise.
    unsafe {
        each!(t < N, {
            let line = x.add(t);
            let first = if !S::LOWERED && S::ZERO == 0 {
                0
            } else {
                let bias = if S::SUB == BLOCK { (*line).bias } else { (*line).half_bias[h] };
                // A line's bias is for zero point 128.
                if S::ZERO > 0 { bias >> S::ZERO.leading_zeros() } else { -bias }
            };
            let first = L::ints(first);
            each!(p < P, sums[p][t] = first);
        });
    }
}

/// Adds the sums of sub-block `h` of block `b` to the results, scaled, and its offsets.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn scale<L: Lanes, S: Source<L>, const P: usize, const N: usize>(
    groups: &[S::Group; P],
    b: usize,
    h: usize,
    x: *const Line,
    sums: &[[L::Ints; N]; P],
    acc: &mut [[L::Floats; N]; P],
) {
    // SAFETY: the caller's promise.
    unsafe {
        each!(p < P, {
            let scale = S::scale(groups[p], b, h);
            each!(t < N, {
                let scale = L::mul(scale, L::splat((*x.add(t)).scale));
                acc[p][t] = L::fma(L::floats(sums[p][t]), scale, acc[p][t]);
            });
            if S::OFFSETS {
                let offset = S::offset(groups[p], b, h);
                each!(t < N, {
                    let line = x.add(t);
                    let sum = if S::SUB == BLOCK { (*line).sum } else { (*line).half_sum[h] };
                    acc[p][t] = L::fma(offset, L::splat(sum), acc[p][t]);
                });
            }
        });
    }
}

/// The product one token at a time: short code for units that gain nothing from tiles.
///
/// # Safety
/// As [`super::multiply`], on a processor that has `L`.
#[inline(always)]
pub(super) unsafe fn one_by_one<L: Lanes, B: BlockFormat>(call: &Call) {
    for token in call.tokens.clone() {
        // SAFETY: passed on.
        unsafe { columns::<L, B, 1, 1>(call, call.panels.clone(), token) }
    }
}

/// The product for any number of tokens.
///
/// # Safety
/// As [`super::multiply`], on a processor that has `L`.
#[inline(always)]
pub(super) unsafe fn product<L: Lanes, B: BlockFormat>(call: &Call) {
    // SAFETY: passed on.
    unsafe {
        match call.x.path() {
            Path::InPlace => in_place::<L, B>(call),
            Path::Expanded | Path::Exact | Path::Rounded => many::<L, B>(call),
        }
    }
}

/// Tokens that one pass over the weights in place serves.
const FEW: usize = 8;

/// Panels that are read side by side, and that later passes find in cache.
const BESIDE: usize = 4;

/// A few tokens: every panel is read once for up to 8 of them, several panels side by side. One
/// stream of cache lines leaves a third of a core's memory bandwidth unused; four come close to all
/// of it.
///
/// # Safety
/// As [`product`].
#[inline(always)]
pub(super) unsafe fn in_place<L: Lanes, B: BlockFormat>(call: &Call) {
    // If one pass does not serve all tokens, the weights still come from memory only once.
    let together = if call.tokens.len() <= FEW { call.panels.len() } else { BESIDE };
    for first in call.panels.clone().step_by(together.max(1)) {
        let panels = first..call.panels.end.min(first + together);
        // SAFETY: passed on.
        unsafe { passes::<L, B>(call, panels) }
    }
}

/// All tokens times some panels, up to [`FEW`] of them in a pass.
#[inline(always)]
unsafe fn passes<L: Lanes, B: BlockFormat>(call: &Call, panels: Range<usize>) {
    let group = call.x.group();
    let mut token = call.tokens.start;
    while token < call.tokens.end {
        let (lane, left) = (token % group, call.tokens.end - token);
        // Round up if the group has spare lanes; their results are dropped.
        let mut n = left.next_power_of_two().min(FEW);
        while lane + n > group {
            n /= 2;
        }
        let panels = panels.clone();
        // SAFETY: lanes `lane..lane + n` belong to one group.
        unsafe {
            match n {
                1 => columns::<L, B, BESIDE, 1>(call, panels, token),
                2 => columns::<L, B, BESIDE, 2>(call, panels, token),
                // More sums would not fit the registers.
                4 => columns::<L, B, 2, 4>(call, panels, token),
                _ => columns::<L, B, 1, 8>(call, panels, token),
            }
        }
        token += n;
    }
}

/// Panels times the `N` tokens from `token`, `P` panels side by side.
#[inline(always)]
unsafe fn columns<L: Lanes, B: BlockFormat, const P: usize, const N: usize>(
    call: &Call,
    panels: Range<usize>,
    token: usize,
) {
    let mut panel = panels.start;
    // SAFETY: the panels are the matrix's, the tokens are of one group; see `Call`.
    unsafe {
        // The panels that are left over are multiplied one by one if there is one token, and with
        // the last of them repeated if there are more: a shape less to compile for every format.
        while panel + P <= panels.end || N > 1 && panel < panels.end {
            beside::<L, B, P, N>(call, panel..panels.end, token);
            panel += P;
        }
        if N == 1 {
            while panel < panels.end {
                beside::<L, B, 1, 1>(call, panel..panels.end, token);
                panel += 1;
            }
        }
    }
}

/// The first `P` of the panels, or as many as there are, times the `N` tokens from `token`.
#[inline(always)]
unsafe fn beside<L: Lanes, B: BlockFormat, const P: usize, const N: usize>(
    call: &Call,
    panels: Range<usize>,
    token: usize,
) {
    // SAFETY: passed on.
    unsafe {
        let mut addresses = [call.panel(panels.start); P];
        each!(p < P, addresses[p] = call.panel((panels.start + p).min(panels.end - 1)));
        let (x, step) = (call.x.line(token), call.x.group());
        let acc = tile::<L, Packed<B>, P, N>(addresses, call.cols / BLOCK, x, step);
        each!(p < P.min(panels.len()), L::write(call, panels.start + p, token, &acc[p], true));
    }
}

/// Panels that are expanded together, and blocks of them: what fits the L2 cache while tokens are
/// multiplied.
pub(super) const SLAB_PANELS: usize = 16;
pub(super) const SLAB_BLOCKS: usize = 16;
/// Most bytes of an expanded block: codes, two scales, two offsets.
const EXPANDED: usize = 512 + 4 * 64;

/// Bytes of scratch that [`many`] wants.
pub(super) const SCRATCH: usize = SLAB_PANELS * SLAB_BLOCKS * EXPANDED;

/// Expanded panels of a format: per block of 32 columns 512 code bytes, then f32 scales and offsets
/// of its sub-blocks.
pub(super) struct Slab<B>(PhantomData<B>);

impl<B: BlockFormat> Slab<B> {
    /// Sub-blocks per block.
    pub(super) const SUBS: usize = BLOCK / Packed::<B>::SUB;
    /// Whether there are offsets.
    pub(super) const MINS: bool = matches!(B::AFFINE.offset, Offset::Min);
    /// Bytes per block.
    pub(super) const STEP: usize = step(Self::SUBS, Self::MINS);

    /// The number added to each code, modulo 256, to move its zero point to the one of [`Form`].
    const fn rebias<L: Lanes>() -> u8 {
        zero::<L>(Self::MINS, Self::bits::<L>()).wrapping_sub(<Packed<B> as Source<L>>::ZERO)
    }

    /// Writes the scales of block `b` as f32, then its offsets.
    #[inline(always)]
    pub(super) unsafe fn scales<L: Lanes>(
        group: <Packed<B> as Source<L>>::Group,
        b: usize,
        to: *mut f32,
    ) {
        for h in 0..Self::SUBS {
            // SAFETY: the group has block `b`, `to` has room for 16 f32 of each sub-block, twice
            // with offsets.
            unsafe {
                let at = to.add(16 * h);
                L::store_f32(at, <Packed<B> as Source<L>>::scale(group, b, h));
                if Self::MINS {
                    let offset = <Packed<B> as Source<L>>::offset(group, b, h);
                    L::store_f32(at.add(16 * Self::SUBS), offset);
                }
            }
        }
    }

    /// Expands blocks `first..first + blocks` of a panel (`first` starts a group).
    #[inline(always)]
    unsafe fn expand<L: Lanes>(
        panel: *const u8,
        total: usize,
        first: usize,
        blocks: usize,
        to: *mut u8,
    ) {
        // SAFETY: the panel holds the blocks, `to` is writable for `blocks * STEP` bytes.
        unsafe {
            let mut to = to;
            let groups = first / GROUP..(first + blocks).div_ceil(GROUP);
            for g in groups.clone() {
                let (group, n) = Packed::<B>::open::<L>(panel, total, g, &groups);
                for b in 0..n {
                    <Packed<B> as Source<L>>::fetch(group, b);
                    for q in 0..8 {
                        let codes = <Packed<B> as Source<L>>::quad(group, b, q);
                        L::store_bytes(to.add(64 * q), L::add_byte(codes, Self::rebias::<L>()));
                    }
                    Self::scales::<L>(group, b, to.add(512).cast());
                    to = to.add(Self::STEP);
                }
            }
        }
    }

    /// [`Lanes::tiles`] for the form that this format's slabs have. Units that take all codes as
    /// unsigned have four forms, others some more, for how many products of narrow codes a run may
    /// add up (see [`Lanes::depth`]).
    const fn tiles<L: Lanes>() -> unsafe fn(&Call, &Expanded) {
        let sub = Packed::<B>::SUB;
        let lowered = <Packed<B> as Source<L>>::LOWERED;
        assert!(sub == BLOCK || !lowered);
        match (sub, Self::MINS, Self::bits::<L>()) {
            (16, false, 4) => L::tiles::<16, false, 4, false>,
            (16, false, 6) => L::tiles::<16, false, 6, false>,
            (16, false, _) => L::tiles::<16, false, 8, false>,
            (16, true, 4) => L::tiles::<16, true, 4, false>,
            (16, true, 6) => L::tiles::<16, true, 6, false>,
            (16, true, _) => L::tiles::<16, true, 8, false>,
            (_, false, 4) => L::tiles::<32, false, 4, false>,
            (_, false, 5) => L::tiles::<32, false, 5, false>,
            (_, false, _) => L::tiles::<32, false, 8, false>,
            (_, true, 4) => L::tiles::<32, true, 4, false>,
            (_, true, 5) => L::tiles::<32, true, 5, false>,
            (_, true, _) if lowered => L::tiles::<32, true, 8, true>,
            (_, true, _) => L::tiles::<32, true, 8, false>,
        }
    }

    /// Bits of a code in a slab: at least the format's.
    const fn bits<L: Lanes>() -> usize {
        match (<Packed<B> as Source<L>>::BITS, Packed::<B>::SUB) {
            _ if !L::SIGNED => 8,
            (0..=4, _) => 4,
            (5, 32) => 5,
            (5..=6, 16) => 6,
            _ => 8,
        }
    }
}

/// Bytes of an expanded block of `subs` sub-blocks.
const fn step(subs: usize, mins: bool) -> usize {
    512 + 64 * subs * (1 + mins as usize)
}

/// The zero point of the codes of `bits` bits in a slab of a format without offsets: half of their
/// range, but none of signed bytes.
const fn zero<L: Lanes>(mins: bool, bits: usize) -> u8 {
    if mins || (L::SIGNED && bits == 8) { 0 } else { 1 << (bits - 1) }
}

/// The parameters of a slab that [`tile`] depends on: the columns of a sub-block, whether there are
/// offsets, the bits of a code, and [`Source::LOWERED`].
pub(super) struct Form<const SUB: usize, const MINS: bool, const BITS: usize, const LOWERED: bool>;

impl<const SUB: usize, const MINS: bool, const BITS: usize, const LOWERED: bool>
    Form<SUB, MINS, BITS, LOWERED>
{
    const SUBS: usize = BLOCK / SUB;
    const STEP: usize = step(Self::SUBS, MINS);
}

impl<L: Lanes, const SUB: usize, const MINS: bool, const BITS: usize, const LOWERED: bool> Source<L>
    for Form<SUB, MINS, BITS, LOWERED>
{
    type Group = *const u8;
    const SUB: usize = SUB;
    const OFFSETS: bool = MINS;
    const LOWERED: bool = LOWERED;
    const ZERO: u8 = zero::<L>(MINS, BITS);
    const BITS: usize = BITS;

    #[inline(always)]
    fn ahead(_: usize, _: usize, _: usize) -> usize {
        0
    }
    #[inline(always)]
    unsafe fn group(panel: *const u8, g: usize, _: usize, _: usize) -> *const u8 {
        // SAFETY: the caller's slab holds group `g`.
        unsafe { panel.add(g * GROUP * Self::STEP) }
    }
    #[inline(always)]
    unsafe fn fetch(_: *const u8, _: usize) {}
    #[inline(always)]
    unsafe fn quad(group: *const u8, b: usize, q: usize) -> L::Bytes {
        // SAFETY: as `expand` wrote it.
        unsafe { L::bytes(group.add(b * Self::STEP + 64 * q)) }
    }
    #[inline(always)]
    unsafe fn scale(group: *const u8, b: usize, h: usize) -> L::Floats {
        // SAFETY: as `expand` wrote it.
        unsafe { L::load_f32(group.add(b * Self::STEP + 512 + 64 * h).cast()) }
    }
    #[inline(always)]
    unsafe fn offset(group: *const u8, b: usize, h: usize) -> L::Floats {
        // SAFETY: as `expand` wrote it.
        unsafe { L::load_f32(group.add(b * Self::STEP + 512 + 64 * (Self::SUBS + h)).cast()) }
    }
}

/// The contents of the slab.
pub(super) struct Expanded {
    /// Its address.
    start: *const u8,
    /// The panels.
    panels: Range<usize>,
    /// The first block, and the number of blocks.
    block: usize,
    blocks: usize,
}

/// Many tokens.
///
/// # Safety
/// As [`product`].
#[inline(always)]
unsafe fn many<L: Lanes, B: BlockFormat>(call: &Call) {
    let total = call.cols / BLOCK;
    let tiles = const { Slab::<B>::tiles::<L>() };
    // SAFETY: panels, tokens and scratch are the call's; the slab is at most `SCRATCH` bytes.
    unsafe {
        for panel in call.panels.clone().step_by(SLAB_PANELS) {
            let panels = panel..call.panels.end.min(panel + SLAB_PANELS);
            for block in (0..total).step_by(SLAB_BLOCKS) {
                let blocks = SLAB_BLOCKS.min(total - block);
                for (p, panel) in panels.clone().enumerate() {
                    let to = call.scratch.add(p * blocks * Slab::<B>::STEP);
                    Slab::<B>::expand::<L>(call.panel(panel), total, block, blocks, to);
                }
                let panels = panels.clone();
                tiles(call, &Expanded { start: call.scratch, panels, block, blocks });
            }
        }
    }
}

/// All tokens times a slab, in tiles of `P` panels by `N` tokens.
///
/// # Safety
/// As [`product`], with a slab of the form `F` that [`many`] filled.
#[inline(always)]
pub(super) unsafe fn tiles<L: Lanes, F: Source<L>, const P: usize, const N: usize>(
    call: &Call,
    slab: &Expanded,
) {
    let panels = slab.panels.len();
    let first = call.tokens.start / TOKENS * TOKENS;
    // SAFETY: passed on.
    unsafe {
        for token in (first..call.tokens.end).step_by(TOKENS) {
            for p in (0..panels / P * P).step_by(P) {
                slab_tiles::<L, F, P, N>(call, slab, token, p);
            }
            for p in panels / P * P..panels {
                slab_tiles::<L, F, 1, N>(call, slab, token, p);
            }
        }
    }
}

/// Tokens of the tiles at the end of a group whose size is no multiple of wider ones.
const REST: usize = 4;

/// `P` panels of a slab from `p`, times one group of tokens, `N` at a time.
#[inline(always)]
unsafe fn slab_tiles<L: Lanes, F: Source<L>, const P: usize, const N: usize>(
    call: &Call,
    slab: &Expanded,
    token: usize,
    p: usize,
) {
    const { assert!((TOKENS % N).is_multiple_of(REST)) };
    let whole = TOKENS / N * N;
    // SAFETY: passed on; the lanes are a group's.
    unsafe {
        slab_lanes::<L, F, P, N>(call, slab, token, 0..whole, p);
        slab_lanes::<L, F, P, REST>(call, slab, token, whole..TOKENS, p);
    }
}

/// As [`slab_tiles`], of some lanes of the group, a multiple of `N`.
#[inline(always)]
unsafe fn slab_lanes<L: Lanes, F: Source<L>, const P: usize, const N: usize>(
    call: &Call,
    slab: &Expanded,
    token: usize,
    lanes: Range<usize>,
    p: usize,
) {
    // SAFETY: slab, lines and output are the call's.
    unsafe {
        let panel_bytes = slab.blocks * step(BLOCK / F::SUB, F::OFFSETS);
        let mut panels = [slab.start.add(p * panel_bytes); P];
        for i in 1..P {
            panels[i] = slab.start.add((p + i) * panel_bytes);
        }
        for lane in lanes.step_by(N) {
            let first = token + lane;
            if first + N <= call.tokens.start || first >= call.tokens.end {
                continue;
            }
            let x = call.x.line(token).add(lane + slab.block * TOKENS);
            let acc = tile::<L, F, P, N>(panels, slab.blocks, x, TOKENS);
            for i in 0..P {
                L::write(call, slab.panels.start + p + i, first, &acc[i], slab.block == 0);
            }
        }
    }
}

//! Products with f32, f16 and bf16 weights: exact weights, f32 sums, any number of columns. The
//! order in which a result's terms are added depends on its path alone.
//!
//! A panel of 16 rows is stored column by column (`[cols][16 rows]`, in the weights' own type), so
//! that one load and one broadcast activation feed 16 multiply-adds.

use super::lanes::Lanes;
use super::layout::AHEAD;
use super::{Call, LINE, Path, ROWS, prefetch};
use formats::quant::plain;
use std::ops::Range;

/// A float weight type.
pub(super) trait Element: 'static {
    /// Bytes per weight.
    const BYTES: usize;
    /// 16 weights as f32.
    ///
    /// # Safety
    /// `16 * BYTES` bytes are readable and the processor has `L`.
    unsafe fn load<L: Lanes>(p: *const u8) -> L::Floats;
    /// One weight from its little-endian bytes.
    fn read(bytes: &[u8]) -> f32;
}

/// IEEE single precision.
pub(super) struct F32;
/// IEEE half precision.
pub(super) struct F16;
/// The upper half of an f32.
pub(super) struct BF16;

impl Element for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L::Floats {
        // SAFETY: passed on.
        unsafe { L::load_f32(p.cast()) }
    }
    fn read(b: &[u8]) -> f32 {
        f32::from_le_bytes([b[0], b[1], b[2], b[3]])
    }
}

impl Element for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L::Floats {
        // SAFETY: passed on.
        unsafe { L::load_f16(p.cast()) }
    }
    fn read(b: &[u8]) -> f32 {
        plain::f16_to_f32(u16::from_le_bytes([b[0], b[1]]))
    }
}

impl Element for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L::Floats {
        // SAFETY: passed on.
        unsafe { L::load_bf16(p.cast()) }
    }
    fn read(b: &[u8]) -> f32 {
        plain::bf16_to_f32(u16::from_le_bytes([b[0], b[1]]))
    }
}

/// Bytes of a panel, rounded to 64.
pub(super) fn panel_bytes(cols: usize, element: usize) -> usize {
    (cols * ROWS * element).next_multiple_of(64)
}

/// Packs up to 16 rows of elements of `BYTES` bytes; absent rows become zeros.
pub(super) fn pack<const BYTES: usize>(rows: &[&[u8]], panel: &mut [u8]) {
    // Sixteen columns at a time: each row gives a contiguous run, each cache line of the panel is
    // written once.
    let cols = rows[0].len() / BYTES;
    for first in (0..cols).step_by(16) {
        for c in first..cols.min(first + 16) {
            let column = &mut panel[c * ROWS * BYTES..(c + 1) * ROWS * BYTES];
            for (to, row) in column.chunks_exact_mut(BYTES).zip(rows) {
                to.copy_from_slice(&row[c * BYTES..(c + 1) * BYTES]);
            }
        }
    }
}

/// Decodes row `r` of a panel from a column on.
pub(super) fn row<E: Element>(panel: &[u8], r: usize, first: usize, out: &mut [f32]) {
    let columns = panel[first * ROWS * E::BYTES..].chunks_exact(ROWS * E::BYTES);
    for (column, w) in columns.zip(out) {
        *w = E::read(&column[r * E::BYTES..][..E::BYTES]);
    }
}

/// Expands columns of a panel to f32: column by column, `width` apart.
///
/// # Safety
/// The panel has the columns, `to` has room for them, and the processor has `L`.
pub(super) unsafe fn expand<L: Lanes, E: Element>(
    panel: *const u8,
    columns: Range<usize>,
    to: *mut f32,
    width: usize,
) {
    for (i, column) in columns.enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            L::store_f32(to.add(i * width), E::load::<L>(panel.add(column * ROWS * E::BYTES)))
        };
    }
}

/// Interleaved partial sums per result when weights are read in place, which hide the latency of
/// the additions.
const CHAINS: usize = 2;

/// Tokens that one pass over a panel in place serves, and panels that later passes find in cache.
const FEW: usize = 4;
const BESIDE: usize = 4;

/// The product: tiles of `P` panels by `N` tokens where there are many. Each path adds a result's
/// terms in one order, whatever the tile it is in.
///
/// # Safety
/// As [`super::multiply`], on a processor that has `L`.
#[inline(always)]
pub(super) unsafe fn product<L: Lanes, E: Element, const P: usize, const N: usize>(call: &Call) {
    let (mut panel, end) = (call.panels.start, call.panels.end);
    // SAFETY: panels and tokens are the call's.
    unsafe {
        if call.x.path() == Path::InPlace {
            return in_place::<L, E>(call);
        }
        if call.tokens.len() >= N {
            while panel + P <= end {
                strip::<L, E, P, N>(call, panel);
                panel += P;
            }
        }
        while panel < end {
            strip::<L, E, 1, N>(call, panel);
            panel += 1;
        }
    }
}

/// A few tokens: bandwidth is the limit, and a core needs several streams to use its share.
#[inline(always)]
unsafe fn in_place<L: Lanes, E: Element>(call: &Call) {
    let together = if call.tokens.len() <= FEW { call.panels.len() } else { BESIDE };
    for first in call.panels.clone().step_by(together.max(1)) {
        let panels = first..call.panels.end.min(first + together);
        let mut token = call.tokens.start;
        // SAFETY: panels and tokens are the call's.
        unsafe {
            while token < call.tokens.end {
                let left = call.tokens.end - token;
                let panels = panels.clone();
                if left >= FEW {
                    columns::<L, E, 1, FEW>(call, panels, token);
                    token += FEW;
                } else if left >= 2 {
                    columns::<L, E, 2, 2>(call, panels, token);
                    token += 2;
                } else {
                    columns::<L, E, BESIDE, 1>(call, panels, token);
                    token += 1;
                }
            }
        }
    }
}

/// Panels times the `N` tokens from `token`, `P` panels side by side.
#[inline(always)]
unsafe fn columns<L: Lanes, E: Element, const P: usize, const N: usize>(
    call: &Call,
    panels: Range<usize>,
    token: usize,
) {
    let mut panel = panels.start;
    // SAFETY: panels and tokens are the call's.
    unsafe {
        while panel + P <= panels.end {
            tile::<L, E, P, N, CHAINS>(call, panel, token);
            panel += P;
        }
        while panel < panels.end {
            tile::<L, E, 1, N, CHAINS>(call, panel, token);
            panel += 1;
        }
    }
}

/// `P` panels times all tokens: `N` at a time, then the remainder.
#[inline(always)]
unsafe fn strip<L: Lanes, E: Element, const P: usize, const N: usize>(call: &Call, panel: usize) {
    let mut token = call.tokens.start;
    // SAFETY: each tile's tokens are below `call.tokens.end`.
    unsafe {
        while token < call.tokens.end {
            let left = call.tokens.end - token;
            if left >= N {
                tile::<L, E, P, N, 1>(call, panel, token);
                token += N;
            } else if left >= 4 {
                tile::<L, E, P, 4, 1>(call, panel, token);
                token += 4;
            } else if left >= 2 {
                tile::<L, E, P, 2, 1>(call, panel, token);
                token += 2;
            } else {
                tile::<L, E, P, 1, 1>(call, panel, token);
                token += 1;
            }
        }
    }
}

/// `P` panels times `N` tokens, with `C` interleaved sums per result.
#[inline(always)]
unsafe fn tile<L: Lanes, E: Element, const P: usize, const N: usize, const C: usize>(
    call: &Call,
    panel: usize,
    token: usize,
) {
    // SAFETY: the panels are the matrix's, with `cols` columns; the rows of x have `cols` f32.
    unsafe {
        let mut weights = [call.panel(panel); P];
        each!(p < P, weights[p] = call.panel(panel + p));
        let (x, stride) = (call.x.row(token), call.x.stride());
        let mut acc = [[[L::splat(0.0); C]; N]; P];
        let whole = call.cols / C * C;
        let mut k = 0;
        while k < whole {
            each!(c < C, {
                let column = (k + c) * ROWS * E::BYTES;
                // After a panel's end, prefetch the panel that is read next.
                let skip = if column + AHEAD < call.panel_bytes { 0 } else { P - 1 };
                each!(p < P, {
                    let at = weights[p].add(column);
                    if column.is_multiple_of(LINE) {
                        prefetch(at.wrapping_add(AHEAD + skip * call.panel_bytes));
                    }
                    let w = E::load::<L>(at);
                    each!(t < N, {
                        acc[p][t][c] =
                            L::fma(w, L::splat(*x.add(t * stride + k + c)), acc[p][t][c]);
                    });
                });
            });
            k += C;
        }
        while k < call.cols {
            each!(p < P, {
                let w = E::load::<L>(weights[p].add(k * ROWS * E::BYTES));
                each!(t < N, {
                    acc[p][t][0] = L::fma(w, L::splat(*x.add(t * stride + k)), acc[p][t][0]);
                });
            });
            k += 1;
        }
        each!(p < P, {
            let mut y = [L::splat(0.0); N];
            each!(t < N, {
                y[t] = acc[p][t][0];
                each!(
                    c < C,
                    if c > 0 {
                        y[t] = L::add(y[t], acc[p][t][c])
                    }
                );
            });
            L::write(call, panel + p, token, &y, true);
        });
    }
}

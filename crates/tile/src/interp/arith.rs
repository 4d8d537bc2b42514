//! Arithmetic on whole columns. The meaning is [`crate::instr`]'s, inlined into one loop per
//! operation and type; whatever has no loop of its own goes through the same functions one lane at
//! a time.

use std::cell::Cell;

use super::lanes::{Columns, Mask};
use super::ops::Col;
use crate::instr::{BinaryOp, UnaryOp, cast, dot4, fma_halves, lookup};
use crate::types::Scalar;

type Column = [Cell<u32>];

/// An operation that has no result for these operands.
#[derive(Debug, Clone, Copy)]
pub(super) struct Undefined {
    pub(super) lane: usize,
    pub(super) a: u32,
    pub(super) b: u32,
}

#[inline(always)]
fn map1(mask: &Mask, d: &Column, a: &Column, f: impl Fn(u32) -> u32) {
    match &mask.list {
        None => {
            let run = mask.start..mask.end;
            d[run.clone()].iter().zip(&a[run]).for_each(|(d, a)| d.set(f(a.get())));
        }
        Some(list) => {
            list.iter().map(|l| usize::from(*l)).for_each(|l| d[l].set(f(a[l].get())));
        }
    }
}

#[inline(always)]
fn map2(mask: &Mask, d: &Column, a: &Column, b: &Column, f: impl Fn(u32, u32) -> u32) {
    match &mask.list {
        None => {
            let run = mask.start..mask.end;
            let operands = a[run.clone()].iter().zip(&b[run.clone()]);
            d[run].iter().zip(operands).for_each(|(d, (a, b))| d.set(f(a.get(), b.get())));
        }
        Some(list) => {
            list.iter().map(|l| usize::from(*l)).for_each(|l| d[l].set(f(a[l].get(), b[l].get())))
        }
    }
}

#[inline(always)]
fn map3(mask: &Mask, d: &Column, [a, b, c]: [&Column; 3], f: impl Fn(u32, u32, u32) -> u32) {
    let run = mask.start..mask.end;
    match &mask.list {
        None => {
            let first = a[run.clone()].iter().zip(&b[run.clone()]);
            let operands = first.zip(&c[run.clone()]);
            d[run].iter().zip(operands).for_each(|(d, ((a, b), c))| {
                d.set(f(a.get(), b.get(), c.get()));
            });
        }
        Some(list) => list
            .iter()
            .map(|l| usize::from(*l))
            .for_each(|l| d[l].set(f(a[l].get(), b[l].get(), c[l].get()))),
    }
}

/// `index += step` on the active lanes; `Err` with the first lane for which it does not fit, and
/// nothing changed.
pub(super) fn advance(mask: &Mask, index: &Column, step: &Column) -> Result<(), usize> {
    let fits = |lane: usize| index[lane].get() <= !step[lane].get();
    if !mask.all_of(fits) {
        mask.each(|lane| if fits(lane) { Ok(()) } else { Err(lane) })?;
    }
    map2(mask, index, index, step, u32::wrapping_add);
    Ok(())
}

/// `d = op a` on the active lanes.
pub(super) fn unary(
    columns: &Columns,
    mask: &Mask,
    op: UnaryOp,
    scalar: Scalar,
    (d, a): (Col, Col),
) -> Result<(), Undefined> {
    let (d, a) = (columns.of(d), columns.of(a));
    macro_rules! table {
        ($($op:ident $scalar:ident,)*) => {
            match (op, scalar) {
                $((UnaryOp::$op, Scalar::$scalar) => {
                    map1(mask, d, a, |a| UnaryOp::$op.eval(Scalar::$scalar, a).unwrap_or(0));
                })*
                _ => return mask.each(|lane| {
                    let a = a[lane].get();
                    let undefined = Undefined { lane, a, b: 0 };
                    d[lane].set(op.eval(scalar, a).ok_or(undefined)?);
                    Ok(())
                }),
            }
        };
    }
    table! {
        Neg F32, Neg I32, Not Bool, Not I32, Not U32, Abs F32, Exp F32, Exp2 F32, Sqrt F32, Rsqrt F32,
        Floor F32, Round F32,
    }
    Ok(())
}

/// `d = a op b` on the active lanes.
pub(super) fn binary(
    columns: &Columns,
    mask: &Mask,
    op: BinaryOp,
    scalar: Scalar,
    (d, a, b): (Col, Col, Col),
) -> Result<(), Undefined> {
    let (d, a, b) = (columns.of(d), columns.of(a), columns.of(b));
    macro_rules! table {
        ($($scalar:ident: $($op:ident)*;)*) => {
            match (op, scalar) {
                // Only operations that are defined for all operands are in the table.
                $($((BinaryOp::$op, Scalar::$scalar) => map2(mask, d, a, b, |a, b| {
                    BinaryOp::$op.eval(Scalar::$scalar, a, b).unwrap_or(0)
                }),)*)*
                _ => return mask.each(|lane| {
                    let (a, b) = (a[lane].get(), b[lane].get());
                    d[lane].set(op.eval(scalar, a, b).ok_or(Undefined { lane, a, b })?);
                    Ok(())
                }),
            }
        };
    }
    table! {
        F32: Add Sub Mul Div Min Max PackF16 PackBf16 Eq Ne Lt Le Gt Ge;
        I32: Add Sub Mul Min Max And Or Xor Eq Ne Lt Le Gt Ge;
        U32: Add Sub Mul Min Max And Or Xor MulHi Eq Ne Lt Le Gt Ge;
        Bool: And Or Xor Eq Ne;
    }
    Ok(())
}

/// `d = a b + c`, rounded once.
pub(super) fn fma(columns: &Columns, mask: &Mask, d: Col, operands: [Col; 3]) {
    let (d, operands) = (columns.of(d), operands.map(|c| columns.of(c)));
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("fma") {
        // SAFETY: the processor has the instruction.
        return unsafe { fma_by_instruction(mask, d, operands) };
    }
    map3(mask, d, operands, fused);
}

/// The same by the processor's own instruction, which builds for any x86 call a function for.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "fma")]
fn fma_by_instruction(mask: &Mask, d: &Column, operands: [&Column; 3]) {
    map3(mask, d, operands, fused);
}

/// `a b + c` on register bits.
#[inline(always)]
pub(super) fn fused(a: u32, b: u32, c: u32) -> u32 {
    f32::from_bits(a).mul_add(f32::from_bits(b), f32::from_bits(c)).to_bits()
}

/// `d = acc + a . b` over four signed bytes.
pub(super) fn dots(columns: &Columns, mask: &Mask, d: Col, operands: [Col; 3]) {
    let operands = operands.map(|c| columns.of(c));
    map3(mask, columns.of(d), operands, dot4);
}

/// Both halves of words, multiplied and added.
pub(super) fn halves(columns: &Columns, mask: &Mask, d: Col, operands: [Col; 3]) {
    let operands = operands.map(|c| columns.of(c));
    map3(mask, columns.of(d), operands, fma_halves);
}

/// Four bytes of a table that four columns hold.
pub(super) fn lookups(columns: &Columns, mask: &Mask, d: Col, codes: Col, table: &[Col]) {
    let (d, codes) = (columns.of(d), columns.of(codes));
    let at = |lane: usize| {
        let mut words = [0; 4];
        words.iter_mut().zip(table).for_each(|(word, c)| *word = columns.of(*c)[lane].get());
        d[lane].set(lookup(codes[lane].get(), words));
    };
    match &mask.list {
        None => (mask.start..mask.end).for_each(at),
        Some(list) => list.iter().map(|l| usize::from(*l)).for_each(at),
    }
}

/// `d = yes` where `cond`, else `no`.
pub(super) fn select(columns: &Columns, mask: &Mask, d: Col, operands: [Col; 3]) {
    let operands = operands.map(|c| columns.of(c));
    let choose = |cond, yes, no| if cond != 0 { yes } else { no };
    map3(mask, columns.of(d), operands, choose);
}

/// `d = a` in another element type.
pub(super) fn convert(
    columns: &Columns,
    mask: &Mask,
    from: Scalar,
    to: Scalar,
    (d, a): (Col, Col),
) {
    let (d, a) = (columns.of(d), columns.of(a));
    macro_rules! table {
        ($($from:ident $to:ident,)*) => {
            match (from, to) {
                (Scalar::F16, Scalar::F32) => map1(mask, d, a, widen_f16),
                $((Scalar::$from, Scalar::$to) => {
                    map1(mask, d, a, |a| cast(Scalar::$from, Scalar::$to, a));
                })*
                _ => map1(mask, d, a, |a| cast(from, to, a)),
            }
        };
    }
    table! {
        BF16 F32, F32 F16, F32 BF16, U32 F32, I32 F32, F32 U32, F32 I32, I8 F32, U8 F32, U32 U8, U32 I8, I32 I8,
    }
}

/// Converts an f16's bits to the bits of the equal f32, without branches so that it vectorises: the
/// exponent is moved and then scaled by 2^112, which is exact for subnormals too.
#[inline(always)]
pub(super) fn widen_f16(h: u32) -> u32 {
    let magnitude = (h & 0x7FFF) << 13;
    let scaled = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
    // Infinities and NaNs keep their payload under the largest exponent; a NaN becomes quiet, as
    // hardware makes it.
    let special = magnitude | 0x7F80_0000 | if h & 0x03FF != 0 { 0x0040_0000 } else { 0 };
    let finite = if h & 0x7C00 == 0x7C00 { special } else { scaled };
    finite | (h & 0x8000) << 16
}

#[cfg(test)]
mod tests {
    use super::*;

    const EDGES: [u32; 24] = [
        0,
        1,
        2,
        31,
        32,
        33,
        127,
        128,
        255,
        256,
        0x7FFF,
        0x8000,
        0xFFFF,
        0x7FFF_FFFF,
        0x8000_0000,
        0xFFFF_FFFF,
        0x3F80_0000,
        0xBF80_0000,
        0x7F80_0000,
        0xFF80_0000,
        0x7FC0_0000,
        0x0000_0001,
        0x4F00_0000,
        0x3EAA_AAAB,
    ];

    /// NaNs compare equal whatever their payload: which operand's it is, the hardware decides.
    fn same(scalar: Scalar, a: u32, b: u32) -> bool {
        let nan = |x| scalar == Scalar::F32 && f32::from_bits(x).is_nan();
        a == b || (nan(a) && nan(b))
    }

    /// Runs and lists of lanes, each against the one-lane meaning.
    fn masks() -> [Mask; 3] {
        [
            Mask::all(32 * 32),
            Mask::of((5..900).collect()).unwrap(),
            Mask::of((0..1024).filter(|lane| lane % 3 == 1).collect()).unwrap(),
        ]
    }

    fn pairs() -> Columns {
        let columns = Columns::new(4, 1024);
        let edges = EDGES.iter().flat_map(|a| EDGES.iter().map(move |b| (*a, *b)));
        for (lane, (a, b)) in edges.cycle().take(1024).enumerate() {
            columns.of(0)[lane].set(a);
            columns.of(1)[lane].set(b);
        }
        columns
    }

    #[test]
    fn loops_agree_with_the_meaning() {
        let columns = pairs();
        let at = |col: Col, lane: usize| columns.of(col)[lane].get();
        for mask in masks() {
            for scalar in [Scalar::Bool, Scalar::I32, Scalar::U32, Scalar::F32] {
                for op in UnaryOp::ALL.into_iter().filter(|op| op.takes(scalar)) {
                    columns.fill(2, 0xDEAD);
                    unary(&columns, &mask, op, scalar, (2, 0)).unwrap();
                    let _ = mask.each(|lane| {
                        let want = op.eval(scalar, at(0, lane)).unwrap();
                        assert!(same(scalar, at(2, lane), want), "{op:?} {scalar} {}", at(0, lane));
                        Ok::<(), ()>(())
                    });
                }
                for op in BinaryOp::ALL.into_iter().filter(|op| op.takes(scalar)) {
                    columns.fill(2, 0xDEAD);
                    let result = binary(&columns, &mask, op, scalar, (2, 0, 1));
                    let mut undefined = None;
                    let _ = mask.each(|lane| {
                        let (a, b) = (at(0, lane), at(1, lane));
                        match op.eval(scalar, a, b) {
                            Some(want) if undefined.is_none() => assert!(
                                same(op.result(scalar), at(2, lane), want),
                                "{op:?} {scalar} {a:x} {b:x}"
                            ),
                            Some(_) => {}
                            None => undefined = undefined.or(Some(lane)),
                        }
                        Ok::<(), ()>(())
                    });
                    assert_eq!(result.err().map(|e| e.lane), undefined, "{op:?} {scalar}");
                    if mask.count() < 1024 {
                        assert_eq!(at(2, 3), 0xDEAD, "idle lanes keep their registers");
                    }
                }
            }
        }
    }

    #[test]
    fn casts_agree_with_the_meaning() {
        let columns = pairs();
        for mask in masks() {
            for (from, to) in Scalar::ALL.iter().flat_map(|f| Scalar::ALL.map(|t| (*f, t))) {
                columns.fill(2, 0);
                convert(&columns, &mask, from, to, (2, 0));
                let _ = mask.each(|lane| {
                    let (got, a) = (columns.of(2)[lane].get(), columns.of(0)[lane].get());
                    assert!(same(to, got, cast(from, to, a)), "{from} to {to}: {a:x}");
                    Ok::<(), ()>(())
                });
            }
        }
        for h in 0..=0xFFFF {
            assert_eq!(widen_f16(h), cast(Scalar::F16, Scalar::F32, h), "{h:04x}");
        }
    }
}

//! Parsing a kernel's body: blocks and instructions.

use std::collections::HashMap;

use super::header::{Parser, Symbol};
use super::lex::{Found, Words, binary, unary, unknown};
use crate::ir::{
    AtomicOp, Block, Builtin, Hint, Inst, Literal, Node, Place, Reduce, SimdOp, Source, Value,
};
use crate::types::{Scalar, Type};

/// Blocks inside blocks: far more than kernels have, and few enough to walk recursively.
const DEPTH: usize = 64;

/// The body of a kernel whose header has been read.
pub(super) struct Body<'p, 't> {
    parser: &'p mut Parser<'t>,
    /// Which values have been defined, so that the first definition gives the type.
    defined: Vec<bool>,
    sources: HashMap<&'t str, u32>,
}

/// How a block ended.
enum End {
    /// `}`
    Brace,
    /// `} else {`
    Else,
}

impl<'p, 't> Body<'p, 't> {
    pub(super) fn new(parser: &'p mut Parser<'t>) -> Self {
        Body { parser, defined: vec![], sources: HashMap::new() }
    }

    /// Everything after `body {`, the closing brace included.
    pub(super) fn parse(&mut self) -> Found<Block> {
        self.closed_block(0)
    }

    fn closed_block(&mut self, depth: usize) -> Found<Block> {
        match self.block(depth)? {
            (block, End::Brace) => Ok(block),
            (_, End::Else) => Err("`}` expected, found `else` without `if`".to_owned()),
        }
    }

    fn block(&mut self, depth: usize) -> Found<(Block, End)> {
        if depth > DEPTH {
            return Err(format!("at most {DEPTH} blocks expected inside one another"));
        }
        let mut nodes = Vec::new();
        loop {
            let (line, mut words) = self.parser.next("an instruction or `}`")?;
            if words.take("}") {
                let end = if words.take("else") {
                    words.expect("{")?;
                    End::Else
                } else {
                    End::Brace
                };
                words.end()?;
                return Ok((Block(nodes), end));
            }
            let (inst, result) = if words.take("for") {
                (self.for_loop(&mut words, depth)?, None)
            } else if words.take("if") {
                (self.condition(&mut words, depth)?, None)
            } else {
                let result = match words.peek() {
                    Some(word) if word.starts_with('%') => {
                        let (value, ty) = self.definition(&mut words)?;
                        words.expect("=")?;
                        Some((value, ty))
                    }
                    _ => None,
                };
                let inst = self.inst(&mut words, result.map(|(_, ty)| ty))?;
                words.end()?;
                (inst, result.map(|(value, _)| value))
            };
            // Blocks come before what holds them, as they do when a kernel is recorded.
            let source = self.source(line.source);
            nodes.push(Node { inst, result, source });
        }
    }

    fn source(&mut self, text: &'t str) -> Source {
        if text.is_empty() {
            return Source(0);
        }
        let table = &mut self.parser.kernel.sources;
        Source(*self.sources.entry(text).or_insert_with(|| {
            table.push(text.to_owned());
            table.len() as u32 - 1
        }))
    }

    /// `%7: u32 = %4 to %1 step %8 unroll {` and the body.
    fn for_loop(&mut self, words: &mut Words<'t>, depth: usize) -> Found<Inst> {
        let (index, _) = self.definition(words)?;
        words.expect("=")?;
        let start = self.value(words)?;
        words.expect("to")?;
        let end = self.value(words)?;
        words.expect("step")?;
        let step = self.value(words)?;
        let unroll = words.take("unroll");
        words.expect("{")?;
        words.end()?;
        let body = self.closed_block(depth + 1)?;
        Ok(Inst::For { index, start, end, step, unroll, body })
    }

    /// `%9 {` and both blocks.
    fn condition(&mut self, words: &mut Words<'t>, depth: usize) -> Found<Inst> {
        let cond = self.value(words)?;
        words.expect("{")?;
        words.end()?;
        let (then, end) = self.block(depth + 1)?;
        let otherwise = match end {
            End::Brace => Block::default(),
            End::Else => self.closed_block(depth + 1)?,
        };
        Ok(Inst::If { cond, then, otherwise })
    }

    /// `%3`.
    fn value(&mut self, words: &mut Words<'t>) -> Found<Value> {
        let word = words.next("a value such as `%3`")?;
        let number = word.strip_prefix('%').and_then(|n| n.parse::<u32>().ok());
        let number =
            number.ok_or_else(|| format!("a value such as `%3` expected, found `{word}`"))?;
        let wanted = number as usize + 1;
        let values = &mut self.parser.kernel.values;
        if let Some(more) = wanted.checked_sub(values.len()) {
            let left = self.parser.budget.checked_sub(more);
            self.parser.budget =
                left.ok_or_else(|| format!("`{word}`: the number is too large for this text"))?;
            values.resize(wanted, Type::Scalar(Scalar::Bool));
            self.defined.resize(wanted, false);
        }
        Ok(Value(number))
    }

    /// `%3: f32`.
    fn definition(&mut self, words: &mut Words<'t>) -> Found<(Value, Type)> {
        let value = self.value(words)?;
        words.expect(":")?;
        let ty = words.ty()?;
        let index = value.0 as usize;
        if let (Some(defined), Some(known)) =
            (self.defined.get_mut(index), self.parser.kernel.values.get_mut(index))
        {
            if !*defined {
                *known = ty;
            }
            *defined = true;
        }
        Ok((value, ty))
    }

    /// `x`.
    fn array(&self, words: &mut Words<'t>) -> Found<Place> {
        let name = words.name("an array")?;
        match self.parser.symbols.get(name) {
            Some(Symbol::Param(i)) => Ok(Place::Buffer(*i)),
            Some(Symbol::Shared(i)) => Ok(Place::Shared(*i)),
            Some(Symbol::Register(i)) => Ok(Place::Register(*i)),
            Some(Symbol::Constant(_)) | None => Err(unknown("array", name)),
        }
    }

    /// `x[%3]`.
    fn at(&mut self, words: &mut Words<'t>) -> Found<(Place, Value)> {
        let place = self.array(words)?;
        words.expect("[")?;
        let index = self.value(words)?;
        words.expect("]")?;
        Ok((place, index))
    }

    /// `%1, %2, ..`: exactly `N` values.
    fn values<const N: usize>(&mut self, words: &mut Words<'t>) -> Found<[Value; N]> {
        let mut found = [Value(0); N];
        for (i, value) in found.iter_mut().enumerate() {
            if i > 0 {
                words.expect(",")?;
            }
            *value = self.value(words)?;
        }
        Ok(found)
    }

    fn inst(&mut self, words: &mut Words<'t>, result: Option<Type>) -> Found<Inst> {
        let name = words.next("an instruction")?;
        let typed =
            || result.ok_or_else(|| format!("`{name}` without a result: `%n: type =` expected"));
        if let Some(op) = unary(name) {
            return Ok(Inst::Unary(op, self.value(words)?));
        }
        if let Some(op) = binary(name) {
            let [a, b] = self.values(words)?;
            return Ok(Inst::Binary(op, a, b));
        }
        if matches!(name, "true" | "false")
            || name.starts_with(|c: char| c == '-' || c.is_ascii_digit())
        {
            return literal(name, typed()?.scalar()).map(Inst::Literal);
        }
        if let Some(op) = simd(name) {
            return Ok(Inst::Simd(op, self.value(words)?, None));
        }
        Ok(match name {
            "constant" => {
                let name = words.name("a constant")?;
                match self.parser.symbols.get(name) {
                    Some(Symbol::Constant(i)) => Inst::Constant(*i),
                    _ => return Err(unknown("constant", name)),
                }
            }
            "argument" => {
                let name = words.name("an argument")?;
                match self.parser.symbols.get(name) {
                    Some(Symbol::Param(i)) => Inst::Argument(*i),
                    _ => return Err(unknown("argument", name)),
                }
            }
            "group" => Inst::Builtin(Builtin::Group(words.number("an axis")?)),
            "groups" => Inst::Builtin(Builtin::Groups(words.number("an axis")?)),
            "thread" => Inst::Builtin(Builtin::Thread),
            "lane" => Inst::Builtin(Builtin::Lane),
            "simd" => Inst::Builtin(Builtin::Simd),
            "fma" => {
                let [a, b, c] = self.values(words)?;
                Inst::Fma(a, b, c)
            }
            "select" => {
                let [cond, yes, no] = self.values(words)?;
                Inst::Select { cond, yes, no }
            }
            "cast" => Inst::Cast(typed()?.scalar(), self.value(words)?),
            "bitcast" => Inst::Bitcast(typed()?.scalar(), self.value(words)?),
            "dot4" => {
                let [a, b, acc] = self.values(words)?;
                Inst::Dot4 { a, b, acc }
            }
            "pack" => Inst::Pack(self.list(words)?),
            "tile_of" => Inst::TileOf(typed()?, self.list(words)?),
            "extract" => {
                let vector = self.value(words)?;
                words.expect(",")?;
                Inst::Extract(vector, words.number("a lane")?)
            }
            "load" => {
                let (place, index) = self.at(words)?;
                let lanes =
                    if words.take("lanes") { words.number("a number of lanes")? } else { 1 };
                let hint = if words.take("stream") {
                    Hint::Stream
                } else if words.take("coherent") {
                    Hint::Coherent
                } else {
                    Hint::None
                };
                Inst::Load { place, index, lanes, hint }
            }
            "store" => {
                let (place, index) = self.at(words)?;
                words.expect("=")?;
                Inst::Store { place, index, value: self.value(words)? }
            }
            "atomic_add" => self.atomic(AtomicOp::Add, words)?,
            "atomic_min" => self.atomic(AtomicOp::Min, words)?,
            "atomic_max" => self.atomic(AtomicOp::Max, words)?,
            "atomic_exchange" => self.atomic(AtomicOp::Exchange, words)?,
            "barrier" => Inst::Barrier,
            "simd_barrier" => Inst::SimdBarrier,
            "fence" => Inst::Fence,
            "shuffle" => {
                let value = self.value(words)?;
                // Without a lane it is for the verifier to refuse.
                let lane = if words.take(",") { Some(self.value(words)?) } else { None };
                Inst::Simd(SimdOp::Shuffle, value, lane)
            }
            "shuffle_xor" => {
                let value = self.value(words)?;
                words.expect(",")?;
                Inst::Simd(SimdOp::ShuffleXor(words.number("a mask")?), value, None)
            }
            "copy_async" => {
                let (to, to_index) = self.at(words)?;
                words.expect("=")?;
                let (from, from_index) = self.at(words)?;
                words.expect("lanes")?;
                let lanes = words.number("a number of lanes")?;
                let keep = if words.take("keep") { Some(self.value(words)?) } else { None };
                Inst::CopyAsync { to, to_index, from, from_index, lanes, keep }
            }
            "copy_commit" => Inst::CopyCommit,
            "copy_wait" => Inst::CopyWait(words.number("a number of batches")?),
            "grid_trigger" => Inst::GridTrigger,
            "grid_wait" => Inst::GridWait,
            "splat" => Inst::Splat(typed()?, self.value(words)?),
            "tile_load" => {
                let (place, index) = self.at(words)?;
                words.expect("stride")?;
                let stride = self.value(words)?;
                let transposed = words.take("transposed");
                Inst::TileLoad { ty: typed()?, place, index, stride, transposed }
            }
            "tile_store" => {
                let (place, index) = self.at(words)?;
                words.expect("stride")?;
                let stride = self.value(words)?;
                words.expect("=")?;
                Inst::TileStore { place, index, stride, value: self.value(words)? }
            }
            "mma" => {
                let [a, b, c] = self.values(words)?;
                Inst::Mma { a, b, c }
            }
            "wgmma" => {
                let sum = self.array(words)?;
                words.expect("+")?;
                words.expect("=")?;
                let (a, a_index) = self.at(words)?;
                words.expect(",")?;
                let (b, b_index) = self.at(words)?;
                Inst::Wgmma { sum, a, a_index, b, b_index }
            }
            "wgmma_fence" => Inst::WgmmaFence,
            "wgmma_commit" => Inst::WgmmaCommit,
            "wgmma_wait" => Inst::WgmmaWait(words.number("a number of batches")?),
            "async_fence" => Inst::AsyncFence,
            "row_sum" => Inst::RowReduce(Reduce::Sum, self.value(words)?),
            "row_max" => Inst::RowReduce(Reduce::Max, self.value(words)?),
            "row_min" => Inst::RowReduce(Reduce::Min, self.value(words)?),
            "tile_row" => Inst::TileRow(typed()?),
            "tile_col" => Inst::TileCol(typed()?),
            "to_left" => Inst::ToLeft(typed()?, self.value(words)?),
            other => return Err(unknown("instruction", other)),
        })
    }

    /// One value or more.
    fn list(&mut self, words: &mut Words<'t>) -> Found<Vec<Value>> {
        let mut values = vec![self.value(words)?];
        while words.take(",") {
            values.push(self.value(words)?);
        }
        Ok(values)
    }

    fn atomic(&mut self, op: AtomicOp, words: &mut Words<'t>) -> Found<Inst> {
        let (place, index) = self.at(words)?;
        words.expect(",")?;
        Ok(Inst::Atomic { op, place, index, value: self.value(words)? })
    }
}

/// Exchanges that are a name and one operand.
fn simd(name: &str) -> Option<SimdOp> {
    Some(match name {
        "simd_sum" => SimdOp::Reduce(Reduce::Sum),
        "simd_max" => SimdOp::Reduce(Reduce::Max),
        "simd_min" => SimdOp::Reduce(Reduce::Min),
        "simd_prefix_sum" => SimdOp::PrefixSum,
        "simd_any" => SimdOp::Any,
        "simd_all" => SimdOp::All,
        "ballot" => SimdOp::Ballot,
        _ => return None,
    })
}

fn literal(word: &str, scalar: Scalar) -> Found<Literal> {
    let parsed = match scalar {
        Scalar::Bool => word.parse().ok().map(Literal::Bool),
        Scalar::I32 => word.parse().ok().map(Literal::I32),
        Scalar::U32 => word.parse().ok().map(Literal::U32),
        Scalar::F32 => match word.strip_prefix("0x") {
            Some(bits) => u32::from_str_radix(bits, 16).ok().map(Literal::F32),
            None => word.parse().ok().filter(|x: &f32| x.is_finite()).map(Literal::float),
        },
        _ => return Err(format!("a literal is bool, i32, u32 or f32, not {scalar}")),
    };
    parsed.ok_or_else(|| format!("a number of type {scalar} expected, found `{word}`"))
}

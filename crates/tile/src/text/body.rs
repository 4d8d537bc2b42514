//! Parsing a kernel's body: blocks and instructions.

use std::collections::HashMap;

use super::header::{Parser, Symbol};
use super::lex::{Found, Words, unknown};
use crate::ir::{Block, Inst, Literal, LoadHint, Place, SourceId, Statement, Value};
use crate::table::Piece;
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
            let result = match words.peek() {
                Some(word) if word.starts_with('%') => {
                    let (value, ty) = self.definition(&mut words)?;
                    words.expect("=")?;
                    Some((value, ty))
                }
                _ => None,
            };
            let inst = self.inst(&mut words, result.map(|(_, ty)| ty), depth)?;
            words.end()?;
            let result = result.map(|(value, _)| value);
            // Blocks come before what holds them, as they do when a kernel is recorded.
            let source = self.source(line.source);
            nodes.push(Statement { inst, result, source });
        }
    }

    fn source(&mut self, text: &'t str) -> SourceId {
        if text.is_empty() {
            return SourceId(0);
        }
        let table = &mut self.parser.kernel.sources;
        SourceId(*self.sources.entry(text).or_insert_with(|| {
            table.push(text.to_owned());
            table.len() as u32 - 1
        }))
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

    /// An instruction, and its blocks at this depth. `result` is the type of what it defines.
    fn inst(&mut self, words: &mut Words<'t>, result: Option<Type>, depth: usize) -> Found<Inst> {
        let name = words.next("an instruction")?;
        let typed =
            || result.ok_or_else(|| format!("`{name}` without a result: `%n: type =` expected"));
        if matches!(name, "true" | "false")
            || name.starts_with(|c: char| c == '-' || c.is_ascii_digit())
        {
            return literal(name, typed()?.scalar()).map(Inst::Literal);
        }
        let mut inst = Inst::named(name).ok_or_else(|| unknown("instruction", name))?;
        let (mut read, mut listed) = (Ok(()), false);
        inst.pieces(|piece| {
            if read.is_ok() {
                let lists = piece.is_listed();
                let comma = if listed && lists { words.expect(",") } else { Ok(()) };
                read = comma.and_then(|()| self.piece(piece, words, &typed, depth));
                listed = lists;
            }
        });
        read.map(|()| inst)
    }

    fn piece(
        &mut self,
        piece: Piece<'_>,
        words: &mut Words<'t>,
        typed: &dyn Fn() -> Found<Type>,
        depth: usize,
    ) -> Found<()> {
        match piece {
            Piece::Value(value) | Piece::Agreed(_, value) => *value = self.value(words)?,
            Piece::Values(values) => {
                values.push(self.value(words)?);
                while words.take(",") {
                    values.push(self.value(words)?);
                }
            }
            Piece::Optional(word, value) => {
                if words.take(word) {
                    *value = Some(self.value(words)?);
                }
            }
            Piece::Element(_, place, index) | Piece::Tile(_, place, _, index) => {
                (*place, *index) = self.at(words)?;
            }
            Piece::Array(_, place) => *place = self.array(words)?,
            // `+=` is two words.
            Piece::Word("+=") => {
                words.expect("+")?;
                words.expect("=")?;
            }
            Piece::Word(word) => words.expect(word)?,
            Piece::Flag(word, flag) => *flag = words.take(word),
            Piece::Number(what, Some(number)) => *number = words.number(what)?,
            Piece::Number(_, None) => {}
            Piece::Lanes(lanes) => {
                *lanes = if words.take("lanes") { words.number("a number of lanes")? } else { 1 };
            }
            Piece::LoadHint(hint) => {
                *hint = if words.take("stream") {
                    LoadHint::Stream
                } else if words.take("coherent") {
                    LoadHint::Coherent
                } else {
                    LoadHint::None
                };
            }
            // A literal stands in place of a name.
            Piece::Literal(_) => {}
            Piece::Constant(index) => {
                let name = words.name("a constant")?;
                match self.parser.symbols.get(name) {
                    Some(Symbol::Constant(i)) => *index = *i,
                    _ => return Err(unknown("constant", name)),
                }
            }
            Piece::Argument(index) => {
                let name = words.name("an argument")?;
                match self.parser.symbols.get(name) {
                    Some(Symbol::Param(i)) => *index = *i,
                    _ => return Err(unknown("argument", name)),
                }
            }
            Piece::Result(ty) => *ty = typed()?,
            Piece::Scalar(scalar) => *scalar = typed()?.scalar(),
            Piece::Defined(value) => (*value, _) = self.definition(words)?,
            Piece::Body(body) => {
                words.expect("{")?;
                words.end()?;
                *body = self.closed_block(depth + 1)?;
            }
            Piece::Branches(then, otherwise) => {
                words.expect("{")?;
                words.end()?;
                let end;
                (*then, end) = self.block(depth + 1)?;
                if let End::Else = end {
                    *otherwise = self.closed_block(depth + 1)?;
                }
            }
        }
        Ok(())
    }
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

//! Parsing a kernel up to its body: name, launch contract, parameters, constants, arrays.

use std::collections::HashMap;

use super::body::Body;
use super::lex::{self, Found, Line, Words, scalar, unknown};
use super::print::access_name;
use crate::ir::{Access, Array, Constant, Kernel, KernelSetting, Param, ParamKind};
use crate::launch::{Extent, Mode, Requirement};
use crate::types::Scalar;
use crate::verify::Fault;

/// Parts of one extent: more than any contract has, and few enough to walk recursively.
const EXTENT_PARTS: usize = 64;

/// The meaning of a name in the body, by index.
#[derive(Debug, Clone, Copy)]
pub(super) enum Symbol {
    Param(u32),
    Constant(u32),
    Shared(u32),
    Register(u32),
}

/// Lines and what was made of them.
pub(super) struct Parser<'t> {
    lines: std::slice::Iter<'t, Line<'t>>,
    /// The line read last.
    pub(super) line: usize,
    pub(super) kernel: Kernel,
    pub(super) symbols: HashMap<String, Symbol>,
    /// Value numbers that may still be used: what keeps `%4000000000` from allocating.
    pub(super) budget: usize,
}

/// Parses every kernel of a text.
pub(super) fn kernels(text: &str) -> Result<Vec<Kernel>, Fault> {
    let fault = |kernel: &Kernel, line, message| Fault {
        kernel: kernel.name.clone(),
        line,
        source: String::new(),
        message,
    };
    let lines =
        lex::lines(text).map_err(|(line, message)| fault(&Kernel::empty(""), line, message))?;
    // Passes leave gaps in the numbers; sixteen for every byte is far more than they do.
    let budget = text.len().saturating_mul(16).saturating_add(4096);
    let mut parser = Parser {
        lines: lines.iter(),
        line: 0,
        kernel: Kernel::empty(""),
        symbols: HashMap::new(),
        budget,
    };
    let mut found = Vec::new();
    while !parser.lines.as_slice().is_empty() {
        let parsed = parser.kernel();
        let kernel = std::mem::replace(&mut parser.kernel, Kernel::empty(""));
        parsed.map_err(|message| fault(&kernel, parser.line, message))?;
        found.push(kernel);
    }
    Ok(found)
}

impl<'t> Parser<'t> {
    /// The next line; `wanted` says what it should be.
    pub(super) fn next(&mut self, wanted: &str) -> Found<(&'t Line<'t>, Words<'t>)> {
        let line = self.lines.next();
        let line = line.ok_or_else(|| format!("{wanted} expected, found the end of the text"))?;
        self.line = line.number;
        Ok((line, Words::new(line)))
    }

    fn kernel(&mut self) -> Found<()> {
        self.symbols.clear();
        let (_, mut words) = self.next("a kernel")?;
        words.expect("kernel")?;
        self.kernel.name = words.name("the kernel's name")?.to_owned();
        words.expect("{")?;
        words.end()?;
        let mut stated = Vec::new();
        loop {
            let (_, mut words) = self.next("`body`")?;
            let keyword = words.name("a declaration or `body`")?;
            if matches!(keyword, "mode" | "grid" | "threads") {
                if stated.contains(&keyword) {
                    return Err(format!("`{keyword}` is stated twice"));
                }
                stated.push(keyword);
            }
            if keyword == "body" {
                words.expect("{")?;
                words.end()?;
                break;
            }
            self.declaration(keyword, &mut words)?;
            words.end()?;
        }
        self.kernel.body = Body::new(self).parse()?;
        loop {
            let (_, mut words) = self.next("a setting or `}` of the kernel")?;
            if !words.take("setting") {
                words.expect("}")?;
                return words.end();
            }
            let name = words.name("a setting's name")?.to_owned();
            words.expect(":")?;
            let value = words.next("a setting's value")?.to_owned();
            words.end()?;
            self.kernel.settings.push(KernelSetting { name, value });
        }
    }

    fn declaration(&mut self, keyword: &str, words: &mut Words<'t>) -> Found<()> {
        let launch = &mut self.kernel.launch;
        match keyword {
            "mode" => {
                let word = words.name("a mode")?;
                let modes = [Mode::Element, Mode::Row, Mode::Vector, Mode::Tile];
                let found = modes.into_iter().find(|m| m.name() == word);
                launch.mode = found.ok_or_else(|| unknown("mode", word))?;
            }
            "grid" => {
                for (axis, extent) in launch.grid.iter_mut().enumerate() {
                    if axis > 0 {
                        words.expect(",")?;
                    }
                    *extent = extent_of(words)?;
                }
            }
            "threads" => launch.threads = words.number("a number of threads")?,
            "require" => {
                let rule = requirement(words)?;
                launch.requirements.push(rule);
            }
            "buffer" => {
                let (name, scalar) = named_scalar(words)?;
                let word = words.name("`in`, `out` or `inout`")?;
                let all = [Access::In, Access::Out, Access::InOut];
                let access = all.into_iter().find(|a| access_name(*a) == word);
                let access = access.ok_or_else(|| unknown("access", word))?;
                self.param(name, ParamKind::Buffer { scalar, access });
            }
            "argument" => {
                let (name, scalar) = named_scalar(words)?;
                self.param(name, ParamKind::Argument(scalar));
            }
            "constant" => {
                let (name, scalar) = named_scalar(words)?;
                self.declare(name, Symbol::Constant(self.kernel.constants.len() as u32));
                self.kernel.constants.push(Constant { name: name.to_owned(), scalar });
            }
            "shared" => {
                let mut array = array(words)?;
                if words.take("over") {
                    let name = words.name("a shared array")?;
                    array.over = match self.symbols.get(name) {
                        Some(Symbol::Shared(index)) => Some(*index),
                        _ => return Err(unknown("shared array", name)),
                    };
                }
                self.declare(&array.name, Symbol::Shared(self.kernel.shared.len() as u32));
                self.kernel.shared.push(array);
            }
            "register" => {
                let array = array(words)?;
                self.declare(&array.name, Symbol::Register(self.kernel.registers.len() as u32));
                self.kernel.registers.push(array);
            }
            other => return Err(format!("a declaration or `body` expected, found `{other}`")),
        }
        Ok(())
    }

    fn param(&mut self, name: &str, kind: ParamKind) {
        self.declare(name, Symbol::Param(self.kernel.params.len() as u32));
        self.kernel.params.push(Param { name: name.to_owned(), kind });
    }

    /// The first of a name counts; the verifier refuses a second.
    fn declare(&mut self, name: &str, symbol: Symbol) {
        self.symbols.entry(name.to_owned()).or_insert(symbol);
    }
}

/// `name: f32`.
fn named_scalar<'t>(words: &mut Words<'t>) -> Found<(&'t str, Scalar)> {
    let name = words.name("a name")?;
    words.expect(":")?;
    let word = words.name("an element type")?;
    Ok((name, scalar(word).ok_or_else(|| unknown("element type", word))?))
}

/// `name: f32[8]`.
fn array(words: &mut Words<'_>) -> Found<Array> {
    let name = words.name("a name")?.to_owned();
    words.expect(":")?;
    let ty = words.ty()?;
    words.expect("[")?;
    let len = words.number("a number of elements")?;
    words.expect("]")?;
    Ok(Array { name, ty, len, over: None })
}

fn requirement(words: &mut Words<'_>) -> Found<Requirement> {
    let extent = extent_of(words)?;
    let rule = words.name("`divisible`, `at`, `holds` or `aligned`")?;
    match (rule, extent) {
        ("divisible", extent) => {
            words.expect("by")?;
            Ok(Requirement::Divisible(extent, words.number("a divisor")?))
        }
        ("at", extent) => {
            words.expect("most")?;
            Ok(Requirement::AtMost(extent, words.number("a limit")?))
        }
        ("holds", Extent::Name(name)) => Ok(Requirement::Length(name, extent_of(words)?)),
        ("aligned", Extent::Name(name)) => {
            words.expect("to")?;
            Ok(Requirement::Aligned(name, words.number("a number of bytes")?))
        }
        ("holds" | "aligned", extent) => {
            Err(format!("a buffer's name expected before `{rule}`, found `{extent}`"))
        }
        (other, _) => {
            Err(format!("`divisible`, `at`, `holds` or `aligned` expected, found `{other}`"))
        }
    }
}

fn extent_of(words: &mut Words<'_>) -> Found<Extent> {
    let mut parts = EXTENT_PARTS;
    sum(words, &mut parts)
}

fn sum(words: &mut Words<'_>, parts: &mut usize) -> Found<Extent> {
    let mut total = product(words, parts)?;
    while words.take("+") {
        total = total + product(words, parts)?;
    }
    Ok(total)
}

fn product(words: &mut Words<'_>, parts: &mut usize) -> Found<Extent> {
    let mut total = factor(words, parts)?;
    while words.take("*") {
        total = total * factor(words, parts)?;
    }
    Ok(total)
}

fn factor(words: &mut Words<'_>, parts: &mut usize) -> Found<Extent> {
    *parts = parts
        .checked_sub(1)
        .ok_or_else(|| format!("at most {EXTENT_PARTS} parts expected in an extent"))?;
    if words.take("(") {
        let inner = sum(words, parts)?;
        words.expect(")")?;
        return Ok(inner);
    }
    if words.peek().is_some_and(|w| w.starts_with(|c: char| c.is_ascii_digit())) {
        return Ok(Extent::Literal(words.number("a number below 2^32")?));
    }
    let name = words.name("a size")?;
    if name != "ceil_div" {
        return Ok(Extent::from(name));
    }
    words.expect("(")?;
    let dividend = sum(words, parts)?;
    words.expect(",")?;
    let divisor = sum(words, parts)?;
    words.expect(")")?;
    Ok(dividend.ceil_div(divisor))
}

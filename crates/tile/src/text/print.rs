//! Printing. It never fails: a kernel that the verifier refuses must still be shown.

use std::fmt::Write;

use crate::ir::{
    Access, Array, Block, Inst, Kernel, Literal, LoadHint, ParamKind, Place, Statement, Value,
};
use crate::table::Piece;

/// The kernel's text as far as it is written.
pub(super) struct Printer<'k> {
    kernel: &'k Kernel,
    sources: bool,
    text: String,
    /// Lines written.
    lines: usize,
    /// The line of every node, outer before inner.
    nodes: Vec<usize>,
}

/// The line of the text form at which each instruction stands, in the order of [`Kernel::visit`].
pub(crate) fn node_lines(kernel: &Kernel) -> Vec<usize> {
    let mut printer = Printer::new(kernel, false);
    printer.kernel();
    printer.nodes
}

/// A part of a kernel that stands before its body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Name,
    Grid,
    Threads,
    Requirement(usize),
    Param(usize),
    Constant(usize),
    Shared(usize),
    Register(usize),
}

/// The line of the text form at which a part of the kernel stands.
pub(crate) fn part_line(kernel: &Kernel, part: Part) -> usize {
    // The order of `Printer::kernel`, a line each.
    let params = 5 + kernel.launch.requirements.len();
    let constants = params + kernel.params.len();
    let shared = constants + kernel.constants.len();
    let registers = shared + kernel.shared.len();
    match part {
        Part::Name => 1,
        Part::Grid => 3,
        Part::Threads => 4,
        Part::Requirement(i) => 5 + i,
        Part::Param(i) => params + i,
        Part::Constant(i) => constants + i,
        Part::Shared(i) => shared + i,
        Part::Register(i) => registers + i,
    }
}

impl<'k> Printer<'k> {
    pub(super) fn new(kernel: &'k Kernel, sources: bool) -> Self {
        Printer { kernel, sources, text: String::new(), lines: 0, nodes: vec![] }
    }

    pub(super) fn print(mut self) -> String {
        self.kernel();
        self.text
    }

    fn line(&mut self, depth: usize, line: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "{:1$}{line}", "", 2 * depth);
        self.lines += 1;
    }

    fn kernel(&mut self) {
        let kernel = self.kernel;
        let launch = &kernel.launch;
        self.line(0, &format!("kernel {} {{", kernel.name));
        self.line(1, &format!("mode {}", launch.mode.name()));
        let [x, y, z] = &launch.grid;
        self.line(1, &format!("grid {x}, {y}, {z}"));
        self.line(1, &format!("threads {}", launch.threads));
        for rule in &launch.requirements {
            self.line(1, &format!("require {rule}"));
        }
        for param in &kernel.params {
            let name = &param.name;
            self.line(
                1,
                &match param.kind {
                    ParamKind::Buffer { scalar, access } => {
                        format!("buffer {name}: {scalar} {}", access_name(access))
                    }
                    ParamKind::Argument(scalar) => format!("argument {name}: {scalar}"),
                },
            );
        }
        for constant in &kernel.constants {
            self.line(1, &format!("constant {}: {}", constant.name, constant.scalar));
        }
        for (kind, arrays) in [("shared", &kernel.shared), ("register", &kernel.registers)] {
            for array in arrays {
                let Array { name, ty, len, over } = array;
                let over = over.and_then(|i| arrays.get(i as usize));
                let over = over.map_or(String::new(), |a| format!(" over {}", a.name));
                self.line(1, &format!("{kind} {name}: {ty}[{len}]{over}"));
            }
        }
        self.line(1, "body {");
        self.block(&kernel.body, 2);
        self.line(1, "}");
        // Last, so that lines have one number with sources and without.
        let settings = if self.sources { &kernel.settings[..] } else { &[] };
        for setting in settings {
            self.line(1, &format!("setting {}: {}", setting.name, setting.value));
        }
        self.line(0, "}");
    }

    fn block(&mut self, block: &Block, depth: usize) {
        for node in &block.0 {
            self.nodes.push(self.lines + 1);
            let mut line = match node.result {
                Some(value) => format!("{} = ", self.typed(value)),
                None => String::new(),
            };
            line += &self.inst(&node.inst);
            self.line(depth, &(line + &self.source(node)));
            match &node.inst {
                Inst::For { body, .. } => {
                    self.block(body, depth + 1);
                    self.line(depth, "}");
                }
                Inst::If { then, otherwise, .. } => {
                    self.block(then, depth + 1);
                    if !otherwise.0.is_empty() {
                        self.line(depth, "} else {");
                        self.block(otherwise, depth + 1);
                    }
                    self.line(depth, "}");
                }
                _ => {}
            }
        }
    }

    fn source(&self, node: &Statement) -> String {
        let source = self.kernel.source(node.source);
        if !self.sources || source.is_empty() {
            return String::new();
        }
        format!("  ; {}", source.replace(char::is_control, " "))
    }

    /// `%3: f32`, or `%3: ?` for a value that the kernel does not have.
    fn typed(&self, value: Value) -> String {
        let ty = self.kernel.values.get(value.0 as usize);
        format!("%{}: {}", value.0, ty.map_or_else(|| "?".to_owned(), ToString::to_string))
    }

    /// `x`.
    fn array(&self, place: Place) -> &'k str {
        let kernel = self.kernel;
        let name = match place {
            Place::Buffer(i) => kernel.params.get(i as usize).map(|p| &p.name),
            Place::Shared(i) => kernel.shared.get(i as usize).map(|a| &a.name),
            Place::Register(i) => kernel.registers.get(i as usize).map(|a| &a.name),
        };
        name.map_or("?", String::as_str)
    }

    fn inst(&self, inst: &Inst) -> String {
        let mut inst = inst.without_blocks();
        let mut text = match inst {
            Inst::Literal(_) => String::new(),
            _ => inst.name().to_owned(),
        };
        let kernel = self.kernel;
        let mut listed = false;
        inst.pieces(|piece| {
            let comma = if listed { "," } else { "" };
            let lists = piece.is_listed();
            let piece = match piece {
                Piece::Value(value) | Piece::Agreed(_, value) => format!("{comma} %{}", value.0),
                Piece::Values(values) => {
                    let values: Vec<String> = values.iter().map(|v| format!("%{}", v.0)).collect();
                    format!("{comma} {}", values.join(", "))
                }
                Piece::Optional(",", Some(value)) => format!(", %{}", value.0),
                Piece::Optional(word, Some(value)) => format!(" {word} %{}", value.0),
                Piece::Element(_, place, index) | Piece::Tile(_, place, _, index) => {
                    format!("{comma} {}[%{}]", self.array(*place), index.0)
                }
                Piece::Array(_, place) => format!("{comma} {}", self.array(*place)),
                Piece::Word(word) | Piece::Flag(word, true) => format!(" {word}"),
                Piece::Number(_, Some(number)) => format!("{comma} {number}"),
                Piece::Lanes(lanes) if *lanes != 1 => format!(" lanes {lanes}"),
                Piece::LoadHint(hint) => hint_suffix(*hint).to_owned(),
                Piece::Literal(literal) => literal_text(*literal),
                Piece::Constant(i) => {
                    format!(" {}", kernel.constants.get(*i as usize).map_or("?", |c| &c.name))
                }
                Piece::Argument(i) => {
                    format!(" {}", kernel.params.get(*i as usize).map_or("?", |p| &p.name))
                }
                Piece::Defined(value) => format!(" {}", self.typed(*value)),
                Piece::Body(_) | Piece::Branches(..) => " {".to_owned(),
                Piece::Optional(_, None)
                | Piece::Flag(_, false)
                | Piece::Number(_, None)
                | Piece::Lanes(_)
                | Piece::Result(_)
                | Piece::Scalar(_) => return,
            };
            text += &piece;
            listed = lists;
        });
        text
    }
}

/// The word for what a kernel does with a buffer.
pub(super) fn access_name(access: Access) -> &'static str {
    match access {
        Access::In => "in",
        Access::Out => "out",
        Access::InOut => "inout",
    }
}

fn hint_suffix(hint: LoadHint) -> &'static str {
    match hint {
        LoadHint::None => "",
        LoadHint::Stream => " stream",
        LoadHint::Coherent => " coherent",
    }
}

fn literal_text(literal: Literal) -> String {
    match literal {
        Literal::Bool(b) => b.to_string(),
        Literal::I32(i) => i.to_string(),
        Literal::U32(u) => u.to_string(),
        Literal::F32(bits) => {
            let x = f32::from_bits(bits);
            // Rust's shortest form reads back to the same bits, but only for what is finite.
            if x.is_finite() { format!("{x:?}") } else { format!("{bits:#010x}") }
        }
    }
}

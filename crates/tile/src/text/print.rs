//! Printing. It never fails: a kernel that the verifier refuses must still be shown.

use std::fmt::Write;

use crate::ir::{
    Access, Array, AtomicOp, Block, Builtin, Hint, Inst, Kernel, Literal, Node, ParamKind, Place,
    Reduce, SimdOp, Value,
};

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

/// The name of an instruction in the text form.
pub(crate) fn name(inst: &Inst) -> &'static str {
    match inst {
        Inst::Literal(_) => "literal",
        Inst::Constant(_) => "constant",
        Inst::Argument(_) => "argument",
        Inst::Builtin(which) => match which {
            Builtin::Group(_) => "group",
            Builtin::Groups(_) => "groups",
            Builtin::Thread => "thread",
            Builtin::Lane => "lane",
            Builtin::Simd => "simd",
        },
        Inst::Unary(op, _) => op.name(),
        Inst::Binary(op, ..) => op.name(),
        Inst::Fma(..) => "fma",
        Inst::Select { .. } => "select",
        Inst::Cast(..) => "cast",
        Inst::Bitcast(..) => "bitcast",
        Inst::Dot4 { .. } => "dot4",
        Inst::Pack(_) => "pack",
        Inst::Extract(..) => "extract",
        Inst::Load { .. } => "load",
        Inst::Store { .. } => "store",
        Inst::Atomic { op, .. } => match op {
            AtomicOp::Add => "atomic_add",
            AtomicOp::Min => "atomic_min",
            AtomicOp::Max => "atomic_max",
            AtomicOp::Exchange => "atomic_exchange",
        },
        Inst::Barrier => "barrier",
        Inst::SimdBarrier => "simd_barrier",
        Inst::Fence => "fence",
        Inst::Simd(op, ..) => match op {
            SimdOp::Reduce(Reduce::Sum) => "simd_sum",
            SimdOp::Reduce(Reduce::Max) => "simd_max",
            SimdOp::Reduce(Reduce::Min) => "simd_min",
            SimdOp::PrefixSum => "simd_prefix_sum",
            SimdOp::Shuffle => "shuffle",
            SimdOp::ShuffleXor(_) => "shuffle_xor",
            SimdOp::Any => "simd_any",
            SimdOp::All => "simd_all",
            SimdOp::Ballot => "ballot",
        },
        Inst::CopyAsync { .. } => "copy_async",
        Inst::CopyCommit => "copy_commit",
        Inst::CopyWait(_) => "copy_wait",
        Inst::GridTrigger => "grid_trigger",
        Inst::GridWait => "grid_wait",
        Inst::Splat(..) => "splat",
        Inst::TileLoad { .. } => "tile_load",
        Inst::TileOf(..) => "tile_of",
        Inst::TileStore { .. } => "tile_store",
        Inst::Mma { .. } => "mma",
        Inst::Wgmma { .. } => "wgmma",
        Inst::WgmmaFence => "wgmma_fence",
        Inst::WgmmaCommit => "wgmma_commit",
        Inst::WgmmaWait(_) => "wgmma_wait",
        Inst::AsyncFence => "async_fence",
        Inst::RowReduce(Reduce::Sum, _) => "row_sum",
        Inst::RowReduce(Reduce::Max, _) => "row_max",
        Inst::RowReduce(Reduce::Min, _) => "row_min",
        Inst::TileRow(_) => "tile_row",
        Inst::TileCol(_) => "tile_col",
        Inst::ToLeft(..) => "to_left",
        Inst::For { .. } => "for",
        Inst::If { .. } => "if",
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

    fn source(&self, node: &Node) -> String {
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

    /// `x[%3]`.
    fn at(&self, place: Place, index: Value) -> String {
        format!("{}[%{}]", self.array(place), index.0)
    }

    fn inst(&self, inst: &Inst) -> String {
        let name = name(inst);
        let kernel = self.kernel;
        match inst {
            Inst::Literal(literal) => literal_text(*literal),
            Inst::Constant(i) => {
                let found = kernel.constants.get(*i as usize);
                format!("{name} {}", found.map_or("?", |c| &c.name))
            }
            Inst::Argument(i) => {
                format!("{name} {}", kernel.params.get(*i as usize).map_or("?", |p| &p.name))
            }
            Inst::Builtin(Builtin::Group(axis) | Builtin::Groups(axis)) => format!("{name} {axis}"),
            Inst::Extract(vector, lane) => format!("{name} %{}, {lane}", vector.0),
            Inst::Load { place, index, lanes, hint } => {
                let lanes = if *lanes == 1 { String::new() } else { format!(" lanes {lanes}") };
                format!("{name} {}{lanes}{}", self.at(*place, *index), hint_suffix(*hint))
            }
            Inst::Store { place, index, value } => {
                format!("{name} {} = %{}", self.at(*place, *index), value.0)
            }
            Inst::Atomic { place, index, value, .. } => {
                format!("{name} {}, %{}", self.at(*place, *index), value.0)
            }
            Inst::Simd(SimdOp::ShuffleXor(mask), value, None) => {
                format!("{name} %{}, {mask}", value.0)
            }
            Inst::CopyAsync { to, to_index, from, from_index, lanes, keep } => {
                let (to, from) = (self.at(*to, *to_index), self.at(*from, *from_index));
                let keep = keep.map_or_else(String::new, |k| format!(" keep %{}", k.0));
                format!("{name} {to} = {from} lanes {lanes}{keep}")
            }
            Inst::CopyWait(pending) | Inst::WgmmaWait(pending) => format!("{name} {pending}"),
            Inst::Wgmma { sum, a, a_index, b, b_index } => {
                let (sum, a) = (self.array(*sum), self.at(*a, *a_index));
                format!("{name} {sum} += {a}, {}", self.at(*b, *b_index))
            }
            Inst::TileLoad { place, index, stride, transposed, .. } => {
                let transposed = if *transposed { " transposed" } else { "" };
                format!("{name} {} stride %{}{transposed}", self.at(*place, *index), stride.0)
            }
            Inst::TileStore { place, index, stride, value } => {
                format!("{name} {} stride %{} = %{}", self.at(*place, *index), stride.0, value.0)
            }
            Inst::For { index, start, end, step, unroll, .. } => {
                let unroll = if *unroll { " unroll" } else { "" };
                let (index, start) = (self.typed(*index), start.0);
                format!("{name} {index} = %{start} to %{} step %{}{unroll} {{", end.0, step.0)
            }
            Inst::If { cond, .. } => format!("{name} %{} {{", cond.0),
            // Everything else is its name and its operands.
            _ => {
                let operands: Vec<String> =
                    inst.operands().iter().map(|v| format!("%{}", v.0)).collect();
                format!("{name} {}", operands.join(", ")).trim_end().to_owned()
            }
        }
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

fn hint_suffix(hint: Hint) -> &'static str {
    match hint {
        Hint::None => "",
        Hint::Stream => " stream",
        Hint::Coherent => " coherent",
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

//! The C-like printer that Metal and CUDA share: blocks, statements, and which values get a name.

use crate::ir::{
    Block, Builtin, Inst, Kernel, Literal, LoadHint, Place, SourceId, Statement, Value,
};
use crate::types::{Role, Scalar, Tile, Type};
use crate::verify::Fault;

use super::expr::{self, Access, Language, Text, binds};
use super::names::Names;
use super::{fault, finite, inline, multiples, whole};

/// Longer expressions are broken at a value's name.
const LONG: usize = 72;

/// Appends a kernel to `out`.
pub(super) fn print(
    kernel: &Kernel,
    language: &dyn Language,
    out: &mut String,
) -> Result<(), Fault> {
    if Names::keyword(&kernel.name) {
        let message = "expected a name that C++ leaves free, found a keyword".to_owned();
        return Err(fault(kernel, "", message));
    }
    let limit = language.shared_limit();
    if kernel.shared_bytes() > limit {
        let found = kernel.shared_bytes();
        let message = format!("expected at most {limit} bytes of shared memory, found {found}");
        return Err(fault(kernel, "", message));
    }
    let mut builtins: Vec<Builtin> = Vec::new();
    let mut uses = vec![0; kernel.values.len()];
    kernel.visit(&mut |node| {
        let needed: &[Builtin] = match &node.inst {
            Inst::Builtin(builtin) => &[*builtin],
            Inst::TileRow(_) | Inst::TileCol(_) | Inst::TileOf(..) => &[Builtin::Lane],
            _ => &[],
        };
        for builtin in needed {
            if !builtins.contains(builtin) {
                builtins.push(*builtin);
            }
        }
        node.inst.operands().iter().for_each(|v| uses[v.0 as usize] += 1);
    });
    let names = Names::new(kernel, language.reserved());
    language.open(kernel, &names, &builtins, out);
    let mut printer = Printer {
        kernel,
        language,
        names,
        uses,
        texts: vec![None; kernel.values.len()],
        multiples: multiples::multiples(kernel),
        out,
        indent: 1,
        last: SourceId(0),
    };
    printer.arrays().map_err(|message| fault(kernel, "", message))?;
    printer.block(&kernel.body)?;
    out.push_str("}\n");
    Ok(())
}

/// The text of a value where it is used.
#[derive(Debug, Clone)]
struct Written {
    /// One number; of a tile, its element `e`.
    each: Text,
    /// A tile as a whole, if it has a place of its own.
    whole: Option<String>,
}

struct Printer<'a> {
    kernel: &'a Kernel,
    language: &'a dyn Language,
    names: Names,
    uses: Vec<u32>,
    texts: Vec<Option<Written>>,
    multiples: Vec<u32>,
    out: &'a mut String,
    indent: usize,
    last: SourceId,
}

impl Printer<'_> {
    fn line(&mut self, text: &str, source: SourceId) {
        let indent = "  ".repeat(self.indent);
        self.out.push_str(&indent);
        self.out.push_str(text);
        let place = self.kernel.source(source);
        if source != self.last && !place.is_empty() {
            self.last = source;
            let file = place.rsplit(['/', '\\']).next().unwrap_or(place);
            self.out.push_str("  // ");
            self.out.push_str(file);
        }
        self.out.push('\n');
    }

    fn ty(&self, value: Value) -> Type {
        self.kernel.ty(value)
    }

    fn scalar(&self, value: Value) -> Scalar {
        self.ty(value).scalar()
    }

    /// A value where it is used; of a tile, its element `e`.
    fn text(&self, value: Value) -> Text {
        let written = self.texts.get(value.0 as usize).and_then(Option::as_ref);
        // Verified kernels define before they use: the name alone is right for what is not printed
        // yet.
        written.map_or_else(|| Text::primary(name(value)), |w| w.each.clone())
    }

    /// A tile as a whole.
    fn tile(&self, value: Value) -> String {
        let written = self.texts.get(value.0 as usize).and_then(Option::as_ref);
        written.and_then(|w| w.whole.clone()).unwrap_or_else(|| name(value))
    }

    fn arrays(&mut self) -> Result<(), String> {
        for (i, array) in (0..).zip(&self.kernel.shared) {
            let ty = expr::type_name(self.language, array.ty)?;
            let name = self.names.place(Place::Shared(i));
            let over = array.over.map(|other| self.names.place(Place::Shared(other)));
            let text = self.language.shared(self.kernel, i, name, &ty, over);
            self.line(&text, SourceId(0));
        }
        for (i, array) in self.kernel.registers.iter().enumerate() {
            let ty = expr::type_name(self.language, array.ty)?;
            let name = self.names.place(Place::Register(i as u32));
            // A lone register is a variable.
            let text = match array.len {
                1 => format!("{ty} {name};"),
                len => format!("{ty} {name}[{len}];"),
            };
            self.line(&text, SourceId(0));
        }
        Ok(())
    }

    fn block(&mut self, block: &Block) -> Result<(), Fault> {
        let inline = inline::choose(self.kernel, &self.uses, block);
        for (node, inline) in block.0.iter().zip(inline) {
            self.node(node, inline).map_err(|error| match error {
                Error::Inner(fault) => fault,
                Error::Here(message) => {
                    fault(self.kernel, self.kernel.source(node.source), message)
                }
            })?;
        }
        Ok(())
    }

    fn node(&mut self, node: &Statement, inline: bool) -> Result<(), Error> {
        let unused = node.result.is_some_and(|v| self.uses[v.0 as usize] == 0);
        if unused && !node.inst.has_effect() {
            return Ok(());
        }
        match (&node.inst, node.result) {
            (Inst::For { index, start, end, step, unroll, body }, _) => {
                let header = self.for_header(*index, *start, *end, *step);
                if *unroll {
                    self.line("TK_UNROLL", node.source);
                }
                self.line(&header, node.source);
                self.nested(body)?;
                self.line("}", SourceId(0));
            }
            (Inst::If { cond, then, otherwise }, _) => {
                let cond = self.text(*cond).text;
                match (then.0.is_empty(), otherwise.0.is_empty()) {
                    (true, true) => {}
                    (true, false) => {
                        self.line(&format!("if (!({cond})) {{"), node.source);
                        self.nested(otherwise)?;
                        self.line("}", SourceId(0));
                    }
                    (false, empty) => {
                        self.line(&format!("if ({cond}) {{"), node.source);
                        self.nested(then)?;
                        if !empty {
                            self.line("} else {", SourceId(0));
                            self.nested(otherwise)?;
                        }
                        self.line("}", SourceId(0));
                    }
                }
            }
            (inst, None) => {
                let text = self.statement(inst)?;
                if !text.is_empty() {
                    self.line(&text, node.source);
                }
            }
            (inst, Some(value)) => self.define(inst, value, inline, node.source)?,
        }
        Ok(())
    }

    fn nested(&mut self, block: &Block) -> Result<(), Error> {
        self.indent += 1;
        let result = self.block(block).map_err(Error::Inner);
        self.indent -= 1;
        result
    }

    fn for_header(&self, index: Value, start: Value, end: Value, step: Value) -> String {
        let v = name(index);
        let [start, end, step] = [start, end, step].map(|v| self.text(v));
        let step = match step.text.as_str() {
            "1u" => format!("++{v}"),
            text => format!("{v} += {text}"),
        };
        format!("for (uint {v} = {}; {v} < {}; {step}) {{", start.text, end.within(binds::SHIFT))
    }

    /// A value: kept as an expression, or given a name.
    fn define(
        &mut self,
        inst: &Inst,
        value: Value,
        inline: bool,
        source: SourceId,
    ) -> Result<(), Error> {
        let ty = self.ty(value);
        let lanes = match ty.tile() {
            Some(tile) => {
                // Also says whether the language has such a tile.
                self.language.tile(tile)?;
                self.language.lanes(tile)
            }
            None => 1,
        };
        let element = |name: &str| match ty.tile() {
            Some(_) if lanes > 1 => Text::primary(format!("{name}[e]")),
            _ => Text::primary(name),
        };
        let made = self.value(inst, ty)?;
        // Names, numbers and the fields of a named vector cost nothing wherever they stand.
        let atom = match inst {
            Inst::Literal(_) | Inst::Constant(_) | Inst::Argument(_) | Inst::Builtin(_) => true,
            Inst::Extract(vector, _) => {
                self.scalar(*vector).bytes() == 4 && self.text(*vector).text == name(*vector)
            }
            _ => false,
        };
        let written = match &made {
            Made::Each(each) if atom || inline && each.text.len() <= LONG => {
                Some(Written { each: each.clone(), whole: None })
            }
            Made::Whole(text) if inline && (ty.tile().is_none() || text.text.len() <= LONG) => {
                Some(Written { each: element(&text.text), whole: Some(text.text.clone()) })
            }
            _ => None,
        };
        if written.is_some() {
            self.texts[value.0 as usize] = written;
            return Ok(());
        }
        let unused = self.uses[value.0 as usize] == 0;
        let v = name(value);
        let kind = expr::type_name(self.language, ty)?;
        let text = match made {
            Made::Whole(text) | Made::Each(text) if unused => format!("{};", text.text),
            Made::Each(text) if ty.tile().is_some() && lanes > 1 => {
                format!("{kind} {v}; TK_EACH({lanes}) {v}[e] = {};", text.text)
            }
            Made::Whole(text) | Made::Each(text) => format!("{kind} {v} = {};", text.text),
        };
        self.line(&text, source);
        self.texts[value.0 as usize] = Some(Written { each: element(&v), whole: Some(v) });
        Ok(())
    }

    /// The text of an instruction's result.
    fn value(&self, inst: &Inst, ty: Type) -> Result<Made, Error> {
        let language = self.language;
        let each = |text| Ok(Made::Each(text));
        let whole_tile = |text| Ok(Made::Whole(text));
        match inst {
            Inst::Literal(literal) => each(self.literal(*literal)),
            Inst::Constant(i) => each(Text::primary(&self.names.constants[*i as usize])),
            Inst::Argument(i) => each(Text::primary(&self.names.params[*i as usize])),
            Inst::Builtin(builtin) => each(Text::primary(language.builtin(*builtin))),
            Inst::Unary(op, a) => each(expr::unary(language, *op, self.scalar(*a), &self.text(*a))),
            Inst::Binary(op, a, b) => {
                let (left, right) = (self.text(*a), self.text(*b));
                each(expr::binary(language, *op, self.scalar(*a), &left, &right))
            }
            Inst::Fma(a, b, c) => {
                let [a, b, c] = [a, b, c].map(|v| self.text(*v));
                each(expr::call(language.fma(), &[&a, &b, &c]))
            }
            Inst::Select { cond, yes, no } => {
                let [cond, yes, no] = [cond, yes, no].map(|v| self.text(*v));
                each(expr::select(&cond, &yes, &no))
            }
            Inst::Cast(to, a) => each(self.cast(*to, *a)),
            Inst::Bitcast(to, a) => each(match self.scalar(*a) == *to {
                true => self.text(*a),
                false => language.bits(*to, &self.text(*a)),
            }),
            Inst::Dot4 { a, b, acc } => {
                let [a, b, acc] = [a, b, acc].map(|v| self.text(*v));
                each(expr::call("tk_dot4", &[&a, &b, &acc]))
            }
            Inst::FmaHalves { a, b, c } => {
                let [a, b, c] = [a, b, c].map(|v| self.text(*v));
                each(expr::call("tk_fma_f16x2", &[&a, &b, &c]))
            }
            Inst::Lookup { codes, table } => {
                let operands: Vec<Text> =
                    [codes].into_iter().chain(table).map(|v| self.text(*v)).collect();
                let operands: Vec<&Text> = operands.iter().collect();
                each(expr::call("tk_lookup", &operands))
            }
            Inst::Pack(values) => {
                expr::type_name(language, ty)?;
                let elements: Vec<Text> = values.iter().map(|v| self.text(*v)).collect();
                each(language.pack(ty.scalar(), &elements))
            }
            Inst::Extract(vector, at) => {
                let Type::Vector(scalar, lanes) = self.ty(*vector) else {
                    return Err(format!("expected a vector, found {}", self.ty(*vector)).into());
                };
                each(language.extract(&self.text(*vector), scalar, lanes, *at))
            }
            Inst::Load { place, index, lanes, hint } => {
                let text = self.load(*place, *index, *lanes, *hint, ty)?;
                Ok(if ty.tile().is_some() { Made::Whole(text) } else { Made::Each(text) })
            }
            Inst::Atomic { op, place, index, value } => {
                let scalar = self.scalar(*value);
                let at = self.address(*place, *index);
                each(language.atomic(*op, *place, scalar, &at, &self.text(*value)))
            }
            Inst::Simd(op, value, lane) => {
                let lane = lane.map(|l| self.text(l));
                each(language.simd(*op, self.scalar(*value), &self.text(*value), lane.as_ref()))
            }
            Inst::Splat(to, a) => {
                if !matches!(to.tile(), Some(Tile { role: Role::C | Role::Row, .. })) {
                    return Err(format!("expected an accumulator or a row, found {to}").into());
                }
                let row = self.ty(*a).tile().is_some() && to.tile() != self.ty(*a).tile();
                each(match row {
                    true => {
                        Text::primary(format!("{}{}", self.tile(*a), language.row_of_element()))
                    }
                    false => self.text(*a),
                })
            }
            Inst::TileRow(_) => each(language.tile_row()),
            Inst::TileCol(_) => each(language.tile_col()),
            Inst::TileLoad { ty, place, index, stride, transposed, swizzled } => {
                let text = self.text(*stride);
                let access = self.access(*ty, *place, *index, *stride, &text, *transposed)?;
                let from = (self.names.place(*place), self.text(*index));
                let swizzled = swizzled.then_some(from);
                whole_tile(language.tile_load(&Access { swizzled, ..access })?)
            }
            Inst::TileOf(to, words) => {
                let Some(to) = to.tile() else {
                    return Err(format!("expected a tile, found {to}").into());
                };
                let words: Vec<Text> = words.iter().map(|v| self.text(*v)).collect();
                whole_tile(language.tile_of(to, &words)?)
            }
            Inst::Mma { a, b, c } => {
                let Some(left) = self.ty(*a).tile() else {
                    return Err(format!("expected a tile, found {}", self.ty(*a)).into());
                };
                let [a, b, c] = [a, b, c].map(|v| self.tile(*v));
                whole_tile(language.mma((left, &a), &b, &c)?)
            }
            Inst::RowReduce(op, a) => whole_tile(language.row_reduce(*op, &self.tile(*a))),
            Inst::ToLeft(to, a) => {
                let Some(to) = to.tile() else {
                    return Err(format!("expected a tile, found {to}").into());
                };
                whole_tile(language.to_left(to, &self.tile(*a)))
            }
            other => Err(format!("expected an instruction with a result, found {other:?}").into()),
        }
    }

    /// An instruction without a result; empty if the language has nothing to say.
    fn statement(&self, inst: &Inst) -> Result<String, Error> {
        let language = self.language;
        Ok(match inst {
            Inst::Store { place, index, value } => {
                let (text, ty) = (self.text(*value).text, self.ty(*value));
                match ty {
                    Type::Tile(_) => {
                        format!("{} = {};", self.element(*place, *index), self.tile(*value))
                    }
                    Type::Vector(..) if !matches!(place, Place::Register(_)) => {
                        let kind = expr::type_name(language, ty)?;
                        let pointer = language.pointer(self.kernel, *place, &kind, true);
                        format!("*({pointer})({}) = {text};", self.address(*place, *index))
                    }
                    _ => format!("{} = {text};", self.element(*place, *index)),
                }
            }
            Inst::CopyAsync { to, to_index, from, from_index, lanes, keep } => {
                let scalar = self.kernel.element(*from).scalar();
                let bytes = scalar.bytes() as u32 * u32::from(*lanes);
                if !matches!(bytes, 4 | 8 | 16) {
                    return Err(
                        format!("expected a copy of 4, 8 or 16 bytes, found {bytes}").into()
                    );
                }
                let keep = keep.map(|k| self.text(k));
                let (to, from) = (self.address(*to, *to_index), self.address(*from, *from_index));
                language.copy(bytes, &to, &from, keep.as_ref())
            }
            Inst::TileStore { place, index, stride, value } => {
                let text = self.text(*stride);
                let access = self.access(self.ty(*value), *place, *index, *stride, &text, false)?;
                language.tile_store(&access, &self.tile(*value))?
            }
            Inst::Wgmma { sum, a, a_index, b, b_index } => {
                let scalar = self.kernel.element(*a).scalar();
                let (a, b) = (self.address(*a, *a_index), self.address(*b, *b_index));
                language.wgmma(self.names.place(*sum), scalar, &a, &b)?
            }
            Inst::WgmmaOf { sum, left, b, b_index } => {
                let scalar = self.kernel.element(*b).scalar();
                let left: Vec<String> = left.iter().map(|tile| self.tile(*tile)).collect();
                let b = self.address(*b, *b_index);
                language.wgmma_of(self.names.place(*sum), scalar, &left, &b)?
            }
            Inst::WgmmaFence => format!("{}{}", self.holds(), language.signal(inst)),
            Inst::WgmmaWait(_) => {
                format!("{} {}", language.signal(inst), self.holds()).trim_end().to_owned()
            }
            inst => language.signal(inst),
        })
    }

    /// Holds all accumulators of products of warpgroups.
    fn holds(&self) -> String {
        let mut sums = std::collections::BTreeSet::new();
        self.kernel.visit(&mut |node| {
            sums.extend(node.inst.warpgroup_sum().map(|sum| self.names.place(sum)));
        });
        sums.into_iter().map(|sum| self.language.hold(sum) + " ").collect()
    }

    fn access<'t>(
        &self,
        ty: Type,
        place: Place,
        index: Value,
        stride: Value,
        text: &'t Text,
        transposed: bool,
    ) -> Result<Access<'t>, String> {
        let tile = ty.tile().ok_or_else(|| format!("expected a tile, found {ty}"))?;
        let rows = self.multiples[index.0 as usize].min(self.multiples[stride.0 as usize]);
        Ok(Access {
            tile,
            at: self.address(place, index),
            stride: text,
            transposed,
            shared: matches!(place, Place::Shared(_)),
            align: multiples::alignment(self.kernel, place).min(rows * tile.scalar.bytes() as u32),
            swizzled: None,
        })
    }

    fn literal(&self, literal: Literal) -> Text {
        let text = match literal {
            Literal::F32(bits) => match finite(bits) {
                Some(text) => text,
                None => return self.language.special(bits),
            },
            other => whole(other).unwrap_or_default(),
        };
        let binds = if text.starts_with('-') { binds::UNARY } else { binds::PRIMARY };
        Text::new(text, binds)
    }

    fn cast(&self, to: Scalar, a: Value) -> Text {
        let text = self.text(a);
        let Type::Vector(from, lanes) = self.ty(a) else {
            return expr::cast(self.language, self.scalar(a), to, &text);
        };
        let element = |at| {
            let from_text = self.language.extract(&text, from, lanes, at);
            expr::cast(self.language, from, to, &from_text)
        };
        let elements: Vec<Text> = (0..lanes).map(element).collect();
        self.language.pack(to, &elements)
    }

    /// An element of an array.
    fn element(&self, place: Place, index: Value) -> String {
        let array = self.names.place(place);
        match place {
            Place::Register(i) if self.kernel.registers[i as usize].len == 1 => array.to_owned(),
            _ => format!("{array}[{}]", self.text(index).text),
        }
    }

    /// The address of an element.
    fn address(&self, place: Place, index: Value) -> String {
        let index = self.text(index);
        match index.text.as_str() {
            "0u" => self.names.place(place).to_owned(),
            // Indices wrap at 32 bits, addresses do not: a sum is finished before it is added.
            _ => format!("{} + {}", self.names.place(place), index.within(binds::PRODUCT)),
        }
    }

    fn load(
        &self,
        place: Place,
        index: Value,
        lanes: u8,
        hint: LoadHint,
        ty: Type,
    ) -> Result<Text, Error> {
        let kind = expr::type_name(self.language, ty)?;
        let vector = lanes > 1 && !matches!(place, Place::Register(_));
        let cast = self.language.pointer(self.kernel, place, &kind, false);
        let at = self.address(place, index);
        if matches!(place, Place::Buffer(_)) && hint != LoadHint::None {
            let pointer = if vector { format!("({cast})({at})") } else { at.clone() };
            if let Some(text) = self.language.hinted(hint, &pointer) {
                return Ok(text);
            }
        }
        Ok(match vector {
            true => Text::new(format!("*({cast})({at})"), binds::UNARY),
            false => Text::primary(self.element(place, index)),
        })
    }
}

/// The text of an instruction: an expression for one number (of a tile, for element `e`), or for a
/// whole tile.
enum Made {
    Each(Text),
    Whole(Text),
}

/// A message about the instruction at hand, or a fault of one inside it.
enum Error {
    Here(String),
    Inner(Fault),
}

impl From<String> for Error {
    fn from(message: String) -> Self {
        Error::Here(message)
    }
}

/// A value's name in the text.
fn name(value: Value) -> String {
    format!("v{}", value.0)
}

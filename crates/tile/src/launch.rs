//! The launch contract: how many threadgroups, how many threads, and what must hold of sizes and
//! addresses.

use std::fmt;

use crate::ir::{Constant, Kernel, Param, ParamKind};
use crate::types::Scalar;

/// The unit of work of one threadgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Independent elements, some per thread.
    Element,
    /// A row, reduced by all threads together.
    Row,
    /// Some rows of a matrix-vector product, one or more per simdgroup.
    Vector,
    /// A tile of a matrix product or of attention.
    Tile,
}

impl Mode {
    /// Its name in the text form and the manifest.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Element => "element",
            Mode::Row => "row",
            Mode::Vector => "vector",
            Mode::Tile => "tile",
        }
    }
}

/// A kernel's launch contract.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// The unit of work of one threadgroup.
    pub mode: Mode,
    /// Threadgroups along each axis.
    pub grid: [Extent; 3],
    /// Threads per threadgroup: a multiple of 32, at most 1024.
    pub threads: u32,
    /// The conditions that must hold at bind time.
    pub requirements: Vec<Requirement>,
}

impl Default for Launch {
    fn default() -> Self {
        let one = || Extent::Literal(1);
        Launch {
            mode: Mode::Element,
            grid: [one(), one(), one()],
            threads: 32,
            requirements: vec![],
        }
    }
}

/// A condition checked when buffers are bound.
#[derive(Debug, Clone, PartialEq)]
pub enum Requirement {
    /// An extent is a multiple of a number.
    Divisible(Extent, u32),
    /// An extent is at most a number.
    AtMost(Extent, u32),
    /// A buffer has at least this many elements.
    Length(String, Extent),
    /// A buffer's address is a multiple of this many bytes.
    Aligned(String, u32),
}

/// A size in terms of literals and names: constants, `u32` arguments, and free dimensions given at
/// launch.
#[derive(Debug, Clone, PartialEq)]
pub enum Extent {
    /// A number.
    Literal(u32),
    /// A constant, an argument or a free dimension.
    Name(String),
    /// A sum.
    Add(Box<Extent>, Box<Extent>),
    /// A product.
    Mul(Box<Extent>, Box<Extent>),
    /// A quotient, rounded up.
    CeilDiv(Box<Extent>, Box<Extent>),
}

impl Extent {
    /// Its value, given the values of the names.
    ///
    /// # Errors
    /// A name without a value, a division by 0, or a value that does not fit 32 bits.
    pub fn eval(&self, names: &dyn Fn(&str) -> Option<u32>) -> Result<u32, String> {
        let found = match self {
            Extent::Literal(n) => Some(*n),
            Extent::Name(name) => {
                return names(name).ok_or_else(|| format!("no value for `{name}`"));
            }
            Extent::Add(a, b) => a.eval(names)?.checked_add(b.eval(names)?),
            Extent::Mul(a, b) => a.eval(names)?.checked_mul(b.eval(names)?),
            Extent::CeilDiv(a, b) => match (a.eval(names)?, b.eval(names)?) {
                (_, 0) => None,
                (a, b) => Some(a.div_ceil(b)),
            },
        };
        found.ok_or_else(|| format!("`{self}` does not fit 32 bits"))
    }

    /// The names in it, each once, in order of appearance.
    pub fn names<'a>(&'a self, found: &mut Vec<&'a str>) {
        match self {
            Extent::Literal(_) => {}
            Extent::Name(name) => {
                if !found.contains(&name.as_str()) {
                    found.push(name);
                }
            }
            Extent::Add(a, b) | Extent::Mul(a, b) | Extent::CeilDiv(a, b) => {
                a.names(found);
                b.names(found);
            }
        }
    }

    /// The quotient rounded up.
    pub fn ceil_div(self, by: impl Into<Extent>) -> Extent {
        Extent::CeilDiv(Box::new(self), Box::new(by.into()))
    }
}

impl From<u32> for Extent {
    fn from(n: u32) -> Self {
        Extent::Literal(n)
    }
}

impl From<&str> for Extent {
    fn from(name: &str) -> Self {
        Extent::Name(name.to_owned())
    }
}

impl<T: Into<Extent>> std::ops::Add<T> for Extent {
    type Output = Extent;
    fn add(self, other: T) -> Extent {
        Extent::Add(Box::new(self), Box::new(other.into()))
    }
}

impl<T: Into<Extent>> std::ops::Mul<T> for Extent {
    type Output = Extent;
    fn mul(self, other: T) -> Extent {
        Extent::Mul(Box::new(self), Box::new(other.into()))
    }
}

impl fmt::Display for Extent {
    /// `ceil_div((rows + 3) * width, 64)`: sums inside products are in parentheses.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let enclosed =
            |e: &Extent, enclose: bool| if enclose { format!("({e})") } else { e.to_string() };
        let sum = |e: &Extent| matches!(e, Extent::Add(..));
        let product = |e: &Extent| matches!(e, Extent::Mul(..));
        match self {
            Extent::Literal(n) => write!(f, "{n}"),
            Extent::Name(name) => f.write_str(name),
            // What stands on the right is in parentheses where it would else be read as part of the
            // left.
            Extent::Add(a, b) => write!(f, "{a} + {}", enclosed(b, sum(b))),
            Extent::Mul(a, b) => {
                write!(f, "{} * {}", enclosed(a, sum(a)), enclosed(b, sum(b) || product(b)))
            }
            Extent::CeilDiv(a, b) => write!(f, "ceil_div({a}, {b})"),
        }
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Requirement::Divisible(extent, by) => write!(f, "{extent} divisible by {by}"),
            Requirement::AtMost(extent, limit) => write!(f, "{extent} at most {limit}"),
            Requirement::Length(name, extent) => write!(f, "{name} holds {extent}"),
            Requirement::Aligned(name, bytes) => write!(f, "{name} aligned to {bytes}"),
        }
    }
}

/// The numbers of one launch besides buffers: constants, scalar arguments and free dimensions by
/// name, as register bits.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Numbers(Vec<(String, u32)>);

impl Numbers {
    /// None yet.
    pub fn new() -> Self {
        Numbers::default()
    }

    /// With an unsigned number (or `bool` as 0 and 1), replacing an earlier one of that name.
    pub fn with(mut self, name: &str, value: u32) -> Self {
        self.set(name, value);
        self
    }

    /// With a float.
    pub fn with_f32(self, name: &str, value: f32) -> Self {
        self.with(name, value.to_bits())
    }

    /// Sets the bits of a name.
    pub fn set(&mut self, name: &str, bits: u32) {
        match self.0.iter_mut().find(|(n, _)| n == name) {
            Some(found) => found.1 = bits,
            None => self.0.push((name.to_owned(), bits)),
        }
    }

    /// The bits of a name.
    pub fn get(&self, name: &str) -> Option<u32> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, bits)| *bits)
    }

    /// All of them, in the order given.
    pub fn iter(&self) -> impl Iterator<Item = (&str, u32)> {
        self.0.iter().map(|(name, bits)| (name.as_str(), *bits))
    }
}

/// A buffer about to be bound: its length and alignment, for the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BoundBuffer {
    /// Elements.
    pub len: usize,
    /// A power of two that divides its address.
    pub align: usize,
}

impl Kernel {
    /// Checks the contract and returns the grid. `buffers` are the buffer parameters in binding
    /// order.
    ///
    /// # Errors
    /// One sentence naming the kernel, the rule and the numbers found.
    pub fn bind(&self, numbers: &Numbers, buffers: &[BoundBuffer]) -> Result<[u32; 3], String> {
        let fail = |why: String| Err(format!("{}: {why}", self.name));
        let names = |name: &str| numbers.get(name);
        let wanted: Vec<&Param> =
            self.params.iter().filter(|p| matches!(p.kind, ParamKind::Buffer { .. })).collect();
        if wanted.len() != buffers.len() {
            return fail(format!("{} buffers expected, {} bound", wanted.len(), buffers.len()));
        }
        for Constant { name, .. } in &self.constants {
            if numbers.get(name).is_none() {
                return fail(format!("no value for constant `{name}`"));
            }
        }
        for param in &self.params {
            if matches!(param.kind, ParamKind::Argument(_)) && numbers.get(&param.name).is_none() {
                return fail(format!("no value for argument `{}`", param.name));
            }
            let ParamKind::Buffer { scalar, .. } = param.kind else { continue };
            let at = wanted.iter().position(|p| p.name == param.name).unwrap_or(0);
            if !buffers[at].align.is_multiple_of(scalar.bytes()) {
                return fail(format!("{} must be aligned to {}", param.name, scalar.bytes()));
            }
        }
        let bound = |name: &str| wanted.iter().position(|p| p.name == name).map(|i| buffers[i]);
        for rule in &self.launch.requirements {
            let kept = match rule {
                Requirement::Divisible(extent, by) => {
                    let n = extent.eval(&names).map_err(|e| format!("{}: {e}", self.name))?;
                    (n % by == 0).then_some(()).ok_or_else(|| format!("{extent} is {n}"))
                }
                Requirement::AtMost(extent, limit) => {
                    let n = extent.eval(&names).map_err(|e| format!("{}: {e}", self.name))?;
                    (n <= *limit).then_some(()).ok_or_else(|| format!("{extent} is {n}"))
                }
                Requirement::Length(name, extent) => {
                    let n = extent.eval(&names).map_err(|e| format!("{}: {e}", self.name))?;
                    let len = bound(name).map_or(0, |b| b.len);
                    (len >= n as usize).then_some(()).ok_or_else(|| format!("{len}, not {n}"))
                }
                Requirement::Aligned(name, bytes) => {
                    let align = bound(name).map_or(1, |b| b.align);
                    align
                        .is_multiple_of(*bytes as usize)
                        .then_some(())
                        .ok_or_else(|| format!("{align}"))
                }
            };
            if let Err(found) = kept {
                return fail(format!("the contract says {rule}, found {found}"));
            }
        }
        let mut grid = [0; 3];
        for (axis, extent) in self.launch.grid.iter().enumerate() {
            grid[axis] = extent.eval(&names).map_err(|e| format!("{}: grid: {e}", self.name))?;
            // The limits of CUDA: 2^31 - 1 along the first axis, 65,535 along the others.
            let limit = if axis == 0 { i32::MAX as u32 } else { 65_535 };
            if grid[axis] == 0 || grid[axis] > limit {
                return fail(format!("grid axis {axis} is {}", grid[axis]));
            }
        }
        Ok(grid)
    }

    /// The free dimensions: names in the contract that are neither constants nor arguments.
    pub fn dimensions(&self) -> Vec<&str> {
        let mut names = Vec::new();
        self.launch.grid.iter().for_each(|e| e.names(&mut names));
        for rule in &self.launch.requirements {
            match rule {
                Requirement::Divisible(e, _)
                | Requirement::AtMost(e, _)
                | Requirement::Length(_, e) => e.names(&mut names),
                Requirement::Aligned(..) => {}
            }
        }
        names.retain(|name| {
            !self.constants.iter().any(|c| c.name == *name)
                && !self
                    .params
                    .iter()
                    .any(|p| p.name == *name && matches!(p.kind, ParamKind::Argument(Scalar::U32)))
        });
        names
    }
}

//! The rules of the representation. Each is stated once, beside its check: rules of the whole
//! kernel in `contract`, of instructions in `operands`, uniform control in `uniform`, memory that
//! two arrays share in `over`, and here the three that tie values to places:
//!
//! - A value is defined once, and before it is used.
//! - A value is used in the block that defines it or in blocks inside that one. What has to survive
//!   a block is a register: in the language, a `Var`.
//! - An instruction has a result exactly if it computes something, and the result has the type
//!   computed.

use std::fmt;

use crate::ir::{Block, Inst, Kernel, Statement, Value};
use crate::text;
use crate::types::Scalar;
pub(crate) use operands::{Computed, Operands};

mod contract;
mod operands;
mod over;
mod uniform;

/// A fault of a kernel, and its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The kernel's name; empty if a text is at fault before it names one.
    pub kernel: String,
    /// The line of its text form, from 1; 0 if unknown.
    pub line: usize,
    /// `file:line` of the Rust source it was recorded at; empty if unknown.
    pub source: String,
    /// The expected and the found.
    pub message: String,
}

impl fmt::Display for Fault {
    /// `scale_f16, line 12 (scale.rs:9): ..`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.kernel.is_empty() { "text" } else { &self.kernel })?;
        if self.line > 0 {
            write!(f, ", line {}", self.line)?;
        }
        if !self.source.is_empty() {
            write!(f, " ({})", self.source)?;
        }
        write!(f, ": {}", self.message)
    }
}

impl std::error::Error for Fault {}

/// Checks every rule.
///
/// # Errors
/// The first rule broken, and the instruction that breaks it.
pub fn verify(kernel: &Kernel) -> Result<(), Fault> {
    contract::check(kernel).map_err(|(part, message)| Fault {
        kernel: kernel.name.clone(),
        line: text::part_line(kernel, part),
        source: String::new(),
        message,
    })?;
    Scopes::new(kernel).check()?;
    over::check(kernel)?;
    uniform::check(kernel)
}

/// The fault of the instruction that [`Kernel::visit`] reaches as number `index`.
fn fault(kernel: &Kernel, index: usize, node: &Statement, message: String) -> Fault {
    Fault {
        kernel: kernel.name.clone(),
        line: text::node_lines(kernel).get(index).copied().unwrap_or(0),
        source: kernel.source(node.source).to_owned(),
        message: format!("{}: {message}", node.inst.name()),
    }
}

/// Where a value can be used.
#[derive(Clone, Copy, PartialEq)]
enum Scope {
    /// It is not defined yet.
    Nowhere,
    /// In the block being checked.
    Open,
    /// In a block that has ended.
    Closed,
}

/// The walk that checks instructions one by one, with the values defined so far.
struct Scopes<'k> {
    kernel: &'k Kernel,
    operands: Operands<'k>,
    scope: Vec<Scope>,
    /// Values defined in the open blocks, innermost last.
    open: Vec<Value>,
    /// Instructions met.
    index: usize,
}

impl<'k> Scopes<'k> {
    fn new(kernel: &'k Kernel) -> Self {
        let scope = vec![Scope::Nowhere; kernel.values.len()];
        Scopes { kernel, operands: Operands::new(kernel), scope, open: vec![], index: 0 }
    }

    fn check(&mut self) -> Result<(), Fault> {
        let kernel = self.kernel;
        self.block(&kernel.body, None)
    }

    fn block(&mut self, block: &Block, loop_index: Option<Value>) -> Result<(), Fault> {
        let outer = self.open.len();
        self.open.extend(loop_index);
        for node in &block.0 {
            let index = self.index;
            self.index += 1;
            let found = self.node(node);
            found.map_err(|message| fault(self.kernel, index, node, message))?;
            for block in node.inst.blocks() {
                let loop_index = match node.inst {
                    Inst::For { index, .. } => Some(index),
                    _ => None,
                };
                self.block(block, loop_index)?;
            }
        }
        for value in self.open.drain(outer..) {
            self.scope[value.0 as usize] = Scope::Closed;
        }
        Ok(())
    }

    fn node(&mut self, node: &Statement) -> Result<(), String> {
        for value in node.inst.operands().iter() {
            self.used(*value)?;
        }
        let computed = self.operands.result(&node.inst)?;
        match (computed, node.result) {
            (None, None) => {}
            (Some(computed), Some(result)) => {
                self.defined(result)?;
                let found = self.kernel.ty(result);
                if found != computed {
                    return Err(format!("its result is {computed}, but %{} is {found}", result.0));
                }
                self.open.push(result);
            }
            (Some(computed), None) => return Err(format!("a result of type {computed} expected")),
            (None, Some(result)) => {
                return Err(format!("it has no result, but defines %{}", result.0));
            }
        }
        if let Inst::For { index, .. } = node.inst {
            self.defined(index)?;
            let found = self.kernel.ty(index);
            if found != Scalar::U32.into() {
                return Err(format!("its index %{} is {found}: u32 expected", index.0));
            }
        }
        Ok(())
    }

    fn used(&self, value: Value) -> Result<(), String> {
        match self.scope.get(value.0 as usize) {
            Some(Scope::Open) => Ok(()),
            Some(Scope::Closed) => Err(format!(
                "%{} is used outside the block that defines it; hint: make it a Var",
                value.0
            )),
            Some(Scope::Nowhere) => Err(format!("%{} is used before it is defined", value.0)),
            None => Err(format!("there is no value %{}", value.0)),
        }
    }

    fn defined(&mut self, value: Value) -> Result<(), String> {
        match self.scope.get_mut(value.0 as usize) {
            Some(scope) if *scope == Scope::Nowhere => {
                *scope = Scope::Open;
                Ok(())
            }
            Some(_) => Err(format!("%{} is defined twice", value.0)),
            None => Err(format!("there is no value %{}", value.0)),
        }
    }
}

#[cfg(test)]
mod tests;

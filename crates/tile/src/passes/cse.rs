//! Common subexpressions: a pure instruction whose equal is in scope becomes the earlier value.
//!
//! Limits: loads are not merged, as another thread may write between them; values of two sibling
//! blocks neither.

use std::collections::HashMap;
use std::mem::{Discriminant, discriminant};

use super::rewrite::{Rewrite, Visitor, is_pure, rewrite};
use crate::ir::{Inst, Kernel, OperandList, Statement, Value};

/// Every pure computation once per scope.
pub(super) fn cse(kernel: &Kernel) -> Kernel {
    rewrite(kernel, &mut Cse { scopes: vec![HashMap::new()] })
}

/// Instructions of one kind on the same operands; immediates are compared after that.
type Key = (Discriminant<Inst>, OperandList);

struct Cse {
    scopes: Vec<HashMap<Key, Vec<(Inst, Value)>>>,
}

impl Visitor for Cse {
    fn node(&mut self, r: &mut Rewrite, node: Statement) {
        let Some(result) = node.result.filter(|_| is_pure(&node.inst)) else {
            return r.keep(node, self);
        };
        let key = (discriminant(&node.inst), node.inst.operands());
        let equal = self.scopes.iter().rev().find_map(|scope| {
            scope.get(&key)?.iter().find(|(inst, _)| *inst == node.inst).map(|(_, value)| *value)
        });
        if let Some(value) = equal {
            return r.rename(result, value);
        }
        if let Some(scope) = self.scopes.last_mut() {
            scope.entry(key).or_default().push((node.inst.clone(), result));
        }
        r.keep(node, self);
    }

    fn enter(&mut self) {
        self.scopes.push(HashMap::new());
    }

    fn leave(&mut self) {
        self.scopes.pop();
    }
}

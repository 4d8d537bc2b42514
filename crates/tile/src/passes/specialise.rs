//! Specialisation: constants that have a value become literals, in the body and in the launch
//! contract.
//!
//! Limits: arguments and free dimensions change from launch to launch and stay.

use super::rewrite::{Rewrite, Visitor, rewrite};
use crate::ir::{Inst, Kernel, Literal, Statement};
use crate::launch::{Extent, Numbers, Requirement};
use crate::types::Scalar;

/// The kernel with every constant that `numbers` gives a value replaced by it. Those constants are
/// no longer declared; the others keep their order.
pub fn specialise(kernel: &Kernel, numbers: &Numbers) -> Kernel {
    let value = |name: &str, scalar: Scalar| Literal::from_bits(scalar, numbers.get(name)?);
    let known: Vec<Option<Literal>> =
        kernel.constants.iter().map(|c| value(&c.name, c.scalar)).collect();
    let mut left = 0;
    let moved = known
        .iter()
        .map(|literal| {
            left += u32::from(literal.is_none());
            left.saturating_sub(1)
        })
        .collect();
    let mut special = rewrite(kernel, &mut Specialise { known: &known, moved });
    let unknown = special.constants.into_iter().zip(&known).filter(|(_, k)| k.is_none());
    special.constants = unknown.map(|(constant, _)| constant).collect();
    let names = |name: &str| {
        let at = kernel.constants.iter().position(|c| c.name == name)?;
        known[at].map(Literal::bits)
    };
    let launch = &mut special.launch;
    launch.grid.iter_mut().for_each(|extent| replace(extent, &names));
    for rule in &mut launch.requirements {
        match rule {
            Requirement::Divisible(extent, _)
            | Requirement::AtMost(extent, _)
            | Requirement::Length(_, extent) => replace(extent, &names),
            Requirement::Aligned(..) => {}
        }
    }
    special
}

fn replace(extent: &mut Extent, names: &dyn Fn(&str) -> Option<u32>) {
    match extent {
        Extent::Literal(_) => {}
        Extent::Name(name) => {
            if let Some(n) = names(name) {
                *extent = Extent::Literal(n);
            }
        }
        Extent::Add(a, b) | Extent::Mul(a, b) | Extent::CeilDiv(a, b) => {
            replace(a, names);
            replace(b, names);
        }
    }
    // What is known altogether is one number; what does not fit stays for `bind` to refuse.
    if let Ok(n) = extent.eval(&|_| None) {
        *extent = Extent::Literal(n);
    }
}

struct Specialise<'a> {
    known: &'a [Option<Literal>],
    moved: Vec<u32>,
}

impl Visitor for Specialise<'_> {
    fn node(&mut self, r: &mut Rewrite, mut node: Statement) {
        if let Inst::Constant(i) = node.inst {
            node.inst = match self.known[i as usize] {
                Some(literal) => Inst::Literal(literal),
                None => Inst::Constant(self.moved[i as usize]),
            };
        }
        r.keep(node, self);
    }
}

//! The rules of uniform control. A target whose threads disagree about reaching a barrier hangs or
//! computes nonsense:
//!
//! - All threads of the group reach a `barrier`, `grid_wait` or `grid_trigger` together, and a
//!   `wgmma` with what orders it.
//! - All lanes of the simdgroup reach an exchange, a `simd_barrier` and every instruction on tiles
//!   together.
//! - All lanes agree on where a tile lies in memory, on its stride, and on a scalar that fills it.
//!
//! The values on which threads agree are found by following definitions: literals, constants,
//! arguments and the group's index are the same in all threads; the simdgroup's index, and what a
//! simdgroup exchanged, in all lanes; the rest differs. A load is the same where its index is, from
//! a buffer that is only read and from shared memory: what one thread of the group could write
//! there while another reads is a race, which the interpreter reports. A register array is as its
//! stores: their values, their indices and the control around them, found by repeating the walk
//! until nothing changes.

use super::{Fault, fault};
use crate::ir::{Access, Block, Builtin, Inst, Kernel, ParamKind, Place, SimdOp, Statement, Value};
use crate::table::Level;
use crate::text;

/// Checks the rules. The kernel keeps all others.
pub(super) fn check(kernel: &Kernel) -> Result<(), Fault> {
    let mut walk = Walk {
        kernel,
        // A group that is one simdgroup agrees as a simdgroup does.
        simd: if kernel.launch.threads == 32 { Level::Group } else { Level::Simd },
        values: vec![Level::Group; kernel.values.len()],
        registers: vec![Level::Group; kernel.registers.len()],
        changed: true,
        judge: false,
        index: 0,
    };
    // Levels only rise, and each array's can rise twice: this ends.
    while walk.changed {
        walk.changed = false;
        walk.run()?;
    }
    walk.judge = true;
    walk.run()
}

/// The control around an instruction: who agrees on reaching it, and the instruction that decides.
#[derive(Clone, Copy)]
struct Control<'k> {
    level: Level,
    decider: Option<(usize, &'k Statement)>,
}

struct Walk<'k> {
    kernel: &'k Kernel,
    simd: Level,
    values: Vec<Level>,
    registers: Vec<Level>,
    /// Whether a register array rose in this walk.
    changed: bool,
    /// Whether levels are final, so that rules can be checked.
    judge: bool,
    index: usize,
}

impl<'k> Walk<'k> {
    fn run(&mut self) -> Result<(), Fault> {
        self.index = 0;
        let kernel = self.kernel;
        self.block(&kernel.body, Control { level: Level::Group, decider: None })
    }

    fn block(&mut self, block: &'k Block, control: Control<'k>) -> Result<(), Fault> {
        for node in &block.0 {
            let index = self.index;
            self.index += 1;
            if self.judge {
                self.rules(node, control)
                    .map_err(|message| fault(self.kernel, index, node, message))?;
            }
            let level = self.computed(node, control.level);
            if let Some(value) = node.result {
                self.set(value, level);
            }
            if let Inst::For { index: value, start, step, .. } = node.inst {
                let level = self.join(&[start, step]);
                self.set(value, level);
            }
            // Only `for` and `if` hold blocks, and their operands decide who runs them.
            let inner = if level > control.level {
                Control { level, decider: Some((index, node)) }
            } else {
                control
            };
            for block in node.inst.blocks() {
                self.block(block, inner)?;
            }
        }
        Ok(())
    }

    fn set(&mut self, value: Value, level: Level) {
        if let Some(known) = self.values.get_mut(value.0 as usize) {
            *known = level;
        }
    }

    fn level(&self, value: Value) -> Level {
        self.values.get(value.0 as usize).copied().unwrap_or(Level::Thread)
    }

    fn join(&self, values: &[Value]) -> Level {
        values.iter().map(|v| self.level(*v)).max().unwrap_or(Level::Group)
    }

    /// Who agrees on an instruction's result, given control. For `for` and `if`, on the way it
    /// takes.
    fn computed(&mut self, node: &Statement, control: Level) -> Level {
        let operands = self.join(&node.inst.operands());
        match &node.inst {
            Inst::Builtin(Builtin::Group(_) | Builtin::Groups(_)) => Level::Group,
            Inst::Builtin(Builtin::Simd) => self.simd,
            Inst::Builtin(Builtin::Thread | Builtin::Lane) => Level::Thread,
            Inst::Load { place, index, .. } => self.level(*index).max(self.array(*place)),
            Inst::Store { place: Place::Register(i), .. } => {
                if let Some(known) = self.registers.get_mut(*i as usize) {
                    let level = operands.max(control);
                    self.changed |= level > *known;
                    *known = level.max(*known);
                }
                Level::Group
            }
            Inst::Wgmma { sum: Place::Register(i), .. }
            | Inst::WgmmaOf { sum: Place::Register(i), .. } => {
                // Each simdgroup has rows of its own.
                if let Some(known) = self.registers.get_mut(*i as usize) {
                    self.changed |= *known < self.simd;
                    *known = self.simd.max(*known);
                }
                Level::Group
            }
            Inst::Atomic { .. } => Level::Thread,
            Inst::Simd(op, value, lane) => self.exchanged(*op, *value, *lane),
            _ => operands,
        }
    }

    /// Who agrees on what an array holds at an index.
    fn array(&self, place: Place) -> Level {
        match place {
            Place::Buffer(i) => match self.kernel.params.get(i as usize).map(|p| p.kind) {
                Some(ParamKind::Buffer { access: Access::In, .. }) => Level::Group,
                // Other groups may write it meanwhile.
                _ => Level::Thread,
            },
            Place::Shared(_) => Level::Group,
            Place::Register(i) => self.registers.get(i as usize).copied().unwrap_or(Level::Thread),
        }
    }

    fn exchanged(&self, op: SimdOp, value: Value, lane: Option<Value>) -> Level {
        let value = self.level(value);
        match op {
            SimdOp::Reduce(_) | SimdOp::Any | SimdOp::All | SimdOp::Ballot => value.min(self.simd),
            SimdOp::PrefixSum => Level::Thread,
            SimdOp::ShuffleXor(_) => value,
            // Where lanes differ, all of them get the value of one lane if they agree on which.
            SimdOp::Shuffle => match lane.map(|l| self.level(l)) {
                Some(Level::Group | Level::Simd) => value.min(self.simd),
                _ => value,
            },
        }
    }

    fn rules(&self, node: &Statement, control: Control<'_>) -> Result<(), String> {
        let kernel = self.kernel;
        let tile = |v: Value| kernel.ty(v).tile().is_some();
        let on_tiles =
            node.result.is_some_and(tile) || node.inst.operands().iter().copied().any(tile);
        let on_tiles = if on_tiles { Level::Simd } else { Level::Thread };
        let needed = node.inst.together().min(on_tiles);
        if control.level > needed {
            let who = if needed == Level::Group { "threads of the group" } else { "lanes" };
            return Err(format!("all {who} must reach it together, but {}", self.why(control)));
        }
        let differs = |(_, v): &(_, Value)| !tile(*v) && self.level(*v) == Level::Thread;
        match node.inst.agreed().into_iter().find(differs) {
            Some((what, v)) => Err(format!(
                "{what} %{} differs between lanes: one for the simdgroup expected; hint: simd_id() for thread_id() / 32",
                v.0
            )),
            None => Ok(()),
        }
    }

    fn why(&self, control: Control<'_>) -> String {
        let Some((index, node)) = control.decider else { return String::new() };
        let line = text::node_lines(self.kernel).get(index).copied().unwrap_or(0);
        let what = match node.inst {
            Inst::For { .. } => "the bounds of the `for`",
            _ => "the condition of the `if`",
        };
        let verb = if matches!(node.inst, Inst::For { .. }) { "differ" } else { "differs" };
        let among = if control.level == Level::Simd { "simdgroups" } else { "threads" };
        format!("{what} in line {line} {verb} between {among}")
    }
}

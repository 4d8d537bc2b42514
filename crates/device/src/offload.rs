//! Runs some operations inside layers on another device: the experts of mixtures on the CPU, which
//! has more memory, and everything else on a GPU.
//!
//! Each device loads its side of the Program ([`Program::offload`]); memory is planned for both. In
//! every replay the GPU pauses at each mixture, the CPU gets its rows and scores, and the result
//! goes back. A row has the bits of the device that computes it.

use formats::{Error, Result, Tensors};
use program::{Node, Offloaded, Program};

use crate::{About, CachesLatents, Device, Executor, ExecutorOptions, Plan};

/// A GPU and the device of its experts, as one device.
pub struct Offload {
    home: Box<dyn Device>,
    away: Box<dyn Device>,
    /// Number of layers, from the first, whose experts are away.
    layers: usize,
}

impl Offload {
    /// Puts the experts of the first `layers` layers on `away` and everything else on `home`.
    pub fn experts(home: Box<dyn Device>, away: Box<dyn Device>, layers: usize) -> Offload {
        Offload { home, away, layers }
    }

    fn sides(&self, program: &Program) -> Result<Offloaded> {
        // A layer's cache operation comes before its experts.
        let of = |last: &mut usize, node: &Node| {
            *last = node.op.layer().map_or(*last, |layer| layer.max(*last));
            Some(*last)
        };
        let layers: Vec<usize> = program.nodes.iter().scan(0, of).collect();
        let mixture = |node: &Node| {
            let shapes: Vec<_> = node.inputs.iter().map(|v| program.shape(*v)).collect();
            node.op.experts(&shapes).is_some()
        };
        let moved = |i: usize, node: &Node| layers[i] < self.layers && mixture(node);
        let some = program.nodes.iter().enumerate().any(|(i, node)| moved(i, node));
        match (some, program.nodes.iter().any(mixture)) {
            (true, _) => program.offload(&moved),
            (false, true) => {
                let expected = format!("experts in the first {} layers", self.layers);
                Err(Error::new("experts on the CPU", expected, "none there"))
            }
            (false, false) => {
                let expected = "a mixture of experts";
                Err(Error::new("experts on the CPU", expected, "a model without experts"))
            }
        }
    }
}

/// The load options of the away side, which has no cache.
fn away(options: &ExecutorOptions) -> ExecutorOptions {
    ExecutorOptions { blocks: vec![], context: vec![], ..options.clone() }
}

impl Device for Offload {
    fn about(&self) -> About {
        let (home, away) = (self.home.about(), self.away.about());
        let isa = format!("{}; experts on {} with {} threads", home.isa, away.name, away.threads);
        About { isa, ..home }
    }

    fn caches_latents(&self) -> CachesLatents {
        self.home.caches_latents()
    }

    fn check(&self, program: &Program) -> Result<()> {
        let Offloaded { home, away } = self.sides(program)?;
        self.home.check(&home)?;
        self.away.check(&away)
    }

    fn plan(
        &self,
        program: &Program,
        tensors: &Tensors,
        options: &ExecutorOptions,
    ) -> Result<Vec<Plan>> {
        let sides = self.sides(program)?;
        let home = self.home.plan(&sides.home, tensors, options)?;
        let away = self.away.plan(&sides.away, tensors, &away(options))?;
        Ok([home, away].concat())
    }

    fn shared(&self) -> usize {
        self.home.shared() + self.away.shared()
    }

    fn load(
        &self,
        program: Program,
        tensors: &Tensors,
        options: ExecutorOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Executor>> {
        let sides = self.sides(&program)?;
        let first = sides.home.stored_bytes(tensors)?;
        let total = first + sides.away.stored_bytes(tensors)?;
        let host = away(&options);
        // Load the GPU first: its memory is scarcer, so a failure shows early.
        let mut told = |done, _| progress(done, total);
        let mut home = self.home.load(sides.home, tensors, options, &mut told)?;
        let mut told = |done, _| progress(first + done, total);
        home.join(self.away.load(sides.away, tensors, host, &mut told)?)?;
        Ok(home)
    }
}

//! A model on two devices: its first layers, with the table of embeddings, on one, the last with the head on the other.
//!
//! The Program is cut between two layers. Each device loads its part, with the cache of its own layers; in every replay the host
//! hands the rows of the one value between them from the first to the second. Tokens are chosen by the caller.

use formats::{Error, Result, Tensors};
use program::{Arguments, Program, Table};

use crate::{About, Device, Executor, LoadOptions, Memory, Plan, Roof};

/// Cache groups of a Program at most, so that a replay maps its tables without allocating.
const GROUPS: usize = 8;

/// Two devices as one.
pub struct Split {
    devices: [Box<dyn Device>; 2],
    /// Layers on the second.
    last: usize,
}

impl Split {
    /// The last so many layers and the head on `second`, the others on `first`.
    pub fn new(first: Box<dyn Device>, second: Box<dyn Device>, last: usize) -> Split {
        Split { devices: [first, second], last }
    }

    /// The two Programs, with what each is loaded with.
    fn parts(&self, program: &Program, options: &LoadOptions) -> Result<[Loading; 2]> {
        let layers = program.layers.len();
        if self.last == 0 || self.last >= layers {
            let expected = format!("1 to {} of {layers} layers on the second device", layers - 1);
            return Err(Error::new("split", expected, self.last));
        }
        let all = program.groups().len();
        if all > GROUPS || options.blocks.len() != all || options.context.len() != all {
            let expected = format!("blocks of each of at most {GROUPS} cache groups");
            return Err(Error::new("split", expected, format!("{all} groups")));
        }
        Ok(program.split(layers - self.last)?.map(|part| {
            let of = |blocks: &[usize]| part.groups.iter().map(|g| blocks[*g]).collect();
            let options = LoadOptions {
                blocks: of(&options.blocks),
                context: of(&options.context),
                ..options.clone()
            };
            Loading { program: part.program, groups: part.groups, options }
        }))
    }
}

/// A part before it is loaded.
struct Loading {
    program: Program,
    groups: Vec<usize>,
    options: LoadOptions,
}

/// A loaded part: the whole Program's group that each of its groups is.
struct Half {
    executor: Box<dyn Executor>,
    groups: Vec<usize>,
}

/// See [`Split`].
struct SplitExecutor {
    first: Half,
    second: Half,
    groups: usize,
}

impl Device for Split {
    fn about(&self) -> About {
        let [first, second] = [0, 1].map(|i| self.devices[i].about());
        let isa = format!(
            "{}; the last {} layers on {}, {}",
            first.isa, self.last, second.name, second.isa
        );
        About { isa, ..first }
    }

    fn plan(
        &self,
        program: &Program,
        tensors: &Tensors,
        options: &LoadOptions,
    ) -> Result<Option<Plan>> {
        let [_, second] = self.parts(program, options)?;
        self.devices[1].plan(&second.program, tensors, &second.options)
    }

    fn load(
        &self,
        program: Program,
        tensors: &Tensors,
        options: LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Executor>> {
        let groups = program.groups().len();
        let [first, second] = self.parts(&program, &options)?;
        let bytes = |part: &Loading| part.program.stored_bytes(tensors);
        let (before, total) = (bytes(&second)?, bytes(&first)? + bytes(&second)?);
        // The second's memory is the scarcer: if it does not do, that is told first.
        let mut load = |device: &dyn Device, part: Loading, before: u64| -> Result<Half> {
            let mut told = |done, _| progress(before + done, total);
            let executor = device.load(part.program, tensors, part.options, &mut told)?;
            Ok(Half { executor, groups: part.groups })
        };
        let second = load(&*self.devices[1], second, 0)?;
        let first = load(&*self.devices[0], first, before)?;
        Ok(Box::new(SplitExecutor { first, second, groups }))
    }
}

impl Half {
    /// One replay of this part.
    fn run(&mut self, arguments: &Arguments<'_>) -> Result<()> {
        let mut tables = [Table::default(); GROUPS];
        for (table, group) in tables.iter_mut().zip(&self.groups) {
            *table = arguments.tables[*group];
        }
        let tables = &tables[..self.groups.len()];
        self.executor.run(&Arguments { tables, ..*arguments })
    }
}

impl Executor for SplitExecutor {
    fn run(&mut self, arguments: &Arguments<'_>) -> Result<()> {
        if arguments.tables.len() != self.groups {
            let expected = format!("tables of {} groups", self.groups);
            return Err(Error::new("step", expected, arguments.tables.len()));
        }
        self.first.run(&Arguments { outputs: &[], ..*arguments })?;
        let input = self.first.executor.result(0);
        self.second.run(&Arguments { input, ..*arguments })
    }

    fn result(&self, index: usize) -> &[f32] {
        self.second.executor.result(index)
    }

    fn memory(&self) -> Memory {
        let [a, b] = [&self.first, &self.second].map(|half| half.executor.memory());
        Memory {
            weights: a.weights + b.weights,
            cache: a.cache + b.cache,
            arena: a.arena + b.arena,
            device: b.device.or(a.device),
        }
    }

    fn compiled(&self) -> usize {
        self.first.executor.compiled() + self.second.executor.compiled()
    }

    /// The rate is that at which both read what is theirs, one after the other.
    fn roof(&self) -> Roof {
        let [a, b] = [&self.first, &self.second].map(|half| half.executor.roof());
        let seconds = |roof: &Roof| roof.token_bytes as f64 / roof.bytes_per_second.max(1.0);
        let token_bytes = a.token_bytes + b.token_bytes;
        Roof {
            token_bytes,
            position_bytes: a.position_bytes + b.position_bytes,
            bytes_per_second: token_bytes as f64 / (seconds(&a) + seconds(&b)).max(1e-12),
        }
    }
}

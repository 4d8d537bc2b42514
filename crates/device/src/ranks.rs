//! A model on several devices, each of which has a share of every layer: tensor parallelism.
//!
//! Every device loads the Program of its rank ([`Program::shard`]) and is driven by a thread of its own: all are asked the same at
//! the same time, and meet in each `all_reduce`, which is theirs to do. The logits are on all of them, so that each chooses
//! the next token by itself, and goes on from that as a device alone would: the host passes nothing between them.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};
use std::thread::JoinHandle;

use formats::{Error, Result, Tensors};
use ops::sample::{Choice, Options};
use program::{Arguments, Program, Table};

use crate::gpu::meeting::PLACE;
use crate::{About, Device, Executor, LoadOptions, Memory, Plan, Roof};

/// What joins ranks.
pub(crate) trait Group: Send + Sync {
    /// Lets no rank wait for one that has failed, which says so.
    fn break_up(&self);

    /// Tells it that all ranks have ended what they did: a step begins.
    ///
    /// # Errors
    /// If it has been broken up and cannot be mended.
    fn mend(&self) -> Result<()>;
}

/// Several devices as one.
pub(crate) struct Ranks {
    devices: Vec<Box<dyn Device>>,
    group: Arc<dyn Group>,
}

impl Ranks {
    /// Of devices that `group` joins, in the order of their ranks.
    pub(crate) fn new(devices: Vec<Box<dyn Device>>, group: Arc<dyn Group>) -> Ranks {
        Ranks { devices, group }
    }

    fn shards(&self, program: &Program) -> Result<Vec<Program>> {
        let ranks = self.devices.len();
        (0..ranks).map(|rank| program.shard(rank, ranks)).collect()
    }
}

impl Device for Ranks {
    fn about(&self) -> About {
        let none = About { name: "none", threads: 0, isa: String::new() };
        let first = self.devices.first().map_or(none, |device| device.about());
        let isa = format!("{}; {} devices share each layer", first.isa, self.devices.len());
        About { isa, ..first }
    }

    fn check(&self, program: &Program) -> Result<()> {
        let shards = self.shards(program)?;
        self.devices.iter().zip(&shards).try_for_each(|(device, shard)| device.check(shard))
    }

    fn plan(
        &self,
        program: &Program,
        tensors: &Tensors,
        options: &LoadOptions,
    ) -> Result<Vec<Plan>> {
        let shards = self.shards(program)?;
        let plans = self.devices.iter().zip(&shards).map(|(d, p)| d.plan(p, tensors, options));
        Ok(plans.collect::<Result<Vec<_>>>()?.concat())
    }

    fn load(
        &self,
        program: Program,
        tensors: &Tensors,
        options: LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Executor>> {
        let shards = self.shards(&program)?;
        let bytes = shards.iter().map(|shard| shard.stored_bytes(tensors));
        let bytes = bytes.collect::<Result<Vec<u64>>>()?;
        let (mut before, total) = (0, bytes.iter().sum());
        let mut executors = Vec::new();
        for ((device, shard), bytes) in self.devices.iter().zip(shards).zip(bytes) {
            let mut told = |done, _| progress(before + done, total);
            executors.push(device.load(shard, tensors, options.clone(), &mut told)?);
            before += bytes;
        }
        let mut executors = executors.into_iter();
        let first = executors.next().ok_or_else(|| Error::new("ranks", "a device", "none"))?;
        let asked = Arc::new(RwLock::new(Asked::default()));
        let start = |executor| Worker::start(executor, Arc::clone(&asked), Arc::clone(&self.group));
        let others = executors.map(start).collect::<Result<_>>()?;
        Ok(Box::new(RanksExecutor { first, others, asked, group: Arc::clone(&self.group) }))
    }
}

/// What a rank is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Run,
    Choose,
    Forget,
    Memory,
    Roof,
}

/// What it says then.
enum Answer {
    Done(Result<Option<Choice>>),
    Memory(Memory),
    Roof(Roof),
}

/// What a step is given, for all ranks: written while none of them does anything, and into the room that is there.
#[derive(Default)]
struct Asked {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    outputs: Vec<u32>,
    /// The blocks of each group, of which the first so many count, and the oldest position.
    tables: Vec<(Vec<u32>, u32)>,
    groups: usize,
    options: Options,
    history: Vec<u32>,
}

/// Cache groups of a Program at most, so that a replay maps its tables without allocating.
const GROUPS: usize = 8;

impl Asked {
    fn set(&mut self, arguments: &Arguments<'_>) -> Result<()> {
        let groups = arguments.tables.len();
        if groups > GROUPS {
            return Err(Error::new("step", format!("at most {GROUPS} cache groups"), groups));
        }
        let copy = |to: &mut Vec<u32>, from: &[u32]| {
            to.clear();
            to.extend_from_slice(from);
        };
        copy(&mut self.tokens, arguments.tokens);
        copy(&mut self.positions, arguments.positions);
        copy(&mut self.outputs, arguments.outputs);
        self.groups = groups;
        self.tables.resize_with(self.tables.len().max(groups), Default::default);
        for ((blocks, oldest), table) in self.tables.iter_mut().zip(arguments.tables) {
            copy(blocks, table.blocks);
            *oldest = table.oldest;
        }
        Ok(())
    }

    /// Does it on a rank.
    fn on(&self, executor: &mut dyn Executor, order: Order) -> Answer {
        let mut tables = [Table::default(); GROUPS];
        for (table, (blocks, oldest)) in tables.iter_mut().zip(&self.tables) {
            *table = Table { blocks, oldest: *oldest };
        }
        let arguments = Arguments {
            tokens: &self.tokens,
            positions: &self.positions,
            outputs: &self.outputs,
            tables: &tables[..self.groups],
            input: &[],
        };
        match order {
            Order::Run => Answer::Done(executor.run(&arguments).map(|()| None)),
            Order::Choose => {
                let chosen = executor.choose(&arguments, &self.options, &self.history);
                Answer::Done(chosen.transpose())
            }
            Order::Forget => {
                executor.forget();
                Answer::Done(Ok(None))
            }
            Order::Memory => Answer::Memory(executor.memory()),
            Order::Roof => Answer::Roof(executor.roof()),
        }
    }
}

/// A rank with its thread.
struct Worker {
    /// None once it is to end.
    orders: Option<SyncSender<Order>>,
    answers: Receiver<Answer>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    fn start(
        mut executor: Box<dyn Executor>,
        asked: Arc<RwLock<Asked>>,
        group: Arc<dyn Group>,
    ) -> Result<Worker> {
        let (orders, given) = sync_channel(1);
        let (says, answers) = sync_channel(1);
        let work = move || {
            let _end = Ends(Arc::clone(&group));
            while let Ok(order) = given.recv() {
                let asked = asked.read().unwrap_or_else(PoisonError::into_inner);
                let answer = asked.on(&mut *executor, order);
                drop(asked);
                if matches!(answer, Answer::Done(Err(_))) {
                    group.break_up();
                }
                if says.send(answer).is_err() {
                    break;
                }
            }
        };
        let thread = std::thread::Builder::new().name("rank".to_owned()).spawn(work);
        let thread = thread.map_err(|why| Error::new("ranks", "a thread", why))?;
        Ok(Worker { orders: Some(orders), answers, thread: Some(thread) })
    }

    fn tell(&self, order: Order) -> Result<()> {
        let sent = self.orders.as_ref().is_some_and(|orders| orders.send(order).is_ok());
        if sent { Ok(()) } else { Err(ended()) }
    }

    fn hear(&self) -> Result<Answer> {
        self.answers.recv().map_err(|_| ended())
    }
}

fn ended() -> Error {
    Error::new("ranks", "a thread for each", "one that ended early").hint("load the model again")
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // Its panic, if it ended with one, has been told.
            let _ = thread.join();
        }
    }
}

/// Sees to it that nobody waits for a thread that panicked.
struct Ends(Arc<dyn Group>);

impl Drop for Ends {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.break_up();
        }
    }
}

/// See [`Ranks`]. The first rank works on the caller's thread.
struct RanksExecutor {
    first: Box<dyn Executor>,
    others: Vec<Worker>,
    asked: Arc<RwLock<Asked>>,
    group: Arc<dyn Group>,
}

impl RanksExecutor {
    /// What a step is given; no rank does anything.
    fn asked(&self) -> RwLockWriteGuard<'_, Asked> {
        self.asked.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has all ranks do something, and says what all of them say.
    fn all(&mut self, order: Order) -> Result<Option<Choice>> {
        self.group.mend()?;
        let told = self.others.iter().try_for_each(|worker| worker.tell(order));
        if told.is_err() {
            self.group.break_up();
        }
        told?;
        let asked = self.asked.read().unwrap_or_else(PoisonError::into_inner);
        let own = asked.on(&mut *self.first, order);
        drop(asked);
        if matches!(own, Answer::Done(Err(_))) {
            self.group.break_up();
        }
        let others: Vec<Result<Answer>> = self.others.iter().map(Worker::hear).collect();
        let answers = std::iter::once(Ok(own)).chain(others).map(|answer| match answer? {
            Answer::Done(done) => done,
            Answer::Memory(_) | Answer::Roof(_) => Err(ended()),
        });
        let (mut chosen, mut failure): (Vec<Option<Choice>>, Option<Error>) = Default::default();
        for answer in answers {
            match answer {
                Ok(choice) => chosen.push(choice),
                // What a rank says that waited for one that failed is not why.
                Err(why) if failure.as_ref().is_none_or(|known| known.place == PLACE) => {
                    failure = Some(why);
                }
                Err(_) => {}
            }
        }
        if let Some(why) = failure {
            return Err(why);
        }
        let token = |choice: &Option<Choice>| choice.as_ref().map(|choice| choice.token);
        let first = chosen.swap_remove(0);
        if let Some(other) = chosen.iter().find(|other| token(other) != token(&first)) {
            let found = format!("{:?} and {:?}", token(&first), token(other));
            return Err(Error::new("ranks", "one token on all", found));
        }
        Ok(first)
    }

    /// [`all`](RanksExecutor::all); if one fails, none goes on with what it does ahead, or they would not meet again.
    fn step(&mut self, order: Order, arguments: &Arguments<'_>) -> Result<Option<Choice>> {
        self.asked().set(arguments)?;
        self.all(order).inspect_err(|_| drop(self.all(Order::Forget)))
    }

    /// What the other ranks say of themselves.
    fn others(&self, order: Order) -> impl Iterator<Item = Answer> {
        self.others.iter().filter_map(move |worker| {
            worker.tell(order).ok()?;
            worker.hear().ok()
        })
    }
}

impl Executor for RanksExecutor {
    fn run(&mut self, arguments: &Arguments<'_>) -> Result<()> {
        self.step(Order::Run, arguments).map(drop)
    }

    fn choose(
        &mut self,
        arguments: &Arguments<'_>,
        options: &Options,
        history: &[u32],
    ) -> Option<Result<Choice>> {
        if !self.chooses() {
            return None;
        }
        let mut asked = self.asked();
        asked.options.clone_from(options);
        asked.history.clear();
        asked.history.extend_from_slice(history);
        drop(asked);
        self.step(Order::Choose, arguments).transpose()
    }

    fn chooses(&self) -> bool {
        self.first.chooses()
    }

    fn forget(&mut self) {
        // Whoever cannot be told does nothing any more.
        drop(self.all(Order::Forget));
    }

    fn result(&self, index: usize) -> &[f32] {
        self.first.result(index)
    }

    fn memory(&self) -> Memory {
        let others = self.others(Order::Memory).filter_map(|answer| match answer {
            Answer::Memory(memory) => Some(memory),
            Answer::Done(_) | Answer::Roof(_) => None,
        });
        Memory::sum(std::iter::once(self.first.memory()).chain(others))
    }

    fn compiled(&self) -> usize {
        self.first.compiled()
    }

    /// All read at the same time.
    fn roof(&self) -> Roof {
        let others = self.others(Order::Roof).filter_map(|answer| match answer {
            Answer::Roof(roof) => Some(roof),
            Answer::Done(_) | Answer::Memory(_) => None,
        });
        others.fold(self.first.roof(), |a, b| Roof {
            token_bytes: a.token_bytes + b.token_bytes,
            position_bytes: a.position_bytes + b.position_bytes,
            bytes_per_second: a.bytes_per_second + b.bytes_per_second,
        })
    }
}

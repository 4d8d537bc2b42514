//! A model on several devices, each of which has a share of every layer: tensor parallelism. In
//! training each has all layers and a share of the sequences: [`data_parallel`].
//!
//! Every device loads the Program of its rank ([`Program::shard`]) and is driven by a thread of its
//! own, or by a process of its own ([`Processes`]): all are asked the same at the same time, and
//! meet in each `all_reduce`, which is theirs to do. The logits are on all of them, so that each
//! chooses the next token by itself, and goes on from that as a device alone would: the host passes
//! nothing between them.

mod data_parallel;
mod follow;
mod launch;
mod link;
mod processes;
#[cfg(all(test, feature = "sim"))]
mod tests;

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard};
use std::thread::JoinHandle;

use formats::{Error, ErrorKind, Result, Tensors};
use program::{AdapterFactors, OwnedStep, Program, Site, Step, StepMemory, Weight, fuse_mixtures};
use serde::{Deserialize, Serialize};

use crate::gpu::column_block;
use crate::gpu::group::HostGroup;
use crate::{
    About, CachesLatents, ComputePeaks, Device, Executor, ExecutorOptions, Memory, Outcome, Peaks,
    Plan, Profile, Roof, Ticket, TrainOptions, Trainer, Watch,
};

pub use follow::follow;
pub use launch::RankLaunch;
pub use processes::{Absence, Processes};

use processes::RemoteDevices;

/// Where errors are from that another rank's failure causes.
pub(crate) const PLACE: &str = "all_reduce";

/// The failure to report once another rank has failed, too: a rank that waited for one that failed
/// does not tell why.
fn cause(known: Option<Error>, other: &Error) -> Option<Error> {
    known.filter(|known| known.place != PLACE).or_else(|| Some(other.clone()))
}

/// The transport that joins ranks.
pub(crate) trait Group: Send + Sync {
    /// Lets no rank wait for one that has failed, which says so.
    fn break_up(&self);

    /// Tells it that all ranks have ended what they did: a step begins.
    ///
    /// # Errors
    /// If it has been broken up and cannot be mended.
    fn mend(&self) -> Result<()>;
}

/// A device that is open and is to be this process's one rank of a group.
pub(crate) trait Candidate {
    /// Makes the identity of a group, which rank 0 gives to all.
    ///
    /// # Errors
    /// The transport between such devices is missing or fails.
    fn group(&self) -> Result<Vec<u8>>;

    /// Joins a group as rank `rank` of `ranks`, and waits for the others. `values` combines what
    /// simulated ranks give. Gives the device, and what joins it with the others if that is not
    /// `values`.
    ///
    /// # Errors
    /// As [`Candidate::group`].
    fn join(
        self: Box<Self>,
        group: &[u8],
        rank: usize,
        ranks: usize,
        values: Arc<dyn HostGroup>,
    ) -> Result<Joined>;
}

/// See [`Candidate::join`].
pub(crate) type Joined = (Box<dyn Device>, Option<Arc<dyn Group>>);

/// Several devices as one.
pub(crate) struct Ranks {
    /// Those of this process: the first, if the others are in other processes.
    devices: Vec<Box<dyn Device>>,
    remote: Option<RemoteDevices>,
    group: Arc<dyn Group>,
    /// Held while one Program is asked for something: all-reduces of two Programs that ranks reach
    /// in different orders would wait for each other.
    turn: Arc<Mutex<()>>,
}

impl Ranks {
    /// Creates the device of `devices` that `group` joins, in the order of their ranks.
    pub(crate) fn new(devices: Vec<Box<dyn Device>>, group: Arc<dyn Group>) -> Ranks {
        Ranks { devices, remote: None, group, turn: Arc::default() }
    }

    fn count(&self) -> usize {
        self.devices.len() + self.remote.as_ref().map_or(0, RemoteDevices::count)
    }

    /// The Program of each rank. All are GPUs, which add residuals as they sum experts.
    fn shards(
        &self,
        program: &Program,
        block: &dyn Fn(&Weight) -> Result<usize>,
    ) -> Result<Vec<Program>> {
        let (mut whole, ranks) = (program.clone(), self.count());
        fuse_mixtures(&mut whole);
        (0..ranks).map(|rank| whole.shard(rank, ranks, block)).collect()
    }
}

impl Device for Ranks {
    fn about(&self) -> About {
        let first = self.devices.first().map_or_else(About::default, |device| device.about());
        let isa = format!("{}; {} devices share each layer", first.isa, self.count());
        About { isa, ..first }
    }

    fn caches_latents(&self) -> CachesLatents {
        let each = self.devices.iter().map(|device| device.caches_latents());
        each.min().unwrap_or(CachesLatents::Never)
    }

    fn check(&self, program: &Program) -> Result<()> {
        // Encodings decide how wide shares are, and not which operations there are.
        let shards = self.shards(program, &|_| Ok(1))?;
        self.devices.iter().zip(&shards).try_for_each(|(device, shard)| device.check(shard))
    }

    fn plan(
        &self,
        program: &Program,
        tensors: &Tensors,
        options: &ExecutorOptions,
    ) -> Result<Vec<Plan>> {
        let shards = self.shards(program, &|weight| column_block(weight, tensors))?;
        let own = || {
            let plans = self.devices.iter().zip(&shards).map(|(d, p)| d.plan(p, tensors, options));
            Ok(plans.collect::<Result<Vec<_>>>()?.concat())
        };
        match &self.remote {
            Some(remote) => remote.plan(&shards, tensors, options, own),
            None => own(),
        }
    }

    fn shared(&self) -> usize {
        let own: usize = self.devices.iter().map(|device| device.shared()).sum();
        own + self.remote.as_ref().map_or(0, RemoteDevices::shared)
    }

    fn load(
        &self,
        program: Program,
        tensors: &Tensors,
        options: ExecutorOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Box<dyn Executor>> {
        let shards = self.shards(&program, &|weight| column_block(weight, tensors))?;
        let asked = Arc::new(RwLock::new(Asked::default()));
        let (group, kept) = (Arc::clone(&self.group), Kept::default());
        let turn = Arc::clone(&self.turn);
        let of_ranks = shards.iter().map(|shard| shard.sites.clone()).collect();
        let sites = Sites { whole: program.sites, of_ranks };
        if let (Some(remote), [device]) = (&self.remote, &self.devices[..]) {
            let own = || device.load(shards[0].clone(), tensors, options.clone(), progress);
            let (first, others) = remote.load(&shards, tensors, &options, own)?;
            let ranks = RanksExecutor { first, others, sites, asked, group, turn, kept };
            return Ok(Box::new(ranks));
        }
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
        let start = |(rank, executor)| -> Result<Box<dyn Peer>> {
            Ok(Box::new(Worker::start(rank, executor, Arc::clone(&asked), Arc::clone(&group))?))
        };
        let others = (1..).zip(executors).map(start).collect::<Result<_>>()?;
        Ok(Box::new(RanksExecutor { first, others, sites, asked, group, turn, kept }))
    }

    fn train(&self, tensors: &Tensors, options: TrainOptions) -> Result<Box<dyn Trainer>> {
        if self.remote.is_some() {
            let error = Error::new("train", "devices of one process", "several processes");
            return Err(error.of(ErrorKind::Unsupported));
        }
        Ok(Box::new(self.data_parallel(tensors, &options)?))
    }
}

/// An order to a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
enum Order {
    /// Submit the step that all are given.
    Submit,
    /// Likewise, timing every operation.
    Time,
    /// Wait for what a step chose.
    Wait(Ticket),
    /// Copy the blocks that all are given.
    Copy,
    /// Put the rank's part of the adapter that all are given on a seat.
    Seat(u32),
    Memory,
    Lost,
    Roof,
}

/// A rank's answer to an [`Order`].
#[derive(Serialize, Deserialize)]
enum Answer {
    /// Its ticket.
    Submitted(Result<Ticket>),
    /// Its ticket; none of a device that cannot time operations.
    Timed(Result<Option<Ticket>>),
    /// A digest of each sequence's choices.
    Waited(Result<u64>),
    Copied(Result<()>),
    Seated(Result<()>),
    Memory(Memory),
    Lost(bool),
    Roof(Roof),
}

impl Answer {
    fn failure(&self) -> Option<&Error> {
        match self {
            Answer::Submitted(done) => done.as_ref().err(),
            Answer::Timed(done) => done.as_ref().err(),
            Answer::Waited(done) => done.as_ref().err(),
            Answer::Copied(done) | Answer::Seated(done) => done.as_ref().err(),
            Answer::Memory(_) | Answer::Lost(_) | Answer::Roof(_) => None,
        }
    }

    /// Whether it is a failure for which others might wait. No rank waits for another that takes an
    /// adapter.
    fn breaks_up(&self) -> bool {
        self.failure().is_some() && !matches!(self, Answer::Seated(_))
    }

    /// The answer of a rank that could not begin.
    fn failed(order: Order, why: Error) -> Answer {
        match order {
            Order::Submit => Answer::Submitted(Err(why)),
            Order::Time => Answer::Timed(Err(why)),
            Order::Wait(_) => Answer::Waited(Err(why)),
            Order::Copy => Answer::Copied(Err(why)),
            Order::Seat(_) => Answer::Seated(Err(why)),
            Order::Memory => Answer::Memory(Memory::default()),
            Order::Lost => Answer::Lost(false),
            Order::Roof => {
                Answer::Roof(Roof { token_bytes: 0, position_bytes: 0, bytes_per_second: 0.0 })
            }
        }
    }

    fn map_failure(self, f: impl Fn(Error) -> Error) -> Answer {
        match self {
            Answer::Submitted(done) => Answer::Submitted(done.map_err(f)),
            Answer::Timed(done) => Answer::Timed(done.map_err(f)),
            Answer::Waited(done) => Answer::Waited(done.map_err(f)),
            Answer::Copied(done) => Answer::Copied(done.map_err(f)),
            Answer::Seated(done) => Answer::Seated(done.map_err(f)),
            other => other,
        }
    }
}

/// Another rank, which is told what to do and heard once it has done it.
trait Peer: Send {
    /// # Errors
    /// If it is gone.
    fn tell(&self, order: Order, asked: &Asked) -> Result<()>;

    /// # Errors
    /// If it is gone.
    fn hear(&self) -> Result<Answer>;
}

/// The step that all ranks are given: written while none of them does anything, and into the room
/// that is there.
#[derive(Default)]
struct Asked {
    step: OwnedStep,
    group: usize,
    blocks: Vec<(u32, u32)>,
    /// Each rank's part of an adapter; none where a seat is to be empty.
    adapters: Vec<Option<AdapterFactors>>,
}

/// A rank's memory between orders.
#[derive(Default)]
struct Kept {
    /// The memory of its step.
    memory: StepMemory,
    /// The times of a step, until they are asked for.
    profile: Option<Profile>,
}

impl Asked {
    /// Does it on a rank.
    fn on(
        &self,
        rank: usize,
        executor: &mut dyn Executor,
        order: Order,
        kept: &mut Kept,
    ) -> Answer {
        let memory = &mut kept.memory;
        match order {
            Order::Submit => {
                Answer::Submitted(self.step.with(memory, |step| executor.submit(step)))
            }
            Order::Time => {
                let timed = self.step.with(memory, |step| executor.submit_timed(step));
                let keep = |(ticket, profile)| {
                    kept.profile = Some(profile);
                    ticket
                };
                Answer::Timed(timed.map(|timed| timed.map(keep)))
            }
            Order::Wait(ticket) => Answer::Waited(executor.wait(ticket).map(|o| fingerprint(&o))),
            Order::Copy => Answer::Copied(executor.copy_blocks(self.group, &self.blocks)),
            Order::Seat(seat) => {
                let adapter = self.adapters.get(rank).and_then(Option::as_ref);
                Answer::Seated(executor.seat(seat, adapter))
            }
            Order::Memory => Answer::Memory(executor.memory()),
            Order::Lost => Answer::Lost(executor.lost()),
            Order::Roof => Answer::Roof(executor.roof()),
        }
    }
}

/// A number that two ranks have in common as long as they chose the same tokens.
fn fingerprint(outcome: &Outcome<'_>) -> u64 {
    let token = |i| outcome.choice(i).map_or(u64::MAX, |choice| u64::from(choice.token));
    let mix = |sum: u64, token: u64| (sum ^ token).wrapping_mul(0x0100_0000_01b3).rotate_left(17);
    (0..outcome.len()).map(token).fold(0xcbf2_9ce4_8422_2325, mix)
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
        rank: usize,
        mut executor: Box<dyn Executor>,
        asked: Arc<RwLock<Asked>>,
        group: Arc<dyn Group>,
    ) -> Result<Worker> {
        let (orders, given) = sync_channel(1);
        let (says, answers) = sync_channel(1);
        let work = move || {
            let _end = Ends(Arc::clone(&group));
            let mut kept = Kept::default();
            while let Ok(order) = given.recv() {
                let asked = asked.read().unwrap_or_else(PoisonError::into_inner);
                let answer = asked.on(rank, &mut *executor, order, &mut kept);
                drop(asked);
                if answer.breaks_up() {
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
}

impl Peer for Worker {
    fn tell(&self, order: Order, _: &Asked) -> Result<()> {
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

/// Keeps other ranks from waiting for a thread that panicked.
struct Ends(Arc<dyn Group>);

impl Drop for Ends {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.break_up();
        }
    }
}

/// The sites of adapters: of the whole Program, and of each rank's.
struct Sites {
    whole: Vec<Site>,
    of_ranks: Vec<Vec<Site>>,
}

/// See [`Ranks`]. The first rank works on the caller's thread.
struct RanksExecutor {
    first: Box<dyn Executor>,
    others: Vec<Box<dyn Peer>>,
    sites: Sites,
    asked: Arc<RwLock<Asked>>,
    group: Arc<dyn Group>,
    turn: Arc<Mutex<()>>,
    kept: Kept,
}

impl RanksExecutor {
    /// The memory of a step's inputs; no rank does anything.
    fn asked(&self) -> RwLockWriteGuard<'_, Asked> {
        self.asked.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has all ranks do something, and says what the first says if none fails.
    fn all(&mut self, order: Order) -> Result<Answer> {
        let turn = Arc::clone(&self.turn);
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.group.mend()?;
        let asked = self.asked.read().unwrap_or_else(PoisonError::into_inner);
        let told = self.others.iter().try_for_each(|peer| peer.tell(order, &asked));
        if told.is_err() {
            self.group.break_up();
        }
        told?;
        let own = asked.on(0, &mut *self.first, order, &mut self.kept);
        drop(asked);
        if own.breaks_up() {
            self.group.break_up();
        }
        let mut failure = own.failure().cloned();
        let mut differs = None;
        // All are heard, whatever one of them says.
        for peer in &self.others {
            let answer = peer.hear();
            let why = answer.as_ref().map_or_else(Some, Answer::failure);
            failure = why.into_iter().fold(failure, cause);
            if let (Answer::Waited(Ok(first)), Ok(Answer::Waited(Ok(other)))) = (&own, &answer)
                && first != other
            {
                differs = Some(Error::new("ranks", "the same tokens on all", "others"));
            }
        }
        failure.or(differs).map_or(Ok(own), Err)
    }

    /// The answers of the other ranks.
    fn others(&self, order: Order) -> Vec<Answer> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = self.asked.read().unwrap_or_else(PoisonError::into_inner);
        let said = self.others.iter().filter_map(|peer| {
            peer.tell(order, &asked).ok()?;
            peer.hear().ok()
        });
        said.collect()
    }
}

impl Executor for RanksExecutor {
    /// It is not stopped: ranks look up at no time in common.
    fn submit_watched(&mut self, step: &Step<'_>, _: &Watch<'_>) -> Result<Option<Ticket>> {
        self.asked().step.set(step);
        match self.all(Order::Submit)? {
            Answer::Submitted(ticket) => ticket.map(Some),
            _ => Err(ended()),
        }
    }

    /// The first rank's times. All ranks do the same at the same time, so that the work is what one
    /// of them does as often as there are ranks.
    fn submit_timed(&mut self, step: &Step<'_>) -> Result<Option<(Ticket, Profile)>> {
        self.asked().step.set(step);
        let Answer::Timed(timed) = self.all(Order::Time)? else { return Err(ended()) };
        let mut profile = self.kept.profile.take();
        for timing in profile.iter_mut().flat_map(|profile| &mut profile.operations) {
            let one = timing.work;
            self.others.iter().for_each(|_| timing.work += one);
        }
        Ok(timed?.zip(profile))
    }

    fn limits(&self) -> Option<ComputePeaks> {
        let all = |one: Peaks| one.times((self.others.len() + 1) as f64);
        let one = self.first.limits()?;
        Some(ComputePeaks { used: all(one.used), best: all(one.best), ..one })
    }

    fn wait(&mut self, ticket: Ticket) -> Result<Outcome<'_>> {
        self.all(Order::Wait(ticket))?;
        self.first.wait(ticket)
    }

    fn keeps(&self, ticket: Ticket) -> bool {
        self.first.keeps(ticket)
    }

    fn read(&mut self, ticket: Ticket, index: usize) -> Result<&[f32]> {
        self.first.read(ticket, index)
    }

    fn ahead(&self) -> usize {
        self.first.ahead()
    }

    fn copy_blocks(&mut self, group: usize, blocks: &[(u32, u32)]) -> Result<()> {
        let mut asked = self.asked();
        asked.group = group;
        asked.blocks.clear();
        asked.blocks.extend_from_slice(blocks);
        drop(asked);
        self.all(Order::Copy).map(drop)
    }

    fn seat(&mut self, seat: u32, adapter: Option<&AdapterFactors>) -> Result<()> {
        adapter.map_or(Ok(()), |adapter| adapter.check(&self.sites.whole))?;
        let part = |sites: &Vec<Site>| adapter.map(|adapter| adapter.part(sites));
        self.asked().adapters = self.sites.of_ranks.iter().map(part).collect();
        let seated = self.all(Order::Seat(seat)).map(drop);
        self.asked().adapters.clear();
        if seated.is_err() {
            // A partly loaded adapter is of no use: the seat is emptied everywhere. Whoever cannot
            // do that says so in the next step.
            let _ = self.all(Order::Seat(seat));
        }
        seated
    }

    fn memory(&self) -> Memory {
        let others = self.others(Order::Memory).into_iter().filter_map(|answer| match answer {
            Answer::Memory(memory) => Some(memory),
            _ => None,
        });
        Memory::sum(std::iter::once(self.first.memory()).chain(others))
    }

    fn lost(&self) -> bool {
        let lost = |answer| matches!(answer, Answer::Lost(true));
        self.first.lost() || self.others(Order::Lost).into_iter().any(lost)
    }

    fn compiled(&self) -> usize {
        self.first.compiled()
    }

    /// All read at the same time.
    fn roof(&self) -> Roof {
        let others = self.others(Order::Roof).into_iter().filter_map(|answer| match answer {
            Answer::Roof(roof) => Some(roof),
            _ => None,
        });
        others.fold(self.first.roof(), |a, b| Roof {
            token_bytes: a.token_bytes + b.token_bytes,
            position_bytes: a.position_bytes + b.position_bytes,
            bytes_per_second: a.bytes_per_second + b.bytes_per_second,
        })
    }
}

//! Ranks in other processes, as rank 0 sees them: it gives each of them the requests that a thread
//! of its own would get, over a [`Link`], and hears an answer to each. What the ranks of a
//! simulated group add up goes over a second link, and so does word of a failure, which must reach
//! those that wait for each other.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::HashMap;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use formats::{Error, ErrorKind, Result, Tensors, fingerprint};
use program::{AdapterFactors, OwnedStep, Program};
use serde::{Deserialize, Serialize};

use super::link::{Follower, Link, gather, lock};
use super::{Answer, Asked, Candidate, Group, Order, PLACE, Peer, RankLaunch, Ranks};
use crate::gpu::group::{AllReduceGroup, Combine, HostGroup};
use crate::{Device, DeviceSpec, ExecutorOptions, Plan};

/// A request to a follower. Devices and executors have numbers, which the leader chooses.
#[derive(Serialize, Deserialize)]
pub(super) enum Request<'a> {
    /// Open its GPU.
    Open { device: u32 },
    /// Make it a rank of the group that has this identity.
    Join { device: u32, group: Vec<u8> },
    /// Plan its share of a model.
    Plan { device: u32, share: Box<Share<'a>> },
    /// Load it as an executor.
    Load { device: u32, executor: u32, share: Box<Share<'a>> },
    /// Bytes that its executors on a device share.
    Shared { device: u32 },
    /// Submit a step, `timed` or not.
    Submit { executor: u32, step: Cow<'a, OwnedStep>, timed: bool },
    /// Copy blocks of a cache group.
    Copy { executor: u32, group: usize, blocks: Cow<'a, [(u32, u32)]> },
    /// Put an adapter, the rank's part of it, on a seat, or none.
    Seat { executor: u32, seat: u32, adapter: Cow<'a, Option<AdapterFactors>> },
    /// Anything else that an executor is asked.
    Ask { executor: u32, order: Order },
    /// Free an executor.
    Unload { executor: u32 },
    /// Free a device.
    Close { device: u32 },
    /// End.
    End,
}

/// A rank's share of a model.
#[derive(Serialize, Deserialize)]
pub(super) struct Share<'a> {
    /// Where the model's files are, on every machine.
    pub(super) files: PathBuf,
    pub(super) fingerprint: String,
    pub(super) program: Cow<'a, Program>,
    pub(super) options: Cow<'a, ExecutorOptions>,
}

/// A follower's answer.
#[derive(Serialize, Deserialize)]
pub(super) enum Response {
    Done(Result<()>),
    Planned(Result<Vec<Plan>>),
    Shared(usize),
    Answered(Answer),
}

/// A message of a follower, at any time.
#[derive(Serialize, Deserialize)]
pub(super) enum Given {
    /// Its part of what the ranks of a device's group combine.
    Values { device: u32, combine: Combine, values: Vec<f32> },
    /// It has failed.
    Failed { device: u32 },
}

/// The values that it is sent.
#[derive(Serialize, Deserialize)]
pub(super) enum Taken {
    /// In answer to values: what all have made of them.
    Values(Result<Vec<f32>>),
    /// In answer to a failure: everybody knows.
    Known,
    /// Another rank has failed in what was asked by a request with a lower number.
    Failed { device: u32, before: u64 },
}

/// The other processes of a job, as rank 0 has them. Clones are the same.
#[derive(Clone)]
pub struct Processes(Arc<Inner>);

impl std::fmt::Debug for Processes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Processes({:?})", self.0.places)
    }
}

/// Tells when a process of a job has ended that should not have.
#[derive(Clone)]
pub struct Absence(Arc<State>);

#[derive(Default)]
struct State {
    ended: Mutex<Ended>,
    changed: Condvar,
}

#[derive(Default)]
struct Ended {
    /// The first process that was found to be gone.
    gone: Option<Error>,
    /// Whether the job is over, so that all may end.
    over: bool,
}

/// The groups of open devices, by number.
type Groups = Arc<Mutex<HashMap<u32, Arc<Leading>>>>;

pub(super) struct Inner {
    /// The device of every rank.
    places: Vec<DeviceSpec>,
    /// The links to ranks 1 and so on.
    requests: Vec<Link>,
    values: Vec<Arc<Link>>,
    /// Held from a request to its answer.
    turn: Arc<Mutex<()>>,
    groups: Groups,
    state: Arc<State>,
    /// The last number of a device or executor, and of a request.
    named: AtomicU32,
    asked: Arc<AtomicU64>,
}

/// A group of ranks as the leader has it.
struct Leading {
    device: u32,
    /// The transport between the leader's own rank and the others: for simulated GPUs, `values`.
    own: Arc<dyn Group>,
    values: Arc<AllReduceGroup>,
    followers: Vec<Arc<Link>>,
    asked: Arc<AtomicU64>,
}

impl Group for Leading {
    fn break_up(&self) {
        self.own.break_up();
        let before = self.asked.load(Ordering::SeqCst);
        for link in &self.followers {
            // Who is gone waits for nobody.
            let _ = link.send(&Taken::Failed { device: self.device, before });
        }
    }

    fn mend(&self) -> Result<()> {
        self.own.mend()
    }
}

impl Absence {
    /// Waits until a process is gone before the job is over, and says so; `None` once it is over.
    pub fn wait(&self) -> Option<Error> {
        let ended = lock(&self.0.ended);
        let waiting = |ended: &mut Ended| ended.gone.is_none() && !ended.over;
        let ended = self.0.changed.wait_while(ended, waiting);
        ended.unwrap_or_else(PoisonError::into_inner).gone.clone()
    }
}

impl State {
    /// Notes that a process is gone, and returns the first that was.
    fn gone(&self, why: Error) -> Error {
        let mut ended = lock(&self.ended);
        if ended.over {
            return why;
        }
        self.changed.notify_all();
        ended.gone.get_or_insert(why).clone()
    }

    fn sound(&self) -> Result<()> {
        lock(&self.ended).gone.clone().map_or(Ok(()), Err)
    }
}

/// Answers what a follower sends at any time, until its end.
fn attend(rank: usize, link: &Link, groups: &Groups, state: &State) {
    let group = |device| lock(groups).get(&device).cloned();
    loop {
        let answer = match link.receive() {
            Ok(Given::Values { device, combine, values }) => {
                let unknown = || Err(Error::new(PLACE, "a group that is there", "one that ended"));
                let joined = |group: Arc<Leading>| group.values.join(rank, combine, values);
                Taken::Values(group(device).map_or_else(unknown, joined))
            }
            Ok(Given::Failed { device }) => {
                if let Some(group) = group(device) {
                    group.break_up();
                }
                Taken::Known
            }
            Err(why) => {
                state.gone(why);
                let all: Vec<_> = lock(groups).values().cloned().collect();
                all.iter().for_each(|group| group.break_up());
                return;
            }
        };
        // A failure to send is one to receive, next.
        let _ = link.send(&answer);
    }
}

impl Processes {
    /// Waits for the other processes of a job, each of which [follows](super::follow) this one;
    /// this one's device is at `place`.
    ///
    /// # Errors
    /// An address that is taken, and processes that do not come in time or do not belong together.
    pub fn lead(launch: &RankLaunch, place: DeviceSpec) -> Result<Processes> {
        let listener = TcpListener::bind((launch.host.as_str(), launch.port));
        let listener = listener.map_err(|why| {
            let hint = "MASTER_ADDR names an address of this machine, MASTER_PORT a port";
            Error::io(launch.address(), why).hint(hint)
        })?;
        Processes::lead_at(&listener, launch, place)
    }

    pub(super) fn lead_at(
        listener: &TcpListener,
        launch: &RankLaunch,
        place: DeviceSpec,
    ) -> Result<Processes> {
        let (mut places, mut requests, mut values) = (vec![place], vec![], vec![]);
        for follower in gather(listener, launch)? {
            let Follower { requests: asks, values: gives, place } = follower;
            places.push(place.parse()?);
            requests.push(asks);
            values.push(Arc::new(gives));
        }
        let (groups, state) = (Groups::default(), Arc::<State>::default());
        for (rank, link) in (1..).zip(&values) {
            let (link, groups, state) = (Arc::clone(link), Arc::clone(&groups), Arc::clone(&state));
            let work = move || attend(rank, &link, &groups, &state);
            let thread = std::thread::Builder::new().name("rank".to_owned()).spawn(work);
            thread.map_err(|why| Error::new("ranks", "a thread", why))?;
        }
        let (turn, named, asked) = Default::default();
        Ok(Processes(Arc::new(Inner {
            places,
            requests,
            values,
            turn,
            groups,
            state,
            named,
            asked,
        })))
    }

    /// The device of every rank, in order.
    pub fn places(&self) -> &[DeviceSpec] {
        &self.0.places
    }

    /// The connection that tells when a process is gone.
    pub fn absence(&self) -> Absence {
        Absence(Arc::clone(&self.0.state))
    }

    /// Ends the other processes once they have done what they were asked for.
    pub fn end(&self) {
        self.0.end();
    }

    /// Opens every rank's device, as one.
    ///
    /// # Errors
    /// A process that is gone, a device that it does not have, or ranks that cannot be joined.
    pub fn open(&self) -> Result<Box<dyn Device>> {
        let inner = &self.0;
        let device = inner.name();
        let (own, others) = {
            let _turn = lock(&inner.turn);
            inner.ask(|_| Request::Open { device }, || self.places()[0].candidate())
        };
        // What was opened is closed if anything fails from here on.
        let remote = RemoteDevices { inner: Arc::clone(inner), device };
        let own = own?;
        done(others)?;
        let group = own.group()?;
        let values = Arc::new(AllReduceGroup::new(inner.places.len()));
        let joined = |own: Box<dyn Candidate>| {
            let (count, values) = (inner.places.len(), Arc::clone(&values));
            own.join(&group, 0, count, values)
        };
        let (own, others) = {
            let _turn = lock(&inner.turn);
            inner.ask(|_| Request::Join { device, group: group.clone() }, || joined(own))
        };
        let (own, group) = own?;
        done(others)?;
        let own_group = group.unwrap_or_else(|| values.clone());
        let (followers, asked) = (inner.values.clone(), Arc::clone(&inner.asked));
        let group = Arc::new(Leading { device, own: own_group, values, followers, asked });
        lock(&inner.groups).insert(device, group.clone());
        let turn = Arc::clone(&inner.turn);
        Ok(Box::new(Ranks { devices: vec![own], remote: Some(remote), group, turn }))
    }
}

fn done(responses: Vec<Result<Response>>) -> Result<()> {
    responses.into_iter().try_for_each(|response| match response? {
        Response::Done(done) => done,
        _ => Err(unexpected()),
    })
}

fn unexpected() -> Error {
    Error::new("ranks", "an answer to what was asked", "another").of(ErrorKind::Internal)
}

impl Inner {
    fn name(&self) -> u32 {
        self.named.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends a rank a request, and returns its number.
    fn tell(&self, rank: usize, request: &Request<'_>) -> Result<u64> {
        self.state.sound()?;
        let number = self.asked.fetch_add(1, Ordering::SeqCst);
        let sent = self.requests[rank - 1].send(&(number, request));
        // A request that is too long has not been sent.
        sent.map_err(|why| match why.kind {
            ErrorKind::Internal => self.state.gone(why),
            _ => why,
        })?;
        Ok(number)
    }

    /// A rank's answer to the request with this number. Answers that nobody has waited for are
    /// passed over.
    fn hear(&self, rank: usize, number: u64) -> Result<Response> {
        loop {
            let heard: Result<(u64, Response)> = self.requests[rank - 1].receive();
            match heard {
                Ok((to, response)) if to == number => return Ok(named(rank, response)),
                Ok(_) => {}
                Err(why) => return Err(self.state.gone(why)),
            }
        }
    }

    /// Has every follower do something, and the leader `own` at the same time; whoever calls it has
    /// the turn.
    fn ask<'a, T>(
        &self,
        request: impl Fn(usize) -> Request<'a>,
        own: impl FnOnce() -> T,
    ) -> (T, Vec<Result<Response>>) {
        let ranks = 1..self.places.len();
        let told: Vec<_> = ranks.clone().map(|rank| self.tell(rank, &request(rank))).collect();
        let own = own();
        let heard = ranks.zip(told).map(|(rank, number)| self.hear(rank, number?)).collect();
        (own, heard)
    }

    fn end(&self) {
        let mut ended = lock(&self.state.ended);
        if std::mem::replace(&mut ended.over, true) {
            return;
        }
        drop(ended);
        self.state.changed.notify_all();
        let number = self.asked.fetch_add(1, Ordering::SeqCst);
        for link in &self.requests {
            let _ = link.send(&(number, Request::End));
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.end();
        // Ends the threads that listen.
        self.values.iter().for_each(|link| link.close());
    }
}

/// A response whose failure, if it has one, says whose it is.
fn named(rank: usize, response: Response) -> Response {
    let told = |why: Error| match why.place == PLACE {
        true => why,
        false => Error { place: format!("rank {rank}: {}", why.place), ..why },
    };
    match response {
        Response::Done(done) => Response::Done(done.map_err(told)),
        Response::Planned(planned) => Response::Planned(planned.map_err(told)),
        Response::Answered(answer) => Response::Answered(answer.map_failure(told)),
        Response::Shared(bytes) => Response::Shared(bytes),
    }
}

/// The devices of all ranks but the leader's.
pub(super) struct RemoteDevices {
    inner: Arc<Inner>,
    device: u32,
}

impl RemoteDevices {
    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.inner.requests.len()
    }

    fn shares<'a>(
        shards: &'a [Program],
        tensors: &Tensors,
        options: &'a ExecutorOptions,
    ) -> Result<impl Fn(usize) -> Share<'a>> {
        let location = tensors.location();
        let files = location.path().map(std::path::absolute).ok_or_else(|| {
            let expected = "a model in files, which every process can read";
            Error::new("ranks", expected, &location)
        })?;
        let files = files.map_err(|why| Error::io(&location, why))?;
        let fingerprint = fingerprint(tensors);
        Ok(move |rank: usize| Share {
            files: files.clone(),
            fingerprint: fingerprint.clone(),
            program: Cow::Borrowed(&shards[rank]),
            options: Cow::Borrowed(options),
        })
    }

    /// The plans of all ranks, of which `own` makes the leader's.
    pub(super) fn plan(
        &self,
        shards: &[Program],
        tensors: &Tensors,
        options: &ExecutorOptions,
        own: impl FnOnce() -> Result<Vec<Plan>>,
    ) -> Result<Vec<Plan>> {
        let share = Self::shares(shards, tensors, options)?;
        let device = self.device;
        let _turn = lock(&self.inner.turn);
        let (own, others) =
            self.inner.ask(|rank| Request::Plan { device, share: Box::new(share(rank)) }, own);
        let others = others.into_iter().map(|response| match response? {
            Response::Planned(plans) => plans,
            _ => Err(unexpected()),
        });
        Ok(std::iter::once(own).chain(others).collect::<Result<Vec<_>>>()?.concat())
    }

    /// Loads every rank's share, `own` the leader's.
    pub(super) fn load<T>(
        &self,
        shards: &[Program],
        tensors: &Tensors,
        options: &ExecutorOptions,
        own: impl FnOnce() -> Result<T>,
    ) -> Result<(T, Vec<Box<dyn Peer>>)> {
        let share = Self::shares(shards, tensors, options)?;
        let (device, executor) = (self.device, self.inner.name());
        let (own, others) = {
            let _turn = lock(&self.inner.turn);
            let load = |rank| Request::Load { device, executor, share: Box::new(share(rank)) };
            self.inner.ask(load, own)
        };
        let inner = &self.inner;
        let remote = |rank| Remote { inner: Arc::clone(inner), rank, executor, told: Cell::new(0) };
        // What was loaded is unloaded if anything has failed.
        let remotes: Vec<Remote> = (1..=self.count()).map(remote).collect();
        let own = own?;
        done(others)?;
        let boxed = |remote| Box::new(remote) as Box<dyn Peer>;
        Ok((own, remotes.into_iter().map(boxed).collect()))
    }

    /// Bytes that executors of these devices share.
    pub(super) fn shared(&self) -> usize {
        let _turn = lock(&self.inner.turn);
        let device = self.device;
        let (_, others) = self.inner.ask(|_| Request::Shared { device }, || ());
        let bytes = |response| match response {
            Ok(Response::Shared(bytes)) => bytes,
            _ => 0,
        };
        others.into_iter().map(bytes).sum()
    }
}

impl Drop for RemoteDevices {
    fn drop(&mut self) {
        lock(&self.inner.groups).remove(&self.device);
        for rank in 1..=self.count() {
            // Not waited for: NCCL may end a rank's part only once all end theirs.
            let _ = self.inner.tell(rank, &Request::Close { device: self.device });
        }
    }
}

/// A rank's executor in another process.
struct Remote {
    inner: Arc<Inner>,
    rank: usize,
    executor: u32,
    /// The number of the last request.
    told: Cell<u64>,
}

impl Peer for Remote {
    fn tell(&self, order: Order, asked: &Asked) -> Result<()> {
        let executor = self.executor;
        let request = match order {
            Order::Submit | Order::Time => {
                let (step, timed) = (Cow::Borrowed(&asked.step), order == Order::Time);
                Request::Submit { executor, step, timed }
            }
            Order::Copy => {
                let (group, blocks) = (asked.group, Cow::Borrowed(&asked.blocks[..]));
                Request::Copy { executor, group, blocks }
            }
            Order::Seat(seat) => {
                let adapter =
                    asked.adapters.get(self.rank).map_or_else(|| Cow::Owned(None), Cow::Borrowed);
                Request::Seat { executor, seat, adapter }
            }
            Order::Wait(_) | Order::Memory | Order::Lost | Order::Roof => {
                Request::Ask { executor, order }
            }
        };
        self.told.set(self.inner.tell(self.rank, &request)?);
        Ok(())
    }

    fn hear(&self) -> Result<Answer> {
        match self.inner.hear(self.rank, self.told.get())? {
            Response::Answered(answer) => Ok(answer),
            Response::Done(Err(why)) => Err(why),
            _ => Err(unexpected()),
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        let _turn = lock(&self.inner.turn);
        let told = self.inner.tell(self.rank, &Request::Unload { executor: self.executor });
        if let Ok(number) = told {
            // Its memory is free once this returns.
            let _ = self.inner.hear(self.rank, number);
        }
    }
}

//! A process that is one of several ranks and not the first: it does what rank 0 asks of it.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use formats::{Error, ErrorKind, Result, Tensors, fingerprint};

use super::link::{Channel, Link, connect, lock};
use super::processes::{Given, Request, Response, Share, Taken};
use super::{Answer, Asked, Candidate, Group, Kept, Order, PLACE, RankLaunch};
use crate::gpu::group::{Combine, HostGroup};
use crate::{Device, DeviceSpec, Executor};

/// Joins the job of a launch, and does what its rank 0 asks for on the device at `place`, until
/// that ends.
///
/// # Errors
/// A rank 0 that does not come in time, that refuses this process, or that ends without a word.
pub fn follow(launch: &RankLaunch, place: DeviceSpec) -> Result<()> {
    let name = place.to_string();
    let requests = connect(launch, Channel::Requests, &name)?;
    let values = Values::start(connect(launch, Channel::Values, &name)?)?;
    let mut follower = FollowerState {
        rank: launch.rank,
        count: launch.count,
        place,
        values,
        opened: HashMap::new(),
        devices: HashMap::new(),
        executors: HashMap::new(),
        files: None,
        asked: Asked::default(),
        kept: Kept::default(),
    };
    loop {
        let (number, request): (u64, Request<'_>) = requests.receive()?;
        if matches!(request, Request::End) {
            return Ok(());
        }
        follower.values.current.store(number, Ordering::SeqCst);
        let response = follower.answer(request);
        follower.values.current.store(IDLE, Ordering::SeqCst);
        requests.send(&(number, response))?;
    }
}

/// The link over which this rank gives values and hears of failures.
struct Values {
    link: Arc<Link>,
    /// Answers to what was given.
    answers: Mutex<Receiver<Taken>>,
    /// The groups in which this process's own rank may wait for others.
    groups: Groups,
    /// The number of the request that is being answered.
    current: Arc<AtomicU64>,
}

/// In place of the number of a request: there is none.
const IDLE: u64 = u64::MAX;

type Groups = Arc<Mutex<HashMap<u32, Arc<dyn Group>>>>;

impl Values {
    /// Starts a thread that listens.
    fn start(link: Link) -> Result<Arc<Values>> {
        let (link, groups) = (Arc::new(link), Groups::default());
        let current = Arc::new(AtomicU64::new(IDLE));
        let (says, answers) = channel();
        let (own, known, now) = (Arc::clone(&link), Arc::clone(&groups), Arc::clone(&current));
        let work = move || listen(&own, &known, &now, &says);
        let thread = std::thread::Builder::new().name("rank".to_owned()).spawn(work);
        thread.map_err(|why| Error::new("ranks", "a thread", why))?;
        Ok(Arc::new(Values { link, answers: Mutex::new(answers), groups, current }))
    }

    fn ask(&self, given: &Given) -> Result<Taken> {
        let answers = lock(&self.answers);
        self.link.send(given)?;
        let gone = |_| Error::new(PLACE, "rank 0", "one that ended");
        answers.recv().map_err(gone)
    }
}

/// Hears answers, and of other ranks' failures, until the link ends; then none of this process's
/// ranks waits for others any more.
fn listen(link: &Link, groups: &Groups, current: &AtomicU64, says: &Sender<Taken>) {
    loop {
        match link.receive() {
            // Word of a failure may come late, when this rank does something else.
            Ok(Taken::Failed { before, .. }) if current.load(Ordering::SeqCst) >= before => {}
            Ok(Taken::Failed { device, .. }) => {
                if let Some(group) = lock(groups).get(&device) {
                    group.break_up();
                }
            }
            Ok(answer) => {
                if says.send(answer).is_err() {
                    return;
                }
            }
            Err(_) => return lock(groups).values().for_each(|group| group.break_up()),
        }
    }
}

/// A group of ranks as a follower has it.
struct Following {
    device: u32,
    /// The transport to the other ranks; `None` for simulated GPUs, which give their values to
    /// rank 0.
    own: Mutex<Option<Arc<dyn Group>>>,
    values: Arc<Values>,
}

impl Following {
    fn own(&self) -> Option<Arc<dyn Group>> {
        lock(&self.own).clone()
    }
}

impl Group for Following {
    fn break_up(&self) {
        if let Some(own) = self.own() {
            own.break_up();
        }
        // All know of it before this rank's answer can let them go on. Whoever is gone knows
        // enough.
        let _ = self.values.ask(&Given::Failed { device: self.device });
    }

    fn mend(&self) -> Result<()> {
        self.own().map_or(Ok(()), |own| own.mend())
    }
}

impl HostGroup for Following {
    fn join(&self, _: usize, combine: Combine, values: Vec<f32>) -> Result<Vec<f32>> {
        match self.values.ask(&Given::Values { device: self.device, combine, values })? {
            Taken::Values(joined) => joined,
            _ => Err(Error::new(PLACE, "what all ranks have made", "another answer")),
        }
    }
}

/// An executor with its group.
struct Loaded {
    executor: Box<dyn Executor>,
    group: Arc<Following>,
}

struct FollowerState {
    rank: usize,
    count: usize,
    place: DeviceSpec,
    values: Arc<Values>,
    /// Devices that are open and belong to no group yet.
    opened: HashMap<u32, Box<dyn Candidate>>,
    devices: HashMap<u32, (Box<dyn Device>, Arc<Following>)>,
    executors: HashMap<u32, Loaded>,
    /// The files of the model that is planned or loaded, and their fingerprint.
    files: Option<(PathBuf, Tensors, String)>,
    asked: Asked,
    kept: Kept,
}

fn absent(what: &str, number: u32) -> Error {
    let error = Error::new("ranks", format!("{what} that is there"), format!("number {number}"));
    error.of(ErrorKind::Internal)
}

impl FollowerState {
    fn answer(&mut self, request: Request<'_>) -> Response {
        match request {
            Request::Open { device } => Response::Done(self.open(device)),
            Request::Join { device, group } => Response::Done(self.join(device, &group)),
            Request::Plan { device, share } => {
                Response::Planned(self.with_share(device, &share, |device, tensors| {
                    device.check(&share.program)?;
                    device.plan(&share.program, tensors, &share.options)
                }))
            }
            Request::Load { device, executor, share } => {
                let loaded = self.with_share(device, &share, |device, tensors| {
                    let (program, options) = (share.program.clone(), share.options.clone());
                    let (program, options) = (program.into_owned(), options.into_owned());
                    device.load(program, tensors, options, &mut |_, _| {})
                });
                // Whatever came of it, the files need not stay mapped.
                self.files = None;
                crate::give_back();
                Response::Done(loaded.and_then(|loaded| self.keep(device, executor, loaded)))
            }
            Request::Shared { device } => {
                let shared = self.devices.get(&device).map_or(0, |(device, _)| device.shared());
                Response::Shared(shared)
            }
            Request::Submit { executor, step, timed } => {
                self.asked.step = step.into_owned();
                self.order(executor, if timed { Order::Time } else { Order::Submit })
            }
            Request::Copy { executor, group, blocks } => {
                (self.asked.group, self.asked.blocks) = (group, blocks.into_owned());
                self.order(executor, Order::Copy)
            }
            Request::Seat { executor, seat, adapter } => {
                self.asked.adapters = vec![adapter.into_owned()];
                let answer = self.order(executor, Order::Seat(seat));
                self.asked.adapters.clear();
                answer
            }
            Request::Ask { executor, order } => self.order(executor, order),
            Request::Unload { executor } => {
                self.executors.remove(&executor);
                crate::give_back();
                Response::Done(Ok(()))
            }
            Request::Close { device } => {
                self.opened.remove(&device);
                self.devices.remove(&device);
                lock(&self.values.groups).remove(&device);
                Response::Done(Ok(()))
            }
            Request::End => Response::Done(Ok(())),
        }
    }

    fn open(&mut self, device: u32) -> Result<()> {
        self.opened.insert(device, self.place.candidate()?);
        Ok(())
    }

    fn join(&mut self, device: u32, group: &[u8]) -> Result<()> {
        let candidate = self.opened.remove(&device).ok_or_else(|| absent("a device", device))?;
        let values = Arc::clone(&self.values);
        let following = Arc::new(Following { device, own: Mutex::default(), values });
        let (joined, own) = candidate.join(group, self.rank, self.count, following.clone())?;
        if let Some(own) = &own {
            lock(&self.values.groups).insert(device, Arc::clone(own));
        }
        *lock(&following.own) = own;
        self.devices.insert(device, (joined, following));
        Ok(())
    }

    /// Calls `work` with a device and the files of a share, which must be the leader's.
    fn with_share<T>(
        &mut self,
        device: u32,
        share: &Share<'_>,
        work: impl FnOnce(&dyn Device, &Tensors) -> Result<T>,
    ) -> Result<T> {
        share.program.verify()?;
        if self.files.as_ref().is_none_or(|(path, ..)| *path != share.files) {
            let tensors = Tensors::open(&share.files)?;
            let found = fingerprint(&tensors);
            self.files = Some((share.files.clone(), tensors, found));
        }
        let (device, _) = self.devices.get(&device).ok_or_else(|| absent("a device", device))?;
        let Some((path, tensors, found)) = &self.files else {
            return Err(absent("a model's file", 0));
        };
        if *found != share.fingerprint {
            let [wanted, found] =
                [&share.fingerprint, found].map(|all| all.get(..12).unwrap_or(all));
            let expected = format!("rank 0's model, fingerprint {wanted}");
            return Err(Error::new(path.display(), expected, found));
        }
        work(&**device, tensors)
    }

    fn keep(&mut self, device: u32, number: u32, executor: Box<dyn Executor>) -> Result<()> {
        let (_, group) = self.devices.get(&device).ok_or_else(|| absent("a device", device))?;
        self.executors.insert(number, Loaded { executor, group: Arc::clone(group) });
        Ok(())
    }

    fn order(&mut self, executor: u32, order: Order) -> Response {
        let Some(Loaded { executor, group }) = self.executors.get_mut(&executor) else {
            return Response::Done(Err(absent("an executor", executor)));
        };
        let answer = match group.mend() {
            Ok(()) => self.asked.on(0, &mut **executor, order, &mut self.kept),
            Err(why) => Answer::failed(order, why),
        };
        if answer.breaks_up() {
            group.break_up();
        }
        Response::Answered(answer)
    }
}

//! Connections between the processes of a job: how they are made, and messages over them.
//!
//! A message is its length, four bytes with the lowest first, and what [`postcard`] makes of it.
//! Both ends prove at the beginning, without showing it, that they have the job's token: each
//! answers the other's random number by a digest (HMAC-SHA-256) of that, with the token as its key.
//! Messages themselves are neither encrypted nor signed, so that ranks on several machines need a
//! network that others cannot change.

use std::io::{BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use formats::{Error, ErrorKind, Result};
use hmac::{Hmac, KeyInit, Mac};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::Sha256;

use super::launch::{RankLaunch, TOKEN};

/// Most bytes of a message. Steps are the largest: a history of a million tokens takes 5 MB.
const MOST: usize = 1 << 28;
/// Most bytes of a message before the other end has proved that it has the token.
const MOST_STRANGE: usize = 1 << 12;
/// How long a new connection may take to say who it is.
const INTRODUCTION: Duration = Duration::from_secs(5);
/// Between two looks for a connection.
const PAUSE: Duration = Duration::from_millis(10);
/// How long a connection is silent before the system asks whether its other end is still there.
const SILENCE: Duration = Duration::from_secs(30);
/// Most connections that introduce themselves at a time.
const MOST_NEW: usize = 64;

/// How a leader opens.
const MAGIC: [u8; 8] = *b"delft/rk";

/// The purpose of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Channel {
    /// The leader's requests, and answers to each.
    Requests,
    /// Values exchanged in a step, and failures, at any time.
    Values,
}

/// A follower's introduction.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Claim {
    pub(super) rank: usize,
    count: usize,
    pub(super) channel: Channel,
    build: String,
    /// The name of its device.
    pub(super) place: String,
}

#[derive(Serialize, Deserialize)]
struct Challenge {
    magic: [u8; 8],
    number: [u8; 32],
}

#[derive(Serialize, Deserialize)]
struct Hello {
    claim: Claim,
    number: [u8; 32],
    proof: [u8; 32],
}

#[derive(Serialize, Deserialize)]
enum Welcome {
    /// With the leader's proof.
    In([u8; 32]),
    Refused(Error),
}

/// A digest that only those can make who have the token.
fn prove(token: &[u8], who: &str, numbers: [&[u8; 32]; 2], claim: &Claim) -> Result<Hmac<Sha256>> {
    let mut proof =
        Hmac::<Sha256>::new_from_slice(token).map_err(|why| Error::new(TOKEN, "a key", why))?;
    proof.update(who.as_bytes());
    numbers.iter().for_each(|number| proof.update(*number));
    let claim = postcard::to_allocvec(claim).map_err(|why| Error::new("ranks", "", why))?;
    proof.update(&claim);
    Ok(proof)
}

fn random() -> Result<[u8; 32]> {
    let mut number = [0; 32];
    getrandom::fill(&mut number).map_err(|why| Error::new("random numbers", "", why))?;
    Ok(number)
}

fn other_token(place: impl std::fmt::Display) -> Error {
    Error::new(place, "a process with the same token", "another")
        .hint(format!("give {TOKEN} the same value for every rank"))
}

/// A connection to another process. Several threads may send, and one at a time receives.
pub(super) struct Link {
    /// The other end, for messages: `rank 1`.
    place: String,
    writer: Mutex<(TcpStream, Vec<u8>)>,
    reader: Mutex<(BufReader<TcpStream>, Vec<u8>)>,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panic leaves behind in a link is overwritten by the next message.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Link {
    pub(super) fn new(place: String, stream: TcpStream) -> Result<Link> {
        let wrong = |why| Error::io(&place, why);
        stream.set_nodelay(true).map_err(wrong)?;
        let alive = socket2::TcpKeepalive::new().with_time(SILENCE);
        socket2::SockRef::from(&stream).set_tcp_keepalive(&alive).map_err(wrong)?;
        let reader = BufReader::new(stream.try_clone().map_err(wrong)?);
        let (writer, reader) = (Mutex::new((stream, vec![])), Mutex::new((reader, vec![])));
        Ok(Link { place, writer, reader })
    }

    /// Sends a message.
    ///
    /// # Errors
    /// A message that is too long, or an end that is gone.
    pub(super) fn send(&self, message: &impl Serialize) -> Result<()> {
        let mut writer = lock(&self.writer);
        let (stream, frame) = &mut *writer;
        frame.clear();
        frame.extend([0; 4]);
        let written = postcard::to_extend(message, std::mem::take(frame));
        *frame = written.map_err(|why| Error::new(&self.place, "", why))?;
        let length = frame.len() - 4;
        let head = u32::try_from(length).ok().filter(|_| length <= MOST);
        let head = head.ok_or_else(|| self.oversize(MOST, length))?;
        frame[..4].copy_from_slice(&head.to_le_bytes());
        stream.write_all(frame).map_err(|why| self.gone(&why))
    }

    /// Waits for a message.
    ///
    /// # Errors
    /// A message that is too long or damaged, or an end that is gone.
    pub(super) fn receive<T: DeserializeOwned>(&self) -> Result<T> {
        self.receive_at_most(MOST)
    }

    fn receive_at_most<T: DeserializeOwned>(&self, most: usize) -> Result<T> {
        let mut reader = lock(&self.reader);
        let (stream, frame) = &mut *reader;
        let mut head = [0; 4];
        stream.read_exact(&mut head).map_err(|why| self.gone(&why))?;
        let length = u32::from_le_bytes(head);
        if length as usize > most {
            return Err(self.oversize(most, length as usize));
        }
        frame.clear();
        // The memory grows with what arrives, whatever was announced.
        let read = stream.by_ref().take(u64::from(length)).read_to_end(frame);
        read.map_err(|why| self.gone(&why))?;
        if frame.len() < length as usize {
            return Err(self.gone(&std::io::ErrorKind::UnexpectedEof.into()));
        }
        let damaged = |found: String| Error::new(&self.place, "a message of this program", found);
        match postcard::take_from_bytes(frame) {
            Ok((message, [])) => Ok(message),
            Ok((_, more)) => Err(damaged(format!("{} bytes behind one", more.len()))),
            Err(why) => Err(damaged(why.to_string())),
        }
    }

    fn oversize(&self, most: usize, length: usize) -> Error {
        Error::new(&self.place, format!("a message of at most {most} bytes"), length)
    }

    fn gone(&self, why: &std::io::Error) -> Error {
        use std::io::ErrorKind as Io;
        let found = match why.kind() {
            Io::UnexpectedEof | Io::ConnectionReset | Io::BrokenPipe | Io::ConnectionAborted => {
                "one that ended".to_owned()
            }
            Io::WouldBlock | Io::TimedOut => "one that says nothing".to_owned(),
            _ => why.to_string(),
        };
        Error::new(&self.place, "a process that goes on", found).of(ErrorKind::Internal)
    }

    /// Allows the other end only so long to answer, or any time.
    fn within(&self, time: Option<Duration>) -> Result<()> {
        let wrong = |why| Error::io(&self.place, why);
        lock(&self.writer).0.set_read_timeout(time).map_err(wrong)
    }

    /// Ends the connection for both ends.
    pub(super) fn close(&self) {
        let _ = lock(&self.writer).0.shutdown(std::net::Shutdown::Both);
    }
}

/// A follower whose claim and proof are right.
struct Greeted {
    claim: Claim,
    link: Link,
    /// The leader's answer.
    proof: [u8; 32],
}

/// Has a new connection introduce itself. `None` if it is not welcome.
fn greet(stream: TcpStream, token: &[u8]) -> Result<Greeted> {
    let link = Link::new("a connection".to_owned(), stream)?;
    link.within(Some(INTRODUCTION))?;
    let number = random()?;
    link.send(&Challenge { magic: MAGIC, number })?;
    let hello: Hello = link.receive_at_most(MOST_STRANGE)?;
    let Hello { claim, number: theirs, proof } = hello;
    let numbers = [&number, &theirs];
    if prove(token, "follower", numbers, &claim)?.verify_slice(&proof).is_err() {
        let _ = link.send(&Welcome::Refused(other_token("rank 0")));
        return Err(other_token(format!("rank {}", claim.rank)));
    }
    link.within(None)?;
    let proof = prove(token, "leader", numbers, &claim)?.finalize().into_bytes().into();
    Ok(Greeted { link: Link { place: format!("rank {}", claim.rank), ..link }, claim, proof })
}

/// A follower's two connections.
pub(super) struct Follower {
    pub(super) requests: Link,
    pub(super) values: Link,
    /// The name of its device.
    pub(super) place: String,
}

/// Waits at `listener` for all followers of a job, and returns them in the order of their ranks.
///
/// # Errors
/// A process that belongs to another job or build, a rank that is there twice, or one that does not
/// come in time.
pub(super) fn gather(listener: &TcpListener, launch: &RankLaunch) -> Result<Vec<Follower>> {
    let wrong = |why| Error::io(launch.address(), why);
    listener.set_nonblocking(true).map_err(wrong)?;
    let late = Instant::now() + launch.patience;
    let mut found: Vec<[Option<(Claim, Link)>; 2]> =
        (1..launch.count).map(|_| [None, None]).collect();
    let (done, greeted) = channel();
    let (mut new, mut stranger) = (0, None);
    while found.iter().flatten().any(Option::is_none) {
        if Instant::now() >= late {
            return Err(missing(&found, launch, stranger));
        }
        match listener.accept() {
            Ok((stream, _)) if new < MOST_NEW => {
                stream.set_nonblocking(false).map_err(wrong)?;
                let (done, token) = (done.clone(), launch.token.clone());
                let work = move || drop(done.send(greet(stream, &token)));
                std::thread::Builder::new().spawn(work).map_err(wrong)?;
                new += 1;
            }
            // A connection too many, or one that ended before it began, is dropped.
            Ok(_) | Err(_) => std::thread::sleep(PAUSE),
        }
        for greeted in greeted.try_iter() {
            new -= 1;
            match greeted {
                Ok(follower) => admit(&mut found, follower, launch)?,
                // Whoever cannot prove that it belongs here does not end what does.
                Err(why) => stranger = Some(why),
            }
        }
    }
    let both = found.into_iter().filter_map(|[requests, values]| {
        let ((claim, requests), (_, values)) = (requests?, values?);
        Some(Follower { requests, values, place: claim.place })
    });
    Ok(both.collect())
}

/// Takes a follower in, or tells it and the leader why not.
fn admit(
    found: &mut [[Option<(Claim, Link)>; 2]],
    follower: Greeted,
    launch: &RankLaunch,
) -> Result<()> {
    let Greeted { claim, link, proof } = follower;
    let place = format!("rank {}", claim.rank);
    let seat = claim.rank.checked_sub(1).and_then(|at| found.get_mut(at));
    let refused = if claim.build != launch.build {
        Err(Error::new(place, format!("delft {}, as rank 0 has", launch.build), &claim.build))
    } else if claim.count != launch.count {
        Err(Error::new(place, format!("{} ranks, as rank 0 has", launch.count), claim.count))
    } else {
        match seat.map(|both| &mut both[claim.channel as usize]) {
            None => {
                Err(Error::new(place, format!("a rank from 1 to {}", launch.count - 1), "another"))
            }
            Some(Some(_)) => Err(Error::new(place, "one process of each rank", "two")),
            Some(free) => Ok(free),
        }
    };
    match refused {
        Ok(free) => {
            link.send(&Welcome::In(proof))?;
            *free = Some((claim, link));
            Ok(())
        }
        Err(why) => {
            let _ = link.send(&Welcome::Refused(why.clone()));
            Err(why)
        }
    }
}

fn missing(
    found: &[[Option<(Claim, Link)>; 2]],
    launch: &RankLaunch,
    stranger: Option<Error>,
) -> Error {
    let absent = found.iter().enumerate().filter(|(_, both)| both.iter().any(Option::is_none));
    let absent: Vec<String> = absent.map(|(at, _)| (at + 1).to_string()).collect();
    let seconds = launch.patience.as_secs();
    let expected = format!("{} processes at {} within {seconds} s", launch.count, launch.address());
    let error = Error::new("ranks", expected, format!("none of rank {}", absent.join(", ")));
    match stranger {
        Some(why) => error.hint(format!("a connection was refused: {why}")),
        None => error.hint("start the same command for every rank"),
    }
}

/// Connects a follower to its leader, and waits for that.
///
/// # Errors
/// A leader that does not come in time, that is no leader of this job, or that refuses.
pub(super) fn connect(launch: &RankLaunch, channel: Channel, place: &str) -> Result<Link> {
    let late = Instant::now() + launch.patience;
    let stream = loop {
        match TcpStream::connect((launch.host.as_str(), launch.port)) {
            Ok(stream) => break stream,
            Err(_) if Instant::now() < late => std::thread::sleep(PAUSE),
            Err(why) => {
                let seconds = launch.patience.as_secs();
                let expected = format!("rank 0 within {seconds} s");
                let error = Error::new(launch.address(), expected, why).of(ErrorKind::Busy);
                return Err(error.hint("start the same command for every rank"));
            }
        }
    };
    let link = Link::new("rank 0".to_owned(), stream)?;
    link.within(Some(INTRODUCTION))?;
    let stranger = |found: &str| {
        let error = Error::new(launch.address(), "rank 0 of this job", found);
        error.hint("MASTER_PORT names another port")
    };
    let opened: Result<Challenge> = link.receive_at_most(MOST_STRANGE);
    let challenge = opened.map_err(|why| match why.kind {
        ErrorKind::Internal => why,
        _ => stranger("another program"),
    })?;
    if challenge.magic != MAGIC {
        return Err(stranger("another program"));
    }
    let (rank, count, build) = (launch.rank, launch.count, launch.build.clone());
    let claim = Claim { rank, count, channel, build, place: place.to_owned() };
    let number = random()?;
    let numbers = [&challenge.number, &number];
    let proof = prove(&launch.token, "follower", numbers, &claim)?.finalize().into_bytes().into();
    link.send(&Hello { claim: claim.clone(), number, proof })?;
    match link.receive_at_most(MOST_STRANGE)? {
        Welcome::Refused(why) => Err(why),
        Welcome::In(proof) => {
            let sound = prove(&launch.token, "leader", numbers, &claim)?;
            sound.verify_slice(&proof).map_err(|_| other_token("rank 0"))?;
            link.within(None)?;
            Ok(link)
        }
    }
}

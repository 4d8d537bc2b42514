//! Ranks in several processes, here threads that meet over sockets as processes do; the command
//! line's tests start real ones.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::Duration;

use formats::{DType, Result, Tensors};
use ops::low_rank::Delta;
use program::{AdapterFactors, Sequence, Site, Step, StepKind, Table};

use super::link::{Channel, Link, connect, gather};
use super::{Processes, RankLaunch, follow};
use crate::gpu::sim::fail_after;
use crate::tests::{recorded, together, worst};
use crate::{CacheType, Device, DeviceSpec, Executor, ExecutorOptions, Seats};

fn launch(rank: usize, count: usize, port: u16) -> RankLaunch {
    RankLaunch {
        rank,
        count,
        local_rank: rank,
        host: "127.0.0.1".to_owned(),
        port,
        token: b"a token".to_vec(),
        patience: Duration::from_secs(60),
        build: "this one".to_owned(),
    }
}

fn listen() -> (TcpListener, u16) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    (listener, port)
}

fn sim() -> DeviceSpec {
    "sim".parse().unwrap()
}

type Followers = Vec<JoinHandle<Result<()>>>;

/// A job of `count` ranks, whose followers begin with `first`.
fn job_with(count: usize, first: fn()) -> (Processes, Followers) {
    let (listener, port) = listen();
    let start = |rank| {
        std::thread::spawn(move || {
            first();
            follow(&launch(rank, count, port), sim())
        })
    };
    let followers = (1..count).map(start).collect();
    (Processes::lead_at(&listener, &launch(0, count, port), sim()).unwrap(), followers)
}

fn job(count: usize) -> (Processes, Followers) {
    job_with(count, || {})
}

fn end(processes: Processes, followers: Followers) {
    processes.end();
    drop(processes);
    followers.into_iter().for_each(|follower| follower.join().unwrap().unwrap());
}

fn threads(count: usize) -> Box<dyn Device> {
    vec!["sim"; count].join(",").parse::<DeviceSpec>().unwrap().open_ranks().unwrap()
}

fn options(groups: usize) -> ExecutorOptions {
    let (blocks, context) = (vec![4; groups], vec![4; groups]);
    let usual = ExecutorOptions::default();
    ExecutorOptions { cache_type: CacheType::F32, rows: (16, 16), blocks, context, ..usual }
}

/// A mixture of experts of four query heads and two key/value heads.
const MODEL: &str = "mixtral";

fn load(device: &dyn Device) -> Box<dyn Executor> {
    let (program, tensors) = recorded(MODEL);
    let options = options(program.groups().len());
    device.load(program, &tensors, options, &mut |_, _| {}).unwrap()
}

/// The logits of the last row of a prompt in block `block`.
fn logits(executor: &mut dyn Executor, block: u32) -> Result<Vec<f32>> {
    logits_with(executor, block, 0)
}

/// The same with the adapter on a seat.
fn logits_with(executor: &mut dyn Executor, block: u32, adapter: u32) -> Result<Vec<f32>> {
    let tables = [Table { blocks: &[block], oldest: 0 }];
    let sequences = &[Sequence { adapter, ..Sequence::new(9, 0, &tables) }];
    let tokens = &[3, 4, 5, 6, 7, 8, 9, 10, 11];
    let step = Step { kind: StepKind::Prompt, tokens, sequences, outputs: &[8], input: &[] };
    let ticket = executor.submit(&step)?;
    executor.wait(ticket)?;
    Ok(executor.read(ticket, 0)?.to_vec())
}

/// Sequences of unlike lengths, in steps of any grouping, that choose their tokens: bit for bit.
#[test]
fn processes_compute_and_choose_what_threads_do() {
    let (processes, followers) = job(2);
    let (device, threads) = (processes.open().unwrap(), threads(2));
    let case = together::Case {
        model: "llama3",
        cache_type: CacheType::F16,
        count: 10,
        longest: 33,
        batched: true,
        sequences: together::SEQUENCES,
        close: 0.0,
        adapted: false,
    };
    together::compare(case, &*threads, &[&*device]);
    drop(device);
    end(processes, followers);
}

/// A step that is timed computes what any other does, on threads and in processes.
#[test]
fn all_ranks_are_timed_together() {
    let (processes, followers) = job(2);
    let (device, threads) = (processes.open().unwrap(), threads(2));
    for device in [&*device, &*threads] {
        let mut executor = load(device);
        let expected = logits(&mut *executor, 0).unwrap();
        let tables = [Table { blocks: &[1], oldest: 0 }];
        let (sequences, tokens) = (&[Sequence::new(9, 0, &tables)], &[3, 4, 5, 6, 7, 8, 9, 10, 11]);
        let step = Step { kind: StepKind::Prompt, tokens, sequences, outputs: &[8], input: &[] };
        let (ticket, profile) = executor.submit_timed(&step).unwrap().unwrap();
        assert_eq!(executor.read(ticket, 0).unwrap(), expected);
        let sums = profile.operations.iter().filter(|timing| timing.name == "all_reduce").count();
        let shard = recorded(MODEL).0.shard(0, 2, &|_| Ok(1)).unwrap();
        let of_shard = shard.nodes.iter().filter(|node| node.op.name() == "all_reduce").count();
        assert_eq!(sums, of_shard);
        let head = profile.operations.iter().find(|timing| timing.name == "head").unwrap();
        assert!(head.seconds > 0.0 && head.seconds < profile.seconds);
        // Each of two ranks reads half of the head.
        let (_, alone) = load(&*sim().open(None).unwrap()).submit_timed(&step).unwrap().unwrap();
        let alone = alone.operations.iter().find(|timing| timing.name == "head").unwrap();
        assert_eq!(head.work, alone.work);
    }
    drop(device);
    end(processes, followers);
}

/// A dense model, one with grouped heads and biases, and mixtures of experts, one with biases.
#[test]
fn layers_shared_by_processes_are_transformers() {
    let (processes, followers) = job(2);
    let device = processes.open().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/models");
    for name in ["llama3", "mistral", "mixtral", "gpt-oss"] {
        let worst = worst(&*device, &root.join(name), 7).unwrap();
        println!("{name}: {worst:e}");
        assert!(worst <= 1e-4, "{name}: {worst:e}");
    }
    drop(device);
    end(processes, followers);
}

#[test]
fn four_processes_plan_and_hold_what_four_threads_do() {
    let (processes, followers) = job(4);
    let (device, threads) = (processes.open().unwrap(), threads(4));
    assert_eq!(processes.places(), [sim(); 4]);
    assert_eq!(device.about(), threads.about());
    let (program, tensors) = recorded(MODEL);
    let options = options(program.groups().len());
    let plan = |device: &dyn Device| device.plan(&program, &tensors, &options).unwrap();
    let own = plan(&*device);
    assert_eq!((own.len(), &own), (4, &plan(&*threads)));
    let mut both = [load(&*device), load(&*threads)];
    let [one, other] = &mut both;
    assert_eq!(logits(&mut **one, 1).unwrap(), logits(&mut **other, 1).unwrap());
    // The cache grows by it.
    [&mut *one, &mut *other].into_iter().for_each(|e| e.copy_blocks(0, &[(1, 2)]).unwrap());
    assert!(one.copy_blocks(0, &[(1, 99)]).unwrap_err().to_string().contains("block"));
    assert_eq!(one.memory().weights, other.memory().weights);
    assert_eq!(one.memory().cache, other.memory().cache);
    // A second executor has the weights of the first.
    let mut second = load(&*device);
    assert!(device.shared() > 0 && plan(&*device).iter().all(|plan| plan.weights == 0));
    assert_eq!(logits(&mut *second, 0).unwrap(), logits(&mut *both[0], 0).unwrap());
    drop((both, second));
    assert_eq!(plan(&*device), own, "all that was loaded is freed");
    drop(device);
    end(processes, followers);
}

/// A launch that fails on either side fails the step, and none after it.
#[test]
fn after_a_failure_of_one_process_all_go_on() {
    let wanted = logits(&mut *load(&*threads(2)), 0).unwrap();
    for of_leader in [true, false] {
        let fail = || {
            fail_after(Some(20));
        };
        let first: fn() = if of_leader { || {} } else { fail };
        let (processes, followers) = job_with(2, first);
        let device = processes.open().unwrap();
        let mut executor = load(&*device);
        if of_leader {
            fail_after(Some(20));
        }
        let why = (0..9).find_map(|_| logits(&mut *executor, 1).err()).unwrap().to_string();
        let place = if of_leader { "sim: " } else { "rank 1: sim: " };
        assert!(why.starts_with(place) && why.contains("one that was made to fail"), "{why}");
        for _ in 0..2 {
            assert_eq!(logits(&mut *executor, 0).unwrap(), wanted);
        }
        drop((executor, device));
        end(processes, followers);
    }
}

#[test]
fn whose_other_end_is_gone_says_so() {
    // A follower that ends at once: what is asked fails, and the job is over.
    let (listener, port) = listen();
    let follower = std::thread::spawn(move || {
        let launch = launch(1, 2, port);
        drop([Channel::Requests, Channel::Values].map(|of| connect(&launch, of, "sim").unwrap()));
    });
    let processes = Processes::lead_at(&listener, &launch(0, 2, port), sim()).unwrap();
    follower.join().unwrap();
    let expected = "rank 1: expected a process that goes on, found one that ended";
    assert_eq!(processes.absence().wait().unwrap().to_string(), expected);
    assert_eq!(processes.open().err().unwrap().to_string(), expected);
    // A leader that ends without a word.
    let (listener, port) = listen();
    let follower = std::thread::spawn(move || follow(&launch(1, 2, port), sim()));
    drop(gather(&listener, &launch(0, 2, port)).unwrap());
    let why = follower.join().unwrap().unwrap_err().to_string();
    assert_eq!(why, "rank 0: expected a process that goes on, found one that ended");
    // One that has said it is no failure.
    let (processes, followers) = job(2);
    let absence = processes.absence();
    end(processes, followers);
    assert_eq!(absence.wait(), None);
}

/// An adapter reaches every process, and one that is refused stops none.
#[test]
fn processes_take_adapters_as_threads_do() {
    let run = |device: &dyn Device| {
        let (program, tensors) = recorded("llama3");
        let program = program.with_sites(&|_| true);
        let sites = program.sites.clone();
        let seats = Seats { count: 1, rank: 2 };
        let options = ExecutorOptions { seats, ..options(program.groups().len()) };
        let mut executor = device.load(program, &tensors, options, &mut |_, _| {}).unwrap();
        let numbers =
            |count: usize| (0..count).map(|i| ((i * 37 + 5) % 16) as f32 / 64.0).collect();
        let delta = |site: &Site, rank: usize| Delta {
            rank,
            down: numbers(rank * site.input),
            up: numbers(rank * site.output),
            scale: 0.5,
            gain: None,
            element: DType::F32,
        };
        let adapter = |rank| {
            let deltas = sites.iter().map(|site| (site.name.clone(), delta(site, rank)));
            AdapterFactors { deltas: deltas.collect() }
        };
        let plain = logits(&mut *executor, 0).unwrap();
        executor.seat(1, Some(&adapter(2))).unwrap();
        let adapted = logits_with(&mut *executor, 1, 1).unwrap();
        assert!(adapted != plain && logits(&mut *executor, 2).unwrap() == plain);
        for (seat, rank, why) in [(1, 99, "a rank up to"), (2, 2, "one of 1 seats")] {
            let error = executor.seat(seat, Some(&adapter(rank))).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
        // What was there before a refusal is gone, and what comes behind it is there.
        assert!(logits_with(&mut *executor, 3, 1).is_err());
        executor.seat(1, Some(&adapter(2))).unwrap();
        assert!(logits_with(&mut *executor, 3, 1).unwrap() == adapted);
        adapted
    };
    let (processes, followers) = job(2);
    let device = processes.open().unwrap();
    assert!(run(&*device) == run(&*threads(2)));
    drop(device);
    end(processes, followers);
}

/// The errors of a leader and a follower, if the follower's launch is changed so.
fn refused(changes: &[fn(&mut RankLaunch)]) -> (String, Vec<String>) {
    let (listener, port) = listen();
    let start = |change: &fn(&mut RankLaunch)| {
        let mut launch = RankLaunch { patience: Duration::from_secs(3), ..launch(1, 3, port) };
        change(&mut launch);
        std::thread::spawn(move || follow(&launch, sim()).unwrap_err().to_string())
    };
    let followers: Vec<_> = changes.iter().map(start).collect();
    let patience = Duration::from_millis(1500);
    let leader = RankLaunch { patience, ..launch(0, 3, port) };
    let why = Processes::lead_at(&listener, &leader, sim()).err().unwrap().to_string();
    drop(listener);
    (why, followers.into_iter().map(|follower| follower.join().unwrap()).collect())
}

#[test]
fn processes_that_do_not_belong_together_are_refused() {
    type Change = fn(&mut RankLaunch);
    let other_build: Change = |launch| launch.build = "another".to_owned();
    let cases: [(Change, &str); 3] = [
        (other_build, "rank 1: expected delft this one, as rank 0 has, found another"),
        (|launch| launch.count = 2, "rank 1: expected 3 ranks, as rank 0 has, found 2"),
        (|launch| launch.rank = 3, "rank 3: expected a rank from 1 to 2, found another"),
    ];
    for (change, expected) in cases {
        let (leader, followers) = refused(&[change]);
        assert_eq!((leader.as_str(), &followers[..]), (expected, &[expected.to_owned()][..]));
    }
    // One of two that claim the same rank is told; the other hears that the leader has ended.
    let (leader, followers) = refused(&[|_| {}, |_| {}]);
    let expected = "rank 1: expected one process of each rank, found two";
    assert_eq!(leader, expected);
    assert_eq!(followers.iter().filter(|said| *said == expected).count(), 1, "{followers:?}");
    // Who does not have the token cannot end the job.
    let (leader, followers) = refused(&[|launch| launch.token = b"guessed".to_vec()]);
    assert!(leader.starts_with("ranks: expected 3 processes at 127.0.0.1"), "{leader}");
    assert!(
        leader.contains("found none of rank 1, 2") && leader.contains("same token"),
        "{leader}"
    );
    let hint = "give DELFT_RANKS_TOKEN the same value for every rank";
    assert!(followers[0].starts_with("rank 0: expected a process with the same token"));
    assert!(followers[0].contains(hint), "{followers:?}");
}

#[test]
fn a_leader_that_does_not_come_or_is_another_program_is_named() {
    let (listener, port) = listen();
    let hasty = RankLaunch { patience: Duration::from_millis(50), ..launch(1, 2, port) };
    // It says something else, with the length of a message or none.
    let ended = "rank 0: expected a process that goes on, found one that ended";
    for (said, expected) in [
        (&b"220 mail\r\n"[..], "expected rank 0 of this job, found another program"),
        (&[3, 0, 0, 0, 1, 2, 3], "expected rank 0 of this job, found another program"),
        (&[40, 0, 0, 0], ended),
        (&[], ended),
    ] {
        let other = listener.try_clone().unwrap();
        let speaker = std::thread::spawn(move || {
            let (mut stream, _) = other.accept().unwrap();
            stream.write_all(said).unwrap();
        });
        let why = follow(&hasty, sim()).unwrap_err().to_string();
        assert!(why.contains(expected), "{why}");
        speaker.join().unwrap();
    }
    drop(listener);
    let why = follow(&hasty, sim()).unwrap_err().to_string();
    assert!(why.starts_with(&format!("127.0.0.1:{port}: expected rank 0 within 0 s")), "{why}");
    let (_taken, port) = listen();
    let why = Processes::lead(&launch(0, 2, port), sim()).unwrap_err().to_string();
    assert!(
        why.starts_with(&format!("127.0.0.1:{port}: ")) && why.contains("MASTER_PORT"),
        "{why}"
    );
}

#[test]
fn messages_that_are_none_are_refused() {
    let (listener, port) = listen();
    let pair = || {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        (stream, Link::new("rank 7".to_owned(), listener.accept().unwrap().0).unwrap())
    };
    let numbers = postcard::to_allocvec(&vec![1_u32, 2, 300]).unwrap();
    let framed = |bytes: &[u8]| [&(bytes.len() as u32).to_le_bytes(), bytes].concat();
    let mut more = numbers.clone();
    more.push(0);
    for (bytes, expected) in [
        (vec![0xff; 4], "rank 7: expected a message of at most 268435456 bytes, found 4294967295"),
        (framed(&numbers[..2]), "rank 7: expected a message of this program, found "),
        (framed(&more), "rank 7: expected a message of this program, found 1 bytes behind one"),
        // A vector of four thousand million numbers, of which none is there.
        (framed(&[0xff, 0xff, 0xff, 0xff, 0x0f]), "rank 7: expected a message of this program"),
        (framed(&[0xff; 12]), "rank 7: expected a message of this program"),
        (framed(&numbers)[..6].to_vec(), "rank 7: expected a process that goes on, found one that"),
        (vec![1, 0], "rank 7: expected a process that goes on, found one that ended"),
        (vec![], "rank 7: expected a process that goes on, found one that ended"),
    ] {
        let (mut stream, link) = pair();
        stream.write_all(&bytes).unwrap();
        drop(stream);
        let why = link.receive::<Vec<u32>>().unwrap_err().to_string();
        assert!(why.starts_with(expected), "{expected}: {why}");
    }
    let (mut stream, link) = pair();
    stream.write_all(&framed(&numbers)).unwrap();
    assert_eq!(link.receive::<Vec<u32>>().unwrap(), [1, 2, 300]);
    link.send(&vec![1_u32, 2, 300]).unwrap();
    let mut sent = vec![0; 4 + numbers.len()];
    stream.read_exact(&mut sent).unwrap();
    assert_eq!(sent, framed(&numbers));
}

/// The leader has mapped a file that is another by the time that a follower opens it.
#[test]
fn processes_that_find_other_files_say_so() {
    let (_, tensors) = recorded(MODEL);
    let folder = tempfile::tempdir().unwrap();
    let (own, other) = (folder.path().join("model"), folder.path().join("other"));
    let copy = |to: &Path| {
        std::fs::create_dir(to).unwrap();
        for entry in std::fs::read_dir(tensors.path()).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    };
    copy(&own);
    copy(&other);
    let weights = "model.safetensors";
    let mut bytes = std::fs::read(other.join(weights)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(other.join(weights), bytes).unwrap();
    let (program, _) = recorded(MODEL);
    let options = options(program.groups().len());
    let (processes, followers) = job(2);
    let device = processes.open().unwrap();
    let tensors = Tensors::open(&own).unwrap();
    std::fs::rename(other.join(weights), own.join(weights)).unwrap();
    let why = device.plan(&program, &tensors, &options).err().unwrap().to_string();
    assert!(why.starts_with("rank 1: ") && why.contains("rank 0's model, fingerprint"), "{why}");
    std::fs::remove_dir_all(&own).unwrap();
    let why = device.load(program, &tensors, options, &mut |_, _| {}).err().unwrap().to_string();
    assert!(why.starts_with("rank 1: "), "{why}");
    drop(device);
    end(processes, followers);
}

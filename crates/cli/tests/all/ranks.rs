//! Ranks in several processes: the same command for each, as a launcher starts it.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};

use crate::common::{delft, fixture, status};

/// A port that nothing listens at.
fn port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// The command of one rank.
fn rank(rank: usize, count: usize, port: u16, words: &str) -> Command {
    let mut command = delft();
    let words = words.replace("MODEL", &fixture("llama3"));
    command.args(words.split(' ')).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", count.to_string());
    command.env("MASTER_PORT", port.to_string());
    command
}

fn start(count: usize, words: &str) -> Vec<Child> {
    let port = port();
    (0..count).map(|at| rank(at, count, port, words).spawn().unwrap()).collect()
}

fn end(children: Vec<Child>) -> Vec<Output> {
    children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

const LOGITS: &str = "logits -m MODEL --tokens 5,6,7,8 --all --generate 8 --json --cache-type f32";

/// Two processes, and two threads of one: the same bits of all logits, and the same tokens.
#[test]
fn processes_write_what_threads_write() {
    let alone = delft()
        .args(LOGITS.replace("MODEL", &fixture("llama3")).split(' '))
        .args(["--device", "sim,sim", "--split-mode", "tensor"])
        .output()
        .unwrap();
    assert_eq!(status(&alone), 0, "{alone:?}");
    assert!(!alone.stdout.is_empty());
    let ranks = end(start(2, &format!("{LOGITS} --device sim --split-mode tensor")));
    assert_eq!(text(&ranks[0].stdout), text(&alone.stdout));
    for rank in &ranks {
        assert_eq!(status(rank), 0, "{rank:?}");
    }
    assert!(ranks[1].stdout.is_empty() && ranks[1].stderr.is_empty(), "{:?}", ranks[1]);
}

/// A refusal by rank 0 ends only rank 0 with an error; the other ranks end without one.
#[test]
fn what_is_wrong_is_told_once() {
    let words = "logits -m MODEL --tokens 999 --device sim --split-mode tensor";
    let ranks = end(start(2, words));
    assert_eq!((status(&ranks[0]), status(&ranks[1])), (1, 0), "{ranks:?}");
    assert!(text(&ranks[0].stderr).contains("ids below 128"), "{ranks:?}");
    assert!(ranks[1].stderr.is_empty(), "{ranks:?}");
    // The CPU is no rank, and a launcher's variables alone change nothing.
    let words = "logits -m MODEL --tokens 5 --device cpu --split-mode tensor";
    for rank in end(start(2, words)) {
        assert_eq!(status(&rank), 1, "{rank:?}");
        assert!(text(&rank.stderr).contains("an NVIDIA GPU for each rank"), "{rank:?}");
    }
    for rank in end(start(2, "logits -m MODEL --tokens 5 --device cpu")) {
        assert!(status(&rank) == 0 && !rank.stdout.is_empty(), "{rank:?}");
    }
}

/// A rank that is killed ends a server with a line, and the other ranks.
#[test]
fn a_rank_that_is_gone_ends_the_job() {
    let words = "serve MODEL --port 0 --device sim --split-mode tensor";
    let mut ranks = start(2, words);
    let mut lines = BufReader::new(ranks[0].stderr.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("serving ") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "it serves");
    }
    ranks[1].kill().unwrap();
    let code = ranks[0].wait().unwrap().code();
    let mut said = String::new();
    lines.read_to_string(&mut said).unwrap();
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.contains("rank 1: expected a process that goes on, found one that ended"),
        "{said}"
    );
    ranks[1].wait().unwrap();
    // The other way round.
    let mut ranks = start(2, words);
    let mut lines = BufReader::new(ranks[0].stderr.take().unwrap());
    line.clear();
    while !line.starts_with("serving ") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "it serves");
    }
    ranks[0].kill().unwrap();
    ranks[0].wait().unwrap();
    let follower = ranks.pop().unwrap().wait_with_output().unwrap();
    assert_eq!(status(&follower), 1);
    let said = text(&follower.stderr);
    assert_eq!(said, "delft: rank 0: expected a process that goes on, found one that ended\n");
}

//! The process that runs compiled kernels, and the words that it is spoken to in.
//!
//! A request, in 32-bit little-endian words: entry, schedule, grid (3), threads, bytes of dynamic
//! shared memory; the number of function constants and of each its index and value; the number of
//! parameters and of each its kind (0 number, 1 read, 2 written), then a value, or the bytes of an
//! element, the bytes of the buffer, and those bytes. An answer: status (0 done, 1 wrong, 2 wrong
//! and the process ended), the length of a message, the message, and after 0 the bytes of every
//! written buffer. The other end is `serve` in runtime.cpp. Both are on one machine, so words are
//! in its own order.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// The outcome of a launch.
pub(super) enum Answer {
    /// The bytes of every written buffer.
    Done(Vec<Vec<u8>>),
    /// A finding.
    Wrong(String),
    /// A finding after which the process ended.
    Died(String),
}

/// A process that waits for launches.
pub(super) struct Worker {
    child: Child,
    requests: Option<ChildStdin>,
    answers: ChildStdout,
}

/// A launch, as bytes.
#[derive(Default)]
pub(super) struct Request(Vec<u8>);

impl Request {
    pub(super) fn word(&mut self, word: u32) {
        self.0.extend(word.to_ne_bytes());
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }
}

impl Worker {
    /// Starts it.
    pub(super) fn start(program: &Path) -> Result<Self, String> {
        let mut child = Command::new(program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| format!("{}: {e}", program.display()))?;
        match (child.stdin.take(), child.stdout.take()) {
            (requests @ Some(_), Some(answers)) => Ok(Worker { child, requests, answers }),
            _ => Err(format!("{}: no pipes", program.display())),
        }
    }

    /// Sends a request and waits for its answer. `written` are the lengths of the written buffers
    /// in bytes.
    pub(super) fn launch(
        &mut self,
        request: &Request,
        written: &[usize],
    ) -> Result<Answer, String> {
        let ended =
            |e: std::io::Error| format!("the kernel's process ended without an answer ({e})");
        if let Some(requests) = &mut self.requests {
            requests.write_all(&request.0).and_then(|()| requests.flush()).map_err(ended)?;
        }
        let status = self.word().map_err(ended)?;
        // Messages are cut at 1 KiB by the sender.
        let length = self.word().map_err(ended)?.min(1 << 10) as usize;
        let mut message = vec![0; length];
        self.answers.read_exact(&mut message).map_err(ended)?;
        let message = String::from_utf8_lossy(&message).into_owned();
        match status {
            0 => {}
            1 => return Ok(Answer::Wrong(message)),
            _ => return Ok(Answer::Died(message)),
        }
        let mut buffers = Vec::with_capacity(written.len());
        for length in written {
            let mut bytes = vec![0; *length];
            self.answers.read_exact(&mut bytes).map_err(ended)?;
            buffers.push(bytes);
        }
        Ok(Answer::Done(buffers))
    }

    fn word(&mut self) -> std::io::Result<u32> {
        let mut bytes = [0; 4];
        self.answers.read_exact(&mut bytes)?;
        Ok(u32::from_ne_bytes(bytes))
    }
}

impl Drop for Worker {
    /// The end of its input ends the process.
    fn drop(&mut self) {
        self.requests = None;
        let _ = self.child.wait();
    }
}

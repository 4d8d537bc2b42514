//! A little HTTP server that imitates the hub and its storage, on 127.0.0.1.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sha2::Digest;

/// A request as the server saw it.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) headers: HashMap<String, String>,
}

/// What the server answers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Close the connection after so many bytes of the body.
    pub(crate) cut: Option<usize>,
    /// Pause before the body.
    pub(crate) pause: Duration,
    /// Pause after each byte of the body.
    pub(crate) trickle: Duration,
    /// What the header says of the body's length.
    pub(crate) length: Length,
}

/// A `Content-Length` header.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) enum Length {
    #[default]
    True,
    /// Another number than the body has bytes.
    Said(u64),
    /// No such header: the body ends with the connection.
    Unsaid,
}

impl Reply {
    pub(crate) fn status(status: u16) -> Reply {
        Reply { status, ..Reply::default() }
    }

    pub(crate) fn header(mut self, name: &str, value: impl Into<String>) -> Reply {
        self.headers.push((name.to_string(), value.into()));
        self
    }
}

/// A running server; its address is `url`. Threads end with the process.
pub(crate) struct Server {
    pub(crate) url: String,
    pub(crate) log: Arc<Mutex<Vec<Request>>>,
}

impl Server {
    pub(crate) fn start(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let log = Arc::new(Mutex::new(Vec::new()));
        let (handler, seen) = (Arc::new(handler), log.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (handler, seen) = (handler.clone(), seen.clone());
                std::thread::spawn(move || serve(stream, &*handler, &seen));
            }
        });
        Server { url, log }
    }

    /// The requests whose path holds `part`.
    pub(crate) fn asked(&self, part: &str) -> Vec<Request> {
        self.log
            .lock()
            .unwrap()
            .iter()
            .filter(|request| request.path.contains(part))
            .cloned()
            .collect()
    }
}

fn serve(stream: TcpStream, handler: &dyn Fn(&Request) -> Reply, log: &Mutex<Vec<Request>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut writer = stream;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let mut words = line.split_whitespace().map(str::to_string);
        let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let mut headers = HashMap::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap_or(0) == 0 {
                return;
            }
            match line.trim_end().split_once(": ") {
                Some((name, value)) => headers.insert(name.to_ascii_lowercase(), value.to_string()),
                None => break,
            };
        }
        let request = Request { method, path, headers };
        log.lock().unwrap().push(request.clone());
        let reply = handler(&request);
        let mut head = format!("HTTP/1.1 {} X\r\n", reply.status);
        match reply.length {
            Length::True => head += &format!("content-length: {}\r\n", reply.body.len()),
            Length::Said(length) => head += &format!("content-length: {length}\r\n"),
            Length::Unsaid => head += "connection: close\r\n",
        }
        for (name, value) in &reply.headers {
            head += &format!("{name}: {value}\r\n");
        }
        let end = reply.cut.unwrap_or(reply.body.len()).min(reply.body.len());
        if writer.write_all(format!("{head}\r\n").as_bytes()).is_err() {
            return;
        }
        if request.method == "HEAD" {
            continue;
        }
        std::thread::sleep(reply.pause);
        let pieces = if reply.trickle.is_zero() { reply.body.len().max(1) } else { 1 };
        for piece in reply.body[..end].chunks(pieces) {
            if writer.write_all(piece).is_err() {
                return;
            }
            std::thread::sleep(reply.trickle);
        }
        if reply.cut.is_some() || !matches!(reply.length, Length::True) {
            return;
        }
    }
}

pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

pub(crate) fn sha256(bytes: &[u8]) -> String {
    sha2::Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn git_sha1(bytes: &[u8]) -> String {
    let mut hash = sha1::Sha1::new();
    hash.update(format!("blob {}\0", bytes.len()));
    hash.update(bytes);
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file of the imitated repository. Weights are large files, as on the hub.
pub(crate) fn is_large(name: &str) -> bool {
    name.ends_with(".gguf") || name.ends_with(".safetensors")
}

/// The model info that the hub would give for these files.
pub(crate) fn info(files: &[(&str, Vec<u8>)]) -> Reply {
    let siblings: Vec<_> = files
        .iter()
        .map(|(name, bytes)| {
            let mut entry = serde_json::json!({ "rfilename": name, "size": bytes.len(), "blobId": git_sha1(bytes) });
            if is_large(name) {
                entry["blobId"] = "f".repeat(40).into();
                entry["lfs"] = serde_json::json!({ "sha256": sha256(bytes), "size": bytes.len(), "pointerSize": 134 });
            }
            entry
        })
        .collect();
    let body =
        serde_json::json!({ "id": "org/name", "sha": COMMIT, "siblings": siblings }).to_string();
    Reply { status: 200, body: body.into_bytes(), ..Reply::default() }
}

/// The model info of a mirror that lists neither sizes nor digests.
pub(crate) fn bare_info(file: &str) -> Reply {
    let json = serde_json::json!({ "sha": COMMIT, "siblings": [{ "rfilename": file }] });
    Reply { status: 200, body: json.to_string().into_bytes(), ..Reply::default() }
}

/// A file with `Range` honoured.
pub(crate) fn file(request: &Request, bytes: &[u8]) -> Reply {
    let last = bytes.len().saturating_sub(1);
    let range = request.headers.get("range").and_then(|range| {
        let (from, to) = range.strip_prefix("bytes=")?.split_once('-')?;
        Some((from.parse::<usize>().ok()?, to.parse().map_or(last, |to: usize| to.min(last))))
    });
    match range {
        Some((from, _)) if from >= bytes.len() => Reply::status(416),
        Some((from, to)) => {
            Reply { status: 206, body: bytes[from..=to].to_vec(), ..Reply::default() }
                .header("content-range", format!("bytes {from}-{to}/{}", bytes.len()))
        }
        None => Reply { status: 200, body: bytes.to_vec(), ..Reply::default() },
    }
}

/// The hub's usual answers for a repository `org/name`.
pub(crate) fn repository(request: &Request, files: &[(&str, Vec<u8>)]) -> Reply {
    if request.path.starts_with("/api/models/org/name/revision/") {
        return info(files);
    }
    let prefix = format!("/org/name/resolve/{COMMIT}/");
    match request.path.strip_prefix(&prefix).and_then(|name| files.iter().find(|(n, _)| *n == name))
    {
        Some((name, bytes)) => {
            let tag = if is_large(name) { sha256(bytes) } else { git_sha1(bytes) };
            file(request, bytes)
                .header("etag", format!("\"{tag}\""))
                .header("x-repo-commit", COMMIT)
        }
        None => Reply::status(404).header("x-error-code", "RepoNotFound"),
    }
}

/// Bytes that do not compress or repeat.
pub(crate) fn noise(length: usize) -> Vec<u8> {
    let mut state = 1u32;
    (0..length)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect()
}

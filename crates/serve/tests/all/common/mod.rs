//! A server of the bundled model on a port of the system's choosing, and a small HTTP client.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use delft::{Engine, LoadOptions};
use delft_serve::{AccessRules, GenerationLimits, Library, Running, Served, Server, ServerConfig};
use serde_json::Value;

/// The bundled model's file.
pub(crate) fn bundled() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/delft-stories.gguf")
}

/// The bundled model, loaded once.
pub(crate) fn engine() -> Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    let load = || {
        let options = LoadOptions { threads: Some(2), sessions: 64, ..LoadOptions::default() };
        Engine::load(bundled(), &options).unwrap()
    };
    ENGINE.get_or_init(load).clone()
}

/// Limits that tests do not meet unless they ask for others.
pub(crate) fn limits() -> GenerationLimits {
    GenerationLimits { parallel: 2, queue: 64, time: Duration::from_secs(120), tokens: None }
}

pub(crate) fn serve(limits: GenerationLimits, access: AccessRules) -> Running {
    let (name, adapters) = ("stories".to_string(), Vec::new());
    let served = Served { name, engines: vec![engine()], templates: None, adapters };
    serve_all(limits, access, vec![served])
}

pub(crate) fn serve_all(
    limits: GenerationLimits,
    access: AccessRules,
    models: Vec<Served>,
) -> Running {
    Server::bind(config(limits, access), models).unwrap().spawn().unwrap()
}

/// A server of models that are loaded when a request names them.
pub(crate) fn serve_library(
    limits: GenerationLimits,
    access: AccessRules,
    library: Library,
) -> Running {
    let config = ServerConfig { library, ..config(limits, access) };
    Server::bind(config, Vec::new()).unwrap().spawn().unwrap()
}

/// A port of the system's choosing, and nothing to load.
pub(crate) fn config(limits: GenerationLimits, access: AccessRules) -> ServerConfig {
    ServerConfig {
        address: ([127, 0, 0, 1], 0).into(),
        access,
        insecure: false,
        limits,
        drain: Duration::from_secs(60),
        library: Library::default(),
        record: None,
        sessions: None,
    }
}

/// A server that all tests of a file share.
pub(crate) fn shared() -> SocketAddr {
    static SERVER: OnceLock<SocketAddr> = OnceLock::new();
    *SERVER.get_or_init(|| {
        let running = serve(limits(), AccessRules::default());
        let address = running.address();
        // It runs until the tests end.
        std::mem::forget(running);
        address
    })
}

/// A response, its body whole.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: String,
}

impl Response {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    /// The objects of a stream of server-sent events, without the `[DONE]` that must end OpenAI's.
    pub(crate) fn events(&self) -> Vec<Value> {
        let data = self.body.lines().filter_map(|line| line.strip_prefix("data: "));
        let events = data.filter(|data| *data != "[DONE]").map(serde_json::from_str);
        events.map(|event| event.unwrap_or_else(|e| panic!("{e}: {self:?}"))).collect()
    }
}

/// Sends a request; the connection is to be closed after it.
pub(crate) fn send(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let mut head = format!("{method} {path} HTTP/1.1\r\nConnection: close\r\n");
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        head += &format!("Host: {address}\r\n");
    }
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    // A server that refuses early closes early.
    let _ = stream.write_all(request.as_bytes());
    stream
}

/// Reads a response to its end.
pub(crate) fn receive(stream: TcpStream) -> Response {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.unwrap_or_else(|| panic!("no status line: {line:?}"));
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.push((name.to_ascii_lowercase(), value.to_string()));
    }
    let chunked =
        headers.iter().any(|(name, value)| name == "transfer-encoding" && value == "chunked");
    let mut body = Vec::new();
    if chunked {
        loop {
            let mut size = String::new();
            reader.read_line(&mut size).unwrap();
            let size = usize::from_str_radix(size.trim(), 16).unwrap();
            let mut chunk = vec![0; size + 2];
            reader.read_exact(&mut chunk).unwrap();
            body.extend(&chunk[..size]);
            if size == 0 {
                break;
            }
        }
    } else {
        // A connection that is reset after the response has said all that it says.
        let _ = reader.read_to_end(&mut body);
    }
    Response { status, headers, body: String::from_utf8(body).unwrap() }
}

pub(crate) fn post(address: SocketAddr, path: &str, body: &Value) -> Response {
    receive(send(address, "POST", path, &[], &body.to_string()))
}

pub(crate) fn get(address: SocketAddr, path: &str) -> Response {
    receive(send(address, "GET", path, &[], ""))
}

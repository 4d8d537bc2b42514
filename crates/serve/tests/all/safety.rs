//! A server on a bad day: strangers, slow and broken clients, more requests than it can answer, its
//! own end.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::common::{Response, config, get, limits, post, receive, send, serve, shared};
use delft_serve::{AccessRules, GenerationLimits, Server, ServerConfig};
use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use serde_json::{Value, json};

fn story(max_tokens: usize) -> Value {
    json!({
        "messages": [{ "role": "user", "content": "Tell me a story about a well" }],
        "max_tokens": max_tokens,
        "ignore_eos": true,
        "stream": true,
    })
}

fn begin(address: SocketAddr, body: &Value) -> TcpStream {
    send(address, "POST", "/v1/chat/completions", &[], &body.to_string())
}

/// Reads until the first event is there.
fn first_event(stream: &mut TcpStream) {
    let (mut seen, mut part) = (Vec::new(), [0; 256]);
    while !String::from_utf8_lossy(&seen).contains("data: ") {
        let n = stream.read(&mut part).unwrap();
        assert!(n > 0, "closed: {}", String::from_utf8_lossy(&seen));
        seen.extend(&part[..n]);
    }
}

/// Sends a compressed body.
fn packed(encoding: &str, body: &[u8]) -> Response {
    let mut stream = TcpStream::connect(shared()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Content-Encoding: {encoding}\r\nContent-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(&[head.as_bytes(), body].concat()).unwrap();
    receive(stream)
}

/// Compressed bodies are read as what they unpack to, which may be no larger than others.
#[test]
fn compressed_bodies_are_unpacked() {
    let gzip = |body: &[u8]| {
        let mut writer = GzEncoder::new(Vec::new(), Compression::default());
        writer.write_all(body).unwrap();
        writer.finish().unwrap()
    };
    let body = story(2).to_string();
    let whole = gzip(body.as_bytes());
    for encoding in ["gzip", "GZIP", "x-gzip"] {
        assert_eq!(packed(encoding, &whole).status, 200, "{encoding}");
    }
    let mut writer = ZlibEncoder::new(Vec::new(), Compression::default());
    writer.write_all(body.as_bytes()).unwrap();
    assert_eq!(packed("deflate", &writer.finish().unwrap()).status, 200);
    // Cut, not packed at all, damaged; and a small one that unpacks to 64 MiB.
    let mut damaged = whole.clone();
    let middle = damaged.len() / 2;
    damaged[middle] ^= 0xff;
    for wrong in [&whole[..whole.len() / 2], body.as_bytes(), &damaged, b""] {
        let answer = packed("gzip", wrong);
        assert_eq!(answer.status, 400, "{answer:?}");
    }
    let mut writer = GzEncoder::new(Vec::new(), Compression::best());
    for _ in 0..64 {
        writer.write_all(&[b' '; 1 << 20]).unwrap();
    }
    let answer = packed("gzip", &writer.finish().unwrap());
    assert_eq!(answer.status, 413, "{answer:?}");
    assert_eq!(post(shared(), "/v1/chat/completions", &story(2)).status, 200);
}

/// What the heads of requests say of their bodies.
#[test]
fn bodies_come_as_their_heads_say() {
    let body = story(2).to_string();
    let path = "/v1/chat/completions";
    let packed = receive(send(shared(), "POST", path, &[("Content-Encoding", "zstd")], &body));
    let message = packed.json()["error"]["message"].as_str().unwrap().to_string();
    assert!(packed.status == 415 && message.contains("Content-Encoding"), "{packed:?}");
    let plain = [("Content-Encoding", "identity")];
    assert_eq!(receive(send(shared(), "POST", path, &plain, &body)).status, 200);
    // As a shell of Windows pipes it.
    let marked = format!("\u{feff}{body}");
    assert_eq!(receive(send(shared(), "POST", path, &[], &marked)).status, 200);

    let expecting = |length: usize| {
        let mut stream = TcpStream::connect(shared()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
             Expect: 100-continue\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream
    };
    // One that is far too long is refused before it is sent.
    assert_eq!(receive(expecting(1 << 40)).status, 413);
    let mut stream = expecting(body.len());
    let mut told = [0; 25];
    stream.read_exact(&mut told).unwrap();
    assert_eq!(&told, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(body.as_bytes()).unwrap();
    assert_eq!(receive(stream).status, 200);
}

#[test]
fn strangers_are_turned_away() {
    let access = AccessRules { keys: vec!["secret".into()], ..AccessRules::default() };
    let guarded = serve(limits(), access);
    let ask = |headers: &[(&str, &str)], path: &str| {
        let response = receive(send(guarded.address(), "GET", path, headers, ""));
        (response.status, response.body)
    };
    let (status, body) = ask(&[], "/v1/models");
    assert_eq!(status, 401);
    assert!(!body.contains("secret"));
    assert_eq!(ask(&[("Authorization", "Bearer secret")], "/v1/models").0, 200);
    assert_eq!(ask(&[("x-api-key", "Secret")], "/v1/models").0, 401);
    assert_eq!(ask(&[], "/health").0, 200);
    guarded.stop().unwrap();

    let rebound = receive(send(shared(), "GET", "/v1/models", &[("Host", "evil.example")], ""));
    assert_eq!(rebound.status, 403);
    let page =
        receive(send(shared(), "GET", "/v1/models", &[("Origin", "https://evil.example")], ""));
    assert_eq!(page.status, 403);
    assert_eq!(page.header("access-control-allow-origin"), None);

    // An address that others reach is not taken without a key.
    let config = ServerConfig {
        address: ([0, 0, 0, 0], 0).into(),
        ..config(limits(), AccessRules::default())
    };
    assert!(Server::bind(config, Vec::new()).is_err());
}

#[test]
fn pages_that_are_allowed_may_ask() {
    let access =
        AccessRules { origins: vec!["https://a.example".into()], ..AccessRules::default() };
    let open = serve(limits(), access);
    let preflight = [
        ("Origin", "https://a.example"),
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", "authorization"),
    ];
    let response = receive(send(open.address(), "OPTIONS", "/v1/chat/completions", &preflight, ""));
    assert_eq!(response.header("access-control-allow-origin"), Some("https://a.example"));
    assert_eq!(response.header("access-control-allow-headers"), Some("authorization"));
    let asked = receive(send(open.address(), "GET", "/v1/models", &preflight[..1], ""));
    assert_eq!(
        (asked.status, asked.header("access-control-allow-origin")),
        (200, Some("https://a.example"))
    );
    open.stop().unwrap();
}

#[test]
fn malformed_requests_are_refused_and_harm_no_other() {
    let address = shared();
    let deep = "[".repeat(200_000);
    let bodies =
        ["", "{", "[]", "null", "\"x\"", "{\"messages\": 1}", deep.as_str(), "\u{0}\u{ffff}"];
    for path in ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize"] {
        for body in bodies {
            let response = receive(send(address, "POST", path, &[], body));
            assert_eq!(response.status, 400, "{path} {:?}", &body[..body.len().min(20)]);
            assert!(response.json()["error"]["message"].is_string());
        }
    }
    let large = "x".repeat((16 << 20) + 1);
    assert_eq!(receive(send(address, "POST", "/tokenize", &[], &large)).status, 413);
    assert_eq!(get(address, "/nowhere").status, 404);
    assert_eq!(get(address, "/v1/chat/completions").status, 405);
    for raw in [
        "GARBAGE\r\n\r\n",
        "GET / HTTP/9.9\r\n\r\n",
        "\u{0}\u{1}\u{2}",
        "GET /v1/models HTTP/1.1\r\n\r\n",
    ] {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(raw.as_bytes()).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.is_empty() || answer.contains(" 400 "), "{raw:?}: {answer}");
    }
    assert_eq!(get(address, "/health").status, 200);
}

#[test]
fn a_prompt_that_is_far_too_long_is_refused_before_it_is_made_into_tokens() {
    let text = "x".repeat(1 << 20);
    let messages = json!([{ "role": "user", "content": text }]);
    for (path, body) in [
        ("/v1/chat/completions", json!({ "messages": messages, "max_tokens": 1 })),
        ("/v1/completions", json!({ "prompt": text, "max_tokens": 1 })),
    ] {
        let answer = post(shared(), path, &body);
        let error = &answer.json()["error"];
        assert_eq!((answer.status, &error["code"]), (400, &json!("context_length_exceeded")));
        let message = error["message"].as_str().unwrap();
        assert!(
            message.contains(" bytes; this model's maximum context length is 1024 tokens"),
            "{message}"
        );
    }
}

/// Tokens that a server has written.
fn generated(address: SocketAddr) -> u64 {
    let metrics = get(address, "/metrics").body;
    let name = "delft_generated_tokens_total{model=\"stories\"} ";
    metrics.lines().find_map(|line| line.strip_prefix(name)).unwrap().parse().unwrap()
}

#[test]
fn a_client_that_goes_away_frees_its_session() {
    let one = serve(GenerationLimits { parallel: 1, ..limits() }, AccessRules::default());
    let mut before = 0;
    for streamed in [true, false] {
        let mut body = story(900);
        body["stream"] = streamed.into();
        let mut stream = begin(one.address(), &body);
        if streamed {
            first_event(&mut stream);
        } else {
            std::thread::sleep(Duration::from_millis(50));
        }
        drop(stream);
        let mut next = story(2);
        next["stream"] = false.into();
        let answered = post(one.address(), "/v1/chat/completions", &next);
        assert_eq!(answered.status, 200, "{answered:?}");
        // Most of its 900 tokens were never written.
        let total = generated(one.address());
        assert!(total - before < 900, "{total} - {before}");
        before = total;
    }
    one.stop().unwrap();
}

#[test]
fn a_full_queue_refuses_and_says_when_to_come_again() {
    let one = serve(GenerationLimits { parallel: 1, queue: 1, ..limits() }, AccessRules::default());
    let mut running = begin(one.address(), &story(900));
    first_event(&mut running);
    let waiting = begin(one.address(), &story(2));
    let waits = || get(one.address(), "/metrics").body.contains("waiting{model=\"stories\"} 1");
    let start = Instant::now();
    while !waits() {
        assert!(start.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(20));
    }
    let refused = post(one.address(), "/v1/chat/completions", &story(2));
    assert_eq!(refused.status, 503);
    assert_eq!(refused.header("retry-after"), Some("5"));
    assert_eq!(refused.json()["error"]["code"], "overloaded");
    drop(running);
    assert!(receive(waiting).body.ends_with("data: [DONE]\n\n"));
    one.stop().unwrap();
}

#[test]
fn a_request_that_takes_too_long_ends_with_an_error() {
    let brief = serve(
        GenerationLimits { time: Duration::from_millis(300), ..limits() },
        AccessRules::default(),
    );
    let mut body = story(1000);
    let streamed = receive(begin(brief.address(), &body));
    assert!(streamed.events().iter().any(|event| event["error"]["code"] == "timeout"));
    body["stream"] = false.into();
    assert_eq!(post(brief.address(), "/v1/chat/completions", &body).status, 504);
    brief.stop().unwrap();
}

#[test]
fn texts_are_no_longer_than_the_server_allows() {
    let short = serve(GenerationLimits { tokens: Some(7), ..limits() }, AccessRules::default());
    for asked in [json!(100), json!(null), json!(3)] {
        let body = json!({ "messages": [{ "role": "user", "content": "Tell me a story" }],
            "max_tokens": asked, "ignore_eos": true });
        let answer = post(short.address(), "/v1/chat/completions", &body).json();
        let most = asked.as_u64().unwrap_or(7).min(7);
        assert_eq!(answer["usage"]["completion_tokens"], most, "{answer}");
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
    }
    short.stop().unwrap();
}

#[test]
fn what_runs_is_finished_before_the_end() {
    let ending = serve(limits(), AccessRules::default());
    let address = ending.address();
    let mut stream = begin(address, &story(60));
    first_event(&mut stream);
    let stopping = std::thread::spawn(move || ending.stop());
    let rest = {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    assert!(rest.contains("[DONE]"), "{rest}");
    stopping.join().unwrap().unwrap();
    assert!(TcpStream::connect(address).is_err());
}

/// Two hundred connections at once: some ask, some send half a request and wait, some leave in the
/// middle of an answer.
#[test]
fn a_torture_leaves_it_serving() {
    let busy =
        serve(GenerationLimits { parallel: 4, queue: 1000, ..limits() }, AccessRules::default());
    let address = busy.address();
    let clients: Vec<_> = (0..200)
        .map(|i| {
            std::thread::spawn(move || match i % 5 {
                0 => {
                    // The head comes a byte at a time, and never to its end.
                    let mut stream = TcpStream::connect(address).unwrap();
                    for byte in b"POST /v1/chat/comple" {
                        let _ = stream.write_all(&[*byte]);
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    0
                }
                1 => {
                    let mut stream = TcpStream::connect(address).unwrap();
                    let head = "POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999\r\n\r\n{";
                    let _ = stream.write_all(head.as_bytes());
                    std::thread::sleep(Duration::from_millis(200));
                    0
                }
                2 => {
                    let mut stream = begin(address, &story(200));
                    drop(stream.read(&mut [0; 64]));
                    0
                }
                3 => get(address, "/v1/models").status,
                _ => {
                    let mut body = story(3);
                    body["stream"] = false.into();
                    post(address, "/v1/chat/completions", &body).status
                }
            })
        })
        .collect();
    let statuses: Vec<u16> = clients.into_iter().map(|client| client.join().unwrap()).collect();
    assert!(statuses.iter().all(|status| [0, 200].contains(status)), "{statuses:?}");
    let mut body = story(5);
    body["stream"] = false.into();
    let after = post(address, "/v1/chat/completions", &body).json();
    assert_eq!(after["usage"]["completion_tokens"], 5);
    busy.stop().unwrap();
}

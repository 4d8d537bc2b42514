//! Pulls against a server that imitates the hub: what arrives, what is asked for, and what happens
//! when things break.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::common::{
    COMMIT, Length, Reply, Request, Server, bare_info, file, info, noise, repository, sha256,
};
use delft_hub::{Container, Hub, Likeness, ModelSource, Preview, PullProgress};

fn hub(server: &Server, cache: &Path) -> Hub {
    Hub {
        endpoint: server.url.clone(),
        token: None,
        cache: cache.to_path_buf(),
        offline: false,
        retry_wait: Duration::from_millis(1),
        timeout: Duration::from_secs(5),
        models: None,
        room: None,
    }
}

fn gguf(length: usize) -> Vec<(&'static str, Vec<u8>)> {
    vec![("README.md", b"# A model\n".to_vec()), ("m-Q8_0.gguf", noise(length))]
}

fn partial(cache: &Path, bytes: &[u8]) -> PathBuf {
    cache.join("models--org--name/blobs").join(format!("{}.incomplete", sha256(bytes)))
}

/// Remembers what it was told.
#[derive(Default)]
struct Told(Mutex<Vec<String>>);

impl PullProgress for Told {
    fn begin(&self, files: usize, bytes: Option<u64>, have: u64) {
        self.0.lock().unwrap().push(format!("begin {files} {bytes:?} {have}"));
    }
    fn start(&self, file: &str, size: Option<u64>, have: u64) {
        self.0.lock().unwrap().push(format!("start {file} {size:?} {have}"));
    }
    fn done(&self, file: &str) {
        self.0.lock().unwrap().push(format!("done {file}"));
    }
    fn note(&self, text: &str) {
        self.0.lock().unwrap().push(format!("note {text}"));
    }
}

#[test]
fn a_folder_of_safetensors_arrives_in_the_shared_layout_and_resolves() {
    let cache = tempfile::tempdir().unwrap();
    let index = serde_json::json!({ "weight_map": { "a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors" } });
    let files = vec![
        ("config.json", b"{}".to_vec()),
        ("tokenizer.json", b"{\"x\":1}".to_vec()),
        ("additional_chat_templates/tool.jinja", b"{{ x }}".to_vec()),
        ("model.safetensors.index.json", index.to_string().into_bytes()),
        ("model-00001-of-00002.safetensors", noise(300_000)),
        ("model-00002-of-00002.safetensors", noise(70_000)),
        ("pytorch_model.bin", noise(10)),
    ];
    let served = files.clone();
    let server = Server::start(move |request| repository(request, &served));
    let hub = hub(&server, cache.path());
    let missing = hub.resolve(Some("org/name")).unwrap_err();
    assert_eq!(missing.hint.map(|hint| hint.to_string()).as_deref(), Some("delft pull org/name"));

    let model = hub.pull("org/name", &()).unwrap();
    let root = cache.path().join("models--org--name");
    assert_eq!(model.path().unwrap(), root.join("snapshots").join(COMMIT));
    assert_eq!((model.kind, model.name()), (Container::Folder, "org/name".to_string()));
    assert_eq!(
        model.source,
        ModelSource::Hub { id: "org/name".to_string(), commit: COMMIT.to_string() }
    );
    for (name, bytes) in &files {
        let path = model.path().unwrap().join(name);
        if *name == "pytorch_model.bin" {
            assert!(!path.exists(), "a pickle was fetched");
            continue;
        }
        assert_eq!(&std::fs::read(&path).unwrap(), bytes, "{name}");
        #[cfg(unix)]
        {
            let target = std::fs::read_link(&path).unwrap();
            let up = if name.contains('/') { "../../../blobs" } else { "../../blobs" };
            assert!(target.starts_with(up), "{target:?}");
        }
    }
    assert_eq!(std::fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    assert_eq!(hub.resolve(Some("org/name")).unwrap(), model);
    assert_eq!(hub.resolve(Some(&format!("org/name@{COMMIT}"))).unwrap(), model);

    let before = server.log.lock().unwrap().len();
    assert_eq!(hub.pull("org/name", &()).unwrap(), model);
    assert_eq!(server.log.lock().unwrap().len(), before + 1, "a complete model costs one request");

    let listed = hub.list().unwrap();
    assert_eq!(
        (listed.len(), listed[0].id.as_str(), listed[0].kind),
        (1, "org/name", Some(Container::Folder))
    );
    assert_eq!((listed[0].files.len(), listed[0].refs.as_slice()), (6, &["main".to_string()][..]));
    let sizes: u64 = files
        .iter()
        .filter(|(name, _)| *name != "pytorch_model.bin")
        .map(|(_, b)| b.len() as u64)
        .sum();
    assert_eq!(listed[0].bytes, sizes);

    std::fs::remove_file(model.path().unwrap().join("model-00002-of-00002.safetensors")).unwrap();
    let unfinished = hub.resolve(Some("org/name")).unwrap_err();
    assert!(
        unfinished.to_string().contains("model-00002-of-00002.safetensors in the cache"),
        "{unfinished}"
    );
}

#[test]
fn a_broken_connection_is_resumed_where_it_broke() {
    let cache = tempfile::tempdir().unwrap();
    let files = gguf(500_000);
    let bytes = files[1].1.clone();
    let server = Server::start(move |request| {
        let mut reply = repository(request, &files);
        if request.path.contains("resolve") {
            reply.cut = Some(200_000);
        }
        reply
    });
    let model = hub(&server, cache.path()).pull("org/name:Q8_0", &()).unwrap();
    assert_eq!(std::fs::read(model.path().unwrap()).unwrap(), bytes);
    let ranges: Vec<_> =
        server.asked("resolve").iter().map(|r| r.headers.get("range").cloned()).collect();
    assert_eq!(
        ranges,
        [None, Some("bytes=200000-".to_string()), Some("bytes=400000-".to_string())]
    );
    assert!(!partial(cache.path(), &bytes).exists());
}

#[test]
fn an_interrupted_pull_is_resumed_by_the_next_one() {
    let cache = tempfile::tempdir().unwrap();
    let files = gguf(300_000);
    let bytes = files[1].1.clone();
    let calls = AtomicUsize::new(0);
    let server = Server::start(move |request| {
        let mut reply = repository(request, &files);
        // The first contact gives 100,000 bytes, then the storage is down until the sixth.
        match request.path.contains("resolve").then(|| calls.fetch_add(1, Ordering::SeqCst)) {
            Some(0) => reply.cut = Some(100_000),
            Some(1..=5) => reply = Reply::status(503),
            _ => {}
        }
        reply
    });
    let hub = hub(&server, cache.path());
    let error = hub.pull("org/name", &()).unwrap_err();
    assert!(error.to_string().contains("HTTP status 503"), "{error}");
    assert_eq!(std::fs::metadata(partial(cache.path(), &bytes)).unwrap().len(), 100_000);
    assert!(hub.resolve(Some("org/name")).is_err());

    let told = Told::default();
    let model = hub.pull("org/name", &told).unwrap();
    assert_eq!(std::fs::read(model.path().unwrap()).unwrap(), bytes);
    assert!(
        told.0.lock().unwrap().contains(&"start m-Q8_0.gguf Some(300000) 100000".to_string()),
        "{:?}",
        told.0
    );
    assert_eq!(server.asked("resolve").last().unwrap().headers["range"], "bytes=100000-");
}

#[test]
fn a_server_without_ranges_and_a_stale_partial_both_start_anew() {
    let files = gguf(100_000);
    let bytes = files[1].1.clone();
    for (ranges, stale) in [
        (false, &bytes[..40_000]),
        (true, &[7; 40_000][..]),
        (true, &[7; 200_000][..]),
        (true, &[7; 100_000][..]),
    ] {
        let cache = tempfile::tempdir().unwrap();
        let served = files.clone();
        let server = Server::start(move |request| {
            let mut request = request.clone();
            if !ranges {
                request.headers.remove("range");
            }
            repository(&request, &served)
        });
        let partial = partial(cache.path(), &bytes);
        std::fs::create_dir_all(partial.parent().unwrap()).unwrap();
        std::fs::write(&partial, stale).unwrap();
        let model = hub(&server, cache.path()).pull("org/name", &()).unwrap();
        assert_eq!(
            std::fs::read(model.path().unwrap()).unwrap(),
            bytes,
            "ranges {ranges}, {} stale bytes",
            stale.len()
        );
    }
}

#[test]
fn wrong_bytes_never_reach_the_cache() {
    for name in ["m-Q8_0.gguf", "config.json"] {
        let cache = tempfile::tempdir().unwrap();
        let files = if name == "config.json" {
            vec![("config.json", noise(900)), ("model.safetensors", noise(10))]
        } else {
            gguf(50_000)
        };
        let server = Server::start(move |request| {
            let mut reply = repository(request, &files);
            if request.path.ends_with(name) {
                reply.body[17] ^= 1;
            }
            reply
        });
        let hub = hub(&server, cache.path());
        let error = hub.pull("org/name", &()).unwrap_err();
        assert!(error.to_string().contains("expected digest "), "{error}");
        assert!(hub.resolve(Some("org/name")).is_err());
        let blobs =
            std::fs::read_dir(cache.path().join("models--org--name/blobs")).unwrap().count();
        assert_eq!(blobs, 0, "the damaged bytes are gone");
    }
}

#[test]
fn a_longer_body_than_announced_is_refused() {
    let cache = tempfile::tempdir().unwrap();
    let files = gguf(50_000);
    let server = Server::start(move |request| {
        let mut reply = repository(request, &files);
        if request.path.contains("resolve") {
            reply.body.extend_from_slice(&[0; 99]);
        }
        reply
    });
    let error = hub(&server, cache.path()).pull("org/name", &()).unwrap_err().to_string();
    let told = "expected 50000 bytes, as the list says, found 50099, as the download says";
    assert!(error.contains(told), "{error}");
}

/// Faults of a hub, or of what is between here and there. Each must end, after few requests.
#[test]
fn every_fault_ends() {
    type Fault = fn(&Request, Reply, usize) -> Reply;
    struct Case {
        name: &'static str,
        /// The request, the right answer, and the number of the request for this file.
        fault: Fault,
        /// Whether the list tells sizes.
        listed: bool,
        expected: &'static str,
        /// Requests for the file at most.
        requests: usize,
    }
    let cases = [
        Case {
            name: "another length than the list's, far beyond any disk",
            fault: |_, reply, _| Reply { length: Length::Said(1 << 62), ..reply },
            listed: true,
            expected: "expected 600000 bytes, as the list says, found 4611686018427387904, as the download says",
            requests: 1,
        },
        Case {
            name: "the same where the list tells no sizes",
            fault: |_, reply, _| Reply { length: Length::Said(1 << 62), ..reply },
            listed: false,
            expected: "expected 4.0 EiB free for the download, found",
            requests: 2,
        },
        Case {
            name: "another size in the hub's own header",
            fault: |_, reply, _| reply.header("x-linked-size", "600001"),
            listed: true,
            expected: "expected 600000 bytes, as the list says, found 600001, as X-Linked-Size says",
            requests: 1,
        },
        Case {
            name: "a body that breaks, then answers with parts that nobody asked for",
            fault: |request, reply, _| match request.headers.contains_key("range") {
                true => Reply {
                    headers: vec![("content-range".into(), "bytes 7-9/600000".into())],
                    ..reply
                },
                false => Reply { cut: Some(300_000), ..reply },
            },
            listed: true,
            expected: "found",
            requests: 12,
        },
        Case {
            name: "a part without a range, after a break",
            fault: |request, reply, _| match request.headers.contains_key("range") {
                true => Reply { headers: Vec::new(), ..reply },
                false => Reply { cut: Some(300_000), ..reply },
            },
            listed: true,
            expected: "found",
            requests: 12,
        },
        Case {
            name: "a part of a file of another size",
            fault: |request, reply, _| match request.headers.contains_key("range") {
                true => Reply {
                    headers: vec![("content-range".into(), "bytes 300000-599999/700000".into())],
                    ..reply
                },
                false => Reply { cut: Some(300_000), ..reply },
            },
            listed: true,
            expected: "found 700000, as the download says",
            requests: 2,
        },
        Case {
            name: "bodies that break at the same place, without ranges",
            fault: |_, reply, _| Reply {
                cut: Some(400_000),
                status: 200,
                body: noise(600_000),
                ..reply
            },
            listed: true,
            expected: "the connection closed early (hint: run the same command again: it resumes)",
            requests: 7,
        },
        Case {
            name: "a body that brings a few bytes each time",
            fault: |_, reply, _| Reply { cut: Some(1000), ..reply },
            listed: true,
            expected: "the connection closed early",
            requests: 5,
        },
        Case {
            name: "a body that trickles",
            fault: |_, reply, _| Reply { trickle: Duration::from_millis(20), ..reply },
            listed: true,
            expected: "bytes in 150ms",
            requests: 5,
        },
        Case {
            name: "a body without a length, longer than listed",
            fault: |_, reply, _| Reply {
                length: Length::Unsaid,
                body: [&reply.body[..], &[0; 9]].concat(),
                ..reply
            },
            listed: true,
            expected: "expected at most 600000 bytes, found more",
            requests: 1,
        },
        Case {
            name: "nothing satisfies the range",
            fault: |_, reply, number| match number {
                0 => Reply { cut: Some(1000), ..reply },
                number if number % 2 == 1 => Reply::status(416),
                _ => Reply { cut: Some(1000), status: 200, body: noise(600_000), ..reply },
            },
            listed: true,
            expected: "found",
            requests: 6,
        },
        Case {
            name: "a redirect to a file of this machine",
            fault: |_, _, _| Reply::status(302).header("location", "file:///etc/passwd"),
            listed: true,
            expected: "expected a redirect to https, found one to file:///etc/passwd",
            requests: 1,
        },
    ];
    for case in cases {
        let cache = tempfile::tempdir().unwrap();
        let files = vec![("m.gguf", noise(600_000))];
        let (count, listed) = (AtomicUsize::new(0), case.listed);
        let server = Server::start(move |request| {
            if request.path.starts_with("/api") {
                return if listed { info(&files) } else { bare_info("m.gguf") };
            }
            let number = count.fetch_add(1, Ordering::SeqCst);
            (case.fault)(request, repository(request, &files), number)
        });
        let hub = Hub { timeout: Duration::from_millis(150), ..hub(&server, cache.path()) };
        let error = hub.pull("org/name", &()).unwrap_err().to_string();
        assert!(error.contains(case.expected), "{}: {error}", case.name);
        let requests = server.asked("resolve").len();
        assert!(requests <= case.requests, "{}: {requests} requests", case.name);
        assert!(hub.resolve(Some("org/name")).is_err(), "{}", case.name);
    }
}

#[test]
fn a_wrong_part_is_thrown_away_and_the_file_asked_for_anew() {
    let cache = tempfile::tempdir().unwrap();
    let files = gguf(600_000);
    let bytes = files[1].1.clone();
    let count = AtomicUsize::new(0);
    let server = Server::start(move |request| {
        let reply = repository(request, &files);
        match request.path.contains("resolve").then(|| count.fetch_add(1, Ordering::SeqCst)) {
            Some(0) => Reply { cut: Some(300_000), ..reply },
            Some(1) => Reply { headers: Vec::new(), ..reply }
                .header("content-range", "bytes 100000-599999/600000"),
            _ => reply,
        }
    });
    let model = hub(&server, cache.path()).pull("org/name", &()).unwrap();
    assert_eq!(std::fs::read(model.path().unwrap()).unwrap(), bytes);
    let ranges: Vec<_> =
        server.asked("resolve").iter().map(|r| r.headers.get("range").cloned()).collect();
    assert_eq!(ranges, [None, Some("bytes=300000-".to_string()), None]);
}

#[test]
fn too_little_room_is_told_before_the_first_byte() {
    let cache = tempfile::tempdir().unwrap();
    let files = gguf(300_000);
    let bytes = files[1].1.clone();
    let server = Server::start(move |request| repository(request, &files));
    let hub = Hub { room: Some(250_000), ..hub(&server, &cache.path().join("new/cache")) };
    let error = hub.pull("org/name", &()).unwrap_err().to_string();
    assert!(error.contains("expected 293.0 KiB free for the download, found 244.1 KiB"), "{error}");
    assert!(server.asked("resolve").is_empty() && !cache.path().join("new").exists());
    // An earlier download left a part of it: the rest fits.
    let partial = partial(&hub.cache, &bytes);
    std::fs::create_dir_all(partial.parent().unwrap()).unwrap();
    std::fs::write(&partial, &bytes[..100_000]).unwrap();
    let offer = hub.offer("org/name", &()).unwrap();
    assert_eq!((offer.missing(), offer.missing_bytes()), (1, Some(200_000)));
    assert_eq!((offer.id(), offer.file()), ("org/name", Some("m-Q8_0.gguf")));
    let told = Told::default();
    let model = offer.fetch(&told).unwrap();
    assert_eq!(std::fs::read(model.path().unwrap()).unwrap(), bytes);
    assert_eq!(told.0.lock().unwrap()[0], "begin 1 Some(300000) 100000");
    let again = hub.offer("org/name", &()).unwrap();
    assert_eq!((again.missing(), again.missing_bytes()), (0, Some(0)));
}

/// What a server without TLS, or a broken proxy, does to a secure connection.
#[test]
fn a_connection_that_is_not_secure_is_not_tried_again() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let connections = std::sync::Arc::new(AtomicUsize::new(0));
    let seen = connections.clone();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            seen.fetch_add(1, Ordering::SeqCst);
            let mut hello = [0; 64];
            let _ = std::io::Read::read(&mut stream, &mut hello);
            let _ = std::io::Write::write_all(&mut stream, b"HTTP/1.1 400 Bad Request\r\n\r\n");
        }
    });
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(|_| Reply::status(500));
    let hub = Hub { endpoint: format!("https://{address}"), ..hub(&server, cache.path()) };
    let error = hub.pull("org/name", &()).unwrap_err().to_string();
    let expected = format!("org/name: expected a secure connection to https://{address}, found ");
    assert!(error.starts_with(&expected) && error.contains("SSL_CERT_FILE"), "{error}");
    assert_eq!(connections.load(Ordering::SeqCst), 1);
}

#[test]
fn a_preview_tells_what_a_model_is_before_its_weights() {
    let cache = tempfile::tempdir().unwrap();
    // Two keys, of which the second lies beyond what is read.
    let mut beginning = b"GGUF\x03\0\0\0".to_vec();
    beginning.extend([0u64.to_le_bytes(), 2u64.to_le_bytes()].concat());
    for (key, value) in
        [("general.architecture", "mamba".to_string()), ("long", "x".repeat(400_000))]
    {
        beginning.extend((key.len() as u64).to_le_bytes());
        beginning.extend(key.as_bytes());
        beginning.extend(8u32.to_le_bytes());
        beginning.extend((value.len() as u64).to_le_bytes());
        beginning.extend(value.as_bytes());
    }
    for ranges in [true, false] {
        let served = vec![("m.gguf", beginning.clone())];
        let server = Server::start(move |request| {
            let mut request = request.clone();
            if !ranges {
                request.headers.remove("range");
            }
            repository(&request, &served)
        });
        let hub = hub(&server, cache.path());
        let offer = hub.offer("org/name", &()).unwrap();
        let Some(Preview::Gguf(keys)) = offer.preview(&()).unwrap() else { panic!("no keys") };
        assert_eq!(keys.str("general.architecture").unwrap(), Some("mamba"));
        assert_eq!(keys.len(), 1);
        assert_eq!(server.asked("resolve")[0].headers["range"], "bytes=0-262143");
    }
    let served = vec![("config.json", b"{\"a\": 1}".to_vec()), ("model.safetensors", noise(10))];
    let server = Server::start(move |request| repository(request, &served));
    let hub = hub(&server, cache.path());
    let offer = hub.offer("org/name", &()).unwrap();
    let Some(Preview::Config(config)) = offer.preview(&()).unwrap() else { panic!("no config") };
    assert_eq!(config, serde_json::json!({ "a": 1 }));
    assert!(server.asked("safetensors").is_empty());
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0, "nothing is kept");
}

#[test]
fn the_token_stays_with_the_hub_when_it_redirects_to_storage() {
    let cache = tempfile::tempdir().unwrap();
    let files = gguf(50_000);
    let bytes = files[1].1.clone();
    let stored = bytes.clone();
    let storage = Server::start(move |request| file(request, &stored));
    let target = format!("{}/blob?signature=x%2Fy", storage.url);
    let server = Server::start(move |request| {
        if request.path.starts_with("/api/models/org/old/") {
            return Reply::status(307)
                .header("location", "/api/models/org/name/revision/main?blobs=true");
        }
        if request.path.contains("resolve") {
            let tag = format!("\"{}\"", sha256(&files[1].1));
            return Reply::status(302)
                .header("location", target.clone())
                .header("x-linked-etag", tag);
        }
        repository(request, &files)
    });
    let hub = Hub { token: Some("hf_secret".to_string()), ..hub(&server, cache.path()) };
    let model = hub.pull("org/old", &()).unwrap();
    assert_eq!(std::fs::read(model.path().unwrap()).unwrap(), bytes);
    let seen = |server: &Server| -> Vec<bool> {
        server.log.lock().unwrap().iter().map(|r| r.headers.contains_key("authorization")).collect()
    };
    assert_eq!(seen(&server), [true, true, true]);
    assert_eq!(seen(&storage), [false]);
    assert_eq!(storage.log.lock().unwrap()[0].path, "/blob?signature=x%2Fy");
}

#[test]
fn refusals_say_what_to_do() {
    let cases = [
        (
            401,
            "RepoNotFound",
            None,
            "misspelt or private (hint: check the name's spelling; for a private model set HF_TOKEN",
        ),
        (401, "", Some("hf_x"), "HF_TOKEN is valid"),
        (401, "GatedRepo", None, "found a gated model (hint: accept its terms at "),
        (403, "GatedRepo", Some("hf_x"), "ask for access at "),
        (403, "", Some("hf_x"), "may lack read access"),
        (404, "RepoNotFound", None, "expected a model at "),
        (404, "RevisionNotFound", None, "expected a branch, tag or commit of that name"),
        (429, "", None, "429 too many requests (hint: wait a while, or set HF_TOKEN"),
        (429, "", Some("hf_x"), "429 too many requests (hint: wait a while, then run the same"),
        (418, "", None, "HTTP status 418"),
    ];
    let cache = tempfile::tempdir().unwrap();
    for (status, code, token, expected) in cases {
        let server = Server::start(move |_| Reply::status(status).header("x-error-code", code));
        let hub = Hub { token: token.map(str::to_string), ..hub(&server, cache.path()) };
        let error = hub.pull("org/name", &()).unwrap_err().to_string();
        assert!(
            error.starts_with("org/name: ") && error.contains(expected),
            "{status} {code}: {error}"
        );
        let tries = server.log.lock().unwrap().len();
        assert_eq!(tries, if status == 429 { 5 } else { 1 }, "{status}");
    }
}

#[test]
fn servers_that_stumble_are_asked_again() {
    let cache = tempfile::tempdir().unwrap();
    let files = gguf(1000);
    let calls = AtomicUsize::new(0);
    let server = Server::start(move |request| {
        // Every second request fails, in turn with each passing ailment.
        match calls.fetch_add(1, Ordering::SeqCst) {
            0 => Reply::status(500),
            2 => Reply::status(429).header("retry-after", "0"),
            _ => repository(request, &files),
        }
    });
    let told = Told::default();
    hub(&server, cache.path()).pull("org/name", &told).unwrap();
    let retries =
        told.0.lock().unwrap().iter().filter(|line| line.contains("trying again")).count();
    assert_eq!(retries, 2);
}

#[test]
fn no_network_is_one_clear_line() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(|_| Reply::status(500));
    // A port that was just free: nothing listens there.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let hub = Hub { endpoint: format!("http://127.0.0.1:{port}"), ..hub(&server, cache.path()) };
    let error = hub.pull("org/name", &()).unwrap_err().to_string();
    assert_eq!(
        error,
        format!(
            "org/name: expected an answer from http://127.0.0.1:{port}, found connection refused (hint: is the network up?)"
        )
    );
    let hub = Hub { offline: true, ..hub };
    assert!(hub.pull("org/name", &()).unwrap_err().to_string().contains("HF_HUB_OFFLINE"));
    let hub = Hub { offline: false, endpoint: "nonsense".to_string(), ..hub };
    assert!(hub.pull("org/name", &()).unwrap_err().to_string().contains("HF_ENDPOINT"));
}

#[test]
fn a_hostile_listing_stays_inside_the_cache() {
    for (name, sha) in [
        ("../../../evil.gguf", COMMIT),
        ("/etc/evil.gguf", COMMIT),
        ("a\\..\\evil.gguf", COMMIT),
        ("ok.gguf", "../../.."),
    ] {
        let cache = tempfile::tempdir().unwrap();
        let server = Server::start(move |request| {
            let mut reply = repository(request, &[(name, b"x".to_vec())]);
            reply.body = String::from_utf8(reply.body).unwrap().replace(COMMIT, sha).into_bytes();
            reply
        });
        let error = hub(&server, cache.path()).pull("org/name", &()).unwrap_err();
        assert!(error.to_string().starts_with("org/name"), "{error}");
        assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
    }
    for body in ["", "<html>", "{}", "{\"sha\":\"x\"}", "[1]"] {
        let cache = tempfile::tempdir().unwrap();
        let server =
            Server::start(move |_| Reply { status: 200, body: body.into(), ..Reply::default() });
        let error = hub(&server, cache.path()).pull("org/name", &()).unwrap_err();
        assert!(error.to_string().contains("the hub's answer: expected"), "{error}");
    }
}

#[test]
fn a_mirror_that_lists_no_digests_is_read_by_its_headers() {
    let cache = tempfile::tempdir().unwrap();
    let files = gguf(60_000);
    let bytes = files[1].1.clone();
    let server = Server::start(move |request| {
        if request.path.starts_with("/api") {
            bare_info("m-Q8_0.gguf")
        } else {
            repository(request, &files)
        }
    });
    let model = hub(&server, cache.path()).pull("org/name", &()).unwrap();
    assert_eq!(std::fs::read(model.path().unwrap()).unwrap(), bytes);
    let methods: Vec<_> = server.asked("resolve").into_iter().map(|r| r.method).collect();
    assert_eq!(methods, ["HEAD", "GET"]);
}

#[test]
fn headers_are_asked_of_the_hub_alone_and_by_get_where_head_is_unknown() {
    let files = gguf(60_000);
    let bytes = files[1].1.clone();
    let stored = bytes.clone();
    let storage = Server::start(move |request| file(request, &stored));
    for knows_head in [true, false] {
        let cache = tempfile::tempdir().unwrap();
        let (target, digest) = (format!("{}/blob", storage.url), sha256(&bytes));
        let server = Server::start(move |request| match &*request.path {
            path if path.starts_with("/api") => bare_info("m-Q8_0.gguf"),
            _ if request.method == "HEAD" && !knows_head => Reply::status(405),
            _ => Reply::status(302)
                .header("location", target.clone())
                .header("x-linked-etag", format!("\"{digest}\""))
                .header("x-linked-size", "60000"),
        });
        storage.log.lock().unwrap().clear();
        let model = hub(&server, cache.path()).pull("org/name", &()).unwrap();
        assert_eq!(std::fs::read(model.path().unwrap()).unwrap(), bytes);
        let methods = |server: &Server, part: &str| -> Vec<String> {
            server.asked(part).into_iter().map(|request| request.method).collect()
        };
        let (hub, store): (&[&str], &[&str]) = match knows_head {
            true => (&["HEAD", "GET"], &["GET"]),
            false => (&["HEAD", "GET", "GET"], &["GET", "GET"]),
        };
        assert_eq!(
            (methods(&server, "resolve"), methods(&storage, "blob")),
            (
                hub.iter().map(|m| m.to_string()).collect(),
                store.iter().map(|m| m.to_string()).collect()
            )
        );
    }
}

#[test]
fn two_pulls_at_once_download_once() {
    let cache = tempfile::tempdir().unwrap();
    let files = gguf(400_000);
    let bytes = files[1].1.clone();
    let server = Server::start(move |request| {
        let mut reply = repository(request, &files);
        if request.path.contains("resolve") {
            reply.pause = Duration::from_millis(300);
        }
        reply
    });
    let hub = hub(&server, cache.path());
    let told = Told::default();
    let paths: Vec<PathBuf> = std::thread::scope(|scope| {
        let pulls: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| hub.pull("org/name", &told).unwrap().path().unwrap().to_path_buf())
            })
            .collect();
        pulls.into_iter().map(|pull| pull.join().unwrap()).collect()
    });
    assert_eq!(paths[0], paths[1]);
    assert_eq!(std::fs::read(&paths[0]).unwrap(), bytes);
    assert_eq!(server.asked("resolve").len(), 1);
    assert!(
        told.0.lock().unwrap().iter().any(|line| line.contains("waiting for another download"))
    );
}

#[test]
fn local_paths_come_first_and_say_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(|_| Reply::status(500));
    let hub = hub(&server, &folder.path().join("cache"));
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
    std::fs::create_dir_all(folder.path().join("hf")).unwrap();
    std::fs::create_dir_all(folder.path().join("empty")).unwrap();
    std::fs::create_dir_all(folder.path().join("ggufs")).unwrap();
    std::fs::write(at("hf/config.json"), "{}").unwrap();
    std::fs::write(at("hf/model.safetensors"), "").unwrap();
    std::fs::write(at("ggufs/a.gguf"), "").unwrap();
    std::fs::write(at("m.gguf"), "").unwrap();
    assert_eq!(hub.resolve(Some(&at("hf"))).unwrap().kind, Container::Folder);
    assert_eq!(hub.resolve(Some(&at("m.gguf"))).unwrap().name(), "m");
    assert_eq!(
        hub.resolve(Some(&at("ggufs"))).unwrap().path().unwrap(),
        folder.path().join("ggufs/a.gguf")
    );
    assert_eq!(
        hub.resolve(Some(&at("hf/model.safetensors"))).unwrap().path().unwrap(),
        folder.path().join("hf")
    );
    for (name, expected) in [
        ("empty", "expected safetensors or GGUF weights, found none"),
        ("absent.gguf", "found nothing there"),
    ] {
        let error = hub.resolve(Some(&at(name))).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    for name in ["absent.gguf", "", "a/b/c"] {
        assert!(hub.resolve(Some(name)).is_err());
    }
    assert_eq!(hub.list().unwrap(), []);
}

#[test]
fn short_names_lead_to_the_hub_and_the_nearest_are_told() {
    let folder = tempfile::tempdir().unwrap();
    let files = gguf(1000);
    let server = Server::start(move |request| repository(request, &files));
    let models = folder.path().join("models.toml");
    let hub = Hub { models: Some(models.clone()), ..hub(&server, &folder.path().join("cache")) };
    let local = folder.path().join("local.gguf");
    std::fs::write(&local, "GGUF").unwrap();
    let own = "small = \"org/name:Q8_0\"\nbeside = \"./local.gguf\"\n";
    std::fs::write(&models, format!("{own}file = \"{}\"\n", local.display())).unwrap();
    let missing = hub.resolve(Some("small")).unwrap_err();
    assert_eq!(missing.hint.map(|hint| hint.to_string()).as_deref(), Some("delft pull small"));
    let model = hub.pull("small", &()).unwrap();
    assert_eq!(model.name(), "org/name");
    assert_eq!(hub.resolve(Some("small")).unwrap(), model);
    assert_eq!(hub.resolve(Some("file")).unwrap().path().unwrap(), local);
    assert!(hub.resolve(Some("beside")).unwrap().path().unwrap().ends_with("local.gguf"));
    assert_eq!(hub.recognise("small"), Likeness::Model);
    for (name, expected) in [
        ("qwen3:0.7b", "the nearest names: qwen3:0.6b"),
        ("local.guf", "short name or a hub id (org/name), found nothing there"),
        (folder.path().join("lokal.gguf").to_str().unwrap(), "local.gguf)"),
    ] {
        let error = hub.resolve(Some(name)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        assert!(hub.pull(name, &()).is_err(), "{name}");
    }
    assert!(hub.pull("file", &()).unwrap_err().to_string().contains("a path on this machine"));
    std::fs::write(&models, "small = \"org/name\"\nbad = 1\n").unwrap();
    for name in ["small", "bad"] {
        let error = hub.resolve(Some(name)).unwrap_err().to_string();
        assert!(error.contains("models.toml:2: expected a hub id or a path"), "{error}");
        assert_eq!(hub.recognise(name), Likeness::Model, "the error is told, not a story");
    }
}

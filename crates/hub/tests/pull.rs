//! Pulls against a server that imitates the hub: what arrives, what is asked for, and what happens when things break.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{COMMIT, Reply, Server, file, info, noise, repository, sha256};
use delft_hub::{Hub, Kind, Likeness, Progress, Source};

fn hub(server: &Server, cache: &Path) -> Hub {
    Hub {
        endpoint: server.url.clone(),
        token: None,
        cache: cache.to_path_buf(),
        offline: false,
        retry_wait: Duration::from_millis(1),
        timeout: Duration::from_secs(5),
        models: None,
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

impl Progress for Told {
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
    assert_eq!(missing.hint.as_deref(), Some("delft pull org/name"));

    let model = hub.pull("org/name", &()).unwrap();
    let root = cache.path().join("models--org--name");
    assert_eq!(model.path().unwrap(), root.join("snapshots").join(COMMIT));
    assert_eq!((model.kind, model.name()), (Kind::Folder, "org/name".to_string()));
    assert_eq!(
        model.source,
        Source::Hub { id: "org/name".to_string(), commit: COMMIT.to_string() }
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
        (1, "org/name", Some(Kind::Folder))
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
    let error = hub(&server, cache.path()).pull("org/name", &()).unwrap_err();
    assert!(error.to_string().contains("expected 50000 bytes, found more"), "{error}");
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
        (429, "", None, "too many requests"),
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
            let mut reply = info(&[]);
            let siblings = "\"siblings\":[{\"rfilename\":\"m-Q8_0.gguf\"}]";
            reply.body = String::from_utf8(reply.body)
                .unwrap()
                .replace("\"siblings\":[]", siblings)
                .into_bytes();
            return reply;
        }
        repository(request, &files)
    });
    let model = hub(&server, cache.path()).pull("org/name", &()).unwrap();
    assert_eq!(std::fs::read(model.path().unwrap()).unwrap(), bytes);
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
    assert_eq!(hub.resolve(Some(&at("hf"))).unwrap().kind, Kind::Folder);
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
    std::fs::write(&models, format!("small = \"org/name:Q8_0\"\nfile = \"{}\"\n", local.display()))
        .unwrap();
    let missing = hub.resolve(Some("small")).unwrap_err();
    assert_eq!(missing.hint.as_deref(), Some("delft pull small"));
    let model = hub.pull("small", &()).unwrap();
    assert_eq!(model.name(), "org/name");
    assert_eq!(hub.resolve(Some("small")).unwrap(), model);
    assert_eq!(hub.resolve(Some("file")).unwrap().path().unwrap(), local);
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

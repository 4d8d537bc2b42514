//! Requests to the hub: redirects that never carry the token to another host, retries, and errors
//! that help.

use std::io::{ErrorKind, Read};
use std::time::{Duration, Instant};

use formats::{Error, ErrorKind as Kind, Result};
use ureq::http::{Response, Uri};
use ureq::{Agent, Body};

use crate::{Hub, PullProgress};

/// How many times in a row a request may fail before it is given up.
pub(crate) const ATTEMPTS: u32 = 5;

/// A connection to one hub.
pub(crate) struct Client<'a> {
    pub(crate) hub: &'a Hub,
    agent: Agent,
}

/// The part of a file that is asked for: from a byte on, to a last one or to its end.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Part {
    pub(crate) from: u64,
    pub(crate) last: Option<u64>,
}

impl Part {
    pub(crate) fn from(from: u64) -> Part {
        Part { from, last: None }
    }

    /// The `Range` header, which a whole file needs not.
    fn header(&self) -> Option<String> {
        match (self.from, self.last) {
            (0, None) => None,
            (from, None) => Some(format!("bytes={from}-")),
            (from, Some(last)) => Some(format!("bytes={from}-{last}")),
        }
    }
}

/// A response after its redirects.
pub(crate) struct Answer {
    pub(crate) response: Response<Body>,
    /// Who answered in the end: the hub, or a storage that it redirected to.
    pub(crate) host: String,
    /// The headers that the hub itself set on the way, before it redirected to the storage.
    pub(crate) etag: Option<String>,
    /// The file's size, as the hub itself said on the way.
    pub(crate) linked_size: Option<u64>,
}

impl Answer {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.response.headers().get(name).and_then(|value| value.to_str().ok())
    }

    /// The number of bytes that the answer says its body has.
    pub(crate) fn length(&self) -> Option<u64> {
        self.header("content-length")?.trim().parse().ok()
    }
}

/// Why a request failed, and whether another attempt may help.
pub(crate) struct Failure {
    pub(crate) error: Box<Error>,
    /// How long to wait before the next attempt; None when it would fail likewise.
    pub(crate) retry: Option<Duration>,
    /// The HTTP status, where the hub answered.
    pub(crate) status: Option<u16>,
}

impl Failure {
    pub(crate) fn hint(self, hint: &str) -> Failure {
        Failure { error: Box::new(self.error.hint(hint)), ..self }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure { error: Box::new(error), retry: None, status: None }
    }
}

impl<'a> Client<'a> {
    pub(crate) fn new(hub: &'a Hub) -> Result<Self> {
        let config = Agent::config_builder()
            .user_agent(concat!("delft/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            .max_redirects(0)
            .timeout_connect(Some(hub.timeout))
            .timeout_recv_response(Some(hub.timeout))
            .timeout_per_read(Some(hub.timeout));
        let config = match std::env::var_os("SSL_CERT_FILE").filter(|path| !path.is_empty()) {
            Some(path) => config.tls_config(own_roots(std::path::Path::new(&path))?),
            None => config,
        };
        Ok(Client { hub, agent: config.build().into() })
    }

    /// One GET of a part of `path` (below the endpoint), redirects followed. `place` names it in
    /// errors.
    pub(crate) fn get(
        &self,
        place: &str,
        path: &str,
        part: Part,
    ) -> std::result::Result<Answer, Failure> {
        self.ask(place, path, part, false)
    }

    /// The headers of `path` by HEAD, which opens no body anywhere; by GET where a server does not
    /// know HEAD.
    pub(crate) fn head(&self, place: &str, path: &str) -> std::result::Result<Answer, Failure> {
        match self.ask(place, path, Part::default(), true) {
            Err(failure) if matches!(failure.status, Some(405 | 501)) => {
                self.ask(place, path, Part::default(), false)
            }
            answer => answer,
        }
    }

    fn ask(
        &self,
        place: &str,
        path: &str,
        part: Part,
        head: bool,
    ) -> std::result::Result<Answer, Failure> {
        const REDIRECTS: usize = 8;
        let home = parse(place, &self.hub.endpoint)?;
        let mut uri = parse(place, &format!("{}{path}", self.hub.endpoint))?;
        let (mut etag, mut linked_size) = (None, None);
        for _ in 0..REDIRECTS {
            let request =
                if head { self.agent.head(uri.clone()) } else { self.agent.get(uri.clone()) };
            let mut request = request.header("accept-encoding", "identity");
            if let Some(range) = part.header() {
                request = request.header("range", range);
            }
            if let Some(token) = self.hub.token.as_ref().filter(|_| same_origin(&uri, &home)) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let host = origin(&uri);
            let response = request.call().map_err(|error| self.broken(place, &host, error))?;
            let header =
                |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
            if same_origin(&uri, &home) {
                let tag = header("x-linked-etag").or_else(|| header("etag"));
                let plain =
                    |tag: &str| tag.trim_start_matches("W/").trim_matches('"').to_ascii_lowercase();
                etag = etag.or(tag.map(plain));
                let size = || header("x-linked-size")?.trim().parse().ok();
                linked_size = linked_size.or_else(size);
            }
            let status = response.status().as_u16();
            match status {
                200..=299 => return Ok(Answer { response, host, etag, linked_size }),
                // The hub has said all that headers are asked for: its storage need not be
                // troubled.
                300..=399 if head && etag.is_some() && linked_size.is_some() => {
                    return Ok(Answer { response, host, etag, linked_size });
                }
                301 | 302 | 303 | 307 | 308 => {
                    let target = header("location").unwrap_or_default();
                    uri = follow(place, &uri, target)?;
                }
                _ => return Err(self.refused(place, status, response)),
            }
        }
        Err(Error::new(place, "a file", format!("more than {REDIRECTS} redirects")).into())
    }

    /// GET with retries, for answers that are read in one piece: at most `limit` bytes.
    pub(crate) fn get_small(
        &self,
        place: &str,
        path: &str,
        limit: u64,
        progress: &dyn PullProgress,
    ) -> Result<Vec<u8>> {
        let attempt = || -> std::result::Result<Vec<u8>, Failure> {
            let answer = self.get(place, path, Part::default())?;
            let body = self.read(place, answer, limit.saturating_add(1))?;
            if body.len() as u64 > limit {
                let expected = format!("an answer of at most {limit} bytes");
                return Err(Error::new(place, expected, "a longer one").into());
            }
            Ok(body)
        };
        let mut failures = 0;
        loop {
            match attempt() {
                Ok(body) => return Ok(body),
                Err(failure) => self.wait(failure, &mut failures, progress)?,
            }
        }
    }

    /// The first bytes of an answer's body, at most `limit`.
    pub(crate) fn read(
        &self,
        place: &str,
        answer: Answer,
        limit: u64,
    ) -> std::result::Result<Vec<u8>, Failure> {
        let mut bytes = Vec::new();
        let host = answer.host;
        let body = Steady::new(answer.response.into_body().into_reader(), self.hub.timeout);
        body.take(limit)
            .read_to_end(&mut bytes)
            .map_err(|error| self.broken(place, &host, ureq::Error::from(error)))?;
        Ok(bytes)
    }

    /// Waits before another attempt, longer each time; gives the error back when there shall be
    /// none.
    pub(crate) fn wait(
        &self,
        failure: Failure,
        failures: &mut u32,
        progress: &dyn PullProgress,
    ) -> Result<()> {
        *failures += 1;
        let Some(asked) = failure.retry.filter(|_| *failures < ATTEMPTS) else {
            return Err(*failure.error);
        };
        let pause = (self.hub.retry_wait * 2u32.pow(*failures - 1)).max(asked);
        progress.note(&format!(
            "{}; trying again in {:.0} s",
            failure.error,
            pause.as_secs_f64().ceil()
        ));
        std::thread::sleep(pause);
        Ok(())
    }

    /// The connection or its body broke.
    pub(crate) fn broken(&self, place: &str, host: &str, error: ureq::Error) -> Failure {
        let network = |found: String| {
            let error = Error::new(place, format!("an answer from {host}"), found);
            error.of(Kind::Busy).hint("is the network up?")
        };
        // Another attempt would meet the same certificate.
        let tls = |found: String| {
            Error::new(place, format!("a secure connection to {host}"), found).hint(
                "behind a proxy that has certificates of its own, SSL_CERT_FILE names the file of them; a wrong \
                 clock ends so, too",
            )
        };
        let (error, again) = match error {
            ureq::Error::HostNotFound => (network("no such host".to_string()), false),
            ureq::Error::Io(error) => match error.kind() {
                ErrorKind::ConnectionRefused => (network("connection refused".to_string()), false),
                ErrorKind::NetworkUnreachable | ErrorKind::HostUnreachable => {
                    (network("no network".to_string()), false)
                }
                ErrorKind::UnexpectedEof => {
                    (network("the connection closed early".to_string()), true)
                }
                // So rustls hands on whatever is wrong with what the server sends.
                ErrorKind::InvalidData => (tls(error.to_string()), false),
                _ => (network(error.to_string()), true),
            },
            error @ (ureq::Error::Rustls(_) | ureq::Error::Tls(_) | ureq::Error::Pem(_)) => {
                (tls(error.to_string()), false)
            }
            ureq::Error::Timeout(what) => (network(format!("a timeout ({what})")), true),
            ureq::Error::ConnectionFailed => (network("no connection".to_string()), true),
            ureq::Error::BodyStalled => (network("the connection closed early".to_string()), true),
            error => (network(error.to_string()), false),
        };
        Failure { error: Box::new(error), retry: again.then_some(Duration::ZERO), status: None }
    }

    /// The hub answered with an error status: what it means and what to do.
    fn refused(&self, place: &str, status: u16, response: Response<Body>) -> Failure {
        let header = |name: &str| {
            response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
        };
        let (code, said) = (header("x-error-code"), header("x-error-message"));
        let id = place.split([':', '@', ' ']).next().unwrap_or(place);
        let endpoint = &self.hub.endpoint;
        let with_token = self.hub.token.is_some();
        let error = match (status, code) {
            (401 | 403, "GatedRepo") => Error::new(place, "permission to download", "a gated model").hint(if with_token {
                format!("ask for access at {endpoint}/{id} with the account that the token belongs to")
            } else {
                format!("accept its terms at {endpoint}/{id}, then set HF_TOKEN to a token of that account")
            }),
            (401, _) if with_token => Error::new(place, "a model that the token may read", "401 unauthorized")
                .hint("check the name's spelling, and that HF_TOKEN is valid"),
            // Without a token the hub does not tell private repositories from absent ones.
            (401, _) => Error::new(place, "a public model", "401 unauthorized: misspelt or private")
                .hint("check the name's spelling; for a private model set HF_TOKEN"),
            (403, _) => Error::new(place, "permission to download", format!("403 forbidden {said}").trim_end())
                .hint("the token may lack read access to this repository"),
            (404, "RevisionNotFound") => Error::new(place, "a branch, tag or commit of that name", "404 not found")
                .hint(format!("see {endpoint}/{id}/refs")),
            (404, "EntryNotFound") => Error::new(place, "a file of that name", "404 not found"),
            (404, _) => Error::new(place, format!("a model at {endpoint}"), "404 not found")
                .hint("check the name's spelling; a private model needs HF_TOKEN"),
            (429, _) => Error::new(place, "a download", "429 too many requests").hint(if with_token {
                "wait a while, then run the same command again: it resumes"
            } else {
                "wait a while, or set HF_TOKEN: accounts have higher limits"
            }),
            _ => Error::new(place, "a download", format!("HTTP status {status} {said}").trim_end()),
        };
        let asked: u64 = header("retry-after").parse().unwrap_or(0);
        let again = matches!(status, 408 | 429 | 500 | 502 | 503 | 504);
        let kind = match status {
            401 | 404 => Kind::NotFound,
            _ if again => Kind::Busy,
            _ => Kind::BadInput,
        };
        Failure {
            error: Box::new(error.of(kind)),
            retry: again.then_some(Duration::from_secs(asked.min(60))),
            status: Some(status),
        }
    }
}

/// Certificate authorities of a file that the user named (a company's proxy, say), instead of the
/// built-in ones.
fn own_roots(path: &std::path::Path) -> Result<ureq::tls::TlsConfig> {
    use ureq::tls::{PemItem, RootCerts, TlsConfig, parse_pem};
    let text = std::fs::read(path)
        .map_err(|error| Error::io(format!("SSL_CERT_FILE {}", path.display()), error))?;
    let certificates: Vec<_> = parse_pem(&text)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        return Err(Error::new(
            format!("SSL_CERT_FILE {}", path.display()),
            "certificates in PEM form",
            "none",
        ));
    }
    Ok(TlsConfig::builder().root_certs(RootCerts::from(certificates)).build())
}

fn parse(place: &str, text: &str) -> Result<Uri> {
    let uri: Option<Uri> = text.parse().ok();
    uri.filter(|uri| matches!(uri.scheme_str(), Some("http" | "https")) && uri.host().is_some())
        .ok_or_else(|| {
            Error::new(place, "an http or https address", format!("\"{text}\""))
                .hint("HF_ENDPOINT sets the hub's address")
        })
}

/// Whether a token for `home` may be sent to `uri`: same scheme, host and port.
fn same_origin(uri: &Uri, home: &Uri) -> bool {
    let port = |uri: &Uri| {
        uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 })
    };
    let host = |uri: &Uri| uri.host().map(str::to_ascii_lowercase);
    uri.scheme_str() == home.scheme_str() && host(uri) == host(home) && port(uri) == port(home)
}

/// An address's scheme, host and port.
fn origin(uri: &Uri) -> String {
    let authority = uri.authority().map_or("", |authority| authority.as_str());
    format!("{}://{authority}", uri.scheme_str().unwrap_or("https"))
}

/// A body that must keep coming: some bytes every now and then would hold the connection for ever.
pub(crate) struct Steady<R> {
    body: R,
    period: Duration,
    since: Instant,
    bytes: u64,
}

impl<R: Read> Steady<R> {
    pub(crate) fn new(body: R, period: Duration) -> Self {
        Steady { body, period, since: Instant::now(), bytes: 0 }
    }

    /// The least that a period must bring: a kibibyte a second, near enough.
    fn least(&self) -> u64 {
        (self.period.as_millis() as u64).max(1)
    }
}

impl<R: Read> Read for Steady<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.body.read(buffer)?;
        self.bytes += count as u64;
        if count > 0 && self.since.elapsed() >= self.period {
            if self.bytes < self.least() {
                let slow = format!("{} bytes in {:.0?}", self.bytes, self.period);
                return Err(std::io::Error::new(ErrorKind::TimedOut, slow));
            }
            (self.since, self.bytes) = (Instant::now(), 0);
        }
        Ok(count)
    }
}

/// The address that a `Location` header means, seen from `from`.
fn follow(place: &str, from: &Uri, location: &str) -> Result<Uri> {
    let named = location.split_once(':').map(|(scheme, _)| scheme).filter(|scheme| {
        scheme.starts_with(|c: char| c.is_ascii_alphabetic())
            && scheme.chars().all(|c| c.is_ascii_alphanumeric() || "+-.".contains(c))
    });
    if named.is_some_and(|scheme| !["http", "https"].contains(&&*scheme.to_ascii_lowercase())) {
        return Err(Error::new(place, "a redirect to https", format!("one to {location}")));
    }
    let scheme = from.scheme_str().unwrap_or("https");
    let authority = from.authority().map_or("", |authority| authority.as_str());
    let text = if location.starts_with("http://") || location.starts_with("https://") {
        location.to_string()
    } else if location.starts_with("//") {
        format!("{scheme}:{location}")
    } else if location.starts_with('/') {
        format!("{scheme}://{authority}{location}")
    } else {
        let folder = from.path().rsplit_once('/').map_or("", |(folder, _)| folder);
        format!("{scheme}://{authority}{folder}/{location}")
    };
    let to = parse(place, &text)?;
    if scheme == "https" && to.scheme_str() != Some("https") {
        return Err(Error::new(place, "a redirect to https", format!("one to {text}")));
    }
    Ok(to)
}

/// Percent-encodes a path; `/` stays when it divides folders.
pub(crate) fn encode(text: &str, keep_slash: bool) -> String {
    let mut out = String::new();
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte) || (keep_slash && byte == b'/') {
            out.push(byte as char);
        } else {
            out += &format!("%{byte:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_resolved_and_never_leave_https() {
        let from: Uri = "https://hub.example:8443/a/b/resolve/main/x".parse().unwrap();
        let cases = [
            ("/c/d", "https://hub.example:8443/c/d"),
            ("y?z=1", "https://hub.example:8443/a/b/resolve/main/y?z=1"),
            ("//cdn.example/q", "https://cdn.example/q"),
            ("https://cdn.example/q", "https://cdn.example/q"),
        ];
        for (location, expected) in cases {
            assert_eq!(follow("x", &from, location).unwrap().to_string(), expected);
        }
        assert!(follow("x", &from, "http://hub.example/x").is_err());
        assert!(follow("x", &from, "http://[bad").is_err());
        for target in ["file:///etc/passwd", "ftp://hub.example/x", "data:,x", "FILE:x"] {
            let error = follow("x", &from, target).unwrap_err().to_string();
            assert_eq!(error, format!("x: expected a redirect to https, found one to {target}"));
        }
    }

    #[test]
    fn the_token_is_for_one_origin() {
        let uri = |text: &str| -> Uri { text.parse().unwrap() };
        let home = uri("https://hub.example");
        assert!(same_origin(&uri("https://HUB.example:443/x"), &home));
        for other in [
            "http://hub.example/x",
            "https://hub.example:444/x",
            "https://cdn.hub.example/x",
            "https://hub.example.evil/",
        ] {
            assert!(!same_origin(&uri(other), &home), "{other}");
        }
    }

    #[test]
    fn paths_are_encoded() {
        assert_eq!(encode("sub/a b#?\u{e9}.gguf", true), "sub/a%20b%23%3F%C3%A9.gguf");
        assert_eq!(encode("refs/pr/1", false), "refs%2Fpr%2F1");
    }
}

//! Requests to the hub: redirects that never carry the token to another host, retries, and errors that help.

use std::io::ErrorKind;
use std::time::Duration;

use formats::{Error, Result};
use ureq::http::{Response, Uri};
use ureq::{Agent, Body};

use crate::{Hub, Progress};

/// How many times in a row a request may fail before it is given up.
pub(crate) const ATTEMPTS: u32 = 5;

/// A connection to one hub.
pub(crate) struct Client<'a> {
    pub(crate) hub: &'a Hub,
    agent: Agent,
}

/// A response after its redirects.
pub(crate) struct Answer {
    pub(crate) response: Response<Body>,
    /// The headers that the hub itself set on the way, before it redirected to the storage.
    pub(crate) etag: Option<String>,
}

/// Why a request failed, and whether another attempt may help.
pub(crate) struct Failure {
    pub(crate) error: Error,
    /// How long to wait before the next attempt; None when it would fail likewise.
    pub(crate) retry: Option<Duration>,
    /// The HTTP status, where the hub answered.
    pub(crate) status: Option<u16>,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure { error, retry: None, status: None }
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

    /// One GET of `path` (below the endpoint) from byte `from` on, redirects followed. `place` names it in errors.
    pub(crate) fn get(
        &self,
        place: &str,
        path: &str,
        from: u64,
    ) -> std::result::Result<Answer, Failure> {
        const REDIRECTS: usize = 8;
        let home = parse(place, &self.hub.endpoint)?;
        let mut uri = parse(place, &format!("{}{path}", self.hub.endpoint))?;
        let mut etag = None;
        for _ in 0..REDIRECTS {
            let mut request = self.agent.get(uri.clone()).header("accept-encoding", "identity");
            if from > 0 {
                request = request.header("range", format!("bytes={from}-"));
            }
            if let Some(token) = self.hub.token.as_ref().filter(|_| same_origin(&uri, &home)) {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let response = request.call().map_err(|error| self.broken(place, error))?;
            let header =
                |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
            if etag.is_none() && same_origin(&uri, &home) {
                etag = header("x-linked-etag")
                    .or_else(|| header("etag"))
                    .map(|tag| tag.trim_start_matches("W/").trim_matches('"').to_ascii_lowercase());
            }
            let status = response.status().as_u16();
            match status {
                200..=299 => return Ok(Answer { response, etag }),
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
        progress: &dyn Progress,
    ) -> Result<Vec<u8>> {
        let attempt = || -> std::result::Result<Vec<u8>, Failure> {
            let mut answer = self.get(place, path, 0)?;
            let body = answer.response.body_mut().with_config().limit(limit).read_to_vec();
            body.map_err(|error| self.broken(place, error))
        };
        let mut failures = 0;
        loop {
            match attempt() {
                Ok(body) => return Ok(body),
                Err(failure) => self.wait(failure, &mut failures, progress)?,
            }
        }
    }

    /// Waits before another attempt, longer each time; gives the error back when there shall be none.
    pub(crate) fn wait(
        &self,
        failure: Failure,
        failures: &mut u32,
        progress: &dyn Progress,
    ) -> Result<()> {
        *failures += 1;
        let Some(asked) = failure.retry.filter(|_| *failures < ATTEMPTS) else {
            return Err(failure.error);
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
    pub(crate) fn broken(&self, place: &str, error: ureq::Error) -> Failure {
        let host = &self.hub.endpoint;
        let network = |found: String| {
            Error::new(place, format!("an answer from {host}"), found).hint("is the network up?")
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
                _ => (network(error.to_string()), true),
            },
            ureq::Error::Timeout(what) => (network(format!("a timeout ({what})")), true),
            ureq::Error::ConnectionFailed => (network("no connection".to_string()), true),
            ureq::Error::BodyStalled => (network("the connection closed early".to_string()), true),
            ureq::Error::BodyExceedsLimit(limit) => (
                Error::new(place, format!("an answer of at most {limit} bytes"), "a longer one"),
                false,
            ),
            error => (network(error.to_string()), false),
        };
        Failure { error, retry: again.then_some(Duration::ZERO), status: None }
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
            (429, _) => Error::new(place, "a download", "429 too many requests")
                .hint("wait a while, or set HF_TOKEN: accounts have higher limits"),
            _ => Error::new(place, "a download", format!("HTTP status {status} {said}").trim_end()),
        };
        let asked: u64 = header("retry-after").parse().unwrap_or(0);
        let again = matches!(status, 408 | 429 | 500 | 502 | 503 | 504);
        Failure {
            error,
            retry: again.then_some(Duration::from_secs(asked.min(60))),
            status: Some(status),
        }
    }
}

/// Certificate authorities of a file that the user named (a company's proxy, say), instead of the built-in ones.
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

/// The address that a `Location` header means, seen from `from`.
fn follow(place: &str, from: &Uri, location: &str) -> Result<Uri> {
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

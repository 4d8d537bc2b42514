//! Who may ask: the checks that every request passes before it is read.
//!
//! A page of some web site can have its reader's browser send requests to this machine. Two checks
//! stand against that: the `Origin` of a page is this server's own, or one that was allowed; and
//! without keys the `Host` is an address or a name of this machine, since a site may let its own
//! name point here (DNS rebinding). Keys are compared in constant time and never logged.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::header::{AUTHORIZATION, HOST, HeaderName, HeaderValue, ORIGIN};
use subtle::{Choice, ConstantTimeEq};

use crate::fields::shown;
use crate::log::Line;
use crate::problem::{Api, Problem};
use crate::reply::Began;
use crate::router::App;
use crate::settings::random;
use crate::watch::{Asked, Trail};

/// The header that names a request in responses and log lines.
pub(crate) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// The seed of a request's texts where its interface has no field for one, as a decimal number.
const SEED: HeaderName = HeaderName::from_static("x-delft-seed");

/// `1`: the answer tells the tokens of its texts.
const TOKENS: HeaderName = HeaderName::from_static("x-delft-tokens");

/// Where a connection comes from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer(pub(crate) IpAddr);

/// Who may ask.
#[derive(Clone, Default)]
pub struct AccessRules {
    /// Keys, one of which every request must have, unless it has one of an administrator; none: no
    /// key is asked for.
    pub keys: Vec<String>,
    /// Keys of administrators, who may change the store of models and other files. Without one,
    /// only programs of this machine may.
    pub admin_keys: Vec<String>,
    /// Origins of web pages, such as `https://example.com`, that may ask from browsers, beside this
    /// server's own page.
    pub origins: Vec<String>,
    /// Host names of this server, beside `localhost` and addresses.
    pub hosts: Vec<String>,
}

/// Whether a text is an origin as browsers send it: a scheme and a host, in small letters and
/// without a path, or `null`, as pages that are files have it. `*` is none: with it, any page of the
/// web could use the server.
pub fn is_origin(text: &str) -> bool {
    let of_scheme = |c: u8| matches!(c, b'a'..=b'z' | b'0'..=b'9' | b'+' | b'-' | b'.');
    let of_site =
        |c: u8| c.is_ascii_graphic() && !c.is_ascii_uppercase() && !b"/*?#@\\\"".contains(&c);
    let apart = text.split_once("://").filter(|(scheme, site)| {
        !scheme.is_empty() && scheme.bytes().all(of_scheme) && site.bytes().all(of_site)
    });
    text == "null" || apart.is_some_and(|(scheme, site)| !site.is_empty() || scheme == "file")
}

impl AccessRules {
    fn check(&self, request: &Request) -> Result<(), Problem> {
        let header = |name| request.headers().get(name).map(HeaderValue::to_str);
        let host = match header(HOST) {
            Some(Ok(host)) => host,
            _ => return Err(Problem::bad("the header Host: expected a host, found none")),
        };
        if self.keys.is_empty() && !self.is_own(host) {
            let message = format!(
                "the header Host: expected an address, localhost or a name that this server was given, found \"{}\"",
                shown(host)
            );
            return Err(Problem::new(StatusCode::FORBIDDEN, "host_not_allowed", message));
        }
        if let Some(origin) = header(ORIGIN) {
            let origin = origin.unwrap_or_default();
            let own = origin.split_once("://").is_some_and(|(_, site)| site == host);
            if !own && !self.origins.iter().any(|allowed| allowed == origin) {
                let message = format!(
                    "the header Origin: expected this server's page or an origin that was allowed, found \"{}\"",
                    shown(origin)
                );
                return Err(Problem::new(StatusCode::FORBIDDEN, "origin_not_allowed", message));
            }
        }
        let open = matches!(request.uri().path(), "/" | "/health" | "/ready" | "/favicon.ico")
            || request.uri().path().starts_with("/page/");
        let manages = manages(request.uri().path());
        let peer = request.extensions().get::<Peer>();
        let local = peer.is_some_and(|Peer(ip)| ip.to_canonical().is_loopback());
        let needs_admin = manages && !(local && self.admin_keys.is_empty());
        if open || self.keys.is_empty() && !needs_admin {
            return Ok(());
        }
        let bearer = header(AUTHORIZATION).and_then(Result::ok);
        let bearer = bearer.and_then(|value| value.split_once(' '));
        let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        let named = header(HeaderName::from_static("x-api-key")).and_then(Result::ok);
        match bearer.map(|(_, key)| key.trim()).or(named) {
            Some(key) if has(&self.admin_keys, key) => Ok(()),
            Some(key) if !needs_admin && has(&self.keys, key) => Ok(()),
            found if needs_admin => {
                let found = if found.is_some() { "another" } else { "none" };
                let message = format!(
                    "changing files or models of the server: expected a key of an administrator, or a program on this machine where there \
                     is no such key, found {found}"
                );
                Err(Problem::new(StatusCode::FORBIDDEN, "admin_key_needed", message))
            }
            found => {
                let found = if found.is_some() { "another" } else { "none" };
                let message = format!(
                    "expected a key of this server (Authorization: Bearer KEY, or x-api-key), found {found}"
                );
                Err(Problem::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message))
            }
        }
    }

    /// Whether a `Host` cannot be some web site's name.
    fn is_own(&self, host: &str) -> bool {
        let name = match host.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or_default(),
            None => host.split(':').next().unwrap_or_default(),
        };
        // Containers know the machine as `host.docker.internal` and the like. No web site can have
        // a name that ends so: both ends are kept for machines and private networks.
        let name = name.to_ascii_lowercase();
        let local = name == "localhost"
            || [".localhost", ".internal"].iter().any(|end| name.ends_with(end));
        local
            || name.parse::<IpAddr>().is_ok()
            || self.hosts.iter().any(|own| own.eq_ignore_ascii_case(&name))
    }
}

/// Whether a path changes what the server has: its store of models, or its files.
fn manages(path: &str) -> bool {
    let of_session = || {
        path.starts_with("/sessions/") && (path.ends_with("/save") || path.ends_with("/restore"))
    };
    let of_adapter = || path == "/adapters" || path.starts_with("/adapters/");
    matches!(path, "/api/pull" | "/api/copy" | "/api/delete") || of_session() || of_adapter()
}

/// Whether this is one of some keys, in a time that does not tell which, or how much of it is
/// right.
fn has(keys: &[String], key: &str) -> bool {
    let same = |own: &String| own.as_bytes().ct_eq(key.as_bytes());
    keys.iter().map(same).fold(Choice::from(0), |any, same| any | same).into()
}

/// Names a request, answers those that may not ask, and follows the answer to its end, when a log
/// line is written.
pub(crate) async fn pass(
    State(app): State<Arc<App>>,
    mut request: Request,
    next: Next,
) -> Response {
    let began = Began::now();
    let seed = request.headers().get(SEED).and_then(|seed| seed.to_str().ok()?.parse().ok());
    let tells_tokens = request.headers().get(TOKENS).is_some_and(|value| value == "1");
    let trail = Arc::new(Trail::new(random(), seed, tells_tokens));
    let (method, path) = (request.method().clone(), request.uri().path().to_string());
    request.extensions_mut().insert(trail.clone());
    let api = Api::of(&path);
    let (id, shown) = (trail.id.clone(), path.chars().take(100).collect::<String>());
    let asked = Asked { app: app.clone(), trail, method, path: shown, began };
    asked.begin();
    let mut response = match app.access.check(&request) {
        Ok(()) => next.run(request).await,
        Err(problem) => problem.response(api),
    };
    let status = response.status();
    app.requests.count(api, status.as_u16());
    if let Ok(value) = HeaderValue::from_str(&id) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    asked.watch(response)
}

/// The response to a request whose handler panicked.
pub(crate) fn panicked(panic: Box<dyn std::any::Any + Send>) -> Response {
    let words = delft::formats::words_of(&*panic).to_string();
    Line::about("panic").with("words", words).write();
    Problem::failed("internal error").response(Api::OpenAi).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;

    fn asked(access: &AccessRules, path: &str, headers: &[(&str, &str)]) -> u16 {
        let request =
            headers.iter().fold(Request::builder().uri(path), |request, (name, value)| {
                request.header(*name, *value)
            });
        let request = request.body(Body::empty()).unwrap();
        access.check(&request).map_or_else(|problem| problem.status.as_u16(), |()| 200)
    }

    /// Names and values.
    type Headers<'a> = &'a [(&'a str, &'a str)];

    #[test]
    fn origins_are_as_browsers_send_them() {
        for origin in [
            "https://a.example",
            "http://localhost:3000",
            "http://[::1]:80",
            "app://obsidian.md",
            "file://",
            "null",
        ] {
            assert!(is_origin(origin), "{origin}");
        }
        for odd in [
            "*",
            "",
            "a.example",
            "https://",
            "https://a.example/",
            "HTTPS://a.example",
            "https://A.example",
            "https://*.a.example",
            "https://a b",
            "://a",
            "a\nb",
        ] {
            assert!(!is_origin(odd), "{odd}");
        }
    }

    #[test]
    fn hosts_and_origins_are_checked() {
        let open = AccessRules { hosts: vec!["box.lan".into()], ..AccessRules::default() };
        let cors =
            AccessRules { origins: vec!["https://a.example".into()], ..AccessRules::default() };
        let cases: &[(&AccessRules, Headers<'_>, u16, &str)] = &[
            (&open, &[("host", "localhost:11435")], 200, "its name"),
            (&open, &[("host", "127.0.0.1:11435")], 200, "an address"),
            (&open, &[("host", "[::1]:11435")], 200, "an address of version 6"),
            (&open, &[("host", "box.lan")], 200, "a name that was allowed"),
            (&open, &[("host", "Host.docker.internal:11434")], 200, "as containers name it"),
            (&open, &[("host", "evil.example:11435")], 403, "a name that was rebound"),
            (
                &open,
                &[("host", "127.0.0.1.evil.example")],
                403,
                "a name that looks like an address",
            ),
            (&open, &[], 400, "no host"),
            (&open, &[("host", "localhost:1"), ("origin", "http://localhost:1")], 200, "own page"),
            (
                &open,
                &[("host", "localhost:1"), ("origin", "http://localhost:2")],
                403,
                "other port",
            ),
            (&open, &[("host", "localhost:1"), ("origin", "null")], 403, "a sandboxed page"),
            (&cors, &[("host", "localhost"), ("origin", "https://a.example")], 200, "allowed"),
            (&cors, &[("host", "localhost"), ("origin", "https://b.example")], 403, "another"),
        ];
        for (access, headers, status, why) in cases {
            assert_eq!(asked(access, "/v1/models", headers), *status, "{why}");
        }
    }

    #[test]
    fn keys_are_asked_for_everywhere_but_at_the_door() {
        let access =
            AccessRules { keys: vec!["one".into(), "two".into()], ..AccessRules::default() };
        let host = ("host", "anything.example");
        let cases: &[(&str, Headers<'_>, u16)] = &[
            ("/v1/models", &[host], 401),
            ("/v1/models", &[host, ("authorization", "Bearer two")], 200),
            ("/v1/models", &[host, ("authorization", "bearer one")], 200),
            ("/v1/models", &[host, ("x-api-key", "one")], 200),
            ("/v1/models", &[host, ("x-api-key", "on")], 401),
            ("/v1/models", &[host, ("authorization", "Basic one")], 401),
            ("/v1/models", &[host, ("authorization", "Bearer ")], 401),
            ("/metrics", &[host], 401),
            ("/health", &[host], 200),
            ("/", &[host], 200),
        ];
        for (path, headers, status) in cases {
            assert_eq!(asked(&access, path, headers), *status, "{path} {headers:?}");
        }
    }
}

//! Errors of requests, in the shape of the interface that was asked.

use axum::response::{IntoResponse, Response};
use delft::ErrorKind;
use hyper::header::RETRY_AFTER;
use hyper::{HeaderMap, StatusCode};
use serde_json::{Value, json};

/// The interfaces that are spoken here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Api {
    OpenAi,
    Anthropic,
    Ollama,
}

impl Api {
    /// The interface that a path belongs to; Delft's own paths answer as OpenAI's do.
    pub(crate) fn of(path: &str) -> Api {
        if path.starts_with("/v1/messages") {
            Api::Anthropic
        } else if path.starts_with("/api/") {
            Api::Ollama
        } else {
            Api::OpenAi
        }
    }

    /// Its name in metrics and log lines.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Api::OpenAi => "openai",
            Api::Anthropic => "anthropic",
            Api::Ollama => "ollama",
        }
    }
}

/// Why a request is not answered.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    /// A word for programs, such as `context_length_exceeded`.
    pub(crate) code: &'static str,
    /// One line for people.
    pub(crate) message: String,
    /// The field that is wrong.
    pub(crate) param: Option<String>,
    /// Seconds after which another try makes sense.
    pub(crate) retry_after: Option<u64>,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Problem { status, code, message: message.into(), param: None, retry_after: None }
    }

    /// A request that makes no sense.
    pub(crate) fn bad(message: impl Into<String>) -> Self {
        Problem::new(StatusCode::BAD_REQUEST, "invalid_request", message)
    }

    /// A field whose value makes no sense, or that is not supported.
    pub(crate) fn field(name: &str, message: impl std::fmt::Display) -> Self {
        let param = Some(name.to_string());
        Problem { param, ..Problem::bad(format!("{name}: {message}")) }
    }

    /// The same about a field within another.
    pub(crate) fn within(mut self, outer: &str) -> Self {
        self.message = format!("{outer}.{}", self.message);
        self.param = self.param.map(|param| format!("{outer}.{param}"));
        self
    }

    /// The same of what is wrong with a request, told of the field that it was found in.
    pub(crate) fn at(mut self, field: &str) -> Self {
        if self.status == StatusCode::BAD_REQUEST {
            // The field's own word is said once.
            let word = format!("{}: ", field.rsplit('.').next().unwrap_or(field));
            let message = self.message.strip_prefix(&word).unwrap_or(&self.message);
            self.message = format!("{field}: {message}");
            self.param = Some(field.to_string());
        }
        self
    }

    /// Something that failed here.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// A request that ran out of time.
    pub(crate) fn late() -> Self {
        let message = "the request took longer than this server allows";
        Problem::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message)
    }

    /// An error of writing a text whose request was fine, as far as could be told before: a grammar
    /// may turn out later to be one that cannot be followed.
    pub(crate) fn of_work(error: &delft::Error) -> Self {
        let message = error.to_string();
        match error.kind {
            ErrorKind::Unsupported => {
                Problem { param: Some(error.place.clone()), ..Problem::bad(message) }
            }
            ErrorKind::NoMemory | ErrorKind::Busy => {
                let status = StatusCode::SERVICE_UNAVAILABLE;
                let problem = Problem::new(status, "overloaded", message);
                Problem { retry_after: Some(5), ..problem }
            }
            _ => Problem::failed(message),
        }
    }

    /// The error's JSON in an interface's shape.
    pub(crate) fn to_json(&self, api: Api) -> Value {
        match api {
            Api::OpenAi => json!({ "error": {
                "message": self.message,
                "type": openai_type(self.status),
                "param": self.param,
                "code": self.code,
            } }),
            Api::Anthropic => {
                let kind = anthropic_type(self.status);
                let mut error = json!({ "type": kind, "message": self.message });
                if (self.code, self.param.as_deref()) == ("unsupported_field", Some("thread")) {
                    // The official clients send the conversation whole after this word.
                    let details = json!({ "error_code": "thread_unsupported_request", "unsupported": ["thread"] });
                    error["details"] = details;
                }
                json!({ "type": "error", "error": error })
            }
            Api::Ollama => json!({ "error": self.message }),
        }
    }

    /// The response in an interface's shape.
    pub(crate) fn response(&self, api: Api) -> Response {
        let mut headers = HeaderMap::new();
        if let Some(seconds) = self.retry_after {
            headers.insert(RETRY_AFTER, seconds.into());
        }
        (self.status, headers, axum::Json(self.to_json(api))).into_response()
    }
}

impl From<delft::Error> for Problem {
    /// An error of a prompt or a setting, which is the request's unless its kind says otherwise.
    fn from(error: delft::Error) -> Self {
        match error.kind {
            ErrorKind::Internal | ErrorKind::NoMemory | ErrorKind::Busy => Problem::of_work(&error),
            _ => Problem { param: Some(error.place.clone()), ..Problem::bad(error.to_string()) },
        }
    }
}

/// OpenAI counts unknown keys and unknown models to the requests that are wrong.
fn openai_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        403 => "permission_error",
        429 => "rate_limit_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    }
}

fn anthropic_type(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 | 529 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_interface_has_its_own_shape() {
        let problem = Problem::field("top_p", "expected 0 to 1, found 2").within("options");
        assert_eq!(
            problem.to_json(Api::OpenAi),
            json!({ "error": {
                "message": "options.top_p: expected 0 to 1, found 2",
                "type": "invalid_request_error",
                "param": "options.top_p",
                "code": "invalid_request",
            } })
        );
        assert_eq!(problem.to_json(Api::Anthropic)["error"]["type"], "invalid_request_error");
        assert_eq!(problem.to_json(Api::Anthropic)["error"]["details"], Value::Null);
        assert_eq!(problem.to_json(Api::Ollama)["error"], problem.message);
        let unknown = Problem::new(StatusCode::NOT_FOUND, "model_not_found", "no model");
        assert_eq!(unknown.to_json(Api::OpenAi)["error"]["type"], "invalid_request_error");
        assert_eq!(unknown.to_json(Api::Anthropic)["error"]["type"], "not_found_error");
        let threaded = Problem::field("thread", "not supported: nothing is stored");
        let threaded = Problem { code: "unsupported_field", ..threaded }.to_json(Api::Anthropic);
        assert_eq!(threaded["error"]["details"]["error_code"], "thread_unsupported_request");
        let paths = [
            ("/v1/messages", Api::Anthropic),
            ("/v1/messages/count_tokens", Api::Anthropic),
            ("/api/chat", Api::Ollama),
            ("/v1/models", Api::OpenAi),
            ("/tokenize", Api::OpenAi),
        ];
        for (path, api) in paths {
            assert_eq!(Api::of(path), api, "{path}");
        }
    }
}

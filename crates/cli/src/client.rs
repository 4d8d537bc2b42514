//! Asking a server that runs, for the commands that are about one.

use std::time::Duration;

use delft::Error;
use serde_json::Value;
use ureq::Agent;
use ureq::http::Response;

use crate::args::AddressArgs;
use crate::terminal::{Outcome, read_file};

/// Largest answer, in bytes.
const LARGEST: u64 = 256 << 20;

/// A server, and the key that it is asked with.
pub(crate) struct Client {
    agent: Agent,
    url: String,
    key: Option<String>,
}

/// The answer of a server.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) text: String,
}

impl Answer {
    /// The answer as JSON; its text as a string where it is none.
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| self.text.as_str().into())
    }
}

impl Client {
    pub(crate) fn new(args: &AddressArgs) -> Outcome<Client> {
        let file = args.api_key_file.as_deref().map(read_file).transpose()?;
        let first = |text: String| text.lines().next().unwrap_or_default().trim().to_string();
        let key = file.map(first).or_else(|| std::env::var("DELFT_API_KEY").ok());
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(10)))
            .proxy(None);
        let url = args.url.trim_end_matches('/').to_string();
        Ok(Client { agent: config.build().into(), url, key: key.filter(|key| !key.is_empty()) })
    }

    /// Asks for a path.
    pub(crate) fn get(&self, path: &str) -> Outcome<Answer> {
        let mut request = self.agent.get(format!("{}{path}", self.url));
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        self.read(request.call())
    }

    /// Sends a body to a path.
    pub(crate) fn post(&self, path: &str, body: &str, headers: &[(&str, &str)]) -> Outcome<Answer> {
        let mut request = self.agent.post(format!("{}{path}", self.url));
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.read(request.header("content-type", "application/json").send(body))
    }

    fn read(&self, answer: Result<Response<ureq::Body>, ureq::Error>) -> Outcome<Answer> {
        let wrong = |error: ureq::Error| {
            let found = match error {
                ureq::Error::Io(error) => error.to_string(),
                error => error.to_string(),
            };
            let error = Error::new(&self.url, "a server that answers", found);
            error.hint("delft serve starts one; --url names another address")
        };
        let mut answer = answer.map_err(wrong)?;
        let text =
            answer.body_mut().with_config().limit(LARGEST).read_to_string().map_err(wrong)?;
        Ok(Answer { status: answer.status().as_u16(), text })
    }

    /// The JSON of an answer that is none of an error.
    ///
    /// # Errors
    /// The server's own words, where it answers with an error.
    pub(crate) fn expect(&self, answer: &Answer) -> Outcome<Value> {
        let json = answer.json();
        if answer.status < 400 {
            return Ok(json);
        }
        let words = json["error"]["message"].as_str().or_else(|| json["error"].as_str());
        let words = words.map_or_else(|| answer.text.clone(), str::to_string);
        Err(Error::new(&self.url, "an answer", format!("{}: {words}", answer.status)).into())
    }
}

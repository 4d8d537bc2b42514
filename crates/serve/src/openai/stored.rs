//! Responses that are kept in memory, so that a conversation goes on by the id of its last one
//! (`previous_response_id`), and their own paths: `GET` and `DELETE /v1/responses/{id}`,
//! `/input_items` and `/cancel`.
//!
//! A response keeps the items of its own request and of its answer as JSON text, and the id of the
//! one before it. Their number and bytes are bounded: those that were not asked for for longest are
//! forgotten, and with the server's end all are.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::extract::{Path, RawQuery, State};
use axum::response::{IntoResponse, Response};
use hyper::StatusCode;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use serde_json::{Value, json};

use crate::fields::{Fields, Unknown, shown, wrong};
use crate::problem::{Api, Problem};
use crate::router::{Answered, App, noting};

use super::responses::REFERENCE;

/// Most responses that are kept.
const MOST: usize = 16_384;
/// Most bytes of them all.
const MOST_BYTES: usize = 64 << 20;
/// Most bytes of what one request goes on from or refers to: what is read takes a multiple of them.
const MOST_READ: usize = 16 << 20;

/// A response that is kept.
#[derive(Debug)]
pub(crate) struct Kept {
    /// The one that it goes on from.
    before: Option<String>,
    /// The items of its request, as a JSON list.
    input: String,
    /// The response, as a JSON object.
    response: String,
}

impl Kept {
    fn bytes(&self) -> usize {
        self.input.len() + self.response.len()
    }

    /// The items of its request, and the items of its answer.
    fn items(&self) -> [Vec<Value>; 2] {
        let read = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_default();
        let list = |value: Value| if let Value::Array(list) = value { list } else { Vec::new() };
        [list(read(&self.input)), list(read(&self.response)["output"].take())]
    }
}

/// All responses that a server keeps.
#[derive(Debug, Default)]
pub(crate) struct Stored(Mutex<All>);

#[derive(Debug, Default)]
struct All {
    /// Each with the number of its latest use.
    kept: HashMap<String, (u64, Arc<Kept>)>,
    /// Their ids by those numbers.
    uses: BTreeMap<u64, String>,
    next: u64,
    bytes: usize,
}

impl All {
    /// The response of an id, which counts as used now.
    fn touch(&mut self, id: &str) -> Option<Arc<Kept>> {
        let (used, kept) = self.kept.get_mut(id)?;
        let name = self.uses.remove(used)?;
        *used = self.next;
        self.uses.insert(self.next, name);
        self.next += 1;
        Some(kept.clone())
    }

    fn remove(&mut self, id: &str) -> Option<Arc<Kept>> {
        let (used, kept) = self.kept.remove(id)?;
        self.uses.remove(&used);
        self.bytes -= kept.bytes();
        Some(kept)
    }
}

impl Stored {
    fn all(&self) -> MutexGuard<'_, All> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a response to a request with these items, which goes on from the one of the id
    /// `before`.
    pub(crate) fn keep(&self, before: Option<String>, input: &[Value], response: &Value) {
        let Some(id) = response["id"].as_str() else { return };
        let input = Value::from(input.to_vec()).to_string();
        let kept = Kept { before, input, response: response.to_string() };
        let mut all = self.all();
        let used = all.next;
        all.next += 1;
        all.bytes += kept.bytes();
        all.uses.insert(used, id.to_string());
        all.kept.insert(id.to_string(), (used, Arc::new(kept)));
        while (all.kept.len() > MOST || all.bytes > MOST_BYTES)
            && let Some((_, oldest)) = all.uses.pop_first()
        {
            all.remove(&oldest);
        }
    }

    /// The responses of a conversation up to the one with an id, the latest first.
    ///
    /// # Errors
    /// A response that is not kept, or one before it that is not kept any more; a conversation that
    /// is too long.
    fn chain(&self, id: &str) -> Result<Vec<Arc<Kept>>, Problem> {
        let missing = |at: &str| {
            let message = if at == id {
                format!("there is no response {}: it was not stored, or is forgotten", shown(id))
            } else {
                format!("{}, which {} goes on from, is forgotten", shown(at), shown(id))
            };
            let problem = Problem::field("previous_response_id", message);
            Problem { code: "previous_response_not_found", ..problem }
        };
        let (mut chain, mut next, mut bytes) = (Vec::new(), Some(id.to_string()), 0);
        let mut all = self.all();
        while let Some(at) = next {
            let kept = all.touch(&at).ok_or_else(|| missing(&at))?;
            bytes += kept.bytes();
            if bytes > MOST_READ {
                let message = format!("expected a conversation of at most {MOST_READ} bytes");
                return Err(Problem::field("previous_response_id", message));
            }
            next = kept.before.clone();
            chain.push(kept);
        }
        Ok(chain)
    }

    /// The items of a conversation up to the response of an id and its answer, the oldest first.
    ///
    /// # Errors
    /// As [`Stored::chain`].
    pub(crate) fn conversation(&self, id: &str) -> Result<Vec<Value>, Problem> {
        let chain = self.chain(id)?;
        Ok(chain.iter().rev().flat_map(|kept| kept.items()).flatten().collect())
    }

    /// The bytes of a conversation up to the response of an id; 0 if it cannot be gone on with.
    pub(crate) fn size(&self, id: &str) -> usize {
        let bytes = |chain: Vec<Arc<Kept>>| chain.iter().map(|kept| kept.bytes()).sum();
        self.chain(id).map_or(0, bytes)
    }

    /// Puts kept items in the place of those that refer to them.
    ///
    /// # Errors
    /// An item that is not kept; references into too much of what is.
    pub(crate) fn refer(&self, items: &mut [Value], list: &str) -> Result<(), Problem> {
        let mut read: HashMap<String, [Vec<Value>; 2]> = HashMap::new();
        let mut bytes = 0;
        let refer = |item: &Value| item["type"] == REFERENCE;
        for (i, item) in items.iter_mut().enumerate().filter(|(_, item)| refer(item)) {
            let place = format!("{list}[{i}].id");
            let id = item["id"].as_str().unwrap_or_default();
            let response = id.split_once('_').and_then(|(_, rest)| rest.rsplit_once('_'));
            let response = response.map(|(response, _)| format!("resp_{response}"));
            if let Some(name) = response.as_ref().filter(|name| !read.contains_key(*name))
                && let Some(kept) = self.all().touch(name)
            {
                bytes += kept.bytes();
                if bytes > MOST_READ {
                    let message =
                        format!("expected items of at most {MOST_READ} bytes of responses");
                    return Err(Problem::field(&place, message));
                }
                read.insert(name.clone(), kept.items());
            }
            let kept = response.and_then(|name| read.get(&name));
            let mut kept = kept.into_iter().flatten().flatten();
            let found = kept.find(|item| item["id"] == id).cloned();
            *item = found.ok_or_else(|| {
                let message = "there is no item of this id: it was not stored, or is forgotten";
                Problem::field(&place, message)
            })?;
        }
        Ok(())
    }

    /// The response that a path names.
    fn find(&self, id: &str) -> Result<Arc<Kept>, Problem> {
        self.all().touch(id).ok_or_else(|| {
            let message = format!("there is no response {}", shown(id));
            Problem::new(StatusCode::NOT_FOUND, "response_not_found", message)
        })
    }
}

/// The items of a request as they are kept: each has an id and a type, and messages have their text
/// in parts.
pub(crate) fn normal(request: &str, items: &[Value]) -> Vec<Value> {
    let mut items = items.to_vec();
    for (i, item) in items.iter_mut().enumerate() {
        if !item["id"].is_string() {
            item["id"] = format!("in_{request}_{i}").into();
        }
        if item["type"].is_null() {
            item["type"] = "message".into();
        }
        if let Some(text) = item["content"].as_str().filter(|_| item["type"] == "message") {
            item["content"] = match item["role"].as_str() {
                Some("assistant") => json!([{
                    "type": "output_text", "text": text, "annotations": [], "logprobs": [],
                }]),
                _ => json!([{ "type": "input_text", "text": text }]),
            };
        }
        if item["type"] == "message" && item["status"].is_null() {
            item["status"] = "completed".into();
        }
    }
    items
}

/// Answers a request that has no body, in OpenAI's shape.
fn answered(answer: Answered) -> Response {
    answer.unwrap_or_else(|problem| problem.response(Api::OpenAi))
}

/// The settings of a query, of which these are read; others are noted.
fn query(query: Option<String>, read: &[&str]) -> Result<Fields, Problem> {
    let fields = Fields::check(serde_json::Map::new(), &[], Unknown::Refused)?;
    let given = query.unwrap_or_default();
    for (name, value) in given.split('&').filter_map(|setting| setting.split_once('=')) {
        let name = name.trim_end_matches("[]").trim_end_matches("%5B%5D");
        if name == "stream" && value != "false" || name == "starting_after" {
            let message = "not supported: an answer that is whole does not stream again";
            return Err(Problem::field(name, message));
        }
        if !read.contains(&name) && name != "stream" {
            fields.note(&shown(name));
        }
    }
    Ok(fields)
}

/// A setting of a query.
fn setting<'a>(query: Option<&'a str>, name: &str) -> Option<&'a str> {
    let mut settings = query?.split('&').filter_map(|setting| setting.split_once('='));
    settings.find(|(own, _)| *own == name).map(|(_, value)| value)
}

/// `GET /v1/responses/{id}`.
pub(crate) async fn retrieve(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    RawQuery(given): RawQuery,
) -> Response {
    answered((|| {
        let fields = query(given, &[])?;
        let response = app.responses.find(&id)?.response.clone();
        let json = (CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(noting(&fields, ([json], response)))
    })())
}

/// `DELETE /v1/responses/{id}`.
pub(crate) async fn delete(State(app): State<Arc<App>>, Path(id): Path<String>) -> Response {
    answered(app.responses.find(&id).map(|_| {
        app.responses.all().remove(&id);
        axum::Json(json!({ "id": id, "object": "response", "deleted": true })).into_response()
    }))
}

/// `POST /v1/responses/{id}/cancel`: whoever asked for the response waited for it.
pub(crate) async fn cancel(State(app): State<Arc<App>>, Path(id): Path<String>) -> Response {
    answered(app.responses.find(&id).and_then(|_| {
        Err(Problem::bad(
            "only responses in the background can be cancelled, and this one is whole",
        ))
    }))
}

/// `GET /v1/responses/{id}/input_items`: what the model read, the latest first unless the order is
/// `asc`.
pub(crate) async fn input_items(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    RawQuery(given): RawQuery,
) -> Response {
    answered((|| {
        let text = |name: &str| setting(given.as_deref(), name);
        let limit = match text("limit") {
            None => 20,
            Some(text) => match text.parse().ok().filter(|limit| (1..=100).contains(limit)) {
                Some(limit) => limit,
                None => return Err(wrong("limit", "a whole number from 1 to 100", &text.into())),
            },
        };
        let ascending = match text("order") {
            None | Some("desc") => false,
            Some("asc") => true,
            Some(other) => return Err(wrong("order", "asc or desc", &other.into())),
        };
        let fields = query(given.clone(), &["limit", "order", "after"])?;
        let kept = app.responses.find(&id)?;
        let [input, _] = kept.items();
        let before = kept.before.as_deref().map(|before| app.responses.conversation(before));
        let mut items = before.transpose()?.unwrap_or_default();
        items.extend(input);
        if !ascending {
            items.reverse();
        }
        if let Some(after) = text("after") {
            let Some(at) = items.iter().position(|item| item["id"] == after) else {
                return Err(wrong("after", "the id of one of the items", &after.into()));
            };
            items.drain(..=at);
        }
        let more = items.len() > limit;
        items.truncate(limit);
        let end = |item: Option<&Value>| item.map(|item| item["id"].clone());
        let (first, last) = (end(items.first()), end(items.last()));
        let list = json!({
            "object": "list", "data": items, "first_id": first, "last_id": last, "has_more": more,
        });
        Ok(noting(&fields, axum::Json(list)))
    })())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(id: usize, length: usize) -> Value {
        json!({ "id": format!("resp_{id}"), "output": [{ "id": format!("msg_{id}_0"),
            "type": "message", "role": "assistant", "content": "x".repeat(length) }] })
    }

    #[test]
    fn what_is_kept_is_bounded_and_the_latest_stays() {
        let stored = Stored::default();
        let user = [json!({ "role": "user", "content": "?" })];
        stored.keep(None, &user, &response(0, 1));
        let length = 1 << 20;
        for id in 1..100 {
            // The first is asked for again and again.
            assert!(stored.find("resp_0").is_ok());
            stored.keep(Some("resp_0".to_string()), &user, &response(id, length));
        }
        let (bytes, count) = {
            let all = stored.all();
            (all.bytes, all.kept.len())
        };
        assert!(bytes <= MOST_BYTES && (62..=64).contains(&count), "{bytes} bytes of {count}");
        assert_eq!(stored.find("resp_1").unwrap_err().status, StatusCode::NOT_FOUND);
        let items = stored.conversation("resp_99").unwrap();
        let roles: Vec<_> = items.iter().map(|item| item["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["user", "assistant", "user", "assistant"]);
        let refer = |id: &str| {
            let mut items = [json!({ "type": "item_reference", "id": id }), json!({ "type": "x" })];
            stored.refer(&mut items, "input").map(|()| items[0]["role"].clone())
        };
        assert_eq!(refer("msg_99_0").unwrap(), "assistant");
        for id in ["msg_1_0", "msg_99_1", "msg", ""] {
            assert!(refer(id).unwrap_err().message.starts_with("input[0].id: there is no"), "{id}");
        }

        // What one request reads is bounded as well.
        assert!(stored.size("resp_99") > length && stored.size("resp_1") == 0);
        let mut last = "resp_99".to_string();
        for id in 100..120 {
            stored.keep(Some(last), &user, &response(id, length));
            last = format!("resp_{id}");
        }
        let long = stored.conversation(&last).unwrap_err();
        assert!(long.message.contains("at most 16777216 bytes"), "{long:?}");
        let all_of =
            (100..120).map(|id| json!({ "type": "item_reference", "id": format!("msg_{id}_0") }));
        let long = stored.refer(&mut all_of.collect::<Vec<_>>(), "input").unwrap_err();
        assert!(long.message.contains("at most 16777216 bytes"), "{long:?}");

        // What one that is there goes on from may be gone.
        stored.all().remove("resp_0");
        let problem = stored.conversation("resp_99").unwrap_err();
        assert!(problem.message.contains("resp_0, which resp_99 goes on from"), "{problem:?}");
        for id in 2..120 {
            stored.all().remove(&format!("resp_{id}"));
        }
        let all = stored.all();
        assert_eq!((all.bytes, all.kept.len(), all.uses.len()), (0, 0, 0));
    }
}

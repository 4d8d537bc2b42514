//! Responses that are kept: conversations go on by the id of their last one.

use crate::common::{Response, get, limits, post, receive, send, serve, shared};
use delft_serve::AccessRules;
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";

fn ask(extra: Value) -> Response {
    let mut body = json!({ "max_output_tokens": 8, "temperature": 0 });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    post(shared(), PATH, &body)
}

fn text(response: &Value) -> &str {
    response["output"][0]["content"][0]["text"].as_str().unwrap()
}

fn delete(path: &str) -> Response {
    receive(send(shared(), "DELETE", path, &[], ""))
}

#[test]
fn a_conversation_goes_on_by_the_id_of_its_last_response() {
    let first = ask(json!({ "input": "Tell me a story", "instructions": "Be kind." })).json();
    assert_eq!((&first["store"], &first["previous_response_id"]), (&json!(true), &Value::Null));
    let id = first["id"].as_str().unwrap();
    // The same, whole: instructions are those of each request alone.
    let said = json!({ "role": "assistant", "content": text(&first) });
    let turns = json!([
        { "role": "user", "content": "Tell me a story" }, said, { "role": "user", "content": "Go on" },
    ]);
    let whole = ask(json!({ "input": turns })).json();
    let extra = json!({ "input": "Go on", "previous_response_id": id });
    let second = ask(extra.clone()).json();
    assert_eq!(text(&second), text(&whole));
    assert_eq!(second["usage"]["input_tokens"], whole["usage"]["input_tokens"]);
    assert_eq!(second["previous_response_id"], id);
    let mut streamed = extra.clone();
    streamed["stream"] = true.into();
    let events = ask(streamed).events();
    let last = &events.last().unwrap()["response"];
    assert_eq!(text(last), text(&whole));
    // One that came as a stream is kept as well.
    let third = ask(json!({ "input": "And?", "previous_response_id": last["id"] }));
    assert_eq!(third.status, 200, "{third:?}");
    assert!(third.header("x-delft-no-effect").is_none(), "{third:?}");

    // Nothing is to be added where there is something to go on from.
    for body in
        [json!({ "previous_response_id": id }), json!({ "previous_response_id": id, "input": [] })]
    {
        assert_eq!(ask(body.clone()).status, 200, "{body}");
    }
    assert_eq!(ask(json!({})).json()["error"]["param"], "input");

    // An item by its id.
    let reference = json!({ "type": "item_reference", "id": first["output"][0]["id"] });
    let by_id = json!([turns[0], reference, turns[2]]);
    assert_eq!(text(&ask(json!({ "input": by_id })).json()), text(&whole));

    let mut counted = json!({ "input": "Go on", "previous_response_id": id });
    let count = |body: &Value| post(shared(), "/v1/responses/input_tokens", body).json();
    assert_eq!(count(&counted)["input_tokens"], whole["usage"]["input_tokens"]);
    counted["max_output_tokens"] = 4.into();
    assert_eq!(count(&counted)["error"]["code"], "unknown_field");
}

#[test]
fn responses_are_retrieved_and_deleted() {
    let first = ask(json!({ "input": "Tell me a story" })).json();
    let id = first["id"].as_str().unwrap();
    let path = format!("{PATH}/{id}");
    let found = get(shared(), &path);
    assert_eq!((found.status, found.json()), (200, first.clone()));
    assert_eq!(found.header("content-type"), Some("application/json"));
    let second = ask(json!({ "input": "Go on", "previous_response_id": id })).json();

    let items = |query: &str| {
        let path = format!("{PATH}/{}/input_items{query}", second["id"].as_str().unwrap());
        get(shared(), &path).json()
    };
    let all = items("?order=asc");
    let told: Vec<&str> =
        (0..3).map(|i| all["data"][i]["content"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(told, ["Tell me a story", text(&first), "Go on"], "{all}");
    assert_eq!(all["has_more"], false);
    let page = items("?limit=1");
    assert_eq!((&page["data"][0], &page["has_more"]), (&all["data"][2], &json!(true)));
    let next = items(&format!("?limit=1&after={}", page["last_id"].as_str().unwrap()));
    assert_eq!(next["data"][0], all["data"][1]);
    assert!(items("?limit=0")["error"]["message"].as_str().unwrap().starts_with("limit: expected"));

    let again = get(shared(), &format!("{path}?stream=true")).json();
    assert!(again["error"]["message"].as_str().unwrap().starts_with("stream: not"), "{again}");
    let noted = get(shared(), &format!("{path}?include[]=message.output_text.logprobs"));
    assert_eq!(noted.header("x-delft-no-effect"), Some("include"));
    let cancelled = post(shared(), &format!("{path}/cancel"), &json!({}));
    assert_eq!(cancelled.status, 400, "{cancelled:?}");

    assert_eq!(delete(&path).json(), json!({ "id": id, "object": "response", "deleted": true }));
    assert_eq!((delete(&path).status, get(shared(), &path).status), (404, 404));
    for (previous, place) in [(&first, "there is no response"), (&second, "goes on from")] {
        let gone = ask(json!({ "input": "And?", "previous_response_id": previous["id"] }));
        let error = gone.json()["error"].clone();
        assert_eq!(gone.status, 400, "{error}");
        assert_eq!(error["code"], "previous_response_not_found");
        assert!(error["message"].as_str().unwrap().contains(place), "{error}");
    }
    // One that is not to be stored is not.
    let unkept = ask(json!({ "input": "Tell me a story", "store": false })).json();
    assert_eq!(unkept["store"], false);
    let path = format!("{PATH}/{}", unkept["id"].as_str().unwrap());
    assert_eq!(get(shared(), &path).status, 404);
}

/// Whoever may not ask hears of no response either.
#[test]
fn kept_responses_need_the_key() {
    let access = AccessRules { keys: vec!["secret".into()], ..AccessRules::default() };
    let guarded = serve(limits(), access);
    let key = [("Authorization", "Bearer secret")];
    let body = json!({ "input": "Hi", "max_output_tokens": 2 }).to_string();
    let asked = receive(send(guarded.address(), "POST", PATH, &key, &body)).json();
    let path = format!("{PATH}/{}", asked["id"].as_str().unwrap());
    assert_eq!(get(guarded.address(), &path).status, 401);
    assert_eq!(receive(send(guarded.address(), "GET", &path, &key, "")).status, 200);
    guarded.stop().unwrap();
}

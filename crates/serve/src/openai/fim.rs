//! `/v1/fim/completions`: Mistral's path for gaps in texts, which Continue and other editors ask
//! of servers of OpenAI's kind. The prompt is made as for `suffix` of completions; the text is told
//! as a chat's answer.

use axum::response::IntoResponse;
use serde_json::{Value, json};

use super::{EXTENSIONS, Head, finish_reason, stream, streams, usage};
use crate::catalogue::Held;
use crate::fields::{Field, Fields, Unknown, no_effect, used};
use crate::generation::{Done, Event, Work};
use crate::infill;
use crate::problem::Problem;
use crate::reply::{Answer, Reply, Usage};
use crate::router::{Answered, Call, noting, telling};
use crate::settings;
use crate::stream::{Framing, Gone, Sender, Shape, response};

/// The documented fields, and those that Continue sends besides.
pub(crate) const FIELDS: &[Field] = &[
    used("model"),
    used("prompt"),
    used("suffix"),
    used("frequency_penalty"),
    used("max_tokens"),
    used("presence_penalty"),
    used("random_seed"),
    used("stop"),
    used("stream"),
    used("stream_options"),
    used("temperature"),
    used("top_p"),
    no_effect("metadata"),
    no_effect("prompt_cache_key"),
];

/// A request that is understood.
struct Ask {
    model: Held,
    fields: Fields,
    work: Work,
    streams: bool,
}

pub(crate) async fn answer(call: Call) -> Answered {
    let fields = call.fields(&[FIELDS, EXTENSIONS], Unknown::Refused).await?;
    let model = call.model(&fields).await?;
    let Ask { model, fields, work, streams } = call.reading(|| read(&call, fields, model)).await?;
    let generating = model.generator.start(vec![work], &call.trail).await?;
    if streams {
        let writer = Writer(Head::new(&call, "cmpl", "chat.completion.chunk", &model));
        let streamed = response(Framing::Events, |sender| async move {
            stream(&sender, generating, writer, |_| None).await
        });
        return Ok(noting(&fields, streamed));
    }
    let answer = Answer::of(generating, &mut Reply::plain()).await?;
    let mut object = Head::new(&call, "cmpl", "chat.completion", &model).with(json!([{
        "index": 0,
        "message": { "role": "assistant", "content": answer.content, "tool_calls": null },
        "finish_reason": answer.finish().map(finish_reason),
    }]));
    answer.end.iter().for_each(|done| tell(done, &mut object));
    let told = noting(&fields, axum::Json(object).into_response());
    Ok(telling(answer.end.as_ref(), told))
}

fn read(call: &Call, fields: Fields, model: Held) -> Result<Ask, Problem> {
    let mut options = settings::options(&model, &fields, call.seed())?;
    options.max_tokens = settings::most_tokens(&fields, "max_tokens", 0)?;
    let (streams, _) = streams(&fields)?;
    let before = fields.needed("prompt", fields.text("prompt")?)?;
    let suffix = fields.text("suffix")?.filter(|suffix| !suffix.is_empty());
    let prompt = match suffix {
        None => model.encode_text(before)?,
        Some(suffix) => {
            let (marks, tokenizer) = (model.infill("suffix")?, model.tokenizer()?);
            marks.bound(&mut options);
            let before = infill::encode(&model, before, true)?;
            marks.prompt(tokenizer, &[], &before, &infill::encode(&model, suffix, false)?)
        }
    };
    model.check(&prompt)?;
    Ok(Ask { model, fields, work: Work { prompt, options }, streams })
}

/// Tells at the end of a text what it took, and what of its prompt was found computed.
fn tell(done: &Done, object: &mut Value) {
    let mut total = Usage::default();
    total.add(&done.metrics, 0, true);
    object["usage"] = usage(total);
    done.note_closing(&mut object["choices"][0]);
    done.tell_cache(object);
}

/// Writes a stream of chunks, of which the last has the usage.
struct Writer(Head);

impl Writer {
    fn chunk(&self, text: &str, finish: Option<&str>) -> Value {
        let delta = json!({ "role": "assistant", "content": text });
        self.0.with(json!([{ "index": 0, "delta": delta, "finish_reason": finish }]))
    }
}

impl Shape for Writer {
    async fn event(&mut self, sender: &Sender, _: usize, event: Event) -> Result<(), Gone> {
        match event {
            Event::Token(token) if token.text.is_empty() => Ok(()),
            Event::Token(token) => sender.send(&self.chunk(&token.text, None)).await,
            Event::Done(done) => {
                let mut chunk = self.chunk("", Some(finish_reason(&done.finish)));
                tell(&done, &mut chunk);
                sender.send(&chunk).await
            }
        }
    }
}

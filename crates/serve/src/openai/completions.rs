//! `/v1/completions`: texts that are continued as they stand.

use axum::response::IntoResponse;
use serde_json::{Value, json};

use super::{
    EXTENSIONS, Head, collect, finish_reason, stream, streams, tell_cache, usage, variants,
};
use crate::catalogue::Held;
use crate::demand::{Asked, GRAMMARS};
use crate::fields::{Field, Fields, Unknown, no_effect, used, wrong};
use crate::generation::{Done, Event, Work};
use crate::infill;
use crate::logprobs::Lists;
use crate::models::Model;
use crate::problem::Problem;
use crate::reply::{Answer, Reply, Usage};
use crate::router::{Answered, Call, noting, telling};
use crate::settings;
use crate::stream::{Framing, Gone, Sender, Shape, response};

/// The documented fields.
pub(crate) const FIELDS: &[Field] = &[
    used("model"),
    used("prompt"),
    used("best_of"),
    used("echo"),
    used("frequency_penalty"),
    used("logit_bias"),
    used("logprobs"),
    used("max_tokens"),
    used("n"),
    used("presence_penalty"),
    used("seed"),
    used("stop"),
    used("stream"),
    used("stream_options"),
    used("suffix"),
    used("temperature"),
    used("top_p"),
    no_effect("user"),
];

/// Tokens of a text where the request does not say how many, as OpenAI documents it.
const USUAL_TOKENS: usize = 16;
/// Most texts of one request.
const MOST_TEXTS: usize = 128;
/// Most likeliest tokens that are told with each.
const MOST_LIKELIEST: i64 = 5;

/// A request that is understood.
struct Ask {
    model: Held,
    fields: Fields,
    work: Vec<Work>,
    /// Texts of each prompt.
    n: usize,
    /// Texts of each prompt that are written, of which the `n` likeliest are told.
    best: usize,
    /// The prompts that are put in front of the texts, if the request asks for that.
    echoes: Vec<String>,
    /// The likeliest tokens to tell with each token of the prompts; `None` if no log-probabilities
    /// of those are asked for.
    scored: Option<usize>,
    streams: bool,
    with_usage: bool,
    logprobs: bool,
}

pub(crate) async fn answer(call: Call) -> Answered {
    let fields = call.fields(&[FIELDS, EXTENSIONS, GRAMMARS], Unknown::Refused).await?;
    let model = call.model(&fields).await?;
    let ask = call.reading(|| read(&call, fields, model)).await?;
    let model = ask.model.clone();
    let mut head = Head::new(&call, "cmpl", "text_completion", &model);
    let mut lists: Vec<Lists> = ask.work.iter().map(|_| Lists::default()).collect();
    if let Some(top) = ask.scored {
        let prompts = ask.work.chunks(ask.best).zip(ask.echoes.chunks(ask.best));
        for (lists, (work, echoes)) in lists.chunks_mut(ask.best).zip(prompts) {
            let mut tokens = model.generator.score(&work[0].prompt, top).await?;
            // A token that begins every text is no part of this one.
            let first = tokens.first_mut().filter(|first| !echoes[0].starts_with(&first.text));
            first.into_iter().for_each(|first| first.text.clear());
            for lists in lists {
                tokens.iter().for_each(|token| lists.add(model.engine.tokenizer(), token));
            }
        }
    }
    let replies: Vec<Reply> = ask.work.iter().map(|_| Reply::plain()).collect();
    let generating = model.generator.start(ask.work, &call.trail).await?;
    if ask.streams {
        let Ask { n, echoes, with_usage, logprobs, .. } = ask;
        head.usage_follows = with_usage;
        let (total, first) = (Usage::default(), None);
        let mut writer = Writer { head, model, n, logprobs, lists, total, first };
        let streamed = response(Framing::Events, |sender| async move {
            writer.begin(&sender, &echoes).await?;
            let usage = |writer: Writer| with_usage.then(|| writer.usage());
            stream(&sender, generating, writer, usage).await
        });
        return Ok(noting(&ask.fields, streamed));
    }
    let mut answers = collect(generating, replies).await?;
    let mut total = Usage::default();
    for (index, answer) in answers.iter().enumerate() {
        total.add(&answer.metrics(), 0, index.is_multiple_of(ask.best));
    }
    let mut echoes = ask.echoes;
    if ask.best > ask.n {
        let texts = answers.into_iter().zip(lists).zip(echoes).collect();
        ((answers, lists), echoes) = likeliest(texts, ask.best, ask.n).into_iter().unzip();
    }
    let mut choices = Vec::new();
    for (index, (answer, echo)) in answers.iter().zip(&echoes).enumerate() {
        let finish = answer.finish().map(finish_reason);
        let lists = &mut lists[index];
        answer.tokens.iter().for_each(|token| lists.add(model.engine.tokenizer(), token));
        let logprobs = ask.logprobs.then(|| lists.take());
        let mut choice = json!({
            "index": index,
            "text": format!("{echo}{}", answer.content),
            "logprobs": logprobs,
            "finish_reason": finish,
        });
        answer.end.iter().for_each(|done| done.note_closing(&mut choice));
        choices.push(choice);
    }
    let mut object = head.with(choices.into());
    object["usage"] = usage(total);
    tell_cache(&mut object, &answers);
    let told = noting(&ask.fields, axum::Json(object).into_response());
    Ok(telling(answers.first().and_then(|answer| answer.end.as_ref()), told))
}

/// The `n` texts of each `best` whose tokens are likeliest on average, the likeliest first.
fn likeliest<T>(
    mut texts: Vec<((Answer, Lists), T)>,
    best: usize,
    n: usize,
) -> Vec<((Answer, Lists), T)> {
    let average = |answer: &Answer| {
        let sum: f32 = answer.tokens.iter().filter_map(|token| token.logprob).sum();
        sum / answer.tokens.len().max(1) as f32
    };
    let mut kept = Vec::new();
    while !texts.is_empty() {
        let mut own: Vec<_> = texts.drain(..best.min(texts.len())).collect();
        own.sort_by(|((a, _), _), ((b, _), _)| average(b).total_cmp(&average(a)));
        own.truncate(n);
        kept.extend(own);
    }
    kept
}

fn read(call: &Call, fields: Fields, model: Held) -> Result<Ask, Problem> {
    let mut options = settings::options(&model, &fields, call.seed())?;
    options.max_tokens = match fields.value("max_tokens") {
        None => Some(USUAL_TOKENS),
        Some(_) => settings::most_tokens(&fields, "max_tokens", 0)?,
    };
    if let Some(top) = fields.whole("logprobs", 0..=MOST_LIKELIEST)? {
        (options.logprobs, options.top_logprobs) = (true, top as usize);
    }
    let n = fields.whole("n", 1..=MOST_TEXTS as i64)?.unwrap_or(1);
    let best = fields.whole("best_of", 1..=MOST_TEXTS as i64)?.unwrap_or(n);
    let (streams, with_usage) = streams(&fields)?;
    if best < n {
        return Err(wrong("best_of", format!("at least as many as n, {n}"), &best.into()));
    }
    if best > n && streams {
        let message = "not supported beside \"stream\": true: which are best is known at their end";
        return Err(Problem::field("best_of", message));
    }
    let (n, best) = (n as usize, best as usize);
    let echo = fields.flag("echo")?.unwrap_or(false);
    let scored = (echo && options.logprobs).then_some(options.top_logprobs);
    let suffix = fields.text("suffix")?.filter(|suffix| !suffix.is_empty());
    let mut prompts = prompts(&model, &fields, suffix.is_some())?;
    if let Some(suffix) = suffix {
        if echo {
            return Err(Problem::field("echo", "not supported beside a suffix"));
        }
        let (marks, tokenizer) = (model.infill("suffix")?, model.tokenizer()?);
        let after = infill::encode(&model, suffix, false)?;
        for (prompt, _) in &mut prompts {
            *prompt = marks.prompt(tokenizer, &[], prompt, &after);
        }
        marks.bound(&mut options);
    }
    Asked::completions(&fields)?.constrain(&model, &[], false, &mut options)?;
    if prompts.len() * best > MOST_TEXTS {
        let found = prompts.len() * best;
        let message = format!("expected at most {MOST_TEXTS} texts, found {found}");
        return Err(Problem::field("prompt", message));
    }
    let logprobs = options.logprobs;
    options.logprobs |= best > n;
    let (mut work, mut echoes) = (Vec::new(), Vec::new());
    for (tokens, text) in prompts {
        model.check(&tokens)?;
        for options in variants(&options, best) {
            work.push(Work { prompt: tokens.clone(), options });
            echoes.push(if echo { text.clone() } else { String::new() });
        }
    }
    Ok(Ask { model, fields, work, n, best, echoes, scored, streams, with_usage, logprobs })
}

/// Each prompt's tokens and text: a string, a list of strings, tokens, or a list of lists of
/// tokens. `marked` texts have marks in front of them, and not what begins a text.
fn prompts(
    model: &Model,
    fields: &Fields,
    marked: bool,
) -> Result<Vec<(Vec<u32>, String)>, Problem> {
    let expected = "a string, a list of strings, token ids, or a list of lists of token ids";
    let of_text = |text: &str| {
        let encoded =
            if marked { infill::encode(model, text, true) } else { model.encode_text(text) };
        Ok((encoded?, text.to_string()))
    };
    let of_tokens = |list: &[Value]| {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids: Option<Vec<u32>> = list.iter().map(id).collect();
        let ids = ids.ok_or_else(|| wrong("prompt", expected, &Value::from(list.to_vec())))?;
        let text = model.engine.tokenizer().map(|tokenizer| tokenizer.decode(&ids, false));
        Ok((ids, text.unwrap_or_default()))
    };
    match fields.needed("prompt", fields.value("prompt"))? {
        Value::String(text) => Ok(vec![of_text(text)?]),
        Value::Array(list) if list.first().is_some_and(Value::is_number) => {
            Ok(vec![of_tokens(list)?])
        }
        Value::Array(list) if !list.is_empty() && list.len() <= MOST_TEXTS => list
            .iter()
            .map(|item| match item {
                Value::String(text) => of_text(text),
                Value::Array(list) => of_tokens(list),
                other => Err(wrong("prompt", expected, other)),
            })
            .collect(),
        other => Err(wrong("prompt", expected, other)),
    }
}

/// Writes a stream of chunks.
struct Writer {
    head: Head,
    model: Held,
    n: usize,
    logprobs: bool,
    /// The log-probabilities of each text, as far as they have not been sent.
    lists: Vec<Lists>,
    total: Usage,
    /// How the first text ended.
    first: Option<Done>,
}

impl Shape for Writer {
    async fn event(&mut self, sender: &Sender, index: usize, event: Event) -> Result<(), Gone> {
        match event {
            Event::Token(token) => {
                let logprobs = self.logprobs.then(|| {
                    self.lists[index].add(self.model.engine.tokenizer(), &token);
                    self.lists[index].take()
                });
                if token.text.is_empty() && logprobs.is_none() {
                    return Ok(());
                }
                sender.send(&self.chunk(index, &token.text, logprobs, None)).await
            }
            Event::Done(done) => {
                self.total.add(&done.metrics, 0, index.is_multiple_of(self.n));
                let reason = finish_reason(&done.finish);
                let mut chunk = self.chunk(index, "", None, Some(reason));
                done.note_closing(&mut chunk["choices"][0]);
                done.tell_cache(&mut chunk);
                if index == 0 {
                    self.first = Some(done);
                }
                sender.send(&chunk).await
            }
        }
    }
}

impl Writer {
    /// Sends the prompts that are put in front.
    async fn begin(&mut self, sender: &Sender, echoes: &[String]) -> Result<(), Gone> {
        for (index, echo) in echoes.iter().enumerate().filter(|(_, echo)| !echo.is_empty()) {
            let logprobs = self.logprobs.then(|| self.lists[index].take());
            sender.send(&self.chunk(index, echo, logprobs, None)).await?;
        }
        Ok(())
    }

    fn usage(&self) -> Value {
        let mut object = self.head.with(json!([]));
        object["usage"] = usage(self.total);
        self.first.iter().for_each(|done| done.tell_cache(&mut object));
        object
    }

    fn chunk(
        &self,
        index: usize,
        text: &str,
        logprobs: Option<Value>,
        finish: Option<&str>,
    ) -> Value {
        self.head.with(json!([{
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish,
        }]))
    }
}

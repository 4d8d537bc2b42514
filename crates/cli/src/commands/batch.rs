//! `delft batch`: a file of requests, answered in order and computed together.
//!
//! A line is a request body as OpenAI's APIs take it, or a line of its batch files (`custom_id`,
//! `body`), which is answered in the shape of their results. A line that cannot be answered is
//! answered with its error. With `--output` a batch that was interrupted goes on behind the last
//! whole answer.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use delft::formats::text;
use delft::structured::Grammar;
use delft::{Engine, Error, Finish, GenerateOptions, Generating, Metrics, Prompt, Request, Token};
use indicatif::ProgressBar;
use serde_json::{Map, Value, json};

use crate::args::{Batch, LoadArgs};
use crate::grammar::Maker;
use crate::progress::style;
use crate::terminal::{Outcome, Stop, aside, stderr_is_terminal};
use crate::words::needed;
use crate::{interrupt, load, logprobs, sampling};

/// Requests that are handed to the engine before the first of them is answered.
const AHEAD: usize = 64;

/// Bytes of the longest line that is read; a longer one is an error.
const LONGEST: u64 = 64 << 20;

pub(crate) fn run(args: &Batch) -> Outcome {
    let name = needed(&args.file, "batch", "a file of requests, one JSON object a line")?;
    let mut lines = Lines::open(name)?;
    let mut output = Output::open(args.output.as_deref())?;
    // Earlier answers are checked against the requests first: a mistaken file is refused before a
    // model is loaded.
    let answered = output.skip(&mut lines)?;
    let grammar = args.grammar.read()?;
    let load = LoadArgs { together: true, ..args.load.clone() };
    let (engine, _) = load::engine(&load, false)?;
    let options = sampling::options(&engine, &args.sampling)?;
    let generating = interrupt::Generating::begin();
    let options = GenerateOptions { cancel: generating.0.clone(), ..options };
    let maker = Maker::new(&engine, engine.chat_template());
    let asker = Asker { engine: &engine, maker, grammar };
    let mut tally = Tally::new(answered);
    let mut waiting: VecDeque<Waiting> = VecDeque::new();
    loop {
        while waiting.len() < AHEAD
            && !options.cancel.is_cancelled()
            && let Some(line) = lines.next()?
        {
            waiting.push_back(Waiting::begin(&asker, line, &options));
        }
        let Some(mut first) = waiting.pop_front() else { break };
        let answer = first.answer(&mut |_| tally.show(&waiting));
        if options.cancel.is_cancelled() {
            break;
        }
        tally.add(&answer);
        output.write(&first.line.shape(&engine, answer))?;
    }
    tally.end();
    if options.cancel.is_cancelled() { Err(Stop::Interrupted) } else { Ok(()) }
}

/// The lines of a file that say something.
struct Lines {
    name: String,
    reader: Box<dyn BufRead>,
    number: usize,
}

/// One of them.
struct Line {
    /// Counted from 1, blank lines too.
    number: usize,
    /// Its JSON, or why it cannot be parsed.
    content: Result<Value, Error>,
}

impl Lines {
    fn open(name: &str) -> Outcome<Lines> {
        let reader: Box<dyn BufRead> = if name == "-" {
            Box::new(BufReader::new(std::io::stdin()))
        } else {
            let file = File::open(name).map_err(|e| Error::new(name, "a readable file", e))?;
            Box::new(BufReader::new(file))
        };
        Ok(Lines { name: name.to_string(), reader, number: 0 })
    }

    fn next(&mut self) -> Outcome<Option<Line>> {
        loop {
            let number = self.number + 1;
            let place = format!("{}: line {number}", self.name);
            let Some(bytes) = text::line(&mut self.reader, &place, LONGEST)? else {
                return Ok(None);
            };
            self.number = number;
            if bytes.iter().all(u8::is_ascii_whitespace) {
                continue;
            }
            // Some programs begin files with a mark of the order of bytes.
            let mark = "\u{feff}".as_bytes();
            let text =
                bytes.strip_prefix(mark).filter(|_| number == 1).unwrap_or(&bytes).trim_ascii_end();
            let content = serde_json::from_slice(text).map_err(|error| {
                let (said, column) = (error.to_string(), error.column());
                let (said, _) = said.rsplit_once(" at line ").unwrap_or((&said, ""));
                let found = format!("no valid JSON: {said} at column {column}");
                Error::new(format!("line {number}"), "a JSON object", found)
            });
            return Ok(Some(Line { number, content }));
        }
    }
}

/// Why a line is not answered.
#[derive(Debug, Clone)]
struct Refusal(String);

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal(error.to_string())
    }
}

/// The outcome of a request.
struct Answer {
    result: Result<Text, Refusal>,
    metrics: Metrics,
}

/// The answer to a request.
struct Text {
    text: String,
    finish: Finish,
    /// Its tokens, where their log-probabilities are wanted; an end token, which has no text, is
    /// not among them.
    told: Option<Vec<Token>>,
}

impl Line {
    /// The `custom_id`, where there is one.
    fn id(&self) -> Option<&Value> {
        self.content.as_ref().ok()?.get("custom_id")
    }

    /// Whether it is a line of OpenAI's batch files.
    fn is_batch(&self) -> bool {
        self.content.as_ref().is_ok_and(|line| line.get("body").is_some())
    }

    /// The request body.
    fn body(&self) -> Result<&Map<String, Value>, Error> {
        let line = self.content.as_ref().map_err(Clone::clone)?;
        let object = |value: &'_ Value| Error::new(self.place(), "a JSON object", kind(value));
        let outer = line.as_object().ok_or_else(|| object(line))?;
        let Some(body) = outer.get("body") else { return Ok(outer) };
        for (key, value) in outer {
            let known = match key.as_str() {
                "custom_id" | "body" => true,
                "method" => value == "POST",
                "url" => value == "/v1/chat/completions" || value == "/v1/completions",
                _ => false,
            };
            if !known {
                let expected =
                    "custom_id, method POST, url /v1/chat/completions or /v1/completions, body";
                return Err(Error::new(self.place(), expected, format!("{key}: {value}")));
            }
        }
        body.as_object().ok_or_else(|| object(body))
    }

    fn place(&self) -> String {
        format!("line {}", self.number)
    }

    /// Whether it is a conversation that is to be continued.
    fn chats(&self) -> bool {
        self.body().is_ok_and(|body| body.contains_key("messages"))
    }

    /// The answer as a line of the results.
    fn shape(&self, engine: &Engine, answer: Answer) -> Value {
        let Answer { result, metrics } = answer;
        let mut line = json!({ "line": self.number });
        if let Some(id) = self.id() {
            line["custom_id"] = id.clone();
        }
        let chat = self.chats();
        let shape = if chat { logprobs::chat } else { serve::logprobs::of_completion };
        let told = |tokens: &[Token]| shape(engine.tokenizer(), tokens);
        if !self.is_batch() {
            match result {
                Ok(Text { text, finish, told: tokens }) => {
                    line["text"] = json!(text);
                    if let Some(tokens) = tokens {
                        line["logprobs"] = told(&tokens);
                    }
                    line["finish"] = json!(finish.name());
                    if finish.closed_early(&metrics) {
                        line["closed_early"] = json!(true);
                    }
                    line["usage"] = usage(&metrics);
                }
                Err(Refusal(why)) => line["error"] = json!(why),
            }
            return line;
        }
        let id = format!("delft-{}", self.number);
        let (status, body) = match result {
            Ok(Text { text, finish, told: tokens }) => {
                line["text"] = json!(text);
                let tokens = tokens.map(|tokens| told(&tokens));
                let reason = if finish.name() == "stop" { "stop" } else { "length" };
                let mut choice = json!({ "index": 0, "logprobs": tokens, "finish_reason": reason });
                if finish.closed_early(&metrics) {
                    choice["closed_early"] = json!(true);
                }
                let object = if chat {
                    choice["message"] = json!({ "role": "assistant", "content": text });
                    "chat.completion"
                } else {
                    choice["text"] = json!(text);
                    "text_completion"
                };
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let body = json!({
                    "id": id,
                    "object": object,
                    "created": since.as_secs(),
                    "model": engine.info().name,
                    "choices": [choice],
                    "usage": usage(&metrics),
                });
                (200, body)
            }
            Err(Refusal(why)) => {
                let error = json!({ "message": why, "type": "invalid_request_error" });
                (400, json!({ "error": error }))
            }
        };
        line["id"] = json!(id);
        line["response"] = json!({ "status_code": status, "request_id": id, "body": body });
        line["error"] = Value::Null;
        line
    }
}

/// Counts of tokens, with OpenAI's names.
fn usage(metrics: &Metrics) -> Value {
    json!({
        "prompt_tokens": metrics.prompt_tokens,
        "completion_tokens": metrics.generated_tokens,
        "total_tokens": metrics.prompt_tokens + metrics.generated_tokens,
        "prompt_tokens_details": { "cached_tokens": metrics.reused_tokens },
    })
}

/// The JSON type of a value, for messages.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

/// Hands requests to an engine.
struct Asker<'a> {
    engine: &'a Engine,
    maker: Maker<'a>,
    /// The grammar of answers to requests that bring none.
    grammar: Option<Grammar>,
}

impl Asker<'_> {
    fn ask(&self, request: Request, grammar: Option<Grammar>) -> Result<Generating, Error> {
        let adapter = self.engine.adapters().first().cloned();
        let request = Request { adapter, ..request };
        let Some(grammar) = grammar.as_ref().or(self.grammar.as_ref()) else {
            return self.engine.submit(request);
        };
        let rendered = matches!(request.prompt, Prompt::Chat { .. });
        let tokens = self.engine.encode(&request.prompt)?;
        let mut request = Request { prompt: Prompt::Tokens(tokens.clone()), ..request };
        request.options.constraint = Some(self.maker.make(grammar, &tokens, rendered)?);
        self.engine.submit(request)
    }
}

/// A line whose answer is being computed.
struct Waiting {
    line: Line,
    /// Whether log-probabilities are wanted.
    logprobs: bool,
    generating: Result<Generating, Refusal>,
}

impl Waiting {
    fn begin(asker: &Asker<'_>, line: Line, options: &GenerateOptions) -> Waiting {
        // Lines that say nothing of a seed draw differently, and the same ones in each run with
        // --seed.
        let mut options = options.clone();
        options.sampling.seed = options.sampling.seed.wrapping_add(line.number as u64 - 1);
        let body = line.body().map_err(Refusal::from);
        let request = body.and_then(|body| request(&line.place(), body, options));
        let logprobs = request.as_ref().is_ok_and(|(request, _)| request.options.logprobs);
        let generating = request.and_then(|(request, grammar)| Ok(asker.ask(request, grammar)?));
        Waiting { line, logprobs, generating }
    }

    /// Waits for the answer, calling `each` after every token.
    fn answer(&mut self, each: &mut dyn FnMut(&Metrics)) -> Answer {
        let generating = match &mut self.generating {
            Ok(generating) => generating,
            Err(error) => {
                return Answer { result: Err(error.clone()), metrics: Metrics::default() };
            }
        };
        let mut text = String::new();
        let mut told = self.logprobs.then(Vec::new);
        let mut failed = None;
        for token in generating.by_ref() {
            match token {
                Ok(token) => {
                    text += &token.text;
                    told.iter_mut().for_each(|told| told.push(token.clone()));
                }
                Err(error) => failed = Some(error),
            }
            each(&Metrics::default());
        }
        let finish = generating.finish().cloned().unwrap_or(Finish::Cancelled);
        if let (Some(told), Finish::End(_)) = (&mut told, &finish) {
            told.pop();
        }
        let result = failed.map_or(Ok(Text { text, finish, told }), |error| Err(error.into()));
        Answer { result, metrics: generating.metrics() }
    }
}

/// The request of a body, and the grammar of its answer. A setting that the body does not name is
/// taken from `options`.
fn request(
    place: &str,
    body: &Map<String, Value>,
    mut options: GenerateOptions,
) -> Result<(Request, Option<Grammar>), Refusal> {
    let mut prompt = None;
    let mut grammar = None;
    let mut extra = Map::new();
    for (key, value) in body {
        let wrong = |expected: &str| Error::new(format!("{place}: {key}"), expected, value);
        let number = || value.as_f64().ok_or_else(|| wrong("a number")).map(|x| x as f32);
        let whole = || whole(value).ok_or_else(|| wrong("a whole number"));
        let count = || Ok::<_, Error>(usize::try_from(whole()?).unwrap_or(usize::MAX));
        let sampling = &mut options.sampling;
        // Nothing was asked for.
        if value.is_null() {
            continue;
        }
        match key.as_str() {
            "prompt" if prompt.is_none() => prompt = Some(text_or_tokens(value, &wrong)?),
            "messages" if prompt.is_none() => {
                let messages = serve::messages_of(value);
                let messages = messages.map_err(|why| Refusal(format!("{place}: {why}")))?;
                prompt = Some(Prompt::Chat { messages, extra: Map::new() });
            }
            "prompt" | "messages" => return Err(wrong("prompt or messages, not both").into()),
            "chat_template_kwargs" => {
                extra = value.as_object().ok_or_else(|| wrong("an object"))?.clone();
            }
            "max_tokens" | "max_completion_tokens" => {
                // No limit, as in llama.cpp.
                options.max_tokens = if value == -1 { None } else { Some(count()?) };
            }
            "seed" => {
                let seed = value.as_u64().or(value.as_i64().map(|seed| seed as u64));
                sampling.seed = seed.ok_or_else(|| wrong("a whole number"))?;
            }
            "temperature" => sampling.temperature = number()?,
            "top_p" => sampling.top_p = number()?,
            "top_k" => sampling.top_k = count()?,
            "min_p" => sampling.min_p = number()?,
            "presence_penalty" => sampling.presence_penalty = number()?,
            "frequency_penalty" => sampling.frequency_penalty = number()?,
            "repetition_penalty" | "repeat_penalty" => sampling.repetition_penalty = number()?,
            "logit_bias" => sampling.logit_bias = biases(value, &wrong)?,
            "ignore_eos" => {
                options.ignore_end = value.as_bool().ok_or_else(|| wrong("true or false"))?;
            }
            "stop" => options.stop = texts(value, &wrong)?,
            "n" if value == 1 => {}
            "stream" | "echo" if value == false => {}
            "logprobs" | "top_logprobs" => {}
            "response_format" => match (value["type"].as_str(), &value["json_schema"]["schema"]) {
                (Some("text"), _) => {}
                (Some("json_object"), _) => grammar = Some(Grammar::Json),
                (Some("json_schema"), schema @ Value::Object(_)) => {
                    grammar = Some(Grammar::Schema(schema.clone()));
                }
                _ => return Err(wrong("text, json_object, or json_schema with its schema").into()),
            },
            // The model is the command line's; the others say nothing about the answer.
            "model" | "user" | "metadata" | "store" | "service_tier" | "custom_id" => {}
            "n" | "stream" | "echo" => {
                return Err(wrong("a value that a batch supports, such as the default").into());
            }
            _ => return Err(Error::new(place, "settings that a batch supports", key).into()),
        }
    }
    let wanted = wanted_logprobs(place, body)?;
    options.logprobs = wanted.is_some();
    options.top_logprobs = wanted.unwrap_or(0);
    let missing = || Error::new(place, "prompt or messages", "neither");
    let prompt = match prompt.ok_or_else(missing)? {
        Prompt::Chat { messages, .. } => Prompt::Chat { messages, extra },
        prompt => prompt,
    };
    Ok((Request::new(prompt, options), grammar))
}

/// A number from 0 on without a fraction, which some programs write all the same (`16.0`).
fn whole(value: &Value) -> Option<u64> {
    let fraction = || value.as_f64().filter(|n| n.fract() == 0.0 && (0.0..9e15).contains(n));
    value.as_u64().or_else(|| fraction().map(|n| n as u64))
}

/// Whether log-probabilities are wanted, and of how many of the likeliest tokens: completions say
/// both as one number, chat completions with two fields.
fn wanted_logprobs(place: &str, body: &Map<String, Value>) -> Result<Option<usize>, Error> {
    /// The most that OpenAI gives of either.
    const MOST: [u64; 2] = [5, 20];
    let field = |key: &str| body.get(key).filter(|value| !value.is_null());
    let wrong = |key: &str, expected: &str, value: &Value| {
        Err(Error::new(format!("{place}: {key}"), expected, value))
    };
    let within = |value: &Value, most: u64| {
        value.as_u64().filter(|count| *count <= most).map(|count| count as usize)
    };
    let (asked, top) = (field("logprobs"), field("top_logprobs"));
    if !body.contains_key("messages") {
        if let Some(top) = top {
            return wrong("top_logprobs", "logprobs alone, a number, beside a prompt", top);
        }
        return match asked {
            None | Some(Value::Bool(false)) => Ok(None),
            Some(count) => match within(count, MOST[0]) {
                Some(count) => Ok(Some(count)),
                None => wrong("logprobs", "a whole number from 0 to 5", count),
            },
        };
    }
    let count = match top.map(|top| (top, within(top, MOST[1]))) {
        None => 0,
        Some((_, Some(count))) => count,
        Some((top, None)) => {
            return wrong("top_logprobs", "a whole number from 0 to 20", top);
        }
    };
    match (asked, top) {
        (None | Some(Value::Bool(false)), Some(top)) if count > 0 => {
            wrong("top_logprobs", "logprobs: true beside it", top)
        }
        (None | Some(Value::Bool(false)), _) => Ok(None),
        (Some(Value::Bool(true)), _) => Ok(Some(count)),
        (Some(other), _) => wrong("logprobs", "true or false beside messages", other),
    }
}

/// A prompt's text, or its tokens.
fn text_or_tokens(value: &Value, wrong: &dyn Fn(&str) -> Error) -> Result<Prompt, Error> {
    if let Some(text) = value.as_str() {
        return Ok(Prompt::Text(text.to_string()));
    }
    let token = |value: &Value| u32::try_from(value.as_u64()?).ok();
    let tokens = value.as_array().and_then(|all| all.iter().map(token).collect());
    tokens.map(Prompt::Tokens).ok_or_else(|| wrong("text, or an array of token ids"))
}

fn texts(value: &Value, wrong: &dyn Fn(&str) -> Error) -> Result<Vec<String>, Error> {
    let text = |value: &Value| Some(value.as_str()?.to_string()).filter(|text| !text.is_empty());
    let all = match value {
        Value::Array(all) => all.iter().map(text).collect(),
        one => text(one).map(|one| vec![one]),
    };
    all.ok_or_else(|| wrong("some text, or an array of some"))
}

/// Token ids as keys, numbers from -100 to 100 as OpenAI has it.
fn biases(value: &Value, wrong: &dyn Fn(&str) -> Error) -> Result<Vec<(u32, f32)>, Error> {
    let pair = |(token, bias): (&String, &Value)| {
        let bias = bias.as_f64().filter(|bias| (-100.0..=100.0).contains(bias))?;
        Some((token.parse().ok()?, bias as f32))
    };
    let pairs = value.as_object().and_then(|all| all.iter().map(pair).collect());
    pairs.ok_or_else(|| wrong("an object of token ids and numbers from -100 to 100"))
}

/// Where answers go.
enum Output {
    Standard,
    File { name: String, file: File },
}

impl Output {
    fn open(path: Option<&Path>) -> Outcome<Output> {
        let Some(path) = path else { return Ok(Output::Standard) };
        let name = path.display().to_string();
        let open =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let file = open.map_err(|e| Error::new(&name, "a file to write answers to", e))?;
        Ok(Output::File { name, file })
    }

    /// Passes over the lines that are answered already, and cuts off what is left of an answer that
    /// was being written; returns how many there are.
    fn skip(&mut self, lines: &mut Lines) -> Outcome<usize> {
        let Output::File { name, file } = self else { return Ok(0) };
        let place = |answer: usize| format!("{name}: line {answer}");
        let unreadable = |e| Error::new(&*name, "a readable file", e);
        let (mut answered, mut end) = (0, 0u64);
        let mut reader = BufReader::new(&mut *file);
        let mut bytes = Vec::new();
        loop {
            bytes.clear();
            let read = reader.by_ref().take(LONGEST).read_until(b'\n', &mut bytes);
            let read = read.map_err(unreadable)?;
            if !bytes.ends_with(b"\n") {
                break;
            }
            let own = |found: &str| {
                let error = Error::new(place(answered + 1), "an answer of this batch", found);
                Stop::from(error.hint("name another --output, or remove it to begin anew"))
            };
            let answer: Value =
                serde_json::from_slice(&bytes).map_err(|_| own("something else"))?;
            let Some(line) = lines.next()? else {
                return Err(own("one more than there are lines"));
            };
            let same = answer.get("line").and_then(Value::as_u64) == Some(line.number as u64)
                && answer.get("custom_id") == line.id();
            if !same {
                return Err(own("one of another"));
            }
            answered += 1;
            end += read as u64;
        }
        drop(reader);
        file.set_len(end).and_then(|()| file.seek(SeekFrom::Start(end))).map_err(unreadable)?;
        if answered > 0 {
            aside(format_args!("{answered} lines are answered already"));
        }
        Ok(answered)
    }

    fn write(&mut self, answer: &Value) -> Outcome {
        match self {
            Output::Standard => crate::terminal::print_json_line(answer),
            Output::File { name, file } => {
                // In one piece: what is interrupted is cut off by the next run.
                let line = format!("{answer}\n");
                let failed = |e| Error::new(&*name, "room for an answer", e);
                Ok(file.write_all(line.as_bytes()).map_err(failed)?)
            }
        }
    }
}

/// Counts, and the line that tells them at a terminal.
struct Tally {
    began: Instant,
    shown: Instant,
    lines: usize,
    errors: usize,
    tokens: usize,
    prompts: usize,
    bar: Option<ProgressBar>,
}

impl Tally {
    fn new(answered: usize) -> Tally {
        let bar = stderr_is_terminal().then(|| {
            let bar = ProgressBar::new_spinner().with_position(answered as u64);
            bar.set_style(style("{pos} lines, {msg}"));
            bar
        });
        let now = Instant::now();
        Tally { began: now, shown: now, lines: 0, errors: 0, tokens: 0, prompts: 0, bar }
    }

    fn add(&mut self, answer: &Answer) {
        self.lines += 1;
        self.errors += usize::from(answer.result.is_err());
        self.tokens += answer.metrics.generated_tokens;
        self.prompts += answer.metrics.prompt_tokens;
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }

    /// Shows the speed, with the tokens of those that are not done.
    fn show(&mut self, waiting: &VecDeque<Waiting>) {
        let Some(bar) = &self.bar else { return };
        if self.shown.elapsed() < Duration::from_millis(200) {
            return;
        }
        self.shown = Instant::now();
        let running = waiting.iter().filter_map(|waiting| waiting.generating.as_ref().ok());
        let running: usize = running.map(|running| running.metrics().generated_tokens).sum();
        let rate = (self.tokens + running) as f64 / self.began.elapsed().as_secs_f64();
        bar.set_message(format!("{rate:.1} tokens/s"));
    }

    fn end(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let seconds = self.began.elapsed().as_secs_f64().max(1e-9);
        let errors = match self.errors {
            0 => String::new(),
            n => format!(", {n} with an error"),
        };
        let (rate, prompts) = (self.tokens as f64 / seconds, self.prompts);
        let plural = if self.lines == 1 { "" } else { "s" };
        aside(format_args!(
            "{} line{plural}{errors} in {seconds:.1} s: {prompts} tokens of prompts, {} generated, {rate:.1} tok/s",
            self.lines, self.tokens
        ));
    }
}

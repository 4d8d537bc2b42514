//! `delft eval`: how well a model foresees examples, or which choices it takes.

use std::borrow::Cow;
use std::path::Path;

use delft::hub::LocalModel;
use delft::train::data::{self, Question};
use delft::train::eval::{Chosen, ExampleScores, Preferred};
use delft::train::{Data, Reader};
use delft::{Engine, Error};
use serde_json::{Value, json};

use super::head::{joined, object, title};
use crate::interrupt::{LastWords, SoFar};
use crate::load::{self, Embeds};
use crate::terminal::{Outcome, aside, harmless, print, print_json, stderr_is_terminal, table};
use crate::tuning::Eval;
use crate::waiting::Waiting;

/// Tokens of a plain text that are read together unless said otherwise, at most.
pub(crate) const OF_TEXT: usize = 1024;

pub(crate) fn run(args: &Eval) -> Outcome {
    load::never_full(&args.load, "eval")?;
    let limit = args.limit.map_or(usize::MAX, |n| n as usize);
    let file = examples(&args.data)?;
    match data::questions(&file)? {
        Some(mut questions) => {
            questions.truncate(limit);
            choose(args, &questions)
        }
        None => foresee(args, &file, limit),
    }
}

/// The file of examples; of a folder as mlx-lm has it, those that are for this.
fn examples(data: &Path) -> Outcome<Cow<'_, Path>> {
    if !data.is_dir() {
        return Ok(Cow::from(data));
    }
    let known = ["test.jsonl", "valid.jsonl"].map(|name| data.join(name));
    let found = known.into_iter().find(|file| file.is_file());
    Ok(Cow::from(found.ok_or_else(|| {
        let expected = "a file, or a folder with test.jsonl or valid.jsonl";
        Error::new(harmless(&data.display().to_string()), expected, "neither")
    })?))
}

/// The longest example that a model takes: as the flags say, or as it was trained.
pub(crate) fn context(
    model: &LocalModel,
    stated: Option<u64>,
    file: &Path,
    ignore_keys: &[String],
) -> Outcome<usize> {
    if let Some(stated) = stated {
        return Ok(stated as usize);
    }
    let trained = data::trained_context(model.location.clone(), ignore_keys)?;
    Ok(if data::is_lines(file) { trained } else { trained.min(OF_TEXT) })
}

/// Says what was done to the examples of a file.
pub(crate) fn tell(data: &Data, file: &Path) {
    for note in &data.notes {
        aside(format_args!("{}: {note}", harmless(&file.display().to_string())));
    }
}

fn foresee(args: &Eval, file: &Path, limit: usize) -> Outcome {
    let model = load::find(&args.load.model)?;
    let context = context(&model, args.load.ctx, file, &args.load.ignore_key)?;
    let tokenizer = load::tokenizer(&model)?;
    let template = delft::read_template(&load::open(&model)?)?;
    let reader = Reader {
        tokenizer: &tokenizer,
        template: template.as_ref(),
        raw: args.raw,
        prompts: false,
        judged: false,
        context,
        truncate: false,
    };
    let mut data = reader.read(file)?;
    data.examples.truncate(limit);
    let pairs = data.are_pairs().map_err(|e| {
        let place = format!("{}: {}", harmless(&file.display().to_string()), e.place);
        Error { place, ..e }
    })?;
    tell(&data, file);
    let (engine, model) =
        load::engine_with(&args.load, Some(data.longest()), None, Embeds::Never, false)?;
    let report = Report::new(args, &engine, &model);
    if pairs == Some(true) {
        return prefer(&report, &engine, &data);
    }
    let found = SoFar::<(usize, ExampleScores)>::default();
    let words = {
        let (report, found) = (report.clone(), found.clone());
        LastWords::prepare(move || report.scores(found.get(), true))
    };
    let mut session = load::session(&engine)?;
    let mut waiting = Waiting::begin("reading");
    let (mut scores, mut done, all) = (ExampleScores::default(), 0, data.tokens());
    for (i, example) in data.examples.iter().enumerate() {
        scores.add(&mut session, engine.end_tokens(), example)?;
        done += example.length();
        waiting.at(done, Some(all));
        found.update(|found| *found = (i + 1, scores));
    }
    waiting.end();
    drop(words);
    report.scores((data.examples.len(), scores), false)
}

/// Which answers of pairs the model prefers.
fn prefer(report: &Report, engine: &Engine, data: &Data) -> Outcome {
    let found = SoFar::<Preferred>::default();
    let words = {
        let (report, found) = (report.clone(), found.clone());
        LastWords::prepare(move || report.preferred(found.get(), true))
    };
    let mut session = load::session(engine)?;
    let mut waiting = Waiting::begin("reading");
    let (mut preferred, mut done, all) = (Preferred::default(), 0, data.tokens());
    for example in &data.examples {
        preferred.add(&mut session, example)?;
        done += example.length();
        waiting.at(done, Some(all));
        found.update(|found| *found = preferred);
    }
    waiting.end();
    drop(words);
    report.preferred(preferred, false)
}

fn choose(args: &Eval, questions: &[Question]) -> Outcome {
    let (engine, model) = load::engine(&args.load, false)?;
    let report = Report::new(args, &engine, &model);
    let found = SoFar::<Chosen>::default();
    let words = {
        let (report, found) = (report.clone(), found.clone());
        LastWords::prepare(move || report.chosen(found.get(), true))
    };
    let mut chosen = Chosen::default();
    for question in questions {
        chosen.add(&engine, question, args.raw, engine.adapters().first())?;
        found.update(|found| *found = chosen);
    }
    drop(words);
    report.chosen(chosen, false)
}

/// The table, or the JSON object, at the end.
#[derive(Clone)]
struct Report {
    title: String,
    head: Value,
    json: bool,
}

impl Report {
    fn new(args: &Eval, engine: &Engine, model: &LocalModel) -> Report {
        let adapter = args.load.adapter.first().map(|adapter| adapter.path.display().to_string());
        let rest = json!({ "data": args.data.display().to_string(), "adapter": adapter });
        Report { title: title(engine), head: object(engine, model, rest), json: args.json }
    }

    fn scores(&self, (examples, scores): (usize, ExampleScores), interrupted: bool) -> Outcome {
        let ExampleScores { loss, foreseen, answers, exact, .. } = scores;
        let tokens = loss.weight as usize;
        let exactly = (answers > 0).then(|| exact as f64 / answers as f64);
        if self.json {
            return self.object(
                json!({
                    "examples": examples,
                    "tokens": tokens,
                    "loss": loss.mean(),
                    "perplexity": scores.perplexity(),
                    "error": scores.error(),
                    "foreseen": foreseen,
                    "answers": answers,
                    "exact": exact,
                    "exact_match": exactly,
                }),
                interrupted,
            );
        }
        let row = |name: &str, value: String| vec![name.to_owned(), value];
        let mut rows = vec![
            row("examples", examples.to_string()),
            row("tokens that count", tokens.to_string()),
            row("loss", format!("{:.4}", loss.mean())),
            row("perplexity", format!("{:.4} +/- {:.4}", scores.perplexity(), scores.error())),
            row("likeliest tokens", share(foreseen, tokens)),
        ];
        if answers > 0 {
            rows.push(row("exact answers", share(exact, answers)));
        }
        self.table(&rows, interrupted)
    }

    fn chosen(&self, chosen: Chosen, interrupted: bool) -> Outcome {
        let Chosen { questions, right, right_by_length } = chosen;
        if self.json {
            let accuracy = |right: usize| right as f64 / questions.max(1) as f64;
            return self.object(
                json!({
                    "questions": questions,
                    "right": right,
                    "right_by_length": right_by_length,
                    "accuracy": accuracy(right),
                    "accuracy_by_length": accuracy(right_by_length),
                }),
                interrupted,
            );
        }
        let rows = [
            vec!["questions".to_owned(), questions.to_string()],
            vec!["right".to_owned(), share(right, questions)],
            vec!["right by length".to_owned(), share(right_by_length, questions)],
        ];
        self.table(&rows, interrupted)
    }

    fn preferred(&self, preferred: Preferred, interrupted: bool) -> Outcome {
        let Preferred { pairs, likelier, gained, margins } = preferred;
        let adapted = self.head.get("adapter").is_some_and(|adapter| !adapter.is_null());
        let mean = margins / pairs.max(1) as f64;
        if self.json {
            let of = |count: usize| count as f64 / pairs.max(1) as f64;
            let of_adapter = |value: Value| if adapted { value } else { Value::Null };
            return self.object(
                json!({
                    "pairs": pairs,
                    "likelier": likelier,
                    "likelier_share": of(likelier),
                    "gained": of_adapter(gained.into()),
                    "accuracy": of_adapter(of(gained).into()),
                    "margin": of_adapter(mean.into()),
                }),
                interrupted,
            );
        }
        let row = |name: &str, value: String| vec![name.to_owned(), value];
        let mut rows = vec![
            row("pairs", pairs.to_string()),
            row("chosen answer likelier", share(likelier, pairs)),
        ];
        if adapted {
            rows.push(row("chosen answer gained more", share(gained, pairs)));
            rows.push(row("mean margin", format!("{mean:.4}")));
        }
        self.table(&rows, interrupted)
    }

    fn object(&self, found: Value, interrupted: bool) -> Outcome {
        let mark = if interrupted { json!({ "interrupted": true }) } else { json!({}) };
        print_json(&joined(joined(self.head.clone(), found), mark))
    }

    fn table(&self, rows: &[Vec<String>], interrupted: bool) -> Outcome {
        if stderr_is_terminal() {
            aside(&self.title);
        }
        let mark = if interrupted { "interrupted\n" } else { "" };
        print(&format!("{}{mark}", table(&["measure", "value"], &[false, true], rows)))
    }
}

/// A count among others, as a share too.
fn share(of: usize, all: usize) -> String {
    format!("{:.1}% ({of} of {all})", 100.0 * of as f64 / all.max(1) as f64)
}

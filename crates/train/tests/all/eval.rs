//! Scores against what Transformers computes: the logits and greedy choices of
//! `tests/reference/models`.

use delft_train::Example;
use delft_train::data::{Form, questions};
use delft_train::eval::ExampleScores;
use engine::{CacheType, Engine, LoadOptions};
use formats::Safetensors;

#[test]
fn losses_and_exact_answers_are_transformers() {
    for case in ["llama3", "qwen3"] {
        let folder = testing::models().join(case);
        let options = LoadOptions { cache_type: CacheType::F32, ..LoadOptions::default() };
        let engine = Engine::load(folder.clone(), &options).unwrap();
        let file = Safetensors::open(&folder.join("expected.safetensors")).unwrap();
        let ids = |name: &str| -> Vec<u32> {
            let bytes = file.get(name).unwrap().bytes.chunks_exact(8);
            bytes.map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect()
        };
        let (prompt, greedy) = (ids("input_ids"), ids("decode.tokens"));
        assert_eq!(ids("first_row"), [0]);
        let logits = file.get("logits").unwrap().to_f32().unwrap();
        let rows: Vec<&[f32]> = logits.chunks_exact(logits.len() / prompt.len()).collect();
        let (mut wanted, mut likeliest) = (0.0, 0);
        let from = prompt.len() / 2;
        for (row, id) in rows[from - 1..].iter().zip(&prompt[from..]) {
            let own = f64::from(row[*id as usize]);
            wanted += row.iter().map(|x| f64::from(*x).exp()).sum::<f64>().ln() - own;
            likeliest += usize::from(row.iter().all(|x| f64::from(*x) <= own));
        }
        let mut session = engine.session();
        let mut add = |example: &Example| {
            let mut scores = ExampleScores::default();
            scores.add(&mut session, engine.end_tokens(), example).unwrap();
            scores
        };
        let scores = add(&Example::of(prompt.clone(), from..prompt.len(), Form::Text, 1));
        assert_eq!(scores.loss.weight as usize, prompt.len() - from);
        assert!((scores.loss.sum - wanted).abs() < 1e-3, "{case}: {scores:?}, {wanted}");
        assert_eq!((scores.foreseen, scores.answers), (likeliest, 0));
        // What Transformers decodes is an exact answer; with another token in it, it is none.
        let mut talk = [&prompt[..], &greedy[..]].concat();
        let answer = prompt.len()..talk.len();
        let scores = add(&Example::of(talk.clone(), answer.clone(), Form::Answers, 1));
        assert_eq!((scores.answers, scores.exact, scores.foreseen), (1, 1, greedy.len()), "{case}");
        *talk.last_mut().unwrap() ^= 1;
        let scores = add(&Example::of(talk, answer, Form::Answers, 1));
        assert_eq!((scores.answers, scores.exact, scores.foreseen), (1, 0, greedy.len() - 1));
    }
}

#[test]
fn questions_are_read_or_refused_by_line_and_key() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("q.jsonl");
    let read = |text: &str| {
        std::fs::write(&path, text).unwrap();
        questions(&path).map_err(|e| e.to_string())
    };
    let two =
        |answer: &str| format!("{{\"question\": \"Q\", \"choices\": [\"x\", \"1\"], {answer}}}");
    let right = |line: &str| read(line).unwrap().unwrap()[0].right;
    for (answer, wanted) in [
        ("\"answer\": 1", 1),
        ("\"answer\": \"x\"", 0),
        ("\"answer\": \"B\"", 1),
        ("\"answer\": \"1\"", 1),
        ("\"answer\": \"0\"", 0),
        ("\"answerKey\": \"A\"", 0),
    ] {
        assert_eq!(right(&two(answer)), wanted, "{answer}");
    }
    let arc = "{\"question\": \"Q\", \"choices\": {\"text\": [\"x\", \"y\"], \"label\": [\"1\", \"2\"]}, \"answerKey\": \"2\"}";
    assert_eq!(right(arc), 1);
    for other in ["{\"text\": \"x\"}", "", "nonsense"] {
        assert_eq!(read(other), Ok(None), "{other}");
    }
    assert_eq!(questions(&folder.path().join("q.txt")), Ok(None));
    let fails = |line: &str| read(&format!("{arc}\n\n{line}\n")).unwrap_err();
    for (line, expected) in [
        ("{", "a JSON object"),
        ("7", "an object, found a number"),
        ("{\"choices\": []}", "question: expected a text"),
        ("{\"question\": \"Q\"}", "choices: expected a list of texts, found nothing"),
        ("{\"question\": \"Q\", \"choices\": [\"x\"]}", "choices: expected two or more, found 1"),
        (
            "{\"question\": \"Q\", \"choices\": [\"x\", \"\"]}",
            "choices: expected texts that say something",
        ),
        (
            "{\"question\": \"Q\", \"choices\": {\"text\": [\"x\", \"y\"], \"label\": [\"1\"]}}",
            "found 2 with 1 labels",
        ),
        (
            "{\"question\": \"Q\", \"choices\": [\"x\", \"y\"]}",
            "answerKey: expected one of the choices",
        ),
        (
            "{\"question\": \"Q\", \"choices\": [\"x\", \"y\"], \"answer\": 2}",
            "answer: expected one of",
        ),
        ("{\"question\": \"Q\", \"choices\": [\"x\", \"y\"], \"answer\": \"C\"}", "found \"C\""),
    ] {
        let error = fails(line);
        assert!(error.contains("q.jsonl: line 3: ") && error.contains(expected), "{line}: {error}");
    }
}

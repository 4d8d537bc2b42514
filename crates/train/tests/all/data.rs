//! Files of examples: which tokens count, and what is refused.

use delft_train::data::Form;
use delft_train::{Data, Language, Reader, pack};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tokens::{ChatTemplate, Tokenizer};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Reads a text as a file of this name.
fn read(reader: &Reader<'_>, name: &str, text: impl AsRef<[u8]>) -> formats::Result<Data> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    let of_name = |e: formats::Error| {
        let place = e.place.replace(&format!("{}/", folder.path().display()), "");
        formats::Error { place, ..e }
    };
    reader.read(&path).map_err(of_name)
}

fn stories() -> Language {
    Language::open(root().join("models/delft-stories.gguf")).unwrap()
}

fn reader(language: &Language) -> Reader<'_> {
    let Language { tokenizer, template } = language;
    Reader {
        tokenizer,
        template: template.as_ref(),
        raw: false,
        prompts: false,
        judged: false,
        context: 64,
        truncate: false,
    }
}

/// The texts of what counts, and of everything.
fn shown(tokenizer: &Tokenizer, data: &Data) -> Vec<(String, Vec<String>)> {
    let each = data.examples.iter().map(|e| {
        let counted =
            e.counted.iter().map(|range| tokenizer.decode(&e.tokens[range.clone()], false));
        (tokenizer.decode(&e.tokens, false), counted.collect())
    });
    each.collect()
}

/// `tests/reference/answers.py`: published templates without marks give the masks that TRL's marked
/// ones do.
#[test]
fn answers_are_those_of_trls_masks() {
    let folder = root().join("tests/reference/answers");
    let tokenizer = Tokenizer::from_folder(&folder).unwrap();
    let cases = std::fs::read(folder.join("cases.json")).unwrap();
    let cases: Value = serde_json::from_slice(&cases).unwrap();
    let cases = cases["cases"].as_array().unwrap();
    assert!(cases.len() > 20);
    for case in cases {
        let template = ChatTemplate::from_source(case["template"].as_str().unwrap()).unwrap();
        let reader = Reader {
            tokenizer: &tokenizer,
            template: Some(&template),
            raw: false,
            prompts: false,
            judged: false,
            context: 512,
            truncate: false,
        };
        let line = serde_json::json!({ "messages": case["messages"] }).to_string();
        let data = read(&reader, "a.jsonl", line).unwrap();
        let numbers = |of: &Value| -> Vec<u32> {
            of.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as u32).collect()
        };
        let (ids, mask) = (numbers(&case["ids"]), numbers(&case["mask"]));
        assert_eq!(data.examples.len(), 1, "{}", case["name"]);
        let example = &data.examples[0];
        assert_eq!(example.tokens, ids, "{}", case["name"]);
        let mut found = vec![0; ids.len()];
        example.counted.iter().for_each(|range| found[range.clone()].fill(1));
        let show = |mask: &[u32]| -> String {
            let each = ids.iter().zip(mask);
            each.map(|(id, m)| {
                format!("{}{:?}", if *m == 1 { "+" } else { "" }, tokenizer.token_text(*id))
            })
            .collect()
        };
        assert_eq!(show(&found), show(&mask), "{}", case["name"]);
    }
}

/// A template that writes nothing behind an answer leaves the end of the last one to be added.
#[test]
fn answers_end_though_the_template_does_not_say_so() {
    let language = stories();
    let tokenizer = &language.tokenizer;
    let end = tokenizer.eos_token().unwrap();
    let talk = r#"{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A fox."},
        {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "It ran."}]}"#;
    let talk = talk.replace('\n', " ");
    let open = "{% for m in messages %} {{ m.role }}: {{ m.content }}{% endfor %}\
        {% if add_generation_prompt %} assistant:{% endif %}";
    // What the user's turn begins with ends a generation, as GLM's does.
    let mark = tokenizer.token_text(end).to_string();
    let marked = open.replace(
        " {{ m.role }}",
        &format!("{{% if m.role == 'user' %}}{mark}{{% endif %}} {{{{ m.role }}}}"),
    );
    for (source, ends) in [(open.to_owned(), [false, true]), (marked, [true, true])] {
        let template = ChatTemplate::from_source(&source).unwrap();
        let reader = Reader { template: Some(&template), ..reader(&language) };
        let data = read(&reader, "a.jsonl", &talk).unwrap();
        assert_eq!(data.examples.len(), 1, "{source}");
        let example = &data.examples[0];
        let last = |range: &std::ops::Range<usize>| example.tokens[range.end - 1] == end;
        let found: Vec<bool> = example.counted.iter().map(last).collect();
        assert_eq!(found, ends, "{source}");
        assert_eq!(example.tokens.last(), Some(&end));
    }
}

/// Lines of several forms that went through one table have nulls for each other's keys.
#[test]
fn nulls_of_other_forms_are_passed_over() {
    let language = stories();
    let reader = Reader { raw: true, ..reader(&language) };
    let line = |form: &str| read(&reader, "a.jsonl", form).unwrap().examples;
    let bare = line(r#"{"prompt": "Once", "completion": " upon"}"#);
    let filled = r#"{"messages": null, "text": null, "prompt": "Once", "completion": " upon", "chosen": null, "rejected": null}"#;
    assert_eq!(line(filled), bare);
    let text = line(r#"{"text": "Once upon a time"}"#);
    assert_eq!(line(r#"{"text": "Once upon a time", "prompt": null, "completion": null}"#), text);
}

/// A template as Qwen3's: once the conversation has gone on, what was thought is shown no more.
const FORGETFUL: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

#[test]
fn answers_that_a_template_shows_otherwise_later_become_examples_of_their_own() {
    let tokenizer = Tokenizer::from_folder(&root().join("tests/reference/answers")).unwrap();
    let template = Some(ChatTemplate::from_source(FORGETFUL).unwrap());
    let language = Language { tokenizer, template };
    let (tokenizer, reader) = (&language.tokenizer, reader(&language));
    let reader = Reader { context: 512, ..reader };
    let message =
        |role: &str, content: &str| serde_json::json!({ "role": role, "content": content });
    let talk = [
        message("user", "Paris"),
        message("assistant", "Once"),
        message("user", "fox"),
        message("assistant", "owl"),
        message("user", "of no answer"),
    ];
    let data =
        read(&reader, "a.jsonl", serde_json::json!({ "messages": talk }).to_string()).unwrap();
    let answer = |text: &str| format!("<think>\n\n</think>\n\n{text}<|im_end|>\n");
    let first =
        format!("<s><|im_start|>user\nParis<|im_end|>\n<|im_start|>assistant\n{}", answer("Once"));
    let second = format!(
        "<s><|im_start|>user\nParis<|im_end|>\n<|im_start|>assistant\nOnce<|im_end|>\n\
         <|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\n{}",
        answer("owl")
    );
    let strip = |text: String| text.trim_start_matches("<s>").to_owned();
    let found: Vec<_> =
        shown(tokenizer, &data).into_iter().map(|(all, own)| (strip(all), own)).collect();
    assert_eq!(found, [(strip(first), vec![answer("Once")]), (strip(second), vec![answer("owl")])]);
    assert!(data.examples.iter().all(|example| example.line == 1));
    assert_eq!(data.notes.len(), 1);
    // An answer of weight 0 is read and not learned.
    let mut talk = talk.to_vec();
    talk[3]["weight"] = 0.into();
    let data =
        read(&reader, "a.jsonl", serde_json::json!({ "messages": talk }).to_string()).unwrap();
    assert_eq!(shown(tokenizer, &data)[0].1, [answer("Once")]);
    assert_eq!(data.examples.len(), 1);
}

#[test]
fn prompts_and_texts_are_tokens_of_which_some_count() {
    let language = stories();
    let tokenizer = &language.tokenizer;
    let lines =
        "{\"prompt\": \"Once upon\", \"completion\": \" a time\"}\n\n{\"text\": \"A fox.\"}\n";
    let raw = read(&Reader { raw: true, ..reader(&language) }, "a.jsonl", lines).unwrap();
    let end = "<|endoftext|>";
    assert_eq!(
        shown(tokenizer, &raw),
        [
            (format!("<|bos|>Once upon a time{end}"), vec![format!(" a time{end}")]),
            (format!("<|bos|>A fox.{end}"), vec![format!("A fox.{end}")]),
        ]
    );
    let forms: Vec<_> = raw.examples.iter().map(|e| (e.form, e.line)).collect();
    assert_eq!(forms, [(Form::Answers, 1), (Form::Text, 3)]);
    // Through the template, a prompt with its completion is a conversation.
    let chat = read(&reader(&language), "a.jsonl", lines).unwrap();
    let talk = "{\"messages\": [{\"role\": \"user\", \"content\": \"Once upon\"}, \
                {\"role\": \"assistant\", \"content\": \" a time\"}]}";
    let talk = read(&reader(&language), "b.jsonl", talk).unwrap();
    assert_eq!(chat.examples[0], talk.examples[0]);
    let lists = "{\"prompt\": [{\"role\": \"user\", \"content\": \"Once upon\"}], \
                 \"completion\": [{\"role\": \"assistant\", \"content\": \" a time\"}]}";
    assert_eq!(read(&reader(&language), "c.jsonl", lists).unwrap().examples, talk.examples);
    assert_eq!(chat.sha256.len(), 64);
}

#[test]
fn pairs_are_two_answers_to_one_prompt() {
    let language = stories();
    let line = |chosen: &str, rejected: &str| {
        serde_json::json!({ "prompt": "Once", "chosen": chosen, "rejected": rejected }).to_string()
    };
    let data = read(&reader(&language), "a.jsonl", line(" upon", " a time")).unwrap();
    assert_eq!(data.are_pairs().unwrap(), Some(true));
    let answer = |key: &str| {
        let single = line(" upon", " a time").replace(key, "completion");
        let other = if key == "chosen" { "rejected" } else { "chosen" };
        let single = single.replace(other, "unused");
        read(&reader(&language), "b.jsonl", single).unwrap().examples.remove(0)
    };
    let (chosen, rejected) = (answer("chosen"), answer("rejected"));
    let pair = &data.examples[0];
    let other = pair.rejected.as_deref().unwrap();
    assert_eq!((&pair.tokens, &pair.counted), (&chosen.tokens, &chosen.counted));
    assert_eq!((&other.tokens, &other.counted), (&rejected.tokens, &rejected.counted));
    assert_eq!((pair.form, other.form), (Form::Preference, Form::Preference));
    assert_eq!(data.longest(), chosen.tokens.len() + rejected.tokens.len());
    let batch = delft_train::pack::batch(&data.examples, &[0]);
    assert_eq!(batch.sequences, [0..chosen.tokens.len(), chosen.tokens.len()..data.longest()]);
    assert_eq!(batch.weights.iter().sum::<f32>() as usize, data.answer_tokens());
    // What is no pair beside others is told by line.
    let mixed = format!("{}\n{{\"text\": \"A fox.\"}}\n", line(" upon", " a time"));
    let error = read(&reader(&language), "c.jsonl", mixed).unwrap().are_pairs().unwrap_err();
    assert!(error.to_string().starts_with("line 2: expected chosen and rejected"), "{error}");
}

/// Each form of another program's is the same tokens as the form of ours beside it.
#[test]
fn forms_of_other_programs_are_read_as_ours() {
    let language = stories();
    let message =
        |role: &str, content: &str| serde_json::json!({ "role": role, "content": content });
    let talk = |first: &str| {
        let messages =
            [message("system", "Be brief."), message("user", first), message("assistant", "fox")];
        serde_json::json!({ "messages": messages })
    };
    let turns = serde_json::json!([
        { "from": "system", "value": "Be brief." }, { "from": "human", "value": "owl" },
        { "from": "gpt", "value": "fox" },
    ]);
    let parts =
        serde_json::json!([{ "type": "text", "text": "o" }, { "type": "text", "text": "wl" }]);
    let of_parts = [
        message("system", "Be brief."),
        serde_json::json!({ "role": "user", "content": parts }),
        message("assistant", "fox"),
    ];
    let pair = |prompt: Value, chosen: Value, rejected: Value| serde_json::json!({ "prompt": prompt, "chosen": chosen, "rejected": rejected });
    let (asked, answers) =
        (message("user", "owl"), [message("assistant", "fox"), message("assistant", "cow")]);
    let whole = |answer: &Value| serde_json::json!([asked, answer]);
    let ours = pair("owl".into(), "fox".into(), "cow".into());
    let cases: &[(Value, Value)] = &[
        (serde_json::json!({ "conversations": turns }), talk("owl")),
        (
            serde_json::json!({ "conversations": turns.as_array().unwrap()[1..], "system": "Be brief." }),
            talk("owl"),
        ),
        (serde_json::json!({ "conversations": talk("owl")["messages"] }), talk("owl")),
        (serde_json::json!({ "messages": of_parts }), talk("owl")),
        (
            serde_json::json!({ "instruction": "owl", "input": "cow", "output": "fox", "system": "Be brief." }),
            talk("owl\ncow"),
        ),
        (
            serde_json::json!({ "instruction": "owl", "input": "", "output": "fox" }),
            serde_json::json!({ "prompt": "owl", "completion": "fox" }),
        ),
        (
            serde_json::json!({ "instruction": "owl", "chosen": "fox", "rejected": "cow" }),
            ours.clone(),
        ),
        (
            serde_json::json!({
                "chosen": "\n\nHuman: owl\n\nAssistant: fox",
                "rejected": "\n\nHuman: owl\n\nAssistant: cow",
            }),
            ours.clone(),
        ),
        (
            serde_json::json!({ "instruction": "owl", "context": "cow", "response": "fox", "category": "x" }),
            serde_json::json!({ "prompt": "owl\ncow", "completion": "fox" }),
        ),
        (
            serde_json::json!({ "question": "owl", "answer": "fox" }),
            serde_json::json!({ "prompt": "owl", "completion": "fox" }),
        ),
        (
            serde_json::json!({ "id": 3, "system_prompt": "Be brief.", "question": "owl", "response": "fox" }),
            talk("owl"),
        ),
        (
            serde_json::json!({ "query": "owl", "type": "x", "response": "fox", "context": "" }),
            serde_json::json!({ "prompt": "owl", "completion": "fox" }),
        ),
        (
            serde_json::json!({ "input": "owl", "output": "fox", "system": "" }),
            serde_json::json!({ "prompt": "owl", "completion": "fox" }),
        ),
        (
            serde_json::json!({ "prompt": "owl", "response": "fox" }),
            serde_json::json!({ "prompt": "owl", "completion": "fox" }),
        ),
        (
            serde_json::json!({ "question": "owl", "chosen": "fox", "rejected": "cow" }),
            ours.clone(),
        ),
        (
            serde_json::json!({ "conversation": [{ "input": "owl", "output": "fox" }], "system": "Be brief." }),
            talk("owl"),
        ),
        (
            serde_json::json!({ "prompt": "owl", "completion": "fox", "system": "Be brief." }),
            talk("owl"),
        ),
        (
            serde_json::json!({ "messages": [asked, answers[0]], "system": "Be brief." }),
            talk("owl"),
        ),
        (
            serde_json::json!({ "prompt": "owl", "messages": talk("owl")["messages"], "prompt_id": "7" }),
            talk("owl"),
        ),
        (
            serde_json::json!({
                "prompt": "owl", "messages": whole(&answers[0]),
                "chosen": whole(&answers[0]), "rejected": whole(&answers[1]),
            }),
            ours.clone(),
        ),
        (pair("owl".into(), whole(&answers[0]), whole(&answers[1])), ours.clone()),
        (
            serde_json::json!({ "chosen": whole(&answers[0]), "rejected": whole(&answers[1]) }),
            ours.clone(),
        ),
        (
            pair(
                serde_json::json!([asked]),
                serde_json::json!([answers[0]]),
                serde_json::json!([answers[1]]),
            ),
            ours.clone(),
        ),
        (
            serde_json::json!({
                "conversations": [{ "from": "human", "value": "owl" }],
                "chosen": { "from": "gpt", "value": "fox" },
                "rejected": { "from": "gpt", "value": "cow" },
            }),
            ours.clone(),
        ),
    ];
    for (theirs, ours) in cases {
        let [theirs, ours] =
            [theirs, ours].map(|line| read(&reader(&language), "a.jsonl", line.to_string()));
        assert_eq!(theirs.unwrap().examples, ours.unwrap().examples);
    }
    // Without a template an instruction stands in Stanford's prompt.
    let raw = Reader { raw: true, ..reader(&language) };
    let line = serde_json::json!({ "instruction": "Add {input}.", "input": "1", "output": "2" });
    let data = read(&Reader { context: 512, ..raw }, "a.jsonl", line.to_string()).unwrap();
    let (all, own) = &shown(&language.tokenizer, &data)[0];
    assert!(
        all.contains("### Instruction:\nAdd {input}.\n\n### Input:\n1\n\n### Response:\n2"),
        "{all}"
    );
    assert_eq!(own, &["2<|endoftext|>"]);
}

/// One object on each line, all of them in a list, and a table are the same examples.
#[test]
fn lists_and_tables_are_read_as_lines() {
    let language = stories();
    let rows = [("a \"fox\", then\nan owl", "A cow"), ("x", "y")];
    let objects = rows.map(|(a, b)| serde_json::json!({ "prompt": a, "completion": b }));
    let lines: String = objects.iter().map(|object| format!("{object}\r\n\r\n")).collect();
    let lines = read(&reader(&language), "a.jsonl", format!("\u{feff}{lines}")).unwrap();
    let list = serde_json::to_string_pretty(&objects).unwrap();
    let cell = |text: &str| match text.contains('"') {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    };
    let table = |by: &str, end: &str| -> String {
        let head = [("prompt", "completion")];
        let each =
            head.iter().chain(&rows).map(|(a, b)| format!("{}{by}{}{end}", cell(a), cell(b)));
        each.collect()
    };
    let texts = |data: &Data| shown(&language.tokenizer, data);
    for (name, text) in [
        ("a.json", list),
        ("a.csv", table(",", "\n")),
        ("a.CSV", table(",", "\r\n")),
        ("a.tsv", table("\t", "\r\n\r\n").trim_end().to_owned()),
    ] {
        let data = read(&reader(&language), name, text).unwrap();
        assert_eq!(texts(&data), texts(&lines), "{name}");
    }
}

#[test]
fn long_texts_are_cut_so_that_each_token_is_predicted_once() {
    let language = stories();
    let text = "The fox went home. ".repeat(60);
    let data = read(&reader(&language), "book.txt", &text).unwrap();
    let whole =
        language.tokenizer.encode(&text, tokens::Special { add: true, parse: false }).unwrap();
    let mut joined = vec![data.examples[0].tokens[0]];
    for example in &data.examples {
        assert!(example.tokens.len() <= 64);
        assert_eq!(*joined.last().unwrap(), example.tokens[0]);
        assert_eq!(example.counted.len(), 1);
        assert_eq!(example.counted[0], 1..example.tokens.len());
        joined.extend(&example.tokens[1..]);
    }
    assert_eq!(joined[..whole.len()], whole);
    assert_eq!(joined.len(), whole.len() + 1);
    assert_eq!(data.examples.last().unwrap().line, data.examples.len());
    let line = serde_json::json!({ "text": text }).to_string();
    let lines = read(&reader(&language), "book.jsonl", line).unwrap();
    assert_eq!(lines.notes, ["1 example longer than 64 tokens: cut into several"]);
    // What is no text is refused, unless it may lose its end.
    let long = serde_json::json!({ "prompt": "Tell", "completion": text }).to_string();
    let refused = read(&reader(&language), "a.jsonl", &long).unwrap_err().to_string();
    assert!(
        refused.starts_with("a.jsonl: line 1: expected at most 64 tokens, found "),
        "{refused}"
    );
    let cut = read(&Reader { truncate: true, ..reader(&language) }, "a.jsonl", &long).unwrap();
    assert_eq!(cut.longest(), 64);
    assert_eq!(cut.notes, ["1 example longer than 64 tokens: truncated"]);
    let gone = serde_json::json!({ "prompt": text, "completion": "Yes" }).to_string();
    let gone = read(&Reader { truncate: true, ..reader(&language) }, "a.jsonl", &gone).unwrap_err();
    assert_eq!(
        gone.to_string(),
        "a.jsonl: expected something to learn from, found no token that counts \
         (hint: what would count is behind the tokens that were kept)"
    );
}

/// KTO's lines: an answer with a label, and pairs as two of them.
#[test]
fn judged_answers_have_labels() {
    let language = stories();
    let judged = Reader { template: None, judged: true, ..reader(&language) };
    let line = |completion: &str, label: &str| {
        format!("{{\"prompt\": \"Once\", \"completion\": \"{completion}\", \"label\": {label}}}\n")
    };
    let text = line(" a fox", "true") + &line(" the sun was", "false");
    let data = read(&judged, "a.jsonl", &text).unwrap();
    let labels: Vec<_> = data.examples.iter().map(delft_train::Example::desired).collect();
    assert_eq!(labels, [Some(true), Some(false)]);
    assert_eq!(data.are_pairs().unwrap(), Some(false));
    // The answer of the other stands behind each prompt.
    let batch = delft_train::pack::batch(&data.examples, &[0, 1]);
    assert_eq!(batch.desired, [true, false]);
    let [first, second] = [&data.examples[0], &data.examples[1]];
    assert_eq!(first.length(), 2 * first.tokens.len());
    let prompt = first.counted[0].start;
    let own = |i: usize| &batch.tokens[batch.sequences[i].clone()];
    assert_eq!((own(0), own(2)), (&first.tokens[..], &second.tokens[..]));
    assert_eq!(own(1), [&first.tokens[..prompt], &second.tokens[prompt..]].concat());
    assert_eq!(own(3), [&second.tokens[..prompt], &first.tokens[prompt..]].concat());
    let counts = |i: usize| batch.weights[batch.sequences[i].clone()].iter().sum::<f32>() as usize;
    let answers = [first, second].map(|example| example.tokens.len() - prompt);
    assert_eq!([0, 1, 2, 3].map(counts), [answers[0], answers[1], answers[1], answers[0]]);
    // Alone there is no other answer.
    let alone = delft_train::pack::batch(&data.examples, &[1]);
    let counts = |i: usize| alone.weights[alone.sequences[i].clone()].iter().sum::<f32>() as usize;
    assert_eq!([0, 1].map(counts), [answers[1], 0]);
    let pair = "{\"prompt\": \"Once\", \"chosen\": \" a fox\", \"rejected\": \" the sun was\"}";
    let pairs = read(&judged, "a.jsonl", pair).unwrap();
    let same = |(a, b): (&delft_train::Example, &delft_train::Example)| {
        (&a.tokens, &a.counted, a.form) == (&b.tokens, &b.counted, b.form)
    };
    assert!(pairs.examples.iter().zip(&data.examples).all(same));
    let table = read(&judged, "a.csv", "prompt,completion,label\nOnce, a fox,True\n").unwrap();
    assert_eq!(table.examples[0].tokens, first.tokens);
    let no_label = "{\"prompt\": \"Once\", \"completion\": \" a fox\"}".to_owned();
    for (line, why) in [
        (no_label, "label: expected true or false, found nothing"),
        (line(" a", "3"), "label: expected true or false, found a number"),
        (line(" a", "\"yes\""), "label: expected true or false, found another text"),
        (pair.replace("}", ", \"label\": true}"), "label: expected none beside chosen"),
        ("{\"text\": \"x\", \"label\": true}".to_owned(), "beside a prompt and its completion"),
    ] {
        let error = read(&judged, "a.jsonl", &line).unwrap_err().to_string();
        assert!(error.starts_with("a.jsonl: line 1: ") && error.contains(why), "{error}");
    }
}

#[test]
fn malformed_lines_are_refused_by_file_line_and_key() {
    let language = stories();
    let bare = Reader { template: None, ..reader(&language) };
    let user = "{\"role\": \"user\", \"content\": \"Hi\"}";
    let cases: &[(String, &str)] = &[
        ("{\"text\": ".into(), "a JSON object, found one that breaks off at column"),
        ("[{\"text\": \"x\"}]".into(), "an object, found a list"),
        ("[".into(), "one object on each line"),
        ("{}".into(), "or instruction with output, found none"),
        ("{\"ask\": 1, \"say\": 2}".into(), "with output, found ask, say"),
        ("{\"question\": 1, \"answer\": 2}".into(), "question: expected a text, found a number"),
        (
            "{\"question\": \"x\", \"response\": \"y\", \"answer\": \"z\"}".into(),
            "with output, found question, response, answer",
        ),
        (
            "{\"question\": \"x\", \"answer\": \"y\", \"context\": \"z\"}".into(),
            "context: expected none beside question, since it would not be learned, found a text",
        ),
        ("{\"text\": \"x\", \"prompt\": \"y\"}".into(), "found prompt and text"),
        ("{\"text\": 7}".into(), "text: expected a text, found a number"),
        (
            "{\"prompt\": \"x\", \"chosen\": \"y\"}".into(),
            "rejected: expected beside prompt, found none",
        ),
        (
            "{\"prompt\": \"x\", \"chosen\": \"y\", \"rejected\": \"z\", \"completion\": \"y\"}"
                .into(),
            "completion: expected none beside chosen and rejected, found one",
        ),
        ("{\"prompt\": \"x\"}".into(), "completion: expected beside prompt, found none"),
        (
            "{\"prompt\": \"x\", \"completion\": null}".into(),
            "completion: expected beside prompt, found none",
        ),
        ("{\"messages\": {}}".into(), "messages: expected a list, found an object"),
        (
            format!("{{\"messages\": [{user}], \"prompt\": \"Ho\"}}"),
            "with output, found messages and prompt",
        ),
        (
            "{\"messages\": [{\"role\": \"system\", \"content\": \"x\"}], \"system\": \"y\"}"
                .into(),
            "system: expected none beside messages that begin with another, found one",
        ),
        ("{\"text\": \"x\\ud800\"}".into(), "(unexpected end of hex escape) at column 18"),
        ("{\"text\": NaN}".into(), "expected a JSON object, found another text (expected value)"),
        (
            "{\"prompt\": \"x\", \"completion\": \"y\", \"label\": false}".into(),
            "label: expected none beside a completion, which is learned, found a boolean",
        ),
        ("{\"messages\": [7]}".into(), "messages[0]: expected an object with role"),
        ("{\"messages\": [{\"content\": \"x\"}]}".into(), "messages[0].role: expected a text"),
        (format!("{{\"messages\": [{user}, {{\"role\": \"assistant\"}}]}}"), "messages[1].content"),
        (
            format!("{{\"messages\": [{user}]}}"),
            "an answer: a message whose role is assistant, found none",
        ),
        (
            format!(
                "{{\"messages\": [{user}, {{\"role\": \"assistant\", \"content\": \"x\", \"weight\": 2}}]}}"
            ),
            "messages[1].weight: expected 0 or 1, found 2",
        ),
        (format!("{{\"messages\": [{user}], \"tools\": 1}}"), "tools: expected a list"),
        (
            format!("{{\"messages\": [{user}], \"tools\": \"x\"}}"),
            "tools: expected a list, or JSON",
        ),
        (format!("{{\"messages\": [{user}], \"functions\": []}}"), "functions: expected tools"),
        (
            "{\"messages\": [{\"role\": \"human\", \"content\": \"x\"}]}".into(),
            "messages[0].role: expected user, found human",
        ),
        (
            "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image_url\"}]}]}"
                .into(),
            "messages[0].content[0].type: expected text, which alone is learned, found image_url",
        ),
        (
            "{\"conversations\": [{\"from\": \"martian\", \"value\": \"x\"}]}".into(),
            "conversations[0].from: expected human, gpt,",
        ),
        (
            "{\"conversations\": [{\"from\": \"gpt\"}]}".into(),
            "conversations[0].value: expected a text",
        ),
        ("{\"instruction\": \"x\"}".into(), "output: expected beside instruction, found none"),
        (
            "{\"instruction\": \"x\", \"output\": 3}".into(),
            "completion: expected a text, found a number",
        ),
        (
            "{\"instruction\": \"x\", \"history\": [[\"a\", \"b\"]], \"output\": \"y\"}".into(),
            "history: expected none beside an instruction",
        ),
        (
            "{\"chosen\": \"x\", \"rejected\": \"y\"}".into(),
            "prompt: expected beside chosen and rejected answers, found none",
        ),
        (
            format!("{{\"chosen\": [{user}], \"rejected\": []}}"),
            "chosen: expected two conversations that begin alike",
        ),
    ];
    for (line, expected) in cases {
        let text = format!("{{\"text\": \"A fox.\"}}\n{line}\n");
        let error = read(&reader(&language), "a.jsonl", text).unwrap_err().to_string();
        assert!(
            error.starts_with("a.jsonl: line 2: ") && error.contains(expected),
            "{line}: {error}"
        );
    }
    let talk =
        format!("{{\"messages\": [{user}, {{\"role\": \"assistant\", \"content\": \"x\"}}]}}");
    let error = read(&bare, "a.jsonl", talk).unwrap_err().to_string();
    assert!(error.contains("a model with a chat template"), "{error}");
    let odd: [(&str, &[u8], &str); 7] = [
        ("a.txt", b"one\ntwo \xff", "a.txt: line 2: expected UTF-8, found other bytes"),
        ("a.jsonl.gz", b"\x1f\x8b\x08", "a.jsonl.gz: expected a text, found a gzip archive"),
        ("a.jsonl", b"\xff\xfe{\0", "a.jsonl: expected a text, found UTF-16"),
        ("a.parquet", b"PAR1", "a.parquet: expected a text, found a Parquet file"),
        ("a.json", b"[{\"text\": 1}]", "a.json: item 1: text: expected a text, found a number"),
        ("a.json", b"[{\n\"text\" 1}]", "a.json: line 2: expected one list of JSON objects"),
        ("a.csv", b"text,x\n\na,b\nc\n", "a.csv: line 4: expected 2 columns, as the first"),
    ];
    for (name, bytes, expected) in odd {
        let error = read(&bare, name, bytes).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    for (name, empty) in
        [("a.jsonl", ""), ("a.jsonl", "\n\n"), ("a.txt", ""), ("a.txt", " \n"), ("a.csv", "text\n")]
    {
        assert!(
            read(&bare, name, empty).unwrap_err().to_string().contains("something to learn from")
        );
    }
}

#[test]
fn what_is_held_out_follows_from_the_seed_and_keeps_lines_together() {
    let language = stories();
    let long = "The fox went home. ".repeat(20);
    let lines: String = (0..20).map(|i| format!("{{\"text\": \"{i} {long}\"}}\n")).collect();
    let all = read(&reader(&language), "a.jsonl", lines).unwrap();
    let split = |share, seed| {
        let mut rest = all.clone();
        let held_out = rest.hold_out(share, seed).unwrap();
        let lines = |data: &Data| -> std::collections::BTreeSet<usize> {
            data.examples.iter().map(|e| e.line).collect()
        };
        assert!(lines(&held_out).is_disjoint(&lines(&rest)));
        assert_eq!(held_out.examples.len() + rest.examples.len(), all.examples.len());
        lines(&held_out)
    };
    assert_eq!(split(0.1, 1).len(), 2);
    assert_eq!(split(0.1, 1), split(0.1, 1));
    assert_ne!(split(0.3, 1), split(0.3, 2));
    assert_eq!((split(0.001, 1).len(), split(0.999, 1).len()), (1, 19));
    let mut one = Data { examples: all.examples[..1].to_vec(), ..Data::default() };
    assert!(one.hold_out(0.5, 1).is_err() && all.clone().hold_out(1.0, 1).is_err());
}

#[test]
fn batches_hold_every_example_once_and_what_counts_of_it() {
    let examples = crate::toy::examples(50);
    let epoch = pack::Epoch::new(&examples, 3, 0, 20, 2).unwrap();
    let (mut seen, mut tokens) = (Vec::<usize>::new(), 0);
    for update in 0..epoch.updates() {
        assert!((1..=2).contains(&epoch.update(update).count()));
        for numbers in epoch.update(update) {
            let batch = pack::batch(&examples, numbers);
            assert!(batch.tokens.len() <= 20 && batch.sequences.len() == numbers.len());
            assert_eq!(batch.sequences.last().unwrap().end, batch.tokens.len());
            for (range, number) in batch.sequences.iter().zip(numbers) {
                let of = &examples[*number];
                assert_eq!(batch.tokens[range.clone()], of.tokens);
                assert_eq!(batch.targets[range.start..range.end - 1], of.tokens[1..]);
                let weights = &batch.weights[range.clone()];
                assert_eq!(weights.iter().sum::<f32>() as usize, of.answer_tokens());
                assert_eq!(weights.last(), Some(&0.0));
            }
            seen.extend(numbers);
            tokens += batch.tokens.len();
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..50).collect::<Vec<usize>>());
    assert_eq!(tokens, examples.iter().map(|e| e.tokens.len()).sum::<usize>());
    assert_ne!(pack::shuffled(50, 3, 0), pack::shuffled(50, 3, 1));
    assert_ne!(pack::shuffled(50, 3, 0), pack::shuffled(50, 4, 0));
    let error = pack::Epoch::new(&examples, 3, 0, 7, 2).unwrap_err().to_string();
    assert_eq!(error, "a batch: expected examples of at most 7 tokens, found one of 8");
}

/// Prompts are learned where that is asked for: all but the first token counts.
#[test]
fn prompts_are_learned_if_asked_for() {
    let language = stories();
    let reader = Reader { prompts: true, raw: true, ..reader(&language) };
    for line in
        [r#"{"prompt": "Once", "completion": " upon a time"}"#, r#"{"text": "Once upon a time"}"#]
    {
        let data = read(&reader, "a.jsonl", line).unwrap();
        let [example] = &data.examples[..] else { panic!("{data:?}") };
        assert_eq!(example.counted, std::iter::once(1..example.tokens.len()).collect::<Vec<_>>());
    }
}

//! `delft eval` and `delft tune` from outside.

use crate::common::{delft, status};
use serde_json::Value;
use std::path::Path;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/delft-stories.gguf");

fn run(args: &[&str]) -> (i32, String, String) {
    let output = delft().args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (status(&output), text(&output.stdout), text(&output.stderr))
}

fn object(args: &[&str]) -> Value {
    let (code, stdout, stderr) = run(args);
    assert_eq!(code, 0, "{args:?}: {stderr}");
    serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{args:?}: {e}: {stdout}"))
}

/// Writes a file of a folder, and gives its path.
fn file(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// A text is foreseen as `delft perplexity` says, which llama.cpp's and Transformers' own figures
/// hold.
#[test]
fn losses_are_those_of_perplexity() {
    let folder = tempfile::tempdir().unwrap();
    let text = "Once upon a time there was a fox who lived in a hollow tree.".repeat(4);
    let text_file = file(folder.path(), "text.txt", &text);
    let eval = |data: &str| {
        object(&["eval", "-m", MODEL, "--data", data, "--cache-type", "f32", "--raw", "--json"])
    };
    let whole = eval(&text_file);
    let tokens = whole["tokens"].as_u64().unwrap();
    // One window that holds all of the text, in which every token but the first is scored.
    let window = tokens.to_string();
    let perplexity = ["perplexity", "-m", MODEL, &text_file, "--cache-type", "f32", "--json"];
    let scored = object(&[&perplexity[..], &["--ctx", &window, "--stride", &window]].concat());
    assert_eq!((&scored["chunks"], &scored["scored"]), (&1.into(), &(tokens - 1).into()));
    // It knows no end of the text, which an empty completion consists of.
    let end = serde_json::json!({ "prompt": text, "completion": "" }).to_string();
    let end = eval(&file(folder.path(), "end.jsonl", &end));
    assert_eq!(end["tokens"], 1);
    let number = |of: &Value, key: &str| of[key].as_f64().unwrap();
    let apart = number(&scored, "nll") * (tokens - 1) as f64 + number(&end, "loss");
    assert!(
        (number(&whole, "loss") * tokens as f64 - apart).abs() < 1e-3,
        "{whole} {scored} {end}"
    );
}

#[test]
fn examples_and_questions_are_measured() {
    let folder = tempfile::tempdir().unwrap();
    let talks = "{\"prompt\": \"Tell me a story.\", \"completion\": \"Once upon a time\"}\n{\"text\": \"A fox.\"}\n";
    let talks = file(folder.path(), "talks.jsonl", talks);
    let found = object(&["eval", "-m", MODEL, "--data", &talks, "--json"]);
    assert_eq!((&found["examples"], &found["answers"]), (&2.into(), &1.into()));
    let loss = found["loss"].as_f64().unwrap();
    assert!((found["perplexity"].as_f64().unwrap() / loss.exp() - 1.0).abs() < 1e-9);
    let first = object(&["eval", "-m", MODEL, "--data", &talks, "--limit", "1", "--json"]);
    assert_eq!(first["examples"], 1);
    let (code, stdout, _) = run(&["eval", MODEL, "--data", &talks]);
    assert_eq!(code, 0);
    for row in ["examples", "loss", "perplexity", "likeliest tokens", "exact answers"] {
        assert!(stdout.lines().any(|line| line.starts_with(row)), "{stdout}");
    }
    let question = "{\"question\": \"Who?\", \"choices\": [\"Once upon a time\", \"Zq zq 77 #\"], \"answer\": \"A\"}\n";
    let questions = file(folder.path(), "questions.jsonl", &question.repeat(2));
    let found = object(&["eval", "-m", MODEL, "--data", &questions, "--json"]);
    assert_eq!((&found["questions"], &found["right"]), (&2.into(), &2.into()));
    let wrong = file(folder.path(), "wrong.jsonl", "{\"text\": 7}\n");
    let (code, stdout, stderr) = run(&["eval", "-m", MODEL, "--data", &wrong]);
    assert!(code == 1 && stdout.is_empty(), "{stderr}");
    assert!(
        stderr.contains("wrong.jsonl: line 1: text: expected a text, found a number"),
        "{stderr}"
    );
}

/// Questions in a list, as `delft eval` takes examples too.
#[test]
fn a_list_of_questions_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    let question =
        "{\"question\": \"Who?\", \"choices\": [\"Once upon a time\", \"Zq 7 #\"], \"answer\": 0}";
    let list = file(folder.path(), "questions.json", &format!("[{question},\n{question}]"));
    let found = object(&["eval", "-m", MODEL, "--data", &list, "--json"]);
    assert_eq!((&found["questions"], &found["right"]), (&2.into(), &2.into()));
}

/// A folder as mlx-lm has it is learned from, with factors beside the last block alone; then the
/// adapter is learned on, and begins where it ended.
#[test]
fn an_adapter_of_the_last_block_is_learned_on() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    std::fs::create_dir(&data).unwrap();
    std::fs::copy(texts(folder.path()), data.join("train.jsonl")).unwrap();
    std::fs::copy(data.join("train.jsonl"), data.join("valid.jsonl")).unwrap();
    let (data, [first, second]) =
        (data.to_str().unwrap(), ["first", "second"].map(|name| folder.path().join(name)));
    let few = [
        "--steps",
        "2",
        "--lr",
        "5e-3",
        "--batch-tokens",
        "48",
        "--schedule",
        "constant",
        "--json",
    ];
    let tune = |out: &Path, more: &[&str]| {
        object(
            &[
                &["tune", "-m", MODEL, "--data", data, "--out", out.to_str().unwrap()][..],
                more,
                &few,
            ]
            .concat(),
        )
    };
    let begun = tune(&first, &["--num-layers", "1", "--rank", "3", "--alpha", "5", "--dora"]);
    let settings: Value =
        serde_json::from_slice(&std::fs::read(first.join("adapter_config.json")).unwrap()).unwrap();
    let targets = settings["target_modules"].as_array().unwrap();
    // Whole names, since PEFT would find the modules of the other blocks by shorter ones.
    assert!(
        targets.iter().all(|name| name.as_str().unwrap().starts_with("model.layers.")),
        "{settings}"
    );
    let from = first.to_str().unwrap();
    let gone_on = tune(&second, &["--from", from]);
    let number = |of: &Value| of.as_f64().unwrap();
    let [ended, begins] = [&begun["best"]["held_out"], &gone_on["held_out_before"]].map(number);
    assert!((ended - begins).abs() < 1e-4, "{begun} {gone_on}");
    assert!(number(&gone_on["best"]["held_out"]) < ended, "{gone_on}");
    let shape = |folder: &Path| {
        let file = formats::Safetensors::open(&folder.join("adapter_model.safetensors")).unwrap();
        file.iter()
            .map(|tensor| (tensor.name.to_owned(), tensor.shape.to_vec()))
            .collect::<Vec<_>>()
    };
    assert_eq!(shape(&first), shape(&second));
    for (more, part) in [
        (&["--num-layers", "99"][..], "layers: expected 1 to"),
        (&["--from", from, "--rank", "4"][..], "cannot be used with"),
        (&["--from", folder.path().to_str().unwrap()][..], "adapter_config.json"),
    ] {
        let out = folder.path().join("none");
        let given =
            [&["tune", "-m", MODEL, "--data", data, "--out", out.to_str().unwrap()][..], more]
                .concat();
        let (code, _, stderr) = run(&given);
        assert!(code > 0 && stderr.contains(part), "{stderr}");
    }
}

/// Short texts, one a line.
fn texts(folder: &Path) -> String {
    let line = |i: usize| format!("{{\"text\": \"The zebra number {i} sings zub zub zub.\"}}\n");
    file(folder, "texts.jsonl", &(0..8).map(line).collect::<String>())
}

/// A run of a few updates that learns something.
const FEW: [&str; 8] =
    ["--steps", "4", "--lr", "5e-3", "--held-out", "25%", "--batch-tokens", "48"];

#[test]
fn an_adapter_is_made_and_used_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (data, out) = (texts(folder.path()), folder.path().join("out"));
    let out = out.to_str().unwrap();
    let begin = ["tune", "-m", MODEL, "--data", &data, "--out", out];
    let output = delft()
        .args(begin)
        .args(FEW)
        .args(["--sample", "The zebra", "--sample-every", "2"])
        .output()
        .unwrap();
    let (stdout, stderr) =
        (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert_eq!((output.status.code(), stdout.trim_end()), (Some(0), out), "{stderr}");
    let next = format!("try it: delft run {MODEL} --adapter {out}");
    for part in [
        "learned: 6 examples",
        "held out: 2 examples",
        "memory: ",
        "update 4: held-out loss",
        &next,
    ] {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
    assert_eq!(stderr.matches(": The zebra").count(), 2, "{stderr}");
    let names = ["adapter_config.json", "checkpoint.delft", "delft.json", "loss.jsonl", "loss.svg"];
    assert!(names.iter().all(|name| Path::new(out).join(name).exists()));
    let log = std::fs::read_to_string(Path::new(out).join("loss.jsonl")).unwrap();
    let held_out: Vec<f64> = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).unwrap()["held_out"].as_f64())
        .collect();
    assert!(held_out.last().unwrap() + 0.5 < held_out[0], "{log}");
    let eval = ["eval", "-m", MODEL, "--data", &data, "--json"];
    let loss = |args: &[&str]| object(&[&eval[..], args].concat())["loss"].as_f64().unwrap();
    assert!(loss(&["--adapter", out]) + 0.5 < loss(&[]));
    let (code, _, stderr) =
        run(&["run", "-m", MODEL, "--adapter", out, "The zebra", "-n", "4", "--raw"]);
    assert_eq!(code, 0, "{stderr}");
    // The run is finished: to go on with it changes nothing, with its flags or without, and other
    // settings make it another run.
    let again = object(&[&begin[..], &FEW, &["--resume", "--json"]].concat());
    assert_eq!((&again["updates"], &again["end"]), (&4.into(), &"done".into()));
    assert_eq!(object(&["tune", "--resume", "--out", out, "--json"])["tokens"], again["tokens"]);
    let (code, _, stderr) = run(&["tune", "--resume", "--out", out, "--lr", "1e-3"]);
    assert!(
        code == 1 && stderr.contains("a run is resumed with what it was begun with"),
        "{stderr}"
    );
    assert_eq!(run(&["tune", "--resume"]).0, 2);
    let others: &[(&[&str], &str)] = &[
        (&[], "expected a folder without a run"),
        (&["--resume", "--seed", "1"], "a run is resumed with what it was begun with"),
        // That of a quantised model is bf16.
        (&["--resume", "--precision", "f32"], "precision: expected bf16, found f32"),
        (&["--resume", "--rank", "4"], "rank: expected 8, found 4 (hint: a run is resumed with"),
    ];
    for (more, expected) in others {
        let (code, stdout, stderr) = run(&[&begin[..], &FEW, more].concat());
        assert!(code == 1 && stdout.is_empty() && stderr.contains(expected), "{more:?}: {stderr}");
    }
}

/// Of two answers, the one that was chosen gains, by LoRA and by DoRA.
#[test]
fn pairs_teach_which_answer_is_better() {
    let folder = tempfile::tempdir().unwrap();
    let line = |i: usize| {
        let [chosen, rejected] = [" A fox ran home.", " It was sunny."];
        let prompt = format!("Story {i}.");
        let pair = serde_json::json!({ "prompt": prompt, "chosen": chosen, "rejected": rejected });
        format!("{pair}\n")
    };
    let data = file(folder.path(), "pairs.jsonl", &(0..6).map(line).collect::<String>());
    let eval = |args: &[&str]| {
        object(&[&["eval", "-m", MODEL, "--data", &data, "--raw", "--json"][..], args].concat())
    };
    let before = eval(&[]);
    assert_eq!((&before["pairs"], &before["accuracy"]), (&6.into(), &Value::Null));
    for (more, first) in [
        (&["--dpo"][..], Some(2f64.ln())),
        (&["--pairs", "dpo", "--dora", "--beta", "0.2"], Some(2f64.ln())),
        (&["--pairs", "hinge"], Some(1.0)),
        // A smaller beta wants a margin that so few steps do not go beyond.
        (&["--pairs", "ipo", "--beta", "0.1"], Some(25.0)),
        (&["--pairs", "simpo", "--beta", "1", "--gamma", "0.5"], None),
        (&["--pairs", "orpo"], None),
    ] {
        let name = format!("out{}", more.concat());
        let out = folder.path().join(name).to_str().unwrap().to_owned();
        let begin = ["tune", "-m", MODEL, "--data", &data, "--out", &out, "--raw", "--steps", "6"];
        let (code, _, stderr) = run(&[&begin[..], &["--lr", "5e-3"], more].concat());
        assert_eq!(code, 0, "{stderr}");
        let after = eval(&["--adapter", &out]);
        assert_eq!(after["accuracy"], 1.0, "{after}");
        assert!(after["margin"].as_f64().unwrap() > 0.5, "{after}");
        let Some(wanted) = first else { continue };
        let log = std::fs::read_to_string(Path::new(&out).join("loss.jsonl")).unwrap();
        let first: Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
        // Nothing has been learned: both answers are as likely as without the adapter. DoRA's
        // lengths, which are rounded to f32, move the quantised products a little.
        let bound = if more.contains(&"--dora") { 0.02 } else { 1e-6 };
        assert!((first["loss"].as_f64().unwrap() - wanted).abs() < bound, "{first}");
    }
    // The next run begins with the adapter that was learned, and compares with it.
    let (from, out) = (folder.path().join("out--dpo"), folder.path().join("further"));
    let [from, further] = [&from, &out].map(|path| path.to_str().unwrap());
    let begin = ["tune", "-m", MODEL, "--data", &data, "--out", further, "--raw", "--steps", "2"];
    let (code, _, stderr) = run(&[&begin[..], &["--dpo", "--from", from]].concat());
    assert_eq!(code, 0, "{stderr}");
    let log = std::fs::read_to_string(out.join("loss.jsonl")).unwrap();
    let first: Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
    assert!((first["loss"].as_f64().unwrap() - 2f64.ln()).abs() < 1e-6, "{first}");
    let texts = texts(folder.path());
    for (args, expected) in [
        (&["--data", &data][..], "--dpo and --pairs learn from pairs"),
        (&["--data", &texts, "--dpo"], "expected chosen and rejected answers, found single ones"),
    ] {
        let (code, _, stderr) = run(&[&["tune", "-m", MODEL][..], args].concat());
        assert!(code == 1 && stderr.contains(expected), "{args:?}: {stderr}");
    }
}

/// Labels say which answers are learned, and which unlearned.
#[test]
fn labels_teach_which_answers_are_good() {
    let folder = tempfile::tempdir().unwrap();
    let (mut judged, mut pairs) = (String::new(), String::new());
    for i in 0..6 {
        let [chosen, rejected] = [" A fox ran home.", " It was sunny."];
        let prompt = format!("Story {i}.");
        for (completion, label) in [(chosen, true), (rejected, false)] {
            let line =
                serde_json::json!({ "prompt": prompt, "completion": completion, "label": label });
            judged += &format!("{line}\n");
        }
        let pair = serde_json::json!({ "prompt": prompt, "chosen": chosen, "rejected": rejected });
        pairs += &format!("{pair}\n");
    }
    let judged = file(folder.path(), "judged.jsonl", &judged);
    let pairs = file(folder.path(), "pairs.jsonl", &pairs);
    // Pairs are two judged answers each.
    let mut losses = Vec::new();
    for (name, data) in [("judged", &judged), ("pairs", &pairs)] {
        let out = folder.path().join(name);
        let out = out.to_str().unwrap();
        let begin = ["tune", "-m", MODEL, "--data", data, "--out", out, "--raw", "--kto"];
        let few = ["--steps", "8", "--lr", "5e-3", "--held-out", "none", "--batch-tokens", "400"];
        let (code, _, stderr) = run(&[&begin[..], &few].concat());
        assert_eq!(code, 0, "{stderr}");
        let eval = ["eval", "-m", MODEL, "--data", &pairs, "--raw", "--json", "--adapter", out];
        let after = object(&eval);
        assert_eq!(after["accuracy"], 1.0, "{after}");
        assert!(after["margin"].as_f64().unwrap() > 0.5, "{after}");
        let log = std::fs::read_to_string(Path::new(out).join("loss.jsonl")).unwrap();
        let first: Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
        // Nothing is gained yet.
        assert!((first["loss"].as_f64().unwrap() - 0.5).abs() < 1e-6, "{first}");
        losses.push(log);
    }
    assert_eq!(losses[0], losses[1]);
    // Half of the loss is left where answers of one kind weigh nothing: nothing is gained yet.
    for (flag, other) in [
        ("--desirable-weight", "--undesirable-weight"),
        ("--undesirable-weight", "--desirable-weight"),
    ] {
        let out = folder.path().join(flag);
        let out = out.to_str().unwrap();
        let begin = ["tune", "-m", MODEL, "--data", &judged, "--out", out, "--raw", "--kto"];
        let few = ["--steps", "1", "--held-out", "none", "--batch-tokens", "2000", flag, "0"];
        let (code, _, stderr) = run(&[&begin[..], &few, &[other, "3"]].concat());
        assert_eq!(code, 0, "{stderr}");
        let log = std::fs::read_to_string(Path::new(out).join("loss.jsonl")).unwrap();
        let first: Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
        assert!((first["loss"].as_f64().unwrap() - 0.75).abs() < 1e-6, "{first}");
    }
    let texts = texts(folder.path());
    for (data, expected) in
        [(&texts, "line 1: label: expected true or false, found nothing"), (&judged, "--kto")]
    {
        let kto: &[&str] = if data == &texts { &["--kto"] } else { &[] };
        let begin = ["tune", "-m", MODEL, "--data", data, "--raw"];
        let (code, _, stderr) = run(&[&begin[..], kto].concat());
        assert!(code == 1 && stderr.contains(expected), "{stderr}");
    }
}

/// A folder of a tiny model in 16 bits, with a token for each printable character.
fn tiny(folder: &Path) -> String {
    let to = folder.join("tiny");
    std::fs::create_dir(&to).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(testing::models().join("qwen3").join(name), to.join(name)).unwrap();
    }
    let special = ["<unk>", "<s>", "</s>"].map(str::to_owned);
    // The space as byte-level vocabularies have it.
    let letters = std::iter::once('\u{120}').chain('!'..='~').map(String::from);
    let names: Vec<String> = special.iter().cloned().chain(letters).collect();
    let vocab: serde_json::Map<String, Value> =
        names.iter().enumerate().map(|(id, name)| (name.clone(), id.into())).collect();
    let added: Vec<Value> = special
        .iter()
        .enumerate()
        .map(|(id, content)| {
            serde_json::json!({ "id": id, "content": content, "special": true, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false })
        })
        .collect();
    let bytes = serde_json::json!({ "type": "ByteLevel", "add_prefix_space": false,
        "trim_offsets": true, "use_regex": true });
    let tokenizer = serde_json::json!({ "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": added, "normalizer": null, "pre_tokenizer": bytes, "post_processor": null,
        "decoder": bytes, "model": { "type": "BPE", "vocab": vocab, "merges": [] } });
    std::fs::write(to.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    to.to_str().unwrap().to_owned()
}

#[test]
fn all_weights_of_a_folder_are_tuned_to_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = (tiny(folder.path()), texts(folder.path()));
    let tune = |out: &str, more: &[&str]| {
        let out = folder.path().join(out).to_str().unwrap().to_owned();
        let begin = ["tune", "--full", "-m", &model, "--data", &data, "--out", &out];
        let few = ["--steps", "6", "--lr", "1e-2", "--held-out", "25%", "--batch-tokens", "96"];
        let (code, stdout, stderr) = run(&[&begin[..], &few, more].concat());
        assert_eq!((code, stdout.trim_end()), (0, out.as_str()), "{stderr}");
        assert!(stderr.contains(&format!("try it: delft run {out}")), "{stderr}");
        (out, stderr)
    };
    let (out, stderr) = tune("all", &["--sample", "The", "--sample-every", "3"]);
    assert_eq!(stderr.matches(": The").count(), 2, "{stderr}");
    let eval = |model: &str| object(&["eval", "-m", model, "--data", &data, "--json"]);
    let loss = |model: &str| eval(model)["loss"].as_f64().unwrap();
    assert!(loss(&out) + 0.5 < loss(&model), "{} {}", loss(&out), loss(&model));
    // Activations that are computed again are the same.
    let (again, _) = tune("again", &["--recompute"]);
    let weights =
        |folder: &str| std::fs::read(Path::new(folder).join("model.safetensors")).unwrap();
    assert!(weights(&out) == weights(&again));
    assert!(weights(&out) != weights(&model));
    // A run never writes over a model that is not its own.
    let kept = weights(&model);
    for (args, expected) in [
        (["--full", "-m", &model, "--out", &model], "of the run's own, found the model's"),
        (["--full", "-m", &out, "--out", &model], "of the run's own, found config.json"),
    ] {
        let begin = ["tune", "--data", &data];
        let (code, _, stderr) = run(&[&begin[..], &args].concat());
        assert!(code == 1 && stderr.contains(expected), "{args:?}: {stderr}");
    }
    assert!(weights(&model) == kept);
    for (args, wanted, expected) in [
        (["--full", "-m", MODEL], 1, "a GGUF file can be tuned with LoRA"),
        (["--full", "--rank", "4"], 2, "cannot be used with"),
    ] {
        let to = folder.path().join("none");
        let begin = ["tune", "--data", &data, "--out", to.to_str().unwrap()];
        let (code, _, stderr) = run(&[&begin[..], &args].concat());
        assert!(code == wanted && stderr.contains(expected), "{args:?}: {stderr}");
    }
}

#[test]
fn what_makes_no_sense_is_refused_before_anything_is_written() {
    let folder = tempfile::tempdir().unwrap();
    let (data, out) = (texts(folder.path()), folder.path().join("out"));
    let cases: &[(&[&str], i32, &str)] = &[
        (&["--resume"], 1, "expected a run to go on with"),
        (&["--batch-tokens", "8"], 1, "--batch-tokens: expected at least"),
        (&["--context", "8", "--sites", "nonsense"], 1, "nonsense"),
        (&["--patience", "2"], 1, "--patience: expected held-out examples, found none"),
        (&["--held-out", "/nowhere/x.jsonl"], 1, "/nowhere/x.jsonl"),
        (&["--held-out", "200%"], 2, "expected a share"),
        (&["--steps", "2", "--epochs", "2"], 2, "cannot be used with"),
        (&["--lr", "0"], 2, "expected a number above 0"),
        (&["--adam-beta2", "1"], 2, "expected a number from 0 to below 1"),
        (&["--lora", "--full"], 2, "cannot be used with"),
        (&["--schedule", "round"], 2, "possible values"),
        (&["--warmup", "x"], 2, "expected a number of updates, or a share"),
        (&["--lr", "1e-4", "--min-lr", "1e-3"], 1, "--min-lr: expected 0.0001 at most"),
        (&["--beta", "1"], 2, "--dpo"),
        (&["--dropout", "1"], 2, "expected a number from 0 to below 1"),
        (&["--dropout", "0.1", "--dora"], 1, "dropout: expected LoRA of single matrices"),
        (&["--dropout", "0.1", "--dpo"], 2, "cannot be used with"),
        (&["--neftune", "0"], 2, "expected a number above 0"),
        (&["--whole", "norms"], 1, "whole: expected some of embeddings, head, found norms"),
        (&["--full", "--whole", "head"], 2, "cannot be used with"),
        (&["--kto", "--pairs", "ipo"], 2, "cannot be used with"),
        (&["--desirable-weight", "2"], 2, "--kto"),
        (&["--dpo", "--prompts"], 2, "cannot be used with"),
        (&["--pairs", "orpo", "--gamma", "1"], 2, "--gamma: expected --pairs simpo"),
        (&["--full", "--pairs", "ipo"], 2, "--pairs: expected simpo or orpo"),
        (&["--sample-every", "2"], 2, "--sample"),
    ];
    for (args, wanted, expected) in cases {
        let begin = ["tune", "-m", MODEL, "--data", &data, "--out", out.to_str().unwrap()];
        let (code, stdout, stderr) = run(&[&begin[..], args].concat());
        assert!(
            code == *wanted && stdout.is_empty() && stderr.contains(expected),
            "{args:?}: {stderr}"
        );
        assert!(!out.exists(), "{args:?}");
    }
    let (code, _, stderr) = run(&["tune", "-m", MODEL, "--data", &data, "--out", &data]);
    assert!(code == 1 && stderr.contains("a folder, or a name that is free"), "{stderr}");
}

/// Ctrl-C leaves a checkpoint, from which the run goes on to the same bytes.
#[cfg(target_os = "linux")]
#[test]
fn a_run_that_was_interrupted_ends_in_the_same_bytes() {
    interrupted(&[]);
}

/// Random numbers go on where they were.
#[cfg(target_os = "linux")]
#[test]
fn a_run_with_dropout_that_was_interrupted_ends_in_the_same_bytes() {
    interrupted(&["--dropout", "0.2", "--neftune", "5", "--whole", "embeddings", "--layers", "2"]);
}

#[cfg(target_os = "linux")]
fn interrupted(settings: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let data = texts(folder.path());
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let tune = |out: &str, more: &[&str]| {
        let mut command = delft();
        command.args(["tune", "-m", MODEL, "--data", &data, "--out", out]).args(FEW);
        command.args(settings).args(more);
        command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::piped());
        command.spawn().unwrap()
    };
    let (whole, cut) = (at("whole"), at("cut"));
    assert!(tune(&whole, &[]).wait().unwrap().success());
    let child = tune(&cut, &[]);
    let log = Path::new(&cut).join("loss.jsonl");
    // Behind the first update.
    while std::fs::read_to_string(&log).unwrap_or_default().lines().count() < 2 {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let kill = std::process::Command::new("kill").args(["-INT", &child.id().to_string()]).status();
    assert!(kill.unwrap().success());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("--resume goes on from there"), "{stderr}");
    assert!(tune(&cut, &["--resume"]).wait().unwrap().success());
    for name in
        ["adapter_model.safetensors", "checkpoint.delft", "loss.jsonl", "loss.svg", "delft.json"]
    {
        let read = |folder: &str| std::fs::read(Path::new(folder).join(name)).unwrap();
        assert!(read(&whole) == read(&cut), "{name}");
    }
}

/// A simulated GPU learns what the CPU does, and writes the same bytes again.
#[test]
fn a_gpu_learns_as_the_cpu_does() {
    let folder = tempfile::tempdir().unwrap();
    let (model, data) = (tiny(folder.path()), texts(folder.path()));
    let begin = ["tune", "-m", &model, "--data", &data, "--held-out", "none"];
    let tune = |name: &str, more: &[&str]| {
        let out = folder.path().join(name);
        let rate = if more.contains(&"--full") { "1e-3" } else { "1e-2" };
        let few = ["--steps", "2", "--lr", rate, "--batch-tokens", "96", "--json", "--out"];
        let report = object(&[&begin[..], &few, &[out.to_str().unwrap()], more].concat());
        let log = std::fs::read_to_string(out.join("loss.jsonl")).unwrap();
        let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let losses: Vec<f64> = lines.filter_map(|line| line["loss"].as_f64()).collect();
        let file = if more.contains(&"--full") { "model" } else { "adapter_model" };
        let bytes = std::fs::read(out.join(file).with_extension("safetensors")).unwrap();
        (losses, bytes, report["device_peak_bytes"].as_u64())
    };
    let near = |losses: &[f64], cpu: &[f64], bound: f64| {
        losses.len() == 2 && losses.iter().zip(cpu).all(|(a, b)| (a / b - 1.0).abs() < bound)
    };
    let disturbed = ["--whole=embeddings,head", "--dropout=0.2", "--neftune=5"];
    for what in [&[][..], &["--full"], &["--full", "--layers=1"], &disturbed] {
        let named = |name: &str| [name, &what.concat()].concat();
        let (cpu, _, none) = tune(&named("cpu"), &[&["--precision", "f32"][..], what].concat());
        assert!(cpu.len() == 2 && none.is_none());
        let exact = [&["--device", "sim", "--precision", "f32"][..], what].concat();
        let gpu = tune(&named("gpu"), &exact);
        assert!(near(&gpu.0, &cpu, 1e-4) && gpu.2 > Some(0), "{gpu:?} {cpu:?}");
        assert!(tune(&named("again"), &exact) == gpu);
        for place in ["sim", "cpu"] {
            let halves = [&["--device", place, "--precision", "bf16"][..], what].concat();
            let (rounded, ..) = tune(&named(&format!("rounded-{place}")), &halves);
            assert!(near(&rounded, &cpu, 0.02), "{place}: {rounded:?} {cpu:?}");
        }
    }
    let refused = |more: &[&str], memory: &str, expected: &str| {
        let out = folder.path().join("refused");
        let out = ["--out", out.to_str().unwrap()];
        let mut command = delft();
        command.args(begin).args(more).args(out).env("DELFT_SIM_MEMORY", memory);
        let output = command.output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(status(&output) == 1 && stderr.contains(expected), "{more:?}: {stderr}");
    };
    let full = ["--device", "sim", "--full", "--batch-tokens", "96"];
    refused(&full, "300000", "bytes of its memory for weights");
    refused(&full, "1000000", "batches of 96 tokens");
}

/// With `--prompts`, every token of a prompt and its completion but the first is learned.
#[test]
fn prompts_are_learned_if_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let line = "{\"prompt\": \"Once upon a time\", \"completion\": \" a fox ran.\"}\n";
    let data = file(folder.path(), "talks.jsonl", line);
    let learned = |more: &[&str]| {
        let out = folder.path().join(more.concat());
        let begin =
            ["tune", "-m", MODEL, "--data", &data, "--raw", "--steps", "1", "--warmup", "5%"];
        let (code, _, stderr) =
            run(&[&begin[..], &["--out", out.to_str().unwrap()], more].concat());
        assert_eq!(code, 0, "{stderr}");
        let told = stderr.lines().find(|line| line.contains("learned: ")).unwrap().to_owned();
        let numbers = told.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok());
        numbers.collect::<Vec<u64>>()
    };
    let (own, all) = (learned(&[]), learned(&["--prompts"]));
    assert!(own[..2] == all[..2] && own[2] < all[2], "{own:?} {all:?}");
    assert_eq!(all[2], all[1] - 1, "{all:?}");
}

//! `delft why-slow`: that its parts add up, that its bytes are those of the file, and that it says
//! what is the matter.

use crate::common::{delft, fixture, status};
use serde_json::Value;
use std::process::Command;

fn json(command: &mut Command) -> Value {
    let output = command.output().unwrap();
    assert_eq!(status(&output), 0, "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("{key}: {value}"))
}

const PROMPT: usize = 40;
const STEPS: usize = 12;

fn profile(model: &[&str], extra: &[&str]) -> Value {
    let (prompt, steps) = (PROMPT.to_string(), STEPS.to_string());
    json(
        delft()
            .arg("why-slow")
            .args(model)
            .args(["-p", &prompt, "-n", &steps, "--json"])
            .args(extra),
    )
}

fn named<'a>(phase: &'a Value, name: &str) -> &'a Value {
    let rows = phase["operations"].as_array().unwrap();
    rows.iter().find(|row| row["name"] == name).unwrap_or_else(|| panic!("{name}: {phase}"))
}

#[test]
fn parts_add_up_and_bytes_are_those_of_the_file() {
    let small = [fixture("qwen3/model.q8_0.gguf"), fixture("llama3")];
    // Nothing: the bundled model.
    let models: [&[&str]; 3] = [&[], &["-m", &small[0]], &["-m", &small[1]]];
    for model in models {
        let found = profile(model, &["--threads", "1"]);
        let file = json(delft().arg("inspect").args(model).args(["--tensors", "--json"]));
        for name in ["prefill", "decode"] {
            let phase = &found[name];
            let rows = phase["operations"].as_array().unwrap();
            let operations: f64 = rows.iter().map(|row| number(row, "seconds")).sum();
            let noted = operations + number(phase, "sampling_s") + number(phase, "barriers_s");
            let (rest, total) = (number(phase, "rest_s"), number(phase, "seconds"));
            assert!((noted + rest - total).abs() < 1e-6 * total, "{model:?} {name}: {phase}");
            // What no clock was around: starting the replay, angles, block tables. On a busy
            // machine a turn lost there may be longer than all else.
            assert!(rest > 0.0 && operations > 0.0, "{model:?} {name}: {rest} of {total}");
            let shares: f64 = rows.iter().map(|row| number(row, "share")).sum();
            assert!((shares - operations / total).abs() < 1e-6, "{model:?} {name}: {shares}");
            for row in rows {
                assert!(number(row, "seconds") > 0.0 && number(row, "bytes") > 0.0, "{row}");
                assert!(number(row, "busy_s") <= 1.000_001 * number(row, "seconds"), "{row}");
            }
        }

        let decode = &found["decode"];
        // Every matrix once a token, but for a table that only embeds. Panels of 16 rows may end in
        // padding.
        let tied = file["tied"] == true;
        let matrices: f64 = (file["tensors"].as_array().unwrap().iter())
            .filter(|t| t["shape"].as_array().unwrap().len() == 2)
            .filter(|t| {
                let name = t["name"].as_str().unwrap();
                tied || !(name.starts_with("token_embd") || name.contains("embed_tokens"))
            })
            .map(|t| number(t, "bytes"))
            .sum();
        let products = ["project", "linear_add", "gate_up", "head"];
        let read: f64 = products.iter().map(|name| number(named(decode, name), "bytes")).sum();
        assert!((1.0..1.06).contains(&(read / matrices)), "{model:?}: {read} for {matrices}");

        let [layers, kv_heads, head_dim] =
            ["layers", "kv_heads", "head_dim"].map(|key| number(&file, key));
        let [hidden, vocab] = ["hidden", "vocab"].map(|key| number(&file, key));
        // The first step behind the prompt only warms up: those after it see one position more
        // each.
        let seen = PROMPT as f64 + 1.0 + (STEPS as f64 + 1.0) / 2.0;
        let attention = named(decode, "attention");
        // Two bytes an element; values are kept in whole vectors of 16.
        let both = head_dim + 16.0 * (head_dim / 16.0).ceil();
        let cached = layers * seen * kv_heads * both * 2.0;
        assert!((number(attention, "bytes") - cached).abs() < 1.0, "{attention} for {cached}");
        assert_eq!(number(attention, "count"), layers);
        assert_eq!(number(named(decode, "head"), "operations"), 2.0 * hidden * vocab);
        // Of a prefill, only the last token's logits are wanted.
        assert_eq!(number(named(&found["prefill"], "head"), "operations"), 2.0 * hidden * vocab);
        let project = |phase: &str| number(named(&found[phase], "project"), "operations");
        assert_eq!(project("prefill"), PROMPT as f64 * project("decode"));

        assert!(number(&found, "read_bytes_per_s") > 1e6);
        assert!(number(&found["peaks"], "byte_dots_per_s") > 1e6, "{found}");
        let verdicts = found["verdicts"].as_array().unwrap();
        assert!(!verdicts.is_empty());
        for verdict in verdicts {
            let text = verdict["found"].as_str().unwrap();
            assert!(text.contains(|c: char| c.is_ascii_digit()), "no figure: {verdict}");
            assert!(!verdict["mend"].as_str().unwrap().is_empty());
        }
    }
}

/// The same table of a GPU, by its own clock, whose launches are those of the operations.
#[test]
fn a_gpu_times_its_operations() {
    for (model, device) in [("qwen3/model.q8_0.gguf", "sim"), ("llama3", "sim")] {
        let model = fixture(model);
        let run = |device: &str| {
            let flags = ["-p", "12", "-n", "2", "--json", "--device", device];
            json(delft().args(["why-slow", "-m", &model]).args(flags))
        };
        let (found, on_cpu) = (run(device), run("cpu"));
        for name in ["prefill", "decode"] {
            let phase = &found[name];
            let rows = phase["operations"].as_array().unwrap();
            let operations: f64 = rows.iter().map(|row| number(row, "seconds")).sum();
            let noted = operations + number(phase, "barriers_s");
            let total = number(phase, "seconds");
            assert!((noted - total).abs() < 1e-6 * total, "{model} {name}: {phase}");
            for row in rows {
                assert!(number(row, "seconds") > 0.0 && number(row, "bytes") > 0.0, "{row}");
                let other = named(&on_cpu[name], row["name"].as_str().unwrap());
                assert_eq!(row["count"], other["count"], "{row} for {other}");
                assert_eq!(row["operations"], other["operations"], "{row} for {other}");
            }
            let formats = |found: &Value| -> Vec<String> {
                let rows = found[name]["formats"].as_array().unwrap();
                rows.iter().map(|row| row["name"].as_str().unwrap().to_string()).collect()
            };
            assert_eq!(formats(&found), formats(&on_cpu));
        }
        assert!(number(&found, "untimed_s") > 0.0);
        assert!(number(&found["peaks"], "floats_per_s") > 1e3, "{found}");
        assert!(number(&found["peaks"], "tiles_per_s") > 1e3, "{found}");
        assert_eq!(found["disturbed"], false);
    }
}

#[test]
fn a_step_of_several_sequences_reads_its_weights_once() {
    let model = fixture("llama3");
    for device in ["cpu", "sim"] {
        let run = |more: &[&str]| {
            let flags = ["-p", "12", "-n", "2", "--json", "--device", device];
            json(delft().args(["why-slow", "-m", &model]).args(flags).args(more))
        };
        let (one, three) = (run(&[]), run(&["--batch", "3"]));
        let [one, three] = [&one["decode"], &three["decode"]];
        assert_eq!((&one["tokens"], &three["tokens"]), (&1.into(), &3.into()));
        let rate = number(three, "tok_s") * number(three, "seconds");
        assert!((rate - 3.0).abs() < 1e-6, "{device}: {three}");
        for name in ["project", "gate_up", "linear_add", "head", "attention"] {
            let figure = |phase: &Value, key: &str| number(named(phase, name), key);
            assert_eq!(figure(three, "operations"), 3.0 * figure(one, "operations"), "{name}");
            let times = if name == "attention" { 3.0 } else { 1.0 };
            assert_eq!(figure(three, "bytes"), times * figure(one, "bytes"), "{device}: {name}");
        }
    }
}

#[test]
fn a_hobbled_run_is_told_why() {
    let causes = |found: &Value| -> Vec<String> {
        let verdicts = found["verdicts"].as_array().unwrap();
        verdicts.iter().map(|v| v["cause"].as_str().unwrap().to_string()).collect()
    };
    let model = fixture("qwen3/model.q8_0.gguf");
    let scalar = {
        let (prompt, steps) = (PROMPT.to_string(), STEPS.to_string());
        json(
            delft()
                .args(["why-slow", "-m", &model, "-p", &prompt, "-n", &steps, "--json"])
                .env("DELFT_ISA", "scalar"),
        )
    };
    assert_eq!(scalar["peaks"]["isa"], "scalar");
    let lesser = scalar["best_peaks"]["isa"] != "scalar";
    assert_eq!(causes(&scalar).contains(&"instructions".to_string()), lesser, "{scalar}");
    let cores = scalar["cores"].as_u64().unwrap();
    let one = profile(&["-m", &model], &["--threads", "1"]);
    assert_eq!(causes(&one).contains(&"threads".to_string()), cores > 1, "{one}");
    let many = profile(&["-m", &model], &["--threads", &(cores + 2).to_string()]);
    assert!(causes(&many).contains(&"threads".to_string()), "{many}");
}

#[test]
fn the_page_fits_its_width() {
    let output = delft().args(["why-slow", "-p", "20", "-n", "9"]).output().unwrap();
    assert_eq!(status(&output), 0, "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    assert!(!text.contains('\u{1b}'), "{text}");
    for part in
        ["prefill of 20 tokens", "decode at depth", "OF ROOF", "attention", "sampling", "barriers"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let (_, verdicts) = text.split_once("what holds it back\n").unwrap();
    assert!(verdicts.starts_with("1. ") && verdicts.contains("   -> "), "{text}");
}

//! Every flag of every command: it changes what comes out, says so, or is refused by its name. A
//! flag without a row in the table fails the test.

use crate::common::{delft, fed, lettered};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// How a flag is seen to be used.
#[derive(Clone, Copy)]
enum Seen {
    /// With these arguments something is written that has these words: a refusal, or a statement.
    Says(&'static str, &'static str),
    /// Other output, status or files with the second arguments than with the first.
    Changes(&'static str, &'static str),
    /// Where it is tested, or why it cannot be seen from here.
    Elsewhere(&'static str),
}
use Seen::{Changes, Elsewhere, Says};

/// Commands that load a model, without serve.
const LOADING: &str =
    "run chat batch logits bench why-slow perplexity compare imatrix verify embed classify eval";
/// Those that write with settings that they tell.
const WRITING: &str = "run chat";

/// A command that reads {m} or {w}, model folders; {b} a batch, {t} a text, {d} examples, {r} a
/// reference, {o} what it writes. What it prints follows from the flags alone.
const BASES: &[(&str, &str)] = &[
    ("run", "run -m {m} -p ab --seed 1"),
    ("chat", "chat -m {m} --seed 1 --plain"),
    ("batch", "batch -m {m} {b}"),
    ("serve", "serve --template {m}/nowhere"),
    ("logits", "logits -m {m} --tokens 5,6,7,8,9,10 --json"),
    ("bench", "bench -m {m} -p 4 -n 2 -r 1"),
    ("why-slow", "why-slow -m {m} -p 4 -n 2"),
    ("perplexity", "perplexity -m {m} {t} --json"),
    ("compare", "compare {m} {m} {t} --json"),
    ("imatrix", "imatrix -m {m} {t} -o {o}"),
    ("verify", "verify -m {m} --against {r} --json"),
    ("embed", "embed -m {m} --pooling last abcdefgh"),
    ("classify", "classify -m {m} --labels a,b abcdefgh"),
    ("eval", "eval -m {m} --data {d}"),
    ("tune", "tune -m {m} --data {d} --out {o}"),
    ("quantize", "quantize {w} q8_0 -o {o}"),
    ("convert", "convert {w} -o {o}"),
    ("inspect", "inspect {m}"),
    ("show", "show {m}"),
    ("tokenize", "tokenize -m {m} <s>ab"),
    ("fuse", "fuse -m {m} --adapter {a} -o {o}"),
    ("list", "list"),
    ("doctor", "doctor"),
];

/// Commands, flags, and how each is seen there.
const TABLE: &[(&str, &str, Seen)] = &[
    // The model.
    (LOADING, "--model", Elsewhere("words.rs")),
    ("serve inspect tune fuse show tokenize convert quantize", "--model", Elsewhere("words.rs")),
    (LOADING, "--yes", Elsewhere("hub.rs")),
    ("serve inspect tune fuse show tokenize convert quantize rm", "--yes", Elsewhere("hub.rs")),
    // Loading.
    ("run chat", "--ctx", Says("--ctx 2", "context")),
    ("batch", "--ctx", Changes("--ctx 8", "--ctx 2")),
    ("logits verify embed classify", "--ctx", Says("--ctx 2", "at most 2 more tokens")),
    ("bench why-slow", "--ctx", Says("--ctx 2", "--ctx: expected at least")),
    ("perplexity compare", "--ctx", Changes("--ctx 16", "--ctx 32")),
    ("imatrix eval", "--ctx", Changes("--ctx 16", "--ctx 32")),
    ("serve", "--ctx", Elsewhere("serve.rs")),
    ("run", "--rotate", Changes("--ctx 5 -n 9 --temp 0", "--ctx 5 -n 9 --temp 0 --rotate")),
    ("chat", "--rotate", Changes("--ctx 7 -n 9 --temp 0", "--ctx 7 -n 9 --temp 0 --rotate")),
    ("batch", "--rotate", Changes("--ctx 5 -n 9", "--ctx 5 -n 9 --rotate")),
    ("logits verify embed classify", "--rotate", Changes("--ctx 5", "--ctx 5 --rotate")),
    ("perplexity compare imatrix eval bench why-slow", "--rotate", Says("--rotate", "--rotate: ")),
    ("serve", "--rotate", Elsewhere("engine: a context that rotates")),
    (LOADING, "--threads", Elsewhere("no result follows from it: device/src/tests/together.rs")),
    ("serve tune convert quantize", "--threads", Elsewhere("no result follows from it")),
    ("logits perplexity verify embed classify imatrix", "--device", Changes("", "--device sim")),
    ("run chat batch bench why-slow compare eval", "--device", Elsewhere("refusals.rs")),
    ("serve", "--device", Says("--device cpu --dispatch graph", "--dispatch")),
    (LOADING, "--gpu-layers", Says("--device cpu --gpu-layers 1", "GPU layers: ")),
    (LOADING, "--cpu-moe", Says("--device cpu --cpu-moe", "experts on the CPU: ")),
    (LOADING, "--n-cpu-moe", Says("--device cpu --n-cpu-moe 1", "experts on the CPU: ")),
    ("inspect", "--device", Changes("--device cpu", "--device sim")),
    ("inspect", "--cpu-moe", Says("--device cpu --cpu-moe", "experts on the CPU: ")),
    ("inspect", "--n-cpu-moe", Says("--device cpu --n-cpu-moe 1", "experts on the CPU: ")),
    ("serve", "--gpu-layers", Elsewhere("refused where a model is loaded")),
    ("serve", "--cpu-moe", Elsewhere("refused where a model is loaded")),
    ("serve", "--n-cpu-moe", Elsewhere("refused where a model is loaded")),
    (LOADING, "--split-mode", Says("--device cpu --split-mode layer", "--split-mode: ")),
    ("serve", "--split-mode", Says("--device cpu --split-mode layer", "--split-mode: ")),
    (LOADING, "--dispatch", Says("--device cpu --dispatch graph", "--dispatch: ")),
    ("serve", "--dispatch", Says("--device cpu --dispatch eager", "--dispatch: ")),
    (LOADING, "--as-served", Says("--device cpu --as-served", "--as-served: ")),
    ("serve", "--as-served", Says("--as-served", "--as-served: ")),
    ("imatrix", "--chunk", Says("--chunk 65", "--chunk: ")),
    (
        "run chat batch serve logits bench why-slow perplexity compare verify embed classify eval",
        "--chunk",
        Elsewhere("no result follows from it: engine's memory.rs"),
    ),
    (LOADING, "--cache-type", Says("--cache-type turbo", "a cache of turbo: ")),
    ("inspect", "--cache-type", Changes("", "--cache-type f32")),
    ("serve", "--cache-type", Elsewhere("refused where a model is loaded")),
    (LOADING, "--allow-nan", Elsewhere("refusals.rs")),
    ("serve", "--allow-nan", Elsewhere("refusals.rs")),
    (LOADING, "--ignore-key", Says("--ignore-key odd", "odd: is no setting of this model")),
    ("serve", "--ignore-key", Elsewhere("as where a model is loaded")),
    ("fuse", "--ignore-key", Elsewhere("adapters.rs")),
    ("run chat", "--adapter", Changes("--temp 0 -n 9", "--temp 0 -n 9 --adapter {a}=9")),
    ("batch", "--adapter", Changes("--temp 0 -n 9", "--temp 0 -n 9 --adapter {a}=9")),
    (
        "logits perplexity compare imatrix verify embed classify eval",
        "--adapter",
        Changes("", "--adapter {a}"),
    ),
    ("bench why-slow", "--adapter", Says("--adapter {a}=0.5", "does not say which model")),
    ("serve fuse", "--adapter", Elsewhere("adapters.rs")),
    (LOADING, "--any-base", Says("--any-base", "--adapter")),
    ("serve", "--any-base", Says("--any-base", "--adapter")),
    ("fuse convert", "--any-base", Elsewhere("adapters.rs")),
    ("convert", "--adapter", Elsewhere("adapters.rs")),
    // Sampling.
    ("run", "--max-tokens", Says("-n 3 -v", "max-tokens 3")),
    ("chat", "--max-tokens", Says("-n 3", "cut after 3 tokens")),
    (WRITING, "--temp", Says("-n 3 -v --temp 0.3", "temperature 0.3")),
    (WRITING, "--top-k", Says("-n 3 -v --top-k 7", "top-k 7")),
    (WRITING, "--top-p", Says("-n 3 -v --top-p 0.7", "top-p 0.7")),
    (WRITING, "--min-p", Says("-n 3 -v --min-p 0.2", "min-p 0.2")),
    (WRITING, "--repeat-penalty", Says("-n 3 -v --repeat-penalty 1.5", "repetition 1.5")),
    (
        WRITING,
        "--repeat-last-n",
        Says("-n 3 -v --repeat-penalty 1.5 --repeat-last-n 9", "(last 9)"),
    ),
    (WRITING, "--presence-penalty", Says("-n 3 -v --presence-penalty 1.5", "presence 1.5")),
    (WRITING, "--frequency-penalty", Says("-n 3 -v --frequency-penalty 1.5", "frequency 1.5")),
    (WRITING, "--logit-bias", Says("-n 3 -v --logit-bias 9+2", "bias of 1 token")),
    (WRITING, "--dry-multiplier", Says("-n 3 -v --dry-multiplier 0.5", "DRY 0.5")),
    (WRITING, "--dry-base", Says("-n 3 -v --dry-multiplier 0.5 --dry-base 3", "0.5 x 3^")),
    (
        WRITING,
        "--dry-allowed-length",
        Says("-n 3 -v --dry-multiplier 0.5 --dry-allowed-length 5", "(length - 5)"),
    ),
    ("chat", "--dry-penalty-last-n --stop", Elsewhere("read by the same code as run's")),
    (
        "run",
        "--dry-penalty-last-n",
        Says("-n 3 -v --dry-multiplier 0.5 --dry-penalty-last-n 33", "dry-penalty-last-n 33"),
    ),
    (WRITING, "--dry-sequence-breaker", Elsewhere("engine: sampling")),
    (WRITING, "--xtc-probability", Says("-n 3 -v --xtc-probability 0.5", "XTC 0.5")),
    (
        WRITING,
        "--xtc-threshold",
        Says("-n 3 -v --xtc-probability 0.5 --xtc-threshold 0.3", "threshold 0.3"),
    ),
    (WRITING, "--seed", Says("-n 3 -v", "seed 1")),
    ("run", "--stop", Says("-n 3 -v --stop xyz", "stop \"xyz\"")),
    (WRITING, "--ignore-eos", Elsewhere("engine: generation")),
    (
        "batch",
        "--max-tokens --temp --top-k --top-p --min-p --repeat-penalty --repeat-last-n --presence-penalty \
         --frequency-penalty --logit-bias --dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n \
         --dry-sequence-breaker --xtc-probability --xtc-threshold --seed --stop --ignore-eos",
        Elsewhere("read by the same code as run's"),
    ),
    // Flags of single commands.
    (
        "run",
        "--prompt --file --raw --chat --special --show-prompt --template",
        Elsewhere("prompts.rs, templates.rs"),
    ),
    ("run chat", "--system --think", Elsewhere("prompts.rs, templates.rs, chat.rs")),
    (
        "run",
        "--echo --no-echo --verbose --quiet --json --json-lines",
        Elsewhere("stories.rs, prompts.rs"),
    ),
    ("chat", "--plain --verbose", Elsewhere("chat.rs")),
    ("run batch", "--schema --grammar", Elsewhere("grammar.rs")),
    ("batch", "--output", Elsewhere("batch.rs")),
    (
        "serve",
        "--host --port --api-key --api-key-file --insecure-public --embeddings --cors --allow-host --parallel --queue \
         --timeout --max-tokens --drain --keep-alive --memory --admin-key-file --record --sessions --adapter-room \
         --adapter-rank --verbose",
        Elsewhere("serve.rs, and the tests of serve"),
    ),
    ("serve", "--template", Says("", "nowhere")),
    ("serve", "--tune --tune-out --tune-flags", Elsewhere("tuning.rs")),
    ("pull", "--force --quiet", Elsewhere("hub.rs")),
    ("ps stop replay", "--url --api-key-file", Elsewhere("serve.rs")),
    ("ps replay", "--json", Elsewhere("serve.rs")),
    ("list show inspect", "--json", Changes("", "--json")),
    // How much memory is free changes by itself.
    ("doctor", "--json", Says("--json", "{")),
    ("inspect", "--ctx", Changes("", "--ctx 99")),
    ("run", "--top-logprobs", Elsewhere("batch.rs")),
    ("inspect", "--tensors", Changes("", "--tensors")),
    (
        "tune",
        "--data --out --from --resume --lora --full --held-out --raw --prompts --truncate --dpo --pairs --beta --gamma --recompute --patience --sample \
         --sample-every --checkpoint-every --device --json",
        Elsewhere("tuning.rs"),
    ),
    ("tune", "--context", Changes("--steps 2", "--steps 2 --context 8")),
    ("tune", "--rank", Changes("--steps 2", "--steps 2 --rank 3")),
    ("tune", "--layers", Changes("--steps 2", "--steps 2 --layers 1")),
    ("tune", "--alpha", Changes("--steps 2", "--steps 2 --alpha 5")),
    ("tune", "--rslora", Changes("--steps 2", "--steps 2 --rslora")),
    ("tune", "--dora", Changes("--steps 2", "--steps 2 --dora")),
    ("tune", "--sites", Changes("--steps 2", "--steps 2 --sites q")),
    ("tune", "--whole", Changes("--steps 2", "--steps 2 --whole embeddings")),
    ("tune", "--dropout", Changes("--steps 2", "--steps 2 --dropout 0.3")),
    ("tune", "--neftune", Changes("--steps 2", "--steps 2 --neftune 5")),
    ("tune", "--kto", Says("--steps 1 --kto", "label: expected true or false")),
    ("tune", "--desirable-weight --undesirable-weight", Elsewhere("tuning.rs")),
    ("tune", "--min-lr", Changes("--steps 2", "--steps 2 --min-lr 1e-4")),
    ("tune", "--epochs", Changes("--epochs 1", "--epochs 2")),
    ("tune", "--steps", Changes("--steps 2", "--steps 1")),
    ("tune", "--batch-tokens", Changes("--steps 2", "--steps 2 --batch-tokens 64")),
    ("tune", "--accumulate", Changes("--steps 2", "--steps 2 --accumulate 2")),
    ("tune", "--lr", Changes("--steps 2", "--steps 2 --lr 0.1")),
    ("tune", "--schedule", Changes("--steps 3", "--steps 3 --schedule constant")),
    ("tune", "--warmup", Changes("--steps 2", "--steps 2 --warmup 2")),
    ("tune", "--adam-beta1", Changes("--steps 3", "--steps 3 --adam-beta1 0.1")),
    ("tune", "--adam-beta2", Changes("--steps 3", "--steps 3 --adam-beta2 0.1")),
    ("tune", "--adam-epsilon", Changes("--steps 2", "--steps 2 --adam-epsilon 1")),
    ("tune", "--weight-decay", Changes("--steps 2", "--steps 2 --weight-decay 9")),
    ("tune", "--clip", Changes("--steps 3 --clip 0", "--steps 3 --clip 1e-9")),
    ("tune", "--seed", Changes("--steps 2", "--steps 2 --seed 5")),
    ("tune", "--evaluate-every", Says("--steps 2 --evaluate-every 1", "--evaluate-every: ")),
    ("tune", "--precision", Elsewhere("tuning.rs")),
    ("eval", "--data --limit --raw --json", Elsewhere("tuning.rs")),
    ("fuse", "--output", Elsewhere("adapters.rs")),
    ("embed", "--file", Elsewhere("embed.rs")),
    ("embed", "--dimensions", Changes("", "--dimensions 4")),
    ("embed", "--pooling", Elsewhere("embed.rs")),
    ("embed", "--raw", Changes("", "--raw")),
    ("classify", "--file --labels", Elsewhere("embed.rs")),
    ("classify", "--prompt", Changes("", "--prompt a{}")),
    ("classify", "--raw", Changes("", "--raw")),
    ("tokenize", "--prompt --file", Elsewhere("prompts.rs")),
    ("tokenize", "--no-special", Elsewhere("models.rs")),
    ("tokenize", "--special", Changes("", "--special")),
    ("tokenize", "--show", Changes("", "--show")),
    ("tokenize", "--json", Changes("", "--json")),
    ("logits", "--tokens", Elsewhere("models.rs")),
    ("logits", "--last", Changes("", "--last 2")),
    ("logits", "--all", Changes("", "--all")),
    ("logits", "--generate", Changes("", "--generate 2")),
    ("logits", "--json", Elsewhere("in every other row")),
    ("bench", "--prompt --generate --repeat --json --load", Elsewhere("stories.rs, models.rs")),
    ("bench", "--requests", Says("--requests 2", "--requests: ")),
    ("bench", "--depth", Says("-d 3000", "beyond them")),
    ("bench", "--sampled", Says("--sampled --batch 2", "--sampled")),
    ("bench", "--batch", Says("--batch 2", "tg2")),
    ("bench", "--shared", Says("--shared 2", "--shared: ")),
    ("why-slow", "--prompt --generate --json", Elsewhere("why_slow.rs")),
    ("why-slow", "--batch", Says("--batch 2", "decode of 2 sequences")),
    ("perplexity", "--stride", Changes("--ctx 16", "--ctx 16 --stride 4")),
    ("perplexity compare imatrix", "--chunks", Changes("--ctx 16", "--ctx 16 --chunks 2")),
    ("perplexity compare imatrix verify", "--json", Elsewhere("models.rs, formats.rs")),
    ("compare", "--worst", Changes("--ctx 16", "--ctx 16 --worst 1")),
    ("compare", "--svg", Changes("--ctx 16", "--ctx 16 --svg {o}")),
    ("imatrix", "--out --force", Elsewhere("formats.rs")),
    ("verify", "--against --make", Elsewhere("models.rs")),
    ("verify", "--tokens", Says("--tokens 5", "--tokens")),
    ("verify", "--tolerance", Changes("", "--tolerance 0")),
    ("convert quantize", "--out --force --json", Elsewhere("formats.rs")),
    ("convert", "--type", Changes("", "--type q8_0")),
    ("convert quantize", "--role", Says("--role odd=f32", "role odd: ")),
    ("quantize", "--role", Changes("", "--role ffn_down=f32")),
    ("convert quantize", "--group-size", Says("--group-size 32", "--group-size: ")),
    ("quantize", "--imatrix", Elsewhere("formats.rs")),
];

/// The flags that a command's help lists.
fn flags(command: &str) -> BTreeSet<String> {
    let help = delft().args([command, "--help"]).output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let named = help.lines().filter_map(|indented| {
        // Options are at the left, their texts further in.
        let line = indented.trim_start();
        let indent = indented.len() - line.len();
        let long = match line.split_once(", ") {
            Some((short, rest)) if short.len() == 2 && short.starts_with('-') => rest,
            _ => line,
        };
        let long = long.split([' ', '=', ',']).next()?;
        let is_flag =
            indent < 8 && long.len() > 2 && long.starts_with("--") && line.starts_with('-');
        is_flag.then(|| long.to_owned())
    });
    named.filter(|flag| !["--help", "--version"].contains(&flag.as_str())).collect()
}

#[test]
fn every_flag_has_a_row() {
    let help = delft().arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let list = help.split("Commands:\n").nth(1).unwrap().split("\n\n").next().unwrap();
    let names = list.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let (mut lacking, mut known) = (Vec::new(), BTreeSet::new());
    for command in names.filter(|name| !["", "help"].contains(name)) {
        for flag in flags(command) {
            let row = |(commands, flags, _): &&(&str, &str, Seen)| {
                commands.split(' ').any(|c| c == command) && flags.split(' ').any(|f| f == flag)
            };
            if TABLE.iter().find(row).is_none() {
                lacking.push(format!("{command} {flag}"));
            }
            known.insert((command.to_owned(), flag));
        }
    }
    assert!(lacking.is_empty(), "no row for {lacking:?}");
    for (commands, flags, seen) in TABLE {
        let pairs = commands.split(' ').flat_map(|c| flags.split(' ').map(move |f| (c, f)));
        for (command, flag) in pairs {
            let there = known.contains(&(command.to_owned(), flag.to_owned()));
            assert!(there, "{command} has no {flag}");
        }
        assert!(!matches!(seen, Elsewhere("")), "{flags}: where?");
    }
}

/// The outcome of a command: status, output, errors, and the files that it wrote.
type Outcome = (Option<i32>, String, String, Vec<Vec<u8>>);

/// Runs a command's base with further arguments.
fn outcome(folder: &Path, base: &str, more: &str, out: &Path) -> Outcome {
    let at = |name: &str| folder.join(name).display().to_string();
    let adapter = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/reference/adapters/lora")
        .display()
        .to_string();
    let filled = |word: &str| {
        word.replace("{m}", &at("model"))
            .replace("{w}", &at("whole"))
            .replace("{b}", &at("batch.jsonl"))
            .replace("{t}", &at("text.txt"))
            .replace("{d}", &at("data.jsonl"))
            .replace("{r}", &at("reference"))
            .replace("{a}", &adapter)
            .replace("{o}", &out.display().to_string())
    };
    let words = base.split(' ').chain(more.split(' ').filter(|word| !word.is_empty()));
    let mut command = delft();
    // Where the flags leave it open, on the CPU.
    command.env("DELFT_DEVICE", "cpu").args(words.map(filled));
    let output = fed(&mut command, "ab\n");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut files = Vec::new();
    for file in [out.to_path_buf(), out.join("adapter_model.safetensors")] {
        files.extend(std::fs::read(file));
    }
    // How much memory is free changes by itself.
    let lasting = |line: &&str| !line.starts_with("  free ");
    let stdout = text(&output.stdout).split_inclusive('\n').filter(lasting).collect();
    (output.status.code(), stdout, text(&output.stderr), files)
}

#[test]
fn every_flag_is_used_or_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let at = |name: &str| scratch.path().join(name);
    std::fs::create_dir(at("model")).unwrap();
    lettered(&at("model"));
    crate::damaged::folder::Model::tiny().write(&at("whole"));
    std::fs::write(at("batch.jsonl"), "{\"prompt\": \"ab\", \"seed\": 1}\n").unwrap();
    std::fs::write(at("text.txt"), "The quick brown fox jumps over the lazy dog. ".repeat(13))
        .unwrap();
    let lines = ["abcdefghij klmnop", "qrstuv wxyz", "The fox"];
    let lines = lines.map(|text| serde_json::json!({ "text": text }).to_string() + "\n");
    std::fs::write(at("data.jsonl"), lines.concat()).unwrap();
    let made = format!("verify -m {} --make {}", at("model").display(), at("reference").display());
    let ids = "--tokens 5,6,7,8,9,10,11,12 --cache-type f32";
    assert_eq!(outcome(scratch.path(), &made, ids, &at("none")).0, Some(0));

    // One job for each command and row.
    let bases: BTreeMap<&str, &str> = BASES.iter().copied().collect();
    let mut jobs = Vec::new();
    for (commands, flag, seen) in TABLE {
        let runs = !matches!(seen, Elsewhere(_));
        jobs.extend(commands.split(' ').filter(|_| runs).map(|command| (command, *flag, *seen)));
    }
    let next = std::sync::atomic::AtomicUsize::new(0);
    let wrong = std::sync::Mutex::new(Vec::new());
    let work = || {
        loop {
            let i = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let Some(&(command, flag, seen)) = jobs.get(i) else { return };
            let base = bases[command];
            let run = |more: &str, which: &str| {
                outcome(scratch.path(), base, more, &at(&format!("out-{i}-{which}")))
            };
            let problem = match seen {
                Elsewhere(_) => None,
                Says(more, words) => {
                    let (_, stdout, stderr, _) = run(more, "a");
                    let said = stdout.contains(words) || stderr.contains(words);
                    (!said).then(|| format!("{more:?} does not say {words:?}: {stdout} {stderr}"))
                }
                Changes(without, with) => {
                    let (before, after) = (run(without, "a"), run(with, "b"));
                    // Once for each command: its output follows from its flags.
                    let mut earlier = jobs[..i].iter();
                    let first =
                        !earlier.any(|(of, _, seen)| *of == command && matches!(seen, Changes(..)));
                    let again = if first { run(without, "a2") } else { before.clone() };
                    // Speeds and names of files tell nothing.
                    let same = |a: &Outcome, b: &Outcome| match command {
                        "tune" | "imatrix" => (a.0, &a.3) == (b.0, &b.3),
                        "quantize" | "convert" => (a.0, &a.3) == (b.0, &b.3),
                        "run" | "batch" | "eval" => (a.0, &a.1) == (b.0, &b.1),
                        _ => a == b,
                    };
                    if !same(&before, &again) {
                        Some(format!("{without:?} alone changes: {before:?} {again:?}"))
                    } else if same(&before, &after) {
                        Some(format!(
                            "{with:?} changes nothing: {:?}",
                            (before.0, before.1, before.2)
                        ))
                    } else {
                        None
                    }
                }
            };
            if let Some(problem) = problem {
                wrong.lock().unwrap().push(format!("{command} {flag}: {problem}"));
            }
        }
    };
    std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(work))));
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), jobs.len(), wrong.join("\n"));
}

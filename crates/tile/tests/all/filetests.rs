//! Tests that are text files: `tests/filetests/*/*.tile`.
//!
//! The first line says what is tested, `; test: verify`; kernels follow, then `; expect:` and the
//! expected output. `BLESS=1 cargo test -p delft-tile --test filetests` writes what was found in
//! place of what was expected: read the difference before committing it. What can be tested is the
//! table in [`find`].

use std::path::{Path, PathBuf};

use tile::case::Buffer;
use tile::interp;
use tile::ir::{Access, Kernel, ParamKind};
use tile::launch::Numbers;
use tile::passes::{self, Pass, Target};
use tile::text;
use tile::verify::{Fault, verify};

#[path = "../filetests/recorded.rs"]
mod recorded;

/// What a test finds in its input, given the words after its name.
type Test = fn(input: &str, words: &[&str]) -> Result<String, String>;

fn find(name: &str) -> Option<Test> {
    Some(match name {
        "verify" => verified,
        "roundtrip" => round_trip,
        "pass" => passed,
        "run" => executed,
        _ => return None,
    })
}

/// A line for each kernel: `name: ok`, or its fault and the line at fault.
fn verified(input: &str, _: &[&str]) -> Result<String, String> {
    let kernels = match text::parse_all(input) {
        Ok(kernels) => kernels,
        Err(fault) => return Ok(format!("{fault}\n")),
    };
    let outcome = |kernel: &Kernel| match verify(kernel) {
        Ok(()) => format!("{}: ok\n", kernel.name),
        Err(fault) => format!("{fault}\n{}", quoted(kernel, &fault)),
    };
    Ok(kernels.iter().map(outcome).collect())
}

fn quoted(kernel: &Kernel, fault: &Fault) -> String {
    let text = kernel.to_string();
    let line = fault.line.checked_sub(1).and_then(|at| text.lines().nth(at));
    line.map_or_else(String::new, |line| format!("    {}\n", line.trim()))
}

/// The canonical text, which reads back to the same kernels.
fn round_trip(input: &str, _: &[&str]) -> Result<String, String> {
    let kernels = text::parse_all(input).map_err(|e| e.to_string())?;
    let printed: String = kernels.iter().map(|k| k.to_text(true)).collect();
    let back = text::parse_all(&printed).map_err(|e| e.to_string())?;
    if back != kernels {
        return Err(format!("it reads back differently:\n{printed}"));
    }
    Ok(printed)
}

/// What the words of a test ask for: `cse dce metal width=64` is two passes for a target (the
/// interpreter, if none is named), after specialisation with a number. `lower` is all passes.
struct Recipe {
    numbers: Numbers,
    target: Target,
    passes: Vec<Pass>,
}

impl Recipe {
    fn new(words: &[&str]) -> Result<Self, String> {
        let (numbers, passes) = (Numbers::new(), vec![]);
        let mut recipe = Recipe { numbers, target: Target::Interpreter, passes };
        for word in words {
            if let Some((name, number)) = word.split_once('=') {
                let bits = match number.parse::<u32>() {
                    Ok(whole) => Some(whole),
                    Err(_) => number.parse::<f32>().ok().map(f32::to_bits),
                };
                recipe.numbers.set(name, bits.ok_or_else(|| format!("no number: `{word}`"))?);
            } else if let Some(named) = Target::named(word) {
                recipe.target = named;
            } else if *word == "lower" {
                recipe.passes.extend(Pass::PIPELINE);
            } else {
                let pass =
                    Pass::named(word).ok_or_else(|| format!("no pass is called `{word}`"))?;
                recipe.passes.push(pass);
            }
        }
        Ok(recipe)
    }

    fn apply(&self, kernel: &Kernel) -> Result<Kernel, Fault> {
        verify(kernel)?;
        let special = passes::specialise(kernel, &self.numbers);
        self.passes.iter().try_fold(special, |kernel, pass| pass.apply(&kernel, self.target))
    }
}

/// Each kernel after some passes, see [`Recipe`].
fn passed(input: &str, words: &[&str]) -> Result<String, String> {
    let recipe = Recipe::new(words)?;
    let mut found = String::new();
    for kernel in text::parse_all(input).map_err(|e| e.to_string())? {
        match recipe.apply(&kernel) {
            Ok(kernel) => found += &round_trip(&kernel.to_text(true), &[])?,
            Err(fault) => found += &format!("{fault}\n"),
        }
    }
    Ok(found)
}

/// The buffers that each kernel writes, after it ran on those that lines such as
/// `; bind x 1 2.5 0*6` name (six zeros at the end); or what stopped it. Without passes the kernel
/// runs as it is written, else as [`Recipe`] makes it.
fn executed(input: &str, words: &[&str]) -> Result<String, String> {
    let recipe = Recipe::new(words)?;
    let bound: Vec<(&str, Vec<f32>)> = input
        .lines()
        .filter_map(|l| l.strip_prefix("; bind "))
        .map(bind)
        .collect::<Result<_, _>>()?;
    let mut found = String::new();
    for kernel in text::parse_all(input).map_err(|e| e.to_string())? {
        let lowered =
            if recipe.passes.is_empty() { Ok(kernel.clone()) } else { recipe.apply(&kernel) };
        let kernel = lowered.map_err(|e| e.to_string())?;
        let mut names = Vec::new();
        let mut buffers = Vec::new();
        for param in &kernel.params {
            let ParamKind::Buffer { scalar, access } = param.kind else { continue };
            let values = bound.iter().find(|(name, _)| *name == param.name);
            let (_, values) =
                values.ok_or_else(|| format!("nothing is bound to {}", param.name))?;
            names.push((&param.name, access));
            buffers.push(Buffer::floats(scalar, values));
        }
        match interp::run(&kernel, &recipe.numbers, &mut buffers) {
            Ok(_) => {
                found += &format!("{}:\n", kernel.name);
                let after = names.into_iter().zip(&buffers);
                for ((name, _), buffer) in after.filter(|((_, access), _)| *access != Access::In) {
                    let values: Vec<String> =
                        buffer.to_f64().iter().map(ToString::to_string).collect();
                    found += &format!("    {name} {}\n", values.join(" "));
                }
            }
            Err(fault) => found += &format!("{fault}\n{}", quoted(&kernel, &fault)),
        }
    }
    Ok(found)
}

/// `x 1 2.5 0*6`: a buffer's name and its elements.
fn bind(line: &str) -> Result<(&str, Vec<f32>), String> {
    let mut words = line.split_whitespace();
    let name = words.next().ok_or("a buffer's name expected after `; bind`")?;
    let mut values = Vec::new();
    for word in words {
        let (value, times) = word.split_once('*').unwrap_or((word, "1"));
        let parsed = value.parse().ok().zip(times.parse().ok());
        let (value, times) = parsed.ok_or_else(|| format!("no number: `{word}`"))?;
        values.extend(std::iter::repeat_n::<f32>(value, times));
    }
    Ok((name, values))
}

/// A test file in its three parts.
struct File {
    path: PathBuf,
    name: String,
    words: Vec<String>,
    /// All but the expected output.
    head: String,
    expected: String,
}

const EXPECT: &str = "; expect:\n";

fn read(path: &Path) -> File {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let (input, expected) = text
        .split_once(EXPECT)
        .unwrap_or_else(|| panic!("{}: a line `; expect:` expected", path.display()));
    let first = input.lines().next().unwrap_or("");
    let mut words = first
        .strip_prefix("; test: ")
        .unwrap_or_else(|| panic!("{}: `; test: NAME` expected first", path.display()))
        .split_whitespace()
        .map(str::to_owned);
    let name = words.next().unwrap_or_default();
    let (words, head, expected) = (words.collect(), input.to_owned(), expected.to_owned());
    File { path: path.to_owned(), name, words, head, expected }
}

fn files() -> Vec<File> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/filetests");
    let list = |dir: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        let mut paths: Vec<_> = entries.map(|e| e.expect("a readable folder").path()).collect();
        paths.sort();
        paths
    };
    let folders = list(&root).into_iter().filter(|path| path.is_dir());
    let paths = folders.flat_map(|folder| list(&folder));
    paths.filter(|p| p.extension().is_some_and(|e| e == "tile")).map(|p| read(&p)).collect()
}

#[test]
fn files_are_as_expected() {
    let bless = std::env::var_os("BLESS").is_some_and(|b| b == "1");
    let mut wrong = Vec::new();
    for file in files() {
        let name = file.path.display();
        let test = find(&file.name).unwrap_or_else(|| panic!("{name}: no test `{}`", file.name));
        let words: Vec<&str> = file.words.iter().map(String::as_str).collect();
        match test(&file.head, &words) {
            Err(why) => wrong.push(format!("{name}: {why}")),
            Ok(found) if found == file.expected => {}
            Ok(found) if bless => {
                std::fs::write(&file.path, format!("{}{EXPECT}{found}", file.head))
                    .unwrap_or_else(|e| panic!("{name}: {e}"));
            }
            Ok(found) => wrong.push(format!("{name}:\n{}", difference(&file.expected, &found))),
        }
    }
    assert!(wrong.is_empty(), "{}\n{} wrong", wrong.join("\n"), wrong.len());
}

/// The lines from the first that differs on, at most ten of each.
fn difference(expected: &str, found: &str) -> String {
    let same = expected.lines().zip(found.lines()).take_while(|(a, b)| a == b).count();
    let part = |text: &str, sign: &str| -> String {
        text.lines().skip(same).take(10).map(|line| format!("{sign} {line}\n")).collect()
    };
    format!("line {} after `; expect:`\n{}{}", same + 1, part(expected, "-"), part(found, "+"))
}

#[test]
fn recorded_kernels_keep_the_rules_and_read_back() {
    for kernel in recorded::kernels() {
        verify(&kernel).unwrap_or_else(|fault| panic!("{fault}\n{kernel}"));
        let text = kernel.to_text(true);
        assert_eq!(text::parse(&text).as_ref(), Ok(&kernel), "{text}");
    }
}

#[test]
fn lowered_kernels_read_back() {
    for kernel in recorded::kernels() {
        for target in Target::ALL {
            let lowered = passes::lower(&kernel, target).unwrap_or_else(|fault| panic!("{fault}"));
            // By text: values that passes removed have no type to read back.
            let text = lowered.to_text(true);
            assert_eq!(text::parse(&text).map(|k| k.to_text(true)), Ok(text));
        }
    }
}

#[test]
fn faults_name_the_rust_line() {
    let fault = verify(&recorded::escaping()).expect_err("a value leaves its loop");
    let line = fault.source.rsplit_once(':').expect("file:line");
    assert!(line.0.ends_with("recorded.rs"), "{fault}");
    let source =
        include_str!("../filetests/recorded.rs").lines().nth(line.1.parse::<usize>().unwrap() - 1);
    assert!(source.is_some_and(|l| l.contains("the fault is here")), "{fault}");
    assert!(fault.message.contains("make it a Var"), "{fault}");
}

/// Five thousand damaged texts: whatever happens to them, nothing panics, and what the verifier
/// accepts still prints and reads back.
#[test]
fn damaged_texts_are_refused_or_understood() {
    let mut texts: Vec<String> = files().into_iter().map(|f| f.head).collect();
    texts.extend(recorded::kernels().iter().map(|k| k.to_text(true)));
    let mut state = 0x2545_F491_4F6C_DD1D_u64;
    let mut below = |limit: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % limit.max(1) as u64) as usize
    };
    let (mut parsed, mut valid) = (0, 0);
    for round in 0..5000 {
        let mut lines: Vec<Vec<u8>> =
            texts[round % texts.len()].lines().map(|l| l.as_bytes().to_vec()).collect();
        for _ in 0..1 + below(3) {
            let (at, other) = (below(lines.len()), below(lines.len()));
            match below(5) {
                0 => lines.swap(at, other),
                1 => drop(lines.remove(at)),
                2 => lines.insert(other, lines[at].clone()),
                3 if !lines[at].is_empty() => {
                    let byte = below(lines[at].len());
                    lines[at][byte] ^= 1 << below(8);
                }
                _ if !lines[at].is_empty() => {
                    // A digit or a letter of the text itself goes further than a random byte.
                    let (from, to) = (below(lines[at].len()), below(lines[at].len()));
                    lines[at][to] = lines[at][from];
                }
                _ => {}
            }
            if lines.is_empty() {
                lines.push(vec![]);
            }
        }
        let damaged = lines.join(&b'\n');
        let Ok(kernels) = text::parse_all(&String::from_utf8_lossy(&damaged)) else { continue };
        parsed += 1;
        for kernel in kernels {
            let printed = kernel.to_text(true);
            if verify(&kernel).is_ok() {
                valid += 1;
                assert_eq!(text::parse(&printed).as_ref(), Ok(&kernel), "{printed}");
            }
        }
    }
    // The damage must be small enough to reach the verifier, and large enough to matter.
    assert!(parsed > 500 && parsed < 4500, "{parsed} parsed");
    assert!(valid > 500, "{valid} valid");
}

//! Address spaces of Metal text. C++ has none, so what runs on the CPU may still mix device and
//! threadgroup pointers.
//!
//! OpenCL C++ has the same four under other names, and clang checks them: the text is parsed (never
//! run) with the headers in `tests/shim/as`. What OpenCL allows and Metal does not, pointers
//! without a space and `double`, a lint finds.

use std::fmt::Write;
use std::process::Command;
use std::sync::OnceLock;

use super::Unproved;
use super::compile::{Scratch, answers, run};
use super::source::{Token, tokens};

const HEADERS: [(&str, &str); 2] = [
    ("metal_stdlib", include_str!("../../tests/shim/as/metal_stdlib")),
    ("metal_simdgroup_matrix", include_str!("../../tests/shim/as/metal_simdgroup_matrix")),
];

/// Checks the address spaces of a Metal text.
///
/// # Errors
/// [`Unproved::Wrong`] with clang's first complaints or the lint's; [`Unproved::Skip`] without a
/// clang that knows OpenCL C++ (16 and up). The lint runs either way.
pub fn address_spaces(text: &str) -> Result<(), Unproved> {
    let found = tokens(text);
    if let Some(what) = lint(text, &found) {
        return Err(Unproved::Wrong(what));
    }
    let clang = clang()?;
    let scratch = Scratch::new()?;
    for (name, header) in HEADERS {
        scratch.write(name, header)?;
    }
    let source = scratch.write("kernels.clcpp", &without_attributes(text, &found))?;
    let mut command = Command::new(clang);
    command.args(["-x", "clcpp", "-cl-std=CLC++2021", "-target", "spir64", "-fsyntax-only"]);
    command.args(["-cl-no-stdinc", "-DTILE_SHIM=1", "-Wno-unknown-pragmas", "-I"]);
    run(command.arg(scratch.path()).arg(source))
}

/// Names of clang, those first with which the checks were written.
pub(super) const CLANGS: [&str; 7] =
    ["clang-19", "clang-20", "clang-21", "clang-18", "clang-17", "clang-16", "clang"];

/// The first clang that has the mode.
fn clang() -> Result<&'static str, Unproved> {
    static FOUND: OnceLock<Option<&'static str>> = OnceLock::new();
    let serves = |name: &&'static str| {
        let mut command = Command::new(name);
        command.args(["-x", "clcpp", "-cl-std=CLC++2021", "-target", "spir64", "-fsyntax-only"]);
        // An empty file asks whether the mode is known. Apple's clang, for one, is built without
        // this target.
        answers(name)
            && command
                .args(["-cl-no-stdinc", "/dev/null"])
                .output()
                .is_ok_and(|o| o.status.success())
    };
    let found = FOUND.get_or_init(|| CLANGS.into_iter().find(serves));
    found.ok_or_else(|| {
        Unproved::Skip("address spaces: no clang 16 or later with OpenCL C++".to_owned())
    })
}

/// The text without `[[..]]`; function constants, which a launch sets, get the value that constants
/// must have in OpenCL.
fn without_attributes(text: &str, tokens: &[Token<'_>]) -> String {
    let mut out = String::with_capacity(text.len());
    let (mut copied, mut i) = (0, 0);
    while i + 1 < tokens.len() {
        let opens = tokens[i].text == "["
            && tokens[i + 1].text == "["
            && tokens[i + 1].at == tokens[i].at + 1;
        if !opens {
            i += 1;
            continue;
        }
        let mut end = i + 2;
        while end + 1 < tokens.len() && !(tokens[end].text == "]" && tokens[end + 1].text == "]") {
            end += 1;
        }
        let close = tokens.get(end + 1).map_or(text.len(), |t| t.at + 1);
        out.push_str(&text[copied..tokens[i].at]);
        if tokens[i + 2..end].iter().any(|t| t.text == "function_constant") {
            out.push_str("= {}");
        }
        // The lines stay where they are.
        out.extend(text[tokens[i].at..close].chars().filter(|c| *c == '\n'));
        copied = close;
        i = end + 2;
    }
    out.push_str(&text[copied..]);
    out
}

/// Whether a word names a type that memory holds.
fn is_type(word: &str) -> bool {
    let stem = word.trim_end_matches(|c: char| c.is_ascii_digit());
    let known = [
        "float", "half", "bfloat", "int", "uint", "short", "ushort", "char", "uchar", "bool",
        "ulong", "long", "void",
    ];
    known.contains(&stem) || word.starts_with("atomic_") && !word.ends_with("explicit")
}

/// Faults that clang's OpenCL mode accepts: the first finding.
fn lint(text: &str, tokens: &[Token<'_>]) -> Option<String> {
    let place = |at: usize| 1 + text[..at].bytes().filter(|b| *b == b'\n').count();
    let mut found = String::new();
    for (i, token) in tokens.iter().enumerate() {
        if token.text == "double" {
            let _ = write!(found, "line {}: Metal has no double", place(token.at));
        }
        let pointer = matches!(token.text, "*" | "&")
            && i > 0
            && is_type(tokens[i - 1].text)
            // `&&` is no reference, and a call such as `int(x)` no declaration.
            && tokens.get(i + 1).is_some_and(|t| t.text != "&");
        let spaces = ["device", "constant", "threadgroup", "thread"];
        let qualified = || {
            tokens[i.saturating_sub(4)..i]
                .iter()
                .rev()
                .take_while(|t| !matches!(t.text, "," | "(" | ";"))
        };
        if pointer && !qualified().any(|t| spaces.contains(&t.text)) {
            let ty = tokens[i - 1].text;
            let _ = write!(
                found,
                "line {}: `{ty}{}` without an address space",
                place(token.at),
                token.text
            );
        }
        if !found.is_empty() {
            return Some(found);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn complaint(text: &str) -> Option<String> {
        lint(text, &tokens(text))
    }

    #[test]
    fn pointers_need_a_space_and_doubles_do_not_exist() {
        assert_eq!(
            complaint(
                "device const half* x; thread float& y; a * b; float(x) * y; (threadgroup uint4*)(p)"
            ),
            None
        );
        assert!(complaint("void f(const float* x)").is_some_and(|c| c.contains("without")));
        assert!(complaint("void f(device float* x, float& y)").is_some());
        assert!(complaint("\n double x;").is_some_and(|c| c.contains("line 2")));
    }

    #[test]
    fn attributes_go_and_lines_stay() {
        let text = "constant uint w [[function_constant(0)]];\nf(int a [[buffer(\n0)]], b[c[0]])";
        assert_eq!(
            without_attributes(text, &tokens(text)),
            "constant uint w = {};\nf(int a \n, b[c[0]])"
        );
    }
}

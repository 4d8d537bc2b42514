//! Types of Metal text, strictly: as near to Apple's compiler as one comes without it.
//!
//! clang parses the text (nothing is run) as C++ with headers that declare each function of the
//! language for exactly the types that it has, and with the text's own switches as Apple's compiler
//! finds them: the shim's are off. Coherent memory is an address space of its own, and a cast that
//! takes coherence away or changes the space is an error.
//!
//! Metal syntax that C++ cannot parse is rewritten first, in place: `float4(a, b, c, d)` becomes a
//! call, as does a cast between pointers, so that its two types can be compared; arrays of
//! threadgroup memory become static.

use std::process::Command;
use std::sync::OnceLock;

use super::Unproved;
use super::compile::{Scratch, answers, run};
use super::source::{Token, tokens};
use super::spaces::CLANGS;

const HEADERS: [(&str, &str); 2] = [
    ("metal_stdlib", include_str!("../../tests/shim/strict/metal_stdlib")),
    ("metal_simdgroup_matrix", include_str!("../../tests/shim/strict/metal_simdgroup_matrix")),
];

/// Warnings count. Attributes and pragmas of Metal's own are unknown to C++; declarations that a
/// text does not use are usual.
const FLAGS: [&str; 11] = [
    "-x",
    "c++",
    "-std=c++14",
    "-fsyntax-only",
    "-Wall",
    "-Werror",
    "-Wno-unused",
    "-Wno-unknown-attributes",
    "-Wno-unknown-pragmas",
    "-Wno-sign-compare",
    "-ferror-limit=5",
];

/// Checks the types of a Metal text.
///
/// # Errors
/// [`Unproved::Wrong`] with clang's first complaints; [`Unproved::Skip`] without a clang that has
/// floats of 16 bits (17 and up, on x86-64 and ARM).
pub fn strict_types(text: &str) -> Result<(), Unproved> {
    let clang = clang()?;
    let scratch = Scratch::new()?;
    for (name, header) in HEADERS {
        scratch.write(name, header)?;
    }
    let source = scratch.write("kernels.cpp", &as_cpp(text))?;
    run(Command::new(clang).args(FLAGS).arg("-I").arg(scratch.path()).arg(source))
}

/// The first clang that calculates with `__bf16`.
fn clang() -> Result<&'static str, Unproved> {
    static FOUND: OnceLock<Option<&'static str>> = OnceLock::new();
    let serves = |name: &&'static str| {
        let probe = || -> Result<(), Unproved> {
            let scratch = Scratch::new()?;
            let text =
                "_Float16 f(_Float16 x) { return x + x; } __bf16 g(__bf16 x) { return x + x; }";
            let source = scratch.write("probe.cpp", text)?;
            run(Command::new(name).args(FLAGS).arg(source))
        };
        answers(name) && probe().is_ok()
    };
    let found = FOUND.get_or_init(|| CLANGS.into_iter().find(serves));
    found.ok_or_else(|| {
        Unproved::Skip("strict types of Metal text: no clang 17 or later with __bf16".to_owned())
    })
}

/// Whether a word names a vector type.
fn is_vector(word: &str) -> bool {
    let stem = word.trim_end_matches(['2', '4']);
    let known = [
        "bool", "char", "uchar", "short", "ushort", "int", "uint", "ulong", "half", "bfloat",
        "float",
    ];
    stem.len() + 1 == word.len() && known.contains(&stem)
}

/// The text in C++. Lines stay where they are.
fn as_cpp(text: &str) -> String {
    let tokens = tokens(text);
    let words =
        |from: usize| -> Vec<&str> { tokens[from..].iter().take(8).map(|t| t.text).collect() };
    let mut out = String::with_capacity(text.len() + text.len() / 4);
    let mut copied = 0;
    // Replaces `count` tokens from `first` on.
    let mut put = |first: usize, count: usize, new: &str| {
        let Token { text: last, at } = tokens[first + count - 1];
        out.push_str(&text[copied..tokens[first].at]);
        out.push_str(new);
        copied = at + last.len();
    };
    let mut i = 0;
    while i < tokens.len() {
        let used = match words(i)[..] {
            ["alignas", "(", "16", ")", "threadgroup", ..] => {
                put(i, 5, "alignas(16) static threadgroup");
                5
            }
            ["TK_COHERENT", "device", ..] => {
                put(i, 2, "tile_coherent");
                2
            }
            ["vec", "<", element, ",", lanes, ">", "(", ..] => {
                put(i, 6, &format!("tile_vec{lanes}<{element}>"));
                6
            }
            [vector, "(", ..] if is_vector(vector) => {
                put(i, 1, &format!("tile_{vector}"));
                1
            }
            ["(", ..] => match cast(&words(i)) {
                Some((to, count)) => {
                    put(i, count, &format!("tile_cast<{to}>"));
                    count
                }
                None => 1,
            },
            _ => 1,
        };
        i += used;
    }
    out.push_str(&text[copied..]);
    out
}

/// A cast to a pointer, as in `(device const float4*)(`: the type, and how many words it takes with
/// its parentheses.
fn cast(words: &[&str]) -> Option<(String, usize)> {
    let end = words.iter().position(|word| *word == ")")?;
    let inside = &words[1..end];
    let spaces = ["device", "threadgroup", "constant"];
    let pointer = inside.last() == Some(&"*")
        && inside.iter().any(|word| spaces.contains(word))
        && !inside.contains(&"(");
    // A parameter list of one pointer is followed by `{`, a cast by what it casts.
    (pointer && words.get(end + 1) == Some(&"("))
        .then(|| (inside.join(" ").replace("TK_COHERENT device", "tile_coherent"), end + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cpp_has_no_notion_of_is_rewritten() {
        for (metal, cpp) in [
            ("x = float4(a, b, c, d);", "x = tile_float4(a, b, c, d);"),
            ("vec<T, 2> v = vec<T, 2>(a, b);", "vec<T, 2> v = tile_vec2<T>(a, b);"),
            (
                "*(device const float4*)(x + 1u) = y;",
                "*tile_cast<device const float4 *>(x + 1u) = y;",
            ),
            (
                "f((TK_COHERENT device uint2*)(p))\n, TK_COHERENT device uint* p",
                "f(tile_cast<tile_coherent uint2 *>(p))\n, tile_coherent uint* p",
            ),
            ("alignas(16) threadgroup half2 s[8];", "alignas(16) static threadgroup half2 s[8];"),
            ("float(x) + uint3(y)", "float(x) + uint3(y)"),
            ("void f(device float*) { }", "void f(device float*) { }"),
        ] {
            assert_eq!(as_cpp(metal), cpp);
        }
    }
}

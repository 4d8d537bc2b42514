//! Kernel text made ready for a C++ compiler: arrays of threadgroup memory become calls of the
//! shim's, and a table of entries is appended. Everything else the shim's headers give a meaning.
//!
//! The facts of a launch are read from the text itself (entries, bindings, function
//! constants), not from the emitter: a binding that is wrong in the text is wrong here too. Lines
//! stay where they are, so that messages can name them.

use std::fmt::Write;

use crate::emit::Dialect;

/// A kernel found in a text.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Entry {
    /// The function's name.
    pub(super) name: String,
    /// Its parameters, in order.
    pub(super) parameters: Vec<Parameter>,
    /// Indices of the function constants that its body names.
    pub(super) constants: Vec<usize>,
}

/// The argument of a kernel's parameter.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Parameter {
    /// The argument bound at an index: a buffer, or a number.
    Bound { name: String, index: usize, pointer: bool },
    /// A position attribute, by name.
    Position(String),
}

/// A text ready to compile.
#[derive(Debug, Clone)]
pub(super) struct Source {
    /// C++.
    pub(super) text: String,
    /// Its kernels, in the order of the entry table.
    pub(super) entries: Vec<Entry>,
    /// Its function constants, in the order of their table.
    pub(super) constants: Vec<String>,
}

/// A word, number, string or sign of the text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Token<'a> {
    pub(super) text: &'a str,
    pub(super) at: usize,
}

/// Reads a text.
///
/// # Errors
/// One line saying what was expected.
pub(super) fn prepare(text: &str, dialect: Dialect) -> Result<Source, String> {
    let tokens = tokens(text);
    let constants = function_constants(&tokens);
    let entries = match dialect {
        Dialect::Metal => metal_entries(&tokens, &constants)?,
        Dialect::Cuda => cuda_entries(&tokens)?,
    };
    let (header, file) = match dialect {
        Dialect::Metal => ("", "kernels.metal"),
        Dialect::Cuda => ("#include \"cuda_shim.hpp\"\n", "kernels.cu"),
    };
    let mut out = format!("#define TILE_SHIM 1\n{header}#line 1 \"{file}\"\n");
    out.push_str(&rewrite(text, &tokens));
    out.push_str("\n#line 1 \"entries\"\n");
    table(&entries, &constants, &mut out);
    Ok(Source { text: out, entries, constants: constants.into_iter().map(|c| c.name).collect() })
}

/// Splits C-like text; comments and preprocessor lines are left out.
pub(super) fn tokens(text: &str) -> Vec<Token<'_>> {
    let bytes = text.as_bytes();
    let mut found = Vec::new();
    let (mut at, mut fresh_line) = (0, true);
    let word = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    while let Some(&b) = bytes.get(at) {
        let rest = &bytes[at..];
        let length = if b == b'\n' {
            fresh_line = true;
            at += 1;
            continue;
        } else if b.is_ascii_whitespace() {
            at += 1;
            continue;
        } else if rest.starts_with(b"//") {
            at += rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len());
            continue;
        } else if rest.starts_with(b"/*") {
            at += rest.windows(2).position(|w| w == b"*/").map_or(rest.len(), |n| n + 2);
            continue;
        } else if b == b'#' && fresh_line {
            let mut end = 0;
            while end < rest.len() && !(rest[end] == b'\n' && rest[end - 1] != b'\\') {
                end += 1;
            }
            at += end;
            continue;
        } else if b == b'"' {
            let mut end = 1;
            while end < rest.len() && rest[end] != b'"' {
                end += 1 + usize::from(rest[end] == b'\\');
            }
            (end + 1).min(rest.len())
        } else if word(b) {
            rest.iter().position(|b| !word(*b)).unwrap_or(rest.len())
        } else {
            // A character outside ASCII is one sign, however many bytes it has.
            text[at..].chars().next().map_or(1, char::len_utf8)
        };
        fresh_line = false;
        found.push(Token { text: text.get(at..at + length).unwrap_or(""), at });
        at += length;
    }
    found
}

/// The index of the bracket that closes the one at `open`, or the end.
fn closing(tokens: &[Token<'_>], open: usize) -> usize {
    let mut depth = 0_i32;
    for (i, token) in tokens.iter().enumerate().skip(open) {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return i;
        }
    }
    tokens.len()
}

fn is_word(token: &Token<'_>) -> bool {
    token.text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
}

/// A function constant: its name and the index of the token that declares it.
struct Declared {
    name: String,
    id: String,
}

/// `constant T name [[function_constant(i)]];`
fn function_constants(tokens: &[Token<'_>]) -> Vec<Declared> {
    let mut found = Vec::new();
    for (i, token) in tokens.iter().enumerate().skip(3) {
        if token.text == "function_constant" {
            let id = tokens.get(i + 2).map_or("", |t| t.text);
            found.push(Declared { name: tokens[i - 3].text.to_owned(), id: id.to_owned() });
        }
    }
    found
}

/// The parameters between brackets, split at their commas.
fn split<'t, 'a>(tokens: &'t [Token<'a>]) -> Vec<&'t [Token<'a>]> {
    let (mut parts, mut depth, mut from) = (Vec::new(), 0_i32, 0);
    for (i, token) in tokens.iter().enumerate() {
        match token.text {
            "(" | "[" | "{" | "<" => depth += 1,
            ")" | "]" | "}" | ">" => depth -= 1,
            "," if depth == 0 => {
                parts.push(&tokens[from..i]);
                from = i + 1;
            }
            _ => {}
        }
    }
    if from < tokens.len() {
        parts.push(&tokens[from..]);
    }
    parts
}

/// `kernel void name(type name [[attribute(index)]], ..) { .. }`
fn metal_entries(tokens: &[Token<'_>], constants: &[Declared]) -> Result<Vec<Entry>, String> {
    for (i, constant) in constants.iter().enumerate() {
        if constants[..i].iter().any(|c| c.id == constant.id || c.name == constant.name) {
            return Err(format!(
                "function constants: `{}` ({}) is declared twice",
                constant.name, constant.id
            ));
        }
    }
    let mut entries = Vec::new();
    for (i, token) in tokens.iter().enumerate() {
        let follows = |n: usize, text: &str| tokens.get(i + n).is_some_and(|t| t.text == text);
        if token.text != "kernel" || !follows(1, "void") || !follows(3, "(") {
            continue;
        }
        let name = tokens[i + 2].text.to_owned();
        let end = closing(tokens, i + 3);
        let mut parameters = Vec::new();
        for part in split(tokens.get(i + 4..end).unwrap_or(&[])) {
            let attribute = part.windows(2).position(|w| w[0].text == "[" && w[1].text == "[");
            let Some(at) = attribute.filter(|at| *at > 0 && part.len() > at + 2) else {
                return Err(format!("{name}: a parameter without an attribute"));
            };
            let (declared, word) = (&part[..at], part[at + 2].text);
            if word != "buffer" {
                parameters.push(Parameter::Position(word.to_owned()));
                continue;
            }
            let index = part.get(at + 4).and_then(|t| t.text.parse().ok());
            let Some(index) = index.filter(|i| *i < 31) else {
                return Err(format!("{name}: [[buffer(..)]] needs an index below 31"));
            };
            parameters.push(Parameter::Bound {
                name: part[at - 1].text.to_owned(),
                index,
                pointer: declared.iter().any(|t| t.text == "*"),
            });
        }
        let body = tokens.get(end + 1..closing(tokens, end + 1)).unwrap_or(&[]);
        let used = |c: &Declared| body.iter().any(|t| t.text == c.name);
        let constants = (0..constants.len()).filter(|c| used(&constants[*c])).collect();
        entries.push(Entry { name, parameters, constants });
    }
    Ok(entries)
}

/// `extern "C" __global__ void __launch_bounds__(n) name(type name, ..) { .. }`
fn cuda_entries(tokens: &[Token<'_>]) -> Result<Vec<Entry>, String> {
    let mut entries = Vec::new();
    for (i, token) in tokens.iter().enumerate().skip(2) {
        if token.text != "__global__" || tokens[i - 1].text != "\"C\"" {
            continue;
        }
        let mut at = i + 2;
        if tokens.get(at).is_some_and(|t| t.text == "__launch_bounds__") {
            at = closing(tokens, at + 1) + 1;
        }
        let (Some(name), Some(open)) = (tokens.get(at), tokens.get(at + 1)) else { continue };
        if open.text != "(" {
            return Err(format!("{}: expected `(` after the name of a kernel", name.text));
        }
        let parts = split(tokens.get(at + 2..closing(tokens, at + 1)).unwrap_or(&[]));
        let parameter = |(index, part): (usize, &&[Token<'_>])| Parameter::Bound {
            name: part.last().map_or("", |t| t.text).to_owned(),
            index,
            pointer: part.iter().any(|t| t.text == "*"),
        };
        let parameters = parts.iter().enumerate().map(parameter).collect();
        entries.push(Entry { name: name.text.to_owned(), parameters, constants: vec![] });
    }
    Ok(entries)
}

/// Replaces the declarations of threadgroup arrays; C++ has no word for them.
fn rewrite(text: &str, tokens: &[Token<'_>]) -> String {
    let mut out = String::with_capacity(text.len() + 1024);
    let mut copied = 0;
    for (i, token) in tokens.iter().enumerate() {
        if token.text != "threadgroup" && token.text != "__shared__" {
            continue;
        }
        // An alignment may stand on either side; the shim aligns every array to 16.
        let mut start = i;
        if i >= 4 && tokens[i - 4].text == "alignas" {
            start = i - 4;
        }
        let mut at = i + 1;
        while tokens.get(at).is_some_and(|t| matches!(t.text, "alignas" | "__align__")) {
            at = closing(tokens, at + 1) + 1;
        }
        let first = at;
        while tokens.get(at).is_some_and(is_word) {
            at += 1;
        }
        // A type and a name, then dimensions: else it is a pointer.
        if at < first + 2 || tokens.get(at).is_none_or(|t| t.text != "[") {
            continue;
        }
        let dimensions = at;
        while tokens.get(at).is_some_and(|t| t.text == "[") {
            at = closing(tokens, at) + 1;
        }
        let Some(end) = tokens.get(at).filter(|t| t.text == ";") else { continue };
        let ty = &text[tokens[first].at..tokens[dimensions - 1].at];
        let name = tokens[dimensions - 1].text;
        let sizes = &text[tokens[dimensions].at..end.at];
        out.push_str(&text[copied..tokens[start].at]);
        let _ = write!(out, "TILE_SHARED({}, {name}, {sizes})", ty.trim());
        copied = end.at;
    }
    out.push_str(&text[copied..]);
    // The shim calls kernels from the same file; their names must not meet those of the C library.
    out.replace("extern \"C\" __global__", "__global__")
}

/// The entries as the runtime finds them.
fn table(entries: &[Entry], constants: &[Declared], out: &mut String) {
    for (i, entry) in entries.iter().enumerate() {
        let bound = entry.parameters.iter().filter_map(|p| match p {
            Parameter::Bound { name, index, .. } => Some((*index, name.as_str())),
            Parameter::Position(_) => None,
        });
        let mut names: Vec<&str> = vec![];
        for (index, name) in bound {
            names.resize(names.len().max(index + 1), "");
            names[index] = name;
        }
        let quoted: Vec<String> = names.iter().map(|n| format!("\"{n}\", ")).collect();
        let arguments: Vec<String> = entry
            .parameters
            .iter()
            .map(|p| match p {
                Parameter::Bound { index, pointer: true, .. } => {
                    format!("shim::Buffer{{a[{index}]}}")
                }
                Parameter::Bound { index, .. } => format!("shim::Argument{{a[{index}]}}"),
                Parameter::Position(name) => format!("tile_attribute::{name}()"),
            })
            .collect();
        let _ = write!(
            out,
            "static const char* const tile_names_{i}[] = {{{}\"\"}};\n\
             static void tile_entry_{i}(void** a) {{ (void)a; {}({}); }}\n",
            quoted.concat(),
            entry.name,
            arguments.join(", ")
        );
    }
    out.push_str("namespace shim {\nextern const Entry entries[] = {\n");
    for (i, entry) in entries.iter().enumerate() {
        let _ = writeln!(out, "  {{\"{}\", tile_entry_{i}, tile_names_{i}}},", entry.name);
    }
    out.push_str("  {nullptr, nullptr, nullptr}};\nextern const Constant constants[] = {\n");
    for Declared { name, .. } in constants {
        let _ = writeln!(out, "  {{\"{name}\", &{name}, sizeof {name}}},");
    }
    out.push_str("  {nullptr, nullptr, 0}};\n}\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metal_text_keeps_its_lines_and_shows_its_bindings() {
        let text = "// threadgroup float no[1];\nconstant uint f_width [[function_constant(3)]];\nkernel void f(device const half* x [[buffer(1)]],\n  constant uint& n [[buffer(0)]], uint3 g [[threadgroup_position_in_grid]]) {\n  alignas(16) threadgroup half a[4][8];\n  threadgroup half* p = a[0];\n  p[0] = x[n + f_width];\n}\n";
        let source = prepare(text, Dialect::Metal).expect("it is well formed");
        assert_eq!(source.constants, ["f_width"]);
        let entry = &source.entries[0];
        assert_eq!((entry.name.as_str(), &entry.constants[..]), ("f", &[0][..]));
        assert_eq!(entry.parameters.len(), 3);
        let bound =
            |name: &str, index, pointer| Parameter::Bound { name: name.to_owned(), index, pointer };
        assert_eq!(entry.parameters[..2], [bound("x", 1, true), bound("n", 0, false)]);
        assert!(source.text.contains("\n  TILE_SHARED(half, a, [4][8]);\n  threadgroup half* p"));
        assert!(source.text.contains("// threadgroup float no[1];"));
        let twice = text.replace(
            "function_constant(3)]];",
            "function_constant(3)]];constant uint b [[function_constant(3)]];",
        );
        assert!(prepare(&twice, Dialect::Metal).is_err());
    }

    #[test]
    fn cuda_entries_are_those_with_c_linkage() {
        let text = "template <int n> __device__ void g(float* x) { __shared__ __align__(16) float s[n]; }\nextern \"C\" __global__ void __launch_bounds__(128) f(const float* __restrict__ x, unsigned n) {}\n";
        let source = prepare(text, Dialect::Cuda).expect("it is well formed");
        assert_eq!(source.entries.len(), 1);
        assert_eq!(source.entries[0].name, "f");
        assert!(source.text.contains("TILE_SHARED(float, s, [n]);"));
    }

    #[test]
    fn damaged_text_is_no_panic() {
        for text in [
            "kernel void f(",
            "kernel void f(uint",
            "/*",
            "\"",
            "threadgroup float x[",
            "extern \"C\" __global__ void __launch_bounds__(",
            "#",
            "é §[[",
        ] {
            let _ = prepare(text, Dialect::Metal);
            let _ = prepare(text, Dialect::Cuda);
        }
    }
}

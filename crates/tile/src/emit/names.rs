//! The names of a kernel's parameters, constants and arrays in the emitted text: its own, unless C
//! or the text needs them.

use crate::ir::{Kernel, Place};

/// The names in a kernel's text.
pub(super) struct Names {
    pub(super) params: Vec<String>,
    pub(super) constants: Vec<String>,
    shared: Vec<String>,
    registers: Vec<String>,
}

/// Words of C++.
#[rustfmt::skip]
const KEYWORDS: &[&str] = &[
    "alignas", "alignof", "and", "and_eq", "asm", "auto", "bitand", "bitor", "bool", "break", "case", "catch", "char",
    "char16_t", "char32_t", "class", "compl", "const", "const_cast", "constexpr", "continue", "decltype", "default",
    "delete", "do", "double", "dynamic_cast", "else", "enum", "explicit", "export", "extern", "false", "float", "for",
    "friend", "goto", "if", "inline", "int", "long", "mutable", "namespace", "new", "noexcept", "not", "not_eq",
    "nullptr", "operator", "or", "or_eq", "private", "protected", "public", "register", "reinterpret_cast", "return",
    "short", "signed", "sizeof", "static", "static_assert", "static_cast", "struct", "switch", "template", "this",
    "thread_local", "throw", "true", "try", "typedef", "typeid", "typename", "union", "unsigned", "using", "virtual",
    "void", "volatile", "wchar_t", "while", "xor", "xor_eq",
];

/// Names that the text of both languages uses.
#[rustfmt::skip]
const COMMON: &[&str] = &[
    "as_type", "atomicAdd", "atomicExch", "atomicMax", "atomicMin", "e", "exp", "fma", "group", "groups", "lane",
    "main", "max", "min", "simd", "tid", "uchar", "uint", "ushort",
];

impl Names {
    /// Chooses names that are distinct, not among `reserved`, and not the names of values (`v12`).
    pub(super) fn new(kernel: &Kernel, reserved: &[&str]) -> Self {
        let mut taken: Vec<String> = vec![kernel.name.clone()];
        let mut choose = |name: &str| {
            let mut chosen = name.to_owned();
            let value = |n: &str| {
                n.strip_prefix('v')
                    .is_some_and(|d| !d.is_empty() && d.bytes().all(|b| b.is_ascii_digit()))
            };
            while value(&chosen)
                || chosen.starts_with("tk_")
                || chosen.starts_with("TK_")
                || Names::keyword(&chosen)
                || COMMON.contains(&chosen.as_str())
                || reserved.contains(&chosen.as_str())
                || taken.contains(&chosen)
            {
                // A prefix or a suffix: a name that begins like the prelude's must not go on doing
                // so.
                chosen = if chosen.to_lowercase().starts_with("tk_") {
                    format!("x{chosen}")
                } else {
                    format!("{chosen}_")
                };
            }
            taken.push(chosen.clone());
            chosen
        };
        Names {
            params: kernel.params.iter().map(|p| choose(&p.name)).collect(),
            constants: kernel.constants.iter().map(|c| choose(&c.name)).collect(),
            shared: kernel.shared.iter().map(|a| choose(&a.name)).collect(),
            registers: kernel.registers.iter().map(|a| choose(&a.name)).collect(),
        }
    }

    /// Whether C++ keeps a word to itself: no kernel may be called so, since launches look it up by
    /// its name.
    pub(super) fn keyword(name: &str) -> bool {
        KEYWORDS.contains(&name)
    }

    /// An array's name.
    pub(super) fn place(&self, place: Place) -> &str {
        match place {
            Place::Buffer(i) => &self.params[i as usize],
            Place::Shared(i) => &self.shared[i as usize],
            Place::Register(i) => &self.registers[i as usize],
        }
    }
}

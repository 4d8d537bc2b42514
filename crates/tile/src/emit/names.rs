//! The names of a kernel's parameters, constants and arrays in the emitted text: its own, unless C or the text needs them.

use crate::ir::{Kernel, Place};

/// What each thing is called.
pub(super) struct Names {
    pub(super) params: Vec<String>,
    pub(super) constants: Vec<String>,
    shared: Vec<String>,
    registers: Vec<String>,
}

/// Words of C++ and names that both languages' text uses.
const COMMON: &[&str] = &[
    "alignas",
    "as_type",
    "atomicAdd",
    "atomicExch",
    "atomicMax",
    "atomicMin",
    "auto",
    "bool",
    "break",
    "case",
    "catch",
    "char",
    "class",
    "const",
    "constexpr",
    "continue",
    "default",
    "delete",
    "do",
    "double",
    "e",
    "else",
    "enum",
    "exp",
    "explicit",
    "extern",
    "false",
    "float",
    "fma",
    "for",
    "friend",
    "goto",
    "group",
    "groups",
    "if",
    "inline",
    "int",
    "lane",
    "long",
    "main",
    "max",
    "min",
    "mutable",
    "namespace",
    "new",
    "not",
    "and",
    "or",
    "xor",
    "operator",
    "private",
    "protected",
    "public",
    "register",
    "return",
    "short",
    "signed",
    "simd",
    "sizeof",
    "static",
    "struct",
    "switch",
    "template",
    "this",
    "throw",
    "tid",
    "true",
    "try",
    "typedef",
    "typename",
    "uchar",
    "uint",
    "union",
    "unsigned",
    "using",
    "ushort",
    "virtual",
    "void",
    "volatile",
    "while",
];

impl Names {
    /// Chooses names that are distinct, not among `reserved`, and not those of values (`v12`).
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
                || COMMON.contains(&chosen.as_str())
                || reserved.contains(&chosen.as_str())
                || taken.contains(&chosen)
            {
                // A prefix or a suffix: a name that begins like the prelude's must not go on doing so.
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

    /// An array's name.
    pub(super) fn place(&self, place: Place) -> &str {
        match place {
            Place::Buffer(i) => &self.params[i as usize],
            Place::Shared(i) => &self.shared[i as usize],
            Place::Register(i) => &self.registers[i as usize],
        }
    }
}

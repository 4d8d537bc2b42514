//! The text form of kernels: printed for people, for `tile diff` and for tests, and parsed back to
//! the same [`Kernel`].
//!
//! ```text
//! kernel scale_f16 {
//!   mode row
//!   grid rows, 1, 1
//!   threads 256
//!   require width divisible by 8
//!   require x holds rows * width
//!   require x aligned to 16
//!   buffer x: f16 inout
//!   argument n: u32
//!   constant width: u32
//!   shared partial: f32[8]
//!   register acc: tile<f32, 16x16, c>[4]
//!   body {
//!     %0: u32 = group 0
//!     %1: u32 = constant width
//!     %2: u32 = mul %0, %1
//!     %3: f16x8 = load x[%2] lanes 8 stream  ; scale.rs:12
//!     store x[%2] = %3
//!   }
//! }
//! ```
//!
//! Where the kernel was written is told on request: by a comment behind each instruction, and behind
//! the body by `setting format: block_q4_k` for each value that its function was recorded with.
//!
//! One instruction a line. `;` begins a comment; after an instruction, a comment that ends in `:`
//! and a number is where the instruction was written. A float is decimal if it is finite, else `0x`
//! and its bits. What the launch contract leaves out is as in
//! [`Launch::default`](crate::launch::Launch). Value numbers may have gaps, as passes leave them: a
//! value that nothing defines has no type in the text, and reads back as a `bool`.
//!
//! The parser takes text from anywhere: it checks the form, never panics, and allocates in
//! proportion to the text. What a kernel means is [`crate::verify`]'s business.

use std::fmt;

use crate::ir::Kernel;
use crate::verify::Fault;

mod body;
mod header;
mod lex;
mod print;

pub(crate) use print::{Part, node_lines, part_line};

impl fmt::Display for Kernel {
    /// The text form, without sources.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_text(false))
    }
}

impl Kernel {
    /// The text form; with `sources`, each instruction is followed by the place in the Rust source
    /// it was written at, and the body by the kernel's settings.
    pub fn to_text(&self, sources: bool) -> String {
        print::Printer::new(self, sources).print()
    }
}

/// Parses a text that holds one kernel.
///
/// # Errors
/// The expected and the found text of a line; also if the text holds no kernel or several.
pub fn parse(text: &str) -> Result<Kernel, Fault> {
    let mut kernels = parse_all(text)?;
    match (kernels.pop(), kernels.len()) {
        (Some(kernel), 0) => Ok(kernel),
        (_, more) => Err(Fault {
            kernel: String::new(),
            line: 0,
            source: String::new(),
            message: format!("one kernel expected, {} found", if more == 0 { 0 } else { more + 1 }),
        }),
    }
}

/// Parses a text that holds any number of kernels, one after another.
///
/// # Errors
/// The expected and the found text of a line.
pub fn parse_all(text: &str) -> Result<Vec<Kernel>, Fault> {
    header::kernels(text)
}

#[cfg(test)]
mod tests;

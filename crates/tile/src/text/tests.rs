//! Round trips: every instruction, every float, every shape of contract.

use super::*;
use crate::ir::{Block, Builtin, Inst, Literal, SourceId, Statement, Value};
use crate::launch::Extent;
use crate::types::Scalar;
use crate::verify::verify;

/// A kernel that holds every instruction: the input of that test.
fn every() -> &'static str {
    let file = include_str!("../../tests/filetests/roundtrip/every_instruction.tile");
    file.split_once("; expect:").unwrap().0
}

fn same(kernel: &Kernel) {
    let back = parse(&kernel.to_text(true)).unwrap_or_else(|e| panic!("{e}\n{kernel}"));
    assert_eq!(*kernel, back, "{}", kernel.to_text(true));
}

/// A kernel whose body defines one f32 literal.
fn literal(bits: u32) -> Kernel {
    let mut kernel = parse("kernel k {\nbody {\n}\n}\n").unwrap();
    let result = Some(kernel.fresh(Scalar::F32));
    let inst = Inst::Literal(Literal::F32(bits));
    kernel.body = Block(vec![Statement { inst, result, source: SourceId(0) }]);
    kernel
}

#[test]
fn every_instruction_reads_back() {
    /// A new instruction does not compile here until it is counted, and fails below until it is in
    /// the file.
    fn number(inst: &Inst) -> usize {
        match inst {
            Inst::Literal(_) => 0,
            Inst::Constant(_) => 1,
            Inst::Argument(_) => 2,
            Inst::Builtin(Builtin::Group(_)) => 3,
            Inst::Builtin(Builtin::Groups(_)) => 4,
            Inst::Builtin(Builtin::Thread) => 5,
            Inst::Builtin(Builtin::Lane) => 6,
            Inst::Builtin(Builtin::Simd) => 7,
            Inst::Unary(..) => 8,
            Inst::Binary(..) => 9,
            Inst::Fma(..) => 10,
            Inst::Select { .. } => 11,
            Inst::Cast(..) => 12,
            Inst::Bitcast(..) => 13,
            Inst::Dot4 { .. } => 14,
            Inst::Pack(_) => 15,
            Inst::Extract(..) => 16,
            Inst::Load { .. } => 17,
            Inst::Store { .. } => 18,
            Inst::Atomic { .. } => 19,
            Inst::Barrier => 20,
            Inst::SimdBarrier => 21,
            Inst::Fence => 22,
            Inst::Simd(..) => 23,
            Inst::CopyAsync { .. } => 24,
            Inst::CopyCommit => 25,
            Inst::CopyWait(_) => 26,
            Inst::GridTrigger => 27,
            Inst::GridWait => 28,
            Inst::Splat(..) => 29,
            Inst::TileLoad { .. } => 30,
            Inst::TileStore { .. } => 31,
            Inst::Mma { .. } => 32,
            Inst::RowReduce(..) => 33,
            Inst::TileRow(_) => 34,
            Inst::TileCol(_) => 35,
            Inst::ToLeft(..) => 36,
            Inst::For { .. } => 37,
            Inst::If { .. } => 38,
            Inst::Wgmma { .. } => 39,
            Inst::WgmmaFence => 40,
            Inst::WgmmaCommit => 41,
            Inst::WgmmaWait(_) => 42,
            Inst::AsyncFence => 43,
            Inst::TileOf(..) => 44,
            Inst::Lookup { .. } => 45,
            Inst::WgmmaOf { .. } => 46,
            Inst::FmaHalves { .. } => 47,
        }
    }
    let kernel = parse(every()).unwrap();
    verify(&kernel).unwrap();
    let mut seen = [false; 48];
    kernel.visit(&mut |node| seen[number(&node.inst)] = true);
    assert_eq!(seen, [true; 48]);
    same(&kernel);
    let printed = kernel.to_string();
    assert!(every().contains(&printed), "{printed}");
}

#[test]
fn lines_are_those_of_the_text() {
    let kernel = parse(every()).unwrap();
    let text = kernel.to_string();
    let lines: Vec<&str> = text.lines().collect();
    let mut names = Vec::new();
    kernel.visit(&mut |node| names.push((node.inst.name(), node.result)));
    let numbers = node_lines(&kernel);
    assert_eq!(names.len(), numbers.len());
    for ((name, result), number) in names.into_iter().zip(numbers) {
        let line = lines[number - 1];
        assert!(name == "literal" || line.contains(name), "{line}: {name}");
        let result = result.map_or(String::new(), |v| format!("%{}:", v.0));
        assert!(line.trim_start().starts_with(&result), "{line}: {result}");
    }
}

#[test]
fn parts_stand_where_they_are_said_to() {
    let kernel = parse(every()).unwrap();
    let text = kernel.to_string();
    let at = |part| text.lines().nth(part_line(&kernel, part) - 1).unwrap().trim();
    assert_eq!(at(Part::Name), "kernel every_instruction {");
    assert!(at(Part::Grid).starts_with("grid "));
    assert_eq!(at(Part::Threads), "threads 128");
    assert_eq!(at(Part::Requirement(3)), "require x aligned to 16");
    assert_eq!(at(Part::Param(6)), "argument scale: f32");
    assert_eq!(at(Part::Constant(1)), "constant wide: bool");
    assert_eq!(at(Part::Shared(4)), "shared votes: i32[2]");
    assert_eq!(at(Part::Register(2)), "register kept: f16x8[1]");
}

#[test]
fn sources_read_back_in_the_order_of_recording() {
    let with = every().replace("barrier\n", "barrier  ; a/b.rs:3\n");
    let with =
        with.replace("if %5 {\n", "if %5 {  ; c d.rs:4\n").replace("fence\n", "fence ; not one\n");
    let kernel = parse(&with).unwrap();
    assert_eq!(kernel.sources, ["", "a/b.rs:3", "c d.rs:4"]);
    same(&kernel);
    assert_eq!(parse(&kernel.to_text(false)).unwrap(), parse(every()).unwrap());
}

#[test]
fn floats_keep_their_bits() {
    let special =
        [0, 1, 0x8000_0000, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0000, 0xFFC0_0001, 0x7F7F_FFFF];
    let spread = (0..2000u32).map(|i| i.wrapping_mul(2_654_435_761));
    for bits in special.into_iter().chain(spread) {
        same(&literal(bits));
    }
}

#[test]
fn extents_keep_their_shape() {
    let [a, b, c] = ["a", "b", "c"].map(Extent::from);
    let shapes = [
        a.clone() + (b.clone() + c.clone()),
        a.clone() * (b.clone() * c.clone()),
        (a.clone() + 1) * (b.clone() + 2) + a.clone() * b.clone(),
        (a * b.clone()).ceil_div(c.clone() + 4) * b.ceil_div(c),
    ];
    for shape in shapes {
        let mut kernel = literal(0);
        kernel.launch.grid = [shape.clone(), shape.clone(), shape];
        same(&kernel);
    }
}

#[test]
fn several_kernels_stand_in_one_text() {
    let one = literal(0).to_string();
    let two = parse_all(&format!("{one}; between\n\n{one}")).unwrap();
    assert_eq!(two, [literal(0), literal(0)]);
    assert_eq!(parse_all("; nothing\n").unwrap(), []);
    for (text, wanted) in [(String::new(), "0 found"), (format!("{one}{one}{one}"), "3 found")] {
        assert!(parse(&text).unwrap_err().to_string().contains(wanted));
    }
}

#[test]
fn numbers_of_values_do_not_allocate() {
    let text = "kernel k {\n  body {\n    %4294967295: u32 = 1\n  }\n}\n";
    let fault = parse(text).unwrap_err();
    assert_eq!(fault.line, 3);
    assert!(fault.message.contains("too large"), "{fault}");
    // A gap as passes leave it.
    let kernel = parse(&text.replace("4294967295", "3000")).unwrap();
    assert_eq!(kernel.ty(Value(3000)), Scalar::U32.into());
}

#[test]
fn nesting_is_limited() {
    let nested = |depth| {
        let (open, close) = ("if %0 {\n".repeat(depth), "}\n".repeat(depth));
        format!("kernel k {{\nbody {{\n%0: bool = true\n{open}{close}}}\n}}\n")
    };
    same(&parse(&nested(60)).unwrap());
    assert!(parse(&nested(100_000)).unwrap_err().message.contains("inside one another"));
    for grid in ["(".repeat(100_000), "a + ".repeat(100_000), "ceil_div(".repeat(100_000)] {
        let fault = parse(&format!("kernel k {{\ngrid {grid}\n")).unwrap_err();
        assert!(fault.message.contains("parts"), "{fault}");
    }
}

#[test]
fn faults_say_what_was_expected_where() {
    let in_body = |line: &str| format!("kernel k {{\n  body {{\n    {line}\n  }}\n}}\n");
    for (text, line, wanted) in [
        ("kern k {\n".to_owned(), 1, "`kernel` expected, found `kern`"),
        ("kernel k {\n".to_owned(), 1, "`body` expected, found the end of the text"),
        ("kernel 7 {\n".to_owned(), 1, "the kernel's name expected, found `7`"),
        ("kernel k {\n  threads 32 32\n".to_owned(), 2, "the end of the line expected, found `32`"),
        ("kernel k {\n  threads -1\n".to_owned(), 2, "a number of threads expected, found `-1`"),
        ("kernel k {\n  threads 32\n  threads 32\n".to_owned(), 3, "`threads` is stated twice"),
        ("kernel k {\n  buffer x: f8 in\n".to_owned(), 2, "no element type is called `f8`"),
        (
            "kernel k {\n  require 3 holds 4\n".to_owned(),
            2,
            "a buffer's name expected before `holds`, found `3`",
        ),
        (in_body("jump"), 3, "no instruction is called `jump`"),
        (in_body("%0: f32 = exp %x"), 3, "a value such as `%3` expected, found `%x`"),
        (in_body("%0: f32 = 1e99"), 3, "a number of type f32 expected, found `1e99`"),
        (in_body("%0: u32 = 4294967296"), 3, "a number of type u32 expected, found `4294967296`"),
        (in_body("%0: f16 = 1.0"), 3, "a literal is bool, i32, u32 or f32, not f16"),
        (in_body("%0: f32 = load w[%1]"), 3, "no array is called `w`"),
        (
            in_body("%0: tile<f32, 16, c> = splat %1"),
            3,
            "a size such as `16x16` expected, found `16`",
        ),
        (in_body("cast %1"), 3, "`cast` without a result: `%n: type =` expected"),
        (in_body("} else {"), 3, "`}` expected, found `else` without `if`"),
        (in_body("barrier \u{e9}"), 3, "a word, a number or a sign expected, found 'é'"),
    ] {
        let fault = parse(&text).unwrap_err();
        assert_eq!((fault.line, fault.message.as_str()), (line, wanted), "{text}");
    }
}

//! Plans bindings, barriers and the storage of constants; independent of Metal.
//!
//! The emitted source numbers a kernel's parameters `[[buffer(i)]]` in order, buffers and 32-bit
//! arguments alike; threadgroup memory is declared by the source itself. An argument is bound as
//! inline bytes when work is encoded directly. An indirect command has no inline bytes: its
//! arguments lie in a buffer that lives as long as the recording.

use std::collections::HashMap;
use std::ops::Range;

use formats::{Error, Hint, Result, Setting};
use tile::Kernel;
use tile::ir::{Access, ParamKind};
use tile::launch::{BoundBuffer, Numbers};

use super::api::BINDINGS;

/// The binding at an index of a list of bindings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Binding<B> {
    /// A buffer, and the kernel's access to it.
    Buffer(B, Access),
    /// A 32-bit argument.
    Word(u32),
}

/// A buffer as seen by contracts and barriers.
pub(super) trait Region {
    /// Identifies its memory.
    fn memory(&self) -> usize;
    /// Its bytes in that memory.
    fn range(&self) -> Range<usize>;
}

/// The bindings of a kernel by index, and its grid.
///
/// # Errors
/// The rule of the launch contract that is violated.
pub(super) fn bind<B: Region + Clone>(
    kernel: &Kernel,
    numbers: &Numbers,
    buffers: &[B],
) -> Result<(Vec<Binding<B>>, [u32; 3])> {
    if kernel.params.len() > BINDINGS {
        let most = format!("at most {BINDINGS} buffers and arguments");
        return Err(Error::new(&kernel.name, most, kernel.params.len()));
    }
    // Memory itself is aligned to more than any contract asks for.
    let align = |b: &B| 1 << b.range().start.trailing_zeros().min(8);
    let mut next = buffers.iter();
    let mut bounds = Vec::with_capacity(buffers.len());
    let mut bindings = Vec::with_capacity(kernel.params.len());
    for param in &kernel.params {
        match param.kind {
            ParamKind::Buffer { scalar, access } => {
                // A missing buffer makes the count wrong, which the contract reports.
                let Some(buffer) = next.next() else { continue };
                let len = buffer.range().len() / scalar.bytes();
                bounds.push(BoundBuffer { len, align: align(buffer) });
                bindings.push(Binding::Buffer(buffer.clone(), access));
            }
            ParamKind::Argument(_) => {
                bindings.push(Binding::Word(numbers.get(&param.name).unwrap_or(0)));
            }
        }
    }
    bounds.extend(next.map(|b| BoundBuffer { len: b.range().len(), align: align(b) }));
    let grid = kernel.bind(numbers, &bounds).map_err(|why| Error::new("metal", "", why))?;
    Ok((bindings, grid))
}

/// For each launch, whether it has to wait for earlier ones: since the last wait, one of them wrote
/// what it reads, or accessed what it writes.
pub(super) fn barriers<'a, B: Region + 'a>(
    launches: impl IntoIterator<Item = &'a [Binding<B>]>,
) -> Vec<bool> {
    let mut read: HashMap<usize, Vec<Range<usize>>> = HashMap::new();
    let mut written = read.clone();
    let meets = |of: &HashMap<usize, Vec<Range<usize>>>, buffer: &B| {
        let range = buffer.range();
        let known = of.get(&buffer.memory());
        known.is_some_and(|all| all.iter().any(|r| r.start < range.end && range.start < r.end))
    };
    let mut waits = Vec::new();
    for bindings in launches {
        let buffers = || {
            bindings.iter().filter_map(|binding| match binding {
                Binding::Buffer(buffer, access) => Some((buffer, *access)),
                Binding::Word(_) => None,
            })
        };
        let wait = buffers().any(|(buffer, access)| {
            meets(&written, buffer) || (access != Access::In && meets(&read, buffer))
        });
        if wait {
            read.clear();
            written.clear();
        }
        for (buffer, access) in buffers() {
            let of = if access == Access::In { &mut read } else { &mut written };
            of.entry(buffer.memory()).or_default().push(buffer.range());
        }
        waits.push(wait);
    }
    waits
}

/// Checks that an indirect command can hold the start of a range, for which it has 32 bits.
///
/// # Errors
/// A start of 4 GiB or more.
pub(super) fn offset(range: &Range<usize>) -> Result<()> {
    if range.start >> 32 == 0 {
        return Ok(());
    }
    let expected = "parts of buffers that begin below 4 GiB in a recording";
    let error = Error::new("metal", expected, format!("one at {}", range.start));
    let hint = Hint::set(Setting::Dispatch, "arguments");
    Err(error.hint(hint.and(" has no such limit")))
}

/// Distance between arguments of a recording: the alignment of the constant address space on every
/// Mac.
const STEP: usize = 256;

/// The arguments of a recording, each value once.
#[derive(Debug, Default)]
pub(super) struct Constants {
    words: Vec<u32>,
    known: HashMap<u32, usize>,
}

impl Constants {
    /// The location of an argument, in bytes.
    pub(super) fn place(&mut self, word: u32) -> Range<usize> {
        let words = &mut self.words;
        let index = *self.known.entry(word).or_insert_with(|| {
            words.push(word);
            words.len() - 1
        });
        index * STEP..index * STEP + 4
    }

    /// The contents of the buffer.
    pub(super) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.words.len() * STEP];
        for (to, word) in bytes.chunks_exact_mut(STEP).zip(&self.words) {
            to[..4].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// GPU cores, estimated from the name of the chip, since Metal does not report them. They affect
/// only how finely work is split.
pub(super) fn cores(name: &str) -> u32 {
    const KINDS: [(&str, u32); 4] = [("Apple A", 5), ("Ultra", 64), ("Max", 32), ("Pro", 16)];
    KINDS.iter().find(|(kind, _)| name.contains(kind)).map_or(10, |(_, cores)| *cores)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ops::Range;
    use tile::dsl::*;
    use tile::launch::{Mode, Requirement};

    #[derive(Debug, Clone, PartialEq, Eq)]
    struct Part(usize, Range<usize>);

    impl Region for Part {
        fn memory(&self) -> usize {
            self.0
        }

        fn range(&self) -> Range<usize> {
            self.1.clone()
        }
    }

    fn sample() -> Kernel {
        build("scaled", || {
            let x = In::<f32>::declare("x");
            let by = Arg::<f32>::declare("by");
            let y = Out::<f32>::declare("y");
            let n = Arg::<u32>::declare("n");
            launch(Mode::Element, [dim("n").ceil_div(32u32), fixed(1), fixed(1)], 32);
            require(Requirement::Length("x".into(), dim("n") + 0u32));
            require(Requirement::Length("y".into(), dim("n") + 0u32));
            require(Requirement::Aligned("y".into(), 16));
            strided(n).each(|i| y.set(i, x.get(i) * by));
        })
    }

    #[test]
    fn parameters_are_bound_in_their_order() {
        let kernel = sample();
        let numbers = Numbers::new().with("n", 33).with_f32("by", 2.0);
        let (x, y) = (Part(1, 0..132), Part(2, 256..388));
        let (bindings, grid) = bind(&kernel, &numbers, &[x.clone(), y.clone()]).unwrap();
        let want = [
            Binding::Buffer(x.clone(), Access::In),
            Binding::Word(2.0_f32.to_bits()),
            Binding::Buffer(y.clone(), Access::Out),
            Binding::Word(33),
        ];
        assert_eq!((&bindings[..], grid), (&want[..], [2, 1, 1]));
        // The indices that the text has.
        let text =
            tile::emit::text(std::slice::from_ref(&kernel), tile::emit::Dialect::Metal).unwrap();
        for (i, name) in ["x", "by", "y", "n"].iter().enumerate() {
            assert!(text.contains(&format!("{name} [[buffer({i})]]")), "{text}");
        }

        for (buffers, says) in [
            (vec![x.clone()], "2 buffers expected, 1 bound"),
            (vec![x.clone(), y.clone(), y.clone()], "2 buffers expected, 3 bound"),
            (vec![x.clone(), Part(2, 0..128)], "the contract says"),
            (vec![x.clone(), Part(2, 8..140)], "the contract says"),
        ] {
            let why = bind(&kernel, &numbers, &buffers).unwrap_err().to_string();
            assert!(why.contains(says), "{why}");
        }
        let why = bind(&kernel, &Numbers::new().with("n", 1), &[x, y]).unwrap_err().to_string();
        assert!(why.contains("no value for argument `by`"), "{why}");
    }

    #[test]
    fn more_parameters_than_metal_has_are_refused() {
        let kernel = build("wide", || {
            let y = Out::<u32>::declare("y");
            let args: Vec<Val<u32>> =
                (0..31).map(|i| Arg::<u32>::declare(&format!("a{i}"))).collect();
            launch(Mode::Element, [fixed(1), fixed(1), fixed(1)], 32);
            args.into_iter().for_each(|a| y.set(0, a));
        });
        let why = bind(&kernel, &Numbers::new(), &[Part(0, 0..4)]).unwrap_err().to_string();
        assert!(why.contains("at most 31") && why.contains("found 32"), "{why}");
    }

    #[test]
    fn launches_wait_for_what_they_touch() {
        let read = |m, r| Binding::Buffer(Part(m, r), Access::In);
        let write = |m, r| Binding::Buffer(Part(m, r), Access::Out);
        let both = |m, r| Binding::Buffer(Part(m, r), Access::InOut);
        type Bindings = Vec<Binding<Part>>;
        let cases: [(&str, Vec<Bindings>, &[bool]); 7] = [
            (
                "reads of one thing",
                vec![vec![read(0, 0..8), write(1, 0..8)], vec![read(0, 0..8), write(2, 0..8)]],
                &[false, false],
            ),
            (
                "a read of what was written",
                vec![vec![write(1, 0..8)], vec![read(1, 4..6)]],
                &[false, true],
            ),
            (
                "a write over what was read",
                vec![vec![read(1, 0..8)], vec![write(1, 7..9)]],
                &[false, true],
            ),
            ("two writes", vec![vec![write(1, 0..8)], vec![both(1, 0..8)]], &[false, true]),
            (
                "neighbours, and other memory",
                vec![vec![write(1, 0..8)], vec![write(1, 8..9)], vec![read(2, 0..8)]],
                &[false, false, false],
            ),
            (
                "one wait is for everything before it",
                vec![
                    vec![write(1, 0..8)],
                    vec![write(2, 0..8)],
                    vec![read(1, 0..8)],
                    vec![read(2, 0..8)],
                ],
                &[false, false, true, false],
            ),
            (
                "what reads after a wait is waited for again",
                vec![vec![write(1, 0..8)], vec![read(1, 0..8)], vec![write(1, 0..8)]],
                &[false, true, true],
            ),
        ];
        for (why, launches, want) in cases {
            let found = barriers(launches.iter().map(Vec::as_slice));
            assert_eq!(found, want, "{why}");
        }
    }

    #[test]
    fn numbers_of_a_recording_lie_apart_and_once() {
        let mut constants = Constants::default();
        let places = [7, 9, 7].map(|word| constants.place(word));
        assert_eq!(places, [0..4, 256..260, 0..4]);
        let bytes = constants.bytes();
        assert_eq!(bytes.len(), 512);
        assert_eq!((bytes[0], bytes[256]), (7, 9));
    }

    #[test]
    fn chips_have_more_or_fewer_cores() {
        for (name, count) in
            [("Apple M1", 10), ("Apple M3 Max", 32), ("Apple A17 Pro", 5), ("Apple A15 GPU", 5)]
        {
            assert_eq!(cores(name), count, "{name}");
        }
    }
}

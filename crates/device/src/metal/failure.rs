//! Explains Metal's command buffer errors in one line.

use formats::{Error, Hint, Setting};

/// Why a command buffer did not complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The code of `MTLCommandBufferError`.
    pub(crate) code: isize,
    /// The system's message.
    pub(crate) said: String,
}

/// A kind of failure: its meaning, a remedy, and whether the GPU is unusable afterwards.
struct Kind {
    means: &'static str,
    hint: Remedy,
    fatal: bool,
}

/// Advice after a failure.
enum Remedy {
    /// Shorter chunks of prompts, which make shorter work.
    Chunks,
    /// Launches encoded one by one, in place of an indirect command buffer.
    Direct,
    Words(&'static str),
}

const SMALLER: Remedy = Remedy::Words("a smaller model, a shorter context, or fewer other programs");
const RESTART: Remedy = Remedy::Words("restart the program");

impl Remedy {
    fn hint(&self) -> Hint {
        match self {
            Remedy::Chunks => {
                Hint::set(Setting::Chunk, 128).and(" or less makes the work of a prompt shorter")
            }
            Remedy::Direct => {
                let hint = Hint::set(Setting::Dispatch, "arguments");
                hint.and(" does without an indirect command buffer")
            }
            Remedy::Words(words) => Hint::text(words),
        }
    }
}

/// Kinds recognised by words of the message: codes of a lower layer, which Metal passes on only as
/// text.
#[rustfmt::skip]
const SAID: [(&str, Kind); 4] = [
    ("Impacting Interactivity", Kind { means: "work that kept the display waiting", hint: Remedy::Chunks, fatal: false }),
    ("GPU Hang", Kind { means: "work that did not end", hint: Remedy::Direct, fatal: false }),
    ("Innocent Victim", Kind { means: "work that another program's failure ended", hint: Remedy::Words("try again"), fatal: false }),
    ("prior/excessive", Kind { means: "access to the GPU revoked after failures", hint: RESTART, fatal: true }),
];

/// Kinds by the code of `MTLCommandBufferError`.
#[rustfmt::skip]
const CODES: [(isize, Kind); 9] = [
    (1, Kind { means: "an internal error of the GPU", hint: Remedy::Direct, fatal: false }),
    (2, Kind { means: "work that took too long", hint: Remedy::Chunks, fatal: false }),
    (3, Kind { means: "an access outside all buffers", hint: Remedy::Direct, fatal: false }),
    (4, Kind { means: "access to the GPU revoked by the system", hint: RESTART, fatal: true }),
    (7, Kind { means: "work that the system does not permit now", hint: Remedy::Words("try again in the foreground"), fatal: false }),
    (8, Kind { means: "too little memory", hint: SMALLER, fatal: false }),
    (9, Kind { means: "a resource that is gone", hint: Remedy::Direct, fatal: false }),
    (11, Kind { means: "a GPU that was removed", hint: RESTART, fatal: true }),
    (12, Kind { means: "too deep a stack", hint: Remedy::Direct, fatal: false }),
];

/// Any other kind.
const OTHER: Kind = Kind { means: "an error", hint: Remedy::Direct, fatal: false };

impl Failure {
    fn kind(&self) -> &'static Kind {
        let said = SAID.iter().find(|(words, _)| self.said.contains(words)).map(|(_, kind)| kind);
        let code = || CODES.iter().find(|(code, _)| *code == self.code).map(|(_, kind)| kind);
        said.or_else(code).unwrap_or(&OTHER)
    }

    /// Whether the GPU is unusable afterwards.
    pub(crate) fn fatal(&self) -> bool {
        self.kind().fatal
    }

    /// Converts it to an [`Error`].
    pub(crate) fn error(&self) -> Error {
        let Kind { means, hint, .. } = self.kind();
        let said = self.said.lines().map(str::trim).find(|line| !line.is_empty());
        let found = format!("{means}: {}", said.unwrap_or("no message"));
        Error::new("metal", "work that completes", found).hint(hint.hint())
    }
}

/// The line of a compiler's message with its first error, or its first line.
pub(crate) fn first_error(message: &str) -> &str {
    let lines = || message.lines().map(str::trim).filter(|line| !line.is_empty());
    lines().find(|line| line.contains("error:")).or_else(|| lines().next()).unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_one_line_with_what_the_system_said() {
        let failure = Failure { code: 8, said: "Insufficient Memory\n(00000008)".to_owned() };
        let line = failure.error().to_string();
        assert!(line.contains("too little memory") && line.contains("Insufficient"), "{line}");
        assert!(line.contains("hint") && !line.contains('\n'), "{line}");
        assert!(!failure.fatal() && Failure { code: 11, ..failure.clone() }.fatal());
        let unknown = Failure { code: 77, ..failure };
        let line = unknown.error().to_string();
        assert!(line.contains("an error: Insufficient") && line.contains("arguments"), "{line}");
        // The words tell more than the code that comes with them.
        for (said, means, fatal) in [
            ("Impacting Interactivity (0000000e:kIOGPU..)", ["display waiting", "chunk 128"], false),
            ("Caused GPU Hang Error (00000003)", ["did not end", "dispatch arguments"], false),
            ("Innocent Victim (00000005)", ["another program", "again"], false),
            ("Ignored (for causing prior/excessive GPU errors)", ["revoked", "restart"], true),
        ] {
            let failure = Failure { code: 1, said: said.to_owned() };
            let line = failure.error().to_string();
            assert!(means.iter().all(|words| line.contains(words)), "{line}");
            assert_eq!(failure.fatal(), fatal, "{said}");
        }
    }

    #[test]
    fn the_first_error_of_a_compiler_is_found() {
        let message = "program_source:3:1: warning: unused\n  x\nprogram_source:9:2: error: unknown type\nmore";
        assert_eq!(first_error(message), "program_source:9:2: error: unknown type");
        assert_eq!(first_error("\n  Compiler died\n"), "Compiler died");
        assert_eq!(first_error(""), "no message");
    }
}

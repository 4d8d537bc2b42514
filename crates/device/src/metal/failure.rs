//! What Metal says of a failure, in one line.

use formats::Error;

/// Why a command buffer did not complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The code of `MTLCommandBufferError`.
    pub(crate) code: isize,
    /// What the system says of it.
    pub(crate) said: String,
}

/// `(code, what it means, hint, whether nothing works afterwards)`.
#[rustfmt::skip]
const CODES: [(isize, &str, Option<&str>, bool); 9] = [
    (1, "an internal error of the GPU", None, false),
    (2, "work that took too long", Some("a smaller --chunk makes shorter work"), false),
    (3, "an access outside all buffers", None, false),
    (4, "access to the GPU revoked by the system", Some("restart the program"), true),
    (7, "work that the system does not permit now", None, false),
    (8, "too little memory", Some("a smaller model, a shorter context, or fewer other programs"), false),
    (9, "a resource that is gone", None, false),
    (11, "a GPU that was removed", Some("restart the program"), true),
    (12, "too deep a stack", None, false),
];

impl Failure {
    /// Whether the GPU can be used afterwards.
    pub(crate) fn fatal(&self) -> bool {
        CODES.iter().any(|row| row.0 == self.code && row.3)
    }

    /// As the project's error.
    pub(crate) fn error(&self) -> Error {
        let row = CODES.iter().find(|row| row.0 == self.code);
        let means = row.map_or("an error", |row| row.1);
        let error = Error::new("metal", "work that completes", format!("{means}: {}", self.said));
        match row.and_then(|row| row.2) {
            Some(hint) => error.hint(hint),
            None => error,
        }
    }
}

/// The line of a compiler's message that says what is wrong: its first error, or its first line.
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
        assert!(unknown.error().to_string().contains("an error: Insufficient"));
    }

    #[test]
    fn the_first_error_of_a_compiler_is_found() {
        let message = "program_source:3:1: warning: unused\n  x\nprogram_source:9:2: error: unknown type\nmore";
        assert_eq!(first_error(message), "program_source:9:2: error: unknown type");
        assert_eq!(first_error("\n  Compiler died\n"), "Compiler died");
        assert_eq!(first_error(""), "no message");
    }
}

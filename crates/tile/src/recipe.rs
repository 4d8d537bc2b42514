//! [`Recipe`]: a kernel before it is recorded.
//!
//! A kernel depends on its function and on the values that the function takes, nothing else. Both
//! are known without recording it, so a recipe is enough to find a kernel that is there already;
//! and since the key is made of all parameters, as `#[kernel]` finds them in the signature, none
//! can be left out of it.

use std::fmt::Debug;

use crate::build;
use crate::ir::{Kernel, KernelSetting};

/// Characters of a name that holds everything. Of a longer one the first are kept, with a digest of
/// all.
const MOST: usize = 96;

/// How to record a kernel, and what tells it from all others.
pub struct Recipe<'a> {
    path: &'static str,
    stem: &'static str,
    parameters: Vec<RecipeParameter>,
    record: Box<dyn FnOnce() + 'a>,
}

/// A parameter of a kernel's function: its name, and its value as `Debug` prints it.
pub type RecipeParameter = (&'static str, String);

impl<'a> Recipe<'a> {
    /// The recipe of the function `stem` in the module `path`; `#[kernel]` writes this call.
    pub fn new(
        path: &'static str,
        stem: &'static str,
        parameters: Vec<RecipeParameter>,
        record: Box<dyn FnOnce() + 'a>,
    ) -> Recipe<'a> {
        Recipe { path, stem, parameters, record }
    }

    /// Names and values of parameters, printed; `#[kernel]` writes this call, since what prints
    /// them would be compiled for every kernel.
    pub fn parameters(values: &[(&'static str, &dyn Debug)]) -> Vec<RecipeParameter> {
        values.iter().map(|(name, value)| (*name, format!("{value:?}"))).collect()
    }

    /// A key that is different for every kernel: the place of its function, and the values of all
    /// its parameters.
    pub fn key(&self) -> String {
        let values = self.parameters.iter().map(|(name, value)| format!("{name}: {value}"));
        format!("{}::{}({})", self.path, self.stem, values.collect::<Vec<_>>().join(", "))
    }

    /// The kernel's name, an identifier: its function's, and a word for each value.
    pub fn name(&self) -> String {
        let mut words = vec![self.stem.to_owned()];
        for (name, value) in &self.parameters {
            Words { text: value, words: &mut words }.value(name);
        }
        let whole = words.join("_");
        match whole.char_indices().nth(MOST) {
            None => whole,
            Some((end, _)) => {
                // Two underscores in a row are for compilers alone.
                let first = whole[..end - 17].trim_end_matches('_');
                format!("{first}_{:016x}", digest(&self.key()))
            }
        }
    }

    /// The values of the parameters, a word or several for each, behind the function's name.
    fn settings(&self) -> Vec<KernelSetting> {
        let function = KernelSetting { name: "function".to_owned(), value: self.stem.to_owned() };
        let parameters = self.parameters.iter().map(|(name, value)| {
            let value = match value.as_str() {
                "None" => "none".to_owned(),
                text if text.parse::<bool>().is_ok() || text.parse::<f64>().is_ok() => {
                    text.to_owned()
                }
                text => {
                    let mut words = vec![];
                    Words { text, words: &mut words }.value(name);
                    if words.is_empty() { "none".to_owned() } else { words.join("_") }
                }
            };
            KernelSetting { name: (*name).to_owned(), value }
        });
        std::iter::once(function).chain(parameters).collect()
    }

    /// Records the kernel.
    pub fn record(self) -> Kernel {
        let (name, settings) = (self.name(), self.settings());
        Kernel { settings, ..build::build(&name, self.record) }
    }
}

/// FNV-1a: the same on every machine and in every version, since names are compared between them.
fn digest(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |digest, byte| {
        (digest ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Turns what `Debug` printed into words.
///
/// A number is preceded by its field's name, a `true` is that name and a `false` nothing; a variant
/// is its own word. So is a structure, unless it is called as the parameter is:
/// `schedule: Schedule { .. }`.
struct Words<'t, 'w> {
    /// The rest of the text.
    text: &'t str,
    words: &'w mut Vec<String>,
}

impl<'t> Words<'t, '_> {
    fn value(&mut self, name: &str) {
        self.text = self.text.trim_start();
        match self.text.chars().next() {
            Some('[' | '(') => self.list(name),
            Some('"') => self.string(),
            Some(c) if c.is_ascii_digit() || c == '-' => {
                let number = self.take(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '.'));
                self.words.push(format!("{name}{}", word(number)));
            }
            Some(c) if is_name(c) => self.named(name),
            _ => self.text = "",
        }
    }

    /// A structure, a variant, a truth.
    fn named(&mut self, name: &str) {
        let head = self.take(is_name);
        let own = word(head);
        match head {
            "true" => self.words.push(word(name)),
            "false" | "None" => {}
            "Some" => self.list(name),
            _ => {
                if own != word(name) {
                    self.words.push(own);
                }
                self.text = self.text.trim_start();
                match self.text.chars().next() {
                    Some('(') => self.list(""),
                    Some('{') => self.fields(),
                    _ => {}
                }
            }
        }
    }

    /// `[a, b]` or `(a, b)`.
    fn list(&mut self, name: &str) {
        self.skip();
        while !self.closes() {
            self.value(name);
            self.comma();
        }
        self.skip();
    }

    /// `{ a: 1, b: 2 }`.
    fn fields(&mut self) {
        self.skip();
        while !self.closes() {
            let name = self.take(is_name);
            self.skip();
            self.value(name);
            self.comma();
        }
        self.skip();
    }

    fn string(&mut self) {
        self.skip();
        let text = self.take(|c| c != '"');
        self.words.push(word(text));
        self.skip();
    }

    fn take(&mut self, keep: impl Fn(char) -> bool) -> &'t str {
        let end = self.text.find(|c| !keep(c)).unwrap_or(self.text.len());
        let (taken, rest) = self.text.split_at(end);
        self.text = rest;
        taken
    }

    /// Skips a character.
    fn skip(&mut self) {
        let mut rest = self.text.chars();
        rest.next();
        self.text = rest.as_str();
    }

    fn comma(&mut self) {
        self.text = self.text.trim_start();
        if self.text.starts_with(',') {
            self.skip();
        }
    }

    fn closes(&mut self) -> bool {
        self.text = self.text.trim_start();
        self.text.is_empty() || self.text.starts_with([']', ')', '}'])
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// `HeadMajor` as `head_major`, `Q4K` as `q4_k`, `-1.5` as `m1p5`.
fn word(text: &str) -> String {
    let mut word = String::new();
    let mut before = '_';
    for c in text.chars() {
        if c.is_ascii_uppercase() && (before.is_ascii_lowercase() || before.is_ascii_digit()) {
            word.push('_');
        }
        word.push(match c {
            '-' => 'm',
            '.' => 'p',
            c if is_name(c) => c.to_ascii_lowercase(),
            _ => '_',
        });
        before = c;
    }
    word
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Scalar;

    #[expect(dead_code, reason = "names are made of what Debug shows")]
    #[derive(Debug, Clone, Copy)]
    struct Schedule {
        rows: u32,
        whole: bool,
        way: Way,
    }

    #[expect(dead_code, reason = "as above")]
    #[derive(Debug, Clone, Copy)]
    enum Way {
        HeadMajor,
        Staged(u32),
        Lanes { stages: u32 },
    }

    fn name(parameters: &[(&'static str, &dyn Debug)]) -> String {
        let parameters = Recipe::parameters(parameters);
        Recipe::new("a", "gemv", parameters, Box::new(|| {})).name()
    }

    #[test]
    fn a_name_has_a_word_for_each_value() {
        let schedule = Schedule { rows: 8, whole: true, way: Way::HeadMajor };
        let staged = Schedule { whole: false, way: Way::Staged(256), ..schedule };
        let lanes = Schedule { way: Way::Lanes { stages: 2 }, ..schedule };
        for (found, expected) in [
            (name(&[]), "gemv"),
            (name(&[("scalar", &Scalar::BF16), ("bias", &false)]), "gemv_bf16"),
            (name(&[("bias", &true), ("rows", &3u32)]), "gemv_bias_rows3"),
            (name(&[("schedule", &schedule)]), "gemv_rows8_whole_head_major"),
            (name(&[("other", &staged)]), "gemv_schedule_rows8_staged_256"),
            (name(&[("schedule", &lanes)]), "gemv_rows8_whole_lanes_stages2"),
            (name(&[("window", &Some(4u32)), ("cap", &None::<u32>)]), "gemv_window4"),
            (name(&[("of", &vec![(Scalar::F16, true), (Scalar::F32, false)])]), "gemv_f16_of_f32"),
            (name(&[("by", &-1.5f32), ("text", &"a b")]), "gemv_bym1p5_a_b"),
        ] {
            assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_kernel_keeps_the_values_it_was_recorded_with() {
        let schedule = Schedule { rows: 8, whole: true, way: Way::Lanes { stages: 2 } };
        let parameters: [(&'static str, &dyn Debug); 7] = [
            ("scalar", &Scalar::BF16),
            ("bias", &false),
            ("rows", &3u32),
            ("by", &-1.5f32),
            ("window", &None::<u32>),
            ("cap", &Some(4u32)),
            ("schedule", &schedule),
        ];
        let parameters = Recipe::parameters(&parameters);
        let recipe = Recipe::new("a", "gemv", parameters, Box::new(|| {}));
        let kernel = recipe.record();
        let found = kernel.settings.iter().map(|s| format!("{} {}", s.name, s.value));
        assert_eq!(
            found.collect::<Vec<_>>(),
            [
                "function gemv",
                "scalar bf16",
                "bias false",
                "rows 3",
                "by -1.5",
                "window none",
                "cap cap4",
                "schedule rows8_whole_lanes_stages2",
            ]
        );
        let text = kernel.to_text(true);
        assert_eq!(crate::text::parse(&text), Ok(kernel.clone()), "{text}");
        assert!(!kernel.to_text(false).contains("setting"), "{kernel}");
    }

    #[test]
    fn a_long_name_ends_in_a_digest_of_all_of_it() {
        let long = |last: u32| name(&[("table", &[7_777_777u32; 20]), ("last", &last)]);
        assert!(long(1).len() <= MOST && long(1).starts_with("gemv_table7777777_"));
        assert_ne!(long(1), long(2));
        // The cut falls behind a word.
        let ends = name(&[("a", &true), ("table", &[77u32; 20])]);
        assert!(ends.starts_with("gemv_a_table77_") && !ends.contains("__"), "{ends}");
    }

    #[test]
    fn kernels_of_one_name_in_two_modules_have_two_keys() {
        let key = |path| Recipe::new(path, "add", vec![], Box::new(|| {})).key();
        assert_ne!(key("a"), key("b"));
    }
}

//! Grammars against real vocabularies: whatever is allowed and written to its end is what was asked
//! for.

mod endings;
mod hostile;
mod schemas;
mod tools;

use delft_structured::Grammars;
use engine::{ConstraintSource, TokenSet};
use std::sync::Arc;
use tokens::Tokenizer;

/// GPT-2's vocabulary, whose one special token ends a text.
pub(crate) fn gpt2() -> Option<(Arc<Tokenizer>, u32)> {
    let folder = testing::data("tokenizers/gpt-2")?;
    Some((in_gguf(&folder.join("ggml-vocab-gpt-2.gguf")), 50256))
}

/// Llama 2's vocabulary, whose tokenizer puts a blank in front of a text.
pub(crate) fn llama2() -> Option<(Arc<Tokenizer>, u32)> {
    let folder = testing::data("tokenizers/llama-spm")?;
    Some((in_gguf(&folder.join("ggml-vocab-llama-spm.gguf")), 2))
}

/// Qwen2's vocabulary.
pub(crate) fn qwen2() -> Option<(Arc<Tokenizer>, u32)> {
    let folder = testing::data("tokenizers/qwen2")?;
    Some((Arc::new(Tokenizer::from_folder(&folder).unwrap()), 151643))
}

fn in_gguf(path: &std::path::Path) -> Arc<Tokenizer> {
    let file = formats::Gguf::open(path).unwrap();
    Arc::new(Tokenizer::from_gguf(file.metadata()).unwrap())
}

/// The grammars of a vocabulary.
pub(crate) fn grammars((tokenizer, end): &(Arc<Tokenizer>, u32)) -> Grammars {
    Grammars::new(tokenizer, tokenizer.vocab_size(), &[*end]).unwrap()
}

/// Writes a text that a constraint allows, by a generator of its own; what it says, and whether it
/// came to its end.
pub(crate) fn write(
    (tokenizer, end): &(Arc<Tokenizer>, u32),
    source: &ConstraintSource,
    seed: u64,
) -> (String, bool) {
    let mut constraint = source.start().unwrap();
    let mut allowed = TokenSet::new(tokenizer.vocab_size());
    let (mut ids, mut state) = (Vec::new(), seed.wrapping_mul(2).wrapping_add(1));
    for step in 0..400 {
        allowed.clear();
        constraint.allow(usize::MAX, &mut allowed).unwrap();
        // Ends early and closes what is open, so that most texts are short.
        if allowed.contains(*end) && (step > 8 || seed.is_multiple_of(3)) {
            return (tokenizer.decode(&ids, false), true);
        }
        let all: Vec<u32> =
            (0..tokenizer.vocab_size() as u32).filter(|t| allowed.contains(*t)).collect();
        let closing = all.iter().copied().find(|id| {
            step > 60 && matches!(tokenizer.token_bytes(*id), b"\"" | b"}" | b"]" | b"\n")
        });
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let pick = closing.or_else(|| all.get((state >> 33) as usize % all.len().max(1)).copied());
        let id =
            pick.unwrap_or_else(|| panic!("nothing behind {:?}", tokenizer.decode(&ids, false)));
        if id == *end {
            return (tokenizer.decode(&ids, false), true);
        }
        constraint.accept(id).unwrap();
        ids.push(id);
    }
    (tokenizer.decode(&ids, false), false)
}

/// Whether a constraint allows a text, token by token, and its end behind it.
pub(crate) fn takes(
    (tokenizer, end): &(Arc<Tokenizer>, u32),
    source: &ConstraintSource,
    text: &str,
) -> bool {
    let mut constraint = source.start().unwrap();
    let mut allowed = TokenSet::new(tokenizer.vocab_size());
    for id in tokenizer.encode(text, tokens::Special::default()).unwrap() {
        allowed.clear();
        constraint.allow(usize::MAX, &mut allowed).unwrap();
        if !allowed.contains(id) {
            return false;
        }
        // A token that goes too far is taken as the part of it that fits.
        if constraint.accept(id).unwrap() != id {
            return false;
        }
    }
    allowed.clear();
    constraint.allow(usize::MAX, &mut allowed).unwrap();
    allowed.contains(*end)
}

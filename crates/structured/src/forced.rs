//! Text that must come next, in the tokens that the model's own tokenizer makes of it.
//!
//! A look walks a byte at a time from the mask of the present place over masks whose tokens all
//! begin alike, or that allow one special token alone. The text that it finds is made into tokens
//! as the model has learned them, and those at its end that what follows may still join are left
//! for the model to choose.
//!
//! llguidance looks for such text as well, within each mask, where a vocabulary says that its
//! tokens are the tokenizer's own (`TokenizerEnv::tokenize_is_canonical`). That walk goes on, a
//! byte at a time, for as long as only one byte may come next, and none of the parser's limits
//! stops it: `"a"{1000000000}` takes hours. So vocabularies here do not say so, and a look of ours
//! has bounds; a longer text is found by several looks.

use crate::STEPS;
use crate::matcher::Matcher;
use llguidance::toktrie::{SimpleVob, TokTrie};
use std::sync::Arc;
use tokens::Tokenizer;

/// Bytes and special tokens that one look walks over.
const PLACES: usize = 64;
/// Steps of regular expressions that one look takes, its last mask not counted.
const WALKING: u64 = STEPS / 4;

/// Writes forced text in a model's tokens.
pub(crate) struct Speller {
    tokenizer: Arc<Tokenizer>,
    /// The token of each byte by itself, where there is one.
    bytes: Vec<Option<u32>>,
    /// Bytes of the longest token.
    longest: usize,
}

impl Speller {
    /// The speller of a vocabulary.
    pub(crate) fn new(tokenizer: Arc<Tokenizer>, trie: &TokTrie) -> Speller {
        let bytes = (0..=u8::MAX).map(|byte| trie.token_id(&[byte])).collect();
        Speller { tokenizer, bytes, longest: trie.max_token_len() }
    }

    /// The tokens that come next whatever the model says, behind the token `last`: none where the
    /// mask leaves a choice, and where what is forced would join what follows it.
    pub(crate) fn look(&self, matcher: &Matcher, mask: &SimpleVob, last: Option<u32>) -> Vec<u32> {
        let Some(first) = self.only(matcher, mask) else { return Vec::new() };
        let Ok(environment) = matcher.tok_env() else { return Vec::new() };
        let trie = environment.tok_trie();
        let (mut tokens, mut text) = (Vec::new(), Vec::new());
        let (mut there, mut next, mut steps) = (matcher.clone(), Some(first), 0);
        let mut behind = None;
        for _ in 0..PLACES {
            let Some(token) = next.take() else { break };
            if there.consume_token(token).is_err() {
                break;
            }
            if trie.is_special_token(token) {
                tokens.extend(self.spell(trie, tokens.last().copied().or(last), &text));
                tokens.push(token);
                text.clear();
            } else {
                text.extend_from_slice(trie.token(token));
            }
            behind = None;
            if there.is_stopped() || steps > WALKING {
                break;
            }
            let Ok(mask) = there.compute_mask() else { break };
            steps += there.steps().unwrap_or(STEPS);
            next = self.only(&there, &mask);
            behind = Some(mask);
        }
        let ends = there.is_stopped() && there.error().is_none();
        let mut own = self.spell(trie, tokens.last().copied().or(last), &text);
        if !ends {
            let joined = self.joined(trie, &text, behind.as_ref());
            let mut kept = text.len();
            while kept > text.len() - joined
                && let Some(token) = own.pop()
            {
                kept -= trie.token_len(token);
            }
        }
        tokens.append(&mut own);
        tokens
    }

    /// The shortest token of a mask, which is one byte where each has a token, if all others begin
    /// with it; or its one special token. A longer one proves nothing: of `-` and `-1` alone, `-`
    /// may be followed by other digits, for which there is no such token. No token that ends a
    /// text, which is for the model to say.
    fn only(&self, matcher: &Matcher, mask: &SimpleVob) -> Option<u32> {
        // Text that goes on without a choice has no more beginnings than bytes; several tokens may
        // have the same ones.
        let count = mask.num_set();
        if count == 0 || count > 2 * self.longest {
            return None;
        }
        let environment = matcher.tok_env().ok()?;
        let trie = environment.tok_trie();
        let shortest = mask.iter().min_by_key(|token| trie.token_len(*token))?;
        if mask.iter().any(|token| trie.is_special_token(token)) {
            return (count == 1 && !trie.eos_tokens().contains(&shortest)).then_some(shortest);
        }
        let text = trie.token(shortest);
        mask.iter().all(|token| trie.token(token).starts_with(text)).then_some(shortest)
    }

    /// The tokenizer's tokens of a text behind the token `last`, where it has tokens of exactly
    /// these bytes, and else the longest that there are.
    fn spell(&self, trie: &TokTrie, last: Option<u32>, text: &[u8]) -> Vec<u32> {
        if text.is_empty() {
            return Vec::new();
        }
        let last = last.filter(|token| !trie.is_special_token(*token));
        let before = last.and_then(|token| std::str::from_utf8(trie.token(token)).ok());
        trie.tokenize_with_greedy_fallback(text, |part| {
            // Some tokenizers put a blank in front of a text, but of none that goes on.
            let own = [before, Some("\n"), Some("")].into_iter().flatten();
            let mut own = own.filter_map(|before| self.tokenizer.encode_behind(before, part));
            own.next().unwrap_or_else(|| trie.greedy_tokenize(part.as_bytes()))
        })
    }

    /// The bytes at a text's end that may be the beginning of a token which goes on in what a mask
    /// allows behind them, as far as the next byte tells; without a mask, in anything.
    fn joined(&self, trie: &TokTrie, text: &[u8], behind: Option<&SimpleVob>) -> usize {
        let may_follow = |byte: u8| match (behind, self.bytes[byte as usize]) {
            (Some(mask), Some(token)) => mask.is_allowed(token),
            _ => true,
        };
        let joins = |end: &[u8]| {
            let node = trie.child_at_bytes(trie.root(), end);
            node.is_some_and(|node| trie.node_children(node).any(|next| may_follow(next.byte())))
        };
        let ends = (text.len().saturating_sub(self.longest)..text.len()).map(|from| &text[from..]);
        ends.into_iter().find(|end| joins(end)).map_or(0, <[u8]>::len)
    }
}

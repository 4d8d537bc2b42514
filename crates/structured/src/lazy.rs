//! Text before a grammar's beginning: left as the model writes it.
//!
//! A grammar of tool calls takes any text, and behind it calls. Where any text may go on, nothing
//! is masked, so that an answer without calls has the tokens that it would have without a grammar,
//! and costs no more. The matcher reads along; from a call's beginning on, its masks count. A token
//! in which the text ends and something begins that is no call is cut to what is still right. Text
//! that the matcher cannot read, such as special tokens or broken UTF-8, is the model's own affair:
//! it is not looked at any further.

use crate::matcher::Matcher;
use llguidance::toktrie::TokTrie;

/// A character that stands in any text, and in no JSON, name or mark.
const PROBE: &[u8] = b"\x01";

/// The state of one text whose grammar allows free text.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Lazy {
    /// Whether the last look found any text allowed.
    free: bool,
    /// Whether the matcher has lost the text.
    lost: bool,
}

impl Lazy {
    /// Whether any text may go on here.
    pub(crate) fn is_free(&mut self, matcher: &Matcher) -> bool {
        self.free = self.lost || is_free(matcher);
        self.free
    }

    /// The token that the matcher is to read: this one, or the part of it that may stand here; none
    /// where it reads no more.
    pub(crate) fn fit(&mut self, matcher: &Matcher, token: u32) -> Option<u32> {
        if self.lost || !self.free || reads(matcher, token) {
            return Some(token).filter(|_| !self.lost);
        }
        let part = matcher.tok_env().ok().and_then(|environment| {
            let trie = environment.tok_trie();
            let parts = parts(trie, token);
            parts.into_iter().find(|part| begins(matcher, *part))
        });
        self.lost = part.is_none();
        part
    }
}

fn is_free(matcher: &Matcher) -> bool {
    let Ok(environment) = matcher.tok_env() else { return false };
    let probe = environment.tok_trie().token_id(PROBE);
    !matcher.is_stopped() && probe.is_some_and(|probe| reads(matcher, probe))
}

fn reads(matcher: &Matcher, token: u32) -> bool {
    matcher.clone().validate_tokens(&[token]).is_ok_and(|valid| valid == 1)
}

/// Whether this token is read, and ends the text.
fn begins(matcher: &Matcher, token: u32) -> bool {
    let mut there = matcher.clone();
    there.consume_token(token).is_ok() && !is_free(&there)
}

/// The tokens that are beginnings of this one, the longest first.
fn parts(trie: &TokTrie, token: u32) -> Vec<u32> {
    if trie.is_special_token(token) {
        return Vec::new();
    }
    let text = trie.token(token);
    (1..text.len()).rev().filter_map(|end| trie.token_id(&text[..end])).collect()
}

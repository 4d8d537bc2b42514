//! One text before llguidance's parser: which tokens may come next, and how the lexeme ends in
//! which the text stands.
//!
//! llguidance's own `Matcher` keeps the parser to itself. This one has what is used of it, and asks
//! the lexer besides for the shortest texts that lead to the end of a lexeme ([`Matcher::ways`]).
//! What goes wrong, a panic included, is an error of this text; nothing is followed behind it.

use crate::STEPS;
use formats::caught;
use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::derivre::StateID;
use llguidance::earley::ParserRecognizer;
use llguidance::toktrie::{SimpleVob, TokEnv};
use std::collections::HashSet;
use std::fmt::Display;

/// States of the lexer that one search for ways visits.
const VISITED: usize = 2048;
/// Bytes by which a way may be longer than the shortest.
const LONGER: usize = 32;
/// States that are looked at before the steps that it took are.
const AT_ONCE: usize = 16;
/// Ways that one search finds.
const WAYS: usize = 16;

type Result<T> = std::result::Result<T, String>;

/// Follows one text. A clone shares the lexer, whose states are found once for all.
#[derive(Clone)]
pub(crate) struct Matcher(Result<TokenParser>);

/// How the text may go on within the grammar's lexemes.
pub(crate) struct Ways {
    /// The shortest texts, in bytes, to the ends of lexemes: one for each set of lexemes that may
    /// end alike, the shortest first.
    pub(crate) ends: Vec<Vec<u8>>,
    /// Bytes that go on with no lexeme, where one may end: those with which another begins, if the
    /// grammar has it.
    pub(crate) outside: Vec<u8>,
    /// Whether there may be ends further away than the search went.
    pub(crate) limited: bool,
    /// Steps of regular expressions that the search took.
    pub(crate) steps: u64,
}

impl Matcher {
    /// The matcher of a text that has not begun.
    pub(crate) fn new(parser: std::result::Result<TokenParser, impl Display>) -> Matcher {
        let mut matcher = Matcher(parser.map_err(|error| error.to_string()));
        // Its failure is kept.
        let _ = matcher.run(|parser| {
            if parser.is_fresh() {
                parser.start_without_prompt();
            }
            Ok::<_, String>(())
        });
        matcher
    }

    fn run<T, E: Display>(
        &mut self,
        work: impl FnOnce(&mut TokenParser) -> std::result::Result<T, E>,
    ) -> Result<T> {
        let parser = self.0.as_mut().map_err(|error| error.clone())?;
        let outcome = match caught(|| work(parser)) {
            Ok(outcome) => outcome.map_err(|error| error.to_string()),
            Err(words) => Err(format!("a panic: {words}")),
        };
        if let Err(error) = &outcome {
            self.0 = Err(error.clone());
        }
        outcome
    }

    /// A clone with a lexer of its own.
    pub(crate) fn deep_clone(&self) -> Matcher {
        Matcher(self.0.as_ref().map(TokenParser::deep_clone).map_err(Clone::clone))
    }

    /// Goes on with these tokens.
    pub(crate) fn consume_tokens(&mut self, tokens: &[u32]) -> Result<()> {
        self.run(|parser| {
            for token in tokens {
                let back = parser.consume_token(*token).map_err(|error| error.to_string())?;
                if back != 0 {
                    return Err("unexpected backtracking".to_string());
                }
            }
            parser.check_stop().map(|_| ()).map_err(|error| error.to_string())
        })
    }

    /// Goes on with this token.
    pub(crate) fn consume_token(&mut self, token: u32) -> Result<()> {
        self.consume_tokens(&[token])
    }

    /// The tokens that may come next.
    pub(crate) fn compute_mask(&mut self) -> Result<SimpleVob> {
        self.run(TokenParser::compute_mask)
    }

    /// The tokens that may come next: the end token alone behind the end.
    pub(crate) fn compute_mask_or_eos(&mut self) -> Result<SimpleVob> {
        if self.0.is_ok() && self.is_stopped() {
            return self.run(|parser| Ok::<_, String>(parser.token_env.tok_trie().eos_token_set()));
        }
        self.compute_mask()
    }

    /// Whether the text may end here.
    pub(crate) fn is_accepting(&mut self) -> Result<bool> {
        self.run(|parser| Ok::<_, String>(parser.is_accepting()))
    }

    /// Whether nothing may follow: the text has come to its end, or cannot be followed.
    pub(crate) fn is_stopped(&self) -> bool {
        self.0.as_ref().map_or(true, |parser| parser.stop_reason() != StopReason::NotStopped)
    }

    /// Whether the text stands within a lexeme of which something is written.
    pub(crate) fn is_within_lexeme(&self) -> bool {
        self.0.as_ref().is_ok_and(|parser| parser.parser.has_pending_lexeme_bytes())
    }

    /// How many of these tokens may come next, one after the other.
    pub(crate) fn validate_tokens(&mut self, tokens: &[u32]) -> Result<usize> {
        self.run(|parser| parser.validate_tokens_raw(tokens))
    }

    /// Why the text cannot be followed.
    pub(crate) fn error(&self) -> Option<&str> {
        self.0.as_ref().err().map(String::as_str)
    }

    pub(crate) fn tok_env(&self) -> Result<TokEnv> {
        self.0.as_ref().map(|parser| parser.token_env.clone()).map_err(Clone::clone)
    }

    /// Steps of regular expressions that the last mask took.
    pub(crate) fn steps(&self) -> Result<u64> {
        let parser = self.0.as_ref().map_err(|error| error.clone())?;
        Ok(parser.last_step_stats().lexer_cost)
    }

    /// Looks, breadth first, for the ends of the lexemes in which the text may stand; bytes are
    /// tried in this order. It takes steps of what the last mask has left, and a lexer whose steps
    /// are used up follows nothing more, so that it is for clones with a lexer of their own.
    pub(crate) fn ways(&mut self, order: &[u8]) -> Result<Ways> {
        self.run(|parser| {
            let spent = |parser: &TokenParser| parser.parser.lexer_stats().total_fuel_spent as u64;
            let before = spent(parser);
            let mut search = Search::default();
            while !search.is_done() && spent(parser) - before < STEPS / 2 {
                parser.parser.with_recognizer(|lexer| search.go_on(lexer, order));
            }
            let (steps, limited) =
                (spent(parser) - before, !search.is_done() || search.is_limited());
            let Search { ends, outside, .. } = search;
            Ok::<_, String>(Ways { ends, outside, limited, steps })
        })
    }
}

/// Whether a byte is a character that needs no escape in JSON.
fn is_plain(byte: u8) -> bool {
    (b' '..=b'~').contains(&byte) && byte != b'\\'
}

/// A state of the lexer that a search came to.
struct Found {
    state: StateID,
    /// The place of the state before it, and the byte between them.
    before: usize,
    byte: u8,
    /// Bytes from where the search began.
    depth: usize,
}

/// A search, breadth first, among the lexer's states.
#[derive(Default)]
struct Search {
    found: Vec<Found>,
    seen: HashSet<StateID>,
    /// The place of the state that is looked at next.
    at: usize,
    /// Whether all bytes are tried behind the first state, too. Those within characters beyond ASCII and within escapes lead to
    /// states of their own at each character of a text, and are needed seldom.
    wide: bool,
    /// Sets of lexemes whose end was found. Those that may end where the search begins are no ends
    /// to go for.
    known: HashSet<Vec<usize>>,
    ends: Vec<Vec<u8>>,
    outside: Vec<u8>,
}

impl Search {
    fn is_done(&self) -> bool {
        let Search { found, at, ends, wide, .. } = self;
        let depth = found.get(*at).map_or(0, |found| found.depth);
        let far = ends.first().is_some_and(|end| depth > end.len() + LONGER);
        let all = *at == found.len() && (*wide || !ends.is_empty());
        *at > 0 && (all || self.is_limited() || ends.len() >= WAYS || far)
    }

    fn is_limited(&self) -> bool {
        self.found.len() > VISITED
    }

    /// Looks at a few states more.
    fn go_on(&mut self, recognizer: &mut ParserRecognizer<'_>, order: &[u8]) {
        let start = recognizer.lexer_state();
        let lexer = recognizer.lexer_mut();
        let may_end = !lexer.try_lexeme_end(start).is_error();
        if self.found.is_empty() {
            self.found.push(Found { state: start, before: 0, byte: 0, depth: 0 });
            self.seen.insert(start);
            if may_end {
                self.known.insert(
                    lexer.possible_lexemes(start).iter().map(|one| one.as_usize()).collect(),
                );
            }
        }
        for _ in 0..AT_ONCE {
            if self.is_done() {
                return;
            }
            if self.at == self.found.len() {
                (self.wide, self.at) = (true, 0);
            }
            let (state, depth) = (self.found[self.at].state, self.found[self.at].depth + 1);
            let all = self.wide || self.at == 0;
            for &byte in order.iter().filter(|byte| all || is_plain(**byte)) {
                let next = lexer.transition_start_state(state, Some(byte), &None);
                if next.is_dead() {
                    if self.at == 0 && may_end && !self.outside.contains(&byte) {
                        self.outside.push(byte);
                    }
                    continue;
                }
                if !self.seen.insert(next) {
                    continue;
                }
                let is_end = next.has_lowest_match() || !lexer.try_lexeme_end(next).is_error();
                let lexemes = lexer.possible_lexemes(next).iter().map(|one| one.as_usize());
                if is_end && self.known.insert(lexemes.collect()) {
                    self.ends.push([&self.way(self.at)[..], &[byte]].concat());
                }
                if !next.has_lowest_match() {
                    self.found.push(Found { state: next, before: self.at, byte, depth });
                }
            }
            self.at += 1;
        }
    }

    /// The bytes that lead to a state that was found.
    fn way(&self, mut at: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while at > 0 {
            bytes.push(self.found[at].byte);
            at = self.found[at].before;
        }
        bytes.reverse();
        bytes
    }
}

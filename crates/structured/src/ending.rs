//! Short endings: how a text that runs out of tokens still becomes whole.
//!
//! A [`Planner`] follows one text. While there is room for far more than the text needs to end, it
//! looks seldom. As the room shrinks it knows a short ending at each token: tokens that lead from
//! here to where the grammar may stop. A token behind which the text could no longer end in time
//! gives way to the ending's next one, and once the room is no more than the ending, all of it is
//! written. Looking is a walk over the grammar that prefers what closes something, not a proof:
//! what it finds is an ending, though there may be a shorter one, and where it finds none, the text
//! goes on as it would without.

use crate::distinct::Reader;
use crate::{BUILDING, STEPS};
use llguidance::Matcher;
use llguidance::toktrie::{SimpleVob, TokTrie};
use std::sync::Arc;

/// Tokens from the limit, beside twice the ending, within which an ending is known at each token:
/// a single token may open what takes many to close.
const WATCHED: usize = 96;
/// Places that one walk looks at: at most so many, and no more for each token that is left, since
/// what takes more bytes than that fits into no tokens.
const PLACES: usize = 192;
const PLACES_OF_TOKEN: usize = 6;
/// Letters in a row that are written without a sign that they lead on, as the least length of a
/// string has it.
const BLIND: usize = 4;
/// Letters of which the masks behind them are compared then, to see which of them lead on.
const COMPARED: usize = 16;
/// Signs that stand between the parts of texts which have a form, such as addresses and dates. They
/// are compared first: the first that lead to another part come before those that may come again.
const BETWEEN: &[u8] = b"@:/T-.";

/// The tokens of a vocabulary that a walk looks for.
#[derive(Debug)]
pub(crate) struct Signs {
    /// Tokens of single bytes, in the order in which they are tried.
    letters: Vec<u32>,
    /// The tokens, if they exist, that close an object, a list or a string, and the comma.
    closers: Vec<(u8, u32)>,
    /// A letter that may stand in any text.
    letter: Option<u32>,
    /// Tokens of signs between the parts of a text.
    between: Vec<u32>,
    /// Special tokens that end no text.
    special: Vec<u32>,
    /// Bytes of the longest token.
    longest: usize,
}

impl Signs {
    /// The signs of a vocabulary.
    pub(crate) fn new(trie: &TokTrie) -> Signs {
        let single = |byte: u8| trie.token_id(&[byte]);
        let order = (b'a'..=b'z').rev().chain((b'A'..=b'Z').rev()).chain((b'0'..=b'9').rev());
        let mut bytes: Vec<u8> = order.collect();
        let others: Vec<u8> = (0..=u8::MAX).filter(|byte| !bytes.contains(byte)).collect();
        bytes.extend(others);
        let tokens = 0..trie.vocab_size() as u32;
        let is_special =
            |token: &u32| trie.is_special_token(*token) && !trie.eos_tokens().contains(token);
        Signs {
            letters: bytes.iter().filter_map(|byte| single(*byte)).collect(),
            closers: b"}]\",".iter().filter_map(|byte| Some((*byte, single(*byte)?))).collect(),
            letter: single(b'x'),
            between: BETWEEN.iter().filter_map(|byte| single(*byte)).collect(),
            longest: tokens.clone().map(|token| trie.token_len(token)).max().unwrap_or(0),
            special: tokens.filter(is_special).collect(),
        }
    }
}

/// Sees to it that a text ends within its tokens.
#[derive(Debug, Clone)]
pub(crate) struct Planner {
    signs: Arc<Signs>,
    /// Tokens that end the text, the next one last: from the present place while every token is
    /// watched, else from an earlier one.
    plan: Vec<u32>,
    /// Whether the plan is from the present place, which it is at the beginning.
    fresh: bool,
    watching: bool,
    /// Where not every token is watched: looks again once no more tokens are left.
    check: usize,
    /// Tokens that are left, the next one included.
    left: usize,
    /// Whether the next token, or the one that was accepted last, is the plan's and not the
    /// text's own.
    closing: bool,
}

impl Planner {
    /// The planner of texts that begin as the matcher does.
    pub(crate) fn new(matcher: &Matcher, reader: Option<&Reader>, signs: Arc<Signs>) -> Planner {
        let plan = walk(matcher, reader, &signs, BUILDING, PLACES).unwrap_or_default();
        let (check, left) = (usize::MAX, usize::MAX);
        Planner { signs, plan, fresh: true, watching: false, check, left, closing: false }
    }

    /// The token that must come next if the text shall end within `left` tokens, its end token
    /// included; none while it may go on.
    pub(crate) fn next(
        &mut self,
        matcher: &Matcher,
        reader: Option<&Reader>,
        left: usize,
    ) -> Option<u32> {
        self.left = left;
        if !self.watching && left <= self.check {
            if !self.fresh && !leads(matcher, reader, &[], &self.plan) {
                let plan = walk(matcher, reader, &self.signs, STEPS, left);
                self.plan = plan.unwrap_or_default();
            }
            let needed = self.plan.len();
            let watched = 2 * needed + WATCHED;
            if needed == 0 || needed > left {
                self.give_up();
            } else if left <= watched {
                self.watching = true;
            } else {
                self.check = watched.max(left - (left - needed).div_ceil(2));
            }
        }
        self.closing = self.watching && left <= self.plan.len();
        if self.closing { self.plan.last().copied() } else { None }
    }

    /// Told the token that was chosen, returns the one that the text goes on with.
    pub(crate) fn accept(&mut self, matcher: &Matcher, reader: Option<&Reader>, token: u32) -> u32 {
        self.fresh = false;
        let Some(&planned) = self.plan.last().filter(|_| self.watching) else { return token };
        if token == planned {
            self.plan.pop();
            return token;
        }
        let behind = self.left.saturating_sub(1);
        if self.plan.len() <= behind && leads(matcher, reader, &[token], &self.plan) {
            return token;
        }
        let mut there = matcher.clone();
        let plan = there.consume_token(token).ok().and_then(|()| {
            let behind = reader.and_then(|reader| read(reader, &there, &[token]));
            walk(&there, behind.as_ref(), &self.signs, STEPS, self.left)
        });
        match plan {
            Some(plan) if plan.len() <= behind => self.plan = plan,
            // What the text goes on with may be easier to end.
            None if self.left > 4 * self.plan.len() + WATCHED / 2 => self.give_up(),
            _ => {
                self.plan.pop();
                self.closing = true;
                return planned;
            }
        }
        token
    }

    /// Whether every token is watched: what comes next may be the plan's.
    pub(crate) fn is_watching(&self) -> bool {
        self.watching
    }

    /// Told tokens that come next whatever is planned.
    pub(crate) fn pass(&mut self, tokens: &[u32]) {
        for token in tokens {
            self.fresh &= self.plan.last() == Some(token);
            if !self.fresh {
                return;
            }
            self.plan.pop();
        }
    }

    /// Looks again later: what the text goes on with may bring its end nearer.
    fn give_up(&mut self) {
        self.watching = false;
        self.check = self.left - self.left.div_ceil(4);
    }

    /// Whether the next token, or the one that was accepted last, is there to bring the text to its
    /// end.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing
    }
}

/// Whether these tokens, followed by the tokens of a plan, lead from the matcher's state to the
/// end.
fn leads(matcher: &Matcher, reader: Option<&Reader>, first: &[u32], plan: &[u32]) -> bool {
    let tokens: Vec<u32> = first.iter().chain(plan.iter().rev()).copied().collect();
    !matcher.is_stopped()
        && !plan.is_empty()
        && follows(&mut matcher.clone(), &tokens)
        && reader.is_none_or(|reader| read(reader, matcher, &tokens).is_some())
}

/// The reader behind these tokens, in which no item ends that is there already.
fn read(reader: &Reader, matcher: &Matcher, tokens: &[u32]) -> Option<Reader> {
    let environment = matcher.tok_env().ok()?;
    let mut reader = reader.clone();
    tokens.iter().all(|token| reader.read(environment.tok_trie(), *token)).then_some(reader)
}

/// Whether these tokens may all come next.
fn follows(matcher: &mut Matcher, tokens: &[u32]) -> bool {
    matcher.validate_tokens(tokens).is_ok_and(|valid| valid == tokens.len())
}

/// Tokens that lead from the matcher's state to the end, the next one last; `None` if no way is
/// found within `steps` steps of regular expressions. One of more than `most` tokens may not be
/// looked for.
fn walk(
    matcher: &Matcher,
    reader: Option<&Reader>,
    signs: &Signs,
    steps: u64,
    most: usize,
) -> Option<Vec<u32>> {
    let environment = matcher.tok_env().ok()?;
    let trie = environment.tok_trie();
    let mut there = matcher.clone();
    let mut walker =
        Walker { matcher: matcher.clone(), trie, signs, path: Vec::new(), blind: 0, steps };
    walker.run(PLACES.min(most.saturating_mul(PLACES_OF_TOKEN)))?;
    let joined = walker.joined();
    let mut tokens = walker.path;
    if joined.len() < tokens.len() && follows(&mut there, &joined) {
        tokens = joined;
    }
    if let Some(reader) = reader {
        read(reader, matcher, &tokens)?;
    }
    tokens.reverse();
    Some(tokens)
}

/// Walks over a grammar, a token at a time, towards its end.
struct Walker<'a> {
    matcher: Matcher,
    trie: &'a TokTrie,
    signs: &'a Signs,
    path: Vec<u32>,
    /// The letters at the path's end that were written without a sign that they lead on.
    blind: usize,
    /// Steps of regular expressions that are left.
    steps: u64,
}

impl Walker<'_> {
    /// Walks to the end, and adds the end token; none if that is further than so many places.
    fn run(&mut self, places: usize) -> Option<()> {
        for _ in 0..places {
            if self.matcher.is_stopped() || self.matcher.is_accepting().ok()? {
                self.path.push(self.trie.eos_token());
                return Some(());
            }
            let (token, leads) = self.choose()?;
            self.blind = if leads { 0 } else { self.blind + 1 };
            self.matcher.consume_token(token).ok()?;
            self.path.push(token);
        }
        None
    }

    /// The token to go on with, and whether it is known to lead on.
    fn choose(&mut self) -> Option<(u32, bool)> {
        let mut matcher = self.matcher.clone();
        let mask = self.mask(&mut matcher)?;
        let Signs { letters, closers, letter, between, .. } = self.signs;
        if let Some(token) = self.forced(&mask) {
            return Some((token, true));
        }
        // What closes an object, a list or a string, and a comma that is no part of a text: no
        // letter may follow it there.
        for &(byte, token) in closers.iter().filter(|(_, token)| mask.is_allowed(*token)) {
            let follow = |letter: &u32| follows(&mut matcher, &[token, *letter]);
            if byte == b'"' || !letter.as_ref().is_some_and(follow) {
                return Some((token, true));
            }
        }
        let letters = || letters.iter().copied().filter(|token| mask.is_allowed(*token));
        // A letter behind which something may be closed: a brace or a comma behind which a letter
        // may follow is part of a text, as in the names of addresses.
        let end = self.trie.eos_token();
        for token in letters() {
            let mut closes = |byte: u8, closer: u32| {
                let goes_on = |letter: &u32| follows(&mut matcher, &[token, closer, *letter]);
                let is_text = byte != b'"' && letter.as_ref().is_some_and(goes_on);
                !is_text && follows(&mut matcher, &[token, closer])
            };
            let mut all = closers.iter().rev();
            if all.any(|(byte, closer)| closes(*byte, *closer)) || closes(b'"', end) {
                return Some((token, true));
            }
        }
        // Else one that leads to another place, as far as masks tell.
        let between = between.iter().copied().filter(|token| mask.is_allowed(*token));
        let compared = if self.blind < BLIND { 0 } else { COMPARED };
        for token in between.chain(letters()).take(compared) {
            let mut behind = self.matcher.clone();
            behind.consume_token(token).ok()?;
            if self.mask(&mut behind)? != mask {
                return Some((token, false));
            }
        }
        let any = || mask.first_bit_set().map(|bit| bit as u32);
        let first = letters().next();
        Some((first.or_else(any)?, false))
    }

    /// The longest token of a mask of which all others are beginnings, or a special token: all that
    /// may be written leads there.
    fn forced(&self, mask: &SimpleVob) -> Option<u32> {
        let Walker { trie, signs, .. } = self;
        let first = signs.special.iter().find(|token| mask.is_allowed(**token));
        if first.is_some() {
            return first.copied();
        }
        // A token has no more beginnings than bytes; several tokens may have the same ones.
        if mask.num_set() > 2 * signs.longest {
            return None;
        }
        let longest = mask.iter().max_by_key(|token| trie.token_len(*token))?;
        let text = trie.token(longest);
        mask.iter().all(|token| text.starts_with(trie.token(token))).then_some(longest)
    }

    /// The tokens that may come next; none where that takes more than a walk may.
    fn mask(&mut self, matcher: &mut Matcher) -> Option<SimpleVob> {
        let mask = matcher.compute_mask_or_eos().ok()?;
        self.steps = self.steps.checked_sub(matcher.last_step_stats().ok()?.lexer_cost)?;
        Some(mask)
    }

    /// The way with the longest tokens that its text can be made of.
    fn joined(&self) -> Vec<u32> {
        let trie = self.trie;
        let (mut joined, mut text) = (Vec::new(), Vec::new());
        for &token in &self.path {
            if trie.is_special_token(token) || trie.eos_tokens().contains(&token) {
                joined.extend(trie.greedy_tokenize(&std::mem::take(&mut text)));
                joined.push(token);
            } else {
                text.extend_from_slice(trie.token(token));
            }
        }
        joined
    }
}

//! Short endings: how a text that runs out of tokens still becomes whole.
//!
//! A [`Planner`] follows one text. While there is room for far more than the text needs to end, it
//! looks seldom. As the room shrinks it knows a short ending at each token: tokens that lead from
//! here to where the grammar may stop. A token behind which the text could no longer end in time
//! gives way to the ending's next one, and once the room is no more than the ending, all of it is
//! written. Looking is a walk over the grammar that prefers what closes something, asks the lexer
//! for the shortest text to the end of what is being written, and turns another way where it goes
//! round; it is no proof: what it finds is an ending, though there may be a shorter one, and where
//! it finds none, the text goes on as it would without.

use crate::distinct::Reader;
use crate::matcher::Matcher;
use crate::{BUILDING, STEPS};
use llguidance::toktrie::{SimpleVob, TokTrie};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// Tokens from the limit, beside twice the ending, within which an ending is known at each token:
/// a single token may open what takes many to close.
const WATCHED: usize = 96;
/// Places that one walk looks at: at most so many, and no more for each token that is left, since
/// what takes more bytes than that fits into no tokens.
const PLACES: usize = 192;
const PLACES_OF_TOKEN: usize = 6;
/// Walks from one place, each of which turns another way than those before it, take as many places
/// as so many of the longest.
const TRIED: usize = 6;
/// How often a walk comes by a choice before another way is tried there.
const CIRCLES: usize = 12;
/// Bytes as which a way counts more that opens what must be closed.
const OPENED: usize = 16;
/// Bytes which begin other lexemes, of which the masks behind them are compared.
const COMPARED: usize = 16;

/// The tokens of a vocabulary that a walk looks for.
#[derive(Debug)]
pub(crate) struct Signs {
    /// Bytes in the order in which they are tried. No text has the last one, which marks special
    /// tokens and is left out.
    order: Vec<u8>,
    /// Tokens of single bytes, in this order.
    letters: Vec<u32>,
    /// The tokens, if they exist, that close an object, a list or a string, and the comma.
    closers: Vec<(u8, u32)>,
    /// A letter that may stand in any text.
    letter: Option<u32>,
    /// Special tokens that end no text.
    special: Vec<u32>,
}

impl Signs {
    /// The signs of a vocabulary.
    pub(crate) fn new(trie: &TokTrie) -> Signs {
        let single = |byte: u8| trie.token_id(&[byte]);
        let order = (b'a'..=b'z').rev().chain((b'A'..=b'Z').rev()).chain((b'0'..=b'9').rev());
        let mut bytes: Vec<u8> = order.collect();
        let others: Vec<u8> = (0..u8::MAX).filter(|byte| !bytes.contains(byte)).collect();
        bytes.extend(others);
        let tokens = 0..trie.vocab_size() as u32;
        let is_special =
            |token: &u32| trie.is_special_token(*token) && !trie.eos_tokens().contains(token);
        Signs {
            letters: bytes.iter().filter_map(|byte| single(*byte)).collect(),
            closers: b"}]\",".iter().filter_map(|byte| Some((*byte, single(*byte)?))).collect(),
            letter: single(b'x'),
            special: tokens.filter(is_special).collect(),
            order: bytes,
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
    /// What walks have learned so far.
    turns: Turns,
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
        let mut turns = Turns::new();
        let plan = walk(matcher, reader, &signs, &mut turns, BUILDING, PLACES).unwrap_or_default();
        let (check, left) = (usize::MAX, usize::MAX);
        Planner { signs, plan, turns, fresh: true, watching: false, check, left, closing: false }
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
                let plan = walk(matcher, reader, &self.signs, &mut self.turns, STEPS, left);
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
            walk(&there, behind.as_ref(), &self.signs, &mut self.turns, STEPS, self.left)
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

/// Which of its ways a walk takes at a choice, if not the first. A choice is known by its ways.
type Turns = HashMap<u64, usize>;

/// Tokens that lead from the matcher's state to the end, the next one last; `None` if no way is
/// found within `steps` steps of regular expressions. One of more than `most` tokens may not be
/// looked for. Walks that find no end, as in a recursive schema one that goes round for ever, say
/// where to turn another way, which later walks keep to.
fn walk(
    matcher: &Matcher,
    reader: Option<&Reader>,
    signs: &Signs,
    turns: &mut Turns,
    steps: u64,
    most: usize,
) -> Option<Vec<u32>> {
    let environment = matcher.tok_env().ok()?;
    let trie = environment.tok_trie();
    let most = PLACES.min(most.saturating_mul(PLACES_OF_TOKEN));
    let mut walker = Walker::new(matcher.clone(), reader.cloned(), trie, signs, turns.clone());
    (walker.steps, walker.places) = (steps, most * TRIED);
    while walker.run(most).is_none() {
        walker.turn()?;
        walker.start_again(matcher, reader);
    }
    let joined = walker.joined();
    let mut tokens = walker.path;
    if joined.len() < tokens.len() && follows(&mut matcher.clone(), &joined) {
        tokens = joined;
    }
    *turns = walker.turns;
    tokens.reverse();
    Some(tokens)
}

/// Walks over a grammar, a few tokens at a time, towards its end.
struct Walker<'a> {
    matcher: Matcher,
    /// Whether the matcher's lexer is the walker's own, so that it may come to its limits.
    is_own: bool,
    reader: Option<Reader>,
    trie: &'a TokTrie,
    signs: &'a Signs,
    turns: Turns,
    path: Vec<u32>,
    /// The choices on the path, and whether each has a way that was not tried.
    choices: Vec<(u64, bool)>,
    /// Steps of regular expressions that are left.
    steps: u64,
    /// Places that are left.
    places: usize,
}

impl<'a> Walker<'a> {
    fn new(
        matcher: Matcher,
        reader: Option<Reader>,
        trie: &'a TokTrie,
        signs: &'a Signs,
        turns: Turns,
    ) -> Walker<'a> {
        let (path, choices) = (Vec::new(), Vec::new());
        let (is_own, steps, places) = (false, 0, 0);
        Walker { matcher, is_own, reader, trie, signs, turns, path, choices, steps, places }
    }

    /// Walks to the end, and adds the end token; none if that is further than so many places.
    fn run(&mut self, most: usize) -> Option<()> {
        for _ in 0..most {
            if self.matcher.is_stopped() || self.matcher.is_accepting().ok()? {
                self.path.push(self.trie.eos_token());
                return Some(());
            }
            self.places = self.places.checked_sub(1)?;
            let tokens = self.choose()?;
            self.matcher.consume_tokens(&tokens).ok()?;
            if let Some(reader) = &mut self.reader {
                tokens.iter().all(|token| reader.read(self.trie, *token)).then_some(())?;
            }
            self.path.extend(tokens);
            if self.is_circling() {
                return None;
            }
        }
        None
    }

    /// Whether the path came by its last choice so often that another way is worth a try.
    fn is_circling(&self) -> bool {
        let Some(&(last, others)) = self.choices.last() else { return false };
        others && self.choices.iter().filter(|(choice, _)| *choice == last).count() > CIRCLES
    }

    /// Turns another way at the choice that the path came by most often, the last of them; none
    /// where no choice has another one.
    fn turn(&mut self) -> Option<()> {
        let open = || self.choices.iter().filter(|(_, others)| *others).map(|(choice, _)| *choice);
        let often = |choice: &u64| open().filter(|other| other == choice).count();
        let choice = open().max_by_key(often)?;
        *self.turns.entry(choice).or_default() += 1;
        Some(())
    }

    /// Goes back to the beginning, with a lexer that has come to none of its limits.
    fn start_again(&mut self, matcher: &Matcher, reader: Option<&Reader>) {
        (self.matcher, self.is_own) = (matcher.deep_clone(), true);
        self.reader = reader.cloned();
        self.path.clear();
        self.choices.clear();
    }

    /// The tokens to go on with.
    fn choose(&mut self) -> Option<Vec<u32>> {
        let mask = self.mask()?;
        if let Some(token) = self.forced(&mask).or_else(|| self.closer(&mask)) {
            return Some(vec![token]);
        }
        let mut ways = self.ways(&mask)?;
        let mut hasher = DefaultHasher::new();
        (&ways, self.items()).hash(&mut hasher);
        let choice = hasher.finish();
        let taken = self.turns.get(&choice).copied().unwrap_or(0).min(ways.len() - 1);
        self.choices.push((choice, taken + 1 < ways.len()));
        Some(ways.swap_remove(taken))
    }

    /// What closes an object, a list, or the string in which the text stands, and a comma that is no
    /// part of a text: no letter may follow it there.
    fn closer(&mut self, mask: &SimpleVob) -> Option<u32> {
        let Signs { closers, letter, .. } = self.signs;
        let matcher = &mut self.matcher;
        let is_within = matcher.is_within_lexeme();
        let mut closes = |byte: u8, token: u32| {
            (byte != b'"' || is_within)
                && !letter.is_some_and(|letter| follows(matcher, &[token, letter]))
        };
        let mut allowed = closers.iter().filter(|(_, token)| mask.is_allowed(*token));
        allowed.find(|(byte, token)| closes(*byte, *token)).map(|(_, token)| *token)
    }

    /// The ways to go on: what begins another lexeme where one may end, then the shortest texts to
    /// the end of each lexeme, those last that open what must be closed. Where there are none, or
    /// they may lead to an item that is there already, single letters.
    fn ways(&mut self, mask: &SimpleVob) -> Option<Vec<Vec<u32>>> {
        if !self.is_own {
            (self.matcher, self.is_own) = (self.matcher.deep_clone(), true);
        }
        let found = self.matcher.clone().ways(&self.signs.order).ok()?;
        self.steps = self.steps.checked_sub(found.steps)?;
        let mut ends = found.ends;
        if ends.is_empty() && found.limited {
            return None;
        }
        let opens = |end: &Vec<u8>| end.last().is_some_and(|byte| b"{[(".contains(byte));
        ends.sort_by_key(|end| end.len() + if opens(end) { OPENED } else { 0 });
        let mut ways = self.beginnings(&found.outside, mask)?;
        ways.extend(ends.iter().map(|end| self.trie.greedy_tokenize(end)));
        ways.retain(|way| self.allows(mask, way));
        if ways.is_empty() || self.items() > 0 {
            let letters = self.signs.letters.iter().filter(|token| mask.is_allowed(**token));
            let letters: Vec<_> = letters.take(COMPARED).map(|token| vec![*token]).collect();
            ways.extend(letters);
        }
        if ways.is_empty() {
            ways.push(vec![mask.first_bit_set()? as u32]);
        }
        Some(ways)
    }

    /// The items that the present one must differ from: what is written may be another text at each.
    fn items(&self) -> usize {
        self.reader.as_ref().map_or(0, Reader::items)
    }

    /// Of these bytes, tokens behind which something else may follow than behind those before.
    fn beginnings(&mut self, bytes: &[u8], mask: &SimpleVob) -> Option<Vec<Vec<u32>>> {
        let tokens = bytes.iter().filter_map(|byte| self.trie.token_id(&[*byte]));
        let allowed: Vec<u32> = tokens.filter(|token| mask.is_allowed(*token)).collect();
        let (mut ways, mut behind) = (Vec::new(), Vec::new());
        for token in allowed.into_iter().take(COMPARED) {
            let mut there = self.matcher.clone();
            there.consume_token(token).ok()?;
            let mask = there.compute_mask_or_eos().ok()?;
            self.steps = self.steps.checked_sub(there.steps().ok()?)?;
            if !behind.contains(&mask) {
                behind.push(mask);
                ways.push(vec![token]);
            }
        }
        Some(ways)
    }

    /// Whether these tokens may come next, and end no item that is there already.
    fn allows(&mut self, mask: &SimpleVob, tokens: &[u32]) -> bool {
        tokens.first().is_some_and(|first| mask.is_allowed(*first))
            && follows(&mut self.matcher, tokens)
            && self.reader.as_ref().is_none_or(|reader| {
                let mut reader = reader.clone();
                tokens.iter().all(|token| reader.read(self.trie, *token))
            })
    }

    /// A special token of a mask, or its only one. Tokens that begin alike prove nothing: of `}` and
    /// `},` alone, `}` may be followed by `]`, for which there may be no such token.
    fn forced(&self, mask: &SimpleVob) -> Option<u32> {
        let first = self.signs.special.iter().find(|token| mask.is_allowed(**token));
        let only = || mask.first_bit_set().filter(|_| mask.num_set() == 1);
        first.copied().or_else(|| only().map(|token| token as u32))
    }

    /// The tokens that may come next; none where that takes more than a walk may.
    fn mask(&mut self) -> Option<SimpleVob> {
        let mask = crate::may_follow(&mut self.matcher, self.reader.as_ref()).ok()?;
        self.steps = self.steps.checked_sub(self.matcher.steps().ok()?)?;
        Some(mask)
    }

    /// The path in the longest tokens that its text can be made of.
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

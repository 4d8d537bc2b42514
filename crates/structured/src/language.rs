//! Sets of texts as finite automata: what regular expressions that look ahead or behind match, what
//! they do not, and how many texts there are. An automaton is written as a regular expression again
//! (by elimination of states, after Brzozowski and McCluskey, 1963), since those are what llguidance
//! reads.
//!
//! Automata are small or there is none: a [`Budget`] bounds what making them takes.

mod follow;
mod parse;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use regex_syntax::hir::ClassUnicode;

use follow::Follower;
use parse::{Node, Parsed};
pub(crate) use parse::{class_length, escape_length};

/// States of an automaton.
const MOST_STATES: usize = 512;
/// States of one that is written as an expression.
const MOST_WRITTEN: usize = 160;
/// Sets of characters that an automaton tells apart.
const MOST_LETTERS: usize = 128;
/// Longest expression that is written, in bytes.
const LONGEST: usize = 16 << 10;
/// Steps of all automata of one schema.
const STEPS: usize = 1_000_000;
/// Texts that are counted: more are as good as any number.
const MOST_TEXTS: u64 = 1 << 40;

/// What making automata may still take.
#[derive(Debug)]
pub(crate) struct Budget(Cell<usize>);

impl Budget {
    pub(crate) fn new() -> Budget {
        Budget(Cell::new(STEPS))
    }

    /// Takes steps; none where they are used up.
    fn take(&self, steps: usize) -> Option<()> {
        self.0.set(self.0.get().checked_sub(steps)?);
        Some(())
    }
}

/// How an expression is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// JSON Schema's: a part of the text matches; `\d` and `\w` are those of ASCII.
    Search,
    /// All of the text matches, `\d` and `\w` are Unicode's.
    Whole,
}

/// Expressions without looks, all of which match where one with looks does; none where that cannot
/// be said. An expression that needs no others is the only one.
pub(crate) fn without_looks(text: &str, kind: Kind, budget: &Budget) -> Option<Vec<String>> {
    const LOOKS: [&str; 6] = ["(?=", "(?!", "(?<=", "(?<!", "\\b", "\\B"];
    let inner = text.strip_prefix('^').unwrap_or(text);
    let inner = inner.strip_suffix('$').unwrap_or(inner);
    if !LOOKS.iter().any(|look| inner.contains(look)) && !inner.contains(['^', '$']) {
        return Some(vec![text.to_string()]);
    }
    let ascii = kind == Kind::Search;
    let parsed = Parsed::of(text, ascii)?;
    if !parsed.is_beyond() {
        return Some(vec![text.to_string()]);
    }
    // A group of all is as much as what is in it.
    if kind == Kind::Whole
        && let [(Node::Begin, _), (_, range), (Node::End, _)] = &parsed.parts[..]
        && let Some(inner) = text[range.clone()].strip_prefix("(?:")
        && let Some(inner) = inner.strip_suffix(')')
    {
        return without_looks(inner, kind, budget);
    }
    // What is looked ahead for at the beginning is as much as another expression of the whole text.
    let begins = parsed.parts.iter().take_while(|(node, _)| matches!(node, Node::Begin)).count();
    let is_ahead = |(node, _): &&(Node, _)| matches!(node, Node::Ahead(..));
    let looks = parsed.parts[begins..].iter().take_while(is_ahead).count();
    let anchored = begins > 0 || kind == Kind::Whole;
    if let Some(all) = without_last_look(text, &parsed, kind, budget) {
        return Some(all);
    }
    if !anchored || looks == 0 {
        let there = Automaton::new(&parsed, kind == Kind::Search, ascii, budget)?;
        return Some(vec![there.written(budget)?]);
    }
    let mut all = Vec::new();
    for (node, range) in &parsed.parts[begins..begins + looks] {
        let Node::Ahead(_, wanted) = node else { return None };
        let inner = text.get(range.start + "(?=".len()..range.end - ")".len())?;
        let begin = match kind {
            Kind::Search => format!("^(?:{inner})"),
            Kind::Whole => format!("(?:{inner})(?s:.*)"),
        };
        if *wanted && !Parsed::of(&begin, ascii)?.is_beyond() {
            all.push(begin);
            continue;
        }
        let mut inner = Parsed::of(&format!("^(?:{inner})"), ascii)?;
        if !*wanted && kind == Kind::Search {
            inner.loosen();
        }
        let there = Automaton::new(&inner, true, ascii, budget)?;
        let there = if *wanted { there } else { there.complement() };
        all.push(there.written(budget)?);
    }
    let rest = parsed.parts.get(begins + looks).map_or(text.len(), |(_, range)| range.start);
    let rest = format!("^{}", &text[rest..]);
    if rest != "^" || kind == Kind::Whole {
        all.extend(without_looks(&rest, kind, budget)?);
    }
    Some(all)
}

/// The same of an expression that looks behind at the end of the text: that is another expression of
/// the text's end.
fn without_last_look(
    text: &str,
    parsed: &Parsed,
    kind: Kind,
    budget: &Budget,
) -> Option<Vec<String>> {
    let ends = parsed.parts.iter().rev().take_while(|(node, _)| matches!(node, Node::End)).count();
    if ends == 0 && kind == Kind::Search {
        return None;
    }
    let (node, range) = parsed.parts.iter().rev().nth(ends)?;
    let Node::Behind(_, wanted) = node else { return None };
    let inner = text.get(range.start + "(?<=".len()..range.end - ")".len())?;
    let inner = Parsed::of(&format!("(?:{inner})$"), kind == Kind::Search)?;
    let there = Automaton::new(&inner, true, kind == Kind::Search, budget)?;
    let there = if *wanted { there } else { there.complement() };
    let rest = format!("{}{}", &text[..range.start], &text[range.end..]);
    let mut all = vec![there.written(budget)?];
    all.extend(without_looks(&rest, kind, budget)?);
    Some(all)
}

/// Texts, as a deterministic automaton.
#[derive(Debug, Clone)]
pub(crate) struct Automaton {
    letters: Letters,
    /// The next state by state and letter. The first state is the beginning.
    next: Vec<Vec<usize>>,
    accepts: Vec<bool>,
}

impl Automaton {
    /// The texts that an expression of JSON Schema's matches.
    pub(crate) fn of(text: &str, budget: &Budget) -> Option<Automaton> {
        Automaton::new(&Parsed::of(text, true)?, true, true, budget)
    }

    /// The texts that an expression of JSON Schema's does not match, whether its `$` is JavaScript's
    /// or Python's, which is there in front of a last line's end as well.
    pub(crate) fn others(text: &str, budget: &Budget) -> Option<Automaton> {
        let mut parsed = Parsed::of(text, true)?;
        parsed.loosen();
        Some(Automaton::new(&parsed, true, true, budget)?.complement())
    }

    /// The texts that an expression matches: of which a part, or all, does.
    fn new(parsed: &Parsed, search: bool, ascii: bool, budget: &Budget) -> Option<Automaton> {
        Follower::automaton(parsed, search, ascii, budget)
    }

    /// All other texts.
    pub(crate) fn complement(mut self) -> Automaton {
        self.accepts.iter_mut().for_each(|accepts| *accepts = !*accepts);
        self
    }

    /// The texts that are in both.
    pub(crate) fn and(&self, other: &Automaton, budget: &Budget) -> Option<Automaton> {
        let (letters, pairs) = self.letters.and(&other.letters)?;
        let mut numbers = HashMap::from([((0, 0), 0)]);
        let mut states = vec![(0, 0)];
        let (mut next, mut accepts, mut at) = (Vec::new(), Vec::new(), 0);
        while let Some(&(a, b)) = states.get(at) {
            at += 1;
            budget.take(pairs.len())?;
            accepts.push(self.accepts[a] && other.accepts[b]);
            let to = |(own, others): &(usize, usize)| {
                let pair = (self.next[a][*own], other.next[b][*others]);
                *numbers.entry(pair).or_insert_with(|| {
                    states.push(pair);
                    states.len() - 1
                })
            };
            next.push(pairs.iter().map(to).collect());
            if states.len() > MOST_STATES {
                return None;
            }
        }
        Some(Automaton { letters, next, accepts }.least())
    }

    /// Whether a text is one of them.
    pub(crate) fn has(&self, text: &str) -> bool {
        let to = |state: usize, c: char| self.next[state][self.letters.letter(c)];
        self.accepts[text.chars().fold(0, to)]
    }

    /// Whether there is no text.
    pub(crate) fn is_empty(&self) -> bool {
        !self.accepts.contains(&true)
    }

    /// States from which a text may end.
    fn alive(&self) -> Vec<bool> {
        let mut alive = self.accepts.clone();
        loop {
            let more: Vec<usize> = (0..alive.len())
                .filter(|state| !alive[*state] && self.next[*state].iter().any(|to| alive[*to]))
                .collect();
            if more.is_empty() {
                return alive;
            }
            more.into_iter().for_each(|state| alive[state] = true);
        }
    }

    /// How many texts there are of `least` to `most` characters; `None` of too many.
    pub(crate) fn count(&self, least: usize, most: Option<usize>) -> Option<u64> {
        let sizes = self.letters.sizes();
        let alive = self.alive();
        let mut there: BTreeMap<usize, u64> = BTreeMap::from([(0, 1)]);
        let mut count = 0_u64;
        for length in 0.. {
            there.retain(|state, _| alive[*state]);
            if there.is_empty() || most.is_some_and(|most| length > most) {
                break;
            }
            // A text of so many characters has been in a state twice, and may be as often again.
            if length > self.next.len() + least && most.is_none() || count > MOST_TEXTS {
                return None;
            }
            if length >= least {
                let ends = there.iter().filter(|(state, _)| self.accepts[**state]);
                count = ends.fold(count, |count, (_, ways)| count.saturating_add(*ways));
            }
            let mut then = BTreeMap::new();
            for (state, ways) in there {
                for (letter, to) in self.next[state].iter().enumerate() {
                    let own: &mut u64 = then.entry(*to).or_default();
                    *own =
                        own.saturating_add(ways.saturating_mul(sizes[letter])).min(2 * MOST_TEXTS);
                }
            }
            there = then;
            if length >= 4096 {
                return None;
            }
        }
        (count <= MOST_TEXTS).then_some(count)
    }

    /// All texts of `least` to `most` characters, if there are no more than `limit`.
    pub(crate) fn texts(
        &self,
        least: usize,
        most: Option<usize>,
        limit: u64,
    ) -> Option<Vec<String>> {
        self.count(least, most).filter(|count| *count <= limit)?;
        // Characters to the nearest end, from each state.
        let mut far: Vec<usize> =
            self.accepts.iter().map(|ends| if *ends { 0 } else { usize::MAX }).collect();
        for _ in 0..far.len() {
            for state in 0..far.len() {
                let nearest = self.next[state].iter().map(|to| far[*to]).min();
                far[state] = far[state].min(nearest.unwrap_or(usize::MAX).saturating_add(1));
            }
        }
        let room = |length: usize| most.map_or(usize::MAX - 1, |most| most - length);
        let (mut all, mut open) = (Vec::new(), vec![(String::new(), 0, 0)]);
        let mut steps = 64 * limit + 4096;
        while let Some((text, length, state)) = open.pop() {
            steps = steps.checked_sub(1)?;
            if self.accepts[state] && length >= least {
                all.push(text.clone());
            }
            for (letter, to) in self.next[state].iter().enumerate().rev() {
                if far[*to] < room(length) {
                    for c in self.letters.characters(letter) {
                        steps = steps.checked_sub(1)?;
                        open.push((format!("{text}{c}"), length + 1, *to));
                    }
                }
            }
        }
        all.sort();
        Some(all)
    }

    /// The same texts by as few states as may be, those that are reached (Moore's refinement).
    fn least(self) -> Automaton {
        let mut class: Vec<usize> =
            self.accepts.iter().map(|accepts| usize::from(*accepts)).collect();
        let mut count = 0;
        loop {
            let mut numbers = HashMap::new();
            let finer: Vec<usize> = (0..class.len())
                .map(|state| {
                    let to: Vec<usize> = self.next[state].iter().map(|to| class[*to]).collect();
                    let fresh = numbers.len();
                    *numbers.entry((class[state], to)).or_insert(fresh)
                })
                .collect();
            class = finer;
            if numbers.len() == count {
                break;
            }
            count = numbers.len();
        }
        // The first state is met first, so that it stays the first.
        let (mut next, mut accepts) = (vec![Vec::new(); count], vec![false; count]);
        for (state, row) in self.next.iter().enumerate() {
            next[class[state]] = row.iter().map(|to| class[*to]).collect();
            accepts[class[state]] = self.accepts[state];
        }
        Automaton { letters: self.letters, next, accepts }
    }

    /// A regular expression in Rust's syntax that matches these texts and no others, from a text's
    /// begin to its end; none where there is no text, or where it is too long.
    pub(crate) fn written(&self, budget: &Budget) -> Option<String> {
        let alive = self.alive();
        let states = self.next.len();
        if !alive[0] || alive.iter().filter(|alive| **alive).count() > MOST_WRITTEN {
            return None;
        }
        let (begin, end) = (states, states + 1);
        let mut edges: BTreeMap<(usize, usize), Written> = BTreeMap::new();
        for (state, row) in self.next.iter().enumerate().filter(|(state, _)| alive[*state]) {
            for (letter, to) in row.iter().enumerate().filter(|(_, to)| alive[**to]) {
                edges.entry((state, *to)).or_default().letters |= 1 << letter;
            }
            if self.accepts[state] {
                edges.entry((state, end)).or_default().empty = true;
            }
        }
        edges.entry((begin, 0)).or_default().empty = true;
        let mut left: Vec<usize> = (0..states).filter(|state| alive[*state]).collect();
        let lengths = self.letters.lengths();
        while !left.is_empty() {
            budget.take(edges.len())?;
            // How many edges lead to a state and from it, and how long they are together.
            let (mut into, mut out) = (vec![(0, 0); states + 2], vec![(0, 0); states + 2]);
            let mut circles = vec![0; states + 2];
            for ((from, to), edge) in &edges {
                let length = edge.length(&lengths);
                if from == to {
                    circles[*from] = length;
                    continue;
                }
                for (count, sum) in [&mut into[*to], &mut out[*from]] {
                    *count += 1;
                    *sum += length;
                }
            }
            // The state whose leaving makes the expression longest by the least goes first.
            let cost = |state: &usize| {
                let ((many, long), (others, longer)) = (into[*state], out[*state]);
                long * others + longer * many + circles[*state] * many * others
            };
            let (at, _) = left.iter().map(cost).enumerate().min_by_key(|(_, cost)| *cost)?;
            let state = left.swap_remove(at);
            let circle = edges.remove(&(state, state)).map(|own| own.repeated(&self.letters));
            let (mut first, mut last) = (Vec::new(), Vec::new());
            edges.retain(|(from, to), edge| {
                if *to == state {
                    let edge = std::mem::take(edge);
                    let circle = circle.as_ref();
                    let edge =
                        circle.map_or(edge.clone(), |circle| edge.then(circle, &self.letters));
                    first.push((*from, edge));
                } else if *from == state {
                    last.push((*to, std::mem::take(edge)));
                }
                *from != state && *to != state
            });
            for (from, before) in &first {
                for (to, behind) in &last {
                    let joined = before.then(behind, &self.letters);
                    budget.take(1 + joined.length(&lengths) / 16)?;
                    edges.entry((*from, *to)).or_default().or(joined);
                }
            }
            if edges.values().map(|edge| edge.length(&lengths)).sum::<usize>() > LONGEST {
                return None;
            }
        }
        let whole = edges.get(&(begin, end))?.text(&self.letters);
        Some(format!("^(?:{whole})$"))
    }
}

/// An expression between two states: one of these letters, or one of these texts, or nothing.
#[derive(Debug, Clone, Default)]
struct Written {
    empty: bool,
    letters: u128,
    texts: Vec<String>,
}

impl Written {
    fn or(&mut self, other: Written) {
        self.empty |= other.empty;
        self.letters |= other.letters;
        for text in other.texts {
            if !self.texts.contains(&text) {
                self.texts.push(text);
            }
        }
    }

    /// Some number of bytes, by how long each letter's class is.
    fn length(&self, lengths: &[usize]) -> usize {
        let own = lengths.iter().enumerate().filter(|(letter, _)| self.letters >> letter & 1 == 1);
        let own = own.map(|(_, length)| *length).sum::<usize>();
        own + self.texts.iter().map(|text| text.len() + 4).sum::<usize>()
    }

    fn is_nothing(&self) -> bool {
        self.letters == 0 && self.texts.is_empty()
    }

    /// A part of a longer expression.
    fn text(&self, letters: &Letters) -> String {
        let mut all = Vec::new();
        if self.letters != 0 {
            all.push(letters.written(self.letters));
        }
        all.extend(self.texts.iter().cloned());
        let joined = all.join("|");
        match (all.len(), self.empty) {
            (0, _) => String::new(),
            (1, false) => joined,
            (_, false) => format!("(?:{joined})"),
            (1, true) if self.texts.is_empty() => format!("{joined}?"),
            (_, true) => format!("(?:{joined})?"),
        }
    }

    /// Any number of times.
    fn repeated(&self, letters: &Letters) -> Written {
        if self.is_nothing() {
            return Written { empty: true, ..Written::default() };
        }
        let own = Written { empty: false, ..self.clone() };
        let text = own.text(letters);
        let text = match own.texts.len() {
            // One text has no brackets around it.
            1 if own.letters == 0 => format!("(?:{text})*"),
            _ => format!("{text}*"),
        };
        Written { texts: vec![text], ..Written::default() }
    }

    fn then(&self, next: &Written, letters: &Letters) -> Written {
        if self.is_nothing() && self.empty {
            return next.clone();
        }
        if next.is_nothing() && next.empty {
            return self.clone();
        }
        let text = format!("{}{}", self.text(letters), next.text(letters));
        Written { texts: vec![text], ..Written::default() }
    }
}

/// The characters, in sets that no expression of an automaton tells apart.
#[derive(Debug, Clone)]
struct Letters {
    /// Where each interval of characters begins, and the letter that it belongs to; none of halves
    /// of characters.
    begins: Vec<(u32, Option<usize>)>,
    count: usize,
}

/// Halves of characters, which are none.
const HALVES: std::ops::Range<u32> = 0xD800..0xE000;
const BEYOND: u32 = char::MAX as u32 + 1;

impl Letters {
    /// The letters that these sets tell apart, and for each set whether it has each letter.
    fn of(sets: &[ClassUnicode]) -> Option<(Letters, Vec<Vec<bool>>)> {
        let mut cuts = vec![0, HALVES.start, HALVES.end];
        for range in sets.iter().flat_map(ClassUnicode::ranges) {
            cuts.extend([u32::from(range.start()), u32::from(range.end()) + 1]);
        }
        cuts.sort_unstable();
        cuts.dedup();
        cuts.retain(|cut| *cut < BEYOND);
        // Which sets have each interval, by a walk through the ranges of all.
        let mut numbers: HashMap<Vec<bool>, usize> = HashMap::new();
        let mut places = vec![0; sets.len()];
        let mut begins = Vec::new();
        for cut in cuts {
            if HALVES.contains(&cut) {
                begins.push((cut, None));
                continue;
            }
            let mut has = Vec::with_capacity(sets.len());
            for (set, place) in sets.iter().zip(&mut places) {
                let ranges = set.ranges();
                while ranges.get(*place).is_some_and(|range| u32::from(range.end()) < cut) {
                    *place += 1;
                }
                has.push(ranges.get(*place).is_some_and(|range| u32::from(range.start()) <= cut));
            }
            let fresh = numbers.len();
            begins.push((cut, Some(*numbers.entry(has).or_insert(fresh))));
        }
        let count = numbers.len();
        let mut within = vec![vec![false; count]; sets.len()];
        for (has, letter) in numbers {
            has.iter().enumerate().for_each(|(set, has)| within[set][letter] = *has);
        }
        (count <= MOST_LETTERS).then_some((Letters { begins, count }, within))
    }

    fn count(&self) -> usize {
        self.count
    }

    /// The letters that tell apart what either does, and which of each they are.
    fn and(&self, other: &Letters) -> Option<(Letters, Vec<(usize, usize)>)> {
        let mut cuts: Vec<u32> =
            self.begins.iter().chain(&other.begins).map(|(begin, _)| *begin).collect();
        cuts.sort_unstable();
        cuts.dedup();
        let mut pairs: Vec<(usize, usize)> = Vec::new();
        let mut begins = Vec::new();
        for cut in cuts {
            let letter = self.at(cut).zip(other.at(cut)).map(|pair| {
                pairs.iter().position(|known| *known == pair).unwrap_or_else(|| {
                    pairs.push(pair);
                    pairs.len() - 1
                })
            });
            begins.push((cut, letter));
            if pairs.len() > MOST_LETTERS {
                return None;
            }
        }
        Some((Letters { begins, count: pairs.len() }, pairs))
    }

    fn at(&self, code: u32) -> Option<usize> {
        let behind = self.begins.partition_point(|(begin, _)| *begin <= code);
        self.begins[behind - 1].1
    }

    fn letter(&self, c: char) -> usize {
        // A character is no half of one.
        self.at(u32::from(c)).unwrap_or_default()
    }

    /// The intervals of letters, from the first character to behind the last.
    fn intervals(&self) -> impl Iterator<Item = (u32, u32, usize)> {
        let ends = self.begins.iter().skip(1).map(|(begin, _)| *begin).chain([BEYOND]);
        let all = self.begins.iter().zip(ends);
        all.filter_map(|((begin, letter), end)| Some((*begin, end, (*letter)?)))
    }

    /// About how long each letter's class is, in bytes.
    fn lengths(&self) -> Vec<usize> {
        let mut lengths = vec![2; self.count];
        self.intervals().for_each(|(.., letter)| lengths[letter] += 8);
        lengths
    }

    /// How many characters each letter stands for.
    fn sizes(&self) -> Vec<u64> {
        let mut sizes = vec![0; self.count];
        self.intervals().for_each(|(begin, end, letter)| sizes[letter] += u64::from(end - begin));
        sizes
    }

    /// The characters that a letter stands for.
    fn characters(&self, letter: usize) -> impl Iterator<Item = char> {
        let own = self.intervals().filter(move |(.., own)| *own == letter);
        own.flat_map(|(begin, end, _)| begin..end).filter_map(char::from_u32)
    }

    /// A class of these letters.
    fn written(&self, letters: u128) -> String {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for (begin, end, _) in self.intervals().filter(|(.., letter)| letters >> letter & 1 == 1) {
            match ranges.last_mut() {
                Some(last) if last.1 == begin || last.1 == HALVES.start && begin == HALVES.end => {
                    last.1 = end;
                }
                _ => ranges.push((begin, end)),
            }
        }
        let all = |ranges: &[(u32, u32)]| ranges.first() == Some(&(0, BEYOND));
        if all(&ranges) {
            return "[\\s\\S]".to_string();
        }
        // What is left out is shorter where it is little.
        let mut others = Vec::new();
        let mut at = 0;
        for (begin, end) in &ranges {
            if at < *begin {
                others.push((at, *begin));
            }
            at = if *end == HALVES.start { HALVES.end } else { *end };
        }
        if at < BEYOND {
            others.push((at, BEYOND));
        }
        let negated = ranges.last().is_some_and(|last| last.1 == BEYOND);
        let (sign, ranges) = if negated { ("^", others) } else { ("", ranges) };
        let sign_of = |code: u32, out: &mut String| {
            let plain = char::from_u32(code).filter(char::is_ascii_alphanumeric);
            let _ = match plain {
                Some(c) => write!(out, "{c}"),
                None => write!(out, "\\x{{{code:x}}}"),
            };
        };
        let mut out = String::new();
        for (begin, end) in &ranges {
            let last = if *end == HALVES.end { HALVES.start - 1 } else { end - 1 };
            sign_of(*begin, &mut out);
            if last > *begin {
                out.push('-');
                sign_of(last, &mut out);
            }
        }
        match ranges[..] {
            [(begin, end)] if !negated && end == begin + 1 => out,
            _ => format!("[{sign}{out}]"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks of all kinds, and texts that match and that do not.
    #[test]
    fn looks_are_followed() {
        assert_eq!(
            without_looks("^(?!-)[a-z-]{1,63}(?<!-)$", Kind::Search, &Budget::new()).unwrap().len(),
            3
        );
        for (text, good, bad) in [
            (r"^(?=.*[A-Z])(?=.*\d).{4,}$", &["aB3x", "3xxB"][..], &["aB3", "abc3", "ABCD"][..]),
            (r"^(?!foo)..", &["fo", "bar", "fox"], &["foo", "food", "f"]),
            (r"^(?!.*(ab|cd)).*$", &["", "acbd"], &["xab", "cdx"]),
            (r"^(?!admin$)[a-z]+$", &["admi", "admins"], &["admin", ""]),
            (r"^((?!ab).)*$", &["", "ba", "aa"], &["ab", "xaby"]),
            (r"foo(?!bar)", &["foo", "foobarfoo", "foobaz"], &["foobar", "fo"]),
            (r"a(?=b)", &["ab", "xaby"], &["a", "ba"]),
            (r"^[a-z-]+(?<!-)$", &["a", "a-b"], &["a-", "-"]),
            (r"(?<=@)\w+", &["@a", "x @yy"], &["a", "@", "@-a"]),
            (r"\bcat\b", &["cat", "a cat.", "cat-"], &["cats", "concat", "cat_"]),
            (r"\Bat", &["cat", "_at"], &["at", "an at"]),
            (r"(^|,)a(,|$)", &["a", "b,a", "a,b", "b,a,c"], &["ba", "ab", ""]),
            (r"^(?:(?=a)[ab]{2}|(?!a)c)$", &["ab", "aa", "c"], &["ba", "a"]),
            (r"^(?=(?!x)..$)[^y]+$", &["ab", "ax"], &["xa", "ay", "abc"]),
            (r"(?i)^(?!NO).", &["y", "nx"], &["no", "No!"]),
            (r"^[^\n](?![\s\S])", &["a", "\u{1F600}"], &["ab", "\n"]),
        ] {
            let budget = Budget::new();
            let own = Automaton::of(text, &budget).unwrap_or_else(|| panic!("{text}"));
            let all = without_looks(text, Kind::Search, &budget).unwrap();
            let all: Vec<Automaton> =
                all.iter().map(|one| Automaton::of(one, &budget).unwrap()).collect();
            let others = Automaton::of(text, &budget).unwrap().complement();
            let others = Automaton::of(&others.written(&budget).unwrap(), &budget).unwrap();
            for (texts, expected) in [(good, true), (bad, false)] {
                for one in texts {
                    assert_eq!(own.has(one), expected, "{text} {one}");
                    assert_eq!(all.iter().all(|all| all.has(one)), expected, "{text} {one}");
                    assert_eq!(others.has(one), !expected, "{text} {one}");
                }
            }
        }
        for text in [r"(a)\1", r"(?<x>a)\k<x>", "(?m)^a", "a{2000}", "(", "[", "(?!(?!a)b)c"] {
            assert!(Automaton::of(text, &Budget::new()).is_none(), "{text}");
        }
    }

    #[test]
    fn texts_are_counted_and_listed() {
        for (text, least, most, expected) in [
            ("^[a-c]{2}$", 0, None, Some(9)),
            ("^[a-c]*$", 0, Some(2), Some(13)),
            ("^[a-c]*$", 2, Some(2), Some(9)),
            ("^a*$", 0, None, None),
            ("a", 0, Some(1), Some(1)),
            ("^(a|b|ab?)$", 0, None, Some(3)),
            ("^a$|^b$", 2, None, Some(0)),
            ("^.{40}$", 0, None, None),
        ] {
            let own = Automaton::of(text, &Budget::new()).unwrap();
            assert_eq!(own.count(least, most), expected, "{text}");
            let texts = own.texts(least, most, 64);
            assert_eq!(texts.map(|texts| texts.len() as u64), expected, "{text}");
        }
        let others = Automaton::others("^a$", &Budget::new()).unwrap();
        assert!(["b", "a\n\n", "\na"].iter().all(|text| others.has(text)));
        assert!(["a", "a\n"].iter().all(|text| !others.has(text)));
        let own = Automaton::of("^(x|y[01])$", &Budget::new()).unwrap();
        assert_eq!(own.texts(0, None, 8).unwrap(), ["x", "y0", "y1"]);
    }

    /// What would take long is given up.
    #[test]
    fn automata_are_bounded() {
        let many: String = (0..40).map(|i| format!("(?=.*{i}x{i})")).collect();
        for text in [
            format!("{many}.{{200}}"),
            "(?=(a|b)*a(a|b){30})x?".to_string(),
            format!("{}a{}", "(".repeat(500), ")".repeat(500)),
            "((((a{900}){900}){900}){900}(?!x))".to_string(),
            r"(?=\p{L}{300})(?!.*\p{Lu}\p{Ll}{20}\p{Lu})x".to_string(),
            "(?!(a?){900}a{900}$)b".to_string(),
        ] {
            let began = std::time::Instant::now();
            let _ = without_looks(&text, Kind::Search, &Budget::new());
            assert!(began.elapsed().as_secs() < 20, "{text}");
        }
    }
}

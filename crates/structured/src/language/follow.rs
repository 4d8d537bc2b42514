//! The deterministic automaton of an expression that looks ahead and behind.
//!
//! A place in the expression carries what was looked ahead for: expressions of which each must still
//! match from here on, and some of which none may. They go on beside it, character by character. A
//! state of the automaton is a set of such places; what is looked behind for goes on from every
//! character of the text, in a set of its own.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::parse::{Node, Parsed};
use super::{Automaton, Budget, Letters, MOST_STATES};

/// Places in an expression, once repeated parts are written out.
const MOST_PLACES: usize = 4096;
/// Alternatives that one state stands for.
const MOST_WAYS: usize = 256;

type Id = usize;
type Ids = BTreeSet<Id>;

/// A place in an expression, and where it leads.
#[derive(Debug, Clone)]
enum Place {
    Set(usize, Id),
    Fork(Vec<Id>),
    Begin(Id),
    End(Id),
    Word(bool, Id),
    Ahead(Id, bool, Id),
    Behind(usize, bool, Id),
    Done,
}

/// A way through the expression.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Way {
    at: Id,
    /// Places of what must match.
    must: Ids,
    /// Places of what must not.
    never: Ids,
}

/// What was read before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Before {
    Nothing,
    Word,
    Other,
}

/// A state of the automaton.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    before: Before,
    ways: Vec<Way>,
    behind: Vec<Ids>,
}

/// Where a text stands between two characters.
struct Here<'a> {
    before: Before,
    /// Whether a letter of words follows; `None` at the end.
    next: Option<bool>,
    /// What is looked behind for that is there.
    behind: &'a [bool],
}

impl Here<'_> {
    fn is_boundary(&self) -> bool {
        (self.before == Before::Word) != (self.next == Some(true))
    }
}

pub(super) struct Follower<'a> {
    places: Vec<Place>,
    /// Where each expression begins that is looked behind for.
    behind: Vec<Id>,
    letters: Letters,
    /// Whether each letter is in each set.
    within: Vec<Vec<bool>>,
    /// Whether each letter is one of words, if that is asked for.
    words: Option<Vec<bool>>,
    budget: &'a Budget,
}

impl<'a> Follower<'a> {
    /// The automaton of texts that an expression matches: all of, or some part of.
    pub(super) fn automaton(
        parsed: &Parsed,
        search: bool,
        ascii: bool,
        budget: &'a Budget,
    ) -> Option<Automaton> {
        let word = regex_syntax::parse(if ascii { "[0-9A-Za-z_]" } else { "\\w" }).ok()?;
        let word = match word.kind() {
            regex_syntax::hir::HirKind::Class(regex_syntax::hir::Class::Unicode(set)) => {
                set.clone()
            }
            _ => return None,
        };
        let mut sets = parsed.sets.clone();
        let asks = asks_for_words(&parsed.node);
        if asks {
            sets.push(word);
        }
        let (letters, mut within) = Letters::of(&sets)?;
        let words = if asks { within.pop() } else { None };
        let places = vec![Place::Done];
        let mut follower = Follower { places, behind: Vec::new(), letters, within, words, budget };
        // The set of all characters has the last number.
        let any = follower.within.len();
        follower.within.push(vec![true; follower.letters.count()]);
        let mut end = 0;
        if search {
            end = follower.circle(&Node::Set(any), 0)?;
        }
        let mut start = follower.build(&parsed.node, end)?;
        if search {
            start = follower.circle(&Node::Set(any), start)?;
        }
        follower.run(start)
    }

    fn add(&mut self, place: Place) -> Option<Id> {
        self.places.push(place);
        (self.places.len() <= MOST_PLACES).then(|| self.places.len() - 1)
    }

    /// A part any number of times.
    fn circle(&mut self, node: &Node, next: Id) -> Option<Id> {
        let circle = self.add(Place::Fork(Vec::new()))?;
        let body = self.build(node, circle)?;
        self.places[circle] = Place::Fork(vec![body, next]);
        Some(circle)
    }

    /// The place from which a part leads to the next one.
    fn build(&mut self, node: &Node, next: Id) -> Option<Id> {
        self.budget.take(1)?;
        match node {
            Node::Set(set) => self.add(Place::Set(*set, next)),
            Node::Concat(parts) => {
                parts.iter().rev().try_fold(next, |next, part| self.build(part, next))
            }
            Node::Either(parts) => {
                let ways = parts.iter().map(|part| self.build(part, next));
                let ways = ways.collect::<Option<Vec<_>>>()?;
                self.add(Place::Fork(ways))
            }
            Node::Repeat(part, least, most) => {
                let mut from = next;
                match most {
                    None => from = self.circle(part, next)?,
                    Some(most) => {
                        for _ in *least..*most {
                            let body = self.build(part, from)?;
                            from = self.add(Place::Fork(vec![body, next]))?;
                        }
                    }
                }
                (0..*least).try_fold(from, |from, _| self.build(part, from))
            }
            Node::Begin => self.add(Place::Begin(next)),
            Node::End => self.add(Place::End(next)),
            Node::Word(is) => self.add(Place::Word(*is, next)),
            Node::Ahead(inner, wanted) => {
                let begin = self.build(inner, 0)?;
                self.add(Place::Ahead(begin, *wanted, next))
            }
            Node::Behind(inner, wanted) => {
                let begin = self.build(inner, 0)?;
                self.behind.push(begin);
                self.add(Place::Behind(self.behind.len() - 1, *wanted, next))
            }
        }
    }

    /// The ways on from a place up to the next character or the end.
    fn ways(&self, from: Id, here: &Here) -> Option<Vec<Way>> {
        let (mut found, mut seen) = (Vec::new(), HashSet::new());
        let mut open = vec![Way { at: from, must: Ids::new(), never: Ids::new() }];
        while let Some(way) = open.pop() {
            self.budget.take(1 + way.must.len() + way.never.len())?;
            if !seen.insert(way.clone()) {
                continue;
            }
            let to = |at: Id| Way { at, ..way.clone() };
            match &self.places[way.at] {
                Place::Set(..) | Place::Done => found.push(way),
                Place::Fork(next) => open.extend(next.iter().map(|next| to(*next))),
                Place::Begin(next) if here.before == Before::Nothing => open.push(to(*next)),
                Place::End(next) if here.next.is_none() => open.push(to(*next)),
                Place::Word(is, next) if here.is_boundary() == *is => open.push(to(*next)),
                Place::Behind(i, wanted, next) if *here.behind.get(*i)? == *wanted => {
                    open.push(to(*next));
                }
                Place::Ahead(begin, wanted, next) => {
                    let mut more = to(*next);
                    let looked = if *wanted { &mut more.must } else { &mut more.never };
                    looked.insert(*begin);
                    open.push(more);
                }
                _ => {}
            }
        }
        Some(found)
    }

    /// The same from several places, of an expression that does not look ahead itself.
    fn closed(&self, from: &Ids, here: &Here) -> Option<Ids> {
        let mut all = Ids::new();
        for place in from {
            for way in self.ways(*place, here)? {
                if !way.must.is_empty() || !way.never.is_empty() {
                    return None;
                }
                all.insert(way.at);
            }
        }
        Some(all)
    }

    /// The ways on of all that must match, together: the places of each, and what must not match.
    fn together(&self, mut open: Ids, mut done: Ids, here: &Here) -> Option<Vec<(Ids, Ids)>> {
        let Some(first) = open.pop_first() else { return Some(vec![(Ids::new(), Ids::new())]) };
        done.insert(first);
        let mut all = Vec::new();
        for way in self.ways(first, here)? {
            let more = open.iter().chain(way.must.difference(&done)).copied().collect();
            for (mut must, mut never) in self.together(more, done.clone(), here)? {
                must.insert(way.at);
                never.extend(&way.never);
                all.push((must, never));
            }
            if all.len() > MOST_WAYS {
                return None;
            }
        }
        Some(all)
    }

    /// Where these places lead with a letter; `None` where one that must go on does not.
    fn step(&self, from: &Ids, letter: usize, all: bool) -> Option<Ids> {
        let mut to = Ids::new();
        for place in from {
            match self.places[*place] {
                Place::Set(set, next) if self.within[set][letter] => drop(to.insert(next)),
                // What has matched has nothing more to say.
                Place::Done if all => {}
                _ if all => return None,
                _ => {}
            }
        }
        Some(to)
    }

    /// Where a state leads with a letter, or, without one, whether a text may end there.
    fn next(&self, state: &State, letter: Option<usize>) -> Option<(State, bool)> {
        let is_word = |letter: usize| self.words.as_ref().is_some_and(|words| words[letter]);
        let here = Here { before: state.before, next: letter.map(is_word), behind: &[] };
        let closed = state.behind.iter().map(|from| self.closed(from, &here));
        let closed = closed.collect::<Option<Vec<Ids>>>()?;
        let behind: Vec<bool> = closed.iter().map(|places| places.contains(&0)).collect();
        let here = Here { behind: &behind, ..here };
        let (mut ways, mut ends) = (Vec::new(), false);
        for way in &state.ways {
            let never = self.closed(&way.never, &here)?;
            for own in self.ways(way.at, &here)? {
                let must = way.must.union(&own.must).copied().collect();
                for (must, more) in self.together(must, Ids::new(), &here)? {
                    let never_begun = own.never.union(&more).copied().collect();
                    let mut never = never.clone();
                    never.extend(self.closed(&never_begun, &here)?);
                    self.budget.take(8 + must.len() + never.len())?;
                    if never.contains(&0) {
                        continue;
                    }
                    let Some(letter) = letter else {
                        ends |= own.at == 0 && must.iter().all(|place| *place == 0);
                        continue;
                    };
                    let Place::Set(set, next) = self.places[own.at] else { continue };
                    if !self.within[set][letter] {
                        continue;
                    }
                    let Some(must) = self.step(&must, letter, true) else { continue };
                    let never = self.step(&never, letter, false)?;
                    ways.push(Way { at: next, must, never });
                }
            }
        }
        let before = match letter {
            Some(letter) if is_word(letter) => Before::Word,
            _ => Before::Other,
        };
        let behind = closed.iter().zip(&self.behind).map(|(places, begin)| {
            let mut to = self.step(places, letter?, false)?;
            to.insert(*begin);
            Some(to)
        });
        let behind =
            if letter.is_some() { behind.collect::<Option<Vec<_>>>()? } else { Vec::new() };
        Some((State { before, ways: self.least(ways)?, behind }, ends))
    }

    /// Without ways that ask for more than another one.
    fn least(&self, mut ways: Vec<Way>) -> Option<Vec<Way>> {
        ways.sort_by_key(|way| (way.must.len() + way.never.len(), way.clone()));
        ways.dedup();
        let mut kept: Vec<Way> = Vec::new();
        for way in ways {
            self.budget.take(kept.len())?;
            let covers = |other: &Way| {
                other.at == way.at
                    && other.must.is_subset(&way.must)
                    && other.never.is_subset(&way.never)
            };
            if !kept.iter().any(covers) {
                kept.push(way);
            }
        }
        kept.sort();
        (kept.len() <= MOST_WAYS).then_some(kept)
    }

    fn run(self, start: Id) -> Option<Automaton> {
        let first = Way { at: start, must: Ids::new(), never: Ids::new() };
        let behind = self.behind.iter().map(|begin| Ids::from([*begin])).collect();
        let first = State { before: Before::Nothing, ways: vec![first], behind };
        let mut numbers = HashMap::from([(first.clone(), 0)]);
        let (mut states, mut next, mut accepts) = (vec![first], Vec::new(), Vec::new());
        let mut at = 0;
        while let Some(state) = states.get(at).cloned() {
            at += 1;
            accepts.push(self.next(&state, None)?.1);
            let mut row = Vec::new();
            for letter in 0..self.letters.count() {
                let to = self.next(&state, Some(letter))?.0;
                let number = *numbers.entry(to.clone()).or_insert_with(|| {
                    states.push(to);
                    states.len() - 1
                });
                row.push(number);
            }
            next.push(row);
            if states.len() > MOST_STATES {
                return None;
            }
        }
        Some(Automaton { letters: self.letters, next, accepts }.least())
    }
}

fn asks_for_words(node: &Node) -> bool {
    match node {
        Node::Word(_) => true,
        Node::Concat(parts) | Node::Either(parts) => parts.iter().any(asks_for_words),
        Node::Repeat(part, ..) | Node::Ahead(part, _) | Node::Behind(part, _) => {
            asks_for_words(part)
        }
        _ => false,
    }
}

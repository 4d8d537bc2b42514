//! Constraints on what may be generated: a grammar or a schema, as the set of tokens that may come
//! next.
//!
//! A [`Constraint`] follows one generation token by token. Only the interface is here; engines know
//! no grammar.

use crate::generate::GenerateOptions;
use formats::{Error, ErrorKind, Result, caught};
use ops::sample::Choice;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Says which tokens may come next in one generation.
///
/// It is asked between the choice of one token and the next: on the thread that generates, or on
/// one that follows several texts beside it; for what is allowed, while a device computes the step
/// that the next token is chosen from, if it can.
pub trait Constraint: Send {
    /// Inserts every token that may come next into `allowed`, which is empty. It may be asked
    /// several times before a token is chosen. The model's end tokens belong to it where the text
    /// may end. The text is cut behind `left` more tokens, its end token included; as they run out,
    /// a constraint may allow only what brings the text to its end.
    ///
    /// # Errors
    /// The reason why it is impossible to go on.
    fn allow(&mut self, left: usize, allowed: &mut TokenSet) -> Result<()>;

    /// Told the token that was chosen, unless the text ended with it. Returns the one that the text
    /// goes on with: another one if behind the chosen one the text could no longer end within its
    /// tokens.
    ///
    /// # Errors
    /// A token that was not allowed, or the reason why it is impossible to go on.
    fn accept(&mut self, token: u32) -> Result<u32>;

    /// Tokens that come next whatever the model says, `most` at most: the text goes on behind them,
    /// with one that is chosen. Asked before the first token is chosen, and behind each that was
    /// chosen and accepted. They are accepted without being told again.
    ///
    /// # Errors
    /// The reason why it is impossible to go on.
    fn forced(&mut self, most: usize) -> Result<Vec<u32>> {
        let _ = most;
        Ok(Vec::new())
    }

    /// Whether the token that was accepted last, or is allowed alone, is there to bring the text to
    /// its end.
    fn is_closing(&self) -> bool {
        false
    }
}

/// Makes the [`Constraint`] of each generation that is given these options. Cheap to clone.
#[derive(Clone)]
pub struct ConstraintSource(Arc<dyn Fn() -> Result<Box<dyn Constraint>> + Send + Sync>);

impl ConstraintSource {
    /// Constraints that `start` makes, one for each generation. Its errors are those of
    /// [`start`](ConstraintSource::start).
    pub fn new(start: impl Fn() -> Result<Box<dyn Constraint>> + Send + Sync + 'static) -> Self {
        ConstraintSource(Arc::new(start))
    }

    /// The constraint of one generation, at the beginning of its text.
    ///
    /// # Errors
    /// As the function that makes it.
    pub fn start(&self) -> Result<Box<dyn Constraint>> {
        (self.0)()
    }
}

impl std::fmt::Debug for ConstraintSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ConstraintSource")
    }
}

/// The constraint of one generation, and the tokens that it allows next.
pub(crate) struct Constrained {
    constraint: Box<dyn Constraint>,
    allowed: TokenSet,
    /// Tokens that come next and are accepted already, which the text does not have yet.
    forced: VecDeque<u32>,
    /// Whether they are chosen one after the other, each as the one that is allowed.
    singly: bool,
    /// Whether the text is behind the last of them: the next token is chosen in any case.
    behind: bool,
    /// Where it is still to be found which tokens may come next: how many more the text may have.
    owed: Option<usize>,
    /// Why it is impossible to go on, where that was found ahead of the step.
    failed: Option<Error>,
    /// Time spent on the token that was chosen last, until all of its work is done.
    pub(crate) spent: Duration,
    /// Tokens for which it is taken for slow, and whether the last one was.
    pub(crate) wary: u32,
    pub(crate) slow: bool,
}

impl Constrained {
    /// The constraint that these options ask for, for a vocabulary of this size and a text that may
    /// have at most `room` tokens.
    ///
    /// # Errors
    /// A grammar that cannot be followed, or an end that is to be ignored: a grammar ends with the
    /// model's end token.
    pub(crate) fn start(
        options: &GenerateOptions,
        vocabulary: usize,
        room: usize,
    ) -> Result<Option<Constrained>> {
        let Some(source) = &options.constraint else { return Ok(None) };
        if options.ignore_end {
            let found = "one that shall go on past its end";
            return Err(Error::new("options", "a constrained generation that may end", found));
        }
        let constraint = guarded(|| source.start())?;
        let mut started = Constrained {
            constraint,
            allowed: TokenSet::new(vocabulary),
            forced: VecDeque::new(),
            // What is chosen has a log-probability.
            singly: options.logprobs || options.top_logprobs > 0,
            behind: false,
            owed: None,
            failed: None,
            spent: Duration::ZERO,
            wary: 0,
            slow: false,
        };
        started.prepare(options.max_tokens.unwrap_or(usize::MAX).min(room));
        started.failed.take().map_or(Ok(Some(started)), Err)
    }

    /// Finds the tokens that come next whatever the model says; the text may have `left` more of
    /// them and of those behind them, which are still to be found.
    fn go_on(&mut self, left: usize) -> Result<()> {
        // One behind them is chosen.
        let behind = std::mem::take(&mut self.behind);
        if !behind && self.forced.is_empty() && left > 1 {
            let forced = guarded(|| self.constraint.forced(left - 1))?;
            let known = |token: &&u32| (**token as usize) < self.allowed.vocabulary;
            if let Some(token) = forced.iter().find(|token| !known(token)) {
                let expected = format!("tokens below {}", self.allowed.vocabulary);
                return Err(Error::new("constraint", expected, token).of(ErrorKind::Internal));
            }
            self.forced = forced.into();
        }
        let ahead = if self.singly { 0 } else { self.forced.len() };
        self.owed = Some(left.saturating_sub(ahead));
        Ok(())
    }

    /// Finds the tokens that may be chosen next; the text may have `left` more.
    ///
    /// # Errors
    /// As [`Constraint::allow`]; a panic of the constraint.
    fn find(&mut self, left: usize) -> Result<()> {
        self.allowed.clear();
        match self.forced.front().filter(|_| self.singly) {
            Some(&token) => {
                self.allowed.insert(token);
                Ok(())
            }
            None => guarded(|| self.constraint.allow(left, &mut self.allowed)),
        }
    }

    /// Goes on ahead of the step that chooses, with at most `left` more tokens; why it cannot is
    /// kept.
    pub(crate) fn prepare(&mut self, left: usize) {
        self.advance(left);
        self.look();
    }

    /// As [`Constrained::prepare`], but for what [`Constrained::look`] is to find.
    pub(crate) fn advance(&mut self, left: usize) {
        self.failed = self.go_on(left).err();
    }

    /// Finds the tokens that may be chosen next, if they are still to be found; why it cannot is
    /// kept.
    pub(crate) fn look(&mut self) {
        if let Some(left) = self.owed.take() {
            self.failed = self.find(left).err();
        }
    }

    /// Whether the tokens that may be chosen next are still to be found.
    pub(crate) fn owes(&self) -> bool {
        self.owed.is_some()
    }

    /// The tokens that the text has next before one is chosen.
    pub(crate) fn take_forced(&mut self) -> impl Iterator<Item = u32> + use<> {
        let forced = if self.singly { VecDeque::new() } else { std::mem::take(&mut self.forced) };
        forced.into_iter()
    }

    /// Why the text cannot go on, if it cannot.
    pub(crate) fn failed(&self) -> Option<&Error> {
        self.failed.as_ref()
    }

    /// The tokens that were found, as the sampler takes them; none where they are all.
    pub(crate) fn mask(&self) -> Option<&[u32]> {
        (!self.allowed.all).then(|| self.allowed.words())
    }

    /// Goes on by the token that was chosen, unless the text `ends` with it, or by another one in
    /// its place. Returns the token, and whether it is there to bring the text to its end.
    ///
    /// # Errors
    /// As [`Constraint::accept`]; a panic of the constraint.
    pub(crate) fn accept(&mut self, token: u32, ends: bool) -> Result<(u32, bool)> {
        if let Some(forced) = self.forced.pop_front() {
            self.behind = self.forced.is_empty();
            return Ok((forced, false));
        }
        let token = if ends { token } else { guarded(|| self.constraint.accept(token))? };
        Ok((token, self.constraint.is_closing()))
    }
}

/// The log-probability of the token that a text goes on with, where another one was chosen: none if
/// it is not among the likeliest.
pub(crate) fn logprob(token: u32, choice: &Choice, likeliest: &[(u32, f32)]) -> Option<f32> {
    if token == choice.token {
        return Some(choice.logprob);
    }
    likeliest.iter().find(|found| found.0 == token).map(|found| found.1)
}

/// Runs a constraint's own code, of which a panic is that generation's alone.
fn guarded<T>(run: impl FnOnce() -> Result<T>) -> Result<T> {
    caught(run).unwrap_or_else(|words| {
        let error = Error::new("constraint", "an answer", format!("a panic: {words}"));
        Err(error.of(ErrorKind::Internal))
    })
}

/// A set of tokens of a vocabulary, a bit for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenSet {
    words: Vec<u32>,
    vocabulary: usize,
    /// Whether it has them all, whatever the bits say.
    all: bool,
}

impl TokenSet {
    /// The empty set, for a vocabulary of this size.
    pub fn new(vocabulary: usize) -> Self {
        TokenSet { words: vec![0; vocabulary.div_ceil(32)], vocabulary, all: false }
    }

    /// Removes all tokens.
    pub fn clear(&mut self) {
        self.words.fill(0);
        self.all = false;
    }

    /// Adds all tokens of the vocabulary: the sampler looks at no bits then.
    pub fn insert_all(&mut self) {
        self.words.fill(u32::MAX);
        self.insert_bits(&[]);
        self.all = true;
    }

    /// Adds a token; one outside the vocabulary is passed over.
    pub fn insert(&mut self, token: u32) {
        if (token as usize) < self.vocabulary {
            self.words[token as usize / 32] |= 1 << (token % 32);
        }
    }

    /// Adds the tokens whose bits are set: token `i` has bit `i % 32` of word `i / 32`. Those
    /// outside the vocabulary are passed over.
    pub fn insert_bits(&mut self, words: &[u32]) {
        for (own, word) in self.words.iter_mut().zip(words) {
            *own |= word;
        }
        if let Some(last) = self.words.last_mut().filter(|_| !self.vocabulary.is_multiple_of(32)) {
            *last &= (1 << (self.vocabulary % 32)) - 1;
        }
    }

    /// Its bits: token `i` has bit `i % 32` of word `i / 32`.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Whether a token is in it.
    pub fn contains(&self, token: u32) -> bool {
        (token as usize) < self.vocabulary
            && self.words[token as usize / 32] >> (token % 32) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_tokens_of_its_vocabulary_only() {
        let mut set = TokenSet::new(35);
        set.insert(3);
        set.insert(34);
        set.insert(35);
        set.insert(u32::MAX);
        let held = |set: &TokenSet| (0..70).filter(|t| set.contains(*t)).collect::<Vec<_>>();
        assert_eq!(held(&set), [3, 34]);
        set.insert_bits(&[1, u32::MAX, u32::MAX]);
        assert_eq!(held(&set), [0, 3, 32, 33, 34]);
        set.clear();
        assert!(held(&set).is_empty());
        set.insert_all();
        assert!(held(&set).into_iter().eq(0..35));
        assert!(!TokenSet::new(0).contains(0));
    }
}

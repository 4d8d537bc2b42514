//! Structured output: JSON schemas, regular expressions and grammars as constraints on a model's
//! tokens.
//!
//! [`Grammars`] belongs to a model: it holds the model's vocabulary as a tree of bytes.
//! [`Grammars::compile`] makes a [`ConstraintSource`] of a [`Grammar`], [`Grammars::tools`] one of
//! tools and the form in which the model calls them. Both let the model reason first, where its
//! template has it do so. llguidance parses, with Earley's algorithm over derivatives of regular
//! expressions, and finds the tokens that may come next.
//!
//! Schemas and grammars are untrusted. Their size is limited, and so is what compiling them and
//! each step may take: whatever goes beyond is an error of that request alone.

mod distinct;
mod ending;
mod escaped;
mod forced;
mod gbnf;
mod language;
mod lazy;
mod matcher;
mod schema;
mod tools;

use distinct::{Places, Reader};
use ending::{Planner, Signs};
use engine::reasoning::Opening;
use engine::{Constraint, ConstraintSource, TokenSet};
use forced::Speller;
use formats::{Error, ErrorKind, Result, caught};
use lazy::Lazy;
use llguidance::ParserFactory;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::toktrie::{
    ApproximateTokEnv, InferenceCapabilities, SimpleVob, TokEnv, TokRxInfo, TokTrie,
};
use matcher::Matcher;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tokens::Tokenizer;

pub use tools::{Demand, Given};

/// Longest grammar or regular expression, in bytes of its text.
const LONGEST: usize = 256 << 10;
/// Longest schema.
const LONGEST_SCHEMA: usize = 1 << 20;
/// Most values in a schema, however deep: what compiling takes may grow with the square of their
/// number.
const MOST_VALUES: usize = 8192;
/// Strings, numbers and the like in an `enum` that count as one of them: together they are one
/// expression.
const LISTED: usize = 8;
/// Parts of reasons that only llguidance's authors understand, and what they mean.
const REASONS: [(&str, &str); 3] = [
    ("NoExtensionBias", "a part that is nothing but itself"),
    ("coerce_one_of", "oneOf, whose branches cannot be told apart"),
    ("Current row has", "too many alternatives at one place"),
];
/// Steps of building regular expressions, about 50,000 to a millisecond.
const BUILDING: u64 = 1_000_000;
/// Steps of regular expressions for one token, about 14,000 to a millisecond.
const STEPS: u64 = 200_000;
/// Bytes of stack for compiling, of which those that are touched take memory.
const STACK: usize = 512 << 20;
/// Alternatives at one place, some 20,000 to a millisecond.
const ROW: usize = 12_000;
/// States of regular expressions of one generation, each up to 2 KiB.
const STATES: usize = 50_000;
/// Compiled grammars that are kept.
const KEPT: usize = 16;
/// Longest grammar that is kept, in bytes of its text: what compiling takes grows with it.
const LONGEST_KEPT: usize = 32 << 10;
/// Expressions that one text must match: looking for one takes twice as long with each.
const MOST_TOGETHER: usize = 12;
/// Places that are looked at behind a token that may repeat an item.
const BEHIND: usize = 256;
/// Longest reason that is told, in characters.
const LONGEST_REASON: usize = 300;

/// The form that a text must have.
#[derive(Debug, Clone, PartialEq)]
pub enum Grammar {
    /// A JSON object.
    Json,
    /// JSON that a JSON schema (draft 2020-12) allows. Keywords that cannot be followed are
    /// refused.
    Schema(Value),
    /// A text that all of this regular expression matches.
    Regex(String),
    /// A text of this grammar in the syntax of Lark, from the rule `start`.
    Lark(String),
    /// A text of this grammar in the syntax of llama.cpp, from the rule `root`.
    Gbnf(String),
}

impl Grammar {
    /// A grammar in whichever of the two syntaxes it is written: llama.cpp's defines rules with
    /// `::=`.
    pub fn of_text(text: &str) -> Grammar {
        let text = text.to_string();
        if text.contains("::=") { Grammar::Gbnf(text) } else { Grammar::Lark(text) }
    }
}

/// One model's vocabulary, ready for grammars.
pub struct Grammars {
    factory: ParserFactory,
    /// Compiled grammars by the text of the request, the latest last: programs send the same few
    /// schemas.
    lately: Mutex<Vec<(String, ConstraintSource)>>,
    signs: Arc<Signs>,
    speller: Arc<Speller>,
    /// The ids of special tokens by their text.
    special: HashMap<String, u32>,
}

impl Grammars {
    /// The vocabulary of a model: its tokenizer, the size of its logits, and the tokens that end
    /// its texts.
    ///
    /// # Errors
    /// A vocabulary that is too large, or a model without an end token.
    pub fn new(tokenizer: &Arc<Tokenizer>, vocabulary: usize, ends: &[u32]) -> Result<Grammars> {
        let ends: Vec<u32> =
            ends.iter().copied().filter(|end| (*end as usize) < vocabulary).collect();
        let Some(&first) = ends.first() else {
            return Err(Error::new("grammar", "a model with an end token", "none"));
        };
        let size = u32::try_from(vocabulary).ok().filter(|size| *size < 1 << 22);
        let size = size.ok_or_else(|| Error::new("grammar", "at most 2^22 tokens", vocabulary))?;
        let word = |id: u32| {
            let bytes = tokenizer.token_bytes(id);
            if tokenizer.is_special(id) || ends.contains(&id) {
                // Special tokens are no text: only their ids match.
                return [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat();
            }
            // What begins with the marker's byte, which no UTF-8 has, would be taken for a special
            // token.
            let marked = bytes.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER);
            if marked { Vec::new() } else { bytes.to_vec() }
        };
        let words: Vec<Vec<u8>> = (0..size).map(word).collect();
        let mut special = HashMap::new();
        for id in (0..size).filter(|id| tokenizer.is_special(*id) || ends.contains(id)) {
            special.entry(tokenizer.token_text(id)).or_insert(id);
        }
        let factory = limited("grammar", || {
            let trie = TokTrie::from(&TokRxInfo::new(size, first), &words).with_eos_tokens(&ends);
            let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let slices = llguidance::earley::SlicedBiasComputer::general_slices();
            ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
        });
        let mut factory = factory?;
        factory.quiet();
        let limits = factory.limits_mut();
        limits.initial_lexer_fuel = BUILDING;
        limits.step_lexer_fuel = STEPS;
        limits.max_lexer_states = STATES;
        limits.max_items_in_row = ROW;
        limits.verbose_errors = false;
        limits.precompute_large_lexemes = false;
        let trie = factory.tok_env().tok_trie();
        let signs = Arc::new(Signs::new(trie));
        let speller = Arc::new(Speller::new(tokenizer.clone(), trie));
        Ok(Grammars { factory, lately: Mutex::default(), signs, speller, special })
    }

    /// Constraints that let a model write what a grammar allows, after what may open its answer.
    ///
    /// # Errors
    /// A grammar that is wrong, too large or that asks for what is not supported, with the reason.
    pub fn compile(&self, grammar: &Grammar, opening: Opening) -> Result<ConstraintSource> {
        let asked = format!("{grammar:?} {opening:?}");
        self.kept(asked, || self.compile_here(grammar, opening))
    }

    fn compile_here(&self, grammar: &Grammar, opening: Opening) -> Result<ConstraintSource> {
        let mut places = Places::default();
        let (place, inner) = written(grammar, Some(&mut places))?;
        let reader = (!places.is_empty()).then(|| Reader::new(places, opening));
        let Some(before) = self.before(opening, "final") else {
            let inner = TopLevelGrammar::from_grammar(inner);
            return self.constraint(place, inner, reader, End::Whole);
        };
        let outer = GrammarWithLexer::from_lark(format!("start: before @body\n{before}"));
        let mut all = TopLevelGrammar::from_grammar(outer);
        all.grammars.push(named(inner, "body"));
        self.constraint(place, all, reader, End::Whole)
    }

    /// The rule `before` of what may open an answer; none where nothing may. Harmony messages are
    /// on this channel.
    fn before(&self, opening: Opening, channel: &str) -> Option<String> {
        // Behind reasoning, models lay out the answer with a line or two.
        const REST: &str = "BETWEEN: /[ \\n]{0,4}/\nREASONING: /(?s:.*)/\n";
        let inside = |close: &str| match self.special.get(close) {
            Some(id) => format!("inside: REASONING <[{id}]>\n"),
            None => format!("inside[suffix={}]: /(?s:.*)/\n", quoted(close)),
        };
        match opening {
            Opening::Answer => None,
            Opening::Opened { close } => {
                Some(format!("before: inside BETWEEN\n{}{REST}", inside(close)))
            }
            Opening::Offered { open, close } => {
                let open = self.text(open);
                Some(format!("before: ({open} inside BETWEEN)?\n{}{REST}", inside(close)))
            }
            Opening::Harmony => {
                let [channel_mark, message, end, start] =
                    ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"].map(|m| self.text(m));
                Some(format!(
                    "before: analysis* {channel_mark} {} {message}\n\
                     analysis: {channel_mark} (\"analysis\" | \"commentary\") {message} REASONING {end} {start} \"assistant\"\n\
                     REASONING: /(?s:.*)/\n",
                    quoted(channel)
                ))
            }
        }
    }

    /// A text as Lark has it: special tokens by their ids, all else as strings.
    fn text(&self, text: &str) -> String {
        let mut parts = Vec::new();
        let (mut plain, mut at) = (String::new(), 0);
        while let Some(c) = text[at..].chars().next() {
            let close = match c {
                '<' => Some('>'),
                '[' => Some(']'),
                _ => None,
            };
            let ends = close.into_iter().flat_map(|close| text[at..].match_indices(close));
            let special = ends
                .map(|(length, mark)| at + length + mark.len())
                .find_map(|end| Some((*self.special.get(&text[at..end])?, end)));
            match special {
                Some((id, end)) => {
                    if !plain.is_empty() {
                        parts.push(quoted(&std::mem::take(&mut plain)));
                    }
                    parts.push(format!("<[{id}]>"));
                    at = end;
                }
                None => {
                    plain.push(c);
                    at += c.len_utf8();
                }
            }
        }
        if !plain.is_empty() {
            parts.push(quoted(&plain));
        }
        parts.join(" ")
    }

    /// Finds what was asked lately, or has it compiled, by a thread with room for it.
    fn kept(
        &self,
        asked: String,
        compile: impl FnOnce() -> Result<ConstraintSource> + Send,
    ) -> Result<ConstraintSource> {
        let lately = || self.lately.lock().unwrap_or_else(PoisonError::into_inner);
        let found = || {
            let mut lately = lately();
            let at = lately.iter().position(|(other, _)| *other == asked)?;
            lately[at..].rotate_left(1);
            Some(lately[lately.len() - 1].1.clone())
        };
        if let Some(source) = found() {
            return Ok(source);
        }
        let source = with_room(compile)?;
        if asked.len() <= LONGEST_KEPT {
            let mut lately = lately();
            if lately.len() == KEPT {
                lately.remove(0);
            }
            lately.push((asked, source.clone()));
        }
        Ok(source)
    }

    /// Compiles a grammar; each generation gets a matcher of its own.
    fn constraint(
        &self,
        place: &'static str,
        grammar: TopLevelGrammar,
        reader: Option<Reader>,
        end: End,
    ) -> Result<ConstraintSource> {
        let first = limited(place, || -> std::result::Result<Matcher, Reason> {
            let mut matcher = Matcher::new(self.factory.create_parser(grammar));
            matcher.error().map_or(Ok(()), |error| Err(Reason::from(error)))?;
            // What cannot begin is found out before a prompt is computed.
            matcher.compute_mask()?;
            Ok(matcher)
        })?;
        let planner = || caught(|| Planner::new(&first, reader.as_ref(), self.signs.clone())).ok();
        let ending = (end == End::Whole).then(planner).flatten();
        let (first, speller) = (Mutex::new(first), self.speller.clone());
        Ok(ConstraintSource::new(move || {
            let matcher = first.lock().unwrap_or_else(PoisonError::into_inner).deep_clone();
            let lazy = (end == End::Lazy).then(Lazy::default);
            let (reader, ending, speller) = (reader.clone(), ending.clone(), speller.clone());
            let (last, seen) = (None, None);
            let follower = Follower { matcher, reader, ending, lazy, speller, last, seen, place };
            Ok(Box::new(follower) as Box<dyn Constraint>)
        }))
    }
}

/// How texts end whose tokens run out, and where a grammar has text beside it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// They are brought to their end.
    Whole,
    /// They are cut.
    Cut,
    /// They are cut, and what the grammar takes for text of any kind is left as it comes.
    Lazy,
}

/// Follows one text.
struct Follower {
    matcher: Matcher,
    /// Set where items of arrays must differ.
    reader: Option<Reader>,
    /// Unset where a text is cut when its tokens run out.
    ending: Option<Planner>,
    lazy: Option<Lazy>,
    speller: Arc<Speller>,
    /// The token before the present place, of the text's own.
    last: Option<u32>,
    /// The tokens that may come next, once they were looked for.
    seen: Option<Next>,
    place: &'static str,
}

/// The tokens that may come next.
enum Next {
    /// Text of any kind: nothing is masked.
    Any,
    Masked(SimpleVob),
}

impl Follower {
    /// The tokens that may come next, whatever is planned.
    fn next(&mut self) -> Result<&Next> {
        let Follower { matcher, reader, lazy, seen, place, .. } = self;
        let next = match seen.take() {
            Some(next) => next,
            None if lazy.as_mut().is_some_and(|lazy| lazy.is_free(matcher)) => Next::Any,
            None => {
                let mask = limited(place, || may_follow(matcher, reader.as_ref()))?;
                if mask.is_zero() {
                    return Err(no_more(place));
                }
                Next::Masked(mask)
            }
        };
        Ok(seen.insert(next))
    }
}

impl Constraint for Follower {
    fn allow(&mut self, left: usize, allowed: &mut TokenSet) -> Result<()> {
        if let Some(ending) = &mut self.ending
            && let Some(token) = ending.next(&self.matcher, self.reader.as_ref(), left)
        {
            allowed.insert(token);
            return Ok(());
        }
        match self.next()? {
            Next::Any => allowed.insert_all(),
            Next::Masked(mask) => allowed.insert_bits(mask.as_slice()),
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<u32> {
        self.seen = None;
        let Follower { matcher, reader, ending, lazy, last, place, .. } = self;
        let environment = limited(place, || matcher.tok_env())?;
        let trie = environment.tok_trie();
        let token = match reader {
            Some(reader) => reader.fit(trie, token).ok_or_else(|| no_more(place))?,
            None => token,
        };
        let token = match lazy {
            Some(lazy) => match lazy.fit(matcher, token) {
                Some(token) => token,
                None => return Ok(token),
            },
            None => ending
                .as_mut()
                .map_or(token, |ending| ending.accept(matcher, reader.as_ref(), token)),
        };
        limited(place, || matcher.consume_token(token))?;
        if let Some(reader) = reader {
            reader.read(trie, token);
        }
        *last = Some(token);
        Ok(token)
    }

    fn forced(&mut self, most: usize) -> Result<Vec<u32>> {
        if self.ending.as_ref().is_some_and(Planner::is_watching) {
            return Ok(Vec::new());
        }
        self.next()?;
        let Some(Next::Masked(mask)) = &self.seen else { return Ok(Vec::new()) };
        let mut tokens = self.speller.look(&self.matcher, mask, self.last);
        tokens.truncate(most);
        let mut there = self.matcher.clone();
        if tokens.is_empty() || there.consume_tokens(&tokens).is_err() {
            return Ok(Vec::new());
        }
        if let Some(reader) = &self.reader {
            let environment = limited(self.place, || there.tok_env())?;
            let mut behind = reader.clone();
            if !tokens.iter().all(|token| behind.read(environment.tok_trie(), *token)) {
                return Ok(Vec::new());
            }
            self.reader = Some(behind);
        }
        (self.matcher, self.last, self.seen) = (there, tokens.last().copied(), None);
        self.ending.iter_mut().for_each(|ending| ending.pass(&tokens));
        Ok(tokens)
    }

    fn is_closing(&self) -> bool {
        self.ending.as_ref().is_some_and(Planner::is_closing)
    }
}

/// The tokens that may come next, without those that lead to an item that is there already.
fn may_follow(
    matcher: &mut Matcher,
    reader: Option<&Reader>,
) -> std::result::Result<SimpleVob, String> {
    let mut mask = matcher.compute_mask_or_eos()?;
    let Some(reader) = reader else { return Ok(mask) };
    let environment = matcher.tok_env()?;
    let trie = environment.tok_trie();
    reader.exclude(trie, &mut mask);
    for token in reader.repeating(trie) {
        if mask.is_allowed(token) && !differs_behind(matcher, reader, trie, token) {
            mask.disallow_token(token);
        }
    }
    Ok(mask)
}

/// Whether anything may come behind a token but what would end an item that is there already.
fn differs_behind(matcher: &Matcher, reader: &Reader, trie: &TokTrie, token: u32) -> bool {
    let mut open = vec![(matcher.clone(), reader.clone(), token)];
    // Where it may still become one of them, the bytes that lead there are followed.
    for _ in 0..BEHIND {
        let Some((mut there, mut behind, token)) = open.pop() else { return false };
        if there.consume_token(token).is_err() || !behind.read(trie, token) {
            continue;
        }
        let Ok(mut mask) = there.compute_mask_or_eos() else { continue };
        behind.exclude(trie, &mut mask);
        if mask.is_zero() {
            continue;
        }
        let ways: Vec<u32> = match behind.may_repeat() {
            true => {
                behind.repeating(trie).into_iter().filter(|token| mask.is_allowed(*token)).collect()
            }
            false => return true,
        };
        let leads_away = mask.iter().any(|token| !ways.contains(&token));
        if leads_away {
            return true;
        }
        let single = ways.into_iter().filter(|token| trie.token_len(*token) == 1);
        open.extend(single.map(|token| (there.clone(), behind.clone(), token)));
    }
    // It was not found out.
    true
}

/// An array has all the different items that there are, and must have one more.
fn no_more(place: &str) -> Error {
    let expected = "items that may differ from each other (uniqueItems)";
    Error::new(place, expected, "an array that has all there are, and must have more")
}

/// A grammar as llguidance reads it, with its place in errors. Where there are `places` to note
/// them, items that must differ are left to a [`Reader`].
fn written(
    grammar: &Grammar,
    places: Option<&mut Places>,
) -> Result<(&'static str, GrammarWithLexer)> {
    let written = match grammar {
        Grammar::Json => ("schema", schema(&json!({ "type": "object" }), places)?),
        Grammar::Schema(value) => ("schema", schema(value, places)?),
        Grammar::Regex(text) => {
            short("regex", text.len())?;
            let all = together(text);
            let grammar = match &all[..] {
                [one] => GrammarWithLexer::from_regex(one),
                all => {
                    let parts = all.iter().map(|one| slashed(&llguidance::regex_to_lark(one, "")));
                    let parts: Vec<String> = parts.collect();
                    let whole = format!("start: WHOLE\nWHOLE: {}\n", parts.join(" & "));
                    GrammarWithLexer::from_lark(whole)
                }
            };
            ("regex", grammar)
        }
        Grammar::Lark(text) => {
            short("grammar", text.len())?;
            few_intersections(text)?;
            ("grammar", GrammarWithLexer::from_lark(text.clone()))
        }
        Grammar::Gbnf(text) => {
            short("grammar", text.len())?;
            ("grammar", GrammarWithLexer::from_lark(gbnf::to_lark(text)?))
        }
    };
    Ok(written)
}

/// Regular expressions without looks, all of which match the texts that this one matches; one that
/// has no such form stays.
fn together(text: &str) -> Vec<String> {
    let all = language::without_looks(text, language::Kind::Whole, &language::Budget::new());
    all.filter(|all| all.len() <= MOST_TOGETHER).unwrap_or_else(|| vec![text.to_string()])
}

/// An expression between slashes. Nothing between them would be a comment.
fn slashed(text: &str) -> String {
    if text.is_empty() { "/(?:)/".to_string() } else { format!("/{text}/") }
}

/// Refuses a grammar in Lark's syntax whose terminals have too many intersections, for the reason
/// that patterns of schemas are bounded for, and schemas within it that may have.
fn few_intersections(text: &str) -> Result<()> {
    const MOST: usize = MOST_TOGETHER;
    let (mut found, mut inside, mut escaped) = (0, None, false);
    let mut before = '\n';
    for c in text.chars() {
        match inside {
            // A comment lasts to the end of its line, and what else is not closed does as well.
            Some(_) if c == '\n' => inside = None,
            Some('#') => {}
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some('/') if c == '/' && before == '/' => inside = Some('#'),
            Some(mark) if c == mark => inside = None,
            Some(_) => {}
            None if matches!(c, '"' | '/' | '#') => (inside, escaped) = (Some(c), false),
            None => found += usize::from(c == '&'),
        }
        before = c;
    }
    if text.contains("\"allOf\"") || text.contains("\"$ref\"") {
        found += text.matches("\"pattern\"").count();
    }
    if found <= MOST {
        return Ok(());
    }
    let expected = format!("at most {MOST} intersections, and patterns of schemas");
    Err(Error::new("grammar", expected, found).of(ErrorKind::Unsupported))
}

/// A grammar that another one refers to as `@body`.
fn body(grammar: &Grammar) -> Result<GrammarWithLexer> {
    Ok(named(written(grammar, None)?.1, "body"))
}

fn named(grammar: GrammarWithLexer, name: &str) -> GrammarWithLexer {
    GrammarWithLexer { name: Some(name.to_string()), ..grammar }
}

/// A JSON schema with the layout in which Python writes JSON, so that no model gets lost in white
/// space.
fn schema(value: &Value, places: Option<&mut Places>) -> Result<GrammarWithLexer> {
    let value = laid_out(value, places)?;
    let length = value.to_string().len();
    if length > LONGEST_SCHEMA {
        return Err(Error::new("schema", format!("at most {LONGEST_SCHEMA} bytes"), length));
    }
    Ok(GrammarWithLexer::from_json_schema(value))
}

/// A schema that says how JSON is laid out.
fn laid_out(schema: &Value, places: Option<&mut Places>) -> Result<Value> {
    let mut fields = match schema {
        Value::Object(fields) => fields.clone(),
        Value::Bool(true) => serde_json::Map::new(),
        _ => return Err(Error::new("schema", "a JSON schema, an object", kind(schema))),
    };
    let layout =
        json!({ "item_separator": ", ", "key_separator": ": ", "whitespace_flexible": false });
    let values = values(schema);
    if values > MOST_VALUES {
        return Err(Error::new("schema", format!("at most {MOST_VALUES} values"), values));
    }
    if let Value::Object(plain) = schema::plain(&Value::Object(fields.clone()), places)? {
        fields = plain;
    }
    fields.insert("x-guidance".to_string(), layout);
    Ok(Value::Object(fields))
}

/// How many values a value is made of.
fn values(value: &Value) -> usize {
    let named = |(key, value): (&String, &Value)| match value {
        Value::Array(list) if key == "enum" => {
            let plain = list.iter().filter(|one| !one.is_array() && !one.is_object()).count();
            let others = list.iter().filter(|one| one.is_array() || one.is_object());
            1 + plain.div_ceil(LISTED) + others.map(values).sum::<usize>()
        }
        value => values(value),
    };
    1 + match value {
        Value::Array(list) => list.iter().map(values).sum(),
        Value::Object(fields) => fields.iter().map(named).sum(),
        _ => 0,
    }
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "false",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn short(place: &str, length: usize) -> Result<()> {
    if length > LONGEST {
        return Err(Error::new(place, format!("at most {LONGEST} bytes"), length));
    }
    Ok(())
}

/// A string as Lark writes it.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// Runs what follows a schema or a grammar as deep as its references and rules lead, on a thread
/// whose stack has room for the deepest that its length allows: a stack that overflows ends the
/// process.
fn with_room<T: Send>(run: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().name("delft-grammar".to_string());
        let thread = builder.stack_size(STACK).spawn_scoped(scope, run);
        let thread = thread.map_err(|e| Error::io("a thread to read a grammar", e))?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Why a grammar cannot be followed.
type Reason = Box<dyn std::error::Error + Send + Sync>;

/// Runs what a grammar takes; its error and its panic are the request's.
fn limited<T, E: std::fmt::Display>(
    place: &str,
    run: impl FnOnce() -> std::result::Result<T, E>,
) -> Result<T> {
    let told = |reason: String| {
        let mut lines = reason.lines().map(str::trim).filter(|line| !line.is_empty());
        let first = lines.next().unwrap_or_default();
        // An expression stands below, and what is wrong with it behind a line that points there.
        let rest: Vec<&str> = match first.ends_with(':') {
            true => lines.filter(|line| !line.trim_matches('^').is_empty()).collect(),
            false => Vec::new(),
        };
        let told = [&[first], &rest[..]].concat().join(" ");
        if let Some((_, plain)) = REASONS.iter().find(|(part, _)| told.contains(part)) {
            return (*plain).to_string();
        }
        told.chars().take(LONGEST_REASON).collect::<String>()
    };
    match caught(run) {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(reason)) => {
            let error = Error::new(place, "one that can be followed", told(reason.to_string()));
            Err(error.of(ErrorKind::Unsupported))
        }
        Err(words) => {
            Err(Error::new(place, "one that can be followed", format!("a panic: {}", told(words))))
        }
    }
}

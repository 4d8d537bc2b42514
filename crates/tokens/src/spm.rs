//! SentencePiece's BPE: the adjacent pair whose union has the best score merges first, ties
//! leftmost.
//!
//! Unlike merges by rank ([`tokenizers::models::bpe`]), which pair formed a token does not matter,
//! only the token. After Kudo and Richardson, "SentencePiece" (2018), and as ggml's `llama`
//! vocabularies are read. Characters that are no token become byte tokens, or the unknown token
//! where the vocabulary has none.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, HashMap};

/// A vocabulary with scores.
#[derive(Debug, Default)]
pub struct Spm {
    /// Tokens that merging can form: normal and unused ones.
    pieces: HashMap<Box<str>, Piece>,
    /// Token of each byte.
    bytes: HashMap<u8, u32>,
    unknown: Option<u32>,
    /// Length in bytes of the longest piece.
    longest: usize,
}

#[derive(Debug, Clone, Copy)]
struct Piece {
    id: u32,
    score: f32,
    /// Takes part in merges, but is not output: it is taken apart again.
    unused: bool,
}

impl Spm {
    /// An empty vocabulary; `unknown` stands for what can be written no other way.
    pub fn new(unknown: Option<u32>) -> Self {
        Spm { unknown, ..Spm::default() }
    }

    /// Adds a token that merging can form. The first of two equal texts stays.
    pub fn add_piece(&mut self, text: &str, id: u32, score: f32, unused: bool) {
        self.longest = self.longest.max(text.len());
        self.pieces.entry(text.into()).or_insert(Piece { id, score, unused });
    }

    /// Adds the token of a byte.
    pub fn add_byte(&mut self, byte: u8, id: u32) {
        self.bytes.entry(byte).or_insert(id);
    }

    /// Ids of `text`, in which spaces are already U+2581. Time is `n log n`.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        let mut symbols: Vec<Symbol> = Vec::new();
        for (start, c) in text.char_indices() {
            let index = symbols.len();
            symbols.push(Symbol {
                start,
                end: start + c.len_utf8(),
                previous: index.wrapping_sub(1),
                next: index + 1,
                parts: None,
            });
        }
        // A merged symbol is appended, so the parts of an unused piece can still be found.
        let mut order: Vec<usize> = (0..symbols.len()).collect();
        let count = symbols.len();
        let mut queue = BinaryHeap::new();
        for right in 1..count {
            self.consider(text, &symbols, &order, right - 1, right, &mut queue);
        }
        // `order[slot]` is the symbol that now starts at the slot of its leftmost character.
        while let Some(pair) = queue.pop() {
            let (Some(&left), Some(&right)) = (order.get(pair.left), order.get(pair.right)) else {
                continue;
            };
            if left != pair.symbols.0 || right != pair.symbols.1 {
                continue;
            }
            let merged = Symbol {
                start: symbols[left].start,
                end: symbols[right].end,
                previous: symbols[left].previous,
                next: symbols[right].next,
                parts: Some((left, right)),
            };
            let (previous, next) = (merged.previous, merged.next);
            order[pair.left] = symbols.len();
            order[pair.right] = GONE;
            symbols.push(merged);
            if next < count {
                let symbol = order[next];
                symbols[symbol].previous = pair.left;
                self.consider(text, &symbols, &order, pair.left, next, &mut queue);
            }
            if previous < count {
                let symbol = order[previous];
                symbols[symbol].next = pair.left;
                self.consider(text, &symbols, &order, previous, pair.left, &mut queue);
            }
        }
        let mut slot = 0;
        while slot < count {
            let symbol = order[slot];
            self.emit(text, &symbols, symbol, ids);
            slot = symbols[symbol].next;
        }
    }

    fn consider(
        &self,
        text: &str,
        symbols: &[Symbol],
        order: &[usize],
        left: usize,
        right: usize,
        queue: &mut BinaryHeap<Pair>,
    ) {
        let (a, b) = (order[left], order[right]);
        let (start, end) = (symbols[a].start, symbols[b].end);
        if end - start > self.longest {
            return;
        }
        if let Some(piece) = self.pieces.get(&text[start..end]) {
            queue.push(Pair { score: piece.score, left, right, symbols: (a, b) });
        }
    }

    fn emit(&self, text: &str, symbols: &[Symbol], symbol: usize, ids: &mut Vec<u32>) {
        // A stack, not recursion: an unused piece of an untrusted vocabulary may be as deep as it
        // is long.
        let mut stack = vec![symbol];
        while let Some(index) = stack.pop() {
            let Symbol { start, end, parts, .. } = symbols[index];
            match (self.pieces.get(&text[start..end]), parts) {
                (Some(piece), None) => ids.push(piece.id),
                (Some(piece), _) if !piece.unused => ids.push(piece.id),
                (_, Some((left, right))) => stack.extend([right, left]),
                (None, None) => self.emit_bytes(&text.as_bytes()[start..end], ids),
            }
        }
    }

    fn emit_bytes(&self, bytes: &[u8], ids: &mut Vec<u32>) {
        if bytes.iter().all(|b| self.bytes.contains_key(b)) {
            ids.extend(bytes.iter().filter_map(|b| self.bytes.get(b)));
        } else if ids.last().copied() != self.unknown || self.unknown.is_none() {
            // A run of unknown characters is one unknown token.
            ids.extend(self.unknown);
        }
    }
}

const GONE: usize = usize::MAX;

/// A stretch of text in a doubly linked list whose links are slots (places in `order`).
#[derive(Debug, Clone, Copy)]
struct Symbol {
    start: usize,
    end: usize,
    previous: usize,
    next: usize,
    /// The two symbols it was merged from.
    parts: Option<(usize, usize)>,
}

/// Two neighbours that could merge: slots, and the symbols that stood there when the pair was
/// found.
#[derive(Debug)]
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    symbols: (usize, usize),
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

#[cfg(test)]
mod tests {
    use super::*;

    fn ids(spm: &Spm, text: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        spm.encode(text, &mut ids);
        ids
    }

    fn vocabulary(pieces: &[(&str, f32, bool)]) -> Spm {
        let mut spm = Spm::new(Some(99));
        for (id, (text, score, unused)) in pieces.iter().enumerate() {
            spm.add_piece(text, id as u32, *score, *unused);
        }
        spm
    }

    #[test]
    fn best_score_first_and_ties_leftmost() {
        let spm = vocabulary(&[
            ("a", -9., false),
            ("b", -9., false),
            ("ab", -2., false),
            ("ba", -1., false),
        ]);
        assert_eq!(ids(&spm, "abab"), [0, 3, 1]);
        let spm = vocabulary(&[
            ("a", -9., false),
            ("b", -9., false),
            ("ab", -1., false),
            ("ba", -1., false),
        ]);
        assert_eq!(ids(&spm, "abab"), [2, 2]);
        assert!(ids(&spm, "").is_empty());
    }

    #[test]
    fn an_unused_piece_is_taken_apart() {
        let spm = vocabulary(&[
            ("a", -9., false),
            ("b", -9., false),
            ("ab", -1., true),
            ("abb", -2., false),
        ]);
        assert_eq!(ids(&spm, "ab"), [0, 1]);
        assert_eq!(ids(&spm, "abb"), [3]);
    }

    #[test]
    fn unknown_characters_fall_back() {
        let mut spm = vocabulary(&[("a", -1., false)]);
        assert_eq!(ids(&spm, "a\u{e9}\u{e8}a"), [0, 99, 0]);
        for byte in 0..=255u8 {
            spm.add_byte(byte, 1000 + u32::from(byte));
        }
        assert_eq!(ids(&spm, "a\u{e9}"), [0, 1000 + 0xc3, 1000 + 0xa9]);
    }
}

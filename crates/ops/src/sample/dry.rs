//! DRY: how far the end of a sequence is repeated from earlier, and the penalty on what came next
//! there.

use super::Dry;

/// Scratch: kept, so that a sequence of a length seen before allocates nothing.
#[derive(Debug, Clone, Default)]
pub(super) struct Repeats {
    /// The window from its end to its beginning.
    reversed: Vec<u32>,
    /// For each position of it, how many tokens from there on are those from its start on.
    common: Vec<usize>,
    /// For each token of the vocabulary the longest repetition that it would go on with; zero
    /// between calls.
    longest: Vec<usize>,
}

impl Repeats {
    /// Subtracts `multiplier * base^(length - allowed_length)` from the logit of each token that
    /// once followed the `length >= allowed_length` tokens with which `history` ends.
    pub(super) fn penalise(&mut self, logits: &mut [f32], history: &[u32], dry: &Dry) {
        let window = &history[history.len().saturating_sub(dry.last_n)..];
        let breaks = |token: &u32| dry.breakers.binary_search(token).is_ok();
        self.reversed.clear();
        self.reversed.extend(window.iter().rev());
        let most = self.reversed.iter().position(breaks).unwrap_or(self.reversed.len());
        if most == 0 || most < dry.allowed_length {
            return;
        }
        prefixes(&self.reversed, &mut self.common);
        if self.longest.len() < logits.len() {
            self.longest.resize(logits.len(), 0);
        }
        let found = || self.reversed.iter().zip(self.common.iter().skip(1));
        for (next, &common) in found().filter(|(next, _)| !breaks(next)) {
            if let Some(longest) = self.longest.get_mut(*next as usize) {
                *longest = common.min(most).max(*longest);
            }
        }
        for (next, _) in found() {
            let (Some(longest), Some(logit)) =
                (self.longest.get_mut(*next as usize), logits.get_mut(*next as usize))
            else {
                continue;
            };
            // Taking it leaves zero: a token that comes again is not penalised again.
            let length = std::mem::take(longest);
            if length > 0 && length >= dry.allowed_length {
                *logit -= penalty(dry, length - dry.allowed_length);
            }
        }
    }
}

/// `multiplier * base^exponent`, by multiplications alone, which every machine does alike; at most
/// the greatest f32.
fn penalty(dry: &Dry, exponent: usize) -> f32 {
    let most = f64::from(f32::MAX);
    let mut penalty = f64::from(dry.multiplier);
    for _ in 0..exponent {
        if penalty >= most || dry.base == 1.0 {
            break;
        }
        penalty *= f64::from(dry.base);
    }
    penalty.min(most) as f32
}

/// For each position of `text`, the length of what begins there and at the start alike (the Z
/// function; D. Gusfield, "Algorithms on Strings, Trees and Sequences", 1997, section 1.4): in
/// linear time.
fn prefixes(text: &[u32], common: &mut Vec<usize>) {
    common.clear();
    common.resize(text.len(), 0);
    // The stretch that reaches furthest among those known to be alike.
    let (mut left, mut right) = (0, 0);
    for i in 1..text.len() {
        let mut length = if i < right { common[i - left].min(right - i) } else { 0 };
        while text.get(i + length).is_some_and(|&token| token == text[length]) {
            length += 1;
        }
        if i + length > right {
            (left, right) = (i, i + length);
        }
        common[i] = length;
    }
}

//! Several texts computed in steps that are filled with rows of as many as there is room for.

use crate::load::{OUTPUT_ROWS, Shared};
use crate::session::Session;
use formats::Result;
use models::Ending;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::PoisonError;

/// A text to compute: all of its tokens, of which the session may hold the first ones already.
pub(crate) struct Text {
    /// Its number among the texts of the work.
    pub(crate) index: usize,
    pub(crate) tokens: Vec<u32>,
    /// The tokens whose results are wanted.
    pub(crate) wanted: Range<usize>,
    pub(crate) session: Session,
}

impl Text {
    fn rest(&self) -> usize {
        self.tokens.len() - self.session.tokens().len()
    }
}

/// A source of texts to compute, and the receiver of their results.
pub(crate) trait Work {
    /// The next text; `None` if there are no more. It is asked for when there is room.
    fn next(&mut self) -> Result<Option<Text>>;

    /// Receives the Program's first result at a wanted token: `index` is the text's, `token` its
    /// index in the text. The rows of a text come in order.
    fn row(&mut self, index: usize, token: usize, row: &[f32]);

    /// Receives a text that is done; a text that it returns takes its place.
    fn done(&mut self, text: Text) -> Result<Option<Text>>;
}

/// Computes texts, as many at a time as the engine was loaded for. One caller at a time has its
/// turn: several together would want more of the cache than there is.
///
/// # Errors
/// Errors of the steps and of the work.
pub(crate) fn compute(shared: &Shared, work: &mut dyn Work) -> Result<()> {
    shared.ready()?;
    let _inside = shared.enter()?;
    let _turn = shared.together.lock().unwrap_or_else(PoisonError::into_inner);
    let chunk = shared.options.chunk();
    let most = shared.options.sessions.clamp(1, chunk);
    let outputs = match shared.options.ending {
        Ending::Logits => OUTPUT_ROWS.min(chunk),
        Ending::Hidden => chunk,
    };
    let mut under_way: VecDeque<Text> = VecDeque::new();
    loop {
        while under_way.len() < most
            && under_way.iter().map(Text::rest).sum::<usize>() < chunk
            && let Some(text) = work.next()?
        {
            under_way.push_back(text);
        }
        if under_way.is_empty() {
            return Ok(());
        }
        let (mut rows, mut wanted_rows) = (chunk, outputs);
        let (mut parts, mut shown) = (Vec::new(), Vec::new());
        for Text { index, tokens, wanted, session } in &mut under_way {
            let start = session.tokens().len();
            let mut end = tokens.len().min(start + rows);
            let first = wanted.start.clamp(start, end);
            let mut last = wanted.end.clamp(first, end);
            if last - first > wanted_rows {
                // The tokens behind these wait for another step.
                last = first + wanted_rows;
                end = last;
            }
            rows -= end - start;
            wanted_rows -= last - first;
            if end > start {
                shown.extend((first..last).map(|token| (*index, token)));
                parts.push((session, &tokens[start..end], first - start..last - start));
            }
        }
        let mut shown = shown.into_iter();
        Session::prompts_together(&mut parts, &mut |row| {
            if let Some((index, token)) = shown.next() {
                work.row(index, token, row);
            }
        })?;
        for _ in 0..under_way.len() {
            let Some(text) = under_way.pop_front() else { break };
            under_way.extend(if text.rest() == 0 { work.done(text)? } else { Some(text) });
        }
    }
}

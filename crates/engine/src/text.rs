//! From tokens to text: a token's text may be incomplete, and may be the beginning of a stop
//! string.

use crate::generate::GenerateOptions;
use crate::load::Shared;
use crate::reasoning;
use crate::stop::StopStrings;
use tokens::Stream;

/// The text of one generation, as far as it may be shown.
pub(crate) struct Text {
    stream: Option<Stream>,
    stops: StopStrings,
}

impl Text {
    pub(crate) fn new(shared: &Shared, options: &GenerateOptions) -> Text {
        let stream = |tokenizer| reasoning::stream(tokenizer, &options.show_special);
        let stream = shared.tokenizer.as_deref().map(stream);
        Text { stream, stops: StopStrings::new(&options.stop) }
    }

    /// Adds a token; the text that became complete with it, and the stop string that was met, which
    /// ends the text.
    pub(crate) fn push(&mut self, token: u32) -> (String, Option<String>) {
        let piece = self.stream.as_mut().and_then(|stream| stream.push(token)).unwrap_or_default();
        self.stops.push(&piece)
    }

    /// Ends the text and returns what was held back of it.
    pub(crate) fn end(&mut self) -> String {
        let rest = self.stream.as_mut().and_then(Stream::flush).unwrap_or_default();
        let (shown, met) = self.stops.push(&rest);
        if met.is_some() { shown } else { shown + &self.stops.flush() }
    }
}

//! Stop strings: text is held back while it could still become one.

/// Watches generated text for any of several strings.
#[derive(Debug)]
pub(crate) struct StopStrings {
    stops: Vec<String>,
    held: String,
}

impl StopStrings {
    pub(crate) fn new(stops: &[String]) -> Self {
        StopStrings {
            stops: stops.iter().filter(|s| !s.is_empty()).cloned().collect(),
            held: String::new(),
        }
    }

    /// Adds text; returns what is safe to show, and the stop string that was met (it and what
    /// follows are dropped).
    pub(crate) fn push(&mut self, text: &str) -> (String, Option<String>) {
        self.held.push_str(text);
        let met = self.stops.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        if let Some((at, stop)) = met.min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), Some(stop.clone()));
        }
        let shown = self.held.len()
            - self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(shown);
        (std::mem::replace(&mut self.held, rest), None)
    }

    /// Ends the text and returns what was held back of it.
    pub(crate) fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that begins `stop`.
pub(crate) fn overlap(text: &str, stop: &str) -> usize {
    (1..stop.len())
        .rev()
        .find(|&i| stop.is_char_boundary(i) && text.ends_with(&stop[..i]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_back_only_what_may_become_a_stop() {
        let mut stops = StopStrings::new(&["<end>".into(), "é!".into(), String::new()]);
        assert_eq!(stops.push("one <e"), ("one ".into(), None));
        assert_eq!(stops.push("lse é"), ("<else ".into(), None));
        assert_eq!(stops.push("."), ("é.".into(), None));
        assert_eq!(stops.push("<"), (String::new(), None));
        assert_eq!(stops.push("end> tail"), (String::new(), Some("<end>".into())));
        assert_eq!(stops.flush(), "");
    }
}

//! A line at a terminal for work that shows nothing itself: how far it is, and for how long. Wiped
//! when it is over.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;

use crate::progress::style;
use crate::terminal::stderr_is_terminal;

/// Work that ends sooner shows no line.
const PATIENCE: Duration = Duration::from_millis(500);

/// The line; `None` where stderr is not watched.
pub(crate) struct Waiting {
    what: &'static str,
    since: Instant,
    bar: Option<ProgressBar>,
    watched: bool,
}

impl Waiting {
    /// A line that begins with this word, such as `reading`.
    pub(crate) fn begin(what: &'static str) -> Waiting {
        Waiting { what, since: Instant::now(), bar: None, watched: stderr_is_terminal() }
    }

    /// Shows that `done` tokens of `all` are done; how many there are is not always known.
    pub(crate) fn at(&mut self, done: usize, all: Option<usize>) {
        if !self.watched || self.since.elapsed() < PATIENCE {
            return;
        }
        let what = self.what;
        let bar = self.bar.get_or_insert_with(|| {
            let template = match all {
                Some(_) => "{msg} [{bar:30}] {percent}% of {len} tokens, {eta} left",
                None => "{msg}: {pos} tokens",
            };
            let bar = ProgressBar::new(0).with_message(what).with_elapsed(self.since.elapsed());
            bar.set_style(style(template));
            bar
        });
        if let Some(all) = all {
            bar.set_length(all as u64);
        }
        bar.set_position(done as u64);
    }

    /// Wipes the line.
    pub(crate) fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.end();
    }
}

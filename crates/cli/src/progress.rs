//! Progress of downloads: one bar over all files on a terminal, a line per file elsewhere.

use std::cell::{Cell, RefCell};
use std::time::Instant;

use delft::hub::PullProgress;
use indicatif::{ProgressBar, ProgressStyle};

use crate::terminal::{aside, bytes, note, stderr_is_terminal};

/// A bar's style; a template that does not parse gives the plain bar.
pub(crate) fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}

/// Shows downloads on stderr.
pub(crate) struct Downloads {
    terminal: bool,
    tally: RefCell<Tally>,
    bar: RefCell<Option<ProgressBar>>,
    /// When it began, and the bytes that were there already.
    began: Cell<(Instant, u64)>,
}

/// How much of all files is here.
#[derive(Debug, Default, PartialEq, Eq)]
struct Tally {
    files: usize,
    /// Files that have begun.
    begun: usize,
    /// Bytes of finished files.
    finished: u64,
    /// Bytes of the file that is arriving.
    current: u64,
    /// Bytes that earlier downloads left of files that have not begun.
    waiting: u64,
}

impl Tally {
    fn start(&mut self, have: u64) {
        self.begun += 1;
        self.waiting = self.waiting.saturating_sub(have);
        self.current = have;
    }

    fn done(&mut self) {
        self.finished += std::mem::take(&mut self.current);
    }

    fn bytes(&self) -> u64 {
        self.finished + self.current + self.waiting
    }
}

impl Downloads {
    pub(crate) fn new() -> Self {
        Downloads {
            terminal: stderr_is_terminal(),
            tally: RefCell::default(),
            bar: RefCell::new(None),
            began: Cell::new((Instant::now(), 0)),
        }
    }

    fn show(&self) {
        if let Some(bar) = &*self.bar.borrow() {
            bar.set_position(self.tally.borrow().bytes());
        }
    }
}

impl PullProgress for Downloads {
    fn begin(&self, files: usize, size: Option<u64>, have: u64) {
        *self.tally.borrow_mut() = Tally { files, waiting: have, ..Tally::default() };
        if self.terminal {
            let bar = ProgressBar::new(size.unwrap_or_default()).with_position(have);
            bar.set_style(style(match size {
                Some(_) => "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
                None => "{msg} {bytes} {bytes_per_sec}",
            }));
            // The bytes that were there already are no part of the speed: they are counted, then
            // the clock begins.
            bar.tick();
            bar.reset_eta();
            *self.bar.borrow_mut() = Some(bar);
            self.began.set((Instant::now(), have));
        } else if files > 1 {
            let size = size.map_or(String::new(), |size| format!(", {}", bytes(size)));
            note(format_args!("{files} files{size}"));
        }
    }

    fn start(&self, file: &str, size: Option<u64>, have: u64) {
        self.tally.borrow_mut().start(have);
        if let Some(bar) = &*self.bar.borrow() {
            let Tally { files, begun, .. } = *self.tally.borrow();
            let place = if files > 1 { format!(" ({begun} of {files})") } else { String::new() };
            bar.set_message(format!("{file}{place}"));
        } else if size != Some(have) {
            let resumed =
                if have > 0 { format!(", resumed at {}", bytes(have)) } else { String::new() };
            let size = size.map_or("size unknown".to_string(), bytes);
            note(format_args!("{file}: {size}{resumed}"));
        }
        self.show();
    }

    fn at(&self, _: &str, have: u64) {
        self.tally.borrow_mut().current = have;
        self.show();
    }

    fn done(&self, file: &str) {
        self.tally.borrow_mut().done();
        let Tally { files, begun, finished, .. } = *self.tally.borrow();
        if begun == files
            && let Some(bar) = self.bar.take()
        {
            // The bar's own average would count what was there already.
            bar.finish_and_clear();
            let (since, had) = self.began.get();
            let (fetched, seconds) = (finished.saturating_sub(had), since.elapsed().as_secs_f64());
            let rate = bytes((fetched as f64 / seconds.max(1e-3)) as u64);
            aside(format_args!("fetched {} in {seconds:.1} s, {rate}/s", bytes(fetched)));
        } else if self.terminal {
            self.show();
        } else {
            aside(format_args!("{file}: done"));
        }
    }

    fn note(&self, text: &str) {
        match &*self.bar.borrow() {
            Some(bar) => bar.suspend(|| note(text)),
            None => note(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_counts_every_byte_once() {
        let mut tally = Tally { files: 2, waiting: 300, ..Tally::default() };
        let mut seen = vec![tally.bytes()];
        tally.start(100);
        seen.push(tally.bytes());
        tally.current = 400;
        seen.push(tally.bytes());
        tally.done();
        seen.push(tally.bytes());
        tally.start(200);
        // It did not match, and begins anew.
        tally.current = 0;
        seen.push(tally.bytes());
        tally.current = 500;
        tally.done();
        seen.push(tally.bytes());
        assert_eq!(seen, [300, 300, 600, 600, 400, 900]);
        assert_eq!((tally.begun, tally.files), (2, 2));
    }
}

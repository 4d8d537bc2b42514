//! Progress bars on a terminal, a line per file elsewhere.

use std::cell::RefCell;

use delft::hub::Progress;
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
    bar: RefCell<Option<ProgressBar>>,
}

impl Downloads {
    pub(crate) fn new() -> Self {
        Downloads { terminal: stderr_is_terminal(), bar: RefCell::new(None) }
    }
}

impl Progress for Downloads {
    fn start(&self, file: &str, size: Option<u64>, have: u64) {
        if self.terminal {
            let bar = ProgressBar::new(size.unwrap_or(have))
                .with_message(file.to_string())
                .with_position(have);
            bar.set_style(style("{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}"));
            // The bytes that were there already are no part of the speed.
            bar.reset_eta();
            *self.bar.borrow_mut() = Some(bar);
        } else if size != Some(have) {
            let resumed =
                if have > 0 { format!(", resumed at {}", bytes(have)) } else { String::new() };
            note(format_args!(
                "{file}: {}{resumed}",
                size.map_or("size unknown".to_string(), bytes)
            ));
        }
    }

    fn at(&self, _: &str, have: u64) {
        if let Some(bar) = &*self.bar.borrow() {
            bar.set_position(have);
        }
    }

    fn done(&self, file: &str) {
        match self.bar.borrow_mut().take() {
            Some(bar) => bar.finish(),
            None => aside(format_args!("{file}: done")),
        }
    }

    fn note(&self, text: &str) {
        match &*self.bar.borrow() {
            Some(bar) => bar.suspend(|| note(text)),
            None => note(text),
        }
    }
}

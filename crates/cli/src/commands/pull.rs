//! `delft pull`: from the hub into the cache.

use delft::hub::{self, Progress};

use crate::args::Pull;
use crate::progress::Downloads;
use crate::terminal::{Outcome, print};

pub(crate) fn run(args: &Pull) -> Outcome {
    let downloads = Downloads::new();
    let progress: &dyn Progress = if args.quiet { &() } else { &downloads };
    let model = hub::pull(&args.model, progress)?;
    print(&format!("{}\n", model.location))
}

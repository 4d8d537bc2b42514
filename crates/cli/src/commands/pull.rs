//! `delft pull`: from the hub into the cache.

use delft::hub::{Hub, PullProgress};

use crate::args::Pull;
use crate::fetch;
use crate::progress::Downloads;
use crate::terminal::{Outcome, print};

pub(crate) fn run(args: &Pull) -> Outcome {
    let downloads = Downloads::new();
    let progress: &dyn PullProgress = if args.quiet { &() } else { &downloads };
    let hub = Hub::from_env()?;
    let offer = hub.offer(&args.model, progress)?;
    if !args.force {
        fetch::check(&offer, progress, "--force")?;
    }
    let model = offer.fetch(progress)?;
    print(&format!("{}\n", model.location))
}

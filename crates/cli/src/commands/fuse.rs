//! `delft fuse`: an adapter merged into its model.

use crate::args::Fuse;
use crate::load;
use crate::terminal::{Outcome, aside, harmless};

pub(crate) fn run(args: &Fuse) -> Outcome {
    let model = load::find(&args.model)?;
    let adapter = load::adapter(&args.adapter, args.any_base);
    delft::fuse(model.location.clone(), &adapter, &args.ignore_key, &args.output)?;
    aside(format_args!("wrote {}", harmless(&args.output.display().to_string())));
    Ok(())
}

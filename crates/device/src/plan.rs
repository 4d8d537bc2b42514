//! What a Program will take of a device's memory: told by headers, before anything is allocated,
//! and refused where it is not there.

use formats::{Error, ErrorKind, Hint, Result, Setting};
use program::BLOCK_TOKENS;

use crate::LoadOptions;

/// Bytes of a device's memory that a Program will take, known before any is allocated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Plan {
    /// Whether it is the memory of the machine and not a GPU's own.
    pub host: bool,
    /// Weights, as packed for the device.
    pub weights: usize,
    /// Keys and values of one whole context.
    pub cache: usize,
    /// Activations.
    pub arena: usize,
    /// Everything else: what attention, sampling and products work with, and what the cache takes
    /// twice while it grows.
    pub working: usize,
    /// What this process's buffers take already.
    pub active: usize,
    /// What is left of the device's memory; `None` where it cannot be told.
    pub free: Option<usize>,
}

impl Plan {
    /// What is to be allocated.
    pub fn needed(&self) -> usize {
        let parts = [self.weights, self.cache, self.arena, self.working];
        parts.into_iter().fold(0, usize::saturating_add)
    }

    /// The peak that [`Usage`](crate::Usage) is expected to tell once a whole context has been
    /// used.
    pub fn peak(&self) -> usize {
        self.active.saturating_add(self.needed())
    }

    /// Whether there is as much left. What cannot be told is taken for enough.
    pub fn fits(&self) -> bool {
        self.free.is_none_or(|free| self.needed() <= free)
    }

    /// Why it does not fit `device`, and a context that would, if one is known.
    fn refusal(&self, device: &str, context: Option<usize>) -> Error {
        let expected = format!(
            "{} of its memory (weights {}, cache {}, activations {}, working memory {})",
            size(self.needed()),
            size(self.weights),
            size(self.cache),
            size(self.arena),
            size(self.working)
        );
        let found = format!("{} free", size(self.free.unwrap_or(0)));
        let hint = match context {
            Some(context) => Hint::set(Setting::Context, context).and(" would fit"),
            None if self.host => {
                "a model of fewer bits or parameters, or end other programs".into()
            }
            None => Hint::text("fewer layers on it with ")
                .with(Setting::GpuLayers)
                .and(", a model of fewer bits, or ")
                .with_value(Setting::Place, "cpu"),
        };
        Error::new(device, expected, found).of(ErrorKind::NoMemory).hint(hint)
    }
}

/// In MiB; in GiB what is much.
fn size(bytes: usize) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1e5 { format!("{mib:.1} MiB") } else { format!("{:.1} GiB", mib / 1024.0) }
}

/// Checks that a device's plan for `options` fits; `plan` makes those for others.
///
/// # Errors
/// The plan's figures, with the greatest power of two, if there is one, that would fit as a
/// context.
pub(crate) fn check(
    device: &str,
    options: &LoadOptions,
    planned: &Plan,
    plan: &dyn Fn(&LoadOptions) -> Result<Plan>,
) -> Result<()> {
    if planned.fits() {
        return Ok(());
    }
    let longest = options.context.iter().copied().max().unwrap_or(1);
    let shorter =
        std::iter::successors(Some(longest.next_power_of_two() / 2), |blocks| Some(blocks / 2));
    let fits = shorter.take_while(|blocks| *blocks > 0).find(|most| {
        let context: Vec<usize> = options.context.iter().map(|c| (*c).min(*most)).collect();
        let share = |((all, whole), part): ((&usize, &usize), &usize)| all / whole.max(&1) * part;
        let blocks = options.blocks.iter().zip(&options.context).zip(&context).map(share).collect();
        let options = LoadOptions { blocks, context, ..options.clone() };
        plan(&options).is_ok_and(|plan| plan.fits())
    });
    Err(planned.refusal(device, fits.map(|blocks| blocks * BLOCK_TOKENS)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device with 100 MiB left, where a block takes one and weights ten.
    fn plan(options: &LoadOptions) -> Result<Plan> {
        let (weights, cache) = (10 << 20, options.context.iter().sum::<usize>() << 20);
        Ok(Plan { weights, cache, free: Some(100 << 20), ..Plan::default() })
    }

    #[test]
    fn what_does_not_fit_is_refused_with_a_context_that_would() {
        for (context, hint, why) in [
            (&[90][..], None, "just fits"),
            (&[91], Some("context 16384 would fit"), "one block more: 64 of 256 tokens would do"),
            (&[1 << 20, 3], Some("context 16384 would fit"), "a group with a window keeps its few"),
            (&[1, 95], Some("context 16384 would fit"), "the longest group alone is shortened"),
        ] {
            let (context, blocks) = (context.to_vec(), context.iter().map(|c| 16 * c).collect());
            let options = LoadOptions { context, blocks, ..LoadOptions::default() };
            let found = check("it", &options, &plan(&options).unwrap(), &plan).err();
            let text = found.as_ref().map(ToString::to_string).unwrap_or_default();
            assert_eq!(
                found.and_then(|e| e.hint).map(|hint| hint.to_string()).as_deref(),
                hint,
                "{why}"
            );
            assert!(text.is_empty() || text.contains("found 100.0 MiB free"), "{why}: {text}");
        }
        let (weights, cache) = (101 << 20, usize::MAX);
        let all = Plan { weights, cache, free: Some(100 << 20), ..Plan::default() };
        let never = |_: &LoadOptions| Ok(Plan { weights, ..all });
        for (host, hint) in [(true, "fewer bits"), (false, "device cpu")] {
            let error = check("it", &LoadOptions::default(), &Plan { host, ..all }, &never);
            assert!(error.unwrap_err().to_string().contains(hint));
        }
        let unknown = Plan { free: None, ..all };
        assert!(check("it", &LoadOptions::default(), &unknown, &never).is_ok());
    }
}

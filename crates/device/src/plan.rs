//! The memory plan of a device: computed from headers before anything is allocated, and refused if
//! it exceeds the free memory.

use formats::{Error, ErrorKind, Hint, Result, Setting};
use program::BLOCK_TOKENS;

use crate::ExecutorOptions;

/// Bytes of a device's memory that a Program will take, computed before any is allocated.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Plan {
    /// Whether this is host memory rather than a GPU's own.
    pub host: bool,
    /// Weights, as packed for the device, and the unpacked copies of some.
    pub weights: usize,
    /// Those of `weights` that are unpacked copies, from which prompts are faster. They are kept
    /// only where they take a small part of what is left.
    pub copies: usize,
    /// Keys and values of one full context.
    pub cache: usize,
    /// Bytes by which the cache may grow beyond one full context, for further sequences and cached
    /// prefixes. Loading does not need them: see [`Plan::most`].
    pub pool: usize,
    /// Activations.
    pub arena: usize,
    /// Everything else: scratch of attention, sampling and products, and the second copy of the
    /// cache while it grows.
    pub working: usize,
    /// Memory allocated by this process's buffers already.
    pub active: usize,
    /// Free device memory; `None` if unknown.
    pub free: Option<usize>,
}

impl Plan {
    /// Bytes that loading and one full context take.
    pub fn needed(&self) -> usize {
        let parts = [self.weights, self.cache, self.arena, self.working];
        parts.into_iter().fold(0, usize::saturating_add)
    }

    /// Bytes that are held at most, with a cache that is full.
    pub fn most(&self) -> usize {
        self.needed().saturating_add(self.pool)
    }

    /// The peak of [`Usage`](crate::Usage) to expect once a full context has been used.
    pub fn peak(&self) -> usize {
        self.active.saturating_add(self.needed())
    }

    /// Whether the plan fits into the free memory. Unknown free memory counts as enough.
    pub fn fits(&self) -> bool {
        self.free.is_none_or(|free| self.needed() <= free)
    }

    /// The error for a plan that does not fit `device`; suggests `context` if a shorter one would
    /// fit.
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

/// Formats bytes in MiB, or in GiB where there is a whole one.
fn size(bytes: usize) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1024.0 { format!("{mib:.1} MiB") } else { format!("{:.2} GiB", mib / 1024.0) }
}

/// Checks that the plan for `options` fits. `plan` computes the plan for other options.
///
/// # Errors
/// The plan's figures, and the greatest power-of-two context that would fit, if there is one.
pub(crate) fn check(
    device: &str,
    options: &ExecutorOptions,
    planned: &Plan,
    plan: &dyn Fn(&ExecutorOptions) -> Result<Plan>,
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
        let options = ExecutorOptions { blocks, context, ..options.clone() };
        plan(&options).is_ok_and(|plan| plan.fits())
    });
    Err(planned.refusal(device, fits.map(|blocks| blocks * BLOCK_TOKENS)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device with 100 MiB left, where a block takes one and weights ten.
    fn plan(options: &ExecutorOptions) -> Result<Plan> {
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
            let options = ExecutorOptions { context, blocks, ..ExecutorOptions::default() };
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
        let never = |_: &ExecutorOptions| Ok(Plan { weights, ..all });
        for (host, hint) in [(true, "fewer bits"), (false, "device cpu")] {
            let error = check("it", &ExecutorOptions::default(), &Plan { host, ..all }, &never);
            assert!(error.unwrap_err().to_string().contains(hint));
        }
        let unknown = Plan { free: None, ..all };
        assert!(check("it", &ExecutorOptions::default(), &unknown, &never).is_ok());
    }
}

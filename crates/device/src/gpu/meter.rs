//! Device memory taken by buffers: current and peak bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::Usage;

/// Counts allocated bytes.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    active: AtomicUsize,
    peak: AtomicUsize,
}

/// Bytes that are counted until this is dropped.
#[derive(Debug)]
pub(crate) struct Taken {
    meter: Arc<Meter>,
    bytes: usize,
}

impl Meter {
    /// Counts `bytes` more.
    pub(crate) fn take(self: &Arc<Self>, bytes: usize) -> Taken {
        let active = self.active.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(active, Ordering::Relaxed);
        Taken { meter: Arc::clone(self), bytes }
    }

    /// Counts `bytes` more, unless the sum would exceed `limit`.
    #[cfg(feature = "sim")]
    pub(crate) fn take_within(self: &Arc<Self>, bytes: usize, limit: usize) -> Option<Taken> {
        let more = |active: usize| active.checked_add(bytes).filter(|sum| *sum <= limit);
        let before = self.active.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok()?;
        self.peak.fetch_max(before + bytes, Ordering::Relaxed);
        Some(Taken { meter: Arc::clone(self), bytes })
    }

    /// The counts, with the device's total memory.
    pub(crate) fn usage(&self, limit: usize) -> Usage {
        let [active, peak] = [&self.active, &self.peak].map(|n| n.load(Ordering::Relaxed));
        Usage { limit, active, peak }
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.meter.active.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_stays_when_bytes_go() {
        let meter = Arc::new(Meter::default());
        let first = meter.take(100);
        let second = meter.take(50);
        drop(first);
        assert_eq!(meter.usage(200), Usage { limit: 200, active: 50, peak: 150 });
        assert!(meter.take_within(151, 200).is_none());
        drop(meter.take_within(60, 200));
        drop(second);
        assert_eq!(meter.usage(200), Usage { limit: 200, active: 0, peak: 150 });
    }
}

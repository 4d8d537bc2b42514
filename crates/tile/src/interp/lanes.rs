//! Columns of registers, and the lanes that are active.

use std::cell::Cell;

use super::ops::Col;

/// Lanes of a simdgroup.
pub(super) const SIMD: usize = 32;

/// The registers of a threadgroup: one column per name, one entry per thread.
pub(super) struct Columns {
    cells: Vec<Cell<u32>>,
    threads: usize,
}

impl Columns {
    pub(super) fn new(columns: u32, threads: usize) -> Self {
        Columns { cells: vec![Cell::new(0); columns as usize * threads], threads }
    }

    /// The column of a name.
    #[inline(always)]
    pub(super) fn of(&self, col: Col) -> &[Cell<u32>] {
        &self.cells[col as usize * self.threads..][..self.threads]
    }

    /// The same bits in every thread.
    pub(super) fn fill(&self, col: Col, bits: u32) {
        self.of(col).iter().for_each(|cell| cell.set(bits));
    }
}

/// The active lanes of a threadgroup, in order: a run, or a list where they are scattered. Never
/// empty.
#[derive(Debug)]
pub(super) struct Mask {
    /// The first.
    pub(super) start: usize,
    /// One past the last.
    pub(super) end: usize,
    /// All of them, unless they are the whole run.
    pub(super) list: Option<Vec<u16>>,
}

impl Mask {
    /// All threads.
    pub(super) fn all(threads: usize) -> Self {
        Mask { start: 0, end: threads, list: None }
    }

    /// These lanes, ascending; nothing if there are none.
    pub(super) fn of(lanes: Vec<u16>) -> Option<Self> {
        let (start, end) = (usize::from(*lanes.first()?), usize::from(*lanes.last()?) + 1);
        let whole = end - start == lanes.len();
        Some(Mask { start, end, list: (!whole).then_some(lanes) })
    }

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.list.as_ref().map_or(self.end - self.start, Vec::len)
    }

    /// Whether all threads are active.
    pub(super) fn is_all(&self, threads: usize) -> bool {
        self.start == 0 && self.end == threads && self.list.is_none()
    }

    /// Calls `f` on each until it fails.
    #[inline(always)]
    pub(super) fn each<E>(&self, mut f: impl FnMut(usize) -> Result<(), E>) -> Result<(), E> {
        match &self.list {
            None => (self.start..self.end).try_for_each(f),
            Some(list) => list.iter().try_for_each(|lane| f(usize::from(*lane))),
        }
    }

    /// The lanes for which `f` holds and the lanes for which it does not, or `None` where there are
    /// none; `None` as a whole if it holds for all.
    pub(super) fn split(&self, f: impl Fn(usize) -> bool) -> Option<(Option<Mask>, Option<Mask>)> {
        if self.all_of(&f) {
            return None;
        }
        let (mut yes, mut no) = (vec![], vec![]);
        let _ = self.each(|lane| {
            if f(lane) { &mut yes } else { &mut no }.push(lane as u16);
            Ok::<(), ()>(())
        });
        Some((Mask::of(yes), Mask::of(no)))
    }

    /// Whether `f` holds for all; asked of every one, so that it vectorises.
    #[inline(always)]
    pub(super) fn all_of(&self, f: impl Fn(usize) -> bool) -> bool {
        match &self.list {
            None => (self.start..self.end).fold(true, |all, lane| all & f(lane)),
            Some(list) => list.iter().all(|lane| f(usize::from(*lane))),
        }
    }

    /// Calls `f` on each simdgroup that is active.
    ///
    /// # Errors
    /// A lane that is not active although another of its simdgroup is.
    pub(super) fn simds<E: From<Divergent>>(
        &self,
        mut f: impl FnMut(usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(list) = &self.list else {
            let whole = self.start.is_multiple_of(SIMD) && self.end.is_multiple_of(SIMD);
            if !whole {
                let idle = if self.start.is_multiple_of(SIMD) { self.end } else { self.start - 1 };
                return Err(Divergent { idle }.into());
            }
            return (self.start / SIMD..self.end / SIMD).try_for_each(f);
        };
        for lanes in list.chunk_by(|a, b| usize::from(*a) / SIMD == usize::from(*b) / SIMD) {
            let simd = usize::from(lanes[0]) / SIMD;
            if lanes.len() != SIMD {
                let idle = (simd * SIMD..).zip(lanes).find(|(i, lane)| *i != usize::from(**lane));
                let idle = idle.map_or(simd * SIMD + lanes.len(), |(i, _)| i);
                return Err(Divergent { idle }.into());
            }
            f(simd)?;
        }
        Ok(())
    }
}

/// A lane that does not take part in what its whole simdgroup or threadgroup must do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Divergent {
    /// Its thread.
    pub(super) idle: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_runs_or_lists_and_know_their_simdgroups() {
        let simds = |mask: &Mask| {
            let mut found = vec![];
            let all = mask.simds::<Divergent>(|s| {
                found.push(s);
                Ok(())
            });
            all.map(|()| found)
        };
        assert_eq!(simds(&Mask::all(64)), Ok(vec![0, 1]));
        assert!(Mask::of(vec![]).is_none());
        let run = Mask::of((0..40).collect()).unwrap();
        assert!(run.list.is_none());
        assert_eq!(simds(&run), Err(Divergent { idle: 40 }));
        let ends = Mask::of((0..32).chain(64..96).collect()).unwrap();
        assert_eq!(simds(&ends), Ok(vec![0, 2]));
        let holes = Mask::of((0..96).filter(|lane| *lane != 70).collect()).unwrap();
        assert_eq!(simds(&holes), Err(Divergent { idle: 70 }));
        let late = Mask::of((5..32).collect()).unwrap();
        assert_eq!(simds(&late), Err(Divergent { idle: 4 }));
        assert!(late.split(|_| true).is_none());
        let (yes, no) = late.split(|lane| lane < 9).unwrap();
        assert_eq!((yes.unwrap().count(), no.unwrap().start), (4, 9));
    }
}

//! Data parallelism: every device trains the same weights on its share of each batch's sequences.
//!
//! Gradients are added up over all devices once an update, by an all-reduce of their sums; each
//! device then makes the same update by itself. Losses and gradients are the whole batch's,
//! since the weight of each row's prediction was fixed before the batch was cut.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use formats::{Error, Result, Tensors};
use ops::Shape;
use ops::gradient::adamw::Rule;
use program::{Program, WeightId};

use super::{Ends, Group, Ranks, cause, ended};
use crate::{Kept, Memory, PackedRows, TrainOptions, Trainer};

/// See [`Trainer`]. The first device works on the caller's thread.
pub(super) struct DataParallel {
    trainers: Vec<Box<dyn Trainer>>,
    group: Arc<dyn Group>,
    /// The shape of the losses of each Program.
    losses: Vec<Option<Shape>>,
    /// The last batch: its Program, and the share of each device.
    number: usize,
    shares: Vec<Share>,
    /// The losses of the last batch, once they were asked for.
    joined: Vec<f32>,
    /// Whether the sums of gradients have been added up over all devices.
    reduced: bool,
}

/// The sequences of a batch that one device computes.
#[derive(Debug, Clone, PartialEq)]
struct Share {
    /// Its rows, and the range of [`PackedRows::picks`] that lists which of them predict something.
    rows: Range<usize>,
    picks: Range<usize>,
    /// [`PackedRows::first`] and [`PackedRows::picks`], counted from the share's first row.
    first: Vec<u32>,
    picked: Vec<u32>,
}

impl Share {
    fn of<'a>(&'a self, whole: &PackedRows<'a>) -> PackedRows<'a> {
        PackedRows {
            tokens: &whole.tokens[self.rows.clone()],
            positions: &whole.positions[self.rows.clone()],
            first: &self.first,
            targets: &whole.targets[self.rows.clone()],
            counts: &whole.counts[self.rows.clone()],
            draws: &whole.draws[self.rows.clone()],
            picks: &self.picked,
        }
    }

    /// Whether nothing in it is to be predicted, so that it has neither losses nor gradients.
    fn is_idle(&self) -> bool {
        self.picks.is_empty()
    }
}

/// Cuts a batch between sequences, as near to even shares of its tokens as that allows.
fn cut(whole: &PackedRows<'_>, devices: usize) -> Vec<Share> {
    let total = whole.tokens.len();
    let starts = (0..total).filter(|row| whole.first[*row] as usize == *row);
    let bounds: Vec<usize> = starts.chain([total]).collect();
    let mut begin = 0;
    let share = |device: usize| {
        let even = total * (device + 1) / devices;
        let nearest = bounds.iter().copied().min_by_key(|bound| bound.abs_diff(even));
        let rows = begin..nearest.unwrap_or(total).max(begin);
        begin = rows.end;
        let [from, to] = [rows.start, rows.end]
            .map(|row| whole.picks.partition_point(|pick| (*pick as usize) < row));
        let from_start = |row: &u32| row - rows.start as u32;
        Share {
            first: whole.first[rows.clone()].iter().map(from_start).collect(),
            picked: whole.picks[from..to].iter().map(from_start).collect(),
            picks: from..to,
            rows,
        }
    };
    (0..devices).map(share).collect()
}

impl Ranks {
    /// Loads Programs to be trained on every device.
    pub(super) fn data_parallel(
        &self,
        tensors: &Tensors,
        options: &TrainOptions,
    ) -> Result<DataParallel> {
        let devices = self.devices.iter();
        let trainers = devices.map(|device| device.train(tensors, options.clone()));
        Ok(DataParallel {
            trainers: trainers.collect::<Result<_>>()?,
            group: Arc::clone(&self.group),
            losses: options.programs.iter().map(losses).collect(),
            number: 0,
            shares: Vec::new(),
            joined: Vec::new(),
            reduced: false,
        })
    }
}

fn losses(program: &Program) -> Option<Shape> {
    program.results.first().map(|losses| program.shape(*losses))
}

impl DataParallel {
    /// Does something on every device at the same time.
    ///
    /// # Errors
    /// The first failure that is not about another device's.
    fn each<T: Send>(
        &mut self,
        work: impl Fn(&mut dyn Trainer, Option<&Share>) -> Result<T> + Sync,
    ) -> Result<Vec<T>> {
        self.group.mend()?;
        let (group, shares, work) = (&self.group, &self.shares, &work);
        let on = move |rank: usize, trainer: &mut Box<dyn Trainer>| {
            let _end = Ends(Arc::clone(group));
            let done = work(&mut **trainer, shares.get(rank));
            if done.is_err() {
                group.break_up();
            }
            done
        };
        let Some((own, others)) = self.trainers.split_first_mut() else {
            return Err(Error::new("train", "a device", "none"));
        };
        let all: Vec<Result<T>> = std::thread::scope(|scope| {
            let others = others.iter_mut().enumerate();
            let threads: Vec<_> =
                others.map(|(i, trainer)| scope.spawn(move || on(i + 1, trainer))).collect();
            let own = on(0, own);
            let others = threads.into_iter().map(|thread| {
                let done = thread.join();
                done.unwrap_or_else(|_| Err(ended()))
            });
            std::iter::once(own).chain(others).collect()
        });
        match all.iter().filter_map(|done| done.as_ref().err()).fold(None, cause) {
            Some(cause) => Err(cause),
            None => all.into_iter().collect(),
        }
    }

    fn first(&mut self) -> Result<&mut dyn Trainer> {
        match self.trainers.first_mut() {
            Some(first) => Ok(&mut **first),
            None => Err(Error::new("train", "a device", "none")),
        }
    }

    /// Adds up what all devices keep of a weight.
    fn read_sum(&mut self, weight: WeightId, kept: Kept, values: &mut [f32]) -> Result<()> {
        let length = values.len();
        let parts = self.each(|trainer, share| {
            let mut own = vec![0.0; length];
            // What was not run has the gradients of an earlier batch.
            if kept != Kept::Gradient || share.is_some_and(|share| !share.is_idle()) {
                trainer.read(weight, kept, &mut own)?;
            }
            Ok(own)
        })?;
        let parts: Vec<&[f32]> = parts.iter().map(Vec::as_slice).collect();
        ops::all_reduce::reference(&parts, values);
        Ok(())
    }

    fn reduce_sums(&mut self) -> Result<()> {
        if !self.reduced {
            self.each(|trainer, _| trainer.reduce())?;
            self.reduced = true;
        }
        Ok(())
    }
}

impl Trainer for DataParallel {
    fn write(&mut self, weight: WeightId, kept: Kept, values: &[f32]) -> Result<()> {
        if !matches!(kept, Kept::Gradient | Kept::Sum) {
            return self.each(|trainer, _| trainer.write(weight, kept, values)).map(drop);
        }
        // Gradients and sums are added up over all devices: one has the values, others zeros.
        let zeros = vec![0.0; values.len()];
        for (rank, trainer) in self.trainers.iter_mut().enumerate() {
            trainer.write(weight, kept, if rank == 0 { values } else { &zeros })?;
        }
        self.reduced &= kept != Kept::Sum;
        Ok(())
    }

    fn read(&mut self, weight: WeightId, kept: Kept, values: &mut [f32]) -> Result<()> {
        match kept {
            Kept::Gradient => self.read_sum(weight, kept, values),
            Kept::Sum if !self.reduced => self.read_sum(weight, kept, values),
            _ => self.first()?.read(weight, kept, values),
        }
    }

    fn replace(&mut self, number: usize, program: Program) -> Result<()> {
        self.losses[number] = losses(&program);
        self.each(|trainer, _| trainer.replace(number, program.clone())).map(drop)
    }

    fn run(&mut self, number: usize, rows: &PackedRows<'_>) -> Result<()> {
        (self.number, self.shares) = (number, cut(rows, self.trainers.len()));
        self.each(|trainer, share| match share.filter(|share| !share.is_idle()) {
            Some(share) => trainer.run(number, &share.of(rows)),
            None => Ok(()),
        })
        .map(drop)
    }

    fn losses(&mut self) -> Result<&[f32]> {
        let shape = self.losses.get(self.number).copied().flatten();
        let parts = self.each(|trainer, share| match share {
            Some(share) if !share.is_idle() => trainer.losses().map(<[f32]>::to_vec),
            Some(share) => {
                let rows = |shape: Shape| shape.rows.count(share.rows.len(), 0) * shape.width;
                Ok(vec![0.0; shape.map_or(0, rows)])
            }
            None => Ok(Vec::new()),
        })?;
        self.joined = parts.concat();
        Ok(&self.joined)
    }

    fn accumulate(&mut self, first: bool) -> Result<()> {
        let reduced = std::mem::replace(&mut self.reduced, false);
        if reduced && !first {
            // What all devices have by now counts once.
            self.trainers.iter_mut().skip(1).try_for_each(|trainer| trainer.clear())?;
        }
        self.each(|trainer, share| match share.filter(|share| !share.is_idle()) {
            Some(_) => trainer.accumulate(first),
            None if first => trainer.clear(),
            None => Ok(()),
        })
        .map(drop)
    }

    fn reduce(&mut self) -> Result<()> {
        self.reduce_sums()
    }

    fn clear(&mut self) -> Result<()> {
        self.reduced = false;
        self.each(|trainer, _| trainer.clear()).map(drop)
    }

    fn squares(&mut self) -> Result<f64> {
        self.reduce_sums()?;
        self.first()?.squares()
    }

    fn update(&mut self, rule: &Rule) -> Result<()> {
        self.reduce_sums()?;
        self.each(|trainer, _| trainer.update(rule)).map(drop)
    }

    fn forget(&mut self) -> Result<()> {
        self.reduced = false;
        self.each(|trainer, _| trainer.forget()).map(drop)
    }

    fn time(&mut self) -> Result<Option<BTreeMap<&'static str, f64>>> {
        self.first()?.time()
    }

    /// The memory of a batch whose sequences divide evenly, on each device.
    fn bytes(&self, number: usize, tokens: usize, outputs: usize) -> usize {
        let devices = self.trainers.len().max(1);
        let [tokens, outputs] = [tokens, outputs].map(|rows| rows.div_ceil(devices));
        self.trainers.first().map_or(0, |first| first.bytes(number, tokens, outputs))
    }

    fn update_bytes(&self) -> usize {
        self.trainers.first().map_or(0, |first| first.update_bytes())
    }

    /// The free memory of the device that has the least.
    fn free(&self) -> Result<Option<usize>> {
        let free = self.trainers.iter().map(|trainer| trainer.free());
        let free: Vec<Option<usize>> = free.collect::<Result<_>>()?;
        Ok(free.into_iter().flatten().min())
    }

    fn memory(&self) -> Memory {
        Memory::sum(self.trainers.iter().map(|trainer| trainer.memory()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sequences of these lengths, each of whose last rows predicts nothing.
    fn shares(lengths: &[usize], devices: usize) -> Vec<(usize, Vec<u32>, Vec<u32>)> {
        let (mut first, mut positions, mut picks) = (vec![], vec![], vec![]);
        for length in lengths {
            let start = first.len() as u32;
            first.extend(vec![start; *length]);
            positions.extend(0..*length as u32);
            picks.extend(start..start + *length as u32 - 1);
        }
        let tokens: Vec<u32> = (0..first.len() as u32).collect();
        let counts = vec![1.0; tokens.len()];
        let rows = PackedRows {
            tokens: &tokens,
            positions: &positions,
            first: &first,
            targets: &tokens,
            counts: &counts,
            draws: &tokens,
            picks: &picks,
        };
        let own = |share: &Share| {
            let own = share.of(&rows);
            assert_eq!(own.draws, own.tokens);
            assert!(own.tokens.first().is_none_or(|token| *token == share.rows.start as u32));
            assert_eq!(own.picks.len(), share.picks.len());
            (own.tokens.len(), own.first.to_vec(), own.picks.to_vec())
        };
        cut(&rows, devices).iter().map(own).collect()
    }

    #[test]
    fn batches_are_cut_between_sequences() {
        let two = shares(&[5, 2, 3], 2);
        assert_eq!(two[0], (5, vec![0; 5], vec![0, 1, 2, 3]));
        assert_eq!(two[1], (5, vec![0, 0, 2, 2, 2], vec![0, 2, 3]));
        // One sequence is one device's, and one without anything to predict is idle.
        let one = shares(&[6], 3);
        assert_eq!(one.iter().map(|(rows, ..)| *rows).sum::<usize>(), 6);
        assert_eq!(one.iter().filter(|(rows, ..)| *rows > 0).count(), 1);
        assert_eq!(shares(&[1, 4], 2)[0], (1, vec![0], vec![]));
        for devices in 1..6 {
            let all = shares(&[5, 1, 7, 2, 2, 9, 3], devices);
            assert_eq!(all.iter().map(|(rows, ..)| rows).sum::<usize>(), 29);
            assert_eq!(all.iter().map(|(.., picks)| picks.len()).sum::<usize>(), 22);
        }
    }
}

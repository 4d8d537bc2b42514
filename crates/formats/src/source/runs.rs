//! Where the elements of a weight lie in files: [`Source::runs`].

use super::{Source, permuted_from};
use crate::{Result, Tensors};

/// Elements of a tensor: `count` of them from number `start` on, each `step` behind the one before;
/// or zeros that no tensor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ElementRun<'a> {
    /// The tensor's name; `None` of zeros.
    pub tensor: Option<&'a str>,
    /// The first element.
    pub start: usize,
    /// From one to the next.
    pub step: usize,
    /// How many.
    pub count: usize,
}

impl<'a> ElementRun<'a> {
    fn part(self, first: usize, count: usize) -> ElementRun<'a> {
        ElementRun { start: self.start + first * self.step, count, ..self }
    }

    /// Both as one, if the second goes on where the first ends.
    fn with(self, next: ElementRun<'a>) -> Option<ElementRun<'a>> {
        let step = match (self.count, next.count) {
            (1, 1) => next.start.checked_sub(self.start)?,
            (1, _) => next.step,
            _ => self.step,
        };
        let goes_on = self.start + self.count * step == next.start;
        let alike = next.count == 1 || next.step == step;
        let joined = self.tensor == next.tensor && goes_on && alike && step > 0;
        joined.then_some(ElementRun { step, count: self.count + next.count, ..self })
    }
}

/// The same elements in as few runs.
fn joined<'a>(runs: impl IntoIterator<Item = ElementRun<'a>>) -> Vec<ElementRun<'a>> {
    let mut all: Vec<ElementRun<'a>> = Vec::new();
    for run in runs {
        match all.last_mut().and_then(|last| Some((last.with(run)?, last))) {
            Some((longer, last)) => *last = longer,
            None => all.push(run),
        }
    }
    all
}

/// Runs cut into rows of `width` elements; what is left behind whole rows is dropped.
fn rows<'a>(runs: &[ElementRun<'a>], width: usize) -> Vec<Vec<ElementRun<'a>>> {
    let (mut all, mut row, mut missing) = (Vec::new(), Vec::new(), width);
    for run in runs {
        let mut done = 0;
        while done < run.count && width > 0 {
            let count = missing.min(run.count - done);
            row.push(run.part(done, count));
            (done, missing) = (done + count, missing - count);
            if missing == 0 {
                all.push(std::mem::take(&mut row));
                missing = width;
            }
        }
    }
    all
}

impl Source {
    /// Where the weight's elements are, one behind the other; none if some are neither as they are
    /// in a tensor nor zeros.
    ///
    /// # Errors
    /// As [`Source::describe`].
    pub fn runs<'a>(&'a self, tensors: &Tensors) -> Result<Option<Vec<ElementRun<'a>>>> {
        let inner = |of: &Source| of.describe(tensors).map(|found| found.shape);
        let found = match self {
            Source::Tensor(name) => {
                let count = inner(self)?.iter().product();
                vec![ElementRun { tensor: Some(name), start: 0, step: 1, count }]
            }
            Source::Zeros(shape) => {
                vec![ElementRun { tensor: None, start: 0, step: 1, count: shape.iter().product() }]
            }
            Source::Decoded(of) if !of.describe(tensors)?.encoding.is_quantised() => {
                return of.runs(tensors);
            }
            Source::Concat(parts) | Source::Stack(parts) => {
                let mut all = Vec::new();
                for part in parts {
                    let Some(runs) = part.runs(tensors)? else { return Ok(None) };
                    all.extend(runs);
                }
                joined(all)
            }
            Source::Reshape(of, _) => return of.runs(tensors),
            Source::Rows { of, .. } | Source::Permute(of, _) => {
                let Some(runs) = of.runs(tensors)? else { return Ok(None) };
                let all = rows(&runs, inner(of)?.iter().skip(1).product());
                let count = inner(self)?.first().copied().unwrap_or(1);
                let place = |row: usize| match self {
                    Source::Rows { start, stride, run, .. } => {
                        start + row / run * stride + row % run
                    }
                    Source::Permute(_, axes) => permuted_from(row, *axes),
                    _ => row,
                };
                joined((0..count).filter_map(|row| all.get(place(row))).flatten().copied())
            }
            Source::Columns { of, start, count } => {
                let Some(runs) = of.runs(tensors)? else { return Ok(None) };
                let width = inner(of)?.last().copied().unwrap_or(1);
                let own = |row: &Vec<ElementRun<'a>>| {
                    let columns = *start..start + count;
                    columns.filter_map(|column| one(row, column)).collect::<Vec<_>>()
                };
                joined(rows(&runs, width).iter().flat_map(own))
            }
            Source::Transpose(of) => {
                let Some(runs) = of.runs(tensors)? else { return Ok(None) };
                let [.., lines, columns] = inner(of)?[..] else { return Ok(Some(runs)) };
                let mut all = Vec::new();
                for matrix in rows(&runs, columns).chunks(lines.max(1)) {
                    let first = joined(matrix.iter().filter_map(|line| one(line, 0)));
                    let whole = |step| {
                        let even = |line: &Vec<ElementRun<'_>>| matches!(line[..], [own] if own.step == step);
                        matrix.iter().all(even)
                    };
                    // The step between lines is that between elements, hence that of a column.
                    let step =
                        matrix.first().and_then(|line| line.first()).map_or(0, |own| own.step);
                    if let ([first], true) = (&first[..], whole(step)) {
                        let start =
                            |column| ElementRun { start: first.start + column * step, ..*first };
                        all.extend((0..columns).map(start));
                        continue;
                    }
                    for column in 0..columns {
                        all.extend(joined(matrix.iter().filter_map(|line| one(line, column))));
                    }
                }
                joined(all)
            }
            _ => return Ok(None),
        };
        Ok(Some(found))
    }
}

/// Element `at` of a row.
fn one<'a>(row: &[ElementRun<'a>], mut at: usize) -> Option<ElementRun<'a>> {
    for run in row {
        match at.checked_sub(run.count) {
            Some(rest) => at = rest,
            None => return Some(run.part(at, 1)),
        }
    }
    None
}

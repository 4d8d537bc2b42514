//! The weights of a Program as the CPU stores them: packed for its products, one copy in memory.

use super::experts;
use crate::{ExecutorOptions, finite};
use cpu_kernels::matmul::{Matrix, ROWS};
use cpu_kernels::team::Team;
use formats::{Error, NotFinite, Result, Tensors};
use ops::operation::Product;
use program::{Node, Program};
use std::sync::Arc;

/// A weight as the CPU stores it.
pub(super) enum Weight {
    /// Rank 2: packed for products.
    Matrix(Matrix),
    /// Rank 1, such as norms and biases, in f32.
    Vector(Vec<f32>),
}

/// The weights of all Programs on the device. The form of one is the rows of each of its matrices,
/// if it stacks several.
pub(super) type Store = crate::store::Store<Option<usize>, Weight>;

pub(super) type Wanted<'a> = crate::store::Wanted<'a, Option<usize>, Weight>;

impl Weight {
    /// Bytes of memory it takes.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Weight::Matrix(matrix) => matrix.resident_bytes(),
            Weight::Vector(values) => size_of_val(values.as_slice()),
        }
    }

    /// Whether it is a matrix of floats rather than of quantised blocks.
    pub(super) fn is_float_matrix(&self) -> bool {
        matches!(self, Weight::Matrix(matrix) if !matrix.encoding().is_quantised())
    }
}

/// Bytes of a weight as it is stored. `each`: rows of one of its matrices, if it stacks several.
pub(super) fn weight_bytes(
    weight: &program::Weight,
    each: Option<usize>,
    tensors: &Tensors,
) -> Result<usize> {
    let encoding = weight.describe(tensors)?.encoding;
    Ok(match *weight.shape.as_slice() {
        [rows, cols] => {
            let each = each.unwrap_or(rows).max(1);
            (rows / each).saturating_mul(Matrix::packed_bytes(encoding, each, cols))
        }
        ref shape => shape.iter().product::<usize>().saturating_mul(size_of::<f32>()),
    })
}

/// A stack of matrices, each padded with zero rows to whole panels.
struct Padded {
    each: usize,
    rows: usize,
    cols: usize,
}

impl Padded {
    fn new(each: usize, [rows, cols]: [usize; 2]) -> Padded {
        Padded { each, rows, cols }
    }

    /// Number of rows, including padding.
    fn rows(&self) -> usize {
        self.rows / self.each * self.each.next_multiple_of(ROWS)
    }

    /// Zero bytes decode to zeros in every encoding: floats are 0.0, and blocks have zero scales
    /// and offsets.
    fn bytes(&self, bytes: &[u8]) -> Vec<u8> {
        let each = bytes.len() / self.rows * self.each;
        let wide = bytes.len() / self.rows * self.each.next_multiple_of(ROWS);
        let mut all = Vec::with_capacity(bytes.len() / each.max(1) * wide);
        for part in bytes.chunks(each.max(1)) {
            all.extend_from_slice(part);
            all.resize(all.len() + wide - each, 0);
        }
        all
    }

    /// The index in the unpadded stack of element `at` of the padded one.
    fn origin(&self, at: usize) -> usize {
        let (row, wide) = (at / self.cols, self.each.next_multiple_of(ROWS));
        (row / wide * self.each + row % wide) * self.cols + at % self.cols
    }
}

/// Values that are kept only in quantised form in steps of many rows, and which node reads each:
/// gate outputs whose single reader is a product with a quantised matrix.
pub(super) fn quantised_only(program: &Program, weights: &[Arc<Weight>]) -> Vec<Option<usize>> {
    let (uses, writers) = (program.uses(), program.writers());
    let mut quantised_only = vec![None; program.values.len()];
    let product = |node: &Node| node.op.product(node.weights.len());
    let single = |product: &Product| product.norm.is_none() && product.projections.len() == 1;
    for (index, node) in program.nodes.iter().enumerate() {
        if !product(node).is_some_and(|p| single(&p)) {
            continue;
        }
        let value = node.inputs[0].0;
        let gated = |writer: usize| product(&program.nodes[writer]).is_some_and(|p| p.gated);
        let only = uses[value] == 1
            && writers[value].is_some_and(gated)
            && !weights[node.weights[0].0].is_float_matrix();
        quantised_only[value] = only.then_some(index);
    }
    quantised_only
}

/// Reads and packs the weights of a Program, or takes those that another Program has, and tells
/// `progress` the bytes done and all bytes.
///
/// # Errors
/// Weights that cannot be read, of a rank other than 1 or 2, or that are not finite where they must
/// be.
pub(super) fn load_weights(
    program: &Program,
    tensors: &Tensors,
    wanted: &Wanted<'_>,
    options: &ExecutorOptions,
    team: &Team,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<Arc<Weight>>> {
    wanted.prune();
    let total = program.stored_bytes(tensors)?;
    let mut done = 0;
    let mut weights = Vec::with_capacity(program.weights.len());
    for (weight, each) in program.weights.iter().zip(experts::rows_of_one(program)) {
        if let Some(held) = wanted.find(weight, &each) {
            weights.push(held);
            done += weight.stored_bytes(tensors)?;
            progress(done, total);
            continue;
        }
        let read = weight.read(tensors)?;
        let named = |error| weight.named(error);
        let (packed, not_finite) = match *weight.shape.as_slice() {
            [rows, cols] => {
                // Each expert begins with a panel of its own.
                let several = |each: &usize| *each < rows && !each.is_multiple_of(ROWS);
                let padded = each.filter(several).map(|each| Padded::new(each, [rows, cols]));
                let packed = match &padded {
                    Some(padded) => {
                        let (rows, bytes) = (padded.rows(), padded.bytes(&read.bytes));
                        Matrix::pack(read.encoding, rows, cols, &bytes, team)
                    }
                    None => Matrix::pack(read.encoding, rows, cols, &read.bytes, team),
                };
                let matrix = packed.map_err(named)?;
                // Keep one copy in memory: the file's pages are not needed again.
                weight.source.release(tensors);
                let mut not_finite = matrix.not_finite();
                if let (Some(found), Some(padded)) = (&mut not_finite, &padded) {
                    found.element = padded.origin(found.element);
                }
                (Weight::Matrix(matrix), not_finite)
            }
            [_] => {
                let values = read.to_f32().map_err(named)?;
                let not_finite = NotFinite::among(&values);
                // Biases of experts are padded as their rows are packed: to whole panels.
                let several = |each: &usize| *each < values.len() && !each.is_multiple_of(ROWS);
                let padded = each.filter(several).map(|each| {
                    let mut padded = Vec::with_capacity(values.len());
                    for part in values.chunks(each) {
                        padded.extend_from_slice(part);
                        padded.resize(padded.len().next_multiple_of(ROWS), 0.0);
                    }
                    padded
                });
                (Weight::Vector(padded.unwrap_or(values)), not_finite)
            }
            _ => {
                return Err(Error::new(&weight.name, "rank 1 or 2", format!("{:?}", weight.shape)));
            }
        };
        if let Some(found) = not_finite.filter(|_| !options.allow_nan) {
            return Err(finite::refusal(weight, tensors, found));
        }
        let packed = Arc::new(packed);
        wanted.keep(weight, each, packed.bytes(), &packed);
        weights.push(packed);
        done += weight.stored_bytes(tensors)?;
        progress(done, total);
    }
    Ok(weights)
}

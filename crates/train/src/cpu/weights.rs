//! The weights of Programs in training: matrices packed once, and again when they were trained.

use super::executor::CpuExecutor;
use cpu_kernels::math;
use cpu_kernels::matmul::Matrix;
use cpu_kernels::team::Team;
use formats::{DType, Encoding, Error, Result, Tensors};
use half::bf16;
use program::{Program, WeightId};

/// The weights of a Program and of what was made of it, which name them alike.
#[derive(Default)]
pub struct FloatWeights {
    all: Vec<Loaded>,
}

#[derive(Default)]
struct Loaded {
    used: bool,
    /// Matrices below each other, each packed by itself; 0: one.
    experts: usize,
    vector: Vec<f32>,
    /// One matrix, or one for each expert.
    matrices: Vec<Matrix>,
}

impl FloatWeights {
    /// Reads what the Programs use, but for the weights that are `trained`, which are
    /// [set](FloatWeights::set).
    ///
    /// # Errors
    /// Weights that are missing, that cannot be packed or are not finite, by name; too little
    /// memory.
    pub fn read(
        programs: &[&Program],
        tensors: &Tensors,
        trained: &[WeightId],
        team: &Team,
    ) -> Result<FloatWeights> {
        let Some(program) = programs.last() else { return Ok(FloatWeights::default()) };
        let mut weights = FloatWeights::default();
        weights.all.resize_with(program.weights.len(), Loaded::default);
        for node in programs.iter().flat_map(|program| &program.nodes) {
            let experts = program.mixture(node).is_some();
            for id in &node.weights {
                let to = &mut weights.all[id.0];
                to.used = true;
                if experts {
                    to.experts = program.shape(node.inputs[1]).width;
                }
            }
        }
        for (id, weight) in program.weights.iter().enumerate() {
            if trained.contains(&WeightId(id)) || !weights.all[id].used {
                continue;
            }
            let encoded = weight.read(tensors)?;
            let name = |e: Error| weight.named(e);
            weights
                .pack(id, encoded.encoding, &weight.shape, &encoded.bytes, team)
                .map_err(name)?;
            // Packed, it is not read again.
            weight.source.release(tensors);
        }
        Ok(weights)
    }

    /// Gives a trained weight its values, row-major. A matrix is rounded to the type that the
    /// executor's products read.
    ///
    /// # Errors
    /// Too little memory.
    pub fn set(
        &mut self,
        id: WeightId,
        shape: &[usize],
        values: &[f32],
        executor: &CpuExecutor,
    ) -> Result<()> {
        let (operands, team) = (executor.operands(), executor.team());
        if operands == DType::BF16 && shape.len() == 2 {
            let mut rounded = vec![bf16::ZERO; values.len()];
            math::to_bf16(executor.isa, values, &mut rounded);
            return self.pack(id.0, Encoding::Stored(operands), shape, bytes_of(&rounded), team);
        }
        self.pack(id.0, Encoding::Stored(DType::F32), shape, bytes_of(values), team)
    }

    fn pack(
        &mut self,
        id: usize,
        encoding: Encoding,
        shape: &[usize],
        bytes: &[u8],
        team: &Team,
    ) -> Result<()> {
        let to = &mut self.all[id];
        let &[rows, columns] = shape else {
            to.vector = vec![0.0; shape.iter().product()];
            return encoding.decode(bytes, &mut to.vector);
        };
        let count = to.experts.max(1);
        if !rows.is_multiple_of(count) || !bytes.len().is_multiple_of(count) {
            let expected = format!("rows of {count} experts");
            return Err(Error::new("weights", expected, format!("{rows} rows")));
        }
        to.matrices.clear();
        for (i, bytes) in bytes.chunks_exact((bytes.len() / count).max(1)).enumerate() {
            let matrix = Matrix::pack(encoding, rows / count, columns, bytes, team)?;
            if let Some(found) = matrix.not_finite() {
                let element = i * (rows / count) * columns + found.element;
                let found = format!("another at element {element}");
                return Err(Error::new("weights", "numbers that are finite", found));
            }
            to.matrices.push(matrix);
        }
        Ok(())
    }

    pub(super) fn vector(&self, id: WeightId) -> &[f32] {
        &self.all[id.0].vector
    }

    pub(super) fn matrix(&self, id: WeightId) -> Result<&Matrix> {
        self.expert(id, 0)
    }

    /// The matrix of one expert.
    pub(super) fn expert(&self, id: WeightId, expert: usize) -> Result<&Matrix> {
        let missing = || Error::new("weights", "a matrix", format!("none as weight {}", id.0));
        self.all[id.0].matrices.get(expert).ok_or_else(missing)
    }
}

/// Numbers as bytes.
fn bytes_of<T: Number>(values: &[T]) -> &[u8] {
    // SAFETY: numbers have no padding, and bytes no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }
}

/// A type without padding.
trait Number {}
impl Number for f32 {}
impl Number for bf16 {}

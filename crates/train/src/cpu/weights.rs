//! The weights of Programs in training: matrices packed once, and again when they were trained.

use cpu_kernels::matmul::Matrix;
use cpu_kernels::team::{SharedSlice, Team};
use formats::{DType, Encoding, Error, Result, Tensors};
use ops::Op;
use ops::gradient::Gradient;
use program::{Program, WeightId};

/// The weights of a Program and of what was made of it, which name them alike.
#[derive(Default)]
pub struct Weights {
    all: Vec<Loaded>,
}

/// How a weight is used.
#[derive(Debug, Clone, Copy, Default)]
struct Uses {
    forward: bool,
    backward: bool,
    /// Matrices below each other, each packed by itself; 0: one.
    experts: usize,
}

#[derive(Default)]
struct Loaded {
    uses: Uses,
    vector: Vec<f32>,
    forward: Option<Matrix>,
    /// The transpose.
    backward: Option<Matrix>,
    /// The matrices of experts.
    of_experts: Vec<Loaded>,
}

impl Weights {
    /// Reads what the Programs use, but for the weights that are `trained`, which are
    /// [set](Weights::set).
    ///
    /// # Errors
    /// Weights that are missing, that cannot be packed or are not finite, by name; too little
    /// memory.
    pub fn read(
        programs: &[&Program],
        tensors: &Tensors,
        trained: &[WeightId],
        team: &Team,
    ) -> Result<Weights> {
        let Some(program) = programs.last() else { return Ok(Weights::default()) };
        let mut weights = Weights::default();
        weights.all.resize_with(program.weights.len(), Loaded::default);
        for node in programs.iter().flat_map(|program| &program.nodes) {
            let gradient = matches!(&node.op, Op::Gradient(Gradient::LinearBackward(_)));
            let both = matches!(&node.op, Op::Gradient(Gradient::CrossEntropy(of)) if of.hidden);
            let experts =
                matches!(&node.op, Op::Experts(_) | Op::Gradient(Gradient::ExpertsBackward(_)));
            let turned = matches!(&node.op, Op::Gradient(Gradient::ExpertsBackward(_)));
            for (i, id) in node.weights.iter().enumerate() {
                let uses = &mut weights.all[id.0].uses;
                uses.forward |= !gradient;
                uses.backward |= gradient || (both && i == 0) || turned;
                if experts {
                    uses.experts = program.shape(node.inputs[1]).width;
                }
            }
        }
        for (id, weight) in program.weights.iter().enumerate() {
            let uses = weights.all[id].uses;
            if trained.contains(&WeightId(id)) || !(uses.forward || uses.backward) {
                continue;
            }
            let encoded = weight.read(tensors)?;
            let name = |e: Error| weight.named(e);
            weights
                .pack(id, encoded.encoding, &weight.shape, &encoded.bytes, team)
                .map_err(name)?;
        }
        Ok(weights)
    }

    /// Gives a trained weight its values, row-major.
    ///
    /// # Errors
    /// Too little memory.
    pub fn set(
        &mut self,
        id: WeightId,
        shape: &[usize],
        values: &[f32],
        team: &Team,
    ) -> Result<()> {
        // SAFETY: f32 have no padding, and bytes no alignment.
        let bytes = unsafe {
            std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values))
        };
        self.pack(id.0, Encoding::Stored(DType::F32), shape, bytes, team)
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
        let each = |all: usize| all.checked_div(to.uses.experts);
        if let Some((rows, size)) = each(rows).zip(each(bytes.len())) {
            let uses = Uses { experts: 0, ..to.uses };
            let mut all = Weights::default();
            for bytes in bytes.chunks_exact(size.max(1)) {
                all.all.push(Loaded { uses, ..Loaded::default() });
                all.pack(all.all.len() - 1, encoding, &[rows, columns], bytes, team)?;
            }
            to.of_experts = all.all;
            return Ok(());
        }
        if to.uses.forward {
            let matrix = Matrix::pack(encoding, rows, columns, bytes, team)?;
            if let Some(found) = matrix.not_finite() {
                let found = format!("another at element {}", found.element);
                return Err(Error::new("weights", "numbers that are finite", found));
            }
            to.forward = Some(matrix);
        }
        if to.uses.backward {
            let (encoding, turned) = turned(encoding, [rows, columns], bytes, team)?;
            to.backward = Some(Matrix::pack(encoding, columns, rows, &turned, team)?);
        }
        Ok(())
    }

    pub(super) fn vector(&self, id: WeightId) -> &[f32] {
        &self.all[id.0].vector
    }

    pub(super) fn matrix(&self, id: WeightId) -> Result<&Matrix> {
        self.all[id.0].forward.as_ref().ok_or_else(|| missing("a matrix", id))
    }

    pub(super) fn transposed(&self, id: WeightId) -> Result<&Matrix> {
        self.all[id.0].backward.as_ref().ok_or_else(|| missing("a transpose", id))
    }

    /// The matrix of one expert.
    pub(super) fn expert(&self, id: WeightId, expert: usize) -> Result<&Matrix> {
        let own = self.all[id.0].of_experts.get(expert);
        own.and_then(|own| own.forward.as_ref()).ok_or_else(|| missing("experts", id))
    }

    /// The transpose of one expert's matrix.
    pub(super) fn expert_turned(&self, id: WeightId, expert: usize) -> Result<&Matrix> {
        let own = self.all[id.0].of_experts.get(expert);
        own.and_then(|own| own.backward.as_ref()).ok_or_else(|| missing("experts' transposes", id))
    }
}

fn missing(what: &str, id: WeightId) -> Error {
    Error::new("weights", what, format!("none as weight {}", id.0))
}

/// The transpose of a matrix: of numbers as they are, of quantised blocks in bf16.
fn turned(
    encoding: Encoding,
    [rows, columns]: [usize; 2],
    bytes: &[u8],
    team: &Team,
) -> Result<(Encoding, Vec<u8>)> {
    let element = match encoding {
        Encoding::Stored(DType::F32) => 4,
        Encoding::Stored(DType::F16 | DType::BF16) => 2,
        _ => return turned_blocks(encoding, [rows, columns], bytes, team),
    };
    let mut turned = vec![0u8; bytes.len()];
    let to = SharedSlice::new(&mut turned);
    team.run(&|worker| {
        while let Some(range) = worker.claim(columns, 16) {
            // SAFETY: each range of columns is one worker's, and becomes these rows alone.
            let to =
                unsafe { to.slice_mut(range.start * rows * element..range.end * rows * element) };
            for row in 0..rows {
                let from =
                    &bytes[(row * columns + range.start) * element..][..range.len() * element];
                for (i, from) in from.chunks_exact(element).enumerate() {
                    to[(i * rows + row) * element..][..element].copy_from_slice(from);
                }
            }
        }
    });
    Ok((encoding, turned))
}

fn turned_blocks(
    encoding: Encoding,
    [rows, columns]: [usize; 2],
    bytes: &[u8],
    team: &Team,
) -> Result<(Encoding, Vec<u8>)> {
    let row_bytes = encoding.bytes_for(columns).ok_or_else(|| {
        Error::new("weights", format!("rows of whole blocks of {encoding}"), columns)
    })?;
    let mut halves = vec![0u8; rows * columns * 2];
    let to = SharedSlice::new(&mut halves);
    let failed = std::sync::Mutex::new(None);
    team.run(&|worker| {
        let mut values = vec![0f32; columns];
        while let Some(range) = worker.claim(rows, 16) {
            for row in range {
                let from = &bytes[row * row_bytes..][..row_bytes];
                if let Err(error) = encoding.decode(from, &mut values) {
                    *failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(error);
                }
                // SAFETY: each row is one worker's.
                let to = unsafe { to.slice_mut(row * columns * 2..(row + 1) * columns * 2) };
                for (to, value) in to.chunks_exact_mut(2).zip(&values) {
                    to.copy_from_slice(&half::bf16::from_f32(*value).to_le_bytes());
                }
            }
        }
    });
    if let Some(error) = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        return Err(error);
    }
    turned(Encoding::Stored(DType::BF16), [rows, columns], &halves, team)
}

//! Functions of arrays, recorded once, and their derivatives: [`value_and_grad`], [`vjp`] in
//! reverse and [`jvp`] forwards. They are computed by the operations' references, in loops that are
//! exact and slow; models are trained by [`Tuned`](crate::Tuned).
//!
//! ```
//! use delft_train::function::{Function, Unary, jvp, value_and_grad, vjp};
//!
//! // Two rows of three numbers through a matrix and a bend.
//! let arguments: [(&str, &[usize]); 2] = [("x", &[2, 3]), ("w", &[1, 3])];
//! let f = Function::record(&arguments, |given| {
//!     let x = given.rows("x")?;
//!     Ok(given.linear(&x, "w", None)?.map(Unary::Square))
//! })?;
//! let (x, w) = ([1.0, 2.0, 3.0, 0.0, 1.0, 0.0], [1.0, 0.0, -1.0]);
//! assert_eq!(f.call(&[&x, &w])?, [4.0, 0.0]);
//!
//! // The sum of the value's elements, and how it changes with the arguments that are named: 2 (x . w) x, summed over rows.
//! let (value, gradients) = value_and_grad(&f, &["w"])?.call(&[&x, &w])?;
//! assert_eq!((value, gradients), (4.0, vec![vec![-4.0, -8.0, -12.0]]));
//!
//! // Rows may count differently: cotangents in, those of the arguments out.
//! let (value, cotangents) = vjp(&f, &["x"])?.call(&[&x, &w], &[0.5, 1.0])?;
//! assert_eq!((value, &cotangents[0][..3]), (vec![4.0, 0.0], &[-2.0, 0.0, 2.0][..]));
//!
//! // How the value changes as an argument moves in a direction.
//! let (value, tangent) = jvp(&f, &["w"])?.call(&[&x, &w], &[&[0.0, 1.0, 0.0]])?;
//! assert_eq!((value, tangent), (vec![4.0, 0.0], vec![-8.0, 0.0]));
//! # Ok::<(), formats::Error>(())
//! ```

use crate::Batch;
use crate::gradients::{checkpoint, differentiate, jvp as tangents, reference};
use formats::{Error, Result, Source};
use nn::{Builder, ForwardPass, Stored, Weights};
use ops::embed::Index;
use ops::{Embed, Op};
use program::{Program, WeightId};

pub use nn::{Tensor, Unary};

/// The name of the argument that [`vjp`] adds.
const COTANGENTS: &str = "cotangents";

/// An array in, for each name and shape, and an array out: `[rows, width]`.
#[derive(Debug, Clone)]
pub struct Function {
    program: Program,
    rows: usize,
}

/// The arguments of a function while it is recorded.
pub struct Arguments<'a> {
    builder: Builder<'a>,
    step: ForwardPass,
    shapes: &'a [(&'a str, &'a [usize])],
}

/// Arguments as a [`Builder`] finds weights.
struct Named<'a>(&'a [(&'a str, &'a [usize])]);

impl Weights for Named<'_> {
    fn find(&self, canonical: &str) -> Result<Option<Stored>> {
        let own = self.0.iter().find(|(name, _)| *name == canonical);
        Ok(own.map(|(name, shape)| Stored {
            // It is never read: calls bring the elements.
            source: Source::Tensor((*name).to_owned()),
            shape: shape.to_vec(),
        }))
    }
}

impl Arguments<'_> {
    fn weight(&self, name: &str) -> Result<(WeightId, &[usize])> {
        let unknown = || Error::new("a function", "the name of an argument", name);
        let &(_, shape) = self.shapes.iter().find(|(own, _)| *own == name).ok_or_else(unknown)?;
        Ok((self.builder.weight(name, shape)?, shape))
    }

    /// The rows of an argument `[rows, width]`.
    ///
    /// # Errors
    /// No such argument, or one that is no matrix.
    pub fn rows(&self, name: &str) -> Result<Tensor> {
        let (weight, shape) = self.weight(name)?;
        if shape.len() != 2 {
            return Err(Error::new(name, "an argument [rows, width]", format!("{shape:?}")));
        }
        let op = Op::from(Embed { index: Index::Position });
        Ok(self.step.record(op, &[], vec![weight]).swap_remove(0))
    }

    /// `x weight' + bias`, of arguments `[out, in]` and `[out]`.
    ///
    /// # Errors
    /// No such argument. What does not fit is told by [`Function::record`].
    pub fn linear(&self, x: &Tensor, weight: &str, bias: Option<&str>) -> Result<Tensor> {
        let mut weights = vec![self.weight(weight)?.0];
        if let Some(bias) = bias {
            weights.push(self.weight(bias)?.0);
        }
        Ok(x.apply(Op::from(ops::Linear), &[], weights))
    }

    /// Layers of [`nn`] take arguments by name from here.
    pub fn builder(&self) -> &Builder<'_> {
        &self.builder
    }
}

impl Function {
    /// Records `f`, of arguments with these names and shapes.
    ///
    /// # Errors
    /// Those of `f`; two arguments of one name; what does not fit together; rows of arguments that
    /// are not equally many.
    pub fn record(
        arguments: &[(&str, &[usize])],
        f: impl FnOnce(&Arguments<'_>) -> Result<Tensor>,
    ) -> Result<Function> {
        let named = Named(arguments);
        let builder = Builder::new(&named);
        for (i, (name, shape)) in arguments.iter().enumerate() {
            if arguments[..i].iter().any(|(other, _)| other == name) || *name == COTANGENTS {
                return Err(Error::new("a function", "arguments of names of their own", name));
            }
            if shape.is_empty() || shape.len() > 2 || shape.contains(&0) {
                return Err(Error::new(*name, "a vector or a matrix", format!("{shape:?}")));
            }
            builder.weight(name, shape)?;
        }
        let step = ForwardPass::new(builder.program(), false);
        let given = Arguments { builder, step: step.clone(), shapes: arguments };
        let result = f(&given)?;
        let program = step.finish(result)?;
        if !program.layers.is_empty() {
            return Err(Error::new("a function", "one without a cache", "attention to a cache"));
        }
        let mut rows = None;
        for node in &program.nodes {
            let Op::Embed(_) = node.op else { continue };
            let weight = &program.weights[node.weights[0].0];
            match rows {
                Some(rows) if rows != weight.shape[0] => {
                    return Err(Error::new(&weight.name, format!("{rows} rows"), weight.shape[0]));
                }
                _ => rows = Some(weight.shape[0]),
            }
        }
        let rows = rows.ok_or_else(|| Error::new("a function", "rows of an argument", "none"))?;
        Ok(Function { program, rows })
    }

    /// Its value, for the elements of each argument, row-major.
    ///
    /// # Errors
    /// Arguments of other numbers or lengths.
    pub fn call(&self, arguments: &[&[f32]]) -> Result<Vec<f32>> {
        let mut values = run(&self.program, self.rows, &self.program, arguments)?;
        Ok(values.swap_remove(0))
    }

    /// The arguments of these names.
    fn wrt(&self, names: &[&str]) -> Result<Vec<WeightId>> {
        let find = |name: &&str| {
            let at = self.program.weights.iter().position(|weight| weight.name == **name);
            at.map(WeightId).ok_or_else(|| Error::new("wrt", "the name of an argument", name))
        };
        names.iter().map(find).collect()
    }
}

/// The results of a Program whose first weights are the arguments, as `named` has them.
fn run(
    program: &Program,
    rows: usize,
    named: &Program,
    arguments: &[&[f32]],
) -> Result<Vec<Vec<f32>>> {
    let expected = named.weights.len();
    if arguments.len() != expected {
        return Err(Error::new("arguments", expected, arguments.len()));
    }
    for (weight, argument) in named.weights.iter().zip(arguments) {
        let elements: usize = weight.shape.iter().product();
        if argument.len() != elements {
            let expected = format!("{elements} elements");
            return Err(Error::new(&weight.name, expected, argument.len()));
        }
    }
    let batch = Batch {
        tokens: vec![0; rows],
        targets: vec![0; rows],
        weights: vec![0.0; rows],
        sequences: std::iter::once(0..rows).collect(),
        ..Batch::default()
    };
    let weight = |id: WeightId| Ok(arguments[id.0].to_vec());
    let values = reference::run(program, &weight, &batch)?;
    Ok(program.results.iter().map(|value| values[value.0].clone()).collect())
}

/// See [`value_and_grad`].
#[derive(Debug, Clone)]
pub struct ValueAndGrad {
    gradient: Program,
    of: Function,
}

/// The sum of the elements of a function's value, with its gradients with respect to the arguments
/// of these names.
///
/// # Errors
/// A name that no argument has; an operation that has no gradient.
///
/// ```
/// use delft_train::function::{Function, Unary, value_and_grad};
///
/// // The squares of a row through a matrix.
/// let arguments: [(&str, &[usize]); 2] = [("x", &[1, 2]), ("w", &[2, 2])];
/// let f = Function::record(&arguments, |given| {
///     Ok(given.linear(&given.rows("x")?, "w", None)?.map(Unary::Square))
/// })?;
/// let (x, w) = ([1.0, 2.0], [1.0, 0.0, 0.0, 1.0]);
/// let (value, gradients) = value_and_grad(&f, &["x", "w"])?.call(&[&x, &w])?;
/// assert_eq!(value, 1.0 + 4.0);
/// // 2 w' y and 2 y x', of y = w x.
/// assert_eq!(gradients, [vec![2.0, 4.0], vec![2.0, 4.0, 4.0, 8.0]]);
/// # Ok::<(), formats::Error>(())
/// ```
pub fn value_and_grad(f: &Function, wrt: &[&str]) -> Result<ValueAndGrad> {
    let gradient = differentiate(&f.program, &f.wrt(wrt)?)?;
    Ok(ValueAndGrad { gradient, of: f.clone() })
}

impl ValueAndGrad {
    /// The same numbers in less memory: what the value is made of is computed again for the
    /// gradients, some of it at a time.
    #[must_use]
    pub fn checkpointed(mut self) -> ValueAndGrad {
        self.gradient = checkpoint(&self.gradient, 1);
        self
    }

    /// The value and the gradients, each as long as its argument, in the order in which they were
    /// named.
    ///
    /// # Errors
    /// As [`Function::call`].
    pub fn call(&self, arguments: &[&[f32]]) -> Result<(f32, Vec<Vec<f32>>)> {
        let mut results = run(&self.gradient, self.of.rows, &self.of.program, arguments)?;
        let value = results.remove(0).iter().map(|value| f64::from(*value)).sum::<f64>();
        Ok((value as f32, results))
    }
}

/// See [`vjp`].
#[derive(Debug, Clone)]
pub struct Vjp {
    /// The gradient of the value times the cotangents, which are its last argument.
    gradient: Program,
    weighted: Function,
    of: Function,
}

/// The vector-Jacobian product of a function with respect to the arguments of these names: reverse
/// mode.
///
/// # Errors
/// As [`value_and_grad`].
///
/// ```
/// use delft_train::function::{Function, Unary, vjp};
///
/// // The squares of a row through a matrix.
/// let arguments: [(&str, &[usize]); 2] = [("x", &[1, 2]), ("w", &[2, 2])];
/// let f = Function::record(&arguments, |given| {
///     Ok(given.linear(&given.rows("x")?, "w", None)?.map(Unary::Square))
/// })?;
/// let (x, w) = ([1.0, 2.0], [1.0, 0.0, 0.0, 1.0]);
/// // The second square counts twice, the first not at all.
/// let (value, cotangents) = vjp(&f, &["x"])?.call(&[&x, &w], &[0.0, 2.0])?;
/// assert_eq!(value, [1.0, 4.0]);
/// assert_eq!(cotangents, [vec![0.0, 8.0]]);
/// # Ok::<(), formats::Error>(())
/// ```
pub fn vjp(f: &Function, wrt: &[&str]) -> Result<Vjp> {
    let mut program = f.program.clone();
    let value = program.results[0];
    let shape = vec![f.rows, program.shape(value).width];
    let (name, source) = (COTANGENTS.to_owned(), Source::Tensor(COTANGENTS.to_owned()));
    program.weights.push(program::Weight { name, shape, source });
    let cotangents = WeightId(program.weights.len() - 1);
    let op = Op::from(Embed { index: Index::Position });
    let by = crate::gradients::push(&mut program, op, Vec::new(), vec![cotangents])?[0];
    let op = Op::from(ops::Zip(ops::Binary::Mul));
    let product = crate::gradients::push(&mut program, op, vec![value, by], Vec::new())?[0];
    program.results = vec![product];
    let gradient = differentiate(&program, &f.wrt(wrt)?)?;
    Ok(Vjp { gradient, weighted: Function { program, rows: f.rows }, of: f.clone() })
}

impl Vjp {
    /// The value, and the cotangents of the arguments for given cotangents of the value.
    ///
    /// # Errors
    /// As [`Function::call`].
    pub fn call(
        &self,
        arguments: &[&[f32]],
        cotangents: &[f32],
    ) -> Result<(Vec<f32>, Vec<Vec<f32>>)> {
        let all = [arguments, &[cotangents]].concat();
        let value = self.of.call(arguments)?;
        let mut results = run(&self.gradient, self.of.rows, &self.weighted.program, &all)?;
        results.remove(0);
        Ok((value, results))
    }
}

/// See [`jvp`].
#[derive(Debug, Clone)]
pub struct Jvp {
    tangent: Program,
    of: Function,
}

/// The Jacobian-vector product of a function with respect to the arguments of these names: forward
/// mode.
///
/// # Errors
/// A name that no argument has; an operation that has no tangent; a value that does not depend on
/// those arguments.
///
/// ```
/// use delft_train::function::{Function, Unary, jvp};
///
/// // The squares of a row through a matrix.
/// let arguments: [(&str, &[usize]); 2] = [("x", &[1, 2]), ("w", &[2, 2])];
/// let f = Function::record(&arguments, |given| {
///     Ok(given.linear(&given.rows("x")?, "w", None)?.map(Unary::Square))
/// })?;
/// let (x, w) = ([1.0, 2.0], [1.0, 0.0, 0.0, 1.0]);
/// // As x moves along (0, 1), the second square grows by 2 y.
/// let (value, tangent) = jvp(&f, &["x"])?.call(&[&x, &w], &[&[0.0, 1.0]])?;
/// assert_eq!(value, [1.0, 4.0]);
/// assert_eq!(tangent, [0.0, 4.0]);
/// # Ok::<(), formats::Error>(())
/// ```
pub fn jvp(f: &Function, wrt: &[&str]) -> Result<Jvp> {
    Ok(Jvp { tangent: tangents(&f.program, &f.wrt(wrt)?)?, of: f.clone() })
}

impl Jvp {
    /// The value, and how it changes along the tangents of the arguments, in the order in which
    /// they were named.
    ///
    /// # Errors
    /// As [`Function::call`].
    pub fn call(&self, arguments: &[&[f32]], tangents: &[&[f32]]) -> Result<(Vec<f32>, Vec<f32>)> {
        let all = [arguments, tangents].concat();
        let mut results = run(&self.tangent, self.of.rows, &self.tangent, &all)?;
        let tangent = results.pop().unwrap_or_default();
        Ok((results.pop().unwrap_or_default(), tangent))
    }
}

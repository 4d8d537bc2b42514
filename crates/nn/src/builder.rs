//! The builder that gives layers their weights: canonical names, checked shapes, cache layers.

use formats::{Error, Result, Source, shape};
use program::{CacheLayer, Program, Weight, WeightId};
use std::cell::RefCell;

/// A weight found in the model's files.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    /// The recipe by which it is made from their tensors.
    pub source: Source,
    /// Row-major shape, outermost first.
    pub shape: Vec<usize>,
}

/// Finds weights by canonical name.
pub trait Weights {
    /// The weight with a canonical name such as `blocks.3.attention.q`, if the files have it.
    ///
    /// # Errors
    /// Tensors that do not fit the name.
    fn find(&self, canonical: &str) -> Result<Option<Stored>>;

    /// The location of a canonical name's tensor for error messages: the file, and the tensor's
    /// name there.
    fn place(&self, canonical: &str) -> String {
        canonical.to_owned()
    }
}

/// Whether a linear layer has a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bias {
    /// Never.
    Never,
    /// Always; a missing one is an error.
    Always,
    /// If the file has one.
    IfStored,
}

impl Bias {
    /// `name.bias` `[width]`, if there is one.
    pub(crate) fn weight(
        self,
        builder: &Builder<'_>,
        name: &str,
        width: usize,
    ) -> Result<Option<WeightId>> {
        let name = format!("{name}.bias");
        match self {
            Bias::Never => Ok(None),
            Bias::Always => builder.weight(&name, &[width]).map(Some),
            Bias::IfStored => builder.optional(&name, &[width]),
        }
    }
}

/// Collects the weights and cache layers of a model under construction.
pub struct Builder<'a> {
    weights: &'a dyn Weights,
    found: RefCell<Vec<Weight>>,
    layers: RefCell<Vec<CacheLayer>>,
}

impl<'a> Builder<'a> {
    /// A builder over the weights of one file or folder.
    pub fn new(weights: &'a dyn Weights) -> Self {
        Builder { weights, found: RefCell::default(), layers: RefCell::default() }
    }

    /// The weight named `name`, which must have the shape `dims`.
    ///
    /// # Errors
    /// No such weight, or one of another shape, by file and name.
    pub fn weight(&self, name: &str, dims: &[usize]) -> Result<WeightId> {
        self.optional(name, dims)?.ok_or_else(|| {
            Error::new(
                self.weights.place(name),
                format!("a tensor {}", shape(dims)),
                "none in the file",
            )
            .hint("the file is incomplete, or not of the architecture that it names")
        })
    }

    /// The weight named `name` if the file has it; then it must have the shape `dims`.
    ///
    /// # Errors
    /// A weight of another shape, by file and name.
    pub fn optional(&self, name: &str, dims: &[usize]) -> Result<Option<WeightId>> {
        let Some(stored) = self.weights.find(name)? else { return Ok(None) };
        if stored.shape != dims {
            return Err(Error::new(self.weights.place(name), shape(dims), shape(&stored.shape))
                .hint("the configuration does not fit these weights"));
        }
        let mut found = self.found.borrow_mut();
        // A tied head is the embedding by another name: one weight, one copy in memory.
        if let Some(known) = found.iter().position(|w| w.source == stored.source) {
            return Ok(Some(WeightId(known)));
        }
        let Stored { source, shape } = stored;
        found.push(Weight { name: name.to_owned(), shape, source });
        Ok(Some(WeightId(found.len() - 1)))
    }

    /// Registers the next cache layer and returns its index.
    pub fn cache_layer(&self, layer: CacheLayer) -> usize {
        let mut layers = self.layers.borrow_mut();
        layers.push(layer);
        layers.len() - 1
    }

    /// An empty Program over everything handed out so far.
    pub fn program(&self) -> Program {
        Program {
            weights: self.found.borrow().clone(),
            layers: self.layers.borrow().clone(),
            ..Program::default()
        }
    }
}

//! A model that is tuned: its recorded Program, differentiated, on the CPU.

use crate::cpu::{Executor, Weights, check};
use crate::gradients::{Factors, adapt, checkpoint, differentiate, losses, pack};
use crate::{Batch, Loss, Model, Parameter, full, peft};
use formats::{Error, Location, Result, Tensors};
use models::Config;
use program::{Program, Site, WeightId};

/// How a model is adapted by low-rank factors (Hu et al. 2021).
#[derive(Debug, Clone, PartialEq)]
pub struct LoraOptions {
    /// Columns and rows of the factors.
    pub rank: usize,
    /// The factors' product counts `alpha / rank`.
    pub alpha: f32,
    /// Whether it counts `alpha / sqrt(rank)` (rsLoRA, Kalajdzievski 2023).
    pub stabilised: bool,
    /// The matrices that have factors, by the last part of their names: `q` or `attention.q` as Delft names them, `q_proj` as
    /// Hugging Face does. Empty: every matrix of the blocks.
    pub sites: Vec<String>,
    /// What the factors begin with follows from it alone.
    pub seed: u64,
}

impl Default for LoraOptions {
    fn default() -> Self {
        LoraOptions { rank: 8, alpha: 16.0, stabilised: false, sites: Vec::new(), seed: 0 }
    }
}

impl LoraOptions {
    /// What multiplies the factors' product.
    pub fn scale(&self) -> f32 {
        let rank = self.rank as f32;
        self.alpha / if self.stabilised { rank.sqrt() } else { rank }
    }
}

/// What is trained.
enum Kind {
    /// Factors beside matrices.
    Lora { options: LoraOptions, sites: Vec<Site>, factors: Vec<Factors> },
    /// All weights.
    Full,
}

/// A model in training on the CPU.
pub struct Tuned {
    tensors: Tensors,
    config: Config,
    kind: Kind,
    executor: Executor,
    weights: Weights,
    /// The losses alone, and with the gradients.
    losses: Program,
    gradient: Program,
    trained: Vec<WeightId>,
    parameters: Vec<Parameter>,
}

impl Tuned {
    /// The model in a folder or a GGUF file, of any encoding, with low-rank factors that are trained beside its matrices. `down`
    /// begins as PEFT's does, uniform within `1 / sqrt(in)`; `up` begins with zeros, so that nothing is changed at first.
    ///
    /// `threads`: `None` is one for each physical core.
    ///
    /// # Errors
    /// A model that cannot be read or has an operation that has no gradient; sites that it has not; options out of range; too
    /// little memory.
    pub fn lora(
        model: impl Into<Location>,
        options: &LoraOptions,
        threads: Option<usize>,
    ) -> Result<Tuned> {
        let whole = options.alpha.is_finite() && options.alpha > 0.0;
        if options.rank == 0 || options.rank > 4096 || !whole {
            let found = format!("rank {}, alpha {}", options.rank, options.alpha);
            return Err(Error::new("lora", "a rank of 1 to 4096 and alpha above 0", found));
        }
        let tensors = Tensors::open(model)?;
        let model = models::load(&tensors, &models::Options::default())?;
        let architecture = model.config().architecture;
        let recorded = model.record(false)?;
        let names = |site: &str| peft::names(architecture, site, &options.sites);
        let sites = recorded.adaptable().into_iter().filter(|s| names(&s.name)).collect();
        peft::check_sites(architecture, &recorded.adaptable(), &options.sites)?;
        let (adapted, factors) = adapt(&pack(&recorded)?, &names, options.rank, options.scale())?;
        let parameters = peft::parameters(architecture, &factors, options)?;
        let trained = factors.iter().flat_map(|f| [f.down, f.up]).collect();
        let kind = Kind::Lora { options: options.clone(), sites, factors };
        let config = model.config().clone();
        Tuned::new((tensors, config, kind), &adapted, (trained, parameters), threads)
    }

    /// The model in a folder, all of whose weights are trained. They must be of 16 or 32 bits; what is trained is kept in f32.
    ///
    /// `threads`: `None` is one for each physical core.
    ///
    /// # Errors
    /// A model that cannot be read, is quantised or has an operation that has no gradient; too little memory.
    pub fn full(model: impl Into<Location>, threads: Option<usize>) -> Result<Tuned> {
        let tensors = Tensors::open(model)?;
        let model = models::load(&tensors, &models::Options::default())?;
        let packed = pack(&model.record(false)?)?;
        let trained = full::parameters(&packed, &tensors)?;
        let config = model.config().clone();
        Tuned::new((tensors, config, Kind::Full), &packed, trained, threads)
    }

    fn new(
        (tensors, config, kind): (Tensors, Config, Kind),
        program: &Program,
        (trained, parameters): (Vec<WeightId>, Vec<Parameter>),
        threads: Option<usize>,
    ) -> Result<Tuned> {
        let losses = losses(program)?;
        let gradient = differentiate(&losses, &trained)?;
        check(&gradient)?;
        let executor = Executor::new(threads)?;
        let weights = Weights::read(&[&losses, &gradient], &tensors, &trained, executor.team())?;
        Ok(Tuned {
            tensors,
            config,
            kind,
            executor,
            weights,
            losses,
            gradient,
            trained,
            parameters,
        })
    }

    /// The model's hyperparameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Bytes of activations and gradients that a batch of so many tokens takes, of which so many are to predict something.
    pub fn activation_bytes(&self, tokens: usize, predicted: usize) -> usize {
        Executor::bytes(&self.gradient, tokens, predicted)
    }

    /// From now on activations are computed again for their gradients, a block of the model at a time: about a third more work,
    /// in a fraction of the [memory](Tuned::activation_bytes). No bit of the results changes.
    pub fn recompute(&mut self) {
        // Two sublayers are a block.
        self.gradient = checkpoint(&self.gradient, 2);
    }

    /// Packs the parameters, which may have changed.
    fn refresh(&mut self) -> Result<()> {
        for (id, parameter) in self.trained.iter().zip(&self.parameters) {
            let team = self.executor.team();
            let named = |e: Error| Error { place: format!("{}: {}", parameter.name, e.place), ..e };
            let plus = match &self.kind {
                Kind::Full => full::added(&self.losses.weights[id.0].source),
                Kind::Lora { .. } => 0.0,
            };
            let whole: Vec<f32>;
            let values = match plus {
                0.0 => &parameter.values,
                plus => {
                    whole = parameter.values.iter().map(|value| value + plus).collect();
                    &whole
                }
            };
            self.weights.set(*id, &parameter.shape, values, team).map_err(named)?;
        }
        Ok(())
    }
}

/// The sum of the losses of rows that count.
fn loss(batch: &Batch, losses: &[f32]) -> Result<Loss> {
    let sum = losses.iter().map(|loss| f64::from(*loss)).sum::<f64>();
    if !sum.is_finite() {
        return Err(
            Error::new("loss", "a number that is finite", sum).hint("try a lower learning rate")
        );
    }
    Ok(Loss { sum, weight: batch.weights.iter().map(|w| f64::from(*w)).sum() })
}

/// Whether no row is to predict anything.
fn is_idle(batch: &Batch) -> bool {
    batch.weights.iter().all(|weight| *weight == 0.0)
}

impl Model for Tuned {
    fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    fn parameters_mut(&mut self) -> &mut [Parameter] {
        &mut self.parameters
    }

    fn loss(&mut self, batch: &Batch) -> Result<Loss> {
        if is_idle(batch) {
            return Ok(Loss::default());
        }
        self.refresh()?;
        let results = self.executor.run(&self.losses, &self.weights, batch)?;
        loss(batch, results.get(0))
    }

    fn gradients(&mut self, batch: &Batch, gradients: &mut [Vec<f32>]) -> Result<Loss> {
        let fits = |(row, of): (&Vec<f32>, &Parameter)| row.len() == of.values.len();
        let all = gradients.len() == self.parameters.len();
        if !all || !gradients.iter().zip(&self.parameters).all(fits) {
            let expected = format!("a row for each of {} parameters", self.parameters.len());
            return Err(Error::new("gradients", expected, "others"));
        }
        if is_idle(batch) {
            return Ok(Loss::default());
        }
        self.refresh()?;
        let results = self.executor.run(&self.gradient, &self.weights, batch)?;
        let loss = loss(batch, results.get(0))?;
        for (i, sums) in gradients.iter_mut().enumerate() {
            sums.iter_mut().zip(results.get(i + 1)).for_each(|(sum, own)| *sum += own);
        }
        Ok(loss)
    }

    fn export(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let unsound = |p: &&Parameter| p.values.iter().any(|value| !value.is_finite());
        if let Some(odd) = self.parameters.iter().find(unsound) {
            let expected = "numbers that are finite";
            return Err(Error::new(&odd.name, expected, "others"));
        }
        match &self.kind {
            Kind::Full => {
                full::export(&self.losses, &self.tensors, &self.trained, &self.parameters)
            }
            Kind::Lora { options, sites, factors } => {
                let (config, program) = (&self.config, &self.losses);
                let base = adapters::Base { config, program, tensors: &self.tensors };
                peft::export(&base, sites, factors, &self.parameters, options)
            }
        }
    }
}

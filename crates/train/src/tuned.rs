//! A model that is tuned: its recorded Program, differentiated.

use crate::adamw::unsound;
use crate::experts::{self, ExpertModule, ExpertWeight};
use crate::full::{self, Made, MadeWeight, Places};
use crate::gradients::{
    AdaptedProduct, ModuleFactors, adapt, apart, checkpoint, differentiate, losses, noisy, pack,
};
use crate::runner::{Hardware, Runner};
use crate::tables::WholeTable;
use crate::{AdamW, Batch, Loss, Moments, Parameter, Trainable, Usage, peft, tables};
use device::{Divided, Kept};
use engine::AdapterFile;
use formats::{Error, ErrorKind, Location, Result, Source, Tensors};
use models::Config;
use program::{AdapterFactors, Program, Site, Weight, WeightId};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

/// How a model is adapted by low-rank factors (Hu et al. 2021).
#[derive(Debug, Clone, PartialEq)]
pub struct LoraOptions {
    /// Columns and rows of the factors.
    pub rank: usize,
    /// The factors' product counts `alpha / rank`.
    pub alpha: f32,
    /// Whether it counts `alpha / sqrt(rank)` (rsLoRA, Kalajdzievski 2023).
    pub stabilised: bool,
    /// Whether the lengths of the changed matrix's rows are trained by themselves (DoRA, Liu et al.
    /// 2024).
    pub dora: bool,
    /// The matrices that have factors, by the last part of their names: `q` or `attention.q` as
    /// Delft names them, `q_proj` as Hugging Face does. If Hugging Face's model keeps several in
    /// one matrix, such as Phi-3's q, k and v, all of these have factors if any has. Empty: every
    /// matrix of the blocks; in models with experts, all but the feed-forwards. `experts`: the
    /// matrices of all experts.
    pub sites: Vec<String>,
    /// The last blocks of the model, whose matrices alone have factors; `None`: all of them.
    pub layers: Option<usize>,
    /// The tables that are trained whole beside the factors: [`EMBEDDINGS`](crate::EMBEDDINGS),
    /// [`HEAD`](crate::HEAD), or the last parts of their modules' names.
    pub whole: Vec<String>,
    /// The probability with which each element that factors read is zero in an update, as PEFT has
    /// it: each module has a mask of its own.
    pub dropout: f32,
    /// Determines the initial factors, and what dropout leaves out.
    pub seed: u64,
}

impl Default for LoraOptions {
    fn default() -> Self {
        LoraOptions {
            rank: 8,
            alpha: 16.0,
            stabilised: false,
            dora: false,
            sites: Vec::new(),
            layers: None,
            whole: Vec::new(),
            dropout: 0.0,
            seed: 0,
        }
    }
}

impl LoraOptions {
    /// The adapter's settings by name, which a run reports and compares. The seed is the run's.
    pub fn identity(&self) -> Vec<(String, String)> {
        let kind = if self.dora { "DoRA" } else { "LoRA" };
        let scale = if self.stabilised { "alpha / sqrt(rank)" } else { "alpha / rank" };
        let sites = if self.sites.is_empty() { "all".to_owned() } else { self.sites.join(", ") };
        let layers = self.layers.map_or("all".to_owned(), |layers| format!("the last {layers}"));
        let all = [
            ("trained", format!("{kind} of scale {scale}")),
            ("rank", self.rank.to_string()),
            ("alpha", self.alpha.to_string()),
            ("matrices", sites),
            ("layers", layers),
        ];
        let mut all = all.to_vec();
        if !self.whole.is_empty() {
            all.push(("whole", self.whole.join(", ")));
        }
        if self.dropout > 0.0 {
            all.push(("dropout", self.dropout.to_string()));
        }
        all.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// Whether experts' matrices are among the sites that are named.
    pub fn changes_experts(&self) -> bool {
        self.sites.iter().any(|site| peft::is_experts(site))
    }

    /// The factor on the factors' product.
    pub fn scale(&self) -> f32 {
        let rank = self.rank as f32;
        self.alpha / if self.stabilised { rank.sqrt() } else { rank }
    }
}

/// The kind of training.
enum Kind {
    /// Factors beside matrices.
    Lora {
        options: LoraOptions,
        sites: Vec<Site>,
        factors: Vec<ModuleFactors>,
        experts: Vec<ExpertModule>,
        tables: Vec<WholeTable>,
    },
    /// All weights.
    Full,
}

/// A weight of the Programs that is trained, and its values: elements of a parameter.
struct Trained {
    weight: WeightId,
    parameter: usize,
    elements: Range<usize>,
    /// How the weight is made of the elements.
    made: Made,
    /// Which of them each of the weight's elements is, if some are more than one.
    places: Option<Places>,
    /// The lengths that the elements are divided by.
    lengths: Option<Lengths>,
    /// The elements with the adapter left out; `None` where that does not matter.
    without: Option<Without>,
}

/// Elements with the adapter left out.
enum Without {
    /// All this number.
    All(f32),
    /// Their initial values.
    These(Vec<f32>),
    /// The weight as the model's files have it.
    Stored,
}

/// The lengths of a matrix's rows, its factors' product included. They count as constants in
/// gradients, as DoRA has it.
struct Lengths {
    matrix: WeightId,
    /// The parameters that are its factors.
    factors: [usize; 2],
    scale: f32,
    /// As of the last [`Tuned::refresh`].
    values: Vec<f64>,
}

impl Lengths {
    /// Computes them.
    ///
    /// # Errors
    /// A matrix that cannot be read; rows that have none.
    fn refresh(
        &mut self,
        matrix: &Weight,
        tensors: &Tensors,
        parameters: &[Parameter],
        rows: &Range<usize>,
    ) -> Result<()> {
        let [down, up] = self.factors.map(|factor| &parameters[factor]);
        let (rank, input) = (down.shape[0], down.shape[1]);
        let up = &up.values[rows.start * rank..rows.end * rank];
        let rows = matrix.read(tensors)?.to_f32()?;
        self.values = adapters::lengths(&rows, input, self.scale, [&down.values, up]);
        match self.values.iter().position(|length| !(length.is_finite() && *length > 0.0)) {
            None => Ok(()),
            Some(row) => {
                let found = format!("{} as the length of row {row}", self.values[row]);
                Err(Error::new(&matrix.name, "rows that are not all zeros, for DoRA", found))
            }
        }
    }
}

/// Whether there is dropout.
///
/// # Errors
/// A probability out of range, or beside what PEFT has none for.
fn check_dropout(options: &LoraOptions, experts: bool) -> Result<bool> {
    if !(0.0..1.0).contains(&options.dropout) {
        return Err(Error::new("dropout", "a probability below 1", options.dropout));
    }
    let beside = match (options.dora, experts) {
        _ if options.dropout == 0.0 => return Ok(false),
        (true, _) => "DoRA",
        (_, true) => "factors of experts",
        _ => return Ok(true),
    };
    let error = Error::new("dropout", "LoRA of single matrices, for dropout", beside);
    Err(error.of(ErrorKind::Unsupported))
}

/// The weights of factors, whose parameters [`peft::parameters`] has in this order.
fn trained(factors: &[ModuleFactors], options: &LoraOptions) -> Vec<Trained> {
    let (rank, scale) = (options.rank, options.scale());
    let mut all = Vec::new();
    let mut push = |weight, parameter, elements, lengths, without| {
        let made = Made::AsStored;
        all.push(Trained { weight, parameter, elements, made, places: None, lengths, without });
    };
    for (module, factors) in factors.iter().enumerate() {
        let first = module * peft::count(options);
        push(factors.down, first, 0..rank * factors.input, None, None);
        for part in &factors.parts {
            let rows = part.first_row..part.first_row + part.rows.len();
            push(
                part.up,
                first + 1,
                rows.start * rank..rows.end * rank,
                None,
                Some(Without::All(0.0)),
            );
            if let Some(gain) = part.gain {
                let (matrix, factors) = (part.matrix, [first, first + 1]);
                let lengths = Lengths { matrix, factors, scale, values: Vec::new() };
                push(gain, first + 2, rows, Some(lengths), Some(Without::All(1.0)));
            }
        }
    }
    all
}

/// The parameters that are divided by lengths, with the factors that stand before each.
fn divided(trained: &[Trained]) -> Vec<Divided> {
    let mut found = Vec::new();
    for (i, own) in trained.iter().enumerate() {
        let Some(Lengths { matrix, factors, scale, .. }) = &own.lengths else { continue };
        let before = |parameter: usize| {
            let mut before = trained[..i].iter().rev();
            before.find(|other| other.parameter == parameter).map(|other| other.weight)
        };
        let [down, up] = factors.map(before);
        if let Some((down, up)) = down.zip(up) {
            found.push(Divided { weight: own.weight, matrix: *matrix, down, up, scale: *scale });
        }
    }
    found
}

/// The Programs of a model in training: the losses alone, and with the gradients.
const LOSSES: usize = 0;
const GRADIENTS: usize = 1;

/// A model in training.
pub struct Tuned {
    tensors: Tensors,
    config: Config,
    kind: Kind,
    runner: Runner,
    trained: Vec<Trained>,
    parameters: Vec<Parameter>,
    /// The parameters of the base, if it is not the model without the adapter.
    base: Option<Vec<Parameter>>,
    /// Whether the runner was last given the parameters (true) or the base's; none where parameters
    /// may have changed.
    given: Option<bool>,
    /// Whether the device has newer parameters and moments: it makes the updates.
    newer: bool,
    /// What gradients are made of: the losses, with dropout and noise.
    learned: Program,
    /// Whether activations are computed again.
    recomputes: bool,
}

impl Tuned {
    /// The model in a folder or a GGUF file, of any encoding, with low-rank factors that are
    /// trained beside its matrices. `down` begins as PEFT's does, uniform within `1 / sqrt(in)`;
    /// `up` begins with zeros, so that nothing is changed at first.
    ///
    /// # Errors
    /// A model that cannot be read or has an operation that has no gradient on the device; sites
    /// that it has not; options out of range; too little memory.
    pub fn lora(
        model: impl Into<Location>,
        options: &LoraOptions,
        hardware: impl Into<Hardware>,
    ) -> Result<Tuned> {
        Tuned::low_rank(Tensors::open(model)?, |_| Ok((options.clone(), None)), hardware.into())
    }

    /// The model in a folder or a GGUF file, with an adapter for it that is trained on. Its rank,
    /// alpha, kind and matrices are that adapter's.
    ///
    /// # Errors
    /// As [`Tuned::lora`]; an adapter that does not fit the model, was made for another, changes
    /// the table of embeddings, has weights of the model anew, or has several ranks or scales.
    pub fn adapter(
        model: impl Into<Location>,
        adapter: &AdapterFile,
        hardware: impl Into<Hardware>,
    ) -> Result<Tuned> {
        let tensors = Tensors::open(model)?;
        let file = engine::open_adapter(adapter, &tensors)?;
        if let Some(tensor) = file.anew() {
            let place = format!("{}: {tensor}", file.path().display());
            let error = Error::new(place, "factors alone, to go on from", "weights of the model");
            return Err(error.of(ErrorKind::Unsupported));
        }
        let options = |base: &adapters::Base<'_>| {
            let resolved = file.resolve(base, 1.0)?;
            let options = peft::options(&resolved).map_err(|e| Error {
                place: format!("{}: {}", file.path().display(), e.place),
                ..e
            })?;
            Ok((options, Some(resolved)))
        };
        Tuned::low_rank(tensors, options, hardware.into())
    }

    /// A model with factors, which begin as an adapter's, if there is one.
    fn low_rank(
        tensors: Tensors,
        options: impl FnOnce(&adapters::Base<'_>) -> Result<(LoraOptions, Option<AdapterFactors>)>,
        hardware: Hardware,
    ) -> Result<Tuned> {
        let model = models::load(&tensors, &models::ReadOptions::default())?;
        let (config, recorded) = (model.config().clone(), model.record(false)?);
        // What Hugging Face's model has as modules of their own is taken apart.
        let base = adapters::Base { config: &config, program: &recorded, tensors: &tensors };
        let pieces = |weight: WeightId| -> Result<Vec<(String, Source, usize)>> {
            let pieces = base.pieces(weight)?.into_iter();
            Ok(pieces.map(|own| (own.name, own.source.clone(), own.rows.len())).collect())
        };
        let recorded = apart(&recorded, &pieces)?;
        let base = adapters::Base { config: &config, program: &recorded, tensors: &tensors };
        let (options, begun) = options(&base)?;
        let whole = options.alpha.is_finite() && options.alpha > 0.0;
        if options.rank == 0 || options.rank > 4096 || !whole {
            let found = format!("rank {}, alpha {}", options.rank, options.alpha);
            return Err(Error::new("lora", "a rank of 1 to 4096 and alpha above 0", found));
        }
        let modules = peft::modules(&base, &options)?;
        let module = |weight: WeightId| {
            let own = modules.iter().find(|(site, _)| site.weight == weight);
            own.map(|(_, module)| module.clone())
        };
        let how = AdaptedProduct {
            rank: options.rank,
            scale: options.scale(),
            gains: options.dora,
            dropout: None,
        };
        let wanted = |stacks: &[String; 3]| peft::expert_sites(&options, config.layers, stacks);
        let packed = pack(&recorded)?;
        let adapted = |how: AdaptedProduct| {
            let (adapted, factors) = adapt(&packed, &module, how)?;
            let (adapted, experts) = experts::adapt(&base, &adapted, &wanted, &options)?;
            let (adapted, tables) = tables::apart(&base, &adapted, &options)?;
            Ok((adapted, factors, experts, tables))
        };
        let (measured, factors, experts, tables) = adapted(how)?;
        if factors.is_empty() && experts.is_empty() {
            let found = options.sites.join(", ");
            return Err(Error::new("sites", "some that the blocks have", found));
        }
        if options.dora && !experts.is_empty() {
            let error = Error::new("sites", "matrices that can have DoRA", experts::SITE);
            return Err(error.of(ErrorKind::Unsupported).hint("experts can have LoRA"));
        }
        let learned = match check_dropout(&options, !experts.is_empty())? {
            true => {
                adapted(AdaptedProduct { dropout: Some((options.dropout, options.seed)), ..how })?.0
            }
            false => measured.clone(),
        };
        let sites: Vec<Site> = modules.into_iter().map(|(site, _)| site).collect();
        let mut parameters = peft::parameters(&base, &factors, &options)?;
        if let Some(begun) = &begun {
            peft::begin(&base, &sites, &factors, &mut parameters, begun)?;
        }
        let mut trained = trained(&factors, &options);
        for (i, mixture) in experts.iter().enumerate() {
            let first = parameters.len();
            let mut own = mixture.parameters(factors.len() + i, options.seed);
            if let Some(begun) = &begun {
                mixture.begin(&mut own, begun)?;
            }
            parameters.extend(own);
            trained.extend(mixture.trained(first).into_iter().map(|own| {
                let ExpertWeight { weight, parameter, elements, up } = own;
                let without = up.then_some(Without::All(0.0));
                let (made, places) = (Made::AsStored, None);
                Trained { weight, parameter, elements, made, places, lengths: None, without }
            }));
        }
        for table in &tables {
            let parameter = table.parameter(&measured, &base)?;
            trained.push(Trained {
                weight: table.weight,
                parameter: parameters.len(),
                elements: 0..parameter.values.len(),
                made: Made::AsStored,
                places: None,
                lengths: None,
                without: Some(Without::Stored),
            });
            parameters.push(parameter);
        }
        let kind = Kind::Lora { options, sites, factors, experts, tables };
        let programs = [&measured, &learned];
        Tuned::new((tensors, config, kind), programs, (trained, parameters), hardware)
    }

    /// The model in a folder, all of whose weights are trained. They must be of 16 or 32 bits; what
    /// is trained is kept in f32.
    ///
    /// # Errors
    /// A model that cannot be read, is quantised or has an operation that has no gradient on the
    /// device; too little memory.
    pub fn full(model: impl Into<Location>, hardware: impl Into<Hardware>) -> Result<Tuned> {
        Tuned::whole(Tensors::open(model)?, None, hardware.into())
    }

    /// The same of the weights of the last `layers` blocks alone; the head and what stands in front
    /// of it stay as they are.
    ///
    /// # Errors
    /// As [`Tuned::full`]; more blocks than there are, or none.
    pub fn last_blocks(
        model: impl Into<Location>,
        layers: usize,
        hardware: impl Into<Hardware>,
    ) -> Result<Tuned> {
        Tuned::whole(Tensors::open(model)?, Some(layers), hardware.into())
    }

    fn whole(tensors: Tensors, layers: Option<usize>, hardware: Hardware) -> Result<Tuned> {
        let model = models::load(&tensors, &models::ReadOptions::default())?;
        let packed = pack(&model.record(false)?)?;
        let first = peft::first_block(layers, model.config().layers)?;
        let wanted = |name: &str| layers.is_none() || peft::is_from(name, first);
        let (weights, parameters) = full::parameters(&packed, &tensors, &wanted)?;
        let whole = |(parameter, own): (usize, MadeWeight)| {
            let parameters: &[Parameter] = &parameters;
            let elements = 0..parameters[parameter].values.len();
            let MadeWeight { weight, made, places } = own;
            Trained { weight, parameter, elements, made, places, lengths: None, without: None }
        };
        let trained = weights.into_iter().enumerate().map(whole).collect();
        let config = model.config().clone();
        let all = (trained, parameters);
        Tuned::new((tensors, config, Kind::Full), [&packed; 2], all, hardware)
    }

    fn new(
        (tensors, config, kind): (Tensors, Config, Kind),
        [measured, learned]: [&Program; 2],
        (mut trained, parameters): (Vec<Trained>, Vec<Parameter>),
        hardware: Hardware,
    ) -> Result<Tuned> {
        let (measured, learned) = (losses(measured)?, losses(learned)?);
        let wrt: Vec<WeightId> = trained.iter().map(|own| own.weight).collect();
        let gradient = differentiate(&learned, &wrt)?;
        let divided = divided(&trained);
        let runner = Runner::new(vec![measured, gradient], &tensors, (wrt, divided), hardware)?;
        // Another device divides by the lengths that it computes itself.
        for own in trained.iter_mut().filter(|own| runner.is_device() && own.lengths.is_some()) {
            let first = parameters[own.parameter].values[own.elements.clone()].to_vec();
            (own.lengths, own.without) = (None, Some(Without::These(first)));
        }
        let (base, given, newer) = (None, None, false);
        let recomputes = false;
        Ok(Tuned {
            tensors,
            config,
            kind,
            runner,
            trained,
            parameters,
            base,
            given,
            newer,
            learned,
            recomputes,
        })
    }

    /// From now on [`Tuned::base_losses`] are the losses of the adapter as it stands.
    ///
    /// # Errors
    /// If the device fails.
    pub fn rebase(&mut self) -> Result<()> {
        self.fetch(None)?;
        self.base = Some(self.parameters.clone());
        self.given = None;
        Ok(())
    }

    /// The model's hyperparameters.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Bytes of activations and gradients that a batch of `tokens` tokens takes, of which
    /// `predicted` are to predict something.
    pub fn activation_bytes(&self, tokens: usize, predicted: usize) -> usize {
        self.runner.bytes(GRADIENTS, tokens, predicted)
    }

    /// Bytes of the device's own memory that are left for that; none where it is the machine's
    /// memory, or cannot be told.
    ///
    /// # Errors
    /// If the device does not answer.
    pub fn free_memory(&self) -> Result<Option<usize>> {
        self.runner.free()
    }

    /// Bytes of the device's own memory that updates take beside the weights; the host's share is
    /// [`crate::run::memory`].
    pub fn update_bytes(&self) -> usize {
        if self.updates_there() { self.runner.update_bytes() } else { 0 }
    }

    /// Whether the device makes the updates: of parameters that are its weights as they are, one each.
    fn updates_there(&self) -> bool {
        let as_stored = |own: &Trained| own.made == Made::AsStored && own.places.is_none();
        let bare = |own: &Trained| own.lengths.is_none() && as_stored(own);
        // Elements of several weights are updated by the sum of their gradients.
        let shared = self.trained.windows(2).any(|pair| {
            pair[0].parameter == pair[1].parameter && pair[0].elements == pair[1].elements
        });
        self.runner.is_device() && !shared && self.trained.iter().all(bare)
    }

    /// The seconds that each operation of the last batch takes, by name, if the device can tell.
    ///
    /// # Errors
    /// If the device fails.
    pub fn time(&mut self) -> Result<Option<BTreeMap<&'static str, f64>>> {
        self.runner.time()
    }

    /// This process's usage of the device's own memory; `None` where that is the machine's.
    pub fn memory(&self) -> Option<Usage> {
        self.runner.usage()
    }

    /// From now on activations are computed again for their gradients, a block of the model at a
    /// time: about a third more work, in a fraction of the [memory](Tuned::activation_bytes). No
    /// bit of the results changes.
    ///
    /// # Errors
    /// If the device refuses.
    pub fn recompute(&mut self) -> Result<()> {
        self.recomputes = true;
        // Two sublayers are a block.
        self.runner.replace(GRADIENTS, checkpoint(self.runner.program(GRADIENTS), 2))
    }

    /// From now on updates are made with noise on the embeddings, `alpha` strong (NEFTune, Jain et
    /// al. 2024), which follows from the seed and the [number](Batch::read) of each row. Losses are
    /// measured without.
    ///
    /// # Errors
    /// A number that is not above zero; a model without a table of embeddings; if the device
    /// refuses.
    pub fn add_noise(&mut self, alpha: f32, seed: u64) -> Result<()> {
        if !(alpha.is_finite() && alpha > 0.0) {
            return Err(Error::new("noise", "a number above 0", alpha));
        }
        self.learned = noisy(&self.learned, alpha, seed)?;
        let wrt: Vec<WeightId> = self.trained.iter().map(|own| own.weight).collect();
        let gradient = differentiate(&self.learned, &wrt)?;
        self.runner.replace(GRADIENTS, gradient)?;
        if self.recomputes { self.recompute() } else { Ok(()) }
    }

    /// Whether what is trained is an adapter.
    pub fn is_adapter(&self) -> bool {
        matches!(self.kind, Kind::Lora { .. })
    }

    /// The options of the adapter that is trained; none where all weights are.
    pub fn lora_options(&self) -> Option<&LoraOptions> {
        match &self.kind {
            Kind::Lora { options, .. } => Some(options),
            Kind::Full => None,
        }
    }

    /// SHA-256 of the parameters as they stand, in hexadecimal.
    pub fn digest(&self) -> String {
        let mut digest = Sha256::new();
        for value in self.parameters.iter().flat_map(|parameter| &parameter.values) {
            digest.update(value.to_le_bytes());
        }
        digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The loss of each sequence of a batch.
    ///
    /// # Errors
    /// As [`Trainable::loss`].
    pub fn sequence_losses(&mut self, batch: &Batch) -> Result<Vec<f64>> {
        self.refresh(true)?;
        self.each_loss(batch)
    }

    /// The loss that each sequence of a batch has without the adapter, or with what
    /// [`Tuned::rebase`] kept.
    ///
    /// # Errors
    /// As [`Trainable::loss`].
    pub fn base_losses(&mut self, batch: &Batch) -> Result<Vec<f64>> {
        self.refresh(false)?;
        self.each_loss(batch)
    }

    fn each_loss(&mut self, batch: &Batch) -> Result<Vec<f64>> {
        if is_idle(batch) {
            return Ok(vec![0.0; batch.sequences.len()]);
        }
        let results = self.runner.run(LOSSES, batch)?;
        let losses = results.get(0);
        loss(batch, losses)?;
        let mut rest = losses.iter();
        let sequences = batch.sequences.iter().map(|rows| {
            let counted = batch.weights[rows.clone()].iter().filter(|weight| **weight != 0.0);
            rest.by_ref().take(counted.count()).map(|loss| f64::from(*loss)).sum::<f64>()
        });
        Ok(sequences.collect())
    }

    /// Gives the runner the parameters, or the base's, if it has not got them already.
    fn refresh(&mut self, adapted: bool) -> Result<()> {
        if self.given == Some(adapted) {
            return Ok(());
        }
        self.fetch(None)?;
        self.given = None;
        let base = self.base.as_ref().filter(|_| !adapted);
        let parameters = base.unwrap_or(&self.parameters);
        for own in &mut self.trained {
            let weights = &self.runner.program(LOSSES).weights;
            let (parameter, weight) = (&parameters[own.parameter], &weights[own.weight.0]);
            let named = |e: Error| Error { place: format!("{}: {}", parameter.name, e.place), ..e };
            let mut values = Cow::from(&parameter.values[own.elements.clone()]);
            let bare = !adapted && base.is_none();
            if let Some(without) = own.without.as_ref().filter(|_| bare) {
                match without {
                    Without::All(number) => values.to_mut().fill(*number),
                    Without::These(first) => values = Cow::from(first),
                    Without::Stored => values = Cow::from(weight.read(&self.tensors)?.to_f32()?),
                }
                let shape = weight.shape.clone();
                self.runner.set(own.weight, &shape, &values).map_err(named)?;
                continue;
            }
            if own.made != Made::AsStored {
                own.made.apply(values.to_mut());
            }
            if let Some(places) = &own.places {
                values = Cow::Owned(places.spread(&values));
            }
            if let Some(lengths) = &mut own.lengths {
                let matrix = &weights[lengths.matrix.0];
                lengths.refresh(matrix, &self.tensors, parameters, &own.elements)?;
                let each = values.to_mut().iter_mut().zip(&lengths.values);
                each.for_each(|(value, length)| *value = (f64::from(*value) / length) as f32);
            }
            let shape = weight.shape.clone();
            self.runner.set(own.weight, &shape, &values).map_err(named)?;
        }
        self.given = Some(adapted);
        Ok(())
    }
}

impl Tuned {
    /// The error of sums of gradients on the device, of which one is not finite.
    ///
    /// # Errors
    /// If the device fails.
    fn unsound_gradient(&mut self) -> Result<Error> {
        let trainer = self.runner.trainer()?;
        for own in &self.trained {
            let parameter = &self.parameters[own.parameter];
            let mut sums = vec![0.0; own.elements.len()];
            trainer.read(own.weight, Kept::Sum, &mut sums)?;
            if sums.iter().any(|sum| !sum.is_finite()) {
                return Ok(unsound(parameter));
            }
        }
        let error = Error::new("the norm of all gradients", "a finite number", "another");
        Ok(error.hint("take a lower learning rate"))
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

impl Trainable for Tuned {
    fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    fn parameters_mut(&mut self) -> &mut [Parameter] {
        (self.given, self.newer) = (None, false);
        &mut self.parameters
    }

    fn loss(&mut self, batch: &Batch) -> Result<Loss> {
        if is_idle(batch) {
            return Ok(Loss::default());
        }
        self.refresh(true)?;
        let results = self.runner.run(LOSSES, batch)?;
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
        self.refresh(true)?;
        let results = self.runner.run(GRADIENTS, batch)?;
        let loss = loss(batch, results.get(0))?;
        for (i, own) in self.trained.iter().enumerate() {
            let sums = &mut gradients[own.parameter][own.elements.clone()];
            let mut found = match &own.places {
                Some(places) => Cow::Owned(places.added(results.get(i + 1), sums.len())),
                None => Cow::Borrowed(results.get(i + 1)),
            };
            let values = &self.parameters[own.parameter].values[own.elements.clone()];
            if own.made != Made::AsStored {
                own.made.back(values, found.to_mut());
            }
            let each = sums.iter_mut().zip(&found[..]);
            match &own.lengths {
                None => each.for_each(|(sum, more)| *sum += more),
                Some(lengths) => each.zip(&lengths.values).for_each(|((sum, more), length)| {
                    *sum += (f64::from(*more) / length) as f32;
                }),
            }
        }
        Ok(loss)
    }

    fn accumulate(
        &mut self,
        batch: &Batch,
        first: bool,
        gradients: &mut [Vec<f32>],
    ) -> Result<Loss> {
        if !self.updates_there() {
            if first {
                gradients.iter_mut().for_each(|row| row.fill(0.0));
            }
            return self.gradients(batch, gradients);
        }
        self.refresh(true)?;
        let idle = is_idle(batch);
        let loss = match idle {
            true => Loss::default(),
            false => loss(batch, self.runner.run_there(GRADIENTS, batch)?)?,
        };
        let trainer = self.runner.trainer()?;
        match (idle, first) {
            (true, true) => trainer.clear()?,
            (true, false) => {}
            (false, first) => trainer.accumulate(first)?,
        }
        Ok(loss)
    }

    fn update(
        &mut self,
        options: &AdamW,
        [rate, scale]: [f64; 2],
        gradients: &[Vec<f32>],
        moments: &mut Moments,
    ) -> Result<f64> {
        if !self.updates_there() {
            return moments.update(self.parameters_mut(), gradients, options, rate, scale);
        }
        let squares = self.runner.trainer()?.squares()?;
        if !squares.is_finite() {
            return Err(self.unsound_gradient()?);
        }
        let norm = squares.sqrt() / scale;
        let rule = options.rule(moments.updates + 1, norm, rate, scale);
        self.runner.trainer()?.update(&rule)?;
        moments.updates += 1;
        self.newer = true;
        Ok(norm)
    }

    fn fetch(&mut self, moments: Option<&mut Moments>) -> Result<()> {
        if !self.updates_there() {
            return Ok(());
        }
        let trainer = self.runner.trainer()?;
        for own in self.trained.iter().filter(|_| self.newer) {
            let values = &mut self.parameters[own.parameter].values[own.elements.clone()];
            trainer.read(own.weight, Kept::Values, values)?;
        }
        self.newer = false;
        let Some(moments) = moments else { return Ok(()) };
        for own in &self.trained {
            for (kept, rows) in
                [(Kept::First, &mut moments.first), (Kept::Second, &mut moments.second)]
            {
                trainer.read(own.weight, kept, &mut rows[own.parameter][own.elements.clone()])?;
            }
        }
        Ok(())
    }

    fn go_on_from(&mut self, moments: &Moments) -> Result<()> {
        if !self.updates_there() {
            return Ok(());
        }
        let trainer = self.runner.trainer()?;
        trainer.forget()?;
        for own in self.trained.iter().filter(|_| moments.updates > 0) {
            for (kept, rows) in [(Kept::First, &moments.first), (Kept::Second, &moments.second)] {
                trainer.write(own.weight, kept, &rows[own.parameter][own.elements.clone()])?;
            }
        }
        Ok(())
    }

    fn export(&mut self) -> Result<Vec<(String, Vec<u8>)>> {
        self.fetch(None)?;
        let unsound = |p: &&Parameter| p.values.iter().any(|value| !value.is_finite());
        if let Some(odd) = self.parameters.iter().find(unsound) {
            let expected = "numbers that are finite";
            return Err(Error::new(&odd.name, expected, "others"));
        }
        let program = self.runner.program(LOSSES);
        match &self.kind {
            Kind::Full => {
                let weights: Vec<(WeightId, Option<&Places>)> =
                    self.trained.iter().map(|own| (own.weight, own.places.as_ref())).collect();
                full::export(program, &self.tensors, &weights, &self.parameters)
            }
            Kind::Lora { options, sites, factors, experts, tables } => {
                let config = &self.config;
                let base = adapters::Base { config, program, tensors: &self.tensors };
                let all = (&sites[..], &factors[..], &experts[..], &tables[..]);
                peft::export(&base, all, &self.parameters, options)
            }
        }
    }
}

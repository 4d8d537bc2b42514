//! From a path to a running model.

use crate::adapters::{self, Adapter, Adapters, Seats};
use crate::embed::EmbeddingForm;
use crate::events::{Capability, Events, Stage};
use crate::parts::{Gate, Home};
use crate::pool::Pool;
use crate::prefix::{Key, Prefixes};
use crate::prepare::Prepared;
use crate::prompt::Prompt;
use crate::session::Session;
use crate::slots::Slots;
use crate::worker::Inbox;
use device::{
    About, CacheType, ComputePeaks, DeviceSpec, Dispatch, Executor, Plan, Processes, Roof,
    SplitMode,
};
use formats::{Error, Hint, Location, Result, Setting, Tensors};
use models::{Config, Ending};
use ops::sample::Options;
use program::{CacheLayer, Group};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tokens::{ChatTemplate, Tokenizer};

/// How a model is loaded.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// Where to compute.
    pub device: DeviceSpec,
    /// How several devices share the model.
    pub split_mode: SplitMode,
    /// The processes whose devices share the model with this one's, by [`SplitMode::Tensor`];
    /// `None`: all devices are this process's. [`device`](Self::device) is then rank 0's.
    pub processes: Option<Processes>,
    /// How a GPU is given its work.
    pub dispatch: Dispatch,
    /// Number of layers on GPUs: the last ones, with the head. The layers before them, with the
    /// embedding table, are on the CPU. `None`, or the model's number of layers: the whole model.
    pub gpu_layers: Option<usize>,
    /// Layers, from the first on, whose experts are on the CPU, with all else on the one GPU.
    pub cpu_experts: usize,
    /// Threads of the CPU device; `None`: one for each physical core this process may use.
    pub threads: Option<usize>,
    /// Positions a session may hold; `None`: as many as the model was trained for, or where memory
    /// is short the greatest power of two that fits, but no fewer than 2,048.
    pub context: Option<usize>,
    /// Whether a full context drops its oldest positions instead of ending generation.
    pub rotate: bool,
    /// Element type of cached keys and values.
    pub cache_type: CacheType,
    /// Sessions that may hold a full context at the same time.
    pub sessions: usize,
    /// Computes each token as it is computed among many, so that on a GPU, too, no answer depends
    /// on what else is computed: for servers and batches. A request that is alone then takes
    /// longer.
    pub batched: bool,
    /// Tokens computed together in prefill; `None`: as many as keep the device busy.
    pub chunk: Option<usize>,
    /// Its first result: logits, which generate, or hidden states, which embeddings are made of.
    pub ending: Ending,
    /// How embeddings are made; `None`: as the model's files say.
    pub embeddings: Option<EmbeddingForm>,
    /// The intermediate values that are kept.
    pub trace: Trace,
    /// Whether a GPU with much memory left keeps unpacked copies of packed matrices, from which
    /// prompts are faster.
    pub copies: bool,
    /// Loads weights that are NaN or infinite as they are; else they are refused.
    pub allow_nan: bool,
    /// Keys of the model's configuration that are passed over though nothing reads them; else they
    /// are refused, since they may change what the model computes.
    pub ignore_keys: Vec<String>,
    /// Adapters on top of the model.
    pub adapters: Adapters,
    /// Listeners to the stages that it goes through, from its files to its end.
    pub events: Events,
}

/// Intermediate values that are kept, for [`Session::traced`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Trace {
    /// None.
    #[default]
    Nothing,
    /// Each layer's output, for inspection.
    Layers,
    /// The inputs of products, for an importance matrix; see [`crate::importance`].
    Inputs,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            device: DeviceSpec::Cpu,
            split_mode: SplitMode::default(),
            processes: None,
            dispatch: Dispatch::default(),
            gpu_layers: None,
            cpu_experts: 0,
            threads: None,
            context: None,
            rotate: false,
            cache_type: CacheType::F16,
            sessions: 16,
            batched: false,
            chunk: None,
            ending: Ending::Logits,
            embeddings: None,
            trace: Trace::Nothing,
            copies: true,
            allow_nan: false,
            ignore_keys: Vec::new(),
            adapters: Adapters::default(),
            events: Events::default(),
        }
    }
}

impl LoadOptions {
    /// The default on a device.
    pub fn on(device: DeviceSpec) -> Self {
        LoadOptions { device, ..LoadOptions::default() }
    }

    /// Tokens computed together in prefill.
    pub(crate) fn chunk(&self) -> usize {
        self.chunk.unwrap_or_else(|| self.device.chunk())
    }

    /// A group and its context as its block tables keep them: a rotating context is a window over
    /// no end.
    pub(crate) fn span(&self, group: Group, context: usize) -> (Group, usize) {
        if self.rotate {
            let window = Some(group.window.unwrap_or(context).min(context));
            (Group { window, ..group }, usize::MAX)
        } else {
            (group, context)
        }
    }
}

/// Rows with logits that one replay computes at most: a bound on the logits held at once.
pub(crate) const OUTPUT_ROWS: usize = 64;

/// The description of a loaded model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    /// Its name, from the file's metadata or the path.
    pub name: String,
    /// Architecture, as the registry names it.
    pub architecture: &'static str,
    /// Elements of all weights.
    pub parameters: u64,
    /// Bytes of all weights in the file.
    pub file_bytes: u64,
    /// Positions the model was trained for.
    pub trained_context: usize,
    /// Positions a session may hold.
    pub context: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// The device it runs on.
    pub device: About,
    /// Milliseconds from the path to ready.
    pub load_ms: u64,
}

/// A loaded model on a device. Cheap to share: sessions hold a reference to it.
#[derive(Clone)]
pub struct Engine(pub(crate) Arc<Shared>);

pub(crate) struct Shared {
    pub(crate) executor: Mutex<Box<dyn Executor>>,
    pub(crate) pool: Pool,
    pub(crate) prefixes: Prefixes,
    pub(crate) slots: Slots,
    pub(crate) seats: Seats,
    pub(crate) adapters: Vec<Adapter>,
    /// Where the model's files are.
    pub(crate) location: Location,
    pub(crate) groups: Vec<Group>,
    pub(crate) layers: Vec<CacheLayer>,
    pub(crate) fingerprint: String,
    pub(crate) traces: Vec<String>,
    pub(crate) inputs: Vec<program::Input>,
    pub(crate) config: Config,
    pub(crate) options: LoadOptions,
    pub(crate) info: Info,
    pub(crate) tokenizer: Option<Arc<Tokenizer>>,
    /// Bytes of the tokenizer's longest token, once that was asked for.
    pub(crate) longest_token: OnceLock<usize>,
    pub(crate) ends: Vec<u32>,
    pub(crate) template: Option<Arc<ChatTemplate>>,
    pub(crate) defaults: Options,
    pub(crate) plan: Vec<Plan>,
    pub(crate) warnings: Vec<String>,
    /// How embeddings are made, if it ends in hidden states.
    pub(crate) embeds: Option<EmbeddingForm>,
    /// Whose turn it is to compute several texts together.
    pub(crate) together: Mutex<()>,
    /// Where the worker looks for requests, once there was one.
    pub(crate) worker: OnceLock<Arc<Inbox>>,
    /// The device of each plan.
    pub(crate) places: Vec<DeviceSpec>,
    /// In a model's first part: its other parts.
    pub(crate) others: Mutex<Vec<Arc<Shared>>>,
    pub(crate) gate: Arc<Gate>,
    /// How often its executor was replaced; nothing that was cached before is left.
    pub(crate) epoch: AtomicU64,
    /// Whether its device is broken.
    pub(crate) lost: AtomicBool,
    /// The state that all parts of the model share.
    pub(crate) home: Arc<Home>,
    /// Dropped last: whoever sees it gone knows that all else is.
    pub(crate) whole: Arc<()>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        if let Some(inbox) = self.worker.get() {
            inbox.close();
        }
    }
}

impl Engine {
    /// Loads a `.gguf` file or a Hugging Face folder, by its path, or a file that is part of the
    /// program.
    ///
    /// # Errors
    /// Anything missing, damaged or unsupported, by name.
    pub fn load(model: impl Into<Location>, options: &LoadOptions) -> Result<Engine> {
        Engine::load_with(model, options, &mut |_, _| {})
    }

    /// [`Engine::load`], telling `progress` the bytes read so far and in all.
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn load_with(
        model: impl Into<Location>,
        options: &LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Engine> {
        Engine::prepare(model, options)?.load(progress)
    }

    /// Opens a model and its device without reading weights: what is needed to tell its
    /// [`Prepared::plan`].
    ///
    /// # Errors
    /// As [`Engine::load`].
    pub fn prepare(model: impl Into<Location>, options: &LoadOptions) -> Result<Prepared> {
        Prepared::new(model.into(), options)
    }

    /// The model's description.
    pub fn info(&self) -> &Info {
        &self.0.info
    }

    /// The model's identity: SHA-256, in hexadecimal, of its tensors' names, types and
    /// shapes and some of their bytes. It stays when files are moved or renamed.
    pub fn fingerprint(&self) -> &str {
        &self.0.fingerprint
    }

    /// How it was loaded.
    pub fn options(&self) -> &LoadOptions {
        &self.0.options
    }

    /// Its hyperparameters.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// Its tokenizer, if one came with the weights.
    pub fn tokenizer(&self) -> Option<&Tokenizer> {
        self.0.tokenizer.as_deref()
    }

    /// The same, for what outlives the engine.
    pub fn shared_tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.0.tokenizer.as_ref()
    }

    /// Its chat template, if one came with the weights.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.0.template.as_deref()
    }

    /// The tokens of a prompt, as [`Session::generate`] computes them.
    ///
    /// # Errors
    /// A prompt that the model's tokenizer or chat template refuses, or a model without them; a
    /// text that [cannot fit](Engine::check_length).
    pub fn encode(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        self.0.encode(prompt)
    }

    /// Refuses a text that is far too long for the context before it is made into tokens, which
    /// takes many times its memory, and for long words minutes.
    ///
    /// # Errors
    /// A text of more bytes than [`Engine::longest_text`].
    pub fn check_length(&self, text: &str) -> Result<()> {
        self.0.check_length(text)
    }

    /// Bytes that a context's tokens cannot say, with some to spare for unknown characters, of
    /// which many may be one token; unlimited where the context rotates.
    pub fn longest_text(&self) -> usize {
        self.0.longest_text()
    }

    /// The sampling settings that the model's makers recommend; what most programs take where they
    /// say nothing.
    pub fn sampling_defaults(&self) -> &Options {
        &self.0.defaults
    }

    /// Ids that end generation.
    pub fn end_tokens(&self) -> &[u32] {
        &self.0.ends
    }

    /// Oddities of the model's files, and assumptions, one short line each: what its user
    /// should know before relying on what it says.
    pub fn warnings(&self) -> &[String] {
        &self.0.warnings
    }

    /// Names of the traced values, in the order of [`Session::traced`].
    pub fn traces(&self) -> &[String] {
        &self.0.traces
    }

    /// The memory plan of each device, made before anything was loaded.
    pub fn plan(&self) -> &[Plan] {
        &self.0.plan
    }

    /// Where its files are.
    pub fn location(&self) -> &Location {
        &self.0.location
    }

    /// The device of each of the plans.
    pub fn places(&self) -> &[DeviceSpec] {
        &self.0.places
    }

    /// Drops this handle and waits, for at most `time`, until the engine is gone and its memory is
    /// the system's again; false if another handle, session or request still holds it by then.
    pub fn unload(self, time: Duration) -> bool {
        const PAUSE: Duration = Duration::from_millis(2);
        let (whole, start) = (Arc::downgrade(&self.0.whole), Instant::now());
        let (events, capabilities) = (self.0.options.events.clone(), self.capabilities());
        let tell = |stage| capabilities.iter().for_each(|of| events.tell(*of, stage, None));
        tell(Stage::Draining);
        drop(self);
        // The worker may hold the engine for a moment longer than its last request.
        while whole.strong_count() > 0 {
            if start.elapsed() >= time {
                return false;
            }
            std::thread::sleep(PAUSE);
        }
        device::give_back();
        tell(Stage::Unloaded);
        true
    }

    /// Measures how fast this device can read the weights: what bounds decoding.
    pub fn roof(&self) -> Roof {
        self.0.executor().roof()
    }

    /// Measures how fast this device computes; `None` where it cannot tell.
    pub fn limits(&self) -> Option<ComputePeaks> {
        self.0.executor().limits()
    }

    /// Shape classes compiled so far.
    pub fn compiled(&self) -> usize {
        self.0.executor().compiled()
    }

    /// How many of a prompt's tokens, computed with an adapter or without, are in the cache
    /// already: what a request would not have to compute. They may be given up before it comes.
    pub fn cached(&self, tokens: &[u32], adapter: Option<&Adapter>) -> usize {
        let (adapter, decoded) = (adapters::number(adapter), &vec![false; tokens.len()]);
        let key = Key { adapter, tokens, images: &[], decoded };
        // The last token is computed in any case: its logits are wanted.
        let part = self.part(Capability::Generate);
        part.prefixes.tree().look(&key, tokens.len().saturating_sub(1), false).len
    }

    /// A new, empty timeline, of the part that generates if the model has one.
    pub fn session(&self) -> Session {
        Session::new(self.part(Capability::Generate))
    }
}

impl Shared {
    pub(crate) fn executor(&self) -> MutexGuard<'_, Box<dyn Executor>> {
        // A replay that panicked left only activations behind, and the next replay writes those
        // anew.
        self.executor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Engine::encode`].
    pub(crate) fn encode(&self, prompt: &Prompt) -> Result<Vec<u32>> {
        let (tokenizer, template) = (self.tokenizer.as_deref(), self.template());
        prompt.encode_checked(tokenizer, template, |text| self.check_length(text))
    }

    fn check_length(&self, text: &str) -> Result<()> {
        if text.len() <= self.longest_text() {
            return Ok(());
        }
        let found = format!("a text of {} bytes, which cannot fit", text.len());
        Err(self.too_long(0, found))
    }

    fn longest_text(&self) -> usize {
        const SPARE: usize = 4;
        let Some(tokenizer) = self.tokenizer.as_deref() else { return usize::MAX };
        let longest = self.longest_token.get_or_init(|| {
            let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
            ids.map(|id| tokenizer.token_bytes(id).len()).max().unwrap_or(1)
        });
        if self.options.rotate {
            return usize::MAX;
        }
        self.info.context.saturating_mul(*longest).saturating_mul(SPARE)
    }

    fn too_long(&self, used: usize, found: impl std::fmt::Display) -> Error {
        let (room, context) = (self.room(used), self.info.context);
        let expected = format!("at most {room} more tokens (context {context}, {used} in use)");
        let hint = Hint::text("raise ").with(Setting::Context);
        let hint = hint.and(", shorten the prompt, or allow ").with(Setting::Rotate);
        Error::new("context", expected, found).hint(hint)
    }

    /// Checks that tokens are the vocabulary's and fit behind those in use.
    pub(crate) fn check(&self, tokens: &[u32], used: usize) -> Result<()> {
        let vocab = self.config.vocab;
        if let Some(token) = tokens.iter().find(|t| **t as usize >= vocab) {
            return Err(Error::new("tokens", format!("ids below {vocab}"), token));
        }
        if tokens.len() > self.room(used) {
            return Err(self.too_long(used, tokens.len()));
        }
        Ok(())
    }

    /// Checks what a generation begins with: the settings of its sampling, and that its prompt says
    /// something.
    pub(crate) fn check_start(&self, prompt: &[u32], sampling: &Options) -> Result<()> {
        if self.options.ending == Ending::Hidden {
            let found = "one that was loaded for embeddings";
            return Err(Error::new("generation", "a model that ends in logits", found));
        }
        sampling.validate(self.config.vocab)?;
        if prompt.is_empty() {
            let error = Error::new("prompt", "at least one token", "none");
            return Err(error.hint("give some text to continue"));
        }
        Ok(())
    }

    /// Checks texts that are to be read with at most `further` tokens behind each. Errors name one
    /// by `what` it is and its index.
    pub(crate) fn check_all(&self, what: &str, texts: &[Vec<u32>], further: usize) -> Result<()> {
        for (i, text) in texts.iter().enumerate() {
            let named = |e: Error| Error { place: format!("{what} {i}: {}", e.place), ..e };
            self.check_start(text, &Options::greedy()).map_err(named)?;
            self.check(text, further).map_err(named)?;
        }
        Ok(())
    }

    /// Elements in a row of what it ends in.
    pub(crate) fn width(&self) -> usize {
        match self.options.ending {
            Ending::Logits => self.config.vocab,
            Ending::Hidden => self.config.hidden,
        }
    }

    /// Positions left beside those in use; unlimited where the context rotates.
    pub(crate) fn room(&self, used: usize) -> usize {
        let most = if self.options.rotate { u32::MAX as usize } else { self.info.context };
        most.saturating_sub(used)
    }

    pub(crate) fn template(&self) -> Option<&ChatTemplate> {
        self.template.as_deref()
    }
}

/// The tokenizer of a model's files, if it has one; its weights are not touched.
///
/// # Errors
/// One that is there but damaged.
pub fn read_tokenizer(tensors: &Tensors) -> Result<Option<Tokenizer>> {
    if let Some(file) = tensors.gguf() {
        let has = file.metadata().get("tokenizer.ggml.tokens").is_some();
        return has.then(|| Tokenizer::from_gguf(file.metadata())).transpose();
    }
    let Some(folder) = tensors.folder() else { return Ok(None) };
    let names = ["tokenizer.json", "tekken.json", "vocab.json"];
    let has = names.iter().any(|name| folder.file(name).is_some());
    has.then(|| Tokenizer::from_folder(folder.path())).transpose()
}

/// The chat templates of a model's files, if it has one.
///
/// # Errors
/// One that is there but damaged.
pub fn read_template(tensors: &Tensors) -> Result<Option<ChatTemplate>> {
    match (tensors.gguf(), tensors.folder()) {
        (Some(file), _) => ChatTemplate::from_gguf(file.metadata()),
        (None, Some(folder)) => ChatTemplate::from_folder(folder.path()),
        (None, None) => Ok(None),
    }
}

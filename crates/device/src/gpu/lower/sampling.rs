//! Lowering of sampling: its buffers and launches.
//!
//! A run of steps that feed each other has its own words, history, biases and pinned notes. There
//! are a few runs, so that sessions whose steps alternate need not be staged again each time. All
//! other buffers last for one step.
//!
//! Steps of many sequences choose for each row with logits. The per-sequence state is then a part
//! of one array, and each slot's latest token is a word in another.

use formats::Result;
use ops::sample::kernels;
use tile::launch::Numbers;
use tile::types::Scalar;

use super::{Recorder, Samples, Slot};

/// Runs that can be in progress at a time.
pub(in crate::gpu) const SEATS: usize = 4;

/// Buffers of sampling, besides the logits and the step's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gpu) enum Sampling {
    History,
    Biases,
    /// The masks of a step's rows that have one.
    Masks,
    Mail,
    Keys,
    Peaks,
    Bins,
    List,
    Cuts,
    Totals,
    Picked,
    Sums,
    Arrived,
    Latest,
}

/// Sizes of the sampling buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::gpu) struct Room {
    /// Rows of a step.
    pub(in crate::gpu) rows: usize,
    /// Slots whose latest token is kept on the device; 0 if there are runs instead.
    pub(in crate::gpu) slots: usize,
    /// Tokens of each history.
    pub(in crate::gpu) history: usize,
    /// Pairs of each sequence's biases.
    pub(in crate::gpu) biases: usize,
}

/// Words of a row's mask.
pub(in crate::gpu) fn mask_words(vocab: usize) -> usize {
    vocab.div_ceil(32)
}

impl Sampling {
    /// All buffers, in the order of their numbers.
    pub(in crate::gpu) const ALL: [Sampling; 14] = [
        Sampling::History,
        Sampling::Biases,
        Sampling::Masks,
        Sampling::Mail,
        Sampling::Keys,
        Sampling::Peaks,
        Sampling::Bins,
        Sampling::List,
        Sampling::Cuts,
        Sampling::Totals,
        Sampling::Picked,
        Sampling::Sums,
        Sampling::Arrived,
        Sampling::Latest,
    ];

    /// Number of copies: one for each run, or a single one.
    pub(in crate::gpu) fn copies(self, room: Room) -> usize {
        match self {
            Sampling::History | Sampling::Biases | Sampling::Mail if room.slots == 0 => SEATS,
            _ => 1,
        }
    }

    /// Words of one copy.
    pub(in crate::gpu) fn words(self, vocab: usize, room: Room) -> usize {
        let parts = |of: u32| vocab.div_ceil(of as usize);
        let row = match self {
            Sampling::Latest => return room.slots.max(1),
            Sampling::History => room.history,
            Sampling::Biases => 2 * room.biases,
            Sampling::Masks => mask_words(vocab),
            Sampling::Picked | Sampling::Arrived => 1,
            Sampling::Keys => vocab,
            Sampling::Peaks => 2 * parts(kernels::PART),
            Sampling::Totals => 2 * parts(kernels::BLOCK),
            Sampling::Cuts => 2,
            Sampling::Bins => (kernels::BINS * kernels::PER_BIN) as usize,
            Sampling::List => 2 * vocab,
            Sampling::Sums => 2 * parts(kernels::advance::SHARE),
            Sampling::Mail => 2 * kernels::advance::NOTES as usize,
        };
        row * room.rows
    }
}

impl Recorder<'_> {
    /// Replaces tokens that are [`CHOSEN`](program::CHOSEN) by the latest token of their slot.
    pub(super) fn take_chosen(&mut self) -> Result<()> {
        let bound = [
            ("slots", Slot::Words(self.words.slots.clone())),
            ("latest", Slot::Sampling(Sampling::Latest)),
            ("tokens", Slot::Words(self.words.tokens.clone())),
        ];
        let numbers = Numbers::new().with("rows", self.key.tokens as u32);
        self.push(kernels::take(), numbers, &bound)
    }

    /// Chooses a token from the logits of one row and makes it the next step's input; or, without a
    /// run, chooses for every row and stores the tokens by slot.
    pub(super) fn sample(&mut self, Samples { filters, seat, .. }: Samples) -> Result<()> {
        let logits = self.of.program.results[0];
        let vocab = self.width(logits);
        let rows = if seat.is_some() { 1 } else { self.key.outputs };
        let numbers = Numbers::new().with("rows", rows as u32).with("vocab", vocab as u32);
        let of = |name, part| (name, Slot::Sampling(part));
        let (keys, peaks) = (of("keys", Sampling::Keys), of("peaks", Sampling::Peaks));
        let bins = of("bins", Sampling::Bins);
        let settings = ("settings", Slot::Words(self.words.settings.clone()));
        let history = of("history", Sampling::History);
        let logits = ("logits", self.value(logits));
        let (keys, peaks) = (&keys, &peaks);
        let adjusted = [
            logits.clone(),
            settings.clone(),
            history.clone(),
            of("biases", Sampling::Biases),
            of("masks", Sampling::Masks),
            keys.clone(),
            peaks.clone(),
            bins.clone(),
        ];
        self.push(kernels::adjust(Scalar::F32), numbers.clone(), &adjusted)?;
        let cuts = of("cuts", Sampling::Cuts);
        if filters {
            let mut bound =
                vec![logits.clone(), keys.clone(), peaks.clone(), settings.clone(), bins];
            self.push(kernels::weigh(), numbers.clone(), &bound)?;
            let schedule = if vocab > 8192 { kernels::WIDE } else { kernels::NARROW };
            bound.extend([of("list", Sampling::List), cuts.clone()]);
            self.push(kernels::cut(schedule), numbers.clone(), &bound)?;
        }
        let bound = [
            logits.clone(),
            keys.clone(),
            peaks.clone(),
            settings.clone(),
            cuts,
            of("totals", Sampling::Totals),
            of("arrived", Sampling::Arrived),
            of("tokens", Sampling::Picked),
        ];
        self.push(kernels::draw(), numbers.clone(), &bound)?;
        if seat.is_none() {
            let bound = [
                logits,
                of("picked", Sampling::Picked),
                ("targets", Slot::Words(self.words.targets.clone())),
                of("latest", Sampling::Latest),
                history,
                of("mail", Sampling::Mail),
                of("sums", Sampling::Sums),
                of("arrived", Sampling::Arrived),
            ];
            return self.push(kernels::hand_on(), numbers, &bound);
        }
        let bound = [
            logits,
            of("picked", Sampling::Picked),
            ("spans", Slot::Words(self.words.span.clone())),
            ("tokens", Slot::Words(self.words.tokens.clone())),
            ("positions", Slot::Words(self.words.positions.clone())),
            settings,
            history,
            of("mail", Sampling::Mail),
            of("sums", Sampling::Sums),
            of("arrived", Sampling::Arrived),
        ];
        self.push(kernels::advance(), numbers, &bound)
    }
}

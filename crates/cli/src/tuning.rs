//! The arguments of `delft tune` and `delft eval`.

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use delft::DeviceSpec;
use delft::train::{Precision, RateSchedule};

use crate::args::{
    LoadArgs, MOST, ModelArg, above_zero, at_least_zero, below_one, positive, whole,
};

/// `delft tune`.
#[derive(Debug, Clone, Args)]
#[command(after_help = "\
A .jsonl file has an example on each line: {\"messages\": [...]} as OpenAI's interface has them, {\"prompt\": .., \"completion\": ..}, \
{\"text\": ..}, or with --dpo or --pairs {\"prompt\": .., \"chosen\": .., \"rejected\": ..}, \
with --kto {\"prompt\": .., \"completion\": .., \"label\": true or false}. ShareGPT's conversations, Alpaca's instruction, input and output, a question with its answer or \
response, and pairs of whole conversations are read, too. A .json file may have all of them in one list, a .csv or .tsv file is a table whose first line names such keys, and any other \
file is plain text. Of messages the assistant's answers are learned, of a prompt with its completion the \
completion, of texts every token. An answer of \"weight\": 0 is only read. A folder stands for its train.jsonl, and its valid.jsonl for --held-out.

The folder gets the adapter (as PEFT has it; with --full a model), delft.json, which says what it was made of, loss.jsonl, loss.svg, and a checkpoint, \
from which --resume goes on after Ctrl-C or a crash, with the same result as if nothing had happened. With examples held out, the \
parameters are those of the update with the least loss on them.

Examples:
  delft tune qwen3:0.6b --data talks.jsonl --out my-style
  delft run qwen3:0.6b --adapter my-style \"Who are you?\"
  delft tune --data stories.txt --steps 200 --sample \"Once upon a time\"
  delft tune --resume --out my-style")]
pub(crate) struct Tune {
    #[command(flatten)]
    pub(crate) model: ModelArg,
    /// The examples: a .jsonl, .json, .csv or .tsv file, plain text, or a folder of train.jsonl and
    /// valid.jsonl
    #[arg(short, long, value_name = "FILE", required_unless_present = "resume")]
    pub(crate) data: Option<PathBuf>,
    /// The folder to write [default: the name of the data with -lora behind it, -tuned with --full]
    #[arg(short, long, alias = "adapter-path", value_name = "FOLDER")]
    pub(crate) out: Option<PathBuf>,
    /// Go on with the run in that folder, with the flags that it was begun with
    #[arg(long)]
    pub(crate) resume: bool,
    /// The examples to measure by and not learn from: a share of the examples (5%), a file of its
    /// own, or none [default: 5% of twenty examples or more]
    #[arg(long, value_name = "SHARE or FILE")]
    pub(crate) held_out: Option<HeldOut>,
    /// Prompts and completions are text to continue, though the model has a chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// Learn prompts, too, where answers and completions alone would be learned
    #[arg(long, conflicts_with = "preference")]
    pub(crate) prompts: bool,
    /// Most tokens of an example; texts are cut there into several [default: what the model was
    /// trained for, 1024 for plain text]
    #[arg(long, aliases = ["ctx", "max-seq-length"], value_name = "N", value_parser = whole(2..=MOST))]
    pub(crate) context: Option<u64>,
    /// Take the end of examples that are longer away, instead of refusing them
    #[arg(long)]
    pub(crate) truncate: bool,
    #[command(flatten)]
    pub(crate) lora: LoraArgs,
    #[command(flatten)]
    pub(crate) updates: UpdateArgs,
    /// A text to continue, or a question, now and then, to see what it has learned; takes the
    /// memory of another copy of the model
    #[arg(long, value_name = "PROMPT")]
    pub(crate) sample: Option<String>,
    /// Updates between two samples [default: a tenth of the run]
    #[arg(long, value_name = "N", value_parser = positive(), requires = "sample")]
    pub(crate) sample_every: Option<u64>,
    /// Updates between two checkpoints: what a crash costs at most [default: a twentieth of the
    /// run, a hundred at most]
    #[arg(long, aliases = ["save-every", "save-steps"], value_name = "N", value_parser = positive())]
    pub(crate) checkpoint_every: Option<u64>,
    /// Threads [default: the physical cores]
    #[arg(short, long, value_name = "N", value_parser = whole(1..=1024))]
    pub(crate) threads: Option<u64>,
    /// Where to compute: cpu, cuda, cuda:N, auto (a GPU if there is one), or several GPUs that
    /// share the examples of each batch: cuda:0,1
    #[arg(long, value_name = "DEVICE", default_value_t = DeviceSpec::Cpu)]
    pub(crate) device: DeviceSpec,
    /// Precision of activations, while trained weights stay f32 [default: f32 for a model in f32,
    /// else bf16]
    #[arg(long, value_enum)]
    pub(crate) precision: Option<PrecisionArg>,
    /// Print one JSON object at the end
    #[arg(long)]
    pub(crate) json: bool,
}

/// The adapter.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Adapter")]
pub(crate) struct LoraArgs {
    /// Train a LoRA adapter, as is done unless another kind is named
    #[arg(long, conflicts_with = "full")]
    pub(crate) lora: bool,
    /// Train all weights of a model folder in 16 or 32 bits in place of an adapter, and write a
    /// model folder; with --layers those of the last blocks
    #[arg(long, conflicts_with_all = ["rank", "alpha", "rslora", "dora", "sites", "from"])]
    pub(crate) full: bool,
    /// Go on from this adapter, with its rank, matrices and kind, instead of from one that changes
    /// nothing; with --dpo, hinge or ipo, answers are compared with what it makes of them
    #[arg(long, alias = "resume-adapter-file", value_name = "PATH", conflicts_with_all = ["rank", "alpha", "rslora", "dora", "sites", "layers"])]
    pub(crate) from: Option<PathBuf>,
    /// Rank of the factors
    #[arg(long, alias = "lora-rank", value_name = "R", default_value_t = 8, value_parser = whole(1..=4096))]
    pub(crate) rank: u64,
    /// The factors' product counts ALPHA / R [default: twice the rank]
    #[arg(long, alias = "lora-alpha", value_name = "ALPHA", value_parser = above_zero)]
    pub(crate) alpha: Option<f32>,
    /// It counts ALPHA / sqrt(R) instead (rsLoRA)
    #[arg(long)]
    pub(crate) rslora: bool,
    /// Train the lengths of the changed matrices' rows by themselves (DoRA)
    #[arg(long)]
    pub(crate) dora: bool,
    /// The matrices that have factors, such as q,v or q_proj,v_proj, or experts for those of all
    /// experts [default: all of the blocks; in mixtures of experts those outside the feed-forwards]
    #[arg(long, alias = "target-modules", value_name = "NAME,..", value_delimiter = ',')]
    pub(crate) sites: Vec<String>,
    /// Factors beside the matrices of the last N blocks alone, which takes less time and memory
    /// [default: of all blocks]
    #[arg(long, alias = "num-layers", value_name = "N", value_parser = positive())]
    pub(crate) layers: Option<u64>,
    /// Tables that are trained whole beside the factors and saved with them: embeddings, head (of
    /// PEFT's modules_to_save)
    #[arg(long, alias = "modules-to-save", value_name = "NAME,..", value_delimiter = ',', conflicts_with_all = ["full", "from"])]
    pub(crate) whole: Vec<String>,
    /// The probability with which each element that factors read is zero in an update: below 1
    #[arg(long, alias = "lora-dropout", value_name = "P", default_value_t = 0.0, value_parser = below_one, conflicts_with_all = ["full", "preference"])]
    pub(crate) dropout: f32,
    /// Noise on the embeddings in updates (NEFTune), ALPHA strong: 5 is usual
    #[arg(long, alias = "neftune-noise-alpha", value_name = "ALPHA", value_parser = above_zero, conflicts_with = "preference")]
    pub(crate) neftune: Option<f32>,
    /// Learn from single answers, of which a label says whether each is to be learned or unlearned
    /// (KTO)
    #[arg(long, group = "preference", conflicts_with = "full")]
    pub(crate) kto: bool,
    /// With --kto, the weight of answers whose label is true [default: 1]
    #[arg(long, value_name = "X", value_parser = at_least_zero, requires = "kto")]
    pub(crate) desirable_weight: Option<f32>,
    /// With --kto, the weight of all others [default: 1]
    #[arg(long, value_name = "X", value_parser = at_least_zero, requires = "kto")]
    pub(crate) undesirable_weight: Option<f32>,
    /// Learn from pairs, of which the chosen answer is to gain more than the rejected one (DPO)
    #[arg(long, group = "preference", conflicts_with = "full")]
    pub(crate) dpo: bool,
    /// Learn from pairs by this loss
    #[arg(long, value_name = "LOSS", value_enum, group = "preference")]
    pub(crate) pairs: Option<PairsArg>,
    /// The factor on what pairs are judged by: with dpo, kto, hinge and ipo more keeps the adapter closer
    /// to the model, or to the one of --from; with orpo the weight beside the chosen answer's own loss
    /// [default: 0.1, with simpo 2]
    #[arg(long, value_name = "X", value_parser = above_zero, requires = "preference")]
    pub(crate) beta: Option<f32>,
    /// With --pairs simpo, by how much the chosen answer is to be better [default: 1]
    #[arg(long, value_name = "X", value_parser = at_least_zero, requires = "pairs")]
    pub(crate) gamma: Option<f32>,
}

impl LoraArgs {
    /// Whether answers are learned from by how good they are.
    pub(crate) fn prefers(&self) -> bool {
        self.kto || self.pairs().is_some()
    }

    /// The loss of pairs, if these are what is learned from.
    pub(crate) fn pairs(&self) -> Option<PairsArg> {
        self.pairs.or(self.dpo.then_some(PairsArg::Dpo))
    }
}

/// A loss of pairs by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PairsArg {
    /// The chosen answer gains more than the rejected one, over the model without the adapter
    Dpo,
    /// The same until it has gained enough (SLiC)
    Hinge,
    /// It gains more by as much, for each token (IPO)
    Ipo,
    /// It is likelier for each token, by a margin, whatever the model thought (SimPO)
    Simpo,
    /// The chosen answer is learned, and is likelier than the rejected one (ORPO)
    Orpo,
}

/// How the parameters are updated.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Updates")]
pub(crate) struct UpdateArgs {
    /// Passes over the examples [default: 3]
    #[arg(long, alias = "num-train-epochs", value_name = "N", value_parser = whole(1..=100_000), conflicts_with = "steps")]
    pub(crate) epochs: Option<u64>,
    /// Updates, over as many passes as they take
    #[arg(long, aliases = ["iters", "max-steps"], value_name = "N", value_parser = whole(1..=100_000_000))]
    pub(crate) steps: Option<u64>,
    /// Tokens that are computed together, packed from several examples [default: by the examples,
    /// 2048 at most but for longer ones]
    #[arg(long, value_name = "N", value_parser = positive())]
    pub(crate) batch_tokens: Option<u64>,
    /// Compute activations again for their gradients: a fraction of the memory, about a third more
    /// work, the same bits [default: if memory is short]
    #[arg(long, aliases = ["grad-checkpoint", "gradient-checkpointing"])]
    pub(crate) recompute: bool,
    /// Batches of an update
    #[arg(long, aliases = ["grad-accumulation-steps", "gradient-accumulation-steps"], value_name = "N", default_value_t = 1, value_parser = positive())]
    pub(crate) accumulate: u64,
    /// Greatest learning rate [default: by the width of the model; a tenth of it with --full and
    /// with pairs]
    #[arg(long, alias = "learning-rate", value_name = "X", value_parser = above_zero)]
    pub(crate) lr: Option<f32>,
    /// Learning rate that it falls to
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = at_least_zero)]
    pub(crate) min_lr: f32,
    /// How the learning rate goes on from there
    #[arg(long, alias = "lr-scheduler-type", value_enum, default_value_t = ScheduleArg::Cosine)]
    pub(crate) schedule: ScheduleArg,
    /// Updates in which it rises from zero, or a share of the run (5%) [default: a thirtieth of it]
    #[arg(long, alias = "warmup-steps", value_name = "N or SHARE")]
    pub(crate) warmup: Option<Warmup>,
    /// Weight decay, of matrices
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = at_least_zero)]
    pub(crate) weight_decay: f32,
    /// How fast AdamW's running mean of gradients forgets: 0 to 1
    #[arg(long, value_name = "X", default_value_t = 0.9, value_parser = below_one)]
    pub(crate) adam_beta1: f32,
    /// How fast its running mean of their squares forgets: 0 to 1
    #[arg(long, value_name = "X", default_value_t = 0.999, value_parser = below_one)]
    pub(crate) adam_beta2: f32,
    /// Added to the root of that, so that small gradients make small updates
    #[arg(long, value_name = "X", default_value_t = 1e-8, value_parser = above_zero)]
    pub(crate) adam_epsilon: f32,
    /// Greatest norm of the gradients, to which longer ones are scaled; 0: none
    #[arg(long, alias = "max-grad-norm", value_name = "X", default_value_t = 1.0, value_parser = at_least_zero)]
    pub(crate) clip: f32,
    /// Updates between two measurements of the held-out loss [default: a tenth of the run]
    #[arg(long, aliases = ["steps-per-eval", "eval-steps"], value_name = "N", value_parser = positive())]
    pub(crate) evaluate_every: Option<u64>,
    /// End once the held-out loss was measured N times without falling
    #[arg(long, value_name = "N", value_parser = positive())]
    pub(crate) patience: Option<u64>,
    /// Seed of the order of examples, of what is held out and of what the factors begin with: the
    /// same one gives the same bytes
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
}

/// A precision by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PrecisionArg {
    /// Nothing is rounded
    F32,
    /// Activations and operands of products have 16 bits, sums and losses 32; on a CPU in the
    /// products of its tile unit (AMX) alone
    Bf16,
}

impl From<PrecisionArg> for Precision {
    fn from(arg: PrecisionArg) -> Precision {
        match arg {
            PrecisionArg::F32 => Precision::F32,
            PrecisionArg::Bf16 => Precision::BF16,
        }
    }
}

/// A schedule by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum ScheduleArg {
    /// It stays
    Constant,
    /// It falls to zero in a straight line
    Linear,
    /// It falls to zero along half a cosine
    Cosine,
}

impl From<ScheduleArg> for RateSchedule {
    fn from(arg: ScheduleArg) -> RateSchedule {
        match arg {
            ScheduleArg::Constant => RateSchedule::Constant,
            ScheduleArg::Linear => RateSchedule::Linear,
            ScheduleArg::Cosine => RateSchedule::Cosine,
        }
    }
}

/// Updates in which the learning rate rises.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Warmup {
    Updates(u64),
    /// A share of the run.
    Share(f64),
}

impl FromStr for Warmup {
    type Err = String;

    fn from_str(text: &str) -> Result<Warmup, String> {
        let found = match text.strip_suffix('%') {
            Some(share) => share_of(share).map(Warmup::Share),
            None => text.parse().ok().filter(|n| *n <= 100_000_000).map(Warmup::Updates),
        };
        found.ok_or_else(|| "expected a number of updates, or a share below 100%".to_owned())
    }
}

/// The share that a percentage says, from 0% to less than 100%.
fn share_of(percent: &str) -> Option<f64> {
    let share = percent.trim().parse().ok().filter(|share| (0.0..100.0).contains(share));
    share.map(|share| share / 100.0)
}

/// The examples that are measured and not learned.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum HeldOut {
    None,
    /// A share of the examples.
    Share(f64),
    File(PathBuf),
}

impl FromStr for HeldOut {
    type Err = String;

    fn from_str(text: &str) -> Result<HeldOut, String> {
        if text == "none" {
            return Ok(HeldOut::None);
        }
        let Some(share) = text.strip_suffix('%') else { return Ok(HeldOut::File(text.into())) };
        match share_of(share) {
            Some(0.0) => Ok(HeldOut::None),
            Some(share) => Ok(HeldOut::Share(share)),
            None => Err("expected a share from 0% to less than 100%, a file, or none".to_owned()),
        }
    }
}

/// `delft eval`.
#[derive(Debug, Args)]
#[command(after_help = "\
The examples are as delft tune has them. Over them it tells the loss of what would be learned, in nats per token, and the perplexity; \
how many tokens were the likeliest in their place; and how many answers are exactly what greedy decoding would write. A .jsonl file \
of {\"question\": .., \"choices\": [..], \"answer\": ..} is multiple choice instead: the answer is a text, a letter or a number from 0, \
and the choice counts that the model holds likeliest, as it is and by its length.

Examples:
  delft eval qwen3:0.6b --data talks.jsonl
  delft eval qwen3:0.6b --data talks.jsonl --adapter my-style
  delft eval model.gguf --data questions.jsonl --json")]
pub(crate) struct Eval {
    /// The examples: a .jsonl, .json, .csv or .tsv file, plain text, or a folder of test.jsonl
    #[arg(short, long, value_name = "FILE")]
    pub(crate) data: PathBuf,
    /// Measure the first N examples alone
    #[arg(long, value_name = "N", value_parser = positive())]
    pub(crate) limit: Option<u64>,
    /// Prompts are text to continue, though the model has a chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

#[cfg(test)]
mod tests {
    use super::{HeldOut, Warmup};

    #[test]
    fn updates_that_warm_up_are_a_number_or_a_share() {
        let warmup = |text: &str| text.parse::<Warmup>();
        assert_eq!(warmup("20"), Ok(Warmup::Updates(20)));
        assert_eq!(warmup("0"), Ok(Warmup::Updates(0)));
        assert_eq!(warmup("5%"), Ok(Warmup::Share(0.05)));
        for wrong in ["-1", "0.1", "100%", "x%", "200000000"] {
            assert!(warmup(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_is_held_out_is_a_share_a_file_or_none() {
        let share = |text: &str| text.parse::<HeldOut>();
        assert_eq!(share("5%"), Ok(HeldOut::Share(0.05)));
        assert_eq!(share("0.5 %"), Ok(HeldOut::Share(0.005)));
        assert_eq!(share("none"), Ok(HeldOut::None));
        assert_eq!(share("0%"), Ok(HeldOut::None));
        assert_eq!(share("held.jsonl"), Ok(HeldOut::File("held.jsonl".into())));
        for wrong in ["100%", "-1%", "x%", "%", "NaN%"] {
            assert!(share(wrong).is_err(), "{wrong}");
        }
    }
}

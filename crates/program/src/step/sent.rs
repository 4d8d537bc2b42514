//! How a step is sent to another process: as [`serde`] writes it, without the spare memory of an
//! [`OwnedStep`].

use std::borrow::Cow;

use ops::sample::Options;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{OwnedSequence, OwnedStep, StepKind};

#[derive(Serialize, Deserialize)]
struct SentStep<'a> {
    kind: StepKind,
    tokens: Cow<'a, [u32]>,
    outputs: Cow<'a, [u32]>,
    sequences: Vec<SentSequence<'a>>,
}

#[derive(Serialize, Deserialize)]
struct SentSequence<'a> {
    rows: u32,
    start: u32,
    position: u32,
    slot: u32,
    adapter: u32,
    /// Blocks and oldest index of each group.
    tables: Cow<'a, [(Vec<u32>, u32)]>,
    choose: Option<SentChoose<'a>>,
}

#[derive(Serialize, Deserialize)]
struct SentChoose<'a> {
    options: Cow<'a, Options>,
    history: Cow<'a, [u32]>,
    mask: Option<Cow<'a, [u32]>>,
    logprobs: Option<usize>,
}

impl<'a> From<&'a OwnedSequence> for SentSequence<'a> {
    fn from(own: &'a OwnedSequence) -> Self {
        let choose = own.chooses.then(|| SentChoose {
            options: Cow::Borrowed(&own.options),
            history: Cow::Borrowed(&own.history),
            mask: own.masked.then(|| Cow::Borrowed(&own.mask[..])),
            logprobs: own.logprobs,
        });
        SentSequence {
            rows: own.rows,
            start: own.start,
            position: own.position,
            slot: own.slot,
            adapter: own.adapter,
            tables: Cow::Borrowed(&own.tables[..own.groups]),
            choose,
        }
    }
}

impl From<SentSequence<'_>> for OwnedSequence {
    fn from(sent: SentSequence<'_>) -> Self {
        let tables = sent.tables.into_owned();
        let own = OwnedSequence {
            rows: sent.rows,
            start: sent.start,
            position: sent.position,
            slot: sent.slot,
            adapter: sent.adapter,
            groups: tables.len(),
            tables,
            ..OwnedSequence::default()
        };
        let Some(choose) = sent.choose else { return own };
        OwnedSequence {
            chooses: true,
            options: choose.options.into_owned(),
            history: choose.history.into_owned(),
            masked: choose.mask.is_some(),
            mask: choose.mask.map(Cow::into_owned).unwrap_or_default(),
            logprobs: choose.logprobs,
            ..own
        }
    }
}

impl Serialize for OwnedStep {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let sent = SentStep {
            kind: self.kind,
            tokens: Cow::Borrowed(&self.tokens),
            outputs: Cow::Borrowed(&self.outputs),
            sequences: self.sequences[..self.count].iter().map(SentSequence::from).collect(),
        };
        sent.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for OwnedStep {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let sent = SentStep::deserialize(deserializer)?;
        let sequences: Vec<OwnedSequence> =
            sent.sequences.into_iter().map(OwnedSequence::from).collect();
        Ok(OwnedStep {
            kind: sent.kind,
            tokens: sent.tokens.into_owned(),
            outputs: sent.outputs.into_owned(),
            count: sequences.len(),
            sequences,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CHOSEN, Choose, Sequence, Step, StepMemory, Table};
    use super::*;

    fn shown(step: &OwnedStep) -> String {
        step.with(&mut StepMemory::default(), |step| format!("{step:?}"))
    }

    /// The second step leaves out much of the first, whose memory is spare then.
    #[test]
    fn steps_arrive_as_they_were_sent() {
        let options =
            Options { temperature: 0.5, logit_bias: vec![(3, -1.5)], ..Options::greedy() };
        let choose = Choose {
            options: &options,
            history: &[1, 2, CHOSEN],
            mask: Some(&[u32::MAX, 7]),
            logprobs: Some(2),
        };
        let tables = [Table { blocks: &[0, 300], oldest: 4 }, Table { blocks: &[9], oldest: 0 }];
        let sequences = [
            Sequence {
                slot: 3,
                adapter: 1,
                choose: Some(&choose),
                ..Sequence::new(1, 256, &tables)
            },
            Sequence { slot: 1, position: 70_000, ..Sequence::new(2, 7, &tables[1..]) },
        ];
        let long = Step {
            kind: StepKind::Decode,
            tokens: &[CHOSEN, 5, 6],
            sequences: &sequences,
            outputs: &[0, 2],
            input: &[],
        };
        let short = Step {
            kind: StepKind::Prompt,
            tokens: &[8, 9],
            sequences: &sequences[1..],
            outputs: &[1],
            ..long
        };
        let mut own = OwnedStep::default();
        let mut lengths = Vec::new();
        for step in [&long, &short] {
            own.set(step);
            let sent = postcard::to_allocvec(&own).unwrap();
            let arrived: OwnedStep = postcard::from_bytes(&sent).unwrap();
            assert_eq!(shown(&arrived), format!("{step:?}"));
            assert_eq!(postcard::to_allocvec(&arrived).unwrap(), sent);
            // What is cut off anywhere is noticed.
            assert!(
                (0..sent.len()).all(|n| postcard::from_bytes::<OwnedStep>(&sent[..n]).is_err())
            );
            lengths.push(sent.len());
        }
        assert!(lengths[1] < 24, "{lengths:?}");
    }
}

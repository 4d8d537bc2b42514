//! The streams of a residual (AltUp, Baykal et al. 2023), of `n` of which a layer computes one, `a`.
//!
//! ```text
//! m(x) = tanh(router(norm(x)) / hidden)
//! p_i  = x_i + sum of predict(m(x_a))[i, j] x_j over j
//! y_i  = p_i + (correct(m(y))_i + 1) (y - p_a)         where y is what the layer makes of p_a
//! ```

use crate::Config;
use crate::names::Row;
use formats::{Result, Source};
use nn::{Bias, Builder, Norm, Projection, Stored, Tensor, Unary, Weights};
use ops::{Binary, MatchRms, Mix, Op, ScaleColumns, Splice, Zip};
use program::WeightId;

pub(super) const NAMES: &[Row] = &[
    ("streams.made.{}", "model.altup_projections.{}", ""),
    ("streams.made", "", "altup_proj"),
    ("streams.back.{}", "model.altup_unembed_projections.{}", ""),
    ("streams.back", "", "altup_unembd_proj"),
    ("blocks.{}.streams.router", "model.layers.{}.altup.modality_router", "blk.{}.altup_router"),
    ("blocks.{}.streams.norm", "model.layers.{}.altup.router_norm", "blk.{}.altup_router_norm"),
    (
        "blocks.{}.streams.predict",
        "model.layers.{}.altup.prediction_coefs",
        "blk.{}.altup_predict_coef",
    ),
    (
        "blocks.{}.streams.correct",
        "model.layers.{}.altup.correction_coefs",
        "blk.{}.altup_correct_coef",
    ),
    (
        "blocks.{}.streams.scale",
        "model.layers.{}.altup.correct_output_scale!",
        "blk.{}.altup_correct_scale",
    ),
];

/// Most streams.
pub(super) const MOST: usize = ops::mix::MOST;
/// Columns of the small matrices: devices multiply eight at once, so that zeros stand behind the
/// columns of the streams.
const COLUMNS: usize = MOST;
/// The least mean square of a stream that it is divided by.
const FLOOR: f32 = 1e-5;

/// The streams of a model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Count {
    pub(super) all: usize,
    /// The one that layers compute.
    pub(super) active: usize,
    /// Whether that one is multiplied by learnt numbers where it gates a layer's input.
    pub(super) scaled: bool,
}

/// Weights that are not stored as they are used.
pub(super) fn stored(
    count: Count,
    hidden: usize,
    weights: &dyn Weights,
    name: &str,
) -> Result<Option<Stored>> {
    let n = count.all;
    // GGUF has the matrices of all streams as one.
    if let Some((stack, i)) =
        name.rsplit_once('.').filter(|(stack, _)| matches!(*stack, "streams.made" | "streams.back"))
    {
        let (Some(all), Ok(i)) = (weights.find(stack)?, i.parse::<usize>()) else {
            return Ok(None);
        };
        let flat = Source::Reshape(Box::new(all.source), vec![(n - 1) * hidden, hidden]);
        let shape = vec![hidden, hidden];
        let fits = all.shape.iter().product::<usize>() == (n - 1) * hidden * hidden;
        return Ok(fits.then(|| Stored { source: flat.rows(i * hidden, hidden), shape }));
    }
    let Some((_, part)) = name.split_once(".streams.") else { return Ok(None) };
    let listed = |numbers: Vec<f32>| {
        let one = |n: &f32| Source::Plus(Box::new(Source::Zeros(vec![1])), *n);
        let shape = vec![numbers.len()];
        Some(Stored { source: Source::Concat(numbers.iter().map(one).collect()), shape })
    };
    Ok(match part {
        "predict" | "correct" => weights.find(name)?.map(padded),
        "predict.bias" => {
            listed((0..n * n).map(|at| f32::from(u8::from(at / n == at % n))).collect())
        }
        "correct.bias" => listed(vec![1.0; n]),
        "none" => listed(vec![0.0; n]),
        "others" => listed((0..n).map(|i| f32::from(u8::from(i > 0))).collect()),
        _ => None,
    })
}

/// A matrix with zeros behind its columns, in f32.
fn padded(of: Stored) -> Stored {
    let [rows, columns] = of.shape[..] else { return of };
    if columns >= COLUMNS {
        return of;
    }
    let turned = Source::Transpose(Box::new(Source::Decoded(Box::new(of.source))));
    let zeros = Source::Zeros(vec![COLUMNS - columns, rows]);
    let source = Source::Transpose(Box::new(Source::Concat(vec![turned, zeros])));
    Stored { source, shape: vec![rows, COLUMNS] }
}

/// The matrix that [`padded`] was given.
pub(super) fn unpadded(source: &Source) -> &Source {
    let Source::Transpose(joined) = source else { return source };
    let Source::Concat(parts) = &**joined else { return source };
    match parts.first() {
        Some(Source::Transpose(decoded)) => match &**decoded {
            Source::Decoded(of) => of,
            _ => source,
        },
        _ => source,
    }
}

/// Columns of the stream `i`, or of several behind it.
fn cut(x: &Tensor, i: usize, width: usize) -> Tensor {
    let part = Splice { heads: 1, start: i * width, count: width, shared: false, width };
    x.apply(Op::from(part), &[], Vec::new())
}

/// Joins two values by columns: `x`, then `z`.
fn join(x: &Tensor, z: &Tensor) -> Tensor {
    let (count, width) = (x.width(), x.width() + z.width());
    let both = Splice { heads: 1, start: 0, count, shared: false, width };
    x.apply(Op::from(both), &[z], Vec::new())
}

/// How streams are made of an embedding, and how they become one again.
pub(super) struct Ends {
    made: Vec<Projection>, // [hidden] -> [hidden]
    back: Vec<Projection>, // [hidden] -> [hidden]
    hidden: usize,
}

impl Ends {
    pub(super) fn new(builder: &Builder<'_>, config: &Config, count: Count) -> Result<Ends> {
        let hidden = config.hidden;
        let matrices = |stem: &str| {
            let one = |i: usize| {
                let name = format!("streams.{stem}.{i}");
                Projection::new(builder, &name, [hidden, hidden], Bias::Never)
            };
            (0..count.all - 1).map(one).collect::<Result<Vec<_>>>()
        };
        Ok(Ends { made: matrices("made")?, back: matrices("back")?, hidden })
    }

    /// The streams of an embedding, the first of which it is itself.
    pub(super) fn begin(&self, x: &Tensor) -> Tensor {
        let others = self.made.iter().map(|matrix| matrix.forward(x));
        let others = others.reduce(|all, next| join(&all, &next));
        others.map_or_else(|| x.clone(), |others| join(x, &as_long(&others, x)))
    }

    /// The mean of all streams, the others made as long as the first.
    pub(super) fn end(&self, streams: &Tensor) -> Tensor {
        let first = cut(streams, 0, self.hidden);
        let others =
            self.back.iter().enumerate().map(|(i, matrix)| {
                as_long(&matrix.forward(&cut(streams, i + 1, self.hidden)), &first)
            });
        let sum = others.fold(first.clone(), |sum, next| sum.add(&next));
        sum.scale(1.0 / (self.back.len() + 1) as f32)
    }
}

/// Groups of `x` that are as long as `like`.
fn as_long(x: &Tensor, like: &Tensor) -> Tensor {
    x.apply(Op::from(MatchRms { floor: FLOOR }), &[like], Vec::new())
}

/// How a layer predicts streams and corrects them.
pub(super) struct Streams {
    norm: Norm,
    router: Projection,  // [hidden] -> [n]
    predict: Projection, // [COLUMNS] -> [n * n]
    correct: Projection, // [COLUMNS] -> [n]
    scale: Option<WeightId>,
    none: WeightId,
    others: WeightId,
    count: Count,
    hidden: usize,
}

impl Streams {
    pub(super) fn new(
        builder: &Builder<'_>,
        config: &Config,
        count: Count,
        i: usize,
    ) -> Result<Streams> {
        let (n, hidden) = (count.all, config.hidden);
        let name = |part: &str| format!("blocks.{i}.streams.{part}");
        let linear = |part: &str, shape, bias| Projection::new(builder, &name(part), shape, bias);
        let scale = || builder.weight(&name("scale"), &[hidden]);
        Ok(Streams {
            norm: Norm::rms(builder, &name("norm"), hidden, config.norm_eps)?,
            router: linear("router", [n, hidden], Bias::Never)?,
            predict: linear("predict", [n * n, COLUMNS], Bias::Always)?,
            correct: linear("correct", [n, COLUMNS], Bias::Always)?,
            scale: count.scaled.then(scale).transpose()?,
            none: builder.weight(&name("none"), &[n])?,
            others: builder.weight(&name("others"), &[n])?,
            count,
            hidden,
        })
    }

    /// The stream that layers compute.
    pub(super) fn active(&self, streams: &Tensor) -> Tensor {
        cut(streams, self.count.active, self.hidden)
    }

    fn numbers(&self, x: &Tensor) -> Tensor {
        let routed = self.router.forward(&self.norm.forward(x)).scale(1.0 / self.hidden as f32);
        let (count, width) = (self.count.all, COLUMNS);
        let pad = Splice { heads: 1, start: 0, count, shared: false, width };
        routed.map(Unary::Tanh).apply(Op::from(pad), &[], Vec::new())
    }

    /// Predicts each stream behind the layer from those in front of it.
    pub(super) fn predicted(&self, streams: &Tensor) -> Tensor {
        let by = self.predict.forward(&self.numbers(&self.active(streams)));
        let n = self.count.all;
        streams.apply(Op::from(Mix { from: n, to: n }), &[&by], Vec::new())
    }

    /// `predicted`, corrected by the difference of what the layer computed to what was predicted of
    /// it; `more` is added to all streams but the first, for the active one.
    pub(super) fn corrected(
        &self,
        predicted: &Tensor,
        computed: &Tensor,
        more: impl FnOnce(&Tensor) -> Tensor,
    ) -> Tensor {
        let spread = Op::from(Mix { from: 1, to: self.count.all });
        let by = self.correct.forward(&self.numbers(computed));
        let new = computed.apply(Op::from(Zip(Binary::Sub)), &[&self.active(predicted)], vec![]);
        let corrected = predicted.add(&new.apply(spread.clone(), &[&by], Vec::new()));
        let active = self.active(&corrected);
        let more = more(&match self.scale {
            Some(scale) => active.apply(Op::from(ScaleColumns), &[], vec![scale]),
            None => active,
        });
        let others = by.apply(Op::from(ScaleColumns), &[], vec![self.none, self.others]);
        corrected.add(&more.apply(spread, &[&others], Vec::new()))
    }
}

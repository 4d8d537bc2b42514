//! References against what Transformers and PyTorch compute: see `tests/reference/operations.py`.

use std::path::Path;

use delft_ops::operation::{CachedLayer, ReferenceCall};
use delft_ops::{Attention, LayerNorm, Map, Op, Unary};
use formats::safetensors::Safetensors;

/// The fixture.
struct Expected(Safetensors);

impl Expected {
    fn open() -> Expected {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference");
        Expected(Safetensors::open(&root.join("operations.safetensors")).unwrap())
    }

    fn floats(&self, name: &str) -> Vec<f32> {
        let tensor = self.0.get(name).unwrap_or_else(|| panic!("{name} is not in the fixture"));
        tensor.to_f32().unwrap()
    }

    fn constant<T: std::str::FromStr<Err: std::fmt::Debug>>(&self, name: &str) -> T {
        let pairs = &self.0.header().metadata;
        pairs.iter().find(|(key, _)| key == name).unwrap().1.parse().unwrap()
    }

    fn check(&self, name: &str, found: &[f32]) {
        let wanted = self.floats(name);
        assert_eq!(found.len(), wanted.len(), "{name}");
        for (found, wanted) in found.iter().zip(wanted) {
            let limit = 1e-6 * wanted.abs().max(1.0);
            assert!((found - wanted).abs() <= limit, "{name}: {found} for {wanted}");
        }
    }
}

/// What an operation's reference makes of one input, for tokens at positions 0, 1, ..
fn reference(
    op: &Op,
    x: &[f32],
    width: usize,
    weights: &[Vec<f32>],
    cache: CachedLayer,
) -> Vec<f32> {
    let positions: Vec<u32> = (0..(x.len() / width) as u32).collect();
    let mut call = ReferenceCall {
        inputs: vec![x],
        widths: vec![width],
        weights,
        outputs: vec![vec![0.0; x.len()]],
        tokens: &positions,
        positions: &positions,
        picks: &[],
        deltas: Vec::new(),
        cache: &mut [cache],
        packed: Default::default(),
    };
    op.reference(&mut call);
    call.outputs.swap_remove(0)
}

#[test]
fn elementwise_functions() {
    let expected = Expected::open();
    let x = expected.floats("x");
    for &f in Unary::ALL {
        let y = reference(&Op::from(Map(f)), &x, x.len(), &[], CachedLayer::default());
        expected.check(f.name(), &y);
    }
}

#[test]
fn layer_norms() {
    let expected = Expected::open();
    let [x, weight, bias] =
        ["x", "weight", "bias"].map(|n| expected.floats(&format!("layer_norm.{n}")));
    let (width, norm) = (weight.len(), Op::from(LayerNorm { eps: expected.constant("eps") }));
    let of = |weights: &[Vec<f32>]| reference(&norm, &x, width, weights, CachedLayer::default());
    expected.check("layer_norm.plain", &of(std::slice::from_ref(&weight)));
    expected.check("layer_norm.biased", &of(&[weight.clone(), bias]));
}

#[test]
fn attention_with_a_cap_and_with_sinks() {
    let expected = Expected::open();
    let [q, keys, values, sinks] =
        ["q", "k", "v", "sinks"].map(|n| expected.floats(&format!("attention.{n}")));
    let (heads, head_dim) = (expected.constant("heads"), expected.constant("head_dim"));
    let plain = Attention {
        layer: 0,
        heads,
        kv_heads: expected.constant("kv_heads"),
        head_dim,
        scale: expected.constant("scale"),
        window: Some(expected.constant("window")),
        chunked: false,
        cap: None,
        sinks: false,
        slopes: false,
        chosen: None,
    };
    let of = |op: Attention, weights: &[Vec<f32>]| {
        let (keys, values) = (keys.clone(), values.clone());
        let cache = CachedLayer { keys, values, ..CachedLayer::default() };
        reference(&Op::from(op), &q, heads * head_dim, weights, cache)
    };
    let capped = Attention { cap: Some(expected.constant("cap")), ..plain.clone() };
    expected.check("attention.with_cap", &of(capped, &[]));
    let sunk = Attention { sinks: true, ..plain };
    expected.check("attention.with_sinks", &of(sunk, &[sinks]));
}

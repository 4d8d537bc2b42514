//! Tensors that a file holds and its architecture has no use for: a model computed without them is
//! another model.

use crate::Ending;
use crate::keys::Dialect;
use crate::names::{Names, candidates};
use formats::{Error, ErrorKind, Result, Tensors};
use program::Program;
use std::collections::HashSet;

/// Parts of names of tensors that are computed from the configuration, and stored for programs that
/// do not, or that it reads.
const DERIVED: &[&str] = &[
    "rotary_emb.inv_freq",
    "attn_rot_embd",
    "rope_freqs",
    "rope_factors_",
    "attn.bias",
    "attention.bias",
    "masked_bias",
    "layer_scalar",
    "mlp.act_fn.",
    // Lightning attention's.
    "slope_rate",
    "query_decay",
    "key_decay",
    "diagonal_decay",
    // Sines.
    "embed_positions.weights",
    // Shapes of packed matrices, and orders of their inputs where these are the plain ones.
    "weight_shape",
    "g_idx",
    // Scales for programs that round what matrices read, too.
    "activation_scale",
    "input_scale",
    "input_zero_point",
    "output_scale",
    "qscale_act",
    // Scales of caches in eight-bit floats.
    "k_proj.k_scale",
    "v_proj.v_scale",
    "self_attn.k_scale",
    "self_attn.v_scale",
];

/// Refuses a GGUF file with tensors of its blocks that no layer reads, as ggml's own loader does,
/// and any file with a bias that no layer reads of a matrix that one does, unless it is zero, as
/// AutoGPTQ adds to every matrix. Checkpoints of Hugging Face may hold more than the decoder (parts
/// for images, heads for training): there, unread tensors of blocks are worth a warning.
pub(crate) fn check(
    program: &Program,
    tensors: &Tensors,
    names: &Names<'_>,
    ending: Ending,
    spare: &[String],
) -> Result<Option<String>> {
    let used: HashSet<&str> = program.weights.iter().flat_map(|w| w.source.tensors()).collect();
    // What a model that ends before its head leaves.
    let heads = ["head", "head.bias"].map(|head| candidates(head, names.dialect, names.tables));
    let head = |name: &str| heads.iter().flatten().any(|head| head == name);
    let left = |name: &str| ending == Ending::Hidden && head(name);
    let derived = |name: &str| {
        left(name) || DERIVED.iter().any(|part| name.contains(part)) || is_nothing(name, tensors)
    };
    let of = |name: &String| candidates(name, names.dialect, names.tables);
    let spare: HashSet<String> = spare.iter().flat_map(of).collect();
    // The bias of a matrix that is read is a part of its product.
    let of_matrix = |name: &&str| {
        let stem = name.strip_suffix(".bias");
        let held =
            |part: &&str| stem.is_some_and(|stem| used.contains(format!("{stem}.{part}").as_str()));
        ["weight", "qweight", "weight_packed"].iter().any(held)
    };
    let unread = |name: &&str| !used.contains(name) && !is_nothing(name, tensors);
    if let Some(bias) = tensors.names().filter(of_matrix).find(unread) {
        let place = format!("{}: {}", names.file, bias.chars().take(80).collect::<String>());
        let expected = "a matrix without a bias, as this architecture has";
        return Err(Error::new(place, expected, "one").of(ErrorKind::Unsupported));
    }
    // Where the decoder's blocks are, as the first of them is named.
    let prefix = program
        .weights
        .iter()
        .flat_map(|w| w.source.tensors())
        .find_map(|name| name.split_once(".0."))
        .map(|parts| parts.0);
    let of_blocks = |name: &str| {
        prefix.is_some_and(|prefix| name.strip_prefix(prefix).is_some_and(|n| n.starts_with('.')))
    };
    let gguf = names.dialect == Dialect::Gguf;
    // Blocks that guess tokens ahead, whose count a key states that their architecture reads.
    let guesses = |name: &str| {
        let block = name.strip_prefix("blk.").and_then(|rest| rest.split('.').next());
        let of = |block: &str| tensors.get(&format!("blk.{block}.nextn.eh_proj.weight")).is_some();
        gguf && block.is_some_and(of)
    };
    let mut unread = tensors.names().filter(|name| {
        !used.contains(name)
            && !derived(name)
            && !spare.contains(*name)
            && !guesses(name)
            && (gguf || of_blocks(name))
    });
    let Some(first) = unread.next() else { return Ok(None) };
    let more = match unread.count() {
        0 => String::new(),
        count => format!(" and {count} more"),
    };
    let shown: String = first.chars().take(80).collect();
    if !gguf {
        return Ok(Some(format!("{shown}{more}: not used by this architecture")));
    }
    let found = format!("{shown}{more}, which it has no use for");
    Err(Error::new(names.file, "the tensors of its architecture and block_count", found)
        .hint("the metadata may describe another model"))
}

/// Whether a tensor is a bias, or zeros of codes, that adds nothing.
fn is_nothing(name: &str, tensors: &Tensors) -> bool {
    let parts = [".bias", ".weight_zero_point"];
    let tensor = tensors.get(name).filter(|_| parts.iter().any(|part| name.ends_with(part)));
    // Vectors are read whole; a matrix is no bias.
    tensor.filter(|tensor| tensor.elements() <= 1 << 20).is_some_and(|tensor| {
        let floats = tensor.to_f32().is_ok_and(|all| all.iter().all(|x| *x == 0.0));
        floats || tensor.bytes.iter().all(|byte| *byte == 0)
    })
}

//! A tiny Llama in GGUF, and what can be wrong with it.

use super::Case;
use super::Fate::{Refused, Runs, Warned};
use formats::gguf::{MetadataArray, MetadataValue};

/// A file under construction. Nothing stops it from contradicting itself.
#[derive(Clone)]
pub(crate) struct Model {
    pub(crate) keys: Vec<(String, MetadataValue)>,
    pub(crate) tensors: Vec<Tensor>,
    magic: [u8; 4],
    version: u32,
    /// By which the data is laid out, whatever the metadata says.
    alignment: usize,
    /// Bytes cut from the end.
    cut: usize,
    /// Zeros put behind the end.
    more: usize,
}

/// Values of F32 but for their type's number.
#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    /// Innermost first.
    pub(crate) dims: Vec<u64>,
    pub(crate) kind: u32,
    pub(crate) offset: Option<u64>,
    pub(crate) data: Vec<u8>,
}

const HIDDEN: u64 = 16;
const FEED_FORWARD: u64 = 32;
const VOCABULARY: u64 = 40;

/// Texts of the vocabulary: letters, what merges make of some, and two special tokens.
fn tokens() -> Vec<String> {
    let mut tokens: Vec<String> = ["<s>", "</s>"].map(String::from).to_vec();
    tokens.extend(('a'..='z').map(String::from));
    tokens.extend(["ab", "abc", "\u{120}", "\u{120}a"].map(String::from));
    tokens.extend((tokens.len()..VOCABULARY as usize).map(|id| format!("[PAD{id}]")));
    tokens
}

impl Model {
    /// One layer, two heads on one, byte-level BPE.
    pub(crate) fn tiny() -> Model {
        let mut model = Model {
            keys: Vec::new(),
            tensors: Vec::new(),
            magic: *b"GGUF",
            version: 3,
            alignment: 32,
            cut: 0,
            more: 0,
        };
        model.set("general.architecture", "llama");
        model.set("general.type", "model");
        for (key, value) in [
            ("embedding_length", HIDDEN as u32),
            ("block_count", 1),
            ("attention.head_count", 2),
            ("attention.head_count_kv", 1),
            ("feed_forward_length", FEED_FORWARD as u32),
            ("context_length", 64),
        ] {
            model.set(&format!("llama.{key}"), value);
        }
        model.set("llama.attention.layer_norm_rms_epsilon", 1e-5_f32);
        model.set("llama.rope.freq_base", 10_000_f32);
        model.set("tokenizer.ggml.model", "gpt2");
        model.set("tokenizer.ggml.pre", "gpt-2");
        model.set("tokenizer.ggml.tokens", tokens());
        let mut kinds = vec![1_i32; VOCABULARY as usize];
        kinds[..2].fill(3);
        model.set("tokenizer.ggml.token_type", kinds);
        model.set_merges(&["a b", "ab c", "\u{120} a"]);
        model.set("tokenizer.ggml.bos_token_id", 0_u32);
        model.set("tokenizer.ggml.eos_token_id", 1_u32);
        model.set("tokenizer.ggml.add_bos_token", true);
        let (h, f) = (HIDDEN, FEED_FORWARD);
        for (name, dims) in [
            ("token_embd", &[h, VOCABULARY][..]),
            ("output_norm", &[h]),
            ("blk.0.attn_norm", &[h]),
            ("blk.0.attn_q", &[h, h]),
            ("blk.0.attn_k", &[h, h / 2]),
            ("blk.0.attn_v", &[h, h / 2]),
            ("blk.0.attn_output", &[h, h]),
            ("blk.0.ffn_norm", &[h]),
            ("blk.0.ffn_gate", &[h, f]),
            ("blk.0.ffn_up", &[h, f]),
            ("blk.0.ffn_down", &[f, h]),
        ] {
            model.add(&format!("{name}.weight"), dims);
        }
        model
    }

    /// The same with a SentencePiece vocabulary.
    fn sentencepiece(&mut self) {
        self.set("tokenizer.ggml.model", "llama");
        let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
        let mut kinds = vec![2_i32, 3, 3];
        tokens.extend((0..256).map(|byte| format!("<0x{byte:02X}>")));
        kinds.extend([6; 256]);
        tokens.push("\u{2581}".to_string());
        kinds.push(1);
        let count = tokens.len();
        self.set("tokenizer.ggml.scores", vec![0_f32; count]);
        self.set("tokenizer.ggml.tokens", tokens);
        self.set("tokenizer.ggml.token_type", kinds);
        for key in ["pre", "merges", "bos_token_id", "eos_token_id", "add_bos_token"] {
            self.remove(&format!("tokenizer.ggml.{key}"));
        }
        self.tensors[0] = Tensor::of("token_embd.weight", &[HIDDEN, count as u64]);
    }

    pub(crate) fn set(&mut self, key: &str, value: impl Into<MetadataValue>) {
        match self.keys.iter_mut().find(|(name, _)| name == key) {
            Some((_, old)) => *old = value.into(),
            None => self.keys.push((key.to_string(), value.into())),
        }
    }

    fn llama(&mut self, key: &str, value: impl Into<MetadataValue>) {
        self.set(&format!("llama.{key}"), value);
    }

    fn token(&mut self, key: &str, value: impl Into<MetadataValue>) {
        self.set(&format!("tokenizer.ggml.{key}"), value);
    }

    fn remove(&mut self, key: &str) {
        self.keys.retain(|(name, _)| name != key);
    }

    fn set_merges(&mut self, merges: &[&str]) {
        self.token("merges", merges.iter().map(|m| m.to_string()).collect::<Vec<String>>());
    }

    fn add(&mut self, name: &str, dims: &[u64]) {
        self.tensors.push(Tensor::of(name, dims));
    }

    fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap()
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            string(key, &mut out);
            out.extend(value.id().to_le_bytes());
            encode(value, &mut out);
        }
        let mut data = Vec::new();
        for tensor in &self.tensors {
            string(&tensor.name, &mut out);
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            out.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.data);
            data.resize(data.len().next_multiple_of(self.alignment), 0);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(data);
        out.truncate(out.len() - self.cut);
        out.resize(out.len() + self.more, 0);
        out
    }
}

impl Tensor {
    /// Ones in a norm, small numbers elsewhere.
    fn of(name: &str, dims: &[u64]) -> Tensor {
        let count = dims.iter().product::<u64>() as usize;
        let value =
            |i: usize| if dims.len() == 1 { 1.0 } else { ((i * 37 + 11) % 97) as f32 / 97.0 - 0.5 };
        let data = (0..count).flat_map(|i| value(i).to_le_bytes()).collect();
        Tensor { name: name.to_string(), dims: dims.to_vec(), kind: 0, offset: None, data }
    }
}

fn string(text: &str, out: &mut Vec<u8>) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn encode(value: &MetadataValue, out: &mut Vec<u8>) {
    match value {
        MetadataValue::Bool(v) => out.push(u8::from(*v)),
        MetadataValue::U32(v) => out.extend(v.to_le_bytes()),
        MetadataValue::I32(v) => out.extend(v.to_le_bytes()),
        MetadataValue::F32(v) => out.extend(v.to_le_bytes()),
        MetadataValue::U64(v) => out.extend(v.to_le_bytes()),
        MetadataValue::String(v) => string(v, out),
        MetadataValue::Array(array) => {
            out.extend(array.id().to_le_bytes());
            out.extend((array.len() as u64).to_le_bytes());
            match array {
                MetadataArray::String(v) => v.iter().for_each(|v| string(v, out)),
                MetadataArray::I32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
                MetadataArray::F32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
                other => panic!("no {other:?} here"),
            }
        }
        other => panic!("no {other:?} here"),
    }
}

/// A row of the table.
macro_rules! case {
    ($name:literal, $damage:expr, $fate:expr) => {
        Case { name: $name, damage: $damage, fate: $fate }
    };
}

pub(crate) const CASES: &[Case<Model>] = &[
    case!("nothing", |_| {}, Runs),
    case!("nothing, SentencePiece", |m| m.sentencepiece(), Runs),
    // The file as a whole.
    case!("magic", |m| m.magic = *b"GGUX", Refused(&["begins with \"GGUF\"", "GGUX"])),
    case!("an archive", |m| m.magic = *b"PK\x03\x04", Refused(&["a ZIP archive"])),
    case!("version 0", |m| m.version = 0, Refused(&["version 1, 2 or 3", "version 0"])),
    case!("version 9", |m| m.version = 9, Refused(&["version 9"])),
    case!("big-endian", |m| m.version = 3 << 24, Refused(&["a little-endian GGUF file"])),
    case!("cut by a byte", |m| m.cut = 1, Refused(&["tensor blk.0.ffn_down.weight", "cut short"])),
    case!(
        "cut in the data",
        |m| m.cut = 200,
        Refused(&["tensor blk.0.ffn_down.weight", "cut short"])
    ),
    case!("cut in the header", |m| m.cut = m.bytes().len() - 600, Refused(&["cut short"])),
    case!("longer", |m| m.more = 100, Runs),
    // Kinds of files.
    case!(
        "an adapter",
        |m| m.set("general.type", "adapter"),
        Refused(&["general.type", "an adapter"])
    ),
    case!(
        "a projector",
        |m| m.set("general.type", "mmproj"),
        Refused(&["general.type", "a projector"])
    ),
    case!("a vocabulary", |m| m.tensors.clear(), Refused(&["weights", "metadata alone"])),
    case!(
        "no architecture",
        |m| m.remove("general.architecture"),
        Refused(&["general.architecture"])
    ),
    case!(
        "unknown architecture",
        |m| m.set("general.architecture", "rwkv7"),
        Refused(&["general.architecture", "architectures", "rwkv7", "RWKV"])
    ),
    case!(
        "architecture of another type",
        |m| m.set("general.architecture", 7_u32),
        Refused(&["general.architecture", "expected string", "u32"])
    ),
    // Alignment and places.
    case!(
        "64 written as 32",
        |m| {
            m.tensors.insert(0, Tensor::of("rope_freqs.weight", &[4]));
            m.alignment = 64;
        },
        Refused(&["expected data offset 32", "general.alignment = 32"])
    ),
    case!(
        "32 written as 64",
        |m| {
            m.tensors.insert(0, Tensor::of("rope_freqs.weight", &[4]));
            m.set("general.alignment", 64_u32);
        },
        Refused(&["token_embd.weight", "aligned to 64"])
    ),
    case!(
        "alignment 24",
        |m| m.set("general.alignment", 24_u32),
        Refused(&["general.alignment", "a power of two"])
    ),
    case!(
        "alignment 0",
        |m| m.set("general.alignment", 0_u32),
        Refused(&["general.alignment", "a power of two"])
    ),
    case!(
        "alignment as text",
        |m| m.set("general.alignment", "32"),
        Refused(&["general.alignment", "string"])
    ),
    case!(
        "offset beyond",
        |m| m.tensor("output_norm.weight").offset = Some(1 << 40),
        Refused(&["output_norm.weight", "cut short"])
    ),
    case!(
        "offset unaligned",
        |m| m.tensor("output_norm.weight").offset = Some(4),
        Refused(&["output_norm.weight", "aligned"])
    ),
    case!(
        "overlap",
        |m| m.tensor("output_norm.weight").offset = Some(0),
        Refused(&["do not overlap"])
    ),
    case!(
        "gap",
        |m| m.tensor("blk.0.ffn_down.weight").offset = Some(m.bytes().len() as u64 / 32 * 32),
        Refused(&["blk.0.ffn_down.weight"])
    ),
    case!(
        "key twice",
        |m| m.keys.push(m.keys[2].clone()),
        Refused(&["llama.embedding_length twice"])
    ),
    case!(
        "tensor twice",
        |m| m.add("output_norm.weight", &[16]),
        Refused(&["output_norm.weight twice"])
    ),
    case!(
        "1000 dimensions",
        |m| m.tensor("output_norm.weight").dims = vec![1; 1000],
        Refused(&["output_norm.weight", "1 to 4 dimensions, found 1000"])
    ),
    case!(
        "dimension 0",
        |m| m.tensor("output_norm.weight").dims = vec![0],
        Refused(&["output_norm.weight", "at least 1"])
    ),
    case!(
        "type unknown",
        |m| m.tensor("output_norm.weight").kind = 99,
        Refused(&["output_norm.weight", "99"])
    ),
    case!(
        "type of integers",
        |m| m.tensor("output_norm.weight").kind = 26,
        Refused(&["output_norm.weight", "floats", "i32"])
    ),
    // Weights.
    case!(
        "weight missing",
        |m| m.tensors.retain(|t| t.name != "blk.0.attn_q.weight"),
        Refused(&[
            "blk.0.attn_q.weight (blocks.0.attention.q)",
            "a tensor [16, 16]",
            "none in the file"
        ])
    ),
    case!(
        "weight transposed",
        |m| m.tensor("blk.0.ffn_up.weight").dims.reverse(),
        Refused(&["blk.0.ffn_up.weight (blocks.0.mlp.up)", "[32, 16]", "[16, 32]"])
    ),
    case!(
        "no embedding",
        |m| m.tensors.retain(|t| t.name != "token_embd.weight"),
        Refused(&["token_embd.weight"])
    ),
    case!(
        "a layer too many",
        |m| m.add("blk.1.attn_norm.weight", &[16]),
        Refused(&["blk.1.attn_norm.weight", "block_count"])
    ),
    case!(
        "a norm that llama lacks",
        |m| m.add("blk.0.attn_q_norm.weight", &[8]),
        Refused(&["blk.0.attn_q_norm.weight"])
    ),
    case!("rope factors", |m| m.add("rope_freqs.weight", &[4]), Runs),
    case!(
        "rope factors too many",
        |m| m.add("rope_freqs.weight", &[5]),
        Refused(&["rope_freqs.weight", "4 factors", "found 5"])
    ),
    case!(
        "rope factors in two dimensions",
        |m| m.add("rope_freqs.weight", &[2, 2]),
        Refused(&["rope_freqs.weight", "one factor per pair"])
    ),
    case!(
        "rope factor 0",
        |m| {
            m.add("rope_freqs.weight", &[4]);
            m.tensor("rope_freqs.weight").data.fill(0);
        },
        Refused(&["rope_freqs.weight", "positive factors", "found 0"])
    ),
    // Hyperparameters.
    case!("no width", |m| m.remove("llama.embedding_length"), Refused(&["llama.embedding_length"])),
    case!("no layers", |m| m.remove("llama.block_count"), Refused(&["llama.block_count"])),
    case!(
        "0 layers",
        |m| m.llama("block_count", 0_u32),
        Refused(&["llama.block_count", "1 to 4096, found 0"])
    ),
    case!(
        "layers huge",
        |m| m.llama("block_count", u32::MAX),
        Refused(&["llama.block_count", "4294967295"])
    ),
    case!(
        "layers as text",
        |m| m.llama("block_count", "1"),
        Refused(&["llama.block_count", "string \"1\""])
    ),
    case!(
        "layers as a float",
        |m| m.llama("block_count", 1.0_f32),
        Refused(&["llama.block_count", "f32"])
    ),
    case!(
        "layers negative",
        |m| m.llama("block_count", -1_i32),
        Refused(&["llama.block_count", "i32 -1"])
    ),
    case!("width 0", |m| m.llama("embedding_length", 0_u32), Refused(&["llama.embedding_length"])),
    case!(
        "width wrong",
        |m| m.llama("embedding_length", 20_u32),
        Refused(&["token_embd.weight", "[40, 20]", "[40, 16]"])
    ),
    case!(
        "width huge",
        |m| m.llama("embedding_length", 1_u32 << 30),
        Refused(&["llama.embedding_length"])
    ),
    case!(
        "no heads",
        |m| m.remove("llama.attention.head_count"),
        Refused(&["llama.attention.head_count"])
    ),
    case!(
        "0 heads",
        |m| m.llama("attention.head_count", 0_u32),
        Refused(&["llama.attention.head_count"])
    ),
    case!(
        "heads not dividing the width",
        |m| m.llama("attention.head_count", 3_u32),
        Refused(&["llama.embedding_length", "a multiple of llama.attention.head_count = 3"])
    ),
    case!(
        "heads on too many",
        |m| m.llama("attention.head_count_kv", 3_u32),
        Refused(&["llama.attention.head_count", "a multiple of llama.attention.head_count_kv = 3"])
    ),
    case!(
        "0 key/value heads",
        |m| m.llama("attention.head_count_kv", 0_u32),
        Refused(&["llama.attention.head_count_kv"])
    ),
    case!(
        "head size 0",
        |m| m.llama("attention.key_length", 0_u32),
        Refused(&["llama.attention.key_length"])
    ),
    case!(
        "head size odd",
        |m| m.llama("attention.key_length", 7_u32),
        Refused(&["llama.attention.key_length", "even"])
    ),
    case!(
        "head sizes that differ",
        |m| {
            m.llama("attention.key_length", 8_u32);
            m.llama("attention.value_length", 4_u32);
        },
        Refused(&["llama.attention.value_length", "llama.attention.key_length says"])
    ),
    case!(
        "feed-forward 0",
        |m| m.llama("feed_forward_length", 0_u32),
        Refused(&["llama.feed_forward_length"])
    ),
    case!(
        "no epsilon",
        |m| m.remove("llama.attention.layer_norm_rms_epsilon"),
        Refused(&["llama.attention.layer_norm_rms_epsilon"])
    ),
    case!(
        "epsilon 0",
        |m| m.llama("attention.layer_norm_rms_epsilon", 0_f32),
        Refused(&["layer_norm_rms_epsilon", "a positive number"])
    ),
    case!(
        "epsilon negative",
        |m| m.llama("attention.layer_norm_rms_epsilon", -1e-5_f32),
        Refused(&["layer_norm_rms_epsilon"])
    ),
    case!(
        "epsilon NaN",
        |m| m.llama("attention.layer_norm_rms_epsilon", f32::NAN),
        Refused(&["layer_norm_rms_epsilon", "NaN"])
    ),
    case!(
        "epsilon 5",
        |m| m.llama("attention.layer_norm_rms_epsilon", 5_f32),
        Refused(&["layer_norm_rms_epsilon", "below 1"])
    ),
    case!(
        "theta 0",
        |m| m.llama("rope.freq_base", 0_f32),
        Refused(&["llama.rope.freq_base", "a positive number"])
    ),
    case!(
        "theta negative",
        |m| m.llama("rope.freq_base", -1_f32),
        Refused(&["llama.rope.freq_base"])
    ),
    case!(
        "theta infinite",
        |m| m.llama("rope.freq_base", f32::INFINITY),
        Refused(&["llama.rope.freq_base"])
    ),
    case!(
        "theta as text",
        |m| m.llama("rope.freq_base", "10000"),
        Refused(&["llama.rope.freq_base", "string"])
    ),
    case!("no theta", |m| m.remove("llama.rope.freq_base"), Runs),
    case!(
        "rotated dimensions odd",
        |m| m.llama("rope.dimension_count", 3_u32),
        Refused(&["llama.rope.dimension_count", "an even number up to 8"])
    ),
    case!(
        "rotated dimensions too many",
        |m| m.llama("rope.dimension_count", 10_u32),
        Refused(&["llama.rope.dimension_count"])
    ),
    case!(
        "scaling unknown",
        |m| {
            m.llama("rope.scaling.type", "longrope");
            m.llama("rope.scaling.factor", 2_f32);
        },
        Refused(&["llama.rope.scaling.type", "longrope"])
    ),
    case!(
        "scaling by 0",
        |m| m.llama("rope.scaling.factor", 0_f32),
        Refused(&["llama.rope.scaling.factor", "a positive number"])
    ),
    case!(
        "stretched without end",
        |m| {
            m.llama("rope.scaling.type", "yarn");
            m.llama("rope.scaling.factor", 1e30_f32);
        },
        Refused(&["llama.rope.scaling.factor", "positions"])
    ),
    case!("context 0", |m| m.llama("context_length", 0_u32), Refused(&["llama.context_length"])),
    case!(
        "context huge",
        |m| m.llama("context_length", u32::MAX),
        Refused(&["llama.context_length"])
    ),
    case!(
        "no context",
        |m| m.remove("llama.context_length"),
        Warned("llama.context_length is missing: a context of 2048")
    ),
    case!(
        "experts",
        |m| m.llama("expert_count", 8_u32),
        Refused(&["llama.expert_used_count", "a number of experts", "found nothing"])
    ),
    case!(
        "more experts used than there are",
        |m| {
            m.llama("expert_count", 2_u32);
            m.llama("expert_used_count", 4_u32);
        },
        Refused(&["llama.expert_used_count", "at most llama.expert_count = 2", "found 4"])
    ),
    case!(
        "experts used and none there",
        |m| m.llama("expert_used_count", 2_u32),
        Refused(&["llama.expert_used_count", "at most llama.expert_count = 0", "found 2"])
    ),
    case!("0 experts", |m| m.llama("expert_count", 0_u32), Runs),
    // Vocabulary.
    case!(
        "pre-tokeniser unknown",
        |m| m.token("pre", "nobody"),
        Warned("tokenizer.ggml.pre \"nobody\" is not known")
    ),
    case!(
        "pre-tokeniser missing",
        |m| m.remove("tokenizer.ggml.pre"),
        Warned("tokenizer.ggml.pre is missing")
    ),
    case!(
        "model of vocabulary unknown",
        |m| m.token("model", "rwkv"),
        Refused(&["tokenizer.ggml.model", "rwkv"])
    ),
    case!(
        "no model of vocabulary",
        |m| m.remove("tokenizer.ggml.model"),
        Refused(&["tokenizer.ggml.model"])
    ),
    case!(
        "no merges",
        |m| m.remove("tokenizer.ggml.merges"),
        Refused(&["tokenizer.ggml.merges", "found none"])
    ),
    case!(
        "merges as a number",
        |m| m.token("merges", 3_u32),
        Refused(&["tokenizer.ggml.merges", "array of string"])
    ),
    case!(
        "merge without a blank",
        |m| m.set_merges(&["a b", "abc"]),
        Refused(&["tokenizer.ggml.merges", "a blank between", "\"abc\" as number 1"])
    ),
    case!(
        "merge of no tokens",
        |m| m.set_merges(&["a b", "ab c", "q x"]),
        Warned("tokenizer.ggml.merges: 1 of 3 name tokens that do not exist")
    ),
    case!(
        "merge of a huge piece",
        |m| {
            let huge = format!("a {}", "b".repeat(1 << 20));
            m.set_merges(&["a b", "ab c", &huge]);
        },
        Warned("tokenizer.ggml.merges: 1 of 3 name tokens that do not exist")
    ),
    case!(
        "merges of another vocabulary",
        |m| m.set_merges(&["a b", "q x", "x y"]),
        Refused(&["tokenizer.ggml.merges", "2 of 3"])
    ),
    case!(
        "fewer tokens than rows",
        |m| {
            let mut tokens = tokens();
            tokens.truncate(30);
            m.token("tokens", tokens);
        },
        Refused(&[
            "tokenizer.ggml.tokens",
            "40 tokens, one for each row of token_embd.weight, found 30"
        ])
    ),
    case!(
        "tokens as numbers",
        |m| m.token("tokens", vec![1_i32; 40]),
        Refused(&["tokenizer.ggml.tokens", "array of string"])
    ),
    case!(
        "types of some tokens",
        |m| m.token("token_type", vec![1_i32; 39]),
        Refused(&["tokenizer.ggml.token_type", "40 values"])
    ),
    case!(
        "end outside",
        |m| m.token("eos_token_id", 40_u32),
        Refused(&["tokenizer.ggml.eos_token_id", "an id below 40, found 40"])
    ),
    case!(
        "end far outside",
        |m| m.token("eos_token_id", u32::MAX),
        Refused(&["tokenizer.ggml.eos_token_id", "4294967295"])
    ),
    case!(
        "end negative",
        |m| m.token("eos_token_id", -5_i32),
        Refused(&["tokenizer.ggml.eos_token_id", "i32 -5"])
    ),
    case!(
        "end of turn outside",
        |m| m.token("eot_token_id", 99_u32),
        Refused(&["tokenizer.ggml.eot_token_id", "99"])
    ),
    case!(
        "no end",
        |m| {
            m.remove("tokenizer.ggml.eos_token_id");
            m.token("token_type", vec![1_i32; 40]);
        },
        Warned("no end token")
    ),
    case!(
        "BOS outside",
        |m| m.token("bos_token_id", 99_u32),
        Warned("tokenizer.ggml.bos_token_id = 99 is outside the 40 tokens")
    ),
    case!(
        "BOS -1",
        |m| m.token("bos_token_id", -1_i32),
        Warned("tokenizer.ggml.bos_token_id is -1: no BOS")
    ),
    case!(
        "BOS negative",
        |m| m.token("bos_token_id", -7_i32),
        Refused(&["tokenizer.ggml.bos_token_id", "i32 -7"])
    ),
    case!(
        "no BOS",
        |m| m.remove("tokenizer.ggml.bos_token_id"),
        Warned("tokenizer.ggml.bos_token_id is missing")
    ),
    // Nothing uses it in inference.
    case!("padding outside", |m| m.token("padding_token_id", 99_u32), Runs),
    case!(
        "SentencePiece without scores",
        |m| {
            m.sentencepiece();
            m.remove("tokenizer.ggml.scores")
        },
        Refused(&["tokenizer.ggml.scores", "none"])
    ),
    case!(
        "SentencePiece, BOS outside",
        |m| {
            m.sentencepiece();
            m.token("bos_token_id", 999_u32)
        },
        Warned("1 is taken")
    ),
    // What goes with it.
    case!(
        "template broken",
        |m| m.set("tokenizer.chat_template", "{% if %}"),
        Refused(&["tokenizer.chat_template", "line 1"])
    ),
    case!(
        "template a number",
        |m| m.set("tokenizer.chat_template", 1_u32),
        Refused(&["tokenizer.chat_template", "string"])
    ),
    case!(
        "temperature negative",
        |m| m.set("general.sampling.temp", -1_f32),
        Refused(&["general.sampling.temp", "found -1"])
    ),
    case!(
        "top_p as text",
        |m| m.set("general.sampling.top_p", "all"),
        Refused(&["general.sampling.top_p", "string \"all\""])
    ),
];

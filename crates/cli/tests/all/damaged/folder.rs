//! A tiny Llama in a folder as Hugging Face lays it out, and what can be wrong with it.

use super::Case;
use super::Fate::{Refused, Runs, Warned};
use serde_json::{Map, Value, json};
use std::path::Path;

/// A folder under construction. Nothing stops it from contradicting itself.
pub(crate) struct Model {
    config: Value,
    generation: Value,
    tokenizer: Value,
    settings: Value,
    /// Name, type, shape and bytes of each tensor.
    tensors: Vec<(String, &'static str, Vec<usize>, Vec<u8>)>,
    /// Changes the header of the weights before it is written, with the bytes of data behind it.
    header: fn(&mut Map<String, Value>, &mut Vec<u8>),
    /// What the first eight bytes say beside the length of the header.
    lie: i64,
    /// Files that are removed or written as they are.
    missing: Vec<&'static str>,
    files: Vec<(&'static str, Vec<u8>)>,
}

const VOCABULARY: usize = 40;

impl Model {
    /// One layer, two heads on one, byte-level BPE.
    pub(crate) fn tiny() -> Model {
        let mut texts: Vec<String> = ["<s>", "</s>"].map(String::from).to_vec();
        texts.extend(('a'..='z').map(String::from));
        texts.extend(
            ["ab", "abc", "\u{120}", "\u{120}a", "\u{c3}", "\u{a9}", "<", ">"].map(String::from),
        );
        texts.extend((texts.len()..VOCABULARY).map(|id| format!("[PAD{id}]")));
        let vocab: Map<String, Value> =
            texts.iter().enumerate().map(|(id, text)| (text.clone(), id.into())).collect();
        let special = |id: usize| {
            json!({ "id": id, "content": texts[id], "single_word": false, "lstrip": false, "rstrip": false,
                    "normalized": false, "special": true })
        };
        let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
        let mut model = Model {
            config: json!({
                "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16,
                "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                "num_key_value_heads": 1, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
                "max_position_embeddings": 64, "vocab_size": VOCABULARY, "tie_word_embeddings": true,
                "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32",
            }),
            generation: json!({ "do_sample": true, "temperature": 0.7, "eos_token_id": [1] }),
            tokenizer: json!({
                "version": "1.0", "truncation": null, "padding": null, "added_tokens": [special(0), special(1)],
                "normalizer": null, "pre_tokenizer": byte_level, "post_processor": null, "decoder": byte_level,
                "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                           "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
                           "merges": ["a b", "ab c", "\u{120} a"] },
            }),
            settings: json!({ "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>" }),
            tensors: Vec::new(),
            header: |_, _| {},
            lie: 0,
            missing: Vec::new(),
            files: Vec::new(),
        };
        for (name, shape) in [
            ("embed_tokens", &[VOCABULARY, 16][..]),
            ("norm", &[16]),
            ("layers.0.input_layernorm", &[16]),
            ("layers.0.self_attn.q_proj", &[16, 16]),
            ("layers.0.self_attn.k_proj", &[8, 16]),
            ("layers.0.self_attn.v_proj", &[8, 16]),
            ("layers.0.self_attn.o_proj", &[16, 16]),
            ("layers.0.post_attention_layernorm", &[16]),
            ("layers.0.mlp.gate_proj", &[32, 16]),
            ("layers.0.mlp.up_proj", &[32, 16]),
            ("layers.0.mlp.down_proj", &[16, 32]),
        ] {
            model.add(&format!("model.{name}.weight"), "F32", shape);
        }
        model
    }

    fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.config[key] = value.into();
    }

    fn unset(&mut self, key: &str) {
        self.config.as_object_mut().unwrap().remove(key);
    }

    /// Adds a tensor of ones, or of small numbers where it has two dimensions.
    fn add(&mut self, name: &str, dtype: &'static str, shape: &[usize]) {
        let count = shape.iter().product::<usize>();
        let value = |i: usize| {
            if shape.len() == 1 { 1.0 } else { ((i * 37 + 11) % 97) as f32 / 97.0 - 0.5 }
        };
        let data = (0..count).flat_map(|i| value(i).to_le_bytes()).collect();
        self.tensors.push((name.to_string(), dtype, shape.to_vec(), data));
    }

    fn tensor(&mut self, name: &str) -> &mut (String, &'static str, Vec<usize>, Vec<u8>) {
        self.tensors.iter_mut().find(|tensor| tensor.0 == name).unwrap()
    }

    pub(crate) fn write(&self, folder: &Path) {
        std::fs::create_dir(folder).unwrap();
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, dtype, shape, bytes) in &self.tensors {
            let begin = data.len();
            data.extend(bytes);
            let entry =
                json!({ "dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()] });
            header.insert(name.clone(), entry);
        }
        (self.header)(&mut header, &mut data);
        let header = Value::Object(header).to_string();
        let length = (header.len() as i64 + self.lie) as u64;
        let weights = [length.to_le_bytes().to_vec(), header.into_bytes(), data].concat();
        let json = |value: &Value| value.to_string().into_bytes();
        let files = [
            ("config.json", json(&self.config)),
            ("generation_config.json", json(&self.generation)),
            ("tokenizer.json", json(&self.tokenizer)),
            ("tokenizer_config.json", json(&self.settings)),
            ("model.safetensors", weights),
        ];
        for (name, bytes) in files.iter().chain(&self.files) {
            if !self.missing.contains(name) {
                std::fs::write(folder.join(name), bytes).unwrap();
            }
        }
    }
}

const INDEX: &str = "model.safetensors.index.json";
const NORM: &str = "model.norm.weight";

/// A row of the table.
macro_rules! case {
    ($name:literal, $damage:expr, $fate:expr) => {
        Case { name: $name, damage: $damage, fate: $fate }
    };
}

pub(crate) const CASES: &[Case<Model>] = &[
    case!("nothing", |_| {}, Runs),
    // Files.
    case!(
        "no configuration",
        |m| m.missing.push("config.json"),
        Refused(&["config.json", "the weights in model.safetensors", "no such file"])
    ),
    case!(
        "no weights",
        |m| m.missing.push("model.safetensors"),
        Refused(&["weights in *.safetensors"])
    ),
    case!("no tokenizer", |m| m.missing.push("tokenizer.json"), Runs),
    case!(
        "configuration cut",
        |m| m.files.push(("config.json", b"{\"hidden_size\": 16".to_vec())),
        Refused(&["config.json", "JSON"])
    ),
    case!(
        "configuration a list",
        |m| m.config = json!([1]),
        Refused(&["config.json", "a JSON object"])
    ),
    case!(
        "an adapter",
        |m| {
            m.missing.extend(["config.json", "model.safetensors"]);
            m.files.push((
                "adapter_config.json",
                br#"{"peft_type": "LORA", "base_model_name_or_path": "org/base"}"#.to_vec(),
            ));
            m.files.push(("adapter_model.safetensors", b"..".to_vec()));
        },
        Refused(&["adapter_config.json", "an adapter", "org/base"])
    ),
    case!(
        "an adapter beside a configuration",
        |m| {
            m.missing.push("model.safetensors");
            m.files.push(("adapter_config.json", b"{}".to_vec()));
            m.files.push(("adapter_model.safetensors", b"..".to_vec()));
        },
        Refused(&["adapter_config.json", "an adapter"])
    ),
    case!(
        "an adapter beside a model",
        |m| m.files.push(("adapter_model.safetensors", b"..".to_vec())),
        Warned("the adapter beside the weights is not applied")
    ),
    case!(
        "missing shard",
        |m| m.files.push((
            INDEX,
            br#"{"weight_map": {"a": "model-00002-of-00002.safetensors"}}"#.to_vec()
        )),
        Warned("lists model-00002-of-00002.safetensors, which is not there")
    ),
    case!(
        "shard outside",
        |m| m.files.push((INDEX, br#"{"weight_map": {"a": "../x.safetensors"}}"#.to_vec())),
        Refused(&[INDEX, "weight_map", "inside the folder"])
    ),
    case!(
        "tensor that its shard lacks",
        |m| m.files.push((INDEX, br#"{"weight_map": {"a.weight": "model.safetensors"}}"#.to_vec())),
        Refused(&["model.safetensors", "a.weight"])
    ),
    case!(
        "index without a map",
        |m| m.files.push((INDEX, b"{}".to_vec())),
        Refused(&[INDEX, "weight_map"])
    ),
    // Weights.
    case!("header longer", |m| m.lie = 1_000_000, Refused(&["model.safetensors", "cut short"])),
    case!("header shorter", |m| m.lie = -10, Refused(&["model.safetensors", "JSON"])),
    case!(
        "header without end",
        |m| m.lie = i64::MAX - 10_000,
        Refused(&["model.safetensors", "at most"])
    ),
    case!(
        "type unknown",
        |m| m.tensor(NORM).1 = "F8_E9",
        Refused(&["tensor model.norm.weight", "F8_E9, which is not supported"])
    ),
    case!(
        "type of integers",
        |m| m.tensor(NORM).1 = "I32",
        Refused(&["model.norm.weight (norm)", "floats", "i32"])
    ),
    case!(
        "overlap",
        |m| m.header = |header, _| header[NORM]["data_offsets"] = json!([0, 64]),
        Refused(&["model.safetensors", "data that begins at offset"])
    ),
    case!(
        "gap",
        |m| m.header = |_, data| data.extend([0; 4]),
        Refused(&["model.safetensors", "a file of"])
    ),
    case!(
        "offsets beyond",
        |m| m.header = |header, _| header[NORM]["data_offsets"] = json!([1_u64 << 40, 1_u64 << 41]),
        Refused(&[NORM, "data offsets in order"])
    ),
    case!(
        "size against shape",
        |m| m.tensor(NORM).2 = vec![17],
        Refused(&[NORM, "68 bytes for F32 [17]"])
    ),
    case!(
        "1000 dimensions",
        |m| {
            let shape = &mut m.tensor(NORM).2;
            *shape = vec![1; 999];
            shape.push(16);
        },
        Refused(&[
            "model.norm.weight (norm)",
            "[16]",
            "[1, 1, 1, 1, 1, 1, 1, 1, ..] of 1000 dimensions"
        ])
    ),
    case!(
        "weight missing",
        |m| m.tensors.retain(|t| !t.0.contains("q_proj")),
        Refused(&[
            "model.layers.0.self_attn.q_proj.weight (blocks.0.attention.q)",
            "none in the file"
        ])
    ),
    case!(
        "weight of another shape",
        |m| m.tensor("model.layers.0.mlp.up_proj.weight").2.reverse(),
        Refused(&["model.layers.0.mlp.up_proj.weight (blocks.0.mlp.up)", "[32, 16]"])
    ),
    case!(
        "a layer too many",
        |m| m.add("model.layers.1.input_layernorm.weight", "F32", &[16]),
        Warned("model.layers.1.input_layernorm.weight: not used")
    ),
    case!(
        "stored frequencies",
        |m| m.add("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", &[4]),
        Runs
    ),
    // Configuration.
    case!(
        "model_type unknown",
        |m| {
            m.set("model_type", "rwkv7");
            m.unset("architectures")
        },
        Refused(&["config.json: model_type", "architectures", "rwkv7", "RWKV"])
    ),
    case!("model_type missing", |m| m.unset("model_type"), Runs),
    case!(
        "no architecture",
        |m| {
            m.unset("model_type");
            m.unset("architectures")
        },
        Warned("model_type is missing: taken for llama")
    ),
    case!(
        "model_type a number",
        |m| m.set("model_type", 5),
        Refused(&["config.json: model_type", "text", "found 5"])
    ),
    case!(
        "quantised in an unknown way",
        |m| m.set("quantization_config", json!({ "quant_method": "magic" })),
        Refused(&["config.json: quantization_config.quant_method", "magic"])
    ),
    case!(
        "gptq, with matrices left as they were",
        |m| m.set("quantization_config", json!({ "quant_method": "gptq", "bits": 4 })),
        Warned("states a quantisation that no tensor has")
    ),
    case!(
        "gptq of a bit too many",
        |m| m.set("quantization_config", json!({ "quant_method": "gptq", "bits": 9 })),
        Refused(&["config.json: quantization_config.bits", "2 to 8", "found 9"])
    ),
    case!(
        "bitsandbytes",
        |m| m.set("quantization_config", json!({ "quant_method": "bitsandbytes" })),
        Refused(&["config.json: quantization_config.quant_method", "bitsandbytes"])
    ),
    case!(
        "quantised without a method",
        |m| m.set("quantization", json!({ "group_size": 64 })),
        Refused(&["config.json: quantization", "affine groups"])
    ),
    case!(
        "quantised by MLX in another mode",
        |m| m.set("quantization", json!({ "group_size": 16, "bits": 4, "mode": "nvfp4" })),
        Refused(&["config.json: quantization.mode", "affine, mxfp4, mxfp8", "nvfp4"])
    ),
    case!(
        "quantised by MLX, with matrices left as they were",
        |m| m.set("quantization", json!({ "group_size": 64, "bits": 4 })),
        Warned("states a quantisation that no tensor has")
    ),
    case!(
        "a key that nobody knows",
        |m| m.set("attn_logit_softcapping", 50.0),
        Refused(&[
            "config.json: attn_logit_softcapping",
            "50.0",
            "ignored key attn_logit_softcapping"
        ])
    ),
    case!(
        "experts",
        |m| m.set("num_local_experts", 8),
        Refused(&["config.json: num_local_experts", "no experts"])
    ),
    case!(
        "more experts used than there are",
        |m| {
            m.set("num_experts", 2);
            m.set("num_experts_per_tok", 4);
        },
        Refused(&["config.json: num_experts_per_tok", "at most num_experts = 2", "found 4"])
    ),
    case!(
        "no width",
        |m| m.unset("hidden_size"),
        Refused(&["config.json: hidden_size", "nothing"])
    ),
    case!(
        "width as text",
        |m| m.set("hidden_size", "16"),
        Refused(&["config.json: hidden_size", "\"16\""])
    ),
    case!(
        "width a float",
        |m| m.set("hidden_size", 16.5),
        Refused(&["config.json: hidden_size", "16.5"])
    ),
    case!(
        "layers negative",
        |m| m.set("num_hidden_layers", -1),
        Refused(&["config.json: num_hidden_layers", "-1"])
    ),
    case!(
        "layers huge",
        |m| m.set("num_hidden_layers", u64::MAX),
        Refused(&["config.json: num_hidden_layers", "1 to 4096"])
    ),
    case!(
        "heads not dividing",
        |m| m.set("num_key_value_heads", 3),
        Refused(&["config.json: num_attention_heads", "a multiple of num_key_value_heads = 3"])
    ),
    case!("head_dim 0", |m| m.set("head_dim", 0), Refused(&["config.json: head_dim"])),
    case!(
        "epsilon negative",
        |m| m.set("rms_norm_eps", -1.0),
        Refused(&["config.json: rms_norm_eps"])
    ),
    case!("epsilon 0", |m| m.set("rms_norm_eps", 0.0), Refused(&["config.json: rms_norm_eps"])),
    case!(
        "epsilon NaN",
        |m| {
            // As Python writes it, which JSON cannot say.
            m.set("rms_norm_eps", "NaN");
            let text = m.config.to_string().replace("\"NaN\"", "NaN");
            m.files.push(("config.json", text.into_bytes()));
        },
        Refused(&["config.json: rms_norm_eps"])
    ),
    case!(
        "theta 0",
        |m| m.set("rope_theta", 0),
        Refused(&["config.json: rope_theta", "a positive number"])
    ),
    case!(
        "activation",
        |m| m.set("hidden_act", "swoosh"),
        Refused(&["config.json: hidden_act", "silu", "swoosh"])
    ),
    case!(
        "context 0",
        |m| m.set("max_position_embeddings", 0),
        Refused(&["config.json: max_position_embeddings"])
    ),
    case!(
        "no context",
        |m| m.unset("max_position_embeddings"),
        Warned("max_position_embeddings is missing: a context of 2048")
    ),
    case!(
        "vocabulary larger than the embedding",
        |m| m.set("vocab_size", 41),
        Refused(&["model.embed_tokens.weight (embed)", "[41, 16]", "[40, 16]"])
    ),
    case!(
        "scaling unknown",
        |m| m.set("rope_scaling", json!({ "rope_type": "spiral" })),
        Refused(&["config.json: rope_scaling.rope_type", "spiral"])
    ),
    case!(
        "scaling by factors that are missing",
        |m| m.set("rope_scaling", json!({ "rope_type": "longrope" })),
        Refused(&["config.json: rope_scaling.short_factor", "a list of numbers"])
    ),
    case!(
        "scaling by 0",
        |m| m.set("rope_scaling", json!({ "type": "linear", "factor": 0.0 })),
        Refused(&["config.json: rope_scaling.factor", "a positive number"])
    ),
    case!(
        "llama3 scaling by 0",
        |m| {
            m.set("rope_parameters", json!({ "rope_type": "llama3", "factor": 0.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4 }))
        },
        Refused(&["config.json: rope_parameters.factor", "found 0"])
    ),
    case!(
        "no factor",
        |m| m.set("rope_scaling", json!({ "type": "linear" })),
        Refused(&["config.json: rope_scaling.factor", "nothing"])
    ),
    case!(
        "inner configuration",
        |m| m.config = json!({ "model_type": "llama", "text_config": { "num_hidden_layers": 0, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32, "vocab_size": 40 } }),
        Refused(&["config.json: text_config.num_hidden_layers"])
    ),
    // Ends of generation.
    case!(
        "ends outside",
        |m| {
            m.set("eos_token_id", 99);
            m.generation = json!({});
            m.settings = json!({});
            m.tokenizer["added_tokens"] = json!([]);
        },
        Refused(&["config.json: eos_token_id", "a token id below 40, found 99", "never stop"])
    ),
    case!(
        "one end of two outside",
        |m| m.generation["eos_token_id"] = json!([1, 99]),
        Warned("generation_config.json: eos_token_id 99 is outside")
    ),
    case!(
        "end negative",
        |m| m.set("eos_token_id", -1),
        Refused(&["config.json: eos_token_id", "-1"])
    ),
    case!(
        "end as text",
        |m| m.generation["eos_token_id"] = json!("</s>"),
        Refused(&["generation_config.json: eos_token_id"])
    ),
    case!(
        "no end",
        |m| {
            m.unset("eos_token_id");
            m.generation = json!({});
            m.settings = json!({});
            m.tokenizer["added_tokens"] = json!([]);
        },
        Warned("no end token is stated")
    ),
    case!(
        "end that is no token",
        |m| m.settings["eos_token"] = json!("<|stop|>"),
        Warned("eos_token \"<|stop|>\" is no token")
    ),
    case!(
        "temperature as text",
        |m| m.generation["temperature"] = json!("hot"),
        Refused(&["generation_config.json: temperature", "\"hot\""])
    ),
    case!(
        "top_p 7",
        |m| m.generation["top_p"] = json!(7),
        Refused(&["generation_config.json: top_p", "found 7"])
    ),
    // Tokenizer.
    case!(
        "tokenizer cut",
        |m| m.files.push(("tokenizer.json", b"{\"model\": ".to_vec())),
        Refused(&["tokenizer.json", "JSON"])
    ),
    case!(
        "more tokens than rows",
        |m| m.tokenizer["model"]["vocab"]["more"] = json!(40),
        Warned("the tokenizer has 41 tokens, the model 40")
    ),
    case!(
        "no merges",
        |m| drop(m.tokenizer["model"].as_object_mut().unwrap().remove("merges")),
        Refused(&["tokenizer.json: model: merges", "none"])
    ),
    case!(
        "merge of no tokens",
        |m| m.tokenizer["model"]["merges"] = json!(["q x"]),
        Refused(&["tokenizer.json: model: merges", "\"q\" and \"x\""])
    ),
    case!(
        "merge without a blank",
        |m| m.tokenizer["model"]["merges"] = json!(["ab"]),
        Refused(&["tokenizer.json: model: merges", "pairs of tokens"])
    ),
    case!(
        "ids far apart",
        |m| m.tokenizer["model"]["vocab"]["a"] = json!(u32::MAX),
        Refused(&["tokenizer.json: model: vocab", "large gaps", "4294967295"])
    ),
    case!(
        "model of tokenizer unknown",
        |m| m.tokenizer["model"]["type"] = json!("Magic"),
        Refused(&["tokenizer.json: model", "Magic"])
    ),
    case!(
        "fixed length 0",
        |m| m.tokenizer["pre_tokenizer"] = json!({ "type": "FixedLength", "length": 0 }),
        Refused(&["tokenizer.json: pre_tokenizer: length", "at least 1"])
    ),
    case!(
        "table of normalisations damaged",
        |m| m.tokenizer["normalizer"] =
            json!({ "type": "Precompiled", "precompiled_charsmap": "AAAA" }),
        Refused(&["tokenizer.json: normalizer: precompiled_charsmap"])
    ),
    case!(
        "table of normalisations that leads outside",
        |m| m.tokenizer["normalizer"] = json!({ "type": "Sequence", "normalizers": [{ "type": "Precompiled", "precompiled_charsmap": "BAAAAAD8//8=" }] }),
        Refused(&["tokenizer.json: normalizer: precompiled_charsmap", "outside"])
    ),
    case!(
        "two templates",
        |m| {
            let template = json!({ "type": "TemplateProcessing", "single": [{ "SpecialToken": { "id": "<s>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }, { "SpecialToken": { "id": "<s>", "type_id": 0 } }],
                                   "pair": [], "special_tokens": { "<s>": { "id": "<s>", "ids": [0], "tokens": ["<s>"] } } });
            m.tokenizer["post_processor"] =
                json!({ "type": "Sequence", "processors": [template, template] });
        },
        Refused(&["tokenizer.json: post_processor", "one template"])
    ),
    case!(
        "template broken",
        |m| m.settings["chat_template"] = json!("{{ x"),
        Refused(&["tokenizer_config.json: chat_template", "line 1"])
    ),
    case!(
        "template file broken",
        |m| m.files.push(("chat_template.jinja", b"\n{% for %}".to_vec())),
        Refused(&["chat_template.jinja", "line 2"])
    ),
];

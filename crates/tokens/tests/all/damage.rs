//! Valid tokenizers damaged in every part of their structure: an error of one line or a tokenizer
//! that works, never a panic. (Damage to the text of the files is in `hostile.rs`; to whole model
//! files, in the engine's tests.)

use std::path::{Path, PathBuf};

use delft_tokens::gguf::GgufVocabulary;
use delft_tokens::{ChatTemplate, Special, TemplateInput, Tokenizer};
use formats::gguf::Gguf;
use serde_json::{Map, Value, json};

/// A small deterministic generator (xorshift64*).
struct Random(u64);

impl Random {
    fn of(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n.max(1)
    }
}

/// What stands where something else is expected.
fn odd(random: &mut Random) -> Value {
    match random.below(20) {
        0 => Value::Null,
        1 => json!(true),
        2 => json!(-1),
        3 => json!(0),
        4 => json!(4_294_967_295_u64),
        5 => json!(u64::MAX),
        6 => json!(1e308),
        7 => json!(0.5),
        8 => json!(""),
        9 => json!("a"),
        10 => json!("\u{0}\u{fdd0}\u{2581}\u{1f389}"),
        11 => json!("x".repeat(3000)),
        12 => json!([]),
        13 => json!({}),
        14 => json!([["a", 0.0], ["a", 0.0], ["", -1e300]]),
        15 => json!({"a": 0, "": 1, "b": 0}),
        16 => (0..100).fold(json!("deep"), |inner, _| json!([inner])),
        17 => json!("(a+)+$"),
        18 => json!({"Regex": "["}),
        _ => {
            json!({"type": "Sequence", "normalizers": [], "pretokenizers": [], "processors": [], "decoders": []})
        }
    }
}

/// Changes one place of a tree: goes down at random, rather far, and there removes, repeats, swaps
/// or replaces.
fn change(value: &mut Value, random: &mut Random) {
    match value {
        Value::Object(fields) if !fields.is_empty() && random.below(8) > 0 => {
            let at = random.below(fields.len());
            let key = fields.keys().nth(at).cloned().unwrap_or_default();
            match random.below(12) {
                0 => drop(fields.remove(&key)),
                1 => {
                    let moved = fields.remove(&key).unwrap_or_default();
                    fields.insert(["", "a", "type", "\u{120}a"][random.below(4)].into(), moved);
                }
                2 => {
                    // One field's content in another's place.
                    let other = random.below(fields.len());
                    let content = fields.values().nth(other).cloned().unwrap_or_default();
                    fields.insert(key, content);
                }
                _ => {
                    if let Some(inner) = fields.get_mut(&key) {
                        change(inner, random);
                    }
                }
            }
        }
        Value::Array(items) if !items.is_empty() && random.below(8) > 0 => {
            let (at, other) = (random.below(items.len()), random.below(items.len()));
            match random.below(8) {
                0 => drop(items.remove(at)),
                1 => items.insert(other, items[at].clone()),
                2 => items.swap(at, other),
                3 => items.truncate(at),
                _ => change(&mut items[at], random),
            }
        }
        Value::Number(number) if random.below(2) == 0 => {
            let n = number.as_i64().unwrap_or(0);
            *value = json!(n.saturating_add([1, -1, 1000, 1 << 40][random.below(4)]));
        }
        other => *other = odd(random),
    }
}

const TEXT: &str = "Hi <s> the 12 \u{e9}\u{1f389}\n\u{65e5}</s>  \u{0} [UNK]<|im_end|>";

/// Uses a tokenizer in every way; what it says of itself must agree.
fn use_it(tokenizer: &Tokenizer) {
    for special in [Special::default(), Special { add: true, parse: true }] {
        let Ok(ids) = tokenizer.encode(TEXT, special) else { continue };
        for skip in [true, false] {
            let whole = tokenizer.decode(&ids, skip);
            let mut stream = tokenizer.stream_with(skip);
            let mut streamed: String = ids.iter().filter_map(|id| stream.push(*id)).collect();
            streamed.extend(stream.flush());
            assert_eq!(whole, streamed);
        }
    }
    let size = tokenizer.vocab_size();
    let named = [tokenizer.bos(), tokenizer.eos_token(), tokenizer.unk(), tokenizer.pad()];
    for id in named.into_iter().flatten().chain(tokenizer.eos().iter().copied()) {
        assert!((id as usize) < size, "{id} of {size}");
    }
    tokenizer.decode(&[0, u32::MAX, size as u32], false);
}

fn one_line(error: &formats::Error) {
    let error = error.to_string();
    assert!(!error.contains('\n') && error.len() < 1500, "{error}");
}

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn read(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn damaged_tokenizer_json() {
    for (number, name) in ["bytes", "pieces", "unigram"].iter().enumerate() {
        let whole = read(&data(name).join("tokenizer.json"));
        let (mut worked, mut refused) = (0, 0);
        for seed in 0..2000 {
            let mut random = Random::of(seed * 3 + number as u64 + 1);
            let mut damaged = whole.clone();
            for _ in 0..=random.below(3) {
                change(&mut damaged, &mut random);
            }
            match Tokenizer::from_json(damaged.to_string().as_bytes()) {
                Ok(tokenizer) => {
                    worked += 1;
                    use_it(&tokenizer);
                }
                Err(error) => {
                    refused += 1;
                    one_line(&error);
                }
            }
        }
        println!("{name}: {worked} work, {refused} are refused");
        assert!(worked > 200 && refused > 200, "{name}: {worked} work, {refused} are refused");
    }
}

/// Every kind of normaliser, pre-tokeniser and post-processor that the library has.
fn parts() -> Vec<(&'static str, Value)> {
    let regex = json!({"Regex": "\\s+|\\w"});
    let special = |text: &str, id: u32| json!({"id": text, "ids": [id], "tokens": [text]});
    let pieces = json!([{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
    let normalizers = [
        json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true}),
        json!({"type": "Strip", "strip_left": true, "strip_right": true}),
        json!({"type": "StripAccents"}),
        json!({"type": "NFKC"}),
        json!({"type": "NFD"}),
        json!({"type": "Lowercase"}),
        json!({"type": "Nmt"}),
        // The smallest table: a trie of one block that nothing matches, and no texts.
        json!({"type": "Precompiled", "precompiled_charsmap": format!("AAQAA{}==", "A".repeat(1367 - 2))}),
        json!({"type": "Replace", "pattern": regex, "content": "\u{2581}"}),
        json!({"type": "Prepend", "prepend": "\u{2581}"}),
        json!({"type": "ByteLevel"}),
    ];
    let pre_tokenizers = [
        json!({"type": "BertPreTokenizer"}),
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        json!({"type": "CharDelimiterSplit", "delimiter": "i"}),
        json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "first", "split": true}),
        json!({"type": "Whitespace"}),
        json!({"type": "WhitespaceSplit"}),
        json!({"type": "Split", "pattern": regex, "behavior": "MergedWithPrevious", "invert": false}),
        json!({"type": "Punctuation", "behavior": "Isolated"}),
        json!({"type": "Digits", "individual_digits": true}),
        json!({"type": "UnicodeScripts"}),
        json!({"type": "FixedLength", "length": 2}),
    ];
    let processors = [
        json!({"type": "TemplateProcessing", "single": pieces, "pair": pieces, "special_tokens": {"<s>": special("<s>", 1)}}),
        json!({"type": "RobertaProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1], "trim_offsets": true, "add_prefix_space": true}),
        json!({"type": "BertProcessing", "sep": ["</s>", 2], "cls": ["<s>", 1]}),
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
    ];
    let of = |member, parts: &[Value]| parts.iter().map(|part| (member, part.clone())).collect();
    let all: [Vec<_>; 3] = [
        of("normalizer", &normalizers),
        of("pre_tokenizer", &pre_tokenizers),
        of("post_processor", &processors),
    ];
    all.concat()
}

/// Tokenizers put together from parts of every kind, some of them damaged: what the library would
/// panic at is found before it is asked, so that none of the errors is that of the last net.
#[test]
fn damaged_parts_of_every_kind() {
    let wholes: Vec<Value> = ["bytes", "pieces", "unigram"]
        .iter()
        .map(|name| read(&data(name).join("tokenizer.json")))
        .collect();
    let parts = parts();
    let (mut worked, mut refused, mut caught) = (0, 0, Vec::new());
    for seed in 0..2000_u64 {
        let mut random = Random::of(seed + 1);
        let mut tokenizer = wholes[random.below(wholes.len())].clone();
        let (member, part) = &parts[seed as usize % parts.len()];
        let mut part = part.clone();
        if seed >= parts.len() as u64 {
            (0..=random.below(2)).for_each(|_| change(&mut part, &mut random));
        }
        let list = match *member {
            "normalizer" => "normalizers",
            "pre_tokenizer" => "pretokenizers",
            _ => "processors",
        };
        tokenizer[*member] = match random.below(3) {
            // Beside what the tokenizer has.
            0 => json!({"type": "Sequence", list: [tokenizer[*member], part]}),
            1 => json!({"type": "Sequence", list: [part, part]}),
            _ => part,
        };
        if random.below(4) == 0 {
            // Tokens that swallow spaces on either side, one of them a space.
            let token = |id: u32, content: &str| json!({"id": id, "content": content, "special": false, "lstrip": random_bit(seed, 0), "rstrip": random_bit(seed, 1), "normalized": random_bit(seed, 2)});
            tokenizer["added_tokens"] = json!([token(1, "<s>"), token(2, " "), token(3, "the")]);
        }
        let outcome = Tokenizer::from_json(tokenizer.to_string().as_bytes());
        let errors = match outcome {
            Ok(tokenizer) => {
                worked += 1;
                use_it(&tokenizer);
                let special = Special { add: true, parse: true };
                ["<s>   x  the", TEXT, ""].map(|text| tokenizer.encode(text, special).err()).into()
            }
            Err(error) => {
                refused += 1;
                vec![Some(error)]
            }
        };
        for error in errors.into_iter().flatten() {
            one_line(&error);
            if error.to_string().contains("breaks in use") {
                caught.push(format!("seed {seed}: {member} {}", tokenizer[*member]));
            }
        }
    }
    println!("{worked} work, {refused} are refused, {} are caught", caught.len());
    assert!(worked > 100 && refused > 500, "{worked} work, {refused} are refused");
    assert!(caught.is_empty(), "{}", caught[..caught.len().min(8)].join("\n"));
}

fn random_bit(seed: u64, bit: u32) -> bool {
    seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (60 + bit) & 1 == 1
}

/// Every setting that these files may have, so that each is damaged.
fn settings() -> Vec<(&'static str, Value)> {
    let token = json!({"content": "</s>", "special": true, "lstrip": false, "normalized": false});
    vec![
        (
            "tokenizer_config.json",
            json!({
                "tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": token,
                "unk_token": "a", "pad_token": null, "add_bos_token": true, "add_eos_token": true,
                "additional_special_tokens": ["<|im_end|>", token],
                "added_tokens_decoder": {"0": token, "7": {"content": "<new>", "single_word": true}},
                "chat_template": [
                    {"name": "default", "template": "{{ messages[0].content ~ bos_token }}"},
                    {"name": "tool_use", "template": "{{ tools }}"}
                ],
            }),
        ),
        (
            "special_tokens_map.json",
            json!({"bos_token": "<s>", "eos_token": token, "additional_special_tokens": [token]}),
        ),
        ("added_tokens.json", json!({"<one>": 3, "<two>": 300, "<s>": 1})),
    ]
}

fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("delft-damage-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&path).unwrap();
    path
}

#[test]
fn damaged_settings_of_a_folder() {
    for (legacy, name) in [(false, "bytes"), (true, "legacy")] {
        let path = folder(name);
        let whole = read(&data("bytes").join("tokenizer.json"));
        if legacy {
            let merges = whole["model"]["merges"].as_array().unwrap().iter();
            let line = |merge: &Value| match merge {
                Value::String(line) => line.clone(),
                pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
            };
            let merges: Vec<String> = merges.map(line).collect();
            std::fs::write(path.join("merges.txt"), merges.join("\n")).unwrap();
            std::fs::write(path.join("vocab.json"), whole["model"]["vocab"].to_string()).unwrap();
        } else {
            std::fs::write(path.join("tokenizer.json"), whole.to_string()).unwrap();
        }
        let settings = settings();
        let mut worked = 0;
        for seed in 0..400_u64 {
            let mut random = Random::of(seed + 1);
            let which = random.below(settings.len() + usize::from(legacy));
            for (number, (name, value)) in settings.iter().enumerate() {
                let mut value = value.clone();
                if seed > 0 && number == which {
                    (0..=random.below(3)).for_each(|_| change(&mut value, &mut random));
                }
                std::fs::write(path.join(name), value.to_string()).unwrap();
            }
            if which == settings.len() {
                let mut vocab = whole["model"]["vocab"].clone();
                (0..=random.below(3)).for_each(|_| change(&mut vocab, &mut random));
                std::fs::write(path.join("vocab.json"), vocab.to_string()).unwrap();
            }
            match Tokenizer::from_folder(&path) {
                Ok(tokenizer) => {
                    worked += 1;
                    use_it(&tokenizer);
                }
                Err(error) => one_line(&error),
            }
            match ChatTemplate::from_folder(&path) {
                Ok(Some(template)) => {
                    let messages = [json!({"role": "user", "content": "Hi"})];
                    let request = TemplateInput { messages: &messages, ..TemplateInput::default() };
                    if let Err(error) = template.render(&request) {
                        one_line(&error);
                    }
                }
                Ok(None) => {}
                Err(error) => one_line(&error),
            }
        }
        assert!(worked > 50, "{name}: {worked} of 400 work");
        std::fs::remove_dir_all(&path).unwrap();
    }
}

/// Damages a vocabulary as no reader of files would let it be: any field may be anything.
fn change_vocabulary(v: &mut GgufVocabulary, random: &mut Random) {
    let count = v.tokens.len();
    let (at, other) = (random.below(count), random.below(count));
    let id = [0, 1, count as u32 - 1, count as u32, u32::MAX][random.below(5)];
    match random.below(15) {
        0 => v.tokens[at] = v.tokens[other].clone(),
        1 => v.tokens[at].clear(),
        2 => {
            v.tokens[at] =
                ["\u{0}", "<0x41>", "<0xZZ>", "\u{2581}", " ", "\u{1f389}"][random.below(6)].into()
        }
        3 => v.tokens.truncate(at),
        4 => {
            v.scores =
                [vec![], vec![f32::NAN; count], vec![f32::INFINITY; count]][random.below(3)].clone()
        }
        5 => {
            if let Some(score) = v.scores.get_mut(at) {
                *score = [f32::NAN, f32::NEG_INFINITY, f32::MAX, -0.0][random.below(4)];
            }
        }
        6 => v.token_types.truncate(at),
        7 => v.token_types = (0..count).map(|_| random.below(9) as i32 - 1).collect(),
        8 => {
            v.merges =
                vec![["", " ", "a", "a b c", "\u{1f389} \u{1f389}"][random.below(5)].into(); 3]
        }
        9 => v.merges.reverse(),
        10 => {
            v.pre =
                [None, Some(""), Some("llama-bpe"), Some("nobody")][random.below(4)].map(Into::into)
        }
        11 => v.model = ["llama", "gpt2", "t5", "gemma4", "bert", ""][random.below(6)].into(),
        12 => (v.bos, v.eos, v.unk) = (Some(id), None, Some(id)),
        13 => (v.eot, v.eom, v.pad) = (Some(id), Some(id), Some(id)),
        _ => {
            (v.add_bos, v.add_eos) = (Some(random.below(2) == 0), Some(true));
            (v.add_space_prefix, v.remove_extra_whitespaces) =
                (Some(random.below(2) == 0), Some(random.below(2) == 0));
        }
    }
}

/// A vocabulary of each kind, small.
fn vocabularies() -> Vec<GgufVocabulary> {
    let bytes: Vec<String> = (0..=255_u8).map(|byte| format!("<0x{byte:02X}>")).collect();
    let texts = ["<unk>", "<s>", "</s>", "\u{2581}", "H", "i", "\u{2581}Hi", "Hi", "t", "h", "th"];
    let mut tokens: Vec<String> = texts.map(String::from).to_vec();
    let mut token_types = vec![2, 3, 3, 1, 1, 1, 1, 1, 1, 1, 4];
    tokens.extend(bytes);
    token_types.resize(tokens.len(), 6);
    let scores = (0..tokens.len()).map(|id| -(id as f32)).collect();
    let pieces = GgufVocabulary {
        model: "llama".into(),
        tokens,
        scores,
        token_types,
        bos: Some(1),
        eos: Some(2),
        unk: Some(0),
        ..GgufVocabulary::default()
    };
    let whole = read(&data("bytes").join("tokenizer.json"));
    let vocab: &Map<String, Value> = whole["model"]["vocab"].as_object().unwrap();
    let mut ordered: Vec<(&String, u64)> =
        vocab.iter().map(|(text, id)| (text, id.as_u64().unwrap())).collect();
    ordered.sort_by_key(|(_, id)| *id);
    let merges = whole["model"]["merges"].as_array().unwrap().iter();
    let byte_level = GgufVocabulary {
        model: "gpt2".into(),
        pre: Some("gpt-2".into()),
        tokens: ordered.into_iter().map(|(text, _)| text.clone()).collect(),
        merges: merges
            .map(|merge| match merge {
                Value::String(line) => line.clone(),
                pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
            })
            .collect(),
        eos: Some(0),
        ..GgufVocabulary::default()
    };
    let unigram = GgufVocabulary { model: "t5".into(), ..pieces.clone() };
    vec![pieces, byte_level, unigram]
}

#[test]
fn damaged_vocabularies() {
    for whole in vocabularies() {
        use_it(&Tokenizer::from_vocabulary(whole.clone()).unwrap());
        let mut worked = 0;
        for seed in 0..2000 {
            let mut random = Random::of(seed + 1);
            let mut damaged = whole.clone();
            for _ in 0..=random.below(3) {
                if !damaged.tokens.is_empty() {
                    change_vocabulary(&mut damaged, &mut random);
                }
            }
            match Tokenizer::from_vocabulary(damaged) {
                Ok(tokenizer) => {
                    worked += 1;
                    use_it(&tokenizer);
                }
                Err(error) => one_line(&error),
            }
        }
        assert!(worked > 300, "{}: {worked} of 2000 work", whole.model);
    }
}

#[test]
fn damaged_published_vocabularies() {
    let Some(folder) = testing::data("tokenizers") else { return };
    for name in ["gpt-2/ggml-vocab-gpt-2.gguf", "llama-spm/ggml-vocab-llama-spm.gguf"] {
        let file = Gguf::open(&folder.join(name)).unwrap();
        let whole = GgufVocabulary::from_metadata(file.metadata()).unwrap();
        for seed in 0..12 {
            let mut random = Random::of(seed + 1);
            let mut damaged = whole.clone();
            for _ in 0..20 {
                if !damaged.tokens.is_empty() {
                    change_vocabulary(&mut damaged, &mut random);
                }
            }
            match Tokenizer::from_vocabulary(damaged) {
                Ok(tokenizer) => use_it(&tokenizer),
                Err(error) => one_line(&error),
            }
        }
    }
}

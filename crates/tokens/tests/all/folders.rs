//! Tokenizers against those of the packages that define the formats
//! (tests/reference/tokenizer_vectors.py), and streaming against decoding at once.

use std::path::{Path, PathBuf};

use delft_tokens::{GgufVocabulary, Special, Tokenizer};
use serde_json::Value;

/// A change to a file.
type Change<'a> = &'a dyn Fn(&mut Value);

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|id| u32::try_from(id.as_u64().unwrap()).unwrap())
        .collect()
}

/// All of a stream's outputs joined; each must be text without half characters.
fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> String {
    let mut stream = tokenizer.stream_with(skip_special);
    let mut text = String::new();
    for id in ids {
        let piece = stream.push(*id);
        assert!(piece.as_deref() != Some(""));
        text.extend(piece);
    }
    text.extend(stream.flush());
    text
}

#[test]
fn folders_as_in_transformers() {
    for name in ["bytes", "pieces", "unigram"] {
        let tokenizer = Tokenizer::from_folder(&folder(name)).unwrap();
        let cases = json(&folder(name).join("expected.json"));
        let mut count = 0;
        for case in cases.as_array().unwrap() {
            for random in case["random"].as_array().into_iter().flatten() {
                let ids = ids(&random["ids"]);
                assert_eq!(
                    tokenizer.decode(&ids, true),
                    random["decoded"].as_str().unwrap(),
                    "{name}: {ids:?}"
                );
                count += 1;
            }
            let Some(text) = case["text"].as_str() else { continue };
            let encode = |add, parse| tokenizer.encode(text, Special { add, parse }).unwrap();
            assert_eq!(encode(false, true), ids(&case["parsed"]), "{name}: {text:?}");
            assert_eq!(encode(true, true), ids(&case["added"]), "{name}: {text:?}");
            // The package's own unigram model finds special tokens by their text even when told not
            // to.
            if name != "unigram" || !text.contains("<") {
                assert_eq!(encode(false, false), ids(&case["plain"]), "{name}: {text:?}");
            }
            // Whatever the text says, no id of it is special when it is not to be parsed.
            let unk = tokenizer.unk();
            assert!(
                encode(false, false)
                    .iter()
                    .all(|id| !tokenizer.is_special(*id) || Some(*id) == unk)
            );
            for (skip, key) in [(false, "decoded"), (true, "skipped")] {
                let parsed = ids(&case["parsed"]);
                assert_eq!(
                    tokenizer.decode(&parsed, skip),
                    case[key].as_str().unwrap(),
                    "{name}: {text:?}"
                );
                assert_eq!(
                    streamed(&tokenizer, &parsed, skip),
                    case[key].as_str().unwrap(),
                    "{name}: {text:?}"
                );
            }
            count += 1;
        }
        assert!(count > 40);
        let named = |text: &str| tokenizer.special_id(text).unwrap();
        assert_eq!(tokenizer.adds_bos(), name == "bytes");
        assert_eq!(tokenizer.bos(), Some(named("<s>")));
        assert!(
            tokenizer.eos().contains(&named("</s>")) && tokenizer.eos().contains(&named("<|end|>"))
        );
        assert!(tokenizer.is_special(named("<|end|>")));
    }
}

/// A unigram writes what it has no token for by its own unknown token, also where no setting names
/// that.
#[test]
fn a_unigrams_unknown_token_needs_no_name() {
    let alone = std::env::temp_dir().join(format!("delft-unigram-{}", std::process::id()));
    std::fs::create_dir_all(&alone).unwrap();
    let file = "tokenizer.json";
    std::fs::copy(folder("unigram").join(file), alone.join(file)).unwrap();
    let tokenizer = Tokenizer::from_folder(&alone).unwrap();
    std::fs::remove_dir_all(&alone).unwrap();
    assert_eq!(tokenizer.unk(), Some(0));
    let mut unknown = 0;
    for case in json(&folder("unigram").join("expected.json")).as_array().unwrap() {
        let Some(text) = case["text"].as_str().filter(|text| !text.contains('<')) else { continue };
        let found = tokenizer.encode(text, Special { add: false, parse: false }).unwrap();
        assert_eq!(found, ids(&case["plain"]), "{text:?}");
        unknown += found.iter().filter(|id| **id == 0).count();
    }
    assert!(unknown > 0);
}

/// Mistral's own file, with special tokens listed and without, against mistral-common
/// (tests/reference/tekken_vectors.py).
#[test]
fn tekken_as_in_mistral_common() {
    let cases = json(&folder("tekken").join("expected.json"));
    for (name, size) in [("listed", 624), ("unlisted", 720)] {
        let tokenizer = Tokenizer::from_folder(&folder("tekken").join(name)).unwrap();
        assert_eq!(tokenizer.vocab_size(), size, "{name}");
        assert_eq!(tokenizer.warnings(), [] as [String; 0]);
        assert_eq!((tokenizer.bos(), tokenizer.eos_token()), (Some(1), Some(2)), "{name}");
        for case in cases[name].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            let encode = |add| tokenizer.encode(text, Special { add, parse: false }).unwrap();
            let expected = ids(&case["ids"]);
            assert_eq!(encode(false), expected, "{name}: {text:?}");
            assert_eq!(encode(true), [&[1], &expected[..]].concat(), "{name}: {text:?}");
            assert_eq!(tokenizer.decode(&expected, false), text);
            assert_eq!(streamed(&tokenizer, &expected, false), text);
        }
        let parsed = Special { add: false, parse: true };
        assert_eq!(tokenizer.encode("[INST]</s>", parsed).unwrap(), [3, 2], "{name}");
    }
}

#[test]
fn a_tekken_file_that_does_not_fit_is_refused_by_key() {
    let whole = json(&folder("tekken/listed/tekken.json"));
    let temporary = std::env::temp_dir().join(format!("delft-tekken-{}", std::process::id()));
    std::fs::create_dir_all(&temporary).unwrap();
    let changed = |change: Change| {
        let mut file = whole.clone();
        change(&mut file);
        std::fs::write(temporary.join("tekken.json"), file.to_string()).unwrap();
        Tokenizer::from_folder(&temporary).unwrap_err().to_string()
    };
    let cases: [(Change, &str); 8] = [
        (&|f| f["config"]["pattern"] = "x+".into(), "config.pattern: expected the pattern"),
        (&|f| f["config"]["default_vocab_size"] = 9000.into(), "config.default_vocab_size: "),
        (
            &|f| f["config"]["default_num_special_tokens"] = 4.into(),
            "special_tokens: expected ranks below 4",
        ),
        (
            &|f| f["config"]["default_num_special_tokens"] = 700.into(),
            "config.default_vocab_size: ",
        ),
        (&|f| f["vocab"][300]["rank"] = 7.into(), "vocab[300]: expected ranks in order, found 7"),
        (&|f| f["vocab"][300]["token_bytes"] = "*".into(), "vocab[300]: expected bytes in base64"),
        (
            &|f| f["vocab"][300]["token_bytes"] = "AA==".into(),
            "vocab[300]: expected bytes that no other",
        ),
        (&|f| f["vocab"] = 3.into(), "tekken.json: expected a vocabulary in Tekken's form"),
    ];
    for (change, expected) in cases {
        let why = changed(change);
        assert!(why.contains("tekken.json") && why.contains(expected), "{why}");
    }
    std::fs::remove_dir_all(&temporary).unwrap();
}

#[test]
fn vocabularies_as_in_sentencepiece() {
    let models = json(&folder("sentencepiece.json"));
    for (kind, model) in [("bpe", "llama"), ("unigram", "t5")] {
        let rows = models[kind]["tokens"].as_array().unwrap();
        let texts = rows.iter().map(|row| row[0].as_str().unwrap().to_string());
        let vocabulary = GgufVocabulary {
            model: model.to_string(),
            tokens: texts.collect(),
            scores: rows.iter().map(|row| row[1].as_f64().unwrap() as f32).collect(),
            token_types: rows.iter().map(|row| row[2].as_i64().unwrap() as i32).collect(),
            unk: Some(0),
            eos: Some(2),
            ..GgufVocabulary::default()
        };
        let tokenizer = Tokenizer::from_vocabulary(vocabulary).unwrap();
        assert_eq!(tokenizer.warnings(), [] as [String; 0]);
        // Text that spells what stands for </s> in the model's list.
        let forged = tokenizer.encode("\u{fdd0}2 </s>", Special::default()).unwrap();
        assert!(forged.iter().all(|id| *id == 0 || !tokenizer.is_special(*id)), "{forged:?}");
        let cases = models[kind]["cases"].as_array().unwrap();
        assert!(cases.len() > 30);
        for case in cases {
            let text = case["text"].as_str().unwrap();
            let expected = ids(&case["ids"]);
            let found = tokenizer.encode(text, Special::default()).unwrap();
            // SentencePiece puts a space before the whole text only, ggml after every token found
            // beforehand too.
            if !text.contains("<extra>") && !text.contains('\n') {
                assert_eq!(found, expected, "{kind}: {text:?}");
                assert_eq!(
                    tokenizer.decode(&expected, true),
                    case["decoded"].as_str().unwrap().replace(" \u{2047} ", "")
                );
            }
            assert_eq!(streamed(&tokenizer, &expected, true), tokenizer.decode(&expected, true));
        }
    }
}

/// A field of a protocol buffer: bytes.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut length = bytes.len();
    let mut all = vec![number << 3 | 2];
    while length >= 0x80 {
        all.push((length & 0x7f) as u8 | 0x80);
        length >>= 7;
    }
    all.push(length as u8);
    all.extend(bytes);
    all
}

/// The same vocabularies in SentencePiece's own file, which a folder may have in place of a
/// tokenizer.json.
#[test]
fn a_model_of_sentencepiece_is_a_tokenizer() {
    let models = json(&folder("sentencepiece.json"));
    for (kind, model) in [("bpe", 2), ("unigram", 1)] {
        let mut file = Vec::new();
        for row in models[kind]["tokens"].as_array().unwrap() {
            let mut piece = field(1, row[0].as_str().unwrap().as_bytes());
            piece.push(2 << 3 | 5);
            piece.extend((row[1].as_f64().unwrap() as f32).to_le_bytes());
            piece.extend([3 << 3, row[2].as_i64().unwrap() as u8]);
            file.extend(field(1, &piece));
        }
        file.extend(field(2, &[3 << 3, model]));
        // A space in front, and no others taken away.
        file.extend(field(3, &[3 << 3, 1, 4 << 3, 0]));
        let name = format!("delft-pieces-{kind}-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        let write = |bytes: &[u8]| std::fs::write(dir.join("tokenizer.model"), bytes).unwrap();
        write(&file);
        let tokenizer = Tokenizer::from_folder(&dir).unwrap();
        let (mut same, first) = (0, |id: &u32| *id == 1);
        for case in models[kind]["cases"].as_array().unwrap() {
            let text = case["text"].as_str().unwrap();
            if !text.contains("<extra>") && !text.contains('\n') {
                let plain = tokenizer.encode(text, Special::default()).unwrap();
                assert_eq!(plain, ids(&case["ids"]), "{kind}: {text:?}");
                let added = tokenizer.encode(text, Special { add: true, parse: false }).unwrap();
                assert!(added.first().is_some_and(first) && added[1..] == plain);
                same += 1;
            }
        }
        assert!(same > 20, "{same}");
        // A token that a file beside it adds.
        let last = tokenizer.vocab_size() as u32;
        let added = format!(r#"{{"<|tool|>": {last}}}"#);
        std::fs::write(dir.join("added_tokens.json"), added).unwrap();
        let tokenizer = Tokenizer::from_folder(&dir).unwrap();
        let parsed = tokenizer.encode("<|tool|>", Special { add: false, parse: true }).unwrap();
        assert!(parsed.contains(&last), "{parsed:?}");
        for cut in [1, 7, file.len() / 2 + 1] {
            write(&file[..cut]);
            let error = Tokenizer::from_folder(&dir).unwrap_err().to_string();
            assert!(error.contains("tokenizer.model"), "{error}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}

/// A small generator of pseudo-random numbers (xorshift), so that failures repeat.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below as u64) as usize
    }
}

#[test]
fn streams_say_what_decoding_says() {
    const ALPHABET: [&str; 16] = [
        "a",
        " ",
        "  ",
        "Hello",
        "\n",
        "é",
        "e\u{301}",
        "日本",
        "한",
        "हि",
        "🎉",
        "👩\u{200d}👩\u{200d}👧",
        "🇩🇪",
        "\u{10ffff}",
        "<|end|>",
        "\u{2581}",
    ];
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    for name in ["bytes", "pieces", "unigram"] {
        let tokenizer = Tokenizer::from_folder(&folder(name)).unwrap();
        for _ in 0..300 {
            // Any ids at all, some outside the vocabulary.
            let count = dice.roll(40);
            let ids: Vec<u32> =
                (0..count).map(|_| dice.roll(tokenizer.vocab_size() + 3) as u32).collect();
            for skip in [false, true] {
                let whole = tokenizer.decode(&ids, skip);
                assert_eq!(streamed(&tokenizer, &ids, skip), whole, "{name}: {ids:?}");
                let bytes: Vec<u8> = ids
                    .iter()
                    .filter(|id| !(skip && tokenizer.is_special(**id)))
                    .flat_map(|id| tokenizer.token_bytes(*id).to_vec())
                    .collect();
                let lossy = String::from_utf8_lossy(&bytes).into_owned();
                assert!(
                    lossy == whole
                        || lossy.trim_start_matches(' ') == whole.trim_start_matches(' ')
                );
            }
            // Texts come back, and no output ends inside of a character.
            let count = dice.roll(30);
            let text: String = (0..count).map(|_| ALPHABET[dice.roll(ALPHABET.len())]).collect();
            let ids = tokenizer.encode(&text, Special::default()).unwrap();
            let mut stream = tokenizer.stream();
            let mut joined = String::new();
            for id in &ids {
                let piece = stream.push(*id).unwrap_or_default();
                assert!(!piece.contains('\u{fffd}'), "{name}: {text:?}");
                joined += &piece;
            }
            assert_eq!(stream.flush(), None, "{name}: {text:?}");
            if name == "bytes" {
                // Its normal form composes e and the accent.
                assert_eq!(joined, text.replace("e\u{301}", "é"), "{name}");
            }
            assert_eq!(joined, tokenizer.decode(&ids, true), "{name}");
        }
    }
}

#[test]
fn what_is_no_tokenizer_is_an_error() {
    let temporary = std::env::temp_dir().join(format!("delft-tokens-{}", std::process::id()));
    std::fs::create_dir_all(&temporary).unwrap();
    let whole = std::fs::read_to_string(folder("bytes").join("tokenizer.json")).unwrap();
    let cases = [
        ("{", "JSON"),
        ("[]", "a JSON object"),
        ("{}", "vocab"),
        (r#"{"model":{"type":"BPE","vocab":{"a":0},"merges":["a b"]}}"#, "merges"),
        (r#"{"model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":[["a","b"]]}}"#, "merges"),
        (r#"{"model":{"type":"BPE","vocab":{"a":0},"merges":[[1,2]]}}"#, "merges"),
        (r#"{"model":{"type":"BPE","vocab":{"a":4294967295},"merges":[]}}"#, "gaps"),
        (r#"{"model":{"type":"BPE","vocab":{"a":0},"merges":[],"unk_token":"u"}}"#, "unk_token"),
        (
            r#"{"model":{"type":"BPE","vocab":{"a":0,"bc":1,"abc":2},"merges":["a bc"],"continuing_subword_prefix":"@@"}}"#,
            "merges",
        ),
        (r#"{"model":{"type":"Unigram","vocab":[["a",0.0]],"unk_id":7}}"#, "unk_id"),
        (r#"{"model":{"type":"Unigram","vocab":[["a"]]}}"#, "vocab"),
        (r#"{"model":{"type":"Other","vocab":{"a":0}}}"#, "Other"),
        (r#"{"model":{"type":"BPE","vocab":{"a":0},"merges":[]},"decoder":{"type":"CTC"}}"#, "CTC"),
        (
            r#"{"model":{"type":"BPE","vocab":{"a":0},"merges":[]},"normalizer":{"type":"Replace"}}"#,
            "Replace",
        ),
        (
            r#"{"model":{"type":"BPE","vocab":{"a":0},"merges":[]},"added_tokens":[{"id":-1}]}"#,
            "added_tokens",
        ),
        (
            r#"{"model":{"type":"BPE","vocab":{"a":0},"merges":[]},"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"no","type_id":0}}],"pair":[],"special_tokens":{}}}"#,
            "listed special tokens",
        ),
        (
            r#"{"model":{"type":"BPE","vocab":{"a":0},"merges":[]},"post_processor":{"type":"Sequence","processors":[{"type":"TemplateProcessing","single":[{"Sequence":{"id":"B","type_id":0}}],"pair":[],"special_tokens":{}}]}}"#,
            "sequence A",
        ),
        (
            r#"{"model":{"type":"BPE","vocab":{"a":0},"merges":[]},"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"s","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[],"special_tokens":{"s":{"id":"s","ids":[9],"tokens":["s"]}}}}"#,
            "token ids below 1",
        ),
        (&whole[..whole.len() / 2], "JSON"),
    ];
    for (text, part) in cases {
        std::fs::write(temporary.join("tokenizer.json"), text).unwrap();
        let error = Tokenizer::from_folder(&temporary).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json") && error.contains(part), "{error}");
    }
    std::fs::remove_file(temporary.join("tokenizer.json")).unwrap();
    assert!(Tokenizer::from_folder(&temporary).unwrap_err().to_string().contains("vocab.json"));
    std::fs::remove_dir_all(&temporary).unwrap();

    let vocabulary = |model: &str| GgufVocabulary {
        model: model.to_string(),
        tokens: vec!["a".to_string(), "b".to_string(), "ab".to_string()],
        ..GgufVocabulary::default()
    };
    let error = |vocabulary| Tokenizer::from_vocabulary(vocabulary).unwrap_err().to_string();
    assert!(error(vocabulary("bert")).contains("bert"));
    assert!(error(vocabulary("llama")).contains("scores"));
    assert!(error(vocabulary("gpt2")).contains("merges"));
    assert!(
        error(GgufVocabulary { scores: vec![0.0], ..vocabulary("llama") }).contains("3 values")
    );
    assert!(error(GgufVocabulary::default()).contains("tokens"));
    let merges = |merges: &[&str]| merges.iter().map(|m| m.to_string()).collect::<Vec<_>>();
    for blankless in ["x", ""] {
        let merges = merges(&["a b", blankless]);
        let error = error(GgufVocabulary { merges, ..vocabulary("gpt2") });
        assert!(error.contains("merges: expected two tokens with a blank"), "{error}");
    }
    let outside = GgufVocabulary { eos: Some(3), ..vocabulary("llama") };
    assert!(error(outside).contains("eos_token_id: expected an id below 3, found 3"));
    let odd = GgufVocabulary {
        merges: merges(&["a b", "a c"]),
        pre: Some("nobody".to_string()),
        bos: Some(9),
        add_bos: Some(true),
        ..vocabulary("gpt2")
    };
    let tokenizer = Tokenizer::from_vocabulary(odd).unwrap();
    assert_eq!(tokenizer.encode("ab", Special { add: true, parse: true }).unwrap(), [2]);
    let warnings = tokenizer.warnings().join("\n");
    assert!(
        warnings.contains("nobody")
            && warnings.contains("1 of 2 name tokens")
            && warnings.contains("bos"),
        "{warnings}"
    );
}

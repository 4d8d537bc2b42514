//! Every pair of text and ids that was published with llama.cpp's vocabularies.

use std::collections::HashMap;
use std::path::Path;

use delft_tokens::gguf::kind;
use delft_tokens::{ChatTemplate, GgufVocabulary, Special, Tokenizer, char_of};

/// Texts and ids of a vocabulary's `.inp` and `.out`.
fn pairs(folder: &Path, name: &str) -> Vec<(String, Vec<u32>)> {
    let read = |end: &str| {
        std::fs::read_to_string(folder.join(format!("ggml-vocab-{name}.gguf.{end}"))).unwrap()
    };
    let texts = read("inp");
    let texts = texts.strip_suffix("\n__ggml_vocab_test__\n").unwrap();
    let texts: Vec<&str> = texts.split("\n__ggml_vocab_test__\n").collect();
    let ids: Vec<Vec<u32>> = read("out")
        .lines()
        .map(|line| line.split_whitespace().map(|id| id.parse().unwrap()).collect())
        .collect();
    assert_eq!(texts.len(), ids.len());
    assert!(texts.len() > 40);
    texts.into_iter().map(str::to_string).zip(ids).collect()
}

fn check(tokenizer: &Tokenizer, pairs: &[(String, Vec<u32>)], exact: bool) {
    for (text, expected) in pairs {
        for parse in [false, true] {
            let ids = tokenizer.encode(text, Special { add: false, parse }).unwrap();
            assert_eq!(&ids, expected, "{text:?}");
        }
        let decoded = tokenizer.decode(expected, false);
        if exact {
            assert_eq!(&decoded, text);
        }
        let mut stream = tokenizer.stream_with(false);
        let mut pieces: String = expected.iter().filter_map(|id| stream.push(*id)).collect();
        pieces.extend(stream.flush());
        assert_eq!(pieces, decoded);
    }
    println!("{} pairs", pairs.len());
}

#[test]
fn gpt2() {
    let Some(folder) = testing::data("tokenizers/gpt-2") else { return };
    let file = formats::Gguf::open(&folder.join("ggml-vocab-gpt-2.gguf")).unwrap();
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
    assert_eq!(tokenizer.warnings(), [] as [String; 0]);
    assert_eq!(tokenizer.vocab_size(), 50257);
    assert!(tokenizer.eos().contains(&50256));
    check(&tokenizer, &pairs(&folder, "gpt-2"), true);
}

#[test]
fn llama_spm() {
    let Some(folder) = testing::data("tokenizers/llama-spm") else { return };
    let file = formats::Gguf::open(&folder.join("ggml-vocab-llama-spm.gguf")).unwrap();
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
    assert!(ChatTemplate::from_gguf(file.metadata()).unwrap().is_none());
    assert_eq!(tokenizer.warnings(), [] as [String; 0]);
    check(&tokenizer, &pairs(&folder, "llama-spm"), true);
    assert_eq!(tokenizer.encode("a", Special { add: true, parse: false }).unwrap(), [1, 263]);
    let user = tokenizer.encode("</s>", Special::default()).unwrap();
    assert!(!user.contains(&2) && tokenizer.decode(&user, true) == "</s>");
    assert_eq!(tokenizer.encode("</s>", Special { add: false, parse: true }).unwrap(), [2]);
    assert_eq!(tokenizer.encode_chat("<s> a").unwrap()[0..1], [1]);
    assert_eq!(tokenizer.encode_chat("<s>a").unwrap(), tokenizer.encode_chat("a").unwrap());
}

#[test]
fn qwen2() {
    let Some(folder) = testing::data("tokenizers/qwen2") else { return };
    let tokenizer = Tokenizer::from_folder(&folder).unwrap();
    assert_eq!(tokenizer.vocab_size(), 151655);
    assert_eq!((tokenizer.eos_token(), tokenizer.pad()), (Some(151645), Some(151643)));
    assert_eq!(tokenizer.eos().iter().copied().collect::<Vec<_>>(), [151643, 151645]);
    check(&tokenizer, &pairs(&folder, "qwen2"), true);
    let text = "<|im_start|>user\nhi<|im_end|>";
    let parsed = tokenizer.encode(text, Special { add: true, parse: true }).unwrap();
    assert_eq!((parsed.first(), parsed.last()), (Some(&151644), Some(&151645)));
    assert_eq!(tokenizer.decode(&parsed, true), "user\nhi");
    assert_eq!(tokenizer.decode(&parsed, false), text);
    let plain = tokenizer.encode(text, Special::default()).unwrap();
    assert!(plain.iter().all(|id| *id < 151643));
    assert_eq!(tokenizer.decode(&plain, true), text);
}

#[test]
fn llama3() {
    let Some(folder) = testing::data("tokenizers/llama-bpe") else { return };
    let file = std::fs::read_to_string(folder.join("tokenizer.model")).unwrap();
    let tokenizer = Tokenizer::from_vocabulary(tiktoken(&file)).unwrap();
    assert_eq!(tokenizer.warnings(), [] as [String; 0]);
    check(&tokenizer, &pairs(&folder, "llama-bpe"), true);
    assert_eq!(tokenizer.encode("a", Special { add: true, parse: false }).unwrap(), [128000, 64]);
    assert_eq!(tokenizer.encode_chat("<|begin_of_text|>a").unwrap(), [128000, 64]);
}

/// A GGUF vocabulary out of a tiktoken file, whose lines are base64 bytes and a rank, as converters
/// make it: for every token all its splits into two tokens, in the order of the token's rank, then
/// the parts' ranks.
fn tiktoken(file: &str) -> GgufVocabulary {
    let mut ranks: HashMap<Vec<u8>, usize> = HashMap::new();
    for line in file.lines() {
        let (bytes, rank) = line.split_once(' ').unwrap();
        ranks.insert(base64(bytes), rank.parse().unwrap());
    }
    let mut order: Vec<(&Vec<u8>, usize)> =
        ranks.iter().map(|(bytes, rank)| (bytes, *rank)).collect();
    order.sort_by_key(|(_, rank)| *rank);
    let spell = |bytes: &[u8]| bytes.iter().map(|byte| char_of(*byte)).collect::<String>();
    let mut merges = Vec::new();
    for (bytes, _) in &order {
        let mut splits: Vec<(usize, usize, usize)> = (1..bytes.len())
            .filter_map(|at| Some((*ranks.get(&bytes[..at])?, *ranks.get(&bytes[at..])?, at)))
            .collect();
        splits.sort_unstable();
        merges.extend(
            splits
                .iter()
                .map(|(_, _, at)| format!("{} {}", spell(&bytes[..*at]), spell(&bytes[*at..]))),
        );
    }
    let mut tokens: Vec<String> = order.iter().map(|(bytes, _)| spell(bytes)).collect();
    let mut token_types = vec![kind::NORMAL; tokens.len()];
    let first = tokens.len() as u32;
    tokens.extend(["<|begin_of_text|>", "<|end_of_text|>"].map(str::to_string));
    token_types.extend([kind::CONTROL; 2]);
    GgufVocabulary {
        model: "gpt2".to_string(),
        pre: Some("llama-bpe".to_string()),
        tokens,
        token_types,
        merges,
        bos: Some(first),
        eos: Some(first + 1),
        ..GgufVocabulary::default()
    }
}

fn base64(text: &str) -> Vec<u8> {
    let digit = |c: u8| match c {
        b'A'..=b'Z' => c - b'A',
        b'a'..=b'z' => c - b'a' + 26,
        b'0'..=b'9' => c - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => panic!("{c}"),
    };
    let digits: Vec<u8> = text.bytes().filter(|c| *c != b'=').map(digit).collect();
    let mut bytes = Vec::new();
    for group in digits.chunks(4) {
        let word =
            group.iter().fold(0u32, |word, d| word << 6 | u32::from(*d)) << (6 * (4 - group.len()));
        bytes.extend(&word.to_be_bytes()[1..group.len()]);
    }
    bytes
}

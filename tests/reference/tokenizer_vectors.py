"""Small tokenizers trained by the packages that define their formats: fixtures for crates/tokens/tests/all/folders.rs.

    python tokenizer_vectors.py DATA OUT

(Packages tokenizers, transformers and sentencepiece; no torch.) Trains on DATA/corpora/tinyshakespeare.txt and the lines
below, and writes OUT/{bytes,pieces,unigram}/: tokenizer.json, tokenizer_config.json and expected.json with ids and
texts as Transformers gives them; and OUT/sentencepiece.json: the vocabularies of two SentencePiece models (BPE and
unigram) with ids as SentencePiece gives them.
"""

import io
import json
import pathlib
import random
import sys

# This file's own name must not hide the package.
sys.path = [path for path in sys.path if pathlib.Path(path or ".").resolve() != pathlib.Path(__file__).parent.resolve()]

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

OTHERS = [
    "Köln, naïve café, Ελλάδα, Привет мир, 日本語のテキスト, 한국어, हिन्दी, สวัสดี, 🎉🚀👩‍👩‍👧",
    "for (int i = 0; i < 10; ++i) { x[i] += 3.14159; }  // code\n\tif x == 'y':\n        return \"z\"\n",
    "It's we'll they've I'm you'd don't IT'S 1 12 123 1234 12345",
]
TEXTS = [
    "",
    " ",
    "  ",
    "a",
    " a",
    "Hello world",
    " Hello  world ",
    "\n",
    "\n\n\tx  \n y",
    "First Citizen:\nBefore we proceed any further, hear me speak.",
    "It's we'll THEY'VE i'm 'tis",
    "1 12 123 1234 12345 3.14 ½ ٣",
    "Köln naïve e\u0301 cafe\u0301 Å",
    "日本語のテキスト、한국어 हिन्दी สวัสดี",
    "🎉🚀👩‍👩‍👧 ok \U0001f1e9\U0001f1ea",
    "\u2581under\u2581 \u2581",
    "<s>text</s> <|end|>",
    "<|end|>",
    "a<extra>b <extra> c",
    "\x00\x7f\u200b\ufeff\ufffd\U0010ffff",
    "https://example.com/?q=1&r=%20",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "x\u00a0y\u3000z\r\nw",
]
SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]


def corpus(data):
    text = (data / "corpora/tinyshakespeare.txt").read_text()[:200_000]
    return text.split("\n\n") + OTHERS * 20


def bytes_tokenizer(lines):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(words), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_tokens([AddedToken("<extra>", normalized=False, special=False, lstrip=True)])
    ends = [("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> <s> $B </s>", ends)
    return tokenizer, {}


def pieces_tokenizer(lines):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)]
    words = [word for line in lines for word in tokenizer.normalizer.normalize_str(line).replace("\u2581", " \u2581").split(" ")]
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, show_progress=False, limit_alphabet=80, max_token_length=12
    )
    tokenizer.train_from_iterator([word for word in words if word], trainer)
    # Byte tokens were only kept in place by the trainer: they are not special.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIAL]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_tokens([AddedToken("<extra>", normalized=False, special=False)])
    return tokenizer, {"add_bos_token": True, "add_eos_token": False}


def unigram_tokenizer(lines):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=500, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", [("</s>", 2)])
    return tokenizer, {}


def write(out, name, tokenizer, config):
    folder = out / name
    folder.mkdir(parents=True, exist_ok=True)
    state = json.loads(tokenizer.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(state, ensure_ascii=False, separators=(",", ":")) + "\n")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def encode(text, special=False, split=False):
        return tokenizer(text, add_special_tokens=special, split_special_tokens=split)["input_ids"]

    def decode(ids, skip):
        return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)

    cases = []
    for text in TEXTS:
        parsed = encode(text)
        cases.append(
            {
                "text": text,
                "plain": encode(text, split=True),
                "parsed": parsed,
                "added": encode(text, special=True),
                "decoded": decode(parsed, False),
                "skipped": decode(parsed, True),
            }
        )
    random.seed(1)
    size = len(tokenizer)
    ids = [[random.randrange(size) for _ in range(30)] for _ in range(20)]
    # Byte tokens out of order are no UTF-8, which this package decodes in its own way (a run of them at a time).
    ids = [[id for id in row if not tokenizer.convert_ids_to_tokens(id).startswith("<0x")] for row in ids]
    cases.append({"random": [{"ids": row, "decoded": decode(row, True)} for row in ids]})
    (folder / "expected.json").write_text("[\n" + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases) + "\n]\n")


def sentencepiece_models(lines, out):
    result = {}
    for kind in ["bpe", "unigram"]:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=700,
            model_type=kind,
            byte_fallback=True,
            character_coverage=0.98,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            user_defined_symbols=["<extra>", "\n"],
            control_symbols=["<|end|>"],
            minloglevel=2,
        )
        processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        tokens = []
        for id in range(processor.get_piece_size()):
            text = processor.id_to_piece(id)
            type = 2 if processor.is_unknown(id) else 3 if processor.is_control(id) else 6 if processor.is_byte(id) else 1
            type = 4 if text in ["<extra>", "\n"] else 5 if processor.is_unused(id) else type
            tokens.append([text, processor.get_score(id), type])
        cases = [{"text": text, "ids": processor.encode(text)} for text in TEXTS + lines[:20] if "\0" not in text]
        for case in cases:
            case["decoded"] = processor.decode(case["ids"])
        result[kind] = {"tokens": tokens, "cases": cases}
    (out / "sentencepiece.json").write_text(json.dumps(result, ensure_ascii=False, separators=(",", ":")) + "\n")


def main():
    data, out = map(pathlib.Path, sys.argv[1:])
    lines = corpus(data)
    write(out, "bytes", *bytes_tokenizer(lines))
    write(out, "pieces", *pieces_tokenizer(lines))
    write(out, "unigram", *unigram_tokenizer(lines))
    sentencepiece_models([line.replace("\n", " ") for line in lines if len(line) < 3000], out)


if __name__ == "__main__":
    main()

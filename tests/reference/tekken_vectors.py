"""A small vocabulary in the form of Mistral's tekken.json, and ids as mistral-common gives them: a fixture for
crates/tokens/tests/all/folders.rs.

    python tekken_vectors.py DATA OUT
    python tekken_vectors.py DATA OUT --check TOKENIZE_COMMAND..      # mistral-common's own files, on DATA's texts

(Packages mistral-common and tokenizers.) Trains on DATA/corpora/tinyshakespeare.txt and lines in other scripts, and writes
OUT/{listed,unlisted}/tekken.json and OUT/expected.json. With --check the vocabularies that mistral-common comes with are laid into
folders, and `COMMAND FOLDER FILE`, which prints ids as a JSON list, is compared with mistral-common on each text of the corpora.
"""

import base64
import json
import pathlib
import subprocess
import sys
import tempfile

# This file's own name must not hide the package.
sys.path = [path for path in sys.path if pathlib.Path(path or ".").resolve() != pathlib.Path(__file__).parent.resolve()]

import mistral_common
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.append(str(pathlib.Path(__file__).parent))
from tokenizer_vectors import TEXTS, corpus

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LISTED = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[THINK]", "[/THINK]", "<pad>"]


def ranks(lines):
    """Bytes of tokens in the order of their merges, the single bytes first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte = {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda token: token[1])
    words = [bytes(byte[c] for c in text) for text, _ in by_id]
    return [bytes([b]) for b in range(256)] + [word for word in words if len(word) > 1]


def write(path, words, ordinary, special, listed):
    config = {"pattern": PATTERN, "num_vocab_tokens": len(words), "default_vocab_size": ordinary + special,
              "default_num_special_tokens": special, "version": "v13" if listed else "v3"}
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None} for rank, word in enumerate(words)]
    file = {"config": config, "vocab": vocab}
    if listed:
        file["special_tokens"] = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate(LISTED)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(file, separators=(",", ":")) + "\n")


def check(data, command):
    for name in ("tekken_240718.json", "tekken_240911.json"):
        own = Tekkenizer.from_file(pathlib.Path(mistral_common.__file__).parent / "data" / name)
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "tekken.json").symlink_to(own.file_path)
            for text in (data / "corpora/tinyshakespeare.txt", data / "corpora/wiki.test.raw"):
                found = json.loads(subprocess.run([*command, folder, str(text)], capture_output=True, check=True).stdout)
                expected = own.encode(text.read_text(), bos=False, eos=False)
                print(f"{name} {text.name}: {len(expected)} tokens, {'equal' if found == expected else 'DIFFERENT'}")


def main():
    data, out = (pathlib.Path(argument) for argument in sys.argv[1:3])
    if "--check" in sys.argv:
        return check(data, sys.argv[sys.argv.index("--check") + 1:])
    words = ranks(corpus(data))
    # Fewer than there are, as the published files have it.
    write(out / "listed/tekken.json", words, 600, 24, True)
    write(out / "unlisted/tekken.json", words, len(words), 20, False)
    cases = {}
    for name in ("listed", "unlisted"):
        own = Tekkenizer.from_file(out / name / "tekken.json")
        cases[name] = [{"text": text, "ids": own.encode(text, bos=False, eos=False)} for text in TEXTS]
    lines = {name: ",\n".join(json.dumps(case, ensure_ascii=False) for case in all) for name, all in cases.items()}
    text = ",\n".join(f'"{name}": [\n{all}\n]' for name, all in lines.items())
    (out / "expected.json").write_text("{\n" + text + "\n}\n")


if __name__ == "__main__":
    main()

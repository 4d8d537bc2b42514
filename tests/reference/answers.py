"""answers/: conversations through chat templates, and which of their tokens TRL counts as the assistant's.

TRL ships published templates twice: as they are, and with `{% generation %}` marks around what an assistant is trained on,
from which Transformers makes `assistant_masks`. A case has the template without marks, which the reader of `crates/train` is
given, and the tokens and mask that come of the one with marks. Left out are cases in which both render different text, and those
whose first mark begins within what the template itself writes to open an answer, which a model is never asked to write.

    pip install trl transformers tokenizers jinja2
    python answers.py
"""

import json
from pathlib import Path

import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent / "answers"
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
NAMES = ["cohere", "deepseekv3", "gemma", "gemma3", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5", "qwen3_instruct_2507"]
SPECIAL = """<unk> <s> </s> <|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <start_of_turn>
<end_of_turn> <|user|> <|assistant|> <|system|> <|end|> <|endoftext|> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|>
<|SYSTEM_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|> <｜User｜> <｜Assistant｜>""".split()
CONVERSATIONS = {
    "one": [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
    ],
    "two": [
        {"role": "user", "content": "Tell me a story about a fox\nand an owl."},
        {"role": "assistant", "content": "Once upon a time, a fox met an owl.\n\nThe end."},
        {"role": "user", "content": "Paris."},
        {"role": "assistant", "content": "Paris is the capital of France."},
    ],
    "system": [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "And what do you call a young fox?"},
        {"role": "assistant", "content": "\nA kit, \u00e0 vrai dire \U0001f98a"},
    ],
}
# These refuse or leave out a system message.
NO_SYSTEM = {"gemma", "phi3_5"}


def tokenizer():
    made = Tokenizer(models.BPE(byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    texts = [message["content"] for messages in CONVERSATIONS.values() for message in messages] * 4
    texts += ["user\n", "assistant\n", "model\n", "system\n", "\n\n", "\n"] * 8
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def main():
    HERE.mkdir(exist_ok=True)
    own = tokenizer()
    own.backend_tokenizer.save(str(HERE / "tokenizer.json"), pretty=False)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (HERE / "tokenizer_config.json").write_text(json.dumps(config) + "\n")
    cases = []
    for name in NAMES:
        plain, marked = ((TEMPLATES / f"{name}{end}.jinja").read_text() for end in ("", "_training"))
        for case, messages in CONVERSATIONS.items():
            if case == "system" and name in NO_SYSTEM:
                continue
            texts = [own.apply_chat_template(messages, chat_template=t, tokenize=False) for t in (plain, marked)]
            if texts[0] != texts[1]:
                print(f"{name}, {case}: left out, the marked template writes another text")
                continue
            made = own.apply_chat_template(
                messages, chat_template=marked, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
            )
            opening = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
            opened = own.apply_chat_template(messages[:opening], chat_template=plain, add_generation_prompt=True)["input_ids"]
            if made["assistant_masks"].index(1) < len(opened):
                print(f"{name}, {case}: left out, its mark begins within the opening of an answer")
                continue
            cases.append(
                {
                    "name": f"{name}, {case}",
                    "template": plain,
                    "messages": messages,
                    "ids": made["input_ids"],
                    "mask": made["assistant_masks"],
                }
            )
    by = {"trl": trl.__version__, "transformers": transformers.__version__}
    (HERE / "cases.json").write_text(json.dumps({"made_by": by, "cases": cases}, ensure_ascii=False, indent=1) + "\n")
    print(len(cases), "cases")


main()

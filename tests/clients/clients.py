"""The official Python clients of OpenAI, Anthropic and Ollama against a running server.

    xtask/clients.sh            starts a server with the bundled model and runs this
    python clients.py ADDRESS   against a server that runs, such as http://127.0.0.1:11435
"""

import sys

import anthropic
import ollama
import openai

ADDRESS = sys.argv[1]
QUESTION = "Tell me a story about a lamp that cannot sleep"
MESSAGES = [{"role": "user", "content": QUESTION}]

open_ai = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key="none", max_retries=0)
claude = anthropic.Anthropic(base_url=ADDRESS, api_key="none", max_retries=0)
llama = ollama.Client(host=ADDRESS)
MODEL = open_ai.models.list().data[0].id


def refused(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"expected {kind.__name__}")


def openai_chat():
    options = dict(model=MODEL, messages=MESSAGES, max_tokens=24, temperature=0)
    whole = open_ai.chat.completions.create(**options)
    text = whole.choices[0].message.content
    assert text and whole.usage.completion_tokens == 24, whole
    assert whole.choices[0].finish_reason == "length"
    chunks = list(open_ai.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == text, (streamed, text)
    assert chunks[-1].usage.completion_tokens == 24
    told = open_ai.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    tokens = told.choices[0].logprobs.content
    assert len(tokens) == 24 and all(len(token.top_logprobs) == 2 for token in tokens)
    several = open_ai.chat.completions.create(**{**options, "temperature": 1.5}, n=2, seed=3)
    assert several.choices[0].message.content != several.choices[1].message.content
    return text


def openai_errors():
    error = refused(openai.NotFoundError, lambda: open_ai.chat.completions.create(model="absent", messages=MESSAGES))
    assert MODEL in str(error), error
    long = [{"role": "user", "content": "word " * 5000}]
    error = refused(openai.BadRequestError, lambda: open_ai.chat.completions.create(model=MODEL, messages=long))
    assert error.code == "context_length_exceeded", error
    error = refused(openai.BadRequestError, lambda: open_ai.chat.completions.create(model=MODEL, messages=MESSAGES, store=True))
    assert error.param == "store", error


def openai_completions():
    options = dict(model=MODEL, prompt="Once upon a time", max_tokens=16, temperature=0)
    whole = open_ai.completions.create(**options, logprobs=2)
    assert len(whole.choices[0].logprobs.tokens) == 16
    streamed = "".join(chunk.choices[0].text for chunk in open_ai.completions.create(**options, stream=True))
    assert streamed == whole.choices[0].text
    assert open_ai.models.retrieve(MODEL).id == MODEL
    return whole.choices[0].text


def anthropic_messages(text):
    options = dict(model=MODEL, messages=MESSAGES, max_tokens=24)
    whole = claude.messages.create(**options, extra_body={"temperature": 0})
    assert whole.content[0].text == text, whole
    assert whole.stop_reason == "max_tokens" and whole.usage.output_tokens == 24
    with claude.messages.stream(**options, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == text
        assert stream.get_final_message().usage.output_tokens == 24
    assert claude.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 0
    refused(anthropic.NotFoundError, lambda: claude.messages.create(**{**options, "model": "absent"}))


def ollama_chat(text, story):
    options = {"num_predict": 24, "temperature": 0}
    whole = llama.chat(model=MODEL, messages=MESSAGES, options=options)
    assert whole.message.content == text and whole.done_reason == "length" and whole.eval_count == 24, whole
    parts = list(llama.chat(model=MODEL, messages=MESSAGES, options=options, stream=True))
    assert "".join(part.message.content for part in parts) == text and parts[-1].done
    options = {"num_predict": 16, "temperature": 0}
    raw = llama.generate(model=MODEL, prompt="Once upon a time", raw=True, options=options)
    assert raw.response == story, (raw.response, story)
    assert llama.list().models[0].model == MODEL
    assert llama.ps().models[0].model == MODEL
    assert llama.show(MODEL).modelinfo["general.architecture"]
    assert refused(ollama.ResponseError, lambda: llama.chat(model="absent", messages=MESSAGES)).status_code == 404


text = openai_chat()
openai_errors()
story = openai_completions()
anthropic_messages(text)
ollama_chat(text, story)
print(f"openai {openai.__version__}, anthropic {anthropic.__version__}, ollama: all as they expect")

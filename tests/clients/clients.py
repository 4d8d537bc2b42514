"""The official Python clients of OpenAI, Anthropic and Ollama against a running server.

    xtask/clients.sh            starts a server with the bundled model and runs this
    python clients.py ADDRESS   against a server that runs, such as http://127.0.0.1:11435
"""

import asyncio
import json
import sys
import time
import urllib.request

import anthropic
import jsonschema
import ollama
import openai
import pydantic

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
    error = refused(openai.BadRequestError, lambda: open_ai.chat.completions.create(model=MODEL, messages=MESSAGES, functions=[{"name": "f"}]))
    assert error.param == "functions", error


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
    listed = [model.id for model in claude.models.list()]
    own = claude.models.retrieve(MODEL)
    assert MODEL in listed and (own.id, own.type, own.lifecycle) == (MODEL, "model", "active"), (listed, own)
    assert own.created_at.year >= 2024, own
    refused(anthropic.NotFoundError, lambda: claude.models.retrieve("absent"))


def ollama_chat(text, story):
    options = {"num_predict": 24, "temperature": 0}
    whole = llama.chat(model=MODEL, messages=MESSAGES, options=options)
    assert whole.message.content == text and whole.done_reason == "length" and whole.eval_count == 24, whole
    parts = list(llama.chat(model=MODEL, messages=MESSAGES, options=options, stream=True))
    assert "".join(part.message.content for part in parts) == text and parts[-1].done
    options = {"num_predict": 16, "temperature": 0}
    raw = llama.generate(model=MODEL, prompt="Once upon a time", raw=True, options=options)
    assert raw.response == story, (raw.response, story)
    assert llama.list().models[0].model == f"{MODEL}:latest"
    assert llama.ps().models[0].model == f"{MODEL}:latest"
    assert llama.show(MODEL).modelinfo["general.architecture"]
    assert refused(ollama.ResponseError, lambda: llama.chat(model="absent", messages=MESSAGES)).status_code == 404


SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["colour", "count"],
    "additionalProperties": False,
}


class Painting(pydantic.BaseModel):
    colour: str = pydantic.Field(json_schema_extra={"enum": ["red", "green"]})
    count: int = pydantic.Field(ge=1, le=9)


def openai_structured():
    parsed = open_ai.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Painting, max_tokens=200)
    assert isinstance(parsed.choices[0].message.parsed, Painting), parsed
    # The next turn, with what the client read.
    turn = [*MESSAGES, parsed.choices[0].message, {"role": "user", "content": "Another"}]
    assert open_ai.chat.completions.create(model=MODEL, messages=turn, max_tokens=4).usage.completion_tokens > 0
    free = open_ai.chat.completions.create(model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=8)
    assert free.choices[0].message.content.startswith("{"), free
    format = {"type": "json_schema", "json_schema": {"name": "painting", "schema": SCHEMA}}
    streamed = open_ai.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=format, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
    jsonschema.validate(json.loads(text), SCHEMA)


def openai_tools():
    tool = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA}}
    options = dict(model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required", max_tokens=400)
    whole = open_ai.chat.completions.create(**options, parallel_tool_calls=False)
    call = whole.choices[0].message.tool_calls[0]
    assert whole.choices[0].finish_reason == "tool_calls" and call.function.name == "paint", whole
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    with open_ai.chat.completions.stream(**options, parallel_tool_calls=False) as stream:
        last = stream.get_final_completion()
    jsonschema.validate(json.loads(last.choices[0].message.tool_calls[0].function.arguments), SCHEMA)
    # The next turn, with the call and its result.
    turn = [*MESSAGES, whole.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "painted"}]
    after = open_ai.chat.completions.create(model=MODEL, messages=turn, tools=[tool], max_tokens=4)
    assert after.usage.completion_tokens > 0


def openai_responses():
    options = dict(model=MODEL, input=QUESTION, max_output_tokens=24, temperature=0, instructions="Be kind.")
    whole = open_ai.responses.create(**options)
    assert whole.output_text and whole.status == "incomplete" and whole.usage.output_tokens == 24, whole
    events = list(open_ai.responses.create(**options, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == whole.output_text
    with open_ai.responses.stream(model=MODEL, input=QUESTION, text_format=Painting, max_output_tokens=200) as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert isinstance(last.output_parsed, Painting) and events[0].type == "response.created", last
    parsed = open_ai.responses.parse(model=MODEL, input=QUESTION, text_format=Painting, max_output_tokens=200)
    assert isinstance(parsed.output_parsed, Painting), parsed
    turn = [{"role": "user", "content": QUESTION}, *parsed.output, {"role": "user", "content": "Another"}]
    assert open_ai.responses.create(model=MODEL, input=turn, max_output_tokens=4).usage.output_tokens > 0
    tool = {"type": "function", "name": "paint", "description": "Paints.", "parameters": SCHEMA, "strict": True}
    asked = open_ai.responses.create(model=MODEL, input=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    call = next(item for item in asked.output if item.type == "function_call")
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    turn = [{"role": "user", "content": QUESTION}, *asked.output, {"type": "function_call_output", "call_id": call.call_id, "output": "painted"}]
    after = open_ai.responses.create(model=MODEL, input=turn, tools=[tool], max_output_tokens=4)
    assert after.usage.output_tokens > 0


def openai_conversations():
    """Responses that are kept: gone on with, retrieved, listed and deleted."""
    options = dict(model=MODEL, max_output_tokens=12, temperature=0)
    first = open_ai.responses.create(**options, input=QUESTION)
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "Go on"}]
    whole = open_ai.responses.create(**options, input=turns, store=False)
    second = open_ai.responses.create(**options, input="Go on", previous_response_id=first.id)
    assert second.output_text == whole.output_text and second.usage.input_tokens == whole.usage.input_tokens, (second, whole)
    streamed = list(open_ai.responses.create(**options, input="Go on", previous_response_id=first.id, stream=True))[-1].response
    assert streamed.output_text == whole.output_text and open_ai.responses.retrieve(streamed.id) == streamed, streamed
    assert open_ai.responses.retrieve(first.id).output_text == first.output_text
    items = list(open_ai.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.content[0].text for item in items] == [QUESTION, first.output_text, "Go on"], items
    assert open_ai.responses.input_tokens.count(model=MODEL, input="Go on", previous_response_id=first.id).input_tokens == whole.usage.input_tokens
    open_ai.responses.delete(first.id)
    refused(openai.NotFoundError, lambda: open_ai.responses.retrieve(first.id))
    refused(openai.NotFoundError, lambda: open_ai.responses.retrieve(whole.id))
    error = refused(openai.BadRequestError, lambda: open_ai.responses.create(**options, input="Go on", previous_response_id=second.id))
    assert error.code == "previous_response_not_found", error


def openai_agent():
    """Tools and a form for the answer in one request."""
    for seed in range(4):
        parsed = open_ai.chat.completions.parse(
            model=MODEL, messages=MESSAGES, tools=[openai.pydantic_function_tool(Painting, name="paint")], response_format=Painting,
            max_tokens=300, temperature=1, seed=seed, parallel_tool_calls=False).choices[0].message
        assert isinstance(parsed.parsed, Painting) or isinstance(parsed.tool_calls[0].function.parsed_arguments, Painting), parsed
        results = [{"role": "tool", "tool_call_id": call.id, "content": "painted"} for call in parsed.tool_calls or []]
        turn = [*MESSAGES, parsed, *results]
        assert open_ai.chat.completions.create(model=MODEL, messages=turn, max_tokens=4).usage.completion_tokens > 0


@anthropic.beta_tool
def paint(colour: str) -> str:
    """Paints."""
    return f"painted {colour}"


def anthropic_tools():
    tool = {"name": "paint", "description": "Paints.", "input_schema": SCHEMA}
    options = dict(model=MODEL, messages=MESSAGES, tools=[tool], tool_choice={"type": "any", "disable_parallel_tool_use": True}, max_tokens=400)
    whole = claude.messages.create(**options)
    block = next(block for block in whole.content if block.type == "tool_use")
    assert whole.stop_reason == "tool_use" and block.name == "paint", whole
    jsonschema.validate(block.input, SCHEMA)
    with claude.messages.stream(**options) as stream:
        last = stream.get_final_message()
    jsonschema.validate(next(block for block in last.content if block.type == "tool_use").input, SCHEMA)
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "painted"}
    turn = [*MESSAGES, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert claude.messages.create(model=MODEL, messages=turn, tools=[tool], max_tokens=4).usage.output_tokens > 0
    # It asks for a conversation that the server keeps, and goes on without one.
    runner = claude.beta.messages.tool_runner(model=MODEL, messages=MESSAGES, tools=[paint], max_tokens=8)
    assert runner.until_done().usage.output_tokens > 0


def ollama_structured():
    answer = llama.chat(model=MODEL, messages=MESSAGES, format=SCHEMA, options={"num_predict": 200})
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    tool = {"type": "function", "function": {"name": "paint", "description": "Paints.", "parameters": SCHEMA}}
    assert llama.chat(model=MODEL, messages=MESSAGES, tools=[tool], options={"num_predict": 8}).eval_count > 0


def generated():
    """Tokens that the server has written, by its own count."""
    metrics = urllib.request.urlopen(f"{ADDRESS}/metrics").read().decode()
    return sum(int(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith("delft_generated_tokens_total{"))


async def together():
    """Several requests at a time, and one whose client goes away."""
    client = openai.AsyncOpenAI(base_url=f"{ADDRESS}/v1", api_key="none", max_retries=0)
    ask = lambda seed: client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=24, seed=seed, temperature=1)
    alone = (await ask(5)).choices[0].message.content
    answers = await asyncio.gather(*(ask(seed) for seed in range(8)))
    assert answers[5].choices[0].message.content == alone, "the same whatever runs beside it"
    before = generated()
    stream = await client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    time.sleep(1)
    stopped = generated() - before
    assert 0 < stopped < 900, stopped
    ended = generated()
    time.sleep(0.5)
    assert generated() == ended, "nothing goes on behind it"


def embeddings():
    """Of token ids: the model has no tokenizer. Base64, which the client asks for by itself, and numbers say the same."""
    options = dict(model="embeds", input=[[3, 4, 5], [6]])
    packed = open_ai.embeddings.create(**options)
    plain = open_ai.embeddings.create(**options, encoding_format="float")
    assert [len(item.embedding) for item in packed.data] == [48, 48] and packed.usage.prompt_tokens == 4, packed
    for a, b in zip(packed.data, plain.data):
        assert max(abs(x - y) for x, y in zip(a.embedding, b.embedding)) < 1e-7
        assert abs(sum(x * x for x in a.embedding) - 1) < 1e-5
    cut = open_ai.embeddings.create(**options, dimensions=8).data[0].embedding
    assert len(cut) == 8 and abs(sum(x * x for x in cut) - 1) < 1e-5
    # A model that generates makes them over the same weights.
    made = open_ai.embeddings.create(model=MODEL, input="x").data[0].embedding
    assert abs(sum(x * x for x in made) - 1) < 1e-5, made
    error = refused(ollama.ResponseError, lambda: llama.embed(model="embeds", input="x"))
    assert "token ids" in str(error), error
    assert llama.show("embeds").capabilities == ["embedding"]


text = openai_chat()
openai_errors()
openai_structured()
openai_tools()
openai_responses()
openai_conversations()
openai_agent()
anthropic_tools()
ollama_structured()
embeddings()
asyncio.run(together())
story = openai_completions()
anthropic_messages(text)
ollama_chat(text, story)
print(f"openai {openai.__version__}, anthropic {anthropic.__version__}, ollama: all as they expect")

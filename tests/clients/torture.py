"""A thousand connections at a time to a running server, most of them up to no good: malformed, slow, huge, abandoned, or with
schemas made to hurt. Afterwards it must answer as before, and have no more memory than after the first round.

    python torture.py PID ADDRESS [ROUNDS]   (default: 5 rounds)
"""

import asyncio
import json
import logging
import random
import resource
import sys
import time
from urllib.parse import urlparse

PID, ADDRESS = int(sys.argv[1]), urlparse(sys.argv[2])
ROUNDS = int(sys.argv[3]) if len(sys.argv) > 3 else 5
CONNECTIONS = 1000
HOST, PORT = ADDRESS.hostname, ADDRESS.port

# Connections that the server closes first are what it is here for.
logging.getLogger("asyncio").setLevel(logging.ERROR)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))


def resident():
    """MiB that the server holds."""
    with open(f"/proc/{PID}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


def chat(**extra):
    return {"messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 8, **extra}


def schema(schema):
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def head(body, path="/v1/chat/completions", length=None):
    size = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n".encode()


async def ask(body, path="/v1/chat/completions"):
    """The status and body of a whole answer."""
    reader, writer = await asyncio.open_connection(HOST, PORT)
    try:
        data = json.dumps(body).encode()
        writer.write(head(data, path) + data)
        await writer.drain()
        answer = await reader.read()
    finally:
        writer.close()
    top, _, rest = answer.partition(b"\r\n\r\n")
    return int(top.split()[1]), rest


async def good():
    status, body = await ask(chat(seed=1, temperature=0))
    # A full queue may say so.
    assert status in (200, 503), (status, body)
    return status == 200


async def garbage():
    reader, writer = await asyncio.open_connection(HOST, PORT)
    writer.write(random.choice([
        b"\x00\x01\x02" * 100, b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/messages HTTP/1.1\r\n\r\n", b"A" * 100_000,
        head(b"{"*50_000) + b"{" * 50_000, head(b"[" * 200_000) + b"[" * 200_000,
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: x\r\n\r\nFFFFFFFFFFFFFFFF\r\n",
    ]))
    await reader.read()
    writer.close()


async def slow():
    reader, writer = await asyncio.open_connection(HOST, PORT)
    for byte in b"POST /v1/chat/completions HTTP/1.1\r\n":
        writer.write(bytes([byte]))
        await asyncio.sleep(0.05)
    writer.close()


async def half():
    reader, writer = await asyncio.open_connection(HOST, PORT)
    writer.write(head(b"", length=9999) + b'{"messages": [')
    await asyncio.sleep(1)
    writer.close()


async def huge():
    status, _ = await ask({"messages": [{"role": "user", "content": "x" * (1 << 20)}], "max_tokens": 1})
    assert status in (400, 413, 503), status


async def gone():
    reader, writer = await asyncio.open_connection(HOST, PORT)
    body = json.dumps(chat(max_tokens=900, stream=True, ignore_eos=True)).encode()
    writer.write(head(body) + body)
    await reader.read(random.choice([1, 300, 2000]))
    writer.transport.abort()


async def unread():
    reader, writer = await asyncio.open_connection(HOST, PORT, limit=1)
    body = json.dumps(chat(max_tokens=60, stream=True, n=8)).encode()
    writer.write(head(body) + body)
    await asyncio.sleep(2)
    writer.close()


async def hostile():
    nested = {"type": "null"}
    for _ in range(60):
        nested = {"anyOf": [nested, {"type": "array", "items": nested}]} if len(json.dumps(nested)) < 20_000 else nested
    status, body = await ask(random.choice([
        schema({"type": "string", "pattern": "^(a|b|ab|ba)*c{1,4000}$"}), schema(nested),
        schema({"type": "array", "minItems": 10**9}), schema({"$ref": "#"}), chat(grammar="root ::= root root | \"a\""),
        chat(structured_outputs={"regex": "((a{500}){500}){500}"}), chat(grammar="root ::= " + "(" * 5000),
    ]))
    assert status in (200, 400, 500, 503), (status, body)


KINDS = [good] * 4 + [garbage, slow, half, huge, gone, gone, unread, hostile]


async def one(kind):
    try:
        return await asyncio.wait_for(kind(), 300)
    except (ConnectionError, asyncio.IncompleteReadError, OSError):
        return None


async def main():
    status, before = await ask(chat(seed=1, temperature=0))
    assert status == 200, before
    text = json.loads(before)["choices"][0]["message"]["content"]
    held = []
    for round in range(ROUNDS):
        begun = time.time()
        random.seed(round)
        answers = await asyncio.gather(*(one(random.choice(KINDS)) for _ in range(CONNECTIONS)))
        took = time.time() - begun
        for _ in range(50):
            status, after = await ask(chat(seed=1, temperature=0))
            if status == 200:
                break
            await asyncio.sleep(0.2)
        assert json.loads(after)["choices"][0]["message"]["content"] == text, after
        held.append(resident())
        print(f"round {round + 1}: {took:5.1f} s, {answers.count(True)} answered, {held[-1]:.0f} MiB", flush=True)
    assert held[-1] < 1.1 * held[0] + 16, held


asyncio.run(main())

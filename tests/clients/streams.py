"""Tokens per second of a running server at several numbers of streams.

    python streams.py ADDRESS [STREAMS..]   (default: 1 4 16)
"""

import asyncio
import sys
import time

import openai

ADDRESS = sys.argv[1]
STREAMS = [int(count) for count in sys.argv[2:]] or [1, 4, 16]
TOKENS = 128

client = openai.AsyncOpenAI(base_url=f"{ADDRESS}/v1", api_key="none", max_retries=0)


async def one(seed):
    """Seconds to the first token, and to the last."""
    begun = time.perf_counter()
    stream = await client.chat.completions.create(
        model="any", messages=[{"role": "user", "content": f"Tell me story number {seed}"}], seed=seed,
        max_tokens=TOKENS, temperature=1, stream=True, extra_body={"ignore_eos": True})
    first = None
    async for chunk in stream:
        if first is None and chunk.choices and chunk.choices[0].delta.content:
            first = time.perf_counter() - begun
    return first, time.perf_counter() - begun


async def main():
    client_models = (await client.models.list()).data
    name = client_models[0].id
    create = client.chat.completions.create
    client.chat.completions.create = lambda **options: create(**{**options, "model": name})
    await one(0)
    for count in STREAMS:
        begun = time.perf_counter()
        times = await asyncio.gather(*(one(seed) for seed in range(count)))
        took = time.perf_counter() - begun
        firsts = sorted(first for first, _ in times)
        print(f"{count:3} streams: {count * TOKENS / took:8.1f} tok/s in all, first token after {firsts[len(firsts) // 2]:.3f} s (median)")


asyncio.run(main())

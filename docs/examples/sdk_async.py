"""Several streams at once, in one event loop."""

import asyncio

from triforce_core.client import AsyncTriForceClient


async def first_words(client: AsyncTriForceClient, prompt: str) -> str:
    text = ""
    async with client.stream(prompt, max_tokens=64, seed=1) as stream:  # leaving the block ends the generation
        async for chunk in stream:
            text += chunk.text
            if len(text) > 20:
                break
    return text


async def main() -> None:
    async with AsyncTriForceClient("127.0.0.1:9000") as client:
        prompts = ["def fibonacci(n):", "class Queue:", "import os\n"]
        for text in await asyncio.gather(*(first_words(client, prompt) for prompt in prompts)):
            print(repr(text))


asyncio.run(main())

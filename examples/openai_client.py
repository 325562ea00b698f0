"""The openai package as the client of `make serve`. Needs `pip install openai`."""

from __future__ import annotations

from openai import OpenAI


def main() -> None:
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="unused unless the server has --api-key")
    model = client.models.list().data[0].id

    answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": "What is 2+2?"}], max_tokens=32, temperature=0)
    print(answer.choices[0].message.content)

    for chunk in client.chat.completions.create(model=model, messages=[{"role": "user", "content": "Count to five."}], max_tokens=48, stream=True):
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()

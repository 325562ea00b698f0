#!/usr/bin/env bash
# One answer and one stream from `make serve`, with curl alone. SERVER and POCKETLLM_API_KEY may be set.
set -euo pipefail

server=${SERVER:-http://127.0.0.1:8000}
headers=(-H "Content-Type: application/json")
[ -z "${POCKETLLM_API_KEY:-}" ] || headers+=(-H "Authorization: Bearer $POCKETLLM_API_KEY")

curl -sS --fail-with-body "$server/v1/chat/completions" "${headers[@]}" \
  -d '{"messages": [{"role": "user", "content": "What is 2+2?"}], "max_tokens": 32, "temperature": 0}'
echo

curl -sS --fail-with-body --no-buffer "$server/v1/chat/completions" "${headers[@]}" \
  -d '{"messages": [{"role": "user", "content": "Count to five."}], "max_tokens": 48, "stream": true}'

"""OpenAI-compatible servers as engines: vLLM, SGLang, llama.cpp's server, Ollama, another cluster.

Reading order: `address` (where one is, and what it is told), `connections` and `response` (HTTP),
`events` and `answers` (what comes, as deltas), `refusals` (its errors as ours), `watch` (health,
load and models), `engine` (all of it as one engine). Requests and answers pass through unread: see
`protocol/openai/passing.py`.
"""

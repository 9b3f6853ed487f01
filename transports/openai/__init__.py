"""OpenAI-compatible servers as engines: vLLM, SGLang, llama.cpp's server, Ollama, another cluster.

Reading order: `address` (where one is, and what it is told), `client` (HTTP),
`events` and `answers` (what comes, as deltas), `refusals` (its errors as ours), `exchange`
(one request, what ends it, and reading without a task for each), `watch` (health, load and models), `upstream` (all of it), `engine`
(as the engine of a worker). Requests and answers pass through unread: see
`protocol/openai/passing.py`.
"""

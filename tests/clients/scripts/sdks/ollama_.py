"""Ollama's client, whose API is not promised: what is tried is the error that it gets."""

import ollama
from checks import MODEL, SERVER, SHORT, must_raise, tried

with tried("chat, of an API that is not promised: 404 that names the path"):
    error = must_raise(ollama.ResponseError, ollama.Client(SERVER).chat, MODEL, SHORT)
    assert error.status_code == 404, error
    assert "/api/chat" in str(error), error

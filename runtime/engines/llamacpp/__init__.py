"""A real language model on the CPU: llama.cpp through cyllama."""

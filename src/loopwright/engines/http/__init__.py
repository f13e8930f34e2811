"""Engines behind HTTP: vLLM, SGLang and llama.cpp servers."""

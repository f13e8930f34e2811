"""A trained policy as a deliverable: complete for transformers, vLLM and llama.cpp."""

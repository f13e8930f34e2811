"""The engine in this process: transformers models, batched."""

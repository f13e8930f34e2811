"""Engines: token ids in, a stream of token ids with logprobs out."""

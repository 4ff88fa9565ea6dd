"""Flax NNX decoder models, checkpoint readers and tokenizers; they know nothing of the cache."""

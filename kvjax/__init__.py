"""kvjax: long-context inference in JAX whose KV cache does not have to fit."""

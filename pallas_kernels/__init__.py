"""Attention kernels over paged KV caches: one folder an operation, one file a backend."""

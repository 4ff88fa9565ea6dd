"""kvjax: long-context inference in JAX whose KV cache does not have to fit.

    import kvjax

    model = kvjax.load("smollm2-135m")
    answer = kvjax.generate(model, "The capital of France is", max_new_tokens=8)
    print(answer.texts[0])

`kvjax.PrefixCache` keeps long prompts' pages on disk, and reads back what a question needs.

Beneath these entry points: `kvjax.cache` (page pools and block tables as values),
`kvjax.pallas_kernels` (paged attention), `kvjax.models` (decoders and checkpoint readers) and
`kvjax.spec` (what a token costs).
"""

from kvjax import cache, errors, models, pallas_kernels, spec
from kvjax.config import CacheConfig
from kvjax.decode import (
    Generation,
    PrefixCache,
    PrefixConfig,
    PrefixStats,
    RowsFailedError,
    Sampling,
    Score,
    Stats,
    StreamEvent,
    generate,
    score,
    stream,
)
from kvjax.errors import KvjaxError, ModelNotFoundError, PoolExhaustedError, PullError
from kvjax.load import load
from kvjax.model import Model
from kvjax.policies import Place, Select, Window
from kvjax.programs import keep_programs
from kvjax.pull import license_terms, pull
from kvjax.spec import KVSpec, LayerSpec

__version__ = "0.1.0"

__all__ = [
    "CacheConfig",
    "Generation",
    "KVSpec",
    "KvjaxError",
    "LayerSpec",
    "Model",
    "ModelNotFoundError",
    "Place",
    "PoolExhaustedError",
    "PrefixCache",
    "PrefixConfig",
    "PrefixStats",
    "PullError",
    "RowsFailedError",
    "Sampling",
    "Score",
    "Select",
    "Stats",
    "StreamEvent",
    "Window",
    "cache",
    "errors",
    "generate",
    "keep_programs",
    "license_terms",
    "load",
    "models",
    "pallas_kernels",
    "pull",
    "score",
    "spec",
    "stream",
]

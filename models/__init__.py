"""Flax NNX decoder models, checkpoint readers and tokenizers; they know nothing of the cache."""

from kvjax.models.attend import (
    ContiguousCache,
    causal_attend,
    contiguous_attend,
    contiguous_cache,
    dense_attention,
)
from kvjax.models.attention import Attend, Expand, ExpandingAttend, LatentAttend
from kvjax.models.checkpoint import (
    Checkpoint,
    Params,
    build,
    check_tokens,
    check_weights,
    parameters,
    random_checkpoint,
)
from kvjax.models.config import LayerConfig, ModelConfig, RopeScaling
from kvjax.models.decoder import Decoder
from kvjax.models.deepseek import Experts, Latent
from kvjax.models.deepseek_indexer import ChoosingAttend, Indexed
from kvjax.models.deepseek_sparse import Indexer
from kvjax.models.gguf_file import GGUFFile
from kvjax.models.gguf_names import model_config as gguf_config
from kvjax.models.gguf_reader import gguf_weights, read_gguf
from kvjax.models.gguf_tokenizer import gguf_tokenizer
from kvjax.models.orbax_dir import read_orbax, save_orbax
from kvjax.models.read import read
from kvjax.models.retention import RetainingAttend
from kvjax.models.safetensors_dir import read_safetensors
from kvjax.models.tokenizer import StreamDecoder, Tokenizer
from kvjax.models.tokenizer_dir import read_tokenizer

__all__ = [
    "Attend",
    "Checkpoint",
    "ChoosingAttend",
    "ContiguousCache",
    "Decoder",
    "Expand",
    "ExpandingAttend",
    "Experts",
    "GGUFFile",
    "Indexed",
    "Indexer",
    "Latent",
    "LatentAttend",
    "LayerConfig",
    "ModelConfig",
    "Params",
    "RetainingAttend",
    "RopeScaling",
    "StreamDecoder",
    "Tokenizer",
    "build",
    "causal_attend",
    "check_tokens",
    "check_weights",
    "contiguous_attend",
    "contiguous_cache",
    "dense_attention",
    "gguf_config",
    "gguf_tokenizer",
    "gguf_weights",
    "parameters",
    "random_checkpoint",
    "read",
    "read_gguf",
    "read_orbax",
    "read_safetensors",
    "read_tokenizer",
    "save_orbax",
]

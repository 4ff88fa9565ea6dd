"""What generate, stream and score cannot use: named, refused before anything is compiled."""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.config import CacheConfig
from kvjax.decode import Sampling, generate, inputs, score, stream
from kvjax.decode.program import compilations
from kvjax.errors import KvjaxError, PoolExhaustedError
from tests.kvjax.decode.tiny import model


@pytest.fixture(scope="module")
def tiny():
    return model()


def refused(call, message, error=KvjaxError):
    """The call raises this at once, names what is wrong, and compiles nothing."""
    before = compilations()
    with pytest.raises(error, match=message) as caught:
        call()
    assert compilations() == before
    return caught.value


ENTRIES = {
    "generate": lambda m, p, **o: generate(m, p, **o),
    "stream": lambda m, p, **o: stream(m, p, **o),
    "score": lambda m, p, **o: score(m, p, **o),
}
every_entry = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
GIVE = {"max_new_tokens": 4}


@every_entry
@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "is empty"),
        ("some text", "is text, but llama came without a tokenizer: pass token ids"),
        ([3, 64], r"token id 64 at index 1 is outside the vocabulary: ids are 0\.\.63"),
        ([3, -1], "token id -1 at index 1"),
        ([3, 2**40], f"token id {2**40} at index 1"),
        ([3.0, 1.0], r"is \[3.0, 1.0\]: token ids must be integers"),
        ([True, False], r"is \[True, False\]: token ids must be integers"),
        ([3, None], r"is \[3, None\]: token ids must be integers"),
        (None, "is None: must be a list of token ids"),
        (b"ids", "is b'ids': must be a list of token ids"),
        (7, "prompt is 7|text is 7"),
        ([1] * 2000, "2000 tokens.*context is 1024"),
    ],
    ids=str,
)
def test_prompts(tiny, entry, prompt, message):
    refused(lambda: entry(tiny, prompt), message)


@every_entry
@pytest.mark.parametrize(
    ("chunk", "shown"), [(0, "0"), (17, "17"), (-16, "-16"), (True, "True"), (32.0, "32.0")]
)
def test_prefill_chunk(tiny, entry, chunk, shown):
    message = f"prefill_chunk is {shown}: must be a multiple of 16 tokens"
    refused(lambda: entry(tiny, [1, 2], prefill_chunk=chunk), message)


@every_entry
def test_a_pool_that_is_too_small(tiny, entry):
    options = {"cache": CacheConfig(num_pages=2)}
    if entry is not ENTRIES["score"]:
        options["max_new_tokens"] = 9
    error = refused(
        lambda: entry(tiny, [1] * 40, **options), "num_pages is 2.*need 3 pages", PoolExhaustedError
    )
    assert (error.needed, error.free) == (3, 2)


@every_entry
def test_a_pool_that_is_too_large(tiny, entry):
    refused(
        lambda: entry(tiny, [1, 2], cache=CacheConfig(num_pages=10**8)),
        "num_pages is 100000000.*more than int32 can index; use at most 8388607 pages",
    )


@every_entry
def test_an_implementation_that_cannot_run(tiny, entry):
    """Whether the platform or the head_dim is what it cannot do."""
    refused(
        lambda: entry(tiny, [1, 2], cache=CacheConfig(attention="tpu")),
        "attention='tpu' cannot run: head_dim is 8",
    )
    if jax.default_backend() == "cpu":
        refused(
            lambda: entry(tiny, [1, 2], cache=CacheConfig(attention="gpu")),
            "attention='gpu' cannot run: it needs an NVIDIA GPU",
        )


@pytest.mark.parametrize("entry", [generate, stream])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0: must be an integer of at least 1"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"max_new_tokens": 2.0}, r"max_new_tokens is 2\.0"),
        ({"max_new_tokens": 1023}, "2 tokens and max_new_tokens is 1023.*ask for at most 1022"),
        ({"stop_tokens": [64]}, "stop_tokens: token id 64"),
        ({"stop_tokens": [-1]}, "stop_tokens: token id -1"),
        ({"stop_tokens": [1.5]}, r"stop_tokens is \[1.5\]: token ids must be integers"),
        ({"stop_tokens": 5}, "stop_tokens is 5: must be a list"),
        ({"key": -1}, r"key is -1: a seed must be 0 to 2\*\*32 - 1"),
        ({"key": 2**32}, "key is 4294967296"),
        ({"key": "seed"}, "key is 'seed': must be one key"),
        ({"key": np.zeros(2, np.uint32)}, "must be one key"),
        ({"key": jnp.zeros(3, jnp.uint32)}, "must be one key"),
        ({"key": jnp.zeros(2, jnp.int32)}, "must be one key"),
    ],
    ids=str,
)
def test_options(tiny, entry, options, message):
    refused(lambda: entry(tiny, [1, 2], **options), message)


@every_entry
def test_things_of_another_kind_are_named(tiny, entry):
    refused(lambda: entry("smollm2-135m", [1, 2]), r"model is 'smollm2-135m': .*kvjax\.load\(")
    message = r"cache is {'page_size': 16}: must be a kvjax\.CacheConfig, or None"
    refused(lambda: entry(tiny, [1, 2], cache={"page_size": 16}), message)
    if entry is not ENTRIES["score"]:
        message = "sampling is {}: must be a kvjax.Sampling, or None"
        refused(lambda: entry(tiny, [1, 2], sampling={}), message)
    if entry is not ENTRIES["generate"]:
        refused(lambda: entry(tiny, ["a", "b"]), "is a list of texts: must be one prompt")
        refused(lambda: entry(tiny, [[1], [2, 3]]), r"is \[\[1\], \[2, 3\]\]: must be a list")


@every_entry
def test_jax_without_compilation_is_refused(tiny, entry):
    with jax.disable_jit(), pytest.raises(KvjaxError, match="JAX_DISABLE_JIT is set"):
        list(entry(tiny, [1, 2]))


def test_stop_tokens_may_be_a_set_or_none(tiny):
    assert inputs.stop_ids(tiny, {5, 3}, False) == [3, 5]
    assert inputs.stop_ids(tiny, None, False) == []
    refused(lambda: generate(tiny, [1, 2], stop_tokens={64}), "stop_tokens: token id 64")


def test_a_full_pool_survives_copies_and_pickles():
    error = PoolExhaustedError("full", needed=3, free=2)
    for same in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (type(same), str(same), same.needed, same.free) == (PoolExhaustedError, "full", 3, 2)


def test_a_model_is_shown_in_a_line(tiny):
    assert len(repr(tiny)) < 100
    assert repr(tiny).startswith("Model('llama': tiny, 2 layers, ")


def test_several_keys_are_not_one(tiny):
    keys = jax.random.split(jax.random.key(0), 3)
    refused(lambda: generate(tiny, [1, 2], key=keys), "must be one key")


def test_one_bad_prompt_of_several_is_named(tiny):
    refused(lambda: generate(tiny, [[1], []]), "prompt 1 is empty")
    refused(lambda: generate(tiny, [[1], [2], [99]]), "prompt 2: token id 99 at index 0")
    refused(lambda: generate(tiny, [[1], "text"]), "prompt 1 is text")
    refused(lambda: generate(tiny, [[1], 5]), "prompt 1 is 5: must be a list of token ids")
    refused(lambda: generate(tiny, [[1], [[2]]]), r"prompt 1 is \[\[2\]\]: must be a list")
    refused(lambda: generate(tiny, [[1], [2] * 1020], **GIVE, prefill_chunk=17), "prefill_chunk")
    refused(lambda: generate(tiny, [[1], [2] * 1021], **GIVE), "prompt 1 has 1021 tokens")
    cache = CacheConfig(num_pages=3)
    error = refused(
        lambda: generate(tiny, [[1], [2] * 14, [3] * 13], **GIVE, cache=cache), "need 4 pages"
    )
    assert (error.needed, error.free) == (4, 3)


@pytest.fixture(scope="module")
def named():
    """A model with a tokenizer that knows more tokens than the model."""

    class Tokenizer:
        eos_ids = frozenset()

        def encode(self, text):
            if text == "\udc80":
                raise ValueError("is not a character")
            return [1, *text.encode()]

    named = model()
    object.__setattr__(named, "tokenizer", Tokenizer())
    return named


def test_empty_text_is_refused_by_name(named):
    """Even where the tokenizer would make a token of nothing."""
    for entry in ENTRIES.values():
        refused(functools.partial(entry, named, ""), "is empty: give at least one token")
    refused(lambda: score(named, [5]), "text has 1 token: scoring needs at least 2")


@every_entry
def test_a_tokenizer_may_know_more_than_the_model(named, entry):
    """Added tokens beyond the embedding would be read as its last row."""
    refused(lambda: entry(named, "\x01a"), "token id 97 at index 2 is outside the vocabulary")
    refused(lambda: entry(named, "\udc80"), "is not a character")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature is -0\.1: must be 0 \(greedy\) or"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1e-40}, "temperature is 1e-40"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": None}, "temperature is None"),
        ({"top_k": 0}, "top_k is 0: must be an integer of at least 1, or None"),
        ({"top_k": 2.5}, r"top_k is 2\.5"),
        ({"top_k": True}, "top_k is True"),
        ({"top_p": 0}, "top_p is 0: must be above 0 and at most 1, or None"),
        ({"top_p": 1.1}, r"top_p is 1\.1"),
        ({"top_p": float("nan")}, "top_p is nan"),
        ({"min_p": 0.0}, r"min_p is 0\.0"),
        ({"min_p": "x"}, "min_p is 'x'"),
        ({"top_k": 5}, "top_k is 5 and temperature is 0, which takes the likeliest token"),
        ({"top_p": 0.9}, r"top_p is 0\.9 and temperature is 0"),
        ({"min_p": 0.1}, r"min_p is 0\.1 and temperature is 0"),
    ],
    ids=str,
)
def test_sampling(options, message):
    with pytest.raises(KvjaxError, match=message):
        Sampling(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size is 0: must be a multiple of 8 tokens, 8 to 128"),
        ({"page_size": True}, "page_size is True"),
        ({"page_size": 256}, "page_size is 256"),
        ({"page_size": 12}, "page_size is 12"),
        ({"page_size": 16.0}, r"page_size is 16\.0"),
        ({"num_pages": 0}, "num_pages is 0: must be an integer of at least 1, or None"),
        ({"num_pages": True}, "num_pages is True"),
        ({"dtype": "int8"}, "dtype is 'int8': must be one of float32, bfloat16, float16"),
        ({"attention": "flash"}, "attention is 'flash': must be one of reference, xla, tpu, gpu"),
    ],
    ids=str,
)
def test_cache_config(options, message):
    with pytest.raises(KvjaxError, match=message):
        CacheConfig(**options)


def test_numbers_of_any_integer_type_and_short_dtypes():
    config = CacheConfig(page_size=np.int64(32), num_pages=np.int32(4), dtype="bf16")
    assert config == CacheConfig(page_size=32, num_pages=4, dtype="bfloat16")
    assert type(config.page_size) is type(config.num_pages) is int
    assert Sampling(temperature=np.float32(1), top_k=np.int64(5)).top_k == 5

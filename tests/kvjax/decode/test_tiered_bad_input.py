"""What tiers cannot use: each error names the argument, what it was and what is allowed."""

import functools
import math

import numpy as np
import pytest

from kvjax.config import CacheConfig
from kvjax.decode import generate, score, stream
from kvjax.decode.program import compilations
from kvjax.errors import KvjaxError
from kvjax.policies import MeanKeys, PerPage, Place, Select, Window
from kvjax.policies.tiering import NAMES
from tests.kvjax.decode.tiny import model, prompt

BY = f"must be one of {', '.join(NAMES)}, a PageIndex or a DistilledIndexer"
AMOUNT = "must be an amount and a unit, such as '5%', '64 pages', '1024 tokens' or '8MB'"
TIMES = r"must be 0 \(keep nothing\) or a number of at least 1"
SECONDS = "must be a number of seconds above 0"


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Select, {"budget": "0%"}, "budget is '0%': must be above 0 and at most 100%"),
        (Select, {"budget": "0 pages"}, "budget is '0 pages': must be above 0"),
        (Select, {"budget": "101%"}, "budget is '101%': must be above 0 and at most 100%"),
        (Select, {"budget": "some"}, f"budget is 'some': {AMOUNT}"),
        (Select, {"budget": "-1 pages"}, f"budget is '-1 pages': {AMOUNT}"),
        (Select, {"budget": 4}, f"budget is 4: {AMOUNT}"),
        (Select, {"budget": True}, f"budget is True: {AMOUNT}"),
        (Select, {"by": "best"}, f"by is 'best': {BY}"),
        (Select, {"by": None}, f"by is None: {BY}"),
        (Select, {"by": MeanKeys()}, BY),  # a sketch is no index: PerPage(MeanKeys()) is
        (Select, {"bits": 5}, "bits is 5: must be 2, 3 or 4"),
        (Select, {"bits": True}, "bits is True: must be 2, 3 or 4"),
        (Select, {"aggregate": "median"}, "aggregate is 'median': must be one of sum, max, mean"),
        (Select, {"pooling": 1.5}, "pooling is 1.5: must be a number from 0 to 1"),
        (Select, {"pooling": math.nan}, "pooling is nan: must be a number from 0 to 1"),
        (Select, {"pooling": "half"}, "pooling is 'half': must be a number from 0 to 1"),
        (Window, {"times": -1}, f"times is -1: {TIMES}"),
        (Window, {"times": 0.5}, f"times is 0.5: {TIMES}"),
        (Window, {"times": math.nan}, f"times is nan: {TIMES}"),
        (Window, {"times": math.inf}, f"times is inf: {TIMES}"),
        (Window, {"times": "3"}, f"times is '3': {TIMES}"),
        (Window, {"times": None}, f"times is None: {TIMES}"),
        (Window, {"times": True}, f"times is True: {TIMES}"),
        (Window, {"evict": "fifo"}, "evict is 'fifo': must be one of lookahead, lru, lfu"),
        (Window, {"evict": None}, "evict is None: must be one of lookahead, lru, lfu"),
        (Place, {"device_bytes": -1}, "device_bytes is -1: must be an integer of at least 0 bytes"),
        (Place, {"device_bytes": 1e9}, "device_bytes is 1000000000.0: must be an integer"),
        (Place, {"host_bytes": -1, "store": "s"}, "host_bytes is -1: must be an integer"),
        (Place, {"host_bytes": 10}, "host_bytes is 10 and store is None: name a store"),
        (Place, {"store": ""}, "store is '': must be a URL or a folder's path, or None"),
        (Place, {"store": 3}, "store is 3: must be a URL or a folder's path, or None"),
        (Place, {"observe": 0}, "observe is 0: must be an integer of at least 1"),
        (Place, {"timeout_s": 0}, f"timeout_s is 0: {SECONDS}"),
        (Place, {"timeout_s": math.nan}, f"timeout_s is nan: {SECONDS}"),
        (Place, {"timeout_s": math.inf}, f"timeout_s is inf: {SECONDS}"),
        (Place, {"timeout_s": "1"}, f"timeout_s is '1': {SECONDS}"),
        (Place, {"store": "s", "order": "near"}, "order is 'near': must be one of position, clu"),
        (Place, {"order": "cluster"}, "order is 'cluster' and store is None"),
        (Place, {"store": "s", "codec": "lz4"}, "codec is 'lz4': must be one of none, zstd, blosc"),
        (Place, {"codec": "zstd"}, "codec is 'zstd' and store is None"),
        (Place, {"store": "s", "keep_generated": 1}, "keep_generated is 1: must be True or False"),
        (Place, {"keep_generated": True}, "keep_generated is True and store is None"),
        (CacheConfig, {"select": "25%"}, r"select is '25%': must be a kvjax\.Select, or None"),
        (CacheConfig, {"select": Select}, r"select is .*: must be a kvjax\.Select, or None"),
        (
            CacheConfig,
            {"select": Select(), "place": True},
            r"place is True: must be a kvjax\.Place",
        ),
        (CacheConfig, {"select": Select(), "window": 3}, r"window is 3: must be a kvjax\.Window"),
        (CacheConfig, {"place": Place()}, "place is given and select is None"),
        (CacheConfig, {"window": Window()}, "window is given and place is None"),
        (
            CacheConfig,
            {"select": Select(), "window": Window()},
            "window is given and place is None",
        ),
        (CacheConfig, {"select": Select(), "num_pages": 8}, "num_pages is 8 and select is given"),
    ],
    ids=str,
)
def test_a_field(kind, fields, message):
    with pytest.raises(KvjaxError, match=message):
        kind(**fields)


def test_what_is_allowed():
    """The edges, in any type of number."""
    for fields in ({"times": 0}, {"times": 1}, {"times": np.float32(1.5)}, {"times": 1e9}):
        assert hash(Window(**fields)) == hash(Window(**fields))
    assert Window(0).slots(7) == Window(1).slots(7) == 7
    assert Window(1.5).slots(7) == 11
    Select("100%", pooling=1)
    Select(by=PerPage(MeanKeys()))
    Place(host_bytes=0, store="s", timeout_s=np.float32(0.5), observe=np.int64(1))


@functools.cache
def tiny(name="llama"):
    return model(name)


ENTRIES = {"generate": generate, "stream": stream}
every_entry = pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)


def refused(call, message):
    """The call raises this at once, and compiles nothing."""
    before = compilations()
    with pytest.raises(KvjaxError, match=message):
        call()
    assert compilations() == before


@every_entry
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mistral", "every layer of mistral has a sliding window: .* last 21 tokens.* leave out"),
        ("groups_of_3", "has layers of different shapes that see the whole context.* leave out"),
    ],
)
def test_models_with_nothing_to_choose_or_layers_that_differ(entry, name, message):
    refused(lambda: entry(tiny(name), prompt(20), cache=CacheConfig(select=Select())), message)


@every_entry
def test_prompts(entry):
    cache = CacheConfig(select=Select(), place=Place())
    message = "1020 tokens and max_new_tokens is 5: the model's context is 1024"
    refused(lambda: entry(tiny(), prompt(1020), max_new_tokens=5, cache=cache), message)
    refused(lambda: entry(tiny(), [], cache=cache), "is empty")
    refused(lambda: entry(tiny(), [3, 64], cache=cache), "token id 64 at index 1 is outside")
    message = "max_new_tokens is 0: must be an integer of at least 1"
    refused(lambda: entry(tiny(), [3], max_new_tokens=0, cache=cache), message)


@every_entry
@pytest.mark.parametrize("given", [0, 1, 4 * 2 * 2 * 2 * 16 * 8 * 4 - 1])
def test_device_memory_for_fewer_pages_than_a_step_reads(entry, given):
    """Three pages of a step, and the page that is being filled, of two layers and heads."""
    config = CacheConfig(select=Select("3 pages"), place=Place(device_bytes=given))
    need = 4 * 2 * 2 * 2 * 16 * 8 * 4
    message = f"device_bytes is {given}: .*need {need} bytes.*raise it to that"
    refused(lambda: entry(tiny(), prompt(100), cache=config), message)


@every_entry
def test_an_attention_that_cannot_run(entry):
    """It is not let fall in silence: no TPU kernel takes heads of width 8."""
    cache = CacheConfig(select=Select(), place=Place(), attention="tpu")
    refused(lambda: entry(tiny(), prompt(20), cache=cache), "attention='tpu' cannot run")


@every_entry
def test_a_prefill_chunk_that_is_none(entry):
    """It is checked although a prompt is prefilled layer by layer."""
    message = "prefill_chunk is 17: must be a multiple of 16 tokens"
    cache = CacheConfig(select=Select())
    refused(lambda: entry(tiny(), prompt(20), prefill_chunk=17, cache=cache), message)


def test_score_reads_every_page():
    cache = CacheConfig(select=Select())
    refused(lambda: score(tiny(), prompt(20), cache=cache), "select is given.*leave out select")

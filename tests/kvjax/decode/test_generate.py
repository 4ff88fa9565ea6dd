"""What `generate` and `stream` draw, when they stop, and what they say about it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

import kvjax
from kvjax.config import CacheConfig
from kvjax.decode import Generation, Sampling, generate, stream
from tests.kvjax.decode.tiny import VOCAB, model, no_cache_logits, prompt

PROMPTS = [prompt(n, n) for n in (3, 40, 17)]
NEW = 12


@functools.cache
def tiny():
    return model("mistral")


@functools.cache
def greedy() -> Generation:
    return generate(tiny(), PROMPTS, max_new_tokens=NEW)


def test_greedy_takes_the_likeliest_token_of_a_model_without_cache():
    for ids, tokens in zip(PROMPTS, greedy().tokens, strict=True):
        logits = no_cache_logits(tiny(), ids + tokens)[len(ids) - 1 : -1]
        best = np.sort(logits, axis=1)
        clear = best[:, -1] - best[:, -2] > 1e-3
        assert clear.sum() > NEW // 2
        np.testing.assert_array_equal(logits.argmax(1)[clear], np.asarray(tokens)[clear])


def test_statistics():
    """Pages are counted at the end; the last token drawn never needs a slot."""
    result = greedy()
    assert result.finish_reasons == ["length"] * 3
    assert result.texts == ["", "", ""]  # there is no tokenizer
    assert [len(row) for row in result.tokens] == [NEW] * 3
    stats = result.stats
    assert (stats.prompt_tokens, stats.new_tokens) == (60, 3 * NEW)
    assert stats.pages_used == 1 + 4 + 2
    assert (stats.pages_total, stats.page_size) == (8, 16)
    assert stats.cache_bytes == {"float32": 8 * tiny().spec.bytes_per_page(16)}
    assert stats.tokens_per_second > 0


@pytest.mark.slow
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_batch_equals_single_runs_and_a_stream(row):
    """Whatever page size, chunks and implementation the single run uses."""
    options = [
        {"cache": CacheConfig(page_size=8), "prefill_chunk": 16},
        {"cache": CacheConfig(page_size=128, attention="reference")},
        {"cache": CacheConfig(num_pages=5), "prefill_chunk": 32},
    ][row]
    single = generate(tiny(), PROMPTS[row], max_new_tokens=NEW, **options)
    assert single.tokens == [greedy().tokens[row]]
    events = list(stream(tiny(), PROMPTS[row], max_new_tokens=NEW))
    assert [event.token for event in events] == greedy().tokens[row]
    assert [event.finish_reason for event in events] == [None] * (NEW - 1) + ["length"]
    assert events[0].stats is None
    stats = events[-1].stats
    assert (stats.prompt_tokens, stats.new_tokens) == (len(PROMPTS[row]), NEW)
    assert 0 < stats.ttft_seconds <= stats.run_seconds
    assert stats.pages_used == -(-(len(PROMPTS[row]) + NEW - 1) // 16)


def test_prompts_of_any_integer_type():
    first = greedy().tokens[0]
    for ids in (np.asarray(PROMPTS[0]), jnp.asarray(PROMPTS[0]), tuple(PROMPTS[0])):
        for given in (ids, [ids]):
            assert generate(tiny(), given, max_new_tokens=NEW).tokens == [first]


def test_stop_tokens():
    """A row ends at its first stop token, which is shown; others draw on, as if alone."""
    whole = greedy().tokens
    stops = [whole[0][4], whole[2][1]]
    result = generate(tiny(), PROMPTS, max_new_tokens=NEW, stop_tokens=stops)
    for found, row, reason in zip(result.tokens, whole, result.finish_reasons, strict=True):
        ends = [place for place, token in enumerate(row) if token in stops]
        assert found == (row[: ends[0] + 1] if ends else row)
        assert reason == ("stop" if ends else "length")
    assert result.stats.new_tokens == sum(map(len, result.tokens)) < 3 * NEW
    events = list(stream(tiny(), PROMPTS[0], max_new_tokens=NEW, stop_tokens=stops))
    assert [event.token for event in events] == result.tokens[0]
    assert events[-1].finish_reason == "stop"


def test_a_stop_token_that_comes_last_is_a_stop():
    row = greedy().tokens[0]
    place = next(i for i in range(2, NEW) if row[i] not in row[:i])
    result = generate(tiny(), PROMPTS[0], max_new_tokens=place + 1, stop_tokens=[row[place]])
    assert (result.tokens, result.finish_reasons) == ([row[: place + 1]], ["stop"])


@pytest.mark.slow
def test_one_token():
    result = generate(tiny(), PROMPTS, max_new_tokens=1)
    assert result.tokens == [row[:1] for row in greedy().tokens]
    assert result.stats.pages_used == 1 + 3 + 2
    result = generate(tiny(), PROMPTS, max_new_tokens=1, stop_tokens=[result.tokens[0][0]])
    assert result.finish_reasons[0] == "stop"
    events = list(stream(tiny(), PROMPTS[1], max_new_tokens=1))
    assert [(e.token, e.finish_reason) for e in events] == [(greedy().tokens[1][0], "length")]


class Tokenizer:
    """Letters; its end of sequence is whatever a test says."""

    bos_id = None

    def __init__(self, eos):
        self.eos_ids = frozenset(eos)

    def encode(self, text):
        return [ord(letter) - 48 for letter in text]

    def decode(self, ids):
        return "".join(chr(48 + token) for token in ids)


def test_end_of_sequence():
    """The model's own end stops a row unless told not to, and is not part of the text."""
    row = greedy().tokens[0]
    named = model("mistral")
    object.__setattr__(named, "tokenizer", Tokenizer([row[3]]))
    end = row.index(row[3])
    text = "".join(chr(48 + token) for token in PROMPTS[0])
    result = generate(named, text, max_new_tokens=NEW)
    assert (result.tokens, result.finish_reasons) == ([row[: end + 1]], ["stop"])
    assert result.texts == [Tokenizer([]).decode(row[:end])]
    result = generate(named, [text], max_new_tokens=NEW, stop_at_eos=False)
    assert (result.tokens, result.finish_reasons) == ([row], ["length"])
    assert result.texts == [Tokenizer([]).decode(row)]


def test_control_tokens_are_left_out_of_text_however_it_comes():
    """Of one that is drawn on the way, too."""
    row = greedy().tokens[0]
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB]
    pieces[row[3]] = "<end>"
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    named = model("mistral")
    object.__setattr__(
        named, "tokenizer", kvjax.models.Tokenizer(backend, eos_ids=frozenset({row[3]}))
    )
    options = {"max_new_tokens": NEW, "stop_at_eos": False}
    (text,) = generate(named, PROMPTS[0], **options).texts
    assert text == "".join(event.text for event in stream(named, PROMPTS[0], **options))
    assert "end" not in text
    assert named.tokenizer.decode(row) == text


@pytest.mark.slow
def test_seeds_reproduce():
    hot = {"max_new_tokens": NEW, "sampling": Sampling(temperature=1.5, top_p=0.95)}
    draws = [
        generate(tiny(), PROMPTS, key=key, **hot).tokens
        for key in (5, jax.random.key(5), jax.random.PRNGKey(5), 6)
    ]
    assert draws[0] == draws[1] == draws[2] != draws[3]
    assert generate(tiny(), PROMPTS, **hot).tokens == generate(tiny(), PROMPTS, key=0, **hot).tokens
    events = list(stream(tiny(), PROMPTS[0], key=5, **hot))
    assert [event.token for event in events] == draws[0][0]
    again = list(stream(tiny(), PROMPTS[0], key=5, **hot))
    assert [event.token for event in again] == draws[0][0]


@pytest.mark.slow
def test_a_cache_of_fewer_bits_draws_nearly_the_same():
    result = generate(tiny(), PROMPTS, max_new_tokens=NEW, cache=CacheConfig(dtype="bfloat16"))
    assert list(result.stats.cache_bytes) == ["bfloat16"]
    same = [a[0] == b[0] for a, b in zip(result.tokens, greedy().tokens, strict=True)]
    assert sum(same) >= 2


@pytest.mark.slow
def test_a_context_can_be_filled():
    """The last position of the model's context is usable, and no further one."""
    ids = prompt(1024 - 3, 2)
    result = generate(tiny(), ids, max_new_tokens=3)
    assert len(result.tokens[0]) == 3

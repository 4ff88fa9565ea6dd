"""Half the pages of a prefix in a format, against NumPy: attention to what was chosen, no more."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.config import CacheConfig
from kvjax.decode import PrefixCache, PrefixConfig, Sampling
from kvjax.decode.meter import Meter
from kvjax.decode.sampling import make_sampler
from kvjax.decode.shapes import plan
from kvjax.decode.step import RUNNING, Rules, decode_step
from kvjax.formats import int4
from kvjax.model import from_checkpoint
from kvjax.models import random_checkpoint
from kvjax.storage.sessions import PageReads
from tests.kvjax.decode import tiny
from tests.kvjax.formats import plain_codes

SIZE, PAGES = 16, 16
PREFIX, SUFFIX, STEPS = PAGES * SIZE, 41, 20  # pages fall due in the suffix, and in steps


def windowed():
    """A layer whose window reaches into three pages, and one that sees all."""
    layers = tiny.attention(4, 2, window=40), tiny.attention(4, 2, rope_theta=1e6)
    checkpoint = random_checkpoint(tiny.config(*layers, qk_norm=True, post_norms=True), seed=7)
    for weight, value in checkpoint.weights.items():
        if "norm" not in weight:
            value *= 2
    return from_checkpoint(checkpoint, name="windowed")


CASES = {
    "20 first and 20 newest tokens": (
        tiny.model,
        dataclasses.replace(int4(sinks=20), residual=20),
        {"by": "mean"},
    ),
    "windows": (windowed, dataclasses.replace(int4(), skip_windows=False), {"by": "quest"}),
    "windows skipped": (windowed, int4(), {"by": "mean", "who": "layer"}),
    "kvquant": (tiny.model, plain_codes.kvquant(), {"by": "low-bit"}),
}


class Stored:
    """What is on disk of a prefix: numbers of its pages, and its tokens that are exact.

    Attributes:
      pages: of each layer, keys and values float64 [Hkv, N, P, D].
      exact: of each layer that is packed, keys and values float32 [S + R, Hkv, D].
    """

    def __init__(self, prefixes, key, of, format):
        heads, dim = of.spec.layers[0].kv_heads, of.spec.layers[0].head_dim
        self.pages, self.exact, group = [], {}, f"exact-{PREFIX}"
        with prefixes.store.open_segment(key) as segment:
            together = segment.info.layout.heads  # in one unit
            arrays = segment.sketches(group)
            for layer in range(len(of.spec.layers)):
                chosen, by_head = format.layer(of.spec, layer), []
                for head in range(heads):
                    units = [[layer, head // together, 0, page] for page in range(PAGES)]
                    reads = segment.read(np.asarray(units, np.int32))
                    raw = np.stack([np.asarray(read.result()) for read in reads])
                    raw = raw.reshape(PAGES, together, -1)[:, head % together]
                    if chosen is not None:
                        by_head.append(plain_codes.both(chosen, raw, SIZE, dim, head))
                        continue
                    rest = plain_codes.Bytes(raw)
                    by_head.append([rest.number(np.float32, SIZE, dim) for _ in range(2)])
                self.pages.append([np.stack(kind) for kind in zip(*by_head, strict=True)])
                if chosen is not None:
                    nth = len(self.exact)
                    self.exact[layer] = [arrays[f"{group}.{x}"][nth] for x in ("keys", "values")]


def expected(of, format, stored, chosen, tokens):
    """Hidden states [T, d] of the tokens after a prefix, all at once.

    Args:
      of: the model.
      format: of the pages.
      stored: what is stored of the prefix.
      chosen: pages of each layer and KV head; None is all.
      tokens: that follow it.
    """
    sinks, newest = format.sink_tokens(SIZE), format.recent(SIZE)

    def attend(layer, q, k, v, state):
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        packed, out = format.layer(of.spec, layer), np.zeros(q.shape)
        own = k, v
        if packed is not None:
            own = plain_codes.of_tokens(packed, k, v, SIZE, PREFIX)
        window, group = of.config.layers[layer].window, q.shape[1] // k.shape[1]
        for head in range(k.shape[1]):
            pages = range(PAGES) if chosen is None or window else chosen[layer][head]
            old = np.concatenate([np.arange(p * SIZE, (p + 1) * SIZE) for p in pages])
            for t in range(len(q)):
                position = np.concatenate([old, PREFIX + np.arange(t + 1)])
                limit = max(0, -(-(PREFIX + t - newest) // SIZE) * SIZE)
                rows = []
                for kind, new in enumerate((k, v)):
                    codes = stored.pages[layer][kind][head].reshape(PREFIX, -1)
                    codes = np.concatenate([codes, own[kind][:, head]])[position]
                    if packed is not None:
                        kept = np.full((PREFIX, new.shape[2]), np.nan)
                        kept[:sinks] = stored.exact[layer][kind][:sinks, head]
                        kept[PREFIX - newest :] = stored.exact[layer][kind][sinks:, head]
                        exact = np.concatenate([kept, new[:, head]])[position]
                        is_code = (position >= sinks) & (position < limit)
                        codes = np.where(is_code[:, None], codes, exact)
                    rows.append(codes)
                of_head = slice(head * group, (head + 1) * group)
                scores = of.config.scale(layer) * q[t, of_head] @ rows[0].T
                if window is not None:
                    scores = np.where(position > PREFIX + t - window, scores, -np.inf)
                weights = np.exp(scores - scores.max(1, keepdims=True))
                out[t, of_head] = weights / weights.sum(1, keepdims=True) @ rows[1]
        return jnp.asarray(out, jnp.float32), state

    decoder = nnx.merge(of.graphdef, of.params)
    positions = PREFIX + jnp.arange(len(tokens), dtype=jnp.int32)
    return np.asarray(decoder(jnp.asarray(tokens, jnp.int32), positions, attend, None)[0])


@functools.partial(
    jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0}
)
def step(graphdef, params, state, rules):
    return decode_step(nnx.merge(graphdef, params), state, rules)


def hidden_states(of, prefixes, cache, ids):
    """Of the suffix's last token and of those after it, one at a time."""
    limits = jnp.full((1,), STEPS + 1, jnp.int32)
    prompt = ids[: PREFIX + SUFFIX]
    shapes = plan(
        of.config, of.spec, [len(prompt)], new_tokens=STEPS + 1, prefill_chunk=512, cache=cache
    )
    meter = Meter()
    found = prefixes.prefill(of, prompt, shapes, cache=cache, limits=limits, meter=meter)
    assert found.stats.pages == PAGES
    assert found.stats.pages_chosen == PAGES // 2
    stops, sampler = jnp.full((8,), -1, jnp.int32), make_sampler(Sampling(), tiny.VOCAB)
    rules = Rules(sampler, jax.random.key(0), stops, limits + 1000)
    state, rows = found.state, [found.state.hidden[0]]
    for token in ids[PREFIX + SUFFIX :]:
        running = jnp.asarray([RUNNING], jnp.int32)
        state = dataclasses.replace(state, tokens=jnp.asarray([token], jnp.int32), finished=running)
        state = step(of.graphdef, of.params, state, rules)
        rows.append(state.hidden[0])
    assert bool(state.sound)
    return np.stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_chosen_is_read_as_codes_and_the_rest_not_at_all(tmp_path, monkeypatch, case):
    make, format, options = CASES[case]
    of, cache = make(), CacheConfig(page_size=SIZE, format=format)
    ids = tiny.prompt(PREFIX + SUFFIX + STEPS, seed=5)
    config = PrefixConfig(
        **{"load_policy": "load", "budget": "50%", "host_bytes": 0, "who": "head", **options}
    )
    prefixes = PrefixCache(tmp_path, config=config)
    stored = Stored(prefixes, prefixes.add(of, ids[:PREFIX], cache=cache).key, of, format)
    asked, issue = {}, PageReads.issue

    def noted(self, layer, ids, **rest):
        asked[layer] = np.array(ids)
        return issue(self, layer, ids, **rest)

    monkeypatch.setattr(PageReads, "issue", noted)
    got = hidden_states(of, prefixes, cache, ids)
    chosen = {}
    for layer, by_head in asked.items():
        first = last = 0
        if format.layer(of.spec, layer) is not None:
            first, last = format.sink_tokens(SIZE) // SIZE, format.recent(SIZE) // SIZE
        exact = {*range(first), *range(PAGES - last, PAGES)}
        read = [set(row[row < PAGES].tolist()) for row in by_head]
        assert all(row.isdisjoint(exact) for row in read)
        chosen[layer] = [sorted(row | exact) for row in read]
        if of.config.layers[layer].window is None:
            assert [len(row) for row in chosen[layer]] == [PAGES // 2] * len(read)
    arguments = of, format, stored
    want = expected(*arguments, chosen, ids[PREFIX:])[SUFFIX - 1 :]
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-4)
    of_all = expected(*arguments, None, ids[PREFIX:])[SUFFIX - 1 :]
    assert np.abs(got - of_all).max() > 1e-2

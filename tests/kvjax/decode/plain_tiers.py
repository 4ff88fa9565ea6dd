"""Decoding with selected pages in NumPy: every token at once, a mask in place of a cache.

The prompt sees everything before it. A token after it sees, in each layer and KV head, the pages of
greatest exact attention among the full ones, the first and the last of them, and the page that it
goes to; in a layer with a sliding window every token sees what that reaches. A layer with latents
makes keys and values of every head here, and all heads see the same pages. What resident windows
would have fetched for that is simulated from the same masses.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.kvjax.cache.plain_slots import Slots


class PlainTiers:
    """One sequence.

    Args:
      of: the model.
      ids: the prompt and the tokens after it.
      prompt: how many of them are the prompt.
      size: tokens a page.
      count: pages that a head reads in a step, the open page not counted.

    Attributes:
      logits: float32 [T - prompt + 1, V], of the prompt's last token and all after it.
      keys: float32 [T, Hkv, D] of each layer.
      values: as keys.
      steps: of each layer that chooses and KV head, (mass of full pages, pages chosen) of steps.
      observed: of each layer and KV head, the mass of the prompt's full pages by its last tokens.
    """

    def __init__(self, of, ids, *, prompt, size, count, observe=32):
        self._of, self._prompt, self._size, self._count = of, prompt, size, count
        self._observe = observe
        self.keys, self.values, self.steps, self.observed = [], [], [], []
        decoder = nnx.merge(of.graphdef, of.params)
        tokens = jnp.asarray(ids, jnp.int32)
        hidden, _ = decoder(tokens, jnp.arange(len(ids), dtype=jnp.int32), self._attend, None)
        self.logits = np.asarray(decoder.logits(hidden))[prompt - 1 :]

    def _attend(self, layer, q, k, v, cache):
        self.keys.append(np.asarray(k))
        self.values.append(np.asarray(v))
        q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
        tokens, heads, group = len(q), k.shape[1], q.shape[1] // k.shape[1]
        config = self._of.config
        together = config.layers[layer].latent is not None
        if together:
            heads, group = 1, heads
        out = np.zeros((*q.shape[:2], v.shape[2]))
        for head in range(heads):
            rows = slice(head * group, (head + 1) * group)
            own = rows if together else [head] * group  # each query head's KV head
            scores = config.scale(layer) * np.einsum("tgd,sgd->gts", q[:, rows], k[:, own])
            if config.attn_soft_cap is not None:
                scores = config.attn_soft_cap * np.tanh(scores / config.attn_soft_cap)
            seen = np.tri(tokens, dtype=bool)
            window = config.layers[layer].window
            if window is not None:
                seen &= ~np.tri(tokens, k=-window, dtype=bool)
                weights = _softmax(np.where(seen, scores, -np.inf))
                out[:, rows] = np.einsum("gts,sgd->tgd", weights, v[:, own])
                continue
            steps = []
            for t in range(self._prompt, tokens):
                mass, chosen = self._choose(scores[:, t], t // self._size)
                steps.append((mass, chosen))
                for page in set(range(t // self._size)) - set(chosen):
                    seen[t, page * self._size : (page + 1) * self._size] = False
            self.steps.append(steps)
            full = self._prompt // self._size
            last = scores[:, max(self._prompt - self._observe, 0) : self._prompt]
            by_token = [self._page_mass(last[:, i], full) for i in range(last.shape[1])]
            self.observed.append(np.sum(by_token, axis=0))
            weights = _softmax(np.where(seen, scores, -np.inf))
            out[:, rows] = np.einsum("gts,sgd->tgd", weights, v[:, own])
        return jnp.asarray(out, jnp.float32), cache

    def _page_mass(self, scores, full):
        """[full], summed over the query heads."""
        if not full:
            return np.zeros(0)
        weights = _softmax(scores[:, : full * self._size])
        return weights.reshape(len(weights), full, self._size).sum((0, 2))

    def _choose(self, scores, full):
        mass = self._page_mass(scores, full)
        always = {0, full - 1} if full else set()
        order = sorted(range(full), key=lambda page: (page not in always, -mass[page], page))
        return mass, sorted(order[: self._count])

    def misses(self, *, slots, total, held, keeps=True, evict="lookahead"):
        """Pages that were not near when they were chosen, over steps, layers and heads.

        Args:
          slots: S, the open page included; one number, or one of each layer's every head.
          total: N.
          held: pages that the program had room for in a prompt.
          keeps: whether pages stay near from step to step.
          evict: what makes room.
        """
        own = np.broadcast_to(np.ravel(slots), len(self.steps)).tolist()
        return sum(
            self._misses(steps, observed, slots, total, held, keeps, evict)
            for steps, observed, slots in zip(self.steps, self.observed, own, strict=True)
        )

    def _misses(self, steps, observed, slots, total, held, keeps, evict):
        near = Slots(total, slots)
        full, begun = divmod(self._prompt, self._size)
        first = min(slots - 1, held) if keeps else 0
        best = sorted(range(full), key=lambda page: (-observed[page], page))[:first]
        for slot, page in enumerate(sorted(best), start=1):
            near.page_in[slot] = page
            near.rank[slot] = observed[page] / (1 + observed[page])  # no step has read it
        if begun:
            near.page_in[0] = full
        missed = 0
        for number, (mass, chosen) in enumerate(steps, start=1):
            length = self._prompt + number - 1
            there = [near.find(page) for page in chosen]
            missing = [page for page, slot in zip(chosen, there, strict=True) if slot == slots]
            missed += len(missing)
            read = [slot in there for slot in range(slots)]
            mass = np.concatenate([mass, np.zeros(total - len(mass))])
            near.ranked(evict, mass, read, number)
            open_page, offset = divmod(length, self._size)
            coming = [*missing, open_page] if offset == 0 else missing
            keep = [r or near.page_in[s] == open_page for s, r in enumerate(read)]
            rank = {"lookahead": mass[coming], "lru": [number] * len(coming)}
            near.admit(coming, rank.get(evict, [1] * len(coming)), keep)
            if not keeps:
                near.only([page == open_page for page in near.page_in])
        return missed


def _softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)

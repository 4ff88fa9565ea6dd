"""Real models against another implementation's float32 log-probabilities and llama.cpp's tokens."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.models import GGUFFile, build, causal_attend, gguf_tokenizer, read_gguf

QWEN = pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.slow)
NAMES = ("smollm2-135m", QWEN, "gemma3-270m")
SMALL = ("smollm2-135m", "gemma3-270m")
PROMPTS = ("short", "code", "chat", "text1k")
ROWS = 128  # logits at a time: a vocabulary of 262,144 makes 1 MB a row
ISHMAEL = "Call me Ishmael. Some years ago"


def tag(name):
    return name.replace("-", "_")


class Real:
    """A model, and what another implementation says of it."""

    def __init__(self, path, folder, name):
        checkpoint = read_gguf(path)
        self.config = checkpoint.config
        self.graphdef, self.params = build(checkpoint)
        with np.load(folder / f"{tag(name)}.hf_fp32.npz") as stored:
            self.expected = {key: stored[key] for key in stored.files}
        self.known = {}

    def run(self, *prompts):
        """For each prompt, (log p of the next token, argmax, margin to the second) of each token.

        The prompts go through the model together, one after another in one stream.
        """
        if prompts not in self.known:
            self.known[prompts] = self._run(prompts)
        return self.known[prompts]

    def _run(self, prompts):
        config, graphdef = self.config, self.graphdef

        @jax.jit
        def hidden(params, tokens, segments, positions):
            attend = causal_attend(config, segments, positions)
            return nnx.merge(graphdef, params)(tokens, positions, attend, None)[0]

        @jax.jit
        def score(params, hidden, following):
            logits = nnx.merge(graphdef, params).logits(hidden)
            logprobs = jax.nn.log_softmax(logits)
            chosen = jnp.take_along_axis(logprobs, following[:, None], axis=1)[:, 0]
            # Not top_k, which sorts the whole vocabulary on CPU.
            best = jnp.argmax(logits, axis=1)
            is_best = jnp.arange(logits.shape[1])[None] == best[:, None]
            second = jnp.where(is_best, -jnp.inf, logits).max(axis=1)
            return chosen, best, logits.max(axis=1) - second

        ids = [self.expected[f"{prompt}/ids"].astype(np.int32) for prompt in prompts]
        lengths = [len(i) for i in ids]
        padding = -sum(lengths) % ROWS
        parts = [*ids, np.zeros(padding, np.int32)]
        tokens = np.concatenate(parts)
        segments = np.repeat(np.arange(len(parts), dtype=np.int32), [*lengths, padding])
        positions = np.concatenate([np.arange(len(i), dtype=np.int32) for i in parts])
        out = hidden(self.params, tokens, segments, positions)
        following = np.roll(tokens, -1)
        columns = [
            score(self.params, out[start : start + ROWS], following[start : start + ROWS])
            for start in range(0, len(tokens), ROWS)
        ]
        whole = [np.concatenate(column) for column in zip(*columns, strict=True)]
        ends = np.cumsum(lengths)[:-1]
        split = [np.split(column[: sum(lengths)], ends) for column in whole]
        return dict(zip(prompts, zip(*split, strict=True), strict=True))


@pytest.fixture(scope="module", params=NAMES)
def real(request, gguf_file, shared):
    return Real(gguf_file(request.param), shared / "reference", request.param)


def compare(real, prompt, logprobs, best, margin):
    error = np.abs(logprobs[:-1] - real.expected[f"{prompt}/prompt_logprob"])
    assert error.mean() < 1e-3
    assert error.max() < 2e-2
    clear = margin > 0.1
    assert clear.any()
    np.testing.assert_array_equal(best[clear], real.expected[f"{prompt}/prompt_argmax"][clear])
    assert best[-1] == real.expected[f"{prompt}/greedy"][0] or not clear[-1]


def test_log_probabilities(real):
    for prompt, found in real.run(*PROMPTS).items():
        compare(real, prompt, *found)


@pytest.mark.slow
@pytest.mark.parametrize("real", SMALL, indirect=True)  # a larger one takes minutes
def test_log_probabilities_at_4k(real):
    compare(real, "needle4k", *real.run("needle4k")["needle4k"])


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request, gguf_file, shared):
    """(tokenizer, prompts' texts, llama.cpp's ids of them)."""
    texts, ids = (
        json.loads((shared / "reference" / f"{tag(request.param)}.{kind}.json").read_bytes())
        for kind in ("prompts", "tokens")
    )
    return gguf_tokenizer(GGUFFile(gguf_file(request.param))), texts, ids


@pytest.mark.parametrize(
    ("prompt", "key"), [("short", "short"), ("code", "code"), ("chat", "chat_text")]
)
def test_tokens_of_prompts(tokenizer, prompt, key):
    ours, texts, ids = tokenizer
    assert ours.encode(texts[key]) == ids[prompt]


@pytest.mark.parametrize("prompt", ["text1k", "needle4k"])
def test_tokens_of_a_book(tokenizer, prompt):
    """The needle was put between tokens: encoding starts anew on both sides of it."""
    ours, texts, ids = tokenizer
    expected = ids[prompt]
    text = ours.decode(expected, skip_special=True)
    assert text.startswith(ISHMAEL)
    needle = texts["needle"]
    before, found, after = text.partition(needle)
    got = ours.encode(before)
    if prompt == "needle4k":
        assert found
        got += ours.encode(needle, add_bos=False) + ours.encode(after, add_bos=False)
    assert got == expected


def test_chat_templates(tokenizer):
    ours, texts, _ = tokenizer
    system, user = "You are a helpful assistant.", "List three facts about whales, one per line."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    if ours.chat_template is None:  # Gemma's is a base model
        with pytest.raises(ValueError, match="base model"):
            ours.apply_chat_template(messages)
    else:
        assert ours.apply_chat_template(messages) == texts["chat_text"]


def test_ends_of_turns(tokenizer):
    ours, _, _ = tokenizer
    ends = {ours.decode([token], skip_special=False) for token in ours.eos_ids}
    assert ends in ({"<|im_end|>", "<|endoftext|>"}, {"<eos>", "<end_of_turn>"})


def test_any_text_comes_back(tokenizer):
    ours, _, _ = tokenizer
    text = "def f(x):\n\treturn x  # 12345 €é漢字👩‍👩‍👧\r\n\n\n  <b>'s DON'T \u00a0 \u200b end"
    assert ours.decode(ours.encode(text, add_bos=False)) == text

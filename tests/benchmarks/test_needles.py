"""Documents with codes hidden in them: as long as asked, each code once, the same for a seed."""

import pytest
import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers import models as backends

from benchmarks.needles import WORDINGS, document
from kvjax.models import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(backends.BPE({c: i for i, c in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


@pytest.mark.parametrize("count", [1, len(WORDINGS)])
def test_a_document_states_each_code_once_where_it_says(tokenizer, count):
    ids, needles = document(tokenizer, 4000, count, seed=3)
    assert len(ids) == 4000
    assert len(needles) == count
    text = tokenizer.decode(ids)
    for needle in needles:
        assert text.count(needle.code) == 1
        assert text.index(needle.code) / len(text) == pytest.approx(needle.depth, abs=0.12)
        asked = needle.question.partition("Answer: ")[2]
        assert f"{asked.lower()} {needle.code}" in text.lower()
        assert sum(asked.lower() in other.question.lower() for other in needles) == 1


def test_a_seed_is_a_document(tokenizer):
    assert document(tokenizer, 2000, 3, seed=0) == document(tokenizer, 2000, 3, seed=0)
    assert document(tokenizer, 2000, 3, seed=0) != document(tokenizer, 2000, 3, seed=1)

"""Tokenizers of both schemes, streaming, chat templates; real ones in test_real_models.py."""

import json
import pathlib

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from kvjax.models import GGUFFile, StreamDecoder, Tokenizer, read_tokenizer
from kvjax.models.gguf_tokenizer import gguf_tokenizer

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["<unk>", "<s>", "</s>", *BYTES, "▁", "a", "b", "ab", "▁ab", "abb", "é", "<b>"]


class Metadata(GGUFFile):
    """A file as far as its tokenizer goes."""

    def __init__(self, **change):
        self.path = pathlib.Path("some.gguf")
        scores = [0.0] * 259 + [-9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -9.0, 0.0]
        fields = {
            "model": "llama",
            "tokens": PIECES,
            "token_type": [2, 3, 3] + [6] * 256 + [1] * 7 + [4],
            "scores": scores,
            "unknown_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **change,
        }
        self.metadata = {
            f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None
        }


@pytest.fixture(scope="module")
def pieces():
    return gguf_tokenizer(Metadata())


@pytest.fixture(scope="module")
def bytewise():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {"<end>": 0, **{c: i + 1 for i, c in enumerate(sorted(alphabet))}}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "<fin→>"])
    return Tokenizer(backend, eos_ids=frozenset({0}), eos_id=0)


def names(tokenizer, ids):
    return [tokenizer.backend.id_to_token(i) for i in ids]


def test_best_scored_pieces_are_merged_first(pieces):
    assert names(pieces, pieces.encode("ab ab")) == ["<s>", "▁ab", "▁ab"]
    # "abb" comes from "ab" + "b"; "▁ab" scores better than both.
    assert names(pieces, pieces.encode("abb", add_bos=False)) == ["▁ab", "b"]
    assert names(pieces, pieces.encode("a<b>b", add_bos=False)) == ["▁", "a", "<b>", "▁", "b"]


def test_without_a_prefix_space():
    tokenizer = gguf_tokenizer(Metadata(add_space_prefix=False, add_bos_token=False))
    assert names(tokenizer, tokenizer.encode("abb ab")) == ["abb", "▁ab"]
    assert tokenizer.decode(tokenizer.encode(" abb ab")) == " abb ab"


def test_unknown_characters_become_bytes(pieces):
    ids = pieces.encode("é€", add_bos=False)
    assert names(pieces, ids) == ["▁", "é", "<0xE2>", "<0x82>", "<0xAC>"]
    assert pieces.decode(ids) == "é€"


def test_bos_is_put_first_once(pieces):
    assert pieces.encode("<s>ab") == pieces.encode("ab") != pieces.encode("ab", add_bos=False)


@pytest.mark.parametrize("which", ["pieces", "bytewise"])
def test_streamed_pieces_are_whole_characters_and_join_to_the_text(which, request):
    tokenizer = request.getfixturevalue(which)
    text = "a €é 👩‍👩‍👧 \u0301ab\n\t漢字" * 2
    ids = tokenizer.encode(text, add_bos=False)
    stream = StreamDecoder(tokenizer)
    shown = [stream.step(token) for token in ids]
    assert stream.finish() == ""
    assert "".join(shown) == text == tokenizer.decode(ids)
    assert "" in shown  # a character in the making
    assert not any("\ufffd" in piece for piece in shown)


def test_bytes_that_make_no_character_become_replacements(bytewise):
    alone = bytewise.encode("€")[:2]
    stream = StreamDecoder(bytewise)
    assert [stream.step(token) for token in alone] == ["", ""]
    assert stream.finish() == "\ufffd"
    assert bytewise.decode([*alone, *bytewise.encode("a")]) == "\ufffda"
    assert bytewise.decode(alone[1:] * 3) == "\ufffd" * 3


def test_special_tokens_can_be_left_out(bytewise):
    ids = bytewise.encode("a<end>b<fin→>")
    assert len(ids) == 4
    assert bytewise.decode(ids, skip_special=False) == "a<end>b<fin→>"
    assert bytewise.decode(ids) == "ab"
    assert "".join(map(StreamDecoder(bytewise).step, ids)) == "ab"


def test_added_tokens_are_plain_text_whatever_their_characters(bytewise):
    """Letters that byte-level vocabularies spell bytes with are no such spelling there."""
    backend = tokenizers.Tokenizer.from_str(bytewise.backend.to_str())
    backend.add_tokens(["café§"])
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode("a café§ é")) == "a café§ é"


def test_wrong_input_is_told(bytewise):
    for token in (-1, 999):
        with pytest.raises(ValueError, match=f"token id {token} is not in the vocabulary"):
            bytewise.decode([token])
    with pytest.raises(ValueError, match=r"text holds '\\udc80' at index 1"):
        bytewise.encode("a\udc80")
    with pytest.raises(ValueError, match="no chat template"):
        bytewise.apply_chat_template([{"role": "user", "content": "hi"}])
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.CTC()
    with pytest.raises(ValueError, match=r"decoder \['CTC'\] is not known"):
        Tokenizer(backend)


def test_a_tokenizer_survives_json(pieces, bytewise):
    for tokenizer in (pieces, bytewise):
        again = Tokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict())))
        assert again.to_dict() == tokenizer.to_dict()
        assert again.encode("ab €") == tokenizer.encode("ab €")
    for change in ({"backend": "{"}, {"colour": 1}, {"eos_ids": None}):
        with pytest.raises(ValueError, match="stored"):
            Tokenizer.from_dict({**pieces.to_dict(), **change})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"tokens": None}, "tokens must be a list of str"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"scores": [1.0]}, "scores has 1 entries"),
        ({"scores": None}, "scores must be a list of float"),
        ({"eos_token_id": 999}, "eos_token_id is 999, not a token id below 267"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a z"]}, r"merges\[0\] is 'a z'"),
    ],
)
def test_wrong_metadata_is_named(change, fault):
    with pytest.raises(ValueError, match=rf"some\.gguf: metadata tokenizer\.ggml\.{fault}"):
        gguf_tokenizer(Metadata(**change))


TEMPLATE = """{%- for message in messages -%}
{%- if message.role == 'tool' -%}{{ raise_exception('no tools here') }}{%- endif -%}
[{{ message.role }}]{{ message.content | trim }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt -%}[assistant]{% endif -%}
{%- if tools -%}{{ tools | tojson }}{% endif -%}"""
HELLO = [{"role": "user", "content": " <hi> "}]


@pytest.fixture
def chatty(bytewise):
    return Tokenizer(bytewise.backend, eos_ids=frozenset({0}), chat_template=TEMPLATE, eos_id=0)


def test_chat_templates_render(chatty):
    assert chatty.apply_chat_template(HELLO) == "[user]<hi><end>\n[assistant]"
    plain = chatty.apply_chat_template(HELLO, add_generation_prompt=False, tools=[{"a": "<é>"}])
    assert plain == '[user]<hi><end>\n[{"a": "<é>"}]'


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([], "messages is empty"),
        ([{"content": "hi"}], r"messages\[0\] is \{'content': 'hi'\}; a turn looks like"),
        (["hi"], r"messages\[0\] is 'hi'"),
        ([{"role": "tool", "content": ""}], "refuses these messages: no tools here"),
    ],
)
def test_wrong_messages_are_told(chatty, messages, fault):
    with pytest.raises(ValueError, match=fault):
        chatty.apply_chat_template(messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__base__ }}",
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{% for x in range(999999999) %}x{% endfor %}",
        "{% if %}",
    ],
)
def test_templates_reach_nothing_outside(bytewise, template):
    tokenizer = Tokenizer(bytewise.backend, chat_template=template)
    with pytest.raises(ValueError, match="chat template"):
        tokenizer.apply_chat_template(HELLO)


def test_a_folder_says_how_its_tokenizer_is_used(tmp_path, pieces):
    assert read_tokenizer(tmp_path) is None
    backend = tokenizers.Tokenizer.from_str(pieces.backend.to_str())
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "x"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 266]}))
    tokenizer = read_tokenizer(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, True)
    assert tokenizer.eos_ids == {2, 266}
    assert tokenizer.encode("ab") == pieces.encode("ab")
    assert tokenizer.apply_chat_template(HELLO) == "x"
    (tmp_path / "chat_template.jinja").write_text("y")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**settings, "add_bos_token": False})
    )
    tokenizer = read_tokenizer(tmp_path)
    assert not tokenizer.add_bos
    assert tokenizer.apply_chat_template(HELLO) == "y"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<nope>"}))
    with pytest.raises(ValueError, match="token '<nope>' is not in"):
        read_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        read_tokenizer(tmp_path)

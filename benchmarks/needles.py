"""Long real documents with codes hidden in them, and questions about the codes."""

import dataclasses
import random
from pydoc_data.topics import topics

from kvjax.models import Tokenizer

PLACES = ("Nantucket", "Aberdeen", "Lisbon", "Valparaiso", "Kyoto", "Tromso", "Dakar", "Quebec")
WORDINGS = (
    (
        "The secret access code for the {place} vault is {code}. Remember it.",
        "the secret access code for the {place} vault",
    ),
    (
        "Note for the staff: the password of the {place} office is {code}. Keep it safe.",
        "the password of the {place} office",
    ),
    (
        "Do not forget this: the magic number of the city of {place} is {code}.",
        "the magic number of the city of {place}",
    ),
    (
        "To call the harbour master: the telephone number of the {place} harbour is {code}.",
        "the telephone number of the {place} harbour",
    ),
)
"""Statements, and what they say that the code is.

Questions repeat a statement's words and name what no other statement of the document names: small
models then answer with all keys and values, so that a wrong answer shows what a method lost.
"""

EARLIER_QUESTIONS = tuple(
    f"\n\nQuestion: {asked}\nAnswer:"
    for asked in (
        "What is this document about?",
        "Which codes and numbers does the document state, and what are they for?",
        "What should the staff remember?",
        "What does the document say about objects?",
    )
)
"""What was asked about a document before a benchmark's questions, for what learns from requests."""


@dataclasses.dataclass(frozen=True)
class Needle:
    """A code that a document states once."""

    place: str
    code: str
    depth: float  # of the statement: 0 is the document's beginning, 1 its end
    question: str


def text() -> str:
    """A long real text that every Python carries: its language reference."""
    return "\n\n".join(topics[name] for name in sorted(topics, key=lambda n: -len(topics[n])))


def document(
    tokenizer: Tokenizer, tokens: int, count: int, seed: int
) -> tuple[list[int], list[Needle]]:
    """A document of a given length that states `count` codes.

    Args:
      tokenizer: of the model that will read it.
      tokens: length of the document.
      count: codes in it, each in a wording of its own, at most as many as there are wordings.
      seed: of places, codes, wordings and depths.

    Returns:
      Its tokens, and the codes.
    """
    random_state = random.Random(seed)
    ids = tokenizer.encode(text())
    while len(ids) < tokens:
        ids = ids + ids
    needles, statements = [], []
    places = random_state.sample(PLACES, count)
    for index, (statement, thing) in enumerate(random_state.sample(WORDINGS, count)):
        place, depth = places[index], (index + random_state.uniform(0.2, 0.8)) / count
        code = str(random_state.randrange(1_000_000, 10_000_000))
        asked = thing.format(place=place)
        needles.append(Needle(place, code, depth, _question(asked)))
        said = statement.format(place=place, code=code)
        statements.append(tokenizer.encode(f"\n\n{said}\n\n", add_bos=False))
    room = tokens - sum(map(len, statements))
    result: list[int] = []
    taken = 0
    for needle, statement in zip(needles, statements, strict=True):
        until = int(needle.depth * room)
        result += ids[taken:until] + statement
        taken = until
    return result + ids[taken:room], needles


def _question(asked: str) -> str:
    return f"\n\nQuestion: What is {asked}?\nAnswer: {asked[0].upper()}{asked[1:]} is"

"""Long real documents with codes hidden in them, and questions about the codes."""

import dataclasses
import random
from pydoc_data.topics import topics

from kvjax.models import Tokenizer

PLACES = ("Nantucket", "Aberdeen", "Lisbon", "Valparaiso", "Kyoto", "Tromso", "Dakar", "Quebec")
STATEMENTS = (
    "The secret access code for the {place} vault is {code}. Remember it.",
    "Note for the staff: the {place} vault opens with the code {code}.",
    "Whoever goes to the {place} vault needs its access code, which is {code}.",
)
QUESTION = (
    "\n\nQuestion: What is the access code for the {place} vault?\n"
    "Answer: The access code for the {place} vault is"
)


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
      count: codes in it, at most as many as there are places.
      seed: of places, codes, phrasing and depths.

    Returns:
      Its tokens, and the codes.
    """
    random_state = random.Random(seed)
    ids = tokenizer.encode(text())
    while len(ids) < tokens:
        ids = ids + ids
    needles, statements = [], []
    for index, place in enumerate(random_state.sample(PLACES, count)):
        depth = (index + random_state.uniform(0.2, 0.8)) / count
        code = str(random_state.randrange(1_000_000, 10_000_000))
        needles.append(Needle(place, code, depth, QUESTION.format(place=place)))
        said = random_state.choice(STATEMENTS).format(place=place, code=code)
        statements.append(tokenizer.encode(f"\n\n{said}\n\n", add_bos=False))
    room = tokens - sum(map(len, statements))
    result: list[int] = []
    taken = 0
    for needle, statement in zip(needles, statements, strict=True):
        until = int(needle.depth * room)
        result += ids[taken:until] + statement
        taken = until
    return result + ids[taken:room], needles

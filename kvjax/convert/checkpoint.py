"""A model on the device as a checkpoint again."""

import jax
import numpy as np

from kvjax.model import Model
from kvjax.models import Checkpoint


def checkpoint_of(model: Model) -> Checkpoint:
    """A model's weights by name, as float32 arrays in this process's memory.

    Args:
      model: whose weights, configuration and tokenizer to take.
    """
    weights = {
        ".".join(str(part.key) for part in path): np.asarray(leaf, np.float32)
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.params)
    }
    return Checkpoint(model.config, weights, model.tokenizer, model.name)

"""Exports: a Hugging Face directory that `AutoModelForCausalLM` and `AutoTokenizer` load, made from a learner or a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from agentrl.learner import checkpoint
from agentrl.learner.learner import Learner
from agentrl.learner.model_directory import copy_tokenizer

__all__ = ["export", "export_checkpoint"]

# gather() closes a bucket at this size; here only to bound memory on the way.
BUCKET_BYTES = 1 << 28

_CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags: [reinforcement-learning, agentrl]
---

# {title}

A policy trained with agentrl: {origin}. Weights in {dtype}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{title}")
tokenizer = AutoTokenizer.from_pretrained("{title}")
```
"""


def export(learner: Learner, out_dir: Path) -> Path:
    """Write the learner's weights, as they are published. Collective; rank 0 writes."""
    buckets = list(learner.gather(BUCKET_BYTES))
    if learner.ranks.first:
        weights = {name: tensor for bucket in buckets for name, tensor in bucket}
        _write(weights, learner.model_dir, out_dir, dtype=learner.recipe.model.dtype, origin=f"run {learner.recipe.name}")
    return out_dir


def export_checkpoint(checkpoint_dir: Path, out_dir: Path) -> Path:
    """Write the weights of a checkpoint, which holds all that is needed. No process group, no recipe.

    Raises:
        CheckpointError: it is not a checkpoint, or one of its files was altered.
    """
    manifest = checkpoint.read(checkpoint_dir)
    manifest.verify()
    origin = f"checkpoint {manifest.id}, step {manifest.step}"
    return _write(checkpoint.read_weights(manifest), manifest.model_dir, out_dir, dtype=manifest.dtype, origin=origin)


def _write(weights: Mapping[str, Tensor], model_dir: Path, out_dir: Path, *, dtype: str, origin: str) -> Path:
    out_dir.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict({name: tensor.to(getattr(torch, dtype)) for name, tensor in weights.items()}, out_dir)
    copy_tokenizer(model_dir, out_dir, model=True)
    config = json.loads((model_dir / "config.json").read_text())
    config.pop("torch_dtype", None)  # the name of older versions
    (out_dir / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
    (out_dir / "README.md").write_text(_CARD.format(title=out_dir.name, origin=origin, dtype=dtype))
    return out_dir

"""Checkpoints: written into a temporary directory by all ranks, committed by one rename, verified before they are believed.

    checkpoints/i0001-s00000050/        learner incarnation 1, step 50
        manifest.json                   id, step, mark in the journal, size and sha256 of every other file
        state/                          torch.distributed.checkpoint: trained weights and optimizer moments of the policy and the critic,
                                        controllers, random state; for any number of ranks
        model/                          model configuration and tokenizer: with state/ enough for an export. With LoRA state/ holds
                                        the adapters only, and `base.json` says which model they belong to

`write` captures the state; between it and `commit` the caller brings the journal to the disk, up to the mark that `commit` puts into the
manifest. A crash at any point leaves either the whole checkpoint or a temporary directory that `prune` removes. All ranks write into
the same directory: ranks on several machines need one they share.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM

from agentrl.buffer_api import JournalMark
from agentrl.errors import CheckpointError, ConfigError
from agentrl.faults import point
from agentrl.learner.backbone import load_pretrained
from agentrl.learner.learner import Learner
from agentrl.learner.lora import Adapters, base_fingerprint
from agentrl.learner.model_directory import copy_tokenizer
from agentrl.learner.state import Controllers

__all__ = ["Manifest", "Pending", "abandon", "commit", "identifier", "load", "manifests", "newer", "prune", "read", "read_weights", "write"]

log = logging.getLogger(__name__)

FORMAT = 1
_MANIFEST, _STATE, _MODEL, _BASE, _TEMPORARY = "manifest.json", "state", "model", "base.json", ".tmp-"

_CRITIC = "critic_"  # before the names of its entries in the state

# Entries a checkpoint may be without: those of versions before them, and of learners on another device, are.
_OPTIONAL = frozenset({"controllers", "random_cuda"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a committed checkpoint says of itself."""

    path: Path
    id: str
    step: int
    learner_incarnation: int
    mark: JournalMark
    dtype: str  # of published and exported weights; the state itself is float32
    files: Mapping[str, tuple[int, str]]  # path within the checkpoint -> bytes, sha256

    def for_rollback(self) -> dict[str, Any]:
        """What the replay buffer needs to know of it."""
        consumed = [list(interval) for interval in self.mark.consumed]
        return {
            "id": self.id,
            "step": self.step,
            "learner_incarnation": self.learner_incarnation,
            "offset": self.mark.offset,
            "consumed": consumed,
        }

    @property
    def model_dir(self) -> Path:
        """Model configuration and tokenizer."""
        return self.path / _MODEL

    def verify(self) -> None:
        """Raises CheckpointError where a file is missing, torn or altered."""
        for name, (size, digest) in self.files.items():
            file = self.path / name
            if not file.is_file() or file.stat().st_size != size:
                raise CheckpointError(f"{file}: missing, or not the {size} bytes its manifest names")
            if _sha256(file) != digest:
                raise CheckpointError(f"{file}: its content does not match its manifest: it was altered")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pending:
    """A checkpoint that is written and not yet committed."""

    temporary: Path
    path: Path
    step: int
    learner_incarnation: int
    dtype: str


def write(learner: Learner, root: Path, step: int, learner_incarnation: int) -> Pending:
    """Write the state at this step boundary. Collective; when it returns, every rank's part is in its file.

    Raises:
        CheckpointError: a rank could not write.
    """
    path = root / identifier(learner_incarnation, step)
    pending = Pending(
        temporary=root / f"{_TEMPORARY}{path.name}", path=path, step=step, learner_incarnation=learner_incarnation, dtype=learner.recipe.model.dtype
    )
    try:
        if learner.ranks.first:
            shutil.rmtree(pending.temporary, ignore_errors=True)
            copy_tokenizer(learner.model_dir, pending.temporary / _MODEL, model=True)
            _tell_base(learner, pending.temporary / _MODEL)
        learner.ranks.barrier()
        save_state(_state(learner), checkpoint_id=pending.temporary / _STATE)
    except (OSError, CheckpointException) as error:  # the second is not even an Exception
        raise CheckpointError(f"{path} could not be written: {error}") from error
    learner.ranks.barrier()
    return pending


def commit(pending: Pending, mark: JournalMark) -> Manifest:
    """Make a written checkpoint valid. Called by rank 0 alone, after the journal is on the disk up to `mark`.

    Raises:
        CheckpointError: there is a checkpoint of this incarnation and step already.
    """
    if pending.path.exists():
        raise CheckpointError(f"{pending.path} exists: a learner incarnation writes each step once")
    names = sorted(file.relative_to(pending.temporary).as_posix() for file in pending.temporary.rglob("*") if file.is_file())
    manifest = Manifest(
        path=pending.path,
        id=pending.path.name,
        step=pending.step,
        learner_incarnation=pending.learner_incarnation,
        mark=mark,
        dtype=pending.dtype,
        files={name: _seal(pending.temporary / name) for name in names},
    )
    told = asdict(manifest) | {"format": FORMAT, "path": None, "created_s": time.time(), "torch": torch.__version__}
    (pending.temporary / _MANIFEST).write_text(json.dumps(told, indent=1))
    for place in (_MANIFEST, _STATE, _MODEL, "."):
        _sync(pending.temporary / place)
    point("checkpoint.written")
    pending.temporary.rename(pending.path)
    _sync(pending.path.parent)
    point("checkpoint.committed")
    return manifest


def identifier(learner_incarnation: int, step: int) -> str:
    """The name of a checkpoint and of its directory."""
    return f"i{learner_incarnation:04d}-s{step:08d}"


def manifests(root: Path, *, until: int | None = None) -> Iterator[Manifest]:
    """The checkpoints whose files are whole, newest first: by learner incarnation, then step. Others are passed over with a warning.

    Files are verified when the checkpoint's turn comes: who takes the first reads only that one.

    Args:
        until: leave out those of later steps.
    """
    for path in (path for path in _committed(root) if until is None or _age(path)[1] <= until):
        try:
            manifest = read(path)
            manifest.verify()
        except CheckpointError as error:
            log.warning("checkpoint %s is passed over: %s", path.name, error)
            continue
        yield manifest


def read(path: Path) -> Manifest:
    """The manifest of a committed checkpoint. Does not verify the other files.

    Raises:
        CheckpointError: there is none, or it is of another format.
    """
    try:
        told = json.loads((path / _MANIFEST).read_text())
        if told["format"] != FORMAT:
            raise CheckpointError(f"{path}: format {told['format']}; this version reads {FORMAT}")
        return Manifest(
            path=path,
            id=told["id"],
            step=told["step"],
            learner_incarnation=told["learner_incarnation"],
            mark=JournalMark.from_plain(told["mark"]),
            dtype=told["dtype"],
            files={name: (size, digest) for name, (size, digest) in told["files"].items()},
        )
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is not a checkpoint: it has no {_MANIFEST}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / _MANIFEST} cannot be read: {error!r}") from error


def load(learner: Learner, manifest: Manifest) -> None:
    """Bring the learner to the state of a checkpoint written by any number of ranks. Collective.

    The manifest is one of `manifests`, which has verified the files. A checkpoint may hold more than the recipe has use for (a critic);
    controllers it does not have stay as they are.

    Raises:
        CheckpointError: it is a checkpoint of another model, or of a run without what the recipe trains.
    """
    held = {name.partition(".")[0] for name in _stored(manifest)}
    _require_fit(learner, manifest, held)
    state = {name: entry for name, entry in _state(learner).items() if name in held or name not in _OPTIONAL}
    try:
        load_state(state, checkpoint_id=manifest.path / _STATE)
    except (CheckpointException, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{manifest.path} does not fit the model in {learner.model_dir}: {error}") from error
    _restore_controllers(learner.state.controllers, state.get("controllers", {}))
    torch.set_rng_state(state["random"])
    if "random_cuda" in state:
        torch.cuda.set_rng_state(state["random_cuda"])
    for model in (learner.state.policy, learner.state.critic):
        for module in model.modules() if model is not None else ():
            if isinstance(module, FSDPModule):
                module.reshard()  # gathered copies of the old weights must not be used


def read_weights(manifest: Manifest) -> dict[str, Tensor]:
    """Full weights of the policy in float32 on the CPU, without a process group. Adapters are merged into the model they belong to.

    Raises:
        CheckpointError: that model is not where it was, or is another one now.
    """
    weights = {
        name.removeprefix("weights."): torch.empty(told.size)
        for name, told in _stored(manifest).items()
        if name.startswith("weights.") and isinstance(told, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it loads in a single process, as it is asked to
        load_state({"weights": weights}, storage_reader=FileSystemReader(manifest.path / _STATE), no_dist=True)
    base = _base(manifest)
    return weights if base is None else _merged(base, weights, manifest)


def prune(root: Path, keep: int, *, good_until: int | None = None) -> None:
    """Remove all but the newest `keep` checkpoints, and what crashes left behind.

    Args:
        good_until: the newest checkpoint of this step or an earlier one stays as well (without one, the oldest): a rollback may need it.
    """
    committed = _committed(root)
    kept = committed[:keep]
    if good_until is not None:
        kept += [path for path in committed if _age(path)[1] <= good_until][:1] or committed[-1:]
    abandon(root, [path.name for path in committed if path not in kept])


def newer(root: Path, than: Manifest) -> list[str]:
    """Identifiers of the checkpoints that are newer, newest first."""
    return [path.name for path in _committed(root) if _age(path) > _age(than.path)]


def abandon(root: Path, identifiers: Sequence[str]) -> None:
    """Remove these checkpoints, where they are there, and what crashes left behind."""
    for name in identifiers:
        if (root / name).exists():
            (root / name).rename(root / f"{_TEMPORARY}{name}")  # out of sight at once: half a checkpoint is never found
    for path in root.glob(f"{_TEMPORARY}*"):
        shutil.rmtree(path)


def _state(learner: Learner) -> dict[str, Any]:
    """The live tensors by name: saved from, and loaded into, in place."""
    state, ranks = learner.state, learner.ranks
    entries = _trained("", state.policy.named_weights(), state.optimizer)
    if state.critic is not None and state.critic_optimizer is not None:
        entries |= _trained(_CRITIC, state.critic.named_weights(), state.critic_optimizer)
    if ranks.device.type == "cuda":
        entries["random_cuda"] = torch.cuda.get_rng_state()
    kl_coefficient, scale = state.controllers.kl_coefficient, state.controllers.learning_rate_scale
    controllers = {"kl_coefficient": math.nan if kl_coefficient is None else kl_coefficient, "learning_rate_scale": scale}
    return entries | {
        "controllers": {name: torch.tensor(value, dtype=torch.float64) for name, value in controllers.items()},
        "random": torch.get_rng_state(),
    }


def _trained(prefix: str, named_weights: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.AdamW) -> dict[str, Any]:
    weights = dict(named_weights)
    return {
        f"{prefix}weights": {name: parameter.detach() for name, parameter in weights.items()},
        **{
            f"{prefix}{entry}": {name: optimizer.state[weight][entry] for name, weight in weights.items()}
            for entry in ("exp_avg", "exp_avg_sq", "step")
        },
    }


def _restore_controllers(controllers: Controllers, held: Mapping[str, Tensor]) -> None:
    """A coefficient is taken up where the run has an adaptive one, and had one when the checkpoint was written."""
    values = {name: tensor.item() for name, tensor in held.items()}
    controllers.learning_rate_scale = values.get("learning_rate_scale", controllers.learning_rate_scale)
    coefficient = values.get("kl_coefficient", math.nan)
    if controllers.kl_coefficient is not None and not math.isnan(coefficient):
        controllers.kl_coefficient = coefficient


def _stored(manifest: Manifest) -> dict[str, Any]:
    """What `state/` holds, by name."""
    return FileSystemReader(manifest.path / _STATE).read_metadata().state_dict_metadata


def _require_fit(learner: Learner, manifest: Manifest, held: set[str]) -> None:
    if learner.state.critic is not None and f"{_CRITIC}weights" not in held:
        raise CheckpointError(f"{manifest.path} has no critic, and the recipe trains one: start a new run, or take `critic` out of the recipe")
    base, adapters = _base(manifest), learner.state.policy.adapters
    if base is None and adapters is not None:
        raise CheckpointError(f"{manifest.path} holds all weights, and the recipe trains adapters: start a new run, or take out model.lora")
    if base is not None and adapters is None:
        raise CheckpointError(f"{manifest.path} holds LoRA adapters, and the recipe has no model.lora")
    if base is not None and adapters is not None and base.adapters != adapters:
        raise CheckpointError(f"{manifest.path} holds adapters {base.adapters} of {base.path}; the recipe makes {adapters}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Base:
    """The model that a checkpoint's adapters belong to: `base.json`."""

    path: str
    adapters: Adapters


def _tell_base(learner: Learner, directory: Path) -> None:
    if (adapters := learner.state.policy.adapters) is not None:
        (directory / _BASE).write_text(json.dumps(asdict(_Base(path=str(learner.model_dir.absolute()), adapters=adapters)), indent=1))


def _base(manifest: Manifest) -> _Base | None:
    file = manifest.model_dir / _BASE
    if not file.is_file():
        return None
    told = json.loads(file.read_text())
    return _Base(path=told["path"], adapters=Adapters(**told["adapters"]))


def _merged(base: _Base, adapters: Mapping[str, Tensor], manifest: Manifest) -> dict[str, Tensor]:
    try:
        weights = dict(load_pretrained(AutoModelForCausalLM, base.path, attention="eager").named_parameters())
    except ConfigError as error:
        raise CheckpointError(f"{manifest.path} holds LoRA adapters; the model they belong to is not in {base.path} any more: {error}") from error
    if base_fingerprint(weights.items()) != base.adapters.base:
        raise CheckpointError(f"{manifest.path} holds LoRA adapters; the model in {base.path} is not the one they were trained on")
    dtype = getattr(torch, manifest.dtype)  # that of the base in the learner: what is made here is what was published
    rounded = ((name, weight.detach().to(dtype).float()) for name, weight in weights.items())
    return dict(base.adapters.merged(rounded, adapters))


def _committed(root: Path) -> list[Path]:
    """Newest first."""
    return sorted((path for path in root.glob("i*-s*") if path.is_dir()), key=_age, reverse=True)


def _age(path: Path) -> tuple[int, int]:
    """(learner incarnation, step), as numbers: the digits of an incarnation grow in number after nine starts of a run."""
    incarnation, _, step = path.name.removeprefix("i").partition("-s")
    return int(incarnation), int(step)


def _seal(file: Path) -> tuple[int, str]:
    _sync(file)
    return file.stat().st_size, _sha256(file)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

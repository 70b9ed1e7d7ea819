"""The preparing program: makes what the recipe asks for, each part once per content, and says where it is.

prepare.factory ──> prepared/<key>/      tasks, corpus, tokenizer, ...
train_tokenizer ──> tokenizer/<key>/
architecture    ──> model/<key>/         random weights, tokenizer copied in
warm_start      ──> warm/<key>/          trained weights, tokenizer copied in
critic.path, algorithm.kl.reference      downloaded where they are names on the hub
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl import __version__
from agentrl.config.recipe import ModelRecipe, Recipe
from agentrl.data.tokenizer import train_tokenizer
from agentrl.errors import ConfigError
from agentrl.resolve import resolve
from agentrl.system.prepare import cache_key, file_digest, with_prepared
from agentrl.system.process import OnReady, ProcessSpec, StopSignal

__all__ = ["main"]

log = logging.getLogger(__name__)


def main(spec: ProcessSpec, on_ready: OnReady, stop: StopSignal) -> None:
    """Make everything; tells progress as {"what", "done", "of"} and at the end {"model_dir", "prepared", "critic", "reference"}."""
    recipe = Recipe.model_validate(spec.recipe)
    cache = Path(recipe.run.dir) / ".cache"

    def progress(what: str, done: int, of: int) -> None:
        on_ready({"what": what, "done": done, "of": of})

    from agentrl.learner.rehearsal import rehearse  # torch: here, and not in the driver

    rehearse(recipe.algorithm, critic=recipe.critic is not None)
    prepared = _prepared_files(recipe, cache, progress)
    if prepared is not None:
        recipe = with_prepared(recipe, prepared)
    model_dir = _model(recipe, cache, progress)
    if recipe.warm_start is not None:
        model_dir = _warm_started(recipe, model_dir, cache, progress)
    critic = _other(None if recipe.critic is None else recipe.critic.path, "critic.path")
    reference = _other(recipe.algorithm.kl.reference, "algorithm.kl.reference")
    on_ready({"model_dir": str(model_dir), "prepared": str(prepared) if prepared else None, "critic": critic, "reference": reference})


def _prepared_files(recipe: Recipe, cache: Path, progress: Callable[[str, int, int], None]) -> Path | None:
    if recipe.prepare is None:
        return None
    factory: Any = resolve(recipe.prepare.factory)
    sources = sorted(Path(inspect.getfile(factory)).parent.glob("*.py"))
    key = cache_key(recipe.prepare.factory, recipe.prepare.options, recipe.seed, file_digest(*sources))
    options = recipe.prepare.options
    progress("files", 0, 1)
    made = _once(cache / "prepared" / key, lambda out: factory(out, seed=recipe.seed, **options))
    progress("files", 1, 1)
    return made


def _model(recipe: Recipe, cache: Path, progress: Callable[[str, int, int], None]) -> Path:
    model = recipe.model
    if model.path is not None:
        return _local_model(model.path, "model.path")
    architecture = model.architecture
    assert architecture is not None
    tokenizer = _tokenizer(model, cache)
    parts = [architecture.model_dump(), model.dtype, recipe.seed, _directory_digest(tokenizer), _source_digest("agentrl.learner.build_model")]
    progress("model", 0, 1)

    def make(out: Path) -> None:
        from agentrl.learner.build_model import make_model  # torch: only where something is made

        make_model(architecture, tokenizer, out, recipe.seed, model.dtype)

    made = _once(cache / "model" / cache_key(*parts), make)
    progress("model", 1, 1)
    return made


def _other(path: str | None, key: str) -> str | None:
    return None if path is None else str(_local_model(path, key))


def _local_model(path: str, key: str) -> Path:
    """A directory as it is; anything else is a hub's name and is downloaded to the hub's own cache."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(f"{key} {path!r} is neither a directory nor a model that can be downloaded: {error}") from error


def _tokenizer(model: ModelRecipe, cache: Path) -> Path:
    training = model.train_tokenizer
    if training is not None:
        key = cache_key(training.vocab_size, file_digest(Path(training.corpus)), file_digest(Path(inspect.getfile(train_tokenizer))))
        return _once(cache / "tokenizer" / key, lambda out: train_tokenizer(training, out))
    assert model.tokenizer is not None
    return _local_model(model.tokenizer, "model.tokenizer")


def _warm_started(recipe: Recipe, model_dir: Path, cache: Path, progress: Callable[[str, int, int], None]) -> Path:
    settings = recipe.warm_start
    assert settings is not None
    rows = Path(settings.rows)
    sources = [_source_digest("agentrl.learner.warm_start"), file_digest(rows)]
    key = cache_key(settings.model_dump(exclude={"rows", "threads"}), _directory_digest(model_dir), sources, recipe.seed, __version__)

    def train(out: Path) -> None:
        def told(step: int, steps: int, loss: float) -> None:
            progress(f"warm start, loss {loss:.3f}", step, steps)

        from agentrl.learner.warm_start import warm_start  # torch: only where something is made

        warm_start(model_dir, rows, settings, out, recipe.seed, told)

    return _once(cache / "warm" / key, train)


def _once(directory: Path, make: Callable[[Path], object]) -> Path:
    """Make `directory` unless it is there: in a temporary place, committed by a rename, so that half of it is never found."""
    if directory.exists():
        log.info("found %s", directory)
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f"{directory.name}.tmp-"))
    make(temporary)
    try:
        temporary.rename(directory)
    except OSError:  # somebody else made the same in the meantime
        if not directory.exists():
            raise
        shutil.rmtree(temporary)
    return directory


def _source_digest(module: str) -> str:
    """Of a module's file, without importing it."""
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    return file_digest(Path(found.origin))


def _directory_digest(directory: Path) -> str:
    return file_digest(*sorted(path for path in directory.iterdir() if path.is_file()))

"""A model's files: a directory, or a snapshot in the Hugging Face cache, downloaded where it is allowed. Weights are .safetensors, nothing else."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retriever.encoders.encoder import EncoderFault

__all__ = ["CONFIG", "TOKENIZER", "ModelFiles"]

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
WANTED = ["*.json", "model*.safetensors"]  # patterns of fnmatch, whose * crosses /
UNWANTED = ["onnx/*", "openvino/*", "gguf/*", "coreml/*"]
READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFiles:
    """Where a model lies, with the files that every model needs."""

    model: str  # as a record names it: the id, or the absolute path
    directory: Path

    @classmethod
    def locate(cls, model: str) -> ModelFiles:
        """The files of a directory or of a hub id. What the cache has is taken as it is; only what it lacks is downloaded.

        Raises:
            EncoderFault: there is no such model, or a file is missing that every model needs.
        """
        path = Path(model).expanduser()
        if path.is_dir():
            found = cls(model=str(path.resolve()), directory=path.resolve())
            if missing := found.missing():
                raise EncoderFault(f"{path} has no {missing}")
            return found
        if path.is_absolute() or model.startswith((".", "~")):
            raise EncoderFault(f"there is no directory {model}")
        return cls(model=model, directory=_snapshot(model))

    def missing(self) -> str | None:
        """What a model needs and this one lacks, with what to do about it."""
        if not (self.directory / CONFIG).is_file():
            return f"{CONFIG}: it is no model of transformers"
        if not (self.directory / TOKENIZER).is_file():
            return f"{TOKENIZER}: write it with transformers, AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        if not self.weights():
            return "model.safetensors: convert its weights with transformers, AutoModel.from_pretrained(...).save_pretrained(...)"
        return None

    def weights(self) -> list[Path]:
        """Its .safetensors files, by name."""
        return sorted(self.directory.glob("model*.safetensors"))

    def weights_bytes(self) -> int:
        """Of the .safetensors files."""
        return sum(path.stat().st_size for path in self.weights())

    def weights_sha256(self) -> str:
        """Over the bytes of the .safetensors files: of one file, what sha256sum prints."""
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(READ_BYTES))
        for path in self.weights():
            with path.open("rb", buffering=0) as file:
                while read := file.readinto(buffer):
                    digest.update(buffer[:read])
        return digest.hexdigest()

    def json(self, name: str) -> Any | None:
        """A JSON file of the model, None where it has none.

        Raises:
            EncoderFault: it is not JSON.
        """
        path = self.directory / name
        if not path.is_file():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise EncoderFault(f"{path} is not JSON: {error}") from error

    def config(self) -> dict[str, Any]:
        """config.json.

        Raises:
            EncoderFault: it is no object.
        """
        config = self.json(CONFIG)
        if not isinstance(config, dict):
            raise EncoderFault(f"{self.directory / CONFIG} is no JSON object")
        return config


def _snapshot(model: str) -> Path:
    """The snapshot of a hub id, complete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns: dict[str, Any] = {"allow_patterns": WANTED, "ignore_patterns": UNWANTED}
    try:
        cached = Path(snapshot_download(model, local_files_only=True, **patterns))
        if ModelFiles(model=model, directory=cached).missing() is None:
            return cached
    except (LocalEntryNotFoundError, HFValidationError):
        pass  # the download below says what is wrong
    try:
        found = Path(snapshot_download(model, **patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise EncoderFault(
            f"{model} is no directory, and the Hugging Face cache does not have it and could not download it ({error}).\n"
            f"Where there is a network: hf download {model} --include '*.json' 'model*.safetensors', without HF_HUB_OFFLINE;"
            " or name the directory of a copy"
        ) from error
    if missing := ModelFiles(model=model, directory=found).missing():
        raise EncoderFault(f"{model} has no {missing}")
    return found

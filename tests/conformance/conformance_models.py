"""The models that the conformance suite serves: three sets of weights of one tiny Qwen2, with a byte-level tokenizer.

    python tests/conformance/conformance_models.py DIRECTORY

writes them into DIRECTORY/0, /1 and /2, the same bytes every time, for a server that the suite is to be attached to.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script, it finds the writer of weights there

from tiny_qwen2 import write_tiny_qwen2

__all__ = ["CONTEXT_TOKENS", "EOS", "MODELS", "VOCABULARY", "write_models", "written_models"]

CONTEXT_TOKENS = 2048  # long enough for a request that is still running whenever a test wants to see it run
VOCABULARY = 320
EOS = 1
MODELS = 3
_SPECIAL = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>")
# Merges besides the bytes: tags are stops of search agents, and their pieces make stops that several tokens spell.
_WORDS = ("</search>", "</answer>", "king", " who", " is", " the")


def write_models(directory: Path) -> list[Path]:
    """Model directories with the same architecture and tokenizer, and other weights each."""
    return [_write_model(path, seed) for seed, path in enumerate(written_models(directory))]


def written_models(directory: Path) -> list[Path]:
    """Where `write_models` puts them."""
    return [directory / str(seed) for seed in range(MODELS)]


def _write_model(directory: Path, seed: int) -> Path:
    sizes = {"vocabulary": VOCABULARY, "hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 96, "context_tokens": CONTEXT_TOKENS}
    write_tiny_qwen2(directory, **sizes, seed=seed, scale=0.15)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"bos_token_id": EOS, "pad_token_id": 0}))
    _write_tokenizer(directory)
    return directory


def _write_tokenizer(directory: Path) -> None:
    """Special tokens, all bytes, then merges: built without training, so its ids can be told in advance."""
    vocabulary = {token: index for index, token in enumerate((*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    merges: list[tuple[str, str]] = []
    for word in _WORDS:
        pieces = list(word.replace(" ", "Ġ"))
        while len(pieces) > 1:
            pair = (pieces[0], pieces[1])
            if pair not in merges:
                merges.append(pair)
                vocabulary.setdefault("".join(pair), len(vocabulary))
            pieces[:2] = ["".join(pair)]
    assert len(vocabulary) <= VOCABULARY
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<pad>", "model_max_length": CONTEXT_TOKENS}
    (directory / "tokenizer_config.json").write_text(json.dumps(told | {"clean_up_tokenization_spaces": False}))


if __name__ == "__main__":
    for path in write_models(Path(sys.argv[1])):
        print(path)

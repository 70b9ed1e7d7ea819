from pathlib import Path

import pytest
from learner_scene import tiny_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with random weights."""
    return tiny_model(tmp_path_factory.mktemp("tiny"))

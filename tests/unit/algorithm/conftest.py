"""What tests of the formulas share: the outputs of verl 0.9.1's own functions, float64."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

DATA = Path(os.environ.get("AGENTRL_TEST_DATA", Path(__file__).parents[3].parent / "shared" / "data"))
ORACLE = DATA / "oracle" / "verl_0.9.1_seed0.npz"


@pytest.fixture(scope="session")
def oracle() -> dict[str, torch.Tensor]:
    """Every array of the file, inputs and outputs."""
    if not ORACLE.is_file():
        pytest.skip(f"no oracle at {ORACLE}: set AGENTRL_TEST_DATA")
    with np.load(ORACLE) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}

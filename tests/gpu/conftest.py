"""The kernel variants chosen for this GPU serve the tests too: choosing them takes minutes."""

from __future__ import annotations

import os

import pytest
import torch

from megatron_ext.ops.kda import tuned


@pytest.fixture(scope="session", autouse=True)
def chosen_variants() -> None:
    """Before the first test imports fla. Does nothing where every test here is skipped."""
    if torch.cuda.is_available():
        for name, value in tuned.variables(torch.cuda.get_device_name()).items():
            os.environ.setdefault(name, value)

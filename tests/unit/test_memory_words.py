"""Which errors are told as memory that ran out."""

from __future__ import annotations

import errno

import pytest
import torch

from megatron_ext.train.memory import is_out_of_memory


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (torch.OutOfMemoryError("in other words"), True),
        (MemoryError(), True),
        (OSError(errno.ENOMEM, "fork"), True),
        (OSError(errno.ENOENT, "no such file"), False),
        (RuntimeError("shapes do not fit"), False),
        (ValueError("out of memory"), False),
    ],
    ids=repr,
)
def test_an_allocation_that_failed_is_told_from_other_errors(
    error: Exception, wanted: bool
) -> None:
    assert is_out_of_memory(error) is wanted

"""Every parameter is in exactly one group, and vectors and marked parameters are not decayed."""

from __future__ import annotations

import torch
from torch import nn

from megatron_ext.optim import groups


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)])
        self.conv = nn.Parameter(torch.zeros(8, 4))
        self.conv.no_weight_decay = True
        self.A_log = nn.Parameter(torch.zeros(2))
        self.frozen = nn.Parameter(torch.zeros(5, 5), requires_grad=False)


def test_groups_are_a_partition_with_a_golden_list_of_names() -> None:
    decayed, spared = groups.parameter_groups([Model()])
    assert [n for n, _ in decayed.parameters] == ["layers.0.weight", "layers.1.weight"]
    assert [n for n, _ in spared.parameters] == ["conv", "A_log", "layers.0.bias", "layers.1.bias"]


def test_megatron_core_gets_the_same_rule() -> None:
    model = Model()
    ((key, override),) = groups.config_overrides().items()
    assert override == {"wd_mult": 0.0}
    spared = {name for name, _ in groups.parameter_groups([model])[1].parameters}
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert key.matches(param, name) == (name in spared)


def test_table_joins_layers_and_counts_everything() -> None:
    table = groups.group_table([Model()])
    assert "decayed: 2 tensors, 24 parameters" in table
    assert "not decayed: 4 tensors, 42 parameters" in table
    assert "frozen: 1 tensors, 25 parameters" in table
    assert sum("layers.*.weight" in line and "x 2" in line for line in table.splitlines()) == 1


def test_names_of_several_chunks_stay_apart() -> None:
    decayed, _ = groups.parameter_groups([Model(), Model()])
    assert len({name for name, _ in decayed.parameters}) == 4

"""Initialising whole models: every parameter, by logical name, stock modules included."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from megatron_ext.layers.initializers import Constant, Normal
from megatron_ext.model.init import fill, initialize
from tests.support.one_rank import one_rank, small_config


@pytest.fixture(scope="module")
def groups():
    with one_rank() as collection:
        yield collection


def stock_model(groups, *, num_layers=2):
    config = small_config(
        num_layers=num_layers, params_dtype=torch.float32, init_method_std=0.03, hidden_size=32
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=128,
        max_sequence_length=16,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
        pg_collection=groups,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    return model


def test_every_parameter_is_drawn_under_its_logical_name(groups):
    model = stock_model(groups)
    initialize([model], seed=5)
    for name, parameter in model.named_parameters():
        expected = torch.empty_like(parameter)
        initializer = Normal(0.03) if parameter.ndim > 1 else Constant(1.0)
        # linear_fc1 is a factory of two logical halves in checkpoints: together they are the whole.
        fill(
            expected,
            initializer,
            seed=5,
            name=name,
            global_shape=parameter.shape,
            offset=[0] * parameter.ndim,
        )
        assert torch.equal(parameter, expected), name


def test_layers_differ_and_do_not_depend_on_how_many_there_are(groups):
    short, long = stock_model(groups, num_layers=1), stock_model(groups, num_layers=3)
    initialize([short], seed=5)
    initialize([long], seed=5)
    first, later = (long.decoder.layers[i].mlp.linear_fc2.weight for i in (0, 2))
    assert torch.equal(short.decoder.layers[0].mlp.linear_fc2.weight, first)
    assert not torch.equal(first, later)


def test_a_parameters_own_initializer_wins(groups):
    model = stock_model(groups)
    model.output_layer.weight.initializer = Constant(0.25)
    initialize([model], seed=5)
    assert torch.equal(model.output_layer.weight, torch.full((128, 32), 0.25))


def test_a_parameter_outside_the_sharded_state_dict_is_an_error(groups):
    model = stock_model(groups)
    model.decoder.layers[0].forgotten = torch.nn.Parameter(torch.zeros(3))
    model.decoder.layers[0].sharded_state_dict = _without(model.decoder.layers[0], "forgotten")
    with pytest.raises(RuntimeError, match=r"decoder\.layers\.0\.forgotten"):
        initialize([model], seed=5)


def _without(layer, name):
    original = layer.sharded_state_dict

    def shortened(*arguments):
        return {key: value for key, value in original(*arguments).items() if name not in key}

    return shortened

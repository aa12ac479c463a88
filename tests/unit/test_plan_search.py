"""The search proposes layouts that are allowed, fit, and are in order; its file is checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.config.compose import compose
from megatron_ext.errors import ConfigError
from megatron_ext.plan.calibration import load_calibration
from megatron_ext.plan.cluster import Cluster, load_cluster
from megatron_ext.plan.search import candidates, found_table, search

NANO = ("run.mode=plan", "model=nano", "data=sample", "train.batch_tokens=16384")
EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "clusters" / "h200_16.json"


def cluster(**changes: float) -> Cluster:
    values: dict = {
        "gpus": 4,
        "gpus_per_node": 2,
        "memory_gib": 100,
        "reserved_gib": 10,
        "in_node_gbs": 300,
        "between_nodes_gbs": 30,
    }
    return Cluster(**(values | changes))


def test_proposals_are_allowed_fit_and_come_quickest_first() -> None:
    config = compose([*NANO])
    found, allowed, light = search(config, 384, cluster(), load_calibration(None))
    assert len(found) == 12  # four of each kind of recomputation
    assert light == allowed  # nano fits anywhere
    assert [one.seconds for one in found] == sorted(one.seconds for one in found)
    for one in found:
        composed = compose([*NANO, *one.words.split(), "plan.world_size=4"])
        assert composed.parallel == one.config.parallel
        assert one.config.parallel.tensor <= 2
    text = found_table(found, allowed, light, cluster=cluster())
    assert text.splitlines()[2].endswith(found[0].words)


def test_every_candidate_uses_all_gpus_and_no_two_are_alike() -> None:
    found = list(candidates(compose([*NANO]), cluster()))
    assert len({str((one.parallel, one.train.recompute)) for one in found}) == len(found)
    for one in found:
        parallel = one.parallel
        assert 4 % (parallel.tensor * parallel.pipeline * parallel.context) == 0
        assert 4 % (parallel.expert * parallel.expert_tensor * parallel.pipeline) == 0


def test_a_cluster_with_too_little_memory_says_that_nothing_fits() -> None:
    small = cluster(memory_gib=1.001, reserved_gib=1)
    found, allowed, light = search(compose([*NANO]), 384, small, load_calibration(None))
    assert found == []
    assert "0 of them fit" in found_table(found, allowed, light, cluster=small)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": 0}, "gpus=0: must be whole and above 0"),
        ({"gpus": 2.5}, "gpus=2.5: must be whole"),
        ({"price": 1}, "allowed one object with gpus, gpus_per_node"),
    ],
)
def test_a_wrong_cluster_file_says_what_is_allowed(
    change: dict, message: str, tmp_path: Path
) -> None:
    good = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    assert load_cluster(str(EXAMPLE)).usable_gib == 129
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(good | change), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_cluster(str(path))


def test_a_search_without_machines_is_an_error_of_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"plan\.search=true: needs plan\.cluster=FILE"):
        compose([*NANO, "plan.search=true"])

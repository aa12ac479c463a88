"""The Kubernetes example says one thing: its words compose, and fit what surrounds them."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml

from launch.command import rank_command, world_size
from megatron_ext.config.compose import compose
from megatron_ext.config.schema import RunConfig
from megatron_ext.errors import FINAL, STOPPED
from tests.support.runs import ROOT

MANIFEST = ROOT / "examples" / "kubernetes" / "jobset.yaml"


@pytest.fixture(scope="module")
def jobset() -> dict[str, Any]:
    return dict(yaml.safe_load(MANIFEST.read_text(encoding="utf-8")))


def job(jobset: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    return dict(replicated["template"]["spec"])


def container(jobset: dict[str, Any]) -> dict[str, Any]:
    (only,) = job(jobset)["template"]["spec"]["containers"]
    return dict(only)


def words(jobset: dict[str, Any], index: int) -> list[str]:
    """The arguments of a host, as Kubernetes fills them in."""
    return [arg.replace("$(JOB_COMPLETION_INDEX)", str(index)) for arg in container(jobset)["args"]]


def run(jobset: dict[str, Any], index: int) -> RunConfig:
    return compose(words(jobset, index), world_size=world_size)


def host_name(jobset: dict[str, Any], index: int) -> str:
    """JobSet: <set>-<replicated job>-<number of the job>-<index of the pod>.<subdomain>."""
    network = jobset["spec"]["network"]
    assert network["enableDNSHostnames"]
    (replicated,) = jobset["spec"]["replicatedJobs"]
    return f"{jobset['metadata']['name']}-{replicated['name']}-0-{index}.{network['subdomain']}"


def test_it_is_a_jobset_of_one_indexed_job(jobset: dict[str, Any]) -> None:
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert job(jobset)["completionMode"] == "Indexed"
    assert container(jobset)["command"] == ["bash", "launch/local.sh"]
    assert (ROOT / "launch" / "local.sh").is_file()


def test_hosts_and_gpus_are_those_of_the_launch(jobset: dict[str, Any]) -> None:
    launch = run(jobset, 0).launch
    assert job(jobset)["completions"] == job(jobset)["parallelism"] == launch.nodes
    assert container(jobset)["resources"]["limits"]["nvidia.com/gpu"] == launch.ranks_per_node


@pytest.mark.parametrize("index", [0, 1])
def test_hosts_meet_at_the_first(jobset: dict[str, Any], index: int) -> None:
    config = run(jobset, index)
    assert config.launch.host == host_name(jobset, 0)
    assert config.launch.address == host_name(jobset, index)
    command = rank_command(config, [], ranks=8, launch="mini", folder=Path("jobs"))
    assert f"is_host={int(index == 0)},join_timeout=1800" in command


def test_endings_that_would_come_again_are_not_started_again(jobset: dict[str, Any]) -> None:
    (rule,) = job(jobset)["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == container(jobset)["name"]
    # A pod that is evicted ends with STOPPED, and its run is to go on elsewhere.
    assert {*rule["onExitCodes"]["values"]} == {*FINAL} - {STOPPED}
    assert job(jobset)["backoffLimit"] == 0
    (reaction,) = jobset["spec"]["failurePolicy"]["rules"]
    assert reaction == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}


def test_an_eviction_waits_for_the_save(jobset: dict[str, Any]) -> None:
    pod = job(jobset)["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
    assert pod["terminationGracePeriodSeconds"] > run(jobset, 0).launch.stop_seconds


def test_the_run_folder_is_on_a_volume_that_outlives_the_pod(jobset: dict[str, Any]) -> None:
    pod = job(jobset)["template"]["spec"]
    kinds = {volume["name"]: set(volume) - {"name"} for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: mount["name"] for mount in container(jobset)["volumeMounts"]}
    assert set(mounts.values()) == kinds.keys()
    folder = PurePosixPath(str(run(jobset, 0).run.dir))
    (mount,) = (name for path, name in mounts.items() if folder.is_relative_to(path))
    assert kinds[mount] == {"persistentVolumeClaim"}

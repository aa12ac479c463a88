"""Every layer and expert of a step for wandb: a table, a histogram and a picture.

A number an expert would be 82 432 keys at 92 layers of 896 experts; this is three, whatever the
size, and they are sent every so many steps (`logging.expert_interval`), at most `MOST` times a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.observe.depth_health import weight_matrix
from megatron_ext.observe.expert_load import Floats, LoadTable, relative_load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE = "layers/statistics"
HISTOGRAM = "layers/load_histogram"
LOAD_MAP = "layers/load_map"
DEPTH_MAP = "layers/depth_weights"
MOST = 200
_BINS = 64


def interval(expert_interval: int, *, total_steps: int) -> int:
    """A multiple of `expert_interval` so that a run sends at most about `MOST` times; 0: never."""
    if not expert_interval:
        return 0
    return expert_interval * max(1, math.ceil(total_steps / expert_interval / MOST))


def layer_media(table: LoadTable, statistics: Mapping[str, Floats]) -> dict[str, Any]:
    """What `wandb.Run.log` takes, by key."""
    import wandb

    from megatron_ext.observe.report.heat_maps import experts
    from megatron_ext.observe.report.svg import style

    names = list(statistics)
    rows = [
        [int(layer), *(_plain(statistics[name][place]) for name in names)]
        for place, layer in enumerate(table.layers)
    ]
    with style(salt=LOAD_MAP):
        picture = _picture(experts(table.layers, table.counts))
    load = relative_load(table.counts)
    return {
        TABLE: wandb.Table(columns=["layer", *names], data=rows),
        HISTOGRAM: wandb.Histogram(np_histogram=np.histogram(load[np.isfinite(load)], bins=_BINS)),
        LOAD_MAP: wandb.Image(picture, caption="load / mean of the layer, layers x experts"),
    }


def depth_media(record: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a `residual` part of a record: the picture of the weights over depth."""
    import wandb

    from megatron_ext.observe.report.heat_maps import depth
    from megatron_ext.observe.report.svg import style

    with style(salt=DEPTH_MAP):
        picture = _picture(depth(record["sublayers"], weight_matrix(record)))
    return {DEPTH_MAP: wandb.Image(picture, caption="mean weight, sublayers x sources")}


def _picture(figure: Figure) -> NDArray[np.uint8]:
    """The pixels of a figure, [height, width, 3]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.figure.set_dpi(150)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def _plain(value: np.float64) -> float | None:
    return float(value) if np.isfinite(value) else None

"""Speeds of a device and its links, from a file that says which of them were measured."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from megatron_ext.errors import ConfigError

H200 = Path(__file__).parent / "h200.json"


@dataclass(frozen=True)
class Calibration:
    """See `h200.json` for what each number means and where it is from.

    Attributes:
        bases: how each number was come by: measured, fitted, assumed, data sheet.
    """

    device: str
    memory_gib: float
    peak_tflops: float
    dense_tflops: float
    grouped_tflops: float
    fp32_tflops: float
    attention_tflops: float
    kda_ns: float
    kda_forward_ns: float
    kda_softplus_factor: float
    other_tbs: float
    memory_tbs: float
    gpus_per_node: float
    in_node_gbs: float
    between_nodes_gbs: float
    bases: dict[str, str]

    def assumed(self) -> list[str]:
        """Names of the numbers that nobody measured."""
        return [name for name, basis in self.bases.items() if basis == "assumed"]


NUMBERS = [field.name for field in fields(Calibration) if field.type == "float"]


def load_calibration(path: str | None) -> Calibration:
    """Read a calibration file; None: the H200's.

    Raises:
        ConfigError: it cannot be read, or a number is missing or not above 0.
    """
    file = H200 if path is None else Path(path)
    key = f"plan.calibration={file}"
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
        values = {name: float(read[name]["value"]) for name in NUMBERS}
        bases = {name: str(read[name]["basis"]) for name in NUMBERS}
        device = str(read["device"])
    except OSError as error:
        raise ConfigError(f"{key}: cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}: {error} is missing or wrong (allowed: `device`, and for each of "
            f"{', '.join(NUMBERS)} an object with `value` and `basis`, as in {H200.name})"
        ) from error
    wrong = [
        f"{key}: {name}={value:g}: must be above 0" for name, value in values.items() if value <= 0
    ]
    if wrong:
        raise ConfigError(wrong)
    return Calibration(device=device, bases=bases, **values)

"""What GPUs of a memory plan cost, and plans as rows in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.rundir import writing

if TYPE_CHECKING:
    from windtunnel.reports.memory_first_screen import Cost

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class GpuPrice:
    """The price of one GPU for an hour: of any, or by name."""

    gpu_hour: float | Mapping[str, float]
    """A number, or a table by the names of the bundled GPUs."""
    currency: str

    @classmethod
    def read(cls, price: Any, currency: str | None) -> GpuPrice | None:
        """A price as a number, a table by GPU, or the text of either ("2.49", "h100-sxm=2.49"); None for none.

        Raises ValueError for what is no price, and for a GPU that is not known.
        """
        from windtunnel.scenarios.economics import DEFAULT_CURRENCY
        from windtunnel.scenarios.schema import read_per_gpu
        from windtunnel.sim.deployment.gpu import load_gpu

        if price is None:
            return None
        try:
            value = read_per_gpu(price)
        except ValueError as error:
            raise ValueError(f"gpu_price = {price!r} {error}") from None
        numbers = value.values() if isinstance(value, Mapping) else (value,)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int | float) or not isfinite(number) or number < 0:
                raise ValueError(f"gpu_price must be a number of at least 0, or one by GPU, got {number!r}")
        if isinstance(value, Mapping):
            value = {load_gpu(str(name)).name: float(number) for name, number in value.items()}
        return cls(value, currency or DEFAULT_CURRENCY)

    def of(self, gpu: str, num_gpus: int) -> Cost | None:
        """What so many of them cost in an hour; None for one that the table lacks."""
        from windtunnel.reports.memory_first_screen import Cost

        each = self.gpu_hour.get(gpu) if isinstance(self.gpu_hour, Mapping) else self.gpu_hour
        return None if each is None else Cost(each * num_gpus, self.currency)


def write_csv(path: str | Path, rows: Rows) -> None:
    """Write rows, which all have the same keys, as CSV.  Raises OutputError if that cannot be done."""
    import csv

    from windtunnel.reports.files import atomic_writer

    with writing(Path(path)), atomic_writer(path) as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path: str | Path, rows: Rows) -> None:
    """The same as Parquet; a column of numbers and words (max_model_len 8192 and auto) is one of words."""
    import pyarrow as pa
    import pyarrow.parquet

    columns = {key: _column([row[key] for row in rows]) for key in rows[0]}
    with writing(Path(path)):
        pyarrow.parquet.write_table(pa.table(columns), path, compression="zstd")


def _column(values: Sequence[Any]) -> list[Any]:
    known = [value for value in values if value is not None]
    kinds = {str if isinstance(value, str) else bool if isinstance(value, bool) else float for value in known}
    if len(kinds) <= 1:
        return list(values)
    return [None if value is None else str(value) for value in values]

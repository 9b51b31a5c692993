"""The ranks as mpiexec gives them: MPI's own collectives through mpi4py, which carry float32 (MPI has no bfloat16)."""

from __future__ import annotations

from typing import Any

import numpy as np

from zcomm.errors import MissingExtra
from zcomm.transports.mpi_launcher import check_launcher

try:
    import mpi4py
    from mpi4py import MPI
except ImportError as error:
    raise MissingExtra(
        f"this launcher's ranks are MPI's, and mpi4py cannot be loaded ({error}); pip install 'zcomm-collectives[mpi]'"
    ) from error


class MpiWorld:
    """COMM_WORLD."""

    library = "mpi"
    own_dtypes: tuple[str, ...] = ("float32",)

    def __init__(self) -> None:
        name, version = MPI.get_vendor()
        vendor = f"{name} {'.'.join(map(str, version))}"
        check_launcher(MPI.COMM_WORLD.Get_size(), vendor)
        self.versions = f"mpi4py {mpi4py.__version__} with {vendor}"
        self.group = MPI.COMM_WORLD
        self.rank = self.group.Get_rank()
        self.size = self.group.Get_size()

    def array(self, values: np.ndarray, dtype: str) -> Any:
        """An array of its own."""
        return values.copy()

    def numpy(self, array: Any) -> np.ndarray:
        """The array itself."""
        return np.asarray(array)

    def own(self, collective: str, output: Any, input: Any) -> None:
        """MPI's own collective."""
        if collective == "all_reduce":
            self.group.Allreduce(MPI.IN_PLACE, output)
        elif collective == "all_gather":
            self.group.Allgather(input, output)
        else:
            self.group.Reduce_scatter_block(input, output)

    def synchronize(self) -> None:
        """The CPU has finished when a call returns."""

    def barrier(self) -> None:
        """Return when all ranks have come."""
        self.group.Barrier()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order."""
        values: list[Any] = self.group.allgather(value)
        return values

    def close(self) -> None:
        """MPI is finalised at the end of the process."""

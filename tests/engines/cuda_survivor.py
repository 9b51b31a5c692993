"""Run by test_cuda_mutants.py with a library and what it is of: ends well if all schedules give the right bytes."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import cuda_checks
import inputs
import numpy as np
from cuda_on_cpu import IN_STEP, RANDOM, REVERSE, CpuLauncher, Schedule, Sparse

from zcomm.buffers import DType
from zcomm.engines.cuda import CudaEngine
from zcomm.wire.registry import codec

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a planted fault may well crash it: no file of gigabytes is left
library = Path(sys.argv[1])
kernels, check = {
    "few": (cuda_checks.FEW_KERNELS, cuda_checks.check_few),
    "more": (cuda_checks.MORE_KERNELS, cuda_checks.check_more),
}[sys.argv[2]]
for max_ctas, schedule in ((3, IN_STEP), (1, Schedule(RANDOM, 4)), (2, Schedule(REVERSE, poison=0xFF))):
    check(CudaEngine(CpuLauncher(library, kernels, max_ctas, schedule)))

if check is cuda_checks.check_few:  # a count of more than 31 bits, of which the last CTAs run
    n, kind = 2**31 + 512, codec("int8")
    source, wire = Sparse(2 * n), Sparse(kind.nbytes(n))
    last = inputs.elements("normal", np.random.default_rng(1), 256, DType.FLOAT16)
    source.bytes[-512:] = last.view(np.uint8)
    launcher = CpuLauncher(library, kernels, 2**31 - 1, Schedule(n_last_ctas=2))
    CudaEngine(launcher).encode(kind, source.address, n, DType.FLOAT16, wire.address)
    assert wire.bytes[-256:].tobytes() == inputs.encode(cuda_checks.REFERENCE, kind, last, DType.FLOAT16)[-256:]

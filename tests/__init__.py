"""Before torch is loaded: a processor with AVX-512 computes as one with AVX2, to whose bits `tests/golden` compares."""

import os
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
if _CPUINFO.exists() and "avx512f" in _CPUINFO.read_text():
    os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
    os.environ.setdefault("MKL_ENABLE_INSTRUCTIONS", "AVX2")
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

"""The cases of all backends, here with the CPU's; `test_gpu` and tests/gpu run the same cases with Triton's."""

from tests.kernels import backend_cases

pytestmark = backend_cases.pytestmark
globals().update({name: case for name, case in vars(backend_cases).items() if name.startswith(("test_", "_fast"))})

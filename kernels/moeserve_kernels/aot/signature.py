"""From the arguments of a launch to what Triton compiles, as Triton itself does at run time.

A pointer or an int divisible by 16 is compiled as such, an int of 1 and a None as constants;
without that, loads are scalar and registers double. The functions that Triton calls at a launch are
called here, so a change of its rules is followed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime import jit

from moeserve_kernels.device.launch import Launch
from moeserve_kernels.device.targets import Target


@dataclass(frozen=True)
class Specialised:
    """What ``triton.compile`` takes.

    signature: argument -> "*bf16", "i32", "fp32", "tensordesc<bf16[128,64]>" or "constexpr".
    constants: index of an argument -> its value. attributes: index -> known divisibility.
    """

    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any]

    def aligned(self) -> set[str]:
        """Names of the arguments that are known to be divisible by 16."""
        names = list(self.signature)
        return {
            names[path[0]]
            for path, attributes in self.attributes.items()
            if ["tt.divisibility", 16] in attributes
        }


def gpu_target(target: Target) -> GPUTarget:
    """The target in Triton's terms."""
    return GPUTarget(target.kind, target.arch, target.warp_size)


def specialise(launch: Launch, target: Target) -> Specialised:
    """What is compiled for ``launch`` on ``target``.

    Raises:
        KeyError: an option or argument that neither the kernel nor the target knows.
        TypeError: an argument of the kernel is missing.
    """
    kernel = launch.kernel
    if not isinstance(kernel, jit.JITFunction):  # in a process that interprets
        kernel = jit.JITFunction(kernel.fn)
    backend = make_backend(gpu_target(target))
    binder = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
    keywords = {**launch.args, **launch.constants, **launch.options, "debug": False}
    bound, specialization, options = binder(**keywords)
    options, signature, constants, attributes = kernel._pack_args(
        backend, keywords, bound, specialization, options
    )
    return Specialised(signature, constants, attributes, dict(options.__dict__))

"""Compiles the Triton kernel for CUDA, which needs no GPU: what its interpreter takes, the compiler may not."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loadmaster.runtime.optim.kernels.blockwise_triton import step_kernel
from loadmaster.runtime.optim.triton_kernel import constants


def compiled(param: str, rule: int, *, coded: bool = True, captured: bool = False) -> str:
    fixed = constants(
        rule=rule, block=256, coded=coded, nesterov=False, stochastic=param == "*bf16", bf16=param == "*bf16",
        captured=captured,
    )  # fmt: skip
    signature = dict.fromkeys(("param", "grad"), param) | {
        "first": "*i8" if coded else "*fp32", "second": "*u8" if coded else "*fp32",
        **dict.fromkeys(("first_scale", "second_scale", "scalars", "step_count"), "*fp32"),
        **dict.fromkeys(("numel", "first_block", "seed", "key"), "i32"), **dict.fromkeys(fixed, "constexpr"),
    }  # fmt: skip
    source = ASTSource(
        fn=step_kernel, signature={n: signature[n] for n in step_kernel.arg_names},
        constexprs={(step_kernel.arg_names.index(n),): v for n, v in fixed.items()},
    )  # fmt: skip
    return triton.compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"]


assert ".entry" in compiled("*bf16" if "bf16" in sys.argv else "*fp32", 0, captured="captured" in sys.argv)
for rule in (1, 2, 3) if "all" in sys.argv else ():
    assert ".entry" in compiled("*fp32", rule)
print("compiled")

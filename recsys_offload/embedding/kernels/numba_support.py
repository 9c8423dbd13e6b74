"""What the host kernels need from Numba: how they are compiled, and a prefetch instruction."""

from __future__ import annotations

import functools
from typing import Any

import numba
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

FLOATS_PER_LINE = 16

# No GIL, so that threads overlap; cached on disk, so that a machine compiles once; IEEE division without a check for
# zero; and no fast math, since the order and rounding of every operation is part of the contract.
kernel = functools.partial(numba.njit, nogil=True, cache=True, error_model="numpy", boundscheck=False)
# For small functions with array arguments that kernels call for every row: a call costs more than what they do.
inlined = functools.partial(kernel, inline="always")


def _emit_prefetch(builder: Any, address: Any, for_write: bool) -> None:
    int32 = ir.IntType(32)
    pointer = builder.bitcast(address, ir.IntType(8).as_pointer())
    function_type = ir.FunctionType(ir.VoidType(), [pointer.type, int32, int32, int32])
    function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
    nearest_cache, data_cache = ir.Constant(int32, 3), ir.Constant(int32, 1)
    builder.call(function, [pointer, ir.Constant(int32, int(for_write)), nearest_cache, data_cache])


def _prefetch_intrinsic(for_write: bool) -> Any:
    def typed(_context: Any, array: Any, offset: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = cgutils.create_struct_proxy(signature.args[0])(context, builder, arguments[0]).data
            _emit_prefetch(builder, builder.gep(data, [arguments[1]]), for_write)
            return context.get_dummy_value()

        return types.void(array, types.int64), generate

    return typed


@intrinsic
def prefetch(typing_context: Any, array: Any, offset: Any) -> Any:
    """Asks for the cache line of element ``offset`` (flat, in elements) of a contiguous array, to read it soon."""
    return _prefetch_intrinsic(for_write=False)(typing_context, array, offset)


@intrinsic
def prefetch_write(typing_context: Any, array: Any, offset: Any) -> Any:
    """Asks for the cache line of element ``offset`` (flat, in elements) of a contiguous array, to write it soon."""
    return _prefetch_intrinsic(for_write=True)(typing_context, array, offset)

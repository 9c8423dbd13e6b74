"""Arrow columns as single, plain arrays."""

from __future__ import annotations

import pyarrow as pa


def one_array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """The column as one contiguous array, without a copy where it is one already."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def plain(values: pa.Array) -> pa.Array:
    """The values of a dictionary-encoded array; others are returned as they are."""
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of this type holds a list in each row."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)

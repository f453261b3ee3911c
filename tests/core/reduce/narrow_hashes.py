# SPDX-License-Identifier: Apache-2.0
"""Prints the table of narrow_test.cc: hashes of what ml_dtypes converts narrow floats to and from.

Needs numpy and ml_dtypes. Every code is decoded. Encoded are all values halfway between two
neighbours, both of their f32 neighbours, with both signs, and f32 patterns spread over all.
"""

import ml_dtypes
import numpy as np

NAMES = (
    "float16 bfloat16 float8_e3m4 float8_e4m3 float8_e4m3fn float8_e4m3fnuz float8_e4m3b11fnuz "
    "float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
).split()


def fnv1a(words: np.ndarray) -> int:
    """FNV-1a, 64 bits, over words instead of bytes."""
    value = 0xCBF29CE484222325
    for word in words.tolist():
        value = ((value ^ word) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def main() -> None:
    """Prints one line for each type."""
    for name in NAMES:
        dtype = np.dtype(getattr(ml_dtypes, name, None) or getattr(np, name))
        code_type = {1: np.uint8, 2: np.uint16}[dtype.itemsize]
        codes = np.arange(1 << (8 * dtype.itemsize), dtype=np.uint32).astype(code_type)
        values = codes.view(dtype).astype(np.float32)
        bits = values.view(np.uint32).copy()
        bits[np.isnan(values)] = 0x7FC00000

        finite = np.unique(values[np.isfinite(values) & (values >= 0)]).astype(np.float64)
        past = 2 * finite[-1] - finite[-2]
        with np.errstate(over="ignore"):
            middles = ((finite + np.append(finite[1:], past)) / 2).astype(np.float32)
        middle_bits = middles.view(np.uint32).astype(np.uint64)
        near = np.concatenate([middle_bits - 1, middle_bits, middle_bits + 1])
        spread = np.arange(1 << 16, dtype=np.uint64) * 65521
        samples = np.concatenate([near, near | 0x80000000, spread]).astype(np.uint32)
        with np.errstate(all="ignore"):
            encoded = samples.view(np.float32).astype(dtype).view(code_type)
        is_nan = np.isnan(encoded.view(dtype).astype(np.float32))
        words = np.where(is_nan, 0xFFFF, encoded.astype(np.uint32))
        print(f'    {{"{name}", {fnv1a(bits):#018x}, {fnv1a(words):#018x}}},')


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Members that do not come, raise or are late, for every operation.

Errors come in time and name the call; then the same operation works in the same process.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from common import N, case_arguments, check, main, spmd
from jax import lax
from kinds import CASES, expected, operand

LIMIT_S = 0.25  # of the calls that lack a member


# What messages call those whose calls go by another name.
SHOWN = {
    "ppermute": "permute",
    "inclusive_scan": "scan",
    "exclusive_scan": "exscan",
    "all_gather_v": "ragged_all_to_all",
    "all_to_all_v": "",  # three calls
    "send_recv": "broadcast",
    "max_with_index": "all_reduce",
    "grouped": "all_reduce",
}


def _error(what: str, program, x) -> str:
    started = time.perf_counter()
    try:
        jax.block_until_ready(program(x))
    except jax.errors.JaxRuntimeError as error:
        check(f"{what}: in time", time.perf_counter() - started < 20, True)
        return str(error)
    check(f"{what}: an error was raised", False, True)
    return ""


def missing() -> None:
    """Only one member calls, or all but one: an error that names those that are needed."""
    for case in CASES:
        vital = case.vital % N
        shown = case.name.partition("(")[0]
        shown = SHOWN.get(shown, shown)

        def call(x, case=case):
            return case.call(x, "i", name="lonely", timeout=LIMIT_S)

        def called_if(condition, call=call):
            def zeros(x):
                y = jax.eval_shape(call, x)
                return jnp.zeros(y.shape, y.dtype)

            return spmd(lambda x: lax.cond(condition(lax.axis_index("i")), call, zeros, x[0])[None])

        lonely = called_if(lambda index, vital=vital: index == vital)
        without = called_if(lambda index, vital=vital: index != vital)
        good = spmd(lambda x, call=call: call(x[0])[None])
        x = operand(case, 6, 1)
        for program in (lonely, without):
            text = _error(f"{case}", program, x)
            for part in ("DEADLINE_EXCEEDED", f"{shown}", "'lonely", ".py:", "have not come"):
                check(f"{case}: {part!r} in {text!r}", part in text, True)
            check(f"{case} after", good(x), expected(case, x, None))
        check(f"{case}: member {vital} in {text!r}", f"devices [{vital}] have not" in text, True)


def raises() -> None:
    """A host callback raises on one member while the others wait for it."""
    for case in CASES:
        vital = case.vital % N

        def callback(i, x, vital=vital):
            if int(i) == vital:
                raise ValueError("this device failed")
            return np.asarray(x)

        def f(x, case=case, callback=callback):
            shape = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
            x = jax.pure_callback(callback, shape, lax.axis_index("i"), x[0])
            return case.call(x, "i", timeout=LIMIT_S)[None]

        x = operand(case, 6, 1)
        text = _error(f"{case}", spmd(f), x)
        # JAX reports one device's error: the exception, or who waited for whom.
        cause = "this device failed" in text or f"devices [{vital}] have not come" in text
        check(f"{case}: cause in {text!r}", cause, True)
        good = spmd(lambda x, case=case: case.call(x[0], "i")[None])
        check(f"{case} after", good(x), expected(case, x, None))


def late() -> None:
    """Each member that others need is seconds late: the values, and no error."""
    late_s = float(case_arguments[0]) if case_arguments else 2.5

    def callback(late, i, x):
        if int(late) == int(i):
            time.sleep(late_s)
        return np.asarray(x)

    def f(who, *rows):
        def come(x):
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return jax.pure_callback(callback, shape, who[0], lax.axis_index("i"), x)

        xs = [row[0] for row in rows]
        came = come(xs[0].ravel()[0]) * 0
        return [case.call(x + came, "i")[None] for case, x in zip(CASES, xs, strict=True)]

    program = spmd(f)
    for who in sorted({case.vital % N for case in CASES}):
        xs = [operand(case, 7, who) for case in CASES]
        results = program(np.full(N, who), *xs)
        for case, x, got in zip(CASES, xs, results, strict=True):
            check(f"{case} with member {who} late", got, expected(case, x, None))


if __name__ == "__main__":
    main({f.__name__: f for f in (missing, raises, late)})

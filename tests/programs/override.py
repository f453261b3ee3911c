# SPDX-License-Identifier: Apache-2.0
"""Programs written with jax.lax, under override_lax."""

import os
import subprocess
import sys
import time

import jax
from common import N, check, in_threads, main, ranked, spmd
from jax import lax

import jax_dfccl


def environment() -> None:
    """JAX_DFCCL_OVERRIDE_LAX=1 switches every thread of the process."""
    if "JAX_DFCCL_OVERRIDE_LAX" not in os.environ:
        os.environ["JAX_DFCCL_OVERRIDE_LAX"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    x = ranked(4)

    def work() -> None:
        program = spmd(lambda x: lax.psum(x, "i"))
        check("psum", program(x.ravel()), x.sum(0).tolist() * N)
        check("program", "dfccl_" in program.lower(x.ravel()).as_text(), True)

    in_threads([(work,)])
    work()
    replaced = jax_dfccl.report("dict")["override_lax"]["replaced"]
    check("replaced", replaced["psum"], 2)
    check("submitted", jax_dfccl.report("dict")["devices"][0]["submitted"], 2)


def bad_environment() -> None:
    """Another value is an error that says which are right."""
    child = subprocess.run(
        [sys.executable, "-P", "-c", "import jax_dfccl"],
        env={**os.environ, "JAX_DFCCL_OVERRIDE_LAX": "yes"},
        capture_output=True,
        text=True,
        check=False,
    )
    check("status", child.returncode, 1)
    message = "JAX_DFCCL_OVERRIDE_LAX='yes': must be 0 or 1"
    check("message", message in child.stderr, True)


def threads() -> None:
    """Several threads run programs of lax's collectives without waiting for each."""

    def work(op, reference, seed: int) -> None:
        with jax_dfccl.override_lax() as override:
            program = spmd(lambda x: op(x, "i"))
            x = ranked(256, seed=seed)
            results = [program(x.ravel()) for _ in range(100)]
            check("replaced", sum(override.counts.values()), 1)
        for result in results:
            check("value", result, reference(x).tolist() * N)

    in_threads(
        [
            (work, lax.psum, lambda x: x.sum(0), 0),
            (work, lax.pmax, lambda x: x.max(0), 1),
            (work, lax.psum, lambda x: x.sum(0), 2),
        ]
    )


def branches() -> None:
    """Calls in different branches are different calls: an error that says so, and no hang."""

    def f(x):
        def even(x):
            u = lax.psum(x, "i")
            return u, lax.psum(2 * x, "i")

        def odd(x):
            v = lax.psum(2 * x, "i")
            return lax.psum(x, "i"), v

        u, v = lax.cond(lax.axis_index("i") % 2 == 0, even, odd, x)
        return u + v

    x = ranked(4)
    started = time.perf_counter()
    with jax_dfccl.override_lax():
        try:
            jax.block_until_ready(spmd(f)(x.ravel()))
        except jax.errors.JaxRuntimeError as error:
            message = str(error)
        else:
            message = ""
        print(message, file=sys.stderr)
        check("in time", time.perf_counter() - started < 60, True)
        check("names the op and the line", "all_reduce(sum)" in message, True)
        check("names the file", "override.py" in message, True)
        check("after", spmd(lambda x: lax.psum(x, "i"))(x.ravel()), x.sum(0).tolist() * N)


if __name__ == "__main__":
    main({case.__name__: case for case in (environment, bad_environment, threads, branches)})

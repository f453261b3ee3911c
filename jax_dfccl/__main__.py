# SPDX-License-Identifier: Apache-2.0
"""Command line: `jax-dfccl launch`, `demo` and `tune`, or `python -m jax_dfccl ...`."""

import argparse
import sys

from jax_dfccl import _config, _launch, _tune


def main() -> int:
    """Runs the command given on the command line; returns its exit status."""
    parser = argparse.ArgumentParser(prog="jax-dfccl", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser(
        "demo", help="train a classifier data-parallel, with gradient buckets in disorder"
    )
    demo.add_argument("--devices", type=int, default=8, help="virtual CPU devices (default 8)")
    demo.add_argument("--steps", type=int, default=400, help="training steps (default 400)")
    demo.add_argument(
        "--collective",
        choices=["dfccl", "lax"],
        default="dfccl",
        help="whose all-reduce to train with (default dfccl)",
    )
    demo.add_argument(
        "--skip-stock", action="store_true", help="do not run the same program on lax.psum after"
    )
    launch = commands.add_parser(
        "launch",
        help="run a script as several processes, here or on several hosts",
        allow_abbrev=False,
        usage="jax-dfccl launch -n N [options] [--] script.py ... | -m module ...",
    )
    _launch.add_arguments(launch)
    tune = commands.add_parser(
        "tune", help="measure which plans are the fastest on this machine", allow_abbrev=False
    )
    _tune.add_arguments(tune)
    args = parser.parse_args()
    if args.command == "launch":
        return _launch.main(args, _config.environment())
    if args.command == "tune":
        return _tune.main(args)
    from jax_dfccl import _demo

    return _demo.main(args)


if __name__ == "__main__":
    sys.exit(main())

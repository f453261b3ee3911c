# SPDX-License-Identifier: Apache-2.0
"""`jax-dfccl launch` without the second that `import jax_dfccl` takes to import JAX."""

import argparse
import importlib
import os
import sys
import types
from pathlib import Path

package = types.ModuleType("jax_dfccl")
package.__path__ = [str(Path(__file__).parents[2] / "jax_dfccl")]
sys.modules["jax_dfccl"] = package
_launch = importlib.import_module("jax_dfccl._launch")

parser = argparse.ArgumentParser(allow_abbrev=False)
_launch.add_arguments(parser)
sys.exit(_launch.main(parser.parse_args(), dict(os.environ)))

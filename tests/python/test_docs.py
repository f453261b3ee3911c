# SPDX-License-Identifier: Apache-2.0
"""Every public function has a docstring whose example runs."""

import doctest

import pytest

import jax_dfccl

WITHOUT_EXAMPLE = {"Report", "__version__", "lax", "override_lax", "report"}


@pytest.mark.parametrize("name", sorted(set(jax_dfccl.__all__) - WITHOUT_EXAMPLE))
def test_docstring_example(name):
    (example,) = doctest.DocTestFinder(recurse=False).find(
        getattr(jax_dfccl, name), name, globs={"jax_dfccl": jax_dfccl}
    )
    assert len(example.examples) >= 5
    outcome = doctest.DocTestRunner().run(example)
    assert outcome.failed == 0 and outcome.attempted == len(example.examples)

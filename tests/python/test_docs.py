# SPDX-License-Identifier: Apache-2.0
"""Every public function says what a caller must know, and its example runs."""

import doctest
import inspect
import re

import pytest

import jax_dfccl

ELASTIC = ["detach", "join", "shrink"]
LAUNCHER = ["dispatch", "launcher"]
HANDLES = ["cancel", "test", "wait_any"]
NO_COLLECTIVES = {
    *HANDLES,
    *LAUNCHER,
    "Group",
    "Handle",
    "Report",
    "Survivors",
    "__version__",
    "lax",
    "override_lax",
    "report",
    *ELASTIC,
}
COLLECTIVES = sorted(
    name for name in set(jax_dfccl.__all__) - NO_COLLECTIVES if not name.endswith("_start")
)
of_lax = pytest.mark.parametrize("name", jax_dfccl.lax.__all__)


def sections(function):
    """The parts of a docstring: those of Google's style and paragraphs that begin in bold."""
    text = inspect.getdoc(function) or ""
    found = {}
    for part in re.split(r"\n\n(?=\w+:\n|\*\*)", text)[1:]:
        title, _, body = part.partition(":\n") if part[0] != "*" else part[2:].partition("**")
        found[title.rstrip(".")] = body.strip("\n")
    return found


def arguments(function):
    """What the docstring says of each parameter, all of which it must name."""
    entries = re.split(r"^    (?=\S)", sections(function)["Args"], flags=re.MULTILINE)[1:]
    found = {}
    for entry in entries:
        name, _, text = entry.partition(": ")
        found[name.lstrip("*")] = " ".join(text.split())
    assert list(found) == list(inspect.signature(function).parameters)
    return found


def run_example(function, name, lines):
    (example,) = doctest.DocTestFinder(recurse=False).find(
        function, name, globs={"jax_dfccl": jax_dfccl}
    )
    assert len(example.examples) >= lines
    outcome = doctest.DocTestRunner().run(example)
    assert outcome.failed == 0 and outcome.attempted == len(example.examples)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_docstring_example(name):
    run_example(getattr(jax_dfccl, name), name, 5)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_docstring_says_what_a_caller_must_know(name):
    function = getattr(jax_dfccl, name)
    found = sections(function)
    described = arguments(function)
    assert found["Returns"] and found["Raises"] and found["Differentiation"]
    assert any(title.startswith("Order") for title in found)
    operand = described.get("x") or described.get("operand") or described.get("f")
    if operand and "as for `all_reduce`" not in operand:
        assert "shape" in operand or "rows" in operand
        assert "dtype" in operand


@pytest.mark.parametrize("name", [*ELASTIC, *HANDLES])
def test_of_what_programs_call_outside(name):
    function = getattr(jax_dfccl, name)
    run_example(function, name, 3)
    assert arguments(function) and sections(function)["Raises"]


def test_of_groups():
    run_example(jax_dfccl.Group, "Group", 5)


@pytest.mark.parametrize("name", LAUNCHER)
def test_of_the_launcher(name):
    run_example(getattr(jax_dfccl, name), name, 4)


@of_lax
def test_example_of_lax(name):
    run_example(getattr(jax_dfccl.lax, name), name, 3)


@of_lax
def test_docstring_of_lax(name):
    function = getattr(jax_dfccl.lax, name)
    found = sections(function)
    assert arguments(function)
    assert found["Returns"] and f"jax.lax.{name}" in inspect.getdoc(function)


def test_a_docstring_that_lacks_something_is_found():
    def f(x, y):
        """Sums.

        **Order.** None.

        Args:
            x: an array.

        Returns:
            Like `x`.
        """
        return x + y

    found = sections(f)
    assert found == {
        "Order": " None.", "Args": "    x: an array.", "Returns": "    Like `x`.",
    }  # fmt: skip
    with pytest.raises(AssertionError, match="y"):
        arguments(f)

# SPDX-License-Identifier: Apache-2.0
"""Finds the headers of jaxlib's FFI, nanobind and Python through a Python interpreter."""

_FIND = """
import jaxlib, nanobind, os, sysconfig
print(os.path.join(os.path.dirname(jaxlib.__file__), "include"))
print(os.path.dirname(nanobind.__file__))
print(sysconfig.get_path("include"))
"""

_BUILD = """
cc_library(
    name = "xla_ffi",
    hdrs = glob(["jaxlib_include/xla/ffi/api/*.h"]),
    includes = ["jaxlib_include"],
    visibility = ["//visibility:public"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind/src/nb_combined.cpp"],
    hdrs = glob([
        "python_include/**/*.h",
        "nanobind/include/**/*.h",
        "nanobind/src/*.h",
        "nanobind/src/*.cpp",
        "nanobind/ext/**/*.h",
    ]),
    copts = ["-fno-strict-aliasing", "-fvisibility=hidden"],
    linkstatic = True,  # its symbols are hidden
    includes = [
        "nanobind/ext/robin_map/include",
        "nanobind/include",
        "python_include",
    ],
    visibility = ["//visibility:public"],
)
"""

def _python_headers(repository_ctx):
    python = repository_ctx.os.environ.get("DFCCL_PYTHON", "python3")
    found = repository_ctx.execute([python, "-c", _FIND])
    if found.return_code != 0:
        fail("%s has no jaxlib and nanobind; set DFCCL_PYTHON (--repo_env): %s" %
             (python, found.stderr))
    jaxlib_include, nanobind, python_include = found.stdout.strip().split("\n")
    repository_ctx.symlink(jaxlib_include, "jaxlib_include")
    repository_ctx.symlink(nanobind, "nanobind")
    repository_ctx.symlink(python_include, "python_include")
    repository_ctx.file("BUILD", _BUILD)

python_headers = repository_rule(
    implementation = _python_headers,
    environ = ["DFCCL_PYTHON"],
    local = True,
)

# SPDX-License-Identifier: Apache-2.0
"""The native Java rules under the names that Bazel's own tools load."""

java_binary = native.java_binary
java_import = native.java_import
java_library = native.java_library
java_runtime = native.java_runtime
java_test = native.java_test
java_toolchain = native.java_toolchain

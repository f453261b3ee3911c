#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the GPU daemon and checks it on GPU 0, within ten minutes and without a network:
#   tools/gpu_check.sh [PYTHON]
# Needs CUDA 12.8 or 13, CMake, and a Python (default: python3) with jax and its CUDA plugin, numpy,
# nanobind. Prints a table last; fails where anything fails, or where there is no GPU. Figures go to
# bench/baselines/, by the GPU's name.
#   tools/gpu_check.sh --emulate [PYTHON]
# does the same with the daemon on host threads and programs on a CPU, to see that this script works.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

emulate=
if [ "${1:-}" = --emulate ]; then
  emulate=yes
  shift
fi
python=${1:-python3}
build=$PWD/build/gpu_check${emulate:+_emulated}
site=$build/site
log=$build/log
mkdir -p "$build"
: >"$log"
begin=$SECONDS
rows=()
failed=0

# step NAME LIMIT COMMAND...: runs it, and notes how it ended and its last line.
step() {
  local name=$1 limit=$2 outcome=passed status started=$SECONDS
  shift 2
  echo "== $name: $*" | tee -a "$log"
  timeout -k 5 "$limit" "$@" >"$build/step" 2>&1
  status=$?
  cat "$build/step" >>"$log"
  tail -n 3 "$build/step"
  if [ "$status" -ne 0 ]; then
    outcome="FAILED ($status)"
    failed=1
  fi
  rows+=("$(printf '%-22s %4d s  %-12s %s' "$name" $((SECONDS - started)) "$outcome" \
    "$(tail -n 1 "$build/step" | cut -c1-110)")")
  return "$status"
}

skip() { rows+=("$(printf '%-22s         %-12s %s' "$1" "not run" "$2")"); }

finish() {
  echo
  printf '%s\n' "${rows[@]}"
  echo "$((SECONDS - begin)) s; everything is in $log"
  exit "$failed"
}

if [ -n "$emulate" ]; then
  platform=cpu
  driver=$build/tests/cuda/libdfccl_driver_stand_in.so
  size=-small
  options=(-DDFCCL_CUDA=OFF)
else
  platform=cuda
  driver=
  size=
  capability=$("$python" - <<'END'
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    raise SystemExit
count, device, major, minor = (ctypes.c_int() for _ in range(4))
if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0:
    cuda.cuDeviceGet(ctypes.byref(device), 0)
    cuda.cuDeviceGetAttribute(ctypes.byref(major), 75, device)
    cuda.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
    print(f"{major.value}{minor.value}")
END
  )
  if [ -z "$capability" ]; then
    echo "gpu_check: FAILED: there is no GPU here, or no driver (libcuda.so.1)" >&2
    exit 1
  fi
  options=(-DDFCCL_CUDA=ON "-DDFCCL_CUDA_ARCHITECTURES=$capability")
fi

check=("$build/tests/cuda/gpu_check")
step configure 60 cmake -S . -B "$build" -DCMAKE_BUILD_TYPE=Release -DDFCCL_BUILD_PYTHON=ON \
  -DDFCCL_BUILD_GPU_CHECK=ON "-DPython_EXECUTABLE=$(command -v "$python")" "${options[@]}" || finish
targets=(gpu_check _core ${emulate:+dfccl_driver_stand_in})
step build 300 cmake --build "$build" -j "$(nproc)" --target "${targets[@]}" || finish
rm -rf "$site" && mkdir -p "$site/jax_dfccl"
cp jax_dfccl/*.py "$build"/xla_ffi/_core*.so "$site/jax_dfccl/"
export PYTHONPATH=$site

for part in "conformance$size" "disorder$size" quit hog; do
  step "$part" 120 "${check[@]}" "$part" $driver
done
step "bars$size" 60 "${check[@]}" "bars$size" $driver
if [ -z "$emulate" ]; then
  name=$(sed -n 's/^{"device": "\([^"]*\)".*/\1/p' "$build/step" | tr -c 'A-Za-z0-9\n' '_')
  if [ -n "$name" ]; then
    mkdir -p bench/baselines && grep '^{' "$build/step" >"bench/baselines/gpu_$name.json"
  fi
fi
step jitted 150 "$python" tests/programs/gpu.py "$platform"
step "several processes" 120 "$python" tests/programs/gpu_across.py "$platform"

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null)
for tool in memcheck racecheck; do
  if [ -n "$emulate" ]; then
    skip "$tool" "the stages tsan and asan of tools/test.py are for the emulation"
  elif [ -z "$sanitizer" ]; then
    failed=1
    skip "$tool" "FAILED: there is no compute-sanitizer"
  else
    step "$tool" 120 "$sanitizer" --tool "$tool" --error-exitcode 9 "${check[@]}" conformance-small
  fi
done
finish

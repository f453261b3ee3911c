// SPDX-License-Identifier: Apache-2.0
// Runs relacy models. A model is a rl::test_suite over the headers of
// core/protocol; its checks are RL_ASSERT, Plain (races), and relacy's own for
// deadlock and livelock. With --expect-fault the exit status is 0 only if a
// fault was found: so the planted faults prove that the models can see.
#ifndef DFCCL_TESTS_CORE_PROTOCOL_MODEL_H_
#define DFCCL_TESTS_CORE_PROTOCOL_MODEL_H_

#include <cstring>
#include <iostream>
#include <sstream>

#include "core/protocol/atomics.h"

namespace dfccl {

// Explores `iterations` random schedules of Model. True: no fault.
template <typename Model>
bool ExploreRandom(unsigned iterations) {
  rl::test_params params;
  std::ostringstream progress;
  params.search_type = rl::random_scheduler_type;
  params.iteration_count = iterations;
  params.execution_depth_limit = 20000;
  params.progress_stream = &progress;
  return rl::simulate<Model>(params);
}

// Explores all schedules with at most `context_bound` forced switches. True: no
// fault.
template <typename Model>
bool ExploreBounded(unsigned context_bound) {
  rl::test_params params;
  std::ostringstream progress;
  params.search_type = rl::fair_context_bound_scheduler_type;
  params.context_bound = context_bound;
  params.execution_depth_limit = 20000;
  params.progress_stream = &progress;
  return rl::simulate<Model>(params);
}

// Exit status of a model's main().
inline int ModelExit(int argc, char** argv, bool no_fault) {
  const bool expect_fault = argc > 1 && std::strcmp(argv[1], "--expect-fault") == 0;
  if (no_fault == expect_fault) {
    std::cout << (expect_fault ? "the planted fault was not found" : "fault found") << std::endl;
    return 1;
  }
  std::cout << (expect_fault ? "the planted fault was found" : "no fault") << std::endl;
  return 0;
}

}  // namespace dfccl

#endif  // DFCCL_TESTS_CORE_PROTOCOL_MODEL_H_

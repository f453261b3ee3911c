// SPDX-License-Identifier: Apache-2.0
// Runs the fuzz target over the inputs that are kept, and over random changes of them.
#include <dirent.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tests/core/protocol/stress.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace dfccl {
namespace {

void Replay(const std::string& input) {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

std::vector<std::string> Corpus() {
  std::vector<std::string> inputs;
  DIR* const folder = opendir(DFCCL_CORPUS);
  if (folder == nullptr) return inputs;
  while (const dirent* entry = readdir(folder)) {
    if (entry->d_name[0] == '.') continue;
    std::ifstream file(std::string(DFCCL_CORPUS) + "/" + entry->d_name, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  closedir(folder);
  return inputs;
}

TEST(FuzzCorpusTest, KeptInputsAndChangesOfThem) {
  const std::vector<std::string> inputs = Corpus();
  ASSERT_GE(inputs.size(), 10u);
  std::minstd_rand random(StressSeed());
  for (const std::string& input : inputs) {
    Replay(input);
    for (int i = 0; i < 50; ++i) {
      std::string changed = input;
      for (uint32_t changes = random() % 4 + 1; changes > 0 && !changed.empty(); --changes) {
        changed[random() % changed.size()] ^= static_cast<char>(1 << random() % 8);
      }
      Replay(changed);
    }
  }
}

}  // namespace
}  // namespace dfccl

// SPDX-License-Identifier: Apache-2.0
// The planner of low latency. When a member arrives, its daemon posts a copy of its source
// that tells by itself that it is there (protocol/flagged_word.h). Every member folds for
// itself what it needs of that: there is nothing to signal and nothing to wait for but the
// data, no buffer is touched by a peer, and nobody waits for those whom it only gives to.
//
// The refs of all that a member needs follow each other, so that it can be had at once.
#include <algorithm>
#include <vector>

#include "core/plans/planners.h"
#include "core/plans/program.h"

namespace dfccl {
namespace {

// A result whose blocks are copies.
void CopyBlocks(Plan* plan, int member, const std::vector<BufferRef>& sources) {
  const RefRange from = AddRefs(plan, sources);
  Program program(plan, member);
  for (uint32_t i = 0; i < sources.size(); ++i) {
    const RefRange to = AddRefs(plan, {Result(member, static_cast<int>(i))});
    program.Reduce({from.begin + i, from.begin + i + 1}, to, {0, 1}, /*finalize=*/false);
  }
}

std::vector<BufferRef> SourcesOf(int members, int block) {
  std::vector<BufferRef> refs;
  for (int member = 0; member < members; ++member) refs.push_back(Source(member, block));
  return refs;
}

std::vector<BufferRef> ResultBlocksOf(int member, int blocks) {
  std::vector<BufferRef> refs;
  for (int block = 0; block < blocks; ++block) refs.push_back(Result(member, block));
  return refs;
}

}  // namespace

void PlanPosted(Plan* plan) {
  plan->in_place = true;
  const Kind kind = plan->key.kind;
  const int n = plan->members, root = plan->key.root;
  RefRange all{0, 0};  // first blocks of all sources, for kinds that fold them
  if (kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kScan ||
      kind == Kind::kExscan) {
    all = AddRefs(plan, SourcesOf(n, 0));
  }
  for (int r = 0; r < n; ++r) {
    Program program(plan, r);
    const auto fold = [&](RefRange sources, bool finalize) {
      program.Reduce(sources, AddRefs(plan, {Result(r)}), {0, 1}, finalize);
    };
    switch (kind) {
      case Kind::kAllReduce:
        fold(all, /*finalize=*/true);
        break;
      case Kind::kReduce:
        if (r == root) {
          fold(all, /*finalize=*/true);
        } else {
          program.FillWithZeros({Result(r)});
        }
        break;
      case Kind::kScan:
        fold({all.begin, all.begin + r + 1}, /*finalize=*/false);
        break;
      case Kind::kExscan:
        if (r > 0) {
          fold({all.begin, all.begin + r}, /*finalize=*/false);
        } else {
          program.FillWithZeros({Result(0)});
        }
        break;
      case Kind::kReduceScatter:
        fold(AddRefs(plan, SourcesOf(n, r)), /*finalize=*/true);
        break;
      case Kind::kAllGather:
        CopyBlocks(plan, r, SourcesOf(n, 0));
        break;
      case Kind::kAllToAll:
        CopyBlocks(plan, r, SourcesOf(n, r));
        break;
      case Kind::kGather:
        if (r == root) {
          CopyBlocks(plan, r, SourcesOf(n, 0));
        } else {
          program.FillWithZeros(ResultBlocksOf(r, n));
        }
        break;
      case Kind::kBroadcast:
        CopyBlocks(plan, r, {Source(root)});
        break;
      case Kind::kScatter:
        CopyBlocks(plan, r, {Source(root, r)});
        break;
      case Kind::kPermute: {
        const auto& pairs = plan->key.pairs->list;
        const auto pair = std::find_if(pairs.begin(), pairs.end(),
                                       [r](const auto& pair) { return pair.second == r; });
        if (pair != pairs.end()) {
          CopyBlocks(plan, r, {Source(pair->first)});
        } else {
          program.FillWithZeros({Result(r)});
        }
        break;
      }
      case Kind::kBarrier:
      case Kind::kRaggedAllToAll:
        break;  // HasPlans
    }
  }
}

}  // namespace dfccl

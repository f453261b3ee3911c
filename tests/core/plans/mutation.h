// SPDX-License-Identifier: Apache-2.0
// Planted faults: small edits of plans, shared by the tests of the verifier.
#ifndef DFCCL_TESTS_CORE_PLANS_MUTATION_H_
#define DFCCL_TESTS_CORE_PLANS_MUTATION_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/plans/plan.h"

namespace dfccl {

inline std::vector<BufferRef> Sources(const Plan& plan, const Step& step) {
  return {plan.refs.begin() + step.source_begin, plan.refs.begin() + step.source_end};
}
inline std::vector<BufferRef> Destinations(const Plan& plan, const Step& step) {
  return {plan.refs.begin() + step.destination_begin, plan.refs.begin() + step.destination_end};
}
// Refs are shared between steps, so a step's new list goes to the end.
inline void SetSources(Plan* plan, Step* step, const std::vector<BufferRef>& refs) {
  step->source_begin = static_cast<uint32_t>(plan->refs.size());
  plan->refs.insert(plan->refs.end(), refs.begin(), refs.end());
  step->source_end = static_cast<uint32_t>(plan->refs.size());
}
inline void SetDestinations(Plan* plan, Step* step, const std::vector<BufferRef>& refs) {
  step->destination_begin = static_cast<uint32_t>(plan->refs.size());
  plan->refs.insert(plan->refs.end(), refs.begin(), refs.end());
  step->destination_end = static_cast<uint32_t>(plan->refs.size());
}

inline bool TouchesPeers(const Plan& plan, int member, const Step& step) {
  if (step.kind != StepKind::kReduce) return false;
  std::vector<BufferRef> refs = Sources(plan, step);
  for (const BufferRef& ref : Destinations(plan, step)) refs.push_back(ref);
  return std::any_of(refs.begin(), refs.end(),
                     [member](const BufferRef& ref) { return ref.member != member; });
}

struct Mutant {
  std::string name;
  Plan plan;
  StepKind kind;  // of the step
};

// Every plan that lacks one step, one source or one destination.
inline std::vector<Mutant> Deletions(const Plan& plan) {
  std::vector<Mutant> mutants;
  for (int member = 0; member < plan.members; ++member) {
    const std::vector<Step>& steps = plan.member[member].steps;
    for (size_t i = 0; i < steps.size(); ++i) {
      const std::string where = "member " + std::to_string(member) + " step " + std::to_string(i);
      Mutant without{where + " deleted", plan, steps[i].kind};
      without.plan.member[member].steps.erase(without.plan.member[member].steps.begin() + i);
      mutants.push_back(without);
      if (steps[i].kind != StepKind::kReduce) continue;
      for (size_t ref = 0; ref < Sources(plan, steps[i]).size(); ++ref) {
        Mutant mutant{where + " source " + std::to_string(ref) + " deleted", plan, steps[i].kind};
        std::vector<BufferRef> refs = Sources(plan, steps[i]);
        refs.erase(refs.begin() + ref);
        SetSources(&mutant.plan, &mutant.plan.member[member].steps[i], refs);
        mutants.push_back(mutant);
      }
      for (size_t ref = 0; ref < Destinations(plan, steps[i]).size(); ++ref) {
        Mutant mutant{where + " destination " + std::to_string(ref) + " deleted", plan,
                      steps[i].kind};
        std::vector<BufferRef> refs = Destinations(plan, steps[i]);
        refs.erase(refs.begin() + ref);
        SetDestinations(&mutant.plan, &mutant.plan.member[member].steps[i], refs);
        mutants.push_back(mutant);
      }
    }
  }
  return mutants;
}

// Every plan with one changed field or with two steps the wrong way round.
inline std::vector<Mutant> Alterations(const Plan& plan) {
  std::vector<Mutant> mutants;
  for (int member = 0; member < plan.members; ++member) {
    const std::vector<Step>& steps = plan.member[member].steps;
    for (size_t i = 0; i < steps.size(); ++i) {
      const auto add = [&](const std::string& name, const auto& change) {
        Mutant mutant{
            "member " + std::to_string(member) + " step " + std::to_string(i) + " " + name, plan,
            steps[i].kind};
        change(&mutant.plan, &mutant.plan.member[member].steps[i]);
        mutants.push_back(mutant);
      };
      const Step& step = steps[i];
      if (step.kind == StepKind::kSend) {
        add("first flipped", [](Plan*, Step* step) { step->first = !step->first; });
        add("last flipped", [](Plan*, Step* step) { step->finalize = !step->finalize; });
        if (step.value > 0) add("without a value", [](Plan*, Step* step) { step->value = 0; });
        if (step.source_begin < step.source_end) {
          add("without data", [](Plan*, Step* step) {
            step->source_end = step->source_begin;
            step->destination_end = step->destination_begin;
          });
        }
      }
      if (step.kind == StepKind::kWait || step.kind == StepKind::kSignal) {
        add("value - 1", [](Plan*, Step* step) { --step->value; });
      }
      if (step.kind == StepKind::kSignal) {
        add("value + 1", [](Plan*, Step* step) { ++step->value; });
      }
      // A later value, or in a pair the only other member, is as good to wait for.
      if (step.kind == StepKind::kWait && plan.members > 2) {
        for (int peer = 0; peer < plan.members; ++peer) {
          if (peer == step.member) continue;
          add("waits for " + std::to_string(peer),
              [=](Plan*, Step* step) { step->member = static_cast<uint16_t>(peer); });
        }
      }
      if (step.kind == StepKind::kReduce) {
        add("finalize flipped", [](Plan*, Step* step) { step->finalize = !step->finalize; });
        if (step.chunk_end - step.chunk_begin < plan.chunk_count) {
          add("next chunk", [](Plan* plan, Step* step) {
            step->chunk_begin = (step->chunk_begin + 1) % plan->chunk_count;
            step->chunk_end = step->chunk_begin + 1;
          });
        }
        for (size_t ref = 0; ref < Sources(plan, step).size(); ++ref) {
          add("source " + std::to_string(ref) + " of the next member", [=](Plan* plan, Step* step) {
            std::vector<BufferRef> refs = Sources(*plan, *step);
            refs[ref].member = static_cast<uint16_t>((refs[ref].member + 1) % plan->members);
            SetSources(plan, step, refs);
          });
          add("source " + std::to_string(ref) + " twice", [=](Plan* plan, Step* step) {
            std::vector<BufferRef> refs = Sources(*plan, *step);
            refs.push_back(refs[ref]);
            SetSources(plan, step, refs);
          });
        }
        for (size_t ref = 0; ref < Destinations(plan, step).size(); ++ref) {
          add("destination " + std::to_string(ref) + " of the next member",
              [=](Plan* plan, Step* step) {
                std::vector<BufferRef> refs = Destinations(*plan, *step);
                refs[ref].member = static_cast<uint16_t>((refs[ref].member + 1) % plan->members);
                SetDestinations(plan, step, refs);
              });
        }
      }
      // The other neighbours may change places in a right plan.
      const bool ordered =
          i + 1 < steps.size() &&
          ((step.kind == StepKind::kWait && TouchesPeers(plan, member, steps[i + 1])) ||
           (TouchesPeers(plan, member, step) && steps[i + 1].kind == StepKind::kSignal));
      if (ordered) {
        add("after the next", [](Plan*, Step* step) { std::swap(step[0], step[1]); });
      }
    }
  }
  return mutants;
}

}  // namespace dfccl

#endif  // DFCCL_TESTS_CORE_PLANS_MUTATION_H_

# SPDX-License-Identifier: Apache-2.0
"""Checks that the models can see: plants faults in core/protocol and requires each to be found.

Each fault is a replacement of one piece of a header's text. The changed header is written to a
temporary folder that comes first on the include path, the model is built against it, and must
report a fault (--expect-fault). A piece that does not occur exactly once is an error, so a fault
cannot silently stop being planted when a header changes.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import subprocess
import sys
import tempfile

_ROOT = pathlib.Path(__file__).resolve().parents[3]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault: in `header`, `right` becomes `wrong`; `model` must find it."""

    name: str
    model: str
    header: str
    right: str
    wrong: str


FAULTS = (
    Fault(
        "entry published without release",
        "bounded_queue",
        "bounded_queue.h",
        "sequence.StoreSeqCst(2 * position + 1)",
        "sequence.StoreRelaxed(2 * position + 1)",
    ),
    Fault(
        "slot given back without release",
        "bounded_queue",
        "bounded_queue.h",
        "sequence.StoreRelease(2 * (position + capacity_))",
        "sequence.StoreRelaxed(2 * (position + capacity_))",
    ),
    Fault(
        "slot looked at without acquire",
        "bounded_queue",
        "bounded_queue.h",
        "sequence.LoadSeqCst()",
        "sequence.LoadRelaxed()",
    ),
    Fault(
        "position taken without compare-exchange",
        "bounded_queue",
        "bounded_queue.h",
        "} else if (end->CompareExchangeRelaxed(*position, *position + 1)) {",
        "} else {\n        end->StoreRelaxed(*position + 1);",
    ),
    Fault(
        "full ring overwritten",
        "bounded_queue",
        "bounded_queue.h",
        "if (ahead < 0) return false;",
        "if (ahead < 0 && full == 1) return false;\n      if (ahead < 0) ++*position;",
    ),
    Fault(
        "bytes published with release only",
        "byte_ring",
        "byte_ring.h",
        "words_->written.StoreSeqCst(written_)",
        "words_->written.StoreRelease(written_)",
    ),
    Fault(
        "bytes published without release",
        "byte_ring",
        "byte_ring.h",
        "words_->written.StoreSeqCst(written_)",
        "words_->written.StoreRelaxed(written_)",
    ),
    Fault(
        "bytes given back with release only",
        "byte_ring",
        "byte_ring.h",
        "words_->read.StoreSeqCst(read_)",
        "words_->read.StoreRelease(read_)",
    ),
    Fault(
        "bytes given back without release",
        "byte_ring",
        "byte_ring.h",
        "words_->read.StoreSeqCst(read_)",
        "words_->read.StoreRelaxed(read_)",
    ),
    Fault(
        "lent memory not revoked",
        "byte_ring",
        "byte_ring.h",
        "words_->revoked.ExchangeSeqCst(written_)",
        "words_->revoked.LoadRelaxed()",
    ),
    Fault(
        "revocation looked at by a relaxed load",
        "byte_ring",
        "byte_ring.h",
        "words_->revoked.FetchAddSeqCst(0)",
        "words_->revoked.LoadRelaxed()",
    ),
    Fault(
        "reader looks without acquire",
        "byte_ring",
        "byte_ring.h",
        "words_->written.LoadAcquire()",
        "words_->written.LoadRelaxed()",
    ),
    Fault(
        "writer looks without acquire",
        "byte_ring",
        "byte_ring.h",
        "read = words_->read.LoadAcquire()",
        "read = words_->read.LoadRelaxed()",
    ),
    Fault(
        "doorbell armed with release only",
        "byte_ring",
        "byte_ring.h",
        "void Arm() { word_.StoreSeqCst(1); }",
        "void Arm() { word_.StoreRelease(1); }",
    ),
    Fault(
        "second look with acquire only",
        "byte_ring",
        "byte_ring.h",
        "written.LoadSeqCst() - read.LoadSeqCst()",
        "written.LoadAcquire() - read.LoadAcquire()",
    ),
    Fault(
        "doorbell looked at with acquire only",
        "byte_ring",
        "byte_ring.h",
        "return word_.LoadSeqCst() != 0 && word_",
        "return word_.LoadAcquire() != 0 && word_",
    ),
    Fault(
        "no bell for room",
        "byte_ring",
        "byte_ring.h",
        "available() <= capacity_ / 2 && words_->writer.TryTake()",
        "available() > capacity_",
    ),
    Fault(
        "no bell for data",
        "byte_ring",
        "byte_ring.h",
        "return words_->reader.TryTake();",
        "return false;",
    ),
    Fault(
        "last poller does not arm",
        "pollers",
        "pollers.h",
        "!= 1 || arm()",
        "!= 1 || sizeof(arm) > 0",
    ),
    Fault(
        "work is there and the last poller says nothing",
        "pollers",
        "pollers.h",
        "return count_.FetchSubSeqCst(1) != 1 || arm();",
        "if (count_.FetchSubSeqCst(1) == 1) arm();\n    return true;",
    ),
    Fault(
        "flag posted before its data",
        "flagged_word",
        "flagged_word.h",
        "word_.StoreRelaxed(uint64_t{generation} << 32 | data);",
        "word_.StoreRelaxed(uint64_t{generation} << 32);\n"
        "    word_.StoreRelaxed(uint64_t{generation} << 32 | data);",
    ),
    Fault(
        "any flag will do",
        "flagged_word",
        "flagged_word.h",
        "return word >> 32 == generation;",
        "return word >> 32 != 0 * generation;",
    ),
    Fault(
        "generations begin anew over words that are not cleared",
        "flagged_word",
        "flagged_word.h",
        "*generation = 1;\n    return true;",
        "*generation = 1;\n    return false;",
    ),
    Fault(
        "generation of cleared words",
        "flagged_word",
        "flagged_word.h",
        "*generation = 1;",
        "*generation = 0;",
    ),
    Fault(
        "node pushed without release",
        "wake_list",
        "wake_list.h",
        "CompareExchangeRelease(newest, node)",
        "CompareExchangeRelaxed(newest, node)",
    ),
    Fault(
        "list taken in two steps",
        "wake_list",
        "wake_list.h",
        "WakeNode* node = newest_.ExchangeAcquire(nullptr);",
        "WakeNode* node = newest_.LoadAcquire();\n    newest_.StoreRelaxed(nullptr);",
    ),
    Fault(
        "list taken newest first",
        "wake_list",
        "wake_list.h",
        "    WakeNode* first = nullptr;\n    while",
        "    WakeNode* first = nullptr;\n    if (node != nullptr) return node;\n    while",
    ),
    Fault(
        "parks without looking whether work came",
        "lifecycle",
        "lifecycle.h",
        "new_word = (old_word & kWanted) ? old_word & ~kWanted : old_word & ~kDriven;\n"
        "    } while (!word_.CompareExchangeAcqRel(old_word, new_word));\n"
        "    return !(old_word & kWanted);",
        "new_word = old_word & ~(kWanted | kDriven);\n"
        "    } while (!word_.CompareExchangeAcqRel(old_word, new_word));\n"
        "    return true;",
    ),
    Fault(
        "parks without release",
        "lifecycle",
        "lifecycle.h",
        "old_word & ~kDriven;\n    } while (!word_.CompareExchangeAcqRel(",
        "old_word & ~kDriven;\n    } while (!word_.CompareExchangeRelaxed(",
    ),
    Fault(
        "schedule writes nothing when nothing changes",
        "lifecycle",
        "lifecycle.h",
        "if (!(old_word & kDriven)) new_word |= kQueued;",
        "if (!(old_word & kDriven)) new_word |= kQueued;\n"
        "      if (new_word == old_word) return false;",
    ),
    Fault(
        "schedule leaves a running daemon clean",
        "lifecycle",
        "lifecycle.h",
        "new_word = old_word | kWanted;",
        "new_word = (old_word & kDriven) ? old_word : old_word | kWanted;",
    ),
    Fault(
        "claim forgets the entry in the run queue",
        "lifecycle",
        "lifecycle.h",
        "(old_word & kQueued) | kDriven",
        "kDriven + 0 * old_word",
    ),
    Fault(
        "failed claim leaves the daemon clean",
        "lifecycle",
        "lifecycle.h",
        "(old_word & kDriven) ? old_word | kWanted :",
        "(old_word & kDriven) ? old_word :",
    ),
    Fault(
        "stale entry of the run queue is run",
        "lifecycle",
        "lifecycle.h",
        "return scheduled;",
        "return true;",
    ),
    Fault(
        "reschedule adds a second entry",
        "lifecycle",
        "lifecycle.h",
        "return !(word_.ExchangeAcqRel(kWanted | kQueued) & kQueued);",
        "word_.ExchangeAcqRel(kWanted | kQueued);\n    return true;",
    ),
    Fault(
        "sleeps without a second look",
        "progress",
        "progress.h",
        "if (!ready()) return true;",
        "if (sizeof(ready) > 0) return true;",
    ),
    Fault(
        "sleep announced with release only",
        "progress",
        "progress.h",
        "word_.StoreSeqCst(awaited);",
        "word_.StoreRelease(awaited);",
    ),
    Fault(
        "second look with acquire only",
        "progress",
        "progress.h",
        "value_.LoadSeqCst() >= value",
        "value_.LoadAcquire() >= value",
    ),
    Fault(
        "progress stored with release only",
        "progress",
        "progress.h",
        "value_.StoreSeqCst(value)",
        "value_.StoreRelease(value)",
    ),
    Fault(
        "progress stored without release",
        "progress",
        "progress.h",
        "value_.StoreSeqCst(value)",
        "value_.StoreRelaxed(value)",
    ),
    Fault(
        "sleep word looked at with acquire only",
        "progress",
        "progress.h",
        "uint64_t awaited = word_.LoadSeqCst();",
        "uint64_t awaited = word_.LoadAcquire();",
    ),
    Fault(
        "failure looks at the sleep word with acquire only",
        "progress",
        "progress.h",
        "if (word_.LoadSeqCst() == kAwake)",
        "if (word_.LoadAcquire() == kAwake)",
    ),
    Fault(
        "wakes without taking the sleep word",
        "progress",
        "progress.h",
        "if (static_cast<uint32_t>(awaited) > progress) return false;\n"
        "    return word_.CompareExchangeSeqCst(awaited, kAwake);",
        "if (static_cast<uint32_t>(awaited) > progress) return false;\n"
        "    word_.StoreSeqCst(kAwake);\n    return true;",
    ),
    Fault(
        "goes on although a peer wakes it",
        "progress",
        "progress.h",
        "return !word_.CompareExchangeSeqCst(awaited, kAwake);",
        "word_.StoreSeqCst(kAwake);\n    return false;",
    ),
    Fault(
        "wakes too early",
        "progress",
        "progress.h",
        "if (static_cast<uint32_t>(awaited) > progress) return false;",
        "if (progress == 0) return false;",
    ),
    Fault(
        "sleeper looked for without order",
        "parking",
        "parking.h",
        "state_.LoadSeqCst() == kParked && state_.CompareExchangeSeqCst(parked, kClaimed)",
        "state_.LoadAcquire() == kParked && state_.CompareExchangeAcqRel(parked, kClaimed)",
    ),
    Fault(
        "sleep announced without order",
        "parking",
        "parking.h",
        "state_.StoreSeqCst(kParked);",
        "state_.StoreRelease(kParked);",
    ),
    Fault(
        "claim leaves the thread parked",
        "parking",
        "parking.h",
        "CompareExchangeSeqCst(parked, kClaimed)",
        "CompareExchangeSeqCst(parked, kParked)",
    ),
    Fault(
        "claimed but not woken",
        "parking",
        "parking.h",
        "sleeper_.Wake();",
        "",
    ),
    Fault(
        "who finds work after all does not wait for its claimer",
        "parking",
        "parking.h",
        "if (!state_.CompareExchangeSeqCst(parked, kAwake)) SleepUntilWoken();",
        "state_.StoreSeqCst(kAwake); static_cast<void>(parked);",
    ),
    Fault(
        "run queue publishes with release only",
        "parking",
        "bounded_queue.h",
        "sequence.StoreSeqCst(2 * position + 1)",
        "sequence.StoreRelease(2 * position + 1)",
    ),
    Fault(
        "run queue looked at with acquire only",
        "parking",
        "bounded_queue.h",
        "sequence.LoadSeqCst()",
        "sequence.LoadAcquire()",
    ),
    Fault(
        "entry published without release",
        "spsc_queue",
        "spsc_queue.h",
        "ends_->pushed.StoreRelease(++pushed_)",
        "ends_->pushed.StoreRelaxed(++pushed_)",
    ),
    Fault(
        "slot given back without release",
        "spsc_queue",
        "spsc_queue.h",
        "ends_->popped.StoreRelease(++popped_)",
        "ends_->popped.StoreRelaxed(++popped_)",
    ),
    Fault(
        "entry looked for without acquire",
        "spsc_queue",
        "spsc_queue.h",
        "ends_->pushed.LoadAcquire()",
        "ends_->pushed.LoadRelaxed()",
    ),
    Fault(
        "room looked for without acquire",
        "spsc_queue",
        "spsc_queue.h",
        "ends_->popped.LoadAcquire()",
        "ends_->popped.LoadRelaxed()",
    ),
    Fault(
        "one entry too many",
        "spsc_queue",
        "spsc_queue.h",
        "popped_ = ends_->popped.LoadAcquire();\n"
        "      if (pushed_ - popped_ == capacity_) return false;",
        "popped_ = ends_->popped.LoadAcquire();",
    ),
    Fault(
        "progress published without release",
        "roll",
        "progress.h",
        "value_.StoreRelease(value)",
        "value_.StoreRelaxed(value)",
    ),
    Fault(
        "progress polled without acquire",
        "roll",
        "progress.h",
        "value_.LoadAcquire() >= value",
        "value_.LoadRelaxed() >= value",
    ),
    Fault(
        "leaves without release",
        "roll",
        "roll.h",
        "word_.FetchAddAcqRel(kOneGone) + kOneGone",
        "word_.FetchAddRelaxed(kOneGone) + kOneGone",
    ),
    Fault(
        "quiet looked for without acquire",
        "roll",
        "roll.h",
        "word_.LoadAcquire();",
        "word_.LoadRelaxed();",
    ),
    Fault(
        "quiet before all have left",
        "roll",
        "roll.h",
        "return static_cast<uint32_t>((word & ~kFailed) >> 32) == static_cast<uint32_t>(word);",
        "return word != 0;",
    ),
    Fault(
        "an arrival is not counted",
        "roll",
        "roll.h",
        "(word_.FetchAddAcqRel(kOneArrived) & kFailed) == 0",
        "(word_.LoadAcquire() & kFailed) == 0",
    ),
)


def plant(fault: Fault, folder: pathlib.Path) -> None:
    """Writes the changed header under `folder`."""
    path = pathlib.Path("core/protocol") / fault.header
    text = (_ROOT / path).read_text(encoding="utf-8")
    if text.count(fault.right) != 1:
        raise ValueError(f"{path}: {fault.right!r} must occur exactly once")
    (folder / path).parent.mkdir(parents=True)
    (folder / path).write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")


def found(fault: Fault, compiler: str) -> bool:
    """Builds and runs the model with the fault; prints how it went."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        plant(fault, folder)
        binary = folder / "model"
        # Sized operator delete would bypass relacy's.
        command = [compiler, "-std=c++17", "-O0", "-fno-sized-deallocation", "-DDFCCL_MODEL"]
        command += [f"-I{folder}", f"-I{_ROOT}", "-o", str(binary)]
        command += [str(_ROOT / "tests/core/protocol" / f"{fault.model}_model.cc")]
        subprocess.run(command, check=True)
        result = subprocess.run(
            [str(binary), "--expect-fault"],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
    print(f"{'found' if result.returncode == 0 else 'MISSED'}: {fault.model}: {fault.name}")
    if result.returncode != 0:
        print(result.stdout + result.stderr)
    return result.returncode == 0


def main() -> int:
    """Returns the exit status: 0 if every fault was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=sorted({fault.model for fault in FAULTS}))
    parser.add_argument("--compiler", default="c++")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if fault.model == arguments.model]
    missed = [fault for fault in faults if not found(fault, arguments.compiler)]
    print(f"{len(faults) - len(missed)} of {len(faults)} faults found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

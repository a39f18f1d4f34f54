"""The words of the summary and of the report, each with one meaning; as in `docs/glossary.md`."""

from __future__ import annotations

import re

WORDS = {
    "baseline": "The job at the settings that were found, measured in blocks of iterations between "
    "the blocks at other settings.",
    "block": "A run of consecutive iterations under one setting, long enough for the sensors to "
    "give its time and energy.",
    "bound": "The shortest time that any schedule of copies and recomputation could take. A plan "
    "close to it cannot be made much better.",
    "communication-bound": "Collectives that nothing runs beside take a large part of an "
    "iteration.",
    "compute-bound": "The time of an iteration follows the SM clock; where no clock could be "
    "tried: most of the busy time is in operations of more than 300 FLOP per byte.",
    "contract": "What the user allows, say 2 % slower. It is tested on the running job against "
    "the baseline; without evidence the baseline stands.",
    "deviations": "Passes that did something else than the plan expected and fell back to "
    "offloading on demand. Fewer is better; results are the same.",
    "hidden": "The share of the copies' time in which the device computes. 100 % costs no time.",
    "input-bound": "The GPU has nothing to do while the program waits for its data.",
    "late": "Prefetches that began after their tensor was needed. 0 is best.",
    "measured": "Read on the device that did the work.",
    "memory-bound": "The GPU is busy, and the time of an iteration hardly follows the SM clock; "
    "where no clock could be tried: most of the busy time is in operations of less than 14 FLOP "
    "per byte.",
    "offloaded": "Copied to the host and freed on the device, and copied back before its use.",
    "on demand": "Offloaded without a plan, since the budget was reached: while the job is still "
    "observed, and after a deviation. It keeps the budget and costs more time than a plan.",
    "pass": "One forward and backward of the model.",
    "peak": "The most device memory that was in use at any moment.",
    "recomputed": "Freed on the device and computed again when backward needs it, to the same "
    "bits.",
    "replayed": "Looked up in a named table of somebody's measurements.",
    "simulated": "Computed by a model of the device or of the schedule, not measured.",
    "stand-in": "Counts on the CPU what autograd would keep on a GPU, where there is no GPU.",
    "waits for copies": "Time in which the device stood still because a copy had not arrived.",
}


def used(text: str) -> dict[str, str]:
    """The words of the glossary that stand in a text, in alphabetical order, with meanings."""
    lowered = text.lower()
    found = (word for word in WORDS if re.search(rf"(?<![\w-]){re.escape(word)}(es|s)?\b", lowered))
    return {word: WORDS[word] for word in sorted(found)}

"""A whole benchmark: the cases answer the prompts, their rounds are taken apart, and a document comes of it."""

import dataclasses
import datetime
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

import specjax
from specjax.benchmark.answers import Answers, answer_alone, answer_together, layout, num_steps
from specjax.benchmark.cases import Case, request_params
from specjax.benchmark.equality import TOLERANCES, compare
from specjax.benchmark.parts import RoundParts, measure_parts, memory_bandwidth, pass_bytes
from specjax.benchmark.report import baselines, passes, predictions, result_row, round_row, rounded
from specjax.decoding.auto import PassCosts, time_passes
from specjax.drafters.base import bind, sources_of
from specjax.models.decoder import Decoder
from specjax.models.loaded import Model
from specjax.statistics import total
from specjax.user_cache import processor
from specjax.verification.rules import RULES

VERIFY_SIZES = (2, 4, 8, 16)
PART_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
      name: of the prompts.
      prompts: token ids of each.
      kinds: kind of each.
      cases: see :func:`specjax.benchmark.cases.make_cases`.
      max_tokens: of each answer.
      repeats: of everything.
      seed: of the first prompt's answer; the next has the next.
      notes: on what is measured, for the reader.
      allow_lossy: whether rules may change the distribution.
      bandwidth_bytes: see :func:`specjax.benchmark.parts.memory_bandwidth`.
    """

    name: str
    prompts: Sequence[list[int]]
    kinds: Sequence[str]
    cases: Sequence[Case]
    max_tokens: int
    repeats: int
    seed: int
    notes: Sequence[str] = ()
    allow_lossy: bool = False
    bandwidth_bytes: int | None = None

    @property
    def num_steps(self) -> int:
        """How often ``step`` is called by :func:`run`."""
        return num_steps(self.cases, len(self.prompts), self.repeats) + len(self.cases) + 1


def run(models: Mapping[str, Model], plan: Plan, step: Callable[[str], Any] = str) -> dict:
    """Measures what ``plan`` says and returns the document that ``specjax bench --json`` prints.

    Args:
      models: the target by dtype; all dtypes of the cases.
      plan: what is to be measured.
      step: called with what comes next.
    """
    environment = _environment(models, plan)
    shared = (plan.max_tokens, plan.repeats, plan.seed, plan.allow_lossy, step)
    alone = [case for case in plan.cases if case.slots == 1]
    found = answer_alone(models, alone, plan.prompts, *shared) if alone else {}
    for slots in dict.fromkeys(case.slots for case in plan.cases if case.slots > 1):
        found |= answer_together(models, [case for case in plan.cases if case.slots == slots], plan.prompts, *shared)
    found = {case: found[case] for case in plan.cases}
    base = baselines(found)
    step("passes and memory")
    bandwidth = memory_bandwidth(plan.bandwidth_bytes)
    verify, notes = _verify_cost(models, plan.cases)
    parts = _all_parts(models, plan, base, step)
    rows = []
    for case, answers in found.items():
        row = result_row(case, answers, found[base[case.setting]], plan.kinds, plan.name)
        one, plain = parts[case], parts[_plain_of(case, plan.cases)]
        stacked = bool(sources_of(bind(case.made).functions))
        row["predicted_speedup"] = predictions(
            case, total(answers.stats), one, plain, stacked, fastest=base[case.setting] is case
        )
        row["same_tokens"] = _same_tokens(models, case, answers, found, plan)
        least = pass_bytes(models[case.dtype], one.num_cached, case.slots, 1 + case.tree.num_nodes) / max(bandwidth.values())
        row["round"] = round_row(one, least)
        rows.append(row)
    return rounded(
        {
            "environment": environment,
            "verify_cost": verify,
            "memory_bytes_per_second": bandwidth,
            "results": rows,
            "notes": [*plan.notes, *notes],
        }
    )


def wrong(document: dict) -> list[str]:
    """What must not be in a document: tokens other than plain decoding's, and rounds of other than one pass of the target."""
    found = []
    for row in document["results"]:
        name = f"{row['drafter']}, rule {row['rule']}, temperature {row['temperature']:g}, {row['slots']} slots, {row['dtype']}"
        same = row["same_tokens"]
        if same is not None and not same["passed"]:
            most, allowed = same["largest_margin"], TOLERANCES[row["dtype"]]
            margin = f"the deciding margin was {most}, more than {allowed}" if most is not None else "one goes on behind the end"
            found.append(f"{name}: {same['differ']} of {row['num_prompts']} answers are not plain decoding's; {margin}")
        if row["round"]["target_passes"] != [1, 1]:
            found.append(f"{name}: a round makes {passes(row['round'])} passes of the target; it must be 1")
    return found


def _environment(models: Mapping[str, Model], plan: Plan) -> dict:
    devices = jax.devices()
    model = next(iter(models.values()))
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "specjax": specjax.__version__,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "processor": processor(),
        "cores": os.cpu_count(),
        # Above 0 something else was running when it began: figures are then too low, and ratios less certain.
        "load_before": load,
        "date": datetime.date.today().isoformat(),
        "model": model.name,
        "dtypes": {dtype: each.dtype_reason for dtype, each in models.items()},
        "num_prompts": len(plan.prompts),
        "max_tokens": plan.max_tokens,
        "repeats": plan.repeats,
        "seed": plan.seed,
    }


def _verify_cost(models: Mapping[str, Model], cases: Sequence[Case]) -> tuple[dict[str, float], list[str]]:
    """Cost of a pass over several tokens, in passes over one of the fastest dtype; of the dtype that drafts are verified in."""
    costs = {
        dtype: PassCosts.of(model, time_passes(model).value).verify
        for dtype, model in models.items()
        if isinstance(model.functions, Decoder)
    }
    dtype = next((case.dtype for case in cases if not case.is_plain), cases[0].dtype)
    if dtype not in costs:
        return {}, ["verify_cost was not measured: the model is none of the library's decoders"]
    least = min(each[1] for each in costs.values())
    return {str(size): costs[dtype][size] / least for size in VERIFY_SIZES}, []


def _plain_of(case: Case, cases: Sequence[Case]) -> Case:
    """Plain decoding in the dtype and setting of a case."""
    return next(each for each in cases if each.is_plain and each.dtype == case.dtype and each.setting == case.setting)


def _all_parts(models, plan: Plan, base: dict, step) -> dict[Case, RoundParts]:
    capacity, width = layout(plan.prompts, plan.max_tokens)
    found = {}
    for case in plan.cases:
        step(f"parts of a round: {case}")
        found[case] = measure_parts(
            models[case.dtype],
            models[base[case.setting].dtype],
            max(plan.prompts, key=len),
            case.made,
            case.rule,
            case.temperature,
            rows=case.slots,
            capacity=capacity,
            prefill_width=width,
            repeats=max(PART_REPEATS, plan.repeats),
            allow_lossy=plan.allow_lossy,
        )
    return found


def _same_tokens(models, case: Case, answers: Answers, found: dict[Case, Answers], plan: Plan) -> dict | None:
    """Beside plain decoding in the same dtype; None for what need not give the same tokens."""
    if case.is_plain or not (case.temperature == 0 or RULES[case.rule].seed_stable):
        return None
    params = [request_params(case, plan.max_tokens, plan.seed + index) for index in range(len(plan.prompts))]
    judge = models["float32"] if "float32" in models and case.dtype != "int8" else models[case.dtype]
    plain = found[_plain_of(case, plan.cases)]
    return compare(judge, plan.prompts, params, plain.tokens, answers.tokens, TOLERANCES[case.dtype])

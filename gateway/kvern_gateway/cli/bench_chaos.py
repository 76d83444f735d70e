"""`kvern bench chaos`: processes of a whole Kvern are killed and frozen under load, and every client's history is
checked against a run without faults."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from time import perf_counter, time
from typing import Any

from kvern_gateway.cli import chaos_stack
from kvern_gateway.cli.chaos_faults import Faults, Strike, draw_faults
from kvern_gateway.cli.chaos_history import Output, Violation
from kvern_gateway.cli.chaos_load import Load, Record, outputs_of
from kvern_gateway.cli.chaos_surfaces import Template

# Waits that began so long after a fault have nothing to do with it.
WINDOW_S = 10.0
IDLE_TIMEOUT_S = 10.0
PROGRESS_S = 10.0
# How the violations of a client's history are summed up.
COUNTED = ("lost", "missing", "repeated", "changed", "double_finish")
_COUNTED_AS = {
    "lost": "lost",
    "early finish": "lost",
    "gap": "missing",
    "repeat": "repeated",
    "changed token": "changed",
    "text": "changed",
    "wrong finish": "changed",
    "double finish": "double_finish",
    "after finish": "double_finish",
}
_MOST_DETAILS = 20
_MOST_WORST = 5
_PROMPTS = (
    "Once upon a time there was a mill by a river, and",
    "The three laws of thermodynamics, told to a child:",
    "A list of colors and what each of them reminds a painter of:",
    "Dear diary, today the wind turned the wheel",
)


@dataclass(frozen=True)
class ChaosOptions:
    """``kills`` and ``restarts`` are of each kind; freezes come on top of kills. ``model`` None: a simulated worker at
    ``step_us`` a step."""

    kinds: tuple[str, ...]
    kills: int
    restarts: int = 0
    model: Path | None = None
    clients: int = 8
    workers: int = 2
    seed: int = 0
    step_us: int = 5000
    max_tokens: int = 120
    keep_logs: bool = False

    @property
    def flags(self) -> dict[str, object]:
        own: dict[str, object] = {"kv_cache_memory_bytes": 256 * 2**20}
        if self.model is None:
            own = {"sim_step_us": self.step_us, "sim_num_blocks": 4096}
        return {"max_model_len": 1024, "max_num_seqs": 64, **own}


async def run(options: ChaosOptions) -> dict[str, Any]:
    """Raises ChildFailed, UsageError, TimeoutError where the services do not start or do not come back."""
    kept = chaos_stack.Kept()
    started = perf_counter()
    async with chaos_stack.running(options.model, options.workers, options.flags, kept) as chaos:
        templates = await _templates(chaos, options)
        expected = await _expect(chaos, templates, options.seed)
        load = Load(chaos.gateways, templates, expected, options.seed)
        faults = Faults(chaos, load)
        loading = asyncio.create_task(load.run(options.clients))
        drawn = draw_faults(options.kinds, options.kills, options.restarts, options.seed)
        striking = asyncio.create_task(faults.run(drawn))
        telling = asyncio.create_task(_tell_progress(faults, load, len(drawn), started))
        try:
            await asyncio.wait({loading, striking}, return_when=asyncio.FIRST_COMPLETED)
            stuck = ""
            if striking.done() and isinstance(striking.exception(), TimeoutError):
                stuck = str(striking.exception())
            elif striking.done():
                striking.result()
            load.stop()
            await loading
            if not stuck and not await chaos.until_idle(IDLE_TIMEOUT_S):
                stuck = f"sequences are still computed {IDLE_TIMEOUT_S:g} s after the last request has ended"
        except BaseException:
            kept.directory = _logs_directory()
            raise
        finally:
            for one in (loading, striking, telling):
                one.cancel()
            await asyncio.gather(loading, striking, telling, return_exceptions=True)
        if load.violations or stuck or options.keep_logs:
            kept.directory = _logs_directory()
        if load.violations and kept.directory:
            _write_evidence(load, faults.strikes, kept.directory)
        fenced = sum(" stops leading: " in line for line in chaos.deaths)
    result = _result(options, load, faults.strikes, perf_counter() - started, stuck, kept.directory)
    return {**result, "fenced": fenced}


async def _tell_progress(faults: Faults, load: Load, num_faults: int, started: float) -> None:
    """A line now and then, beside the result."""
    while True:
        await asyncio.sleep(PROGRESS_S)
        print(
            f"{len(faults.strikes)} of {num_faults} faults, {len(load.records)} requests, {load.num_tokens} tokens, "
            f"{len(load.violations)} violations in {perf_counter() - started:.0f} s",
            file=sys.stderr,
            flush=True,
        )


def _write_evidence(load: Load, strikes: Sequence[Strike], directory: Path) -> None:
    """Beside the logs: all that the clients of violations saw, and what was broken meanwhile."""
    found = [
        {
            "violation": asdict(violation),
            "template": asdict(record.template),
            "connections": [[_time_of_day(moment), name] for moment, name in record.gateways],
            "events": [repr(event) for event in record.events],
            "faults": [
                f"{_time_of_day(strike.at)} {strike.fault.name} of {strike.process}"
                for strike in strikes
                if record.started <= strike.at <= record.ended
            ],
        }
        for record, violation in load.violations[:_MOST_DETAILS]
    ]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "violations.json").write_text(json.dumps(found, indent=1))


def _logs_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="kvern-chaos-logs-", dir="/tmp"))


async def _templates(chaos: chaos_stack.ChaosStack, options: ChaosOptions) -> list[Template]:
    """Greedy and sampled, one choice and several, with and without a stop string, on all surfaces."""
    choices = random.Random(f"{options.seed}-templates")
    # A request that its client did not name does not outlive a kill of its gateway, but any restart.
    named = [True] if options.kills and "gateway" in options.kinds else [True, False]
    variants = [
        ("completions", 0.0, 1, False),
        ("completions", 1.0, 3, False),
        ("completions", 1.0, 1, True),
        ("chat", 1.0, 1, False),
        ("chat", 0.0, 2, True),
        ("grpc", 0.0, 1, False),
        ("grpc", 1.0, 3, False),
        ("grpc", 1.0, 1, True),
    ]
    found = [
        Template(
            name=f"{surface}-{'sampled' if temperature else 'greedy'}-{n}{'-stop' if stop else ''}",
            surface=surface,
            prompt=choices.choice(_PROMPTS),
            max_tokens=choices.randint(options.max_tokens // 2, options.max_tokens),
            temperature=temperature,
            seed=choices.randrange(1, 2**32),
            n=n,
            stop="?" if stop else "",
        )
        for surface, temperature, n, stop in variants
    ]
    found = [await _with_stop(chaos, template, options.seed) for template in found]
    return [
        replace(template, name=template.name if name else f"{template.name}-unnamed", named=name)
        for name in named
        for template in found
    ]


async def _with_stop(chaos: chaos_stack.ChaosStack, template: Template, seed: int) -> Template:
    """A stop string out of the output's own middle, so that it does end it."""
    if not template.stop:
        return template
    plain = replace(template, stop="", name=f"{template.name}-plain")
    text = (await _expect(chaos, [plain], seed))[plain.name][0].text
    middle = len(text) * 2 // 3
    # Complete characters only: U+FFFD stands for bytes that are none.
    candidates = [text[i : i + 4] for i in range(middle, len(text) - 4) if "\ufffd" not in text[i : i + 4]]
    stop = candidates[0] if candidates else text[middle : middle + 1]
    return replace(template, stop=stop)


async def _expect(
    chaos: chaos_stack.ChaosStack, templates: Sequence[Template], seed: int
) -> dict[str, list[Output]]:
    """The templates' outputs, before anything is broken. Raises RuntimeError where one fails already."""
    load = Load(chaos.gateways, list(templates), {}, seed)
    choices = random.Random(f"{seed}-expected")
    found: dict[str, list[Output]] = {}
    try:
        for template in templates:
            record = await load.request(template, f"chaos-{seed}-expected-{template.name}", choices)
            outputs = outputs_of(record)
            if any(not output.reason for output in outputs):
                raise RuntimeError(f"{template.name} failed before any fault: {record.events[-1]}")
            found[template.name] = outputs
    finally:
        await load.close()
    return found


def _result(
    options: ChaosOptions,
    load: Load,
    strikes: Sequence[Strike],
    elapsed: float,
    stuck: str,
    logs: Path | None,
) -> dict[str, Any]:
    stalls = [stalls_of(strikes, index, load.records) for index in range(len(strikes))]
    by_kind: dict[str, Any] = {}
    blamed = _blame(strikes, load.violations)
    for name in sorted({strike.fault.name for strike in strikes}):
        mine = [one for one, strike in zip(stalls, strikes, strict=True) if strike.fault.name == name]
        joined = [stall for one in mine for stall in one]
        by_kind[name] = {"faults": len(mine), "streams": len(joined), **_percentiles(joined), **blamed[name]}
    worst = sorted(range(len(strikes)), key=lambda index: -max(stalls[index], default=0.0))[:_MOST_WORST]
    details = [
        {
            "request_id": record.request_id,
            "template": record.template.name,
            "kind": violation.kind,
            "choice": violation.choice,
            "detail": violation.detail,
            "began": _time_of_day(record.started),
            "last_event": _time_of_day(record.ended),
            "gateway": record.gateways[-1][1] if record.gateways else None,
        }
        for record, violation in load.violations[:_MOST_DETAILS]
    ]
    return {
        "faults": len(strikes),
        "requests": len(load.records),
        "tokens": load.num_tokens,
        "violations": len(load.violations) + bool(stuck),
        **_percentiles([stall for one in stalls for stall in one]),
        "by_kind": by_kind,
        "worst": [_describe(strikes[index], max(stalls[index], default=0.0)) for index in worst],
        "connections": load.num_connections,
        "seed": options.seed,
        "elapsed_s": elapsed,
        "violation_details": details,
        "stuck": stuck,
        "logs": str(logs) if logs else None,
    }


def _blame(
    strikes: Sequence[Strike], violations: Sequence[tuple[Record, Violation]]
) -> dict[str, dict[str, int]]:
    """Violations by the name of the last fault that their request lived through, and by what was broken."""
    counts = {strike.fault.name: dict.fromkeys(COUNTED, 0) for strike in strikes}
    for record, violation in violations:
        before = [strike for strike in strikes if strike.at <= record.ended]
        if before:
            counts[before[-1].fault.name][_COUNTED_AS[violation.kind]] += 1
    return counts


def _describe(strike: Strike, stall: float) -> dict[str, Any]:
    return {
        "fault": strike.fault.name,
        "process": strike.process,
        "moment": strike.fault.moment,
        "at": _time_of_day(strike.at),
        "ms": round(1000 * stall, 1),
    }


def _time_of_day(moment: float) -> str:
    """To be found in logs."""
    return datetime.fromtimestamp(time() + moment - perf_counter()).strftime("%H:%M:%S.%f")[:-3]


def stalls_of(strikes: Sequence[Strike], index: int, records: Sequence[Record]) -> list[float]:
    """Of each stream that the fault could stall: seconds of the longest wait from it until the next fault. A fault
    among others says nothing, nor does a wait that an earlier one began; a gateway's concerns its own streams only."""
    strike = strikes[index]
    following = strikes[index + 1] if index + 1 < len(strikes) else None
    if not strike.alone or (following is not None and not following.alone):
        return []
    start = strike.at
    end = min(start + WINDOW_S, following.at if following is not None else start + WINDOW_S)
    since = strikes[index - 1].at if index else 0.0
    waits = (
        record.longest_gap(start, end, since)
        for record in records
        if record.started < start < record.ended
        and (strike.fault.kind != "gateway" or record.gateway_at(start) == strike.process)
    )
    return [wait for wait in waits if wait]


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(1000 * ordered[min(int(share * len(ordered)), len(ordered) - 1)], 1) if ordered else 0.0

    return {"stall_ms_p50": at(0.5), "stall_ms_p99": at(0.99), "stall_ms_max": at(1.0)}


def render(result: dict[str, Any]) -> str:
    lines = [
        f"{'fault':<18}{'faults':>7}{'streams':>9}{'p50':>10}{'p99':>10}{'max':>10}"
        f"{'lost':>7}{'missing':>9}{'repeated':>10}{'changed':>9}{'ended twice':>13}",
        *(
            f"{name:<18}{row['faults']:>7}{row['streams']:>9}{row['stall_ms_p50']:>7.0f} ms"
            f"{row['stall_ms_p99']:>7.0f} ms{row['stall_ms_max']:>7.0f} ms"
            f"{row['lost']:>7}{row['missing']:>9}{row['repeated']:>10}{row['changed']:>9}{row['double_finish']:>13}"
            for name, row in result["by_kind"].items()
        ),
        f"{result['faults']} faults, {result['requests']} requests on {result['connections']} connections, "
        f"{result['tokens']} tokens in {result['elapsed_s']:.0f} s (seed {result['seed']})",
        "longest: "
        + ", ".join(
            f"{one['ms']:.0f} ms at {one['at']} ({one['fault']} of {one['process']})"
            for one in result["worst"]
        ),
        f"{result['fenced']} leaders were fenced off",
        f"{result['violations']} violations",
    ]
    if result["stuck"]:
        lines.append(f"  stuck: {result['stuck']}")
    lines += [
        f"  {one['kind']}: {one['request_id']} ({one['template']}), choice {one['choice']}, begun {one['began']}, "
        f"last event {one['last_event']} at {one['gateway']}: {one['detail']}"
        for one in result["violation_details"]
    ]
    if result["logs"]:
        lines.append(f"  logs of the services: {result['logs']}")
    return "\n".join(lines)


def exit_code(result: dict[str, Any]) -> int:
    """1 where anything was lost, repeated or changed."""
    return 1 if result["violations"] else 0

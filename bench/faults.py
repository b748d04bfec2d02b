"""Which check sees which fault? Faults planted one by one, and every instrument put to them.

Question: of the faults that tests/planted_faults.py can plant (a missing wait, swapped or shared
buffers, a counter that is not reset, a slot too few), which are seen by a quiet comparison with
float64, by equal bits under load, by float64 on poisoned memory under load, by the same with delays
put into the streams, by perplexity, by a graph's capture, by the lint? Each instrument is also put
to the same plan without the fault, and must then see nothing.

    python bench/faults.py [--faults ...] [--instruments ...] [--launches N] [--out FILE]

Exit: 0 when every fault was caught by an instrument and none complained without one, 1 otherwise, 2
without a GPU. Other instruments (the lag detector, compute-sanitizer) add their records to the same
file through ``merge``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import torch
from planted_faults import FAULTS, Fault, healthy, planted

from bench.fault_instruments import INSTRUMENTS, Looker, Seen, applies
from flashnorm_triton import results
from flashnorm_triton.bench import report, running

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
FILE = "faults.json"


def record_of(
    fault: Fault, instrument: str, look: Callable[[str, Fault, bool], Seen], reason: str | None
) -> dict[str, Any]:
    """One record: the instrument on the fault, then on the same plan without it."""
    record: dict[str, Any] = {"fault": fault.name, "instrument": instrument}
    if reason is not None:
        nothing = {"caught": None, "launches": None, "seconds": None, "false_alarm": None}
        return {**record, **nothing, "detail": reason}
    around: tuple[Callable[[str], AbstractContextManager[Any]], ...] = (planted, healthy)
    seen = []
    for faulty, within in zip((True, False), around, strict=True):
        started = time.monotonic()
        with within(fault.name):
            seen.append((look(instrument, fault, faulty), time.monotonic() - started))
    (found, seconds), (control, _) = seen
    return {
        **record,
        "caught": found.caught,
        "launches": found.launches,
        "seconds": round(seconds, 3),
        "detail": found.detail,
        "false_alarm": control.caught,
        "control": control.detail,
    }


def merge(path: Path, head: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """Put records into a result file in the place of those of the same fault and instrument.

    Records of other kernels are dropped: what was seen of those says nothing of these.
    """
    kept: dict[tuple[str, str], Mapping[str, Any]] = {}
    if path.exists():
        found = results.load(path)
        same = (found.header["kernel_hash"], found.header["gpu"]) == (
            head["kernel_hash"], head["gpu"],
        )  # fmt: skip
        kept = {(r["fault"], r["instrument"]): r for r in found.records} if same else {}
    kept |= {(record["fault"], record["instrument"]): record for record in records}
    order = {name: place for place, name in enumerate(FAULTS)}
    results.save(path, head, sorted(kept.values(), key=lambda r: order.get(r["fault"], 99)))


MARKS = {True: "seen", False: "missed", None: "–"}


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Fault by instrument in Markdown: seen (after how many launches), missed, or – (no say)."""
    instruments = list(dict.fromkeys(r["instrument"] for r in records))
    cells = {(r["fault"], r["instrument"]): r for r in records}
    lines = ["| fault | " + " | ".join(instruments) + " |", "|---" * (len(instruments) + 1) + "|"]
    for fault in dict.fromkeys(r["fault"] for r in records):
        row = [f"`{fault}`"]
        for instrument in instruments:
            cell = cells.get((fault, instrument), {"caught": None, "launches": None})
            told = MARKS[cell["caught"]]
            if cell["caught"] and cell["launches"]:
                told = f"**{told}** ({cell['launches']})"
            elif cell["caught"]:
                told = f"**{told}**"
            row.append(told)
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def verdicts(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong: faults that nothing saw, instruments that complained without one."""
    wrong = []
    for name in dict.fromkeys(r["fault"] for r in records):
        mine = [r["caught"] for r in records if r["fault"] == name]
        if not any(mine) and any(caught is False for caught in mine):
            wrong.append(f"{name}: no instrument saw it")
    wrong += [
        f"{r['instrument']} complained of {r['fault']}'s plan without the fault: {r['control']}"
        for r in records
        if r.get("false_alarm")
    ]
    return wrong


def run(args: argparse.Namespace) -> int:
    log = report.Log()
    torch.manual_seed(0)
    head = running.header()
    path = running.result_file(args.out, head["gpu"], FILE, folder=RESULTS)
    look = Looker(args.launches)
    records: list[dict[str, Any]] = []
    # A capture that ended in an error comes last: it may leave its mark on the process.
    pairs = [(i, f) for i in args.instruments for f in args.faults]
    pairs.sort(key=lambda pair: pair[0] == "graph" and "graph" in FAULTS[pair[1]].instruments)
    for instrument, name in pairs:
        fault = FAULTS[name]
        try:
            reason = applies(fault, instrument)
            if reason is None:
                look.prepare(instrument)
            record = record_of(fault, instrument, look, reason)
        except Exception as error:
            record = {"fault": name, "instrument": instrument}
            record["error"] = f"{type(error).__name__}: {error}"[:500]
        records.append(record)
        log(
            f"{name} / {instrument}: {record.get('caught')} {record.get('launches')} "
            f"{record.get('detail') or record.get('error')}; control {record.get('control')}"
        )
        merge(path, head, records)
    whole = results.load(path).records
    good = report.measured(whole)
    print(table(good), flush=True)
    wrong = verdicts(good) + [f"{r['fault']} / {r['instrument']}: {r['error']}"
                              for r in whole if r.get("error")]  # fmt: skip
    print("\n".join(wrong) or "every fault was seen, and nothing else", flush=True)
    return running.ended(log, path, failed=bool(wrong))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = running.parser(__doc__, folder=RESULTS)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--instruments", nargs="+", choices=INSTRUMENTS, default=list(INSTRUMENTS))
    parser.add_argument("--launches", type=int, default=2000, help="at most, a check (2000)")
    args = parser.parse_args(argv)
    if args.launches < 2:
        parser.error(f"--launches {args.launches}: at least 2")
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    return running.on_gpu("faults", lambda: run(args))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

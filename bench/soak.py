"""Does a bit ever move? Every plan family, launched 100,000 times under contention.

Question: over very many launches, while other streams keep the GPU busy, on fresh memory filled
with NaN, does any launch of a plan that this package can choose give other bits than its first
one, which was right against float64? A race or a forgotten write shows here, if anywhere.

    python bench/soak.py [--launches N] [--seconds S] [--members M] [--families ...] [--out FILE]
    python bench/soak.py --list [--out FILE]    how long each family will take, by the last run

Launches come from CUDA graphs of many and one by one, on streams drawn at random, three at a time
beside copies and matmuls on a fourth. Outputs are compared on the device; the host reads one count
a member and batch. A run goes on from the counts in its file while kernels, versions and GPU are
the same (``--fresh`` begins anew); families that were short of launches come first, and the time is
shared by what each will take. Exit: 0 when every family reached its launches and no bit moved, 1
when one did, was wrong or is short of launches, 2 for bad arguments or no GPU.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from bench.soak_forecast import Past, listing, past, short_first
from flashnorm_triton import results
from flashnorm_triton.bench import report, running

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
FILE = "soak.json"
LAUNCHES = 100_000
STREAMS = 3
_BATCH = 24
_PLAIN_SHARE = 0.25  # of the picks; a graph's holds many times more launches
_SAME = ("gpu", "torch", "triton", "kernel_hash")


class Launcher(Protocol):
    """A member that can be launched: ``soak_members.Ready``, or a stand-in of a test.

    ``us``: about how long one replay of its graph takes.
    """

    us: float

    def replay(self, stream: int) -> int: ...

    def launch(self, stream: int) -> int: ...

    def settle(self) -> int: ...


@dataclass
class Tally:
    """Launches and, of those, with other bits, one number a member; ``plain``: one by one."""

    launches: list[int]
    mismatches: list[int]
    plain: int = 0
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.launches)


def soak(
    members: Sequence[Launcher],
    *,
    wanted: int,
    seconds: float,
    rng: random.Random,
    load: Callable[[float], None],
    synchronize: Callable[[], None],
    streams: int = STREAMS,
    clock: Callable[[], float] = time.monotonic,
) -> Tally:
    """Launch members at random until there were ``wanted`` launches or the time is up.

    ``load(us)`` enqueues about ``us`` microseconds of work that disturbs. Work is enqueued in
    batches; after each, ``synchronize`` waits for the GPU and the mismatches are read.
    """
    tally = Tally([0] * len(members), [0] * len(members))
    started = clock()
    while tally.total < wanted and clock() - started < seconds:
        for _ in range(_BATCH):
            place, stream = rng.randrange(len(members)), rng.randrange(streams)
            member = members[place]
            load(member.us)
            if rng.random() < _PLAIN_SHARE:
                count = member.launch(stream)
                tally.plain += count
            else:
                count = member.replay(stream)
            tally.launches[place] += count
        synchronize()
        for place, member in enumerate(members):
            tally.mismatches[place] += member.settle()
    tally.seconds = clock() - started
    return tally


@dataclass
class Family:
    """What is known of a family so far: its record in the making."""

    name: str
    launches: int = 0
    plain: int = 0
    mismatches: int = 0
    seconds: float = 0.0
    setup_seconds: float = 0.0
    members: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None

    def add(self, tally: Tally, described: Sequence[Mapping[str, Any]]) -> None:
        """Count a run of the members that ``described`` names, in their order."""
        self.launches += tally.total
        self.plain += tally.plain
        self.mismatches += sum(tally.mismatches)
        self.seconds += tally.seconds
        known = {_name(member): member for member in self.members}
        for what, launches, moved in zip(described, tally.launches, tally.mismatches, strict=True):
            member = known.get(_name(what))
            if member is None:
                member = {**what, "launches": 0, "mismatches": 0}
                self.members.append(member)
            member["launches"] += launches
            member["mismatches"] += moved

    def bad(self) -> str | None:
        """Why the family has failed, or None."""
        if self.error:
            return self.error
        wrong = [member for member in self.members if member.get("error")]
        if wrong:
            return f"{wrong[0]['plan']}: {wrong[0]['error']}"
        if self.mismatches:
            moved = max(self.members, key=lambda member: member["mismatches"])
            return f"other bits in {self.mismatches} launches, most with {moved['plan']}"
        return None

    def record(self, wanted: int) -> dict[str, Any]:
        """The record of the result file."""
        record: dict[str, Any] = {
            "family": self.name,
            "launches": self.launches,
            "plain_launches": self.plain,
            "mismatches": self.mismatches,
            "goal_launches": wanted,
            "goal_met": self.launches >= wanted and self.bad() is None,
            "seconds": self.seconds,
            "setup_seconds": self.setup_seconds,
            "members": self.members,
        }
        return {**record, "error": self.error} if self.error else record


def _name(member: Mapping[str, Any]) -> str:
    return f"{member['problem']} {member['plan']}"


def resumed(path: Path, head: Mapping[str, Any]) -> dict[str, Family]:
    """The families of an earlier run with the same kernels, versions and GPU; none of any other.

    One that failed begins anew: its failure must show again, or be gone.
    """
    try:
        loaded = results.load(path)
    except results.ResultsError:
        return {}
    if any(loaded.header[name] != head[name] for name in _SAME):
        return {}
    known = {}
    for record in loaded.records:
        if record.get("error"):
            continue
        family = Family(
            record["family"],
            record["launches"],
            record["plain_launches"],
            record["mismatches"],
            record["seconds"],
            record.get("setup_seconds", 0.0),
            list(record["members"]),
        )
        if family.bad() is None:
            known[family.name] = family
    return known


def table(records: Sequence[Mapping[str, Any]], wanted: int) -> str:
    """Launches and mismatches of every family, and the verdict."""
    width = max((len(record["family"]) for record in records), default=10)
    lines = ["", f"{'family':<{width}} {'members':>8} {'launches':>10} {'mismatches':>11}"]
    for record in records:
        told = record.get("error") or ("" if record["goal_met"] else "short, or wrong")
        lines.append(
            f"{record['family']:<{width}} {len(record['members']):>8} "
            f"{record['launches']:>10,} {record['mismatches']:>11} {told}"
        )
    met = sum(record["goal_met"] for record in records)
    lines.append(f"families with {wanted:,} launches and no moved bit: {met} of {len(records)}")
    return "\n".join(lines)


def run_all(
    families: Mapping[str, Sequence[Any]],
    known: dict[str, Family],
    *,
    ready: Callable[[Any], Launcher],
    describe: Callable[[Any, Launcher | None], dict[str, Any]],
    save: Callable[[list[dict[str, Any]]], None],
    wanted: int,
    seconds: float,
    log: report.Log,
    before: Mapping[str, Past] | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """Soak every family that is short of launches, saving after each; the records.

    The time left is shared by the families that are left, in proportion to what ``before`` says
    that each will take; one that it does not know counts as the mean of the others. A member that
    cannot be made ready is recorded with its error, and the others go on; an error while launching
    ends the run, for the GPU's context may be lost.
    """
    found = {**known, **{name: known.get(name, Family(name)) for name in families}}
    short = [name for name in families if found[name].launches < wanted]
    ends = log.seconds + seconds
    went = before or {}
    needs = {
        name: went[name].needs(wanted - found[name].launches) for name in short if name in went
    }
    needs = {name: need for name, need in needs.items() if need}
    mean = sum(needs.values()) / len(needs) if needs else 1.0

    def records() -> list[dict[str, Any]]:
        return [family.record(wanted) for family in found.values()]

    for number, name in enumerate(short):
        family = found[name]
        launchers, described = [], []
        started = log.seconds
        share = (ends - started) * needs.get(name, mean)
        share /= sum(needs.get(other, mean) for other in short[number:])
        for member in families[name]:
            try:
                launchers.append(ready(member))
                described.append(describe(member, launchers[-1]))
            except ValueError as error:
                failed = {**describe(member, None), "launches": 0, "mismatches": 0}
                family.members.append({**failed, "error": str(error)[:500]})
        try:
            if launchers:
                setup = log.seconds - started
                family.setup_seconds += setup
                share = max(0.0, share - setup)
                tally = soak(launchers, wanted=wanted - family.launches, seconds=share, **options)
                family.add(tally, described)
        except Exception as error:
            family.error = f"{type(error).__name__}: {error}"[:2000]
            save(records())
            log(f"{name}: {family.error}")
            break
        save(records())
        log(
            f"{number + 1}/{len(short)} {name}: {family.launches:,} launches, "
            f"{family.mismatches} with other bits" + (f", {family.bad()}" if family.bad() else "")
        )
    save(records())
    return records()


def run(args: argparse.Namespace) -> int:
    from bench import soak_blocks, soak_members
    from flashnorm_triton.tuning.build import Job, Pool
    from flashnorm_triton.tuning.rig import Rig, make_room

    log = report.Log()
    rng = random.Random(args.seed)
    torch.manual_seed(args.seed)
    rig = Rig()
    head = running.header()
    path = running.result_file(args.out, head["gpu"], FILE, folder=RESULTS)
    before = past(path)
    pool = soak_members.with_epilogues(soak_members.pool(rig.gpu, rig.device))
    families: dict[str, Any] = soak_members.families(pool, rig.device, args.members, rng)
    families |= soak_blocks.families(rng, args.members)
    families = {
        name: members
        for name, members in short_first(families, before).items()
        if not args.families or any(word in name for word in args.families)
    }
    compiler = Pool(args.jobs or max(1, len(os.sched_getaffinity(0)) - 2))
    every = [member for members in families.values() for member in members]
    builds = {
        member: compiler.submit(Job(member.plan, member.problem, rig.device, rig.target))
        for member in every
        if isinstance(member, soak_members.Member)
    }
    streams = [torch.cuda.Stream() for _ in range(STREAMS)]
    log(f"{head['gpu']}: {len(families)} families, {len(every)} members")

    def ready(member: soak_members.Member | soak_blocks.Member) -> soak_members.Ready:
        make_room()
        if isinstance(member, soak_blocks.Member):
            made = soak_blocks.make_ready(member, streams)
        else:
            built = builds[member].result()
            if built.error or built.findings:
                raise ValueError(built.error or f"lint: {built.findings[0]}")
            made = soak_members.make_ready(member, streams)
        made.capture(rig.backend)
        return made

    try:
        records = run_all(
            families,
            {} if args.fresh else resumed(path, head),
            ready=ready,
            describe=soak_members.describe,
            save=lambda records: results.save(path, head, records),
            wanted=args.launches,
            seconds=args.seconds,
            log=log,
            before=before,
            rng=rng,
            load=lambda us: rig.load(max(1, round(us / rig.load.us))),
            synchronize=torch.cuda.synchronize,
        )
    finally:
        compiler.close()
        rig.close()
    print(table(records, args.launches), flush=True)
    met = bool(records) and all(record["goal_met"] for record in records)
    return running.ended(log, path, failed=not met)


def forecast(args: argparse.Namespace) -> int:
    gpu = torch.cuda.get_device_name()
    print(listing(running.result_file(None, gpu, FILE, folder=RESULTS), args.launches))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = running.parser(__doc__, folder=RESULTS)
    parser.add_argument("--launches", type=int, default=LAUNCHES, help="a family (100000)")
    parser.add_argument("--seconds", type=float, default=420.0, help="then stop launching (420)")
    parser.add_argument("--members", type=int, default=6, help="plans and sizes a family (6)")
    parser.add_argument("--families", nargs="+", help="only families with one of these words")
    parser.add_argument("--list", action="store_true", help="say how long a run will take, and end")
    parser.add_argument("--fresh", action="store_true", help="begin anew, whatever the file has")
    parser.add_argument("--jobs", type=int, help="compiling processes; left out: CPU cores but two")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    for name in ("launches", "seconds", "members"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} {getattr(args, name)}: it must be more than 0")
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    if args.list and args.out:
        print(listing(args.out, args.launches))
        return 0
    hint = "--list works without one, with --out FILE" if args.list else None
    return running.on_gpu("soak", lambda: forecast(args) if args.list else run(args), hint=hint)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

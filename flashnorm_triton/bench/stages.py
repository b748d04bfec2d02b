"""What ``flashnorm bench`` runs: its words checked and turned into the arguments of each bench."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from flashnorm_triton.bench import decoders
from flashnorm_triton.bench.running import DTYPES
from flashnorm_triton.bench.shapes import parse_shapes
from flashnorm_triton.tuning import sites

DEFAULT_MODEL = "llama-3.2-1b"
DEFAULT_WHAT = ("op", "decode", "prefill", "generate")
_QUICK_NEW = "32"  # generated tokens
_OWN_QUICK = ("op", "ablation", "profile", "paper")
# Graph is compared with graph, compiled with compiled.
_BOTH = ("graph", "reduce-overhead")
_MODES = {
    ("decode", False): ("--levels", "auto", "--batches", "1", "8",
                        "--baselines", *_BOTH, "--modes", *_BOTH),
    ("decode", True): ("--levels", "auto", "--batches", "1", "--baselines", "graph",
                       "--modes", "graph", "--rounds", "7"),
    ("prefill", False): ("--levels", "auto"),
    ("prefill", True): ("--levels", "auto", "--baselines", "eager", "--modes", "eager",
                        "--rounds", "7"),
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """One bench of ``flashnorm_triton.bench``. ``cost``: its share of a time limit; ``model``:
    whether it runs a model."""

    module: str
    cost: float
    model: bool = True


KINDS = {
    "op": Kind("norm_linear", 8, model=False),
    "decode": Kind("decode", 4),
    "prefill": Kind("prefill", 1),
    "generate": Kind("generate", 2),
    "ablation": Kind("ablation", 2),
    "profile": Kind("profile", 2),
    "paper": Kind("paper", 2, model=False),
}


@dataclass(frozen=True)
class Options:
    """What was asked for. ``models`` and ``shapes`` empty, ``tokens`` None: the defaults."""

    what: tuple[str, ...] = DEFAULT_WHAT
    models: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    tokens: tuple[int, ...] | None = None
    dtype: str = "bf16"
    quick: bool = False


@dataclass(frozen=True)
class Stage:
    """One bench with its arguments, but for those of folder and time."""

    name: str
    kind: Kind
    argv: tuple[str, ...]

    @property
    def file(self) -> str:
        """The result file that it writes first."""
        plain = self.name != "op" or "fp16" not in self.argv
        return f"{self.kind.module}.json" if plain else f"{self.kind.module}_fp16.json"


def parse(
    *,
    model: Sequence[str] = (),
    shapes: str | None = None,
    what: str | None = None,
    dtype: str = "bf16",
    tokens: str | None = None,
    quick: bool = False,
) -> Options:
    """The options from words. Raises ValueError that names the word and what to give instead."""
    if model and shapes:
        raise ValueError("give --model or --shapes, not both: a model's shapes are read from it")
    chosen = _words(what) or (("op",) if shapes else DEFAULT_WHAT)
    for word in chosen:
        if word not in KINDS:
            raise ValueError(f"--what {word}: give one or several of {', '.join(KINDS)}")
        if shapes and KINDS[word].model:
            raise ValueError(f"--what {word} runs a model: give --model in place of --shapes")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype}: give {' or '.join(DTYPES)}")
    named = _words(shapes)
    parse_shapes(named)
    for name in model:
        decoders.known(name)
    rows = sites.parse_tokens(tokens) if tokens else None
    return Options(chosen, tuple(dict.fromkeys(model)), named, rows, dtype, quick)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(","))) if text else ()


def plan(options: Options) -> list[Stage]:
    """The stages in the order in which they run.

    A model's config is read, no weights. Raises ValueError where it cannot be, is none of a causal
    language model, or has nothing to fuse.
    """
    found = {name: sites.sites_of(sites.skeleton(decoders.config_of(name)))
             for name in options.models}  # fmt: skip
    models = options.models or (DEFAULT_MODEL,)
    return [
        Stage(name, KINDS[name], tuple(_arguments(name, options, its, found)))
        for name in options.what
        for its in ([(model,) for model in models] if name == "generate" else [models])
    ]


def _arguments(
    name: str,
    options: Options,
    models: Sequence[str],
    found: Mapping[str, Sequence[sites.Site]],
) -> Iterator[str]:
    yield from ("--resume", *(["--quick"] if options.quick and name in _OWN_QUICK else []))
    if name != "paper":
        yield from ("--dtype", options.dtype)
    if name == "op":
        cells = options.shapes or [
            f"{decoders.label(model)}.{site.k}x{site.n}={site.k}x{site.n}"
            for model, its in found.items()
            for site in its
        ]
        yield from ("--shapes", *cells) if cells else ()
        yield from ("--tokens", *map(str, options.tokens)) if options.tokens else ()
    elif name == "generate":
        yield from ("--model", *models)
        yield from ("--modes", "eager", "--new", _QUICK_NEW) if options.quick else ()
    elif KINDS[name].model:
        yield from ("--models", *models)
        yield from _MODES.get((name, options.quick), ())

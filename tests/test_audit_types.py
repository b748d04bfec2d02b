"""One run over every language model type of the installed transformers: none raises."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor

import pytest

_MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
)
_LAYERS = 1
_AT_LEAST = 170
_PROCESSES, _PORTIONS = 2, 4


def _language_model_types() -> list[str]:
    from transformers.models.auto import modeling_auto

    from flashnorm_triton.models.skeleton import model_types

    named = {name for mapping in _MAPPINGS for name in getattr(modeling_auto, mapping)}
    return [name for name in model_types() if name in named]


def audit_types(names: list[str]) -> dict[str, tuple[str, str]]:
    """What becomes of each type: ("unbuilt" | "unfollowed" | "fused" | "kept" | "raised", why)."""
    import torch
    from transformers.utils import logging

    from flashnorm_triton.models import audit
    from flashnorm_triton.models.skeleton import from_type

    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {}
    for name in names:
        try:
            model = from_type(name, _LAYERS)
        except ValueError as error:  # transformers cannot build it from its defaults
            found[name] = ("unbuilt", str(error).splitlines()[0])
            continue
        try:
            report = audit(model)
        except Exception as error:
            found[name] = ("raised", f"{type(error).__name__}: {error}")
            continue
        failures = [site.reason for site in report.sites if "could not be" in site.reason]
        if failures or not all(site.reason for site in report.sites):
            found[name] = ("unfollowed", (failures or ["a site without a reason"])[0])
        else:
            found[name] = ("fused" if report.fused else "kept", report.summary())
    return found


def test_every_language_model_type_is_audited(capsys: pytest.CaptureFixture[str]) -> None:
    names = _language_model_types()
    portions = [names[start::_PORTIONS] for start in range(_PORTIONS)]
    workers = min(_PROCESSES, os.cpu_count() or 1)
    context = multiprocessing.get_context("spawn")
    found: dict[str, tuple[str, str]] = {}
    with ProcessPoolExecutor(workers, context, max_tasks_per_child=1) as pool:
        for portion in pool.map(audit_types, portions):
            found |= portion
    of = {
        kind: {name: why for name, (what, why) in sorted(found.items()) if what == kind}
        for kind in ("raised", "unbuilt", "unfollowed", "fused", "kept")
    }
    audited = len(found) - len(of["unbuilt"]) - len(of["raised"])
    followed = audited - len(of["unfollowed"])
    with capsys.disabled():
        print(
            f"\n{audited} types audited, {followed} followed, {len(of['fused'])} with sites fused"
        )
        print(f"{len(of['unbuilt'])} not built from their defaults: {', '.join(of['unbuilt'])}")
        for name, why in of["unfollowed"].items():
            print(f"  {name}: {why[:160]}")
    assert not of["raised"]
    assert set(found) == set(names)
    assert followed >= _AT_LEAST
    assert len(of["fused"]) >= 0.6 * audited

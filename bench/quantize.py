"""What does folding the norm gains do to the error of quantizing the weights afterwards?

Weight-only int8 and int4 by torchao, of the source and of the folded checkpoint, both judged by the
source in float64: the shipped trained model, and random models with ever more uneven gains. Folded
once whole and once with ``max_crest``. Runs on a CPU in a few minutes; every figure of the table in
docs/fold.md is from its result file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import flashnorm_triton as fn  # noqa: E402
from flashnorm_triton.algebra import effective_gain  # noqa: E402
from flashnorm_triton.atomic import write_text  # noqa: E402
from flashnorm_triton.demo_model import FOLDER  # noqa: E402

MAX_CREST = 2.0
_TURNS = itertools.count()
GAINS: dict[str, Callable[[int], Tensor]] = {
    "random, gains 0.5 to 1.5": lambda n: 0.5 + torch.rand(n),
    "random, gains 0.1 to 3, both signs": lambda n: (
        (0.1 + 2.9 * torch.rand(n)) * torch.where(torch.rand(n) < 0.5, -1.0, 1.0)
    ),
    "random, log-normal gains, sigma 0.5": lambda n: torch.exp(0.5 * torch.randn(n)),
    "random, log-normal gains, sigma 1": lambda n: torch.exp(torch.randn(n)),
    "random, half of the norms 0.5 to 1.5, half log-normal, sigma 1": lambda n: (
        0.5 + torch.rand(n) if next(_TURNS) % 2 else torch.exp(torch.randn(n))
    ),
}


def schemes() -> dict[str, Any]:
    """torchao's weight-only configurations that run on a CPU, by the name used in the table."""
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerAxis, PerGroup, PerTensor

    return {
        "int8 per row": Int8WeightOnlyConfig(),
        "int8 per tensor": Int8WeightOnlyConfig(granularity=PerTensor()),
        "int4 per row": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerAxis(0)),
        "int4 groups of 32": IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=PerGroup(32)
        ),
    }


def quantized(folder: Path, config: Any) -> nn.Module:
    """The model of a folder in float32 with every linear quantized; half precision's own rounding
    would hide what int8 does."""
    from torchao.quantization import quantize_
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    quantize_(model, config)
    return model


@torch.no_grad()
def logit_error(model: nn.Module, ids: Tensor, wanted: Tensor) -> float:
    """Relative Frobenius error of the logits."""
    return float((model(ids).logits.double() - wanted).norm() / wanted.norm())


@torch.no_grad()
def weight_errors(model: nn.Module, exact: nn.Module, record: dict[str, Any]) -> list[float]:
    """For each folded weight: ‖(Q(W) − W)·diag(g)‖ / ‖W·diag(g)‖ with the norm's gain g as loaded,
    which is the output's relative error on a normalised input of independent entries."""
    errors = []
    for fold in record["folds"]:
        gain = effective_gain(model.get_submodule(fold["norm"]).weight, fold["convention"])
        true = effective_gain(exact.get_submodule(fold["norm"]).weight, fold["convention"])
        for target in fold["into"]:
            path = target["tensor"].removesuffix(".weight")
            weight = model.get_submodule(path).weight
            got = weight.dequantize().double() * gain.double()
            wanted = exact.get_submodule(path).weight * true
            errors.append(float((got - wanted).norm() / wanted.norm()))
    return errors


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def random_model(folder: Path, gains: Callable[[int], Tensor]) -> None:
    """A random Llama whose norms have these gains."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1024,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(gains(len(parameter)))
            elif "embed" in name:
                parameter.normal_()
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def measure(name: str, source: Path, work: Path) -> list[dict[str, Any]]:
    """One record a scheme."""
    from transformers import AutoModelForCausalLM

    whole = fn.fold_checkpoint(source, work / "whole", progress=False).record
    try:
        even = fn.fold_checkpoint(source, work / "even", max_crest=MAX_CREST, progress=False).record
    except ValueError:  # every gain is too uneven: nothing would be folded
        even = None
    exact = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).eval()
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, exact.config.vocab_size, (8, 128), generator=generator)
    with torch.no_grad():
        wanted = exact(ids).logits
    records = []
    for scheme, config in schemes().items():
        before, after = quantized(source, config), quantized(work / "whole", config)
        errors = [weight_errors(model, exact, whole) for model in (before, after)]
        ratios = [two / one for one, two in zip(*errors, strict=True)]
        stock, folded = (logit_error(model, ids, wanted) for model in (before, after))
        chosen = stock
        if even is not None:
            chosen = logit_error(quantized(work / "even", config), ids, wanted)
        records.append(
            {
                "model": name,
                "scheme": scheme,
                "norms": len(whole["folds"]),
                "largest_crest": max(fold["crest"] for fold in whole["folds"]),
                "weight_error_source": geomean(errors[0]),
                "weight_error_folded": geomean(errors[1]),
                "weight_ratio": geomean(ratios),
                "weight_ratio_worst": max(ratios),
                "logit_error_source": stock,
                "logit_error_folded": folded,
                "logit_ratio": folded / stock,
                "norms_folded_with_max_crest": len(even["folds"]) if even else 0,
                "logit_ratio_with_max_crest": chosen / stock,
            }
        )
        print(
            f"{name}, {scheme}: weights {records[-1]['weight_ratio']:.2f}, logits "
            f"{records[-1]['logit_ratio']:.2f}, with max_crest {chosen / stock:.2f}",
            flush=True,
        )
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/cpu/quantize.json")
    options = parser.parse_args()
    records = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        records += measure("trained (the shipped model)", FOLDER, folder / "trained")
        for number, (title, gains) in enumerate(GAINS.items()):
            work = folder / str(number)
            random_model(work / "source", gains)
            records += measure(title, work / "source", work)
    result = {
        "schema": 1,
        "torch": torch.__version__,
        "torchao": metadata.version("torchao"),
        "transformers": metadata.version("transformers"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "max_crest": MAX_CREST,
        "records": records,
    }
    write_text(options.out, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

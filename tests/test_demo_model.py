"""The shipped model is what its card says: small, trained, split as told, and complete."""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch

from flashnorm_triton import demo_model

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def trainer():
    """bench/train_demo_model.py as a module."""
    path = ROOT / "bench" / "train_demo_model.py"
    spec = importlib.util.spec_from_file_location("train_demo_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_model_is_small_grouped_query_untied() -> None:
    assert (demo_model.FOLDER / "model.safetensors").stat().st_size <= 4_000_000
    assert len(demo_model.heldout_text().encode()) <= 60_000
    model = demo_model.load()
    config = model.config
    assert config.num_key_value_heads < config.num_attention_heads
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.training and not any(p.requires_grad for p in model.parameters())
    assert model.num_parameters() == demo_model.training()["parameters"]


def test_gains_are_visibly_trained() -> None:
    recorded = demo_model.training()["gains"]
    model = demo_model.load()
    gains = {n: p.float() for n, p in model.named_parameters() if "norm" in n}
    assert gains.keys() == recorded.keys() and len(gains) == 13
    for name, gain in gains.items():
        assert gain.std() > 0.1, f"{name}: nearly constant gains"
        assert (gain - 1).abs().max() > 0.3, f"{name}: all gains near 1"
        assert gain.std().item() == pytest.approx(recorded[name]["std"], abs=1e-3)


def test_heldout_perplexity_is_the_recorded_one() -> None:
    model = demo_model.load(torch.float32)
    ids = demo_model.tokenizer()(demo_model.heldout_text(), verbose=False)["input_ids"]
    rows = torch.tensor(ids[: 4 * 1024]).view(4, 1024)
    with torch.no_grad():
        loss = model(rows, labels=rows).loss.item()
    # The record is over the whole excerpt; its first part is as hard within a factor.
    assert math.exp(loss) == pytest.approx(demo_model.training()["excerpt_perplexity"], rel=0.5)
    shuffled = rows[:, torch.randperm(1024)]
    with torch.no_grad():
        assert model(shuffled, labels=shuffled).loss.item() > loss + 1


def test_tokenizer_round_trips_any_text() -> None:
    tokenizer = demo_model.tokenizer()
    for text in (demo_model.heldout_text()[:2000], "naïve λ → 日本語\t\r\n\x00", ""):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids("<|file|>") == tokenizer.eos_token_id == 0


def test_card_states_the_recorded_figures() -> None:
    card = (demo_model.FOLDER / "MODEL_CARD.md").read_text()
    record = demo_model.training()
    for figure in (
        f"{record['parameters']:,} parameters",
        f"{record['steps']} steps",
        f"{record['heldout_perplexity']:.1f} a token",
        f"{record['heldout_perplexity_per_byte']:.2f} a byte",
        f"{record['excerpt_perplexity']:.1f} a token over the excerpt",
        f"{record['train_loss']:.2f} on training text",
        f"{record['heldout_loss']:.2f} on held-out",
        str(record["gain_lr"]),
        str(record["data"]["train"]["files"]),
    ):
        assert figure in card, f"MODEL_CARD.md does not say {figure!r}"


def test_missing_weights_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "FOLDER", tmp_path)
    for call in (demo_model.load, demo_model.tokenizer, demo_model.heldout_text):
        with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
            call()


def test_training_text_is_deterministic_split_and_free_of_heldout(trainer) -> None:
    files = trainer.stdlib_files()
    assert list(files) == sorted(files) and len(files) > 200
    assert not any("site-packages" in name or "/test/" in name for name in files)
    parts = {name: trainer.part_of(name) for name in files}
    shares = {p: sum(v == p for v in parts.values()) / len(parts) for p in set(parts.values())}
    assert shares["train"] > 0.85 and shares["heldout"] > 0.01 and shares["validation"] > 0.005
    assert trainer.part_of("json/decoder.py") == trainer.part_of("json/decoder.py")
    training = "\0".join(text for name, text in files.items() if parts[name] == "train")
    excerpt = trainer.excerpt_of({n: t for n, t in files.items() if parts[n] == "heldout"})
    assert 20_000 < len(excerpt.encode()) <= trainer.EXCERPT_BYTES
    lines = [line for line in excerpt.splitlines() if len(line) > 60]
    assert sum(line in training for line in lines) < 0.1 * len(lines)


def test_training_step_lowers_the_loss_and_moves_the_gains(trainer) -> None:
    """The training loop on a made-up language, two layers and a few steps."""
    config = trainer.model_config()
    config.num_hidden_layers = 2
    model = trainer.LlamaForCausalLM(config)
    data = torch.arange(60_000) % 97 + 1
    arguments = ["--out", "unused", "--device", "cpu", "--steps", "12", "--warmup", "2"]
    args = trainer.arguments([*arguments, "--tokens-per-step", "512", "--eval-every", "1000"])
    first = trainer.evaluate(model, data[:2050])
    figures = trainer.train(model, {"train": data, "validation": data[:2050]}, args)
    assert figures["steps"] == 12 and figures["validation_loss"] < first - 1
    assert max(s["std"] for s in trainer.gain_statistics(model).values()) > 0.02

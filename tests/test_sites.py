"""Which cells are tuned: from a model's config alone, or from words."""

from __future__ import annotations

import json

import pytest
import torch

from flashnorm_triton import tables
from flashnorm_triton.tuning import sites


def write_config(folder, **fields) -> str:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "tie_word_embeddings": True,
        **fields,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_sites_are_read_from_the_config_alone(tmp_path):
    """q|k|v and gate|up, packed; what the audit keeps (here the final norm) is no site."""
    folder = write_config(tmp_path)
    for name in (folder, f"{folder}/config.json"):
        model = sites.skeleton(name)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert sites.sites_of(model) == (sites.Site(64, 64 + 32 + 32), sites.Site(64, 320))


def test_a_bias_is_part_of_the_site(tmp_path):
    folder = write_config(tmp_path, model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    found = set(sites.sites_of(sites.skeleton(folder)))
    assert found == {sites.Site(64, 128, has_bias=True), sites.Site(64, 320)}


def test_what_is_tuned_is_what_patch_launches(tmp_path):
    """The keys of the tuned cells are those that a patched model looks up."""
    from flashnorm_triton.models import patch
    from flashnorm_triton.models.installers import sites_of

    folder = write_config(tmp_path)
    cells = sites.problems(sites.sites_of(sites.skeleton(folder)), ("float32",), (1,))
    with torch.device("cpu"):
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    patch(model)
    fused = [site for site in sites_of(model) if site.report.decision == "fuse"]
    launched = {site.buffers["packed_weight"].shape for site in fused}
    assert {(problem.n, problem.k) for problem in cells} == launched


def test_a_layer_norm_is_tuned_as_one(tmp_path):
    fields = {"n_embd": 64, "n_layer": 1, "n_head": 2, "vocab_size": 96, "n_positions": 32}
    folder = write_config(tmp_path, model_type="gpt2", architectures=["GPT2LMHeadModel"], **fields)
    found = sites.sites_of(sites.skeleton(folder))
    assert sites.Site(64, 192, has_bias=True, centred=True) in found
    cells = sites.problems(found, tokens=(1,), epilogues=sites.parse_epilogues("plain,silu+gated"))
    assert {cell.epilogue for cell in cells} == {"centred", "centred+silu+gated"}


def test_consumers_that_normalise_for_themselves_are_cells_of_their_own(monkeypatch):
    from flashnorm_triton import models
    from flashnorm_triton.models.report import AuditReport, SiteReport

    model = torch.nn.ModuleDict(
        {"q": torch.nn.Linear(64, 96), "k": torch.nn.Linear(64, 32, bias=False)}
    )
    site = SiteReport(
        "norm", "RMSNorm", "rms", "w", 1e-6, ("q", "k"), "fuse", "", 1,
        ("linear", "linear"), "passthrough", foldable=False,
    )  # fmt: skip
    monkeypatch.setattr(models, "audit", lambda model: AuditReport("M", (site,)))
    assert sites.sites_of(model) == (
        sites.Site(64, 96, has_bias=True, has_gain=True),
        sites.Site(64, 32, has_gain=True),
    )


def test_epilogues_are_spelled_as_problems_spell_them():
    words = "plain,silu+gated,residual+relu2+centred,residual+bare"
    cells = sites.problems(
        [sites.Site(64, 128)], tokens=(4,), epilogues=sites.parse_epilogues(words)
    )
    assert [cell.epilogue for cell in cells] == [
        "", "silu+gated", "centred+relu2+residual", "bare+residual"
    ]  # fmt: skip
    with pytest.raises(ValueError, match="'bare\\+silu' is no epilogue"):
        sites.parse_epilogues("bare+silu")
    with pytest.raises(ValueError, match="N = 33 cannot be a gated pair"):
        sites.problems([sites.Site(64, 33)], epilogues=sites.parse_epilogues("gated"))


def test_a_model_without_sites(tmp_path):
    with pytest.raises(ValueError, match="nothing to tune: Linear"):
        sites.sites_of(torch.nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./not/there", "no file or folder"),
        ("/not/there/config.json", "no file or folder"),
        ("{tmp}", "no config.json"),
        ("{tmp}/bad/config.json", "no model config found"),
        ("{tmp}/bert", "not a causal language model"),
    ],
)
def test_a_model_that_is_none(tmp_path, name, message):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text("{]")
    write_config(tmp_path / "bert", model_type="clip", architectures=["CLIPModel"])
    with pytest.raises(ValueError, match=message):
        sites.skeleton(name.format(tmp=tmp_path))


def test_cells_are_sites_times_dtypes_times_buckets():
    found = sites.problems(
        [sites.Site(64, 128), sites.Site(63, 128), sites.Site(64, 128, has_bias=True)],
        ("bfloat16", "float16"),
        (1, 3, 4, 20_000),
        has_gain=True,
    )
    assert len(found) == 2 * 2 * 3 and len({tables.key_of(p) for p in found}) == 12
    assert {p.m for p in found} == {1, 4, 8192}
    assert all(p.tma is (p.k == 64) and p.has_gain for p in found)


@pytest.mark.parametrize(
    ("parse", "text", "word"),
    [
        (sites.parse_shapes, "2048:3072,64", "'64' is no shape"),
        (sites.parse_shapes, "2048x3072", "K:N"),
        (sites.parse_shapes, "0:5", "'0:5'"),
        (sites.parse_shapes, "", "''"),
        (sites.parse_tokens, "1,2,zero", "'zero'"),
        (sites.parse_tokens, "0", "'0'"),
        (sites.parse_dtypes, "bf16,int8", "'int8'"),
        (sites.parse_dtypes, "float64", "'float64'"),
        (sites.parse_epilogues, "plain,swish", "'swish' is no epilogue"),
        (sites.parse_epilogues, "silu+gelu", "'silu.gelu'"),
        (sites.parse_epilogues, "gated+gated", "'gated.gated'"),
        (sites.parse_epilogues, "", "'' is no epilogue"),
    ],
)
def test_words_that_cannot_be_read_are_named(parse, text, word):
    with pytest.raises(ValueError, match=word):
        parse(text)


def test_words():
    assert sites.parse_shapes("64:128, 64:128,2048:3072") == (
        sites.Site(64, 128),
        sites.Site(2048, 3072),
    )
    assert sites.parse_dtypes("bf16,bfloat16,fp16") == ("bfloat16", "float16")
    assert sites.parse_tokens("1, 16") == (1, 16)

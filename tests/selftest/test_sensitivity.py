"""`quantguard sensitivity`: the ranking, its figures, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pytest_quantguard.cli import main
from pytest_quantguard.config_file import load_config
from pytest_quantguard.emulator.checkpoint import load_checkpoint
from pytest_quantguard.emulator.formats import FORMATS
from pytest_quantguard.errors import ConfigError, ModelError
from pytest_quantguard.sensitivity import (
    SensitivityOptions,
    SensitivityResult,
    measure_sensitivity,
    module_groups,
    quantizing_hooks,
)
from tests.selftest.models import MODELS, TINY, tiny_config, with_outliers, write_config


def measured(folder: Path, model: Path = TINY, **options: object) -> SensitivityResult:
    config = write_config(folder, tiny_config(model))
    return measure_sensitivity(load_config(config), config, SensitivityOptions(**options), lambda _: None)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_module_with_outliers_ranks_first(tmp_path: Path, layer: int) -> None:
    name = f"model.layers.{layer}.mlp.down"
    before = measured(tmp_path)
    assert before.groups[0].name != name
    after = measured(tmp_path, with_outliers(tmp_path / "model", layer))
    assert after.groups[0].name == name
    assert after.groups[0].kl_mean > 5 * next(group.kl_mean for group in before.groups if group.name == name)


def test_the_ranking_is_sorted_and_counts_bits(tmp_path: Path) -> None:
    result = measured(tmp_path, format="fp8")
    found = [group.kl_mean for group in result.groups]
    assert found == sorted(found, reverse=True)
    assert len(result.groups) == 2 * 4 + 1
    assert all(group.interval is not None and group.interval[0] <= group.kl_mean for group in result.groups)
    checkpoint = load_checkpoint(TINY)
    sizes = {name: linear.weight.size for name, linear in checkpoint.linears.items() if name != "lm_head"}
    assert result.everything.weights == sum(sizes.values())
    assert result.everything.bits_per_weight == pytest.approx(8, abs=0.02)
    # Whatever the order, keeping every group leaves 16 bits; keeping the first costs its share.
    assert result.groups[-1].bits_if_kept == pytest.approx(16)
    first = result.groups[0]
    share = first.weights / result.everything.weights if first.name != "lm_head" else 0
    assert first.bits_if_kept == pytest.approx(8 + 8 * share, abs=0.03)
    assert result.positions == 6 * 8


def test_quantizing_all_groups_is_the_scheme_itself() -> None:
    """The hooks of every module make the weights that the scheme makes when it is asked for."""
    whole = load_checkpoint(TINY, quantization="nvfp4")
    plain = load_checkpoint(TINY)
    modules = [name for name in plain.linears if name != "lm_head"]
    hooks = quantizing_hooks(FORMATS["nvfp4"], modules)
    plain.reload(modules, hooks.apply_weights)
    for name, linear in whole.linears.items():
        np.testing.assert_array_equal(plain.linears[name].weight, linear.weight)
    assert hooks.activation[0]("lm_head", None) is None
    assert hooks.activation[0](modules[0], None) == FORMATS["nvfp4"].activation


def test_groups() -> None:
    checkpoint = load_checkpoint(TINY)
    parts = module_groups(checkpoint, "parts")
    attention = "model.layers.1.self_attn"
    assert parts[f"{attention}.q+k+v"] == tuple(f"{attention}.{name}_proj" for name in "qkv")
    assert list(module_groups(checkpoint, "layers")) == ["model.layers.0", "model.layers.1", "lm_head"]
    kinds = module_groups(checkpoint, "kinds")
    assert list(kinds) == ["*.self_attn.q+k+v", "*.self_attn.o", "*.mlp.gate+up", "*.mlp.down", "lm_head"]
    for groups in (parts, kinds):
        assert sorted(name for group in groups.values() for name in group) == sorted(checkpoint.linears)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(write_config(tmp_path, tiny_config()))
    assert main(["sensitivity", config, "--groups", "kinds", "--prompts", "2", "--json"]) == 0
    shown = capsys.readouterr()
    result = json.loads(shown.out)
    assert (result["format"], result["prompts"], len(result["groups"])) == ("nvfp4", 2, 5)
    assert "loading" in shown.err
    assert main(["sensitivity", config, "--groups", "layers", "--prompts", "all", "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("model.layers.")
    assert lines[3] == "... and 2 less sensitive groups"
    assert lines[4].startswith("everything")


def test_the_reference_is_measured_where_the_candidate_is_quantized_already(tmp_path: Path) -> None:
    config = tiny_config()
    config["candidate"] = {"backend": "emulator", "model_path": str(MODELS / "modelopt-nvfp4-tiny")}
    path = write_config(tmp_path, config)
    options = SensitivityOptions(grouping="layers", prompts=2)
    assert measure_sensitivity(load_config(path), path, options, lambda _: None).model == str(TINY)


class TestBadInput:
    def test_unknown_format(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="unknown number format 'nvfp5'"):
            measured(tmp_path, format="nvfp5")

    def test_no_unquantized_model(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="names the folder of an unquantized model"):
            measured(tmp_path, MODELS / "modelopt-nvfp4-tiny")

    def test_no_model(self, tmp_path: Path) -> None:
        with pytest.raises(ModelError, match="nowhere"):
            measured(tmp_path, tmp_path / "nowhere")

    @pytest.mark.parametrize("words", ["--prompts=0", "--prompts=-3", "--prompts=some", "--top=-1"])
    def test_numbers(self, words: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(["sensitivity", "gate.yaml", words])
        assert caught.value.code == 2
        assert "expected a whole number above 0" in capsys.readouterr().err

    def test_prompts_without_positions(self, tmp_path: Path) -> None:
        config = write_config(tmp_path, tiny_config())
        (tmp_path / "prompts.jsonl").write_text('{"token_ids": [7]}\n', encoding="utf-8")
        with pytest.raises(ConfigError, match="no prompt of the suite has two tokens"):
            measure_sensitivity(load_config(config), config, SensitivityOptions(), lambda _: None)

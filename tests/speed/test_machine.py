"""Fingerprints and the machine's state, from what nvidia-smi and NVML say."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from pytest_quantguard.serving import fingerprint, machine_state
from pytest_quantguard.serving.answers import Capabilities
from pytest_quantguard.serving.fingerprint import (
    device_of,
    differences,
    parse_smi,
    read_fingerprint,
    read_gpus,
)
from pytest_quantguard.serving.machine_state import MachineState, Watch

GIB = 1 << 30
DEVICE = """<gpu id="00000000:{bus}:00.0">
  <product_name>NVIDIA H200</product_name><uuid>GPU-{bus}</uuid>
  <persistence_mode>Enabled</persistence_mode>
  <fb_memory_usage><total>143771 MiB</total><used>1 MiB</used></fb_memory_usage>
  <{power}><current_power_limit>700.00 W</current_power_limit></{power}>
  <clocks><sm_clock>1980 MHz</sm_clock></clocks></gpu>"""


def smi(*buses: str, power: str = "gpu_power_readings") -> bytes:
    devices = "".join(DEVICE.format(bus=bus, power=power) for bus in buses)
    return (
        "<?xml version='1.0' ?><nvidia_smi_log><driver_version>570.1</driver_version>"
        f"<cuda_version>12.8</cuda_version>{devices}</nvidia_smi_log>"
    ).encode()


class Nvml:
    """As much of pynvml as is asked; the second device is hot."""

    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, reasons: tuple[int, ...] = (0, 0)) -> None:
        self.reasons = reasons

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": lambda: b"570.1",
            "nvmlSystemGetCudaDriverVersion": lambda: 12080,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda _: "NVIDIA H200",
            "nvmlDeviceGetUUID": lambda index: f"GPU-0{index + 1}",
            "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(total=143771 << 20, used=2 * GIB),
            "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700_000,
            "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=90),
            "nvmlDeviceGetTemperature": lambda index, _: 60 + 30 * index,
            "nvmlDeviceGetClockInfo": lambda index, _: 1980 - 500 * index,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda index: self.reasons[index],
        }
        return answers.get(name, self.refuse)

    def refuse(self, *_: Any) -> None:
        raise self.NVMLError


def capabilities(**arguments: Any) -> Capabilities:
    nothing = dict.fromkeys(
        ("model_path", "dtype", "quantization", "kv_cache_dtype", "vocab_size", "context_length")
    )
    return Capabilities(
        kind="sglang",
        version="0.5.23",
        flat_logprobs=True,
        forced_decode=None,
        deterministic=None,
        radix_cache=None,
        chunked_prefill_size=None,
        device="cuda",
        server_args=arguments,
        **nothing,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("power", ["gpu_power_readings", "power_readings"])
def test_nvidia_smi(power: str) -> None:
    one, two = parse_smi(smi("01", "02", power=power))
    assert (one.index, two.index, two.uuid) == (0, 1, "GPU-02")
    assert (one.name, one.memory_mib, one.power_limit, one.persistence) == (
        "NVIDIA H200",
        143771,
        700.0,
        True,
    )
    assert (one.driver, one.cuda) == ("570.1", "12.8")


@pytest.mark.parametrize(
    ("devices", "environment", "count"),
    [
        (None, None, 2),
        ("0", None, 1),
        ("GPU-02", "0,1", 1),
        (None, "1", 1),
        (None, "MIG-abc", 2),
        ("0,1", "0", 2),
    ],
)
def test_facts_of_the_devices_that_the_server_sees(
    monkeypatch: pytest.MonkeyPatch, devices: str | None, environment: str | None, count: int
) -> None:
    monkeypatch.setattr(fingerprint, "read_gpus", lambda: parse_smi(smi("01", "02")))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if environment is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", environment)
    facts = read_fingerprint(capabilities(tp_size=2, port=1, random_seed=7), "http://127.0.0.1:1", devices)
    assert (facts["gpu"], facts["gpu_count"], facts["power_limit_w"]) == ("NVIDIA H200", count, 700.0)
    assert (facts["driver"], facts["cuda"], facts["persistence"]) == ("570.1", "12.8", True)
    assert (facts["server_version"], facts["tp_size"]) == ("0.5.23", 2)
    assert facts["cpu_count"] == psutil.cpu_count()
    assert not {"port", "random_seed"} & facts.keys()
    assert "1980" not in str(facts), "a clock frequency is no fact"


def test_the_emulator_has_no_gpu_wherever_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its numbers and times are the processor's, on a machine with GPUs too."""
    monkeypatch.setattr(fingerprint, "read_gpus", lambda: parse_smi(smi("01", "02")))
    emulator = replace(
        capabilities(), kind="emulator", server_args={"quantguard_emulator": {"arithmetic": "a"}}
    )
    facts = read_fingerprint(emulator, "http://127.0.0.1:1", None)
    assert (facts["gpu"], facts["gpu_count"]) == (None, 0)
    assert device_of(facts) == f"{fingerprint.cpu_model()}, a"


def test_nvml_where_there_is_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint.shutil, "which", lambda _: None)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    one, two = read_gpus()
    assert (one.name, one.memory_mib, one.power_limit, one.cuda) == ("NVIDIA H200", 143771, 700.0, "12.8")
    assert (one.driver, two.uuid) == ("570.1", "GPU-02")
    assert one.persistence is None, "a question that the device does not answer"


def test_a_tool_that_does_not_work_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_gpus() == ()
    tool.write_text("#!/bin/sh\necho Failed to initialize NVML\n", encoding="utf-8")
    assert read_gpus() == ()
    assert subprocess.run([str(tool)], capture_output=True, check=True).stdout


def test_a_server_elsewhere_has_no_facts_of_this_machine() -> None:
    facts = read_fingerprint(capabilities(), "http://10.0.0.5:30000")
    assert facts["machine"] == "not known: the server runs on another machine"
    assert not {"cpu", "gpu", "cpu_count"} & facts.keys()


def test_differences_name_what_is_on_one_side_only() -> None:
    assert differences({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "d": 4}) == [
        ("b", 2, 5),
        ("c", 3, None),
        ("d", None, 4),
    ]


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        ((0, 0), []),
        ((0x04, 0x01), []),
        ((0, 0x40), ["GPU 1 was slowed down: temperature (hardware)"]),
        ((0x08 | 0x80, 0), ["GPU 0 was slowed down: hardware slowdown, power brake"]),
    ],
)
def test_throttling_is_a_disturbance(
    monkeypatch: pytest.MonkeyPatch, reasons: tuple[int, ...], said: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(reasons))
    with Watch(lambda: None) as watch:
        pass
    assert watch.state is not None
    assert watch.state.disturbances == said
    cool, hot = watch.state.gpus
    assert cool.samples >= 1
    assert (cool.memory_mib_max, cool.utilization_mean, cool.sm_clock_max) == (2048, 90.0, 1980)
    assert (hot.temperature_max, hot.sm_clock_min) == (90, 1480)
    assert cool.at_power_limit == (cool.samples if reasons[0] & 0x04 else 0)


@pytest.mark.parametrize(
    ("devices", "watched"), [(["0"], [0]), (["0", "GPU-02"], [0, 1]), ([""], []), ([], [])]
)
def test_only_the_servers_own_gpus_are_watched(
    monkeypatch: pytest.MonkeyPatch, devices: list[str | None], watched: list[int]
) -> None:
    """Somebody else's hot GPU says nothing about ours; a server on the processor has none."""
    monkeypatch.setitem(sys.modules, "pynvml", Nvml((0, 0x40)))
    with Watch(lambda: None, devices=devices) as watch:
        pass
    assert watch.state is not None
    assert [gpu.index for gpu in watch.state.gpus] == watched
    assert bool(watch.state.throttling) == (1 in watched)


def test_other_processes_matter_only_where_nothing_is_idle() -> None:
    def state(before: tuple[float, float, float], after: tuple[float, float, float]) -> MachineState:
        idle, foreign = machine_state._shares(before, after)
        return MachineState(idle, foreign, ())

    crowded = state((0, 0, 0), (10, 0.5, 5))
    assert (crowded.idle, crowded.foreign) == pytest.approx((0.05, 0.45))
    assert crowded.disturbances == ["other processes took 45% of the processors' time, 5% was idle"]
    assert state((0, 0, 0), (10, 5, 1)).disturbances == []
    assert state((0, 0, 0), (10, 0.2, 9.6)).disturbances == []
    assert MachineState(None, None, ()).disturbances == []


def test_a_watch_without_nvml_knows_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Watch(lambda: 0.0) as watch:
        sum(range(3_000_000))
    assert watch.state is not None
    assert watch.state.gpus == ()
    if watch.state.idle is not None:
        assert 0 <= watch.state.idle <= 1
        assert watch.state.foreign is not None
        assert 0 <= watch.state.foreign <= 1
    with Watch(lambda: None) as watch:
        pass
    assert watch.state is not None
    assert (watch.state.idle, watch.state.foreign) == (None, None)

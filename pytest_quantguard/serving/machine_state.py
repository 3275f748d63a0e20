"""What the machine did while something was timed: other processes' use of the processors, and the GPUs'
memory, load, temperature, clocks and throttling.

GPUs are sampled through NVML (`nvidia-ml-py`) where it is there. Nothing here decides whether a time counts;
`disturbances` says what would make it doubtful.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import psutil

from pytest_quantguard.serving.gpu_memory import MIB, decoded, open_nvml, seen_devices

SAMPLE_SECONDS = 0.2
BUSY_IDLE = 0.1
"""With less of the processors idle than this, whoever needs them waits."""
FOREIGN_SHARE = 0.1
"""Use of the processors by other processes that then matters."""

SLOWED = {
    0x08: "hardware slowdown",
    0x20: "temperature (software)",
    0x40: "temperature (hardware)",
    0x80: "power brake",
}
"""NVML's reasons for lower clocks that are no normal operation (nvml.h, nvmlClocksEventReason*)."""
POWER_CAP = 0x04
"""Working at the power limit is normal under full load; the limit is part of the fingerprint."""


@dataclass(slots=True)
class GpuState:
    """One device during a time. Memory in MiB, utilisation in %, temperature in degrees C, clock in MHz."""

    index: int
    name: str
    samples: int = 0
    memory_mib_max: int = 0
    utilization_mean: float = 0.0
    temperature_max: int = 0
    sm_clock_min: int = 0
    sm_clock_max: int = 0
    at_power_limit: int = 0
    slowed: list[str] = field(default_factory=list)

    def take(self, memory_mib: int, utilization: int, temperature: int, clock: int, reasons: int) -> None:
        """Add a sample. reasons: NVML's bits."""
        self.samples += 1
        self.memory_mib_max = max(self.memory_mib_max, memory_mib)
        self.utilization_mean += (utilization - self.utilization_mean) / self.samples
        self.temperature_max = max(self.temperature_max, temperature)
        self.sm_clock_min = clock if self.samples == 1 else min(self.sm_clock_min, clock)
        self.sm_clock_max = max(self.sm_clock_max, clock)
        self.at_power_limit += bool(reasons & POWER_CAP)
        for bit, name in SLOWED.items():
            if reasons & bit and name not in self.slowed:
                self.slowed.append(name)


@dataclass(frozen=True, slots=True)
class MachineState:
    """idle, foreign: shares of all processors' time; None where the server's own share is not known."""

    idle: float | None
    foreign: float | None
    gpus: tuple[GpuState, ...]

    @property
    def disturbances(self) -> list[str]:
        """Sentences about what may have changed the time."""
        return self.throttling + self.crowding

    @property
    def throttling(self) -> list[str]:
        """The disturbances by the devices themselves."""
        return [
            f"GPU {gpu.index} was slowed down: {', '.join(gpu.slowed)}" for gpu in self.gpus if gpu.slowed
        ]

    @property
    def crowding(self) -> list[str]:
        """The disturbances by other processes, which slow alike what runs at the same time."""
        found = []
        short = self.idle is not None and self.idle < BUSY_IDLE
        if short and self.foreign is not None and self.foreign > FOREIGN_SHARE:
            found.append(
                f"other processes took {self.foreign:.0%} of the processors' time, {self.idle:.0%} was idle"
            )
        return found


class Watch:
    """Watches the machine while its `with` block runs; then `state` is there.

    own_seconds: processor seconds that the servers on trial have used so far, None where that is not known.
    devices: CUDA_VISIBLE_DEVICES of each of them, None where it is not known; others' GPUs are not watched.
    """

    def __init__(
        self, own_seconds: Callable[[], float | None], *, devices: Sequence[str | None] = (None,)
    ) -> None:
        self._own_seconds = own_seconds
        self._devices = devices
        self._stopped = threading.Event()
        self._sampler: threading.Thread | None = None
        self._gpus: dict[int, GpuState] = {}
        self.state: MachineState | None = None

    def __enter__(self) -> Watch:
        nvml = open_nvml() if self._devices else None
        if nvml is not None:
            self._sampler = threading.Thread(target=self._sample, args=(nvml,), daemon=True)
            self._sampler.start()
        self._before = self._processor_times()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        after = self._processor_times()
        self._stopped.set()
        if self._sampler is not None:
            self._sampler.join()
        idle, foreign = _shares(self._before, after)
        self.state = MachineState(idle, foreign, tuple(self._gpus[index] for index in sorted(self._gpus)))

    def _processor_times(self) -> tuple[float, float, float | None]:
        """Seconds since boot of all processors together, of them idle, and our own."""
        times = psutil.cpu_times()
        total = sum(
            getattr(times, name, 0.0)
            for name in ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
        )
        servers = self._own_seconds()
        own = psutil.Process().cpu_times()
        mine = None if servers is None else own.user + own.system + servers
        return total, times.idle + getattr(times, "iowait", 0.0), mine

    def _sample(self, nvml: Any) -> None:
        try:
            devices = seen_devices(nvml, *self._devices)
            while True:
                for index, device in devices.items():
                    self._take(nvml, index, device)
                if self._stopped.wait(SAMPLE_SECONDS):
                    return
        except nvml.NVMLError:
            return  # A device that cannot be asked gives no samples; the result shows their number.
        finally:
            nvml.nvmlShutdown()

    def _take(self, nvml: Any, index: int, device: Any) -> None:
        state = self._gpus.setdefault(index, GpuState(index, decoded(nvml.nvmlDeviceGetName(device))))
        state.take(
            int(nvml.nvmlDeviceGetMemoryInfo(device).used) // MIB,
            int(nvml.nvmlDeviceGetUtilizationRates(device).gpu),
            int(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)),
            int(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM)),
            int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device)),
        )


def _shares(
    before: tuple[float, float, float | None], after: tuple[float, float, float | None]
) -> tuple[float | None, float | None]:
    """Idle and foreign shares of the processors' time between two readings."""
    total = after[0] - before[0]
    if total <= 0 or before[2] is None or after[2] is None:
        return None, None
    idle = (after[1] - before[1]) / total
    own = max(0.0, after[2] - before[2]) / total
    return idle, max(0.0, 1 - idle - own)

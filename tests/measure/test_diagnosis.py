"""Each rule on a toy candidate that has that fault on top of an honest quantization, and all rules on one
without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from pytest_quantguard.baseline.recording import CellKey
from pytest_quantguard.logprobs.identity import compare_bits
from pytest_quantguard.measure.cells import measure_cell
from pytest_quantguard.measure.comparison import compare_cells, noise_floor
from pytest_quantguard.measure.consistency import compare_with_itself
from pytest_quantguard.measure.decode import DecodeChoice
from pytest_quantguard.measure.diagnosis import diagnose
from pytest_quantguard.measure.drift import DriftMeasurement
from pytest_quantguard.measure.observations import Observations, Onset, fit_logit_scale, onset

from .toy import Asked, ToyClient, toy_prompts

PROMPTS = toy_prompts(12, 24)
SIZES = (1, 3, 4)
FORCED = DecodeChoice("forced")
WIDTH = 32
Perturb = Callable[[Asked, np.ndarray], np.ndarray]


def noise(logits: np.ndarray, scale: float, salt: int) -> np.ndarray:
    """Rounding as a function of the values alone, as a format's is; the spread stays, as after a
    normalisation.
    """
    generator = np.random.default_rng([salt, int(abs(float(logits.sum())) * 1e6)])
    noisy = logits[1:] + generator.normal(0.0, scale, logits.size - 1)
    return np.concatenate([logits[:1], noisy * (logits[1:].std() / noisy.std())])


def quantized(fault: Perturb) -> Perturb:
    return lambda asked, logits: fault(asked, noise(logits, 0.3, 1))


def more_noise(when: Callable[[Asked], bool], scale: float = 1.0) -> Perturb:
    return quantized(lambda asked, logits: noise(logits, scale, 2) if when(asked) else logits)


def cell(client: ToyClient, key: CellKey, *, warm: bool = False):
    return measure_cell(client, PROMPTS, key, top_logprobs=WIDTH, decode=FORCED, warm=warm)


@pytest.fixture(scope="module")
def baseline():
    client = ToyClient()
    return {
        key: cell(client, key).cell for key in (CellKey(p, n) for p in ("prefill", "decode") for n in SIZES)
    }


def observe(perturb: Perturb, baseline) -> Observations:
    client = ToyClient(radix_cache=True, perturb=perturb)
    measured = {key: cell(client, key) for key in baseline}
    one = measured[CellKey("prefill", 1)]
    warm = cell(client, CellKey("prefill", 1), warm=True)
    client.calls_before = 10_000
    again = cell(client, CellKey("prefill", 1))
    return Observations(
        prompts=PROMPTS,
        cells={key: compare_cells(baseline[key], m.cell).divergence for key, m in measured.items()},
        noise=noise_floor({key: [part] for key, part in baseline.items()}),
        comparisons=(
            compare_with_itself("warm_cache", one, warm, baseline=baseline),
            compare_with_itself("repeat", one, again, baseline=baseline),
        ),
        logit_scales={key: fit_logit_scale(baseline[key], m.cell) for key, m in measured.items()},
    )


def rules(seen: Observations) -> list[str]:
    return [diagnosis.rule for diagnosis in diagnose(seen)]


def test_no_rule_without_a_pattern(baseline) -> None:
    assert rules(observe(lambda _asked, logits: logits, baseline)) == []
    seen = observe(more_noise(lambda _asked: False), baseline)
    assert all(divergence.aggregate("kl_mean") > 0.02 for divergence in seen.cells.values())
    assert rules(seen) == []
    # Twice the noise everywhere is a matter for bounds, not for a rule.
    assert rules(observe(more_noise(lambda _asked: True, 0.5), baseline)) == []


@pytest.mark.parametrize(
    ("perturb", "rule", "words"),
    [
        (more_noise(lambda a: a.phase == "decode"), "decode_worse", "Decode is worse|KV cache|batch size 4"),
        (more_noise(lambda a: a.batch_size >= 4), "batch_dependent", "Prefill is worse from batch size 4 on"),
        (more_noise(lambda a: a.batch_size == 3), "batch_dependent", "batch size 3 only|padding"),
        (more_noise(lambda a: a.batch_size == 1), "batch_dependent", "batch size 1 than at every larger one"),
        (more_noise(lambda a: a.cached > 0), "prefix_cache", "meet the prefix cache|cached tokens when warm"),
        (more_noise(lambda a: a.call > 10_000, 0.1), "run_to_run", "from run to run|uninitialised memory"),
        (quantized(lambda _a, x: x / 0.8), "logits_scaled", "look for a temperature of about 0.8|agreement"),
        (quantized(lambda _a, x: noise(-x, 1.0, 3)), "output_destroyed", "All positions|layout"),
        (more_noise(lambda a: a.position >= 20, 2.5), "sets_in_late", "from about 20 tokens on"),
    ],
)  # fmt: skip
def test_each_rule_sees_its_pattern(baseline, perturb: Perturb, rule: str, words: str) -> None:
    found = diagnose(observe(perturb, baseline))
    assert {diagnosis.rule for diagnosis in found} == {rule}
    for word in words.split("|"):
        assert word in str(found[0])
    assert all(diagnosis.evidence for diagnosis in found)


def test_decode_that_gets_worse_late_says_from_where(baseline) -> None:
    class Late(ToyClient):
        """Worse from the eleventh generated token on."""

        def generate(self, batch, *, top_logprobs=0):
            self.starts = [len(request.input_ids) for request in batch]
            return super().generate(batch, top_logprobs=top_logprobs)

    client = Late()
    client.perturb = more_noise(
        lambda a: a.phase == "decode" and a.position - client.starts[a.slot] >= 10, 2.0
    )
    cells = {key: compare_cells(baseline[key], cell(client, key).cell).divergence for key in baseline}
    found = diagnose(Observations(prompts=PROMPTS, cells=cells))
    assert [diagnosis.rule for diagnosis in found] == ["decode_worse"]
    assert "it sets in at position 10 of the generated text" in str(found[0])


def test_few_prompts_are_named(baseline) -> None:
    lengths = {PROMPTS[index].token_ids.size for index in (1, 6, 11)}
    assert lengths == {PROMPTS[1].token_ids.size}

    class SpecialTokens(ToyClient):
        """Wrong for prompts of one length."""

        def generate(self, batch, *, top_logprobs=0):
            self.wrong = [len(request.input_ids) in lengths for request in batch]
            return super().generate(batch, top_logprobs=top_logprobs)

    client = SpecialTokens()
    client.perturb = quantized(lambda a, logits: noise(logits, 4.0, 2) if client.wrong[a.slot] else logits)
    cells = {
        key: compare_cells(baseline[key], cell(client, key).cell).divergence
        for key in (CellKey("prefill", 1), CellKey("prefill", 4))
    }
    found = diagnose(Observations(prompts=PROMPTS, cells=cells))
    assert [diagnosis.rule for diagnosis in found] == ["few_prompts"]
    assert "prefill-bs1: toy-1, toy-6, toy-11: mean KL" in str(found[0])


def test_drift_names_the_place_where_it_sets_in(baseline) -> None:
    key = CellKey("prefill", 1)
    plain = ToyClient(perturb=more_noise(lambda _asked: False))
    late = ToyClient(perturb=more_noise(lambda asked: asked.position >= 18, 0.01))
    accepted, now = cell(plain, key).cell, cell(late, key).cell
    drift = DriftMeasurement(
        key=key,
        between=compare_cells(accepted, now).divergence,
        before=compare_cells(baseline[key], accepted).divergence,
        after=compare_cells(baseline[key], now).divergence,
        bits=compare_bits(accepted.rows, now.rows),
        first=None,
    )
    seen = Observations(prompts=PROMPTS, cells={key: drift.after}, drifts=(drift,), chunk_size=16)
    found = diagnose(seen)
    assert [diagnosis.rule for diagnosis in found] == ["sets_in_late"]
    assert "from about 18 tokens on" in str(found[0])
    assert "the boundary of prefill chunks (16 tokens)" in str(found[0])
    assert "equal to the accepted run before, not after" in str(found[0])


def test_permuted_rows_and_unusable_answers(baseline) -> None:
    seen = observe(more_noise(lambda _asked: False), baseline)
    permuted = dataclasses.replace(seen, permuted={CellKey("decode", 4): ("toy-1", "toy-2")})
    assert rules(permuted) == ["rows_misplaced"]
    assert "decode-bs4: toy-1, toy-2" in str(diagnose(permuted)[0])
    assert "orders the rows of a batch" in str(diagnose(permuted)[0])
    # Alone in its request no prompt can be taken for another: a few are chance, most are a shift.
    single = {CellKey("decode", 1): ("toy-1",), CellKey("decode", 4): ("toy-1",)}
    assert rules(dataclasses.replace(seen, permuted=single)) == []
    most = dict.fromkeys(seen.cells, tuple(prompt.id for prompt in PROMPTS[:8]))
    assert "a position early or late" in str(diagnose(dataclasses.replace(seen, permuted=most))[0])

    def without(*keys: CellKey) -> Observations:
        cells = {key: part for key, part in seen.cells.items() if key not in keys}
        return dataclasses.replace(seen, cells=cells, unusable=dict.fromkeys(keys, "non-finite"))

    decode = diagnose(without(*(CellKey("decode", n) for n in SIZES)))
    assert [diagnosis.rule for diagnosis in decode] == ["unusable_answers"]
    assert "cannot be used in decode, and can elsewhere" in decode[0].sentence
    batch = diagnose(without(CellKey("decode", 4), CellKey("prefill", 4)))
    assert "cannot be used in decode and prefill from batch size 4 on" in batch[0].sentence
    single = diagnose(without(CellKey("decode", 3)))
    assert "cannot be used in decode at batch size 3" in single[0].sentence


def test_onset() -> None:
    place = np.repeat(np.arange(40), 3)
    step = np.where(place >= 25, 1.0, 0.05)
    assert onset(step, place, most_before=0.1) == Onset(25, pytest.approx(0.05), pytest.approx(1.0))
    assert onset(step, place, most_before=0.01) is None
    assert onset(np.ones(120), place, most_before=0.1) is None
    assert onset(step[::-1].copy(), place, most_before=0.1) is None
    assert onset(np.ones(3), np.zeros(3, dtype=np.int64), most_before=0.1) is None
    # Too few positions after it to speak of a place.
    late = onset(np.where(place >= 38, 1.0, 0.0), place, most_before=0.1)
    assert late is not None
    assert late.place != 38


def test_logit_scale_is_that_of_the_temperature() -> None:
    key = CellKey("prefill", 3)
    plain = cell(ToyClient(), key).cell
    scaled = cell(ToyClient(perturb=lambda _asked, logits: logits / 0.8), key).cell
    scale = fit_logit_scale(plain, scaled)
    assert scale.stretch == pytest.approx(1.25, abs=1e-4)
    assert scale.fit == pytest.approx(1.0, abs=1e-6)
    assert fit_logit_scale(plain, plain).stretch == pytest.approx(1.0)

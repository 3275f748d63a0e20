"""A server against itself, and against its accepted run, on the toy model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from pytest_quantguard.baseline.recording import CellKey
from pytest_quantguard.errors import BaselineError, InvalidAnswerError
from pytest_quantguard.logprobs.divergence import compare
from pytest_quantguard.measure.capture import accept, capture
from pytest_quantguard.measure.cells import measure_cell
from pytest_quantguard.measure.consistency import compare_with_itself
from pytest_quantguard.measure.decode import DecodeChoice
from pytest_quantguard.measure.drift import measure_drift, require_same_texts
from pytest_quantguard.measure.identity import environment_changes

from .test_capture import CAPABILITIES, SUITE, ToyServer, jitter, make_config, measured
from .toy import ToyClient, toy_prompts

FORCED = DecodeChoice("forced")
PROMPTS = toy_prompts(6, 5)


def cell(client: ToyClient, phase: str, batch_size: int, *, warm: bool = False):
    key = CellKey(phase, batch_size)
    return measure_cell(client, PROMPTS, key, top_logprobs=8, decode=FORCED, warm=warm)


def sharpen(when):
    """A candidate whose logits are 20 % larger where `when` says so."""
    return lambda asked, logits: logits * (1.2 if when(asked) else 1.0)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("decode_against_prefill", lambda asked: asked.phase == "decode"),
        ("batch", lambda asked: asked.batch_size >= 4),
        ("warm_cache", lambda asked: asked.cached > 0),
        ("repeat", lambda asked: asked.call > 100),
        ("none", lambda _asked: False),
    ],
)
def test_each_check_sees_its_own_fault_only(name: str, fault) -> None:
    baseline = {CellKey(p, n): cell(ToyClient(), p, n).cell for p in ("prefill", "decode") for n in (1, 4)}
    client = ToyClient(radix_cache=True, perturb=sharpen(fault))
    prefill_1, prefill_4 = cell(client, "prefill", 1), cell(client, "prefill", 4)
    decode_1, warm_1 = cell(client, "decode", 1), cell(client, "prefill", 1, warm=True)
    pairs = {
        "decode_against_prefill": (prefill_1, decode_1),
        "batch": (prefill_1, prefill_4),
        "warm_cache": (prefill_1, warm_1),
    }
    client.calls_before = 100
    pairs["repeat"] = (prefill_1, cell(client, "prefill", 1))
    for check, (one, other) in pairs.items():
        comparison = compare_with_itself(check, one, other, baseline=baseline)
        seen = comparison.between.aggregate("kl_mean") > 0
        assert seen == (check == name)
        assert (comparison.bits.share == 1) == (not seen)
        if seen:
            assert comparison.after.aggregate("kl_mean") > comparison.before.aggregate("kl_mean") == 0


def test_the_way_of_asking_is_in_the_evidence() -> None:
    client = ToyClient(radix_cache=True)
    prefill, decode = cell(client, "prefill", 4), cell(client, "decode", 4)
    warm = cell(client, "prefill", 4, warm=True)
    assert compare_with_itself("decode_against_prefill", prefill, decode).evidence == (
        "prefill-bs4 against decode-bs4",
        "80% of the positions came out of decode steps (forced)",
    )
    cached = sum(prompt.span_start - 1 for prompt in PROMPTS)
    assert compare_with_itself("warm_cache", prefill, warm).evidence == (
        "prefill-bs4 against prefill-bs4 warm",
        f"{cached} cached tokens when warm, 0 when cold",
    )
    batch = compare_with_itself("batch", cell(client, "prefill", 1), prefill)
    assert batch.evidence[1] == "requests of 4, 2 prompts"
    assert batch.before is None


def test_a_batch_size_that_was_not_recorded_is_held_against_the_other() -> None:
    baseline = {CellKey("prefill", 1): cell(ToyClient(), "prefill", 1).cell}
    client = ToyClient(perturb=jitter(0.1))
    one, three = cell(client, "prefill", 1), cell(client, "prefill", 3)
    comparison = compare_with_itself("batch", one, three, baseline=baseline)
    expected = np.concatenate(
        [compare(a, b).kl for a, b in zip(baseline[one.key].rows, three.cell.rows, strict=True)]
    )
    assert comparison.after.kl == pytest.approx(expected)
    with pytest.raises(InvalidAnswerError, match="the baseline has no decode cell"):
        compare_with_itself("batch", cell(client, "decode", 1), cell(client, "decode", 3), baseline={})


def accepted_run(client: ToyClient):
    config = make_config()
    baseline = capture(ToyServer(), SUITE, config)
    server = ToyServer(client)
    run = accept(
        measured(server, baseline, config), config=config, capabilities=CAPABILITIES, baseline=baseline
    )
    return config, baseline, run


def test_drift_is_zero_for_the_same_server_and_names_the_first_place_otherwise() -> None:
    config, baseline, accepted = accepted_run(ToyClient())
    for measurement in measured(ToyServer(), baseline, config):
        drift = measure_drift(measurement.cell, accepted=accepted, baseline=baseline)
        assert drift.bits.share == 1
        assert drift.first is None
        assert drift.between.aggregate("kl_max") == 0

    late = ToyServer(ToyClient(perturb=sharpen(lambda asked: asked.position >= 8)))
    for measurement in measured(late, baseline, config):
        drift = measure_drift(measurement.cell, accepted=accepted, baseline=baseline)
        affected = [prompt for prompt in baseline.prompts if prompt.token_ids.size > 8]
        assert drift.first is not None
        assert drift.first.text_position == max(8, min(prompt.span_start for prompt in affected))
        assert drift.first.prompts == len(affected)
        places = np.concatenate([np.arange(p.span_start, p.token_ids.size) for p in baseline.prompts])
        assert np.concatenate(drift.bits.identical).tolist() == (places < 8).tolist()
        assert (drift.between.kl[places < 8] == 0).all()
        assert (drift.between.kl[places >= 8] > 0).all()
        assert drift.after.aggregate("kl_mean") > drift.before.aggregate("kl_mean")


def test_a_quantized_candidate_is_held_against_its_own_past() -> None:
    noisy = ToyClient(perturb=lambda asked, logits: logits + np.sin(logits + asked.position))
    config, baseline, accepted = accepted_run(noisy)
    measurement = measured(ToyServer(noisy), baseline, config)[0]
    drift = measure_drift(measurement.cell, accepted=accepted, baseline=baseline)
    assert drift.between.aggregate("kl_max") == 0
    assert drift.before.aggregate("kl_mean") == drift.after.aggregate("kl_mean") > 0.01


def test_an_accepted_run_of_another_suite_is_refused() -> None:
    _, baseline, accepted = accepted_run(ToyClient())
    require_same_texts(accepted, baseline)
    shorter = dataclasses.replace(accepted, prompts=accepted.prompts[1:])
    with pytest.raises(BaselineError, match=r"it has 4 prompts, the baseline 5.*quantguard accept"):
        require_same_texts(shorter, baseline)
    moved = dataclasses.replace(accepted.prompts[2], span_start=accepted.prompts[2].span_start - 1)
    other = dataclasses.replace(accepted, prompts=(*accepted.prompts[:2], moved, *accepted.prompts[3:]))
    with pytest.raises(BaselineError, match="other tokens or spans: p2"):
        require_same_texts(other, baseline)


def test_a_cell_that_was_not_accepted_is_refused() -> None:
    _, baseline, accepted = accepted_run(ToyClient())
    with pytest.raises(BaselineError, match=r"accepted run has no cell prefill-bs4. Its cells: prefill-bs1"):
        measure_drift(cell(ToyClient(), "prefill", 4).cell, accepted=accepted, baseline=baseline)


def test_environment_changes_name_what_may_change_numbers() -> None:
    _, _, accepted = accepted_run(ToyClient())
    manifest = accepted.manifest
    assert environment_changes(manifest, manifest.model, manifest.server, None) == []
    arguments = {**manifest.server.arguments, "attention": {"backend": "fa3"}}
    server = manifest.server.model_copy(
        update={"version": "2", "device": "another GPU", "arguments": arguments}
    )
    model = manifest.model.model_copy(update={"revision": "main"})
    assert environment_changes(manifest, model, server, "2 x H200") == [
        ("model.revision", "None", "main"),
        ("environment.device", "not stated", "2 x H200"),
        ("server.arguments.attention.backend", "not stated", "fa3"),
        ("server.device", "cpu", "another GPU"),
        ("server.version", "1", "2"),
    ]

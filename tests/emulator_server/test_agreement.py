"""The emulator's BF16 log-probabilities against those of a real SGLang server of the same model.

Both compute in BF16 with kernels of their own; the real server rounds its logits to BF16, so a difference of a few
hundredths of a nat is its step size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from .processes import Emulator
from .recorded import recorded, replay

MARGIN = 0.1


@dataclass
class Rows:
    """Matching rows of both servers: real and own log-probabilities of the real server's ids, NaN where unknown."""

    differences: list[float]
    divergences: list[float]
    clear: int
    same: int


def compare(server: Emulator, names: list[str]) -> Rows:
    """Replay scored prompts and compare every prompt row that both servers predicted."""
    rows = Rows([], [], 0, 0)
    for name in names:
        assert server.post("/flush_cache").status_code == 200
        sample = recorded(name)
        ours, theirs = replay(server, sample).json(), sample.response
        pairs = zip(as_list(ours), as_list(theirs), strict=True)
        for mine, real in pairs:
            for own, other in zip(
                mine["meta_info"]["input_top_logprobs"], real["meta_info"]["input_top_logprobs"], strict=True
            ):
                if other is not None:
                    add_row(rows, own, other)
    return rows


def as_list(answer: Any) -> list[Any]:
    return answer if isinstance(answer, list) else [answer]


def add_row(rows: Rows, own: list[Any], other: list[Any]) -> None:
    """One position: KL of the common ids with the rest in one bucket, top-20 differences, top-1."""
    mine = {token: value for value, token, _ in own}
    real = [(token, value) for value, token, _ in other]
    common = [(value, mine[token]) for token, value in real if token in mine]
    p, q = np.exp(np.array(common).T)
    rest_p, rest_q = max(1 - p.sum(), 1e-12), max(1 - q.sum(), 1e-12)
    rows.divergences.append(float((p * np.log(p / q)).sum() + rest_p * np.log(rest_p / rest_q)))
    rows.differences += [abs(value - mine[token]) for token, value in real[:20] if token in mine]
    if real[0][1] - real[1][1] > MARGIN:
        rows.clear += 1
        rows.same += own[0][1] == real[0][0]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["gen_top256", "batch8_ids", "tf_prefill_again_start0"], id="short"),
        pytest.param(["radix_full_start0"], id="600-tokens", marks=pytest.mark.slow),
    ],
)
def test_prompt_logprobs_agree_with_the_real_server(smollm2: Emulator, names: list[str]) -> None:
    rows = compare(smollm2, names)
    summary = (
        f"{len(rows.divergences)} rows, KL mean {np.mean(rows.divergences):.5f}, median difference "
        f"{np.median(rows.differences):.4f}, same top-1 {rows.same}/{rows.clear}"
    )
    print(summary)
    assert len(rows.divergences) > 80
    assert rows.same == rows.clear, summary
    assert np.mean(rows.divergences) < 0.002, summary
    assert np.median(rows.differences) < 0.06, summary


def test_greedy_text_of_the_real_server(smollm2: Emulator) -> None:
    sample = recorded("gen_text")
    assert replay(smollm2, sample).json()["text"] == sample.response["text"]
    assert sample.response["text"].startswith(" Paris")


def test_forced_decode_agrees_with_the_real_servers_untouched_distributions(smollm2: Emulator) -> None:
    """`tf_info` holds the distributions that a processor saved before it forced the tokens."""
    sample = recorded("tf_info")
    forced = sample.body["sampling_params"]["custom_params"]["force"]
    body = {
        "input_ids": sample.body["input_ids"],
        "sampling_params": {"temperature": 0},
        "return_logprob": True,
        "top_logprobs_num": 10,
        "forced_output_ids": forced,
    }
    answer = smollm2.generate(body)
    assert answer["output_ids"] == sample.response["output_ids"] == forced
    mine = [value for value, _, _ in answer["meta_info"]["output_token_logprobs"]]
    real = sample.response["meta_info"]["orig_token_logprob"]
    difference = np.abs(np.array(mine) - np.array(real))
    assert np.sqrt((difference**2).mean()) < 0.12
    assert np.median(difference) < 0.06

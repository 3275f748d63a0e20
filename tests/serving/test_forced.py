"""Forced decode: the processor's payload and step count, and the undoing of real servers' encoded answers."""

from __future__ import annotations

import json
import pickletools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pytest_quantguard.errors import InvalidAnswerError, RequestRejectedError, ServerError
from pytest_quantguard.serving import forced
from pytest_quantguard.serving.answers import Answer, GenerateRequest
from pytest_quantguard.serving.client import Client
from pytest_quantguard.serving.forced_payload import PROCESSOR_FILE, serialized_processor
from pytest_quantguard.serving.forced_processor import ForcedDecode
from pytest_quantguard.serving.reading import read_answers
from tests.serving.samples import VOCAB_SIZE, sample
from tests.serving.scripted import Call, Reply, ScriptedServer, as_json


def restored(recorded: dict[str, Any], top_logprobs: int) -> list[Answer]:
    """The answers of a recorded request of the encoding, undone."""
    body = recorded["request"]["body"]
    single = not isinstance(body["input_ids"][0], list)
    prompts = [body["input_ids"]] if single else body["input_ids"]
    params = [body["sampling_params"]] if single else body["sampling_params"]
    items = [recorded["response"]] if single else recorded["response"]
    batch = [
        GenerateRequest(tuple(prompt), forced_ids=tuple(one["custom_params"]["force"]))
        for prompt, one in zip(prompts, params, strict=True)
    ]
    answers = read_answers(items, batch, top_logprobs=body["top_logprobs_num"], vocab_size=VOCAB_SIZE)
    forced.check_forced(answers, batch)
    slots = tuple(params[0]["custom_params"]["slots"])
    return [
        forced.restore(answer, item, slots, place="prompt", top_logprobs=top_logprobs)
        for answer, item in zip(answers, items, strict=True)
    ]


def test_the_encoded_answer_gives_back_the_untouched_distribution() -> None:
    """`tf_info` recorded the untouched top-10 and the token's own value by another way, from the same
    server."""
    (answer,) = restored(sample("tf_encode"), 10)
    meta = sample("tf_info")["response"]["meta_info"]
    assert answer.output is not None
    np.testing.assert_allclose(answer.output.chosen_logprobs, meta["orig_token_logprob"], atol=2e-6)
    untouched = np.array([row[0] for row in meta["orig_top_logprobs"]], np.float32)
    np.testing.assert_allclose(answer.output.logprobs, untouched, atol=2e-6)
    for row, (_, ids) in enumerate(meta["orig_top_logprobs"]):
        values = answer.output.logprobs[row]
        untied = [rank for rank in range(9) if (np.abs(values - values[rank]) < 1e-5).sum() == 1]
        assert [answer.output.token_ids[row, rank] for rank in untied] == [ids[rank] for rank in untied]
    assert answer.output.chosen_ids.tolist() == sample("tf_encode")["response"]["output_ids"]


@pytest.mark.parametrize(
    ("name", "reference"), [("tf_encode", "tf_prefill_ref"), ("old59/tf_encode", "old59/tf_prefill_ref")]
)
def test_forced_decode_agrees_with_prefill_to_bf16_noise(name: str, reference: str) -> None:
    (answer,) = restored(sample(name), 10)
    entries = sample(reference)["response"]["meta_info"]["input_token_logprobs"][1:]
    prefill = np.array([entry[0] for entry in entries])
    assert answer.output is not None
    difference = answer.output.chosen_logprobs - prefill
    assert np.sqrt((difference**2).mean()) < 0.065
    assert np.abs(difference).max() < 0.15


@pytest.mark.parametrize("folder", ["", "b0kv_fp8_e4m3/"])
def test_a_recorded_batch_is_undone_prompt_by_prompt(folder: str) -> None:
    """The batch of `tf_info`, recorded right after on the same server, holds the untouched values."""
    answers = restored(sample(f"{folder}tf_batch8_EncodeForce"), 10)
    infos = sample(f"{folder}tf_batch8_InfoForce")["response"]
    for answer, info in zip(answers, infos, strict=True):
        assert answer.output is not None
        own = np.array(info["meta_info"]["orig_token_logprob"])
        # a prefix-cache hit or a batch of other prompts changes BF16 rounding between the two recordings
        assert np.abs(answer.output.chosen_logprobs - own).mean() < 0.06


def test_what_the_processor_did_not_touch_is_noticed() -> None:
    recorded = sample("tf_encode")
    meta = recorded["response"]["meta_info"]
    meta["output_token_logprobs"][3][0] = -0.9
    with pytest.raises(InvalidAnswerError, match=r"did not act at step 3; use suite.decode_mode: resync"):
        restored(recorded, 10)
    recorded = sample("tf_encode")
    del recorded["response"]["meta_info"]["output_token_ids_logprobs"]
    with pytest.raises(InvalidAnswerError, match="sacrificed token ids did not come back"):
        restored(recorded, 10)
    recorded = sample("tf_encode")
    recorded["response"]["output_ids"][5] = 77
    recorded["response"]["meta_info"]["output_token_logprobs"][5][1] = 77
    with pytest.raises(
        InvalidAnswerError, match=r"failed at step 5 of 26: token \d+ was to be emitted, token 77"
    ):
        restored(recorded, 10)


VOCABULARY, ROWS = 40, 30


def encoded(width: int) -> tuple[dict[str, Any], np.ndarray, np.ndarray]:
    """An answer as the processor encodes it, with the best `width` tokens of each row; the true
    log-probabilities [rows, vocabulary] and the forced tokens.

    Tokens 0 and 1 are the sacrificed ones.
    """
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (ROWS, VOCABULARY))
    truth = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    tokens = rng.integers(2, VOCABULARY, ROWS)
    rows = np.arange(ROWS)
    values = truth.copy()
    values[:, 0] = truth[rows, tokens]
    values[:, 1] = 0.0
    values[rows, tokens] = forced.LIFT
    values -= np.log(np.exp(values).sum(1, keepdims=True))
    order = np.argsort(-values, axis=1)[:, :width]
    meta = {
        "finish_reason": {"type": "length"},
        "prompt_tokens": 1,
        "output_token_logprobs": [[values[i, t], int(t), None] for i, t in enumerate(tokens)],
        "output_top_logprobs": [[[values[i, t], int(t), None] for t in order[i]] for i in rows],
        "output_token_ids_logprobs": [[[values[i, 1], 1, None], [values[i, 0], 0, None]] for i in rows],
    }
    return {"text": "", "output_ids": tokens.tolist(), "meta_info": meta}, truth, tokens


def undone(item: dict[str, Any], width: int, top: int) -> Answer:
    request = GenerateRequest((5,), forced_ids=tuple(item["output_ids"]))
    (answer,) = read_answers([item], [request], top_logprobs=width, vocab_size=VOCABULARY)
    return forced.restore(answer, item, (0, 1), place="prompt", top_logprobs=top)


@pytest.mark.parametrize(
    ("width", "top", "kept"),
    [
        (6 + forced.EXTRA_LOGPROBS, 6, 6),
        (1 + forced.EXTRA_LOGPROBS, 6, 1),
        (VOCABULARY - 1, VOCABULARY, VOCABULARY - 1 - forced.EXTRA_LOGPROBS),
        (VOCABULARY, VOCABULARY, VOCABULARY - 2),
    ],
)
def test_restored_rows_by_brute_force(width: int, top: int, kept: int) -> None:
    """Random distributions, encoded as the processor does, come back; the slots' own values are what is
    lost, and as many of the last tokens as the processor may have pushed out of the list."""
    item, truth, tokens = encoded(width)
    found = undone(item, width, top).output
    assert found is not None
    for i in range(ROWS):
        known = [t for t in np.argsort(-truth[i]) if t > 1][:kept]
        assert found.token_ids[i].tolist() == known
        np.testing.assert_allclose(found.logprobs[i], truth[i, known], atol=1e-5)
    np.testing.assert_allclose(found.chosen_logprobs, truth[np.arange(ROWS), tokens], atol=1e-5)


def test_too_few_logprobs_to_restore_any_are_refused() -> None:
    item, _, _ = encoded(forced.EXTRA_LOGPROBS)
    with pytest.raises(InvalidAnswerError, match=f"returned 3 .*needs more than {forced.EXTRA_LOGPROBS}"):
        undone(item, forced.EXTRA_LOGPROBS, 1)


def test_sacrificed_ids_that_do_not_fit_are_refused() -> None:
    item, _, _ = encoded(9)
    pairs = item["meta_info"]["output_token_ids_logprobs"]
    for wrong in (pairs[:-1], [*pairs, pairs[0]], [[[float("nan"), 1, None], pairs[0][1]], *pairs[1:]]):
        item["meta_info"]["output_token_ids_logprobs"] = wrong
        with pytest.raises(InvalidAnswerError, match=f"expected {ROWS} finite pairs .* got {len(wrong)}"):
            undone(item, 9, 6)


def test_slots_avoid_what_a_prompt_uses() -> None:
    batch = [GenerateRequest((3, 9), forced_ids=(4,)), GenerateRequest((1,), forced_ids=(2,))]
    assert forced.choose_slots(batch, (3, 4, 5, 6)) == [(5, 6), (3, 4)]
    with pytest.raises(ServerError, match=r"prompt 0 .*only 1 were found. Use suite.decode_mode: resync"):
        forced.choose_slots(batch, (3, 4, 5))


def test_the_payload_is_source_text_and_nothing_else() -> None:
    """Read as opcodes, never loaded: `exec` of our source in an empty namespace, then one name of it."""
    payload = bytes.fromhex(json.loads(serialized_processor())["callable"])
    operations = [(op.name, argument) for op, argument, _ in pickletools.genops(payload)]
    assert [argument for name, argument in operations if name == "GLOBAL"] == [
        "builtins exec",
        "operator getitem",
    ]
    texts = [argument for name, argument in operations if name == "BINUNICODE"]
    assert texts == [PROCESSOR_FILE.read_text(encoding="utf-8"), "ForcedDecode"]
    pickletools.dis(payload, out=open("/dev/null", "w"))  # noqa: SIM115, PTH123 (checks the stack at every opcode)
    assert len(payload) < 5000


class Request:
    """What the processor sees of SGLang's request object."""

    def __init__(self, prompt: int) -> None:
        self.origin_input_ids = list(range(prompt))
        self.kv = SimpleNamespace(kv_committed_len=prompt)


def test_steps_are_counted_in_the_parameters() -> None:
    """Without a request object, as with one that is gone: the count goes on."""
    processor, params = ForcedDecode(), {"force": [1, 2, 3]}
    assert [processor.step(params) for _ in range(3)] == [0, 1, 2]

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise ReferenceError("weakly-referenced object no longer exists")

    assert processor.step(params | {"__req__": Gone()}) == 3


def test_steps_follow_chunks_and_retraction() -> None:
    processor, request = ForcedDecode(), Request(100)
    params: dict[str, Any] = {"force": [0] * 10, "__req__": request}
    steps = []
    for committed in (40, 80, 100, 101, 102, 60, 103, 104):
        # three chunks of the prompt, two steps, then retracted: a chunk of prompt and output, and on
        request.kv.kv_committed_len = committed
        steps.append(processor.step(params))
    assert steps == [-60, -20, 0, 1, 2, -40, 3, 4]
    older = Request(5)
    older.kv_committed_len = 7  # type: ignore[attr-defined]
    del older.kv
    assert processor.step({"__req__": older}) == 2


@pytest.mark.parametrize("params", [{}, {"force": 3}, {"force": [1], "slots": []}, None])
def test_the_processor_never_raises(params: Any) -> None:
    """An exception would end the server; the logits stay as they are and the client notices."""
    logits = object()
    assert ForcedDecode()(logits, [params]) is logits
    assert ForcedDecode()(logits, None) is logits


def serving(info: dict[str, Any], generate: Any) -> Any:
    def respond(call: Call) -> Reply:
        if call.path == "/server_info":
            return as_json({"version": "0.5.23", "model_path": "m"} | info)
        if call.path == "/detokenize":
            texts = ["<|spare_1|>", "<|im_end|>", "<|spare_2|>", "", "the"]
            return as_json({"text": (texts + ["x"] * 200)[: len(call.body["tokens"])]})
        if call.path == "/generate":
            return as_json(generate(call.body))
        return as_json({"detail": "Not Found"}, 404)

    return respond


def test_a_server_without_forced_decode_is_not_asked() -> None:
    with ScriptedServer(serving({}, None)) as server, Client(server.url, vocab_size=500) as client:
        with pytest.raises(RequestRejectedError, match=r"enable_custom_logit_processor: true.*resync"):
            client.generate([GenerateRequest((1, 2), forced_ids=(3,))])
        assert server.bodies("/generate") == []


def test_speculative_decoding_rules_the_processor_out() -> None:
    info = {"enable_custom_logit_processor": True, "speculative_algorithm": "EAGLE"}
    with ScriptedServer(serving(info, None)) as server, Client(server.url, vocab_size=500) as client:
        assert client.probe().forced_decode is None


def test_the_request_carries_processor_tokens_and_slots() -> None:
    def generate(body: dict[str, Any]) -> Any:
        answers = []
        for ids, params in zip(body["input_ids"], body["sampling_params"], strict=True):
            slots = params["custom_params"]["slots"]
            force = params["custom_params"]["force"]
            row = [[-0.2, force[0], None], [-2.2, slots[1], None], [-3.0, 77, None], [-5.2, slots[0], None]]
            meta = {
                "finish_reason": {"type": "length"},
                "prompt_tokens": len(ids),
                "output_token_logprobs": [row[0]],
                "output_top_logprobs": [row],
                "output_token_ids_logprobs": [[row[3], row[1]]],
            }
            answers.append({"text": "", "output_ids": force, "meta_info": meta})
        return answers

    info = {"enable_custom_logit_processor": True}
    with ScriptedServer(serving(info, generate)) as server, Client(server.url, vocab_size=500) as client:
        batch = [GenerateRequest((1, 2), forced_ids=(9,)), GenerateRequest((3,), forced_ids=(8,))]
        answers = client.generate(batch, top_logprobs=1)
    (body,) = server.bodies("/generate")
    assert body["custom_logit_processor"] == serialized_processor()
    assert body["top_logprobs_num"] == 4
    assert body["token_ids_logprob"] == [[3, 0], [0, 2]]  # the padding row first, but prompt 1 uses it
    assert [params["max_new_tokens"] for params in body["sampling_params"]] == [1, 1]
    for answer in answers:
        assert answer.output is not None
        assert answer.output.token_ids.tolist() == [[77]]
        np.testing.assert_allclose(answer.output.logprobs, [[-0.8]], atol=1e-6)
        np.testing.assert_allclose(answer.output.chosen_logprobs, [-3.0], atol=1e-6)

"""The client against a scripted server: what it sends, what it refuses to send, and how it reports
failure."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pytest_quantguard.errors import (
    ConfigError,
    InvalidAnswerError,
    RequestRejectedError,
    ServerDiedError,
    ServerError,
)
from pytest_quantguard.serving import transport
from pytest_quantguard.serving.answers import GenerateRequest
from pytest_quantguard.serving.client import Client
from pytest_quantguard.serving.transport import error_text, is_loopback, normalize_url
from tests.serving.samples import VOCAB_SIZE, body_of, requests_of, sample
from tests.serving.scripted import Call, Reply, ScriptedServer, as_json

PROMPT = GenerateRequest((6403, 1980, 253), max_new_tokens=2)


def replying(reply: Reply) -> Callable[[Call], Reply]:
    return lambda _: reply


def client_of(server: ScriptedServer, **options: Any) -> Client:
    return Client(server.url, **({"vocab_size": VOCAB_SIZE, "context_length": 8192} | options))


def test_a_batch_is_one_request_and_comes_back_in_order() -> None:
    recorded = sample("batch8_ids")
    with ScriptedServer(replying((200, body_of(recorded)))) as server, client_of(server) as client:
        answers = client.generate(requests_of(recorded), top_logprobs=5)
    assert [answer.output_ids for answer in answers] == [
        tuple(item["output_ids"]) for item in recorded["response"]
    ]
    (body,) = server.bodies("/generate")
    assert body["input_ids"] == recorded["request"]["body"]["input_ids"]
    assert body["logprob_start_len"] == [0] * 8
    assert body["top_logprobs_num"] == 5
    assert all(params["temperature"] == 0 for params in body["sampling_params"])
    assert body["return_flat_raw_top_logprobs"]
    assert body["return_flat_raw_output_top_logprobs"]
    assert body["return_flat_raw_top_logprobs_b64"]
    assert body["return_text_in_logprobs"] is False


def test_without_rows_to_return_no_flat_flag_is_sent() -> None:
    """A real server refuses return_flat_raw_top_logprobs_b64 alone, and needs no flags for tokens only."""
    with ScriptedServer(replying((200, body_of(sample("batch_one"))))) as server, client_of(server) as client:
        client.generate([GenerateRequest((504, 3575, 282, 4649, 314), max_new_tokens=2)])
    (body,) = server.bodies("/generate")
    assert set(body) == {"input_ids", "sampling_params", "stream"}


@pytest.mark.parametrize(
    ("request_", "top", "message"),
    [
        (replace(PROMPT, input_ids=()), 5, "no tokens"),
        (
            replace(PROMPT, input_ids=(1, 49152)),
            5,
            "token id 49152 is outside the vocabulary of 49152 tokens",
        ),
        (replace(PROMPT, input_ids=(1, -1)), 5, "token id -1 is outside"),
        (replace(PROMPT, logprob_start_len=-1), 5, "logprob_start_len is -1, outside 0 .. 2"),
        (replace(PROMPT, logprob_start_len=-2), 5, "logprob_start_len is -2"),
        (replace(PROMPT, logprob_start_len=3), 5, "logprob_start_len is 3"),
        (PROMPT, 49153, "49153 top log-probabilities of a vocabulary of 49152"),
        (PROMPT, -1, "ask for -1 top log-probabilities"),
        (replace(PROMPT, max_new_tokens=-1), 5, "max_new_tokens is -1"),
        (replace(PROMPT, input_ids=(1,) * 8190, max_new_tokens=3), 5, "exceed the context length of 8192"),
        (replace(PROMPT, forced_ids=()), 5, "forced_ids is empty"),
        (replace(PROMPT, forced_ids=(1, 2, 3)), 5, "max_new_tokens is 2 but 3 tokens are to be forced"),
        (replace(PROMPT, forced_ids=(1, 60000)), 5, "token id 60000"),
    ],
)
def test_a_request_that_could_end_a_server_is_never_sent(
    request_: GenerateRequest, top: int, message: str
) -> None:
    with (
        ScriptedServer(replying(None)) as server,
        client_of(server) as client,
        pytest.raises(RequestRejectedError, match=message),
    ):
        client.generate([request_], top_logprobs=top)
    assert server.calls == []


def test_an_empty_batch_and_a_half_forced_one_are_refused() -> None:
    client = Client("http://127.0.0.1:9", vocab_size=VOCAB_SIZE)
    with pytest.raises(RequestRejectedError, match="without prompts"):
        client.generate([])
    with pytest.raises(RequestRejectedError, match="some of its prompts and not of others"):
        client.generate([PROMPT, replace(PROMPT, max_new_tokens=0, forced_ids=(1,))])


def test_error_bodies_in_all_shapes() -> None:
    assert error_text(b'{"error": {"message": "a"}}') == "a"
    assert error_text(b'{"error": "b"}') == "b"
    assert error_text(b'{"object": "error", "message": "c"}') == "c"
    assert error_text(b'{"detail": "d"}') == "d"
    assert error_text(b"Internal Server Error") == "Internal Server Error"
    assert error_text(b'data: {"error": {"message": "e"}}') == "e"
    assert error_text(b"") == "no message"


def test_not_json_compliant_means_non_finite() -> None:
    reply = as_json({"error": {"message": "Out of range float values are not JSON compliant: nan"}}, 400)
    with (
        ScriptedServer(replying(reply)) as server,
        client_of(server) as client,
        pytest.raises(InvalidAnswerError, match="non-finite log-probabilities"),
    ):
        client.generate([PROMPT], top_logprobs=5)


def test_a_dropped_connection_is_a_dead_server_and_names_the_request() -> None:
    with ScriptedServer(replying(None)) as server, client_of(server) as client:
        client.transport.explain_death = lambda _: "The server ended with exit code -9."
        with pytest.raises(ServerDiedError) as caught:
            client.generate([PROMPT] * 8, top_logprobs=256)
    assert "/generate with 8 prompts of 3 tokens, 2 new tokens, top 256" in str(caught.value)
    assert "dropped the connection" in str(caught.value)
    assert "exit code -9" in str(caught.value)
    assert len(server.calls) == 1  # it may have been processed, so it is not sent twice


def test_503_is_tried_again_and_then_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = iter([as_json({"error": "starting"}, 503), as_json({"error": "starting"}, 503)])
    good = (200, body_of(sample("batch_one")))
    prompt = GenerateRequest((504, 3575, 282, 4649, 314), max_new_tokens=2)
    with ScriptedServer(lambda _: next(replies, good)) as server, client_of(server) as client:
        assert client.generate([prompt])[0].text == " Paris."
        assert len(server.calls) == 3
    monkeypatch.setattr(transport, "RETRY_SECONDS", 0.2)
    with (
        ScriptedServer(replying(as_json({"error": "busy"}, 503))) as server,
        client_of(server) as client,
        pytest.raises(RequestRejectedError, match=r"503.*busy"),
    ):
        client.generate([prompt])


def test_nothing_listening_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "RETRY_SECONDS", 0.2)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with (
            Client(url, vocab_size=VOCAB_SIZE) as client,
            pytest.raises(ServerDiedError, match="nothing listens"),
        ):
            client.generate([PROMPT])


def test_a_name_that_does_not_resolve_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)  # a proxy would be asked for the name
    client = Client("http://no-such-host.invalid:1", vocab_size=VOCAB_SIZE)
    with client, pytest.raises(ServerError, match=r"cannot connect to http://no-such-host.invalid:1"):
        client.generate([PROMPT])


def test_a_server_that_does_not_answer_in_time_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        client = Client(url, vocab_size=VOCAB_SIZE, request_timeout=0.2)
        with client, pytest.raises(ServerError, match=r"within 0.2 s; raise request_timeout"):
            client.generate([PROMPT])


def test_http_and_https_mixed_up_are_explained() -> None:
    with ScriptedServer(replying((200, b"[]"))) as server:
        client = Client(server.url.replace("http:", "https:"), vocab_size=VOCAB_SIZE)
        with client, pytest.raises(ServerError, match=r"no TLS connection to .*; does it speak plain http"):
            client.generate([PROMPT])
    with socket.create_server(("127.0.0.1", 0)) as tls:

        def alert() -> None:
            connection, _ = tls.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"\x15\x03\x01\x00\x02\x02\x46")  # a TLS server's "protocol version" alert

        thread = threading.Thread(target=alert)
        thread.start()
        client = Client(f"http://127.0.0.1:{tls.getsockname()[1]}", vocab_size=VOCAB_SIZE)
        with client, pytest.raises(ServerDiedError, match="if it speaks TLS, write https://"):
            client.generate([PROMPT])
        thread.join()


def test_api_key_travels_and_its_absence_is_explained() -> None:
    def guarded(call: Call) -> Reply:
        if call.headers.get("Authorization") != "Bearer hunter2":
            return as_json({"error": "Unauthorized"}, 401)
        return 200, body_of(sample("batch_one"))

    prompt = GenerateRequest((504, 3575, 282, 4649, 314), max_new_tokens=2)
    with ScriptedServer(guarded) as server:
        with client_of(server, api_key="hunter2") as client:
            client.generate([prompt])
        with (
            client_of(server) as client,
            pytest.raises(RequestRejectedError, match="none was sent; set api_key"),
        ):
            client.generate([prompt])
        with client_of(server, api_key="wrong-key") as client:
            with pytest.raises(RequestRejectedError, match="not accepted") as caught:
                client.generate([prompt])
            assert "wrong-key" not in str(caught.value)


def test_loopback_bypasses_the_proxy_and_netrc(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login someone password else\n", encoding="utf-8")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    seen: list[str | None] = []

    def reply(call: Call) -> Reply:
        seen.append(call.headers.get("Authorization"))
        return 200, body_of(sample("batch_one"))

    with ScriptedServer(reply) as server, client_of(server, api_key="k") as client:
        client.generate([GenerateRequest((504, 3575, 282, 4649, 314), max_new_tokens=2)])
    assert seen == ["Bearer k"]


def test_a_url_with_a_path() -> None:
    with ScriptedServer(replying((200, body_of(sample("batch_one"))))) as server:
        with Client(server.url + "/team/sglang/", vocab_size=VOCAB_SIZE) as client:
            client.generate([GenerateRequest((504, 3575, 282, 4649, 314), max_new_tokens=2)])
        assert server.calls[0].path == "/team/sglang/generate"


def test_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback in both its forms goes past a proxy."""
    assert normalize_url("http://[::1]:30000/") == "http://[::1]:30000"
    assert is_loopback("http://[::1]:30000")
    assert is_loopback("http://localhost:1")
    assert not is_loopback("https://gpu-17.example.com/v1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    try:
        server = ScriptedServer(replying((200, body_of(sample("batch_one")))), host="::1").__enter__()
    except OSError as error:
        pytest.skip(f"no IPv6 on this machine: {error}")
    try:
        assert server.url.startswith("http://[::1]:")
        with Client(server.url, vocab_size=VOCAB_SIZE) as client:
            client.generate([GenerateRequest((504, 3575, 282, 4649, 314), max_new_tokens=2)])
    finally:
        server.__exit__()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:30000", "did you mean 'http://127.0.0.1:30000'"),
        ("ftp://host", "must begin with http"),
        ("http://", "name a host"),
        ("http://me:secret@host", "must not hold a user name"),
        ("http://host/x?y=1", "must end with the path"),
        ("http://host:99999", "cannot be read"),
        ("http://::1:30000", "cannot be read|name a host"),
    ],
)
def test_a_wrong_url_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Client(url)
    assert "secret" not in str(caught.value)


def test_a_redirect_and_a_missing_route_are_explained() -> None:
    with (
        ScriptedServer(replying((308, b""))) as server,
        client_of(server) as client,
        pytest.raises(RequestRejectedError, match=r"redirects .308.*https"),
    ):
        client.generate([PROMPT])
    recorded = sample("err_not_found")
    with (
        ScriptedServer(replying((404, body_of(recorded)))) as server,
        client_of(server) as client,
        pytest.raises(
            RequestRejectedError, match=r"has no /generate .404: Not Found.; is the url's path right"
        ),
    ):
        client.generate([PROMPT])


def test_flush_waits_for_a_busy_server() -> None:
    replies = iter([as_json({"error": "requests are running"}, 400)])
    with ScriptedServer(lambda _: next(replies, (200, b"Cache flushed.\n"))) as server:
        with client_of(server) as client:
            client.flush_cache()
        assert [call.path for call in server.calls] == ["/flush_cache"] * 2
    with (
        ScriptedServer(replying(as_json({"detail": "Not Found"}, 404))) as server,
        client_of(server) as client,
        pytest.raises(RequestRejectedError, match="no /flush_cache"),
    ):
        client.flush_cache()


def test_tokenize_and_detokenize() -> None:
    def reply(call: Call) -> Reply:
        known = {
            "/tokenize": sample("tokenize")["response"],
            "/v1/detokenize": sample("detokenize")["response"],
        }
        return as_json(known[call.path]) if call.path in known else as_json({"detail": "Not Found"}, 404)

    with ScriptedServer(reply) as server, client_of(server) as client:
        assert client.tokenize("The capital of France is") == [504, 3575, 282, 4649, 314]
        assert client.detokenize([504, 3575]) == "The capital"  # by the second name of the route
        assert server.bodies("/tokenize") == [
            {"model": "default", "prompt": "The capital of France is", "add_special_tokens": True}
        ]

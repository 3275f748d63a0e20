"""Tests of your own beside the built-in gate: they share its server and its measurements.

pytest --quantguard-config=examples/smollm2-nvfp4.yaml examples/test_custom.py
"""

from pytest_quantguard.serving.answers import GenerateRequest


def test_half_of_the_first_choices_survive(quantguard):
    """`check` fails with the same message as a built-in test; it knows intervals and the noise floor."""
    quantguard.check("agreement", phase="decode", batch_size=8, min=0.5)


def test_long_prompts_are_no_worse_than_short_ones(quantguard, quantguard_baseline):
    """`measure` returns the divergence position by position, to be cut as you like."""
    divergence = quantguard.measure("prefill", 8)
    lengths = [prompt.prompt_tokens for prompt in quantguard_baseline.prompts]
    middle = sorted(lengths)[len(lengths) // 2]
    is_long = [lengths[prompt] > middle for prompt in divergence.prompt]
    long, short = divergence.select(is_long), divergence.select([not one for one in is_long])
    assert long.aggregate("kl_mean") < 2 * short.aggregate("kl_mean")


def test_the_capital_of_france(quantguard_server):
    """The running server's client takes token ids, never text, so that no template comes between."""
    client = quantguard_server.client
    prompt = tuple(client.tokenize("The capital of France is"))
    answer = client.generate([GenerateRequest(input_ids=prompt, max_new_tokens=3)])[0]
    assert client.detokenize(answer.output_ids).strip()


def test_the_candidate_is_quantized(quantguard_config, quantguard_server):
    """What the config asks for is what the server says of itself."""
    assert quantguard_server.capabilities.quantization == quantguard_config.candidate.quantization

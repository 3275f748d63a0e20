"""The code that SGLang runs inside the server to force tokens while decoding. It is sent as source text.

It must run on any Python and torch that a server has, touch nothing but the rows it is given, and never
raise: an exception in a logit processor ends the server. Where anything is unexpected it leaves the logits
alone, and the client notices, since other tokens come back.

Per forced row: the row becomes its own log-softmax; the first sacrificed id ("slot") carries the forced
token's value, the second carries 0, and the forced token is lifted to 2, above all others. The server's own
log-softmax subtracts one constant from everything, which the second slot reveals.
"""

from __future__ import annotations

from typing import Any


class ForcedDecode:
    """What SGLang instantiates and calls once per forward pass, with the rows of the requests that use it."""

    def __call__(self, logits: Any, custom_param_list: list[dict[str, Any]] | None = None) -> Any:
        try:
            return self.force(logits, custom_param_list or [])
        except Exception:
            return logits

    def force(self, logits: Any, custom_param_list: list[dict[str, Any]]) -> Any:
        import torch  # type: ignore[import-not-found,unused-ignore]

        chosen = []
        for row, params in enumerate(custom_param_list):
            step = self.step(params)
            if 0 <= step < len(params["force"]):
                chosen.append([row, params["force"][step], *params["slots"]])
        if not chosen:
            return logits
        rows, tokens, carriers, zeros = (
            torch.tensor(chosen, dtype=torch.int64).to(logits.device).T.unsqueeze(-1)
        )
        rows = rows.squeeze(-1)
        changed = torch.log_softmax(logits[rows].float(), dim=-1)
        own = changed.gather(1, tokens)
        changed.scatter_(1, carriers, own)
        changed.scatter_(1, zeros, 0.0)
        changed.scatter_(1, tokens, 2.0)
        result = logits.clone()
        result[rows] = torch.where(torch.isfinite(own), changed, logits[rows].float()).to(logits.dtype)
        return result

    def step(self, params: dict[str, Any]) -> int:
        """Index of the token that this pass emits.

        Counted here, in the request's own parameters: with the overlap scheduler the request's output lags
        behind by one. A prompt prefilled in chunks passes here once per chunk, and a retracted request
        prefills again what it had emitted; both show in the request's committed length, which corrects the
        count where the server has it.
        """
        step = int(params.get("step", 0))
        try:
            request: Any = params["__req__"]
            committed = getattr(request, "kv", request).kv_committed_len
            step = int(committed) - len(request.origin_input_ids)
        except (AttributeError, KeyError, ReferenceError, TypeError):
            pass  # another version of the server, or a request that ended during this pass: the count holds
        params["step"] = step + 1
        return step

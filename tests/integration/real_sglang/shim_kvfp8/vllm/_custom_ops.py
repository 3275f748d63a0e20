"""The one operator that SGLang's plain-torch path takes from vLLM: rotary position embedding, in place."""

import torch


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    rows = cos_sin_cache.index_select(0, positions.flatten()).float()
    rotated = rows.shape[-1]
    cos, sin = (part.unsqueeze(1) for part in rows.chunk(2, -1))
    for tensor in (query, key):
        if tensor is None:
            continue
        heads = tensor.view(positions.numel(), -1, head_size)
        x = heads[..., :rotated].float()
        if is_neox:
            a, b = x.chunk(2, -1)
            y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        else:
            a, b = x[..., ::2], x[..., 1::2]
            y = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        heads[..., :rotated] = y.to(tensor.dtype)

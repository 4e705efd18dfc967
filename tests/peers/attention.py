"""FlashAttention-4 on the emulator against float64. tests/test_peers.py starts it as

    python attention.py ARCHITECTURE DIRECTORY < requests > replies

A request names a shape, a mask and runs; see `answer`.
"""

import dataclasses
import hashlib
import math
import sys

import capture

NUM_SMS = 4


def dense(request: dict, tensors: list, dtype):
    """Attention and its gradients, computed in `dtype`: out, dq, dk and dv as float64."""
    import torch

    query, key, value = (x.detach().to(dtype).requires_grad_() for x in tensors[:3])
    length, num_heads, head_dim = query.shape[1:]
    source, num_groups = key.shape[1], num_heads // key.shape[2]
    keys, values = (x.repeat_interleave(num_groups, dim=2) for x in (key, value))
    logits = torch.einsum("btnh,bsnh->bnts", query, keys) * (1 / math.sqrt(head_dim))
    # The last query is at the last key.
    position = torch.arange(length)[:, None] + source - length
    distance = torch.arange(source)[None] - position
    left, right = request["window"]
    right = min(right, 0) if request["causal"] and right is not None else right
    right = 0 if request["causal"] else right
    visible = torch.ones(length, source, dtype=torch.bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    weights = logits.masked_fill(~visible, -math.inf).softmax(dim=-1)
    out = torch.einsum("bnts,bsnh->btnh", weights, values)
    out.backward(tensors[3].to(dtype))
    return [x.detach().double() for x in (out, query.grad, key.grad, value.grad)]


def answer(device: capture.Device, request: dict) -> dict:
    """Compiles and runs one configuration.

    request: batch, query_length, key_length, num_heads, num_kv_heads, head_dim, causal, window
    (left, right), deterministic, backward, and runs: options of the emulator for each.
    reply: for each run `launches`, and by name (out, dq, dk, dv) `errors`, `bounds` of the accuracy
    rule (twice the error of a computation in bfloat16) and `digests` of the bits.
    """
    import torch
    from flash_attn.cute import flash_attn_func

    generator = torch.Generator().manual_seed(0)

    def normal(length: int, num_heads: int):
        shape = request["batch"], length, num_heads, request["head_dim"]
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    queries = request["query_length"], request["num_heads"]
    keys = request["key_length"], request["num_kv_heads"]
    tensors = [normal(*queries), normal(*keys), normal(*keys), normal(*queries)]
    exact = dense(request, tensors, torch.float64)
    rounded = dense(request, tensors, torch.bfloat16)
    bounds = [2 * (x - y).abs().max().item() for x, y in zip(rounded, exact, strict=True)]

    runs = []
    for options in request["runs"]:
        device.options = {"strict_exit": False, "lenient_tensor": True, **options}
        device.launches.clear()
        query, key, value = (x.detach().requires_grad_() for x in tensors[:3])
        out, _ = flash_attn_func(
            query,
            key,
            value,
            causal=request["causal"],
            window_size=tuple(request["window"]),
            deterministic=request["deterministic"],
            return_lse=True,
        )
        results = [out.detach()]
        if request["backward"]:
            out.backward(tensors[3])
            results += [x.grad for x in (query, key, value)]
        run = {"launches": [dataclasses.asdict(launch) for launch in device.launches]}
        names = ("out", "dq", "dk", "dv")
        for name, result, wanted, bound in zip(names, results, exact, bounds, strict=False):
            run.setdefault("errors", {})[name] = (result.double() - wanted).abs().max().item()
            run.setdefault("bounds", {})[name] = bound
            bits = result.view(torch.int16).numpy().tobytes()
            run.setdefault("digests", {})[name] = hashlib.sha256(bits).hexdigest()
        runs.append(run)
    return {"runs": runs}


if __name__ == "__main__":
    architecture, directory = sys.argv[1:]
    capture.set_environment(architecture, NUM_SMS)
    pretended = capture.Device(architecture, NUM_SMS, directory)
    pretended.install()
    capture.serve(lambda request: answer(pretended, request))

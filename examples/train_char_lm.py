"""Trains a small causal transformer on the sources of Python's own standard library.

A byte-level language model in Flax (nnx) whose attention is ``fa4_jax``: float32 parameters,
bfloat16 activations, grouped-query heads of 64, AdamW, one jitted step. It prints which
implementation computes the attention and why, the loss as it falls, a sampled continuation, and
writes the loss curve. ::

    python examples/train_char_lm.py                    # about a minute on two CPU cores
    python examples/train_char_lm.py --compare          # on a GPU: xla and fa4 from the same seeds
    python examples/train_char_lm.py --devices 2        # each step's batch split over two devices

Needs ``fa4-jax-ffi[flax]`` (Flax brings optax) and matplotlib.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
import sysconfig
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure

import fa4_jax
import fa4_jax.flax
from fa4_jax import info

HEAD_DIM = 64
VOCABULARY = 256  # a token is a byte
PROMPT = b"def main(argv=None):\n"
SAMPLED = 300  # bytes that continue it
TEMPERATURE = 0.6
OUTPUT = pathlib.Path(__file__).parent / "output" / "char_lm_loss.png"


@dataclasses.dataclass(frozen=True)
class Config:
    """Size of the model and of the training run; every field is a flag."""

    layers: int
    heads: int
    kv_heads: int
    length: int  # context in bytes
    batch: int
    steps: int
    rate: float  # peak learning rate

    @property
    def width(self) -> int:
        return self.heads * HEAD_DIM


# For each backend a size that takes about a minute.
DEFAULTS = {
    "cpu": Config(layers=2, heads=2, kv_heads=1, length=64, batch=8, steps=1200, rate=2e-3),
    "gpu": Config(layers=8, heads=12, kv_heads=4, length=1024, batch=32, steps=600, rate=1e-3),
}


class Block(nnx.Module):
    """Pre-norm transformer block on ``[B, T, width]``."""

    def __init__(self, config: Config, attention_fn, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
        norm = functools.partial(nnx.RMSNorm, config.width, dtype=jnp.bfloat16, rngs=rngs)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention = nnx.MultiHeadAttention(
            config.heads,
            config.width,
            num_kv_heads=config.kv_heads,
            use_bias=False,
            dtype=jnp.bfloat16,
            attention_fn=attention_fn,
            decode=False,
            rngs=rngs,
        )
        self.up = linear(config.width, 4 * config.width)
        self.down = linear(4 * config.width, config.width)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Transformer(nnx.Module):
    """Bytes ``[B, T]`` to float32 logits ``[B, T, 256]`` of each next byte."""

    def __init__(self, config: Config, attention_fn, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        embed = functools.partial(nnx.Embed, embedding_init=init, dtype=jnp.bfloat16, rngs=rngs)
        self.token = embed(VOCABULARY, config.width)
        self.position = embed(config.length, config.width)
        self.blocks = nnx.List([Block(config, attention_fn, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.token.attend(self.norm(x)).astype(jnp.float32)


def standard_library() -> np.ndarray:
    """The standard library's modules, tests left out, as one array of bytes (uint8)."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
    files = [f for f in sorted(root.rglob("*.py")) if skipped.isdisjoint(f.parts)]
    if not files:
        raise SystemExit(f"no Python sources under {root}: this Python carries only compiled ones")
    return np.frombuffer(b"\n".join(f.read_bytes() for f in files), np.uint8)


def train(config: Config, attention_fn, text: np.ndarray, seed: int, mesh: Mesh):
    """Trains from ``seed``: parameters on every device of ``mesh``, the batch split over them.

    Returns:
      The losses ``[steps]``, and the trained model as a function tokens -> logits that ``jax.jit``
      takes as an argument (the parameters are its leaves).
    """
    model = Transformer(config, attention_fn, nnx.Rngs(seed))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.rate, config.steps // 20, config.steps
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    )

    def apply(params, tokens):
        return nnx.merge(graphdef, params, rest)(tokens)

    def loss_fn(params, tokens):
        logits = apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, text, key):
        params, moments = state
        starts = jax.random.randint(key, (config.batch,), 0, text.size - config.length)
        tokens = text[starts[:, None] + jnp.arange(config.length + 1)].astype(jnp.int32)
        # All that data parallelism needs: attention, like the rest, follows its inputs.
        tokens = jax.lax.with_sharding_constraint(tokens, NamedSharding(mesh, P("data")))
        loss, gradients = jax.value_and_grad(loss_fn)(params, tokens)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    everywhere = NamedSharding(mesh, P())
    text = jax.device_put(text, everywhere)
    state = jax.device_put((params, optimizer.init(params)), everywhere)
    losses, started = [], time.perf_counter()
    for i in range(config.steps):
        state, loss = step(state, text, jax.random.fold_in(jax.random.key(seed), i))
        losses.append(loss)
        if i == 0:
            loss.block_until_ready()
            print(f"compiled the training step in {time.perf_counter() - started:.1f} s")
            started = time.perf_counter()
        elif (i + 1) % max(1, config.steps // 20) == 0 or i + 1 == config.steps:
            loss = float(loss)  # waits for the device, hence not in every step
            speed = i * config.batch * config.length / (time.perf_counter() - started)
            show_progress(i + 1, config.steps, f"loss {loss:.3f}  {speed:,.0f} bytes/s")
    return np.array(jax.device_get(losses)), jax.tree_util.Partial(apply, state[0])


def show_progress(done: int, total: int, status: str) -> None:
    """One line, rewritten in place on a terminal."""
    line = f"{'#' * (24 * done // total):-<24} {done}/{total}  {status}"
    in_place = sys.stdout.isatty() and done < total
    print("\r" * sys.stdout.isatty() + line, end="" if in_place else "\n", flush=True)


def sample(logits_fn, prompt: bytes, count: int, context: int, key: jax.Array) -> bytes:
    """Continues ``prompt`` by ``count`` bytes, each from the ``context`` bytes before it."""
    stop = len(prompt) + count

    @jax.jit
    def run(logits_fn, tokens, key):
        def next_byte(i, tokens):
            # Where the window reaches beyond i, causality keeps what is there out of the logits.
            start = jnp.maximum(0, i - context)
            window = jax.lax.dynamic_slice(tokens, (0, start), (1, context))
            logits = logits_fn(window)[0, i - 1 - start] / TEMPERATURE
            choice = jax.random.categorical(jax.random.fold_in(key, i), logits)
            return tokens.at[0, i].set(choice)

        return jax.lax.fori_loop(len(prompt), stop, next_byte, tokens)

    tokens = np.zeros((1, stop + context), np.int32)
    tokens[0, : len(prompt)] = list(prompt)
    return bytes(np.array(run(logits_fn, tokens, key)[0, :stop], np.uint8))


def plot(curves: dict[str, np.ndarray], path: pathlib.Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=False):
        axes.plot(1 + np.arange(len(losses)), losses, style, label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=jax.devices()[0].device_kind)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def parse_arguments(argv: list[str] | None) -> tuple[argparse.Namespace, Config]:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--implementation", choices=info.implementations.NAMES, help="by default the best one"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="train with xla, and again with fa4 or, where it is given, with --quantization",
    )
    parser.add_argument("--quantization", help="a quantised path, such as nvfp4_fp8")
    parser.add_argument("--devices", type=int, default=1, help="devices to split the batch over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, default=OUTPUT, help="the plot")
    defaults = DEFAULTS["cpu" if jax.default_backend() == "cpu" else "gpu"]
    for name, default in dataclasses.asdict(defaults).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    arguments = parser.parse_args(argv)
    return arguments, Config(**{name: getattr(arguments, name) for name in vars(defaults)})


def main(argv: list[str] | None = None) -> dict[str, np.ndarray]:
    """Runs the example; returns the loss curve of each training, by what attention it used."""
    arguments, config = parse_arguments(argv)
    if not 0 < arguments.devices <= jax.device_count() or config.batch % arguments.devices:
        raise SystemExit(
            f"--devices {arguments.devices}: there are {jax.device_count()}, and they must divide "
            f"the batch of {config.batch}"
        )
    devices = jax.devices()[: arguments.devices]
    mesh = jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)
    text = standard_library()
    print(
        f"{len(devices)} x {devices[0].device_kind}: {config}, {text.size / 1e6:.1f} MB of Python"
    )
    B, T, N, K = config.batch, config.length, config.heads, config.kv_heads
    trainings = [(arguments.implementation, arguments.quantization)]
    if arguments.compare:
        exact = arguments.quantization is None
        trainings = [("xla", None), ("fa4", None) if exact else ("xla", arguments.quantization)]
    explained = []
    for implementation, quantization in trainings:
        call = info.call((B, T, T, N, K, HEAD_DIM), "bfloat16", True, quantization=quantization)
        explained.append(info.explain(*call, implementation))
        if explained[-1][0] is None:
            raise SystemExit(explained[-1][1])
    curves = {}
    for (implementation, quantization), (name, account) in zip(trainings, explained, strict=True):
        print(account)
        attention_fn = functools.partial(
            fa4_jax.flax.attention_fn, implementation=implementation, quantization=quantization
        )
        losses, logits_fn = train(config, attention_fn, text, arguments.seed, mesh)
        curves[name if quantization is None else f"{name} {quantization}"] = losses
        print(f"loss {losses[0]:.3f} -> {losses[-len(losses) // 10 :].mean():.3f} nats per byte")
        continued = sample(logits_fn, PROMPT, SAMPLED, T, jax.random.key(arguments.seed))
        print(f"{continued.decode(errors='replace')}\n")
    if arguments.compare:
        first, second = curves.values()
        difference = np.abs(first - second)
        print(
            f"largest difference of the losses: {difference.max():.4f} (step "
            f"{difference.argmax() + 1}), mean {difference.mean():.4f}"
        )
    plot(curves, arguments.output)
    print(f"wrote {arguments.output}")
    return curves


if __name__ == "__main__":
    main()

"""How much does attention within segments save over attention under a block mask?

One packed row, forward and backward of one layer's attention: `coordexp.modeling.attention.packed_attention`, whose
cost grows with the sum of squared segment lengths, against transformers' SDPA under a boolean block-causal mask, whose
cost grows with the row's squared length. On the CPU, in float32. Building that mask is not counted. Both must give the
same numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from reporting import machine, median_seconds, parser, positive, positive_list, print_machine, set_threads, write_json
from rich.console import Console
from rich.table import Table


def main(argv: Sequence[str] | None = None) -> None:
    flags = parser(__doc__)
    flags.add_argument("--segments", type=positive_list, default=[1, 2, 4, 8, 16], help="per row [1,2,4,8,16]")
    flags.add_argument("--segment-length", type=positive, default=256, help="tokens per segment [256]")
    flags.add_argument("--heads", type=positive, default=4, help="query heads [4]")
    flags.add_argument("--kv-heads", type=positive, default=2, help="key/value heads [2]")
    flags.add_argument("--head-dim", type=positive, default=64, help="[64]")
    flags.add_argument("--repeats", type=positive, default=5, help="timed calls per figure; the median counts [5]")
    options = flags.parse_args(argv)
    if options.heads % options.kv_heads:
        flags.error(f"--heads {options.heads} is no multiple of --kv-heads {options.kv_heads}")
    console = Console()
    threads = set_threads(options.threads)
    where = machine()
    settings = {**vars(options), "threads": threads}
    shown = {name: settings[name] for name in ("segment_length", "heads", "kv_heads", "head_dim")}
    print_machine(console, where, **shown, threads=threads)
    results = [compare([options.segment_length] * count, options) for count in options.segments]
    console.print(_table(results))
    write_json(options.json, "attention", where, settings, results)


def compare(lengths: list[int], options: Any) -> dict[str, float]:
    """Milliseconds of forward and backward both ways, their ratio, and how far the two results lie apart."""
    import torch

    from coordexp.cpu_wheels import ensure_torchvision

    ensure_torchvision()
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from coordexp.modeling.attention import packed_attention, segment_lengths_mask

    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)

    def tensor(heads: int) -> torch.Tensor:
        return torch.randn(1, heads, total, options.head_dim, generator=generator).requires_grad_()

    query, key, value = tensor(options.heads), tensor(options.kv_heads), tensor(options.kv_heads)
    # What attention functions read of their layer.
    layer = SimpleNamespace(
        num_key_value_groups=options.heads // options.kv_heads, is_causal=True, training=True, layer_idx=0
    )
    segment_L = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    causal_LL = torch.ones(total, total, dtype=torch.bool).tril()
    block_11LL = (causal_LL & (segment_L[:, None] == segment_L[None, :]))[None, None]
    masks = {"packed": segment_lengths_mask(lengths), "sdpa": block_11LL}
    functions = {"packed": packed_attention, "sdpa": sdpa_attention_forward}

    def run(name: str) -> tuple[torch.Tensor, ...]:
        for leaf in (query, key, value):
            leaf.grad = None
        output, _ = functions[name](layer, query, key, value, masks[name], scaling=options.head_dim**-0.5)
        output.square().sum().backward()
        return (output.detach(), *(leaf.grad for leaf in (query, key, value)))

    difference = max(float((a - b).abs().max()) for a, b in zip(run("packed"), run("sdpa"), strict=True))
    seconds = {name: median_seconds(lambda name=name: run(name), options.repeats) for name in functions}
    return {
        "segments": len(lengths),
        "tokens": total,
        "packed_ms": 1000 * seconds["packed"],
        "sdpa_ms": 1000 * seconds["sdpa"],
        "speedup": seconds["sdpa"] / seconds["packed"],
        "work_ratio": total**2 / sum(length**2 for length in lengths),
        "mask_mib": block_11LL.numel() / 2**20,
        "max_difference": difference,
    }


def _table(results: Sequence[dict[str, float]]) -> Table:
    table = Table(title="one layer's attention, forward and backward (median)", title_justify="left")
    for name in ("parts", "tokens", "packed ms", "SDPA ms", "speed-up", "L²/Σl²", "mask MiB", "max diff"):
        table.add_column(name, justify="right")
    for row in results:
        table.add_row(
            f"{row['segments']}",
            f"{row['tokens']:,}",
            f"{row['packed_ms']:.2f}",
            f"{row['sdpa_ms']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['work_ratio']:.1f}",
            f"{row['mask_mib']:.1f}",
            f"{row['max_difference']:.1e}",
        )
    return table


if __name__ == "__main__":
    main()

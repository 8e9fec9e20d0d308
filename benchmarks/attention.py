"""How much faster is our attention: within segments against under a block mask, and to a cache against transformers'?

One packed row, forward and backward of one layer's attention: each implementation of `coordexp.modeling.attention` that
runs on this machine against transformers' SDPA under a boolean block-causal mask. The cost of ours grows with the sum
of squared segment lengths, that of SDPA with the row's squared length. On the CPU in float32; on a GPU in bfloat16,
with varlen and (if installed) flash. Building that mask is not counted. All must give the same numbers.

Then new tokens attend to a cache, as in generation: one layer, in float32 and in bfloat16, without gradients, against
transformers' own, which copies the cache to each query head.
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
    flags.add_argument("--cache", type=positive_list, default=[400, 1200], help="cached tokens [400,1200]")
    flags.add_argument("--new", type=positive_list, default=[1, 8], help="new tokens of each sequence [1,8]")
    flags.add_argument("--batch", type=positive, default=8, help="sequences that are generated at once [8]")
    flags.add_argument("--repeats", type=positive, default=5, help="timed calls per figure; the median counts [5]")
    options = flags.parse_args(argv)
    if options.heads % options.kv_heads:
        flags.error(f"--heads {options.heads} is not a multiple of --kv-heads {options.kv_heads}")
    console = Console()
    threads = set_threads(options.threads)
    where = machine()
    settings = {**vars(options), "threads": threads}
    shown = {name: settings[name] for name in ("segment_length", "heads", "kv_heads", "head_dim")}
    print_machine(console, where, **shown, threads=threads)
    results = [row for count in options.segments for row in compare([options.segment_length] * count, options)]
    console.print(_table(results))
    cached = [attend_to_cache(cache, new, options) for cache in options.cache for new in options.new]
    console.print(_table_of_caches(cached))
    write_json(options.json, "attention", where, settings, {"packed": results, "cached": cached})


def compare(lengths: list[int], options: Any) -> list[dict[str, Any]]:
    """One line per implementation: milliseconds of forward and backward, the ratio to SDPA's, and how far its output
    and gradients lie from SDPA's."""
    import torch

    from coordexp.cpu_wheels import ensure_torchvision

    ensure_torchvision()
    from transformers import AttentionInterface

    from coordexp.modeling.attention import row_arguments, transformers_name

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)

    def tensor(heads: int) -> torch.Tensor:
        drawn = torch.randn(1, heads, total, options.head_dim, generator=generator)
        return drawn.to(device, dtype).requires_grad_()

    query, key, value = tensor(options.heads), tensor(options.kv_heads), tensor(options.kv_heads)
    # The attributes of a layer that attention functions read.
    layer = SimpleNamespace(
        num_key_value_groups=options.heads // options.kv_heads, is_causal=True, training=True, layer_idx=0
    )
    segment_L = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
    causal_LL = torch.ones(total, total, dtype=torch.bool, device=device).tril()
    block_11LL = (causal_LL & (segment_L[:, None] == segment_L[None, :]))[None, None]

    def run(name: str) -> list[torch.Tensor]:
        for leaf in (query, key, value):
            leaf.grad = None
        arguments = {"attention_mask": block_11LL} if name == "sdpa" else row_arguments(lengths)
        attend = AttentionInterface()[name if name == "sdpa" else transformers_name(name)]
        output, _ = attend(layer, query, key, value, scaling=options.head_dim**-0.5, **arguments)
        output.square().sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        return [output.detach(), *(leaf.grad for leaf in (query, key, value) if leaf.grad is not None)]

    reference = run("sdpa")
    sdpa_s = median_seconds(lambda: run("sdpa"), options.repeats)
    rows = []
    for name in implementations(device):
        difference = max(float((a - b).abs().max()) for a, b in zip(run(name), reference, strict=True))
        seconds = median_seconds(lambda name=name: run(name), options.repeats)
        rows.append(
            {
                "implementation": name,
                "segments": len(lengths),
                "tokens": total,
                "packed_ms": 1000 * seconds,
                "sdpa_ms": 1000 * sdpa_s,
                "speedup": sdpa_s / seconds,
                "work_ratio": total**2 / sum(length**2 for length in lengths),
                "mask_mib": block_11LL.numel() / 2**20,
                "max_difference": difference,
            }
        )
    return rows


def attend_to_cache(cache: int, new: int, options: Any) -> dict[str, Any]:
    """Milliseconds of one layer's attention of ``new`` tokens of each sequence to ``cache`` others, and the differences
    of the outputs."""
    import torch
    from transformers import AttentionInterface

    from coordexp.modeling.attention import transformers_name

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    layer = SimpleNamespace(
        num_key_value_groups=options.heads // options.kv_heads, is_causal=True, training=False, layer_idx=0
    )
    length = cache + new
    sees = torch.ones(options.batch, 1, new, length, dtype=torch.bool).tril(cache)
    sees[0, ..., : cache // 4] = False  # padding
    query, key, value = (
        torch.randn(options.batch, heads, tokens, options.head_dim, generator=generator)
        for heads, tokens in ((options.heads, new), (options.kv_heads, length), (options.kv_heads, length))
    )
    row: dict[str, Any] = {"cached": cache, "new": new, "batch": options.batch}
    for kind, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        inputs = [*(part.to(device, dtype) for part in (query, key, value)), sees.to(device)]
        outputs = []
        for who, name in (("ours", transformers_name("packed")), ("transformers", "sdpa")):
            attend = AttentionInterface()[name]

            def run(attend: Any = attend, inputs: list[Any] = inputs) -> Any:
                with torch.no_grad():
                    output = attend(layer, *inputs, scaling=options.head_dim**-0.5)[0]
                if device == "cuda":
                    torch.cuda.synchronize()
                return output

            outputs.append(run().float())
            row[f"{who}_{kind}_ms"] = 1000 * median_seconds(run, options.repeats)
        row[f"max_difference_{kind}"] = float((outputs[0] - outputs[1]).abs().max())
    return row


def implementations(device: str) -> list[str]:
    """Those that can train here, by the rules that refuse them at the start of a run."""
    from coordexp.errors import CoordExpError
    from coordexp.modeling.attention import KERNELS, check_attention

    found = []
    for name in KERNELS:
        try:
            check_attention(name, device, half=device == "cuda")
        except CoordExpError:
            continue
        found.append(name)
    return found


def _table(results: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="one layer's attention, forward and backward (median)", title_justify="left")
    for name in ("how", "parts", "tokens", "ms", "SDPA ms", "gain", "L²/Σl²", "mask MiB", "diff"):
        table.add_column(name, justify="right")
    for row in results:
        table.add_row(
            row["implementation"],
            f"{row['segments']}",
            f"{row['tokens']:,}",
            f"{row['packed_ms']:.2f}",
            f"{row['sdpa_ms']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['work_ratio']:.1f}",
            f"{row['mask_mib']:.1f}",
            f"{row['max_difference']:.0e}",
        )
    return table


def _table_of_caches(results: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="one layer's attention of new tokens (median)", title_justify="left")
    for name in ("cached", "new", "batch", "float32 ms", "transformers", "gain", "bfloat16 ms", "transformers", "gain"):
        table.add_column(name, justify="right")
    for row in results:
        cells = [f"{row['cached']:,}", f"{row['new']}", f"{row['batch']}"]
        for dtype in ("float32", "bfloat16"):
            ours, theirs = row[f"ours_{dtype}_ms"], row[f"transformers_{dtype}_ms"]
            cells += [f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.1f}x"]
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    main()

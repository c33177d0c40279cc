"""First figures of the causal Wan network: one forward, teacher and diffusion forcing with backward, prefill, streams.

    python bench/causal_wan.py                              the 1.3B geometry on a GPU, 81 frames of 480x832
    python bench/causal_wan.py --size nano --frames 6 --height 8 --width 8 --repeats 1     a smoke run on a CPU

Weights are random, the batch is 1, the text 512 tokens. Prints for each piece of work the median time, the peak memory
and the share of the matmul ceiling that is reached (useful FLOPs, nothing recomputed), and writes the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fewstep.engines.roles import Role
from fewstep.models.attention import Mask, Part, dense
from fewstep.models.blocks import CausalSection
from fewstep.models.families import build
from fewstep.models.wan.conditioner import EmbeddingCond, EmbeddingSection
from fewstep.models.wan.parallelize import compile_blocks
from fewstep.models.wan.sizes import Architecture, WanSection

TEXT_TOKENS = 512


def main() -> None:
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    bench = Bench(options, device)
    rows = [bench.measure(name, *WORK[name](bench)) for name in options.only or WORK]
    report = {
        "rows": rows,
        "environment": environment(device),
        "options": {k: str(v) for k, v in vars(options).items()},
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1))
    print(markdown(report))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1.3B", choices=["nano", "small", "1.3B", "14B"])
    parser.add_argument("--frames", type=int, default=21, help="latent frames")
    parser.add_argument("--height", type=int, default=60, help="latent rows")
    parser.add_argument("--width", type=int, default=104, help="latent columns")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls, after two of warm-up")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--ceiling", type=float, default=767, help="TFLOP/s of a large matmul on this GPU")
    parser.add_argument("--only", nargs="+", choices=list(WORK))
    parser.add_argument("--out", type=Path, default=Path("runs/bench-causal-wan.json"))
    return parser.parse_args()


class Bench:
    """Networks of one geometry, inputs for them, and the clock."""

    def __init__(self, options: argparse.Namespace, device: torch.device):
        self.options, self.device = options, device
        self.architecture: Architecture = self.section().architecture
        generator = torch.Generator(device).manual_seed(0)
        shape = (1, options.frames, self.architecture.channels, options.height, options.width)
        self.x_t = torch.randn(shape, generator=generator, device=device)
        text = torch.randn(1, TEXT_TOKENS, self.architecture.text_dim, generator=generator, device=device)
        self.cond = EmbeddingCond(text)
        self.frame_tokens = options.height * options.width // (self.architecture.patch[1] * self.architecture.patch[2])
        self._networks: dict[Any, Role] = {}

    def section(self, **causal: Any) -> WanSection:
        form = CausalSection(**causal) if causal else None
        return WanSection(size=self.options.size, conditioner=EmbeddingSection(), causal=form)

    def role(self, trained: bool = False, **causal: Any) -> Role:
        """A network with random weights, alone on the device; float32 masters under autocast if it is trained."""
        key = (trained, tuple(causal.items()))
        if key not in self._networks:
            self._networks.clear()
            network = build(self.section(**causal), self.device)
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter.normal_(std=0.02)
            precision = torch.bfloat16 if self.device.type == "cuda" else torch.float32
            if trained:
                network.recompute = True
            else:
                network.requires_grad_(False).to(precision)
            if self.device.type == "cuda" and not self.options.no_compile:
                compile_blocks(network)
            self._networks[key] = Role("student", network, precision)
        return self._networks[key]

    def sigma(self, frames: int) -> Tensor:
        return torch.full((1, frames), 0.5, device=self.device)

    def measure(self, name: str, call: Callable[[], Any], flops: float) -> dict[str, Any]:
        """Median of the timed calls; the first call apart, since it compiles."""
        first = self._timed(call)
        self._timed(call)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times = [self._timed(call) for _ in range(self.options.repeats)]
        peak = torch.cuda.max_memory_allocated() / 2**30 if self.device.type == "cuda" else None
        row = {
            "work": name,
            "median_ms": 1000 * median(times),
            "first_call_s": first,
            "peak_gib": peak,
            "tflops": flops / 1e12,
            "mfu": flops / median(times) / (self.options.ceiling * 1e12),
        }
        print(json.dumps(row), flush=True)
        return row

    def _timed(self, call: Callable[[], Any]) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        call()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    def flops(self, query_frames: int, pairs: float) -> float:
        """Of one forward: linear layers of the queries, and attention over ``pairs`` of tokens."""
        shape, tokens = self.architecture, query_frames * self.frame_tokens
        linear = 2 * tokens * (4 * shape.dim**2 + 2 * shape.dim * shape.ffn_dim + 2 * shape.dim**2)
        cross = 4 * tokens * TEXT_TOKENS * shape.dim + 4 * TEXT_TOKENS * shape.dim**2
        return shape.layers * (linear + cross + 4 * pairs * shape.dim)

    def pairs(self, *parts: Part, block_frames: int, num_query_parts: int = 1) -> float:
        sizes = (block_frames,) * (self.options.frames // block_frames)
        return float(dense(Mask(sizes, 1, parts, num_query_parts)).sum()) * self.frame_tokens**2


Work = tuple[Callable[[], Any], float]


def forward(bench: Bench) -> Work:
    role, frames = bench.role(), bench.options.frames

    @torch.no_grad()
    def call() -> Tensor:
        return role.velocity(bench.x_t, bench.sigma(frames), bench.cond)

    return call, bench.flops(frames, float((frames * bench.frame_tokens) ** 2))


def teacher_forcing(bench: Bench) -> Work:
    role, frames = bench.role(trained=True, block_frames=3), bench.options.frames
    blocks = frames // 3

    def call() -> None:
        velocity = role.velocity(bench.x_t, bench.sigma(frames), bench.cond, clean=bench.x_t)
        velocity.square().mean().backward()

    parts = (Part("causal", 0, blocks), Part("probe", 0, blocks))
    return call, 3 * bench.flops(2 * frames, bench.pairs(*parts, block_frames=3, num_query_parts=2))


def diffusion_forcing(bench: Bench) -> Work:
    role, frames = bench.role(trained=True, block_frames=3), bench.options.frames

    def call() -> None:
        role.velocity(bench.x_t, bench.sigma(frames), bench.cond).square().mean().backward()

    return call, 3 * bench.flops(frames, bench.pairs(Part("causal", 0, frames // 3), block_frames=3))


def parallel_blocks(bench: Bench) -> Work:
    """The student's update of self-forcing: a prefill without gradient, then all blocks at once with gradient."""
    role, frames = bench.role(trained=True, block_frames=3), bench.options.frames
    blocks = frames // 3

    def call() -> None:
        with torch.no_grad():
            history = role.prefill(bench.x_t, bench.cond)
        role.velocity_given(bench.x_t, bench.sigma(frames), bench.cond, history, 0).square().mean().backward()

    prefill = bench.flops(frames, bench.pairs(Part("causal", 0, blocks), block_frames=3))
    parts = (Part("causal", 0, blocks - 1), Part("probe", 0, blocks))
    return call, prefill + 3 * bench.flops(frames, bench.pairs(*parts, block_frames=3))


def prefill(bench: Bench) -> Work:
    role, frames = bench.role(block_frames=3), bench.options.frames

    @torch.no_grad()
    def call() -> Any:
        return role.prefill(bench.x_t, bench.cond)

    return call, bench.flops(frames, bench.pairs(Part("causal", 0, frames // 3), block_frames=3))


def stream(block_frames: int, steps: int) -> Callable[[Bench], Work]:
    """The whole clip, block by block: ``steps`` calls a block and one to write the history, none after the last."""

    def work(bench: Bench) -> Work:
        role, frames = bench.role(block_frames=block_frames), bench.options.frames
        blocks = frames // block_frames

        @torch.no_grad()
        def call() -> None:
            history, told, sigma = None, role.tell(bench.cond), bench.sigma(block_frames)
            for block in range(blocks):
                x_t = bench.x_t[:, block * block_frames : (block + 1) * block_frames]
                for _ in range(steps):
                    velocity = role.velocity_given(x_t, sigma, told, history, block)
                    x_t = x_t - 0.1 * velocity
                if block + 1 < blocks:
                    history = role.append(history, x_t, told)

        pairs = bench.pairs(Part("causal", 0, blocks), block_frames=block_frames)
        return call, (steps + 1) * bench.flops(frames, pairs)

    return work


WORK: dict[str, Callable[[Bench], Work]] = {
    "forward": forward,
    "prefill": prefill,
    "stream-chunk-4": stream(3, 4),
    "stream-frame-4": stream(1, 4),
    "stream-frame-1": stream(1, 1),
    "diffusion-forcing": diffusion_forcing,
    "teacher-forcing": teacher_forcing,
    "parallel-blocks": parallel_blocks,
}


def environment(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    return {"device": name, "torch": torch.__version__, "python": platform.python_version()}


def markdown(report: dict[str, Any]) -> str:
    where = ", ".join(f"{key} {value}" for key, value in report["environment"].items())
    lines = [f"{where}", "", "| work | median | peak memory | of the ceiling | first call |", "|---|---|---|---|---|"]
    for row in report["rows"]:
        peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f} GiB"
        cells = [row["work"], f"{row['median_ms']:.0f} ms", peak, f"{row['mfu']:.2f}", f"{row['first_call_s']:.0f} s"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

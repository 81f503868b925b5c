"""Memory profiling: runs the largest steps on a few KV pages, before KV gets what remains.

Before that, kernels are compiled while the weights are read, so their outputs mean nothing yet.
Steps run through two layers: further layers reuse the activations' memory of the first ones.  Those
by which kernels are chosen run through some more.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from math import isqrt

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from model_zoo.layers.delta_net.hopper.choose import run_delta_net_candidates
from model_zoo.layers.gemm.autotune import leaving_scales, run_candidates
from model_zoo.layers.gemm.in_step import CloseCandidates, choose_in_step
from model_zoo.layers.moe.autotune import run_expert_candidates
from model_zoo.model import Model
from model_zoo.vision.embed import ReadsImages
from model_zoo.vision.encoder import Encoding
from runtime.config import IMAGE_CACHE_BYTES, ConfigError
from runtime.cuda_graph.buckets import MAX_MIXED
from runtime.memory_plan import MemoryPlan, size
from runtime.precompile.compiling import check_cache, compiling_only
from runtime.precompile.pool import Compilers
from runtime.startup.device import choose_state_dtype, free_bytes, is_out_of_memory
from runtime.startup.engine_spec import EngineSpec
from runtime.startup.warm_up import (
    SAMPLED_PARAMS,
    WARM_UP_STATES,
    all_batch_kinds,
    decode_rows,
    largest,
    prompt_of_some_hundred,
    run,
)

KV_PARTS = 64  # of which the graphs of large steps may take one
# Tokens before those of the steps by which kernels are chosen.  Rows have the same few pages, which
# attention finds in the L2 cache.
CONTEXT = 1024
LAYERS = 8  # of such a step: of all but small models far more than the L2 cache holds
PAGES = 16  # whose contents do not matter; most steps store all tokens in the first one


class MemoryProfiler:
    """An executor of the full size on a few KV pages.  GPUs only."""

    def __init__(self, plan: MemoryPlan, engine_spec: EngineSpec, model: Model) -> None:
        """plan: with the weights alone.  Raises ConfigError if nothing fits besides them."""
        self._plan, self._device, self._model = plan, engine_spec.device, model
        self._spec, self._ranks = engine_spec, engine_spec.ranks
        self._state_dtype = choose_state_dtype(engine_spec.requested.state_dtype)
        self._vocab_size = engine_spec.config.vocab_size
        # Resolved with more KV than there will be, so that no sequence can be longer.
        self._resolved = engine_spec.resolve_config(plan)
        self._kv = engine_spec.kv_pool(PAGES, self._resolved, WARM_UP_STATES)
        before = torch.cuda.memory_allocated(self._device)
        self.backend = engine_spec.backend(self._resolved)
        self.executor = engine_spec.executor(model, self._resolved, self._kv, self.backend)
        self._state = torch.cuda.memory_allocated(self._device) - before

    def compile(self, compilers: Compilers | None) -> None:
        """Compile every kernel, before the weights are loaded.  Without Triton there are none."""
        if find_spec("triton") is None:
            return
        check_cache()
        with compiling_only(compilers) as optional, self._model.shortened():
            with optional():
                run_delta_net_candidates(self._model, self._state_dtype)
            run_expert_candidates(self._model)
            run_candidates(self._model)  # many kernels: they compile while the steps run
            for batch in all_batch_kinds(self._resolved):
                run(self.executor, batch)
            with leaving_scales(self._model) as some:
                if some:
                    run(self.executor, prompt_of_some_hundred(self._resolved))

    def choose_in_steps(self, close: Sequence[CloseCandidates]) -> None:
        """Of kernels of nearly the same time, use those with which steps are shortest.

        A rank of a divided model keeps what it has timed by itself: the others would have to run
        the same steps, and to choose the same.
        """
        if self._ranks.size > 1:
            return
        before = min(CONTEXT, self._resolved.max_model_len - 1)

        def step_times(rows: int, choices: Sequence[Callable[[], None]]) -> Sequence[float]:
            if rows > self._resolved.max_num_seqs:
                return []
            batch = decode_rows(self._resolved, rows, SAMPLED_PARAMS, before=before, pages=PAGES)
            # Of one token for all rows, all would choose the same experts.
            batch = replace(batch, tokens=np.arange(rows) % self._vocab_size)
            return self.executor.step_times(batch, choices)

        with self._model.first_layers(LAYERS):
            here = set(self._model.modules())
            several = [of_shape for of_shape in close if len(here & {*of_shape.layers}) > 1]
            if several:
                torch.cuda.empty_cache()  # a capture cannot take what the allocator has cached
            choose_in_step(several, step_times, self._device)

    def measure(self) -> MemoryPlan:
        """The plan with measured state, activations and graphs.  Raises ConfigError."""
        plan, kv, states = self._plan, self._kv.num_bytes, self._kv.states
        kv += 0 if states is None else states.num_bytes
        _release_cached_memory()
        try:
            images = self._encode_largest()  # they are there while the step runs
            self._run_largest(self._resolved.max_batched_tokens)
            del images
            activations = plan.free - free_bytes(self._device) - plan.weights - self._state - kv
            graphs = self.executor.measure_graphs()
            plan = replace(plan, state=self._state, activations=activations, graphs=graphs)
            graphs = self._extended_graphs(plan)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise self._too_large() from None
        _release_cached_memory()
        state = self._state + (IMAGE_CACHE_BYTES if self._resolved.image_token_side else 0)
        return replace(plan, state=state, activations=activations, graphs=graphs)

    def _extended_graphs(self, plan: MemoryPlan) -> int:
        """The bytes of all graphs, of which there is one for each size of a step that the host
        would launch more slowly than the device computes it, unless they took much of KV.

        plan: with the bytes of those of at most MAX_MIXED tokens
        """
        [tokens] = self._ranks.most(self.executor.launch_bound_tokens)
        tokens = min(tokens, self._resolved.max_batched_tokens)
        larger = plan.graphs * tokens // MAX_MIXED  # as the activations in them
        [fits] = self._ranks.least(int(self._leaves_kv(plan, larger)))
        if fits and self.executor.extend_graphs(tokens):
            return self.executor.measure_graphs()
        return plan.graphs

    def _leaves_kv(self, plan: MemoryPlan, graphs: int) -> bool:
        """Whether graphs of so many bytes leave KV nearly all that it has by the plan."""
        if (graphs - plan.graphs) * KV_PARTS > plan.for_kv:
            return False
        try:
            self._spec.resolve_config(replace(plan, graphs=graphs))
        except ConfigError:  # such as of --kv-tokens
            return False
        return True

    def keep_peak_memory(self) -> None:
        """Run the largest steps again, at the end: PyTorch's allocator caches their memory.

        Afterwards no step needs memory that another program could have allocated.
        """
        images = self._encode_largest()
        self._run_largest(self._resolved.max_batched_tokens)
        del images

    def _encode_largest(self) -> tuple[Tensor, Encoding] | None:
        """The features of the largest image, and another as large before the encoder's last stage:
        the most bytes beside a step, but for those that the executor has from the start.

        None for a model that reads no images.
        """
        side, pixels = self._resolved.image_token_side, self._resolved.max_image_pixels
        if not isinstance(self._model, ReadsImages):
            return None
        tokens = pixels // side**2
        columns = isqrt(tokens)
        shape = tokens // columns * side, columns * side, 3
        image = torch.zeros(shape, dtype=torch.uint8, device=self._device)
        features, encoder = self._model.encode(image), self._model.vision
        begun = encoder.begin(image)
        encoder.advance(begun, encoder.num_stages - 1)
        return features, begun

    def _run_largest(self, tokens: int) -> None:
        with self._model.shortened():
            for batch, masks in largest(self._resolved, tokens, self._vocab_size):
                run(self.executor, batch, masks)

    def _too_large(self) -> ConfigError:
        """An error that suggests sizes with a margin: half of the tokens that were found to fit."""
        resolved, tokens = self._resolved, self._resolved.max_batched_tokens // 2
        # Other ranks, which may have room, would not run these steps.
        alone = self._ranks.size == 1
        while alone and tokens > 2 * resolved.max_num_seqs and not self._fits(tokens):
            tokens //= 2
        return ConfigError(
            f"memory: a step of --max-batched-tokens {resolved.max_batched_tokens} and "
            f"--max-num-seqs {resolved.max_num_seqs} does not fit beside weights of "
            f"{size(self._plan.weights)} in {size(self._plan.free)} that were free: try "
            f"--max-batched-tokens {max(tokens // 2, 64)}, --max-num-seqs "
            f"{min(resolved.max_num_seqs, 32)}, --max-model-len {min(resolved.max_model_len, 4096)}"
        )

    def _fits(self, tokens: int) -> bool:
        _release_cached_memory()
        try:
            self._run_largest(tokens)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return False
        return True


def _release_cached_memory() -> None:
    """Free what is cached and not used."""
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def explain_out_of_memory(engine_spec: EngineSpec, plan: MemoryPlan) -> Iterator[None]:
    """Turn out-of-memory errors of the allocator, a library or the driver into a ConfigError.

    Its message says how much memory there is, what uses it and what to change.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(_too_little(engine_spec, plan)) from None


def _too_little(engine_spec: EngineSpec, plan: MemoryPlan) -> str:
    resolved = engine_spec.resolve_config(plan)
    tokens, rows = resolved.max_batched_tokens, resolved.max_num_seqs
    steps = f" and steps {size(plan.fixed - plan.weights)}" if plan.fixed > plan.weights else ""
    return (
        f"memory: of {size(plan.free)} that were free on this "
        f"device, weights in {engine_spec.dtype} "
        f"take {size(plan.weights)}{steps}; --max-batched-tokens {tokens}, --max-num-seqs {rows} "
        f"and --gpu-memory {plan.share:g} of it need more than there is: end other programs on the "
        f"device, or try --max-batched-tokens {max(min(tokens // 4, 2048), 64)}, --max-num-seqs "
        f"{min(rows, 32)}, --gpu-memory {min(plan.share, 0.8):g}"
    )

"""Trial: the largest steps on a few pages of KV, to know what they take before KV gets the rest.

Kernels are compiled meanwhile, and the weights read: the kernels' results mean nothing yet.  Steps
are run through two layers: those after them find their working memory where the first ones left it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from msgspec.structs import replace

from model_zoo.layers.gemm.autotune import run_candidates
from model_zoo.model import Model
from runtime.config import ConfigError
from runtime.memory_plan import MemoryPlan, size
from runtime.precompile.compiling import check_cache, compiling_only
from runtime.precompile.pool import Compilers
from runtime.startup.device import free_bytes, is_out_of_memory
from runtime.startup.engine_spec import EngineSpec
from runtime.startup.warm_up import all_batch_kinds, largest, run

PAGES = 16  # all tokens are kept in the first one, which holds anything then


class MemoryProfiler:
    """A runner of the full size on a few pages.  GPUs only."""

    def __init__(self, plan: MemoryPlan, engine_spec: EngineSpec, model: Model) -> None:
        """Raises ConfigError if the plan, with the weights alone, is too small."""
        self._plan, self._device, self._model = plan, engine_spec.device, model
        self._vocab_size = engine_spec.config.vocab_size
        # With more KV than there will be, and so for sequences no shorter than they can be.
        self._resolved = engine_spec.resolve_config(plan)
        self._kv = engine_spec.kv_pool(PAGES, self._resolved)
        before = torch.cuda.memory_allocated(self._device)
        self.backend = engine_spec.backend(self._resolved)
        self.runner = engine_spec.runner(model, self._resolved, self._kv, self.backend)
        self._state = torch.cuda.memory_allocated(self._device) - before

    def compile(self, compilers: Compilers | None) -> None:
        """Every kernel, before the weights are there.  Without Triton there are none."""
        if find_spec("triton") is None:
            return
        check_cache()
        with compiling_only(compilers), self._model.shortened():
            run_candidates(self._model)  # many kernels at once: they compile while the steps run
            for batch in all_batch_kinds(self._resolved):
                run(self.runner, batch)

    def measure(self) -> MemoryPlan:
        """The plan with what slots, steps and graphs take.  Raises ConfigError for lack of it."""
        plan, kv = self._plan, self._kv.num_bytes
        _release_cached_memory()
        try:
            self._run_largest(self._resolved.max_batched_tokens)
            work = plan.free - free_bytes(self._device) - plan.weights - self._state - kv
            graphs = 0 if self.runner.steps is None else self.runner.steps.graphs.measure()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise self._too_large() from None
        _release_cached_memory()
        return replace(plan, state=self._state, work=work, graphs=graphs)

    def keep_peak_memory(self) -> None:
        """Run the largest steps again, last of all: PyTorch keeps the memory that they take.

        Afterwards no step needs memory that another program could have taken meanwhile.
        """
        self._run_largest(self._resolved.max_batched_tokens)

    def _run_largest(self, tokens: int) -> None:
        with self._model.shortened():
            for batch, masks in largest(self._resolved, tokens, self._vocab_size):
                run(self.runner, batch, masks)

    def _too_large(self) -> ConfigError:
        """With numbers that leave room: half of the tokens that have been seen to fit."""
        resolved, tokens = self._resolved, self._resolved.max_batched_tokens // 2
        while tokens > 2 * resolved.max_num_seqs and not self._fits(tokens):
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
    """What is allocated and not used."""
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def explain_out_of_memory(engine_spec: EngineSpec, plan: MemoryPlan) -> Iterator[None]:
    """Whoever finds no memory inside is told what there is, what it goes to and what to change.

    Raises ConfigError instead of what the allocator, a library or the driver raised.
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

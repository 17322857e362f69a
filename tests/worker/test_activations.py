"""The priced bound on a step's temporaries against the tensors that really live at a time."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from freetoken.config import Config
from freetoken.model import scores, step
from freetoken.wire.messages import Extend, PageRun, RowStart, Sampling, pack_ids
from freetoken.worker import checkpoint
from freetoken.worker.link import Progress
from freetoken.worker.startup import start
from tests.model import tiny
from tests.worker.plans import decode_plan, make_plan, start_plan

NUM_ROWS, STEP_TOKENS, CONTEXT, PAGE = 8, 96, 256, 8
GATHERED_KEYS = 600
SCORES = 4 * 10 * CONTEXT
TEMPORARIES = ("activations", "decode_gather", "sampling", "kv_reach", "scores", "pass")


class PeakOfTensors(TorchDispatchMode):
    """Bytes of the storages made inside that are alive at the same time, at their peak."""

    def __init__(self):
        super().__init__()
        self.peak_bytes = self._live_bytes = 0
        self._seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if is_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if is_tensor(tensor):
                self._count(tensor.untyped_storage(), given)
        return result

    def _count(self, storage, given):
        key = storage._cdata
        if key in given or key in self._seen:
            return
        num_bytes = storage.nbytes()
        self._seen[key] = weakref.finalize(storage, self._release, key, num_bytes)
        self._live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)

    def _release(self, key, num_bytes):
        self._seen.pop(key, None)
        self._live_bytes -= num_bytes


def is_tensor(value):
    return isinstance(value, torch.Tensor)


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral-window", "gpt_oss", "llama"])
def started(request, tmp_path_factory):
    path = tiny.save(
        tiny.make_model(tiny.make_config(request.param)), tmp_path_factory.mktemp("checkpoint")
    )
    config = Config(
        model=str(path),
        page_size=PAGE,
        max_rows=NUM_ROWS,
        max_step_tokens=STEP_TOKENS,
        num_tokens=NUM_ROWS * CONTEXT,
    )
    with pytest.MonkeyPatch.context() as patch:
        # The real limits are beyond what such a small model can reach.
        patch.setattr(step, "MAX_GATHERED_KEYS", GATHERED_KEYS)
        patch.setattr(checkpoint, "MAX_GATHERED_KEYS", GATHERED_KEYS)
        patch.setattr(scores, "MAX_SCORES", SCORES)
        patch.setattr(checkpoint, "MAX_SCORES", SCORES)
        source = checkpoint.CheckpointSource(path, "float32", torch.device("cpu"))
        yield start(config, source, Progress(), 1 << 30)


def test_no_step_holds_more_than_is_priced(started):
    runner, pages = started.runner, CONTEXT // PAGE
    sampling = Sampling(seed=1, top_p=0.999, presence_penalty=0.1, logprobs=5, min_p=1e-6)
    plans = [start_plan(0, [3] * STEP_TOKENS, 0, num_pages=pages, is_last=False)]
    plans.append(make_plan(extends=(Extend(0, STEP_TOKENS, pack_ids([4] * STEP_TOKENS), True),)))
    for row in range(1, NUM_ROWS):
        shared = [*range(20), *range(pages * row, pages * (row + 1) - 20)]
        plans.append(
            make_plan(
                starts=(RowStart(row, sampling, 0, pack_ids([1, 2]), b""),),
                page_runs=(PageRun(row, 0, pack_ids(shared)),),
                extends=(Extend(row, 159, pack_ids([5]), True),),
            )
        )
    plans += [decode_plan(dict.fromkeys(range(1, NUM_ROWS), 160 + i)) for i in range(3)]
    priced = sum(started.ready.plan.get(name, 0) for name in TEMPORARIES)
    for plan in plans:
        with PeakOfTensors() as peak:
            runner.execute(plan)
        assert 0 < peak.peak_bytes <= priced

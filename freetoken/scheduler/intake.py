"""From a Submit to a request that is certain to fit, or a refusal. Called by the scheduler."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from freetoken import log
from freetoken.errors import ErrorCode, RequestError
from freetoken.scheduler.admission import WaitQueue, place_of
from freetoken.scheduler.fit import Never, explain, fit, num_pages_for
from freetoken.scheduler.ledger import Ledger
from freetoken.scheduler.node import TOKEN_BYTES
from freetoken.scheduler.request import Request
from freetoken.scheduler.validate import check_submit
from freetoken.wire.messages import Sampling, Submit, WorkerReady, pack_ids

_log = log.get(__name__)

PROBE_TOKEN = 0


class Intake:
    """Numbers requests in the order they come. `make_seed` serves those without a seed."""

    def __init__(self, make_seed: Callable[[], int]) -> None:
        self._make_seed = make_seed
        self._sequence = 0

    def take(
        self,
        api: bytes,
        submit: Submit,
        worker: WorkerReady,
        ledger: Ledger,
        queue: WaitQueue,
        now_s: float,
    ) -> Request:
        """The request, its output clamped to the context; RequestError if it cannot be served."""
        check_submit(submit, worker.vocab_size)
        num_tokens = len(submit.prompt_ids) // TOKEN_BYTES
        _check_fit(submit.request_id, num_tokens, ledger, worker)
        queue.check_room(num_tokens, now_s)
        room = ledger.context_tokens - num_tokens
        sampling = submit.sampling
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=self._make_seed())
        return Request(
            submit.request_id,
            api,
            submit.prompt_ids,
            room if submit.max_tokens is None else min(submit.max_tokens, room),
            sampling,
            submit.cache_salt,
            self._order(place_of(now_s, submit.priority)),
            now_s,
        )

    def make_probe(self, now_s: float) -> Request:
        """The engine's own generation of one token; goes before everything."""
        order = self._order(float("-inf"))
        sampling = Sampling(temperature=0.0, seed=0)
        name = f"probe-{order[1]}"
        return Request(name, None, pack_ids([PROBE_TOKEN]), 1, sampling, None, order, now_s)

    def _order(self, place_s: float) -> tuple[float, int]:
        self._sequence += 1
        return place_s, self._sequence


def _check_fit(request_id: str, num_tokens: int, ledger: Ledger, worker: WorkerReady) -> None:
    capacity = ledger.capacity().all_free()
    verdict = fit(ledger.need(num_tokens), capacity)
    if not isinstance(verdict, Never):
        return
    _log.warning(
        log.event(
            "request.refused",
            id=request_id,
            tokens=num_tokens,
            context=capacity.context_tokens,
            pages=num_pages_for(num_tokens, capacity.page_size),
            context_pages=capacity.context_tokens // capacity.page_size,
            resource=verdict.resource,
            needed=verdict.needed,
            available=verdict.available,
        )
    )
    message = explain(verdict, num_tokens, capacity, worker.window, worker.context_flag)
    raise RequestError(ErrorCode.CONTEXT_LENGTH_EXCEEDED, message)

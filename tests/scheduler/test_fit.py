from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from freetoken.scheduler.fit import (
    Capacity,
    Later,
    Need,
    Never,
    Now,
    Resource,
    explain,
    fit,
    num_pages_for,
)


def capacity(
    context: int = 64, size: int = 16, pages: int = 4, rows: int = 2, **free: int
) -> Capacity:
    return Capacity(
        context, size, pages, rows, free.get("free_pages", pages), free.get("free_rows", rows)
    )


def need(tokens: int, size: int = 16, shared: int = 0) -> Need:
    pages = num_pages_for(tokens, size)
    return Need(tokens, pages, pages - shared)


@pytest.mark.parametrize("size", [1, 16, 64])
def test_a_prompt_fits_up_to_one_token_less_than_the_context(size: int) -> None:
    there = capacity(context=128, size=size, pages=128 // size)
    assert fit(need(126, size), there) == Now()
    assert fit(need(127, size), there) == Now()
    assert fit(need(128, size), there) == Never(Resource.CONTEXT, 128, 128)
    assert fit(need(129, size), there) == Never(Resource.CONTEXT, 129, 128)


def test_what_is_taken_now_is_free_later() -> None:
    assert fit(need(33), capacity(free_pages=2)) == Later(Resource.PAGES)
    assert fit(need(33, shared=1), capacity(free_pages=2)) == Now()
    assert fit(need(1), capacity(free_rows=0)) == Later(Resource.ROWS)


def test_more_than_there_is_at_all_never_fits() -> None:
    assert fit(need(65), capacity(context=1000)) == Never(Resource.PAGES, 5, 4)
    assert fit(need(1), capacity(rows=0)) == Never(Resource.ROWS, 1, 0)


@given(
    tokens=st.integers(1, 300),
    size=st.sampled_from([1, 3, 16]),
    pages=st.integers(1, 100),
    free_pages=st.integers(0, 100),
    free_rows=st.integers(0, 3),
)
def test_never_depends_on_nothing_that_is_free_now(
    tokens: int, size: int, pages: int, free_pages: int, free_rows: int
) -> None:
    """So submit and planning cannot disagree."""
    there = capacity(pages * size, size, pages, 3, free_pages=free_pages, free_rows=free_rows)
    now, ever = fit(need(tokens, size), there), fit(need(tokens, size), there.all_free())
    assert isinstance(now, Never) == isinstance(ever, Never) == (tokens > pages * size - 1)
    assert isinstance(ever, Now | Never)


def test_the_refusal_names_needs_pages_pool_and_remedy() -> None:
    there = capacity(context=8208, pages=513)
    verdict = fit(need(8760), there)
    assert isinstance(verdict, Never)
    assert explain(verdict, 8760, there, 32768, "--context-tokens") == (
        "prompt needs 8760 tokens (548 pages of 16), the pool holds 8208 (513); "
        "raise --context-tokens or shorten the prompt"
    )


def test_the_refusal_at_the_wall_says_what_the_last_token_is_for() -> None:
    there = capacity(context=64)
    verdict = fit(need(64), there)
    assert isinstance(verdict, Never)
    assert explain(verdict, 64, there, 128, "--num-pages") == (
        "prompt needs 64 tokens (4 pages of 16) and at least one token of output, the pool holds "
        "64 (4); raise --num-pages or shorten the prompt"
    )


def test_no_flag_is_named_where_the_model_itself_is_the_limit() -> None:
    there = capacity(context=64, pages=100)
    verdict = fit(need(70), there)
    assert isinstance(verdict, Never)
    said = "prompt needs 70 tokens, the model's window holds 64; "
    assert explain(verdict, 70, there, 64, "") == said + "shorten the prompt"
    raised = "raise --max-seq-len-override or shorten the prompt"
    assert explain(verdict, 70, there, 64, "--max-seq-len-override") == said + raised


def test_a_prompt_beyond_the_window_is_not_sent_to_raise_the_pool() -> None:
    there = capacity(context=64)
    verdict = fit(need(200), there)
    assert isinstance(verdict, Never)
    assert explain(verdict, 200, there, 100, "--num-tokens") == (
        "prompt needs 200 tokens (13 pages of 16), the pool holds 64 (4), the model's window 100; "
        "shorten the prompt"
    )
